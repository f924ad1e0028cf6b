//! What descriptors have said of the peers' regions, and which of that turned out to be wrong. Both are
//! bounded: what is forgotten is asked for.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use super::nic::Place;
use super::place::Places;

/// Regions of all peers; an engine has at most 1024 itself.
const KNOWN_MAX: usize = 4096;

/// A region of a peer: by its incarnation and the key in the descriptor.
pub(crate) type Named = (u64, u64);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Known {
    pub(crate) place: Place,
    pub(crate) length_bytes: u64,
}

/// Where it lies for each card of its engine, and how long it is.
type OfCards = (Places, u64);

#[derive(Debug, Default)]
pub(crate) struct Described {
    regions: BTreeMap<Named, OfCards>,
    order: VecDeque<Named>,
    /// A card has refused them, or their owner says that they are no more.
    doubted: BTreeSet<Named>,
    doubted_order: VecDeque<Named>,
}

impl Described {
    pub(crate) fn has(&self, named: Named) -> bool {
        self.regions.contains_key(&named) || self.doubted.contains(&named)
    }

    /// Only from descriptors that are whole. Nothing that was doubted is believed again.
    pub(crate) fn learn(&mut self, named: Named, known: OfCards) {
        if self.has(named) {
            return;
        }
        self.regions.insert(named, known);
        self.order.push_back(named);
        if self.order.len() > KNOWN_MAX
            && let Some(oldest) = self.order.pop_front()
        {
            self.regions.remove(&oldest);
        }
    }

    pub(crate) fn get(&self, named: Named) -> Option<OfCards> {
        self.regions.get(&named).copied()
    }

    /// From now on its owner is asked.
    pub(crate) fn doubt(&mut self, named: Named) {
        if self.regions.remove(&named).is_some() {
            self.order.retain(|other| *other != named);
        }
        if self.doubted.insert(named) {
            self.doubted_order.push_back(named);
        }
        if self.doubted_order.len() > KNOWN_MAX
            && let Some(oldest) = self.doubted_order.pop_front()
        {
            self.doubted.remove(&oldest);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn known(address: u64) -> OfCards {
        let mut places = Places::default();
        places.set(0, Place { address, key: 1 });
        (places, 8)
    }

    #[test]
    fn what_is_doubted_is_not_believed_again() {
        let mut described = Described::default();
        described.learn((1, 2), known(64));
        assert_eq!(described.get((1, 2)), Some(known(64)));
        described.doubt((1, 2));
        described.learn((1, 2), known(64));
        assert_eq!(described.get((1, 2)), None);
        assert_eq!(described.get((1, 3)), None);
    }

    #[test]
    fn both_are_bounded() {
        let mut described = Described::default();
        for key in 0..2 * KNOWN_MAX as u64 {
            described.learn((1, key), known(key));
            described.doubt((2, key));
        }
        assert_eq!((described.regions.len(), described.order.len()), (KNOWN_MAX, KNOWN_MAX));
        assert_eq!(described.doubted.len(), KNOWN_MAX);
        assert_eq!(described.get((1, 0)), None);
    }
}
