//! What a node remembers of pushes that it does not hold any more, for receivers that ask it to
//! stop one: those it must never begin (the ask came first), and those whose end it is unsure of (a
//! path was lost with writes on it).

use std::collections::{BTreeSet, VecDeque};

use kvasir_mutation::{Mutation, mutated};

use super::PushName;

/// Each kind is bounded. What is forgotten errs on the safe side, see below.
const NAMES_MAX: usize = 65_536;

#[derive(Debug, Default)]
pub struct SentPushes {
    stopped: Names,
    unsure: Names,
}

#[derive(Debug, Default)]
struct Names {
    set: BTreeSet<PushName>,
    order: VecDeque<PushName>,
    forgot: bool,
}

impl Names {
    fn insert(&mut self, name: PushName) {
        if !self.set.insert(name) {
            return;
        }
        self.order.push_back(name);
        if self.order.len() > NAMES_MAX
            && let Some(oldest) = self.order.pop_front()
        {
            self.set.remove(&oldest);
            self.forgot = true;
        }
    }
}

impl SentPushes {
    /// The receiver asked to stop it: it must not begin.
    pub fn stop(&mut self, name: PushName) {
        self.stopped.insert(name);
    }

    pub fn is_stopped(&self, name: PushName) -> bool {
        self.stopped.set.contains(&name) && !mutated(Mutation::StoppedPushStarts)
    }

    /// A path was lost with its writes on it.
    pub fn unsure(&mut self, name: PushName) {
        self.unsure.insert(name);
    }

    /// Whether a write of it may still land. Once a name was forgotten, every push that is not held
    /// any more counts as unsure: the receiver then cuts this node off, which is always right.
    pub fn is_unsure(&self, name: PushName) -> bool {
        self.unsure.forgot || self.unsure.set.contains(&name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_forgotten_counts_as_unsure() {
        let name = |imm| PushName { receiver: 1, imm };
        let mut pushes = SentPushes::default();
        pushes.unsure(name(7));
        assert!(pushes.is_unsure(name(7)) && !pushes.is_unsure(name(8)));
        for imm in 0..NAMES_MAX as u32 + 8 {
            pushes.unsure(name(100 + imm));
        }
        assert!(pushes.is_unsure(name(7)) && pushes.is_unsure(name(8)));
    }

    #[test]
    fn a_push_that_was_stopped_before_it_began_is_known() {
        let mut pushes = SentPushes::default();
        let name = PushName { receiver: 1, imm: 2 };
        assert!(!pushes.is_stopped(name));
        pushes.stop(name);
        pushes.stop(name);
        assert!(pushes.is_stopped(name));
    }
}
