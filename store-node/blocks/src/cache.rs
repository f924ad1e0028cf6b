//! The cache: slots, index and event log, which must change together and change only here.
//!
//! It knows nothing of transactions beyond the share that a private slot is reserved for. It must
//! hold that the committed slots are exactly the indexed ones, that each coming and going is in the
//! log, and that whoever pins a block pins the blocks before it; the last is the callers' part, and
//! makes every unpinned block evictable.

use kvasir_proto::{Generation, Share, SlotIndex};

use crate::api::BlockChange;
use crate::events::EventLog;
use crate::index::{Entry, Index};
use crate::slot_state::{SlotEvent, SlotState};
use crate::slots::Slots;

#[derive(Debug)]
pub(crate) struct Cache {
    slots: Slots,
    index: Index,
    log: EventLog,
    evicted_total: u64,
    dropped_total: u64,
}

impl Cache {
    pub(crate) fn new(slots: u32, event_log_max: usize) -> Self {
        Cache {
            slots: Slots::new(slots, Generation(0)),
            index: Index::new(slots),
            log: EventLog::new(event_log_max),
            evicted_total: 0,
            dropped_total: 0,
        }
    }

    /// Forgets every block and takes another number of slots. Only when none is held.
    pub(crate) fn reset(&mut self, slots: u32) {
        while self.evict() {}
        assert_eq!(self.slots.tally().free, self.slots.len(), "a reset while slots are held");
        self.slots = Slots::new(slots, self.slots.next_generation());
        self.index = Index::new(slots);
    }

    pub(crate) fn slots(&self) -> &Slots {
        &self.slots
    }

    pub(crate) fn index(&self) -> &Index {
        &self.index
    }

    pub(crate) fn log(&self) -> &EventLog {
        &self.log
    }

    pub(crate) fn evicted_total(&self) -> u64 {
        self.evicted_total
    }

    pub(crate) fn dropped_total(&self) -> u64 {
        self.dropped_total
    }

    /// Slots that could be had now.
    pub(crate) fn available(&self) -> u32 {
        let tally = self.slots.tally();
        tally.free + tally.evictable
    }

    /// What would be available while these committed slots were pinned.
    pub(crate) fn available_beside(&self, pinned: &[SlotIndex]) -> u32 {
        let idle = |slot: &&SlotIndex| self.slots.state(**slot).is_some_and(|s| s.pins() == 0);
        self.available() - pinned.iter().filter(idle).count() as u32
    }

    /// A free slot for one share, if need be by evicting.
    pub(crate) fn reserve(&mut self, share: Share) -> Option<SlotIndex> {
        if self.slots.tally().free == 0 {
            self.evict();
        }
        self.slots.reserve(share)
    }

    /// Its bytes are final: makes it findable, pinned once by the share that wrote it.
    pub(crate) fn seal(&mut self, slot: SlotIndex, entry: Entry) {
        self.log.push(BlockChange { key: entry.key, removed: false });
        self.slots.apply(slot, SlotEvent::Seal);
        self.index.insert(slot, entry);
    }

    pub(crate) fn pin(&mut self, slot: SlotIndex) {
        if self.slots.apply(slot, SlotEvent::Pin).pins() == 1 {
            self.index.set_busy(slot);
        }
    }

    pub(crate) fn unpin(&mut self, slot: SlotIndex) {
        if self.slots.apply(slot, SlotEvent::Unpin) == (SlotState::Committed { pins: 0 }) {
            self.index.set_idle(slot);
        }
    }

    pub(crate) fn quarantine(&mut self, slot: SlotIndex) {
        self.slots.apply(slot, SlotEvent::Quarantine);
    }

    pub(crate) fn give_back(&mut self, slot: SlotIndex) {
        self.slots.apply(slot, SlotEvent::GiveBack);
    }

    /// Takes a block and those after it out of the index; pinned ones leave when unpinned. Answers
    /// with their number.
    pub(crate) fn drop_subtree(&mut self, slot: SlotIndex) -> u32 {
        let gone = self.index.subtree(slot);
        for &slot in &gone {
            self.unlist(slot);
            self.slots.apply(slot, SlotEvent::Drop);
        }
        self.dropped_total += gone.len() as u64;
        gone.len() as u32
    }

    fn evict(&mut self) -> bool {
        let Some(slot) = self.index.eldest() else { return false };
        self.unlist(slot);
        self.slots.apply(slot, SlotEvent::Evict);
        self.evicted_total += 1;
        true
    }

    fn unlist(&mut self, slot: SlotIndex) {
        let key = self.index.remove(slot);
        self.log.push(BlockChange { key, removed: true });
    }
}
