//! Pools in memory of a GPU, which the engine has allocated and the node opens by handles.
//!
//! Copies go over a stream of their own: nothing that the engine computes waits for them, nor the other way round. The
//! node's slots are registered with the driver when the first such pool is opened, and stay so, so that the GPU copies by
//! itself; where that is not possible the driver copies through a buffer of its own, which is slower.

use std::path::Path;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError};

use kvasir_cuda::{Device, Driver, DriverError, IpcHandle, Registered, SharedAllocation, Stream};
use kvasir_proto::{PoolLayout, v1};
use kvasir_transfer::memory::{RangeError, SharedMemory};

use super::memory::{CopyFault, PoolMemory};

/// More allocations than an engine has layers would be a mistake.
const ALLOCATIONS_MAX: usize = 4_096;

/// Why a pool is not opened.
#[derive(Debug, thiserror::Error)]
pub enum CudaPoolError {
    #[error("field `device_uuid` has {0} bytes; a GPU's UUID has 16")]
    Uuid(usize),
    #[error("the pool has {0} allocations; it must have 1 to {ALLOCATIONS_MAX}")]
    Allocations(usize),
    #[error(
        "the handle of allocation {at} has {bytes} bytes; a handle of `cuIpcGetMemHandle` has 64"
    )]
    Handle { at: usize, bytes: usize },
    #[error("allocations {one} and {other} are the same: describe each once")]
    Twice { one: usize, other: usize },
    #[error("allocation {at} has {there} bytes, but {described} are described")]
    Smaller { at: usize, there: u64, described: u64 },
    #[error("the pages of run {run} are not all in one allocation")]
    Across { run: usize },
    #[error("allocation {at}: {source}")]
    Open {
        at: usize,
        #[source]
        source: DriverError,
    },
    #[error(transparent)]
    Driver(#[from] DriverError),
}

/// See the module.
#[derive(Debug)]
pub(crate) struct CudaMemory {
    stream: Stream,
    /// In the pool's order: where each begins, and its bytes as described.
    allocations: Vec<(u64, u64, SharedAllocation)>,
    /// They stay registered for as long as copies may run.
    _slots: Arc<Slots>,
}

/// The node's slots, as GPUs copy from and to them.
#[derive(Debug)]
pub(crate) struct Slots {
    memory: Arc<SharedMemory>,
    /// Dropped before the memory, for which see [`Drop`].
    registered: Mutex<Option<Registered>>,
}

impl Slots {
    pub(crate) fn new(memory: Arc<SharedMemory>) -> Self {
        Slots { memory, registered: Mutex::new(None) }
    }

    /// Registers them unless that is done. Answers whether they are registered.
    fn register(&self, device: &Arc<Device>) -> bool {
        let mut registered = self.registered.lock().unwrap_or_else(PoisonError::into_inner);
        if registered.is_none() {
            let memory = NonNull::new(self.memory.as_ptr()).expect("a mapping is somewhere");
            // SAFETY: the mapping is held for longer than what is made of it.
            let made = unsafe { Registered::new(device, memory, self.memory.len()) };
            *registered = made
                .inspect_err(|error| {
                    tracing::warn!(
                        %error,
                        "the store node cannot register the slots with the GPU's driver; copies are slower"
                    );
                })
                .ok();
        }
        registered.is_some()
    }
}

impl Drop for Slots {
    fn drop(&mut self) {
        *self.registered.get_mut().unwrap_or_else(PoisonError::into_inner) = None;
    }
}

/// What is described, checked as far as it can be without a GPU.
#[derive(Debug)]
pub(crate) struct CudaDescription {
    uuid: [u8; 16],
    allocations: Vec<(IpcHandle, u64)>,
}

impl CudaDescription {
    /// # Errors
    /// [`CudaPoolError`].
    pub(crate) fn new(described: &v1::CudaPool) -> Result<Self, CudaPoolError> {
        let v1::CudaPool { device_uuid, allocations } = described;
        let uuid = device_uuid.as_slice().try_into();
        let uuid = uuid.map_err(|_| CudaPoolError::Uuid(device_uuid.len()))?;
        if allocations.is_empty() || allocations.len() > ALLOCATIONS_MAX {
            return Err(CudaPoolError::Allocations(allocations.len()));
        }
        let handle = |(at, of): (usize, &v1::CudaAllocation)| {
            let bytes = of.ipc_handle.len();
            let handle = of.ipc_handle.as_slice().try_into();
            let handle = handle.map_err(|_| CudaPoolError::Handle { at, bytes })?;
            Ok((IpcHandle(handle), of.bytes))
        };
        let allocations: Result<Vec<_>, CudaPoolError> =
            allocations.iter().enumerate().map(handle).collect();
        let allocations = allocations?;
        for (other, (handle, _)) in allocations.iter().enumerate() {
            if let Some(one) = allocations[..other].iter().position(|(of, _)| of == handle) {
                return Err(CudaPoolError::Twice { one, other });
            }
        }
        Ok(CudaDescription { uuid, allocations })
    }

