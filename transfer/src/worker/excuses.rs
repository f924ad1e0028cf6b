//! Connections that have ended for what may have been no fault of their way. Where a card acknowledges in no order, a
//! post that the peer refuses may end the connection and look like anything. Whose fault it was is known when the peer
//! has said something of the regions that were being written: one that it refuses is the reason. It may say so before
//! the connection ends, or after it, and several connections may have ended for one region by then.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use super::ways::Way;

/// Ways that are remembered. Beyond it one is forgotten, and its failure is held against it.
const WAYS_MAX: usize = 1024;
/// Refused regions that are remembered, the latest ones.
const REFUSED_MAX: usize = 4096;

/// `B` is what was held against a way before.
#[derive(Debug)]
pub(super) struct Excuses<B> {
    /// By the incarnation of the peer and the way to it.
    ended: BTreeMap<(u64, Way), Ended<B>>,
    /// By the incarnation of the peer and the region's key.
    refused: BTreeSet<(u64, u64)>,
    refused_order: VecDeque<(u64, u64)>,
}

/// Connections of one way that have ended one after the other, and for each of which there may be an excuse.
#[derive(Debug)]
struct Ended<B> {
    /// Of the regions that were being written.
    keys: BTreeSet<u64>,
    before: B,
}

impl<B> Default for Excuses<B> {
    fn default() -> Self {
        Excuses { ended: BTreeMap::new(), refused: BTreeSet::new(), refused_order: VecDeque::new() }
    }
}

impl<B> Excuses<B> {
    /// A connection has ended while it wrote to these regions; `before` is what is held against its way so far. Answers
    /// whether it is excused by what is known already. Without regions there is no excuse, nor for those before it.
    pub(super) fn ended(&mut self, named: (u64, Way), keys: &[u64], before: B) -> bool {
        if keys.is_empty() {
            self.ended.remove(&named);
            return false;
        }
        if keys.iter().any(|key| self.refused.contains(&(named.0, *key))) {
            return true;
        }
        if let Some(ended) = self.ended.get_mut(&named) {
            ended.keys.extend(keys);
            return false;
        }
        if self.ended.len() >= WAYS_MAX {
            self.ended.pop_first();
        }
        let keys = keys.iter().copied().collect();
        self.ended.insert(named, Ended { keys, before });
        false
    }

    /// The peer refuses the region: the ways whose connections have ended for it, with what was held against them before
    /// that, each once.
    pub(super) fn refused(&mut self, incarnation: u64, key: u64) -> Vec<(Way, B)> {
        if self.refused.insert((incarnation, key)) {
            self.refused_order.push_back((incarnation, key));
        }
        if self.refused_order.len() > REFUSED_MAX
            && let Some(oldest) = self.refused_order.pop_front()
        {
            self.refused.remove(&oldest);
        }
        let ended_for_it = |(of, _): &(u64, Way), ended: &mut Ended<B>| {
            *of == incarnation && ended.keys.contains(&key)
        };
        let ended = self.ended.extract_if(.., ended_for_it);
        ended.map(|((_, way), ended)| (way, ended.before)).collect()
    }
}

#[cfg(test)]
mod tests {
    use kvasir_transfer_core::Rail;

    use super::*;
    use crate::config::Domain;

    fn way(rail: u8) -> Way {
        Way { domain: Domain::Efa, rail: Rail(rail) }
    }

    #[test]
    fn a_way_is_excused_once_by_a_region_that_was_written_by_its_last_connections() {
        let mut excuses = Excuses::default();
        for (named, keys, before) in [((7, way(0)), &[1, 2][..], 'a'), ((7, way(1)), &[2], 'b')] {
            assert!(!excuses.ended(named, keys, before));
        }
        assert!(!excuses.ended((8, way(0)), &[2], 'c'));
        // Once more for the same region, before the peer has said anything of it.
        assert!(!excuses.ended((7, way(0)), &[2], 'd'));
        assert_eq!(excuses.refused(7, 3), []);
        assert_eq!(excuses.refused(7, 2), [(way(0), 'a'), (way(1), 'b')]);
        assert_eq!(excuses.refused(7, 1), [], "that is settled");
        assert!(!excuses.ended((8, way(0)), &[], 'e'));
        assert_eq!(excuses.refused(8, 2), [], "the last one ended for something else");
    }

    #[test]
    fn what_ends_for_a_region_that_is_known_to_be_refused_is_excused_at_once() {
        let mut excuses = Excuses::default();
        assert_eq!(excuses.refused(7, 1), []);
        assert!(excuses.ended((7, way(0)), &[1, 2], ()));
        assert!(!excuses.ended((8, way(0)), &[1], ()), "another peer's");
        assert!(!excuses.ended((7, way(0)), &[2], ()));
    }

    #[test]
    fn what_is_remembered_is_bounded() {
        let mut excuses = Excuses::default();
        for number in 0..2 * REFUSED_MAX as u64 {
            excuses.ended((number, way(0)), &[1], ());
            excuses.refused(u64::MAX, number);
        }
        assert_eq!(excuses.ended.len(), WAYS_MAX);
        assert_eq!(
            (excuses.refused.len(), excuses.refused_order.len()),
            (REFUSED_MAX, REFUSED_MAX)
        );
    }
}
