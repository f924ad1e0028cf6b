//! How fast blocks come from the SSD into memory: over stretches in which there is always one on its way, so that
//! what counts is what the disk gives and not when it was asked.

use std::time::{Duration, Instant};

/// Fewer bytes say more of the first one's latency than of the disk.
const STRETCH_BYTES_MIN: u64 = 1 << 20;

/// What was read in all that tells how fast the SSD is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Reads {
    pub bytes: u64,
    pub time: Duration,
}

#[derive(Debug, Default)]
pub(crate) struct Pace {
    under_way: u64,
    /// Since the last stretch that counted, or since there was nothing to read.
    began: Option<Instant>,
    bytes: u64,
    reads: Reads,
}

impl Pace {
    /// A block is asked for.
    pub(crate) fn asked(&mut self, now: Instant) {
        if self.under_way == 0 {
            (self.began, self.bytes) = (Some(now), 0);
        }
        self.under_way += 1;
    }

    /// It is there. `None` when it does not come: how long that took says nothing of those that do, and what comes
    /// beside it does not count.
    pub(crate) fn came(&mut self, bytes: Option<u64>, now: Instant) {
        self.under_way = self.under_way.saturating_sub(1);
        match bytes {
            Some(bytes) => self.bytes += bytes,
            None => self.began = None,
        }
        if self.under_way == 0 {
            self.count(now);
        }
    }

    /// Nothing that was asked for comes any more.
    pub(crate) fn broke_off(&mut self) {
        (self.under_way, self.began) = (0, None);
    }

    /// Until now.
    pub(crate) fn reads(&mut self, now: Instant) -> Reads {
        if self.under_way > 0 {
            self.count(now);
        }
        self.reads
    }

    fn count(&mut self, now: Instant) {
        if let Some(began) = self.began
            && self.bytes >= STRETCH_BYTES_MIN
        {
            self.reads.bytes += self.bytes;
            self.reads.time += now.saturating_duration_since(began);
            (self.began, self.bytes) = (Some(now), 0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn only_time_in_which_there_was_something_to_read_counts_and_only_where_enough_came() {
        let (mut pace, start) = (Pace::default(), Instant::now());
        let at = |ms: u64| start + Duration::from_millis(ms);
        let of = |bytes, ms| Reads { bytes, time: Duration::from_millis(ms) };
        assert_eq!(pace.reads(at(0)), of(0, 0));
        // Two at once, and then nothing.
        pace.asked(at(100));
        pace.asked(at(101));
        pace.came(Some(MIB), at(102));
        pace.came(Some(MIB), at(104));
        assert_eq!(pace.reads(at(300)), of(2 * MIB, 4));
        // One that is small, whenever it is asked how it goes.
        pace.asked(at(400));
        assert_eq!(pace.reads(at(401)), of(2 * MIB, 4));
        pace.came(Some(4_096), at(410));
        assert_eq!(pace.reads(at(420)), of(2 * MIB, 4));
        // Where it never ends what has come so far counts, once.
        pace.asked(at(500));
        pace.asked(at(500));
        pace.came(Some(3 * MIB), at(510));
        assert_eq!(pace.reads(at(520)), of(5 * MIB, 24));
        assert_eq!(pace.reads(at(521)), of(5 * MIB, 24));
        pace.came(Some(MIB), at(530));
        assert_eq!(pace.reads(at(600)), of(6 * MIB, 34));
    }

    #[test]
    fn what_does_not_come_says_nothing() {
        let (mut pace, start) = (Pace::default(), Instant::now());
        let at = |ms: u64| start + Duration::from_millis(ms);
        (0..3).for_each(|_| pace.asked(at(0)));
        pace.came(Some(MIB), at(1));
        pace.came(None, at(30_000));
        pace.asked(at(30_000));
        pace.came(Some(MIB), at(30_001));
        pace.came(Some(MIB), at(30_001));
        assert_eq!(pace.reads(at(30_002)), Reads::default());
        pace.asked(at(40_000));
        pace.broke_off();
        pace.asked(at(50_000));
        pace.came(Some(MIB), at(50_002));
        let wanted = Reads { bytes: MIB, time: Duration::from_millis(2) };
        assert_eq!(pace.reads(at(60_000)), wanted);
    }
}
