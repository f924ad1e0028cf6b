//! What an answer saw between its tokens: the mean of the longest tenth of its intervals, which is what the
//! objective is on. Of any number of intervals, in bounded memory: they are counted by length, and of two that
//! are counted together neither is longer than the other by more than an eighth.

use std::collections::BTreeMap;

/// Of a doubling of length.
const STEPS_LOG2: u32 = 3;

/// See the module.
#[derive(Debug, Clone, Default)]
pub struct LongestTenth {
    /// How many there were of each length, and how long all of those.
    counted: BTreeMap<u32, (u64, u64)>,
    intervals: u64,
}

impl LongestTenth {
    /// So many intervals of one length.
    pub fn came(&mut self, interval_us: u64, times: u32) {
        if times > 0 {
            let (count, sum_us) = self.counted.entry(length_of(interval_us)).or_default();
            *count += u64::from(times);
            *sum_us = sum_us.saturating_add(interval_us.saturating_mul(u64::from(times)));
            self.intervals += u64::from(times);
        }
    }

    /// The mean of the longest tenth; of fewer than ten, the longest. Nothing while there is none. Too
    /// short by less than an eighth.
    pub fn mean_us(&self) -> Option<u64> {
        let longest = self.intervals.div_ceil(10);
        let (mut left, mut sum_us) = (longest, 0.0);
        for &(count, of_all_us) in self.counted.values().rev() {
            let taken = count.min(left);
            sum_us += of_all_us as f64 * (taken as f64 / count as f64);
            left -= taken;
            if left == 0 {
                break;
            }
        }
        (longest > 0).then(|| (sum_us / longest as f64).round() as u64)
    }
}

/// The same number for lengths that are counted together.
fn length_of(us: u64) -> u32 {
    let doublings = us.max(1).ilog2();
    let below = doublings.saturating_sub(STEPS_LOG2);
    (below << STEPS_LOG2) + (us >> below) as u32
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn few_are_known_by_the_longest() {
        let mut tenth = LongestTenth::default();
        assert_eq!(tenth.mean_us(), None);
        tenth.came(7, 0);
        assert_eq!(tenth.mean_us(), None);
        tenth.came(1_000, 8);
        assert_eq!(tenth.mean_us(), Some(1_000));
        tenth.came(50_000, 1);
        assert_eq!(tenth.mean_us(), Some(50_000), "of nine");
        tenth.came(1_000, 1);
        assert_eq!(tenth.mean_us(), Some(50_000), "of ten");
        tenth.came(1_000, 10);
        assert_eq!(tenth.mean_us(), Some(25_500), "of twenty, two");
        tenth.came(u64::MAX, u32::MAX);
        assert!(tenth.mean_us().is_some());
    }

    #[test]
    fn longer_ones_are_never_counted_among_shorter_ones() {
        let lengths = (0..100_000).chain((17..64).map(|at| 1 << at)).chain([u64::MAX]);
        let counted: Vec<u32> = lengths.map(length_of).collect();
        assert!(counted.is_sorted());
        assert!(counted.last().is_some_and(|most| *most < 512), "{counted:?}");
    }

    proptest! {
        #[test]
        fn it_is_the_mean_of_the_longest_tenth_but_for_an_eighth(
            intervals in prop::collection::vec((1u64..10_000_000, 1u32..4), 1..300)
        ) {
            let mut tenth = LongestTenth::default();
            intervals.iter().for_each(|&(us, times)| tenth.came(us, times));
            let mut all: Vec<u64> =
                intervals.iter().flat_map(|&(us, times)| vec![us; times as usize]).collect();
            all.sort_unstable();
            let longest = &all[all.len() - all.len().div_ceil(10)..];
            let want = longest.iter().sum::<u64>() as f64 / longest.len() as f64;
            let got = tenth.mean_us().expect("there are some") as f64;
            prop_assert!(got <= want + 1.0, "{got} of {want}");
            prop_assert!(got >= want * 7.0 / 8.0 - 1.0, "{got} of {want}");
        }
    }
}
