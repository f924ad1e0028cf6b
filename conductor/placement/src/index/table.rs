//! An open-addressing map from block key to a set of 64 nodes, 24 bytes a slot. Not a general map:
//! a key whose set becomes empty is gone, and a slot with an empty set is a free slot.
//!
//! Keys are hashes already (BLAKE3), so their first bytes are the place. Linear probing with
//! backward-shift deletion leaves no tombstones; the load stays between 6/11 and 3/4 while it
//! grows, which is 32 to 44 bytes a key.

use kvasir_proto::BlockKey;

const CAPACITY_MIN: usize = 16;
/// The high bits of a key's first word choose one of 64 tables, the rest the place within it.
pub(super) const SHARD_BITS: u32 = 6;

/// A key as two words; the first one places it.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct Words([u64; 2]);

impl From<&BlockKey> for Words {
    fn from(key: &BlockKey) -> Self {
        let both = u128::from_le_bytes(key.0);
        Words([both as u64, (both >> 64) as u64])
    }
}

impl Words {
    pub(super) fn shard(self) -> usize {
        (self.0[0] >> (64 - SHARD_BITS)) as usize
    }

    /// Maps the bits below the shard's onto `0..capacity`, which need not be a power of two.
    fn home(self, capacity: usize) -> usize {
        ((u128::from(self.0[0] << SHARD_BITS) * capacity as u128) >> 64) as usize
    }
}

#[derive(Clone, Copy)]
struct Slot {
    key: Words,
    nodes: u64,
}

const FREE: Slot = Slot { key: Words([0; 2]), nodes: 0 };

/// What an insertion did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Inserted {
    /// The node had the block already.
    Already,
    /// A key that others have too.
    Shared,
    /// A key that nobody had: one more slot is used.
    Fresh,
    /// It would have needed one more slot, which was not allowed.
    Refused,
}

#[derive(Default)]
pub(super) struct Table {
    slots: Vec<Slot>,
    used: usize,
}

impl Table {
    /// The nodes that have this block.
    pub(super) fn get(&self, key: Words) -> u64 {
        if self.slots.is_empty() {
            return 0;
        }
        let mut at = key.home(self.slots.len());
        loop {
            let slot = &self.slots[at];
            if slot.nodes == 0 || slot.key == key {
                return slot.nodes;
            }
            at = self.next(at);
        }
    }

    pub(super) fn insert(&mut self, key: Words, node: u64, may_grow: bool) -> Inserted {
        if may_grow && (self.used + 1) * 4 > self.slots.len() * 3 {
            self.resize(self.used + 1);
        }
        if self.slots.is_empty() {
            return Inserted::Refused;
        }
        let mut at = key.home(self.slots.len());
        loop {
            let slot = &mut self.slots[at];
            if slot.nodes == 0 {
                if !may_grow {
                    return Inserted::Refused;
                }
                *slot = Slot { key, nodes: node };
                self.used += 1;
                return Inserted::Fresh;
            }
            if slot.key == key {
                let had = slot.nodes & node != 0;
                slot.nodes |= node;
                return if had { Inserted::Already } else { Inserted::Shared };
            }
            at = self.next(at);
        }
    }

    /// Takes one node from a key's set. True when it was in it.
    pub(super) fn remove(&mut self, key: Words, node: u64) -> bool {
        if self.slots.is_empty() {
            return false;
        }
        let mut at = key.home(self.slots.len());
        loop {
            let slot = &mut self.slots[at];
            if slot.nodes == 0 {
                return false;
            }
            if slot.key == key {
                let had = slot.nodes & node != 0;
                slot.nodes &= !node;
                if slot.nodes == 0 {
                    self.close_hole(at);
                    self.shrink_when_sparse();
                }
                return had;
            }
            at = self.next(at);
        }
    }

    /// Takes some nodes from every set.
    pub(super) fn clear(&mut self, nodes: u64) {
        // A hole is closed from behind it, so what comes into `at` has not been looked at yet,
        // except across the end, where it has and is clean.
        for at in 0..self.slots.len() {
            while self.slots[at].nodes & nodes != 0 {
                self.slots[at].nodes &= !nodes;
                if self.slots[at].nodes == 0 {
                    self.close_hole(at);
                }
            }
        }
        self.shrink_when_sparse();
    }

    pub(super) fn used(&self) -> usize {
        self.used
    }

    pub(super) fn bytes(&self) -> usize {
        self.slots.capacity() * size_of::<Slot>()
    }

    fn next(&self, at: usize) -> usize {
        if at + 1 == self.slots.len() { 0 } else { at + 1 }
    }

    /// Steps from `from` to `to`, going round.
    fn distance(&self, from: usize, to: usize) -> usize {
        if to >= from { to - from } else { to + self.slots.len() - from }
    }

    /// The slot `hole` has just become free: moves back what probing would no longer find.
    fn close_hole(&mut self, mut hole: usize) {
        self.used -= 1;
        let mut at = self.next(hole);
        while self.slots[at].nodes != 0 {
            let home = self.slots[at].key.home(self.slots.len());
            if self.distance(home, at) >= self.distance(hole, at) {
                self.slots[hole] = self.slots[at];
                self.slots[at].nodes = 0;
                hole = at;
            }
            at = self.next(at);
        }
    }

    fn shrink_when_sparse(&mut self) {
        let sparse = self.slots.len() > CAPACITY_MIN && self.used * 4 < self.slots.len();
        if sparse || self.used == 0 {
            self.resize(self.used);
        }
    }

    /// Makes room for `used` keys at a load of 6/11, or drops everything for none.
    fn resize(&mut self, used: usize) {
        let capacity = if used == 0 { 0 } else { (used * 11 / 6).max(CAPACITY_MIN) };
        let old = std::mem::replace(&mut self.slots, vec![FREE; capacity]);
        for slot in old.into_iter().filter(|slot| slot.nodes != 0) {
            let mut at = slot.key.home(capacity);
            while self.slots[at].nodes != 0 {
                at = self.next(at);
            }
            self.slots[at] = slot;
        }
    }
}
