//! Which slot holds which key, how blocks follow one another, and which block goes next.
//!
//! Owned by the cache. It must hold that a block's parent is indexed while the block is, and that
//! `lru` has exactly the idle (unpinned) blocks without a child, so that whoever evicts from its
//! old end never leaves a block behind whose parent is gone. Eviction costs a logarithm of the
//! slots, not a scan. `unsunk` has the idle blocks, leaves or not, that lie nowhere else.

use std::collections::{BTreeSet, HashMap};
use std::hash::{BuildHasherDefault, Hasher};

use kvasir_proto::{BlockKey, Namespace, SlotIndex};

/// A committed block that can be found.
#[derive(Debug)]
pub(crate) struct Entry {
    pub(crate) key: BlockKey,
    pub(crate) namespace: Namespace,
    /// The block before it; `None` for the first of its chain.
    pub(crate) parent: Option<SlotIndex>,
    pub(crate) checksums: Box<[u64]>,
}

#[derive(Debug)]
struct Held {
    entry: Entry,
    /// Unpinned since the tick `last_use`.
    idle: bool,
    /// The SSD has it too.
    sunk: bool,
    last_use: u64,
}

#[derive(Debug)]
pub(crate) struct Index {
    by_key: HashMap<BlockKey, SlotIndex, BuildHasherDefault<KeyHasher>>,
    by_slot: Vec<Option<Held>>,
    /// (parent, child).
    edges: BTreeSet<(SlotIndex, SlotIndex)>,
    /// (last use, slot) of idle leaves.
    lru: BTreeSet<(u64, SlotIndex)>,
    /// (last use, slot) of idle blocks that the SSD has not.
    unsunk: BTreeSet<(u64, SlotIndex)>,
    tick: u64,
}

impl Index {
    pub(crate) fn new(slots: u32) -> Self {
        Index {
            by_key: HashMap::default(),
            by_slot: (0..slots).map(|_| None).collect(),
            edges: BTreeSet::new(),
            lru: BTreeSet::new(),
            unsunk: BTreeSet::new(),
            tick: 0,
        }
    }

    pub(crate) fn find(&self, key: BlockKey) -> Option<SlotIndex> {
        self.by_key.get(&key).copied()
    }

    pub(crate) fn entry(&self, slot: SlotIndex) -> Option<&Entry> {
        Some(&self.held(slot)?.entry)
    }

    /// The slots of the longest prefix of a chain that is here. A key that is here in another
    /// namespace, or after another block, is not the one asked for.
    pub(crate) fn prefix(&self, namespace: Option<Namespace>, keys: &[BlockKey]) -> Vec<SlotIndex> {
        let mut slots: Vec<SlotIndex> = Vec::new();
        for &key in keys {
            let Some(slot) = self.find(key) else { break };
            let Some(entry) = self.entry(slot) else { break };
            let same_namespace = namespace.is_none_or(|namespace| namespace == entry.namespace);
            if !same_namespace || entry.parent != slots.last().copied() {
                break;
            }
            slots.push(slot);
        }
        slots
    }

    /// Makes a slot findable. It counts as pinned.
    pub(crate) fn insert(&mut self, slot: SlotIndex, entry: Entry, sunk: bool) {
        if let Some(parent) = entry.parent {
            let before = self.held(parent);
            let before = before.unwrap_or_else(|| panic!("no parent of slot {slot} is indexed"));
            // It need not be pinned when its child comes from the SSD, and is no leaf any more.
            let at = (before.last_use, parent);
            self.lru.remove(&at);
            self.edges.insert((parent, slot));
        }
        let before = self.by_key.insert(entry.key, slot);
        assert!(before.is_none(), "the key of slot {slot} is indexed already");
        self.by_slot[slot.0 as usize] = Some(Held { entry, idle: false, sunk, last_use: 0 });
    }

    /// The slot got its first pin.
    pub(crate) fn set_busy(&mut self, slot: SlotIndex) {
        let held = self.held_mut(slot);
        held.idle = false;
        let at = (held.last_use, slot);
        self.lru.remove(&at);
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
        let parent = |slot: &SlotIndex| self.held(*slot).and_then(|held| held.entry.parent);
        let mut path: Vec<SlotIndex> = std::iter::successors(Some(slot), parent).collect();
        path.reverse();
        path
    }

    /// The slot lost its last pin.
    pub(crate) fn set_idle(&mut self, slot: SlotIndex) {
        self.tick += 1;
        self.held_mut(slot).last_use = self.tick;
        self.set_idle_as_before(slot);
    }

    /// The same, and it keeps its place in the order.
    pub(crate) fn set_idle_as_before(&mut self, slot: SlotIndex) {
        let held = self.held_mut(slot);
        held.idle = true;
        let (sunk, at) = (held.sunk, (held.last_use, slot));
        if !sunk {
            self.unsunk.insert(at);
        }
        self.list_if_idle_leaf(slot);
    }

    /// The idle leaf that was used longest ago.
    pub(crate) fn eldest(&self) -> Option<SlotIndex> {
        self.lru.first().map(|&(_, slot)| slot)
    }

