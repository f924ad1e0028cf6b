//! What lies in the object store that several nodes share, as far as this node knows, and what it is
//! sending there.
//!
//! Blocks are there for one reason: somebody was promised that they are kept. So each is of the context
//! class, and is forgotten when its time is over. Unlike the tiers of the node itself, this set is not closed
//! under prefix: other nodes add to it and take from it. It is a hint, which a read of the object store
//! proves or disproves. It must hold that sums, times and contexts are those of the blocks.
//!
//! A block has a time of its own here, which does not follow from what is after it: it is in the name of the
//! object. The mark of a context is there beside it.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::Bound;

use kvasir_proto::{BlockKey, Class, Generation, Mark, Namespace, SlotIndex, Tenant};

use crate::ssd::SsdBlock;

/// Bounds of what a node does with an object store.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BucketOptions {
    /// Blocks that are sent there at once. 0: there is no object store.
    pub uploads_max: usize,
    /// Bytes of blocks that are sent there at once; one block in any case.
    pub upload_bytes_max: u64,
    /// A read that takes longer is not waited for.
    pub timeout_ms: u64,
    /// How long a block is not sent after that has failed.
    pub retry_ms: u64,
    /// Blocks there that are known at once; others count as not there.
    pub blocks_max: usize,
    /// Bytes of one tenant that are kept there on the word of a node without an SSD.
    pub tenant_bytes_max: u64,
}

impl Default for BucketOptions {
    fn default() -> Self {
        BucketOptions {
            uploads_max: 0,
            upload_bytes_max: 64 << 20,
            timeout_ms: 2_000,
            retry_ms: 1_000,
            blocks_max: 262_144,
            tenant_bytes_max: 1 << 30,
        }
    }
}

/// Where the bytes of a block that is sent come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum UploadFrom {
    /// A slot, whose bytes do not change until the upload has ended.
    Slot {
        slot: SlotIndex,
        generation: Generation,
    },
    Ssd,
    /// The object store has them, kept for less long or with another mark: a copy takes the place of that one,
    /// which is not there any more when the upload has ended well.
    Bucket(SsdBlock),
}

/// A block on its way to the object store.
#[derive(Debug)]
pub(crate) struct Upload {
    pub(crate) block: SsdBlock,
    pub(crate) keep: Option<u64>,
    pub(crate) from: UploadFrom,
    /// Slots that are pinned until it has ended.
    pub(crate) path: Vec<SlotIndex>,
    /// It was removed meanwhile.
    pub(crate) unwanted: bool,
    pub(crate) is_exact: bool,
}

/// An object that is to be gone from there for good.
#[derive(Debug)]
pub(crate) struct Discard {
    pub(crate) of: (Namespace, BlockKey),
    /// Who waits until it is.
    pub(crate) keeps: Vec<u64>,
    /// The shell does it; else it waits until what is being sent of the object has ended.
    pub(crate) is_issued: bool,
}

/// Why a block may be there that is not known to be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Doubt {
    /// It was sent, which failed: it may have come there all the same. A list that was begun later would say so: there
    /// had been so many.
    Sent { lists: u64 },
    /// It was not where it was known to be: another node may have given it another name.
    NotFound { lists: u64 },
    /// It was to be gone, which failed: it is found no more, and nothing is sent under its name before it is gone. When
    /// a list that was begun later does not show it, it is.
    NotGone { lists: u64 },
    /// The same, and lists that were cut have not shown it since: what one shows later is another node's, and it may be
    /// there all the same.
    NotShown,
}

/// Doubts that are remembered; beyond that anything may be there.
const DOUBTS_MAX: usize = 1 << 16;

/// A block that shall be there.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Wanted {
    /// Of the upload that it becomes.
    pub(crate) number: u64,
    pub(crate) block: SsdBlock,
    pub(crate) keep: Option<u64>,
    /// The mark shall be this one and none else, also when that promises less than what is there.
    pub(crate) is_exact: bool,
}

