//! Pins that engines hold by a name of their own, bounded for each engine.
//!
//! It only remembers; the pins themselves are counted at the slots.

use std::collections::BTreeMap;

use kvasir_proto::SlotIndex;

use crate::api::{AttachEpoch, GetError};

#[derive(Debug)]
pub(crate) struct Gets {
    by_handle: BTreeMap<(AttachEpoch, u64), Vec<SlotIndex>>,
    pins: BTreeMap<AttachEpoch, usize>,
    pins_max: usize,
}

impl Gets {
    pub(crate) fn new(pins_max: usize) -> Self {
        Gets { by_handle: BTreeMap::new(), pins: BTreeMap::new(), pins_max }
    }

    /// Whether these slots may be pinned under this name.
    pub(crate) fn check(
        &self,
        epoch: AttachEpoch,
        handle: u64,
        slots: usize,
    ) -> Result<(), GetError> {
        if self.by_handle.contains_key(&(epoch, handle)) {
            return Err(GetError::HandleInUse);
        }
        if self.pins.get(&epoch).copied().unwrap_or(0) + slots > self.pins_max {
            return Err(GetError::TooManyPins(self.pins_max));
        }
        Ok(())
    }

    pub(crate) fn insert(&mut self, epoch: AttachEpoch, handle: u64, slots: Vec<SlotIndex>) {
        *self.pins.entry(epoch).or_insert(0) += slots.len();
        self.by_handle.insert((epoch, handle), slots);
    }

    pub(crate) fn remove(&mut self, epoch: AttachEpoch, handle: u64) -> Option<Vec<SlotIndex>> {
        let slots = self.by_handle.remove(&(epoch, handle))?;
        if let Some(pins) = self.pins.get_mut(&epoch) {
            *pins -= slots.len();
            if *pins == 0 {
                self.pins.remove(&epoch);
            }
        }
        Some(slots)
    }

    pub(crate) fn handles(&self, epoch: AttachEpoch) -> Vec<u64> {
        let all = (epoch, 0)..=(epoch, u64::MAX);
        self.by_handle.range(all).map(|((_, handle), _)| *handle).collect()
    }

    pub(crate) fn pins(&self) -> usize {
        self.pins.values().sum()
    }

    /// Which engines hold a slot, once for each handle.
    pub(crate) fn of(&self, slot: SlotIndex) -> impl Iterator<Item = AttachEpoch> + '_ {
        let holds =
            move |(_, slots): &(&(AttachEpoch, u64), &Vec<SlotIndex>)| slots.contains(&slot);
        self.by_handle.iter().filter(holds).map(|((epoch, _), _)| *epoch)
    }

    /// Every pin once.
    pub(crate) fn iter(&self) -> impl Iterator<Item = SlotIndex> + '_ {
        self.by_handle.values().flatten().copied()
    }
}
