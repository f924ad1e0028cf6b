//! Ways that have failed: they are avoided for a while, longer each time, and then tried again (Mooncake,
//! FAST '25, section 3.2.3). Avoided is not forbidden: where there is no other way, it is tried all the same.
//!
//! A way that worked and then failed may have met with an accident, so the first time it is tried again at
//! once. One that goes on so is no better than one that does not come up, and is treated alike.

use std::collections::BTreeMap;

use kvasir_mutation::{Mutation, mutated};

/// How long a way is avoided after its first failure; doubled after each that follows soon.
const AVOIDED_US_MIN: u64 = 1_000_000;
const AVOIDED_US_MAX: u64 = 64_000_000;
/// A way that fails again before it has been left alone or working for so long, or for as long as it was
/// avoided, goes on failing.
const FORGIVEN_US_MIN: u64 = 8_000_000;

/// How much is held against a way.
#[derive(Debug, Clone, Copy)]
pub struct Patience {
    pub avoided_us_min: u64,
    pub avoided_us_max: u64,
    pub forgiven_us_min: u64,
}

impl Patience {
    /// With ways that are of no use.
    pub const USELESS: Patience = Patience {
        avoided_us_min: AVOIDED_US_MIN,
        avoided_us_max: AVOIDED_US_MAX,
        forgiven_us_min: FORGIVEN_US_MIN,
    };
    /// With ways that are of use each time and end soon. There may be reason to end them, and nothing better, so
    /// they are never left for long.
    pub const FLAPPING: Patience =
        Patience { avoided_us_min: 1_000, avoided_us_max: 500_000, forgiven_us_min: 8_000_000 };
}
/// Ways that are remembered. Beyond it the one whose time ends first is forgotten.
const WAYS_MAX: usize = 8192;

/// `K` names a way, such as a peer and a domain.
#[derive(Debug)]
pub struct Avoided<K> {
    patience: Patience,
    failed: BTreeMap<K, Failed>,
}

/// What is held against one way: see [`Avoided::held`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Failed {
    /// 0 for a failure that was let pass.
    for_us: u64,
    until_us: u64,
}

impl<K: Ord + Copy> Avoided<K> {
    pub fn new(patience: Patience) -> Self {
        Avoided { patience, failed: BTreeMap::new() }
    }

    /// The way has failed to come up, or fell silent.
    pub fn failed(&mut self, way: K, now_us: u64) {
        let soon = self.failed_soon_before(way, now_us);
        self.avoid(way, self.next_for_us(soon), now_us);
    }

    /// The way had come up, and has failed since.
    pub fn broke(&mut self, way: K, now_us: u64) {
        let soon = self.failed_soon_before(way, now_us);
        let is_avoided = (soon.is_some() || mutated(Mutation::BrokenPathAvoidedAtOnce))
            && !mutated(Mutation::BrokenPathNotAvoided);
        let for_us = if is_avoided { self.next_for_us(soon) } else { 0 };
        self.avoid(way, for_us, now_us);
    }

    /// Its last failure, unless that was so long ago that it begins anew.
    fn failed_soon_before(&self, way: K, now_us: u64) -> Option<Failed> {
        let former = self.failed.get(&way).copied();
        let long_us = |former: &Failed| former.for_us.max(self.patience.forgiven_us_min);
        former.filter(|former| {
            now_us < former.until_us.saturating_add(long_us(former))
                || mutated(Mutation::FlappingPathNeverForgiven)
        })
    }

    fn avoid(&mut self, way: K, for_us: u64, now_us: u64) {
        if !self.failed.contains_key(&way) && self.failed.len() >= WAYS_MAX {
            let first = self.failed.iter().min_by_key(|(_, failed)| failed.until_us);
            if let Some(first) = first.map(|(way, _)| *way) {
                self.failed.remove(&first);
            }
        }
        let for_us = if mutated(Mutation::FailedPathNotAvoided) { 0 } else { for_us };
        let is_forever = mutated(Mutation::FailedPathNeverRetried);
        let until_us = if is_forever { u64::MAX } else { now_us.saturating_add(for_us) };
        self.failed.insert(way, Failed { for_us, until_us });
    }

    /// What is held against a way now, to be put back when what comes turns out to be no fault of its own.
    pub fn held(&self, way: K) -> Option<Failed> {
        self.failed.get(&way).copied()
    }

    /// Nothing is held against the way but what was when [`Avoided::held`] was asked.
    pub fn put_back(&mut self, way: K, held: Option<Failed>) {
        match held {
            Some(failed) => drop(self.failed.insert(way, failed)),
            None => drop(self.failed.remove(&way)),
        }
    }

    pub fn is_avoided(&self, way: K, now_us: u64) -> bool {
        now_us < self.until_us(way)
    }

    /// When it may be tried again; 0 for one that has not failed.
    pub fn until_us(&self, way: K) -> u64 {
        self.failed.get(&way).map_or(0, |failed| failed.until_us)
    }

    /// When it failed last.
    pub fn failed_us(&self, way: K) -> Option<u64> {
        self.failed.get(&way).map(|failed| failed.until_us - failed.for_us)
    }

