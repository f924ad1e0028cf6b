//! The flag by which a thread says that it sleeps, so that waking it costs a system call only then.
//!
//! The rule is Dekker's: the sleeper raises its flag, fences, looks for work once more and only then
//! sleeps; the waker publishes its work, fences and looks at the flag. One of the two sees the other,
//! so no work is slept through. (The flag may lie in memory that another process spoils: then that
//! process is woken too often or not at all, and nobody else is harmed.)

use kvasir_mutation::{Mutation, mutated};

use crate::sync::{AtomicU32, Ordering, fence};

/// Raises the sleeper's flag. Work must be looked for once more before sleeping.
pub fn announce_sleep(sleeping: &AtomicU32) {
    sleeping.store(1, Ordering::Relaxed);
    let is_weak = mutated(Mutation::SleeperNotSeen);
    fence(if is_weak { Ordering::Release } else { Ordering::SeqCst });
}

/// Lowers the flag again.
pub fn awake(sleeping: &AtomicU32) {
    sleeping.store(0, Ordering::Relaxed);
}

/// Whether the sleeper must be woken. To be asked after the work was published.
pub fn must_wake(sleeping: &AtomicU32) -> bool {
    fence(Ordering::SeqCst);
    sleeping.load(Ordering::Relaxed) != 0
}
