//! What an engine links to attach to the store node of its host.
//!
//! [`EngineAttachment::connect`] once, then [`EngineAttachment::split`]: the [`Sender`] belongs to
//! the thread that computes, the [`Receiver`] to one that waits for the node's answers. Neither
//! makes a system call while the node is awake. [`Link`] is what both share and any thread may ask.
//!
//! When the last of them is dropped the engine says goodbye: from then on it must not touch slot
//! memory, and the node gives its slots to others.

use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use hyper_util::rt::TokioIo;
use kvasir_proto::{SlotLayout, v1};
use kvasir_transfer::SharedMemory;
use kvasir_transfer::memory::{Access, MemoryError};
use kvasir_transfer::ring::{Consumer, Corrupt, Producer, PushError};
use prost::Message;

use super::control::{ControlError, ControlMemory, Progress};
use super::doorbell::{self, Bell, Ringer};
use super::handover::{self, Connection, Token};

/// How long [`Sender::send`] waits for room: the node empties the ring in microseconds unless it
/// is gone or stuck.
const FULL_SPINS: u32 = 200;
const FULL_NAP: Duration = Duration::from_micros(100);
const FULL_NAPS: u32 = 500;
/// The node answers a token at once.
const HANDOVER_TIMEOUT: Duration = Duration::from_secs(10);
/// How long a wait may miss the end of the connection at most.
const WAIT_MAX: Duration = Duration::from_millis(500);

/// What an engine says of itself.
#[derive(Debug, Clone)]
pub struct AttachOptions {
    /// The node's directory, with `attach.sock` in it.
    pub attach_dir: PathBuf,
    pub instance_id: String,
    pub role: v1::Role,
    pub model: v1::ModelDescription,
    pub layout: SlotLayout,
    /// Where this engine answers `Engine` calls, as "host:port".
    pub grpc_address: String,
    /// Sequences it decodes at once, at most.
    pub max_running: u32,
}

/// Why an attach failed or ended.
#[derive(Debug, thiserror::Error)]
pub enum AttachError {
    /// Nobody answers there (yet): try again later.
    #[error("no store node answers at {path}: {reason}")]
    Unreachable { path: PathBuf, reason: String },
    /// The node said no, in these words, and will say so again until something is set otherwise.
    #[error("the store node refused the attach: {0}")]
    Refused(String),
    /// The node is gone or has detached this engine: attach anew.
    #[error("the store node is gone or has detached this engine")]
    Lost,
    /// The node has not taken messages for 50 ms: it is overloaded or stuck.
    #[error("the ring to the store node is full")]
    Full,
    /// Longer than a ring takes: split it.
    #[error("a message of {bytes} bytes is longer than the ring takes ({bytes_max})")]
    TooLong { bytes: usize, bytes_max: usize },
    #[error("the store node broke the protocol: {0}")]
    Protocol(String),
}

impl From<PushError> for AttachError {
    fn from(error: PushError) -> Self {
        match error {
            PushError::Full => AttachError::Full,
            PushError::TooLong { bytes, max } => AttachError::TooLong { bytes, bytes_max: max },
            PushError::Corrupt(_) => AttachError::Protocol(error.to_string()),
        }
    }
}

impl From<Corrupt> for AttachError {
    fn from(error: Corrupt) -> Self {
        AttachError::Protocol(error.to_string())
    }
}

impl From<MemoryError> for AttachError {
    fn from(error: MemoryError) -> Self {
        AttachError::Protocol(format!("the slot memory cannot be mapped: {error}"))
    }
}

impl From<ControlError> for AttachError {
    fn from(error: ControlError) -> Self {
        AttachError::Protocol(error.to_string())
    }
}

/// What sender and receiver share.
#[derive(Debug)]
pub struct Link {
    epoch: u32,
    slots_total: u32,
    slots: Arc<SharedMemory>,
    control: Arc<ControlMemory>,
    /// Wakes the node.
    node: Ringer,
    /// Rung by the node.
    bell: Bell,
    /// Rung by this engine's own threads.
    own_bell: Bell,
    own: Ringer,
    connection: UnixStream,
    lost: AtomicBool,
}

impl Link {
    /// Which attach of the node this is.
    pub fn epoch(&self) -> u32 {
        self.epoch
    }

    pub fn slots_total(&self) -> u32 {
        self.slots_total
    }

    /// The node's slots: slot `i` begins at `i * slot_bytes`. Only bound and granted slots may be
    /// touched, and only bytes of pages that are not cached may be written.
    pub fn slot_memory(&self) -> &Arc<SharedMemory> {
        &self.slots
    }

    /// False once the node is gone or has detached this engine. Slots must then not be written.
    pub fn is_connected(&self) -> bool {
        if !self.lost.load(Ordering::Relaxed)
            && handover::look(self.connection.as_fd()) != Connection::Open
        {
            self.lost.store(true, Ordering::Relaxed);
        }
        !self.lost.load(Ordering::Relaxed)
    }

