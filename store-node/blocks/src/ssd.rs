//! What lies on the SSD: which blocks, how they follow one another, and which goes next.
//!
//! Owned by the cache, beside the index of the slots; a block may be in either or in both. It must
//! hold that a block's parent is here while the block is, so that what a restart finds can be used
//! from its first block on; that a block is of the context class as long as the latest of its own mark
//! and those of the blocks after it, and of the normal class when there is none; that `order` has exactly
//! the blocks that may go (of the normal class, without a child here, not being read); and that bytes and
//! quotas are what the blocks add up to.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::num::NonZeroU64;

use hashbrown::HashTable;
use kvasir_mutation::{Mutation, mutated};
use kvasir_proto::{BlockKey, Class, Mark, Namespace, Tenant};

use crate::compact::Interned;
use crate::copies::CopiedContext;
use crate::ends::{Ends, Named, PersistedContext, rank};
use crate::index::hash;

/// A block on the SSD, or in the object store, as a shell knows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SsdBlock {
    pub key: BlockKey,
    pub namespace: Namespace,
    pub parent: Option<BlockKey>,
    /// On the SSD it follows from the marks there, and is not heeded of a block that comes.
    pub class: Class,
    /// Of the block itself.
    pub mark: Option<Mark>,
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
    ends: Ends,
    /// Of the context class.
    context_blocks: usize,
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
            ends: Ends::default(),
            context_blocks: 0,
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
        self.context_blocks
    }

    pub(crate) fn tenant_bytes(&self, tenant: Tenant) -> u64 {
        self.tenants.get(&tenant).copied().unwrap_or(0)
    }

    /// Those of the context class.
    pub(crate) fn kept(&self) -> Vec<SsdBlock> {
        let mut seen = HashSet::new();
        for end in self.ends.ids() {
            let mut id = end;
            while id != NONE && seen.insert(id) {
                id = self.at(id).parent;
            }
        }
        let mut ids: Vec<Id> = seen.into_iter().collect();
        ids.sort_unstable();
        ids.into_iter().map(|id| self.block_at(id)).collect()
    }

    /// Those that are marked.
    pub(crate) fn ends(&self) -> impl Iterator<Item = SsdBlock> + '_ {
        self.ends.ids().map(|id| self.block_at(id))
    }

    /// Contexts that are to be kept on other nodes too, in the order of namespace and last key.
    pub(crate) fn copied(&self) -> Vec<CopiedContext> {
        self.ends.copied()
    }

    /// A tenant's contexts in the order of namespace and last key, after one of them.
    pub(crate) fn contexts(
        &self,
        tenant: Tenant,
        after: Option<(Namespace, BlockKey)>,
    ) -> impl Iterator<Item = PersistedContext> + '_ {
        self.ends.contexts(tenant, after)
    }

    /// The classes of the blocks after one.
    pub(crate) fn classes_after(&self, key: BlockKey) -> impl Iterator<Item = Class> + '_ {
        let first = self.find(key).map_or(NONE, |id| self.at(id).child);
        self.siblings(first).map(|id| self.classes.get(self.at(id).class))
    }

    /// From the first of its chain to this block; none when it is not here.
    pub(crate) fn chain(&self, key: BlockKey) -> Vec<BlockKey> {
        let mut id = self.find(key).unwrap_or(NONE);
        let mut keys = Vec::new();
        while id != NONE {
            keys.push(self.at(id).key);
            id = self.at(id).parent;
        }
        keys.reverse();
        keys
    }

    pub(crate) fn contains(&self, key: BlockKey) -> bool {
        self.find(key).is_some()
    }

    pub(crate) fn get(&self, key: BlockKey) -> Option<SsdBlock> {
        self.find(key).map(|id| self.block_at(id))
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = SsdBlock> + '_ {
        (0..self.ids()).filter_map(|id| self.at_id(id))
    }

    fn block_at(&self, id: Id) -> SsdBlock {
        let held = self.at(id);
        let Kind { namespace, layout, bytes } = self.kinds.get(held.kind);
        SsdBlock {
            key: held.key,
            namespace,
            parent: (held.parent != NONE).then(|| self.at(held.parent).key),
            class: self.classes.get(held.class),
            mark: self.ends.get(id).map(|(mark, _)| *mark),
            layout,
            bytes,
        }
    }

    /// Numbers of blocks are below this.
    pub(crate) fn ids(&self) -> u32 {
        self.held.len() as Id
    }

    pub(crate) fn at_id(&self, id: u32) -> Option<SsdBlock> {
        self.held.get(id as usize)?.as_ref()?;
        Some(self.block_at(id))
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
                (block.namespace == namespace || mutated(Mutation::SsdNamespaceIgnored))
                    && block.layout == layout
                    && (block.parent == parent || mutated(Mutation::SsdParentIgnored))
            });
            parent = Some(**key);
            fits
        };
        keys.iter().take_while(follows).count()
    }

    /// A block's extent can be relied on. A block that is here already takes what the newer extent says. False, and
    /// nothing happens, when its parent is not here.
    pub(crate) fn insert(&mut self, block: SsdBlock) -> bool {
        if let Some(id) = self.find(block.key) {
            let SsdBlock { namespace, layout, bytes, .. } = block;
            self.set_kind(id, Kind { namespace, layout, bytes });
            self.set_mark(id, block.mark);
            return true;
        }
        let parent = match block.parent.map(|parent| self.find(parent)) {
            Some(None) => return false,
            Some(Some(parent)) => parent,
            None => NONE,
        };
        let SsdBlock { key, namespace, mark, layout, bytes, .. } = block;
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
        self.set_mark(id, mark);
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
        self.ends.forget(id);
        self.derive(id);
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
            ids.extend(self.siblings(self.at(ids[next]).child));
            next += 1;
        }
        ids.iter().rev().map(|id| self.at(*id).key).collect()
    }

    /// Marks whose time is over are none any more. Answers with the number of blocks that became normal ones.
    pub(crate) fn expire(&mut self, unix_ms: u64) -> usize {
        let before = self.context_blocks;
        while let Some(id) = self.ends.next_over(unix_ms) {
            self.set_mark(id, None);
        }
        before - self.context_blocks
    }

    /// A mark is being written to a block, or to one that will follow it: what is before it counts as kept
    /// from now on.
    pub(crate) fn begin_mark(&mut self, key: BlockKey, keep: u64, mark: Mark) {
        let Some(id) = self.find(key) else { return };
        self.ends.add_coming(id, keep, mark);
        self.derive(id);
    }

    /// What [`Self::begin_mark`] has begun is over, well or not.
    pub(crate) fn end_mark(&mut self, key: BlockKey, keep: u64) {
        let Some(id) = self.find(key) else { return };
        self.ends.remove_coming(id, keep);
        self.derive(id);
    }

    fn set_mark(&mut self, id: Id, mark: Option<Mark>) {
        match mark {
            Some(mark) => self.ends.set(id, mark, self.named(id)),
            None => self.ends.remove(id),
        }
        self.derive(id);
    }

    fn set_kind(&mut self, id: Id, kind: Kind) {
        let former = self.kinds.get(self.at(id).kind);
        if former == kind {
            return;
        }
        let replaced = |sum: u64| sum - former.bytes + kind.bytes;
        self.bytes = replaced(self.bytes);
        if let Class::Context { tenant, .. } = self.classes.get(self.at(id).class) {
            self.context_bytes = replaced(self.context_bytes);
            self.tenants.entry(tenant).and_modify(|bytes| *bytes = replaced(*bytes));
        }
        let number = self.kinds.take(kind);
        let former = std::mem::replace(&mut self.at_mut(id).kind, number);
        self.kinds.give_back(former);
    }

    fn named(&self, id: Id) -> Named {
        let held = self.at(id);
        // Mostly the one before it is marked too, or none is.
        let (mut blocks, mut before) = (1, held.parent);
        while before != NONE {
            if let Some((_, named)) = self.ends.get(before) {
                blocks += named.blocks;
                break;
            }
            blocks += 1;
            before = self.at(before).parent;
        }
        Named { namespace: self.kinds.get(held.kind).namespace, key: held.key, blocks }
    }

    /// The marks of a block have changed: gives it and those before it the class that follows.
    fn derive(&mut self, id: Id) {
        let (mut id, mut derived) = (id, self.derived(id));
        loop {
            let former = self.classes.get(self.at(id).class);
            if former == derived {
                return;
            }
            self.set_class(id, derived);
            let parent = self.at(id).parent;
            if parent == NONE {
                return;
            }
            let above = rank(self.classes.get(self.at(parent).class));
            // A block that is kept for longer by something else stays so; there are many of them that
            // very many others follow.
            if above > rank(former).max(rank(derived)) {
                return;
            }
            derived = match rank(derived) >= above {
                true => derived,
                false => self.derived(parent),
            };
            id = parent;
        }
    }

    /// From the marks of the block and the classes of those after it.
    fn derived(&self, id: Id) -> Class {
        let after = self.siblings(self.at(id).child).map(|id| self.classes.get(self.at(id).class));
        after.chain([self.ends.class(id)]).max_by_key(|class| rank(*class)).unwrap_or(Class::Normal)
    }

    /// A child and those after it in the list of one parent's.
    fn siblings(&self, first: Id) -> impl Iterator<Item = Id> + '_ {
        let next = |id: &Id| Some(self.at(*id).next).filter(|id| *id != NONE);
        std::iter::successors(Some(first).filter(|id| *id != NONE), next)
    }

    fn set_class(&mut self, id: Id, class: Class) {
        let (bytes, former) =
            (self.kinds.get(self.at(id).kind).bytes, self.classes.get(self.at(id).class));
        if let Class::Context { tenant, .. } = former {
            self.context_blocks -= 1;
            self.context_bytes -= bytes;
            let of = self.tenants.entry(tenant).or_insert(0);
            *of -= bytes;
            if *of == 0 {
                self.tenants.remove(&tenant);
            }
        }
        if let Class::Context { tenant, .. } = class {
            self.context_blocks += 1;
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
        held.child == NONE
            && held.busy == 0
            && (self.classes.get(held.class) == Class::Normal || mutated(Mutation::ContextEvicted))
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
        let (mut bytes, mut tenants, mut context_blocks) = (0, BTreeMap::new(), 0);
        let mut order = BTreeSet::new();
        let mut children: BTreeMap<Id, BTreeSet<Id>> = BTreeMap::new();
        for (id, held) in (0..).zip(&self.held) {
            let Some(held) = held else { continue };
            let (key, block) = (held.key, self.block_at(id));
            if self.find(key) != Some(id) {
                return Err(format!("block {key:?} on the SSD is missing in the index by key"));
            }
            bytes += block.bytes;
            if block.class != self.derived(id) {
                return Err(format!(
                    "the class of block {key:?} on the SSD differs from its marks"
                ));
            }
            if let Class::Context { tenant, .. } = block.class {
                context_blocks += 1;
                *tenants.entry(tenant).or_insert(0) += block.bytes;
            }
            if self.may_go(held) {
                order.insert((held.last_use, id));
            }
            let parent = self.held.get(held.parent as usize);
            if held.parent != NONE && parent.is_none_or(Option::is_none) {
                return Err(format!("block {key:?} is on the SSD, but its parent is not"));
            }
            if held.parent != NONE {
                children.entry(held.parent).or_default().insert(id);
            }
        }
        for (id, held) in (0..).zip(&self.held) {
            let Some(held) = held else { continue };
            let linked: BTreeSet<Id> = self.siblings(held.child).collect();
            if linked != children.remove(&id).unwrap_or_default() {
                return Err(format!("the children of {:?} on the SSD are wrong", held.key));
            }
        }
        let is_here = |id: Id| self.held.get(id as usize).is_some_and(Option::is_some);
        self.ends.check(|id| is_here(id).then(|| self.named(id)))?;
        let same =
            bytes == self.bytes && tenants == self.tenants && context_blocks == self.context_blocks;
        if !same || order != self.order {
            return Err("the totals or the order of the SSD differ from its blocks".to_owned());
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

    fn block(n: u8, parent: Option<u8>, mark: Option<Mark>) -> SsdBlock {
        SsdBlock {
            key: key(n),
            namespace: Namespace([0; 16]),
            parent: parent.map(key),
            class: Class::Normal,
            mark,
            layout: 1,
            bytes: 10,
        }
    }

    fn until(expires_unix_ms: u64) -> Option<Mark> {
        Some(Mark { tenant: Tenant(1), expires_unix_ms, created_unix_ms: None, copies: 1 })
    }

    fn ssd(chains: &[&[u8]]) -> Ssd {
        let mut ssd = Ssd::default();
        for chain in chains {
            let mut parent = None;
            for &n in *chain {
                assert!(ssd.insert(block(n, parent, None)));
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
        assert!(ssd.insert(block(1, None, until(500))));
        assert!(ssd.insert(block(2, Some(1), until(400))));
        assert!(ssd.insert(block(3, Some(2), None)));
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
    fn an_extent_of_another_layout_replaces_the_former_one_with_what_it_takes() {
        let mut ssd = ssd(&[&[1, 2]]);
        assert!(ssd.insert(block(2, Some(1), until(500))));
        let larger = SsdBlock { layout: 2, bytes: 30, ..block(2, Some(1), until(500)) };
        assert!(ssd.insert(larger));
        ssd.check().expect("in order");
        assert_eq!((ssd.bytes(), ssd.context_bytes(), ssd.tenant_bytes(Tenant(1))), (40, 40, 40));
        assert_eq!(ssd.get(key(2)).map(|block| (block.layout, block.bytes)), Some((2, 30)));
        let prefix = |layout, parent, n| ssd.prefix(larger.namespace, layout, parent, &[key(n)]);
        assert_eq!(
            (prefix(1, None, 1), prefix(1, Some(key(1)), 2), prefix(2, Some(key(1)), 2)),
            (1, 0, 1)
        );
        assert!(ssd.insert(block(2, Some(1), None)));
        assert_eq!((ssd.bytes(), ssd.context_bytes()), (20, 0));
        assert_eq!(drain(&mut ssd), [2, 1]);
    }

    #[test]
    fn a_block_without_its_parent_is_refused_and_a_subtree_is_listed_from_its_leaves() {
        let mut ssd = ssd(&[&[1, 2, 3], &[1, 4]]);
        assert!(!ssd.insert(block(9, Some(8), None)));
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
