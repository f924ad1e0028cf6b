//! Memory of a GPU that another process has allocated, and memory of the host that a GPU copies from and to by itself.
//!
//! Whoever has allocated memory by `cuMemAlloc` (as PyTorch does) makes a handle of it, [`IpcHandle`], which any process of
//! the host can open once it has it. What is opened is the whole allocation. It stays while it is open, also when
//! the other process is gone.

use std::ffi::{c_int, c_uint, c_void};
use std::ptr::NonNull;
use std::sync::Arc;

use crate::DriverError;
use crate::driver::{Device, DeviceAddress, Stream, functions};

/// Peers of the memory's GPU may use it, which is made possible when they first do.
pub(crate) const LAZY_PEER_ACCESS: c_uint = 1;
/// Registered memory counts as such in every context.
pub(crate) const REGISTER_PORTABLE: c_uint = 1;

/// What names an allocation to other processes of the host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub struct IpcHandle(pub [u8; 64]);

functions! { SharingFunctions {
    device_uuid = cuDeviceGetUuid: (*mut [u8; 16], c_int);
    ipc_handle = cuIpcGetMemHandle: (*mut IpcHandle, u64);
    ipc_open = cuIpcOpenMemHandle_v2: (*mut u64, IpcHandle, c_uint);
    ipc_close = cuIpcCloseMemHandle: (u64);
    address_range = cuMemGetAddressRange_v2: (*mut u64, *mut usize, u64);
    register = cuMemHostRegister_v2: (*mut c_void, usize, c_uint);
    unregister = cuMemHostUnregister: (*mut c_void);
} }

impl Device {
    /// By which other processes find it.
    ///
    /// # Errors
    /// [`DriverError`].
    pub fn uuid(&self) -> Result<[u8; 16], DriverError> {
        let (mut uuid, number) = ([0; 16], self.number());
        // SAFETY: it writes 16 bytes, which live through the call.
        self.call_sharing("cuDeviceGetUuid", |f| unsafe { (f.device_uuid)(&mut uuid, number) })?;
        Ok(uuid)
    }
}

impl crate::Memory {
    /// What other processes open it by.
    ///
    /// # Errors
    /// [`DriverError`].
    pub fn ipc_handle(&self) -> Result<IpcHandle, DriverError> {
        let (mut handle, address) = (IpcHandle([0; 64]), self.address());
        // SAFETY: an address that was allocated, and a place for a handle.
        self.device().call_sharing("cuIpcGetMemHandle", |f| unsafe {
            (f.ipc_handle)(&mut handle, address)
        })?;
        Ok(handle)
    }
}

/// An allocation of another process, open until this is dropped.
#[derive(Debug)]
pub struct SharedAllocation {
    device: Arc<Device>,
    address: DeviceAddress,
    len_bytes: u64,
}

impl SharedAllocation {
    /// Opens what another process has allocated on this device.
    ///
    /// # Errors
    /// [`DriverError::Failed`] where the handle is none, or one of this process.
    pub fn open(device: &Arc<Device>, handle: IpcHandle) -> Result<SharedAllocation, DriverError> {
        let mut address = 0;
        // SAFETY: any 64 bytes, which the driver checks, and a place for an address.
        device.call_sharing("cuIpcOpenMemHandle", |f| unsafe {
            (f.ipc_open)(&mut address, handle, LAZY_PEER_ACCESS)
        })?;
        // From here on it is closed when anything fails.
        let mut opened = SharedAllocation { device: device.clone(), address, len_bytes: 0 };
        let (mut base, mut len_bytes) = (0, 0);
        // SAFETY: an address that is, and places for two numbers.
        device.call_sharing("cuMemGetAddressRange", |f| unsafe {
            (f.address_range)(&mut base, &mut len_bytes, address)
        })?;
        opened.len_bytes = (base + len_bytes as u64).saturating_sub(address);
        Ok(opened)
    }

    pub fn len_bytes(&self) -> u64 {
        self.len_bytes
    }

    fn at(&self, offset: u64, bytes: u64) -> DeviceAddress {
        let end = offset.checked_add(bytes);
        assert!(end.is_some_and(|end| end <= self.len_bytes), "beyond the allocation");
        self.address + offset
    }

    /// Copies bytes from here to the host, after what the stream does before. [`Stream::wait`] says when they are there.
    ///
    /// # Errors
    /// [`DriverError::Failed`].
    ///
    /// # Panics
    /// When the allocation is smaller.
    ///
    /// # Safety
    /// So many bytes at `into` may be written, and nobody reads them, until the stream was waited for.
    pub unsafe fn read(
        &self,
        offset: u64,
        into: *mut u8,
        bytes: u64,
        stream: &Stream,
    ) -> Result<(), DriverError> {
        let from = self.at(offset, bytes);
        // SAFETY: so many bytes are there; the rest is the caller's promise.
        self.device.call("cuMemcpyDtoHAsync", |f| unsafe {
            (f.copy_out)(into.cast(), from, bytes as usize, stream.handle)
        })
    }

    /// Copies bytes of the host to here, after what the stream does before. [`Stream::wait`] says when they are there.
    ///
    /// # Errors
    /// [`DriverError::Failed`].
    ///
    /// # Panics
    /// When the allocation is smaller.
    ///
    /// # Safety
    /// So many bytes at `from` may be read, and nobody writes them, until the stream was waited for.
    pub unsafe fn write(
        &self,
        offset: u64,
        from: *const u8,
        bytes: u64,
        stream: &Stream,
    ) -> Result<(), DriverError> {
        let to = self.at(offset, bytes);
        // SAFETY: so many bytes are there; the rest is the caller's promise.
        self.device.call("cuMemcpyHtoDAsync", |f| unsafe {
            (f.copy_in)(to, from.cast(), bytes as usize, stream.handle)
        })
    }
}

impl Drop for SharedAllocation {
    fn drop(&mut self) {
        let close = |f: &SharingFunctions| {
            // SAFETY: opened once by `open`. The driver waits for what uses it.
            unsafe { (f.ipc_close)(self.address) }
        };
        self.device.call_sharing("cuIpcCloseMemHandle", close).ok();
    }
}

/// Memory of the host that the driver keeps in its place, so that GPUs copy from and to it by themselves. Other memory
/// goes through a buffer of the driver's.
#[derive(Debug)]
pub struct Registered {
    device: Arc<Device>,
    memory: NonNull<u8>,
}

// SAFETY: the address is only given back to the driver, which locks.
unsafe impl Send for Registered {}
// SAFETY: as for `Send`.
unsafe impl Sync for Registered {}

impl Registered {
    /// # Errors
    /// [`DriverError::Failed`] where the memory cannot be kept in its place, or is registered already.
    ///
    /// # Safety
    /// So many bytes there stay mapped until this is dropped.
    pub unsafe fn new(
        device: &Arc<Device>,
        memory: NonNull<u8>,
        len_bytes: usize,
    ) -> Result<Registered, DriverError> {
        // SAFETY: the caller's promise.
        device.call_sharing("cuMemHostRegister", |f| unsafe {
            (f.register)(memory.as_ptr().cast(), len_bytes, REGISTER_PORTABLE)
        })?;
        Ok(Registered { device: device.clone(), memory })
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        let unregister = |f: &SharingFunctions| {
            // SAFETY: registered once by `new`.
            unsafe { (f.unregister)(self.memory.as_ptr().cast()) }
        };
        self.device.call_sharing("cuMemHostUnregister", unregister).ok();
    }
}
