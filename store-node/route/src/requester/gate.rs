//! Wakes who waits for answers: it polls for a while, taking the turns of the transfer engine itself, and then
//! sleeps until one has come.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use kvasir_transfer::spin::Spin;

use crate::turns::Drive;

/// About as long as a holder computes for a few requesters.
const POLL_FOR: Duration = Duration::from_micros(300);

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Gate {
    events: AtomicU64,
    sleepers: Mutex<u32>,
    opened: Condvar,
}

impl Gate {
    /// Something has come.
    pub(super) fn open(&self) {
        self.events.fetch_add(1, Ordering::SeqCst);
        // A sleeper counts itself under the lock and looks at the events again before it sleeps.
        let sleepers = self.sleepers.lock().unwrap_or_else(PoisonError::into_inner);
        if *sleepers > 0 {
            self.opened.notify_all();
        }
    }

    /// Waits until `done` says so, or until that time: what comes then is not looked at any more.
    pub(super) fn wait(
        &self,
        until: Instant,
        drive: &Drive,
        mut done: impl FnMut() -> bool,
    ) -> bool {
        let mut spin = Spin::new(POLL_FOR);
        let mut turns = None;
        loop {
            let seen = self.events.load(Ordering::SeqCst);
            let now = Instant::now();
            if now >= until {
                return false;
            }
            // While another thread takes them, it opens the gate.
            turns = turns.or_else(|| drive.take());
            if let Some(turns) = &mut turns {
                turns.turn();
            }
            if done() {
                return true;
            }
            if !spin.wait() {
                turns = None;
                self.sleep(seen, until.saturating_duration_since(Instant::now()));
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
    use std::sync::Arc;
    use std::sync::atomic::AtomicBool;

    use kvasir_transfer::{Handlers, TransferConfig, TransferEngine};
    use prometheus::Registry;

    use super::*;

    #[test]
    fn who_sleeps_is_woken_and_who_waits_in_vain_is_told() {
        let gate = Arc::new(Gate::default());
        let config =
            TransferConfig { tcp_listen: Some(([127, 0, 0, 1], 0).into()), ..Default::default() };
        let engine = TransferEngine::start_driven(config, Handlers::default(), &Registry::new());
        let (_engine, driver) = engine.expect("an engine");
        let drive = Arc::new(Drive::start(driver, "test").expect("a thread"));
        assert!(!gate.wait(Instant::now(), &drive, || true));
        let flag = Arc::new(AtomicBool::new(false));
        let (theirs, theirs_flag) = (Arc::clone(&gate), Arc::clone(&flag));
        let theirs_drive = Arc::clone(&drive);
        let waiter = std::thread::spawn(move || {
            let until = Instant::now() + Duration::from_secs(60);
            theirs.wait(until, &theirs_drive, || theirs_flag.load(Ordering::Acquire))
        });
        std::thread::sleep(10 * POLL_FOR);
        flag.store(true, Ordering::Release);
        gate.open();
        assert!(waiter.join().expect("no panic"));
    }
}
