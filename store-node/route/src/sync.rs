//! The atomics of `requester/slot`. They are named here, so that `tests/models` can compile the same file over a
//! model of memory that tries the orders in which threads may see each other's stores.

pub(crate) use std::sync::atomic::{AtomicU8, Ordering};
