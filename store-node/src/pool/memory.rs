//! Memory that a pool may lie in. Copies are begun one by one and waited for together.

use std::fmt::Debug;
use std::os::fd::BorrowedFd;

use kvasir_transfer::memory::{MemoryError, RangeError, SharedMemory};
use kvasir_transfer::{Checksum, Stores};

/// A copy came to nothing.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CopyFault {
    #[error(transparent)]
    Range(#[from] RangeError),
    #[error(transparent)]
    Cuda(#[from] kvasir_cuda::DriverError),
}

/// See the module.
pub(crate) trait PoolMemory: Debug + Send + Sync {
    /// Begins to copy from the pool. Answers with the checksum of what was copied, where that is over already and
    /// hashing it cost no pass of its own.
    ///
    /// # Errors
    /// [`CopyFault`]; then nothing is copied.
    ///
    /// # Safety
    /// So many bytes at `into` may be written, and nobody reads them, until [`PoolMemory::wait`] has returned.
    unsafe fn read(&self, offset: u64, into: *mut u8, bytes: u64)
    -> Result<Option<u64>, CopyFault>;

    /// Begins to copy to the pool.
    ///
    /// # Errors
    /// [`CopyFault`]; then nothing is copied.
    ///
    /// # Safety
    /// So many bytes at `from` may be read, and nobody writes them, until [`PoolMemory::wait`] has returned.
    unsafe fn write(&self, offset: u64, from: *const u8, bytes: u64) -> Result<(), CopyFault>;

    /// Waits until every copy that was begun is over.
    ///
    /// # Errors
    /// [`CopyFault`] when one of them failed: then none counts.
    fn wait(&self) -> Result<(), CopyFault>;

    /// What the engine maps, where the node has made it.
    fn shared(&self) -> Option<&SharedMemory>;

    /// The descriptor of that.
    fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.shared().map(SharedMemory::fd)
    }
}

/// Memory of the host, made by the node: the engine cannot take it away from under a copy.
#[derive(Debug)]
pub(crate) struct HostMemory(SharedMemory);

impl HostMemory {
    /// # Errors
    /// When the host has not that much.
    pub(crate) fn create(bytes: u64) -> Result<Self, MemoryError> {
        let bytes = usize::try_from(bytes).unwrap_or(usize::MAX);
        SharedMemory::create_large("kvasir-pool", bytes).map(HostMemory)
    }

    fn at(&self, offset: u64, bytes: u64) -> Result<*mut u8, CopyFault> {
        let offset = usize::try_from(offset).unwrap_or(usize::MAX);
        self.0.check(offset, usize::try_from(bytes).unwrap_or(usize::MAX))?;
        Ok(self.0.as_ptr().wrapping_add(offset))
    }
}

impl PoolMemory for HostMemory {
    unsafe fn read(
        &self,
        offset: u64,
        into: *mut u8,
        bytes: u64,
    ) -> Result<Option<u64>, CopyFault> {
        let from = self.at(offset, bytes)?;
        let mut sum = Checksum::new();
        // SAFETY: the source was checked to lie in the mapping, which lives; that the target may be written is the
        // caller's promise. The two do not overlap: the node has made either memory for itself. An engine that writes
        // meanwhile breaks its word, and gets what it wrote. What is copied is mostly sent at once, from the caches.
        unsafe { sum.add_and_copy(from, into, bytes as usize, Stores::Cached) };
        Ok(Some(sum.sum()))
    }

    unsafe fn write(&self, offset: u64, from: *const u8, bytes: u64) -> Result<(), CopyFault> {
        let into = self.at(offset, bytes)?;
        // SAFETY: as for `read`, the other way round.
        unsafe { std::ptr::copy_nonoverlapping(from, into, bytes as usize) };
        Ok(())
    }

    fn wait(&self) -> Result<(), CopyFault> {
        Ok(())
    }

    fn shared(&self) -> Option<&SharedMemory> {
        Some(&self.0)
    }
}
