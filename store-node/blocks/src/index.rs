//! Which slot holds which key, how blocks follow one another, and which block goes next.
//!
//! Owned by the cache. It must hold that a block's parent is indexed while the block is, and that
//! `leaves` has exactly the idle (unpinned) blocks without a child, so that whoever evicts from its
//! old ends never leaves a block behind whose parent is gone. Eviction costs a logarithm of the
//! slots, not a scan. `unsunk` has the idle blocks, leaves or not, that lie nowhere else.
//!
//! When a block was used last is a tick: the time in its upper bits, so that ages follow from it, and below
//! them a number, so that no two are the same.

use std::cmp::Ordering;
use std::collections::BTreeSet;
use std::hash::Hasher;
use std::iter::Peekable;

use hashbrown::HashTable;
use kvasir_mutation::{Mutation, mutated};
use kvasir_proto::{BlockKey, Namespace, SlotIndex};

use crate::compact::{Interned, Link};
use crate::eviction::{CLASSES, Eviction, HitDensity, class};

/// Bits of a tick below its milliseconds. Should more happen in one, ticks run ahead of the time a little.
const TICK_BITS: u32 = 16;
/// Of two blocks that go at once and were unpinned together.
const TICKS_BETWEEN_MAX: u64 = 8;
/// Fewer are taken out one by one.
const CUT_MIN: usize = 32;

/// A committed block that shall be found.
#[derive(Debug)]
pub(crate) struct Entry {
    pub(crate) key: BlockKey,
    pub(crate) namespace: Namespace,
    /// The block before it; `None` for the first of its chain.
    pub(crate) parent: Option<SlotIndex>,
    /// Of its runs, folded into one.
    pub(crate) checksum: u64,
}

/// A committed block that was found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Found {
    pub(crate) key: BlockKey,
    pub(crate) namespace: Namespace,
    /// The block before it; `None` for the first of its chain.
    pub(crate) parent: Option<SlotIndex>,
    pub(crate) checksum: u64,
}

/// There may be millions.
#[derive(Debug)]
struct Held {
    key: BlockKey,
    checksum: u64,
    /// A tick; 0 before it was idle once.
    last_use: u64,
    parent: Link,
    /// The youngest of the blocks after it, which lead to each other.
    child: Link,
    elder: Link,
    younger: Link,
    /// Its number.
    namespace: u32,
    /// Unpinned since the tick `last_use`.
    idle: bool,
    /// The SSD has it too.
    sunk: bool,
    /// Of [`class`].
    continues: bool,
    used_again: bool,
}

const _: () = assert!(size_of::<Option<Held>>() == 56);

/// (last use, slot) from the eldest on.
type Leaves<'a> = std::collections::btree_set::Iter<'a, (u64, SlotIndex)>;

/// A block without successors, ordered by what it is worth.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Leaf {
    worth: f64,
    last_use: u64,
    pub(crate) slot: SlotIndex,
}

impl Ord for Leaf {
    fn cmp(&self, other: &Self) -> Ordering {
        let by_use = (self.last_use, self.slot).cmp(&(other.last_use, other.slot));
        self.worth.total_cmp(&other.worth).then(by_use)
    }
}

impl PartialOrd for Leaf {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Leaf {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Leaf {}

impl Held {
    fn class(&self) -> usize {
        class(self.continues, self.used_again)
    }
}

#[derive(Debug)]
pub(crate) struct Index {
    /// Slots, by the keys of their blocks.
    by_key: HashTable<SlotIndex>,
    by_slot: Vec<Option<Held>>,
    namespaces: Interned<Namespace>,
    /// (last use, slot) of idle leaves, by class.
    leaves: [BTreeSet<(u64, SlotIndex)>; CLASSES],
    /// (last use, slot) of idle blocks that the SSD has not.
    unsunk: BTreeSet<(u64, SlotIndex)>,
    tick: u64,
    /// Blocks that were read ahead, and that nobody has asked for since.
    prefetched: BTreeSet<SlotIndex>,
    prefetched_unused: u64,
    /// `None` where what was used longest ago goes.
    density: Option<HitDensity>,
}

impl Index {
    pub(crate) fn new(slots: u32, eviction: Eviction) -> Self {
        Index {
            by_key: HashTable::new(),
            by_slot: (0..slots).map(|_| None).collect(),
            namespaces: Interned::new(),
            leaves: Default::default(),
            unsunk: BTreeSet::new(),
            tick: 0,
            prefetched: BTreeSet::new(),
            prefetched_unused: 0,
            density: (eviction == Eviction::HitDensity).then(|| HitDensity::new(slots)),
        }
    }

