//! What must hold of every parser that reads bytes of another process or of a disk, whatever the bytes are: it
//! answers, without a panic; what it accepts lies within its bounds and survives the wire once more;
//! and it takes memory for the bytes there are, never for a length that they claim ([`within`]).
//!
//! Each target is a function from bytes to whether they were accepted, in the package of its parser: what
//! decodes is what the product runs. They run in two ways: with arbitrary bytes and changed valid ones in that
//! package's tests ([`bear`]), and under libFuzzer in a folder `fuzz` (see `transfer/fuzz/README.md`).
//!
//! Only tests and the fuzzer link this package: it counts what the whole program allocates.

mod allocated;
mod trial;

pub use allocated::within;
pub use trial::{bear, has_its_file};

/// One parser.
#[derive(Debug, Clone, Copy)]
pub struct Target {
    /// Also the name of its file in `fuzz/fuzz_targets`.
    pub name: &'static str,
    /// Whether the bytes were accepted.
    pub run: fn(&[u8]) -> bool,
    /// Inputs that are accepted, to begin with.
    pub seeds: fn() -> Vec<Vec<u8>>,
}
