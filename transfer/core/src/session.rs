//! One session with one peer, on the sending side: what is queued for it, the paths it has, and the
//! paths that failed and were not closed yet.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use kvasir_mutation::{Mutation, mutated};

use crate::close::{CloseRequest, PathIndex};
use crate::messages::WINDOW;
use crate::op::{Op, OpId};
use crate::path::{Ledger, OnWire, Path};
use crate::rails::{Rail, Rails, Up};
use crate::regions::Target;
use crate::unsuited::Unsuited;
use crate::waiting::{Class, Kind, Waiting};

/// However little waits, things that have ended are not looked for among fewer.
const CROWD_MIN: usize = 1024;

/// Names a session. Chosen by the shell, never used twice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SessionId(pub u64);

#[derive(Debug)]
pub(crate) struct Session {
    /// Go first: they are short, and someone waits for them.
    pub(crate) messages: VecDeque<OpId>,
    /// Seals of split writes whose bytes have all landed.
    pub(crate) seals: Waiting<Seal>,
    /// What was on a failed path and did not land.
    pub(crate) again: Waiting<Again>,
    /// Puts and their signals, in order. All go by one path while it lasts.
    pub(crate) pinned: VecDeque<OpId>,
    pub(crate) pinned_path: Option<PathIndex>,
    /// Puts that their path does not carry, or does not place, and signals that have no place in its order: for
    /// whichever path does.
    pub(crate) aside: Waiting<OpId>,
    /// Writes that are not cut to their end.
    pub(crate) writes: Waiting<OpId>,
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
    /// So much waited when what had ended was taken out last.
    swept: usize,
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
    pub(crate) rail: Rail,
    /// What was acknowledged on it is in place.
    pub(crate) places: bool,
    pub(crate) request: CloseRequest,
    /// The path through which the receiver was asked last, while that one is up.
    pub(crate) through: Option<PathIndex>,
    pub(crate) was_asked: bool,
}

impl Session {
    pub(crate) fn new(now_us: u64) -> Self {
        Session {
            messages: VecDeque::new(),
            seals: Waiting::default(),
            again: Waiting::default(),
            pinned: VecDeque::new(),
            pinned_path: None,
            aside: Waiting::default(),
            writes: Waiting::default(),
            batches: 0,
            paths: BTreeMap::new(),
            closing: BTreeMap::new(),
            unsuited: Unsuited::default(),
            wanted: false,
            was_up: false,
            pathless_us: now_us,
            swept: 0,
            next_message: 0,
            open_messages: BTreeSet::new(),
        }
    }

    /// Whether the peer owes something on this path: an acknowledgement, or an answer.
    pub(crate) fn is_owed(&self, index: PathIndex) -> bool {
        let on_wire = self.paths.get(&index).is_some_and(|path| path.wire.outstanding > 0);
        on_wire || self.closing.values().any(|closing| closing.through == Some(index))
    }

    // ---- what waits ----

    pub(crate) fn push_write(&mut self, op: OpId, kind: Kind) {
        self.writes.push(kind, self.unsuited.rails(kind.target), op);
    }

    pub(crate) fn push_aside(&mut self, op: OpId, kind: Kind) {
        self.aside.push(kind, self.unsuited.rails(kind.target), op);
    }

    pub(crate) fn push_again(&mut self, again: Again, kind: Kind) {
        self.again.push(kind, self.unsuited.rails(kind.target), again);
    }

    pub(crate) fn push_seal(&mut self, seal: Seal, kind: Kind) {
        self.seals.push(kind, self.unsuited.rails(kind.target), seal);
    }

    /// What waits for the region is for other paths now.
    pub(crate) fn sort_anew(&mut self, target: Target) {
        let rails = self.unsuited.rails(target);
        self.seals.learned(target, rails);
        self.again.learned(target, rails);
        self.aside.learned(target, rails);
        self.writes.learned(target, rails);
    }

    /// The kind of the seal that the path `index` puts out next. What came by a card that reorders is known to be in
    /// place when that card tells of something later, or when the receiver has closed the path; what another path
    /// tells says nothing of it. So such paths come first.
    pub(crate) fn next_seal(&mut self, index: PathIndex) -> Option<Kind> {
        let Session { seals, paths, closing, .. } = self;
        let path = paths.get(&index)?;
        let (rail, places) = (path.limits.rail, path.places());
        let of_paths = paths.values().map(|path| (path.limits.rail, path.places()));
        let of_closing = closing.values().map(|closing| (closing.rail, closing.places));
        let others = of_paths.chain(of_closing);
        seals.next(|class| {
            let reorders = |(rail, places): (Rail, bool)| !places && class.rails.may(rail);
            let is_in_place = class.must_be_placed || !others.clone().any(reorders);
            let may_seal = is_in_place || !places || mutated(Mutation::SealedByAnotherPath);
            class.rails.may(rail) && may_seal
        })
    }

