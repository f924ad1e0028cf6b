//! The table of slots: state, generation, free list and tallies. It knows nothing of keys.
//!
//! Owned by the cache, which alone changes it. An event that a state refuses is a programming
//! error and panics: nothing from outside reaches here unchecked.

use kvasir_proto::{Generation, Share, SlotIndex};

use crate::slot_state::{SlotEvent, SlotState};

#[derive(Debug)]
struct Slot {
    state: SlotState,
    generation: Generation,
}

/// How many slots are in which state.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Tally {
    pub(crate) free: u32,
    pub(crate) allocated: u32,
    pub(crate) rising: u32,
    pub(crate) committed: u32,
    /// Committed without a pin.
    pub(crate) evictable: u32,
    pub(crate) leaving: u32,
    pub(crate) quarantined: u32,
    pub(crate) pins: u64,
}

#[derive(Debug)]
pub(crate) struct Slots {
    slots: Vec<Slot>,
    /// Taken from the end, so that slots used lately are used again.
    free: Vec<SlotIndex>,
    tally: Tally,
}

impl Slots {
    pub(crate) fn new(count: u32, first_generation: Generation) -> Self {
        let slot = |_| Slot { state: SlotState::Free, generation: first_generation };
        Slots {
            slots: (0..count).map(slot).collect(),
            free: (0..count).rev().map(SlotIndex).collect(),
            tally: Tally { free: count, ..Tally::default() },
        }
    }

    pub(crate) fn len(&self) -> u32 {
        self.tally.free
            + self.tally.allocated
            + self.tally.rising
            + self.tally.committed
            + self.tally.leaving
            + self.tally.quarantined
    }

    pub(crate) fn tally(&self) -> Tally {
        self.tally
    }

    /// `None` when there is no such slot.
    pub(crate) fn state(&self, slot: SlotIndex) -> Option<SlotState> {
        self.slots.get(slot.0 as usize).map(|slot| slot.state)
    }

    pub(crate) fn generation(&self, slot: SlotIndex) -> Option<Generation> {
        self.slots.get(slot.0 as usize).map(|slot| slot.generation)
    }

    /// A generation that no slot has had yet.
    pub(crate) fn next_generation(&self) -> Generation {
        let last = self.slots.iter().map(|slot| slot.generation).max().unwrap_or_default();
        Generation(last.0.wrapping_add(1))
    }

    pub(crate) fn reserve(&mut self, share: Share) -> Option<SlotIndex> {
        let slot = self.free.pop()?;
        self.apply(slot, SlotEvent::Reserve(share));
        Some(slot)
    }

    /// A free slot to read a block of the SSD into.
    pub(crate) fn rise(&mut self) -> Option<SlotIndex> {
        let slot = self.free.pop()?;
        self.apply(slot, SlotEvent::Rise);
        Some(slot)
    }

    /// Any event but `Reserve` and `Rise`; answers with the new state.
    pub(crate) fn apply(&mut self, index: SlotIndex, event: SlotEvent) -> SlotState {
        let slot = &mut self.slots[index.0 as usize];
        let Some(next) = slot.state.on(event) else {
            panic!("slot {index} is {:?}, where {event:?} must not happen", slot.state);
        };
        self.tally.remove(slot.state);
        self.tally.add(next);
        slot.state = next;
        if next == SlotState::Free {
            slot.generation = Generation(slot.generation.0.wrapping_add(1));
            self.free.push(index);
        }
        next
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (SlotIndex, SlotState)> + '_ {
        (0..).map(SlotIndex).zip(self.slots.iter().map(|slot| slot.state))
    }

    /// The free list names each free slot once, and the tally is true.
    pub(crate) fn check(&self) -> Result<(), String> {
        let mut listed = self.free.clone();
        listed.sort();
        let free = self.iter().filter(|(_, state)| *state == SlotState::Free);
        if !free.map(|(slot, _)| slot).eq(listed) {
            return Err("the free list is not the list of free slots".to_owned());
        }
        let mut tally = Tally::default();
        self.iter().for_each(|(_, state)| tally.add(state));
        if tally != self.tally {
            return Err(format!("the tally is {:?} and should be {tally:?}", self.tally));
        }
        Ok(())
    }
}

impl Tally {
    fn add(&mut self, state: SlotState) {
        *self.of(state) += 1;
        self.evictable += u32::from(state == SlotState::Committed { pins: 0 });
        self.pins += u64::from(state.pins());
    }

    fn remove(&mut self, state: SlotState) {
        *self.of(state) -= 1;
        self.evictable -= u32::from(state == SlotState::Committed { pins: 0 });
        self.pins -= u64::from(state.pins());
    }

    fn of(&mut self, state: SlotState) -> &mut u32 {
        match state {
            SlotState::Free => &mut self.free,
            SlotState::Allocated(_) => &mut self.allocated,
            SlotState::Rising { .. } => &mut self.rising,
            SlotState::Committed { .. } => &mut self.committed,
            SlotState::Leaving { .. } => &mut self.leaving,
            SlotState::Quarantined(_) => &mut self.quarantined,
        }
    }
}
