//! The table of slots: state, generation, free list and tallies. It knows nothing of keys.
//!
//! Owned by the cache, which alone changes it. An event that a state refuses is a programming
//! error and panics: nothing from outside reaches here unchecked.

use kvasir_mutation::{Mutation, mutated};
use kvasir_proto::{Generation, Share, SlotIndex};

use crate::compact::Interned;
use crate::slot_state::{SlotEvent, SlotState};

/// A state in eight bytes: which it is, and its pins or the number of its share.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Packed {
    Free,
    Allocated(u32),
    Rising(u32),
    Committed(u32),
    Leaving(u32),
    Quarantined(u32),
}

#[derive(Debug)]
struct Slot {
    state: Packed,
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
    /// Of allocated and quarantined slots.
    shares: Interned<Share>,
    /// Taken from the end, so that slots used lately are used again.
    free: Vec<SlotIndex>,
    tally: Tally,
    /// Slots that came free, for whoever tells others of generations; `None` where nobody does.
    freed: Option<Vec<SlotIndex>>,
}

impl Slots {
    pub(crate) fn new(count: u32, first_generation: Generation) -> Self {
        let slot = |_| Slot { state: Packed::Free, generation: first_generation };
        Slots {
            slots: (0..count).map(slot).collect(),
            shares: Interned::new(),
            free: (0..count).rev().map(SlotIndex).collect(),
            tally: Tally { free: count, ..Tally::default() },
            freed: None,
        }
    }

    /// From now on it is noted which slots come free.
    pub(crate) fn note_freed(&mut self) {
        self.freed.get_or_insert_default();
    }

    /// A slot that came free since, with the generation that it has now. Each is given once.
    pub(crate) fn next_freed(&mut self) -> Option<(SlotIndex, Generation)> {
        let slot = self.freed.as_mut()?.pop()?;
        Some((slot, self.generation(slot)?))
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
        self.slots.get(slot.0 as usize).map(|slot| self.unpacked(slot.state))
    }

    fn unpacked(&self, state: Packed) -> SlotState {
        match state {
            Packed::Free => SlotState::Free,
            Packed::Allocated(share) => SlotState::Allocated(self.shares.get(share)),
            Packed::Rising(pins) => SlotState::Rising { pins },
            Packed::Committed(pins) => SlotState::Committed { pins },
            Packed::Leaving(pins) => SlotState::Leaving { pins },
            Packed::Quarantined(share) => SlotState::Quarantined(self.shares.get(share)),
        }
    }

    fn packed(&mut self, state: SlotState) -> Packed {
        match state {
            SlotState::Free => Packed::Free,
            SlotState::Allocated(share) => Packed::Allocated(self.shares.take(share)),
            SlotState::Rising { pins } => Packed::Rising(pins),
            SlotState::Committed { pins } => Packed::Committed(pins),
            SlotState::Leaving { pins } => Packed::Leaving(pins),
            SlotState::Quarantined(share) => Packed::Quarantined(self.shares.take(share)),
        }
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
        let packed = self.slots[index.0 as usize].state;
        let state = self.unpacked(packed);
        let Some(next) = state.on(event) else {
            panic!("slot {index} is {state:?}, where {event:?} must not happen");
        };
        self.tally.remove(state);
        self.tally.add(next);
        let becomes = self.packed(next);
        if let Packed::Allocated(share) | Packed::Quarantined(share) = packed {
            self.shares.give_back(share);
        }
        let slot = &mut self.slots[index.0 as usize];
        slot.state = becomes;
        if next == SlotState::Free {
            if !mutated(Mutation::SlotGenerationNotAdvanced) {
                slot.generation = Generation(slot.generation.0.wrapping_add(1));
            }
            self.free.push(index);
            if let Some(freed) = &mut self.freed
                && !mutated(Mutation::FreedSlotNotReported)
            {
                freed.push(index);
            }
        }
        next
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (SlotIndex, SlotState)> + '_ {
        (0..).map(SlotIndex).zip(self.slots.iter().map(|slot| self.unpacked(slot.state)))
    }

    /// The free list names each free slot once, and the tally is true.
    pub(crate) fn check(&self) -> Result<(), String> {
        let mut listed = self.free.clone();
        listed.sort();
        let free = self.iter().filter(|(_, state)| *state == SlotState::Free);
        if !free.map(|(slot, _)| slot).eq(listed) {
            return Err("the free list differs from the free slots".to_owned());
        }
        let mut tally = Tally::default();
        self.iter().for_each(|(_, state)| tally.add(state));
        if tally != self.tally {
            return Err(format!("the tally is {:?}, but should be {tally:?}", self.tally));
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