    /// The kind of what did not land that the path `index` sends again.
    pub(crate) fn next_again(&mut self, index: PathIndex) -> Option<Kind> {
        let Session { again, paths, .. } = self;
        again.next(|class| may_take_class(paths, class, index))
    }

    /// The kind of the write of which the path `index` cuts off the next piece.
    pub(crate) fn next_write(&mut self, index: PathIndex) -> Option<Kind> {
        let Session { writes, paths, .. } = self;
        writes.next(|class| may_take_class(paths, class, index))
    }

    /// Likewise of those that have left the path of the others.
    pub(crate) fn next_aside(&mut self, index: PathIndex) -> Option<Kind> {
        let Session { aside, paths, .. } = self;
        aside.next(|class| may_take_class(paths, class, index))
    }

    /// Whether it is the path of puts and their signals; it becomes it when there is none, and it carries the first
    /// of them.
    pub(crate) fn may_pin<P, C>(&mut self, index: PathIndex, first: &Op<P, C>) -> bool {
        if self.pinned_path.is_none() && self.carries(index, first) {
            let kept_off = self.kept_off(first);
            let mut rails = Rails::only(used(&self.paths, Rails::ANY).without(kept_off));
            if mutated(Mutation::FirstPutChoosesPath) {
                rails = Rails::ANY.without(kept_off);
            }
            let may = may_take(&self.paths, rails, index);
            self.pinned_path = Some(index).filter(|_| may);
        }
        self.pinned_path == Some(index)
    }

    /// Whether the path of puts and signals carries and places the first of them. As long as there is none, whether
    /// one does of those that any would take: none is taken for its sake that others would not take.
    pub(crate) fn has_place<P, C>(&self, first: &Op<P, C>) -> bool {
        if let Some(index) = self.pinned_path {
            return self.carries(index, first);
        }
        let best = used(&self.paths, Rails::ANY);
        best.is_empty()
            || mutated(Mutation::FirstPutChoosesPath)
            || !best.without(self.kept_off(first)).is_empty()
    }

    fn carries<P, C>(&self, index: PathIndex, op: &Op<P, C>) -> bool {
        let Some(path) = self.paths.get(&index) else { return false };
        let is_carried = !self.unsuited.of(&op.body).contains(path.limits.rail);
        let is_placed = path.places() || mutated(Mutation::SignalStaysWithoutPlacement);
        is_carried && (is_placed || !op.must_be_placed())
    }

    /// The rails that do not carry the operation: they do not have its region, or it must be placed, and none of
    /// their paths does that.
    fn kept_off<P, C>(&self, op: &Op<P, C>) -> Up {
        let unsuited = self.unsuited.of(&op.body);
        if op.must_be_placed() { unsuited.with(unplacing(&self.paths)) } else { unsuited }
    }

    /// Of the paths that puts and their signals may take, the one that orders least.
    pub(crate) fn orders_least(&self) -> Option<&Path> {
        let used = used(&self.paths, Rails::ANY);
        let of_used = usable(&self.paths).filter(|path| used.contains(path.limits.rail));
        of_used.max_by_key(|path| path.limits.ordering)
    }

    /// Whether it has nothing to send and waits for nothing.
    pub(crate) fn is_idle(&self, is_running: impl Fn(OpId) -> bool) -> bool {
        let outstanding = self.paths.values().any(|path| path.wire.outstanding > 0);
        let is_waited_for = outstanding || self.batches > 0 || !self.closing.is_empty();
        // What has ended may lie where no path looks.
        let is_busy = |op| is_running(op) || mutated(Mutation::EndedOperationKeepsSessionBusy);
        self.was_up && !is_waited_for && !self.waiting().any(is_busy)
    }

