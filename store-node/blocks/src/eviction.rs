//! Which idle leaf goes first: the one that was used longest ago, or the one that is least likely to be
//! used again soon.
//!
//! The second learns. Blocks are told apart by two things that say much about their future: whether a
//! prompt that continued cached blocks brought them, and whether they have been used since. For each of
//! these classes it counts at which age, since its last use, a block was used again, and at which it was
//! given up. A block that was evicted is remembered for a while as a *ghost*, so that those that come back
//! too late are counted as well. From that follows what a block of a class and an age is worth:
//!
//! `max over h of P(used within h) / E(time until it is used, or h)`
//!
//! which is the index of Gittins ("Bandit processes and dynamic allocation indices", 1979) for keeping a
//! block, and the hit density of LHD (Beckmann, Chen, Cidon, NSDI 18) at the best horizon. In each class the
//! eldest block is looked at, and the one that is worth least goes.
//!
//! Before anything was learnt every class is taken to be used the less the longer it was not, so that it
//! begins as least recently used. Of large caches only a sample of the keys is watched, so that ghosts cost a
//! bounded amount of memory. Nothing is random and no clock is read.

use std::collections::{HashMap, VecDeque};
use std::hash::BuildHasherDefault;
use std::ops::RangeInclusive;

use kvasir_proto::BlockKey;
use serde::{Deserialize, Serialize};

use crate::index::KeyHasher;

/// Which idle block without successors goes first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Eviction {
    /// What was used longest ago.
    Lru,
    /// What is least likely to be used again for the room and time it takes, by what was seen of others.
    #[default]
    HitDensity,
}

/// Classes of blocks: see [`class`].
pub(crate) const CLASSES: usize = 4;

/// Of a block that was brought by a prompt which continued cached blocks, and that was used since.
pub(crate) fn class(continues: bool, used_again: bool) -> usize {
    2 * usize::from(continues) + usize::from(used_again)
}

/// Ages are told apart in quarters of an octave; the last one is from 16 hours on.
const AGES: usize = 64;
/// Below it ages are one.
const AGE_MS_MIN: u64 = 1_024;
/// What was counted is worth half when a class has so many: loads change.
const COUNTS_MAX: u32 = 1 << 18;
/// What is believed is looked over after as many watched blocks as there are slots were used or given up, and
/// after so many at least and at most.
const NOTES_UNTIL_LEARNT: RangeInclusive<u32> = 64..=2_048;
/// Ghosts for each slot, of the keys that are watched.
const GHOSTS_OF_SLOT: usize = 1;
/// Of more slots than these only a part of the keys is watched.
const WATCHED_SLOTS_MAX: u32 = 1 << 14;
/// How much the belief before anything was seen weighs, in blocks.
const PRIOR_BLOCKS: f64 = 2.0;

/// See the module.
#[derive(Debug)]
pub(crate) struct HitDensity {
    classes: [Lives; CLASSES],
    notes: u32,
    notes_until_learnt: u32,
    /// Of the keys one in so many, a power of two, is watched.
    watched_one_in: u64,
    ghosts: HashMap<BlockKey, Ghost, BuildHasherDefault<KeyHasher>>,
    /// In the order of their evictions; those that came back since are here still.
    ghosts_order: VecDeque<(BlockKey, Ghost)>,
    ghosts_max: usize,
}

/// A block that was evicted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Ghost {
    class: u8,
    last_use_ms: u64,
}

impl HitDensity {
    pub(crate) fn new(slots: u32) -> Self {
        let watched_one_in = slots.div_ceil(WATCHED_SLOTS_MAX).max(1).next_power_of_two();
        let ghosts_max = GHOSTS_OF_SLOT * slots.div_ceil(watched_one_in).max(1) as usize;
        HitDensity {
            classes: std::array::from_fn(|_| Lives::new()),
            notes: 0,
            notes_until_learnt: slots.clamp(*NOTES_UNTIL_LEARNT.start(), *NOTES_UNTIL_LEARNT.end()),
            watched_one_in: u64::from(watched_one_in),
            ghosts: HashMap::default(),
            ghosts_order: VecDeque::new(),
            ghosts_max,
        }
    }

    /// A block was used that was used at `last_use_ms` before.
    pub(crate) fn used(&mut self, key: BlockKey, class: usize, last_use_ms: u64, now_ms: u64) {
        if self.is_watched(key) {
            self.classes[class].used[age(now_ms.saturating_sub(last_use_ms))] += 1;
            self.note(class);
        }
    }

