//! Wakes who waits for answers: it polls for a while, and then sleeps until one has come.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use kvasir_transfer::spin::Spin;

/// About as long as a holder computes for a few requesters.
const POLL_FOR: Duration = Duration::from_micros(300);

/// See the module.
#[derive(Debug, Default)]
pub struct Gate {
    events: AtomicU64,
    sleepers: Mutex<u32>,
    opened: Condvar,
}

impl Gate {
    /// Something has come.
    pub fn open(&self) {
        self.events.fetch_add(1, Ordering::SeqCst);
        // A sleeper counts itself under the lock and looks at the events again before it sleeps.
        let sleepers = self.sleepers.lock().unwrap_or_else(PoisonError::into_inner);
        if *sleepers > 0 {
            self.opened.notify_all();
        }
    }

    /// Waits until `done` says so, or until that time: what comes then is not looked at any more.
    pub fn wait(&self, until: Instant, mut done: impl FnMut() -> bool) -> bool {
        let mut spin = Spin::new(POLL_FOR);
        loop {
            let seen = self.events.load(Ordering::SeqCst);
            let now = Instant::now();
            if now >= until {
                return false;
            }
            if done() {
                return true;
            }
            if !spin.wait() {
                self.sleep(seen, until - now);
                spin.worked();
            }
        }
    }

    fn sleep(&self, seen: u64, timeout: Duration) {
        let mut sleepers = self.sleepers.lock().unwrap_or_else(PoisonError::into_inner);
        *sleepers += 1;
        let waits = |_: &mut u32| self.events.load(Ordering::SeqCst) == seen;
        let (mut sleepers, _) = self
            .opened
            .wait_timeout_while(sleepers, timeout, waits)
            .unwrap_or_else(PoisonError::into_inner);
        *sleepers -= 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::sync::atomic::AtomicBool;

    #[test]
    fn who_sleeps_is_woken_and_who_waits_in_vain_is_told() {
        let gate = Arc::new(Gate::default());
        assert!(!gate.wait(Instant::now(), || true));
        let flag = Arc::new(AtomicBool::new(false));
        let (theirs, theirs_flag) = (Arc::clone(&gate), Arc::clone(&flag));
        let waiter = std::thread::spawn(move || {
            let until = Instant::now() + Duration::from_secs(60);
            theirs.wait(until, || theirs_flag.load(Ordering::Acquire))
        });
        std::thread::sleep(10 * POLL_FOR);
        flag.store(true, Ordering::Release);
        gate.open();
        assert!(waiter.join().expect("no panic"));
    }
}
