//! Registered memory for sources that are not registered themselves: pieces of it are filled, posted, and
//! free again when the post is done. When there is none left, posting goes on when one is free.

use std::sync::Arc;

use crate::memory::{MemoryError, Prefault, SharedMemory};

/// The key under which cards know it: no region of callers has it.
pub(crate) const BOUNCE_KEY: u64 = 0;
/// Of one piece.
pub(crate) const CHUNK_BYTES: usize = 32 << 10;

#[derive(Debug)]
pub(crate) struct Bounce {
    memory: Arc<SharedMemory>,
    free: Vec<Chunk>,
}

/// A piece that is filled. Given back with [`Bounce::release`].
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Chunk(u32);

impl Chunk {
    pub(crate) fn offset(&self) -> usize {
        self.0 as usize * CHUNK_BYTES
    }
}

impl Bounce {
    pub(crate) fn new(bytes: usize) -> Result<Self, MemoryError> {
        let chunks = u32::try_from(bytes / CHUNK_BYTES).unwrap_or(u32::MAX).max(1);
        let bytes = chunks as usize * CHUNK_BYTES;
        let memory = Arc::new(SharedMemory::create("kvasir-bounce", bytes, Prefault::No)?);
        Ok(Bounce { memory, free: (0..chunks).rev().map(Chunk).collect() })
    }

    pub(crate) fn memory(&self) -> &Arc<SharedMemory> {
        &self.memory
    }

    /// Fills a piece with all of these, one after the other; at most `CHUNK_BYTES` together. `None` when
    /// none is free.
    pub(crate) fn fill(&mut self, parts: &[&[u8]]) -> Option<Chunk> {
        debug_assert!(parts.iter().map(|part| part.len()).sum::<usize>() <= CHUNK_BYTES);
        let chunk = self.free.pop()?;
        let mut at = chunk.offset();
        for part in parts {
            let copied = self.memory.copy_from(at, part);
            debug_assert!(copied.is_ok(), "a chunk is inside its memory");
            at += part.len();
        }
        Some(chunk)
    }

    pub(crate) fn release(&mut self, chunk: Chunk) {
        self.free.push(chunk);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_run_out_and_come_back() {
        let mut bounce = Bounce::new(2 * CHUNK_BYTES + 7).expect("memory");
        let first = bounce.fill(&[b"head", b"body"]).expect("two are free");
        let second = bounce.fill(&[b"other"]).expect("one is free");
        assert_eq!(bounce.fill(&[b"third"]), None);
        assert_ne!(first.offset(), second.offset());
        let mut bytes = [0; 8];
        bounce.memory().copy_to(first.offset(), &mut bytes).expect("within");
        assert_eq!(&bytes, b"headbody");
        bounce.release(first);
        assert!(bounce.fill(&[b"third"]).is_some());
    }
}
