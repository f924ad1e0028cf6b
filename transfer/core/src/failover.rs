//! What becomes of the frames of a path that has failed. Nobody here knows which of them have landed, so
//! the receiver is asked, through another path. It closes the failed one first; only then, and only what
//! did not land, is sent again.

use std::collections::BTreeSet;

use kvasir_mutation::{Mutation, mutated};

use crate::close::{CloseVerdict, PathIndex};
use crate::op::Body;
use crate::outcome::WriteError;
use crate::path::{OnWire, Part};
use crate::rails::Rails;
use crate::sender::{Action, GivenUp, Sender, Settled};
use crate::session::{Again, Closing, Seal, Session, SessionId};

/// Paths of one session that have failed and are not closed yet: beyond it the session is given up.
const CLOSING_MAX: usize = 64;

/// What the receiver's verdict says of one frame.
enum Fate {
    Landed,
    /// It did not, and never will.
    Missed,
    Unknown,
}

impl<P: Clone, C> Sender<P, C> {
    /// A path is closed on this side. What was on it is undecided until the receiver has said what
    /// landed, or until the session is lost.
    pub fn path_lost(&mut self, id: SessionId, index: PathIndex, now_us: u64) {
        let Some(session) = self.sessions.get_mut(&id) else { return };
        let Some(mut path) = session.paths.remove(&index) else { return };
        for closing in session.closing.values_mut() {
            if closing.through == Some(index) {
                closing.through = None;
            }
        }
        if session.pinned_path == Some(index) {
            session.pinned_path = None;
        }
        let mut frames = path.wire.drain();
        for frame in frames.iter_mut().filter(|frame| frame.has_pin) {
            // Whatever is sent again comes behind what others have put there meanwhile.
            let was_posted =
                !mutated(Mutation::OrderKeptAfterFailover) && std::mem::take(&mut frame.is_posted);
            if let Some(op) = self.ops.get_mut(frame.op) {
                op.posted -= usize::from(was_posted);
                op.is_loose = true;
            }
        }
        let request = path.request(index, &frames);
        let (places, through, was_asked) = (path.places(), None, false);
        let (ledger, rail) = (path.ledger, path.limits.rail);
        let is_early = mutated(Mutation::ResendBeforePathClosed);
        let resent_early = if is_early { std::mem::take(&mut frames) } else { Vec::new() };
        let closing = Closing { frames, ledger, rail, places, request, through, was_asked };
        session.closing.insert(index, closing);
        if session.closing.len() > CLOSING_MAX {
            self.actions.push_back(Action::GiveUpSession(id));
        }
        if session.paths.is_empty() {
            session.pathless_us = now_us;
        }
        resent_early.iter().for_each(|frame| self.frame_missed(frame));
        self.ask_about_closing(id, now_us);
    }

    /// Asks about every failed path that is not being asked about.
    pub(crate) fn ask_about_closing(&mut self, id: SessionId, now_us: u64) {
        let Some(session) = self.sessions.get_mut(&id) else { return };
        let usable = session.paths.iter().find(|(_, path)| !path.given_up);
        let Some(through) = usable.map(|(index, _)| *index) else { return };
        let owed = session.is_owed(through);
        let mut any = false;
        for closing in session.closing.values_mut().filter(|closing| closing.through.is_none()) {
            any = true;
            closing.through = Some(through);
            closing.was_asked = true;
            let close = closing.request.clone();
            self.actions.push_back(Action::ClosePath { session: id, through, close });
        }
        if any
            && !owed
            && let Some(path) = session.paths.get_mut(&through)
        {
            path.heard_us = now_us;
        }
    }

    /// The receiver has closed the path `index`, and says so through another one: nothing lands through
    /// it any more. `false` when it was not asked about it, or has answered already.
    pub fn path_closed(
        &mut self,
        id: SessionId,
        (through, index): (PathIndex, PathIndex),
        verdict: &CloseVerdict,
        now_us: u64,
    ) -> bool {
        let Some(session) = self.sessions.get_mut(&id) else { return false };
        if let Some(path) = session.paths.get_mut(&through) {
            path.heard(now_us);
        }
        if !session.closing.get(&index).is_some_and(|closing| closing.was_asked) {
            return false;
        }
        let Some(closing) = session.closing.remove(&index) else { return false };
        let verdict = Verdict::new(verdict);
        for frame in &closing.frames {
            let imm = frame.entry.map(|entry| closing.ledger.imm(entry));
            match verdict.fate(frame, imm) {
                Fate::Landed => self.frame_settled(*frame, Settled::Landed),
                Fate::Missed if mutated(Mutation::ResendLeftOut) => {
                    self.frame_settled(*frame, Settled::Landed);
                }
                Fate::Missed => self.frame_missed(frame),
                Fate::Unknown => self.frame_failed(frame, WriteError::PeerGone),
            }
        }
        true
    }

