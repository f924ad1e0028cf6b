//! Whoever waits for an outcome gets it, however he waits; and what the parts of a submission tell is so.

use std::sync::Arc;
use std::task::{Wake, Waker};

use kvasir_transfer_core::{Outcome, WriteError};
use loom::cell::UnsafeCell;
use loom::thread;

use crate::check;
use crate::outcome::OutcomeCell;
use crate::parts::{Join, PartOutcomes};
use crate::payload::Waiter;
use crate::sync::{AtomicBool, Ordering};

const GONE: Outcome = Err(WriteError::PeerGone);

/// What an outcome tells of: bytes that are written before it is set.
struct Bytes(UnsafeCell<u64>);

// SAFETY: loom runs one thread at a time, and its cells fail the test when accesses race.
unsafe impl Sync for Bytes {}
// SAFETY: as above.
unsafe impl Send for Bytes {}

impl Bytes {
    fn new() -> Self {
        Bytes(UnsafeCell::new(0))
    }

    fn land(&self) {
        // SAFETY: nobody looks before the outcome is set; loom fails the test if it is not so.
        self.0.with_mut(|bytes| unsafe { *bytes = 7 });
    }

    fn read(&self) -> u64 {
        // SAFETY: nobody writes after the outcome was set; loom fails the test if it is not so.
        self.0.with(|bytes| unsafe { *bytes })
    }
}

/// Looks so many times before it sleeps: a wake-up that is missing is a deadlock, which loom reports.
fn waits(looks: usize) {
    check(3, move || {
        let case = Arc::new((OutcomeCell::default(), Bytes::new()));
        let setting = Arc::clone(&case);
        let worker = thread::spawn(move || {
            setting.1.land();
            setting.0.set(GONE);
            // As its sender does when it is dropped.
            setting.0.set(Err(WriteError::Cancelled));
        });
        let mut left = looks;
        let outcome = case.0.wait(|| {
            thread::yield_now();
            left = left.saturating_sub(1);
            left > 0
        });
        assert_eq!((outcome, case.1.read()), (GONE, 7));
        worker.join().expect("no panic");
    });
}

#[test]
fn who_sleeps_at_once_is_woken() {
    waits(0);
}

#[test]
fn who_polls_and_then_sleeps_is_told_in_time() {
    waits(1);
    waits(2);
}

#[derive(Default)]
struct Task(AtomicBool);

impl Wake for Task {
    fn wake(self: Arc<Self>) {
        self.0.store(true, Ordering::Release);
    }
}

#[test]
fn a_task_that_found_nothing_is_woken() {
    check(3, || {
        let cell = Arc::new(OutcomeCell::default());
        let task = Arc::new(Task::default());
        let waker = Waker::from(Arc::clone(&task));
        let setting = Arc::clone(&cell);
        let worker = thread::spawn(move || setting.set(Ok(())));
        if cell.poll(&waker).is_none() {
            while !task.0.load(Ordering::Acquire) {
                thread::yield_now();
            }
        }
        assert_eq!(cell.poll(&waker), Some(Ok(())));
        worker.join().expect("no panic");
    });
}

#[test]
fn who_sees_that_a_part_has_ended_sees_its_bytes() {
    check(3, || {
        let bytes = Arc::new(Bytes::new());
        let outcomes = Arc::new(PartOutcomes::new(2));
        let told = Arc::new(OutcomeCell::default());
        let join = Join::new(&outcomes, Waiter(Arc::clone(&told)));
        let landing = Arc::clone(&bytes);
        let worker = thread::spawn(move || {
            landing.land();
            join.part_ended(1, Ok(()));
            join.part_ended(0, GONE);
        });
        // At any time, and not only when all have ended.
        if outcomes.get(1).is_some() {
            assert_eq!(bytes.read(), 7);
        }
        assert_eq!(told.wait(|| false), GONE);
        let all = [outcomes.get(0), outcomes.get(1)];
        assert_eq!((all, bytes.read()), ([Some(GONE), Some(Ok(()))], 7));
        worker.join().expect("no panic");
    });
}

#[test]
fn parts_that_end_at_once_tell_of_all_of_them() {
    check(3, || {
        let outcomes = Arc::new(PartOutcomes::new(2));
        let told = Arc::new(OutcomeCell::default());
        let join = Join::new(&outcomes, Waiter(Arc::clone(&told)));
        let other = Arc::clone(&join);
        let worker = thread::spawn(move || other.part_ended(0, GONE));
        join.part_ended(1, Ok(()));
        assert_eq!(told.wait(|| false), GONE, "the first error");
        let all = [outcomes.get(0), outcomes.get(1)];
        assert_eq!(all, [Some(GONE), Some(Ok(()))]);
        worker.join().expect("no panic");
    });
}