#[derive(Debug, Default)]
pub(crate) struct Bucket {
    known: BTreeMap<BlockKey, SsdBlock>,
    untils: BTreeSet<(u64, BlockKey)>,
    /// Last blocks of contexts whose time is not over, and (until, last block) of the same.
    contexts: BTreeSet<(Tenant, Namespace, BlockKey)>,
    context_untils: BTreeSet<(u64, BlockKey)>,
    tenants: BTreeMap<Tenant, u64>,
    bytes: u64,
    /// It answers, and what is there is known.
    pub(crate) usable: bool,
    /// First what was wanted first. Bounded by the context blocks that this node has.
    pub(crate) queue: VecDeque<Wanted>,
    /// Those of the queue that nobody waits for; how many of it somebody waits for.
    pub(crate) queued: BTreeSet<BlockKey>,
    pub(crate) awaited: usize,
    pub(crate) uploads: BTreeMap<u64, Upload>,
    /// What is to be gone from there, by number: at most one for a block.
    pub(crate) discards: BTreeMap<u64, Discard>,
    discarded: BTreeMap<(Namespace, BlockKey), u64>,
    doubts: BTreeMap<(Namespace, BlockKey), Doubt>,
    lists: u64,
    /// It has more than is known.
    has_more: bool,
    /// After an error none is begun before this.
    pub(crate) retry_at_ms: u64,
}

impl Bucket {
    /// What of it is to be gone, when something is.
    pub(crate) fn discard_of(&self, of: (Namespace, BlockKey)) -> Option<u64> {
        self.discarded.get(&of).copied()
    }

    pub(crate) fn begin_discard(&mut self, number: u64, discard: Discard) {
        self.discarded.insert(discard.of, number);
        self.discards.insert(number, discard);
    }

    pub(crate) fn end_discard(&mut self, number: u64) -> Option<Discard> {
        let discard = self.discards.remove(&number)?;
        self.discarded.remove(&discard.of);
        Some(discard)
    }

    pub(crate) fn doubt(&self, of: (Namespace, BlockKey)) -> Option<Doubt> {
        let too_many = self.has_more || self.doubts.len() >= DOUBTS_MAX;
        self.doubts.get(&of).copied().or(too_many.then_some(Doubt::Sent { lists: self.lists }))
    }

    /// Whether this one was sent or was to be gone, which failed.
    pub(crate) fn is_own_in_doubt(&self, of: (Namespace, BlockKey)) -> bool {
        self.doubts.get(&of).is_some_and(|doubt| !matches!(doubt, Doubt::NotFound { .. }))
    }

    /// Whether it was to be gone, which failed: that comes before anything is sent under its name.
    pub(crate) fn is_to_be_gone(&self, of: (Namespace, BlockKey)) -> bool {
        matches!(self.doubts.get(&of), Some(Doubt::NotGone { .. } | Doubt::NotShown))
    }

    /// It was sent, which failed.
    pub(crate) fn doubt_sent(&mut self, of: (Namespace, BlockKey)) {
        if !self.is_to_be_gone(of) {
            self.set_doubt(of, Doubt::Sent { lists: self.lists });
        }
    }

    /// It was not found.
    pub(crate) fn doubt_not_found(&mut self, of: (Namespace, BlockKey)) {
        if !self.is_own_in_doubt(of) {
            self.set_doubt(of, Doubt::NotFound { lists: self.lists });
        }
    }

    /// It was to be gone, which failed.
    pub(crate) fn doubt_gone(&mut self, of: (Namespace, BlockKey)) {
        self.set_doubt(of, Doubt::NotGone { lists: self.lists });
    }

    fn set_doubt(&mut self, of: (Namespace, BlockKey), doubt: Doubt) {
        if self.doubts.len() < DOUBTS_MAX || self.doubts.contains_key(&of) {
            self.doubts.insert(of, doubt);
        }
    }

    /// Now it is known.
    pub(crate) fn end_doubt(&mut self, of: (Namespace, BlockKey)) {
        self.doubts.remove(&of);
    }

    /// It has been listed, all of it or not, and `shown` was what was to be gone.
    ///
    /// What was in doubt since before the list that came before this one is told by it: that one may have been under
    /// way then.
    pub(crate) fn listed(&mut self, is_all: bool, shown: &BTreeSet<(Namespace, BlockKey)>) {
        self.lists += 1;
        self.has_more = !is_all;
        let is_told = |since: u64| since + 2 <= self.lists;
        self.doubts.retain(|of, doubt| match *doubt {
            Doubt::Sent { lists } | Doubt::NotFound { lists } => !is_told(lists),
            Doubt::NotGone { lists } if !is_told(lists) || shown.contains(of) => true,
            Doubt::NotGone { .. } => {
                *doubt = Doubt::NotShown;
                !is_all
            }
            Doubt::NotShown => !is_all && !shown.contains(of),
        });
    }

