//! What comes to the node's thread from elsewhere: commands from gRPC, the ends of transfers, and
//! messages of peers. Each has a bounded queue of its own.
//!
//! - Commands: when full, the caller is told to come again.
//! - Ends of transfers: bounded by what the node has under way (see `ENDS_MAX`), so never full.
//! - Reports of the thread beside the SSD: when full, that thread waits; it owes nobody anything else. The same of
//!   the task that talks to the object store.
//! - Messages of peers: when full, dropped and counted; a peer that needs an answer asks again or
//!   cuts this node off.

use std::sync::Arc;
use std::sync::atomic::AtomicU32;
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};

use kvasir_blocks::moving::push::Group;
use kvasir_blocks::moving::writers::CutRound;
use kvasir_proto::Share;
use kvasir_transfer::doorbell;
use kvasir_transfer::{Outcome, PeerEvent, PeerId};
use prometheus::IntCounter;
use tokio::sync::mpsc;

use super::command::Command;
use super::owner::Failure;
use super::{SHARES_MAX, WRITES_MAX};
use crate::bucket::jobs::{self, Reports};
use crate::pool::copier::Copied;
use crate::ssd::thread::Report;

const COMMANDS_MAX: usize = 1024;
const MESSAGES_MAX: usize = 4096;
const REPORTS_MAX: usize = 1024;
/// Each group under way (at least one write) ends once; each share has one counter, one tail, one
/// drain, one message and one end of its routes at a time; failures are told to so many at a time, and each order for
/// objects has a share at least; of pages as many are copied at once as blocks may rise, and some layers; the rest is for the few
/// operations on writers.
const ENDS_MAX: usize = WRITES_MAX + 7 * SHARES_MAX + 2048 + 4096;

/// The end of something that the transfer engine did.
#[derive(Debug)]
pub(crate) enum End {
    Group(GroupEnd),
    Tail {
        share: Share,
        push: u64,
        outcome: Outcome,
    },
    Drained {
        share: Share,
        push: u64,
        outcome: Outcome,
    },
    /// An immediate reached its count, or never will.
    Counted {
        share: Share,
        imm: u32,
        outcome: Outcome,
    },
    /// One of the operations that cut a writer off.
    Cut {
        writer: u64,
        round: CutRound,
        outcome: Outcome,
    },
    /// A message to a peer was handed over or not.
    Sent {
        share: Share,
        outcome: Outcome,
    },
    /// A writer whose connection was lost was found or not.
    Probed {
        writer: u64,
        outcome: Outcome,
    },
    /// A receiver was told of a failed push or not.
    Told {
        failure: Box<Failure>,
        outcome: Outcome,
    },
    /// Another node was asked for objects, or could not be.
    Ordered {
        fetch: u64,
        outcome: Outcome,
    },
    /// No query reads what a share has pinned any more.
    RoutesClosed {
        share: Share,
    },
    /// Pages of engines' pools, or layers of them, were copied or not.
    PagesCopied(Vec<Copied>),
    /// Who asked for a session for queries had gone when it was made.
    SessionUnwanted {
        session: u64,
    },
}

/// The end of a group of writes.
#[derive(Debug)]
pub(crate) struct GroupEnd {
    pub share: Share,
    /// Which push of the share.
    pub push: u64,
    pub group: Group,
    pub writes: usize,
    pub issued_us: u64,
    pub landed_us: u64,
    pub outcome: Outcome,
}

/// From other nodes.
#[derive(Debug)]
pub(crate) enum FromPeer {
    Message(PeerId, Vec<u8>),
    Event(PeerEvent),
}

/// The sending ends, for any thread.
#[derive(Debug, Clone)]
pub(crate) struct Post {
    commands: SyncSender<Command>,
    ends: SyncSender<End>,
    messages: SyncSender<FromPeer>,
    ssd: SyncSender<Report>,
    bucket: mpsc::Sender<jobs::Report>,
    bell: Arc<Bell>,
    messages_dropped: IntCounter,
}

/// The node thread's own doorbell.
#[derive(Debug)]
pub(crate) struct Bell {
    pub bell: doorbell::Bell,
    ringer: doorbell::Ringer,
    pub sleeping: AtomicU32,
}

impl Bell {
    fn ring(&self) {
        self.ringer.ring_if(&self.sleeping);
    }
}

/// Why a command was not taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum NotTaken {
    Busy,
    Ended,
}

impl Post {
    /// # Errors
    /// [`NotTaken`].
    pub(crate) fn command(&self, command: Command) -> Result<(), NotTaken> {
        self.commands.try_send(command).map_err(|error| match error {
            TrySendError::Full(_) => NotTaken::Busy,
            TrySendError::Disconnected(_) => NotTaken::Ended,
        })?;
        self.bell.ring();
        Ok(())
    }

    pub(crate) fn end(&self, end: End) {
        // Full cannot be (see `ENDS_MAX`); disconnected means that the node's thread has ended.
        let sent = self.ends.try_send(end);
        debug_assert!(!matches!(sent, Err(TrySendError::Full(_))), "more ends than beginnings");
        self.bell.ring();
    }

    /// Waits while there is no room.
    pub(crate) fn ssd(&self, report: Report) {
        // Refused only when the node's thread has ended.
        let _ = self.ssd.send(report);
        self.bell.ring();
    }

    /// Where the task that talks to the object store reports.
    pub(crate) fn bucket(&self) -> Reports {
        let bell = Arc::clone(&self.bell);
        Reports { sender: self.bucket.clone(), ring: Box::new(move || bell.ring()) }
    }

    pub(crate) fn peer(&self, message: FromPeer) {
        if self.messages.try_send(message).is_err() {
            self.messages_dropped.inc();
        }
        self.bell.ring();
    }
}

/// The receiving ends, for the node's thread.
#[derive(Debug)]
pub(crate) struct Inbox {
    pub commands: Receiver<Command>,
    pub ends: Receiver<End>,
    pub messages: Receiver<FromPeer>,
    pub ssd: Receiver<Report>,
    pub bucket: mpsc::Receiver<jobs::Report>,
    pub bell: Arc<Bell>,
}

/// # Errors
/// When the process has no descriptors left.
pub(crate) fn inbox(messages_dropped: IntCounter) -> std::io::Result<(Post, Inbox)> {
    let (bell, ringer) = doorbell::pair()?;
    let bell = Arc::new(Bell { bell, ringer, sleeping: AtomicU32::new(0) });
    let (commands, commands_receiver) = sync_channel(COMMANDS_MAX);
    let (ends, ends_receiver) = sync_channel(ENDS_MAX);
    let (messages, messages_receiver) = sync_channel(MESSAGES_MAX);
    let (ssd, ssd_receiver) = sync_channel(REPORTS_MAX);
    let (bucket, bucket_receiver) = mpsc::channel(jobs::REPORTS_MAX);
    let inbox = Inbox {
        commands: commands_receiver,
        ends: ends_receiver,
        messages: messages_receiver,
        ssd: ssd_receiver,
        bucket: bucket_receiver,
        bell: Arc::clone(&bell),
    };
    Ok((Post { commands, ends, messages, ssd, bucket, bell, messages_dropped }, inbox))
}
