//! One session with one peer, on the sending side: what is queued for it, the paths it has, and the
//! paths that failed and were not closed yet.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use crate::close::{CloseRequest, PathIndex};
use crate::messages::WINDOW;
use crate::op::OpId;
use crate::path::{Ledger, OnWire, Path};

/// Names a session. Chosen by the shell, never used twice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SessionId(pub u64);

#[derive(Debug)]
pub(crate) struct Session {
    /// Go first: they are short, and someone waits for them.
    pub(crate) messages: VecDeque<OpId>,
    /// Seals of split writes whose bytes have all landed.
    pub(crate) seals: VecDeque<Seal>,
    /// What was on a failed path and did not land.
    pub(crate) again: VecDeque<Again>,
    pub(crate) writes: VecDeque<OpId>,
    pub(crate) paths: BTreeMap<PathIndex, Path>,
    pub(crate) closing: BTreeMap<PathIndex, Closing>,
    /// Its loss is to be noticed while nothing is under way, too.
    pub(crate) wanted: bool,
    /// Whether it has had a path.
    pub(crate) was_up: bool,
    /// Since when it has had no path.
    pub(crate) pathless_us: u64,
    next_message: u64,
    /// Messages that were put on a path and whose fate is open.
    open_messages: BTreeSet<u64>,
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct Seal {
    pub(crate) op: OpId,
    pub(crate) write: usize,
}

/// A range of a logical write.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Again {
    pub(crate) op: OpId,
    pub(crate) write: usize,
    pub(crate) start: u64,
    pub(crate) bytes: u64,
    /// It was one frame, and may be one again.
    pub(crate) whole: bool,
}

/// A path that has failed. What was on it is undecided until the receiver has closed it.
#[derive(Debug)]
pub(crate) struct Closing {
    pub(crate) frames: Vec<OnWire>,
    /// Of the path.
    pub(crate) ledger: Ledger,
    pub(crate) request: CloseRequest,
    /// The path through which the receiver was asked last, while that one is up.
    pub(crate) through: Option<PathIndex>,
    pub(crate) was_asked: bool,
}

impl Session {
    pub(crate) fn new(now_us: u64) -> Self {
        Session {
            messages: VecDeque::new(),
            seals: VecDeque::new(),
            again: VecDeque::new(),
            writes: VecDeque::new(),
            paths: BTreeMap::new(),
            closing: BTreeMap::new(),
            wanted: false,
            was_up: false,
            pathless_us: now_us,
            next_message: 0,
            open_messages: BTreeSet::new(),
        }
    }

    /// Whether the peer owes something on this path: an acknowledgement, or an answer.
    pub(crate) fn is_owed(&self, index: PathIndex) -> bool {
        let on_wire = self.paths.get(&index).is_some_and(|path| path.wire.outstanding > 0);
        on_wire || self.closing.values().any(|closing| closing.through == Some(index))
    }

    /// Whether it has nothing to send and waits for nothing.
    pub(crate) fn is_idle(&self) -> bool {
        let queued = !self.messages.is_empty()
            || !self.seals.is_empty()
            || !self.again.is_empty()
            || !self.writes.is_empty();
        let outstanding = self.paths.values().any(|path| path.wire.outstanding > 0);
        self.was_up && !queued && !outstanding && self.closing.is_empty()
    }

    /// Every frame whose fate is open.
    pub(crate) fn into_frames(self) -> impl Iterator<Item = OnWire> {
        let on_paths = self.paths.into_values().flat_map(|mut path| path.wire.drain());
        on_paths.chain(self.closing.into_values().flat_map(|closing| closing.frames))
    }

    // ---- messages ----

    /// Whether a message may be sent for the first time: receivers remember only so many.
    pub(crate) fn may_open_message(&self) -> bool {
        self.open_messages.first().is_none_or(|oldest| self.next_message - oldest < WINDOW)
    }

    pub(crate) fn open_message(&mut self) -> u64 {
        let id = self.next_message;
        self.next_message += 1;
        self.open_messages.insert(id);
        id
    }

    pub(crate) fn message_ended(&mut self, id: u64) {
        self.open_messages.remove(&id);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_message_is_so_far_ahead_that_the_receiver_forgets_an_open_one() {
        let mut session = Session::new(0);
        let first = session.open_message();
        for _ in 1..WINDOW {
            assert!(session.may_open_message());
            let id = session.open_message();
            session.message_ended(id);
        }
        assert!(!session.may_open_message());
        session.message_ended(first);
        assert!(session.may_open_message());
    }
}
