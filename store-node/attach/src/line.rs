//! A process's end of the line to the store node of its host: two rings, doorbells and the connection
//! that stands for it. What is said over it is its users' business: `engine` and the clients of objects.
//!
//! When the last holder of a [`Line`] is dropped the process says goodbye: from then on it must not
//! touch slot memory, and the node gives what it held to others.

use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use hyper_util::rt::TokioIo;
use kvasir_transfer::doorbell::{self, Bell, Ringer};
use kvasir_transfer::ring::{Consumer, Producer, PushError};

use crate::BoxFuture;
use crate::control::ControlMemory;
use crate::error::{AttachError, with_causes};
use crate::handover::{self, Connection, Token};
use crate::words;

/// How long [`LineSender::send`] waits for room: the node empties the ring in microseconds unless it
/// is gone or stuck.
const FULL_SPINS: u32 = 200;
const FULL_NAP: Duration = Duration::from_micros(100);
const FULL_NAPS: u32 = 500;
/// The node answers a token at once.
const HANDOVER_TIMEOUT: Duration = Duration::from_secs(10);
/// How long a wait may miss the end of the connection at most.
const WAIT_MAX: Duration = Duration::from_millis(500);

/// What sender and receiver share, and any thread may ask.
#[derive(Debug)]
pub struct Line {
    epoch: u32,
    control: ControlMemory,
    /// Wakes the node.
    node: Ringer,
    /// Rung by the node.
    bell: Bell,
    /// Rung by this process's own threads.
    own_bell: Bell,
    own: Ringer,
    connection: UnixStream,
    lost: AtomicBool,
}

/// The last three descriptors that a node hands over, in this order.
#[derive(Debug)]
pub struct LineDescriptors {
    pub control: OwnedFd,
    pub node_ringer: OwnedFd,
    pub bell: OwnedFd,
}

impl Line {
    /// Opens both ends of a line.
    ///
    /// # Errors
    /// [`AttachError::Protocol`] when the control memory is not this attach's, and
    /// [`AttachError::Unreachable`] when this process has no descriptors left.
    pub fn open(
        epoch: u32,
        descriptors: LineDescriptors,
        connection: UnixStream,
    ) -> Result<(LineSender, LineReceiver), AttachError> {
        let control = ControlMemory::open(descriptors.control, epoch)?;
        let (own_bell, own) = doorbell::pair().map_err(|errno| AttachError::Unreachable {
            path: PathBuf::new(),
            reason: errno.to_string(),
        })?;
        let (consumer, producer) = control.engine_rings();
        let line = Arc::new(Line {
            epoch,
            control,
            node: Ringer::from_fd(descriptors.node_ringer),
            bell: Bell::from_fd(descriptors.bell),
            own_bell,
            own,
            connection,
            lost: AtomicBool::new(false),
        });
        let sender = LineSender { line: Arc::clone(&line), producer };
        Ok((sender, LineReceiver { line, consumer, record: Vec::new() }))
    }

    /// Which attach of the node this is.
    pub fn epoch(&self) -> u32 {
        self.epoch
    }

    pub fn control(&self) -> &ControlMemory {
        &self.control
    }

    /// False once the node is gone or has detached this process. Slots must then not be written.
    pub fn is_connected(&self) -> bool {
        if !self.lost.load(Ordering::Relaxed)
            && handover::look(self.connection.as_fd()) != Connection::Open
        {
            self.lost.store(true, Ordering::Relaxed);
        }
        !self.lost.load(Ordering::Relaxed)
    }

    /// Wakes a [`LineReceiver::wait`] from another thread of this process.
    pub fn wake(&self) {
        self.own.ring();
    }

    /// Wakes the node if it sleeps.
    pub fn wake_node(&self) {
        self.node.ring_if(self.control.node_sleeps());
    }
}

impl Drop for Line {
    fn drop(&mut self) {
        handover::say_goodbye(self.connection.as_fd());
    }
}

/// The producing end. Not `Clone`: the ring has one producer.
#[derive(Debug)]
pub struct LineSender {
    line: Arc<Line>,
    producer: Producer,
}

impl LineSender {
    pub fn line(&self) -> &Arc<Line> {
        &self.line
    }