    /// Takes a block without children out; answers with its key.
    pub(crate) fn remove(&mut self, slot: SlotIndex) -> BlockKey {
        assert!(self.is_leaf(slot), "slot {slot} has blocks after it");
        let held = self.by_slot[slot.0 as usize].take().expect("the caller names an indexed slot");
        self.lru.remove(&(held.last_use, slot));
        self.unsunk.remove(&(held.last_use, slot));
        self.by_key.remove(&held.entry.key);
        if let Some(parent) = held.entry.parent {
            self.edges.remove(&(parent, slot));
            self.list_if_idle_leaf(parent);
        }
        held.entry.key
    }

    /// The block and all after it, every child before its parent.
    pub(crate) fn subtree(&self, slot: SlotIndex) -> Vec<SlotIndex> {
        let mut found = vec![slot];
        let mut next = 0;
        while next < found.len() {
            found.extend(self.children(found[next]));
            next += 1;
        }
        found.reverse();
        found
    }

    /// Slots with their blocks, in slot order.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (SlotIndex, &Entry)> {
        let entry = |(slot, held): (u32, &'_ Option<Held>)| held.as_ref().map(|_| SlotIndex(slot));
        (0..)
            .zip(&self.by_slot)
            .filter_map(entry)
            .filter_map(|slot| Some((slot, self.entry(slot)?)))
    }

    fn children(&self, slot: SlotIndex) -> impl Iterator<Item = SlotIndex> + '_ {
        self.edges
            .range((slot, SlotIndex(0))..=(slot, SlotIndex(u32::MAX)))
            .map(|&(_, child)| child)
    }

    fn is_leaf(&self, slot: SlotIndex) -> bool {
        self.children(slot).next().is_none()
    }

    fn list_if_idle_leaf(&mut self, slot: SlotIndex) {
        let Some(held) = self.held(slot) else { return };
        let at = (held.last_use, slot);
        if held.idle && self.is_leaf(slot) {
            self.lru.insert(at);
        }
    }

    fn held(&self, slot: SlotIndex) -> Option<&Held> {
        self.by_slot.get(slot.0 as usize)?.as_ref()
    }

    fn held_mut(&mut self, slot: SlotIndex) -> &mut Held {
        self.by_slot[slot.0 as usize].as_mut().expect("the caller names an indexed slot")
    }

    /// Keys and slots agree, chains are closed and of one namespace, idle means unpinned, and
    /// `lru` is what it should be. `pins` answers for a committed slot.
    pub(crate) fn check(&self, pins: impl Fn(SlotIndex) -> Option<u32>) -> Result<(), String> {
        let mut edges = BTreeSet::new();
        let mut lru = BTreeSet::new();
        let mut unsunk = BTreeSet::new();
        let mut indexed = 0;
        for (slot, entry) in self.iter() {
            indexed += 1;
            if self.find(entry.key) != Some(slot) {
                return Err(format!("the key of slot {slot} leads elsewhere"));
            }
            let Some(pins_here) = pins(slot) else {
                return Err(format!("slot {slot} is indexed and not committed"));
            };
            if let Some(parent) = entry.parent {
                edges.insert((parent, slot));
                let Some(before) = self.entry(parent) else {
                    return Err(format!("slot {slot} is indexed and its parent is not"));
                };
                if before.namespace != entry.namespace {
                    return Err(format!("slot {slot} is in another namespace than its parent"));
                }
                if pins_here > 0 && pins(parent) == Some(0) {
                    return Err(format!("slot {slot} is pinned and its parent is not"));
                }
            }
            let held = self.held(slot).expect("it was just listed");
            if held.idle != (pins_here == 0) {
                return Err(format!("slot {slot} has {pins_here} pins and idle is {}", held.idle));
            }
            if held.idle && self.is_leaf(slot) {
                lru.insert((held.last_use, slot));
            }
            if held.idle && !held.sunk {
                unsunk.insert((held.last_use, slot));
            }
        }
        if indexed != self.by_key.len() {
            return Err(format!("{} keys name {indexed} slots", self.by_key.len()));
        }
        if edges != self.edges {
            return Err("the edges are not those of the blocks".to_owned());
        }
        if lru != self.lru || unsunk != self.unsunk {
            return Err("the eviction order is not that of the idle leaves".to_owned());
        }
        Ok(())
    }
}

/// Block keys are hashes already, so their first bytes serve. The map is never iterated.
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
        let mut index = Index::new(16);
        for chain in chains {
            let mut parent = None;
            for &n in *chain {
                let slot = SlotIndex(u32::from(n));
                if index.find(key(n)).is_none() {
                    let namespace = Namespace([0; 16]);
                    let checksums = Box::default();
                    index.insert(slot, Entry { key: key(n), namespace, parent, checksums }, false);
                }
                parent = Some(slot);
            }
        }
        index
    }

    fn drain(index: &mut Index) -> Vec<u32> {
        let mut out = Vec::new();
        while let Some(slot) = index.eldest() {
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
        assert_eq!(subtree(1), [3, 4, 2, 1]);
        assert_eq!(subtree(4), [4]);
    }
}
