//! What an administrator asks of the cache, in words: lists, one block, pins with an end, evictions.
//!
//! The pins are remembered here; they are counted at the slots like all others. What the calls do is in
//! `blocks/admin.rs`.

use std::collections::{BTreeMap, BTreeSet};

use kvasir_proto::{BlockKey, Class, Generation, Namespace, Share, SlotIndex};

use crate::api::{AttachEpoch, Tier};
use crate::ssd::SsdBlock;

/// The longest time for which an administrator's pin may be asked.
pub const PIN_MS_MAX: u64 = 24 * 3_600_000;

/// Which blocks are listed: those that are all of what is set.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ListFilter {
    /// Those that have a copy there, also when they have one elsewhere.
    pub tier: Option<Tier>,
    /// `Some(true)`: those kept for a tenant; `Some(false)`: all others.
    pub kept: Option<bool>,
    pub namespace: Option<Namespace>,
}

/// Where a list goes on. What is looked at is in the order of slots, then in that of the SSD's numbers: a
/// block that stays where it is is met once, one that moves meanwhile perhaps twice or never.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct ListFrom {
    pub tier: Tier,
    pub place: u32,
}

impl ListFrom {
    pub const START: ListFrom = ListFrom { tier: Tier::Dram, place: 0 };
}

/// A part of a list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Listed {
    pub blocks: Vec<ListedBlock>,
    /// Where it goes on; `None` at the end.
    pub next: Option<ListFrom>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ListedBlock {
    pub key: BlockKey,
    pub namespace: Namespace,
    pub dram: Option<DramCopy>,
    /// Its class on the SSD.
    pub ssd: Option<Class>,
}

/// A block's copy in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DramCopy {
    pub slot: SlotIndex,
    pub generation: Generation,
    pub pins: u32,
}

/// All that is known of one block.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Inspection {
    pub key: BlockKey,
    pub namespace: Namespace,
    /// The block before it; `None` for the first of its chain.
    pub parent: Option<BlockKey>,
    pub dram: Option<DramCopy>,
    /// Of the copy in memory, as its writer gave it.
    pub checksum: Option<u64>,
    pub ssd: Option<SsdBlock>,
    /// It is being read from the SSD.
    pub rising: bool,
    /// Who holds a pin of the copy in memory.
    pub holders: Vec<Holder>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Holder {
    /// A share, and when its lease runs out; `None` while it is being aborted.
    Share { share: Share, lease_until_ms: Option<u64> },
    /// An engine, by a handle of its own.
    Engine { epoch: AttachEpoch },
    /// It, or what follows it, is being written to the SSD.
    Sink,
    /// An administrator's pin.
    Admin { pin: u64, until_ms: u64 },
}

/// Why an administrator's pin was not taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum AdminPinError {
    #[error("this node does not hold the block; ask a node that holds it")]
    NotHere,
    #[error(
        "the block is only on the SSD, where blocks cannot be pinned: persist it as a context \
         instead"
    )]
    OnSsdOnly,
    #[error("the time of a pin must be from 1 ms to {PIN_MS_MAX} ms")]
    BadTime,
    #[error(
        "administrators' pins would hold {wanted} blocks, but this node allows {most}; remove a pin first"
    )]
    TooMany { wanted: u32, most: u32 },
}

/// An administrator's pin: it holds a block and all before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AdminPin {
    pub pin: u64,
    pub blocks: u32,
    pub until_ms: u64,
}

/// What an eviction took away, and what it had to leave.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Evicted {
    pub dram_blocks: u32,
    pub ssd_blocks: u32,
    /// Left in memory: somebody has a pin of them, or of a block after them.
    pub pinned_blocks: u32,
    /// Left on the SSD: kept for a tenant, being read, or before such a block.
    pub kept_blocks: u32,
}

impl std::ops::AddAssign for Evicted {
    fn add_assign(&mut self, other: Evicted) {
        self.dram_blocks += other.dram_blocks;
        self.ssd_blocks += other.ssd_blocks;
        self.pinned_blocks += other.pinned_blocks;
        self.kept_blocks += other.kept_blocks;
    }
}

#[derive(Debug)]
struct Held {
    path: Vec<SlotIndex>,
    until_ms: u64,
}

/// Pins of administrators, by number and by the time at which they end.
#[derive(Debug, Default)]
pub(crate) struct AdminPins {
    all: BTreeMap<u64, Held>,
    ends: BTreeSet<(u64, u64)>,
    blocks: usize,
    next: u64,
}

impl AdminPins {
    pub(crate) fn insert(&mut self, path: Vec<SlotIndex>, until_ms: u64) -> u64 {
        self.next += 1;
        self.blocks += path.len();
        self.ends.insert((until_ms, self.next));
        self.all.insert(self.next, Held { path, until_ms });
        self.next
    }

    /// Forgets a pin; answers with the slots that it held.
    pub(crate) fn remove(&mut self, pin: u64) -> Option<Vec<SlotIndex>> {
        let Held { path, until_ms } = self.all.remove(&pin)?;
        self.ends.remove(&(until_ms, pin));
        self.blocks -= path.len();
        Some(path)
    }

    /// When the next one ends, and which.
    pub(crate) fn next_end(&self) -> Option<(u64, u64)> {
        self.ends.first().copied()
    }

    /// Blocks that they hold; one that several hold counts for each.
    pub(crate) fn blocks(&self) -> usize {
        self.blocks
    }

    pub(crate) fn numbers(&self) -> Vec<u64> {
        self.all.keys().copied().collect()
    }

    /// Every pin once.
    pub(crate) fn slots(&self) -> impl Iterator<Item = SlotIndex> + '_ {
        self.all.values().flat_map(|held| &held.path).copied()
    }

    /// Those that hold a slot: number and end.
    pub(crate) fn of(&self, slot: SlotIndex) -> impl Iterator<Item = (u64, u64)> + '_ {
        let holds = move |(_, held): &(&u64, &Held)| held.path.contains(&slot);
        self.all.iter().filter(holds).map(|(pin, held)| (*pin, held.until_ms))
    }
}
