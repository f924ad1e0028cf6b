//! What is shared without locks, under loom: a model of memory that runs each case in every order that
//! its bounds allow, stale loads included, and finds lost wake-ups, data races and deadlocks.
//!
//! It is not a copy that is tested: the files of the crate themselves are compiled here, over the
//! atomics of `sync` and the memory of `memory` below instead of the crate's.

mod memory;

mod sync {
    pub(crate) use loom::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};
}

// The cases need a part of each.
#[allow(dead_code)]
#[path = "../../src/shm/gate.rs"]
mod gate;
#[allow(dead_code)]
#[path = "../../src/ring.rs"]
mod ring;
#[allow(dead_code)]
#[path = "../../src/sleeping.rs"]
mod sleeping;

mod copying;
mod records;
mod waking;

/// Runs a case in every order with at most so many switches away from a thread that could go on.
fn check(preemptions: usize, case: impl Fn() + Sync + Send + 'static) {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(preemptions);
    model.check(case);
}
