//! Memory that may be registered: who owns it, and what that promises.

use std::alloc::{self, Layout};
use std::ptr::NonNull;
use std::sync::Arc;

use crate::error::OutOfRange;

/// Memory that peers may write and read while this program runs.
///
/// # Safety
/// From now until the value is dropped, `as_ptr` gives the same address, and `bytes` bytes from there
/// are mapped, readable and writable, and never a stack or an ordinary Rust value: nobody makes a
/// reference (`&[u8]`, `&mut [u8]`) to a range while a peer or an operation may write it. Bytes are
/// copied in and out through pointers instead. For `FI_MR_ALLOCATED` the pages are present and stay.
///
/// Besides, dropping the value must not call into this crate: it may happen inside a poll.
pub unsafe trait Memory: Send + Sync + 'static {
    fn as_ptr(&self) -> *mut u8;
    fn bytes(&self) -> usize;
}

// SAFETY: the memory is that of the inner value, which lives as long.
unsafe impl<M: Memory + ?Sized> Memory for Arc<M> {
    fn as_ptr(&self) -> *mut u8 {
        (**self).as_ptr()
    }

    fn bytes(&self) -> usize {
        (**self).bytes()
    }
}

/// Zeroed pages of the process, present from the beginning. For tests, examples and small buffers.
#[derive(Debug)]
pub struct Pages {
    base: NonNull<u8>,
    layout: Layout,
}

const PAGE_BYTES: usize = 4096;

// SAFETY: only raw copies go in and out, and the allocation is this value's alone.
unsafe impl Send for Pages {}
// SAFETY: as above; racing copies of the same bytes give torn bytes, as with any shared memory.
unsafe impl Sync for Pages {}

impl Pages {
    /// Whole pages that hold `bytes`, at least one.
    pub fn new(bytes: usize) -> Self {
        let whole = bytes.max(1).next_multiple_of(PAGE_BYTES);
        let layout =
            Layout::from_size_align(whole, PAGE_BYTES).expect("a size that memory can have");
        // SAFETY: the size is not zero.
        let base = unsafe { alloc::alloc_zeroed(layout) };
        let Some(base) = NonNull::new(base) else { alloc::handle_alloc_error(layout) };
        let pages = Pages { base, layout };
        for page in (0..whole).step_by(PAGE_BYTES) {
            // SAFETY: within the allocation, which nobody else has yet. Volatile, because a plain zero
            // over zeroed memory may be left out.
            unsafe { pages.base.as_ptr().add(page).write_volatile(0) };
        }
        pages
    }

    fn check(&self, offset: usize, bytes: usize) -> Result<(), OutOfRange> {
        match offset.checked_add(bytes) {
            Some(end) if end <= self.layout.size() => Ok(()),
            _ => Err(OutOfRange {
                offset: offset as u64,
                bytes: bytes as u64,
                region_bytes: self.layout.size() as u64,
            }),
        }
    }

    /// # Errors
    /// [`OutOfRange`] when it does not fit.
    pub fn copy_in(&self, offset: usize, from: &[u8]) -> Result<(), OutOfRange> {
        self.check(offset, from.len())?;
        // SAFETY: checked; `from` is an ordinary slice and so lies elsewhere.
        unsafe {
            let to = self.base.as_ptr().add(offset);
            std::ptr::copy_nonoverlapping(from.as_ptr(), to, from.len());
        }
        Ok(())
    }

    /// # Errors
    /// [`OutOfRange`] when the range does not lie inside.
    pub fn copy_out(&self, offset: usize, bytes: usize) -> Result<Vec<u8>, OutOfRange> {
        self.check(offset, bytes)?;
        let mut out = vec![0; bytes];
        // SAFETY: checked; `out` was just made.
        unsafe {
            let from = self.base.as_ptr().add(offset);
            std::ptr::copy_nonoverlapping(from, out.as_mut_ptr(), bytes);
        }
        Ok(out)
    }
}

// SAFETY: allocated until drop, never moved, and only copied in and out.
unsafe impl Memory for Pages {
    fn as_ptr(&self) -> *mut u8 {
        self.base.as_ptr()
    }

    fn bytes(&self) -> usize {
        self.layout.size()
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout.
        unsafe { alloc::dealloc(self.base.as_ptr(), self.layout) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_are_whole_zeroed_and_bounded() {
        let pages = Pages::new(5000);
        assert_eq!(pages.bytes(), 8192);
        assert_eq!(pages.as_ptr().addr() % PAGE_BYTES, 0);
        assert_eq!(pages.copy_out(8000, 192), Ok(vec![0; 192]));
        assert_eq!(pages.copy_in(8190, b"abc").unwrap_err().region_bytes, 8192);
        assert!(pages.copy_out(usize::MAX, 2).is_err());
        pages.copy_in(10, b"abc").expect("inside");
        assert_eq!(pages.copy_out(9, 5), Ok(b"\0abc\0".to_vec()));
    }
}
