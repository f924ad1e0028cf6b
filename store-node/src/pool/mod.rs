//! Pools: pages of an attached engine's own, and the copies between them and the node's slots.
//!
//! - [`memory`]: memory that a pool may lie in, and [`cuda`] such memory of a GPU
//! - [`copier`]: the thread that copies
//!
//! Which page holds what, and what is to be copied, is the block core's to know.

pub(crate) mod copier;
pub(crate) mod cuda;
pub(crate) mod memory;

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use kvasir_proto::{PoolLayout, PoolLayoutError, SlotLayout, v1};
use kvasir_transfer::memory::MemoryError;
use v1::pool_description::Memory;

use self::cuda::{CudaDescription, CudaMemory, CudaPoolError, Slots};
use self::memory::{HostMemory, PoolMemory};
use crate::node::command::Refused;

/// The pool of one attachment. When the last holder drops it, its memory is let go.
#[derive(Debug)]
pub(crate) struct Pool {
    pub layout: PoolLayout,
    pub memory: Box<dyn PoolMemory>,
    is_closed: AtomicBool,
    _room: Room,
}

/// What a pool has of the memory that the node gives to pools; given back when it is dropped.
#[derive(Debug)]
struct Room {
    bytes: u64,
    given: Arc<AtomicU64>,
}

impl Drop for Room {
    fn drop(&mut self) {
        self.given.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

impl Pool {
    /// Its engine has left: no copy begins any more.
    pub(crate) fn close(&self) {
        self.is_closed.store(true, Ordering::Release);
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.is_closed.load(Ordering::Acquire)
    }
}

/// Why an engine does not get the pool that it describes.
#[derive(Debug, thiserror::Error)]
pub enum PoolError {
    #[error("field `pool.memory` is missing")]
    NoMemory,
    #[error("invalid pool: {0}")]
    Layout(#[from] PoolLayoutError),
    #[error(
        "a pool of {bytes} bytes exceeds the rest of the {bytes_max} bytes that this node allows \
         for pools: make it smaller, stop another engine, or raise `engine_pool_bytes_max`"
    )]
    TooLarge { bytes: u64, bytes_max: u64 },
    #[error("cannot allocate the memory of the pool: {0}")]
    Memory(#[from] MemoryError),
    #[error("invalid pool in GPU memory: {0}")]
    Cuda(#[from] CudaPoolError),
}

impl From<PoolError> for Refused {
    fn from(error: PoolError) -> Self {
        let why = error.to_string();
        match error {
            PoolError::NoMemory | PoolError::Layout(_) => Refused::Invalid(why),
            PoolError::Cuda(CudaPoolError::Driver(_) | CudaPoolError::Open { .. })
            | PoolError::TooLarge { .. }
            | PoolError::Memory(_) => Refused::Precondition(why),
            PoolError::Cuda(_) => Refused::Invalid(why),
        }
    }
}

/// What pools are made with.
#[derive(Debug)]
pub(crate) struct Pools {
    /// Of all pools in memory of the host together.
    pub bytes_max: u64,
    /// So much of that is given.
    pub given: Arc<AtomicU64>,
    /// NVIDIA's driver, where it is not the system's.
    pub cuda_library: Option<PathBuf>,
    pub slots: Arc<Slots>,
}

impl Pools {
    /// Makes or opens the pool that an engine describes, for slots of this layout. Memory of the host takes half a second
    /// for each GiB.
    ///
    /// # Errors
    /// [`PoolError`].
    pub(crate) fn open(
        &self,
        described: &v1::PoolDescription,
        slot: &SlotLayout,
    ) -> Result<Pool, PoolError> {
        let v1::PoolDescription { memory, pages, layers } = described;
        let layout = |bytes| PoolLayout::from_wire(*pages, bytes, layers, slot);
        let (layout, room, memory): (_, _, Box<dyn PoolMemory>) = match memory {
            None => return Err(PoolError::NoMemory),
            Some(Memory::Host(v1::HostPool { bytes })) => {
                let (layout, room) = (layout(*bytes)?, self.room(*bytes)?);
                (layout, room, Box::new(HostMemory::create(*bytes)?))
            }
            Some(Memory::Cuda(described)) => {
                let described = CudaDescription::new(described)?;
                let layout = layout(described.bytes())?;
                described.check(&layout)?;
                let library = self.cuda_library.as_deref();
                // Its engine has made it.
                let room = Room { bytes: 0, given: Arc::clone(&self.given) };
                (layout, room, Box::new(CudaMemory::open(&described, library, &self.slots)?))
            }
        };
        Ok(Pool { layout, memory, is_closed: AtomicBool::new(false), _room: room })
    }

    fn room(&self, bytes: u64) -> Result<Room, PoolError> {
        let bytes_max = self.bytes_max;
        let with_it = |given: u64| given.checked_add(bytes).filter(|all| *all <= bytes_max);
        let (given, relaxed) = (Arc::clone(&self.given), Ordering::Relaxed);
        match given.fetch_update(relaxed, relaxed, with_it) {
            Ok(_) => Ok(Room { bytes, given }),
            Err(_) => Err(PoolError::TooLarge { bytes, bytes_max }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_pools_together_have_no_more_than_the_node_gives() {
        let memory = kvasir_transfer::memory::SharedMemory::create(
            "slots",
            1 << 16,
            kvasir_transfer::memory::Prefault::No,
        );
        let slots = Arc::new(Slots::new(Arc::new(memory.expect("memory"))));
        let pools = Pools { bytes_max: 100, given: Arc::default(), cuda_library: None, slots };
        let first = pools.room(60).expect("room");
        for bytes in [41, u64::MAX] {
            assert!(matches!(pools.room(bytes), Err(PoolError::TooLarge { .. })), "{bytes}");
        }
        drop(pools.room(40).expect("room"));
        drop(first);
        assert!(pools.room(100).is_ok());
    }
}
