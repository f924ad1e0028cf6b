//! Memory as `ring` sees it, in loom's model: words that are used as atomics, and plain bytes, whose
//! every access is checked for races. The two never hold the same thing here, though they do in a real
//! mapping: what orders one orders the other.

use loom::cell::UnsafeCell;

use crate::sync::AtomicU64;

#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("offset {offset} with {bytes} bytes does not fit the memory of {len} bytes")]
pub struct RangeError {
    pub offset: usize,
    pub bytes: usize,
    pub len: usize,
}

#[derive(Debug)]
pub struct SharedMemory {
    words: Vec<AtomicU64>,
    bytes: Vec<UnsafeCell<[u8; 8]>>,
}

// SAFETY: loom runs one thread at a time, and its cells fail the test when accesses race.
unsafe impl Send for SharedMemory {}
// SAFETY: as above.
unsafe impl Sync for SharedMemory {}

impl SharedMemory {
    pub fn new(bytes: usize) -> Self {
        let words = bytes / 8;
        SharedMemory {
            words: (0..words).map(|_| AtomicU64::new(0)).collect(),
            bytes: (0..words).map(|_| UnsafeCell::new([0; 8])).collect(),
        }
    }

    pub fn len(&self) -> usize {
        self.words.len() * 8
    }

    pub fn check(&self, offset: usize, bytes: usize) -> Result<(), RangeError> {
        let fits = offset.checked_add(bytes).is_some_and(|end| end <= self.len());
        fits.then_some(()).ok_or(RangeError { offset, bytes, len: self.len() })
    }

    pub fn atomic_u64(&self, offset: usize) -> Result<&AtomicU64, RangeError> {
        self.check(offset, 8)?;
        assert!(offset.is_multiple_of(8));
        Ok(&self.words[offset / 8])
    }

    pub fn copy_from(&self, offset: usize, source: &[u8]) -> Result<(), RangeError> {
        self.check(offset, source.len())?;
        for (at, byte) in (offset..).zip(source) {
            // SAFETY: loom checks that nobody else accesses it.
            self.bytes[at / 8].with_mut(|cell| unsafe { (*cell)[at % 8] = *byte });
        }
        Ok(())
    }

    pub fn copy_to(&self, offset: usize, target: &mut [u8]) -> Result<(), RangeError> {
        self.check(offset, target.len())?;
        for (at, byte) in (offset..).zip(target) {
            // SAFETY: loom checks that nobody writes it.
            *byte = self.bytes[at / 8].with(|cell| unsafe { (*cell)[at % 8] });
        }
        Ok(())
    }
}
