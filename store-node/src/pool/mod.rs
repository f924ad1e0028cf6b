//! Pools: pages of an attached engine's own, and the copies between them and the node's slots.
//!
//! - [`memory`]: memory that a pool may lie in, and [`cuda`] such memory of a GPU
//! - [`copier`]: the thread that copies
//!
//! Which page holds what, and what is to be copied, is the block core's to know.

pub mod copier;
pub mod cuda;
pub mod memory;

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use kvasir_proto::pool::PoolLayoutError;
use kvasir_proto::{PoolLayout, SlotLayout, v1};
use kvasir_transfer::memory::MemoryError;
use v1::pool_description::Memory;

use self::cuda::{CudaDescription, CudaMemory, CudaPoolError, Slots};
use self::memory::{HostMemory, PoolMemory};
use crate::node::command::Refused;

/// The pool of one attachment. When the last holder drops it, its memory is let go.
#[derive(Debug)]
pub struct Pool {
    pub layout: PoolLayout,
    pub memory: Box<dyn PoolMemory>,
    is_closed: AtomicBool,
}

impl Pool {
    /// Its engine has left: no copy begins any more.
    pub fn close(&self) {
        self.is_closed.store(true, Ordering::Release);
    }

    pub fn is_closed(&self) -> bool {
        self.is_closed.load(Ordering::Acquire)
    }
}

/// Why an engine does not get the pool that it describes.
#[derive(Debug, thiserror::Error)]
pub enum PoolError {
    #[error("field `pool.memory` is missing")]
    NoMemory,
    #[error("the pool: {0}")]
    Layout(#[from] PoolLayoutError),
    #[error(
        "a pool of {bytes} bytes is more than the {bytes_max} that this node gives: make it \
         smaller, or set `pool_bytes_max` higher"
    )]
    TooLarge { bytes: u64, bytes_max: u64 },
    #[error("the memory of the pool is not to be had: {0}")]
    Memory(#[from] MemoryError),
    #[error("the pool in a GPU's memory: {0}")]
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
pub struct Pools {
    /// Of a pool in memory of the host.
    pub bytes_max: u64,
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
    pub fn open(
        &self,
        described: &v1::PoolDescription,
        slot: &SlotLayout,
    ) -> Result<Pool, PoolError> {
        let v1::PoolDescription { memory, pages, layers } = described;
        let layout = |bytes| PoolLayout::from_wire(*pages, bytes, layers, slot);
        let (layout, memory): (_, Box<dyn PoolMemory>) = match memory {
            None => return Err(PoolError::NoMemory),
            Some(Memory::Host(v1::HostPool { bytes })) => {
                let (layout, bytes_max) = (layout(*bytes)?, self.bytes_max);
                if *bytes > bytes_max {
                    return Err(PoolError::TooLarge { bytes: *bytes, bytes_max });
                }
                (layout, Box::new(HostMemory::create(*bytes)?))
            }
            Some(Memory::Cuda(described)) => {
                let described = CudaDescription::new(described)?;
                let layout = layout(described.bytes())?;
                described.check(&layout)?;
                let library = self.cuda_library.as_deref();
                (layout, Box::new(CudaMemory::open(&described, library, &self.slots)?))
            }
        };
        Ok(Pool { layout, memory, is_closed: AtomicBool::new(false) })
    }
}
