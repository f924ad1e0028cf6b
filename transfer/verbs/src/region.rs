//! Protection domains and the memory registered in them.

use std::ffi::c_void;
use std::mem::ManuallyDrop;
use std::ops::Range;
use std::os::fd::{AsRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;

use crate::bindings::{
    IBV_ACCESS_LOCAL_WRITE, IBV_ACCESS_RELAXED_ORDERING, IBV_ACCESS_REMOTE_READ,
    IBV_ACCESS_REMOTE_WRITE, ibv_mr, ibv_pd, ibv_sge,
};
use crate::context::Context;
use crate::device::Capabilities;
use crate::error::{RangeError, VerbsError};
use crate::ids::{LKey, RKey};
use crate::memory::{Buffer, Memory};
use crate::queue::inline_bytes_max;

/// What one work request can carry at most, by the InfiniBand specification. A port may allow less
/// (`PortInfo::message_bytes_max`).
pub const MESSAGE_BYTES_MAX: u64 = 1 << 31;

/// Regions and queue pairs of one protection domain may be used together. Cheap to clone.
#[derive(Debug, Clone)]
pub struct ProtectionDomain {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    pd: NonNull<ibv_pd>,
    context: Context,
}

// SAFETY: libibverbs allows calls on one protection domain from all threads.
unsafe impl Send for Inner {}
// SAFETY: as above.
unsafe impl Sync for Inner {}

impl Drop for Inner {
    fn drop(&mut self) {
        // SAFETY: everything made in the domain held it, so nothing of that is left.
        let answer = unsafe { (self.context.api().dealloc_pd)(self.pd.as_ptr()) };
        if answer != 0 {
            let device = self.context.name();
            tracing::error!(
                device,
                errno = answer,
                "the verbs library cannot free a protection domain"
            );
        }
    }
}

/// Who may do what with a region. A device of this host may always read it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RegionOptions {
    /// This host's device may write: needed for what is received or READ into it.
    pub local_write: bool,
    /// Peers may write; then this host's device may too.
    pub remote_write: bool,
    pub remote_read: bool,
    /// PCIe may reorder writes into the region, which is faster on some hosts. A completion still comes
    /// after all bytes of its request; polling the last byte of a write proves nothing any more. Where
    /// it is not supported it has no effect.
    pub relaxed_ordering: bool,
}

impl RegionOptions {
    /// A source of writes and sends.
    pub const SOURCE: RegionOptions = RegionOptions {
        local_write: false,
        remote_write: false,
        remote_read: false,
        relaxed_ordering: false,
    };

    /// What peers may write and read.
    pub const SHARED: RegionOptions = RegionOptions {
        local_write: true,
        remote_write: true,
        remote_read: true,
        relaxed_ordering: false,
    };

    fn access(self) -> u32 {
        let bit = |is_set: bool, bit: u32| if is_set { bit } else { 0 };
        bit(self.local_write || self.remote_write, IBV_ACCESS_LOCAL_WRITE)
            | bit(self.remote_write, IBV_ACCESS_REMOTE_WRITE)
            | bit(self.remote_read, IBV_ACCESS_REMOTE_READ)
            | bit(self.relaxed_ordering, IBV_ACCESS_RELAXED_ORDERING)
    }
}

/// Device memory that its driver has exported.
#[derive(Debug)]
pub struct DmaBuf {
    pub fd: OwnedFd,
    /// Where the range begins in the buffer.
    pub offset: u64,
    pub bytes: usize,
    /// The address by which work requests name the first byte, here and at peers. Usually the device's
    /// own; it must lie at the same place within its page as `offset`.
    pub address: u64,
}

impl ProtectionDomain {
    /// # Errors
    /// [`VerbsError::Exhausted`] and others.
    pub fn new(context: &Context) -> Result<Self, VerbsError> {
        // SAFETY: the context is open.
        let pd = unsafe { (context.api().alloc_pd)(context.raw()) };
        let pd = NonNull::new(pd).ok_or_else(|| VerbsError::last("ibv_alloc_pd"))?;
        Ok(ProtectionDomain { inner: Arc::new(Inner { pd, context: context.clone() }) })
    }

    pub fn context(&self) -> &Context {
        &self.inner.context
    }

    pub(crate) fn raw(&self) -> *mut ibv_pd {
        self.inner.pd.as_ptr()
    }

