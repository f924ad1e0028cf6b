//! What a path puts on the wire next: messages, then seals, then what must be sent again, then new writes.
//! Of those, puts with their signals go first, but let others pass after each slice's worth of bytes, and others let
//! puts pass after as many: neither waits for the end of the other. Whichever path has room is asked, so unequal paths
//! get their unequal shares.

use kvasir_mutation::{Mutation, mutated};

use crate::close::PathIndex;
use crate::op::{Body, Done, Op, OpId};
use crate::path::{OnWire, Part, Path};
use crate::plan::Sliced;
use crate::sender::{Action, Frame, FrameKind, GivenUp, Next, Sender};
use crate::session::{Session, SessionId};
use crate::signalled::PartOf;
use crate::waiting::Kind;

/// A slice's worth of short frames is never more of them than this.
const SHORT_IN_A_ROW_MAX: u64 = 16;

/// A frame that is about to be issued.
struct Draft {
    op: OpId,
    write: usize,
    part: Part,
    kind: FrameKind,
    source_offset: u64,
    bytes: u64,
    pin: Option<u32>,
}

/// Where writes wait.
#[derive(Clone, Copy)]
enum Queue {
    /// For the one path that they go by, and behind their puts.
    Pinned,
    /// For any path that carries and places them, in no order.
    Aside,
    /// For any path that suits them.
    Free,
}

impl Queue {
    /// The first one of it that the path may take; its kind, where kinds differ.
    fn next(self, session: &mut Session, path: PathIndex) -> Option<(Option<Kind>, OpId)> {
        let (kind, waiting) = match self {
            Queue::Pinned => return Some((None, *session.pinned.front()?)),
            Queue::Aside => (session.next_aside(path)?, &mut session.aside),
            Queue::Free => (session.next_write(path)?, &mut session.writes),
        };
        Some((Some(kind), *waiting.first_mut(kind)?))
    }

    fn pop(self, session: &mut Session, kind: Option<Kind>) {
        match (self, kind) {
            (Queue::Aside, Some(kind)) => drop(session.aside.pop(kind)),
            (Queue::Free, Some(kind)) => drop(session.writes.pop(kind)),
            (_, _) => drop(session.pinned.pop_front()),
        }
    }
}

/// Puts and signals, and other writes.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Share {
    Signalled,
    Other,
}

impl Path {
    /// Whose turn it is on this path, and then the others.
    fn shares(&self) -> [Share; 2] {
        let others_first = self.ahead_bytes >= self.limits.slice_bytes
            && !mutated(Mutation::PutsBeforeAllOtherWrites);
        let shares = [Share::Signalled, Share::Other];
        if others_first { [shares[1], shares[0]] } else { shares }
    }

    /// A frame costs its bytes, whosever it is, and a short one something, too. Whoever is alone gets ahead by so
    /// much that the others begin, and no more.
    fn took(&mut self, share: Share, bytes: u64) {
        let slice_bytes = self.limits.slice_bytes;
        let cost_bytes = bytes.max(slice_bytes.div_ceil(SHORT_IN_A_ROW_MAX));
        self.ahead_bytes = match share {
            Share::Signalled => self.ahead_bytes.saturating_add(cost_bytes),
            Share::Other if mutated(Mutation::OtherWritesBeforePuts) => u64::MAX,
            Share::Other if mutated(Mutation::ShortWriteCostsASlice) => 0,
            Share::Other => self.ahead_bytes.saturating_sub(cost_bytes),
        };
        self.ahead_bytes = self.ahead_bytes.min(slice_bytes.saturating_mul(2));
    }
}

/// What comes of looking into one of the queues.
enum Found {
    Draft(Draft),
    Wait { until_us: u64 },
    Nothing,
}

impl<P: Clone, C> Sender<P, C> {
    /// The next frame for a path that is up.
    pub fn next_frame(&mut self, id: SessionId, path: PathIndex, now_us: u64) -> Next<P> {
        if !self.has_room(id, path) {
            return Next::Nothing;
        }
        let found = match self.next_message(id).or_else(|| self.next_seal(id, path)) {
            Some(draft) => Found::Draft(draft),
            None => match self.next_again(id, path, now_us) {
                Found::Nothing => self.next_new(id, path, now_us),
                found => found,
            },
        };
        match found {
            Found::Draft(draft) => {
                self.issue(id, path, draft, now_us).map_or(Next::Nothing, Next::Frame)
            }
            Found::Wait { until_us } => Next::Wait { until_us },
            Found::Nothing => Next::Nothing,
        }
    }

