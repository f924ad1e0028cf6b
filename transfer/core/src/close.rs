//! What the two halves say to each other when a path has failed. The sender asks about what it put on
//! the path and never heard of; the receiver drains the path first, so that its answer stays true.

/// Names a path within its session. Given by the sender, never used twice in one session.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PathIndex(pub u32);

/// "Close this path: what of these has landed?"
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CloseRequest {
    pub path: PathIndex,
    /// Every immediate that has undecided frames on the path, once.
    pub counted: Vec<Counted>,
    /// The undecided messages.
    pub messages: Vec<u64>,
}

/// What the sender knows of one immediate on one path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Counted {
    pub imm: u32,
    /// Counts that are known to have landed through the path, since the path began.
    pub landed: u64,
    /// Counts that were put on the path and never heard of.
    pub undecided: u64,
}

/// What has become of them. Nothing lands through the path any more.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CloseVerdict {
    /// The path is not known, or not any more: nobody can say anything of what was on it.
    pub forgotten: bool,
    /// Immediates of which everything has landed.
    pub landed: Vec<u32>,
    /// Immediates of which nobody can say: their writes must neither be sent again nor called landed.
    pub unknown: Vec<u32>,
    /// Messages that were delivered.
    pub delivered: Vec<u64>,
}
