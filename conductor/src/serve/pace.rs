//! The time between the tokens of one answer, as its engine makes them: what a slow client adds
//! is left out. What the cluster learns of its steps begins at the second token: before it an engine
//! may have waited for a place in its batch, which is no step. What an answer saw counts all of them, as its
//! objective does.

use std::time::Duration;

use kvasir_placement::LongestTenth;
use tokio::time::Instant;

use crate::metrics::Metrics;

/// Passing a token on takes microseconds; longer means that the client was waited for.
const WAITED: Duration = Duration::from_millis(1);
/// Tokens that one report to the cluster averages over, unless the answer ends before.
const REPORT_TOKENS: u32 = 16;

/// See the module.
#[derive(Debug)]
pub(super) struct Pace {
    /// When the last tokens came; absent when the time since then says nothing.
    last: Option<Instant>,
    /// How often tokens came, as far as it matters: at most twice.
    came: u8,
    sum: Duration,
    tokens: u32,
    seen: LongestTenth,
}

impl Pace {
    pub(super) fn new() -> Pace {
        Pace { last: None, came: 0, sum: Duration::ZERO, tokens: 0, seen: LongestTenth::default() }
    }

    /// Tokens came. Now and then, the mean time between the latest ones in microseconds.
    pub(super) fn came(&mut self, tokens: usize, metrics: &Metrics) -> Option<u64> {
        self.came_at(Instant::now(), tokens, metrics)
    }

    fn came_at(&mut self, now: Instant, tokens: usize, metrics: &Metrics) -> Option<u64> {
        let steps = self.came == 2;
        self.came = (self.came + 1).min(2);
        let last = self.last.replace(now)?;
        let tokens = u32::try_from(tokens).ok().filter(|tokens| *tokens > 0)?;
        let each = now.saturating_duration_since(last) / tokens;
        metrics.time_between_tokens.observe(each.as_secs_f64());
        self.seen.came(u64::try_from(each.as_micros()).unwrap_or(u64::MAX), tokens);
        if !steps {
            return None;
        }
        self.sum += each * tokens;
        self.tokens += tokens;
        if self.tokens < REPORT_TOKENS { None } else { self.rest() }
    }

    /// The mean over what was not reported yet: short answers teach something, too.
    pub(super) fn rest(&mut self) -> Option<u64> {
        let mean = self.sum.checked_div(self.tokens)?;
        (self.sum, self.tokens) = (Duration::ZERO, 0);
        Some(u64::try_from(mean.as_micros()).unwrap_or(u64::MAX))
    }

    /// What the answer saw of it so far: the mean of the longest tenth.
    pub(super) fn seen_us(&self) -> Option<u64> {
        self.seen.mean_us()
    }

    /// The tokens that came were passed on.
    pub(super) fn passed_on(&mut self) {
        if self.last.is_some_and(|last| last.elapsed() > WAITED) {
            self.last = None;
        }
    }
}

#[cfg(test)]
mod tests {
    use prometheus::Registry;

    use super::*;

    #[test]
    fn a_pace_is_reported_every_sixteen_intervals_and_at_the_end() {
        let metrics = Metrics::new(Registry::new()).expect("registers");
        let mut pace = Pace::new();
        assert_eq!(pace.rest(), None);
        let reports: Vec<usize> = (0..40).filter(|_| pace.came(1, &metrics).is_some()).collect();
        assert_eq!(reports, [17, 33], "the second token begins the first interval");
        assert!(pace.rest().is_some(), "six more");
        assert_eq!(pace.rest(), None, "only once");
    }

    #[test]
    fn a_wait_before_the_second_token_is_no_step() {
        let metrics = Metrics::new(Registry::new()).expect("registers");
        let begun = Instant::now();
        let came = |pace: &mut Pace, at_ms: u64| {
            pace.came_at(begun + Duration::from_millis(at_ms), 1, &metrics)
        };
        let mut pace = Pace::new();
        for at_ms in [0, 25_000, 25_010, 25_040] {
            assert_eq!(came(&mut pace, at_ms), None);
        }
        assert_eq!(pace.rest(), Some(20_000));
        assert_eq!(pace.seen_us(), Some(25_000_000), "it was waited for");
        assert_eq!(metrics.time_between_tokens.get_sample_count(), 3, "the client waited, too");
        let mut short = Pace::new();
        for at_ms in [0, 10] {
            assert_eq!(came(&mut short, at_ms), None);
        }
        assert_eq!(short.rest(), None, "two tokens have no step between them that is known");
    }
}