    /// Puts and signals, and other writes, take turns.
    fn next_new(&mut self, id: SessionId, index: PathIndex, now_us: u64) -> Found {
        let Some(path) = self.path(id, index) else { return Found::Nothing };
        for share in path.shares() {
            let found = match share {
                Share::Signalled => self.next_signalled(id, index, now_us),
                Share::Other => self.next_write(id, index, Queue::Free, now_us),
            };
            if let (Found::Draft(draft), Some(path)) = (&found, self.path(id, index)) {
                path.took(share, draft.bytes);
            }
            if !matches!(found, Found::Nothing) {
                return found;
            }
        }
        Found::Nothing
    }

    /// Those that have an order and those that have none take turns.
    fn next_signalled(&mut self, id: SessionId, index: PathIndex, now_us: u64) -> Found {
        self.let_leave(id);
        let Some(path) = self.path(id, index) else { return Found::Nothing };
        let aside_first = !path.was_aside;
        for is_aside in [aside_first, !aside_first] {
            let found = if is_aside {
                self.next_write(id, index, Queue::Aside, now_us)
            } else {
                self.next_pinned(id, index, now_us)
            };
            if let (Found::Draft(_), Some(path)) = (&found, self.path(id, index)) {
                path.was_aside = is_aside;
            }
            if !matches!(found, Found::Nothing) {
                return found;
            }
        }
        Found::Nothing
    }

    fn has_room(&mut self, id: SessionId, index: PathIndex) -> bool {
        let imms_max = self.limits.path_imms_max;
        let Some(path) = self.path(id, index).filter(|path| !path.given_up) else { return false };
        if path.ledger.len() < imms_max {
            return path.wire.span() < path.limits.frames_max;
        }
        // Worn out. When nothing is on it any more, nothing has to be asked about it; and as long as nobody needs
        // another one in its place, its end would be the end of the session.
        let ends_idle = mutated(Mutation::WornPathEndsIdleSession);
        if path.wire.outstanding == 0 && (ends_idle || !self.is_idle(id)) {
            if let Some(path) = self.path(id, index) {
                path.given_up = true;
            }
            let why = GivenUp::WornOut;
            self.actions.push_back(Action::GiveUpPath { session: id, path: index, why });
        }
        false
    }

    fn next_message(&mut self, id: SessionId) -> Option<Draft> {
        let session = self.sessions.get_mut(&id)?;
        loop {
            let op_id = *session.messages.front()?;
            let Some(op) = self.ops.running(op_id) else {
                session.messages.pop_front();
                continue;
            };
            let message = match op.message {
                Some(message) => message,
                None if session.may_open_message() => session.open_message(),
                None => return None,
            };
            session.messages.pop_front();
            op.message = Some(message);
            op.queued -= 1;
            let Body::Message { bytes } = op.body else { continue };
            let (part, kind) = (Part::Message { id: message }, FrameKind::Message { id: message });
            let (op, write, source_offset, pin) = (op_id, 0, 0, None);
            return Some(Draft { op, write, part, kind, source_offset, bytes, pin });
        }
    }

    fn next_seal(&mut self, id: SessionId, path: PathIndex) -> Option<Draft> {
        let session = self.sessions.get_mut(&id)?;
        loop {
            let kind = session.next_seal(path)?;
            let seal = session.seals.pop(kind)?;
            let Some(op) = self.ops.running(seal.op) else { continue };
            op.queued -= 1;
            let Body::Write { shape, target, imm, .. } = &op.body else { continue };
            let piece = shape.piece(seal.write)?;
            let kind = FrameKind::Seal {
                target: *target,
                offset: piece.target_offset,
                whole_bytes: piece.bytes,
                imm: *imm,
                checksum: piece.checksum,
            };
            let (op, write, part) = (seal.op, seal.write, Part::Seal);
            // Where the whole begins, for who verifies it on this side.
            let source_offset = piece.source_offset;
            let (bytes, pin) = (0, None);
            return Some(Draft { op, write, part, kind, source_offset, bytes, pin });
        }
    }

