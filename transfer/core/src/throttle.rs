//! Paces what is sent: a rate with a small allowance for bursts.

/// A burst may be this long at the full rate of the wire.
const BURST_US: u64 = 5_000;

#[derive(Debug)]
pub struct Throttle {
    bytes_per_s: u64,
    /// When everything sent so far is paid for.
    paid_at_us: u64,
}

impl Throttle {
    /// 0 for no limit.
    pub fn new(bytes_per_s: u64) -> Self {
        Throttle { bytes_per_s, paid_at_us: 0 }
    }

    /// Whether something may be sent now.
    ///
    /// # Errors
    /// When it may be.
    pub fn check(&self, now_us: u64) -> Result<(), u64> {
        if self.bytes_per_s == 0 || self.paid_at_us <= now_us + BURST_US {
            Ok(())
        } else {
            Err(self.paid_at_us - BURST_US)
        }
    }

    pub fn sent(&mut self, now_us: u64, bytes: u64) {
        if let Some(cost_us) = bytes.saturating_mul(1_000_000).checked_div(self.bytes_per_s) {
            self.paid_at_us = self.paid_at_us.max(now_us).saturating_add(cost_us);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_sent_over_a_long_time_keeps_the_rate() {
        let mut throttle = Throttle::new(1_000_000);
        let mut sent = 0;
        for now_us in 0..1_000_000 {
            if throttle.check(now_us).is_ok() {
                throttle.sent(now_us, 1_000);
                sent += 1_000;
            }
        }
        assert!((1_000_000..=1_010_000).contains(&sent), "sent {sent} in one second");
    }

    #[test]
    fn it_says_when_to_go_on() {
        let mut throttle = Throttle::new(1_000_000);
        throttle.sent(100, 50_000);
        let until = throttle.check(100).expect_err("50 ms of bytes were sent at once");
        assert!(throttle.check(until - 1).is_err());
        assert!(throttle.check(until).is_ok());
    }

    #[test]
    fn no_rate_is_no_limit() {
        let mut throttle = Throttle::new(0);
        throttle.sent(0, u64::MAX);
        assert!(throttle.check(0).is_ok());
    }
}
