//! Who takes the turns of a transfer engine: a thread that has to do with it just now (it sends a query, waits for
//! answers or for queries), so that no other one has to be woken on the way; and while there is none, or it
//! computes for long, a thread that otherwise sleeps.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use kvasir_transfer::Driver;
use kvasir_transfer::doorbell::{self, Bell, Ringer};

/// Nothing has to be done without being rung for.
const SLEEP_MAX: Duration = Duration::from_secs(3600);
/// Who has something else to do takes no more turns at the end, whatever others have for the engine.
const LAST_TURNS_MAX: usize = 4;

#[derive(Debug)]
struct Shared {
    /// Held by whoever takes turns. Left, it is announced that nobody does.
    driver: Mutex<Driver>,
    started: Instant,
    /// When the sleeper looks without being woken, in nanoseconds since the start.
    wakes_at_ns: AtomicU64,
    stop: AtomicBool,
}

impl Shared {
    fn now_ns(&self) -> u64 {
        u64::try_from(self.started.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }

    /// When that time is over.
    fn in_ns(&self, patience: Option<Duration>) -> u64 {
        let patience = patience.unwrap_or(SLEEP_MAX).min(SLEEP_MAX);
        self.now_ns() + u64::try_from(patience.as_nanos()).unwrap_or(u64::MAX)
    }
}

/// See the module. Dropped, it ends the engine.
#[derive(Debug)]
pub(crate) struct Drive {
    shared: Arc<Shared>,
    ringer: Ringer,
    sleeper: Option<JoinHandle<()>>,
}

/// The right to take turns, until it is dropped.
#[derive(Debug)]
pub(crate) struct Turns<'a> {
    drive: &'a Drive,
    driver: MutexGuard<'a, Driver>,
    /// The last turn had something to do: there may be more.
    busy: bool,
}

impl Turns<'_> {
    /// Whether there was anything to do.
    pub(crate) fn turn(&mut self) -> bool {
        self.busy = self.driver.turn();
        self.busy
    }
}

impl Drop for Turns<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            return self.drive.ringer.ring();
        }
        self.driver.announce_sleep();
        let mut patience = self.driver.patience();
        // What came at the last moment is not left to somebody who has to be woken.
        for _ in 0..LAST_TURNS_MAX {
            if !self.busy && patience != Some(Duration::ZERO) {
                break;
            }
            self.busy = self.driver.turn();
            patience = self.driver.patience();
        }
        let shared = &self.drive.shared;
        let is_sooner = shared.in_ns(patience) < shared.wakes_at_ns.load(Ordering::SeqCst);
        if self.busy || is_sooner {
            self.drive.ringer.ring();
        }
    }
}

impl Drive {
    /// # Errors
    /// When the system has no thread or no descriptor left.
    pub(crate) fn start(driver: Driver, name: &str) -> std::io::Result<Self> {
        let (bell, ringer) = doorbell::pair()?;
        let wake = driver.wake_fd().map(|fd| fd.try_clone_to_owned()).transpose()?;
        let shared = Arc::new(Shared {
            driver: Mutex::new(driver),
            started: Instant::now(),
            wakes_at_ns: AtomicU64::new(0),
            stop: AtomicBool::new(false),
        });
        let of_sleeper = Arc::clone(&shared);
        let sleeper = std::thread::Builder::new()
            .name(format!("turns-{name}"))
            .spawn(move || sleep_and_turn(&of_sleeper, &bell, wake.as_ref()))?;
        Ok(Drive { shared, ringer, sleeper: Some(sleeper) })
    }

    /// `None` while somebody else takes turns.
    pub(crate) fn take(&self) -> Option<Turns<'_>> {
        let mut driver = match self.shared.driver.try_lock() {
            Ok(driver) => driver,
            // Callbacks do not panic.
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return None,
        };
        driver.awake();
        Some(Turns { drive: self, driver, busy: false })
    }
}

impl Drop for Drive {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        self.ringer.ring();
        if let Some(sleeper) = self.sleeper.take()
            && sleeper.join().is_err()
        {
            tracing::error!(
                "the helper thread of the transfer engine for queries panicked; restart the process"
            );
        }
    }
}

fn sleep_and_turn(shared: &Shared, bell: &Bell, wake: Option<&OwnedFd>) {
    while !shared.stop.load(Ordering::SeqCst) {
        let timeout = {
            let mut driver = shared.driver.lock().unwrap_or_else(PoisonError::into_inner);
            driver.awake();
            while driver.turn() {
                if shared.stop.load(Ordering::SeqCst) {
                    return;
                }
            }
            driver.announce_sleep();
            let patience = driver.patience();
            // Before others can look at it: the lock is held.
            shared.wakes_at_ns.store(shared.in_ns(patience), Ordering::SeqCst);
            patience.unwrap_or(SLEEP_MAX)
        };
        if !timeout.is_zero() {
            let fds: Vec<_> = [bell.as_fd()].into_iter().chain(wake.map(AsFd::as_fd)).collect();
            doorbell::sleep(&fds, timeout);
        }
        bell.clear();
    }
}