    /// A range that did not land may be cut anew: paths differ in `slice_bytes`.
    fn next_again(&mut self, id: SessionId, path: PathIndex, now_us: u64) -> Found {
        let Some(session) = self.sessions.get_mut(&id) else { return Found::Nothing };
        let Some(of) = session.paths.get(&path) else { return Found::Nothing };
        let slice_bytes = of.limits.slice_bytes;
        loop {
            // Their order is of no matter; and what did not land by one path goes by whichever others there are.
            let Some(of_kind) = session.next_again(path) else { return Found::Nothing };
            let Some(again) = session.again.first_mut(of_kind) else { return Found::Nothing };
            let Some(op) = self.ops.running(again.op) else {
                session.again.pop(of_kind);
                continue;
            };
            if let Err(until_us) = self.throttle.check(now_us) {
                return Found::Wait { until_us };
            }
            let Body::Write { shape, target, imm, .. } = &op.body else { return Found::Nothing };
            let Some(piece) = shape.piece(again.write) else { return Found::Nothing };
            let (op_id, write) = (again.op, again.write);
            if again.whole && again.bytes <= slice_bytes {
                let (imm, checksum) = (*imm, piece.checksum);
                let kind = FrameKind::Write {
                    target: *target,
                    offset: piece.target_offset,
                    imm,
                    checksum,
                };
                session.again.pop(of_kind);
                op.queued -= 1;
                self.throttle.sent(now_us, piece.bytes);
                let (part, source_offset, bytes) = (Part::Whole, piece.source_offset, piece.bytes);
                let (op, pin) = (op_id, None);
                return Found::Draft(Draft { op, write, part, kind, source_offset, bytes, pin });
            }
            if again.whole {
                again.whole = false;
                op.split.insert(write, piece.bytes);
            }
            let (start, bytes) = (again.start, again.bytes.min(slice_bytes));
            again.start += bytes;
            again.bytes -= bytes;
            if again.bytes == 0 {
                session.again.pop(of_kind);
                op.queued -= 1;
            }
            self.throttle.sent(now_us, bytes);
            let slice = piece.slice(start, bytes);
            let (offset, imm, checksum) = (slice.target_offset, None, None);
            let kind = FrameKind::Write { target: *target, offset, imm, checksum };
            let (part, source_offset) = (Part::Slice { start, bytes }, slice.source_offset);
            let (op, pin) = (op_id, None);
            return Found::Draft(Draft { op, write, part, kind, source_offset, bytes, pin });
        }
    }

    /// What the path of puts and signals does not carry or does not place leaves it for others, whichever path is
    /// asked, and what comes behind stays.
    fn let_leave(&mut self, id: SessionId) {
        loop {
            let Some(session) = self.sessions.get_mut(&id) else { return };
            let Some(op_id) = session.pinned.front().copied() else { return };
            let stays = mutated(Mutation::PutsStayOnUnsuitablePath);
            let leaves = mutated(Mutation::LaterPutsLeaveToo) && session.aside.len() > 0;
            match self.ops.running(op_id) {
                Some(op) if stays || (session.has_place(op) && !leaves) => return,
                Some(_) => self.leave_order(id, op_id),
                None => drop(session.pinned.pop_front()),
            }
        }
    }

    /// Puts and signals, in order, all by one path.
    fn next_pinned(&mut self, id: SessionId, index: PathIndex, now_us: u64) -> Found {
        loop {
            self.let_leave(id);
            let Some(session) = self.sessions.get_mut(&id) else { return Found::Nothing };
            let Some(op_id) = session.pinned.front().copied() else { return Found::Nothing };
            let Some(op) = self.ops.running(op_id) else { return Found::Nothing };
            if !session.may_pin(index, op) {
                return Found::Nothing;
            }
            let found = match op.done {
                Some(Done::Signal(of)) => self.next_signal(id, index, (op_id, of)),
                _ => self.next_write(id, index, Queue::Pinned, now_us),
            };
            let Some(session) = self.sessions.get(&id) else { return found };
            if !matches!(found, Found::Nothing) || session.pinned.front() == Some(&op_id) {
                return found;
            }
        }
    }

    /// The first one of those that have an order. It waits where its puts are about to have their place in that
    /// order, and leaves it where it is behind something that has none.
    fn next_signal(
        &mut self,
        id: SessionId,
        index: PathIndex,
        (op_id, of): (OpId, PartOf),
    ) -> Found {
        let keeps_order = self.path(id, index).is_some_and(|path| path.keeps_order());
        if !self.may_signal(of, keeps_order) {
            if !keeps_order || self.has_loose(of) {
                self.leave_order(id, op_id);
            }
            return Found::Nothing;
        }
        if let Some(session) = self.sessions.get_mut(&id) {
            session.pinned.pop_front();
        }
        self.ops
            .running(op_id)
            .and_then(|op| signal(op_id, op))
            .map_or(Found::Nothing, Found::Draft)
    }

