//! The SSD tier's shell: one thread beside the disk, which owns the log, and what it stands on.
//!
//! - [`thread`]: takes jobs of the node's thread, drives the log, reports what became of them
//! - [`open`]: the file, io_uring or blocking calls, the index: whatever this host has
//! - [`slots`]: the memory that payloads go to and come from
//! - [`pace`]: how fast blocks come into memory
//! - [`uring`], [`plain`]: disks; [`faulty`]: a disk that does wrong on purpose, for tests
//! - [`sled_index`]: where extents lie, kept in sled
//!
//! What is on the SSD, what sinks and what rises is decided by the block core.

pub(crate) mod faulty;
pub(crate) mod open;
pub(crate) mod pace;
pub(crate) mod plain;
pub(crate) mod sled_index;
pub(crate) mod slots;
pub(crate) mod thread;
pub(crate) mod uring;
