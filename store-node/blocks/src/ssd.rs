//! What lies on the SSD: which blocks, how they follow one another, and which goes next.
//!
//! Owned by the cache, beside the index of the slots; a block may be in either or in both. It must
//! hold that a block's parent is here while the block is, so that what a restart finds can be used
//! from its first block on; that `order` has exactly the blocks that may go (of the normal class,
//! without a child here, not being read); and that bytes and quotas are what the blocks add up to.

use std::collections::{BTreeMap, BTreeSet};
use std::num::NonZeroU64;

use hashbrown::HashTable;
use kvasir_proto::{BlockKey, Class, Namespace, Tenant};

use crate::compact::Interned;
use crate::index::hash;

/// A block on the SSD, or in the object store, as a shell knows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SsdBlock {
    pub key: BlockKey,
    pub namespace: Namespace,
    pub parent: Option<BlockKey>,
    pub class: Class,
    /// Which layout its bytes have.
    pub layout: u64,
    /// That its extent takes.
    pub bytes: u64,
}

/// A number for each block, used again when it is gone.
type Id = u32;
const NONE: Id = Id::MAX;

/// What many blocks have in common.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Kind {
    namespace: Namespace,
    layout: u64,
    bytes: u64,
}

/// There may be many millions.
#[derive(Debug)]
struct Held {
    key: BlockKey,
    /// A tick.
    last_use: NonZeroU64,
    /// Numbers of its kind and its class.
    kind: u32,
    class: u32,
    /// Ids: the parent, the first child, and neighbours among the children of one parent.
    parent: Id,
    child: Id,
    next: Id,
    before: Id,
    /// Reads and writes of its extent under way.
    busy: u32,
}

const _: () = assert!(size_of::<Option<Held>>() <= 56);

#[derive(Debug)]
pub(crate) struct Ssd {
    /// Ids, by the keys of their blocks.
    by_key: HashTable<Id>,
    held: Vec<Option<Held>>,
    kinds: Interned<Kind>,
    classes: Interned<Class>,
    free: Vec<Id>,
    /// (last use, id).
    order: BTreeSet<(NonZeroU64, Id)>,
    /// (until, id) of context blocks.
    untils: BTreeSet<(u64, Id)>,
    tenants: BTreeMap<Tenant, u64>,
    bytes: u64,
    context_bytes: u64,
    tick: NonZeroU64,
}

impl Default for Ssd {
    fn default() -> Self {
        Ssd {
            by_key: HashTable::new(),
            held: Vec::new(),
            kinds: Interned::new(),
            classes: Interned::new(),
            free: Vec::new(),
            order: BTreeSet::new(),
            untils: BTreeSet::new(),
            tenants: BTreeMap::new(),
            bytes: 0,
            context_bytes: 0,
            tick: NonZeroU64::MIN,
        }
    }
}

impl Ssd {
    pub(crate) fn len(&self) -> usize {
        self.by_key.len()
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    pub(crate) fn context_bytes(&self) -> u64 {
        self.context_bytes
    }

    pub(crate) fn context_blocks(&self) -> usize {
        self.untils.len()
    }

    pub(crate) fn tenant_bytes(&self, tenant: Tenant) -> u64 {
        self.tenants.get(&tenant).copied().unwrap_or(0)
    }

    /// Those of the context class.
    pub(crate) fn kept(&self) -> impl Iterator<Item = SsdBlock> + '_ {
        self.untils.iter().map(|&(_, id)| self.block(self.at(id)))
    }

    pub(crate) fn contains(&self, key: BlockKey) -> bool {
        self.find(key).is_some()
    }

    pub(crate) fn get(&self, key: BlockKey) -> Option<SsdBlock> {
        self.find(key).map(|id| self.block(self.at(id)))
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = SsdBlock> + '_ {
        self.held.iter().flatten().map(|held| self.block(held))
    }

    fn block(&self, held: &Held) -> SsdBlock {
        let Kind { namespace, layout, bytes } = self.kinds.get(held.kind);
        SsdBlock {
            key: held.key,
            namespace,
            parent: (held.parent != NONE).then(|| self.at(held.parent).key),
            class: self.classes.get(held.class),
            layout,
            bytes,
        }
    }

    /// Numbers of blocks are below this.
    pub(crate) fn ids(&self) -> u32 {
        self.held.len() as Id
    }

    pub(crate) fn at_id(&self, id: u32) -> Option<SsdBlock> {
        Some(self.block(self.held.get(id as usize)?.as_ref()?))
    }