    /// A block was evicted that was used at `last_use_ms`.
    pub(crate) fn evicted(&mut self, key: BlockKey, class: usize, last_use_ms: u64, now_ms: u64) {
        if !self.is_watched(key) {
            return;
        }
        let ghost = Ghost { class: class as u8, last_use_ms };
        self.ghosts.insert(key, ghost);
        self.ghosts_order.push_back((key, ghost));
        while self.ghosts_order.len() > self.ghosts_max {
            let Some((key, ghost)) = self.ghosts_order.pop_front() else { break };
            if self.ghosts.get(&key) == Some(&ghost) {
                self.ghosts.remove(&key);
                let class = usize::from(ghost.class);
                self.classes[class].given_up[age(now_ms.saturating_sub(ghost.last_use_ms))] += 1;
                self.note(class);
            }
        }
    }

    /// A block was brought, perhaps back.
    pub(crate) fn brought(&mut self, key: BlockKey, now_ms: u64) {
        if let Some(ghost) = self.ghosts.remove(&key) {
            self.used(key, usize::from(ghost.class), ghost.last_use_ms, now_ms);
        }
    }

    /// What a block is worth: uses a second, at the best horizon.
    pub(crate) fn density(&self, class: usize, age_ms: u64) -> f64 {
        self.classes[class].density[age(age_ms)]
    }

    fn is_watched(&self, key: BlockKey) -> bool {
        // Keys are hashes; the map goes by their first bytes.
        let [.., b0, b1, b2, b3, b4, b5, b6, b7] = key.0;
        // A power of two; a division takes as long as all else that is done of a block that goes.
        u64::from_le_bytes([b0, b1, b2, b3, b4, b5, b6, b7]) & (self.watched_one_in - 1) == 0
    }

    fn note(&mut self, class: usize) {
        self.classes[class].total += 1;
        if self.classes[class].total >= COUNTS_MAX {
            self.classes[class].halve();
        }
        self.notes += 1;
        if self.notes >= self.notes_until_learnt {
            self.notes = 0;
            self.classes.iter_mut().for_each(Lives::learn);
        }
    }
}

/// How the watched blocks of one class fared, by age.
#[derive(Debug)]
struct Lives {
    used: [u32; AGES],
    given_up: [u32; AGES],
    total: u32,
    /// Of a block that has reached the age, a second.
    density: [f64; AGES],
}

impl Lives {
    fn new() -> Self {
        let mut lives =
            Lives { used: [0; AGES], given_up: [0; AGES], total: 0, density: [0.0; AGES] };
        lives.learn();
        lives
    }

    fn halve(&mut self) {
        self.used.iter_mut().chain(&mut self.given_up).for_each(|count| *count /= 2);
        self.total = self.used.iter().chain(&self.given_up).sum();
    }

    /// For each age the chance to be used before the next one, of those that reached it.
    fn hazards(&self) -> [f64; AGES] {
        let mut reached = f64::from(self.total);
        std::array::from_fn(|age| {
            let (used, given_up) = (f64::from(self.used[age]), f64::from(self.given_up[age]));
            let believed = PRIOR_BLOCKS * 0.5 / (age as f64 + 2.0);
            let hazard = (used + believed) / (reached + PRIOR_BLOCKS);
            reached -= used + given_up;
            hazard.min(0.999)
        })
    }

    fn learn(&mut self) {
        let hazards = self.hazards();
        self.density = std::array::from_fn(|from| {
            let (mut remaining, mut used, mut seconds, mut best) = (1.0, 0.0, 0.0, 0.0_f64);
            for (age, hazard) in hazards.iter().enumerate().skip(from) {
                used += remaining * hazard;
                seconds += remaining * width_s(age) * (1.0 - hazard / 2.0);
                remaining *= 1.0 - hazard;
                best = best.max(used / seconds);
            }
            best
        });
    }
}

/// The quarter of an octave that an age falls into.
fn age(age_ms: u64) -> usize {
    let shifted = age_ms.saturating_add(AGE_MS_MIN);
    let octave = shifted.ilog2() - AGE_MS_MIN.ilog2();
    let quarter = (shifted >> (shifted.ilog2() - 2)) & 3;
    ((4 * octave) as usize + quarter as usize).min(AGES - 1)
}