    /// Publishes what the engine is doing, for admission. Any thread; cheap.
    pub fn publish_load(&self, load: &v1::InstanceLoad) {
        self.control.set_load(load);
    }

    /// Wakes a [`Receiver::wait`] from another thread of the engine.
    pub fn wake(&self) {
        self.own.ring();
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        handover::say_goodbye(self.connection.as_fd());
    }
}

/// An attached engine: see the module.
#[derive(Debug)]
pub struct EngineAttachment {
    sender: Sender,
    receiver: Receiver,
}

impl EngineAttachment {
    /// Attaches.
    ///
    /// # Errors
    /// [`AttachError::Unreachable`] and [`AttachError::Refused`] say what to do.
    pub async fn connect(options: AttachOptions) -> Result<Self, AttachError> {
        let socket = options.attach_dir.join("attach.sock");
        let reply = request(&socket, &options).await?;
        let dir = options.attach_dir.clone();
        tokio::task::spawn_blocking(move || EngineAttachment::take_descriptors(&dir, &reply))
            .await
            .map_err(|error| AttachError::Protocol(error.to_string()))?
    }

    fn take_descriptors(
        dir: &std::path::Path,
        reply: &v1::AttachReply,
    ) -> Result<Self, AttachError> {
        let token: Token = reply
            .token
            .as_slice()
            .try_into()
            .map_err(|_| AttachError::Protocol("the token has not 16 bytes".into()))?;
        let path = dir.join(&reply.descriptor_socket);
        let failed = |error: std::io::Error| AttachError::Unreachable {
            path: path.clone(),
            reason: error.to_string(),
        };
        let mut connection = UnixStream::connect(&path).map_err(failed)?;
        connection.set_read_timeout(Some(HANDOVER_TIMEOUT)).map_err(failed)?;
        let descriptors = handover::receive(&mut connection, &token).map_err(failed)?;
        let slot_bytes = usize::try_from(reply.slot_memory_bytes).unwrap_or(usize::MAX);
        let slots = SharedMemory::from_fd(descriptors.slots, slot_bytes, Access::ReadWrite)?;
        slots.populate();
        let control = Arc::new(ControlMemory::open(descriptors.control, reply.attach_epoch)?);
        let (own_bell, own) = doorbell::pair().map_err(|errno| failed(errno.into()))?;
        let link = Arc::new(Link {
            epoch: reply.attach_epoch,
            slots_total: reply.slots_total,
            slots: Arc::new(slots),
            control: Arc::clone(&control),
            node: Ringer::from_fd(descriptors.node_ringer),
            bell: Bell::from_fd(descriptors.engine_bell),
            own_bell,
            own,
            connection,
            lost: AtomicBool::new(false),
        });
        let (consumer, producer) = control.engine_rings();
        Ok(EngineAttachment {
            sender: Sender { link: Arc::clone(&link), producer, record: Vec::new() },
            receiver: Receiver { link, consumer, record: Vec::new() },
        })
    }

    /// The two ends, for two threads.
    pub fn split(self) -> (Sender, Receiver) {
        (self.sender, self.receiver)
    }

    /// What both ends share.
    pub fn link(&self) -> &Arc<Link> {
        &self.sender.link
    }

    pub fn epoch(&self) -> u32 {
        self.sender.link.epoch
    }

    pub fn slots_total(&self) -> u32 {
        self.sender.link.slots_total
    }

    pub fn slot_memory(&self) -> &Arc<SharedMemory> {
        &self.sender.link.slots
    }

    pub fn is_connected(&self) -> bool {
        self.sender.link.is_connected()
    }

    /// See [`Sender::send`].
    ///
    /// # Errors
    /// As there.
    pub fn send(&mut self, message: v1::engine_to_node::Message) -> Result<(), AttachError> {
        self.sender.send(message)
    }

    /// See [`Receiver::try_recv`].
    ///
    /// # Errors
    /// As there.
    pub fn try_recv(&mut self) -> Result<Option<v1::node_to_engine::Message>, AttachError> {
        self.receiver.try_recv()
    }

    /// See [`Receiver::wait`].
    ///
    /// # Errors
    /// As there.
    pub fn wait(&mut self, timeout: Duration) -> Result<(), AttachError> {
        self.receiver.wait(timeout)
    }

    /// See [`Sender::progress`].
    pub fn progress(&self, step: u32, layers_done: u16) {
        self.sender.progress(step, layers_done);
    }

    /// See [`Link::publish_load`].
    pub fn publish_load(&self, load: &v1::InstanceLoad) {
        self.sender.link.publish_load(load);
    }
}

/// The producing end: messages and progress to the node. Not `Clone`: the ring has one producer.
#[derive(Debug)]
pub struct Sender {
    link: Arc<Link>,
    producer: Producer,
    record: Vec<u8>,
}

impl Sender {
    pub fn link(&self) -> &Arc<Link> {
        &self.link
    }

