//! Regions that a rail does not carry, because one of its cards did not take them. Only what goes to such a
//! region is kept off such a rail; everything else goes by it as before. When no rail that is up carries a
//! region, what is for it waits for one that does, until its deadline.

use std::collections::BTreeMap;

use crate::close::PathIndex;
use crate::op::Body;
use crate::path::OnWire;
use crate::rails::{Rail, Rails, Up};
use crate::regions::Target;
use crate::sender::Sender;
use crate::session::{Session, SessionId};

/// Regions that are remembered for one session. Beyond it one is forgotten, and asked about again.
const REGIONS_MAX: usize = 4096;

/// What is known of one session.
#[derive(Debug, Default)]
pub(crate) struct Unsuited(BTreeMap<Target, Up>);

impl Unsuited {
    fn learn(&mut self, target: Target, rail: Rail) {
        if self.0.len() >= REGIONS_MAX && !self.0.contains_key(&target) {
            self.0.pop_first();
        }
        self.0.entry(target).or_default().add(rail);
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The rails that do not carry the region.
    pub(crate) fn rails(&self, target: Target) -> Up {
        if self.0.is_empty() {
            return Up::default();
        }
        self.0.get(&target).copied().unwrap_or_default()
    }

    /// Those that do not carry what the operation goes to.
    pub(crate) fn of(&self, body: &Body) -> Up {
        body.target().map_or_else(Up::default, |target| self.rails(target))
    }
}

impl Body {
    pub(crate) fn target(&self) -> Option<Target> {
        match self {
            Body::Write { target, .. } | Body::Signal { target, .. } => Some(*target),
            Body::Message { .. } => None,
        }
    }
}

impl<P: Clone, C> Sender<P, C> {
    /// The path does not carry the region, and no path of its rail does: from now on nothing for it is put on
    /// one. What is named here was not sent, and goes by others.
    pub fn unsuited(
        &mut self,
        id: SessionId,
        index: PathIndex,
        (target, sequences): (Target, &[u64]),
        now_us: u64,
    ) {
        let Some(session) = self.sessions.get_mut(&id) else { return };
        let Some(path) = session.paths.get_mut(&index) else { return };
        path.heard(now_us);
        session.unsuited.learn(target, path.limits.rail);
        let taken: Vec<OnWire> =
            sequences.iter().filter_map(|sequence| path.wire.settle(*sequence)).collect();
        let Session { writes, unsuited, .. } = session;
        let ops = &mut self.ops;
        writes.requeue(|rails, op| {
            let target = ops.get_mut(op).and_then(|op| op.body.target());
            target.map_or(rails, |target| rails.without(unsuited.rails(target)))
        });
        for mut frame in taken {
            if std::mem::take(&mut frame.is_posted)
                && let Some(op) = self.ops.get_mut(frame.op)
            {
                op.posted -= 1;
            }
            self.frame_missed(&frame);
        }
        self.repin(id);
    }

    /// Puts and signals leave their path when it does not carry the next of them, or does not place what a signal
    /// is to follow. Those that are on it keep their place there, which is none on the path that comes after:
    /// signals wait until they have landed.
    pub(crate) fn repin(&mut self, id: SessionId) {
        let Some(session) = self.sessions.get_mut(&id) else { return };
        let path = session.pinned_path.and_then(|path| session.paths.get_mut(&path));
        let Some(path) = path.filter(|path| !session.unsuited.is_empty() || !path.places()) else {
            return;
        };
        while session.pinned.front().is_some_and(|op| self.ops.running(*op).is_none()) {
            session.pinned.pop_front();
        }
        let next = session.pinned.front().and_then(|op| self.ops.running(*op));
        let Some(op) = next else { return };
        let is_unplaced = op.must_be_placed() && !path.places();
        if !is_unplaced && !session.unsuited.of(&op.body).contains(path.limits.rail) {
            return;
        }
        session.pinned_path = None;
        for frame in path.wire.iter_mut() {
            frame.has_pin = false;
            if std::mem::take(&mut frame.is_posted)
                && let Some(op) = self.ops.get_mut(frame.op)
            {
                op.posted -= 1;
            }
        }
    }

    /// Whether some region is kept off some rail of the session. That is known longer than paths last.
    pub fn has_unsuited(&self, id: SessionId) -> bool {
        self.sessions.get(&id).is_some_and(|session| !session.unsuited.is_empty())
    }

    /// The rails for a new operation of the session.
    pub(crate) fn suited(&self, id: SessionId, rails: Rails, body: &Body) -> Rails {
        let session = self.sessions.get(&id);
        session.map_or(rails, |session| rails.without(session.unsuited.of(body)))
    }
}