    /// It is here, nothing after it is, nobody reads it, and it is kept for nobody.
    pub(crate) fn can_go(&self, key: BlockKey) -> bool {
        self.find(key).is_some_and(|id| self.may_go(self.at(id)))
    }

    /// How many of these keys follow one another here, after `parent`, in this namespace and layout.
    pub(crate) fn prefix(
        &self,
        namespace: Namespace,
        layout: u64,
        mut parent: Option<BlockKey>,
        keys: &[BlockKey],
    ) -> usize {
        let follows = |key: &&BlockKey| {
            let fits = self.get(**key).is_some_and(|block| {
                block.namespace == namespace && block.layout == layout && block.parent == parent
            });
            parent = Some(**key);
            fits
        };
        keys.iter().take_while(follows).count()
    }

    /// A block's extent can be relied on. A block that is here already takes the class of the newer
    /// extent. False, and nothing happens, when its parent is not here.
    pub(crate) fn insert(&mut self, block: SsdBlock) -> bool {
        if let Some(id) = self.find(block.key) {
            self.set_class(id, block.class);
            return true;
        }
        let parent = match block.parent.map(|parent| self.find(parent)) {
            Some(None) => return false,
            Some(Some(parent)) => parent,
            None => NONE,
        };
        let SsdBlock { key, namespace, class, layout, bytes, .. } = block;
        let mut held = Held {
            key,
            kind: self.kinds.take(Kind { namespace, layout, bytes }),
            class: self.classes.take(Class::Normal),
            parent,
            child: NONE,
            next: NONE,
            before: NONE,
            last_use: self.next_tick(),
            busy: 0,
        };
        let id = self.free.pop().unwrap_or_else(|| {
            self.held.push(None);
            (self.held.len() - 1) as Id
        });
        if parent != NONE {
            held.next = self.at(parent).child;
            self.unlist(parent);
            self.at_mut(parent).child = id;
            if held.next != NONE {
                self.at_mut(held.next).before = id;
            }
        }
        self.held[id as usize] = Some(held);
        let rows = &self.held;
        let hash_of = |id: &Id| rows[*id as usize].as_ref().map_or(0, |held| hash(held.key));
        self.by_key.insert_unique(hash(key), id, hash_of);
        self.bytes += bytes;
        self.list(id);
        self.set_class(id, class);
        true
    }

    /// Its extent is used from now on, and must stay.
    pub(crate) fn begin_use(&mut self, key: BlockKey) {
        let Some(id) = self.find(key) else { return };
        self.unlist(id);
        self.at_mut(id).busy += 1;
    }

    /// One use has ended; it was a hit. The block may have gone meanwhile.
    pub(crate) fn end_use(&mut self, key: BlockKey) {
        let Some(id) = self.find(key) else { return };
        let tick = self.next_tick();
        // A block that went and came back meanwhile is listed.
        self.unlist(id);
        let held = self.at_mut(id);
        held.busy = held.busy.saturating_sub(1);
        held.last_use = tick;
        self.list(id);
    }

    /// It is wanted, or what follows it.
    pub(crate) fn touch(&mut self, key: BlockKey) {
        self.begin_use(key);
        self.end_use(key);
    }

    /// The block that may go and was used longest ago.
    pub(crate) fn eldest(&self) -> Option<BlockKey> {
        self.order.first().map(|&(_, id)| self.at(id).key)
    }

    /// Takes out a block without children.
    pub(crate) fn remove(&mut self, key: BlockKey) {
        let Some(id) = self.find(key) else { return };
        assert_eq!(self.at(id).child, NONE, "block {key:?} has blocks after it on the SSD");
        self.set_class(id, Class::Normal);
        self.unlist(id);
        let found = self.by_key.find_entry(hash(key), |other| *other == id);
        found.expect("it was just found").remove();
        let held = self.held[id as usize].take().expect("it was just found");
        self.bytes -= self.kinds.get(held.kind).bytes;
        self.kinds.give_back(held.kind);
        self.classes.give_back(held.class);
        if held.before != NONE {
            self.at_mut(held.before).next = held.next;
        } else if held.parent != NONE {
            self.at_mut(held.parent).child = held.next;
        }
        if held.next != NONE {
            self.at_mut(held.next).before = held.before;
        }
        if held.parent != NONE {
            self.list(held.parent);
        }
        self.free.push(id);
    }