    /// Registers a range of memory; its pages stay in RAM while it is registered. It takes long, in
    /// proportion to the number of pages: once for an arena, never on a hot path.
    ///
    /// # Errors
    /// [`VerbsError::Range`] for what does not lie in the memory or is empty, [`VerbsError::Exhausted`]
    /// past `ulimit -l`, and others. Memory that is mapped for reading only can be a source but not
    /// written, by anyone.
    pub fn register(
        &self,
        owner: Arc<dyn Memory>,
        range: Range<usize>,
        options: RegionOptions,
    ) -> Result<MemoryRegion, VerbsError> {
        let bytes = range.end.saturating_sub(range.start);
        if bytes == 0 || range.end > owner.bytes() {
            return Err(VerbsError::Range(RangeError {
                offset: range.start as u64,
                bytes: bytes as u64,
                available: owner.bytes() as u64,
            }));
        }
        let base = owner.as_ptr().wrapping_add(range.start);
        let address = base.expose_provenance() as u64;
        // SAFETY: the range lies in the memory, whose owner promises that it stays mapped and may be
        // used by devices; the region holds the owner until it is deregistered.
        let mr = unsafe {
            (self.context().api().reg_mr_iova2)(
                self.raw(),
                base.cast::<c_void>(),
                bytes,
                address,
                options.access(),
            )
        };
        let mr = NonNull::new(mr).ok_or_else(|| VerbsError::last("ibv_reg_mr"))?;
        let holds = Holds { mr, pd: self.clone(), _owner: Owner::Memory(Arc::clone(&owner)) };
        Ok(MemoryRegion { holds: ManuallyDrop::new(holds), address, bytes })
    }

    /// Registers memory of another device, a GPU's for example.
    ///
    /// # Errors
    /// [`VerbsError::Unsupported`] where the device, its driver or the kernel (before 5.12) cannot.
    pub fn register_dmabuf(
        &self,
        buffer: DmaBuf,
        options: RegionOptions,
    ) -> Result<MemoryRegion, VerbsError> {
        let DmaBuf { fd, offset, bytes, address } = buffer;
        // SAFETY: the descriptor is open. The kernel holds the buffer while it is registered, and moves
        // or revokes it only in agreement with the device's driver.
        let mr = unsafe {
            (self.context().api().reg_dmabuf_mr)(
                self.raw(),
                offset,
                bytes,
                address,
                fd.as_raw_fd(),
                options.access() as i32,
            )
        };
        let mr = NonNull::new(mr).ok_or_else(|| VerbsError::last("ibv_reg_dmabuf_mr"))?;
        let holds = Holds { mr, pd: self.clone(), _owner: Owner::DmaBuf(fd) };
        Ok(MemoryRegion { holds: ManuallyDrop::new(holds), address, bytes })
    }

    /// Finds out by trying what no query tells.
    ///
    /// # Errors
    /// [`VerbsError`] when not even the trials can be made.
    pub fn probe(&self) -> Result<Capabilities, VerbsError> {
        Ok(Capabilities {
            inline_bytes_max: inline_bytes_max(self)?,
            relaxed_ordering: self.takes_relaxed_ordering()?,
            dmabuf: self.takes_dmabuf(),
        })
    }

    fn takes_relaxed_ordering(&self) -> Result<bool, VerbsError> {
        let trial = Buffer::new(4096).map_err(|error| VerbsError::new("mmap", error))?;
        let options = RegionOptions { relaxed_ordering: true, ..RegionOptions::SHARED };
        Ok(self.register(Arc::new(trial), 0..4096, options).is_ok())
    }

    /// A descriptor that is none is refused as such only by what could have used a good one.
    fn takes_dmabuf(&self) -> bool {
        // SAFETY: no memory is named, and a descriptor of -1 is never registered.
        let mr = unsafe { (self.context().api().reg_dmabuf_mr)(self.raw(), 0, 4096, 0, -1, 0) };
        let error = VerbsError::last("ibv_reg_dmabuf_mr");
        debug_assert!(mr.is_null(), "there is no descriptor -1");
        !matches!(error, VerbsError::Unsupported { .. })
    }
}

#[derive(Debug)]
#[expect(
    dead_code,
    reason = "kept for as long as the device may use the memory, and never looked at"
)]
enum Owner {
    Memory(Arc<dyn Memory>),
    DmaBuf(OwnedFd),
}

impl std::fmt::Debug for dyn Memory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Memory({} bytes)", self.bytes())
    }
}

#[derive(Debug)]
struct Holds {
    mr: NonNull<ibv_mr>,
    pd: ProtectionDomain,
    _owner: Owner,
}

/// Registered memory. Dropping it deregisters it: from then on no device reaches the bytes by its
/// keys, and whatever still tries fails with an error of protection at its own side.
#[derive(Debug)]
pub struct MemoryRegion {
    /// Let go of only once the device has: what cannot be deregistered stays mapped for good.
    holds: ManuallyDrop<Holds>,
    address: u64,
    bytes: usize,
}

// SAFETY: the keys and the address never change, and deregistering takes the whole value.
unsafe impl Send for MemoryRegion {}
// SAFETY: as above.
unsafe impl Sync for MemoryRegion {}

