//! What threads share, under loom: a model of memory that runs each case in every order that
//! its bounds allow, stale loads included, and finds lost wake-ups, data races and deadlocks.
//!
//! It is not a copy that is tested: the files of the crate themselves are compiled here, over the
//! atomics of `sync`, the memory of `memory` and the waiters of `payload` below instead of the crate's.

#![allow(unreachable_pub, reason = "a public module of the package is a private one here")]

mod memory;

mod sync {
    pub(crate) use loom::sync::atomic::{
        AtomicBool, AtomicU16, AtomicU32, AtomicU64, AtomicUsize, Ordering, fence,
    };
    pub(crate) use loom::sync::{Condvar, Mutex};
}

mod payload {
    use std::sync::Arc;

    use kvasir_transfer_core::Outcome;

    use crate::outcome::OutcomeCell;

    /// Who is told of the end of several parts.
    #[derive(Debug)]
    pub(crate) struct Waiter(pub(crate) Arc<OutcomeCell>);

    impl Waiter {
        pub(crate) fn complete(self, outcome: Outcome) {
            self.0.set(outcome);
        }
    }
}

// The cases need a part of each.
#[allow(dead_code)]
#[path = "../../src/shm/entry.rs"]
mod entry;
#[allow(dead_code)]
#[path = "../../src/shm/gate.rs"]
mod gate;
#[allow(dead_code)]
#[path = "../../src/outcome.rs"]
mod outcome;
#[allow(dead_code)]
#[path = "../../src/parts.rs"]
mod parts;
#[allow(dead_code)]
#[path = "../../src/ring.rs"]
mod ring;
#[allow(dead_code)]
#[path = "../../verbs/src/room.rs"]
mod room;
#[allow(dead_code)]
#[path = "../../src/sleeping.rs"]
mod sleeping;

mod copying;
mod ends;
mod queues;
mod records;
mod regions;
mod waking;

/// Runs a case in every order with at most so many switches away from a thread that could go on.
fn check(preemptions: usize, case: impl Fn() + Sync + Send + 'static) {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(preemptions);
    model.check(case);
}
