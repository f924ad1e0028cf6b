//! So many units a minute, evenly: it is full at first, holds a minute's worth at most, and what was
//! used beyond it is a debt that is paid off first. Exact: no rounding is lost or gained.

use std::time::Duration;

use tokio::time::Instant;

const MINUTE_NS: i128 = 60_000_000_000;

/// See the module.
#[derive(Debug)]
pub(super) struct Bucket {
    /// At least one.
    per_minute: u64,
    /// Units times nanoseconds of a minute.
    level: i128,
    at: Instant,
}

impl Bucket {
    pub(super) fn new(per_minute: u64, now: Instant) -> Bucket {
        Bucket { per_minute, level: i128::from(per_minute) * MINUTE_NS, at: now }
    }

    pub(super) fn per_minute(&self) -> u64 {
        self.per_minute
    }

    /// What is there stays, as far as it fits.
    pub(super) fn resize(&mut self, per_minute: u64, now: Instant) {
        self.refill(now);
        self.per_minute = per_minute;
        self.level = self.level.min(self.full());
    }

    /// How long until so many are there; `None` when they are. More than a minute's worth is there
    /// when the bucket is full.
    pub(super) fn wait(&mut self, units: u64, now: Instant) -> Option<Duration> {
        self.refill(now);
        let missing = (i128::from(units) * MINUTE_NS).min(self.full()) - self.level;
        if missing <= 0 {
            return None;
        }
        let rate = i128::from(self.per_minute);
        let wait_ns = (missing + rate - 1) / rate;
        Some(Duration::from_nanos(u64::try_from(wait_ns).unwrap_or(u64::MAX)))
    }

    /// Uses so many, into debt if need be.
    pub(super) fn spend(&mut self, units: u64, now: Instant) {
        self.refill(now);
        self.level -= i128::from(units) * MINUTE_NS;
    }

    /// So many were not used after all.
    pub(super) fn give_back(&mut self, units: u64, now: Instant) {
        self.refill(now);
        self.level = (self.level + i128::from(units) * MINUTE_NS).min(self.full());
    }

    fn full(&self) -> i128 {
        i128::from(self.per_minute) * MINUTE_NS
    }

    fn refill(&mut self, now: Instant) {
        let since_ns = now.saturating_duration_since(self.at).as_nanos();
        let since_ns = i128::try_from(since_ns).unwrap_or(MINUTE_NS);
        self.at = self.at.max(now);
        self.level = (self.level + since_ns * i128::from(self.per_minute)).min(self.full());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(begun: Instant, ms: u64) -> Instant {
        begun + Duration::from_millis(ms)
    }

    #[test]
    fn a_minutes_worth_goes_at_once_and_the_rest_as_it_comes() {
        let begun = Instant::now();
        let mut bucket = Bucket::new(3, begun);
        for _ in 0..3 {
            assert_eq!(bucket.wait(1, begun), None);
            bucket.spend(1, begun);
        }
        assert_eq!(bucket.wait(1, begun), Some(Duration::from_secs(20)));
        assert_eq!(bucket.wait(1, at(begun, 19_999)), Some(Duration::from_millis(1)));
        assert_eq!(bucket.wait(1, at(begun, 20_000)), None, "exactly then");
        assert_eq!(bucket.wait(3, at(begun, 600_000)), None);
        assert_eq!(bucket.wait(3, at(begun, 0)), None, "a clock that goes back takes nothing");
        bucket.spend(3, at(begun, 600_000));
        assert!(bucket.wait(1, at(begun, 600_000)).is_some(), "no more than a minute's worth");
    }

    #[test]
    fn a_debt_is_paid_off_first() {
        let begun = Instant::now();
        let mut bucket = Bucket::new(60, begun);
        bucket.spend(120, begun);
        assert_eq!(bucket.wait(1, begun), Some(Duration::from_secs(61)));
        bucket.give_back(30, begun);
        assert_eq!(bucket.wait(1, begun), Some(Duration::from_secs(31)));
    }

    #[test]
    fn more_than_a_minutes_worth_needs_a_full_bucket() {
        let begun = Instant::now();
        let mut bucket = Bucket::new(60, begun);
        assert_eq!(bucket.wait(1_000, begun), None);
        bucket.spend(1, begun);
        assert_eq!(bucket.wait(1_000, begun), Some(Duration::from_secs(1)));
    }

    #[test]
    fn a_new_size_keeps_what_is_there() {
        let begun = Instant::now();
        let mut bucket = Bucket::new(60, begun);
        bucket.spend(60, begun);
        bucket.resize(120, begun);
        assert_eq!(bucket.wait(1, begun), Some(Duration::from_millis(500)));
        bucket.give_back(100, begun);
        bucket.resize(10, begun);
        bucket.spend(10, begun);
        assert_eq!(bucket.wait(1, begun), Some(Duration::from_secs(6)));
    }

    #[test]
    fn absurd_numbers_stay_numbers() {
        let begun = Instant::now();
        let mut bucket = Bucket::new(u64::MAX, begun);
        bucket.spend(u64::MAX, begun);
        bucket.spend(u64::MAX, begun);
        assert!(bucket.wait(u64::MAX, begun).is_some());
        assert_eq!(bucket.wait(u64::MAX, begun + Duration::from_secs(120)), None);
    }
}
