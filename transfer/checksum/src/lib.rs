//! The checksum of blocks: XXH3-64 with seed 0, as its specification has it
//! (<https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md>).
//!
//! Libraries compute it too, by the instructions that a program was compiled for. This one takes the widest that the
//! processor has, and can store the bytes in the pass that hashes them: one read of each, and where
//! it pays no read of the target. So a copy with its checksum costs no more than a copy.
//!
//! Memory may be given by address where others could write to it meanwhile: no reference to it is made. What
//! changes then makes a sum of neither what was nor what is, and nothing else; but what a copy has stored in whole
//! stripes is what was hashed.

mod kernel;
mod secret;

use kernel::Kernel;
use xxhash_rust::xxh3::xxh3_64;

/// What the algorithm takes at once.
const STRIPE_BYTES: usize = 64;
/// Stripes between two scrambles.
const BLOCK_STRIPES: usize = (secret::SECRET.len() - STRIPE_BYTES) / 8;
/// Up to here the algorithm is another one.
const SHORT_BYTES_MAX: u64 = 240;
/// What is held back until more comes: all of a short input, and less than a stripe too much of a long one.
const HELD_BYTES: usize = 256;
/// Shorter copies are never stored past the caches: it does not pay.
const STREAMING_BYTES_MIN: usize = 4 << 10;

/// XXH3-64 of these bytes.
#[must_use]
pub fn checksum(bytes: &[u8]) -> u64 {
    if bytes.len() as u64 <= SHORT_BYTES_MAX {
        return xxh3_64(bytes);
    }
    let mut sum = Checksum::new();
    sum.add(bytes);
    sum.sum()
}

/// One for the checksums of several runs of bytes, by which their own are believed; of one run its own.
#[must_use]
pub fn fold(checksums: &[u64]) -> u64 {
    match checksums {
        [one] => *one,
        several => {
            let mut sum = Checksum::new();
            several.iter().for_each(|one| sum.add(&one.to_le_bytes()));
            sum.sum()
        }
    }
}

/// How a copy is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stores {
    /// As ever: the copy is in the caches afterwards. For what is read soon.
    Cached,
    /// Past the caches, as far as the processor can and the target is aligned: the target is not read first, and
    /// drives nothing out. Ordered before every store that follows. For long copies into large memories.
    Streaming,
}

/// A checksum of bytes that come in pieces.
#[derive(Debug, Clone)]
pub struct Checksum {
    lanes: Lanes,
    bytes: u64,
    /// The last stripe that went into the lanes, and after it what did not yet: never nothing once there was more
    /// than this holds.
    held: [u8; STRIPE_BYTES + HELD_BYTES],
    held_bytes: usize,
}

impl Default for Checksum {
    fn default() -> Self {
        Checksum::new()
    }
}

impl Checksum {
    /// Of nothing yet.
    #[must_use]
    pub fn new() -> Self {
        Checksum::with(Kernel::best())
    }

    fn with(kernel: Kernel) -> Self {
        Checksum {
            lanes: Lanes { kernel, sums: secret::LANES, in_block: 0 },
            bytes: 0,
            held: [0; STRIPE_BYTES + HELD_BYTES],
            held_bytes: 0,
        }
    }

    /// Of nothing again.
    pub fn reset(&mut self) {
        (self.lanes.sums, self.lanes.in_block) = (secret::LANES, 0);
        (self.bytes, self.held_bytes) = (0, 0);
    }

    /// Adds bytes at the end.
    pub fn add(&mut self, bytes: &[u8]) {
        // SAFETY: a slice may be read.
        unsafe { self.add_at(bytes.as_ptr(), bytes.len()) }
    }

    /// Adds bytes at the end that others may write to meanwhile.
    ///
    /// # Safety
    /// So many bytes from the address on can be read.
    pub unsafe fn add_at(&mut self, source: *const u8, bytes: usize) {
        // SAFETY: the caller's promise; there is no target.
        unsafe { self.take(source, std::ptr::null_mut(), bytes, Stores::Cached) }
    }

    /// Adds bytes at the end, and copies them.
    ///
    /// # Safety
    /// So many bytes from the source's address on can be read, and from the target's written; the two do not overlap.
    pub unsafe fn add_and_copy(
        &mut self,
        source: *const u8,
        target: *mut u8,
        bytes: usize,
        stores: Stores,
    ) {
        // SAFETY: the caller's promise.
        unsafe { self.take(source, target, bytes, stores) }
    }

