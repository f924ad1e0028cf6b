//! NVIDIA's driver, opened at run time: the part of `cuda.h` that kernels and their measuring use.
//!
//! A [`Device`] holds the driver and the device's primary context, which PyTorch and the CUDA runtime
//! use too, so that their memory is this one's. Everything else holds its device.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::path::Path;
use std::sync::{Arc, OnceLock};

use super::CudaError;
use super::job::DeviceAddress;
use super::variant::Arch;

const LIBRARY: &str = "libcuda.so.1";
const INSTALL: &str = "install NVIDIA's driver where there is a GPU";

const ATTRIBUTE_MULTIPROCESSORS: c_int = 16;
const ATTRIBUTE_CAPABILITY_MAJOR: c_int = 75;
const ATTRIBUTE_CAPABILITY_MINOR: c_int = 76;
const FUNCTION_SHARED_BYTES_MAX: c_int = 8;
/// Does not wait for the device's default stream.
const STREAM_NON_BLOCKING: c_uint = 1;
const CAPTURE_THREAD_LOCAL: c_int = 1;

type Handle = *mut c_void;

/// A function of a library.
///
/// # Safety
/// `T` is the type of a pointer to the function of this name.
pub(super) unsafe fn symbol<T: Copy>(
    library: &'static libloading::Library,
    library_name: &'static str,
    name: &'static str,
) -> Result<T, CudaError> {
    // SAFETY: the caller's promise.
    unsafe { library.get::<T>(name.as_bytes()) }
        .map(|function| *function)
        .map_err(|_| CudaError::TooOld { library: library_name, name })
}

macro_rules! functions {
    ($($field:ident = $name:literal: ($($argument:ty),*);)*) => {
        #[derive(Debug, Clone, Copy)]
        struct Functions {
            $($field: unsafe extern "C" fn($($argument),*) -> c_int,)*
        }

        impl Functions {
            /// # Safety
            /// The library is NVIDIA's driver.
            unsafe fn of(library: &'static libloading::Library) -> Result<Functions, CudaError> {
                // SAFETY: the names and types are those of `cuda.h` since CUDA 11.4.
                unsafe { Ok(Functions { $($field: symbol(library, LIBRARY, $name)?,)* }) }
            }
        }
    };
}

functions! {
    init = "cuInit": (c_uint);
    error_string = "cuGetErrorString": (c_int, *mut *const c_char);
    device_count = "cuDeviceGetCount": (*mut c_int);
    device_get = "cuDeviceGet": (*mut c_int, c_int);
    device_name = "cuDeviceGetName": (*mut c_char, c_int, c_int);
    device_attribute = "cuDeviceGetAttribute": (*mut c_int, c_int, c_int);
    context_retain = "cuDevicePrimaryCtxRetain": (*mut Handle, c_int);
    context_release = "cuDevicePrimaryCtxRelease_v2": (c_int);
    context_set = "cuCtxSetCurrent": (Handle);
    module_load = "cuModuleLoadData": (*mut Handle, *const c_void);
    module_unload = "cuModuleUnload": (Handle);
    module_function = "cuModuleGetFunction": (*mut Handle, Handle, *const c_char);
    function_set = "cuFuncSetAttribute": (Handle, c_int, c_int);
    launch = "cuLaunchKernel": (
        Handle, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, Handle, *mut *mut c_void,
        *mut *mut c_void
    );
    allocate = "cuMemAlloc_v2": (*mut u64, usize);
    free = "cuMemFree_v2": (u64);
    copy_in = "cuMemcpyHtoDAsync_v2": (u64, *const c_void, usize, Handle);
    copy_out = "cuMemcpyDtoHAsync_v2": (*mut c_void, u64, usize, Handle);
    stream_create = "cuStreamCreate": (*mut Handle, c_uint);
    stream_destroy = "cuStreamDestroy_v2": (Handle);
    stream_wait = "cuStreamSynchronize": (Handle);
    capture_begin = "cuStreamBeginCapture_v2": (Handle, c_int);
    capture_end = "cuStreamEndCapture": (Handle, *mut Handle);
    graph_instantiate = "cuGraphInstantiateWithFlags": (*mut Handle, Handle, u64);
    graph_launch = "cuGraphLaunch": (Handle, Handle);
    graph_destroy = "cuGraphDestroy": (Handle);
    graph_exec_destroy = "cuGraphExecDestroy": (Handle);
    event_create = "cuEventCreate": (*mut Handle, c_uint);
    event_record = "cuEventRecord": (Handle, Handle);
    event_wait = "cuEventSynchronize": (Handle);
    event_elapsed = "cuEventElapsedTime": (*mut f32, Handle, Handle);
    event_destroy = "cuEventDestroy_v2": (Handle);
}

