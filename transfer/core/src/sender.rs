//! The sending half: operations on their way to peers. It decides what goes next and how everything
//! ends; the shell moves bytes.
//!
//! Call order: `begin` an operation; perform what `poll_action` gives, until it gives nothing; for a
//! session that is up take frames from `next_frame` as long as the wire takes them; report with
//! `settle` or `settle_through` what became of them; call `handle_time` when `next_time_us` has come.
//!
//! An operation that failed or ran out of time is told so at once, but stays here while frames of it
//! are on the wire: its group is not drained before their fate is known.

use std::collections::{BTreeMap, VecDeque};

use crate::groups::Groups;
use crate::outcome::{Outcome, Refusal, WriteError};
use crate::plan::{Cutter, Shape, Sliced};
use crate::regions::Target;
use crate::session::{OnWire, Seal, Session, SessionId, SessionState};
use crate::throttle::Throttle;

/// Names an operation; never mistaken for a later one in the same place.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct OpId {
    index: u32,
    generation: u32,
}

/// What is to be done: `P` is how the shell finds the bytes, `C` is who is told.
#[derive(Debug)]
pub struct Operation<P, C> {
    pub session: SessionId,
    pub deadline_us: u64,
    pub payload: P,
    pub body: Body,
    pub done: C,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Body {
    Write { shape: Shape, target: Target, imm: Option<u32>, group: u64 },
    Message { bytes: u64 },
}

/// One thing to put on the wire.
#[derive(Debug, Clone)]
pub struct Frame<P> {
    /// Counts from 0 within its session.
    pub sequence: u64,
    pub op: OpId,
    pub kind: FrameKind,
    pub payload: P,
    pub source_offset: u64,
    /// Of the payload; 0 in a seal.
    pub bytes: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FrameKind {
    Write {
        target: Target,
        offset: u64,
        imm: Option<u32>,
        checksum: Option<u64>,
    },
    /// All slices of a long write have landed: check the whole, then count.
    Seal {
        target: Target,
        offset: u64,
        whole_bytes: u64,
        imm: Option<u32>,
        checksum: Option<u64>,
    },
    Message,
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
    /// The session is used for the first time. Answer with `session_up` or `session_lost`.
    Connect(SessionId),
    /// The operation has ended while frames of it may still be read from its source: copy what is
    /// left of them, because the caller may reuse the source as soon as it is told.
    Detach {
        session: SessionId,
        op: OpId,
    },
    /// The peer has shown no life for too long: close the path, then `session_lost`.
    GiveUp(SessionId),
}

#[derive(Debug, Clone, Copy)]
pub struct Limits {
    pub slice_bytes: u64,
    /// Frames on the wire of one session.
    pub frames_max: usize,
    pub throttle_bytes_per_s: u64,
    pub peer_timeout_us: u64,
}

#[derive(Debug)]
pub struct Sender<P, C> {
    limits: Limits,
    slots: Vec<Slot<P, C>>,
    free: Vec<u32>,
    sessions: BTreeMap<SessionId, Session>,
    groups: Groups<C>,
    throttle: Throttle,
    actions: VecDeque<Action<C>>,
    /// No operation runs out before this.
    earliest_deadline_us: u64,
    next_check_us: u64,
}

#[derive(Debug)]
struct Slot<P, C> {
    generation: u32,
    op: Option<Op<P, C>>,
}

#[derive(Debug)]
struct Op<P, C> {
    session: SessionId,
    deadline_us: u64,
    payload: P,
    body: Body,
    /// Taken when the caller is told.
    done: Option<C>,
    cutter: Cutter,
    /// On the wire.
    frames: usize,
    /// Long writes under way: slices that have not landed, by logical write.
    split: BTreeMap<usize, u32>,
    seals_queued: usize,
    error: Option<WriteError>,
}

impl<P, C> Op<P, C> {
    fn group(&self) -> Option<u64> {
        match self.body {
            Body::Write { group, .. } => Some(group),
            Body::Message { .. } => None,
        }
    }

    fn is_issued(&self) -> bool {
        let cut = match &self.body {
            Body::Write { shape, .. } => self.cutter.is_done(shape),
            Body::Message { .. } => self.cutter.is_stopped(),
        };
        cut && self.split.is_empty() && self.seals_queued == 0
    }

