//! Groups of writes that are drained together. A group lives while it has operations or frames on the
//! wire; it remembers longer that a path was lost under it.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use kvasir_mutation::{Mutation, mutated};

use crate::outcome::{Outcome, WriteError};

#[derive(Debug)]
pub(crate) struct Groups<C> {
    live: BTreeMap<u64, Group<C>>,
    /// Groups with frames that were lost undecided, oldest first.
    undecided: BTreeSet<u64>,
    undecided_order: VecDeque<u64>,
}

#[derive(Debug)]
struct Group<C> {
    operations: usize,
    frames: usize,
    draining: Vec<C>,
}

const UNDECIDED_MAX: usize = 65_536;

impl<C> Groups<C> {
    pub(crate) fn new() -> Self {
        Groups {
            live: BTreeMap::new(),
            undecided: BTreeSet::new(),
            undecided_order: VecDeque::new(),
        }
    }

    pub(crate) fn is_draining(&self, group: u64) -> bool {
        self.live.get(&group).is_some_and(|group| !group.draining.is_empty())
    }

    pub(crate) fn operation_begun(&mut self, group: u64) {
        let empty = Group { operations: 0, frames: 0, draining: Vec::new() };
        self.live.entry(group).or_insert(empty).operations += 1;
    }

    pub(crate) fn frame_issued(&mut self, group: u64) {
        if let Some(group) = self.live.get_mut(&group) {
            group.frames += 1;
        }
    }

    pub(crate) fn frame_settled(&mut self, group: u64) {
        if let Some(group) = self.live.get_mut(&group) {
            group.frames -= 1;
        }
    }

    /// A frame whose fate will never be known here.
    pub(crate) fn frame_lost(&mut self, group: u64) {
        self.frame_settled(group);
        if self.undecided.insert(group) {
            self.undecided_order.push_back(group);
            if self.undecided_order.len() > UNDECIDED_MAX
                && let Some(oldest) = self.undecided_order.pop_front()
            {
                self.undecided.remove(&oldest);
            }
        }
    }

    /// An operation is over and has no frame on the wire. Returns who waited for the group.
    pub(crate) fn operation_ended(&mut self, group: u64) -> (Vec<C>, Outcome) {
        if let Some(live) = self.live.get_mut(&group) {
            live.operations -= 1;
        }
        self.settle(group)
    }

    /// Waits for the group's end. Returns at once who waited when there is nothing to wait for.
    pub(crate) fn drain(&mut self, group: u64, waiter: C) -> (Vec<C>, Outcome) {
        match self.live.get_mut(&group) {
            Some(live) if !mutated(Mutation::DrainedTooEarly) => {
                live.draining.push(waiter);
                self.settle(group)
            }
            _ => (vec![waiter], self.verdict(group)),
        }
    }

    pub(crate) fn drain_waiters(&mut self) -> Vec<C> {
        std::mem::take(&mut self.live).into_values().flat_map(|group| group.draining).collect()
    }

    fn settle(&mut self, group: u64) -> (Vec<C>, Outcome) {
        let over = |group: &Group<C>| group.operations == 0 && group.frames == 0;
        if !self.live.get(&group).is_some_and(over) {
            return (Vec::new(), Ok(()));
        }
        let waiters = self.live.remove(&group).map(|group| group.draining);
        (waiters.unwrap_or_default(), self.verdict(group))
    }

    fn verdict(&self, group: u64) -> Outcome {
        if self.undecided.contains(&group) { Err(WriteError::PeerGone) } else { Ok(()) }
    }
}
