//! Progress words: 64-bit words that another process (or device) raises, and that the worker polls.
//! What a word means is the caller's business.

use std::fmt;
use std::sync::Arc;

use crate::memory::SharedMemory;

/// Called on the worker with the word's former and new value, whenever they differ. Steps in between
/// may have been missed: a jump stands for all of them.
pub type OnProgress = Box<dyn FnMut(u64, u64) + Send>;

/// A word to be watched.
pub struct Watch {
    pub memory: Arc<SharedMemory>,
    /// Of the word; a multiple of 8.
    pub offset: usize,
    /// Of a u32 that the worker sets while it sleeps (a multiple of 4, in the same memory): whoever
    /// raises the word rings the engine's doorbell then (see `TransferEngine::wake_fd`).
    pub sleeping_offset: usize,
    pub on_progress: OnProgress,
}

impl fmt::Debug for Watch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Watch").field("offset", &self.offset).finish_non_exhaustive()
    }
}

/// Names a watch until it is taken back.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct WatchId(pub(crate) u64);
