//! The table of an engine's regions as its shm peers see it: they map it read-only and look a region
//! up in it before each copy. A key is withdrawn here before a revocation waits for copies under way.
//! It also holds the flag that says whether the engine's worker sleeps.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::AtomicU32;

use super::entry::Entry;
use crate::memory::{MemoryError, RangeError, SharedMemory};
use crate::shared::REGIONS_MAX;

const SLEEPING: usize = 0;
const SLOTS: usize = 64;
const SLOT_BYTES: usize = 16;
pub(super) const DIRECTORY_BYTES: usize = SLOTS + REGIONS_MAX * SLOT_BYTES;

/// The owner's side.
#[derive(Debug)]
pub(crate) struct Directory {
    memory: Arc<SharedMemory>,
    slots: BTreeMap<u64, usize>,
    free: Vec<usize>,
}

impl Directory {
    pub(crate) fn create() -> Result<Self, MemoryError> {
        let memory = SharedMemory::create_for_readers("kvasir-regions", DIRECTORY_BYTES)?;
        let free = (0..REGIONS_MAX).rev().collect();
        Ok(Directory { memory: Arc::new(memory), slots: BTreeMap::new(), free })
    }

    pub(crate) fn memory(&self) -> &Arc<SharedMemory> {
        &self.memory
    }

    /// Whether the engine's worker sleeps; see [`crate::sleeping`].
    pub(crate) fn sleeping(&self) -> &AtomicU32 {
        sleeping(&self.memory).expect("the word is inside the directory")
    }

    pub(crate) fn publish(&mut self, key: u64, length_bytes: u64) {
        let slot = self.free.pop().expect("as many slots as there may be regions");
        let entry = entry(&self.memory, slot).expect("slots are inside the directory");
        entry.publish(key, length_bytes);
        self.slots.insert(key, slot);
    }

    /// No check that begins from now on passes.
    pub(crate) fn withdraw(&mut self, key: u64) {
        let Some(slot) = self.slots.remove(&key) else { return };
        entry(&self.memory, slot).expect("slots are inside the directory").withdraw();
        self.free.push(slot);
    }

    pub(crate) fn slot(&self, key: u64) -> Option<usize> {
        self.slots.get(&key).copied()
    }
}

/// The flag in a peer's directory, if it has one.
pub(super) fn sleeping(directory: &SharedMemory) -> Option<&AtomicU32> {
    directory.atomic_u32(SLEEPING).ok()
}

/// The length of the region in a slot, if it still is this one; never more than is mapped of it here,
/// because its owner writes what it likes.
pub(super) fn lookup(
    directory: &SharedMemory,
    slot: usize,
    key: u64,
    mapped_bytes: u64,
) -> Option<u64> {
    let length_bytes = entry(directory, slot).ok()?.length_of(key)?;
    Some(length_bytes.min(mapped_bytes))
}

fn entry(directory: &SharedMemory, slot: usize) -> Result<Entry<'_>, RangeError> {
    let at = SLOTS.saturating_add(slot.saturating_mul(SLOT_BYTES));
    let (key, length) = (directory.atomic_u64(at)?, directory.atomic_u64(at.saturating_add(8))?);
    Ok(Entry { key, length_bytes: length })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_region_is_found_until_it_is_withdrawn() {
        let mut directory = Directory::create().expect("memory");
        directory.publish(5, 100);
        directory.publish(6, 200);
        let slot = directory.slot(5).expect("published");
        let find = |directory: &Directory, key| lookup(directory.memory(), slot, key, 1000);
        assert_eq!(find(&directory, 5), Some(100));
        assert_eq!(find(&directory, 6), None, "another slot has it");
        assert_eq!(lookup(directory.memory(), slot, 5, 60), Some(60), "no more than is mapped");
        directory.withdraw(5);
        assert_eq!(find(&directory, 5), None);
        directory.publish(7, 300);
        assert_eq!(
            (find(&directory, 5), find(&directory, 7)),
            (None, Some(300)),
            "slots are reused"
        );
        assert_eq!(lookup(directory.memory(), usize::MAX, 7, 1000), None);
    }
}
