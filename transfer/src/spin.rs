//! How a thread waits for work that may come at any moment: it polls for a bounded time, giving its core
//! away between looks, and then sleeps.
//!
//! Between looks it yields. On a host with few cores the one that it keeps may be the one that its own
//! work waits for: a caller that polls for the outcome, or the peer's worker. But a thread that computes
//! keeps a core that was yielded to it for milliseconds, whereas it gives way at once to one that wakes
//! up. So where a yield has cost a slice, polling is left off for a while.

use std::time::{Duration, Instant};

/// A yield that took longer was not for somebody who only looked for work.
const CROWDED_FROM: Duration = Duration::from_micros(100);
/// How long a core that somebody else computes on is taken to stay so.
const CROWDED_FOR: Duration = Duration::from_millis(20);

/// Of one thread.
#[derive(Debug)]
pub struct Spin {
    limit: Duration,
    active: Instant,
    crowded_until: Option<Instant>,
}

impl Spin {
    /// Polls for `limit` after it worked last.
    pub fn new(limit: Duration) -> Self {
        Spin { limit, active: Instant::now(), crowded_until: None }
    }

    /// There was something to do.
    pub fn worked(&mut self) {
        self.active = Instant::now();
    }

    /// There was nothing to do. Whether to look again; otherwise it is time to sleep.
    pub fn wait(&mut self) -> bool {
        let now = Instant::now();
        if now.duration_since(self.active) >= self.limit {
            return false;
        }
        if self.crowded_until.is_some_and(|until| now < until) {
            return false;
        }
        self.crowded_until = None;
        std::thread::yield_now();
        let back = Instant::now();
        if back.duration_since(now) >= CROWDED_FROM {
            self.crowded_until = Some(back + CROWDED_FOR);
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_polls_only_for_its_time_after_work() {
        let mut never = Spin::new(Duration::ZERO);
        never.worked();
        assert!(!never.wait());
        let mut spin = Spin::new(Duration::from_millis(5));
        spin.worked();
        let begun = Instant::now();
        while spin.wait() {}
        // Or until it found its core wanted, which the system decides.
        assert!(begun.elapsed() >= Duration::from_millis(5) || spin.crowded_until.is_some());
        assert!(!spin.wait());
    }

    #[test]
    fn it_does_not_poll_where_its_core_is_wanted_until_that_has_passed() {
        let mut spin = Spin::new(Duration::from_secs(60));
        spin.crowded_until = Some(Instant::now() + Duration::from_secs(60));
        spin.worked();
        assert!(!spin.wait(), "even right after work");
        spin.crowded_until = Some(Instant::now());
        assert!(spin.wait());
    }
}
