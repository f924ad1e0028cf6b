//! The atomics and locks of what threads share. They are named here and nowhere else in `ring`, `sleeping`,
//! `shm/gate`, `shm/entry`, `parts` and `outcome`, so that `tests/models` can compile the same files over a model of memory
//! that tries the orders in which threads may see each other's stores.

pub(crate) use std::sync::atomic::{
    AtomicBool, AtomicU16, AtomicU32, AtomicU64, AtomicUsize, Ordering, fence,
};
pub(crate) use std::sync::{Condvar, Mutex};
