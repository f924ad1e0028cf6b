//! When copies were forbidden and the one under way has ended, the memory is the receiver's alone.

use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::thread;

use crate::check;
use crate::gate::{enter, is_over, leave, under_way};
use crate::sync::{AtomicU64, Ordering};

struct Case {
    region: UnsafeCell<u64>,
    epoch: AtomicU64,
    /// As the cut flag and the directory's key: what the sender looks at before it copies. The
    /// weakest order, so that what is proven rests on the gate alone.
    forbidden: AtomicU64,
}

// SAFETY: loom runs one thread at a time, and its cells fail the test when accesses race.
unsafe impl Sync for Case {}

impl Case {
    fn copy(&self, epoch: u64) -> bool {
        enter(&self.epoch, epoch);
        let may = self.forbidden.load(Ordering::Relaxed) == 0;
        if may {
            // SAFETY: the receiver keeps away unless copies are forbidden.
            self.region.with_mut(|region| unsafe { *region = epoch });
        }
        leave(&self.epoch, epoch + 1);
        may
    }

    /// Forbids copies and waits for the one under way. Afterwards the region is ours.
    fn stop(&self) {
        self.forbidden.store(1, Ordering::Relaxed);
        if let Some(epoch) = under_way(&self.epoch) {
            while !is_over(&self.epoch, epoch) {
                thread::yield_now();
            }
        }
    }
}

fn case() -> Arc<Case> {
    Arc::new(Case {
        region: UnsafeCell::new(0),
        epoch: AtomicU64::new(0),
        forbidden: AtomicU64::new(0),
    })
}

#[test]
fn no_copy_meets_the_receiver_after_a_stop() {
    check(3, || {
        let case = case();
        let copying = Arc::clone(&case);
        let sender = thread::spawn(move || {
            let _ = copying.copy(1) && copying.copy(3);
        });
        case.stop();
        // SAFETY: what the stop is for; loom fails the test if it is not so.
        case.region.with_mut(|region| unsafe { *region = 100 });
        sender.join().expect("no panic");
        // SAFETY: the sender has ended.
        assert_eq!(case.region.with(|region| unsafe { *region }), 100, "nothing landed later");
    });
}

#[test]
fn two_who_stop_at_once_both_wait() {
    check(2, || {
        let case = case();
        let (copying, stopping) = (Arc::clone(&case), Arc::clone(&case));
        let sender = thread::spawn(move || copying.copy(1));
        let other = thread::spawn(move || {
            stopping.stop();
            // SAFETY: both may look once nothing is copied any more.
            stopping.region.with(|region| unsafe { *region })
        });
        case.stop();
        // SAFETY: as above.
        let seen = case.region.with(|region| unsafe { *region });
        assert_eq!(other.join().expect("no panic"), seen, "both see the end of it");
        let copied = sender.join().expect("no panic");
        assert_eq!(seen, u64::from(copied));
    });
}