    pub(crate) fn len(&self) -> usize {
        self.known.len()
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    pub(crate) fn tenant_bytes(&self, tenant: Tenant) -> u64 {
        self.tenants.get(&tenant).copied().unwrap_or(0)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = SsdBlock> + '_ {
        self.known.values().copied()
    }

    pub(crate) fn get(&self, key: BlockKey) -> Option<SsdBlock> {
        self.known.get(&key).copied()
    }

    /// How many of these keys follow one another there, after `parent`, in this namespace and layout.
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

    /// It is kept there so long at least, whoever it is kept for, and so is a context that ends with it.
    pub(crate) fn keeps(&self, wanted: &SsdBlock) -> bool {
        self.get(wanted.key).is_some_and(|known| {
            known.namespace == wanted.namespace
                && known.layout == wanted.layout
                && until(&known) >= until(wanted)
                && marked_until(&known) >= marked_until(wanted)
        })
    }

    /// How a block shall be there that is wanted so: what is promised by what is there already stays.
    pub(crate) fn as_wanted(&self, wanted: &SsdBlock) -> SsdBlock {
        // Copies are of what nodes' own disks have.
        let mark = wanted.mark.filter(|mark| mark.created_unix_ms.is_some());
        let mark = mark.map(|mark| Mark { copies: 1, ..mark });
        let mut block = SsdBlock { mark, ..*wanted };
        let same =
            |known: &SsdBlock| (known.namespace, known.layout) == (block.namespace, block.layout);
        if let Some(known) = self.get(block.key).filter(same) {
            if until(&known) > until(&block) {
                block.class = known.class;
            }
            if marked_until(&known) > marked_until(&block) {
                block.mark = known.mark;
            }
        }
        // A name has one tenant.
        let is_of = |mark: &Mark| matches!(block.class, Class::Context { tenant, .. } if tenant == mark.tenant);
        block.mark = block.mark.filter(is_of);
        block
    }

    /// A block is there. Of two that differ in their times, the one that stays longer is known.
    pub(crate) fn insert(&mut self, block: SsdBlock, blocks_max: usize) {
        let Class::Context { tenant, expires_unix_ms } = block.class else { return };
        let times = |block: &SsdBlock| (until(block), marked_until(block));
        match self.get(block.key) {
            Some(known) if times(&known) >= times(&block) => return,
            Some(_) => drop(self.remove(block.key)),
            None if self.known.len() >= blocks_max => {
                self.has_more = true;
                return;
            }
            None => {}
        }
        self.known.insert(block.key, block);
        self.untils.insert((expires_unix_ms, block.key));
        if let Some(Mark { tenant, expires_unix_ms, .. }) = block.mark {
            self.contexts.insert((tenant, block.namespace, block.key));
            self.context_untils.insert((expires_unix_ms, block.key));
        }
        *self.tenants.entry(tenant).or_insert(0) += block.bytes;
        self.bytes += block.bytes;
    }

    pub(crate) fn remove(&mut self, key: BlockKey) -> Option<SsdBlock> {
        let block = self.known.remove(&key)?;
        self.forget_context(&block);
        if let Class::Context { tenant, expires_unix_ms } = block.class {
            self.untils.remove(&(expires_unix_ms, key));
            let of = self.tenants.entry(tenant).or_insert(0);
            *of -= block.bytes;
            if *of == 0 {
                self.tenants.remove(&tenant);
            }
        }
        self.bytes -= block.bytes;
        Some(block)
    }

    pub(crate) fn clear(&mut self) {
        self.known.clear();
        self.untils.clear();
        self.contexts.clear();
        self.context_untils.clear();
        self.tenants.clear();
        self.bytes = 0;
    }

    fn forget_context(&mut self, block: &SsdBlock) {
        if let Some(Mark { tenant, expires_unix_ms, .. }) = block.mark {
            self.contexts.remove(&(tenant, block.namespace, block.key));
            self.context_untils.remove(&(expires_unix_ms, block.key));
        }
    }

    /// The last block of a context, with its mark, when there is one.
    pub(crate) fn context(
        &self,
        tenant: Tenant,
        namespace: Namespace,
        last: BlockKey,
    ) -> Option<(SsdBlock, Mark)> {
        self.contexts.get(&(tenant, namespace, last))?;
        let block = self.get(last)?;
        Some((block, block.mark?))
    }

    /// Last blocks of a tenant's contexts in the order of namespace and key, after one of them.
    pub(crate) fn contexts(
        &self,
        tenant: Tenant,
        after: Option<(Namespace, BlockKey)>,
    ) -> impl Iterator<Item = (SsdBlock, Mark)> + '_ {
        let from = match after {
            Some((namespace, key)) => Bound::Excluded((tenant, namespace, key)),
            None => Bound::Included((tenant, Namespace([0; 16]), BlockKey([0; 16]))),
        };
        let of_tenant = self.contexts.range((from, Bound::Unbounded));
        let of_tenant = of_tenant.take_while(move |(of, ..)| *of == tenant);
        of_tenant.filter_map(|&(tenant, namespace, key)| self.context(tenant, namespace, key))
    }

