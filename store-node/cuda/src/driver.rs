//! The driver's library, a GPU, its memory and streams.
//!
//! A [`Device`] holds the driver and the device's primary context, which PyTorch and the CUDA runtime
//! use too, so that their memory is this one's. Everything else holds its device.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::path::Path;
use std::sync::{Arc, OnceLock};

use crate::DriverError;
use crate::kernel::KernelFunctions;
use crate::shared::SharingFunctions;
use crate::table::DriverLibrary;

pub(crate) const LIBRARY: &str = "libcuda.so.1";
pub(crate) const INSTALL: &str = "install NVIDIA's driver on a host with a GPU";

pub(crate) const ATTRIBUTE_MULTIPROCESSORS: c_int = 16;
pub(crate) const ATTRIBUTE_CAPABILITY_MAJOR: c_int = 75;
pub(crate) const ATTRIBUTE_CAPABILITY_MINOR: c_int = 76;
/// Does not wait for the device's default stream.
pub(crate) const STREAM_NON_BLOCKING: c_uint = 1;

pub(crate) type Handle = *mut c_void;

/// Of memory of a device, as kernels know it.
pub type DeviceAddress = u64;

/// A function of a library.
///
/// # Safety
/// `T` is the type of a pointer to the function of this name.
pub unsafe fn symbol<T: Copy>(
    library: &'static libloading::Library,
    library_name: &'static str,
    name: &'static str,
) -> Result<T, DriverError> {
    // SAFETY: the caller's promise.
    unsafe { library.get::<T>(name.as_bytes()) }
        .map(|function| *function)
        .map_err(|_| DriverError::TooOld { library: library_name, name })
}

/// A table of the driver's functions. [`table`](crate::table) looks them up.
macro_rules! functions {
    ($table:ident { $($field:ident = $name:ident: ($($argument:ty),*);)* }) => {
        #[derive(Debug, Clone, Copy)]
        pub(crate) struct $table {
            $(pub(crate) $field: unsafe extern "C" fn($($argument),*) -> std::ffi::c_int,)*
        }

        impl $table {
            /// # Safety
            /// The library is NVIDIA's driver.
            pub(crate) unsafe fn of(
                library: &'static $crate::table::DriverLibrary,
            ) -> Result<$table, $crate::DriverError> {
                // SAFETY: the names and types are those of `cuda.h` since CUDA 11.8.
                unsafe { Ok($table { $($field: $crate::table::function!(library, $name)?,)* }) }
            }
        }
    };
}
pub(crate) use functions;

functions! { Functions {
    init = cuInit: (c_uint);
    error_string = cuGetErrorString: (c_int, *mut *const c_char);
    version = cuDriverGetVersion: (*mut c_int);
    device_count = cuDeviceGetCount: (*mut c_int);
    device_get = cuDeviceGet: (*mut c_int, c_int);
    device_name = cuDeviceGetName: (*mut c_char, c_int, c_int);
    device_attribute = cuDeviceGetAttribute: (*mut c_int, c_int, c_int);
    context_retain = cuDevicePrimaryCtxRetain: (*mut Handle, c_int);
    context_release = cuDevicePrimaryCtxRelease_v2: (c_int);
    context_set = cuCtxSetCurrent: (Handle);
    allocate = cuMemAlloc_v2: (*mut u64, usize);
    free = cuMemFree_v2: (u64);
    copy_in = cuMemcpyHtoDAsync_v2: (u64, *const c_void, usize, Handle);
    copy_out = cuMemcpyDtoHAsync_v2: (*mut c_void, u64, usize, Handle);
    stream_create = cuStreamCreate: (*mut Handle, c_uint);
    stream_destroy = cuStreamDestroy_v2: (Handle);
    stream_wait = cuStreamSynchronize: (Handle);
} }

/// The library with its tables.
#[derive(Debug)]
pub(crate) struct Library {
    library: &'static DriverLibrary,
    functions: Functions,
    kernels: OnceLock<KernelFunctions>,
    sharing: OnceLock<SharingFunctions>,
}

