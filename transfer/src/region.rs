//! Registered memory: the owner's handle, and the descriptor that peers write to.

use std::sync::Arc;

use prost::Message;

use crate::endpoint::WireError;
use crate::memory::SharedMemory;

/// Memory that is registered here. Cheap to clone; the registration ends with `revoke`, not with the
/// handle.
#[derive(Debug, Clone)]
pub struct RegionHandle {
    pub(crate) key: u64,
    pub(crate) incarnation: u64,
    pub(crate) memory: Arc<SharedMemory>,
}

impl RegionHandle {
    pub fn memory(&self) -> &Arc<SharedMemory> {
        &self.memory
    }

    pub fn descriptor(&self) -> RegionDesc {
        let length_bytes = self.memory.len() as u64;
        RegionDesc { incarnation: self.incarnation, key: self.key, length_bytes }
    }
}

/// What a peer needs, beside the endpoint, to write into a region.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct RegionDesc {
    /// Of the engine that registered it.
    pub incarnation: u64,
    pub key: u64,
    pub length_bytes: u64,
}

const VERSION: u32 = 1;

#[derive(Clone, PartialEq, Message)]
struct RegionWire {
    #[prost(uint32, tag = "1")]
    version: u32,
    #[prost(fixed64, tag = "2")]
    incarnation: u64,
    #[prost(fixed64, tag = "3")]
    key: u64,
    #[prost(uint64, tag = "4")]
    length_bytes: u64,
}

impl RegionDesc {
    pub fn to_bytes(&self) -> Vec<u8> {
        let RegionDesc { incarnation, key, length_bytes } = *self;
        RegionWire { version: VERSION, incarnation, key, length_bytes }.encode_to_vec()
    }

    /// # Errors
    /// [`WireError`] when the bytes are not a descriptor of a version known here.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, WireError> {
        let RegionWire { version, incarnation, key, length_bytes } = RegionWire::decode(bytes)?;
        if version != VERSION {
            return Err(WireError::Version { got: version, known: VERSION });
        }
        Ok(RegionDesc { incarnation, key, length_bytes })
    }
}
