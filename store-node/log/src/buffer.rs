//! Memory for disk operations: whole pages, aligned as direct I/O wants them.

/// The unit of the log: every offset and length on the disk is a multiple of it.
pub const PAGE_BYTES: usize = 4096;

/// Some zeroed pages, owned by whoever works with them: a disk takes one with an operation and
/// gives it back with its end.
pub struct PageBuf {
    /// One page more than is used, so that an aligned part can be found.
    bytes: Box<[u8]>,
    start: usize,
    pages: usize,
}

impl PageBuf {
    pub fn zeroed(pages: usize) -> Self {
        let bytes = vec![0; (pages + 1) * PAGE_BYTES].into_boxed_slice();
        let start = bytes.as_ptr().align_offset(PAGE_BYTES);
        PageBuf { bytes, start, pages }
    }

    pub fn pages(&self) -> usize {
        self.pages
    }

    pub fn bytes(&self) -> &[u8] {
        &self.bytes[self.start..self.start + self.pages * PAGE_BYTES]
    }

    pub fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.bytes[self.start..self.start + self.pages * PAGE_BYTES]
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
        for pages in [0, 1, 7] {
            let mut buffer = PageBuf::zeroed(pages);
            assert_eq!(buffer.bytes().len(), pages * PAGE_BYTES);
            assert_eq!(buffer.bytes_mut().as_ptr().addr() % PAGE_BYTES, 0);
            assert!(buffer.bytes().iter().all(|byte| *byte == 0));
        }
    }
}