    fn next_for_us(&self, former: Option<Failed>) -> u64 {
        let (min, max) = (self.patience.avoided_us_min, self.patience.avoided_us_max);
        former.map_or(min, |former| (2 * former.for_us).clamp(min, max))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_way_is_avoided_for_longer_each_time_it_fails_soon_again() {
        let mut avoided = Avoided::new(Patience::USELESS);
        assert!(!avoided.is_avoided('a', 0));
        let mut now_us = 5;
        for times in 0..10 {
            avoided.failed('a', now_us);
            let for_us = (AVOIDED_US_MIN << times).min(AVOIDED_US_MAX);
            assert!(avoided.is_avoided('a', now_us + for_us - 1));
            assert!(!avoided.is_avoided('a', now_us + for_us), "and tried again");
            assert!(!avoided.is_avoided('b', now_us), "others are not meant");
            assert_eq!((avoided.until_us('a'), avoided.until_us('b')), (now_us + for_us, 0));
            // It fails just when it is tried again.
            now_us += for_us;
        }
        now_us += AVOIDED_US_MAX;
        avoided.failed('a', now_us);
        assert!(!avoided.is_avoided('a', now_us + AVOIDED_US_MIN), "it had worked for long");
    }

    #[test]
    fn a_way_that_comes_up_and_fails_is_avoided_like_one_that_does_not_come_up() {
        let mut avoided = Avoided::new(Patience::USELESS);
        let mut now_us = 5;
        avoided.broke('a', now_us);
        assert!(!avoided.is_avoided('a', now_us), "once may be chance");
        for times in 0..10 {
            // It comes up each time, and works for a moment.
            now_us += 1_000;
            avoided.broke('a', now_us);
            let for_us = (AVOIDED_US_MIN << times).min(AVOIDED_US_MAX);
            assert!(avoided.is_avoided('a', now_us + for_us - 1), "{times}");
            assert!(!avoided.is_avoided('a', now_us + for_us), "and tried again");
            now_us += for_us;
        }
        now_us += AVOIDED_US_MAX;
        avoided.broke('a', now_us);
        assert!(!avoided.is_avoided('a', now_us), "it had worked for long");
        // Both count alike.
        avoided.failed('b', now_us);
        avoided.broke('b', now_us + AVOIDED_US_MIN);
        assert_eq!(avoided.until_us('b'), now_us + 3 * AVOIDED_US_MIN);
        avoided.broke('c', now_us);
        avoided.failed('c', now_us + FORGIVEN_US_MIN - 1);
        avoided.broke('c', now_us + FORGIVEN_US_MIN);
        assert_eq!(avoided.until_us('c'), now_us + FORGIVEN_US_MIN + 2 * AVOIDED_US_MIN);
        avoided.broke('d', now_us);
        avoided.broke('d', now_us + FORGIVEN_US_MIN);
        assert!(!avoided.is_avoided('d', now_us + FORGIVEN_US_MIN));
    }

    #[test]
    fn a_way_that_flaps_is_paused_for_moments_that_grow_and_have_a_bound() {
        let mut flapping = Avoided::new(Patience::FLAPPING);
        let mut now_us = 5;
        let mut pauses_us = Vec::new();
        for _ in 0..12 {
            flapping.broke('a', now_us);
            assert_eq!(flapping.failed_us('a'), Some(now_us));
            pauses_us.push(flapping.until_us('a') - now_us);
            now_us = flapping.until_us('a') + 1_000;
        }
        let grown = (0..).map(|times| 1_000 << times).take_while(|us| *us < 500_000);
        let wanted: Vec<u64> = [0].into_iter().chain(grown).chain([500_000; 2]).collect();
        assert_eq!(pauses_us, wanted);
        // It has worked for a while.
        now_us += 8_000_000;
        flapping.broke('a', now_us);
        assert_eq!(flapping.until_us('a'), now_us);
    }

    #[test]
    fn a_failure_that_was_no_fault_of_the_way_counts_for_nothing() {
        let mut avoided = Avoided::new(Patience::FLAPPING);
        for now_us in (5..).step_by(1_000).take(20) {
            let before = avoided.held('a');
            avoided.broke('a', now_us);
            assert!(!avoided.is_avoided('a', now_us));
            avoided.broke('a', now_us);
            avoided.put_back('a', before);
        }
        assert_eq!(avoided.failed_us('a'), None);
        // Others before it are held against it as before.
        avoided.broke('a', 30_000);
        avoided.broke('a', 31_000);
        let (until_us, before) = (avoided.until_us('a'), avoided.held('a'));
        avoided.broke('a', 33_000);
        assert!(avoided.until_us('a') > until_us);
        avoided.put_back('a', before);
        assert_eq!((avoided.until_us('a'), avoided.failed_us('a')), (until_us, Some(31_000)));
    }

    #[test]
    fn what_is_remembered_is_bounded() {
        let mut avoided = Avoided::new(Patience::USELESS);
        for way in 0..=WAYS_MAX as u64 {
            avoided.failed(way, way);
        }
        assert_eq!(avoided.failed.len(), WAYS_MAX);
        assert!(!avoided.is_avoided(0, 1) && avoided.is_avoided(1, 1));
    }
}