    fn next_write(&mut self, id: SessionId, path: PathIndex, queue: Queue, now_us: u64) -> Found {
        let Some(session) = self.sessions.get_mut(&id) else { return Found::Nothing };
        let Some(of) = session.paths.get(&path) else { return Found::Nothing };
        let slice_bytes = of.limits.slice_bytes;
        loop {
            let Some((kind, op_id)) = queue.next(session, path) else { return Found::Nothing };
            let op = self.ops.running(op_id);
            let Some(op) = op else {
                queue.pop(session, kind);
                continue;
            };
            let Body::Write { shape, target, imm, .. } = &op.body else {
                queue.pop(session, kind);
                return signal(op_id, op).map_or(Found::Nothing, Found::Draft);
            };
            if op.cutter.is_done(shape) {
                queue.pop(session, kind);
                if let Queue::Pinned = queue {
                    // What comes next has other needs.
                    return Found::Nothing;
                }
                continue;
            }
            if let Err(until_us) = self.throttle.check(now_us) {
                return Found::Wait { until_us };
            }
            let Some(cut) = op.cutter.next(shape, slice_bytes) else {
                queue.pop(session, kind);
                return Found::Nothing;
            };
            let (source_offset, bytes) = (cut.piece.source_offset, cut.piece.bytes);
            let (part, imm, checksum) = match cut.sliced {
                Sliced::Whole => (Part::Whole, *imm, cut.piece.checksum),
                Sliced::Slice { start } => {
                    let whole = shape.piece(cut.write).map_or(0, |piece| piece.bytes);
                    op.split.entry(cut.write).or_insert(whole);
                    let imm = imm.filter(|_| mutated(Mutation::ImmOnSlices));
                    (Part::Slice { start, bytes }, imm, None)
                }
            };
            let offset = cut.piece.target_offset;
            let kind = FrameKind::Write { target: *target, offset, imm, checksum };
            self.throttle.sent(now_us, bytes);
            let is_ordered =
                matches!(queue, Queue::Pinned) || mutated(Mutation::OrderAssumedOnOtherPath);
            let pin = op.pin.filter(|_| is_ordered);
            let (op, write) = (op_id, cut.write);
            return Found::Draft(Draft { op, write, part, kind, source_offset, bytes, pin });
        }
    }

    fn issue(
        &mut self,
        id: SessionId,
        index: PathIndex,
        draft: Draft,
        now_us: u64,
    ) -> Option<Frame<P>> {
        let Draft { op: op_id, write, part, kind, source_offset, bytes, pin } = draft;
        let session = self.sessions.get_mut(&id)?;
        if !session.is_owed(index) {
            session.paths.get_mut(&index)?.heard_us = now_us;
        }
        let path = session.paths.get_mut(&index)?;
        let counted = match kind {
            FrameKind::Write { imm, .. } | FrameKind::Seal { imm, .. } => imm,
            FrameKind::Message { .. } | FrameKind::Signal { .. } => None,
        };
        let entry = counted.map(|imm| path.ledger.entry(imm));
        let (has_pin, is_posted) = (pin.is_some(), false);
        let on_wire = OnWire { op: op_id, write, part, bytes, entry, has_pin, is_posted };
        let sequence = path.wire.issue(on_wire);
        let op = self.ops.get_mut(op_id)?;
        op.frames += 1;
        let payload = op.payload.clone();
        if let Some(group) = op.group() {
            self.groups.frame_issued(group);
        }
        Some(Frame { sequence, op: op_id, kind, payload, source_offset, bytes, pin })
    }
}

/// The frame of a signal that may go.
fn signal<P, C>(id: OpId, op: &mut Op<P, C>) -> Option<Draft> {
    let Body::Signal { target, offset, value, is_fenced, .. } = op.body else { return None };
    op.queued -= 1;
    let kind = FrameKind::Signal { target, offset, value, is_fenced };
    let (op, pin, write, part, source_offset, bytes) = (id, op.pin, 0, Part::Signal, 0, 8);
    Some(Draft { op, write, part, kind, source_offset, bytes, pin })
}
