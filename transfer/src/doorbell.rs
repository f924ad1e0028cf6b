//! Wakes a sleeping poller in another process. The poller says in shared memory when it sleeps, so
//! that ringing costs no system call while it is awake. One poller, any number of ringers.
//!
//! Nothing is lost: the sleeper stores its flag, fences, and looks for work once more before it
//! sleeps; the ringer publishes its work, fences, and then looks at the flag. One of the two sees the
//! other.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering, fence};
use std::time::Duration;

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec};

use crate::memory::{RangeError, SharedMemory};

/// Why a doorbell could not be made.
#[derive(Debug, thiserror::Error)]
pub enum DoorbellError {
    #[error(transparent)]
    Range(#[from] RangeError),
    #[error("eventfd")]
    System(#[from] rustix::io::Errno),
}

/// An eventfd and the sleeper's flag (a u32 in shared memory).
#[derive(Debug)]
pub struct Doorbell {
    event: OwnedFd,
    memory: Arc<SharedMemory>,
    flag_offset: usize,
}

impl Doorbell {
    /// Makes the eventfd; `flag_offset` (a multiple of 4) is where both sides find the flag.
    ///
    /// # Errors
    /// [`DoorbellError`] when the offset does not fit or the system refuses.
    pub fn create(memory: &Arc<SharedMemory>, flag_offset: usize) -> Result<Self, DoorbellError> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let event = rustix::event::eventfd(0, flags)?;
        Self::from_fd(event, memory, flag_offset)
    }

    /// Takes over an eventfd that came from the other process.
    ///
    /// # Errors
    /// [`DoorbellError`] when the offset does not fit.
    pub fn from_fd(
        event: OwnedFd,
        memory: &Arc<SharedMemory>,
        flag_offset: usize,
    ) -> Result<Self, DoorbellError> {
        memory.atomic_u32(flag_offset)?;
        Ok(Doorbell { event, memory: Arc::clone(memory), flag_offset })
    }

    /// The eventfd, to be passed on or to be polled by a reactor between [`Doorbell::arm`] and
    /// [`Doorbell::disarm`].
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }

    fn flag(&self) -> &AtomicU32 {
        let flag = self.memory.atomic_u32(self.flag_offset);
        flag.expect("the offset was checked when the doorbell was made")
    }

    /// Wakes the sleeper if it sleeps. Call it after the work is published.
    pub fn ring(&self) {
        fence(Ordering::SeqCst);
        if self.flag().load(Ordering::Relaxed) != 0 {
            ring_event(self.event.as_fd());
        }
    }

    /// Says that this side is about to sleep. It must look for work once more afterwards.
    pub fn arm(&self) {
        self.flag().store(1, Ordering::Relaxed);
        fence(Ordering::SeqCst);
    }

    /// Says that this side is awake, and empties the eventfd.
    pub fn disarm(&self) {
        self.flag().store(0, Ordering::Relaxed);
        drain_event(self.event.as_fd());
    }

    /// Sleeps until rung, until `timeout`, or not at all when `has_work` says so. Returns whether it
    /// was rung or found work.
    pub fn wait(&self, timeout: Duration, has_work: impl FnOnce() -> bool) -> bool {
        self.arm();
        let woken = has_work() || poll_readable(self.event.as_fd(), timeout);
        self.disarm();
        woken
    }
}

/// Adds one to an eventfd. A full one has been rung already.
pub(crate) fn ring_event(event: BorrowedFd<'_>) {
    let _ = rustix::io::write(event, &1u64.to_ne_bytes());
}

/// Empties an eventfd.
pub(crate) fn drain_event(event: BorrowedFd<'_>) {
    let mut count = [0u8; 8];
    let _ = rustix::io::read(event, &mut count);
}

/// Waits until a descriptor is readable or hung up. An interrupted wait counts as a timeout.
pub(crate) fn poll_readable(fd: BorrowedFd<'_>, timeout: Duration) -> bool {
    let mut fds = [PollFd::from_borrowed_fd(fd, PollFlags::IN)];
    let timeout = Timespec {
        tv_sec: i64::try_from(timeout.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: i64::from(timeout.subsec_nanos()),
    };
    matches!(rustix::event::poll(&mut fds, Some(&timeout)), Ok(ready) if ready > 0)
}
