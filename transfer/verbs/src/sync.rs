//! The atomics of what threads share without a lock (`room`), so that `tests/models` of the transfer engine can
//! compile the same file over a model of memory.

pub(crate) use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