    /// Puts a record into the ring and wakes the node if it sleeps. Waits up to 50 ms for room.
    ///
    /// # Errors
    /// [`AttachError::Lost`] when the node is gone, [`AttachError::Full`] when it takes nothing,
    /// [`AttachError::TooLong`] when it never fits.
    pub fn send(&mut self, record: &[u8]) -> Result<(), AttachError> {
        for attempt in 0..FULL_SPINS + FULL_NAPS {
            match self.producer.push(record) {
                Ok(()) => {
                    self.line.wake_node();
                    return Ok(());
                }
                Err(PushError::Full) if !self.line.is_connected() => return Err(AttachError::Lost),
                Err(PushError::Full) if attempt < FULL_SPINS => std::hint::spin_loop(),
                Err(PushError::Full) => std::thread::sleep(FULL_NAP),
                Err(error) => return Err(error.into()),
            }
        }
        Err(AttachError::Full)
    }
}

/// The consuming end. Not `Clone`: the ring has one consumer.
#[derive(Debug)]
pub struct LineReceiver {
    line: Arc<Line>,
    consumer: Consumer,
    record: Vec<u8>,
}

impl LineReceiver {
    pub fn line(&self) -> &Arc<Line> {
        &self.line
    }

    /// The next record, if there is one.
    ///
    /// # Errors
    /// [`AttachError::Protocol`] when the ring cannot be true.
    pub fn try_recv(&mut self) -> Result<Option<&[u8]>, AttachError> {
        let is_there = self.consumer.pop(&mut self.record)?;
        // It may say that slots are this process's to write.
        words::may_write();
        Ok(is_there.then_some(&self.record[..]))
    }

    /// Sleeps until a record is there, somebody called [`Line::wake`], or the time is over.
    ///
    /// # Errors
    /// [`AttachError::Lost`] when the node is gone and every record was taken.
    pub fn wait(&mut self, timeout: Duration) -> Result<(), AttachError> {
        let line = &*self.line;
        let sleep = || {
            let fds = [line.bell.as_fd(), line.own_bell.as_fd(), line.connection.as_fd()];
            let ready = doorbell::sleep(&fds, timeout.min(WAIT_MAX));
            for (bit, bell) in [(0b01, &line.bell), (0b10, &line.own_bell)] {
                if ready & bit != 0 {
                    bell.clear();
                }
            }
        };
        words::sleep_unless(line.control.engine_sleeps(), || !self.consumer.is_empty(), sleep);
        if self.consumer.is_empty() && !line.is_connected() {
            return Err(AttachError::Lost);
        }
        Ok(())
    }
}

/// Shows a token and takes descriptors for it: `N` of them. Blocks.
///
/// # Errors
/// [`AttachError::Unreachable`] when the node does not give them.
pub fn take_descriptors<const N: usize>(
    socket: &Path,
    token: &[u8],
) -> Result<(UnixStream, [OwnedFd; N]), AttachError> {
    let token: Token = token
        .try_into()
        .map_err(|_| AttachError::Protocol("the token does not have 16 bytes".into()))?;
    let failed = |error: std::io::Error| AttachError::Unreachable {
        path: socket.into(),
        reason: error.to_string(),
    };
    let mut connection = UnixStream::connect(socket).map_err(failed)?;
    connection.set_read_timeout(Some(HANDOVER_TIMEOUT)).map_err(failed)?;
    let descriptors = handover::receive(&mut connection, &token).map_err(failed)?;
    Ok((connection, descriptors))
}

/// A gRPC channel over a Unix socket.
///
/// # Errors
/// [`AttachError::Unreachable`] when nobody answers there.
pub fn channel(socket: &Path) -> BoxFuture<Result<tonic::transport::Channel, AttachError>> {
    Box::pin(connect(socket.to_path_buf()))
}

async fn connect(socket: PathBuf) -> Result<tonic::transport::Channel, AttachError> {
    let path = socket.clone();
    let connector = tower::service_fn(move |_: tonic::transport::Uri| {
        let path = path.clone();
        async move { tokio::net::UnixStream::connect(path).await.map(TokioIo::new) }
    });
    // The address is not used: the connector knows the socket.
    tonic::transport::Endpoint::from_static("http://attach")
        .connect_with_connector(connector)
        .await
        .map_err(|error| AttachError::Unreachable { path: socket, reason: with_causes(&error) })
}

/// What a refused call over [`channel`] means.
pub fn refused(socket: &Path, status: &tonic::Status) -> AttachError {
    use tonic::Code::{FailedPrecondition, InvalidArgument, Unimplemented};
    match status.code() {
        // What it says after it has looked at the request. Everything else is a node that cannot
        // take anybody just now, or that was lost in the middle of the call.
        InvalidArgument | FailedPrecondition | Unimplemented => {
            AttachError::Refused(status.message().into())
        }
        _ => AttachError::Unreachable { path: socket.into(), reason: status.message().into() },
    }
}
