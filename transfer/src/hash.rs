//! The checksum of bytes that lie in memory which others may write to at this moment. They are copied out bit by
//! bit, and the copy is hashed: no reference to them is made, and what changes meanwhile makes a wrong sum and
//! nothing else.

use xxhash_rust::xxh3::Xxh3;

use crate::memory::{RangeError, SharedMemory};

/// Stays in the nearest cache.
const BOUNCE_BYTES: usize = 4096;

/// Gives what [`crate::checksum`] gives of all that was added.
#[derive(Default)]
pub(crate) struct Hash(Xxh3);

impl std::fmt::Debug for Hash {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Hash")
    }
}

impl Hash {
    /// # Errors
    /// [`RangeError`] when the range does not lie inside.
    pub(crate) fn add(
        &mut self,
        memory: &SharedMemory,
        offset: usize,
        bytes: usize,
    ) -> Result<(), RangeError> {
        memory.check(offset, bytes)?;
        let mut bounce = [0; BOUNCE_BYTES];
        let mut done = 0;
        while done < bytes {
            let piece = &mut bounce[..BOUNCE_BYTES.min(bytes - done)];
            memory.copy_to(offset + done, piece)?;
            self.0.update(piece);
            done += piece.len();
        }
        Ok(())
    }

    pub(crate) fn digest(&self) -> u64 {
        self.0.digest()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::Prefault;

    #[test]
    fn it_is_the_checksum_in_whatever_pieces_it_is_added() {
        let memory = SharedMemory::create("test", 64 << 10, Prefault::No).expect("memory");
        let bytes: Vec<u8> = (0..64 << 10).map(|at: u32| (at * 7 + at / 251) as u8).collect();
        memory.copy_from(0, &bytes).expect("it fits");
        for (offset, length) in [(0, 0), (3, 1), (1, 200), (0, 4096), (5, 4097), (0, 64 << 10)] {
            let mut whole = Hash::default();
            whole.add(&memory, offset, length).expect("it lies inside");
            assert_eq!(whole.digest(), crate::checksum(&bytes[offset..offset + length]));
            let mut parts = Hash::default();
            let half = length / 2;
            parts.add(&memory, offset, half).expect("it lies inside");
            parts.add(&memory, offset + half, length - half).expect("it lies inside");
            assert_eq!(parts.digest(), whole.digest());
        }
        assert!(Hash::default().add(&memory, 64 << 10, 1).is_err());
    }
}