    pub(crate) fn find(&self, key: BlockKey) -> Option<SlotIndex> {
        let is_it = |slot: &SlotIndex| self.held(*slot).is_some_and(|held| held.key == key);
        self.by_key.find(hash(key), is_it).copied()
    }

    pub(crate) fn entry(&self, slot: SlotIndex) -> Option<Found> {
        let held = self.held(slot)?;
        Some(Found {
            key: held.key,
            namespace: self.namespaces.get(held.namespace),
            parent: held.parent.slot(),
            checksum: held.checksum,
        })
    }

    /// The slots of the longest prefix of a chain that is here. A key that is here in another
    /// namespace, or after another block, is not the one asked for.
    pub(crate) fn prefix(&self, namespace: Option<Namespace>, keys: &[BlockKey]) -> Vec<SlotIndex> {
        let mut slots: Vec<SlotIndex> = Vec::new();
        for &key in keys {
            let Some(slot) = self.find(key) else { break };
            let Some(entry) = self.entry(slot) else { break };
            let same_namespace = namespace.is_none_or(|namespace| namespace == entry.namespace)
                || mutated(Mutation::NamespaceIgnored);
            if !same_namespace
                || entry.parent != slots.last().copied() && !mutated(Mutation::ParentIgnored)
            {
                break;
            }
            slots.push(slot);
        }
        slots
    }

    /// The time is now this; never back.
    pub(crate) fn set_now(&mut self, now_ms: u64) {
        self.tick = self.tick.max(now_ms << TICK_BITS);
    }

    /// Makes a slot findable. It counts as pinned.
    pub(crate) fn insert(&mut self, slot: SlotIndex, entry: Entry, sunk: bool) {
        let Entry { key, namespace, parent, checksum } = entry;
        assert!(self.find(key).is_none(), "the key of slot {slot} is indexed already");
        let (mut continues, mut elder) = (false, Link::NONE);
        if let Some(parent) = parent {
            let Some(before) = self.by_slot[parent.0 as usize].as_mut() else {
                panic!("no parent of slot {slot} is indexed");
            };
            // One that was idle once was there before the prompt that brings this block.
            continues = before.continues || before.last_use > 0;
            elder = std::mem::replace(&mut before.child, slot.into());
            // It need not be pinned when its child comes from the SSD, and is no leaf any more.
            let (of, at) = (before.class(), (before.last_use, parent));
            self.leaves[of].remove(&at);
        }
        if let Some(elder) = elder.slot() {
            self.held_mut(elder).younger = slot.into();
        }
        if let Some(density) = &mut self.density {
            density.brought(key, time_ms(self.tick));
        }
        let held = Held {
            key,
            checksum,
            last_use: 0,
            parent: parent.into(),
            child: Link::NONE,
            elder,
            younger: Link::NONE,
            namespace: self.namespaces.take(namespace),
            idle: false,
            sunk,
            continues,
            used_again: false,
        };
        self.by_slot[slot.0 as usize] = Some(held);
        let by_slot = &self.by_slot;
        let hash_of =
            |slot: &SlotIndex| by_slot[slot.0 as usize].as_ref().map_or(0, |held| hash(held.key));
        self.by_key.insert_unique(hash(key), slot, hash_of);
    }

    /// The slot got its first pin.
    pub(crate) fn set_busy(&mut self, slot: SlotIndex) {
        let held = self.held_mut(slot);
        held.idle = false;
        let (of, at) = (held.class(), (held.last_use, slot));
        self.leaves[of].remove(&at);
        self.unsunk.remove(&at);
    }

