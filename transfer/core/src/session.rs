//! One session with one peer, on the sending side: what is queued for it, the paths it has, and the
//! paths that failed and were not closed yet.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::Bound;

use crate::close::{CloseRequest, PathIndex};
use crate::messages::WINDOW;
use crate::op::{Op, OpId};
use crate::path::{Ledger, OnWire, Path};
use crate::rails::{Rails, Up};
use crate::unsuited::Unsuited;

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
    /// Puts and their signals, in order. All go by one path while it lasts.
    pub(crate) pinned: VecDeque<OpId>,
    pub(crate) pinned_path: Option<PathIndex>,
    pub(crate) writes: Writes,
    /// Batches that name it and are not over.
    pub(crate) batches: usize,
    pub(crate) paths: BTreeMap<PathIndex, Path>,
    pub(crate) closing: BTreeMap<PathIndex, Closing>,
    pub(crate) unsuited: Unsuited,
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

/// Writes that are not cut to their end, by the rails that suit them.
#[derive(Debug, Default)]
pub(crate) struct Writes {
    queues: BTreeMap<Rails, VecDeque<OpId>>,
    /// Whose turn it was last, so that none waits for ever behind another one.
    served: Option<Rails>,
}

impl Writes {
    pub(crate) fn push(&mut self, rails: Rails, op: OpId) {
        self.queues.entry(rails).or_default().push_back(op);
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.queues.is_empty()
    }

    /// Other rails suit some of them now.
    pub(crate) fn requeue(&mut self, mut rails_of: impl FnMut(Rails, OpId) -> Rails) {
        for (rails, queue) in std::mem::take(&mut self.queues) {
            for op in queue {
                self.push(rails_of(rails, op), op);
            }
        }
    }

    /// The first one of the next queue of which `may` says that it may be served.
    pub(crate) fn next(&mut self, may: impl Fn(Rails) -> bool) -> Option<(Rails, OpId)> {
        let after = self
            .queues
            .range((self.served.map_or(Bound::Unbounded, Bound::Excluded), Bound::Unbounded));
        let before = self.served.map(|served| self.queues.range(..=served));
        let mut queues = after.chain(before.into_iter().flatten());
        let (rails, queue) = queues.find(|(rails, _)| may(**rails))?;
        let (rails, op) = (*rails, *queue.front()?);
        self.served = Some(rails);
        Some((rails, op))
    }

    /// The first one of a queue is cut to its end.
    pub(crate) fn pop(&mut self, rails: Rails) {
        let Some(queue) = self.queues.get_mut(&rails) else { return };
        queue.pop_front();
        if queue.is_empty() {
            self.queues.remove(&rails);
        }
    }
}

impl Session {
    pub(crate) fn new(now_us: u64) -> Self {
        Session {
            messages: VecDeque::new(),
            seals: VecDeque::new(),
            again: VecDeque::new(),
            pinned: VecDeque::new(),
            pinned_path: None,
            writes: Writes::default(),
            batches: 0,
            paths: BTreeMap::new(),
            closing: BTreeMap::new(),
            unsuited: Unsuited::default(),
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

    /// The write of which the path `index` cuts off the next piece.
    pub(crate) fn next_write(&mut self, index: PathIndex) -> Option<(Rails, OpId)> {
        let Session { writes, paths, .. } = self;
        writes.next(|rails| may_take(paths, rails, index))
    }

    /// Whether it is the path of puts and their signals; it becomes it when there is none, and it carries the
    /// next of them, which these rails do not.
    pub(crate) fn may_pin(&mut self, index: PathIndex, kept_off: Up) -> bool {
        let rails = Rails::ANY.without(kept_off);
        if self.pinned_path.is_none() && may_take(&self.paths, rails, index) {
            self.pinned_path = Some(index);
        }
        self.pinned_path == Some(index)
    }

    /// The rails that do not carry the operation: they do not have its region, or it must be placed, and none of
    /// their paths does that.
    pub(crate) fn kept_off<P, C>(&self, op: &Op<P, C>) -> Up {
        let unsuited = self.unsuited.of(&op.body);
        if op.must_be_placed() { unsuited.with(unplacing(&self.paths)) } else { unsuited }
    }

    /// Of the paths that puts and their signals may take, the one that orders least.
    pub(crate) fn orders_least(&self) -> Option<&Path> {
        let used = used(&self.paths, Rails::ANY);
        let of_used = usable(&self.paths).filter(|path| used.contains(path.limits.rail));
        of_used.max_by_key(|path| path.limits.ordering)
    }

    /// What of the queue the path may take: nothing of what its rail does not carry, and of the rest what it may
    /// take of what may go by any path.
    pub(crate) fn takes_again<P, C>(&self, index: PathIndex) -> impl Fn(&Op<P, C>) -> bool {
        let any = may_take(&self.paths, Rails::ANY, index);
        move |op| match self.kept_off(op) {
            kept_off if kept_off.is_empty() => any,
            kept_off => may_take(&self.paths, Rails::ANY.without(kept_off), index),
        }
    }

    /// Whether it has nothing to send and waits for nothing.
    pub(crate) fn is_idle(&self) -> bool {
        let queued = !self.messages.is_empty()
            || !self.seals.is_empty()
            || !self.again.is_empty()
            || !self.pinned.is_empty()
            || self.batches > 0
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

/// Whether the path `index` may take a write that these rails suit: it is on one of those that are used
/// for it, and is not far ahead of another one that may take it, too. So the slices of a write are spread
/// over its paths, whichever is asked first; the one that has least on the wire always may.
fn may_take(paths: &BTreeMap<PathIndex, Path>, rails: Rails, index: PathIndex) -> bool {
    let Some(own) = paths.get(&index) else { return false };
    if paths.len() == 1 {
        return rails.may(own.limits.rail);
    }
    let used = used(paths, rails);
    let of_used = usable(paths).filter(|path| used.contains(path.limits.rail));
    let least_bytes = of_used.map(|path| path.wire.outstanding_bytes).min().unwrap_or(0);
    // By no more than one slice: less, and short writes would change the path all the time.
    let is_ahead = own.wire.outstanding_bytes >= least_bytes + own.limits.slice_bytes;
    used.contains(own.limits.rail) && !is_ahead
}

fn usable(paths: &BTreeMap<PathIndex, Path>) -> impl Iterator<Item = &Path> {
    paths.values().filter(|path| !path.given_up)
}

/// The rails of which every path that is up leaves open when its bytes are in place.
fn unplacing(paths: &BTreeMap<PathIndex, Path>) -> Up {
    let (mut placing, mut others) = (Up::default(), Up::default());
    for path in usable(paths) {
        let rails = if path.places() { &mut placing } else { &mut others };
        rails.add(path.limits.rail);
    }
    others.without(placing)
}

/// The rails that are used now.
fn used(paths: &BTreeMap<PathIndex, Path>, rails: Rails) -> Up {
    let mut up = Up::default();
    usable(paths).for_each(|path| up.add(path.limits.rail));
    rails.of(up)
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
