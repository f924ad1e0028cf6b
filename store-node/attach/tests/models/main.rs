//! What a node and a process on its host share, under loom: a model of memory that runs each case in every order
//! that its bounds allow, stale loads included, and finds lost wake-ups, data races and deadlocks.
//!
//! It is not a copy that is tested: `words` of this package, and the ring and the sleeping flag of the transfer
//! engine, are compiled here over loom's atomics. The transfer engine has cases of these two by themselves.

#![allow(unreachable_pub, reason = "a public module of the package is a private one here")]

#[path = "../../../../transfer/tests/models/memory.rs"]
mod memory;

mod sync {
    pub(crate) use loom::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

    pub(crate) use crate::sleeping::{announce_sleep, awake};
}

// The cases need a part of each.
#[allow(dead_code)]
#[path = "../../../../transfer/src/ring.rs"]
mod ring;
#[path = "../../../../transfer/src/sleeping.rs"]
mod sleeping;
#[path = "../../src/words.rs"]
mod words;

use std::sync::Arc;

use kvasir_blocks::moving::engine_stops::Progress;
use loom::cell::UnsafeCell;
use loom::sync::{Condvar, Mutex};
use loom::thread;
use memory::SharedMemory;
use ring::{Consumer, Producer, RingRange};
use sleeping::must_wake;
use sync::{AtomicU32, AtomicU64, Ordering};

/// Runs a case in every order with at most so many switches away from a thread that could go on.
fn check(preemptions: usize, case: impl Fn() + Sync + Send + 'static) {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(preemptions);
    model.check(case);
}

/// A bell that is waited for without end: a ring that is missing is a deadlock, which loom reports.
#[derive(Default)]
struct Bell {
    rings: Mutex<bool>,
    changed: Condvar,
}

impl Bell {
    fn ring(&self) {
        *self.rings.lock().expect("no panic") = true;
        self.changed.notify_one();
    }

    fn sleep(&self) {
        let mut rings = self.rings.lock().expect("no panic");
        while !*rings {
            rings = self.changed.wait(rings).expect("no panic");
        }
        *rings = false;
    }
}

/// One end sleeps; the other one has a ring to it and a progress word, and memory that both see.
struct Line {
    sleeping: AtomicU32,
    bell: Bell,
    progress: AtomicU64,
    slot: UnsafeCell<u64>,
}

// SAFETY: loom runs one thread at a time, and its cells fail the test when accesses race.
unsafe impl Send for Line {}
// SAFETY: as above.
unsafe impl Sync for Line {}

fn line() -> (Arc<Line>, Producer, Consumer) {
    let range = RingRange { offset: 0, bytes: RingRange::BYTES_MIN };
    let memory = Arc::new(SharedMemory::new(range.bytes));
    let producer = Producer::open(&memory, range).expect("it fits");
    let consumer = Consumer::open(&memory, range).expect("it fits");
    let line = Line {
        sleeping: AtomicU32::new(0),
        bell: Bell::default(),
        progress: AtomicU64::new(0),
        slot: UnsafeCell::new(0),
    };
    (Arc::new(line), producer, consumer)
}

impl Line {
    /// As `LineSender` wakes its node.
    fn wake(&self) {
        if must_wake(&self.sleeping) {
            self.bell.ring();
        }
    }

    fn write_slot(&self, value: u64) {
        // SAFETY: loom fails the test when somebody else accesses it meanwhile.
        self.slot.with_mut(|slot| unsafe { *slot = value });
    }

    fn read_slot(&self) -> u64 {
        // SAFETY: as above.
        self.slot.with(|slot| unsafe { *slot })
    }
}

const EPOCH: u32 = 7;

#[test]
fn nobody_sleeps_through_a_record_and_what_was_written_before_it_is_there() {
    check(3, || {
        let (line, mut producer, mut consumer) = line();
        let sending = Arc::clone(&line);
        let sender = thread::spawn(move || {
            sending.write_slot(5);
            for record in [b"one", b"two"] {
                producer.push(record).expect("there is room");
                sending.wake();
            }
        });
        let mut record = Vec::new();
        for expected in [b"one", b"two"] {
            while !consumer.pop(&mut record).expect("the other side is honest") {
                let has_work = || !consumer.is_empty();
                words::sleep_unless(&line.sleeping, has_work, || line.bell.sleep());
            }
            assert_eq!(record, expected);
            assert_eq!(line.read_slot(), 5);
        }
        sender.join().expect("no panic");
    });
}

#[test]
fn a_layer_that_an_engine_says_is_done_is_there_and_its_node_is_awake() {
    check(3, || {
        let (line, ..) = line();
        let computing = Arc::clone(&line);
        let engine = thread::spawn(move || {
            computing.write_slot(5);
            let done = Progress { step: 1, layers_done: 1 };
            words::set_progress(&computing.progress, EPOCH, done);
            computing.wake();
        });
        let progress = || words::progress(&line.progress, EPOCH);
        while progress().is_none() {
            let has_work = || progress().is_some();
            words::sleep_unless(&line.sleeping, has_work, || line.bell.sleep());
        }
        assert_eq!(line.read_slot(), 5);
        assert_eq!(words::progress(&line.progress, EPOCH + 1), None, "of another attach");
        engine.join().expect("no panic");
    });
}

/// A reader who has let go of a slot. The node gives it to a writer, who is told so over his ring.
#[test]
fn who_reads_what_a_new_writer_has_written_sees_that_the_slot_was_given_out() {
    check(3, || {
        let (_, mut producer, mut consumer) = line();
        // What is read while it is written is no plain memory in this model.
        let slot = Arc::new((AtomicU32::new(1), AtomicU64::new(10)));
        let node_slot = Arc::clone(&slot);
        let node = thread::spawn(move || {
            words::set_generation(&node_slot.0, 2);
            producer.push(b"write").expect("there is room");
        });
        let writer_slot = Arc::clone(&slot);
        let writer = thread::spawn(move || {
            let mut record = Vec::new();
            if consumer.pop(&mut record).expect("the other side is honest") {
                words::may_write();
                writer_slot.1.store(20, Ordering::Relaxed);
            }
        });
        let read = slot.1.load(Ordering::Relaxed);
        if words::is_generation(&slot.0, 1) {
            assert_eq!(read, 10, "it is of another generation");
        }
        node.join().expect("no panic");
        writer.join().expect("no panic");
    });
}
