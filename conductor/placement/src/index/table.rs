//! An open-addressing map from block key to a set of 64 nodes, 16 bytes a slot: one writer, and
//! readers that never wait. Not a general map: a key whose set becomes empty is gone.
//!
//! Keys are hashes already (BLAKE3), so that half of one names it: the *tag*. Two keys with one
//! tag (one chance in 2^64 for each pair) look alike here, which costs time and nothing else, as
//! every answer of the index is a hint.
//!
//! Linear probing with backward-shift deletion leaves no tombstones. A key's place is looked for from the beginning of
//! a cache line, so that most are found, or found missing, within that line. The load stays between 3/5
//! and 3/4 while it grows, which is 21 to 27 bytes a key. A table never grows in place: the writer
//! makes another one, and readers that began earlier finish on the old one.
//!
//! What a reader sees meanwhile: a slot's set is read between two looks at its tag, and a tag
//! changes before the set does, so that no set is taken for another key's. A key that moves is at
//! its new place before it leaves the old one. A reader that had just passed the new place misses
//! it; that costs time too, and nothing else.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use kvasir_proto::BlockKey;

const CAPACITY_MIN: usize = 16;
const LINE_SLOTS: usize = 4;
/// The high bits of a tag choose one of 64 tables, the rest the place within it.
pub(super) const SHARD_BITS: u32 = 6;
/// Keys whose slots are asked for together, before any is changed.
pub(super) const TOUCHED_AT_ONCE: usize = 16;

const FREE: u64 = 0;
/// The slot's key is being replaced: not what is looked for, and not an end either.
const MOVING: u64 = 1;

/// A key's first half, which places it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Tag(u64);

impl From<&BlockKey> for Tag {
    fn from(key: &BlockKey) -> Self {
        let half = u128::from_le_bytes(key.0) as u64;
        Tag(if half <= MOVING { half + 2 } else { half })
    }
}

impl Tag {
    pub(super) fn shard(self) -> usize {
        (self.0 >> (64 - SHARD_BITS)) as usize
    }

    /// Maps the bits below the shard's onto `0..lines`, which need not be a power of two. The
    /// order of tags is kept, so that a table is copied from end to end in one sweep of each.
    fn home(self, lines: usize) -> usize {
        ((u128::from(self.0 << SHARD_BITS) * lines as u128) >> 64) as usize
    }
}

#[derive(Debug, Default)]
struct Slot {
    tag: AtomicU64,
    nodes: AtomicU64,
}

/// As long as a cache line, and at the beginning of one.
#[derive(Debug, Default)]
#[repr(align(64))]
struct Line([Slot; LINE_SLOTS]);

/// What an insertion did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Inserted {
    /// The node had the block already.
    Already,
    /// A key that others have too.
    Shared,
    /// A key that nobody had: one more slot is used.
    Fresh,
    /// The table must be replaced by a larger one first.
    Full,
}

/// What a removal did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Removed {
    Nothing,
    /// Others still have it.
    Shared,
    /// Nobody has it any more: one slot less is used.
    Last,
}

/// See the module. Methods that change it are the one writer's. Clones are the same table.
#[derive(Debug, Clone, Default)]
pub(super) struct Table {
    lines: Arc<[Line]>,
}

impl Table {
    /// Room for `used` keys at a load of 3/5, or nothing at all for none.
    pub(super) fn with_room(used: usize) -> Self {
        let capacity = if used == 0 { 0 } else { (used * 5 / 3 + 1).max(CAPACITY_MIN) };
        Table { lines: (0..capacity.div_ceil(LINE_SLOTS)).map(|_| Line::default()).collect() }
    }

    /// The nodes that have this block.
    pub(super) fn get(&self, tag: Tag) -> u64 {
        if self.lines.is_empty() {
            return 0;
        }
        let mut at = tag.home(self.lines.len());
        loop {
            let Line(slots) = &self.lines[at];
            let tags = slots.each_ref().map(|slot| slot.tag.load(Ordering::Acquire));
            let where_is = |wanted| {
                let bits = tags.iter().rev().map(|here| u32::from(*here == wanted));
                bits.fold(0, |all, bit| all << 1 | bit)
            };
            let here = where_is(tag.0);
            if here != 0 {
                let slot = &slots[here.trailing_zeros() as usize % LINE_SLOTS];
                let nodes = slot.nodes.load(Ordering::Acquire);
                if slot.tag.load(Ordering::Relaxed) == tag.0 {
                    return nodes;
                }
                continue;
            }
            if where_is(FREE) != 0 {
                return 0;
            }
            at = if at + 1 == self.lines.len() { 0 } else { at + 1 };
        }
    }

    /// Brings a key's place near. The answer is of no use but to keep the load.
    pub(super) fn touch(&self, tag: Tag) -> u64 {
        match self.lines.len() {
            0 => 0,
            lines => self.lines[tag.home(lines)].0[0].tag.load(Ordering::Relaxed),
        }
    }