    /// The SSD has a copy of the block now, or has none any more.
    pub(crate) fn set_sunk(&mut self, slot: SlotIndex, sunk: bool) {
        let held = self.held_mut(slot);
        held.sunk = sunk;
        let (idle, at) = (held.idle, (held.last_use, slot));
        if idle && !sunk {
            self.unsunk.insert(at);
        } else {
            self.unsunk.remove(&at);
        }
    }

    /// Answers with what was said of it before.
    pub(crate) fn set_prefetched(&mut self, slot: SlotIndex, prefetched: bool) -> bool {
        match prefetched {
            true => !self.prefetched.insert(slot),
            false => self.prefetched.remove(&slot),
        }
    }

    /// Blocks that were read ahead and left before anybody asked for them.
    pub(crate) fn prefetched_unused(&self) -> u64 {
        self.prefetched_unused
    }

    /// What was counted before there was this index.
    pub(crate) fn set_prefetched_unused(&mut self, blocks: u64) {
        self.prefetched_unused = blocks;
    }

    /// The SSD has a copy.
    pub(crate) fn is_sunk(&self, slot: SlotIndex) -> bool {
        self.held(slot).is_some_and(|held| held.sunk)
    }

    /// Idle blocks of which there is no other copy: their number, and the one used longest ago.
    pub(crate) fn unsunk(&self) -> (usize, Option<SlotIndex>) {
        (self.unsunk.len(), self.unsunk.first().map(|&(_, slot)| slot))
    }

    /// The chain that ends with this slot, from its first block on.
    pub(crate) fn path(&self, slot: SlotIndex) -> Vec<SlotIndex> {
        let parent = |slot: &SlotIndex| self.held(*slot).and_then(|held| held.parent.slot());
        let mut path: Vec<SlotIndex> = std::iter::successors(Some(slot), parent).collect();
        path.reverse();
        path
    }

    /// The slot lost its last pin.
    pub(crate) fn set_idle(&mut self, slot: SlotIndex) {
        self.tick += 1;
        let tick = self.tick;
        let held = self.held_mut(slot);
        let (of, before) = (held.class(), std::mem::replace(&mut held.last_use, tick));
        if before > 0 {
            held.used_again = true;
            let key = held.key;
            if let Some(density) = &mut self.density {
                density.used(key, of, time_ms(before), time_ms(tick));
            }
        }
        self.list_idle(slot);
    }

    /// The same, and it keeps its place in the order, if it has one.
    pub(crate) fn set_idle_as_before(&mut self, slot: SlotIndex) {
        if self.held(slot).is_some_and(|held| held.last_use == 0) {
            return self.set_idle(slot);
        }
        self.list_idle(slot);
    }

    fn list_idle(&mut self, slot: SlotIndex) {
        let held = self.held_mut(slot);
        held.idle = true;
        let (sunk, at) = (held.sunk, (held.last_use, slot));
        if !sunk {
            self.unsunk.insert(at);
        }
        self.list_if_idle_leaf(slot);
    }

    /// The idle leaf that goes next.
    pub(crate) fn next_out(&self) -> Option<SlotIndex> {
        self.going().next()
    }

    /// How long ago the idle leaf that goes next was used, if it is on the SSD as well.
    pub(crate) fn next_out_age_if_sunk_ms(&self) -> Option<u64> {
        let slot = self.next_out().filter(|slot| self.is_sunk(*slot))?;
        let held = self.held(slot)?;
        Some(time_ms(self.tick).saturating_sub(time_ms(held.last_use)))
    }

    /// When the idle leaf that goes next was used.
    pub(crate) fn next_out_used_ms(&self) -> Option<u64> {
        Some(time_ms(self.held(self.next_out()?)?.last_use))
    }

    /// The idle leaves in the order in which they would go now.
    pub(crate) fn going(&self) -> impl Iterator<Item = SlotIndex> + '_ {
        let mut eldest = self.leaves.each_ref().map(|leaves| leaves.iter().peekable());
        std::iter::from_fn(move || {
            let first = |(class, of): (usize, &mut Peekable<Leaves<'_>>)| {
                let at = **of.peek()?;
                Some((self.worth(class, at.0), at, class))
            };
            let least = eldest.iter_mut().enumerate().filter_map(first);
            let least = least.min_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
            let (_, (_, slot), class) = least?;
            eldest[class].next();
            Some(slot)
        })
    }