    /// Forgets contexts and blocks whose time is over.
    pub(crate) fn expire(&mut self, unix_ms: u64) {
        while let Some(&(expires_unix_ms, key)) = self.context_untils.first()
            && expires_unix_ms <= unix_ms
        {
            self.context_untils.remove(&(expires_unix_ms, key));
            if let Some(block) = self.get(key) {
                self.forget_context(&block);
            }
        }
        while let Some(&(expires_unix_ms, key)) = self.untils.first()
            && expires_unix_ms <= unix_ms
        {
            self.remove(key);
        }
    }

    /// Every pin once.
    pub(crate) fn pins(&self) -> impl Iterator<Item = SlotIndex> + '_ {
        self.uploads.values().flat_map(|upload| &upload.path).copied()
    }

    /// What the header says must hold.
    pub(crate) fn check(&self) -> Result<(), String> {
        let (mut bytes, mut tenants, mut untils) = (0, BTreeMap::new(), BTreeSet::new());
        for (key, block) in &self.known {
            let Class::Context { tenant, expires_unix_ms } = block.class else {
                return Err(format!(
                    "block {key:?} is in the object store but belongs to no context"
                ));
            };
            bytes += block.bytes;
            *tenants.entry(tenant).or_insert(0) += block.bytes;
            untils.insert((expires_unix_ms, *key));
        }
        let named = |(tenant, namespace, key): &(Tenant, Namespace, BlockKey)| {
            let mark = self.context(*tenant, *namespace, *key).map(|(_, mark)| mark);
            mark.map(|mark| (mark.expires_unix_ms, *key))
        };
        let context_untils: BTreeSet<_> = self.contexts.iter().filter_map(named).collect();
        if self.contexts.len() != context_untils.len() || context_untils != self.context_untils {
            return Err(
                "the contexts in the object store differ from those of its blocks".to_owned()
            );
        }
        if self.queue.iter().filter(|wanted| wanted.keep.is_some()).count() != self.awaited {
            return Err("the number of awaited uploads differs from the queue".to_owned());
        }
        let of = |(number, discard): (&u64, &Discard)| (discard.of, *number);
        if self.discards.iter().map(of).collect::<BTreeMap<_, _>>() != self.discarded {
            return Err(
                "the deletions from the object store differ from the index by key".to_owned()
            );
        }
        if bytes != self.bytes || tenants != self.tenants || untils != self.untils {
            return Err("the totals of the object store differ from those of its blocks".to_owned());
        }
        let queued = self.queue.iter().filter(|wanted| wanted.keep.is_none());
        if !queued.map(|wanted| wanted.block.key).collect::<BTreeSet<_>>().eq(&self.queued) {
            return Err("the blocks that wait for an upload differ from the queue".to_owned());
        }
        Ok(())
    }
}

/// How long a block is kept; not at all when it is kept for nobody.
pub(crate) fn until(block: &SsdBlock) -> u64 {
    match block.class {
        Class::Context { expires_unix_ms, .. } => expires_unix_ms,
        Class::Normal => 0,
    }
}

/// How long the context is kept that ends with a block.
fn marked_until(block: &SsdBlock) -> u64 {
    block.mark.map_or(0, |mark| mark.expires_unix_ms)
}