    /// The target may be null: then nothing is stored.
    ///
    /// # Safety
    /// As [`Self::add_and_copy`].
    unsafe fn take(
        &mut self,
        mut source: *const u8,
        mut target: *mut u8,
        mut bytes: usize,
        stores: Stores,
    ) {
        self.bytes += bytes as u64;
        let stores = if bytes < STREAMING_BYTES_MIN { Stores::Cached } else { stores };
        if self.held_bytes + bytes > HELD_BYTES {
            // SAFETY: there are more bytes than are held now.
            unsafe {
                let held = HELD_BYTES - self.held_bytes;
                self.hold(source, target, held);
                (source, target) = (source.add(held), advanced(target, held));
                bytes -= held;
            }
            let stripes = HELD_BYTES / STRIPE_BYTES;
            let begin = self.held[STRIPE_BYTES..].as_ptr();
            // SAFETY: all that can be held is.
            unsafe { self.lanes.take(begin, std::ptr::null_mut(), stripes, Stores::Cached) };
            self.held.copy_within(HELD_BYTES.., 0);
            self.held_bytes = 0;
            // The last byte is never among these: the last stripe is another one.
            let stripes = (bytes - 1) / STRIPE_BYTES;
            if stripes > 0 {
                let now = stripes * STRIPE_BYTES;
                // SAFETY: so many bytes there are.
                unsafe {
                    self.lanes.take(source, target, stripes, stores);
                    let last = source.add(now - STRIPE_BYTES);
                    std::ptr::copy_nonoverlapping(last, self.held.as_mut_ptr(), STRIPE_BYTES);
                    (source, target) = (source.add(now), advanced(target, now));
                }
                bytes -= now;
            }
        }
        // SAFETY: what is left fits: at most what was free, or one stripe.
        unsafe { self.hold(source, target, bytes) }
    }

    /// # Safety
    /// As [`Self::add_and_copy`]; there must be room.
    unsafe fn hold(&mut self, source: *const u8, target: *mut u8, bytes: usize) {
        let at = STRIPE_BYTES + self.held_bytes;
        let held = &mut self.held[at..at + bytes];
        // SAFETY: the range is as long, and nobody else's.
        unsafe { std::ptr::copy_nonoverlapping(source, held.as_mut_ptr(), bytes) };
        if !target.is_null() {
            // SAFETY: the caller's promise.
            unsafe { std::ptr::copy_nonoverlapping(held.as_ptr(), target, bytes) };
        }
        self.held_bytes += bytes;
    }

    /// The checksum of all that was added.
    #[must_use]
    pub fn sum(&self) -> u64 {
        if self.bytes <= SHORT_BYTES_MAX {
            return xxh3_64(&self.held[STRIPE_BYTES..STRIPE_BYTES + self.held_bytes]);
        }
        let mut lanes = self.lanes.clone();
        let begin = self.held[STRIPE_BYTES..].as_ptr();
        let stripes = (self.held_bytes - 1) / STRIPE_BYTES;
        // SAFETY: whole stripes of what is held.
        unsafe { lanes.take(begin, std::ptr::null_mut(), stripes, Stores::Cached) };
        let last = &self.held[self.held_bytes..][..STRIPE_BYTES];
        secret::finish(&lanes.sums, last, self.bytes)
    }
}

/// What stripes are added up in.
#[derive(Debug, Clone)]
struct Lanes {
    kernel: Kernel,
    sums: [u64; 8],
    /// Stripes since the last scramble.
    in_block: usize,
}

impl Lanes {
    /// Takes stripes in, and scrambles after each block.
    ///
    /// # Safety
    /// As [`Checksum::add_and_copy`], of so many stripes; the target may be null.
    unsafe fn take(&mut self, source: *const u8, target: *mut u8, stripes: usize, stores: Stores) {
        // SAFETY: the caller's promise; the kernel was chosen by what the processor has.
        unsafe {
            self.kernel.run(&mut self.sums, self.in_block, source, target, stripes, stores);
        }
        self.in_block = (self.in_block + stripes) % BLOCK_STRIPES;
    }
}

/// # Safety
/// As [`pointer::add`], unless it is null.
unsafe fn advanced(target: *mut u8, bytes: usize) -> *mut u8 {
    // SAFETY: the caller's promise.
    if target.is_null() { target } else { unsafe { target.add(bytes) } }
}

#[cfg(test)]
mod tests;
