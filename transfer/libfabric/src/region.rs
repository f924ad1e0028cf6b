//! Registered memory: what operations read and write here, and what peers may reach.
//!
//! # Cutting a peer off
//!
//! Reliable datagrams have no connection to close, and removing a peer's address stops only what is
//! sent to it. What keeps a peer out of memory is its registration, so memory that must be withdrawn
//! by itself is registered by itself. After [`MemoryRegion::close`] no *new* write gets in, whoever
//! sends it. What that says about a write that was arriving just then is in [`Closed`]:
//!
//! - A device that checks every access (`efa` with writes in hardware) has let go of the memory:
//!   [`Closed::Certain`].
//! - Where the provider's code copies what arrives (`tcp`, `shm`, `efa` without writes in hardware),
//!   it checks when a write begins. One that had begun may still land. Then either all endpoints of
//!   the domain are closed, or each peer confirms that all it posted to the region has completed (an
//!   operation completes when it is delivered) and that it posts no more.
//!
//! A peer can also be given an endpoint of its own to write to, on the same queue as others: closing
//! that endpoint ends all that arrives through it, for certain and for this peer only, whoever places
//! it. It costs a queue pair per peer.
//!
//! Memory is never freed under a late write: where it is not certain, the domain holds the owner until
//! its last such endpoint is closed. That is what makes closing safe; whether *reusing* the memory is
//! right is for the caller to know from the answer.

use std::fmt;
use std::os::fd::{AsRawFd, OwnedFd};
use std::ptr::{self, NonNull};
use std::sync::Arc;

use crate::bindings::*;
use crate::domain::{Domain, DomainInner, lock, opened};
use crate::error::{OpenError, OutOfRange};
use crate::library::Version;
use crate::memory::Memory;
use crate::ops;

/// What a region is for. Sending, and writing from it to peers, is always allowed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Access {
    /// Messages are received into it, and reads from peers land in it.
    pub local_write: bool,
    /// Peers may write it.
    pub remote_write: bool,
    /// Peers may read it.
    pub remote_read: bool,
}

impl Access {
    /// Everything.
    pub const ALL: Access = Access { local_write: true, remote_write: true, remote_read: true };
    /// Only what operations of this side send from.
    pub const SOURCE: Access =
        Access { local_write: false, remote_write: false, remote_read: false };
    /// What peers write.
    pub const TARGET: Access =
        Access { local_write: false, remote_write: true, remote_read: false };

    fn flags(self) -> u64 {
        let mut flags = FI_SEND | FI_WRITE;
        if self.local_write {
            flags |= FI_RECV | FI_READ;
        }
        if self.remote_write {
            flags |= FI_REMOTE_WRITE;
        }
        if self.remote_read {
            flags |= FI_REMOTE_READ;
        }
        flags
    }
}

/// Whose memory a dma-buf is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Device {
    Cuda(i32),
    Rocr(i32),
    Neuron(i32),
    SynapseAi(i32),
}

/// Memory of a device, as a dma-buf.
#[derive(Debug)]
pub struct DmaBuf {
    /// Held as long as the region.
    pub fd: OwnedFd,
    /// Where in the dma-buf the region begins.
    pub offset: u64,
    pub bytes: usize,
    /// The address at which the *dma-buf* begins for operations of this side; the device's own.
    pub base: u64,
    pub device: Device,
}

