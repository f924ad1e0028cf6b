//! How an operation ends. Every operation ends in exactly one of these, by its deadline.

/// `Ok` means: landed (a write), taken by the peer's engine for its handler (a message), reached (a count).
pub type Outcome = Result<(), WriteError>;

/// Why an operation did not do what was asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum WriteError {
    /// The receiver (or, in shared memory, the check under the receiver's table) said no. Nothing
    /// landed.
    #[error("the receiver refused the operation: {0}")]
    Refused(Refusal),
    /// The bytes did not have the checksum that was given. They may lie in the target, uncounted.
    #[error("the bytes failed their checksum")]
    Corrupt,
    /// The path to the peer was lost. What had been issued may or may not land: the receiver can
    /// make sure with a cut-off, the sender cannot.
    #[error("the peer or the path to it is gone")]
    PeerGone,
    /// Not acknowledged in time. It may still land; draining its group waits for that.
    #[error("the operation did not end before its deadline")]
    DeadlineExceeded,
    /// Taken back before it was issued in full, or the engine is stopping.
    #[error("the operation was cancelled")]
    Cancelled,
}

/// Why a receiver does not take a write or a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, thiserror::Error)]
pub enum Refusal {
    #[error("no region has this key")]
    UnknownRegion,
    #[error("the region was revoked")]
    Revoked,
    #[error("the region belongs to an earlier incarnation")]
    StaleIncarnation,
    #[error("the access is outside the region")]
    OutOfBounds,
    /// Stands for "refused" where the reason is not passed on.
    #[error("the operation is malformed")]
    Malformed,
    /// Only said by this side's own counters.
    #[error("the immediate is already expected")]
    AlreadyExpected,
    /// All of the receiver's message buffers are with its application. The message may be sent again.
    #[error("the receiver has no buffer for the message now")]
    NoRoom,
    #[error("the message is longer than the receiver's buffers")]
    TooLong,
}

impl Refusal {
    /// For metrics and the wire; never reused for another meaning.
    pub const ALL: [(Refusal, u8, &'static str); 8] = [
        (Refusal::UnknownRegion, 1, "unknown_region"),
        (Refusal::Revoked, 2, "revoked"),
        (Refusal::StaleIncarnation, 3, "stale_incarnation"),
        (Refusal::OutOfBounds, 4, "out_of_bounds"),
        (Refusal::Malformed, 5, "malformed"),
        (Refusal::AlreadyExpected, 6, "already_expected"),
        (Refusal::NoRoom, 7, "no_buffer"),
        (Refusal::TooLong, 8, "too_long"),
    ];

    pub fn code(self) -> u8 {
        self.entry().1
    }

    pub fn label(self) -> &'static str {
        self.entry().2
    }

    pub fn from_code(code: u8) -> Option<Refusal> {
        Self::ALL.iter().find(|entry| entry.1 == code).map(|entry| entry.0)
    }

    fn entry(self) -> (Refusal, u8, &'static str) {
        let found = Self::ALL.iter().find(|entry| entry.0 == self);
        *found.expect("every refusal stands in the table")
    }
}
