//! Which of many endpoints goes when there is room for no more: SIEVE (Zhang et al., NSDI '24). Endpoints
//! stand in the order in which they came. A hand goes over them from the oldest to the newest and begins
//! anew at the end; it spares each that was used since it passed there, and takes the first that was not.
//!
//! A use costs nothing here: nobody reports it. Whoever asks for one to go says when each was used last,
//! and the hand remembers what it was told.

use std::collections::BTreeMap;

use kvasir_mutation::{Mutation, mutated};

/// Endpoints by the order of their coming. How many there may be is for its owner to say.
#[derive(Debug)]
pub struct Sieve<K> {
    /// Oldest first.
    order: BTreeMap<u64, Kept<K>>,
    serials: BTreeMap<K, u64>,
    next_serial: u64,
    /// Before which one the hand stands.
    hand: u64,
}

#[derive(Debug)]
struct Kept<K> {
    key: K,
    /// Its last use, as of when it came or the hand passed it.
    used_us: u64,
}

impl<K: Ord + Copy> Default for Sieve<K> {
    fn default() -> Self {
        Sieve { order: BTreeMap::new(), serials: BTreeMap::new(), next_serial: 0, hand: 0 }
    }
}

impl<K: Ord + Copy> Sieve<K> {
    pub fn len(&self) -> usize {
        self.serials.len()
    }

    pub fn is_empty(&self) -> bool {
        self.serials.is_empty()
    }

    pub fn contains(&self, key: K) -> bool {
        self.serials.contains_key(&key)
    }

    /// A new one; one that is known keeps its place.
    pub fn insert(&mut self, key: K, now_us: u64) {
        if self.contains(key) {
            return;
        }
        self.serials.insert(key, self.next_serial);
        self.order.insert(self.next_serial, Kept { key, used_us: now_us });
        self.next_serial += 1;
    }

    /// It has gone by itself: it failed, or nobody wants it any more. Whether it was known.
    pub fn remove(&mut self, key: K) -> bool {
        let serial = self.serials.remove(&key);
        serial.is_some_and(|serial| self.order.remove(&serial).is_some())
    }

    /// Takes out the one that is to go. `used_us` tells when one was used last; `None` where it is in
    /// use and must stay. `None` when all must stay.
    pub fn evict(&mut self, mut used_us: impl FnMut(K) -> Option<u64>) -> Option<K> {
        // In its first round the hand may find that all were used, in the second it takes one.
        for _ in 0..2 * self.order.len() {
            let next = self.order.range_mut(self.hand..).next();
            let (serial, kept) = match next {
                Some((serial, kept)) => (*serial, kept),
                None => {
                    self.hand = 0;
                    let (serial, kept) = self.order.iter_mut().next()?;
                    (*serial, kept)
                }
            };
            self.hand = serial + 1;
            let Some(last_us) = used_us(kept.key) else { continue };
            if last_us > kept.used_us && !mutated(Mutation::UsedEndpointEvicted) {
                kept.used_us = last_us;
                continue;
            }
            let key = kept.key;
            self.remove(key);
            return Some(key);
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    /// As the paper draws it: a list with a bit for each, and a hand on it.
    #[derive(Default)]
    struct Drawn {
        /// Oldest first.
        list: Vec<(u8, bool)>,
        hand: usize,
    }

    impl Drawn {
        fn remove(&mut self, at: usize) {
            self.list.remove(at);
            if at < self.hand {
                self.hand -= 1;
            }
        }

        fn evict(&mut self, in_use: &BTreeSet<u8>) -> Option<u8> {
            for _ in 0..2 * self.list.len() {
                let at = if self.hand < self.list.len() { self.hand } else { 0 };
                self.hand = at + 1;
                let (key, visited) = self.list[at];
                if in_use.contains(&key) {
                    continue;
                }
                if visited {
                    self.list[at].1 = false;
                    continue;
                }
                self.remove(at);
                return Some(key);
            }
            None
        }
    }

    #[derive(Debug, Clone)]
    enum Step {
        Use(u8),
        Remove(u8),
        Evict(BTreeSet<u8>),
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let key = 0..12u8;
        let step = prop_oneof![
            4 => key.clone().prop_map(Step::Use),
            1 => key.clone().prop_map(Step::Remove),
            2 => prop::collection::btree_set(key, 0..6).prop_map(Step::Evict),
        ];
        prop::collection::vec(step, 0..200)
    }

    proptest! {
        #[test]
        fn it_takes_the_ones_that_the_papers_drawing_takes(steps in steps()) {
            let (mut sieve, mut drawn) = (Sieve::default(), Drawn::default());
            let mut used = [0; 12];
            for (now_us, step) in (1..).zip(steps) {
                match step {
                    Step::Use(key) => {
                        match drawn.list.iter_mut().find(|(of, _)| *of == key) {
                            Some((_, visited)) => *visited = true,
                            None => drawn.list.push((key, false)),
                        }
                        sieve.insert(key, now_us);
                        used[usize::from(key)] = now_us;
                    }
                    Step::Remove(key) => {
                        let at = drawn.list.iter().position(|(of, _)| *of == key);
                        prop_assert_eq!(sieve.remove(key), at.is_some());
                        if let Some(at) = at {
                            drawn.remove(at);
                        }
                    }
                    Step::Evict(in_use) => {
                        let last = |key: u8| {
                            (!in_use.contains(&key)).then(|| used[usize::from(key)])
                        };
                        prop_assert_eq!(sieve.evict(last), drawn.evict(&in_use));
                    }
                }
                prop_assert_eq!(sieve.len(), drawn.list.len());
                prop_assert!(drawn.list.iter().all(|(key, _)| sieve.contains(*key)));
            }
        }
    }

    #[test]
    fn what_is_used_again_and_again_outlives_what_came_once() {
        let mut sieve = Sieve::default();
        for key in 0..4u32 {
            sieve.insert(key, 0);
        }
        for round in 1..100u64 {
            // Two are used in every round; one more comes, and one must go.
            let newcomer = 100 + u32::try_from(round).expect("small");
            let used = |key| Some(if key == 1 || key == 3 { round } else { 0 });
            let gone = sieve.evict(used).expect("some are not used");
            assert!(gone != 1 && gone != 3, "round {round}");
            sieve.insert(newcomer, round);
        }
        assert!(sieve.contains(1) && sieve.contains(3));
        assert_eq!(sieve.len(), 4);
    }

    #[test]
    fn none_goes_while_all_are_in_use() {
        let mut sieve = Sieve::default();
        sieve.insert('a', 0);
        sieve.insert('b', 0);
        assert_eq!(sieve.evict(|_| None), None);
        assert_eq!(sieve.evict(|key| (key == 'b').then_some(9)), Some('b'), "used, but alone");
        assert_eq!(Sieve::<u8>::default().evict(|_| Some(0)), None, "there is none");
    }
}
