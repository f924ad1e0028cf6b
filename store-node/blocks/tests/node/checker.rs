//! What the simulation believes of the world outside the core, and what must never happen in it.
//!
//! It learns from the core's answers only, and keeps its own books: what bytes are in which slot,
//! who may still write there, who is reading.

use std::collections::{BTreeMap, BTreeSet};

use kvasir_blocks::{Blocks, Tier};
use kvasir_proto::{BlockKey, Generation, Share, SlotIndex};

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Hand {
    Engine,
    Remote,
}

/// What was last written into a slot: which block's rows (none for a partial one), by whom, and
/// the how-manieth write of the run it was.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Cell {
    content: Option<BlockKey>,
    writer: Share,
    write: u64,
}

#[derive(Debug, Default)]
pub(crate) struct Checker {
    memory: BTreeMap<SlotIndex, Cell>,
    writes: u64,
    /// Who may still write where.
    writers: BTreeMap<SlotIndex, BTreeSet<(Share, Hand)>>,
    /// What was in a committed slot when it was first seen so.
    committed: BTreeMap<(SlotIndex, Generation), Cell>,
    /// What is being read, as it was when the read began.
    reads: BTreeMap<Share, Vec<(SlotIndex, Generation, Option<Cell>)>>,
    /// A subscriber of block events.
    subscriber: BTreeMap<BlockKey, Tier>,
    subscriber_at: u64,
    pub snapshots_taken: u64,
}

impl Checker {
    /// A share got slots that nobody else may touch any more.
    pub(crate) fn hand_out(&self, share: Share, slots: &[SlotIndex]) {
        for slot in slots {
            let others = self.writers.get(slot).is_some_and(|writers| !writers.is_empty());
            assert!(
                !others,
                "slot {slot} goes to {share} and may be written by {:?}",
                self.writers
            );
            for (reader, reads) in &self.reads {
                let read = reads.iter().any(|(read, ..)| read == slot);
                assert!(!read, "slot {slot} goes to {share} and is read by {reader}");
            }
        }
    }

    pub(crate) fn may_write(&mut self, share: Share, hand: Hand, slots: &[SlotIndex]) {
        for &slot in slots {
            let writers = self.writers.entry(slot).or_default();
            assert!(writers.is_empty(), "slot {slot}: {share} {hand:?} beside {writers:?}");
            writers.insert((share, hand));
        }
    }

    /// This hand has confirmed that it writes no more.
    pub(crate) fn stopped(&mut self, share: Share, hand: Hand) {
        for writers in self.writers.values_mut() {
            writers.remove(&(share, hand));
        }
    }

    /// A page is sealed: its writer does not touch it any more, by contract.
    pub(crate) fn sealed(&mut self, slot: SlotIndex) {
        self.writers.remove(&slot);
    }

    pub(crate) fn write(
        &mut self,
        share: Share,
        hand: Hand,
        slot: SlotIndex,
        content: Option<BlockKey>,
    ) {
        let allowed = self.writers.get(&slot).is_some_and(|w| w.contains(&(share, hand)));
        assert!(allowed, "the simulation lets {share} write slot {slot} without the right");
        self.writes += 1;
        self.memory.insert(slot, Cell { content, writer: share, write: self.writes });
    }

    pub(crate) fn read_begin(&mut self, blocks: &Blocks, share: Share, slots: &[SlotIndex]) {
        let read = |&slot: &SlotIndex| {
            let generation = blocks.generation(slot).expect("a slot");
            (slot, generation, self.memory.get(&slot).copied())
        };
        self.reads.entry(share).or_default().extend(slots.iter().map(read).collect::<Vec<_>>());
    }

    pub(crate) fn reads_end(&mut self, share: Share) {
        self.reads.remove(&share);
    }

    /// Blocks that the core calls held must be the ones asked for.
    pub(crate) fn held(&self, keys: &[BlockKey], slots: &[SlotIndex]) {
        for (key, slot) in keys.iter().zip(slots) {
            let content = self.memory.get(slot).and_then(|cell| cell.content);
            assert_eq!(content, Some(*key), "slot {slot} does not have the rows of its key");
        }
    }

    /// Which block's rows are in a slot.
    pub(crate) fn content(&self, slot: SlotIndex) -> Option<BlockKey> {
        self.memory.get(&slot).and_then(|cell| cell.content)
    }

    /// What must hold after every call.
    pub(crate) fn check(
        &mut self,
        blocks: &Blocks,
        parents: &BTreeMap<BlockKey, Option<BlockKey>>,
    ) {
        self.check_committed(blocks, parents);
        for (share, reads) in &self.reads {
            for &(slot, generation, cell) in reads {
                assert_eq!(blocks.generation(slot), Some(generation), "{share} reads slot {slot}");
                assert_eq!(self.memory.get(&slot).copied(), cell, "{share} reads slot {slot}");
            }
        }
    }

    fn check_committed(&mut self, blocks: &Blocks, parents: &BTreeMap<BlockKey, Option<BlockKey>>) {
        let mut seen = BTreeMap::new();
        let keys: BTreeSet<BlockKey> = blocks.blocks().map(|block| block.key).collect();
        for block in blocks.blocks() {
            let cell = self.memory.get(&block.slot).copied().expect("committed and never written");
            assert_eq!(cell.content, Some(block.key), "slot {} has other rows", block.slot);
            let at = (block.slot, block.generation);
            let first = self.committed.get(&at).copied().unwrap_or(cell);
            assert_eq!(cell, first, "committed bytes of slot {} changed", block.slot);
            seen.insert(at, cell);
            if let Some(parent) = parents.get(&block.key).expect("a key of the simulation") {
                assert!(keys.contains(parent), "a block is cached and the one before it is not");
            }
        }
        self.committed = seen;
    }

    /// The subscriber catches up by `changes_max` changes, or by a snapshot.
    pub(crate) fn subscribe(&mut self, blocks: &Blocks, changes_max: usize) {
        let Some(changes) = blocks.changes_since(self.subscriber_at, changes_max) else {
            let snapshot = blocks.snapshot();
            self.subscriber = tiers(&snapshot);
            self.subscriber_at = snapshot.sequence;
            self.snapshots_taken += 1;
            return;
        };
        assert_eq!(changes.first_sequence, self.subscriber_at + 1);
        for change in changes.changes {
            self.subscriber_at += 1;
            let new = if change.removed {
                self.subscriber.remove(&change.key).is_some()
            } else {
                self.subscriber.insert(change.key, change.tier) != Some(change.tier)
            };
            assert!(new, "change {} was so already", self.subscriber_at);
        }
        if self.subscriber_at == blocks.sequence() {
            let now = tiers(&blocks.snapshot());
            assert_eq!(self.subscriber, now, "the changes do not lead to the snapshot");
        }
    }
}

pub(crate) fn tiers(snapshot: &kvasir_blocks::Snapshot) -> BTreeMap<BlockKey, Tier> {
    let tier = |at| match at {
        at if at < snapshot.vram_keys => Tier::Vram,
        at if at < snapshot.vram_keys + snapshot.dram_keys => Tier::Dram,
        _ => Tier::Ssd,
    };
    snapshot.keys.iter().enumerate().map(|(at, key)| (*key, tier(at))).collect()
}
