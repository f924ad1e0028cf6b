//! What a path puts on the wire next: messages, then seals, then what must be sent again, then new writes.
//! Of those, puts with their signals go first, but let others pass after each slice's worth of bytes: neither
//! waits for the end of the other. Whichever path has room is asked, so unequal paths get their unequal shares.

use crate::close::PathIndex;
use crate::op::{Body, Done, Op, OpId};
use crate::path::{OnWire, Part};
use crate::plan::Sliced;
use crate::rails::Rails;
use crate::sender::{Action, Frame, FrameKind, GivenUp, Next, Sender};
use crate::session::{Session, SessionId};

/// A slice's worth of puts and signals is never more frames than this.
const PINNED_IN_A_ROW_MAX: u64 = 16;

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
    /// For any path.
    Free,
}

impl Queue {
    /// The first one of it that the path may take.
    fn next(self, session: &mut Session, path: PathIndex) -> Option<(Rails, OpId)> {
        match self {
            Queue::Pinned => Some((Rails::ANY, *session.pinned.front()?)),
            Queue::Free => session.next_write(path),
        }
    }

    fn pop(self, session: &mut Session, rails: Rails) {
        match self {
            Queue::Pinned => drop(session.pinned.pop_front()),
            Queue::Free => session.writes.pop(rails),
        }
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

    /// What is pinned and what is free take turns.
    fn next_new(&mut self, id: SessionId, index: PathIndex, now_us: u64) -> Found {
        let path = self.path(id, index);
        if path.is_some_and(|path| path.pinned_bytes >= path.limits.slice_bytes) {
            let found = self.next_write(id, index, Queue::Free, now_us);
            if !matches!(found, Found::Nothing) {
                if let (Found::Draft(_), Some(path)) = (&found, self.path(id, index)) {
                    path.pinned_bytes = 0;
                }
                return found;
            }
        }
        match self.next_pinned(id, index, now_us) {
            Found::Nothing => self.next_write(id, index, Queue::Free, now_us),
            Found::Draft(draft) => {
                if let Some(path) = self.path(id, index) {
                    let share_bytes = path.limits.slice_bytes.div_ceil(PINNED_IN_A_ROW_MAX);
                    let bytes = draft.bytes.max(share_bytes);
                    path.pinned_bytes = path.pinned_bytes.saturating_add(bytes);
                }
                Found::Draft(draft)
            }
            found => found,
        }
    }

    fn has_room(&mut self, id: SessionId, index: PathIndex) -> bool {
        let imms_max = self.limits.path_imms_max;
        let Some(session) = self.sessions.get_mut(&id) else { return false };
        let Some(path) = session.paths.get_mut(&index) else { return false };
        if path.ledger.len() >= imms_max {
            // Worn out. When nothing is on it any more, nothing has to be asked about it.
            if path.wire.outstanding == 0 && !path.given_up {
                path.given_up = true;
                let why = GivenUp::WornOut;
                self.actions.push_back(Action::GiveUpPath { session: id, path: index, why });
            }
            return false;
        }
        !path.given_up && path.wire.span() < path.limits.frames_max
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
        let rail = session.paths.get(&path)?.limits.rail;
        loop {
            let (ops, unsuited) = (&mut self.ops, &session.unsuited);
            let suits = |op: Option<&mut Op<P, C>>| {
                op.is_none_or(|op| !unsuited.of(&op.body).contains(rail))
            };
            // The first, unless the rail does not carry some region.
            let mut seals = session.seals.iter();
            let at = seals.position(|seal| unsuited.is_empty() || suits(ops.running(seal.op)))?;
            let seal = session.seals.remove(at)?;
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
        let (slice_bytes, places) = (of.limits.slice_bytes, of.places());
        loop {
            // Their order is of no matter; and what did not land by one path goes by whichever others there are.
            let at = {
                let (ops, takes) = (&mut self.ops, session.takes_again(path));
                let suits = |op: Option<&mut Op<P, C>>| {
                    op.is_none_or(|op| (places || !op.must_be_placed()) && takes(op))
                };
                session.again.iter().position(|again| suits(ops.running(again.op)))
            };
            let Some(at) = at else { return Found::Nothing };
            session.again.swap(0, at);
            let Some(again) = session.again.front_mut() else { return Found::Nothing };
            let Some(op) = self.ops.running(again.op) else {
                session.again.pop_front();
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
                session.again.pop_front();
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
                session.again.pop_front();
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

    /// Puts and signals, in order, all by one path. One that lags behind holds up those after it.
    fn next_pinned(&mut self, id: SessionId, index: PathIndex, now_us: u64) -> Found {
        self.repin(id);
        let found = self.next_write(id, index, Queue::Pinned, now_us);
        if !matches!(found, Found::Nothing) {
            return found;
        }
        let Some(session) = self.sessions.get(&id) else { return Found::Nothing };
        let is_pinned_here = session.pinned_path == Some(index);
        let (Some(op_id), Some(path)) = (session.pinned.front(), session.paths.get(&index)) else {
            return Found::Nothing;
        };
        let (op_id, keeps_order, places) = (*op_id, path.keeps_order(), path.places());
        let Some(op) = self.ops.running(op_id).filter(|_| is_pinned_here) else {
            return Found::Nothing;
        };
        let Body::Signal { target, offset, value, is_fenced, .. } = op.body else {
            return Found::Nothing;
        };
        let (Some(Done::Signal(of)), pin) = (&op.done, op.pin) else { return Found::Nothing };
        let of = *of;
        if session.unsuited.rails(target).contains(path.limits.rail) {
            return Found::Nothing;
        }
        if !places || !self.may_signal(of, keeps_order) {
            return Found::Nothing;
        }
        let Some(session) = self.sessions.get_mut(&id) else { return Found::Nothing };
        session.pinned.pop_front();
        if let Some(op) = self.ops.get_mut(op_id) {
            op.queued -= 1;
        }
        let kind = FrameKind::Signal { target, offset, value, is_fenced };
        let (op, write, part, source_offset, bytes) = (op_id, 0, Part::Signal, 0, 8);
        Found::Draft(Draft { op, write, part, kind, source_offset, bytes, pin })
    }

    fn next_write(&mut self, id: SessionId, path: PathIndex, queue: Queue, now_us: u64) -> Found {
        let Some(session) = self.sessions.get_mut(&id) else { return Found::Nothing };
        let Some(of) = session.paths.get(&path) else { return Found::Nothing };
        let (slice_bytes, rail, places) = (of.limits.slice_bytes, of.limits.rail, of.places());
        loop {
            let Some((rails, op_id)) = queue.next(session, path) else { return Found::Nothing };
            let op = self.ops.running(op_id);
            let Some(op) = op else {
                queue.pop(session, rails);
                continue;
            };
            if let Queue::Pinned = queue {
                let kept_off = session.kept_off(op);
                let is_unplaced = op.must_be_placed() && !places;
                if is_unplaced || kept_off.contains(rail) || !session.may_pin(path, kept_off) {
                    return Found::Nothing;
                }
            }
            let Body::Write { shape, target, imm, .. } = &op.body else { return Found::Nothing };
            if op.cutter.is_done(shape) {
                queue.pop(session, rails);
                continue;
            }
            if let Err(until_us) = self.throttle.check(now_us) {
                return Found::Wait { until_us };
            }
            let Some(cut) = op.cutter.next(shape, slice_bytes) else {
                queue.pop(session, rails);
                continue;
            };
            let (source_offset, bytes) = (cut.piece.source_offset, cut.piece.bytes);
            let (part, imm, checksum) = match cut.sliced {
                Sliced::Whole => (Part::Whole, *imm, cut.piece.checksum),
                Sliced::Slice { start } => {
                    let whole = shape.piece(cut.write).map_or(0, |piece| piece.bytes);
                    op.split.entry(cut.write).or_insert(whole);
                    (Part::Slice { start, bytes }, None, None)
                }
            };
            let offset = cut.piece.target_offset;
            let kind = FrameKind::Write { target: *target, offset, imm, checksum };
            self.throttle.sent(now_us, bytes);
            let (op, write, pin) = (op_id, cut.write, op.pin);
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
