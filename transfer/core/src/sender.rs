//! The sending half: operations on their way to peers. It decides what goes next and how everything
//! ends; the shell moves bytes.
//!
//! Call order: `begin` an operation; perform what `poll_action` gives, until it gives nothing; for each
//! path that is up take frames from `next_frame` as long as the path takes them, and say with `posted` of
//! those with a pin when their place in its order is certain; report with `settle` or
//! `settle_through` what became of them; call `handle_time` when `next_time_us` has come.
//!
//! A session has as many paths as the shell gives it (`path_up`, `path_lost`); whichever has room takes
//! the next frame. A session ends with `session_lost`, when there is no hope of another path.
//!
//! An operation that failed or ran out of time is told so at once, but stays here while the fate of
//! frames of it is open: its group is not drained before that.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use kvasir_mutation::{Mutation, mutated};

use crate::close::{CloseRequest, PathIndex};
use crate::groups::Groups;
use crate::heartbeat::Heartbeats;
use crate::op::{Body, Done, Op, OpId, Operation, Ops};
use crate::outcome::{Outcome, Refusal, WriteError};
use crate::path::{OnWire, Part, Path, PathLimits};
use crate::rails::Rails;
use crate::regions::Target;
use crate::session::{Seal, Session, SessionId};
use crate::signalled::{Batches, Told};
use crate::throttle::Throttle;

/// One thing to put on the wire.
#[derive(Debug, Clone)]
pub struct Frame<P> {
    /// Counts from 0 within its path.
    pub sequence: u64,
    pub op: OpId,
    pub kind: FrameKind,
    pub payload: P,
    pub source_offset: u64,
    /// Of the payload; 0 in a seal.
    pub bytes: u64,
    /// Frames with the same pin keep their order, on a path that orders any: whatever of the path's queue
    /// pairs it stands for, it is always the same one.
    pub pin: Option<u32>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FrameKind {
    Write {
        target: Target,
        offset: u64,
        imm: Option<u32>,
        checksum: Option<u64>,
    },
    /// All bytes of a long write have landed: check the whole, then count.
    Seal {
        target: Target,
        offset: u64,
        whole_bytes: u64,
        imm: Option<u32>,
        checksum: Option<u64>,
    },
    /// The id is the same when the message is sent again.
    Message {
        id: u64,
    },
    /// A word of 8 bytes, stored at once, behind all that has landed before. `is_fenced`: not before prior
    /// reads and atomics on its queue pair are done.
    Signal {
        target: Target,
        offset: u64,
        value: u64,
        is_fenced: bool,
    },
}

/// What became of a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Settled {
    Landed,
    Refused(Refusal),
    Corrupt,
}

/// What a session has to send.
#[derive(Debug)]
pub enum Next<P> {
    Frame(Frame<P>),
    /// The throttle says: not before.
    Wait {
        until_us: u64,
    },
    /// Nothing, or as much is on the wire as may be.
    Nothing,
}

/// What the shell has to do.
#[derive(Debug, PartialEq, Eq)]
pub enum Action<C> {
    Complete(C, Outcome),
    /// A transfer of a batch. `told` says how its peer is told, once that was known.
    CompleteSignalled {
        done: C,
        outcome: Outcome,
        told: Option<Told>,
    },
    /// The session is used for the first time. From now on until `session_lost` the shell gives it
    /// paths, and others for those that are lost.
    Connect(SessionId),
    /// The operation has ended while frames of it may still be read from its source: copy what is
    /// left of them, because the caller may reuse the source as soon as it is told.
    Detach {
        session: SessionId,
        op: OpId,
    },
    /// Close it, then `path_lost`.
    GiveUpPath {
        session: SessionId,
        path: PathIndex,
        why: GivenUp,
    },
    /// Ask the peer for a sign of life through a path that is up. Its answer goes to
    /// `heartbeat_answered`.
    Heartbeat {
        session: SessionId,
        path: PathIndex,
    },
    /// No path has come up for too long: `session_lost`.
    GiveUpSession(SessionId),
    /// Take frames from `next_frame` once more, for each path of the session: one that was asked has made room for
    /// another one, which may have had nothing when it was asked.
    Offer(SessionId),
    /// Ask the receiver, through a path that is up. The answer goes to `path_closed`. It may be asked
    /// for more than once.
    ClosePath {
        session: SessionId,
        through: PathIndex,
        close: CloseRequest,
    },
}

/// Why a path is given up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GivenUp {
    /// The peer shows no life there.
    Silent,
    /// It has carried as many different immediates as are remembered.
    WornOut,
}