    /// All leaves, idle or not, to be compared by what they are worth; pinned ones are worth most.
    pub(crate) fn leaves_by_worth(&self) -> impl Iterator<Item = Leaf> + '_ {
        (0..).zip(&self.by_slot).filter_map(|(slot, held)| {
            let (slot, held) = (SlotIndex(slot), held.as_ref()?);
            let worth = match held.idle {
                true => self.worth(held.class(), held.last_use),
                false => f64::INFINITY,
            };
            self.is_leaf(slot).then_some(Leaf { worth, last_use: held.last_use, slot })
        })
    }

    /// Of an idle leaf; what is worth the same goes in the order of its use.
    fn worth(&self, class: usize, last_use: u64) -> f64 {
        let age_ms = time_ms(self.tick).saturating_sub(time_ms(last_use));
        self.density.as_ref().map_or(0.0, |density| density.density(class, age_ms))
    }

    /// Takes out the blocks that go next, up to so many. Answers with their slots and keys, and whether the
    /// SSD has them.
    ///
    /// Mostly the block before one that goes is the next: chains go from their ends. So the first of each class is
    /// in hand here and not listed, and a leaf that comes to be one is not listed in between.
    pub(crate) fn evict(&mut self, blocks: u32) -> Vec<(SlotIndex, BlockKey, bool)> {
        if blocks == 0 {
            return Vec::new();
        }
        let mut gone = Vec::with_capacity(blocks.min(1 << 16) as usize);
        let mut unsunk = Vec::with_capacity(gone.capacity());
        let mut first: [Option<(u64, SlotIndex)>; CLASSES] =
            std::array::from_fn(|class| self.leaves[class].pop_first());
        while gone.len() < blocks as usize
            && let Some(class) = self.least(&first)
            && let Some((last_use, slot)) = first[class].take()
        {
            let held = self.take_row(slot);
            if let Some(density) = &mut self.density {
                density.evicted(held.key, class, time_ms(last_use), time_ms(self.tick));
            }
            if !held.sunk {
                unsunk.push((last_use, slot));
            }
            gone.push((slot, held.key, held.sunk));
            let before = held.parent.slot().and_then(|parent| self.idle_leaf(parent));
            if let Some((of, at)) = before {
                match first[of] {
                    Some(other) if other < at => {
                        self.leaves[of].insert(at);
                    }
                    Some(other) => {
                        first[of] = Some(at);
                        self.leaves[of].insert(other);
                    }
                    None if self.leaves[of].first().is_some_and(|other| *other < at) => {
                        self.leaves[of].insert(at);
                    }
                    None => first[of] = Some(at),
                }
            }
            if first[class].is_none() {
                first[class] = self.leaves[class].pop_first();
            }
        }
        for (class, at) in first.into_iter().enumerate() {
            self.leaves[class].extend(at);
        }
        self.forget_unsunk(unsunk);
        // Each is a walk to memory that no cache has: one after the other they would be waited for in turn.
        for &(slot, key, _) in &gone {
            self.unlist(slot, key);
        }
        gone
    }

