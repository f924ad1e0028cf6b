//! Which memory peers may write. Keys are given by the shell and never used twice in one incarnation.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use kvasir_mutation::{Mutation, mutated};

use crate::outcome::Refusal;

/// The region that a frame names.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Target {
    pub incarnation: u64,
    pub key: u64,
}

/// The regions of one engine; `M` is what the shell needs to reach the memory.
#[derive(Debug)]
pub struct RegionTable<M> {
    incarnation: u64,
    live: BTreeMap<u64, Region<M>>,
    /// The last ones that were revoked, only to tell a late writer from a lost one.
    revoked: BTreeSet<u64>,
    revoked_order: VecDeque<u64>,
}

#[derive(Debug)]
struct Region<M> {
    memory: M,
    length_bytes: u64,
}

const REVOKED_MAX: usize = 1024;

impl<M> RegionTable<M> {
    pub fn new(incarnation: u64) -> Self {
        RegionTable {
            incarnation,
            live: BTreeMap::new(),
            revoked: BTreeSet::new(),
            revoked_order: VecDeque::new(),
        }
    }

    pub fn insert(&mut self, key: u64, memory: M, length_bytes: u64) {
        let former = self.live.insert(key, Region { memory, length_bytes });
        assert!(former.is_none(), "a key names one region of an incarnation");
    }

    /// From now on every check of the key fails. `None` when there is no such region.
    pub fn revoke(&mut self, key: u64) -> Option<M> {
        let region = self.live.remove(&key)?;
        self.revoked.insert(key);
        self.revoked_order.push_back(key);
        if self.revoked_order.len() > REVOKED_MAX
            && let Some(oldest) = self.revoked_order.pop_front()
        {
            self.revoked.remove(&oldest);
        }
        Some(region.memory)
    }

    /// The memory, when the whole range may be written.
    ///
    /// # Errors
    /// The reason why not.
    pub fn check(&self, target: Target, offset: u64, bytes: u64) -> Result<&M, Refusal> {
        if target.incarnation != self.incarnation && !mutated(Mutation::IncarnationNotChecked) {
            return Err(Refusal::StaleIncarnation);
        }
        let mut region = self.live.get(&target.key);
        if mutated(Mutation::KeyNotChecked) && !self.revoked.contains(&target.key) {
            region = region.or(self.live.values().next());
        }
        let Some(region) = region else {
            let revoked = self.revoked.contains(&target.key);
            return Err(if revoked { Refusal::Revoked } else { Refusal::UnknownRegion });
        };
        check_bounds(region.length_bytes, offset, bytes)?;
        Ok(&region.memory)
    }

    pub fn get(&self, key: u64) -> Option<&M> {
        self.live.get(&key).map(|region| &region.memory)
    }
}

/// Whether a range lies in a region of this length.
///
/// # Errors
/// [`Refusal::OutOfBounds`] when it does not.
pub fn check_bounds(length_bytes: u64, offset: u64, bytes: u64) -> Result<(), Refusal> {
    match offset.checked_add(bytes) {
        Some(end) if end <= length_bytes => Ok(()),
        Some(_) if mutated(Mutation::BoundsNotChecked) && offset > 0 => Ok(()),
        _ => Err(Refusal::OutOfBounds),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(incarnation: u64, key: u64, offset: u64, bytes: u64) -> Result<char, Refusal> {
        let mut table = RegionTable::new(7);
        table.insert(1, 'a', 100);
        table.insert(2, 'b', 100);
        assert_eq!(table.revoke(2), Some('b'));
        assert_eq!(table.revoke(2), None);
        table.check(Target { incarnation, key }, offset, bytes).copied()
    }

    #[test]
    fn only_ranges_inside_live_regions_of_this_incarnation_pass() {
        assert_eq!(check(7, 1, 0, 100), Ok('a'));
        assert_eq!(check(7, 1, 100, 0), Ok('a'));
        assert_eq!(check(7, 1, 0, 101), Err(Refusal::OutOfBounds));
        assert_eq!(check(7, 1, 100, 1), Err(Refusal::OutOfBounds));
        assert_eq!(check(7, 1, u64::MAX, 2), Err(Refusal::OutOfBounds));
        assert_eq!(check(7, 2, 0, 1), Err(Refusal::Revoked));
        assert_eq!(check(7, 3, 0, 1), Err(Refusal::UnknownRegion));
        assert_eq!(check(6, 1, 0, 1), Err(Refusal::StaleIncarnation));
    }

    #[test]
    fn the_memory_of_revoked_keys_is_bounded() {
        let mut table = RegionTable::new(7);
        for key in 0..REVOKED_MAX as u64 + 1 {
            table.insert(key, (), 1);
            table.revoke(key);
        }
        let refusal = |key| table.check(Target { incarnation: 7, key }, 0, 1).unwrap_err();
        assert_eq!(refusal(0), Refusal::UnknownRegion);
        assert_eq!(refusal(1), Refusal::Revoked);
    }
}
