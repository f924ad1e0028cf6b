//! What is under way between the tiers: blocks being written to the SSD, blocks being read from it,
//! and callers that wait until blocks are durable. It only remembers; slots and pins are the cache's.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::hash::BuildHasherDefault;

use kvasir_proto::{BlockKey, Class, Generation, Mark, Namespace, Share, SlotIndex};

use crate::api::AttachEpoch;
use crate::index::KeyHasher;
use crate::ssd::SsdBlock;

/// A block on its way to the SSD.
#[derive(Debug)]
pub(crate) struct Sink {
    pub(crate) block: SsdBlock,
    /// Where its bytes are; `None` when the SSD has them and only the mark changes.
    pub(crate) slot: Option<(SlotIndex, Generation)>,
    pub(crate) batch: u64,
    pub(crate) keep: Option<u64>,
    /// Room on the SSD that is kept for it; none when an extent of the block is there already.
    pub(crate) bytes: u64,
    /// It is the removal of the block which is written.
    pub(crate) erases: bool,
}

impl Sink {
    /// Somebody waits until it is kept. What is written of a block after its removal comes after it.
    pub(crate) fn keeps(&self) -> bool {
        self.keep.is_some() && !self.erases
    }
}

/// Sinks of one chain, with one pin of each of its blocks until the last of them has ended.
#[derive(Debug)]
pub(crate) struct Batch {
    pub(crate) path: Vec<SlotIndex>,
    pub(crate) left: usize,
}

/// A caller that waits until a chain is durable with a mark at its end, or until a mark is durably gone.
#[derive(Debug)]
pub(crate) struct Keep {
    pub(crate) left: BTreeSet<u64>,
    pub(crate) failed: bool,
    pub(crate) blocks: u32,
    pub(crate) mark: Option<Mark>,
    /// Blocks that count as kept because of it.
    pub(crate) coming: Vec<BlockKey>,
}

impl Keep {
    pub(crate) fn new(blocks: usize, mark: Option<Mark>) -> Self {
        let blocks = u32::try_from(blocks).unwrap_or(u32::MAX);
        Keep { left: BTreeSet::new(), failed: false, blocks, mark, coming: Vec::new() }
    }
}

/// Removals may be many: nothing of it is looked for among all.
#[derive(Debug, Default)]
pub(crate) struct Sinks {
    all: BTreeMap<u64, Sink>,
    /// Numbers of `all`, none of them without one.
    by_key: HashMap<BlockKey, Vec<u64>, BuildHasherDefault<KeyHasher>>,
    /// Of them, those that the shell has, with since when.
    issued: BTreeMap<u64, u64>,
    /// Of them, those that it has not.
    queue: VecDeque<u64>,
    /// Of them, those of blocks that are kept for somebody.
    contexts: BTreeSet<u64>,
    pub(crate) batches: BTreeMap<u64, Batch>,
    pub(crate) keeps: BTreeMap<u64, Keep>,
    /// That new extents of them will take.
    pub(crate) bytes: u64,
    pub(crate) next: u64,
    /// After an error none is begun before this.
    pub(crate) retry_at_ms: u64,
    /// Blocks whose extents are to be forgotten, but not those that are being written: they replace them, or fail. With
    /// each whether it follows no other.
    pub(crate) forgotten: BTreeMap<BlockKey, bool>,
}

impl Sinks {
    /// One more, to be issued after those that are there.
    pub(crate) fn plan(&mut self, sink: Sink) -> u64 {
        let number = self.number();
        self.by_key.entry(sink.block.key).or_default().push(number);
        if matches!(sink.block.class, Class::Context { .. }) {
            self.contexts.insert(number);
        }
        self.all.insert(number, sink);
        self.queue.push_back(number);
        number
    }

    /// The next one for the shell.
    pub(crate) fn issue(&mut self, now_ms: u64) -> Option<(u64, &Sink)> {
        let number = self.queue.pop_front()?;
        self.issued.insert(number, now_ms);
        self.all.get(&number).map(|sink| (number, sink))
    }

    /// It is over.
    pub(crate) fn end(&mut self, number: u64) -> Option<Sink> {
        let sink = self.all.remove(&number)?;
        self.issued.remove(&number);
        self.contexts.remove(&number);
        if let Some(numbers) = self.by_key.get_mut(&sink.block.key) {
            numbers.retain(|of| *of != number);
            if numbers.is_empty() {
                self.by_key.remove(&sink.block.key);
            }
        }
        Some(sink)
    }

    pub(crate) fn len(&self) -> usize {
        self.all.len()
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &Sink> + '_ {
        self.all.values()
    }

    /// Those of blocks that are kept for somebody.
    pub(crate) fn contexts(&self) -> impl Iterator<Item = &Sink> + '_ {
        self.contexts.iter().filter_map(|number| self.all.get(number))
    }

    /// Those of one block.
    pub(crate) fn of_key(&self, key: BlockKey) -> impl Iterator<Item = &Sink> + '_ {
        let numbers = self.by_key.get(&key).into_iter().flatten();
        numbers.filter_map(|number| self.all.get(number))
    }

    /// The shell writes an extent of it now.
    pub(crate) fn writes(&self, key: BlockKey) -> bool {
        let mut numbers = self.by_key.get(&key).into_iter().flatten();
        numbers.any(|number| self.issued.contains_key(number))
    }

    /// It is being read there to be written anew.
    pub(crate) fn rewrites(&self, key: BlockKey) -> bool {
        self.of_key(key).any(|sink| sink.slot.is_none() && !sink.erases)
    }

    pub(crate) fn number(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    pub(crate) fn under_way(&self) -> usize {
        self.issued.len()
    }

    /// Since when the shell has the eldest of those that it has; they are few.
    pub(crate) fn oldest_ms(&self) -> Option<u64> {
        self.issued.values().copied().min()
    }

    /// Every pin once.
    pub(crate) fn pins(&self) -> impl Iterator<Item = SlotIndex> + '_ {
        self.batches.values().flat_map(|batch| &batch.path).copied()
    }
}