#[derive(Debug, Clone, Copy)]
pub struct Limits {
    pub send_bytes_per_s_max: u64,
    /// A path that owes something and shows no life for so long is given up, and so is a session that
    /// does not come up.
    pub peer_timeout_us: u64,
    /// A session that had a path and has none for so long is given up.
    pub grace_us: u64,
    /// Different immediates on one path: beyond it the path is replaced by a fresh one, because each is
    /// remembered on both sides as long as the path lasts.
    pub path_imms_max: usize,
    pub heartbeats: Heartbeats,
}

#[derive(Debug)]
pub struct Sender<P, C> {
    pub(crate) limits: Limits,
    pub(crate) ops: Ops<P, C>,
    pub(crate) sessions: BTreeMap<SessionId, Session>,
    pub(crate) groups: Groups<C>,
    pub(crate) throttle: Throttle,
    pub(crate) actions: VecDeque<Action<C>>,
    pub(crate) batches: Batches<P, C>,
    /// Their runs for which something has changed.
    pub(crate) batches_due: BTreeSet<(u64, usize)>,
    pub(crate) next_batch: u64,
    pub(crate) left_order: u64,
    /// No operation runs out before this.
    earliest_deadline_us: u64,
    next_check_us: u64,
}

/// Deadlines are looked at no more often than this.
const CHECK_INTERVAL_US: u64 = 500;

impl<P: Clone, C> Sender<P, C> {
    pub fn new(limits: Limits) -> Self {
        assert!(limits.path_imms_max > 0, "limits must let something through");
        Sender {
            throttle: Throttle::new(limits.send_bytes_per_s_max),
            limits,
            ops: Ops::new(),
            sessions: BTreeMap::new(),
            groups: Groups::new(),
            actions: VecDeque::new(),
            batches: BTreeMap::new(),
            batches_due: BTreeSet::new(),
            next_batch: 0,
            left_order: 0,
            earliest_deadline_us: u64::MAX,
            next_check_us: 0,
        }
    }

    // ---- commands ----

    /// Takes an operation on. Its shape must have passed [`crate::Shape::check`].
    pub fn begin(&mut self, operation: Operation<P, C>, now_us: u64) {
        let Operation { session: id, deadline_us, rails, .. } = operation;
        if let Some(outcome) = self.settled_from_the_start(&operation.body, deadline_us, now_us) {
            self.actions.push_back(Action::Complete(operation.done, outcome));
            return;
        }
        let Operation { session, payload, body, done, .. } = operation;
        let done = Done::Caller(done);
        let op = Op::new(Operation { session, deadline_us, payload, body, rails, done });
        let group = op.group();
        if let Some(group) = group {
            self.groups.operation_begun(group);
        }
        let kind = op.kind(rails);
        let op = self.ops.insert(op);
        self.note_deadline(deadline_us);
        let session = self.session(id, now_us);
        match kind {
            None => session.messages.push_back(op),
            Some(kind) => session.push_write(op, kind),
        }
        self.sweep_if_crowded(id);
    }

    /// What has ended is taken out where it waits when its turn comes. Where that never comes, because no path takes
    /// it, it is taken out here, before it is more than what has not ended.
    pub(crate) fn sweep_if_crowded(&mut self, id: SessionId) {
        let Sender { sessions, ops, .. } = self;
        if let Some(session) = sessions.get_mut(&id).filter(|session| session.is_crowded())
            && !mutated(Mutation::EndedOperationsNotSwept)
        {
            session.sweep(|op| ops.is_running(op));
        }
    }

    pub(crate) fn note_deadline(&mut self, deadline_us: u64) {
        self.earliest_deadline_us = self.earliest_deadline_us.min(deadline_us);
    }

    /// The session, which is connected on its first use.
    pub(crate) fn session(&mut self, id: SessionId, now_us: u64) -> &mut Session {
        self.sessions.entry(id).or_insert_with(|| {
            self.actions.push_back(Action::Connect(id));
            Session::new(now_us)
        })
    }

    fn settled_from_the_start(
        &self,
        body: &Body,
        deadline_us: u64,
        now_us: u64,
    ) -> Option<Outcome> {
        if let Body::Write { shape, group, .. } = body {
            if self.groups.is_draining(*group) {
                return Some(Err(WriteError::Cancelled));
            }
            if shape.writes() == 0 {
                return Some(Ok(()));
            }
        }
        (deadline_us <= now_us).then_some(Err(WriteError::DeadlineExceeded))
    }

    /// Issues nothing more of the group, nor again, and tells `waiter` when the fate of every issued
    /// frame is known.
    pub fn drain_group(&mut self, group: u64, waiter: C) {
        self.batches_drained(group);
        let (waiters, verdict) = self.groups.drain(group, waiter);
        self.complete_all(waiters, verdict);
        for id in self.ops.ids(|op| op.group() == Some(group) && !op.is_issued()) {
            if let Some(op) = self.ops.get_mut(id) {
                op.stop(WriteError::Cancelled);
            }
            self.finish_if_over(id);
        }
    }

