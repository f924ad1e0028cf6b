//! The control memory of one attach: a memfd that node and engine map, made anew each time an
//! engine attaches, so that nothing of a former engine is left in it.
//!
//! Layout (native byte order; both sides run on one host), each hot word on cache lines of its own:
//!
//! | bytes | what |
//! | --- | --- |
//! | 0 | magic, version, attach epoch |
//! | 128 | the node sleeps (u32) |
//! | 256 | the engine sleeps (u32) |
//! | 384 | progress word: attach epoch 16 bits, step 32 bits, layers done 16 bits, high to low |
//! | 512 | load: running, waiting, waiting prompt tokens, computed prompt tokens (u64 each) |
//! | 4096 | ring engine to node, ring node to engine (see [`kvasir_transfer::ring`]) |

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use kvasir_blocks::moving::engine_stops::Progress;
use kvasir_proto::v1;
use kvasir_transfer::memory::{Access, MemoryError, Prefault, SharedMemory};
use kvasir_transfer::ring::{Consumer, Producer, RingRange};

use crate::words;

const MAGIC: u64 = u64::from_le_bytes(*b"kvasir-c");
const VERSION: u32 = 1;
const MAGIC_AT: usize = 0;
const VERSION_AT: usize = 8;
const EPOCH_AT: usize = 12;
const NODE_SLEEPS_AT: usize = 128;
const ENGINE_SLEEPS_AT: usize = 256;
const PROGRESS_AT: usize = 384;
const LOAD_AT: usize = 512;
const RINGS_AT: usize = 4096;
/// Half of it holds the longest message (all slots of the longest prompt, a large tail).
const RING_BYTES: usize = 2 << 20;
/// All of it.
pub const CONTROL_BYTES: usize = RINGS_AT + 2 * RING_BYTES;

/// The ring that the engine produces into.
const TO_NODE: RingRange = RingRange { offset: RINGS_AT, bytes: RING_BYTES };
/// The ring that the node produces into.
const TO_ENGINE: RingRange = RingRange { offset: RINGS_AT + RING_BYTES, bytes: RING_BYTES };

#[derive(Debug, thiserror::Error)]
pub enum ControlError {
    #[error("cannot create or map the control memory")]
    Memory(#[from] MemoryError),
    #[error("the control memory has an unexpected format: {0}")]
    Foreign(String),
}

/// Control memory, mapped.
#[derive(Debug)]
pub struct ControlMemory {
    memory: Arc<SharedMemory>,
}

impl ControlMemory {
    /// Fresh control memory, for the node.
    ///
    /// # Errors
    /// When there is no memory or no descriptor for it.
    pub fn create(epoch: u32) -> Result<Self, ControlError> {
        let memory = SharedMemory::create("kvasir-control", CONTROL_BYTES, Prefault::Yes)?;
        let control = ControlMemory { memory: Arc::new(memory) };
        control.word(MAGIC_AT).store(MAGIC, Ordering::Relaxed);
        control.half_word(VERSION_AT).store(VERSION, Ordering::Relaxed);
        control.half_word(EPOCH_AT).store(epoch, Ordering::Release);
        Ok(control)
    }

    /// Maps what the node made, for the engine.
    ///
    /// # Errors
    /// [`ControlError::Foreign`] when it is of another version or another attach.
    pub fn open(fd: OwnedFd, epoch: u32) -> Result<Self, ControlError> {
        let memory = SharedMemory::from_fd(fd, CONTROL_BYTES, Access::ReadWrite)?;
        let control = ControlMemory { memory: Arc::new(memory) };
        let got_epoch = control.half_word(EPOCH_AT).load(Ordering::Acquire);
        let magic = control.word(MAGIC_AT).load(Ordering::Relaxed);
        let version = control.half_word(VERSION_AT).load(Ordering::Relaxed);
        if magic != MAGIC || version != VERSION || got_epoch != epoch {
            let what = format!("magic {magic:016x}, version {version}, epoch {got_epoch}");
            return Err(ControlError::Foreign(what));
        }
        Ok(control)
    }

