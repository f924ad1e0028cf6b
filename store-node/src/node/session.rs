//! The node's end of one attach: rings, doorbells and the proof that the engine is there.
//!
//! Nothing that comes from the engine is trusted: a ring in an impossible state, a message that
//! cannot be read, or one that claims what is not the engine's ends the session. The engine's slots
//! are free only when it can write no more: it said goodbye, or its process is dead.

use std::collections::VecDeque;
use std::net::Shutdown;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use kvasir_blocks::AttachEpoch;
use kvasir_proto::{SlotLayout, v1};
use kvasir_transfer::process::{Process, ProcessError};
use kvasir_transfer::ring::{Consumer, Producer, PushError};
use prost::Message;

use super::steps::Steps;
use crate::attach::control::{ControlError, ControlMemory, Progress};
use crate::attach::doorbell::{self, Bell, Ringer};
use crate::attach::handover::{self, Connection};

/// Messages that wait for room in the ring. An engine that takes none of so many is stuck.
const OUTBOX_MAX: usize = 4096;

/// Why a session ends: the engine broke the protocol.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Broken(pub String);

/// Whether the engine is there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Presence {
    There,
    /// Its connection is closed, but its process lives: it may still write.
    Unreachable,
    /// It writes no more.
    Gone,
}

/// See the module.
#[derive(Debug)]
pub struct Session {
    pub instance: v1::InstanceDescription,
    pub steps: Steps,
    epoch: u32,
    control: Arc<ControlMemory>,
    from_engine: Consumer,
    to_engine: Producer,
    outbox: VecDeque<Vec<u8>>,
    /// Rung by the engine.
    bell: Bell,
    /// Wakes the engine.
    engine: Ringer,
    connection: UnixStream,
    process: Process,
    /// It is not listened to any more; only its end is waited for.
    expelled: bool,
    record: Vec<u8>,
}

#[derive(Debug, thiserror::Error)]
pub enum SessionError {
    #[error(transparent)]
    Control(#[from] ControlError),
    #[error(transparent)]
    Process(#[from] ProcessError),
    #[error("descriptors could not be passed")]
    Io(#[from] std::io::Error),
    #[error("the engine's process is not known")]
    Peer(#[from] rustix::io::Errno),
}

impl Session {
    /// Hands the descriptors over and takes the engine on.
    ///
    /// # Errors
    /// When the engine is gone again or the host has no descriptors left.
    pub fn open(
        instance: v1::InstanceDescription,
        layout: &SlotLayout,
        slots: BorrowedFd<'_>,
        connection: UnixStream,
    ) -> Result<Self, SessionError> {
        let epoch = instance.attach_epoch;
        let credentials = rustix::net::sockopt::socket_peercred(&connection)?;
        let process = Process::open(credentials.pid.as_raw_nonzero().get().unsigned_abs())?;
        let control = Arc::new(ControlMemory::create(epoch)?);
        let pair = || doorbell::pair().map_err(std::io::Error::from);
        let ((bell, node_ringer), (engine_bell, engine)) = (pair()?, pair()?);
        let given = [slots, control.memory().fd(), node_ringer.as_fd(), engine_bell.as_fd()];
        // Opened while nobody else can write the memory they lie in.
        let (from_engine, to_engine) = control.node_rings();
        handover::send(&connection, given)?;
        // A layout of more layers is refused before.
        let steps = Steps::new(layout.layers() as u16);
        Ok(Session {
            instance,
            steps,
            epoch,
            control,
            from_engine,
            to_engine,
            outbox: VecDeque::new(),
            bell,
            engine,
            connection,
            process,
            expelled: false,
            record: Vec::new(),
        })
    }

    pub fn epoch(&self) -> AttachEpoch {
        AttachEpoch(self.epoch)
    }

    pub fn process_id(&self) -> u32 {
        self.process.id()
    }

    pub fn load(&self) -> v1::InstanceLoad {
        self.control.load()
    }

    /// What the engine has finished. Read it before a message is acted on: what was stored before
    /// the message was sent is then seen.
    pub fn progress(&self) -> Option<Progress> {
        self.control.progress(self.epoch)
    }

    /// The next message of the engine.
    ///
    /// # Errors
    /// [`Broken`].
    pub fn next(&mut self) -> Result<Option<v1::engine_to_node::Message>, Broken> {
        if self.expelled {
            return Ok(None);
        }
        let broken = |error: &dyn std::fmt::Display| Broken(format!("its ring: {error}"));
        if !self.from_engine.pop(&mut self.record).map_err(|error| broken(&error))? {
            return Ok(None);
        }
        let decoded = v1::EngineToNode::decode(self.record.as_slice());
        let message = decoded.map_err(|error| broken(&error))?.message;
        message.map(Some).ok_or_else(|| Broken("an empty message".into()))
    }

    /// Sends a message, or keeps it until the ring has room.
    ///
    /// # Errors
    /// [`Broken`] when the engine has not taken anything for too long.
    pub fn send(&mut self, message: v1::node_to_engine::Message) -> Result<(), Broken> {
        if self.expelled {
            return Ok(());
        }
        if self.outbox.len() >= OUTBOX_MAX {
            return Err(Broken(format!("it has not taken {OUTBOX_MAX} messages")));
        }
        self.outbox.push_back(v1::NodeToEngine { message: Some(message) }.encode_to_vec());
        self.flush()
    }

    /// Puts what waits into the ring, as far as there is room.
    ///
    /// # Errors
    /// [`Broken`] when the ring cannot be true.
    pub fn flush(&mut self) -> Result<(), Broken> {
        let mut sent = false;
        while let Some(record) = self.outbox.front() {
            match self.to_engine.push(record) {
                Ok(()) => sent = true,
                Err(PushError::Full) => break,
                Err(PushError::TooLong { bytes, max }) => {
                    tracing::error!(bytes, max, "a message is too long for the engine's ring");
                }
                Err(error @ PushError::Corrupt(_)) => return Err(Broken(error.to_string())),
            }
            self.outbox.pop_front();
        }
        if sent {
            self.engine.ring_if(self.control.engine_sleeps());
        }
        Ok(())
    }

    pub fn has_outbox(&self) -> bool {
        !self.outbox.is_empty()
    }

    /// What the node's thread sleeps on: doorbell, connection, process.
    pub fn fds(&self) -> [BorrowedFd<'_>; 3] {
        [self.bell.as_fd(), self.connection.as_fd(), self.process.fd()]
    }

    pub fn control(&self) -> &ControlMemory {
        &self.control
    }

    /// Takes all rings of the doorbell so far.
    pub fn clear_bell(&self) {
        self.bell.clear();
    }

    /// Stops listening to the engine and lets it know; its end is still waited for.
    pub fn expel(&mut self) {
        self.expelled = true;
        self.outbox.clear();
        // It may be gone already.
        let _ = self.connection.shutdown(Shutdown::Write);
    }

    pub fn is_expelled(&self) -> bool {
        self.expelled
    }

    /// Looks whether the engine is there. [`Connection::Goodbye`] is said once.
    pub fn presence(&self) -> Presence {
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
