//! The generation of every slot, as clients read it: memory that only this node can write, one `u32`
//! for each slot. A client that was told (slot, generation) sees by it that the slot has been freed.

use std::os::fd::BorrowedFd;

use kvasir_blocks::Blocks;
use kvasir_proto::{Generation, SlotIndex};
use kvasir_transfer::memory::{MemoryError, SharedMemory};

use kvasir_attach::words;

/// See the module.
#[derive(Debug)]
pub(crate) struct Generations {
    memory: SharedMemory,
}

impl Generations {
    /// # Errors
    /// When there is no memory for it, or no slot.
    pub(crate) fn create(blocks: &Blocks, slots: u32) -> Result<Self, MemoryError> {
        let memory = SharedMemory::create_for_readers("kvasir-generations", 4 * slots as usize)?;
        let generations = Generations { memory };
        for slot in (0..slots).map(SlotIndex) {
            if let Some(generation) = blocks.generation(slot) {
                generations.set(slot, generation);
            }
        }
        Ok(generations)
    }

    pub(crate) fn set(&self, slot: SlotIndex, generation: Generation) {
        if let Ok(word) = self.memory.atomic_u32(4 * slot.0 as usize) {
            words::set_generation(word, generation.0);
        }
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.memory.fd()
    }
}
