//! What the node's thread sleeps on for many processes at once: two descriptors, however many they are.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::event::epoll;

use super::line::Line;

/// The doorbells of lines, and their connections and processes.
#[derive(Debug)]
pub(crate) struct Watch {
    bells: OwnedFd,
    ends: OwnedFd,
}

impl Watch {
    /// # Errors
    /// When the process has no descriptors left.
    pub(crate) fn new() -> rustix::io::Result<Self> {
        let make = || epoll::create(epoll::CreateFlags::CLOEXEC);
        Ok(Watch { bells: make()?, ends: make()? })
    }

    /// A line that goes needs not be taken out: closing its descriptors does that.
    ///
    /// # Errors
    /// When the host has no memory for it.
    pub(crate) fn add(&self, line: &Line) -> rustix::io::Result<()> {
        let [bell, connection, process] = line.fds();
        let (data, flags) = (epoll::EventData::new_u64(0), epoll::EventFlags::IN);
        epoll::add(&self.bells, bell, data, flags)?;
        epoll::add(&self.ends, connection, data, flags)?;
        epoll::add(&self.ends, process, data, flags)
    }

    /// A connection that is closed stays readable: its end has been seen.
    pub(crate) fn forget_connection(&self, line: &Line) {
        let [bell, connection, _] = line.fds();
        let _ = epoll::delete(&self.bells, bell);
        let _ = epoll::delete(&self.ends, connection);
    }

    /// Ready when one of them rings; and when one may have gone.
    pub(crate) fn fds(&self) -> [BorrowedFd<'_>; 2] {
        [self.bells.as_fd(), self.ends.as_fd()]
    }
}
