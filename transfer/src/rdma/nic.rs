//! What the domain asks of a network card, whoever drives it: libibverbs today (`verbs`), libfabric behind
//! the same seam. Cards do not learn what a path, a frame or a session is; the domain does not learn what a
//! queue pair is.
//!
//! A *pipe* is one end of a one-way connection with one peer: lane 0 carries messages, the lanes after it
//! writes. What a writer posts on one lane is done in order or not at all; nothing holds between lanes.
//!
//! No call waits for a peer. Some take a system call (`open`, `accept`, `connect`, `cut`, `discard`): they are made
//! when connections come and go. What takes long in proportion to memory (`CardMemory::register`, dropping
//! what `forget` returns) is never called by the worker.

use std::fmt;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use crate::memory::SharedMemory;
use crate::payload::Payload;

/// The lane of messages.
pub(crate) const MESSAGES: usize = 0;

/// Names a pipe of this engine; never used twice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct PipeId(pub(crate) u64);

/// Where a region begins for peers, and what admits them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Place {
    pub(crate) address: u64,
    pub(crate) key: u64,
}

/// The bytes that a post carries.
#[derive(Debug, Clone)]
pub(crate) enum From {
    Nothing,
    /// A range of registered memory, by the key of its region.
    Region {
        key: u64,
        offset: u64,
        bytes: u64,
    },
    /// Copied while posting: at most `Bounds::inline_bytes`.
    Inline {
        payload: Payload,
        offset: u64,
        bytes: u64,
    },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum To {
    /// At the peer, as it described it.
    Memory(Place),
    /// Whatever the peer has ready for messages.
    Message,
}

#[derive(Debug, Clone)]
pub(crate) struct Post {
    pub(crate) from: From,
    pub(crate) to: To,
    /// Counted at the peer when all bytes of this post have landed.
    pub(crate) imm: Option<u32>,
    pub(crate) tag: u32,
    /// Its end is told; otherwise the next one that is told on its lane stands for it too.
    pub(crate) is_told: bool,
}

/// How large posts may be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Bounds {
    /// Of a writer's pipe, that of messages among them.
    pub(crate) lanes: usize,
    pub(crate) inline_bytes: u64,
    /// Of one post.
    pub(crate) post_bytes: u64,
    /// Of one message's piece.
    pub(crate) piece_bytes: usize,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Event {
    /// This post and all before it on its lane are done: the peer has every byte.
    Done { lane: usize, tag: u32 },
    /// All before it on its lane are done, and it is not. Nothing more moves through the pipe. Without a
    /// tag it is not known which.
    Failed { lane: usize, tag: Option<u32>, failure: Failure },
    /// A peer's write with an immediate has landed with all that was posted before it on its lane.
    Landed { imm: u32, bytes: u64 },
    /// A piece of a message.
    Piece(Vec<u8>),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Failure {
    /// The peer's card does not let this memory be written.
    Refused,
    /// The way to the peer, the peer, or the card.
    Broken,
}

/// A sentence: callers do without the card, or without this pipe, and tell a person.
#[derive(Debug, thiserror::Error)]
#[error("{what}")]
pub(crate) struct CardError {
    pub(crate) what: String,
    #[source]
    pub(crate) source: Option<Box<dyn std::error::Error + Send + Sync>>,
}

impl CardError {
    pub(crate) fn new(what: impl Into<String>) -> Self {
        CardError { what: what.into(), source: None }
    }

    /// With its reasons.
    pub(crate) fn sentence(&self) -> String {
        let mut sentence = self.what.clone();
        let mut cause = std::error::Error::source(self);
        while let Some(reason) = cause {
            let reason_text = reason.to_string();
            if !sentence.ends_with(&reason_text) {
                sentence = format!("{sentence}: {reason_text}");
            }
            cause = reason.source();
        }
        sentence
    }

    pub(crate) fn because(
        what: impl Into<String>,
        source: impl std::error::Error + Send + Sync + 'static,
    ) -> Self {
        CardError { what: what.into(), source: Some(Box::new(source)) }
    }
}

/// Registers memory, on the threads of callers.
pub(crate) trait CardMemory: fmt::Debug + Send + Sync {
    /// The worker takes it over with [`Card::adopt`].
    fn register(&self, key: u64, memory: &Arc<SharedMemory>) -> Result<Place, CardError>;
}

/// A card that is open: what the worker drives, and what callers register with.
pub(crate) type Opened = (Box<dyn Card>, Arc<dyn CardMemory>);

/// A card, owned by one worker.
pub(crate) trait Card: fmt::Debug + Send {
    /// What peers must know to tell whether they can reach it.
    fn address(&self) -> Vec<u8>;
    fn may_reach(&self, peer: &[u8]) -> bool;
    fn bounds(&self) -> Bounds;

    // ---- memory ----

    fn adopt(&mut self, key: u64);
    fn place(&self, key: u64) -> Option<Place>;
    /// From the drop of what is returned on, nothing lands in the region and nothing is read from it.
    fn forget(&mut self, key: u64) -> Option<Box<dyn Send>>;

    // ---- pipes ----

    /// A writer's end. Returns what the peer must be told.
    fn open(&mut self, pipe: PipeId) -> Result<Vec<u8>, CardError>;
    /// The other end of what a writer has told. Returns what it must be told; from then on what it writes
    /// is taken.
    fn accept(&mut self, pipe: PipeId, writer: &[u8]) -> Result<Vec<u8>, CardError>;
    /// A writer's end, with what it was told.
    fn connect(&mut self, pipe: PipeId, target: &[u8]) -> Result<(), CardError>;
    /// How many posts the lane takes now.
    fn room(&self, pipe: PipeId, lane: usize) -> usize;
    /// All of them, in order. After an error the pipe is of no use any more.
    fn post(&mut self, pipe: PipeId, lane: usize, posts: &[Post]) -> Result<(), CardError>;
    /// From now on nothing more is let in or out. What has landed is still told.
    fn cut(&mut self, pipe: PipeId);
    /// After `cut`: nothing lands any more, and everything that has landed was polled.
    fn is_drained(&self, pipe: PipeId) -> bool;
    /// When it returns, nothing of the pipe is under way any more, in either direction. What was not
    /// polled yet is not told.
    fn discard(&mut self, pipe: PipeId);

    // ---- what happens ----

    /// Appends what has happened since. Bounded: when it answers `true` there may be more.
    fn poll(&mut self, events: &mut Vec<(PipeId, Event)>) -> Result<bool, CardError>;
    /// Makes `wake_fd` readable when something happens after the next `poll`.
    fn arm(&mut self) -> Result<(), CardError>;
    fn wake_fd(&self) -> BorrowedFd<'_>;
    /// Takes what made `wake_fd` readable.
    fn clear_wake(&mut self);
    /// Readable when the card reports something on its own; see [`Card::look_at_reports`].
    fn report_fd(&self) -> BorrowedFd<'_>;
    /// `Err` when the card is of no use any more.
    fn look_at_reports(&mut self) -> Result<(), CardError>;
}
