//! The node's end of one attached engine's line: what the engine is, how far it is with its steps, what it was told to
//! stop, and its pool.

use std::os::fd::BorrowedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use kvasir_blocks::moving::engine_stops::{EngineStops, Progress};
use kvasir_proto::{SlotLayout, v1};
use prost::Message;

use super::line::{Broken, Line, LineError};
use super::steps::Steps;
use crate::pool::Pool;

/// See the module.
#[derive(Debug)]
pub(crate) struct Session {
    pub instance: v1::InstanceDescription,
    pub steps: Steps,
    pub line: Line,
    /// When somebody last said what the engine plays.
    pub role_set_ms: Option<u64>,
    /// Stops that the engine has been told, and when it is expelled instead.
    pub stops: EngineStops,
    /// Pages of its own, while it is listened to.
    pub pool: Option<Arc<Pool>>,
}

impl Session {
    /// Hands the descriptors over, those of `memory` first, and takes the engine on.
    ///
    /// # Errors
    /// When the engine is gone again or the host has no descriptors left.
    pub(crate) fn open(
        instance: v1::InstanceDescription,
        layout: &SlotLayout,
        memory: &[BorrowedFd<'_>],
        connection: UnixStream,
    ) -> Result<Self, LineError> {
        let line = Line::open(instance.attach_epoch, memory, connection)?;
        // A layout of more layers is refused before.
        let steps = Steps::new(layout.layers() as u16);
        let stops = EngineStops::default();
        Ok(Session { instance, steps, line, role_set_ms: None, stops, pool: None })
    }

    /// What others see of it.
    pub(crate) fn describe(&self) -> v1::AttachedInstance {
        let load = self.line.control().load();
        v1::AttachedInstance { description: Some(self.instance.clone()), load: Some(load) }
    }

    /// What the engine has finished. Read it before a message is acted on: what was stored before
    /// the message was sent is then seen.
    pub(crate) fn progress(&self) -> Option<Progress> {
        self.line.control().progress(self.line.epoch().0)
    }

    /// The next message of the engine.
    ///
    /// # Errors
    /// [`Broken`].
    pub(crate) fn next(&mut self) -> Result<Option<v1::engine_to_node::Message>, Broken> {
        self.line.next()?.map(message).transpose()
    }

    /// Sends a message, or keeps it until the ring has room.
    ///
    /// # Errors
    /// [`Broken`] when the engine has not taken anything for too long.
    pub(crate) fn send(&mut self, message: v1::node_to_engine::Message) -> Result<(), Broken> {
        self.line.send(v1::NodeToEngine { message: Some(message) }.encode_to_vec())
    }
}

/// What a record of an engine says.
pub(crate) fn message(record: &[u8]) -> Result<v1::engine_to_node::Message, Broken> {
    let decoded = v1::EngineToNode::decode(record);
    let message = decoded
        .map_err(|error| Broken(format!("cannot decode a message of the engine: {error}")))?
        .message;
    message.ok_or_else(|| Broken("the message is empty".into()))
}