    /// Whose messages and frames wait to be put on a path, once for each of them.
    fn waiting(&self) -> impl Iterator<Item = OpId> {
        let ops = self.messages.iter().chain(&self.pinned);
        let ops = ops.chain(self.aside.iter()).chain(self.writes.iter()).copied();
        let frames = self.seals.iter().map(|seal| seal.op);
        ops.chain(frames).chain(self.again.iter().map(|again| again.op))
    }

    pub(crate) fn waiting_len(&self) -> usize {
        let Session { messages, pinned, aside, writes, seals, again, .. } = self;
        messages.len() + pinned.len() + aside.len() + writes.len() + seals.len() + again.len()
    }

    /// Whether so much waits that more than half of it may have ended.
    pub(crate) fn is_crowded(&self) -> bool {
        self.waiting_len() > 2 * self.swept + CROWD_MIN
    }

    /// Takes out what has ended. The time that it takes is paid for by as many things that have come since.
    pub(crate) fn sweep(&mut self, is_running: impl Fn(OpId) -> bool) {
        self.messages.retain(|op| is_running(*op));
        self.pinned.retain(|op| is_running(*op));
        self.aside.retain(|op| is_running(*op));
        self.writes.retain(|op| is_running(*op));
        self.seals.retain(|seal| is_running(seal.op));
        self.again.retain(|again| is_running(again.op));
        self.swept = self.waiting_len();
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
    used.contains(own.limits.rail) && (!is_ahead || mutated(Mutation::SlicesNotSpread))
}

/// Whether it may take what belongs to the class.
fn may_take_class(paths: &BTreeMap<PathIndex, Path>, class: Class, index: PathIndex) -> bool {
    let Class { rails, must_be_placed } = class;
    if !must_be_placed {
        return may_take(paths, rails, index);
    }
    let places = paths.get(&index).is_some_and(Path::places);
    places && may_take(paths, rails.without(unplacing(paths)), index)
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
    use crate::heartbeat::Heartbeats;
    use crate::op::{Body, Operation};
    use crate::plan::Shape;
    use crate::sender::{Limits, Sender};

    #[test]
    fn what_has_ended_is_taken_out_before_it_is_more_than_the_rest() {
        let mut session = Session::new(0);
        let target = Target { incarnation: 1, key: 2 };
        let kind = Kind { target, rails: Rails::ANY, must_be_placed: false };
        let op = OpId::default();
        session.messages.push_back(op);
        session.pinned.push_back(op);
        session.push_aside(op, kind);
        session.push_seal(Seal { op, write: 0 }, kind);
        let (start, bytes, whole) = (0, 1, true);
        session.push_again(Again { op, write: 0, start, bytes, whole }, kind);
        let mut sweeps = 0;
        for _ in 0..10 * CROWD_MIN {
            session.push_write(op, kind);
            assert!(session.waiting().count() == session.waiting_len());
            if session.is_crowded() {
                session.sweep(|_| false);
                sweeps += 1;
                assert_eq!(session.waiting_len(), 0);
            }
        }
        assert_eq!(sweeps, 9, "each time for as many as have come");
        // Of those that have not ended nothing is taken out, and they are not looked at again and again.
        for _ in 0..10 * CROWD_MIN {
            session.push_write(op, kind);
            if session.is_crowded() {
                session.sweep(|_| true);
                sweeps += 1;
            }
        }
        assert!(session.waiting_len() > 10 * CROWD_MIN && sweeps <= 9 + 4);
    }

    #[test]
    fn a_sender_takes_out_what_has_ended_where_no_path_takes_it() {
        let heartbeats = Heartbeats { interval_us: 1, timeout_us: 1, always: false };
        let mut sender: Sender<(), ()> = Sender::new(Limits {
            send_bytes_per_s_max: 0,
            peer_timeout_us: u64::MAX / 4,
            grace_us: 1,
            path_imms_max: 1,
            heartbeats,
        });
        let id = SessionId(1);
        for _ in 0..5 * CROWD_MIN {
            let (source_offset, target_offset, bytes, checksum) = (0, 0, 1, None);
            let shape = Shape::Single { source_offset, target_offset, bytes, checksum };
            let target = Target { incarnation: 1, key: 2 };
            let body = Body::Write { shape, target, imm: None, group: 0 };
            let (deadline_us, payload, rails, done) = (u64::MAX, (), Rails::ANY, ());
            sender.begin(Operation { session: id, deadline_us, payload, body, rails, done }, 0);
            sender.drain_group(0, ());
            assert!(sender.sessions[&id].waiting_len() <= CROWD_MIN + 2);
        }
    }

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
