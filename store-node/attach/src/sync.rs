//! The atomics of `words`, and the sleeping flag. They are named here, so that `tests/models` can compile the same file over a model of
//! memory that tries the orders in which processes may see each other's stores.

pub(crate) use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

pub(crate) use kvasir_transfer::doorbell::{announce_sleep, awake};
