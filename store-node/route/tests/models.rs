//! A slot of a session's rings under loom: a model of memory that runs each case in every order that its bounds
//! allow, and finds data races. It is the file of this package that is compiled here, over loom's atomics.

#![allow(unreachable_pub, reason = "a public module of the package is a private one here")]

mod sync {
    pub(crate) use loom::sync::atomic::{AtomicU8, Ordering};
}

#[path = "../src/requester/slot.rs"]
mod slot;

use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::sync::atomic::{AtomicU32, Ordering};
use loom::thread;

use slot::Slot;

/// A slot, where its answer lands, and what the holder was sent: so many queries.
struct Ring {
    slot: Slot,
    answer: UnsafeCell<u32>,
    sent: AtomicU32,
}

// SAFETY: loom runs one thread at a time, and its cells fail the test when accesses race.
unsafe impl Sync for Ring {}

impl Ring {
    fn new() -> Arc<Self> {
        let (answer, sent) = (UnsafeCell::new(0), AtomicU32::new(0));
        Arc::new(Ring { slot: Slot::default(), answer, sent })
    }

    /// The holder writes an answer, and the worker sees that it has come.
    fn land(&self, answer: u32) {
        // SAFETY: loom fails the test when somebody reads it meanwhile.
        self.answer.with_mut(|at| unsafe { *at = answer });
        self.slot.arrived();
    }

    fn read(&self) -> u32 {
        // SAFETY: loom fails the test when somebody writes it meanwhile.
        self.answer.with(|at| unsafe { *at })
    }

    /// Takes the slot when it is free, and sends a query.
    fn dispatch(&self, number: u32) -> bool {
        let taken = self.slot.take();
        if taken {
            self.sent.store(number, Ordering::Release);
        }
        taken
    }
}

fn check(case: impl Fn() + Sync + Send + 'static) {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(3);
    model.check(case);
}

#[test]
fn an_answer_that_has_arrived_can_be_read_whole_and_the_next_one_lands_after_that() {
    check(|| {
        let ring = Ring::new();
        assert!(ring.dispatch(1));
        let holder_ring = Arc::clone(&ring);
        let holder = thread::spawn(move || {
            for number in 1..=2 {
                // The second query may never be sent.
                if holder_ring.sent.load(Ordering::Acquire) >= number {
                    holder_ring.land(number);
                }
            }
        });
        let next_ring = Arc::clone(&ring);
        let next = thread::spawn(move || {
            next_ring.dispatch(2);
        });
        if ring.slot.has_arrived() {
            assert_eq!(ring.read(), 1);
            ring.slot.give_back();
        }
        holder.join().expect("no panic");
        next.join().expect("no panic");
    });
}

#[test]
fn a_slot_that_was_given_up_is_taken_only_once_its_answer_has_landed() {
    check(|| {
        let ring = Ring::new();
        assert!(ring.dispatch(1));
        let holder_ring = Arc::clone(&ring);
        let holder = thread::spawn(move || holder_ring.land(1));
        ring.slot.give_back();
        if ring.slot.take() {
            // Whatever lands from now on is of this dispatch: the former answer is there.
            assert_eq!(ring.read(), 1);
            ring.slot.put_back();
        }
        holder.join().expect("no panic");
        assert!(ring.slot.take(), "it has come free, whoever was first");
    });
}

#[test]
fn a_slot_that_was_given_up_is_not_taken_before_its_answer_has_come() {
    check(|| {
        let slot = Slot::default();
        assert!(slot.take() && !slot.take());
        slot.give_back();
        assert!(!slot.take(), "the answer may still land");
        slot.arrived();
        assert!(!slot.has_arrived() && slot.take(), "it has, and nobody reads it");
        slot.arrived();
        assert!(slot.has_arrived() && !slot.take());
        slot.give_back();
        assert!(slot.take());
        slot.put_back();
        assert!(slot.take());
    });
}
