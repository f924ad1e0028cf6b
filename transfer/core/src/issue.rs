//! What a path puts on the wire next: messages, then seals, then what must be sent again, then new
//! writes. Whichever path has room is asked, so unequal paths get their unequal shares.

use crate::close::PathIndex;
use crate::op::{Body, OpId};
use crate::path::{OnWire, Part};
use crate::plan::Sliced;
use crate::sender::{Action, Frame, FrameKind, GivenUp, Next, Sender};
use crate::session::SessionId;

/// A frame that is about to be issued.
struct Draft {
    op: OpId,
    write: usize,
    part: Part,
    kind: FrameKind,
    source_offset: u64,
    bytes: u64,
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
        let found = match self.next_message(id).or_else(|| self.next_seal(id)) {
            Some(draft) => Found::Draft(draft),
            None => match self.next_again(id, path, now_us) {
                Found::Nothing => self.next_write(id, path, now_us),
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
            return Some(Draft { op: op_id, write: 0, part, kind, source_offset: 0, bytes });
        }
    }

    fn next_seal(&mut self, id: SessionId) -> Option<Draft> {
        let session = self.sessions.get_mut(&id)?;
        loop {
            let seal = session.seals.pop_front()?;
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
            return Some(Draft { op, write, part, kind, source_offset, bytes: 0 });
        }
    }

    /// A range that did not land may be cut anew: paths differ in `slice_bytes`.
    fn next_again(&mut self, id: SessionId, path: PathIndex, now_us: u64) -> Found {
        let Some(session) = self.sessions.get_mut(&id) else { return Found::Nothing };
        let Some(slice_bytes) = session.paths.get(&path).map(|path| path.limits.slice_bytes) else {
            return Found::Nothing;
        };
        loop {
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
                return Found::Draft(Draft { op: op_id, write, part, kind, source_offset, bytes });
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
            return Found::Draft(Draft { op: op_id, write, part, kind, source_offset, bytes });
        }
    }

    fn next_write(&mut self, id: SessionId, path: PathIndex, now_us: u64) -> Found {
        let Some(session) = self.sessions.get_mut(&id) else { return Found::Nothing };
        let Some(slice_bytes) = session.paths.get(&path).map(|path| path.limits.slice_bytes) else {
            return Found::Nothing;
        };
        loop {
            let Some(op_id) = session.writes.front().copied() else { return Found::Nothing };
            let op = self.ops.running(op_id);
            let Some(op) = op else {
                session.writes.pop_front();
                continue;
            };
            let Body::Write { shape, target, imm, .. } = &op.body else { return Found::Nothing };
            if op.cutter.is_done(shape) {
                session.writes.pop_front();
                continue;
            }
            if let Err(until_us) = self.throttle.check(now_us) {
                return Found::Wait { until_us };
            }
            let Some(cut) = op.cutter.next(shape, slice_bytes) else {
                session.writes.pop_front();
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
            let draft = Draft { op: op_id, write: cut.write, part, kind, source_offset, bytes };
            return Found::Draft(draft);
        }
    }

    fn issue(
        &mut self,
        id: SessionId,
        index: PathIndex,
        draft: Draft,
        now_us: u64,
    ) -> Option<Frame<P>> {
        let Draft { op: op_id, write, part, kind, source_offset, bytes } = draft;
        let session = self.sessions.get_mut(&id)?;
        if !session.is_owed(index) {
            session.paths.get_mut(&index)?.heard_us = now_us;
        }
        let path = session.paths.get_mut(&index)?;
        let counted = match kind {
            FrameKind::Write { imm, .. } | FrameKind::Seal { imm, .. } => imm,
            FrameKind::Message { .. } => None,
        };
        let entry = counted.map(|imm| path.ledger.entry(imm));
        let sequence = path.wire.issue(OnWire { op: op_id, write, part, entry });
        let op = self.ops.get_mut(op_id)?;
        op.frames += 1;
        let payload = op.payload.clone();
        if let Some(group) = op.group() {
            self.groups.frame_issued(group);
        }
        Some(Frame { sequence, op: op_id, kind, payload, source_offset, bytes })
    }
}