    /// Puts a message into the ring and wakes the node if it sleeps. Waits up to 50 ms for room.
    ///
    /// # Errors
    /// [`AttachError::Lost`] when the node is gone, [`AttachError::Full`] when it takes nothing.
    pub fn send(&mut self, message: v1::engine_to_node::Message) -> Result<(), AttachError> {
        self.record.clear();
        v1::EngineToNode { message: Some(message) }
            .encode(&mut self.record)
            .expect("a vector grows as it must");
        for attempt in 0..FULL_SPINS + FULL_NAPS {
            match self.producer.push(&self.record) {
                Ok(()) => {
                    self.link.node.ring_if(self.link.control.node_sleeps());
                    return Ok(());
                }
                Err(PushError::Full) if !self.link.is_connected() => return Err(AttachError::Lost),
                Err(PushError::Full) if attempt < FULL_SPINS => std::hint::spin_loop(),
                Err(PushError::Full) => std::thread::sleep(FULL_NAP),
                Err(error) => return Err(error.into()),
            }
        }
        Err(AttachError::Full)
    }

    /// Says that layers `[0, layers_done)` of `step` are written. Everything written before is
    /// visible to the node.
    pub fn progress(&self, step: u32, layers_done: u16) {
        self.link.control.set_progress(self.link.epoch, Progress { step, layers_done });
        self.link.node.ring_if(self.link.control.node_sleeps());
    }
}

/// The consuming end: the node's answers. Not `Clone`: the ring has one consumer.
#[derive(Debug)]
pub struct Receiver {
    link: Arc<Link>,
    consumer: Consumer,
    record: Vec<u8>,
}

impl Receiver {
    pub fn link(&self) -> &Arc<Link> {
        &self.link
    }

    /// The next message, if there is one.
    ///
    /// # Errors
    /// [`AttachError::Protocol`] when what is there is no message.
    pub fn try_recv(&mut self) -> Result<Option<v1::node_to_engine::Message>, AttachError> {
        if !self.consumer.pop(&mut self.record)? {
            return Ok(None);
        }
        let decoded = v1::NodeToEngine::decode(self.record.as_slice());
        let message = decoded.map_err(|error| AttachError::Protocol(error.to_string()))?.message;
        message.map(Some).ok_or_else(|| AttachError::Protocol("an empty message".into()))
    }

    /// Sleeps until a message is there, somebody called [`Link::wake`], or the time is over.
    ///
    /// # Errors
    /// [`AttachError::Lost`] when the node is gone and every message was taken.
    pub fn wait(&mut self, timeout: Duration) -> Result<(), AttachError> {
        let control = Arc::clone(&self.link.control);
        doorbell::announce_sleep(control.engine_sleeps());
        if self.consumer.is_empty() {
            let Link { bell, own_bell, connection, .. } = &*self.link;
            let fds = [bell.as_fd(), own_bell.as_fd(), connection.as_fd()];
            let ready = doorbell::sleep(&fds, timeout.min(WAIT_MAX));
            for (bit, bell) in [(0b01, bell), (0b10, own_bell)] {
                if ready & bit != 0 {
                    bell.clear();
                }
            }
        }
        doorbell::awake(control.engine_sleeps());
        if self.consumer.is_empty() && !self.link.is_connected() {
            return Err(AttachError::Lost);
        }
        Ok(())
    }
}

async fn request(
    socket: &std::path::Path,
    options: &AttachOptions,
) -> Result<v1::AttachReply, AttachError> {
    let unreachable = |reason: String| AttachError::Unreachable { path: socket.into(), reason };
    let path = socket.to_path_buf();
    let connector = tower::service_fn(move |_: tonic::transport::Uri| {
        let path = path.clone();
        async move { tokio::net::UnixStream::connect(path).await.map(TokioIo::new) }
    });
    // The address is not used: the connector knows the socket.
    let channel = tonic::transport::Endpoint::from_static("http://attach")
        .connect_with_connector(connector)
        .await
        .map_err(|error| unreachable(with_causes(&error)))?;
    let request = v1::AttachRequest {
        instance_id: options.instance_id.clone(),
        role: options.role.into(),
        model: Some(options.model.clone()),
        layout: Some((&options.layout).into()),
        grpc_address: options.grpc_address.clone(),
        max_running: options.max_running,
        pid: std::process::id(),
    };
    let reply = v1::attach_client::AttachClient::new(channel).attach(request).await;
    use tonic::Code::{FailedPrecondition, InvalidArgument, Unimplemented};
    reply.map(tonic::Response::into_inner).map_err(|status| match status.code() {
        // What it says after it has looked at the request. Everything else is a node that cannot
        // take an engine just now, or that was lost in the middle of the call.
        InvalidArgument | FailedPrecondition | Unimplemented => {
            AttachError::Refused(status.message().into())
        }
        _ => unreachable(status.message().into()),
    })
}

/// An error with its causes, which the transport hides behind "transport error".
fn with_causes(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text = format!("{text}: {error}");
        cause = error.source();
    }
    text
}
