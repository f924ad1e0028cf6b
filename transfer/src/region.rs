//! Registered memory: the owner's handle, and the descriptor that peers write to.

use std::sync::Arc;

use prost::Message;

use crate::endpoint::WireError;
use crate::memory::SharedMemory;
use crate::rdma::{RdmaPlace, RdmaPlaceWire};

/// Memory that is registered here. Cheap to clone; the registration ends with `revoke`, not with the
/// handle.
#[derive(Debug, Clone)]
pub struct RegionHandle {
    pub(crate) key: u64,
    pub(crate) incarnation: u64,
    pub(crate) memory: Arc<SharedMemory>,
    /// Shared by clones, which are made often.
    pub(crate) rdma: Option<Arc<RdmaPlace>>,
}

impl RegionHandle {
    pub fn memory(&self) -> &Arc<SharedMemory> {
        &self.memory
    }

    pub fn descriptor(&self) -> RegionDesc {
        let length_bytes = self.memory.len() as u64;
        let (incarnation, key) = (self.incarnation, self.key);
        let rdma = self.rdma.as_deref().copied();
        RegionDesc { incarnation, key, length_bytes, rdma }
    }
}

/// What a peer needs, beside the endpoint, to write into a region.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct RegionDesc {
    /// Of the engine that registered it.
    pub incarnation: u64,
    pub key: u64,
    pub length_bytes: u64,
    /// Where it lies for RDMA, when it was registered with a card.
    pub rdma: Option<RdmaPlace>,
}

/// 2: a place for each card, and the memory's location.
const VERSION: u32 = 2;

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
    #[prost(message, optional, tag = "5")]
    rdma: Option<RdmaPlaceWire>,
}

impl RegionDesc {
    pub fn to_bytes(&self) -> Vec<u8> {
        let RegionDesc { incarnation, key, length_bytes, rdma } = *self;
        let rdma = rdma.map(RdmaPlace::to_wire);
        RegionWire { version: VERSION, incarnation, key, length_bytes, rdma }.encode_to_vec()
    }

    /// # Errors
    /// [`WireError`] when the bytes are not a descriptor of a version known here.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, WireError> {
        let RegionWire { version, incarnation, key, length_bytes, rdma } =
            RegionWire::decode(bytes)?;
        if version != VERSION {
            return Err(WireError::Version { got: version, known: VERSION });
        }
        let rdma = rdma.as_ref().map(RdmaPlace::from_wire).transpose()?;
        Ok(RegionDesc { incarnation, key, length_bytes, rdma })
    }
}