    /// Of all allocations.
    pub(crate) fn bytes(&self) -> u64 {
        self.allocations.iter().fold(0, |sum, (_, bytes)| sum.saturating_add(*bytes))
    }

    /// Where each begins, and its bytes.
    fn places(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        self.allocations.iter().scan(0, |next: &mut u64, (_, bytes)| {
            let begin = *next;
            *next = next.saturating_add(*bytes);
            Some((begin, *bytes))
        })
    }

    /// The pages of each run lie in one allocation.
    ///
    /// # Errors
    /// [`CudaPoolError::Across`].
    pub(crate) fn check(&self, layout: &PoolLayout) -> Result<(), CudaPoolError> {
        let last = layout.runs(layout.pages() - 1);
        for (run, ((first, _), (last, bytes))) in layout.runs(0).zip(last).enumerate() {
            let holds = |(begin, of): (u64, u64)| first >= begin && last + bytes <= begin + of;
            if !self.places().any(holds) {
                return Err(CudaPoolError::Across { run });
            }
        }
        Ok(())
    }
}

impl CudaMemory {
    /// Opens what is described, beside these slots. Takes as long as registering them does.
    ///
    /// # Errors
    /// [`CudaPoolError`].
    pub(crate) fn open(
        described: &CudaDescription,
        library: Option<&Path>,
        slots: &Arc<Slots>,
    ) -> Result<Self, CudaPoolError> {
        let driver = match library {
            Some(file) => Driver::open_file(file)?,
            None => Driver::open()?,
        };
        let device = Device::of_uuid(driver, described.uuid)?;
        let mut allocations = Vec::with_capacity(described.allocations.len());
        for (at, (&(handle, bytes), (begin, _))) in
            described.allocations.iter().zip(described.places()).enumerate()
        {
            let opened = SharedAllocation::open(&device, handle)
                .map_err(|source| CudaPoolError::Open { at, source })?;
            if opened.len_bytes() < bytes {
                let (there, described) = (opened.len_bytes(), bytes);
                return Err(CudaPoolError::Smaller { at, there, described });
            }
            allocations.push((begin, bytes, opened));
        }
        let registered = slots.register(&device);
        let stream = Stream::new(&device)?;
        tracing::info!(
            gpu = device.name(),
            bytes = described.bytes(),
            registered,
            "the store node opened a pool in GPU memory"
        );
        Ok(CudaMemory { stream, allocations, _slots: Arc::clone(slots) })
    }

    /// The allocation that has these bytes, and where in it they begin.
    fn at(&self, offset: u64, bytes: u64) -> Result<(&SharedAllocation, u64), CopyFault> {
        let at = self.allocations.partition_point(|(begin, ..)| *begin <= offset);
        let found = at.checked_sub(1).map(|at| &self.allocations[at]);
        let inside = found.filter(|(begin, of, _)| {
            offset.checked_add(bytes).is_some_and(|end| end <= begin.saturating_add(*of))
        });
        let Some((begin, _, allocation)) = inside else {
            let usize_of = |value| usize::try_from(value).unwrap_or(usize::MAX);
            let len = self.allocations.last().map_or(0, |(begin, of, _)| begin + of);
            return Err(CopyFault::Range(RangeError {
                offset: usize_of(offset),
                bytes: usize_of(bytes),
                len: usize_of(len),
            }));
        };
        Ok((allocation, offset - begin))
    }
}

impl PoolMemory for CudaMemory {
    unsafe fn read(
        &self,
        offset: u64,
        into: *mut u8,
        bytes: u64,
    ) -> Result<Option<u64>, CopyFault> {
        let (allocation, offset) = self.at(offset, bytes)?;
        // SAFETY: inside the allocation; the rest is the caller's promise.
        unsafe { allocation.read(offset, into, bytes, &self.stream) }?;
        Ok(None)
    }

    unsafe fn write(&self, offset: u64, from: *const u8, bytes: u64) -> Result<(), CopyFault> {
        let (allocation, offset) = self.at(offset, bytes)?;
        // SAFETY: as for `read`.
        Ok(unsafe { allocation.write(offset, from, bytes, &self.stream) }?)
    }

    fn wait(&self) -> Result<(), CopyFault> {
        Ok(self.stream.wait()?)
    }

    fn shared(&self) -> Option<&SharedMemory> {
        None
    }
}

impl Drop for CudaMemory {
    fn drop(&mut self) {
        // Nothing of it is under way when allocations are closed.
        self.stream.wait().ok();
    }
}