/// The driver, initialised. Its library is never closed: it has threads.
#[derive(Debug, Clone, Copy)]
pub struct Driver(&'static Functions);

impl Driver {
    /// Opens the driver of the system.
    ///
    /// # Errors
    /// [`CudaError::Missing`] says what to install.
    pub fn open() -> Result<Driver, CudaError> {
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
    /// [`CudaError`].
    pub fn open_file(path: &Path) -> Result<Driver, CudaError> {
        // SAFETY: the driver's library under its own name, or where the operator says that it is.
        let library = unsafe { libloading::Library::new(path) }
            .map_err(|source| CudaError::Missing { library: LIBRARY, install: INSTALL, source })?;
        // SAFETY: it is the driver.
        let functions = unsafe { Functions::of(Box::leak(Box::new(library)))? };
        let functions: &'static Functions = Box::leak(Box::new(functions));
        // SAFETY: it takes flags, of which there are none.
        functions.checked("cuInit", unsafe { (functions.init)(0) })?;
        Ok(Driver(functions))
    }
}

impl Functions {
    fn checked(&self, call: &'static str, code: c_int) -> Result<(), CudaError> {
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
            "an error without a text".into()
        };
        Err(CudaError::Failed { call, code, says })
    }
}

/// A GPU and its primary context.
#[derive(Debug)]
pub struct Device {
    driver: &'static Functions,
    number: c_int,
    context: Handle,
    name: String,
    arch: Arch,
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
    /// [`CudaError`] where there is no such GPU, or it is too old for the kernels.
    pub fn open(driver: Driver, index: usize) -> Result<Arc<Device>, CudaError> {
        let Driver(driver) = driver;
        let (mut count, mut number) = (0, 0);
        // SAFETY: it writes one number, which lives through the call.
        driver.checked("cuDeviceGetCount", unsafe { (driver.device_count)(&mut count) })?;
        let count = usize::try_from(count).unwrap_or(0);
        if index >= count {
            return Err(CudaError::NoSuchDevice { index, count });
        }
        // SAFETY: as above.
        let code = unsafe { (driver.device_get)(&mut number, index as c_int) };
        driver.checked("cuDeviceGet", code)?;
        let mut text = [0u8; 128];
        // SAFETY: it writes at most as many bytes as it is told, its zero among them.
        let code = unsafe { (driver.device_name)(text.as_mut_ptr().cast(), 128, number) };
        driver.checked("cuDeviceGetName", code)?;
        let name = text.split(|byte| *byte == 0).next().unwrap_or_default();
        let attribute = |which| {
            let mut value = 0;
            // SAFETY: it writes one number, which lives through the call.
            let code = unsafe { (driver.device_attribute)(&mut value, which, number) };
            driver.checked("cuDeviceGetAttribute", code)?;
            Ok::<u32, CudaError>(value.unsigned_abs())
        };
        let arch = Arch::of(
            attribute(ATTRIBUTE_CAPABILITY_MAJOR)?,
            attribute(ATTRIBUTE_CAPABILITY_MINOR)?,
        )?;
        let multiprocessors = attribute(ATTRIBUTE_MULTIPROCESSORS)?.max(1);
        let mut context = std::ptr::null_mut();
        // SAFETY: a device that is, and a place for a handle.
        let code = unsafe { (driver.context_retain)(&mut context, number) };
        driver.checked("cuDevicePrimaryCtxRetain", code)?;
        let name = String::from_utf8_lossy(name).into_owned();
        Ok(Arc::new(Device { driver, number, context, name, arch, multiprocessors }))
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    pub fn arch(&self) -> Arch {
        self.arch
    }

    pub fn multiprocessors(&self) -> u32 {
        self.multiprocessors
    }

    /// Makes the context current for this thread and checks what `call` returns then.
    fn call(
        &self,
        name: &'static str,
        call: impl FnOnce(&'static Functions) -> c_int,
    ) -> Result<(), CudaError> {
        // SAFETY: the context is retained for as long as this value lives.
        let code = unsafe { (self.driver.context_set)(self.context) };
        self.driver.checked("cuCtxSetCurrent", code)?;
        self.driver.checked(name, call(self.driver))
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        // SAFETY: retained once by `open`; everything that uses the context holds this value.
        unsafe { (self.driver.context_release)(self.number) };
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
    /// [`CudaError::Failed`] where there is not as much.
    pub fn new(device: &Arc<Device>, len_bytes: usize) -> Result<Memory, CudaError> {
        let mut address = 0;
        let bytes = len_bytes.max(1);
        // SAFETY: a place for one address.
        device.call("cuMemAlloc", |f| unsafe { (f.allocate)(&mut address, bytes) })?;
        Ok(Memory { device: device.clone(), address, len_bytes })
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
    /// [`CudaError::Failed`].
    ///
    /// # Panics
    /// When the memory is smaller.
    pub fn write<T: Copy>(&self, from: &[T], stream: &Stream) -> Result<(), CudaError> {
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
    /// [`CudaError::Failed`], also of what ran before on the stream.
    ///
    /// # Panics
    /// When the memory is smaller.
    pub fn read(&self, into: &mut [f32], stream: &Stream) -> Result<(), CudaError> {
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
    device: Arc<Device>,
    handle: Handle,
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
    /// [`CudaError::Failed`].
    pub fn new(device: &Arc<Device>) -> Result<Stream, CudaError> {
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
    /// [`CudaError::Failed`] of anything that ran.
    pub fn wait(&self) -> Result<(), CudaError> {
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

/// Code on a device.
#[derive(Debug)]
pub struct Module {
    device: Arc<Device>,
    handle: Handle,
}

// SAFETY: the driver takes a module from any thread.
unsafe impl Send for Module {}
// SAFETY: as for `Send`.
unsafe impl Sync for Module {}

impl Module {
    /// Loads a cubin of the device's generation.
    ///
    /// # Errors
    /// [`CudaError::Failed`] where the driver does not take it.
    pub fn load(device: &Arc<Device>, cubin: &[u8]) -> Result<Module, CudaError> {
        let mut handle = std::ptr::null_mut();
        // SAFETY: an image, whose own header says how long it is, and a place for a handle.
        device.call("cuModuleLoadData", |f| unsafe {
            (f.module_load)(&mut handle, cubin.as_ptr().cast())
        })?;
        Ok(Module { device: device.clone(), handle })
    }

    /// A kernel by its name, with so much shared memory for each CTA.
    ///
    /// # Errors
    /// [`CudaError::Failed`] where there is none, or not so much memory.
    pub fn kernel(
        self: &Arc<Module>,
        name: &'static CStr,
        threads: u32,
        shared_bytes: usize,
    ) -> Result<Kernel, CudaError> {
        let mut handle = std::ptr::null_mut();
        // SAFETY: a module that is, a string, and a place for a handle.
        self.device.call("cuModuleGetFunction", |f| unsafe {
            (f.module_function)(&mut handle, self.handle, name.as_ptr())
        })?;
        let bytes = shared_bytes as c_int;
        // SAFETY: a kernel that is.
        self.device.call("cuFuncSetAttribute", |f| unsafe {
            (f.function_set)(handle, FUNCTION_SHARED_BYTES_MAX, bytes)
        })?;
        Ok(Kernel { module: self.clone(), handle, threads, shared_bytes: shared_bytes as u32 })
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        // SAFETY: loaded once; its kernels hold it.
        self.device.call("cuModuleUnload", |f| unsafe { (f.module_unload)(self.handle) }).ok();
    }
}

/// A kernel of a module, with its launch's fixed sizes.
#[derive(Debug)]
pub struct Kernel {
    module: Arc<Module>,
    handle: Handle,
    threads: u32,
    shared_bytes: u32,
}

// SAFETY: the driver takes a kernel from any thread.
unsafe impl Send for Kernel {}
// SAFETY: as for `Send`.
unsafe impl Sync for Kernel {}

impl Kernel {
    /// Launches `grid` CTAs with arguments of 8 bytes, after what the stream does before.
    ///
    /// # Errors
    /// [`CudaError::Failed`].
    ///
    /// # Safety
    /// The kernel takes as many arguments of 8 bytes, and what they point to is there until the
    /// stream has done it.
    pub unsafe fn launch(
        &self,
        grid: (u32, u32),
        arguments: &mut [u64],
        stream: &Stream,
    ) -> Result<(), CudaError> {
        let mut pointers: Vec<*mut c_void> =
            arguments.iter_mut().map(|argument| (argument as *mut u64).cast()).collect();
        let (x, y) = grid;
        // SAFETY: the caller's promise; the arguments are copied before the call returns.
        self.module.device.call("cuLaunchKernel", |f| unsafe {
            (f.launch)(
                self.handle,
                x,
                y,
                1,
                self.threads,
                1,
                1,
                self.shared_bytes,
                stream.handle,
                pointers.as_mut_ptr(),
                std::ptr::null_mut(),
            )
        })
    }
}

/// Launches that were recorded once and are replayed.
#[derive(Debug)]
pub struct Graph {
    device: Arc<Device>,
    executable: Handle,
}

impl Graph {
    /// Records what `launches` puts onto the stream; nothing of it runs.
    ///
    /// # Errors
    /// What `launches` returns, and [`CudaError::Failed`].
    pub fn record(
        stream: &Stream,
        launches: impl FnOnce() -> Result<(), CudaError>,
    ) -> Result<Graph, CudaError> {
        let device = &stream.device;
        // SAFETY: a stream that is.
        device.call("cuStreamBeginCapture", |f| unsafe {
            (f.capture_begin)(stream.handle, CAPTURE_THREAD_LOCAL)
        })?;
        let launched = launches();
        let (mut graph, mut executable) = (std::ptr::null_mut(), std::ptr::null_mut());
        // SAFETY: the stream is captured since above; a place for a handle.
        let ended = device
            .call("cuStreamEndCapture", |f| unsafe { (f.capture_end)(stream.handle, &mut graph) });
        launched?;
        ended?;
        // SAFETY: a graph that is, and a place for a handle.
        let made = device.call("cuGraphInstantiateWithFlags", |f| unsafe {
            (f.graph_instantiate)(&mut executable, graph, 0)
        });
        // SAFETY: made above and used no more; what was instantiated does not need it.
        device.call("cuGraphDestroy", |f| unsafe { (f.graph_destroy)(graph) })?;
        made?;
        Ok(Graph { device: device.clone(), executable })
    }

    /// Runs it, after what the stream does before.
    ///
    /// # Errors
    /// [`CudaError::Failed`].
    ///
    /// # Safety
    /// What was recorded may run: its memory is there until the stream has done it.
    pub unsafe fn launch(&self, stream: &Stream) -> Result<(), CudaError> {
        // SAFETY: the caller's promise.
        self.device
            .call("cuGraphLaunch", |f| unsafe { (f.graph_launch)(self.executable, stream.handle) })
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        let destroy = |f: &Functions| {
            // SAFETY: made once; the driver waits for what runs.
            unsafe { (f.graph_exec_destroy)(self.executable) }
        };
        self.device.call("cuGraphExecDestroy", destroy).ok();
    }
}

/// A moment on a stream.
#[derive(Debug)]
pub struct Event {
    device: Arc<Device>,
    handle: Handle,
}

impl Event {
    /// An event of no moment yet.
    ///
    /// # Errors
    /// [`CudaError::Failed`].
    pub fn new(device: &Arc<Device>) -> Result<Event, CudaError> {
        let mut handle = std::ptr::null_mut();
        // SAFETY: a place for a handle.
        device.call("cuEventCreate", |f| unsafe { (f.event_create)(&mut handle, 0) })?;
        Ok(Event { device: device.clone(), handle })
    }

    /// Happens when the stream has done what is on it.
    ///
    /// # Errors
    /// [`CudaError::Failed`].
    pub fn record(&self, stream: &Stream) -> Result<(), CudaError> {
        // SAFETY: both are.
        self.device
            .call("cuEventRecord", |f| unsafe { (f.event_record)(self.handle, stream.handle) })
    }

    /// Waits until it has happened, and says how long that is after another, in milliseconds.
    ///
    /// # Errors
    /// [`CudaError::Failed`], also where either was not recorded.
    pub fn ms_after(&self, begin: &Event) -> Result<f32, CudaError> {
        let mut ms = 0.0;
        // SAFETY: an event that is.
        self.device.call("cuEventSynchronize", |f| unsafe { (f.event_wait)(self.handle) })?;
        // SAFETY: both are, and a place for one number.
        self.device.call("cuEventElapsedTime", |f| unsafe {
            (f.event_elapsed)(&mut ms, begin.handle, self.handle)
        })?;
        Ok(ms)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        let destroy = |f: &Functions| {
            // SAFETY: made once and used no more.
            unsafe { (f.event_destroy)(self.handle) }
        };
        self.device.call("cuEventDestroy", destroy).ok();
    }
}