    /// Nothing of the frame is on any path, nor will land: it may be sent again.
    pub(crate) fn frame_missed(&mut self, frame: &OnWire) {
        let Some(op) = self.ops.get_mut(frame.op) else { return };
        let draining = op.group().is_some_and(|group| self.groups.is_draining(group));
        if (op.stopped || draining) && !mutated(Mutation::EndedOperationResent) {
            self.frame_failed(frame, WriteError::Cancelled);
            return;
        }
        op.frames -= 1;
        op.queued += 1;
        if let Some(group) = op.group() {
            self.groups.frame_settled(group);
        }
        op.is_loose = true;
        let (id, write, kind) = (frame.op, frame.write, op.kind(Rails::ANY));
        let whole_bytes = match &op.body {
            Body::Write { shape, .. } => shape.piece(write).map_or(0, |piece| piece.bytes),
            Body::Message { .. } | Body::Signal { .. } => 0,
        };
        let Some(session) = self.sessions.get_mut(&op.session) else { return };
        match (frame.part, kind) {
            // Behind its puts, which may have to be sent again as well.
            (Part::Signal, _) => session.pinned.push_back(id),
            (Part::Message { .. }, _) => session.messages.push_back(id),
            (Part::Seal, Some(kind)) => session.push_seal(Seal { op: id, write }, kind),
            (Part::Whole, Some(kind)) => {
                let (start, bytes, whole) = (0, whole_bytes, true);
                session.push_again(Again { op: id, write, start, bytes, whole }, kind);
            }
            (Part::Slice { start, bytes }, Some(kind)) => {
                session.push_again(Again { op: id, write, start, bytes, whole: false }, kind);
            }
            (Part::Seal | Part::Whole | Part::Slice { .. }, None) => {
                debug_assert!(false, "whatever is no message goes to a region");
            }
        }
    }

    /// The frame is over, and with it the operation.
    fn frame_failed(&mut self, frame: &OnWire, error: WriteError) {
        let Some(op) = self.ops.get_mut(frame.op) else { return };
        op.frames -= 1;
        op.stop(error);
        if let Some(group) = op.group() {
            self.groups.frame_settled(group);
        }
        self.finish_if_over(frame.op);
    }

    // ---- patience ----

    pub(crate) fn give_up_silent(&mut self, now_us: u64) {
        let limits = self.limits;
        for (id, session) in &mut self.sessions {
            if session.paths.is_empty() {
                let patience_us =
                    if session.was_up { limits.grace_us } else { limits.peer_timeout_us };
                if now_us >= session.pathless_us.saturating_add(patience_us) {
                    session.pathless_us = now_us;
                    self.actions.push_back(Action::GiveUpSession(*id));
                }
                continue;
            }
            let indexes: Vec<PathIndex> = session.paths.keys().copied().collect();
            for index in indexes {
                let owed = session.is_owed(index);
                let Some(path) = session.paths.get_mut(&index) else { continue };
                if now_us >= path.silent_us(owed, limits.peer_timeout_us, limits.heartbeats) {
                    path.heard_us = now_us;
                    path.asked_us = None;
                    path.given_up = true;
                    let why = GivenUp::Silent;
                    self.actions.push_back(Action::GiveUpPath { session: *id, path: index, why });
                }
            }
        }
    }

    pub(crate) fn patience_ends_us(&self, session: &Session) -> u64 {
        let limits = &self.limits;
        if session.paths.is_empty() {
            let patience_us = if session.was_up { limits.grace_us } else { limits.peer_timeout_us };
            return session.pathless_us.saturating_add(patience_us);
        }
        let silent = session.paths.iter().map(|(index, path)| {
            path.silent_us(session.is_owed(*index), limits.peer_timeout_us, limits.heartbeats)
        });
        silent.min().unwrap_or(u64::MAX)
    }
}

/// A verdict as it is looked into. It comes from a peer, so its lists may be in any order.
struct Verdict {
    forgotten: bool,
    landed: BTreeSet<u32>,
    unknown: BTreeSet<u32>,
    delivered: BTreeSet<u64>,
}

impl Verdict {
    fn new(verdict: &CloseVerdict) -> Self {
        Verdict {
            forgotten: verdict.forgotten,
            landed: verdict.landed.iter().copied().collect(),
            unknown: verdict.unknown.iter().copied().collect(),
            delivered: verdict.delivered.iter().copied().collect(),
        }
    }

    /// What was not counted may be written twice: whoever has not been told of its end does not use
    /// what it writes.
    fn fate(&self, frame: &OnWire, imm: Option<u32>) -> Fate {
        match (frame.part, imm) {
            _ if self.forgotten => Fate::Unknown,
            (Part::Message { id }, _) if self.delivered.contains(&id) => Fate::Landed,
            (Part::Whole | Part::Seal, Some(imm)) if self.landed.contains(&imm) => Fate::Landed,
            (Part::Whole | Part::Seal, Some(imm)) if self.unknown.contains(&imm) => Fate::Unknown,
            _ => Fate::Missed,
        }
    }
}