    fn stop(&mut self, error: WriteError) {
        self.error.get_or_insert(error);
        self.cutter.stop();
        self.split.clear();
        self.seals_queued = 0;
    }
}

/// Deadlines are looked at no more often than this.
const CHECK_INTERVAL_US: u64 = 500;

impl<P: Clone, C> Sender<P, C> {
    pub fn new(limits: Limits) -> Self {
        assert!(
            limits.slice_bytes > 0 && limits.frames_max > 0,
            "limits must let something through"
        );
        Sender {
            throttle: Throttle::new(limits.throttle_bytes_per_s),
            limits,
            slots: Vec::new(),
            free: Vec::new(),
            sessions: BTreeMap::new(),
            groups: Groups::new(),
            actions: VecDeque::new(),
            earliest_deadline_us: u64::MAX,
            next_check_us: 0,
        }
    }

    // ---- commands ----

    /// Takes an operation on. Its shape must have passed [`Shape::check`].
    pub fn begin(&mut self, operation: Operation<P, C>, now_us: u64) {
        let Operation { session, deadline_us, payload, body, done } = operation;
        if let Some(outcome) = self.settled_from_the_start(&body, deadline_us, now_us) {
            self.actions.push_back(Action::Complete(done, outcome));
            return;
        }
        let cutter = Cutter::default();
        let is_message = matches!(body, Body::Message { .. });
        let op = Op {
            session,
            deadline_us,
            payload,
            body,
            done: Some(done),
            cutter,
            frames: 0,
            split: BTreeMap::new(),
            seals_queued: 0,
            error: None,
        };
        if let Some(group) = op.group() {
            self.groups.operation_begun(group);
        }
        let id = self.insert(op);
        self.earliest_deadline_us = self.earliest_deadline_us.min(deadline_us);
        let session = self.sessions.entry(session).or_insert_with(|| {
            self.actions.push_back(Action::Connect(session));
            Session::new(now_us)
        });
        if is_message { &mut session.messages } else { &mut session.writes }.push_back(id);
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

    /// Issues nothing more of the group, and tells `waiter` when every issued frame is settled.
    pub fn drain_group(&mut self, group: u64, waiter: C) {
        let (waiters, verdict) = self.groups.drain(group, waiter);
        self.complete_all(waiters, verdict);
        for id in self.ids(|op| op.group() == Some(group) && !op.is_issued()) {
            if let Some(op) = self.get_mut(id) {
                op.stop(WriteError::Cancelled);
            }
            self.finish_if_over(id);
        }
    }

    /// Ends everything, when the engine stops.
    pub fn shut_down(&mut self) {
        for slot in &mut self.slots {
            if let Some(done) = slot.op.take().and_then(|op| op.done) {
                self.actions.push_back(Action::Complete(done, Err(WriteError::Cancelled)));
            }
        }
        let waiters = self.groups.drain_waiters();
        self.complete_all(waiters, Err(WriteError::Cancelled));
        self.sessions.clear();
    }

    // ---- events ----

    pub fn session_up(&mut self, session: SessionId, now_us: u64) {
        if let Some(session) = self.sessions.get_mut(&session) {
            session.state = SessionState::Up;
            session.heard_us = now_us;
        }
    }

    /// Everything on the session ends with `PeerGone`; what was on the wire is undecided.
    pub fn session_lost(&mut self, id: SessionId) {
        let Some(mut session) = self.sessions.remove(&id) else { return };
        for frame in session.wire.drain() {
            let Some(op) = self.get_mut(frame.op) else { continue };
            op.frames -= 1;
            if let Some(group) = op.group() {
                self.groups.frame_lost(group);
            }
        }
        for op in self.ids(|op| op.session == id) {
            if let Some(op) = self.get_mut(op) {
                op.stop(WriteError::PeerGone);
                op.error = Some(WriteError::PeerGone);
            }
            self.finish_if_over(op);
        }
    }

    /// The peer says what became of one frame. `false` when there is no such frame.
    pub fn settle(
        &mut self,
        session: SessionId,
        sequence: u64,
        settled: Settled,
        now_us: u64,
    ) -> bool {
        let Some(of) = self.sessions.get_mut(&session) else { return false };
        of.heard_us = now_us;
        let Some(frame) = of.wire.settle(sequence) else { return false };
        self.frame_settled(frame, settled);
        true
    }

    /// The peer says that every frame up to this one that it has not spoken of has landed. `false`
    /// when this one was never issued.
    pub fn settle_through(&mut self, session: SessionId, sequence: u64, now_us: u64) -> bool {
        loop {
            let Some(of) = self.sessions.get_mut(&session) else { return false };
            of.heard_us = now_us;
            match of.wire.settle_oldest_through(sequence) {
                Some(frame) => self.frame_settled(frame, Settled::Landed),
                None => return sequence < of.wire.next_sequence(),
            }
        }
    }

    /// Ends what has run out of time and gives up silent peers.
    pub fn handle_time(&mut self, now_us: u64) {
        if now_us < self.next_check_us {
            return;
        }
        self.next_check_us = now_us + CHECK_INTERVAL_US;
        if now_us >= self.earliest_deadline_us {
            for id in self.ids(|op| op.done.is_some() && op.deadline_us <= now_us) {
                self.run_out(id);
            }
            let waiting = self.slots.iter().filter_map(|slot| slot.op.as_ref());
            let deadlines = waiting.filter(|op| op.done.is_some()).map(|op| op.deadline_us);
            self.earliest_deadline_us = deadlines.min().unwrap_or(u64::MAX);
        }
        for (id, session) in &mut self.sessions {
            if session.is_owed() && now_us >= session.heard_us + self.limits.peer_timeout_us {
                session.heard_us = now_us;
                self.actions.push_back(Action::GiveUp(*id));
            }
        }
    }

    /// When `handle_time` should be called at the latest; `u64::MAX` for never.
    pub fn next_time_us(&self) -> u64 {
        let owed = self.sessions.values().filter(|session| session.is_owed());
        let silent = owed.map(|session| session.heard_us + self.limits.peer_timeout_us).min();
        let next = silent.unwrap_or(u64::MAX).min(self.earliest_deadline_us);
        next.max(self.next_check_us)
    }

    /// Whether the session has nothing to send and waits for nothing.
    pub fn is_idle(&self, id: SessionId) -> bool {
        self.sessions.get(&id).is_none_or(Session::is_idle)
    }

    // ---- polls ----

    pub fn poll_action(&mut self) -> Option<Action<C>> {
        self.actions.pop_front()
    }

    /// The next frame for a session that is up: messages, then seals, then writes in turn.
    pub fn next_frame(&mut self, id: SessionId, now_us: u64) -> Next<P> {
        let Some(session) = self.sessions.get(&id) else { return Next::Nothing };
        if session.state != SessionState::Up || session.wire.span() >= self.limits.frames_max {
            return Next::Nothing;
        }
        if let Some(frame) = self.next_message(id, now_us) {
            return Next::Frame(frame);
        }
        if let Some(frame) = self.next_seal(id, now_us) {
            return Next::Frame(frame);
        }
        self.next_write(id, now_us)
    }

    fn next_message(&mut self, id: SessionId, now_us: u64) -> Option<Frame<P>> {
        loop {
            let op_id = self.sessions.get_mut(&id)?.messages.pop_front()?;
            let Some(op) = self.get_mut(op_id) else { continue };
            let Body::Message { bytes } = op.body else { continue };
            op.cutter.stop();
            return self.issue(id, op_id, 0, FrameKind::Message, (0, bytes), now_us);
        }
    }

    fn next_seal(&mut self, id: SessionId, now_us: u64) -> Option<Frame<P>> {
        loop {
            let seal = self.sessions.get_mut(&id)?.seals.pop_front()?;
            let Some(op) = self.get_mut(seal.op) else { continue };
            if op.seals_queued == 0 {
                continue;
            }
            op.seals_queued -= 1;
            let Body::Write { shape, target, imm, .. } = &op.body else { continue };
            let piece = shape.piece(seal.write)?;
            let kind = FrameKind::Seal {
                target: *target,
                offset: piece.target_offset,
                whole_bytes: piece.bytes,
                imm: *imm,
                checksum: piece.checksum,
            };
            return self.issue(id, seal.op, seal.write, kind, (0, 0), now_us);
        }
    }

    fn next_write(&mut self, id: SessionId, now_us: u64) -> Next<P> {
        let slice_bytes = self.limits.slice_bytes;
        loop {
            let Some(session) = self.sessions.get_mut(&id) else { return Next::Nothing };
            let Some(op_id) = session.writes.front().copied() else { return Next::Nothing };
            let op = self.slots.get_mut(op_id.index as usize);
            let op = op.filter(|slot| slot.generation == op_id.generation);
            let cut = op.and_then(|slot| slot.op.as_mut()).and_then(|op| {
                let Body::Write { shape, target, imm, .. } = &op.body else { return None };
                if op.cutter.is_done(shape) {
                    return None;
                }
                if let Err(until_us) = self.throttle.check(now_us) {
                    return Some(Err(until_us));
                }
                let cut = op.cutter.next(shape, slice_bytes)?;
                let (imm, checksum) = match cut.sliced {
                    Sliced::Whole => (*imm, cut.piece.checksum),
                    Sliced::Slice { slices } => {
                        op.split.entry(cut.write).or_insert(slices);
                        (None, None)
                    }
                };
                let offset = cut.piece.target_offset;
                let kind = FrameKind::Write { target: *target, offset, imm, checksum };
                Some(Ok((cut.write, kind, cut.piece.source_offset, cut.piece.bytes)))
            });
            match cut {
                None => {
                    session.writes.pop_front();
                }
                Some(Err(until_us)) => return Next::Wait { until_us },
                Some(Ok((write, kind, source_offset, bytes))) => {
                    self.throttle.sent(now_us, bytes);
                    let frame = self.issue(id, op_id, write, kind, (source_offset, bytes), now_us);
                    return frame.map_or(Next::Nothing, Next::Frame);
                }
            }
        }
    }

    fn issue(
        &mut self,
        id: SessionId,
        op_id: OpId,
        write: usize,
        kind: FrameKind,
        (source_offset, bytes): (u64, u64),
        now_us: u64,
    ) -> Option<Frame<P>> {
        let session = self.sessions.get_mut(&id)?;
        if session.wire.outstanding == 0 {
            session.heard_us = now_us;
        }
        let sequence = session.wire.issue(OnWire { op: op_id, write });
        let op = self.get_mut(op_id)?;
        op.frames += 1;
        let payload = op.payload.clone();
        if let Some(group) = op.group() {
            self.groups.frame_issued(group);
        }
        Some(Frame { sequence, op: op_id, kind, payload, source_offset, bytes })
    }

    // ---- what follows ----

    fn frame_settled(&mut self, frame: OnWire, settled: Settled) {
        let Some(op) = self.get_mut(frame.op) else { return };
        op.frames -= 1;
        let session = op.session;
        let mut seal = false;
        match settled {
            Settled::Landed => {
                if let Some(left) = op.split.get_mut(&frame.write) {
                    *left -= 1;
                    if *left == 0 {
                        op.split.remove(&frame.write);
                        op.seals_queued += 1;
                        seal = true;
                    }
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
        if seal && let Some(session) = self.sessions.get_mut(&session) {
            session.seals.push_back(Seal { op: frame.op, write: frame.write });
        }
        self.finish_if_over(frame.op);
    }

    fn run_out(&mut self, id: OpId) {
        let Some(op) = self.get_mut(id) else { return };
        op.stop(WriteError::DeadlineExceeded);
        op.error = Some(WriteError::DeadlineExceeded);
        if op.frames > 0 {
            // First the source is let go of, then the caller is told.
            let session = op.session;
            let done = op.done.take();
            self.actions.push_back(Action::Detach { session, op: id });
            if let Some(done) = done {
                let outcome = Err(WriteError::DeadlineExceeded);
                self.actions.push_back(Action::Complete(done, outcome));
            }
        }
        self.finish_if_over(id);
    }

    fn finish_if_over(&mut self, id: OpId) {
        let Some(op) = self.get_mut(id) else { return };
        if op.frames > 0 || !op.is_issued() {
            return;
        }
        let group = op.group();
        let outcome = op.error.map_or(Ok(()), Err);
        if let Some(done) = op.done.take() {
            self.actions.push_back(Action::Complete(done, outcome));
        }
        self.remove(id);
        if let Some(group) = group {
            let (waiters, verdict) = self.groups.operation_ended(group);
            self.complete_all(waiters, verdict);
        }
    }

    fn complete_all(&mut self, waiters: Vec<C>, outcome: Outcome) {
        for waiter in waiters {
            self.actions.push_back(Action::Complete(waiter, outcome));
        }
    }

    // ---- slots ----

    fn insert(&mut self, op: Op<P, C>) -> OpId {
        let index = self.free.pop().unwrap_or_else(|| {
            self.slots.push(Slot { generation: 0, op: None });
            u32::try_from(self.slots.len() - 1).expect("operations are bounded by the shell")
        });
        let slot = &mut self.slots[index as usize];
        slot.op = Some(op);
        OpId { index, generation: slot.generation }
    }

    fn get_mut(&mut self, id: OpId) -> Option<&mut Op<P, C>> {
        let slot = self.slots.get_mut(id.index as usize)?;
        if slot.generation == id.generation { slot.op.as_mut() } else { None }
    }

    fn remove(&mut self, id: OpId) {
        if let Some(slot) = self.slots.get_mut(id.index as usize) {
            slot.op = None;
            slot.generation = slot.generation.wrapping_add(1);
            self.free.push(id.index);
        }
    }

    fn ids(&self, wanted: impl Fn(&Op<P, C>) -> bool) -> Vec<OpId> {
        let slots = self.slots.iter().zip(0u32..);
        let found = slots.filter(|(slot, _)| slot.op.as_ref().is_some_and(&wanted));
        found.map(|(slot, index)| OpId { index, generation: slot.generation }).collect()
    }
}