/// Where a block comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RiseFrom {
    Ssd,
    Bucket,
    /// A page of the pool of this engine.
    Pool {
        epoch: AttachEpoch,
        page: u32,
    },
}

/// A block on its way from the SSD, from the object store, or from the engine's pool.
#[derive(Debug)]
pub(crate) struct Rise {
    pub(crate) key: BlockKey,
    pub(crate) namespace: Namespace,
    pub(crate) parent: Option<BlockKey>,
    pub(crate) slot: SlotIndex,
    pub(crate) from: RiseFrom,
    pub(crate) since_ms: u64,
    /// Its checksum, when it is there and waits for the block before it.
    pub(crate) landed: Option<u64>,
    /// Its time is over: nobody waits for it any more.
    pub(crate) late: bool,
    /// The block was removed since: what is read counts for nothing, and says nothing of what is there now.
    pub(crate) is_void: bool,
    /// Shares whose page it becomes.
    pub(crate) waiters: Vec<(Share, u32)>,
}

#[derive(Debug, Default)]
pub(crate) struct Rises {
    pub(crate) all: BTreeMap<u64, Rise>,
    pub(crate) by_key: BTreeMap<BlockKey, u64>,
    pub(crate) next: u64,
    /// Of them, those from the SSD that are late.
    pub(crate) late: u32,
    /// Of them, those from the object store.
    pub(crate) downloads: u32,
    /// Of them, those from a pool.
    pub(crate) of_pool: u32,
}

impl Rises {
    pub(crate) fn insert(&mut self, rise: Rise) -> u64 {
        self.next += 1;
        self.count(rise.from, 1);
        self.by_key.insert(rise.key, self.next);
        self.all.insert(self.next, rise);
        self.next
    }

    pub(crate) fn of_key(&self, key: BlockKey) -> Option<(u64, &Rise)> {
        let rise = *self.by_key.get(&key)?;
        Some((rise, self.all.get(&rise)?))
    }

    pub(crate) fn remove(&mut self, rise: u64) -> Option<Rise> {
        let removed = self.all.remove(&rise)?;
        if self.by_key.get(&removed.key) == Some(&rise) {
            self.by_key.remove(&removed.key);
        }
        self.late -= u32::from(removed.late && removed.from == RiseFrom::Ssd);
        self.count(removed.from, -1);
        Some(removed)
    }

    fn count(&mut self, from: RiseFrom, by: i32) {
        match from {
            RiseFrom::Ssd => {}
            RiseFrom::Bucket => self.downloads = self.downloads.saturating_add_signed(by),
            RiseFrom::Pool { .. } => self.of_pool = self.of_pool.saturating_add_signed(by),
        }
    }

    /// Nobody waits for it from now on, and whoever wants the block may ask for it anew.
    pub(crate) fn set_late(&mut self, rise: u64) {
        if let Some(of) = self.all.get_mut(&rise).filter(|of| !of.late) {
            of.late = true;
            self.late += u32::from(of.from == RiseFrom::Ssd);
            // Of one that was removed meanwhile another read may be under way.
            if self.by_key.get(&of.key) == Some(&rise) {
                self.by_key.remove(&of.key);
            }
        }
    }

    /// Blocks of these keys, in their order, are removed in this namespace: whoever wants one from now on wants
    /// another. Answers with what is under way of them.
    pub(crate) fn void(&mut self, namespace: Namespace, keys: &[BlockKey]) -> Vec<u64> {
        let is_of_one =
            |rise: &Rise| rise.namespace == namespace && keys.binary_search(&rise.key).is_ok();
        let mut void = Vec::new();
        for (id, rise) in self.all.iter_mut().filter(|(_, rise)| is_of_one(rise)) {
            rise.is_void = true;
            if self.by_key.get(&rise.key) == Some(id) {
                self.by_key.remove(&rise.key);
            }
            void.push(*id);
        }
        void
    }

    /// When the eldest read of the SSD that is not late began. They begin in the order of their numbers.
    pub(crate) fn oldest(&self) -> Option<(u64, u64)> {
        self.oldest_of(RiseFrom::Ssd)
    }

    /// The same of reads of the object store.
    pub(crate) fn oldest_download(&self) -> Option<(u64, u64)> {
        if self.downloads == 0 { None } else { self.oldest_of(RiseFrom::Bucket) }
    }

    fn oldest_of(&self, from: RiseFrom) -> Option<(u64, u64)> {
        let mut all = self
            .all
            .iter()
            .filter(|(_, rise)| rise.from == from && !rise.late && rise.landed.is_none());
        all.next().map(|(id, rise)| (*id, rise.since_ms))
    }
}
