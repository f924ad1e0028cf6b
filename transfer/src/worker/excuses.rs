//! Connections that have ended for what may have been no fault of their way. Where a card acknowledges in no order, a
//! post that the peer refuses may end the connection and look like anything. Whose fault it was is known when the peer
//! has said something of the regions that were being written: one that it refuses is the reason.

use std::collections::{BTreeMap, BTreeSet};

use super::ways::Way;

/// Ways that are remembered. Beyond it one is forgotten, and its failure is held against it.
const WAYS_MAX: usize = 1024;

/// By the incarnation of the peer and the way to it: the keys of the regions that were being written when its last
/// connection ended.
#[derive(Debug, Default)]
pub(super) struct Excuses(BTreeMap<(u64, Way), BTreeSet<u64>>);

impl Excuses {
    /// A connection has ended. What is known of the one before it counts no more.
    pub(super) fn ended(&mut self, named: (u64, Way), keys: &[u64]) {
        self.0.remove(&named);
        if keys.is_empty() {
            return;
        }
        if self.0.len() >= WAYS_MAX {
            self.0.pop_first();
        }
        self.0.insert(named, keys.iter().copied().collect());
    }

    /// The peer refuses the region: the ways whose last connections have ended for it, each once.
    pub(super) fn refused(&mut self, incarnation: u64, key: u64) -> Vec<Way> {
        let ended_for_it = |(of, _): &(u64, Way), keys: &mut BTreeSet<u64>| {
            *of == incarnation && keys.contains(&key)
        };
        self.0.extract_if(.., ended_for_it).map(|((_, way), _)| way).collect()
    }
}

#[cfg(test)]
mod tests {
    use kvasir_transfer_core::Rail;

    use super::*;
    use crate::config::Domain;

    #[test]
    fn a_way_is_excused_once_by_a_region_that_was_written_by_its_last_connection() {
        let way = |rail| Way { domain: Domain::Efa, rail: Rail(rail) };
        let mut excuses = Excuses::default();
        excuses.ended((7, way(0)), &[1, 2]);
        excuses.ended((7, way(1)), &[2]);
        excuses.ended((8, way(0)), &[2]);
        assert_eq!(excuses.refused(7, 3), []);
        assert_eq!(excuses.refused(7, 2), [way(0), way(1)]);
        assert_eq!(excuses.refused(7, 1), [], "that was one failure");
        excuses.ended((8, way(0)), &[]);
        assert_eq!(excuses.refused(8, 2), [], "the last one ended for something else");
    }

    #[test]
    fn what_is_remembered_is_bounded() {
        let mut excuses = Excuses::default();
        for peer in 0..2 * WAYS_MAX as u64 {
            excuses.ended((peer, Way { domain: Domain::Efa, rail: Rail(0) }), &[1]);
        }
        assert_eq!(excuses.0.len(), WAYS_MAX);
    }
}
