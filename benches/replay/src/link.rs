//! One way of one node's network: first come, first served.

/// See the module.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Way {
    pub(crate) free_us: u64,
}

impl Way {
    /// Takes the way for so long, from when it is free. Answers with when it begins and ends.
    pub(crate) fn take(&mut self, now_us: u64, takes_us: u64) -> (u64, u64) {
        let begins_us = self.free_us.max(now_us);
        self.free_us = begins_us + takes_us;
        (begins_us, self.free_us)
    }
}
