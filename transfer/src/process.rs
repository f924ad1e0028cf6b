//! Another process, held by a pidfd: a later process with the same number is never mistaken for it.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use rustix::process::{Pid, PidfdFlags};

use crate::doorbell;

/// Why a process cannot be held.
#[derive(Debug, thiserror::Error)]
pub enum ProcessError {
    #[error("{0} is not a process id")]
    BadId(u32),
    #[error("there is no such process")]
    Gone,
    #[error("`pidfd_open` failed; it needs Linux 5.3 or later and a free file descriptor")]
    System(#[source] rustix::io::Errno),
}

/// A pidfd. Readable (for any reactor) once the process has exited.
#[derive(Debug)]
pub struct Process {
    pidfd: OwnedFd,
    id: u32,
}

impl Process {
    /// # Errors
    /// [`ProcessError::Gone`] when it has exited already.
    pub fn open(id: u32) -> Result<Self, ProcessError> {
        let raw = i32::try_from(id).map_err(|_| ProcessError::BadId(id))?;
        let pid = Pid::from_raw(raw).ok_or(ProcessError::BadId(id))?;
        match rustix::process::pidfd_open(pid, PidfdFlags::empty()) {
            Ok(pidfd) => Ok(Process { pidfd, id }),
            Err(rustix::io::Errno::SRCH) => Err(ProcessError::Gone),
            Err(errno) => Err(ProcessError::System(errno)),
        }
    }

    pub fn id(&self) -> u32 {
        self.id
    }

    pub fn fd(&self) -> BorrowedFd<'_> {
        self.pidfd.as_fd()
    }

    /// Whether the process has exited. It writes no memory from then on.
    pub fn has_exited(&self) -> bool {
        self.wait_exit(Duration::ZERO)
    }

    /// Waits for its exit; `false` after `timeout`.
    pub fn wait_exit(&self, timeout: Duration) -> bool {
        doorbell::sleep(&[self.fd()], timeout) != 0
    }
}