/// How long a block has an age.
fn width_s(age: usize) -> f64 {
    let octave_ms = AGE_MS_MIN << (age / 4);
    octave_ms as f64 / 4.0 / 1e3
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ages_grow_by_quarters_of_an_octave_and_end() {
        let check = |age_ms: u64, want: usize| assert_eq!(age(age_ms), want, "{age_ms} ms");
        check(0, 0);
        check(255, 0);
        check(256, 1);
        check(1_023, 3);
        check(1_024, 4);
        check(1_535, 4);
        check(1_536, 5);
        check(3_072, 8);
        check(17 * 3_600_000, AGES - 1);
        check(u64::MAX, AGES - 1);
        for age_ms in 0..100_000 {
            assert!(age(age_ms + 1) == age(age_ms) || age(age_ms + 1) == age(age_ms) + 1);
        }
    }

    #[test]
    fn who_has_seen_nothing_prefers_what_was_used_lately() {
        let density = HitDensity::new(1);
        for class in 0..CLASSES {
            for octave in 0..15 {
                let (younger, elder) = (AGE_MS_MIN << octave, AGE_MS_MIN << (octave + 1));
                assert!(density.density(class, younger) >= density.density(class, elder));
                assert_eq!(density.density(class, younger), density.density(0, younger));
            }
        }
    }

    fn key(n: u64) -> BlockKey {
        BlockKey(u128::from(n).to_le_bytes())
    }

    #[test]
    fn what_comes_back_late_is_worth_more_than_what_never_does() {
        let (dead, slow) = (class(false, false), class(true, true));
        let mut density = HitDensity::new(64);
        for n in 0..u64::from(2 * NOTES_UNTIL_LEARNT.end()) {
            density.evicted(key(n), dead, n, n + 20_000);
            density.used(key(0), slow, n, n + 60_000);
        }
        assert!(density.density(dead, 1_000) < density.density(slow, 30_000));
        // It was always back by then.
        assert!(density.density(slow, 500_000) < density.density(slow, 30_000));
    }

    #[test]
    fn a_ghost_that_comes_back_is_a_use_and_one_that_does_not_is_none() {
        let check = |back: bool, used: u32, given_up: u32| {
            let mut density = HitDensity::new(2);
            density.evicted(key(1), 0, 1_000, 2_000);
            if back {
                density.brought(key(1), 9_000);
            }
            density.brought(key(7), 9_000);
            for n in 2..4 {
                density.evicted(key(n), 1, 2_000, 10_000);
            }
            assert_eq!(density.classes[0].used.iter().sum::<u32>(), used);
            assert_eq!(density.classes[0].used[age(8_000)], used);
            assert_eq!(density.classes[0].given_up[age(9_000)], given_up);
            assert_eq!(density.classes[0].total, used + given_up);
            assert!(density.ghosts.len() <= 2 && density.ghosts_order.len() <= 2);
        };
        check(true, 1, 0);
        check(false, 0, 1);
    }

    #[test]
    fn large_caches_watch_a_part_of_the_keys_and_few_ghosts() {
        let check = |slots: u32, one_in: u64| {
            let mut density = HitDensity::new(slots);
            assert_eq!(density.watched_one_in, one_in, "{slots} slots");
            for n in 0..40_000_u64 {
                let key = BlockKey((u128::from(n) << 64).to_le_bytes());
                density.evicted(key, 0, n, n);
            }
            let most = slots.min(WATCHED_SLOTS_MAX) as usize;
            assert!(density.ghosts_order.len() <= most, "{slots} slots");
        };
        check(2_048, 1);
        check(1 << 14, 1);
        check((1 << 14) + 1, 2);
        check(1 << 20, 64);
        check(u32::MAX, 1 << 18);
    }

    #[test]
    fn what_is_seen_outweighs_what_was_seen_long_ago() {
        let seen = class(false, true);
        let slots = 2_048;
        let (mut density, mut fresh) = (HitDensity::new(slots), HitDensity::new(slots));
        for n in 0..u64::from(COUNTS_MAX + slots) {
            density.evicted(key(n), seen, 0, 10_000);
        }
        for _ in 0..COUNTS_MAX {
            density.used(key(0), seen, 0, 10_000);
            fresh.used(key(0), seen, 0, 10_000);
        }
        // A quarter of what is remembered was given up.
        assert!(density.density(seen, 0) > 0.6 * fresh.density(seen, 0));
        assert!(density.classes[seen].total < COUNTS_MAX);
    }
}