    /// Ends everything, when the engine stops.
    pub fn shut_down(&mut self) {
        for op in self.ops.take_all() {
            if let Some(Done::Caller(done)) = op.done {
                self.actions.push_back(Action::Complete(done, Err(WriteError::Cancelled)));
            }
        }
        self.batches_stop();
        let waiters = self.groups.drain_waiters();
        self.complete_all(waiters, Err(WriteError::Cancelled));
        self.sessions.clear();
    }

    // ---- events ----

    /// A path can take frames. Its index is new in the session.
    pub fn path_up(&mut self, id: SessionId, path: PathIndex, limits: PathLimits, now_us: u64) {
        assert!(
            limits.slice_bytes > 0 && limits.frames_max > 0,
            "paths must let something through"
        );
        let Some(session) = self.sessions.get_mut(&id) else { return };
        let former = session.paths.insert(path, Path::new(limits, now_us));
        let is_new = former.is_none() && !session.closing.contains_key(&path);
        assert!(is_new, "an index names one path of a session");
        session.was_up = true;
        self.batches_know(id);
        self.ask_about_closing(id, now_us);
    }

    /// Everything on the session ends with `PeerGone`; what was on the wire is undecided for good.
    pub fn session_lost(&mut self, id: SessionId) {
        let Some(session) = self.sessions.remove(&id) else { return };
        for frame in session.into_frames() {
            let Some(op) = self.ops.get_mut(frame.op) else { continue };
            op.frames -= 1;
            if let Some(group) = op.group() {
                self.groups.frame_lost(group);
            }
        }
        for op in self.ops.ids(|op| op.session == id) {
            if let Some(op) = self.ops.get_mut(op) {
                op.stop(WriteError::PeerGone);
                op.error = Some(WriteError::PeerGone);
            }
            self.finish_if_over(op);
        }
        self.batches_lost(id);
    }

    /// The frame has its place in the order of its pin: what is put there later lands later. Where a
    /// path keeps no order, there is nothing to say.
    pub fn posted(&mut self, id: SessionId, path: PathIndex, sequence: u64) {
        let Some(frame) = self.path(id, path).and_then(|of| of.wire.get_mut(sequence)) else {
            return;
        };
        let is_ordered = frame.has_pin || mutated(Mutation::OrderAssumedOnResend);
        if !is_ordered || std::mem::replace(&mut frame.is_posted, true) {
            return;
        }
        let op = frame.op;
        if let Some(op) = self.ops.get_mut(op) {
            op.posted += 1;
        }
    }

    /// The peer says what became of one frame. `false` when there is no such frame.
    pub fn settle(
        &mut self,
        id: SessionId,
        path: PathIndex,
        sequence: u64,
        settled: Settled,
        now_us: u64,
    ) -> bool {
        let Some(of) = self.path(id, path) else { return false };
        of.heard(now_us);
        let Some(frame) = of.wire.settle(sequence) else { return false };
        of.has_landed |= settled == Settled::Landed;
        if let (Settled::Landed, Some(entry)) = (settled, frame.entry) {
            of.ledger.landed(entry);
        }
        self.frame_settled(frame, settled);
        true
    }

    /// The peer says that every frame up to this one that it has not spoken of has landed. `false`
    /// when this one was never issued.
    pub fn settle_through(
        &mut self,
        id: SessionId,
        path: PathIndex,
        sequence: u64,
        now_us: u64,
    ) -> bool {
        loop {
            let Some(of) = self.path(id, path) else { return false };
            of.heard(now_us);
            let Some(frame) = of.wire.settle_oldest_through(sequence) else {
                return sequence < of.wire.next_sequence();
            };
            of.has_landed = true;
            if let Some(entry) = frame.entry {
                of.ledger.landed(entry);
            }
            self.frame_settled(frame, Settled::Landed);
        }
    }

    /// Ends what has run out of time and gives up silent paths and sessions without any.
    pub fn handle_time(&mut self, now_us: u64) {
        if now_us < self.next_check_us {
            return;
        }
        self.next_check_us = now_us + CHECK_INTERVAL_US;
        if now_us >= self.earliest_deadline_us {
            let is_over = |op: &Op<P, C>| op.done.is_some() && op.deadline_us <= now_us;
            for id in self.ops.ids(|op| is_over(op) && !mutated(Mutation::DeadlinesIgnored)) {
                self.run_out(id);
            }
            self.batches_run_out(now_us);
            let waiting = self.ops.iter().filter(|op| op.done.is_some());
            let deadlines = waiting.map(|op| op.deadline_us);
            let earliest_us = deadlines.min().unwrap_or(u64::MAX);
            self.earliest_deadline_us = earliest_us.min(self.batches_deadline_us());
        }
        self.give_up_silent(now_us);
        self.ask_for_heartbeats(now_us);
    }

