//! Regions that a rail does not carry, because one of its cards did not take them. Only what goes to such a
//! region is kept off such a rail; everything else goes by it as before. When no rail that is up carries a
//! region, what is for it waits for one that does, until its deadline.

use std::collections::{BTreeMap, VecDeque};

use kvasir_mutation::{Mutation, mutated};

use crate::close::PathIndex;
use crate::op::Body;
use crate::path::OnWire;
use crate::rails::{Rail, Up};
use crate::regions::Target;
use crate::sender::Sender;
use crate::session::SessionId;

/// Regions that are remembered for one session. Beyond it the oldest is forgotten, and asked about again.
const REGIONS_MAX: usize = 4096;

/// What is known of one session.
#[derive(Debug, Default)]
pub(crate) struct Unsuited {
    rails: BTreeMap<Target, Up>,
    /// In the order in which they were learned of.
    order: VecDeque<Target>,
}

impl Unsuited {
    /// The region that is forgotten for it: the one that was learned of first.
    fn learn(&mut self, target: Target, rail: Rail) -> Option<Target> {
        if let Some(rails) = self.rails.get_mut(&target) {
            rails.add(rail);
            return None;
        }
        let is_full = self.order.len() >= REGIONS_MAX;
        let newest_goes = mutated(Mutation::NewestRegionForgottenFirst);
        let oldest = match is_full {
            true if newest_goes => self.order.pop_back(),
            true => self.order.pop_front(),
            false => None,
        };
        if let Some(oldest) = oldest {
            self.rails.remove(&oldest);
        }
        self.rails.entry(target).or_default().add(rail);
        self.order.push_back(target);
        oldest
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.rails.is_empty()
    }

    /// The rails that do not carry the region.
    pub(crate) fn rails(&self, target: Target) -> Up {
        if self.rails.is_empty() {
            return Up::default();
        }
        self.rails.get(&target).copied().unwrap_or_default()
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
        let rail = path.limits.rail;
        let taken: Vec<OnWire> =
            sequences.iter().filter_map(|sequence| path.wire.settle(*sequence)).collect();
        let is_missed = mutated(Mutation::RegionRetriedOnSameRail);
        let rail = if is_missed { Rail::LAST } else { rail };
        let forgotten = session.unsuited.learn(target, rail);
        forgotten.into_iter().chain([target]).for_each(|target| session.sort_anew(target));
        for mut frame in taken {
            if std::mem::take(&mut frame.is_posted)
                && let Some(op) = self.ops.get_mut(frame.op)
            {
                op.posted -= 1;
            }
            self.frame_missed(&frame);
        }
    }

    /// Whether some region is kept off some rail of the session. That is known longer than paths last.
    pub fn has_unsuited(&self, id: SessionId) -> bool {
        self.sessions.get(&id).is_some_and(|session| !session.unsuited.is_empty())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_too_many_regions_the_one_that_was_learned_of_first_is_forgotten() {
        let mut unsuited = Unsuited::default();
        let target = |key| Target { incarnation: 1, key };
        // The lowest key comes last.
        let keys = (1..=REGIONS_MAX as u64).rev();
        let forgotten: Vec<Target> =
            keys.filter_map(|key| unsuited.learn(target(key), Rail(0))).collect();
        assert_eq!(forgotten, []);
        let oldest = target(REGIONS_MAX as u64);
        assert_eq!(unsuited.learn(oldest, Rail(1)), None, "it is known");
        assert_eq!(unsuited.learn(target(0), Rail(0)), Some(oldest));
        let carries = |target| unsuited.rails(target) == Up::default();
        assert!(carries(oldest) && !carries(target(1)) && !carries(target(0)));
        assert_eq!((unsuited.rails.len(), unsuited.order.len()), (REGIONS_MAX, REGIONS_MAX));
    }
}
