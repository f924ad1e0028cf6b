//! The room for counters that nobody waits for. All makers share it. When it is full, one that has more of them
//! than its share loses its own oldest, so that nobody pushes out what others have made: as long as a maker
//! stays within its share, none of its counters is forgotten.

use std::collections::BTreeMap;

use kvasir_mutation::{Mutation, mutated};

use super::Maker;

#[derive(Debug)]
pub(super) struct Idle {
    /// Of those that have any: their immediates, oldest first.
    of: BTreeMap<Maker, BTreeMap<u64, u32>>,
    len: usize,
    max: usize,
    next_serial: u64,
    /// The one that had most when it was looked for last. It pays as long as it has more than its share, so that
    /// it is seldom looked for.
    heaviest: Maker,
}

/// Where a counter stands.
#[derive(Debug, Clone, Copy)]
pub(super) struct Place {
    maker: Maker,
    serial: u64,
}

impl Idle {
    pub(super) fn new(max: usize) -> Self {
        Idle { of: BTreeMap::new(), len: 0, max, next_serial: 0, heaviest: Maker::Here }
    }

    pub(super) fn add(&mut self, maker: Maker, imm: u32) -> Place {
        let serial = self.next_serial;
        self.next_serial += 1;
        self.of.entry(maker).or_default().insert(serial, imm);
        self.len += 1;
        Place { maker, serial }
    }

    pub(super) fn remove(&mut self, Place { maker, serial }: Place) {
        let Some(imms) = self.of.get_mut(&maker) else { return };
        self.len -= usize::from(imms.remove(&serial).is_some());
        if imms.is_empty() {
            self.of.remove(&maker);
        }
    }

    /// When there are too many: one that is to be forgotten, and who pays. `maker` has made the last one.
    pub(super) fn pop_beyond_bound(&mut self, maker: Maker) -> Option<(Maker, u32)> {
        if self.len <= self.max {
            return None;
        }
        let payer = self.payer(maker)?;
        let (serial, imm) = self.of.get(&payer)?.first_key_value()?;
        let (place, imm) = (Place { maker: payer, serial: *serial }, *imm);
        self.remove(place);
        Some((payer, imm))
    }

    /// Someone has more than an equal share, because all together have more than there is room for.
    fn payer(&mut self, maker: Maker) -> Option<Maker> {
        if mutated(Mutation::EarlyCountsEvictedByAge) {
            let oldest = self.of.iter().min_by_key(|(_, imms)| imms.keys().next().copied());
            return oldest.map(|(maker, _)| *maker);
        }
        let share = self.max / self.of.len().max(1);
        let pays = |maker: &Maker| self.of.get(maker).is_some_and(|imms| imms.len() > share);
        if let Some(maker) = [maker, self.heaviest].into_iter().find(pays) {
            return Some(maker);
        }
        let (heaviest, _) = self.of.iter().max_by_key(|(_, imms)| imms.len())?;
        self.heaviest = *heaviest;
        Some(self.heaviest)
    }

    pub(super) fn clear(&mut self) {
        self.of.clear();
        self.len = 0;
    }
}