    /// The class of which the first idle leaf is worth least.
    fn least(&self, first: &[Option<(u64, SlotIndex)>; CLASSES]) -> Option<usize> {
        let ranked = |(class, at): (usize, &Option<(u64, SlotIndex)>)| {
            let at = (*at)?;
            Some((self.worth(class, at.0), at, class))
        };
        let least = first.iter().enumerate().filter_map(ranked);
        least.min_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1))).map(|(.., class)| class)
    }

    /// Blocks that are gone are no idle blocks any more. What was unpinned together has ticks that follow one
    /// another: mostly they are the eldest, and are cut off as one.
    fn forget_unsunk(&mut self, mut gone: Vec<(u64, SlotIndex)>) {
        gone.sort_unstable();
        for run in gone.chunk_by(|one, next| next.0 - one.0 <= TICKS_BETWEEN_MAX) {
            let (Some(first), Some(last)) = (run.first(), run.last()) else { continue };
            if run.len() < CUT_MIN || self.unsunk.first() != Some(first) {
                for at in run {
                    self.unsunk.remove(at);
                }
                continue;
            }
            let later = self.unsunk.split_off(&(last.0 + 1, SlotIndex(0)));
            let mut cut = std::mem::replace(&mut self.unsunk, later);
            // No two have one tick, so that few others can be among them.
            if cut.len() > run.len() {
                cut.retain(|at| run.binary_search(at).is_err());
                self.unsunk.extend(cut);
            }
        }
    }

    /// Takes a block without children out; answers with its key.
    pub(crate) fn remove(&mut self, slot: SlotIndex) -> BlockKey {
        let key = self.unlink(slot);
        self.unlist(slot, key);
        key
    }

    fn unlist(&mut self, slot: SlotIndex, key: BlockKey) {
        let found = self.by_key.find_entry(hash(key), |other| *other == slot);
        found.expect("its key leads to it").remove();
    }

    /// Takes it out of all but the keys.
    fn unlink(&mut self, slot: SlotIndex) -> BlockKey {
        let held = self.take_row(slot);
        self.leaves[held.class()].remove(&(held.last_use, slot));
        self.unsunk.remove(&(held.last_use, slot));
        if let Some(parent) = held.parent.slot() {
            self.list_if_idle_leaf(parent);
        }
        held.key
    }

    /// Takes it out of all but the keys and the orders.
    fn take_row(&mut self, slot: SlotIndex) -> Held {
        let leaves_children =
            mutated(Mutation::ParentEvictedFirst) || mutated(Mutation::CorruptBlockLeavesChildren);
        if leaves_children {
            let children: Vec<SlotIndex> = self.children(slot).collect();
            children.into_iter().for_each(|child| self.held_mut(child).parent = Link::NONE);
        }
        let held = self.by_slot[slot.0 as usize].take().expect("the caller names an indexed slot");
        assert!(held.child == Link::NONE || leaves_children, "slot {slot} has blocks after it");
        self.namespaces.give_back(held.namespace);
        self.prefetched_unused += u64::from(self.prefetched.remove(&slot));
        if let Some(elder) = held.elder.slot() {
            self.held_mut(elder).younger = held.younger;
        }
        match (held.younger.slot(), held.parent.slot()) {
            (Some(younger), _) => self.held_mut(younger).elder = held.elder,
            (None, Some(parent)) => self.held_mut(parent).child = held.elder,
            (None, None) => {}
        }
        held
    }

    /// The block and all after it, every child before its parent.
    pub(crate) fn subtree(&self, slot: SlotIndex) -> Vec<SlotIndex> {
        let mut found = vec![slot];
        let mut next = 0;
        while next < found.len() {
            if !mutated(Mutation::CorruptBlockLeavesChildren) {
                found.extend(self.children(found[next]));
            }
            next += 1;
        }
        found.reverse();
        found
    }

    /// Slots with their blocks, in slot order.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (SlotIndex, Found)> {
        let slots = (0..self.by_slot.len() as u32).map(SlotIndex);
        slots.filter_map(|slot| Some((slot, self.entry(slot)?)))
    }

    fn children(&self, slot: SlotIndex) -> impl Iterator<Item = SlotIndex> + '_ {
        let youngest = self.held(slot).and_then(|held| held.child.slot());
        std::iter::successors(youngest, |child| self.held(*child)?.elder.slot())
    }

    pub(crate) fn is_leaf(&self, slot: SlotIndex) -> bool {
        self.held(slot).is_none_or(|held| held.child == Link::NONE)
    }

    fn list_if_idle_leaf(&mut self, slot: SlotIndex) {
        if let Some((of, at)) = self.idle_leaf(slot) {
            self.leaves[of].insert(at);
        }
    }

    /// Its class and its place there, when it is one.
    fn idle_leaf(&self, slot: SlotIndex) -> Option<(usize, (u64, SlotIndex))> {
        let is_leaf =
            |held: &Held| held.child == Link::NONE || mutated(Mutation::ParentEvictedFirst);
        let held = self.held(slot).filter(|held| held.idle && is_leaf(held))?;
        Some((held.class(), (held.last_use, slot)))
    }

    fn held(&self, slot: SlotIndex) -> Option<&Held> {
        self.by_slot.get(slot.0 as usize)?.as_ref()
    }

    fn held_mut(&mut self, slot: SlotIndex) -> &mut Held {
        self.by_slot[slot.0 as usize].as_mut().expect("the caller names an indexed slot")
    }

    /// Keys and slots agree, chains are closed and of one namespace, idle means unpinned, and
    /// `leaves` is what it should be. `pins` answers for a committed slot.
    pub(crate) fn check(&self, pins: impl Fn(SlotIndex) -> Option<u32>) -> Result<(), String> {
        let mut edges = BTreeSet::new();
        let mut linked = BTreeSet::new();
        let mut leaves: [BTreeSet<_>; CLASSES] = Default::default();
        let mut unsunk = BTreeSet::new();
        let mut indexed = 0;
        for (slot, entry) in self.iter() {
            indexed += 1;
            let mut elder = Link::NONE;
            let mut children: Vec<SlotIndex> = self.children(slot).collect();
            children.reverse();
            for child in children {
                linked.insert((slot, child));
                let held = self.held(child);
                if held.is_none_or(|held| held.elder != elder) {
                    return Err(format!("slot {child} does not link to its elder sibling"));
                }
                if let Some(elder) = elder.slot()
                    && self.held(elder).is_none_or(|held| held.younger != Link::from(child))
                {
                    return Err(format!("slot {elder} does not link to its younger sibling"));
                }
                elder = child.into();
            }
            if self.find(entry.key) != Some(slot) {
                return Err(format!("the key of slot {slot} maps to another slot"));
            }
            let Some(pins_here) = pins(slot) else {
                return Err(format!("slot {slot} is indexed but not committed"));
            };
            if let Some(parent) = entry.parent {
                edges.insert((parent, slot));
                let Some(before) = self.entry(parent) else {
                    return Err(format!("slot {slot} is indexed, but its parent is not"));
                };
                if before.namespace != entry.namespace {
                    return Err(format!("slot {slot} is in another namespace than its parent"));
                }
                if pins_here > 0 && pins(parent) == Some(0) {
                    return Err(format!("slot {slot} is pinned, but its parent is not"));
                }
            }
            let held = self.held(slot).expect("it was just listed");
            if held.idle != (pins_here == 0) {
                return Err(format!(
                    "slot {slot} has {pins_here} pins, but its idle flag is {}",
                    held.idle
                ));
            }
            if held.idle && self.is_leaf(slot) {
                leaves[held.class()].insert((held.last_use, slot));
            }
            if held.idle && !held.sunk {
                unsunk.insert((held.last_use, slot));
            }
        }
        if indexed != self.by_key.len() {
            return Err(format!("{} keys map to {indexed} slots", self.by_key.len()));
        }
        if edges != linked {
            return Err("the links differ from the parents of the blocks".to_owned());
        }
        if leaves != self.leaves || unsunk != self.unsunk {
            return Err("the eviction order differs from the idle leaves".to_owned());
        }
        Ok(())
    }
}

