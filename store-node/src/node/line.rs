//! The node's end of a line to another process: rings, doorbells and the proof that it is there.
//!
//! Nothing that comes over it is trusted: a ring in an impossible state ends it, and so do its users
//! when a message cannot be read or claims what cannot be. What the process holds is free only when it
//! can write no more: it said goodbye, or it is dead.

use std::collections::VecDeque;
use std::net::Shutdown;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;

use kvasir_blocks::AttachEpoch;
use kvasir_transfer::process::{Process, ProcessError};
use kvasir_transfer::ring::{Consumer, Producer, PushError};

use kvasir_attach::control::{ControlError, ControlMemory};
use kvasir_attach::handover::{self, Connection};
use kvasir_transfer::doorbell::{self, Bell, Ringer};

/// Messages that wait for room in the ring. A process that takes none of so many is stuck.
const OUTBOX_MAX: usize = 4096;

/// Why a session ends: the process broke the protocol.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub(crate) struct Broken(pub String);

/// Whether the process is there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Presence {
    There,
    /// Its connection is closed, but its process lives: it may still write.
    Unreachable,
    /// It writes no more.
    Gone,
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Line {
    epoch: u32,
    control: ControlMemory,
    inward: Consumer,
    outward: Producer,
    outbox: VecDeque<Vec<u8>>,
    /// Rung by the process.
    bell: Bell,
    /// Wakes the process.
    ringer: Ringer,
    connection: UnixStream,
    process: Process,
    /// It is not listened to any more; only its end is waited for.
    expelled: bool,
    record: Vec<u8>,
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum LineError {
    #[error(transparent)]
    Control(#[from] ControlError),
    #[error(transparent)]
    Process(#[from] ProcessError),
    #[error("cannot pass file descriptors to the process")]
    Io(#[from] std::io::Error),
    #[error("cannot identify the process at the other end of the socket")]
    Peer(#[from] rustix::io::Errno),
}

impl Line {
    /// Hands descriptors over, those of `memory` first, and takes the process on.
    ///
    /// # Errors
    /// When the process is gone again or the host has no descriptors left.
    pub(crate) fn open(
        epoch: u32,
        memory: &[BorrowedFd<'_>],
        connection: UnixStream,
    ) -> Result<Self, LineError> {
        let credentials = rustix::net::sockopt::socket_peercred(&connection)?;
        let process = Process::open(credentials.pid.as_raw_nonzero().get().unsigned_abs())?;
        let control = ControlMemory::create(epoch)?;
        let pair = || doorbell::pair().map_err(std::io::Error::from);
        let ((bell, node_ringer), (their_bell, ringer)) = (pair()?, pair()?);
        let own = [control.memory().fd(), node_ringer.as_fd(), their_bell.as_fd()];
        let given: Vec<BorrowedFd<'_>> = memory.iter().copied().chain(own).collect();
        // Opened while nobody else can write the memory they lie in.
        let (inward, outward) = control.node_rings();
        handover::send(&connection, &given)?;
        Ok(Line {
            epoch,
            control,
            inward,
            outward,
            outbox: VecDeque::new(),
            bell,
            ringer,
            connection,
            process,
            expelled: false,
            record: Vec::new(),
        })
    }

    pub(crate) fn epoch(&self) -> AttachEpoch {
        AttachEpoch(self.epoch)
    }

    pub(crate) fn process_id(&self) -> u32 {
        self.process.id()
    }

    /// The next record of the process.
    ///
    /// # Errors
    /// [`Broken`].
    pub(crate) fn next(&mut self) -> Result<Option<&[u8]>, Broken> {
        if self.expelled {
            return Ok(None);
        }
        match self.inward.pop(&mut self.record) {
            Ok(there) => Ok(there.then_some(&self.record[..])),
            Err(error) => Err(Broken(format!("cannot read the ring of the process: {error}"))),
        }
    }

    /// Sends a record, or keeps it until the ring has room.
    ///
    /// # Errors
    /// [`Broken`] when the process has not taken anything for too long.
    pub(crate) fn send(&mut self, record: Vec<u8>) -> Result<(), Broken> {
        if self.expelled {
            return Ok(());
        }
        if self.outbox.len() >= OUTBOX_MAX {
            return Err(Broken(format!("the process did not read {OUTBOX_MAX} messages")));
        }
        self.outbox.push_back(record);
        self.flush()
    }

    /// Puts what waits into the ring, as far as there is room.
    ///
    /// # Errors
    /// [`Broken`] when the ring cannot be true.
    pub(crate) fn flush(&mut self) -> Result<(), Broken> {
        let mut sent = false;
        while let Some(record) = self.outbox.front() {
            match self.outward.push(record) {
                Ok(()) => sent = true,
                Err(PushError::Full) => break,
                Err(PushError::TooLong { bytes, max }) => {
                    tracing::error!(
                        bytes,
                        bytes_max = max,
                        "the store node dropped a message that is too long for the ring"
                    );
                }
                Err(error @ PushError::Corrupt(_)) => return Err(Broken(error.to_string())),
            }
            self.outbox.pop_front();
        }
        if sent {
            self.ringer.ring_if(self.control.engine_sleeps());
        }
        Ok(())
    }

    pub(crate) fn has_outbox(&self) -> bool {
        !self.outbox.is_empty()
    }

    /// What the node's thread sleeps on: doorbell, connection, process.
    pub(crate) fn fds(&self) -> [BorrowedFd<'_>; 3] {
        [self.bell.as_fd(), self.connection.as_fd(), self.process.fd()]
    }

    pub(crate) fn control(&self) -> &ControlMemory {
        &self.control
    }

    /// Takes all rings of the doorbell so far.
    pub(crate) fn clear_bell(&self) {
        self.bell.clear();
    }

    /// Stops listening to the process and lets it know; its end is still waited for.
    pub(crate) fn expel(&mut self) {
        self.expelled = true;
        self.outbox.clear();
        // It may be gone already.
        let _ = self.connection.shutdown(Shutdown::Write);
    }

    pub(crate) fn is_expelled(&self) -> bool {
        self.expelled
    }

    /// Looks whether the process is there. [`Connection::Goodbye`] is said once.
    pub(crate) fn presence(&self) -> Presence {
        let connection = handover::look(self.connection.as_fd());
        if connection == Connection::Goodbye || self.process.has_exited() {
            return Presence::Gone;
        }
        match connection {
            Connection::Lost => Presence::Unreachable,
            Connection::Open | Connection::Goodbye => Presence::There,
        }
    }
}