    /// A block and all after it, every child before its parent; nothing when it is not here.
    pub(crate) fn subtree(&self, key: BlockKey) -> Vec<BlockKey> {
        let mut ids: Vec<Id> = self.find(key).into_iter().collect();
        let mut next = 0;
        while next < ids.len() {
            let mut child = self.at(ids[next]).child;
            while child != NONE {
                ids.push(child);
                child = self.at(child).next;
            }
            next += 1;
        }
        ids.iter().rev().map(|id| self.at(*id).key).collect()
    }

    /// Context blocks whose time is over become normal ones. Answers with their number.
    pub(crate) fn expire(&mut self, unix_ms: u64) -> usize {
        let mut expired = 0;
        while let Some(&(until_unix_ms, id)) = self.untils.first()
            && until_unix_ms <= unix_ms
        {
            self.set_class(id, Class::Normal);
            expired += 1;
        }
        expired
    }

    fn set_class(&mut self, id: Id, class: Class) {
        let block = self.block(self.at(id));
        let (bytes, former) = (block.bytes, block.class);
        if let Class::Context { tenant, until_unix_ms } = former {
            self.untils.remove(&(until_unix_ms, id));
            self.context_bytes -= bytes;
            let of = self.tenants.entry(tenant).or_insert(0);
            *of -= bytes;
            if *of == 0 {
                self.tenants.remove(&tenant);
            }
        }
        if let Class::Context { tenant, until_unix_ms } = class {
            self.untils.insert((until_unix_ms, id));
            self.context_bytes += bytes;
            *self.tenants.entry(tenant).or_insert(0) += bytes;
        }
        self.unlist(id);
        let class = self.classes.take(class);
        let former = std::mem::replace(&mut self.at_mut(id).class, class);
        self.classes.give_back(former);
        self.list(id);
    }

    fn may_go(&self, held: &Held) -> bool {
        held.child == NONE && held.busy == 0 && self.classes.get(held.class) == Class::Normal
    }

    fn next_tick(&mut self) -> NonZeroU64 {
        self.tick = self.tick.saturating_add(1);
        self.tick
    }

    fn list(&mut self, id: Id) {
        let held = self.at(id);
        if self.may_go(held) {
            let at = (held.last_use, id);
            self.order.insert(at);
        }
    }

    fn unlist(&mut self, id: Id) {
        let at = (self.at(id).last_use, id);
        self.order.remove(&at);
    }

    fn find(&self, key: BlockKey) -> Option<Id> {
        self.by_key.find(hash(key), |id| self.at(*id).key == key).copied()
    }

    fn at(&self, id: Id) -> &Held {
        self.held[id as usize].as_ref().expect("ids name blocks that are here")
    }

    fn at_mut(&mut self, id: Id) -> &mut Held {
        self.held[id as usize].as_mut().expect("ids name blocks that are here")
    }

