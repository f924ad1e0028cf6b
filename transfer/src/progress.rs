//! Progress words: 64-bit words that another process or a device raises, and that the worker polls.
//! What a word means is the caller's business.

use std::any::Any;
use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use crate::completion::Completion;
use crate::engine::SubmitError;
use crate::memory::{Access, RangeError, SharedMemory};

/// Called on the worker with the word's former and new value, whenever they differ. Steps in between
/// may have been missed: a jump stands for all of them.
pub type OnProgress = Box<dyn FnMut(u64, u64) + Send>;

/// A word to be watched.
pub struct Watch {
    pub memory: WordMemory,
    /// Of the word; a multiple of 8.
    pub offset: usize,
    pub raised: Raised,
    pub on_progress: OnProgress,
}

impl fmt::Debug for Watch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Watch").field("offset", &self.offset).finish_non_exhaustive()
    }
}

/// How a sleeping worker learns that the word was raised. One that is awake looks at the word anyway.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Raised {
    /// By whoever raises it: at `sleeping_offset` (a multiple of 4, in the same memory) lies a u32 that
    /// the worker sets while it sleeps, and then the engine's doorbell is to be rung (see
    /// `TransferEngine::wake_fd` and [`crate::doorbell::Ringer::ring_if`]).
    WithBell { sleeping_offset: usize },
    /// By nobody, as where a device raises it: the worker looks at the word at least so often, and at
    /// most every [`POLL_EVERY_MIN`]. Each look of a sleeping worker costs a few microseconds of a core.
    Silently { poll_every: Duration },
}

/// A word in which a counter is mirrored, for whoever polls memory and is not told: a kernel on a device. See
/// `TransferEngine::expect_imm_mirrored`.
#[derive(Debug, Clone)]
pub struct Mirror {
    pub memory: WordMemory,
    /// Of the word; a multiple of 8.
    pub offset: usize,
}

impl Mirror {
    /// A completion that stores `count` when it is reached, and then tells `done`.
    pub(crate) fn before(self, count: u64, done: Completion) -> Result<Completion, SubmitError> {
        let fits = self.memory.word(self.offset).is_ok() && self.memory.is_writable();
        if !fits {
            return Err(SubmitError::Invalid("the mirror's word does not fit its memory"));
        }
        Ok(Completion::callback(move |outcome| {
            // Whoever sees the count sees the bytes that were counted.
            if let (Ok(()), Ok(word)) = (outcome, self.memory.word(self.offset)) {
                word.store(count, Ordering::Release);
            }
            done.complete(outcome);
        }))
    }
}

/// The shortest time between two looks of a worker that would otherwise sleep.
pub const POLL_EVERY_MIN: Duration = Duration::from_micros(50);

/// Names a watch until it is taken back.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct WatchId(pub(crate) u64);

/// Memory in which words lie: shared memory, or any other that is mapped here. Cheap to clone.
#[derive(Clone)]
pub struct WordMemory(Words);

#[derive(Clone)]
enum Words {
    Shared(Arc<SharedMemory>),
    Mapped(Mapped),
}

#[derive(Clone)]
struct Mapped {
    base: NonNull<u8>,
    bytes: usize,
    /// Keeps the mapping alive.
    _owner: Arc<dyn Any + Send + Sync>,
}

// SAFETY: the memory is accessed by atomics only, and whoever made it a `WordMemory` has promised that
// it may be accessed so from any thread while its owner lives.
unsafe impl Send for Mapped {}
// SAFETY: as above.
unsafe impl Sync for Mapped {}

impl fmt::Debug for WordMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WordMemory").field("bytes", &self.len()).finish_non_exhaustive()
    }
}

impl From<Arc<SharedMemory>> for WordMemory {
    fn from(memory: Arc<SharedMemory>) -> Self {
        WordMemory(Words::Shared(memory))
    }
}

