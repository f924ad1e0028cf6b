//! What the domain asks of a network card, whoever drives it: libibverbs (`verbs`), or libfabric (`efa`).
//! Cards do not learn what a path, a frame or a session is; the domain does not learn what a queue pair is.
//!
//! A *pipe* is one end of a one-way connection with one peer: lane 0 carries messages, the lanes after it
//! writes. Whether what a writer posts on one lane is done in order is a capability of the card
//! ([`Bounds::order`]); nothing holds between lanes. What holds of every card: a post that is told to be
//! done has landed with its last byte, and an immediate is told when all of its own post has landed. The
//! host posts: no card here lets a device do it.
//!
//! No call waits for a peer; what the system may ask the network for is asked before, elsewhere
//! ([`Card::seek`]). Some take a system call (`open`, `accept`, `connect`, `cut`, `discard`): they are made
//! when connections come and go. What takes long in proportion to memory (`CardMemory::register`, dropping
//! what `forget` returns) is never called by the worker.

use std::fmt;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use kvasir_transfer_core::signal::Ordering;

use super::seek::Seek;
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
    /// To nothing of the peer's: whether it arrives is all that is asked.
    Nowhere,
}

#[derive(Debug, Clone)]
pub(crate) struct Post {
    pub(crate) from: From,
    pub(crate) to: To,
    /// Counted at the peer when all bytes of this post have landed.
    pub(crate) imm: Option<u32>,
    pub(crate) tag: u32,
    /// Not before prior reads and atomics on its lane are done. Cards without a fence ignore it.
    pub(crate) is_fenced: bool,
    /// Its end is told; otherwise the next one that is told on its lane stands for it too. Where nothing
    /// is in order each one is told.
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
    /// What is placed in regions here may become visible in any order, until a `Landed` speaks for it.
    pub(crate) is_relaxed: bool,
    /// What is known of the posts of one lane.
    pub(crate) order: Ordering,
    /// A writer is told when a peer's card refuses a post. Otherwise nothing is posted to regions that the peer
    /// itself was not asked about.
    pub(crate) tells_refusals: bool,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Event {
    /// This post is done, and where the card acknowledges in order all before it on its lane are: the peer
    /// has every byte.
    Done { lane: usize, tag: u32 },
    /// It is not done; where the card acknowledges in order, all before it on its lane are. Nothing more
    /// moves through the pipe. Without a tag it is not known which.
    Failed { lane: usize, tag: Option<u32>, failure: Failure },
    /// A peer's write with an immediate has landed; where the card is in order, with all that was posted
    /// before it on its lane. Of how many bytes it was a card may not know; then there are none.
    Landed { imm: u32, bytes: u64 },
    /// Of a target: memory was withdrawn, and what its writer has posted may still land there. The writer is to
    /// be asked to say when all of that is done ([`Card::settled`]), and the pipe to be cut where it does not.
    Settle { ticket: u64 },
    /// A piece of a message. Where the card is not in order, pieces come in any.
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

    /// What is to be done, on a thread that may wait, before `accept` or `connect` with what a peer has told.
    /// `None` where neither waits for the network.
    fn seek(&self, _peer: &[u8]) -> Option<Seek> {
        None
    }
    /// A writer's end. Returns what the peer must be told.
    fn open(&mut self, pipe: PipeId) -> Result<Vec<u8>, CardError>;
    /// The other end of what a writer has told. Returns what it must be told; from then on what it writes
    /// is taken.
    fn accept(&mut self, pipe: PipeId, writer: &[u8]) -> Result<Vec<u8>, CardError>;
    /// A writer's end, with what it was told.
    fn connect(&mut self, pipe: PipeId, target: &[u8]) -> Result<(), CardError>;
    /// Whether it is connected: where cards tell each other by themselves, it takes longer than `connect`,
    /// and what they say may get lost.
    fn is_connected(&self, _pipe: PipeId) -> bool {
        true
    }
    /// Says again what has had no answer.
    fn ask_again(&mut self, _pipe: PipeId) {}
    /// How many posts the lane takes now.
    fn room(&self, pipe: PipeId, lane: usize) -> usize;
    /// All of them, in order where the card has one. After an error the pipe is of no use any more.
    fn post(&mut self, pipe: PipeId, lane: usize, posts: &[Post]) -> Result<(), CardError>;
    /// The writer of a target's pipe has said so, of this and of all earlier tickets.
    fn settled(&mut self, _pipe: PipeId, _ticket: u64) {}
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
    /// Something that has happened is kept back, until so many polls later.
    fn holds_back(&self) -> bool {
        false
    }
    /// Makes `wake_fd` readable when something happens after the next `poll`.
    fn arm(&mut self) -> Result<(), CardError>;
    fn wake_fd(&self) -> BorrowedFd<'_>;
    /// Takes what made `wake_fd` readable.
    fn clear_wake(&mut self);
    /// Readable when the card reports something on its own; see [`Card::look_at_reports`].
    fn report_fd(&self) -> BorrowedFd<'_>;
    /// What has come from strangers since.
    fn take_refused_datagrams(&mut self) -> u64 {
        0
    }
    /// `Err` when the card is of no use any more.
    fn look_at_reports(&mut self) -> Result<(), CardError>;
}
