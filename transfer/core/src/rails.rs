//! Rails: the kinds of paths that a session may have, such as pairs of network cards. A write says which
//! suit it best; the other ones are used only while none of those is up, so advice never stops a write. Rails
//! that cannot carry it at all, because their cards do not have its region, are never used for it.

use kvasir_mutation::{Mutation, mutated};

/// Which rail a path is on. Paths of sessions that know no rails are all on 0.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Rail(pub u8);

/// Rails of one session.
pub const RAILS_MAX: u8 = 32;
const LAST: u32 = 1 << (RAILS_MAX - 1);

impl Rail {
    /// Of paths that are used only while no other one is up.
    pub const LAST: Rail = Rail(RAILS_MAX - 1);
    /// Of a path beside the cards that is as good as they are: no pair of cards has it, so what a card does not
    /// carry is not held against it.
    pub const BESIDE: Rail = Rail(RAILS_MAX - 2);

    fn bit(self) -> u32 {
        assert!(self.0 < RAILS_MAX, "a session has {RAILS_MAX} rails at most");
        1 << self.0
    }
}

/// The rails that suit a write.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Rails {
    first: u32,
    second: u32,
    /// Are not used, whatever else is up.
    never: u32,
}

impl Default for Rails {
    fn default() -> Self {
        Rails::ANY
    }
}

impl Rails {
    /// All are alike, but for the last.
    pub const ANY: Rails = Rails { first: !LAST, second: !LAST, never: 0 };
    /// None is better than another. Of all the first in order.
    pub(crate) const NONE: Rails = Rails { first: 0, second: 0, never: 0 };

    /// Those to be used, and those to be used while none of these is up.
    pub fn new(
        first: impl IntoIterator<Item = Rail>,
        second: impl IntoIterator<Item = Rail>,
    ) -> Self {
        let set =
            |rails: &mut dyn Iterator<Item = Rail>| rails.fold(0, |set, rail| set | rail.bit());
        let (first, second) = (set(&mut first.into_iter()), set(&mut second.into_iter()));
        Rails { first, second, never: 0 }
    }

    /// Those in the set, and never another one.
    pub(crate) fn only(up: Up) -> Self {
        Rails { first: up.0, second: up.0, never: !up.0 }
    }

    /// The same, but for those in the set.
    pub(crate) fn without(self, unsuited: Up) -> Self {
        Rails { never: self.never | unsuited.0, ..self }
    }

    /// Whether the rail is used when no better one is up.
    pub(crate) fn may(self, rail: Rail) -> bool {
        self.never & rail.bit() == 0
    }

    /// Of the rails that are `up`, those that are used.
    pub(crate) fn of(self, up: Up) -> Up {
        let up = Up(up.0 & !self.never);
        if mutated(Mutation::CardDistanceIgnored) {
            return up;
        }
        let others = if mutated(Mutation::WriteWaitsForNearRail) { 0 } else { up.0 };
        let usable = [self.first & up.0, self.second & up.0, others];
        Up(usable.into_iter().find(|set| *set != 0).unwrap_or(0))
    }
}

/// Rails that have a path which is up.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Up(u32);

impl Up {
    pub(crate) fn add(&mut self, rail: Rail) {
        self.0 |= rail.bit();
    }

    pub(crate) fn with(self, others: Up) -> Up {
        Up(self.0 | others.0)
    }

    pub(crate) fn without(self, others: Up) -> Up {
        Up(self.0 & !others.0)
    }

    pub(crate) fn is_empty(self) -> bool {
        self.0 == 0
    }

    pub(crate) fn contains(self, rail: Rail) -> bool {
        self.0 & rail.bit() != 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn up(rails: &[u8]) -> Up {
        let mut up = Up::default();
        rails.iter().for_each(|rail| up.add(Rail(*rail)));
        up
    }

    #[test]
    fn others_are_used_only_while_none_of_the_better_ones_is_up() {
        let rails = Rails::new([Rail(0), Rail(2)], [Rail(1)]);
        assert_eq!(rails.of(up(&[0, 1, 2, 3])), up(&[0, 2]));
        assert_eq!(rails.of(up(&[1, 2, 3])), up(&[2]));
        assert_eq!(rails.of(up(&[1, 3])), up(&[1]));
        assert_eq!(rails.of(up(&[3])), up(&[3]));
        assert_eq!(rails.of(up(&[])), up(&[]));
        assert_eq!(Rails::ANY.of(up(&[1, 3])), up(&[1, 3]));
        assert_eq!(Rails::ANY.of(up(&[1, Rail::LAST.0])), up(&[1]));
        assert_eq!(rails.of(up(&[Rail::LAST.0])), up(&[Rail::LAST.0]));
    }

    #[test]
    fn what_cannot_carry_a_write_is_not_used_for_it_whatever_else_is_up() {
        let rails = Rails::new([Rail(0)], [Rail(1)]).without(up(&[0]));
        assert_eq!(rails.of(up(&[0, 1, 2])), up(&[1]));
        assert_eq!(rails.of(up(&[0, 2])), up(&[2]));
        assert_eq!(rails.of(up(&[0])), up(&[]));
        let none_but_last = Rails::ANY.without(up(&[0])).without(up(&[1]));
        assert_eq!(none_but_last.of(up(&[0, 1, Rail::LAST.0])), up(&[Rail::LAST.0]));
    }
}
