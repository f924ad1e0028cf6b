//! What a completion queue tells.

use crate::error::OperationError;

/// The caller's name for an operation; comes back with its completion.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Token(pub u64);

/// The 32 bits that travel with a write and are told to the receiver (`FI_REMOTE_CQ_DATA`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Immediate(pub u32);

/// A peer's number in its address vector: see [`Peer::id`](crate::address::Peer::id).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PeerId(pub u64);

/// Kinds of operations.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Operation {
    Write,
    Read,
    Send,
    Receive,
}

/// One entry of a completion queue. Nothing is said about their order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Completion {
    /// An operation of this side is complete. A write is then in the peer's memory. `bytes` is how
    /// many were moved; for a receive, how long the message was.
    Done { token: Token, operation: Operation, bytes: usize },
    /// An operation of this side failed. What of it reached the peer is not known.
    Failed { token: Token, operation: Operation, error: OperationError },
    /// A peer's write with an immediate has landed, all of it. Who wrote is known where it was
    /// [asked for](crate::info::InfoRequest::arrival_sources) and the provider knows.
    Arrived { immediate: Immediate, from: Option<PeerId> },
    /// Something failed that no operation of this side stands for: a peer's write was refused, or a
    /// connection broke. To be logged and counted.
    Trouble { error: OperationError },
}