/// Why memory could not be registered.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RegisterError {
    #[error(transparent)]
    Range(#[from] OutOfRange),
    /// Register host memory, or install a newer libfabric.
    #[error("dma-bufs need libfabric {needed}; this host has {found}")]
    NoDmaBuf { needed: Version, found: Version },
    /// Ask for device memory when listing providers ([`InfoRequest`](crate::info::InfoRequest)).
    #[error("the domain was not opened for device memory")]
    NoDeviceMemory,
    /// Close the domain and open another.
    #[error("the provider has no free keys: close the domain and open another")]
    NoKeys,
    #[error("cannot register the memory")]
    Open(#[from] OpenError),
}

/// The first interface that takes dma-bufs.
const DMA_BUF: Version = Version::new(1, 20);

/// Registered memory. Operations are posted on [`Span`]s of it, which hold it, as peers' names for it
/// ([`RemoteRegion`]) do not. Dropped, it closes when its last span is gone.
#[derive(Debug)]
pub struct MemoryRegion(Arc<RegionInner>);

pub(crate) struct RegionInner {
    raw: NonNull<fid_mr>,
    pub domain: Arc<DomainInner>,
    /// Taken when the region is closed. A region of a device has none: its descriptor is held.
    memory: Option<Arc<dyn Memory>>,
    device_memory: Option<OwnedFd>,
    /// The address of the first byte here, for the provider.
    start: *mut u8,
    bytes: usize,
    access: Access,
    pub descriptor: *mut std::ffi::c_void,
    remote: RemoteRegion,
    is_closed: bool,
}

// SAFETY: the pointers are addresses of memory that `Memory` lets any thread use, and of libfabric's
// objects, to which calls are serialised (see `DomainInner`).
unsafe impl Send for RegionInner {}
// SAFETY: as above.
unsafe impl Sync for RegionInner {}

/// What closing a region says about writes that peers had under way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use]
pub enum Closed {
    /// None can land any more.
    Certain,
    /// None can begin any more. One that had begun may land until all endpoints of the domain are
    /// closed, or the peers have confirmed: see [the module](self). The memory's owner is held until
    /// the endpoints are closed.
    WhenEndpointsClose,
}

/// The region is in use: posted operations or spans refer to it. Poll the completion queue, drop the
/// spans, and close it then.
#[derive(Debug, thiserror::Error)]
#[error("operations or spans still refer to the region")]
pub struct InUse(pub MemoryRegion);

/// Why a region did not close.
#[derive(Debug, thiserror::Error)]
pub enum CloseError {
    #[error(transparent)]
    InUse(InUse),
    /// Registration and memory are left as they are for the rest of the process. A person must look.
    #[error("the provider cannot close the region")]
    Refused(#[source] crate::error::Failure),
}

impl Domain {
    /// Registers all of `memory`.
    ///
    /// # Errors
    /// [`RegisterError`].
    pub fn register(
        &self,
        memory: Arc<dyn Memory>,
        access: Access,
    ) -> Result<MemoryRegion, RegisterError> {
        let bytes = memory.bytes();
        self.register_range(memory, 0, bytes, access)
    }

    /// Registers `bytes` of `memory` from `offset`: what is to be withdrawn by itself is registered by
    /// itself.
    ///
    /// # Errors
    /// [`RegisterError`].
    pub fn register_range(
        &self,
        memory: Arc<dyn Memory>,
        offset: usize,
        bytes: usize,
        access: Access,
    ) -> Result<MemoryRegion, RegisterError> {
        check(offset, bytes, memory.bytes())?;
        // SAFETY: checked to lie in the memory.
        let start = unsafe { memory.as_ptr().add(offset) };
        let place = iovec { iov_base: start.cast(), iov_len: bytes };
        let mut attributes = self.attributes(access)?;
        attributes.mr_iov = &raw const place;
        let raw = self.register_raw(&attributes, 0)?;
        Ok(self.region(raw, Some(memory), None, (start, bytes, access)))
    }

    /// Registers memory of a device.
    ///
    /// # Errors
    /// [`RegisterError::NoDmaBuf`] before libfabric 1.20, [`RegisterError::NoDeviceMemory`] where the
    /// domain was not opened for it, and as [`Domain::register`].
    pub fn register_dma_buf(
        &self,
        memory: DmaBuf,
        access: Access,
    ) -> Result<MemoryRegion, RegisterError> {
        let found = self.0.library().interface();
        if found < DMA_BUF {
            return Err(RegisterError::NoDmaBuf { needed: DMA_BUF, found });
        }
        if !self.details().device_memory {
            return Err(RegisterError::NoDeviceMemory);
        }
        let base = ptr::without_provenance_mut::<std::ffi::c_void>(memory.base as usize);
        let place = fi_mr_dmabuf {
            fd: memory.fd.as_raw_fd(),
            offset: memory.offset,
            len: memory.bytes,
            base_addr: base,
        };
        let mut attributes = self.attributes(access)?;
        attributes.mr_iov = (&raw const place).cast();
        (attributes.iface, attributes.device) = match memory.device {
            Device::Cuda(number) => (FI_HMEM_CUDA, number as u64),
            Device::Rocr(number) => (FI_HMEM_ROCR, number as u64),
            Device::Neuron(number) => (FI_HMEM_NEURON, number as u64),
            Device::SynapseAi(number) => (FI_HMEM_SYNAPSEAI, number as u64),
        };
        let raw = self.register_raw(&attributes, FI_MR_DMABUF)?;
        let start = base.cast::<u8>().wrapping_add(memory.offset as usize);
        Ok(self.region(raw, None, Some(memory.fd), (start, memory.bytes, access)))
    }

    fn attributes(&self, access: Access) -> Result<fi_mr_attr, RegisterError> {
        let requested_key = if self.details().memory_mode.provider_keys() {
            0
        } else {
            lock(&self.0.keys).next().ok_or(RegisterError::NoKeys)?
        };
        Ok(fi_mr_attr {
            mr_iov: ptr::null(),
            iov_count: 1,
            access: access.flags(),
            offset: 0,
            requested_key,
            context: ptr::null_mut(),
            auth_key_size: 0,
            auth_key: ptr::null_mut(),
            iface: FI_HMEM_SYSTEM,
            device: 0,
            hmem_data: ptr::null_mut(),
            page_size: 0,
            base_mr: ptr::null(),
            sub_mr_cnt: 0,
        })
    }

    fn register_raw(
        &self,
        attributes: &fi_mr_attr,
        flags: u64,
    ) -> Result<NonNull<fid_mr>, RegisterError> {
        let mut raw = ptr::null_mut();
        let result = {
            let _serial = self.0.enter();
            // SAFETY: domain and attributes are live, and the memory that they name is.
            unsafe { ops::mr_regattr(self.0.raw.as_ptr(), attributes, flags, &mut raw) }
        };
        Ok(opened(self.0.library(), "fi_mr_regattr", result, raw)?)
    }

    fn region(
        &self,
        raw: NonNull<fid_mr>,
        memory: Option<Arc<dyn Memory>>,
        device_memory: Option<OwnedFd>,
        (start, bytes, access): (*mut u8, usize, Access),
    ) -> MemoryRegion {
        // SAFETY: just made; key and descriptor do not change.
        let (descriptor, key) = unsafe { ((*raw.as_ptr()).mem_desc, (*raw.as_ptr()).key) };
        let is_virtual = self.details().memory_mode.virtual_addresses();
        let base = if is_virtual { start.addr() as u64 } else { 0 };
        let remote = RemoteRegion { base, key: RemoteKey(key), bytes: bytes as u64 };
        MemoryRegion(Arc::new(RegionInner {
            raw,
            domain: self.0.clone(),
            memory,
            device_memory,
            start,
            bytes,
            access,
            descriptor,
            remote,
            is_closed: false,
        }))
    }
}

impl MemoryRegion {
    #[allow(clippy::len_without_is_empty)] // a region of no bytes is of no use, and not refused
    pub fn len(&self) -> usize {
        self.0.bytes
    }

    pub fn access(&self) -> Access {
        self.0.access
    }

    /// A range of the region, for operations of this side.
    ///
    /// # Errors
    /// [`OutOfRange`] when it does not lie inside.
    pub fn span(&self, offset: usize, bytes: usize) -> Result<Span, OutOfRange> {
        check(offset, bytes, self.0.bytes)?;
        Ok(Span { region: self.0.clone(), offset, bytes })
    }

    /// What peers need to reach the region.
    pub fn remote(&self) -> RemoteRegion {
        self.0.remote
    }

    /// Withdraws the region. From here on no write of any peer begins; see [`Closed`] for those that
    /// were arriving.
    ///
    /// # Errors
    /// [`CloseError::InUse`] gives the region back.
    pub fn close(self) -> Result<Closed, CloseError> {
        match Arc::try_unwrap(self.0) {
            Err(inner) => Err(CloseError::InUse(InUse(MemoryRegion(inner)))),
            Ok(mut inner) => inner.close(),
        }
    }
}

impl RegionInner {
    fn close(&mut self) -> Result<Closed, CloseError> {
        self.is_closed = true;
        let result = {
            let _serial = self.domain.enter();
            // SAFETY: ours, open, and no operation of this side refers to it: each would hold it.
            unsafe { ops::close(self.raw.as_ptr().cast()) }
        };
        let owner = (self.memory.take(), self.device_memory.take());
        if result != 0 {
            // The provider may go on placing into it: whoever owns it must never free it.
            Box::leak(Box::new(owner));
            return Err(CloseError::Refused(self.domain.failure("fi_close(mr)", result)));
        }
        Ok(if self.domain.retire(owner) { Closed::Certain } else { Closed::WhenEndpointsClose })
    }
}

impl Drop for RegionInner {
    fn drop(&mut self) {
        if !self.is_closed {
            // Nobody is there to hear of it; the memory is safe either way.
            let _ = self.close();
        }
    }
}

impl fmt::Debug for RegionInner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RegionInner")
            .field("bytes", &self.bytes)
            .field("access", &self.access)
            .field("remote", &self.remote)
            .finish_non_exhaustive()
    }
}

