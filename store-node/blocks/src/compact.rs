//! What the tables keep a million times, in few bytes: values that many rows share, and links between rows.

use std::collections::HashMap;
use std::hash::Hash;

use kvasir_proto::SlotIndex;

/// Values that many rows share, each kept once and counted. The map is never iterated.
#[derive(Debug)]
pub(crate) struct Interned<T> {
    values: Vec<(T, u32)>,
    ids: HashMap<T, u32>,
    /// Places of values that nobody has any more.
    free: Vec<u32>,
    /// The id asked for last: rows that come together share their values.
    latest: u32,
}

impl<T: Copy + Eq + Hash> Interned<T> {
    pub(crate) fn new() -> Self {
        Interned { values: Vec::new(), ids: HashMap::new(), free: Vec::new(), latest: 0 }
    }

    /// The id of a value, which one more row has now.
    pub(crate) fn take(&mut self, value: T) -> u32 {
        let is_latest = |(kept, rows): &(T, u32)| *rows > 0 && *kept == value;
        let known = match self.values.get(self.latest as usize).filter(|kept| is_latest(kept)) {
            Some(_) => Some(self.latest),
            None => self.ids.get(&value).copied(),
        };
        let id = known.unwrap_or_else(|| self.insert(value));
        self.values[id as usize].1 += 1;
        self.latest = id;
        id
    }

    fn insert(&mut self, value: T) -> u32 {
        let id = self.free.pop().unwrap_or_else(|| {
            self.values.push((value, 0));
            (self.values.len() - 1) as u32
        });
        self.values[id as usize] = (value, 0);
        self.ids.insert(value, id);
        id
    }

    /// One row has it no more.
    pub(crate) fn give_back(&mut self, id: u32) {
        let (value, rows) = &mut self.values[id as usize];
        *rows -= 1;
        if *rows == 0 {
            self.ids.remove(value);
            self.free.push(id);
        }
    }

    /// The value of an id that a row has.
    pub(crate) fn get(&self, id: u32) -> T {
        self.values[id as usize].0
    }

    /// How often each value is kept.
    #[cfg(test)]
    fn rows(&self) -> Vec<u32> {
        self.values.iter().map(|(_, rows)| *rows).filter(|rows| *rows > 0).collect()
    }
}

/// A slot or none, in four bytes. There is no slot of the highest number: it would not have been asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Link(u32);

impl Link {
    pub(crate) const NONE: Link = Link(u32::MAX);

    pub(crate) fn slot(self) -> Option<SlotIndex> {
        (self != Link::NONE).then_some(SlotIndex(self.0))
    }
}

impl From<Option<SlotIndex>> for Link {
    fn from(slot: Option<SlotIndex>) -> Self {
        slot.map_or(Link::NONE, |slot| Link(slot.0))
    }
}

impl From<SlotIndex> for Link {
    fn from(slot: SlotIndex) -> Self {
        Link(slot.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_is_kept_once_for_as_long_as_a_row_has_it() {
        let mut interned = Interned::new();
        let [a, b, again] = ["a", "b", "a"].map(|value| interned.take(value));
        assert_eq!((a == again, a == b), (true, false));
        assert_eq!(interned.rows(), [2, 1]);
        interned.give_back(a);
        assert_eq!(interned.get(a), "a");
        interned.give_back(a);
        assert_eq!(interned.rows(), [1]);
        // Its place goes to the next, under which it is not found any more.
        let c = interned.take("c");
        assert_eq!((c, interned.get(c)), (a, "c"));
        let back = interned.take("a");
        assert_eq!((interned.get(back), interned.get(b), interned.get(c)), ("a", "b", "c"));
        assert_eq!(interned.rows(), [1, 1, 1]);
    }

    #[test]
    fn what_was_asked_for_last_is_not_answered_with_when_nobody_has_it() {
        let mut interned = Interned::new();
        let a = interned.take("a");
        interned.give_back(a);
        let again = interned.take("a");
        assert_eq!((interned.get(again), interned.rows()), ("a", vec![1]));
        assert_eq!(interned.take("a"), again);
    }
}