impl Drop for MemoryRegion {
    fn drop(&mut self) {
        let answer = self.deregister_now();
        if let Err(error) = answer {
            let device = self.holds.pd.context().name();
            tracing::error!(device, %error, "the verbs library cannot deregister memory; it stays allocated");
            return;
        }
        // SAFETY: dropped here alone, and `self` is not used after.
        unsafe { ManuallyDrop::drop(&mut self.holds) };
    }
}

impl MemoryRegion {
    fn deregister_now(&self) -> Result<(), VerbsError> {
        // SAFETY: called from drop alone, so once. Peers' requests that arrive later find no such key.
        let answer = unsafe { (self.holds.pd.context().api().dereg_mr)(self.holds.mr.as_ptr()) };
        VerbsError::check("ibv_dereg_mr", answer)
    }

    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// The address by which work requests name the first byte.
    pub fn address(&self) -> u64 {
        self.address
    }

    pub fn lkey(&self) -> LKey {
        // SAFETY: the region is registered while `self` lives.
        LKey(unsafe { self.holds.mr.as_ref().lkey })
    }

    pub fn rkey(&self) -> RKey {
        // SAFETY: as above.
        RKey(unsafe { self.holds.mr.as_ref().rkey })
    }

    /// What peers are told.
    pub fn remote(&self) -> RemoteRegion {
        RemoteRegion { address: self.address, bytes: self.bytes as u64, rkey: self.rkey() }
    }

    /// A range of the region for a work request.
    ///
    /// # Errors
    /// [`RangeError`] when it does not lie in the region or is longer than a message can be.
    pub fn slice(&self, offset: usize, bytes: usize) -> Result<LocalSlice, RangeError> {
        let (offset, bytes) = (offset as u64, bytes as u64);
        check_range(offset, bytes, self.bytes as u64)?;
        Ok(LocalSlice(ibv_sge {
            addr: self.address + offset,
            length: bytes as u32,
            lkey: self.lkey().0,
        }))
    }
}

fn check_range(offset: u64, bytes: u64, available: u64) -> Result<(), RangeError> {
    let error = RangeError { offset, bytes, available };
    let end = offset.checked_add(bytes).ok_or(error)?;
    if end > available || bytes > MESSAGE_BYTES_MAX { Err(error) } else { Ok(()) }
}

/// A range of a region. It names memory and does not hold it: a request posted after its region was
/// dropped fails with `LocalProtection`.
#[derive(Debug, Clone, Copy)]
#[repr(transparent)]
pub struct LocalSlice(pub(crate) ibv_sge);

impl LocalSlice {
    pub fn bytes(&self) -> u32 {
        self.0.length
    }
}

/// A region of a peer, as it described it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RemoteRegion {
    pub address: u64,
    pub bytes: u64,
    pub rkey: RKey,
}

impl RemoteRegion {
    /// Where a request of so many bytes begins.
    ///
    /// # Errors
    /// [`RangeError`] when it does not lie in the region. The peer's device checks too, but at the price
    /// of the connection.
    pub fn at(&self, offset: u64, bytes: u64) -> Result<RemoteAddress, RangeError> {
        check_range(offset, bytes, self.bytes)?;
        let error = RangeError { offset, bytes, available: self.bytes };
        let address = self.address.checked_add(offset).ok_or(error)?;
        Ok(RemoteAddress { address, rkey: self.rkey })
    }
}

/// Where at a peer. Unchecked: see [`RemoteRegion::at`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RemoteAddress {
    pub address: u64,
    pub rkey: RKey,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_outside_the_peers_region_is_refused() {
        let region = RemoteRegion { address: 0x1000, bytes: 100, rkey: RKey(7) };
        assert_eq!(region.at(90, 10).expect("the end").address, 0x1000 + 90);
        assert!(region.at(100, 0).is_ok());
        for (offset, bytes) in [(91, 10), (101, 0), (u64::MAX, 2), (0, 101)] {
            assert!(region.at(offset, bytes).is_err(), "{bytes} at {offset}");
        }
    }

    #[test]
    fn a_message_has_a_longest() {
        let region = RemoteRegion { address: 0, bytes: u64::MAX, rkey: RKey(7) };
        assert!(region.at(0, MESSAGE_BYTES_MAX).is_ok());
        assert!(region.at(0, MESSAGE_BYTES_MAX + 1).is_err());
    }

    #[test]
    fn a_peer_that_may_write_lets_the_own_device_write() {
        let options = RegionOptions { remote_write: true, ..RegionOptions::SOURCE };
        assert_eq!(options.access(), IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
        assert_eq!(RegionOptions::SOURCE.access(), 0);
        let relaxed = RegionOptions { relaxed_ordering: true, ..RegionOptions::SHARED };
        assert_eq!(relaxed.access(), 0b111 | 1 << 20);
    }
}