/// A range of a local region. It holds the region.
#[derive(Debug, Clone)]
pub struct Span {
    pub(crate) region: Arc<RegionInner>,
    offset: usize,
    bytes: usize,
}

impl Span {
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// A part of the span.
    ///
    /// # Errors
    /// [`OutOfRange`] when it does not lie inside.
    pub fn part(&self, offset: usize, bytes: usize) -> Result<Span, OutOfRange> {
        check(offset, bytes, self.bytes)?;
        Ok(Span { region: self.region.clone(), offset: self.offset + offset, bytes })
    }

    pub(crate) fn allows_local_write(&self) -> bool {
        self.region.access.local_write
    }

    pub(crate) fn as_ptr(&self) -> *mut std::ffi::c_void {
        // Within the region, which was checked when the span was made; for a device an address that
        // is nobody's memory here, so nothing is promised about the arithmetic.
        self.region.start.wrapping_add(self.offset).cast()
    }
}

/// What opens a region to a peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RemoteKey(pub u64);

/// A peer's region, as the peer described it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RemoteRegion {
    /// Where it begins for operations: its virtual address there, or 0.
    pub base: u64,
    pub key: RemoteKey,
    pub bytes: u64,
}

/// A place in a peer's region.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RemotePlace {
    pub address: u64,
    pub key: RemoteKey,
}