    fn slot(&self, at: usize) -> &Slot {
        &self.lines[at / LINE_SLOTS].0[at % LINE_SLOTS]
    }

    fn slots(&self) -> impl Iterator<Item = &Slot> {
        self.lines.iter().flat_map(|line| &line.0)
    }

    fn capacity(&self) -> usize {
        self.lines.len() * LINE_SLOTS
    }

    fn home(&self, tag: Tag) -> usize {
        tag.home(self.lines.len()) * LINE_SLOTS
    }

    /// Whether one more key would be too many beside `used`.
    pub(super) fn is_full(&self, used: usize) -> bool {
        (used + 1) * 4 > self.capacity() * 3
    }

    /// So few of the slots are used that a smaller table should replace it.
    pub(super) fn is_sparse(&self, used: usize) -> bool {
        used == 0 && !self.lines.is_empty()
            || self.capacity() > CAPACITY_MIN && used * 4 < self.capacity()
    }

    /// Adds `nodes` to a key's set. A key that nobody has is only taken while `has_room`.
    pub(super) fn insert(&self, tag: Tag, nodes: u64, has_room: bool) -> Inserted {
        if self.lines.is_empty() {
            return Inserted::Full;
        }
        let mut at = self.home(tag);
        loop {
            let slot = self.slot(at);
            let here = slot.tag.load(Ordering::Relaxed);
            if here == tag.0 {
                let before = slot.nodes.load(Ordering::Relaxed);
                slot.nodes.store(before | nodes, Ordering::Release);
                let had = before & nodes == nodes;
                return if had { Inserted::Already } else { Inserted::Shared };
            }
            if here == FREE {
                if !has_room {
                    return Inserted::Full;
                }
                slot.nodes.store(nodes, Ordering::Release);
                slot.tag.store(tag.0, Ordering::Release);
                return Inserted::Fresh;
            }
            at = self.next(at);
        }
    }

    /// Takes one node from a key's set.
    pub(super) fn remove(&self, tag: Tag, node: u64) -> Removed {
        if self.lines.is_empty() {
            return Removed::Nothing;
        }
        let mut at = self.home(tag);
        loop {
            let slot = self.slot(at);
            let here = slot.tag.load(Ordering::Relaxed);
            if here == tag.0 {
                let before = slot.nodes.load(Ordering::Relaxed);
                slot.nodes.store(before & !node, Ordering::Release);
                return match before & !node {
                    _ if before & node == 0 => Removed::Nothing,
                    0 => {
                        self.close_hole(at);
                        Removed::Last
                    }
                    _ => Removed::Shared,
                };
            }
            if here == FREE {
                return Removed::Nothing;
            }
            at = self.next(at);
        }
    }

    /// A table for `used` keys with what is in this one, less some nodes; and how many keys it has.
    pub(super) fn copy_without(&self, nodes: u64, used: usize) -> (Table, usize) {
        let copy = Table::with_room(used);
        let mut taken = 0;
        for slot in self.slots() {
            let (tag, set) =
                (slot.tag.load(Ordering::Relaxed), slot.nodes.load(Ordering::Relaxed) & !nodes);
            if tag > MOVING && set != 0 {
                copy.insert(Tag(tag), set, true);
                taken += 1;
            }
        }
        (copy, taken)
    }

    /// Keys that have some other node than these.
    pub(super) fn used_without(&self, nodes: u64) -> usize {
        let has = |slot: &&Slot| slot.nodes.load(Ordering::Relaxed) & !nodes != 0;
        self.slots().filter(has).count()
    }

    pub(super) fn bytes(&self) -> usize {
        self.capacity() * size_of::<Slot>()
    }

    fn next(&self, at: usize) -> usize {
        if at + 1 == self.capacity() { 0 } else { at + 1 }
    }

    /// Steps from `from` to `to`, going round.
    fn distance(&self, from: usize, to: usize) -> usize {
        if to >= from { to - from } else { to + self.capacity() - from }
    }

    /// The set at `hole` has just become empty: moves back what probing would no longer find.
    fn close_hole(&self, mut hole: usize) {
        let mut at = self.next(hole);
        loop {
            let tag = self.slot(at).tag.load(Ordering::Relaxed);
            if tag == FREE {
                break;
            }
            let home = self.home(Tag(tag));
            if self.distance(home, at) >= self.distance(hole, at) {
                let nodes = self.slot(at).nodes.load(Ordering::Relaxed);
                self.slot(hole).tag.store(MOVING, Ordering::Release);
                self.slot(hole).nodes.store(nodes, Ordering::Release);
                self.slot(hole).tag.store(tag, Ordering::Release);
                hole = at;
            }
            at = self.next(at);
        }
        self.slot(hole).nodes.store(0, Ordering::Release);
        self.slot(hole).tag.store(FREE, Ordering::Release);
    }
}
