//! Ways that have failed: they are avoided for a while, longer each time, and then tried again (Mooncake,
//! FAST '25, section 3.2.3). Avoided is not forbidden: where there is no other way, it is tried all the same.

use std::collections::BTreeMap;

/// How long a way is avoided after its first failure; doubled after each that follows soon.
pub const AVOIDED_US_MIN: u64 = 1_000_000;
pub const AVOIDED_US_MAX: u64 = 64_000_000;
/// Ways that are remembered. Beyond it the one whose time ends first is forgotten.
const WAYS_MAX: usize = 8192;

/// `K` names a way, such as a peer and a domain.
#[derive(Debug)]
pub struct Avoided<K> {
    failed: BTreeMap<K, Failed>,
}

#[derive(Debug, Clone, Copy)]
struct Failed {
    for_us: u64,
    until_us: u64,
}

impl<K: Ord + Copy> Default for Avoided<K> {
    fn default() -> Self {
        Avoided { failed: BTreeMap::new() }
    }
}

impl<K: Ord + Copy> Avoided<K> {
    /// The way has failed.
    pub fn failed(&mut self, way: K, now_us: u64) {
        let former = self.failed.get(&way).copied();
        // One that has worked for as long as it was avoided begins anew.
        let soon = former.filter(|former| now_us < former.until_us.saturating_add(former.for_us));
        let for_us = soon.map_or(AVOIDED_US_MIN, |soon| (2 * soon.for_us).min(AVOIDED_US_MAX));
        if former.is_none() && self.failed.len() >= WAYS_MAX {
            let first = self.failed.iter().min_by_key(|(_, failed)| failed.until_us);
            if let Some(first) = first.map(|(way, _)| *way) {
                self.failed.remove(&first);
            }
        }
        self.failed.insert(way, Failed { for_us, until_us: now_us.saturating_add(for_us) });
    }

    pub fn is_avoided(&self, way: K, now_us: u64) -> bool {
        self.failed.get(&way).is_some_and(|failed| now_us < failed.until_us)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_way_is_avoided_for_longer_each_time_it_fails_soon_again() {
        let mut avoided = Avoided::default();
        assert!(!avoided.is_avoided('a', 0));
        let mut now_us = 5;
        for times in 0..10 {
            avoided.failed('a', now_us);
            let for_us = (AVOIDED_US_MIN << times).min(AVOIDED_US_MAX);
            assert!(avoided.is_avoided('a', now_us + for_us - 1));
            assert!(!avoided.is_avoided('a', now_us + for_us), "and tried again");
            assert!(!avoided.is_avoided('b', now_us), "others are not meant");
            // It fails just when it is tried again.
            now_us += for_us;
        }
        now_us += AVOIDED_US_MAX;
        avoided.failed('a', now_us);
        assert!(!avoided.is_avoided('a', now_us + AVOIDED_US_MIN), "it had worked for long");
    }

    #[test]
    fn what_is_remembered_is_bounded() {
        let mut avoided = Avoided::default();
        for way in 0..=WAYS_MAX as u64 {
            avoided.failed(way, way);
        }
        assert_eq!(avoided.failed.len(), WAYS_MAX);
        assert!(!avoided.is_avoided(0, 1) && avoided.is_avoided(1, 1));
    }
}
