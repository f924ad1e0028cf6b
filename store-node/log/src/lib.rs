//! The SSD tier's log: what lies where on a disk, what survives a crash, and how space comes back.
//! No I/O: [`Log`] gives [`DiskOp`]s and takes their ends, so that a simulated disk can stand in for
//! a real one, in this package's tests and wherever a whole node is simulated.
//!
//! A disk (or a file) is cut into segments. An extent is one block with what is known of it, under
//! checksums; extents are appended to the one open segment, and a footer with the list of them ends
//! a segment. The log is the truth: [`recover()`] reads the footers and what has none, and the
//! [`KeyIndex`] (where each key's extent lies) is only filled from it.
//!
//! Reading path:
//! 1. `format.rs`: the bytes
//! 2. `log.rs`: appending and removing; `read.rs`: reading; `segments.rs`: what is live where
//! 3. `clean.rs`: how space is reclaimed; `graves.rs`: what that must not bring back
//! 4. `recover.rs`: starting from what a crash has left
//! 5. `disk.rs`, `index.rs`: what a shell brings along; `sim_disk.rs`: a disk that loses, tears,
//!    rots, fills and hangs under a seed
#![forbid(unsafe_code)]

mod buffer;
mod clean;
mod disk;
mod format;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzzing;
mod graves;
mod index;
mod log;
mod read;
mod recover;
mod segments;
pub mod sim_disk;

pub use buffer::{PAGE_BYTES, PageBuf};
pub use disk::{Disk, DiskDone, DiskError, DiskOp, Memory, Span};
pub use format::{ExtentBuf, Record, extent_pages};
pub use index::{IndexError, KeyIndex, Location, MemoryIndex};
pub use log::{AppendError, Counts, Log, Output};
pub use read::{ReadError, ReadExtent};
pub use recover::{Options, RecoverError, Recovered, Recovery, recover};
