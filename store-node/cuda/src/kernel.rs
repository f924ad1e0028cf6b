//! Code on a GPU, launches that are recorded and replayed, and how long they take.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::sync::Arc;

use crate::DriverError;
use crate::driver::{Device, Handle, Stream, functions};

pub(crate) const FUNCTION_SHARED_BYTES_MAX: c_int = 8;
pub(crate) const CAPTURE_THREAD_LOCAL: c_int = 1;
pub(crate) const LAUNCH_OVERLAPS: c_int = 6;

/// `CUlaunchAttribute`: what it is, and its value in 64 bytes, of which some have pointers.
#[repr(C, align(8))]
pub(crate) struct LaunchAttribute {
    id: c_int,
    _padding: c_int,
    pub(crate) value: [c_int; 16],
}

/// `CUlaunchConfig`.
#[repr(C)]
pub(crate) struct LaunchConfig {
    pub(crate) grid: [c_uint; 3],
    pub(crate) block: [c_uint; 3],
    pub(crate) shared_bytes: c_uint,
    pub(crate) stream: Handle,
    pub(crate) attributes: *const LaunchAttribute,
    pub(crate) attribute_count: c_uint,
}

functions! { KernelFunctions {
    module_load = cuModuleLoadData: (*mut Handle, *const c_void);
    module_unload = cuModuleUnload: (Handle);
    module_function = cuModuleGetFunction: (*mut Handle, Handle, *const c_char);
    function_set = cuFuncSetAttribute: (Handle, c_int, c_int);
    launch = cuLaunchKernelEx: (
        *const LaunchConfig, Handle, *mut *mut c_void, *mut *mut c_void
    );
    capture_begin = cuStreamBeginCapture_v2: (Handle, c_int);
    capture_end = cuStreamEndCapture: (Handle, *mut Handle);
    graph_instantiate = cuGraphInstantiateWithFlags: (*mut Handle, Handle, u64);
    graph_launch = cuGraphLaunch: (Handle, Handle);
    graph_destroy = cuGraphDestroy: (Handle);
    graph_exec_destroy = cuGraphExecDestroy: (Handle);
    event_create = cuEventCreate: (*mut Handle, c_uint);
    event_record = cuEventRecord: (Handle, Handle);
    event_wait = cuEventSynchronize: (Handle);
    event_elapsed = cuEventElapsedTime: (*mut f32, Handle, Handle);
    event_destroy = cuEventDestroy_v2: (Handle);
} }

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
    /// [`DriverError::Failed`] where the driver does not take it.
    pub fn load(device: &Arc<Device>, cubin: &[u8]) -> Result<Module, DriverError> {
        let mut handle = std::ptr::null_mut();
        // SAFETY: an image, whose own header says how long it is, and a place for a handle.
        device.call_kernel("cuModuleLoadData", |f| unsafe {
            (f.module_load)(&mut handle, cubin.as_ptr().cast())
        })?;
        Ok(Module { device: device.clone(), handle })
    }

    /// A kernel by its name, with so much shared memory for each CTA.
    ///
    /// # Errors
    /// [`DriverError::Failed`] where there is none, or not so much memory.
    pub fn kernel(
        self: &Arc<Module>,
        name: &'static CStr,
        threads: u32,
        shared_bytes: usize,
    ) -> Result<Kernel, DriverError> {
        let mut handle = std::ptr::null_mut();
        // SAFETY: a module that is, a string, and a place for a handle.
        self.device.call_kernel("cuModuleGetFunction", |f| unsafe {
            (f.module_function)(&mut handle, self.handle, name.as_ptr())
        })?;
        let bytes = shared_bytes as c_int;
        // SAFETY: a kernel that is.
        self.device.call_kernel("cuFuncSetAttribute", |f| unsafe {
            (f.function_set)(handle, FUNCTION_SHARED_BYTES_MAX, bytes)
        })?;
        Ok(Kernel { module: self.clone(), handle, threads, shared_bytes: shared_bytes as u32 })
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        // SAFETY: loaded once; its kernels hold it.
        self.device
            .call_kernel("cuModuleUnload", |f| unsafe { (f.module_unload)(self.handle) })
            .ok();
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
    /// [`DriverError::Failed`].
    ///
    /// # Safety
    /// The kernel takes as many arguments of 8 bytes, and what they point to is there until the
    /// stream has done it.
    pub unsafe fn launch(
        &self,
        grid: (u32, u32),
        arguments: &mut [u64],
        stream: &Stream,
    ) -> Result<(), DriverError> {
        // SAFETY: the caller's promise.
        unsafe { self.launch_with(grid, arguments, stream, &[]) }
    }

    /// As [`Kernel::launch`], but the kernel may begin when the one before it on the stream says
    /// `griddepcontrol.launch_dependents`, and says `griddepcontrol.wait` itself, in every CTA, before it
    /// reads what that one writes, or writes anything.
    ///
    /// # Errors
    /// [`DriverError::Failed`].
    ///
    /// # Safety
    /// As [`Kernel::launch`], and the kernel does wait.
    pub unsafe fn launch_overlapping(
        &self,
        grid: (u32, u32),
        arguments: &mut [u64],
        stream: &Stream,
    ) -> Result<(), DriverError> {
        let mut value = [0; 16];
        value[0] = 1;
        let overlaps = LaunchAttribute { id: LAUNCH_OVERLAPS, _padding: 0, value };
        // SAFETY: the caller's promise.
        unsafe { self.launch_with(grid, arguments, stream, &[overlaps]) }
    }

    /// # Safety
    /// As [`Kernel::launch`].
    unsafe fn launch_with(
        &self,
        (x, y): (u32, u32),
        arguments: &mut [u64],
        stream: &Stream,
        attributes: &[LaunchAttribute],
    ) -> Result<(), DriverError> {
        let mut pointers: Vec<*mut c_void> =
            arguments.iter_mut().map(|argument| (argument as *mut u64).cast()).collect();
        let config = LaunchConfig {
            grid: [x, y, 1],
            block: [self.threads, 1, 1],
            shared_bytes: self.shared_bytes,
            stream: stream.handle,
            attributes: attributes.as_ptr(),
            attribute_count: attributes.len() as c_uint,
        };
        let none = std::ptr::null_mut();
        // SAFETY: the caller's promise; configuration and arguments are copied before the call returns.
        self.module.device.call_kernel("cuLaunchKernelEx", |f| unsafe {
            (f.launch)(&config, self.handle, pointers.as_mut_ptr(), none)
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
    /// What `launches` returns, and [`DriverError::Failed`].
    pub fn record<E: From<DriverError>>(
        stream: &Stream,
        launches: impl FnOnce() -> Result<(), E>,
    ) -> Result<Graph, E> {
        let device = &stream.device;
        // SAFETY: a stream that is.
        device.call_kernel("cuStreamBeginCapture", |f| unsafe {
            (f.capture_begin)(stream.handle, CAPTURE_THREAD_LOCAL)
        })?;
        let launched = launches();
        let (mut graph, mut executable) = (std::ptr::null_mut(), std::ptr::null_mut());
        // SAFETY: the stream is captured since above; a place for a handle.
        let ended = device.call_kernel("cuStreamEndCapture", |f| unsafe {
            (f.capture_end)(stream.handle, &mut graph)
        });
        launched?;
        ended?;
        // SAFETY: a graph that is, and a place for a handle.
        let made = device.call_kernel("cuGraphInstantiateWithFlags", |f| unsafe {
            (f.graph_instantiate)(&mut executable, graph, 0)
        });
        // SAFETY: made above and used no more; what was instantiated does not need it.
        device.call_kernel("cuGraphDestroy", |f| unsafe { (f.graph_destroy)(graph) })?;
        made?;
        Ok(Graph { device: device.clone(), executable })
    }

    /// Runs it, after what the stream does before.
    ///
    /// # Errors
    /// [`DriverError::Failed`].
    ///
    /// # Safety
    /// What was recorded may run: its memory is there until the stream has done it.
    pub unsafe fn launch(&self, stream: &Stream) -> Result<(), DriverError> {
        // SAFETY: the caller's promise.
        self.device.call_kernel("cuGraphLaunch", |f| unsafe {
            (f.graph_launch)(self.executable, stream.handle)
        })
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        let destroy = |f: &KernelFunctions| {
            // SAFETY: made once; the driver waits for what runs.
            unsafe { (f.graph_exec_destroy)(self.executable) }
        };
        self.device.call_kernel("cuGraphExecDestroy", destroy).ok();
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
    /// [`DriverError::Failed`].
    pub fn new(device: &Arc<Device>) -> Result<Event, DriverError> {
        let mut handle = std::ptr::null_mut();
        // SAFETY: a place for a handle.
        device.call_kernel("cuEventCreate", |f| unsafe { (f.event_create)(&mut handle, 0) })?;
        Ok(Event { device: device.clone(), handle })
    }

    /// Happens when the stream has done what is on it.
    ///
    /// # Errors
    /// [`DriverError::Failed`].
    pub fn record(&self, stream: &Stream) -> Result<(), DriverError> {
        // SAFETY: both are.
        self.device.call_kernel("cuEventRecord", |f| unsafe {
            (f.event_record)(self.handle, stream.handle)
        })
    }

    /// Waits until it has happened, and says how long that is after another, in milliseconds.
    ///
    /// # Errors
    /// [`DriverError::Failed`], also where either was not recorded.
    pub fn ms_after(&self, begin: &Event) -> Result<f32, DriverError> {
        let mut ms = 0.0;
        let wait = |f: &KernelFunctions| {
            // SAFETY: an event that is.
            unsafe { (f.event_wait)(self.handle) }
        };
        self.device.call_kernel("cuEventSynchronize", wait)?;
        // SAFETY: both are, and a place for one number.
        self.device.call_kernel("cuEventElapsedTime", |f| unsafe {
            (f.event_elapsed)(&mut ms, begin.handle, self.handle)
        })?;
        Ok(ms)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        let destroy = |f: &KernelFunctions| {
            // SAFETY: made once and used no more.
            unsafe { (f.event_destroy)(self.handle) }
        };
        self.device.call_kernel("cuEventDestroy", destroy).ok();
    }
}