    /// The node's ends of the two rings: what it takes from and what it puts into.
    pub fn node_rings(&self) -> (Consumer, Producer) {
        self.rings(TO_NODE, TO_ENGINE)
    }

    /// The engine's ends.
    pub fn engine_rings(&self) -> (Consumer, Producer) {
        self.rings(TO_ENGINE, TO_NODE)
    }

    fn rings(&self, from: RingRange, to: RingRange) -> (Consumer, Producer) {
        let consumer = Consumer::open(&self.memory, from).expect("the layout of this file");
        (consumer, Producer::open(&self.memory, to).expect("the layout of this file"))
    }

    /// The memory itself, to hand its descriptor over.
    pub fn memory(&self) -> &SharedMemory {
        &self.memory
    }

    pub fn node_sleeps(&self) -> &AtomicU32 {
        self.half_word(NODE_SLEEPS_AT)
    }

    pub fn engine_sleeps(&self) -> &AtomicU32 {
        self.half_word(ENGINE_SLEEPS_AT)
    }

    /// What the engine has finished, or `None` when the word is of another attach or untouched.
    pub fn progress(&self, epoch: u32) -> Option<Progress> {
        words::progress(self.word(PROGRESS_AT), epoch)
    }

    /// Raises the progress word. Everything the engine wrote before is visible to whoever reads it.
    pub fn set_progress(&self, epoch: u32, progress: Progress) {
        words::set_progress(self.word(PROGRESS_AT), epoch, progress);
    }

    /// The engine's load. Its four numbers are read one by one: they are for admission, and one of
    /// them may be a moment older than the next.
    pub fn load(&self) -> v1::InstanceLoad {
        let number = |index: usize| self.word(LOAD_AT + 8 * index).load(Ordering::Relaxed);
        let small = |index: usize| u32::try_from(number(index)).unwrap_or(u32::MAX);
        v1::InstanceLoad {
            running_requests: small(0),
            waiting_requests: small(1),
            waiting_prompt_tokens: number(2),
            computed_prompt_tokens: number(3),
        }
    }

    pub fn set_load(&self, load: &v1::InstanceLoad) {
        let numbers = [
            load.running_requests.into(),
            load.waiting_requests.into(),
            load.waiting_prompt_tokens,
            load.computed_prompt_tokens,
        ];
        for (index, number) in numbers.into_iter().enumerate() {
            self.word(LOAD_AT + 8 * index).store(number, Ordering::Relaxed);
        }
    }

    fn word(&self, at: usize) -> &AtomicU64 {
        self.memory.atomic_u64(at).expect("the layout of this file")
    }

    fn half_word(&self, at: usize) -> &AtomicU32 {
        self.memory.atomic_u32(at).expect("the layout of this file")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn progress_of_another_attach_is_not_seen() {
        let control = ControlMemory::create(7).expect("memory");
        assert_eq!(control.progress(7), None);
        let progress = Progress { step: u32::MAX - 1, layers_done: 61 };
        control.set_progress(7, progress);
        assert_eq!(control.progress(7), Some(progress));
        assert_eq!(control.progress(8), None);
    }

    #[test]
    fn both_processes_see_one_memory_and_a_foreign_one_is_refused() {
        let node = ControlMemory::create(3).expect("memory");
        let fd = || node.memory().fd().try_clone_to_owned().expect("a descriptor");
        let engine = ControlMemory::open(fd(), 3).expect("the same memory");
        let load = v1::InstanceLoad {
            running_requests: 1,
            waiting_requests: 2,
            waiting_prompt_tokens: 3,
            computed_prompt_tokens: 1 << 40,
        };
        engine.set_load(&load);
        assert_eq!(node.load(), load);
        assert!(matches!(ControlMemory::open(fd(), 4), Err(ControlError::Foreign(_))));
    }
}
