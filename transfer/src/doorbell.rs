//! Wakes a sleeping thread, in this process or in another one that may be hostile. One thread hears a
//! [`Bell`]; whoever holds its [`Ringer`] rings it. Whether the sleeper sleeps at all is told by a flag
//! beside it (see [`announce_sleep`] and [`must_wake`]), so that nobody makes a system call while it is
//! awake.
//!
//! Neither side can make the other one wait. The two ends are a pair of datagram sockets: each end has
//! an open file of its own, so that one side's flags are not the other's; every call says for itself
//! that it must not wait; and a datagram socket has no end of stream, so that closing or shutting down
//! one end neither wakes the other one nor keeps it awake. A ringer whose socket is full has rung
//! already. An eventfd would not do: both sides share one open file, and whoever clears its
//! `O_NONBLOCK` and fills or empties the counter blocks the other one's next write or read for good.
//!
//! A pair belongs to one sleeper and one ringing process. Processes that do not trust each other are
//! given a pair each: one could spoil the ringer for the others.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::AtomicU32;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType};

pub use crate::sleeping::{announce_sleep, awake, must_wake};

/// Rings that are taken at once. A well-behaved ringer's socket holds about six; one that made its
/// socket bigger only wakes the sleeper more often.
const RINGS_MAX: usize = 16;

/// A bell and what rings it.
///
/// # Errors
/// When the process has no descriptors left.
pub fn pair() -> rustix::io::Result<(Bell, Ringer)> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let (bell, ringer) =
        rustix::net::socketpair(AddressFamily::UNIX, SocketType::DGRAM, flags, None)?;
    // The least that the system allows: rings beyond the first one say nothing new.
    rustix::net::sockopt::set_socket_send_buffer_size(&ringer, 0)?;
    Ok((Bell { fd: bell }, Ringer { fd: ringer }))
}

/// The sleeper's end.
#[derive(Debug)]
pub struct Bell {
    fd: OwnedFd,
}

impl Bell {
    /// Takes over an end that another process made.
    pub fn from_fd(fd: OwnedFd) -> Self {
        Bell { fd }
    }

    /// Takes the rings so far, so that the next wait sleeps.
    pub fn clear(&self) {
        let mut ring = [0u8; 1];
        for _ in 0..RINGS_MAX {
            match rustix::net::recv(&self.fd, &mut ring, RecvFlags::DONTWAIT) {
                Err(rustix::io::Errno::INTR) | Ok(_) => {}
                Err(_) => break,
            }
        }
    }
}

impl AsFd for Bell {
    /// Readable while it rings.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// The other end.
#[derive(Debug)]
pub struct Ringer {
    fd: OwnedFd,
}

impl Ringer {
    /// Takes over an end that another process made.
    pub fn from_fd(fd: OwnedFd) -> Self {
        Ringer { fd }
    }

    /// Rings, whether or not anyone sleeps. Where nobody can hear it any more nothing happens.
    pub fn ring(&self) {
        let _ = rustix::net::send(&self.fd, &[1], SendFlags::DONTWAIT | SendFlags::NOSIGNAL);
    }

    /// Rings when `sleeping` is raised. Call it after the work was published.
    pub fn ring_if(&self, sleeping: &AtomicU32) {
        if must_wake(sleeping) {
            self.ring();
        }
    }
}

impl AsFd for Ringer {
    /// To be handed to whoever shall ring.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// Sleeps until one of `fds` can be read or is closed, or until the time is over. Answers which ones
/// are ready, as bits in their order. An interrupted sleep is a short one.
pub fn sleep(fds: &[BorrowedFd<'_>], timeout: Duration) -> u32 {
    let mut polled: Vec<PollFd<'_>> =
        fds.iter().map(|fd| PollFd::from_borrowed_fd(*fd, PollFlags::IN)).collect();
    let timeout = Timespec {
        tv_sec: i64::try_from(timeout.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: timeout.subsec_nanos().into(),
    };
    if rustix::event::poll(&mut polled, Some(&timeout)).is_err() {
        return 0;
    }
    let ready = |(bit, fd): (usize, &PollFd<'_>)| u32::from(!fd.revents().is_empty()) << bit;
    polled.iter().enumerate().map(ready).sum()
}