impl RemoteRegion {
    /// How many bytes [`RemoteRegion::to_bytes`] makes.
    pub const WIRE_BYTES: usize = 24;

    /// The place of `bytes` bytes at `offset`. The peer checks too; this only says it earlier.
    ///
    /// # Errors
    /// [`OutOfRange`] when the range does not lie inside.
    pub fn at(&self, offset: u64, bytes: u64) -> Result<RemotePlace, OutOfRange> {
        let outside = OutOfRange { offset, bytes, region_bytes: self.bytes };
        let end = offset.checked_add(bytes).filter(|end| *end <= self.bytes).ok_or(outside)?;
        // A description from elsewhere may say anything: also that it wraps around.
        self.base.checked_add(end).ok_or(outside)?;
        Ok(RemotePlace { address: self.base + offset, key: self.key })
    }

    /// For a handshake: base, key and length, little-endian.
    pub fn to_bytes(self) -> [u8; Self::WIRE_BYTES] {
        let mut out = [0; Self::WIRE_BYTES];
        for (to, value) in out.chunks_exact_mut(8).zip([self.base, self.key.0, self.bytes]) {
            to.copy_from_slice(&value.to_le_bytes());
        }
        out
    }

    pub fn from_bytes(from: [u8; Self::WIRE_BYTES]) -> Self {
        let word = |at: usize| {
            u64::from_le_bytes(from[at..at + 8].try_into().expect("eight bytes of twenty-four"))
        };
        RemoteRegion { base: word(0), key: RemoteKey(word(8)), bytes: word(16) }
    }
}

fn check(offset: usize, bytes: usize, region_bytes: usize) -> Result<(), OutOfRange> {
    match offset.checked_add(bytes) {
        Some(end) if end <= region_bytes => Ok(()),
        _ => Err(OutOfRange {
            offset: offset as u64,
            bytes: bytes as u64,
            region_bytes: region_bytes as u64,
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_remote_region_travels_and_knows_its_bounds() {
        let region = RemoteRegion { base: 0x7000, key: RemoteKey(9), bytes: 4096 };
        assert_eq!(RemoteRegion::from_bytes(region.to_bytes()), region);
        let place = RemotePlace { address: 0x7000 + 96, key: RemoteKey(9) };
        assert_eq!(region.at(96, 4000), Ok(place));
        assert!(region.at(96, 4001).is_err());
        assert!(region.at(u64::MAX, 2).is_err());
    }

    #[test]
    fn a_description_that_wraps_around_is_refused() {
        let region = RemoteRegion { base: u64::MAX - 10, key: RemoteKey(1), bytes: 4096 };
        assert!(region.at(11, 1).is_err());
        assert!(region.at(5, 100).is_err(), "it begins before the end and goes on behind it");
        assert!(region.at(5, 5).is_ok());
    }
}
