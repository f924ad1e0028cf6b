//! The node's slot memory: where a run of a slot lies and what it hashes to.

use std::sync::Arc;

use kvasir_proto::{SlotIndex, SlotLayout, SlotRun};
use kvasir_transfer::memory::{MemoryError, SharedMemory};
use kvasir_transfer::{Checksum, fold};

/// Memory for the cache, shared with the engine and written by peers.
#[derive(Debug, Clone)]
pub(crate) struct Arena {
    memory: Arc<SharedMemory>,
}

impl Arena {
    /// Takes the memory and touches it once.
    ///
    /// # Errors
    /// When the host has not that much.
    pub(crate) fn create(bytes: u64) -> Result<Self, MemoryError> {
        let bytes = usize::try_from(bytes).unwrap_or(usize::MAX);
        let memory = SharedMemory::create_large("kvasir-slots", bytes)?;
        Ok(Arena { memory: Arc::new(memory) })
    }

    pub(crate) fn memory(&self) -> &Arc<SharedMemory> {
        &self.memory
    }

    /// How many slots of this size there are.
    pub(crate) fn slots(&self, slot_bytes: u64) -> u32 {
        u32::try_from(self.memory.len() as u64 / slot_bytes).unwrap_or(u32::MAX)
    }

    /// The checksum of one run of a slot, as writes carry it. Runs are hashed when they are finished: committed,
    /// or said to be written by an engine that then leaves them alone. One that breaks its word makes a checksum
    /// that does not fit, which is what checksums are for.
    pub(crate) fn run_checksum(&self, layout: &SlotLayout, slot: SlotIndex, run: SlotRun) -> u64 {
        let offset = u64::from(slot.0) * layout.slot_bytes() + run.offset_bytes;
        let mut sum = Checksum::new();
        let added = self.memory.add_to(offset as usize, run.length_bytes as usize, &mut sum);
        added.expect("slots of a checked layout are inside the arena");
        sum.sum()
    }

    /// The checksum of a whole slot.
    pub(crate) fn checksum(&self, layout: &SlotLayout, slot: SlotIndex) -> u64 {
        let runs = (0..layout.layers()).flat_map(|layer| layout.runs(layer));
        let checksums: Vec<u64> = runs.map(|run| self.run_checksum(layout, slot, *run)).collect();
        fold(&checksums)
    }
}
