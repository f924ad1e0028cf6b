//! How long GPUs take. The formulas are *Mooncake*'s cost of prefill and a roofline of a decode
//! step; the placement's own models approximate them and learn.

/// `base_us + max(token_us (n - p) + pair_us (n^2 - p^2), reused_us p)` for a prompt of `n` tokens
/// of which the first `p` are reused.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PrefillTime {
    pub base_us: f64,
    pub token_us: f64,
    pub pair_us: f64,
    pub reused_us: f64,
}

impl PrefillTime {
    pub fn us(&self, prompt_tokens: u32, reused_tokens: u32) -> u64 {
        let (n, p) = (f64::from(prompt_tokens), f64::from(reused_tokens));
        let computing = self.token_us * (n - p) + self.pair_us * (n * n - p * p);
        (self.base_us + computing.max(self.reused_us * p)) as u64
    }
}

/// `base_us + max(weights_us, sequence_us running) + context_us tokens`, and what those that join
/// at this step add.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DecodeTime {
    pub base_us: f64,
    pub weights_us: f64,
    pub sequence_us: f64,
    pub context_us: f64,
    pub join_us: f64,
}

impl DecodeTime {
    /// So many times as long.
    pub(crate) fn slower(&self, times: f64) -> DecodeTime {
        DecodeTime {
            base_us: self.base_us * times,
            weights_us: self.weights_us * times,
            sequence_us: self.sequence_us * times,
            context_us: self.context_us * times,
            join_us: self.join_us * times,
        }
    }

    /// `joined_tokens` is the context of those that join.
    pub fn step_us(&self, running: u32, context_tokens: u64, joined_tokens: u64) -> u64 {
        let computing = self.weights_us.max(self.sequence_us * f64::from(running));
        let loading = self.context_us * context_tokens as f64;
        let joining = self.join_us * joined_tokens as f64;
        (self.base_us + computing + loading + joining) as u64
    }
}
