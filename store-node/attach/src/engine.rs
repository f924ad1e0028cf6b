//! What an engine links to attach to the store node of its host.
//!
//! [`EngineAttachment::connect`] once, then [`EngineAttachment::split`]: the [`Sender`] belongs to
//! the thread that computes, the [`Receiver`] to one that waits for the node's answers. Neither
//! makes a system call while the node is awake. [`Link`] is what both share and any thread may ask.
//!
//! When the last of them is dropped the engine says goodbye: from then on it must not touch slot
//! memory, and the node gives its slots to others.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use kvasir_blocks::moving::engine_stops::Progress;
use kvasir_proto::{SlotLayout, v1};
use kvasir_transfer::memory::{Access, SharedMemory};
use prost::Message;

use crate::line::{self, Line, LineDescriptors, LineReceiver, LineSender};
use crate::{AttachError, BoxFuture};

/// What an engine says of itself.
#[derive(Debug, Clone)]
pub struct AttachOptions {
    /// The node's directory, with `attach.sock` in it.
    pub attach_dir: PathBuf,
    pub instance_id: String,
    /// What it runs on, as its operator calls it; may be empty.
    pub instance_type: String,
    pub role: v1::Role,
    pub model: v1::ModelDescription,
    pub layout: SlotLayout,
    /// Where this engine answers `Engine` calls, as "host:port".
    pub engine_address: String,
    /// Sequences it decodes at once, at most.
    pub running_requests_max: u32,
    /// Its own pages, when it has some.
    pub pool: Option<v1::PoolDescription>,
}

/// What sender and receiver share.
#[derive(Debug)]
pub struct Link {
    line: Arc<Line>,
    slots_total: u32,
    slots: Arc<SharedMemory>,
    pool: Option<Arc<SharedMemory>>,
}

impl Link {
    /// Which attach of the node this is.
    pub fn epoch(&self) -> u32 {
        self.line.epoch()
    }

    pub fn slots_total(&self) -> u32 {
        self.slots_total
    }

    /// The node's slots: slot `i` begins at `i * slot_bytes`. Only bound and granted slots may be
    /// touched, and only bytes of pages that are not cached may be written.
    pub fn slot_memory(&self) -> &Arc<SharedMemory> {
        &self.slots
    }

    /// The engine's own pages, where it asked for memory of the host. Pages that are held or being filled must not be
    /// written, nor layers of pages that it computes there (`StepPages::pool_pages`) once it has said that they are done.
    pub fn pool_memory(&self) -> Option<&Arc<SharedMemory>> {
        self.pool.as_ref()
    }

    /// False once the node is gone or has detached this engine. Slots must then not be written.
    pub fn is_connected(&self) -> bool {
        self.line.is_connected()
    }

    /// Publishes what the engine is doing, for admission. Any thread; cheap.
    pub fn publish_load(&self, load: &v1::InstanceLoad) {
        self.line.control().set_load(load);
    }

