//! Room in a completion queue, which threads share without a lock: queue pairs take it when they are made, and what
//! they took is given back when they are destroyed and the queue has been seen empty after that, since drivers
//! leave completions of destroyed queue pairs in it.

use kvasir_mutation::{Mutation, mutated};

use crate::sync::{AtomicU32, AtomicU64, Ordering};

/// See `Room::left_behind`.
const ONCE_LEFT: u64 = 1 << 32;

/// See the module.
#[derive(Debug)]
pub(crate) struct Room {
    capacity: u32,
    /// What queue pairs have taken.
    reserved: AtomicU32,
    /// The part of it whose queue pairs are destroyed, while completions of theirs may still be there,
    /// in the low half; in the high half how often that has happened, so that a thread that saw the
    /// queue empty long ago cannot settle what was left behind since.
    left_behind: AtomicU64,
}

/// What had been left behind at a moment.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Left(u64);

impl Room {
    pub(crate) fn new(capacity: u32) -> Room {
        Room { capacity, reserved: AtomicU32::new(0), left_behind: AtomicU64::new(0) }
    }

    pub(crate) fn capacity(&self) -> u32 {
        self.capacity
    }

    pub(crate) fn free(&self) -> u32 {
        self.capacity.saturating_sub(self.reserved.load(Ordering::Relaxed))
    }

    /// # Errors
    /// How much is free, when that is less.
    pub(crate) fn reserve(&self, wanted: u32) -> Result<(), u32> {
        let taken = self.reserved.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |reserved| {
            reserved.checked_add(wanted).filter(|sum| *sum <= self.capacity)
        });
        taken.map(drop).map_err(|reserved| self.capacity.saturating_sub(reserved))
    }

    /// Gives room back at once: its queue pair was never made.
    pub(crate) fn cancel(&self, wanted: u32) {
        self.reserved.fetch_sub(wanted, Ordering::Relaxed);
    }

    /// Its queue pair is destroyed.
    pub(crate) fn leave_behind(&self, room: u32) {
        let once_left = if mutated(Mutation::RoomFreedByOldObservation) { 0 } else { ONCE_LEFT };
        self.left_behind.fetch_add(once_left + u64::from(room), Ordering::Release);
    }

    /// Before the queue is polled: of queue pairs that are destroyed by now.
    pub(crate) fn left(&self) -> Left {
        Left(self.left_behind.load(Ordering::Acquire))
    }

    /// The queue was empty after that was left behind. Another thread may have seen it too.
    pub(crate) fn seen_empty(&self, Left(left): Left) {
        let room = left as u32;
        if room == 0 {
            return;
        }
        let settled = self.left_behind.compare_exchange(
            left,
            left - u64::from(room),
            Ordering::Relaxed,
            Ordering::Relaxed,
        );
        if settled.is_ok() {
            self.reserved.fetch_sub(room, Ordering::Relaxed);
        }
    }
}