fn time_ms(tick: u64) -> u64 {
    tick >> TICK_BITS
}

/// Block keys are hashes already, so their first bytes serve. The table is never iterated.
pub(crate) fn hash(key: BlockKey) -> u64 {
    let [first @ .., _, _, _, _, _, _, _, _] = key.0;
    u64::from_le_bytes(first)
}

/// The same for a map. It is never iterated.
#[derive(Debug, Default)]
pub(crate) struct KeyHasher(u64);

impl Hasher for KeyHasher {
    fn write(&mut self, bytes: &[u8]) {
        // The slice's length prefix comes through `write_length_prefix` or `write_usize`, not here.
        if let Some(first) = bytes.first_chunk::<8>() {
            self.0 ^= u64::from_le_bytes(*first);
        }
    }

    fn write_usize(&mut self, _length: usize) {}

    fn finish(&self) -> u64 {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(n: u8) -> BlockKey {
        BlockKey([n; 16])
    }

    fn index(chains: &[&[u8]]) -> Index {
        index_of(Eviction::Lru, chains)
    }

    fn index_of(eviction: Eviction, chains: &[&[u8]]) -> Index {
        let mut index = Index::new(16, eviction);
        for chain in chains {
            let mut parent = None;
            for &n in *chain {
                let slot = SlotIndex(u32::from(n));
                if index.find(key(n)).is_none() {
                    let namespace = Namespace([0; 16]);
                    let entry = Entry { key: key(n), namespace, parent, checksum: 0 };
                    index.insert(slot, entry, false);
                }
                parent = Some(slot);
            }
        }
        index
    }

    fn drain(index: &mut Index) -> Vec<u32> {
        let mut out = Vec::new();
        while let Some(slot) = index.next_out() {
            index.remove(slot);
            out.push(slot.0);
        }
        out
    }

    #[test]
    fn leaves_go_first_and_then_what_was_used_longest_ago() {
        let check = |idle: &[u32], busy: &[u32], want: &[u32]| {
            let mut index = index(&[&[1, 2, 3], &[1, 4]]);
            idle.iter().for_each(|&slot| index.set_idle(SlotIndex(slot)));
            busy.iter().for_each(|&slot| index.set_busy(SlotIndex(slot)));
            assert_eq!(drain(&mut index), want, "idle {idle:?}, busy {busy:?}");
        };
        check(&[], &[], &[]);
        check(&[3], &[], &[3]);
        check(&[3, 2, 1], &[], &[3, 2]);
        check(&[3, 2, 4, 1], &[], &[3, 2, 4, 1]);
        check(&[4, 3, 2, 1], &[], &[4, 3, 2, 1]);
        check(&[1, 2, 3, 4], &[], &[3, 2, 4, 1]);
        check(&[4, 3, 2, 1], &[1], &[4, 3, 2]);
        check(&[4, 3, 2, 1], &[4, 1], &[3, 2]);
    }

    /// One block is asked for after 4 others and then after 12, in turn; the others never come back. There is
    /// room for 8.
    #[test]
    fn what_comes_back_outlives_what_never_does() {
        let hits = |eviction: Eviction| {
            let mut index = Index::new(8, eviction);
            let mut free: Vec<SlotIndex> = (0..8).map(SlotIndex).collect();
            let mut hits = 0;
            for n in 0..20_000_u32 {
                index.set_now(u64::from(n) * 1_000);
                let asked = if n % 16 == 0 || n % 16 == 4 { 0 } else { n };
                let key = BlockKey(u128::from(asked).to_le_bytes());
                let slot = index.find(key);
                if let Some(slot) = slot {
                    hits += 1;
                    index.set_busy(slot);
                }
                let slot = slot.unwrap_or_else(|| {
                    let slot = free
                        .pop()
                        .unwrap_or_else(|| index.evict(1).first().expect("all are idle").0);
                    let namespace = Namespace([0; 16]);
                    let entry = Entry { key, namespace, parent: None, checksum: 0 };
                    index.insert(slot, entry, false);
                    slot
                });
                index.set_idle(slot);
            }
            hits
        };
        assert_eq!(hits(Eviction::Lru), 1_250);
        let learnt = hits(Eviction::HitDensity);
        assert!(learnt > 2_000, "{learnt} of 2,500");
    }

    #[test]
    fn a_block_that_was_pinned_without_use_keeps_its_place_and_a_new_one_gets_the_last() {
        let mut index = index(&[&[1], &[2], &[3]]);
        index.set_idle(SlotIndex(1));
        index.set_idle(SlotIndex(2));
        index.set_busy(SlotIndex(1));
        index.set_idle_as_before(SlotIndex(1));
        index.set_idle_as_before(SlotIndex(3));
        assert_eq!(drain(&mut index), [1, 2, 3]);
    }

    /// Trees of 200 blocks, most of them idle, used at many times, some again; by some rule that depends on a seed.
    fn wood(eviction: Eviction, seed: u64) -> Index {
        let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        let mut below = |bound: u64| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 20) % bound
        };
        let mut index = Index::new(200, eviction);
        for n in 0..200_u32 {
            let key = BlockKey(u128::from(n).to_le_bytes());
            // Mostly chains.
            let parent = match below(8) {
                0 => None,
                1 => u32::try_from(below(u64::from(n) + 1)).ok().filter(|before| *before < n),
                _ => n.checked_sub(1),
            };
            let (namespace, parent) = (Namespace([0; 16]), parent.map(SlotIndex));
            index.insert(
                SlotIndex(n),
                Entry { key, namespace, parent, checksum: 0 },
                below(3) == 0,
            );
        }
        let mut now_ms = 0;
        for _ in 0..2 + below(3) {
            for slot in (0..200).map(SlotIndex) {
                // Many at one time, as when a share is released.
                now_ms += if below(60) == 0 { below(30_000) } else { 0 };
                index.set_now(now_ms);
                let is_idle = index.held(slot).is_some_and(|held| held.idle);
                match below(3) {
                    0 if is_idle => index.set_busy(slot),
                    1 | 2 if !is_idle => index.set_idle(slot),
                    _ => {}
                }
            }
        }
        index
    }

    fn evict_one_by_one(index: &mut Index, blocks: usize) -> Vec<u32> {
        let mut gone = Vec::new();
        while gone.len() < blocks
            && let Some(slot) = index.next_out()
        {
            let held = index.held(slot).expect("it goes next");
            let (key, of, last_use) = (held.key, held.class(), held.last_use);
            if let Some(density) = &mut index.density {
                density.evicted(key, of, time_ms(last_use), time_ms(index.tick));
            }
            index.remove(slot);
            gone.push(slot.0);
        }
        gone
    }

    #[test]
    fn many_go_in_the_order_in_which_they_would_go_one_by_one() {
        for (eviction, seed) in [Eviction::Lru, Eviction::HitDensity]
            .into_iter()
            .flat_map(|eviction| (0..300).map(move |seed| (eviction, seed)))
        {
            let (mut at_once, mut singly) = (wood(eviction, seed), wood(eviction, seed));
            for blocks in [0, 1, 37, 5, 200] {
                let gone = at_once.evict(blocks);
                let gone: Vec<u32> = gone.into_iter().map(|(slot, ..)| slot.0).collect();
                let want = evict_one_by_one(&mut singly, blocks as usize);
                assert_eq!(gone, want, "{eviction:?}, seed {seed}");
                assert_eq!(at_once.leaves, singly.leaves, "{eviction:?}, seed {seed}");
                assert_eq!(at_once.unsunk, singly.unsunk, "{eviction:?}, seed {seed}");
                assert_eq!(at_once.by_key.len(), singly.by_key.len());
            }
        }
    }

    #[test]
    fn a_prefix_ends_where_the_chain_or_the_namespace_differs() {
        let index = index(&[&[1, 2, 3], &[1, 4]]);
        let check = |namespace: Option<u8>, keys: &[u8], want: &[u32]| {
            let keys: Vec<BlockKey> = keys.iter().map(|&n| key(n)).collect();
            let namespace = namespace.map(|n| Namespace([n; 16]));
            let got: Vec<u32> = index.prefix(namespace, &keys).iter().map(|slot| slot.0).collect();
            assert_eq!(got, want, "{namespace:?} {keys:?}");
        };
        check(Some(0), &[1, 2, 3], &[1, 2, 3]);
        check(None, &[1, 4], &[1, 4]);
        check(None, &[1, 5, 3], &[1]);
        check(None, &[2, 3], &[]);
        check(None, &[1, 3], &[1]);
        check(None, &[1, 1], &[1]);
        check(None, &[1, 4, 3], &[1, 4]);
        check(Some(9), &[1, 2, 3], &[]);
        check(Some(0), &[], &[]);
    }

    #[test]
    fn a_subtree_lists_children_before_parents() {
        let index = index(&[&[1, 2, 3], &[1, 4]]);
        let subtree = |slot| index.subtree(SlotIndex(slot)).iter().map(|s| s.0).collect::<Vec<_>>();
        assert_eq!(subtree(2), [3, 2]);
        assert_eq!(subtree(1), [3, 2, 4, 1]);
        assert_eq!(subtree(4), [4]);
    }
}
