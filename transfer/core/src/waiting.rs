//! What waits to be put on a path, by what it goes to. Things that the same paths may take are one class, and of a
//! class the one that came first goes first. So a path that asks looks at classes, of which there are few, and never
//! at what waits; and a region of which something is learned changes its class as a whole. Both take a time that grows
//! with the logarithm of how much there is, however many frames a path has lost.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::Bound;

use kvasir_mutation::{Mutation, mutated};

use crate::rails::{Rails, Up};
use crate::regions::Target;

/// What decides which paths may take a thing, as long as nothing new is learned of the region.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Kind {
    // First, so that all of one region lie together.
    pub(crate) target: Target,
    pub(crate) rails: Rails,
    pub(crate) must_be_placed: bool,
}

impl Kind {
    /// Of what goes to the region, none comes before it.
    fn first(target: Target) -> Self {
        Kind { target, rails: Rails::NONE, must_be_placed: false }
    }

    fn class(self, unsuited: Up) -> Class {
        Class { rails: self.rails.without(unsuited), must_be_placed: self.must_be_placed }
    }
}

/// The paths that may take a thing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Class {
    /// Without those that do not carry its region.
    pub(crate) rails: Rails,
    pub(crate) must_be_placed: bool,
}

#[derive(Debug)]
pub(crate) struct Waiting<T> {
    kinds: BTreeMap<Kind, Queue<T>>,
    /// With the number of the first thing of each kind. None is empty.
    classes: BTreeMap<Class, BTreeSet<(u64, Kind)>>,
    /// Whose turn it was last, so that none waits for ever behind another one.
    served: Option<Class>,
    next_number: u64,
    /// Things, of all kinds.
    things: usize,
}

#[derive(Debug)]
struct Queue<T> {
    /// In the order of their numbers. Never empty.
    things: VecDeque<(u64, T)>,
    class: Class,
}

impl<T> Default for Waiting<T> {
    fn default() -> Self {
        let (kinds, classes) = (BTreeMap::new(), BTreeMap::new());
        Waiting { kinds, classes, served: None, next_number: 0, things: 0 }
    }
}