/// The driver, initialised. Its library is never closed: it has threads.
#[derive(Debug, Clone, Copy)]
pub struct Driver(pub(crate) &'static Library);

impl Driver {
    /// Opens the driver of the system.
    ///
    /// # Errors
    /// [`DriverError::Missing`] says what to install.
    pub fn open() -> Result<Driver, DriverError> {
        static OPEN: OnceLock<Driver> = OnceLock::new();
        if let Some(driver) = OPEN.get() {
            return Ok(*driver);
        }
        Driver::open_file(Path::new(LIBRARY)).inspect(|driver| {
            OPEN.get_or_init(|| *driver);
        })
    }

    /// Opens the driver in this file.
    ///
    /// # Errors
    /// [`DriverError`].
    pub fn open_file(path: &Path) -> Result<Driver, DriverError> {
        // SAFETY: the driver's library under its own name, or where the operator says that it is.
        let library = unsafe { libloading::Library::new(path) }.map_err(|source| {
            DriverError::Missing { library: LIBRARY, install: INSTALL, source }
        })?;
        let library = DriverLibrary::of(library, path)?;
        // SAFETY: it is the driver.
        let functions = unsafe { Functions::of(library)? };
        // SAFETY: it takes flags, of which there are none.
        functions.checked("cuInit", unsafe { (functions.init)(0) })?;
        let (kernels, sharing) = (OnceLock::new(), OnceLock::new());
        Ok(Driver(Box::leak(Box::new(Library { library, functions, kernels, sharing }))))
    }
}

impl Driver {
    pub(crate) fn devices(self) -> Result<usize, DriverError> {
        let mut count = 0;
        // SAFETY: it writes one number, which lives through the call.
        let code = unsafe { (self.0.functions.device_count)(&mut count) };
        self.0.functions.checked("cuDeviceGetCount", code)?;
        Ok(usize::try_from(count).unwrap_or(0))
    }

    pub(crate) fn number(self, index: usize) -> Result<c_int, DriverError> {
        let mut number = 0;
        // SAFETY: as above.
        let code = unsafe { (self.0.functions.device_get)(&mut number, index as c_int) };
        self.0.functions.checked("cuDeviceGet", code)?;
        Ok(number)
    }

    pub(crate) fn version(self) -> Result<u32, DriverError> {
        let mut version = 0;
        // SAFETY: as above.
        let code = unsafe { (self.0.functions.version)(&mut version) };
        self.0.functions.checked("cuDriverGetVersion", code)?;
        Ok(version.unsigned_abs())
    }

    pub(crate) fn name(self, number: c_int) -> Result<String, DriverError> {
        let mut text = [0u8; 128];
        // SAFETY: it writes at most as many bytes as it is told, its zero among them.
        let code = unsafe { (self.0.functions.device_name)(text.as_mut_ptr().cast(), 128, number) };
        self.0.functions.checked("cuDeviceGetName", code)?;
        let name = text.split(|byte| *byte == 0).next().unwrap_or_default();
        Ok(String::from_utf8_lossy(name).into_owned())
    }

    pub(crate) fn attribute(self, which: c_int, number: c_int) -> Result<u32, DriverError> {
        let mut value = 0;
        // SAFETY: it writes one number, which lives through the call.
        let code = unsafe { (self.0.functions.device_attribute)(&mut value, which, number) };
        self.0.functions.checked("cuDeviceGetAttribute", code)?;
        Ok(value.unsigned_abs())
    }
}

impl Library {
    fn kernels(&'static self) -> Result<&'static KernelFunctions, DriverError> {
        if let Some(kernels) = self.kernels.get() {
            return Ok(kernels);
        }
        // SAFETY: it is the driver.
        let kernels = unsafe { KernelFunctions::of(self.library)? };
        Ok(self.kernels.get_or_init(|| kernels))
    }

    pub(crate) fn sharing(&'static self) -> Result<&'static SharingFunctions, DriverError> {
        if let Some(sharing) = self.sharing.get() {
            return Ok(sharing);
        }
        // SAFETY: it is the driver.
        let sharing = unsafe { SharingFunctions::of(self.library)? };
        Ok(self.sharing.get_or_init(|| sharing))
    }
}

impl Functions {
    pub(crate) fn checked(&self, call: &'static str, code: c_int) -> Result<(), DriverError> {
        if code == 0 {
            return Ok(());
        }
        let mut text: *const c_char = std::ptr::null();
        // SAFETY: it takes any number and a place for a string that is never freed.
        let known = unsafe { (self.error_string)(code, &mut text) } == 0 && !text.is_null();
        let says = if known {
            // SAFETY: a string of the driver's.
            unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
        } else {
            "an error without a description".into()
        };
        Err(DriverError::Failed { call, code, says })
    }
}

/// A GPU and its primary context.
#[derive(Debug)]
pub struct Device {
    driver: &'static Library,
    number: c_int,
    context: Handle,
    name: String,
    capability: (u32, u32),
    multiprocessors: u32,
}

// SAFETY: a context may be used from any thread that has made it current, which every call does.
unsafe impl Send for Device {}
// SAFETY: as for `Send`; the driver locks.
unsafe impl Sync for Device {}

impl Device {
    /// The GPU of this index, in the driver's order.
    ///
    /// # Errors
    /// [`DriverError`] where there is no such GPU.
    pub fn open(driver: Driver, index: usize) -> Result<Arc<Device>, DriverError> {
        let count = driver.devices()?;
        if index >= count {
            return Err(DriverError::NoSuchDevice { index, count });
        }
        Device::of_number(driver, driver.number(index)?)
    }

    /// The GPU of this UUID.
    ///
    /// # Errors
    /// [`DriverError`] where this process sees no such GPU.
    pub fn of_uuid(driver: Driver, uuid: [u8; 16]) -> Result<Arc<Device>, DriverError> {
        let sharing = driver.0.sharing()?;
        for index in 0..driver.devices()? {
            let number = driver.number(index)?;
            let mut of = [0; 16];
            // SAFETY: it writes 16 bytes, which live through the call.
            let code = unsafe { (sharing.device_uuid)(&mut of, number) };
            driver.0.functions.checked("cuDeviceGetUuid", code)?;
            if of == uuid {
                return Device::of_number(driver, number);
            }
        }
        let uuid = uuid.iter().map(|byte| format!("{byte:02x}")).collect();
        Err(DriverError::NoSuchUuid { uuid })
    }

    fn of_number(driver: Driver, number: c_int) -> Result<Arc<Device>, DriverError> {
        let name = driver.name(number)?;
        let attribute = |which| driver.attribute(which, number);
        let capability =
            (attribute(ATTRIBUTE_CAPABILITY_MAJOR)?, attribute(ATTRIBUTE_CAPABILITY_MINOR)?);
        let multiprocessors = attribute(ATTRIBUTE_MULTIPROCESSORS)?.max(1);
        let driver = driver.0;
        let mut context = std::ptr::null_mut();
        // SAFETY: a device that is, and a place for a handle.
        let code = unsafe { (driver.functions.context_retain)(&mut context, number) };
        driver.functions.checked("cuDevicePrimaryCtxRetain", code)?;
        let device = Device { driver, number, context, name, capability, multiprocessors };
        Ok(Arc::new(device))
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its compute capability, such as (9, 0).
    pub fn capability(&self) -> (u32, u32) {
        self.capability
    }

    pub(crate) fn number(&self) -> c_int {
        self.number
    }

    pub fn multiprocessors(&self) -> u32 {
        self.multiprocessors
    }

    /// Makes the context current for this thread and checks what `call` returns then.
    pub(crate) fn call(
        &self,
        name: &'static str,
        call: impl FnOnce(&'static Functions) -> c_int,
    ) -> Result<(), DriverError> {
        let functions = &self.driver.functions;
        // SAFETY: the context is retained for as long as this value lives.
        let code = unsafe { (functions.context_set)(self.context) };
        functions.checked("cuCtxSetCurrent", code)?;
        functions.checked(name, call(functions))
    }

    /// As [`Device::call`], of a kernel's function.
    pub(crate) fn call_kernel(
        &self,
        name: &'static str,
        call: impl FnOnce(&'static KernelFunctions) -> c_int,
    ) -> Result<(), DriverError> {
        let kernels = self.driver.kernels()?;
        self.call(name, |_| call(kernels))
    }

    /// As [`Device::call`], of a function of memory that is shared.
    pub(crate) fn call_sharing(
        &self,
        name: &'static str,
        call: impl FnOnce(&'static SharingFunctions) -> c_int,
    ) -> Result<(), DriverError> {
        let sharing = self.driver.sharing()?;
        self.call(name, |_| call(sharing))
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        // SAFETY: retained once by `open`; everything that uses the context holds this value.
        unsafe { (self.driver.functions.context_release)(self.number) };
    }
}

/// Memory of a device.
#[derive(Debug)]
pub struct Memory {
    device: Arc<Device>,
    address: DeviceAddress,
    len_bytes: usize,
}

impl Memory {
    /// Memory that holds anything; at a multiple of 256 bytes.
    ///
    /// # Errors
    /// [`DriverError::Failed`] where there is not as much.
    pub fn new(device: &Arc<Device>, len_bytes: usize) -> Result<Memory, DriverError> {
        let mut address = 0;
        let bytes = len_bytes.max(1);
        // SAFETY: a place for one address.
        device.call("cuMemAlloc", |f| unsafe { (f.allocate)(&mut address, bytes) })?;
        Ok(Memory { device: device.clone(), address, len_bytes })
    }

    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }

    pub fn address(&self) -> DeviceAddress {
        self.address
    }

    pub fn len_bytes(&self) -> usize {
        self.len_bytes
    }

    /// Copies in, after what the stream does before. `from` may be changed when this returns.
    ///
    /// # Errors
    /// [`DriverError::Failed`].
    ///
    /// # Panics
    /// When the memory is smaller.
    pub fn write<T: Copy>(&self, from: &[T], stream: &Stream) -> Result<(), DriverError> {
        assert!(size_of_val(from) <= self.len_bytes, "more than the memory holds");
        if from.is_empty() {
            return Ok(());
        }
        let (to, bytes) = (self.address, size_of_val(from));
        // SAFETY: so many bytes are there on either side. Memory that is not page-locked is staged
        // before the call returns.
        self.device.call("cuMemcpyHtoDAsync", |f| unsafe {
            (f.copy_in)(to, from.as_ptr().cast(), bytes, stream.handle)
        })
    }

    /// Copies out what the stream has left there, and waits for it. `T` has no forbidden values.
    ///
    /// # Errors
    /// [`DriverError::Failed`], also of what ran before on the stream.
    ///
    /// # Panics
    /// When the memory is smaller.
    pub fn read(&self, into: &mut [f32], stream: &Stream) -> Result<(), DriverError> {
        assert!(size_of_val(into) <= self.len_bytes, "more than the memory holds");
        let (from, bytes) = (self.address, size_of_val(into));
        // SAFETY: so many bytes are there on either side, and `into` lives until the stream is
        // waited for. Any bits are an f32.
        self.device.call("cuMemcpyDtoHAsync", |f| unsafe {
            (f.copy_out)(into.as_mut_ptr().cast(), from, bytes, stream.handle)
        })?;
        stream.wait()
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: allocated once by `new`. The driver waits for what uses it.
        self.device.call("cuMemFree", |f| unsafe { (f.free)(self.address) }).ok();
    }
}

/// Work of a device in order.
#[derive(Debug)]
pub struct Stream {
    pub(crate) device: Arc<Device>,
    pub(crate) handle: Handle,
    is_own: bool,
}

// SAFETY: the driver takes a stream from any thread.
unsafe impl Send for Stream {}
// SAFETY: as for `Send`.
unsafe impl Sync for Stream {}

impl Stream {
    /// A stream of its own.
    ///
    /// # Errors
    /// [`DriverError::Failed`].
    pub fn new(device: &Arc<Device>) -> Result<Stream, DriverError> {
        let mut handle = std::ptr::null_mut();
        // SAFETY: a place for a handle.
        device.call("cuStreamCreate", |f| unsafe {
            (f.stream_create)(&mut handle, STREAM_NON_BLOCKING)
        })?;
        Ok(Stream { device: device.clone(), handle, is_own: true })
    }

    /// A stream of somebody else's, such as an engine's.
    ///
    /// # Safety
    /// `handle` is a `CUstream` of this device's primary context and outlives this value.
    pub unsafe fn of_handle(device: &Arc<Device>, handle: *mut c_void) -> Stream {
        Stream { device: device.clone(), handle, is_own: false }
    }

    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// Waits until everything on it is done.
    ///
    /// # Errors
    /// [`DriverError::Failed`] of anything that ran.
    pub fn wait(&self) -> Result<(), DriverError> {
        // SAFETY: a stream that is.
        self.device.call("cuStreamSynchronize", |f| unsafe { (f.stream_wait)(self.handle) })
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if self.is_own {
            // SAFETY: made by `new`; what is on it is done before it goes.
            let destroy = |f: &Functions| unsafe { (f.stream_destroy)(self.handle) };
            self.device.call("cuStreamDestroy", destroy).ok();
        }
    }
}
