//! Nobody sleeps through work.

use loom::cell::UnsafeCell;
use loom::sync::{Arc, Condvar, Mutex};
use loom::thread;

use crate::check;
use crate::sleeping::{announce_sleep, awake, must_wake};
use crate::sync::{AtomicU32, AtomicU64, Ordering};

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
    }

    fn clear(&self) {
        *self.rings.lock().expect("no panic") = false;
    }
}

struct Case {
    /// What the word tells of: bytes that are written before it is raised.
    bytes: UnsafeCell<u64>,
    word: AtomicU64,
    sleeping: AtomicU32,
    bell: Bell,
}

// SAFETY: loom runs one thread at a time, and its cells fail the test when accesses race.
unsafe impl Sync for Case {}

fn case() -> Arc<Case> {
    Arc::new(Case {
        bytes: UnsafeCell::new(0),
        word: AtomicU64::new(0),
        sleeping: AtomicU32::new(0),
        bell: Bell::default(),
    })
}

impl Case {
    fn raise(&self, to: u64) {
        self.word.store(to, Ordering::Release);
        if must_wake(&self.sleeping) {
            self.bell.ring();
        }
    }

    /// As every sleeper does it: the worker of an engine, the node's thread, an engine's receiver.
    fn sleep_unless_beyond(&self, seen: u64) {
        announce_sleep(&self.sleeping);
        if self.word.load(Ordering::Acquire) == seen {
            self.bell.sleep();
        }
        self.bell.clear();
        awake(&self.sleeping);
    }
}

#[test]
fn a_word_that_is_raised_wakes_whoever_watches_it_and_what_it_tells_of_is_there() {
    check(4, || {
        let case = case();
        let raising = Arc::clone(&case);
        let raiser = thread::spawn(move || {
            // SAFETY: nobody looks before the word is raised.
            raising.bytes.with_mut(|bytes| unsafe { *bytes = 7 });
            raising.raise(1);
        });
        while case.word.load(Ordering::Acquire) == 0 {
            case.sleep_unless_beyond(0);
        }
        // SAFETY: the word says that it is written.
        assert_eq!(case.bytes.with(|bytes| unsafe { *bytes }), 7);
        raiser.join().expect("no panic");
    });
}

#[test]
fn each_of_several_raises_is_seen() {
    check(3, || {
        let case = case();
        let raising = Arc::clone(&case);
        let raiser = thread::spawn(move || (1..=3).for_each(|to| raising.raise(to)));
        let mut seen = 0;
        while seen < 3 {
            case.sleep_unless_beyond(seen);
            seen = case.word.load(Ordering::Acquire);
        }
        raiser.join().expect("no panic");
    });
}

#[test]
fn either_of_two_who_raise_words_wakes_the_sleeper() {
    check(2, || {
        let (case, other) = (case(), Arc::new(AtomicU64::new(0)));
        let raising = Arc::clone(&case);
        let first = thread::spawn(move || raising.raise(1));
        let (raising, word) = (Arc::clone(&case), Arc::clone(&other));
        let second = thread::spawn(move || {
            word.store(1, Ordering::Release);
            if must_wake(&raising.sleeping) {
                raising.bell.ring();
            }
        });
        while case.word.load(Ordering::Acquire) == 0 || other.load(Ordering::Acquire) == 0 {
            let seen = (case.word.load(Ordering::Acquire), other.load(Ordering::Acquire));
            announce_sleep(&case.sleeping);
            if (case.word.load(Ordering::Acquire), other.load(Ordering::Acquire)) == seen
                && seen != (1, 1)
            {
                case.bell.sleep();
            }
            case.bell.clear();
            awake(&case.sleeping);
        }
        first.join().expect("no panic");
        second.join().expect("no panic");
    });
}
