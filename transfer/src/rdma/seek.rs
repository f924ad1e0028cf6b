//! Finds the ways to peers' cards. Where cards are on an Ethernet the system asks the network for the address of a
//! neighbour that it does not know, and waits up to a second for one that is not there. So it is asked on a
//! thread that may wait, before the worker connects or accepts anything; then the system knows it.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use super::CardError;

/// Asks for the way, and waits for the answer.
pub(crate) type Seek = Box<dyn FnOnce() -> Result<(), CardError> + Send>;

/// Ways that are sought at once. Peers that are not there cost each other time, and nobody else.
const AT_ONCE_MAX: usize = 16;

#[derive(Debug)]
pub(crate) struct Seekers {
    /// Of the threads.
    name: String,
    running: Arc<AtomicUsize>,
}

/// A way that is being sought.
#[derive(Debug)]
pub(crate) struct Sought(Arc<OnceLock<Result<(), CardError>>>);

impl Sought {
    /// `None` while it is sought. To be asked until then: nobody is woken.
    pub(crate) fn found(&self) -> Option<&Result<(), CardError>> {
        self.0.get()
    }

    /// How long to leave it alone between two looks.
    pub(crate) const LOOK_AGAIN_US: u64 = 200;
}

/// Counts a thread for as long as it runs, however it ends.
struct Running(Arc<AtomicUsize>);

impl Drop for Running {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Seekers {
    pub(crate) fn new(engine: &str) -> Self {
        Seekers { name: format!("xfer-{engine}-way"), running: Arc::default() }
    }

    /// # Errors
    /// When as many are sought as may be, or there is no thread. Whoever asked tries again later.
    pub(crate) fn begin(&self, seek: Seek) -> Result<Sought, CardError> {
        let before = self.running.fetch_add(1, Ordering::Relaxed);
        let running = Running(Arc::clone(&self.running));
        if before >= AT_ONCE_MAX {
            return Err(CardError::new("too many searches for paths to peers are in flight"));
        }
        let found = Arc::new(OnceLock::new());
        let told = Arc::clone(&found);
        let thread = std::thread::Builder::new().name(self.name.clone()).spawn(move || {
            let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(seek));
            let died = |_| Err(CardError::new("the search for the path to a peer panicked"));
            let _ = told.set(outcome.unwrap_or_else(died));
            drop(running);
        });
        match thread {
            Ok(_) => Ok(Sought(found)),
            Err(error) => Err(CardError::because("cannot start a thread", error)),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::sync_channel;

    use super::*;

    fn wait(sought: &Sought) -> &Result<(), CardError> {
        loop {
            if let Some(found) = sought.found() {
                return found;
            }
            std::thread::yield_now();
        }
    }

    #[test]
    fn whoever_asks_is_not_kept_and_learns_what_was_found() {
        let seekers = Seekers::new("test");
        let (go, going) = sync_channel::<()>(0);
        let slow = Box::new(move || going.recv().map_err(|_| CardError::new("no peer answers")));
        let sought = seekers.begin(slow).expect("a thread");
        assert!(sought.found().is_none());
        let quick = seekers.begin(Box::new(|| Ok(()))).expect("another thread");
        assert!(wait(&quick).is_ok(), "one that waits keeps no other");
        drop(go);
        assert!(wait(&sought).is_err());
        let died = seekers.begin(Box::new(|| panic!("a bug"))).expect("a thread");
        assert!(wait(&died).is_err());
    }

    #[test]
    fn no_more_are_sought_at_once_than_may() {
        let seekers = Seekers::new("test");
        let mut going = Vec::new();
        for _ in 0..AT_ONCE_MAX {
            let (go, wait) = sync_channel::<()>(0);
            let seek = Box::new(move || wait.recv().map_err(|_| CardError::new("over")));
            going.push((go, seekers.begin(seek).expect("a thread")));
        }
        assert!(seekers.begin(Box::new(|| Ok(()))).is_err());
        drop(going);
        while seekers.running.load(Ordering::Relaxed) > 0 {
            std::thread::yield_now();
        }
        assert!(seekers.begin(Box::new(|| Ok(()))).is_ok());
    }
}