impl<T> Waiting<T> {
    pub(crate) fn len(&self) -> usize {
        self.things
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &T> {
        self.kinds.values().flat_map(|queue| &queue.things).map(|(_, thing)| thing)
    }

    /// Takes out all others.
    pub(crate) fn retain(&mut self, is_kept: impl Fn(&T) -> bool) {
        let Waiting { kinds, classes, things, .. } = self;
        classes.clear();
        *things = 0;
        kinds.retain(|kind, queue| {
            queue.things.retain(|(_, thing)| is_kept(thing));
            *things += queue.things.len();
            let first = queue.things.front().map(|(number, _)| (*number, *kind));
            first.map(|named| classes.entry(queue.class).or_default().insert(named)).is_some()
        });
    }

    /// `unsuited`: the rails that do not carry its region.
    pub(crate) fn push(&mut self, kind: Kind, unsuited: Up, thing: T) {
        let number = self.next_number;
        self.next_number += 1;
        self.things += 1;
        if let Some(queue) = self.kinds.get_mut(&kind) {
            queue.things.push_back((number, thing));
            return;
        }
        let class = kind.class(unsuited);
        self.classes.entry(class).or_default().insert((number, kind));
        self.kinds.insert(kind, Queue { things: VecDeque::from([(number, thing)]), class });
    }

    /// The kind of the first thing of the next class of which `may` says that it may be served.
    pub(crate) fn next(&mut self, may: impl Fn(Class) -> bool) -> Option<Kind> {
        let start = self.served.map_or(Bound::Unbounded, Bound::Excluded);
        let after = self.classes.range((start, Bound::Unbounded));
        let before = self.served.map(|served| self.classes.range(..=served));
        let mut classes = after.chain(before.into_iter().flatten());
        let (class, kinds) = classes.find(|(class, _)| may(**class))?;
        let (_, kind) = *kinds.first()?;
        self.served = Some(*class);
        Some(kind)
    }

    /// The first thing of the kind.
    pub(crate) fn first_mut(&mut self, kind: Kind) -> Option<&mut T> {
        let (_, thing) = self.kinds.get_mut(&kind)?.things.front_mut()?;
        Some(thing)
    }

    /// Takes out the first thing of the kind.
    pub(crate) fn pop(&mut self, kind: Kind) -> Option<T> {
        let queue = self.kinds.get_mut(&kind)?;
        let (number, thing) = queue.things.pop_front()?;
        self.things -= 1;
        let (class, next) = (queue.class, queue.things.front().map(|(number, _)| *number));
        self.leave(class, (number, kind));
        match next {
            Some(next) => drop(self.classes.entry(class).or_default().insert((next, kind))),
            None => drop(self.kinds.remove(&kind)),
        }
        Some(thing)
    }

    fn leave(&mut self, class: Class, named: (u64, Kind)) {
        let Some(kinds) = self.classes.get_mut(&class) else { return };
        kinds.remove(&named);
        if kinds.is_empty() {
            self.classes.remove(&class);
        }
    }

    /// These are the rails now that do not carry the region.
    pub(crate) fn learned(&mut self, target: Target, unsuited: Up) {
        let of_region = self.kinds.range_mut(Kind::first(target)..);
        let of_region = of_region.take_while(|(kind, _)| kind.target == target);
        let mut moved = Vec::new();
        for (kind, queue) in of_region {
            let class = kind.class(unsuited);
            let former = std::mem::replace(&mut queue.class, class);
            let first = queue.things.front().map(|(number, _)| (*number, *kind));
            let is_moved = former != class && !mutated(Mutation::WaitingNotRequeued);
            moved.extend(first.filter(|_| is_moved).map(|named| (former, class, named)));
        }
        for (former, class, named) in moved {
            self.leave(former, named);
            self.classes.entry(class).or_default().insert(named);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;
    use crate::rails::Rail;

    fn rails(of: &[u8]) -> Up {
        let mut up = Up::default();
        of.iter().for_each(|rail| up.add(Rail(*rail)));
        up
    }

    fn kind(key: u64) -> Kind {
        let target = Target { incarnation: 1, key };
        Kind { target, rails: Rails::ANY, must_be_placed: false }
    }

    fn is_empty(waiting: &Waiting<u64>) -> bool {
        let (kinds, classes) = (waiting.kinds.is_empty(), waiting.classes.is_empty());
        assert!(kinds == classes && kinds == (waiting.len() == 0));
        kinds
    }

    /// All that a path on the rail takes.
    fn take_all(waiting: &mut Waiting<u64>, rail: u8) -> Vec<u64> {
        let mut taken = Vec::new();
        while let Some(kind) = waiting.next(|class| class.rails.may(Rail(rail))) {
            taken.extend(waiting.pop(kind));
        }
        taken
    }

    #[test]
    fn what_the_same_paths_may_take_goes_in_the_order_in_which_it_came_whatever_its_region() {
        let mut waiting = Waiting::default();
        for thing in 0..12 {
            waiting.push(kind(thing * 7 % 5), Up::default(), thing);
        }
        let Some(first) = waiting.next(|_| true) else { panic!("twelve are there") };
        assert_eq!(waiting.first_mut(first), Some(&mut 0), "looking takes nothing out");
        assert_eq!(take_all(&mut waiting, 0), (0..12).collect::<Vec<u64>>());
        assert!(is_empty(&waiting));
    }

    #[test]
    fn a_region_changes_its_class_and_others_stay_and_it_may_change_it_back() {
        let mut waiting = Waiting::default();
        for thing in 0..6 {
            waiting.push(kind(thing % 2), Up::default(), thing);
        }
        let advised = Kind { rails: Rails::new([Rail(1)], []), ..kind(0) };
        waiting.push(advised, Up::default(), 6);
        waiting.learned(kind(0).target, rails(&[0]));
        assert_eq!(take_all(&mut waiting, 0), [1, 3, 5]);
        waiting.push(kind(0), rails(&[0]), 7);
        assert!(waiting.next(|class| class.rails.may(Rail(0))).is_none());
        // It was forgotten, and is asked about again.
        waiting.learned(kind(0).target, Up::default());
        let mut left = take_all(&mut waiting, 0);
        left.sort_unstable();
        assert_eq!(left, [0, 2, 4, 6, 7]);
        assert!(is_empty(&waiting));
    }

    #[test]
    fn classes_take_turns() {
        let mut waiting = Waiting::default();
        for thing in 0..6 {
            let unsuited = if thing < 3 { Up::default() } else { rails(&[4]) };
            waiting.push(kind(thing / 3), unsuited, thing);
        }
        assert_eq!(take_all(&mut waiting, 0), [0, 3, 1, 4, 2, 5]);
    }

    #[test]
    fn what_is_taken_out_leaves_the_others_in_their_order() {
        let mut waiting = Waiting::default();
        for thing in 0..12 {
            waiting.push(kind(thing % 3), Up::default(), thing);
        }
        // All of one region, and the first of another one.
        waiting.retain(|thing| thing % 3 != 1 && *thing != 0);
        assert_eq!((waiting.len(), waiting.iter().count()), (7, 7));
        waiting.push(kind(1), Up::default(), 12);
        assert_eq!(take_all(&mut waiting, 0), [2, 3, 5, 6, 8, 9, 11, 12]);
        assert!(is_empty(&waiting));
    }

    /// Thousands of frames to send again cost the next one nothing, wherever they may not go.
    #[test]
    fn a_path_looks_at_classes_and_not_at_what_waits() {
        const THINGS: u64 = 20_000;
        const REGIONS: u64 = 2_000;
        let mut waiting = Waiting::default();
        for thing in 0..THINGS {
            waiting.push(kind(thing % REGIONS), Up::default(), thing);
        }
        for key in 1..REGIONS {
            waiting.learned(kind(key).target, rails(&[0]));
        }
        let looks = Cell::new(0);
        let mut taken = 0;
        while let Some(kind) = waiting.next(|class| {
            looks.set(looks.get() + 1);
            class.rails.may(Rail(0))
        }) {
            taken += waiting.pop(kind).map_or(0, |_| 1);
        }
        assert_eq!(taken, THINGS / REGIONS);
        assert!(looks.get() <= 2 * (taken + 1), "{} looks for {taken}", looks.get());
    }
}