    /// What the header says must hold.
    pub(crate) fn check(&self) -> Result<(), String> {
        let (mut bytes, mut tenants, mut untils) = (0, BTreeMap::new(), BTreeSet::new());
        let mut order = BTreeSet::new();
        let mut children: BTreeMap<Id, BTreeSet<Id>> = BTreeMap::new();
        for (id, held) in (0..).zip(&self.held) {
            let Some(held) = held else { continue };
            let (key, block) = (held.key, self.block(held));
            if self.find(key) != Some(id) {
                return Err(format!("block {key:?} on the SSD is not found by its key"));
            }
            bytes += block.bytes;
            if let Class::Context { tenant, until_unix_ms } = block.class {
                untils.insert((until_unix_ms, id));
                *tenants.entry(tenant).or_insert(0) += block.bytes;
            }
            if self.may_go(held) {
                order.insert((held.last_use, id));
            }
            let parent = self.held.get(held.parent as usize);
            if held.parent != NONE && parent.is_none_or(Option::is_none) {
                return Err(format!("block {key:?} is on the SSD and its parent is not"));
            }
            if held.parent != NONE {
                children.entry(held.parent).or_default().insert(id);
            }
        }
        for (id, held) in (0..).zip(&self.held) {
            let Some(held) = held else { continue };
            let mut linked = BTreeSet::new();
            let mut child = held.child;
            while child != NONE {
                linked.insert(child);
                child = self.at(child).next;
            }
            if linked != children.remove(&id).unwrap_or_default() {
                return Err(format!("the children of {:?} on the SSD are wrong", held.key));
            }
        }
        let same = bytes == self.bytes && tenants == self.tenants && untils == self.untils;
        if !same || order != self.order {
            return Err("the sums or the order of the SSD are not those of its blocks".to_owned());
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(n: u8) -> BlockKey {
        BlockKey([n; 16])
    }

    fn block(n: u8, parent: Option<u8>, class: Class) -> SsdBlock {
        SsdBlock {
            key: key(n),
            namespace: Namespace([0; 16]),
            parent: parent.map(key),
            class,
            layout: 1,
            bytes: 10,
        }
    }

    fn context(until_unix_ms: u64) -> Class {
        Class::Context { tenant: Tenant(1), until_unix_ms }
    }

    fn ssd(chains: &[&[u8]]) -> Ssd {
        let mut ssd = Ssd::default();
        for chain in chains {
            let mut parent = None;
            for &n in *chain {
                assert!(ssd.insert(block(n, parent, Class::Normal)));
                parent = Some(n);
            }
        }
        ssd.check().expect("in order");
        ssd
    }

    fn drain(ssd: &mut Ssd) -> Vec<u8> {
        let mut out = Vec::new();
        while let Some(key) = ssd.eldest() {
            ssd.remove(key);
            ssd.check().expect("in order");
            out.push(key.0[0]);
        }
        out
    }

    #[test]
    fn leaves_go_first_and_then_what_was_used_longest_ago() {
        assert_eq!(drain(&mut ssd(&[&[1, 2, 3], &[1, 4]])), [3, 2, 4, 1]);
        let mut used = ssd(&[&[1, 2, 3], &[1, 4]]);
        used.begin_use(key(3));
        used.end_use(key(3));
        assert_eq!(drain(&mut used), [4, 3, 2, 1]);
        let mut busy = ssd(&[&[1, 2], &[3]]);
        busy.begin_use(key(2));
        assert_eq!(drain(&mut busy), [3]);
        busy.end_use(key(2));
        assert_eq!(drain(&mut busy), [2, 1]);
    }

    #[test]
    fn context_blocks_stay_until_their_time_is_over() {
        let mut ssd = ssd(&[&[1]]);
        assert!(ssd.insert(block(1, None, context(500))));
        assert!(ssd.insert(block(2, Some(1), context(400))));
        assert!(ssd.insert(block(3, Some(2), Class::Normal)));
        assert_eq!((ssd.tenant_bytes(Tenant(1)), ssd.context_bytes(), ssd.len()), (20, 20, 3));
        assert_eq!(drain(&mut ssd), [3]);
        assert_eq!(ssd.expire(399), 0);
        assert_eq!(ssd.expire(400), 1);
        assert_eq!(drain(&mut ssd), [2]);
        assert_eq!(ssd.expire(1_000), 1);
        assert_eq!(drain(&mut ssd), [1]);
        assert_eq!((ssd.bytes(), ssd.tenant_bytes(Tenant(1))), (0, 0));
    }

    #[test]
    fn a_block_without_its_parent_is_refused_and_a_subtree_is_listed_from_its_leaves() {
        let mut ssd = ssd(&[&[1, 2, 3], &[1, 4]]);
        assert!(!ssd.insert(block(9, Some(8), Class::Normal)));
        let subtree = |n| ssd.subtree(key(n)).iter().map(|key| key.0[0]).collect::<Vec<_>>();
        assert_eq!(subtree(2), [3, 2]);
        assert_eq!(subtree(1), [3, 2, 4, 1]);
        assert_eq!(subtree(9), [0; 0]);
    }

    #[test]
    fn a_prefix_ends_where_chain_namespace_or_layout_differ() {
        let ssd = ssd(&[&[1, 2, 3]]);
        let check = |namespace: u8, layout, parent: Option<u8>, keys: &[u8], want| {
            let keys: Vec<BlockKey> = keys.iter().map(|&n| key(n)).collect();
            let got = ssd.prefix(Namespace([namespace; 16]), layout, parent.map(key), &keys);
            assert_eq!(got, want, "{namespace} {layout} {parent:?} {keys:?}");
        };
        check(0, 1, None, &[1, 2, 3], 3);
        check(0, 1, Some(1), &[2, 3, 4], 2);
        check(0, 1, None, &[2], 0);
        check(0, 1, None, &[1, 3], 1);
        check(0, 2, None, &[1], 0);
        check(9, 1, None, &[1], 0);
    }
}
