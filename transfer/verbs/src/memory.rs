//! Memory that a device may read and write at any time. The layer registers memory that its caller
//! owns and holds on to the owner for as long as the device can reach the bytes.

use std::ffi::c_void;
use std::ptr;
use std::sync::atomic::{AtomicU8, Ordering};

use rustix::mm::{MapFlags, ProtFlags};

use crate::error::RangeError;

/// Who owns registered memory. A region holds it until the device has let go.
///
/// # Safety
/// While the value lives, `[as_ptr, as_ptr + bytes)` stays mapped at that address, and `as_ptr` and
/// `bytes` always answer the same. A device, acting for this process or for a peer, may at any time
/// read these bytes and, when they are registered for writing, change them: so nothing hands out a
/// `&[u8]` or `&mut [u8]` over bytes that may change meanwhile. What is copied out is judged by the
/// completions that say it has arrived.
pub unsafe trait Memory: Send + Sync + 'static {
    /// The first byte.
    fn as_ptr(&self) -> *mut u8;
    /// How many there are.
    fn bytes(&self) -> usize;
}

/// Zeroed, page-aligned memory of this process, for small messages and for tests. Its bytes are
/// copied in and out one by one as atomics, so that no access is undefined whatever a device does.
#[derive(Debug)]
pub struct Buffer {
    base: *mut AtomicU8,
    bytes: usize,
}

// SAFETY: the mapping belongs to the process and lives until drop; all accesses are atomic.
unsafe impl Send for Buffer {}
// SAFETY: as above.
unsafe impl Sync for Buffer {}

// SAFETY: the mapping is made once and unmapped in drop; bytes are reached as atomics only.
unsafe impl Memory for Buffer {
    fn as_ptr(&self) -> *mut u8 {
        self.base.cast()
    }

    fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Buffer {
    /// # Errors
    /// When the system gives no memory, or `bytes` is 0.
    pub fn new(bytes: usize) -> std::io::Result<Self> {
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: the kernel chooses a fresh range, so that no memory in use is touched.
        let base = unsafe {
            rustix::mm::mmap_anonymous(ptr::null_mut(), bytes, protection, MapFlags::PRIVATE)
        }?;
        Ok(Buffer { base: base.cast(), bytes })
    }

    /// # Errors
    /// [`RangeError`] when the bytes do not fit; nothing is written then.
    pub fn write(&self, offset: usize, bytes: &[u8]) -> Result<(), RangeError> {
        for (cell, byte) in self.range(offset, bytes.len())?.iter().zip(bytes) {
            cell.store(*byte, Ordering::Relaxed);
        }
        Ok(())
    }

    /// # Errors
    /// [`RangeError`] when the range does not lie in the buffer.
    pub fn read(&self, offset: usize, bytes: usize) -> Result<Vec<u8>, RangeError> {
        let cells = self.range(offset, bytes)?;
        Ok(cells.iter().map(|cell| cell.load(Ordering::Relaxed)).collect())
    }

    fn range(&self, offset: usize, bytes: usize) -> Result<&[AtomicU8], RangeError> {
        let error =
            RangeError { offset: offset as u64, bytes: bytes as u64, available: self.bytes as u64 };
        // SAFETY: the mapping holds `self.bytes` initialised bytes and outlives the borrow; an atomic
        // byte has the layout of a byte and may change under a shared reference.
        let all = unsafe { std::slice::from_raw_parts(self.base, self.bytes) };
        let end = offset.checked_add(bytes).ok_or(error)?;
        all.get(offset..end).ok_or(error)
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours and whole, and no borrow of it outlives `self`.
        let unmapped = unsafe { rustix::mm::munmap(self.base.cast::<c_void>(), self.bytes) };
        debug_assert!(unmapped.is_ok(), "a whole mapping can be unmapped");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_buffer_keeps_what_is_written_and_refuses_what_does_not_fit() {
        let buffer = Buffer::new(8192).expect("8 KiB");
        assert_eq!(buffer.as_ptr().addr() % 4096, 0);
        buffer.write(8190, &[7, 9]).expect("the last two bytes");
        assert_eq!(buffer.read(8189, 3).expect("the last three bytes"), [0, 7, 9]);
        assert!(buffer.write(8191, &[1, 2]).is_err());
        assert!(buffer.read(usize::MAX, 2).is_err());
        assert_eq!(buffer.read(8192, 0).expect("nothing, at the end"), [0_u8; 0]);
    }

    #[test]
    fn a_buffer_of_no_bytes_is_refused() {
        assert!(Buffer::new(0).is_err());
    }
}
