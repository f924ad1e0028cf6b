//! One entry of an engine's table of regions: a key and a length, which the owner changes while peers look at
//! them without a lock. No key is used twice, so one that is seen before and after the length says that the
//! length is its own.

use kvasir_mutation::{Mutation, mutated};

use crate::sync::{AtomicU64, Ordering};

#[derive(Debug, Clone, Copy)]
pub(crate) struct Entry<'a> {
    /// 0: free.
    pub(crate) key: &'a AtomicU64,
    pub(crate) length_bytes: &'a AtomicU64,
}

impl Entry<'_> {
    /// The entry is free.
    pub(crate) fn publish(self, key: u64, length_bytes: u64) {
        // Whoever sees this length has also seen that the former key is no more.
        let is_early = mutated(Mutation::RegionLengthPublishedEarly);
        let order = if is_early { Ordering::Relaxed } else { Ordering::Release };
        self.length_bytes.store(length_bytes, order);
        self.key.store(key, Ordering::Release);
    }

    /// No check that begins from now on passes; see `gate`.
    pub(crate) fn withdraw(self) {
        self.key.store(0, Ordering::SeqCst);
    }

    /// The length, if the key is this one.
    pub(crate) fn length_of(self, key: u64) -> Option<u64> {
        if self.key.load(Ordering::SeqCst) != key {
            return None;
        }
        let length_bytes = self.length_bytes.load(Ordering::Acquire);
        (self.key.load(Ordering::Relaxed) == key).then_some(length_bytes)
    }
}
