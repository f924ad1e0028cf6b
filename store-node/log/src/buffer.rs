//! Memory for disk operations: whole pages, aligned as direct I/O wants them.

use memmap2::MmapMut;

/// The unit of the log: every offset and length on the disk is a multiple of it.
pub const PAGE_BYTES: usize = 4096;

/// From here on a buffer is mapped by itself. Whole segments are read for cleaning on one thread and given back
/// on another: an allocator keeps what comes back that way, for as long as nothing of that size is wanted again.
const MAPPED_PAGES_MIN: usize = (1 << 20) / PAGE_BYTES;

/// Some zeroed pages, owned by whoever works with them: a disk takes one with an operation and
/// gives it back with its end.
pub struct PageBuf {
    memory: Memory,
    pages: usize,
}

enum Memory {
    /// One page more than is used, so that an aligned part can be found.
    Allocated {
        bytes: Box<[u8]>,
        start: usize,
    },
    Mapped(MmapMut),
}

impl PageBuf {
    pub fn zeroed(pages: usize) -> Self {
        let mapped = (pages >= MAPPED_PAGES_MIN).then(|| MmapMut::map_anon(pages * PAGE_BYTES));
        let memory = match mapped {
            Some(Ok(mapped)) => Memory::Mapped(mapped),
            // Without room for one more mapping there may still be some in the allocator.
            Some(Err(_)) | None => {
                let bytes = vec![0; (pages + 1) * PAGE_BYTES].into_boxed_slice();
                let start = bytes.as_ptr().align_offset(PAGE_BYTES);
                Memory::Allocated { bytes, start }
            }
        };
        PageBuf { memory, pages }
    }

    pub fn pages(&self) -> usize {
        self.pages
    }

    pub fn bytes(&self) -> &[u8] {
        match &self.memory {
            Memory::Allocated { bytes, start } => &bytes[*start..*start + self.pages * PAGE_BYTES],
            Memory::Mapped(mapped) => mapped,
        }
    }

    pub fn bytes_mut(&mut self) -> &mut [u8] {
        match &mut self.memory {
            Memory::Allocated { bytes, start } => {
                &mut bytes[*start..*start + self.pages * PAGE_BYTES]
            }
            Memory::Mapped(mapped) => mapped,
        }
    }
}

impl std::fmt::Debug for PageBuf {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "PageBuf({} pages)", self.pages())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_are_aligned_and_zero() {
        for pages in [0, 1, 7, MAPPED_PAGES_MIN, MAPPED_PAGES_MIN + 1] {
            let mut buffer = PageBuf::zeroed(pages);
            assert_eq!(buffer.bytes().len(), pages * PAGE_BYTES);
            assert_eq!(buffer.bytes_mut().as_ptr().addr() % PAGE_BYTES, 0);
            assert!(buffer.bytes().iter().all(|byte| *byte == 0));
        }
    }
}