    /// Wakes a [`Receiver::wait`] from another thread of the engine.
    pub fn wake(&self) {
        self.line.wake();
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
    pub fn connect(options: AttachOptions) -> BoxFuture<Result<Self, AttachError>> {
        let request = v1::AttachRequest {
            instance_id: options.instance_id,
            instance_type: options.instance_type,
            role: options.role.into(),
            model: Some(options.model),
            layout: Some((&options.layout).into()),
            engine_address: options.engine_address,
            running_requests_max: options.running_requests_max,
            pid: 0,
            pool: options.pool,
        };
        EngineAttachment::request(options.attach_dir, request)
    }

    /// Attaches with a request as it goes over the wire, for engines in other languages. Its `pid` is that of
    /// this process, whatever it says.
    ///
    /// # Errors
    /// As [`EngineAttachment::connect`].
    pub fn request(
        attach_dir: PathBuf,
        request: v1::AttachRequest,
    ) -> BoxFuture<Result<Self, AttachError>> {
        Box::pin(EngineAttachment::request_attach(attach_dir, request))
    }

    async fn request_attach(
        attach_dir: PathBuf,
        request: v1::AttachRequest,
    ) -> Result<Self, AttachError> {
        let socket = attach_dir.join("attach.sock");
        let request = v1::AttachRequest { pid: std::process::id(), ..request };
        let channel = line::channel(&socket).await?;
        let reply = v1::attach_client::AttachClient::new(channel).attach(request).await;
        let reply = reply.map_err(|status| line::refused(&socket, &status))?.into_inner();
        tokio::task::spawn_blocking(move || EngineAttachment::take_descriptors(&attach_dir, &reply))
            .await
            .map_err(|error| AttachError::Protocol(error.to_string()))?
    }

    fn take_descriptors(
        dir: &std::path::Path,
        reply: &v1::AttachReply,
    ) -> Result<Self, AttachError> {
        let path = dir.join(&reply.descriptor_socket);
        let has_pool = reply.pool_memory_bytes > 0;
        let (connection, slots, pool, control, node_ringer, bell) = if has_pool {
            let (connection, [slots, pool, control, node_ringer, bell]) =
                line::take_descriptors(&path, &reply.token)?;
            (connection, slots, Some(pool), control, node_ringer, bell)
        } else {
            let (connection, [slots, control, node_ringer, bell]) =
                line::take_descriptors(&path, &reply.token)?;
            (connection, slots, None, control, node_ringer, bell)
        };
        let pool_bytes = usize::try_from(reply.pool_memory_bytes).unwrap_or(usize::MAX);
        let map = |fd| SharedMemory::from_fd(fd, pool_bytes, Access::ReadWrite);
        let pool = pool.map(map).transpose()?;
        if let Some(pool) = &pool {
            pool.populate();
        }
        let slot_bytes = usize::try_from(reply.slot_memory_bytes).unwrap_or(usize::MAX);
        let slots = SharedMemory::from_fd(slots, slot_bytes, Access::ReadWrite)?;
        slots.populate();
        let descriptors = LineDescriptors { control, node_ringer, bell };
        let (to_node, from_node) = Line::open(reply.attach_epoch, descriptors, connection)?;
        let link = Arc::new(Link {
            line: Arc::clone(to_node.line()),
            slots_total: reply.slots_total,
            slots: Arc::new(slots),
            pool: pool.map(Arc::new),
        });
        Ok(EngineAttachment {
            sender: Sender { link: Arc::clone(&link), to_node, record: Vec::new() },
            receiver: Receiver { link, from_node },
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
        self.sender.link.epoch()
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
    to_node: LineSender,
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
        self.to_node.send(&self.record)
    }

    /// Says that layers `[0, layers_done)` of `step` are written, into slots or into the pool as its plan says.
    /// Everything written before is visible to the node; what a device writes must be complete, not only enqueued.
    pub fn progress(&self, step: u32, layers_done: u16) {
        let line = &self.link.line;
        line.control().set_progress(line.epoch(), Progress { step, layers_done });
        line.wake_node();
    }
}

/// The consuming end: the node's answers. Not `Clone`: the ring has one consumer.
#[derive(Debug)]
pub struct Receiver {
    link: Arc<Link>,
    from_node: LineReceiver,
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
        let Some(record) = self.from_node.try_recv()? else { return Ok(None) };
        message(record).map(Some)
    }

    /// The next `NodeToEngine` as the node has encoded it, if there is one.
    ///
    /// # Errors
    /// As [`Receiver::try_recv`], but for what is no message, which is left to the caller.
    pub fn try_recv_encoded(&mut self) -> Result<Option<&[u8]>, AttachError> {
        self.from_node.try_recv()
    }

    /// Sleeps until a message is there, somebody called [`Link::wake`], or the time is over.
    ///
    /// # Errors
    /// [`AttachError::Lost`] when the node is gone and every message was taken.
    pub fn wait(&mut self, timeout: Duration) -> Result<(), AttachError> {
        self.from_node.wait(timeout)
    }
}

/// What a record of a node says.
pub(crate) fn message(record: &[u8]) -> Result<v1::node_to_engine::Message, AttachError> {
    let decoded = v1::NodeToEngine::decode(record);
    let message = decoded.map_err(|error| AttachError::Protocol(error.to_string()))?.message;
    message.ok_or_else(|| AttachError::Protocol("the message is empty".into()))
}