    /// When `handle_time` should be called at the latest; `u64::MAX` for never.
    pub fn next_time_us(&self) -> u64 {
        let of_session =
            |session| self.patience_ends_us(session).min(self.next_heartbeat_us(session));
        let next = self.sessions.values().map(of_session).min();
        let next = next.unwrap_or(u64::MAX).min(self.earliest_deadline_us);
        next.max(self.next_check_us)
    }

    /// How many puts and signals have left the path of the others of their session.
    pub fn left_order(&self) -> u64 {
        self.left_order
    }

    /// Whether the session was used, and has not been lost since.
    pub fn has_session(&self, id: SessionId) -> bool {
        self.sessions.contains_key(&id)
    }

    /// Whether something has landed by the path, as far as is known.
    pub fn has_landed(&self, id: SessionId, path: PathIndex) -> bool {
        let path = self.sessions.get(&id).and_then(|session| session.paths.get(&path));
        path.is_some_and(|path| path.has_landed)
    }

    /// Whether the session has nothing to send and waits for nothing.
    pub fn is_idle(&self, id: SessionId) -> bool {
        let is_running = |op| self.ops.is_running(op);
        self.sessions.get(&id).is_none_or(|session| session.is_idle(is_running))
    }

    pub fn poll_action(&mut self) -> Option<Action<C>> {
        self.advance_batches();
        self.actions.pop_front()
    }

    // ---- what follows ----

    pub(crate) fn path(&mut self, id: SessionId, path: PathIndex) -> Option<&mut Path> {
        self.sessions.get_mut(&id)?.paths.get_mut(&path)
    }

    pub(crate) fn frame_settled(&mut self, frame: OnWire, settled: Settled) {
        let Some(op) = self.ops.get_mut(frame.op) else { return };
        op.frames -= 1;
        op.posted -= usize::from(frame.is_posted);
        let (session, kind) = (op.session, op.kind(Rails::ANY));
        let mut seal = false;
        match settled {
            Settled::Landed => {
                if let Part::Slice { bytes, .. } = frame.part {
                    seal = op.slice_landed(frame.write, bytes);
                    op.queued += usize::from(seal);
                    // Seals have no pin, and may have to wait for another path: nobody waits in line behind one.
                    op.is_loose |= seal && !mutated(Mutation::SealBlocksSignals);
                }
            }
            // What is wrong with one page need not be wrong with the next.
            Settled::Corrupt => {
                op.error.get_or_insert(WriteError::Corrupt);
            }
            Settled::Refused(refusal) => op.stop(WriteError::Refused(refusal)),
        }
        if let Some(group) = op.group() {
            self.groups.frame_settled(group);
        }
        if seal && let (Some(session), Some(kind)) = (self.sessions.get_mut(&session), kind) {
            session.push_seal(Seal { op: frame.op, write: frame.write }, kind);
        }
        self.finish_if_over(frame.op);
    }

    fn run_out(&mut self, id: OpId) {
        let Some(op) = self.ops.get_mut(id) else { return };
        op.stop(WriteError::DeadlineExceeded);
        op.error = Some(WriteError::DeadlineExceeded);
        if op.frames > 0 {
            // First the source is let go of, then the caller is told.
            let session = op.session;
            let done = op.done.take();
            self.actions.push_back(Action::Detach { session, op: id });
            if let Some(done) = done {
                self.tell(done, Err(WriteError::DeadlineExceeded));
            }
        }
        self.finish_if_over(id);
    }

    pub(crate) fn finish_if_over(&mut self, id: OpId) {
        let Some(op) = self.ops.get_mut(id) else { return };
        let is_forgotten = mutated(Mutation::UndecidedFramesForgotten) && op.stopped;
        if (op.frames > 0 && !is_forgotten) || !op.is_issued() {
            return;
        }
        let Some(op) = self.ops.remove(id) else { return };
        if let (Some(message), Some(session)) = (op.message, self.sessions.get_mut(&op.session)) {
            session.message_ended(message);
        }
        let group = op.group();
        if let Some(done) = op.done {
            self.tell(done, op.error.map_or(Ok(()), Err));
        }
        if let Some(group) = group {
            let (waiters, verdict) = self.groups.operation_ended(group);
            self.complete_all(waiters, verdict);
        }
    }

    pub(crate) fn tell(&mut self, done: Done<C>, outcome: Outcome) {
        match done {
            Done::Caller(done) => self.actions.push_back(Action::Complete(done, outcome)),
            Done::Put(part) => self.put_ended(part, outcome),
            Done::Signal(part) => self.signal_ended(part, outcome),
        }
    }

    fn complete_all(&mut self, waiters: Vec<C>, outcome: Outcome) {
        for waiter in waiters {
            self.actions.push_back(Action::Complete(waiter, outcome));
        }
    }
}
