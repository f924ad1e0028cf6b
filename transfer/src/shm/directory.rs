//! The table of an engine's regions as its shm peers see it: they map it read-only and look a region
//! up in it before each copy. A key is withdrawn here before a revocation waits for copies under way.
//! It also holds the flag that says whether the engine's worker sleeps.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

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
        sleeping(&self.memory).expect("it lies in the directory")
    }

    pub(crate) fn publish(&mut self, key: u64, length_bytes: u64) {
        let slot = self.free.pop().expect("as many slots as there may be regions");
        let [word, length] = words(&self.memory, slot).expect("slots lie in the directory");
        length.store(length_bytes, Ordering::Relaxed);
        word.store(key, Ordering::Release);
        self.slots.insert(key, slot);
    }

    /// No check that begins from now on passes.
    pub(crate) fn withdraw(&mut self, key: u64) {
        let Some(slot) = self.slots.remove(&key) else { return };
        let [word, _] = words(&self.memory, slot).expect("slots lie in the directory");
        word.store(0, Ordering::SeqCst);
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
/// because its owner writes what it likes. Read in this order, the length is that of the key.
pub(super) fn lookup(
    directory: &SharedMemory,
    slot: usize,
    key: u64,
    mapped_bytes: u64,
) -> Option<u64> {
    let [word, length] = words(directory, slot).ok()?;
    if word.load(Ordering::SeqCst) != key {
        return None;
    }
    let length_bytes = length.load(Ordering::Acquire);
    (word.load(Ordering::Relaxed) == key).then_some(length_bytes.min(mapped_bytes))
}

fn words(
    directory: &SharedMemory,
    slot: usize,
) -> Result<[&std::sync::atomic::AtomicU64; 2], RangeError> {
    let at = SLOTS.saturating_add(slot.saturating_mul(SLOT_BYTES));
    Ok([directory.atomic_u64(at)?, directory.atomic_u64(at.saturating_add(8))?])
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