impl WordMemory {
    /// Memory that is mapped here by other means: pinned host memory that a device writes, or device
    /// memory that the host can read. `owner` is dropped with the last clone.
    ///
    /// # Safety
    /// As long as `owner` lives, `bytes` bytes from `base` must be mapped in this process and readable
    /// from any thread, and writable where a [`Raised::WithBell`] flag lies in them. Nobody in this
    /// process may access the watched words and flags but by atomics of their size; a device writes
    /// them whole, as it does with aligned words of 8 bytes.
    pub unsafe fn mapped(
        base: NonNull<u8>,
        bytes: usize,
        owner: Arc<dyn Any + Send + Sync>,
    ) -> WordMemory {
        WordMemory(Words::Mapped(Mapped { base, bytes, _owner: owner }))
    }

    #[allow(clippy::len_without_is_empty)] // nobody watches a word in nothing
    pub fn len(&self) -> usize {
        match &self.0 {
            Words::Shared(memory) => memory.len(),
            Words::Mapped(mapped) => mapped.bytes,
        }
    }

    /// Whether a flag in it can be set.
    pub(crate) fn is_writable(&self) -> bool {
        match &self.0 {
            Words::Shared(memory) => memory.access() == Access::ReadWrite,
            Words::Mapped(_) => true,
        }
    }

    pub(crate) fn word(&self, offset: usize) -> Result<&AtomicU64, RangeError> {
        match &self.0 {
            Words::Shared(memory) => memory.atomic_u64(offset),
            Words::Mapped(mapped) => {
                let word = mapped.place(offset, 8)?;
                // SAFETY: it lies in the mapping and is aligned; the rest is promised to `mapped`.
                Ok(unsafe { AtomicU64::from_ptr(word.cast()) })
            }
        }
    }

    pub(crate) fn flag(&self, offset: usize) -> Result<&AtomicU32, RangeError> {
        match &self.0 {
            Words::Shared(memory) => memory.atomic_u32(offset),
            Words::Mapped(mapped) => {
                let flag = mapped.place(offset, 4)?;
                // SAFETY: it lies in the mapping and is aligned; the rest is promised to `mapped`.
                Ok(unsafe { AtomicU32::from_ptr(flag.cast()) })
            }
        }
    }
}

impl Mapped {
    /// Where a word of so many bytes lies.
    fn place(&self, offset: usize, bytes: usize) -> Result<*mut u8, RangeError> {
        let error = RangeError { offset, bytes, len: self.bytes };
        let end = offset.checked_add(bytes).ok_or(error)?;
        let address = self.base.as_ptr().wrapping_add(offset);
        let fits = end <= self.bytes && address.addr().is_multiple_of(bytes);
        fits.then_some(address).ok_or(error)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_of_mapped_memory_lie_inside_and_are_aligned() {
        let owner: Arc<[AtomicU64; 4]> = Arc::new([const { AtomicU64::new(0) }; 4]);
        let base = NonNull::from(owner.as_ref()).cast();
        // SAFETY: the array lives as long as its owner, and is made of atomics.
        let memory = unsafe { WordMemory::mapped(base, 32, Arc::clone(&owner) as _) };
        owner[3].store(7, Ordering::Relaxed);
        assert_eq!(memory.word(24).expect("the last one").load(Ordering::Relaxed), 7);
        memory.flag(4).expect("a half of the first one").store(1, Ordering::Relaxed);
        assert_eq!(owner[0].load(Ordering::Relaxed), 1 << 32);
        for offset in [4, 28, 32, usize::MAX] {
            assert!(memory.word(offset).is_err(), "{offset}");
        }
        for offset in [2, 30, 32, usize::MAX] {
            assert!(memory.flag(offset).is_err(), "{offset}");
        }
        // SAFETY: as above.
        let odd = unsafe { WordMemory::mapped(base.add(4), 28, Arc::clone(&owner) as _) };
        assert!(odd.word(0).is_err(), "it is the address that must be aligned");
        assert_eq!(odd.word(20).expect("aligned").load(Ordering::Relaxed), 7);
        drop((memory, odd));
        assert_eq!(Arc::strong_count(&owner), 1, "the owner is let go with the last clone");
    }
}
