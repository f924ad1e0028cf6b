//! Counts what a thread allocates, so that a parser which believes a length it was told is found
//! although the memory is there. It stands in for the global allocator wherever targets run.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

thread_local! {
    /// Bytes asked for by this thread, given back or not.
    static ALLOCATED: Cell<usize> = const { Cell::new(0) };
}

/// What a parser may take beside what is linear in its input: errors, small tables.
const BYTES_BASE: usize = 4096;
/// Per byte of input. A message of two bytes, all of it defaults, becomes a struct of 24 in a vector
/// that doubles as it grows: 48 per byte, all its lengths together.
const BYTES_PER_BYTE: usize = 64;

#[derive(Debug)]
struct Counting;

#[global_allocator]
static COUNTING: Counting = Counting;

fn count(bytes: usize) {
    // A thread that ends allocates too, when its counter is gone.
    let _ = ALLOCATED.try_with(|allocated| allocated.set(allocated.get().saturating_add(bytes)));
}

// SAFETY: everything is passed on to the system's allocator as it is; the counter allocates nothing.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size());
        // SAFETY: the caller's promises are the system allocator's.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count(layout.size());
        // SAFETY: as above.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, bytes: usize) -> *mut u8 {
        count(bytes);
        // SAFETY: as above.
        unsafe { System.realloc(at, layout, bytes) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: as above.
        unsafe { System.dealloc(at, layout) }
    }
}

/// Runs a parser on so many bytes.
///
/// # Panics
/// When it allocates more than they are reason for.
pub fn within<T>(input_bytes: usize, parser: impl FnOnce() -> T) -> T {
    let before = ALLOCATED.get();
    let parsed = parser();
    let allocated = ALLOCATED.get() - before;
    let max = BYTES_BASE + BYTES_PER_BYTE * input_bytes;
    assert!(allocated <= max, "{allocated} bytes were allocated for {input_bytes} bytes of input");
    parsed
}
