//! Pools: pages of an attached engine's own, and the copies between them and the node's slots.
//!
//! - [`memory`]: memory that a pool may lie in
//! - [`copier`]: the thread that copies
//!
//! Which page holds what, and what is to be copied, is the block core's to know.

pub mod copier;
pub mod memory;

use kvasir_proto::pool::PoolLayoutError;
use kvasir_proto::{PoolLayout, SlotLayout, v1};
use kvasir_transfer::memory::MemoryError;
use v1::pool_description::Memory;

use self::memory::{HostMemory, PoolMemory};
use crate::node::command::Refused;

/// The pool of one attachment. When the last holder drops it, its memory is let go.
#[derive(Debug)]
pub struct Pool {
    pub layout: PoolLayout,
    pub memory: Box<dyn PoolMemory>,
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
}

impl From<PoolError> for Refused {
    fn from(error: PoolError) -> Self {
        let why = error.to_string();
        match error {
            PoolError::NoMemory | PoolError::Layout(_) => Refused::Invalid(why),
            PoolError::TooLarge { .. } | PoolError::Memory(_) => Refused::Precondition(why),
        }
    }
}

impl Pool {
    /// Makes the pool that an engine describes, for slots of this layout. Takes half a second for each GiB.
    ///
    /// # Errors
    /// [`PoolError`].
    pub fn open(
        described: &v1::PoolDescription,
        slot: &SlotLayout,
        bytes_max: u64,
    ) -> Result<Pool, PoolError> {
        let v1::PoolDescription { memory, pages, layers } = described;
        let Some(Memory::Host(v1::HostPool { bytes })) = *memory else {
            return Err(PoolError::NoMemory);
        };
        let layout = PoolLayout::from_wire(*pages, bytes, layers, slot)?;
        if bytes > bytes_max {
            return Err(PoolError::TooLarge { bytes, bytes_max });
        }
        Ok(Pool { layout, memory: Box::new(HostMemory::create(bytes)?) })
    }
}
