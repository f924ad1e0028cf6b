//! The memory of shares that are over, so that what arrives late is told so.
//!
//! Used twice: for shares that ended here, and for tombstones (aborts of shares that were never
//! seen). Bounded by time and by number; what is forgotten early is counted.

use std::collections::{BTreeMap, VecDeque};

use kvasir_proto::Share;

use crate::api::Outcome;

#[derive(Debug)]
pub(crate) struct Ended {
    kept_ms: u64,
    count_max: usize,
    outcomes: BTreeMap<Share, Outcome>,
    /// (forget at, share), in order of both time and arrival.
    order: VecDeque<(u64, Share)>,
    forgotten_total: u64,
}

impl Ended {
    pub(crate) fn new(kept_ms: u64, count_max: usize) -> Self {
        Ended {
            kept_ms,
            count_max,
            outcomes: BTreeMap::new(),
            order: VecDeque::new(),
            forgotten_total: 0,
        }
    }

    /// Remembers a share; one that is remembered already is left as it is.
    pub(crate) fn insert(&mut self, now_ms: u64, share: Share, outcome: Outcome) {
        if self.outcomes.contains_key(&share) {
            return;
        }
        self.outcomes.insert(share, outcome);
        self.order.push_back((now_ms.saturating_add(self.kept_ms), share));
        while self.order.len() > self.count_max {
            self.forget_oldest();
            self.forgotten_total += 1;
        }
    }

    pub(crate) fn get(&self, share: Share) -> Option<Outcome> {
        self.outcomes.get(&share).copied()
    }

    pub(crate) fn forget_until(&mut self, now_ms: u64) {
        while self.next_ms().is_some_and(|at_ms| at_ms <= now_ms) {
            self.forget_oldest();
        }
    }

    pub(crate) fn next_ms(&self) -> Option<u64> {
        self.order.front().map(|&(at_ms, _)| at_ms)
    }

    pub(crate) fn len(&self) -> u32 {
        u32::try_from(self.order.len()).unwrap_or(u32::MAX)
    }

    pub(crate) fn forgotten_total(&self) -> u64 {
        self.forgotten_total
    }

    fn forget_oldest(&mut self) {
        if let Some((_, share)) = self.order.pop_front() {
            self.outcomes.remove(&share);
        }
    }
}

#[cfg(test)]
mod tests {
    use kvasir_proto::{Side, TxId};

    use super::*;

    fn share(serial: u64) -> Share {
        Share { tx: TxId { conductor_incarnation: 1, serial }, side: Side::Decode }
    }

    fn known(ended: &Ended, of: std::ops::Range<u64>) -> Vec<u64> {
        of.filter(|&serial| ended.get(share(serial)).is_some()).collect()
    }

    #[test]
    fn what_is_old_is_forgotten_in_time() {
        let mut ended = Ended::new(100, 10);
        ended.insert(0, share(0), Outcome::Released);
        ended.insert(50, share(1), Outcome::Aborted);
        ended.insert(60, share(0), Outcome::Aborted);
        assert_eq!(ended.get(share(0)), Some(Outcome::Released));
        ended.forget_until(99);
        assert_eq!(known(&ended, 0..2), [0, 1]);
        ended.forget_until(100);
        assert_eq!(known(&ended, 0..2), [1]);
        assert_eq!(ended.next_ms(), Some(150));
        ended.forget_until(150);
        assert_eq!((ended.len(), ended.next_ms(), ended.forgotten_total()), (0, None, 0));
    }

    #[test]
    fn when_full_the_oldest_is_forgotten_and_counted() {
        let mut ended = Ended::new(100, 2);
        (0..5).for_each(|serial| ended.insert(0, share(serial), Outcome::Released));
        assert_eq!(known(&ended, 0..5), [3, 4]);
        assert_eq!((ended.len(), ended.forgotten_total()), (2, 3));
    }
}
