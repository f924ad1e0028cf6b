//! The atomics of what is shared without locks. They are named here and nowhere else in `ring`,
//! `sleeping` and `shm/gate`, so that `tests/models` can compile the same files over a model of memory
//! that tries the orders in which threads may see each other's stores.

pub(crate) use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};
