//! An eventfd that wakes a sleeping thread, and the flag that says it sleeps.
//!
//! The rule is Dekker's: the sleeper raises its flag, fences, looks for work once more and only
//! then sleeps; the waker publishes its work, fences and looks at the flag. One of the two sees the
//! other, so no wake-up is lost, and while nobody sleeps nobody makes a system call.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU32, Ordering, fence};
use std::time::Duration;

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

/// One side's doorbell. The other side, and threads of the same process, ring it.
#[derive(Debug)]
pub struct Doorbell {
    fd: OwnedFd,
}

impl Doorbell {
    /// # Errors
    /// When the process has no descriptors left.
    pub fn new() -> std::io::Result<Self> {
        Ok(Doorbell { fd: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)? })
    }

    /// A doorbell that the other side made.
    pub fn from_fd(fd: OwnedFd) -> Self {
        Doorbell { fd }
    }

    pub fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// Rings it, whether or not anyone sleeps. A bell that is full is ringing already.
    pub fn ring(&self) {
        let _ = rustix::io::write(&self.fd, &1u64.to_ne_bytes());
    }

    /// Rings it when `sleeping` is raised. Call it after the work was published.
    pub fn ring_if(&self, sleeping: &AtomicU32) {
        fence(Ordering::SeqCst);
        if sleeping.load(Ordering::Relaxed) != 0 {
            self.ring();
        }
    }

    /// Takes all rings so far, so that the next wait sleeps.
    pub fn clear(&self) {
        let _ = rustix::io::read(&self.fd, &mut [0u8; 8]);
    }
}

/// Raises the sleeper's flag; work must be looked for once more before [`sleep`].
pub fn announce_sleep(sleeping: &AtomicU32) {
    sleeping.store(1, Ordering::Relaxed);
    fence(Ordering::SeqCst);
}

/// Lowers the flag again.
pub fn awake(sleeping: &AtomicU32) {
    sleeping.store(0, Ordering::Relaxed);
}

/// Sleeps until one of `fds` can be read or is closed, or until the time is over. Answers which
/// ones are ready, as bits in their order.
pub fn sleep(fds: &[BorrowedFd<'_>], timeout: Duration) -> u32 {
    let mut polled: Vec<PollFd<'_>> =
        fds.iter().map(|fd| PollFd::from_borrowed_fd(*fd, PollFlags::IN)).collect();
    let timeout = Timespec {
        tv_sec: i64::try_from(timeout.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: timeout.subsec_nanos().into(),
    };
    // An interrupted wait is a short one: every caller looks for work in a loop.
    if poll(&mut polled, Some(&timeout)).is_err() {
        return 0;
    }
    let ready = |(bit, fd): (usize, &PollFd<'_>)| u32::from(!fd.revents().is_empty()) << bit;
    polled.iter().enumerate().map(ready).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bell_rings_for_a_sleeper_only_and_stops_when_cleared() {
        let bell = Doorbell::new().expect("a descriptor");
        let sleeping = AtomicU32::new(0);
        let look = || sleep(&[bell.as_fd()], Duration::ZERO);
        bell.ring_if(&sleeping);
        assert_eq!(look(), 0);
        announce_sleep(&sleeping);
        bell.ring_if(&sleeping);
        bell.ring_if(&sleeping);
        assert_eq!(look(), 1);
        bell.clear();
        assert_eq!(look(), 0);
        awake(&sleeping);
        bell.ring_if(&sleeping);
        assert_eq!(look(), 0);
    }
}
