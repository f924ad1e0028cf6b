//! Positions of a sequence that have no rows here: other rows lie one after another without them.

#![forbid(unsafe_code)]

use std::ops::Range;

/// Rows that are attended where they lie.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hole {
    /// In the sequence.
    pub positions: Range<u32>,
    /// How many positions further back these rows were computed: the offset of a chunk in this
    /// sequence less its offset where it lies. 0 for blocks of this very sequence, which are whole
    /// pages.
    pub moved: u32,
}

impl Hole {
    fn is_good(&self, block_tokens: usize) -> bool {
        let Range { start, end } = self.positions;
        let whole = |position: u32| (position as usize).is_multiple_of(block_tokens);
        let fits = if self.moved == 0 { whole(start) && whole(end) } else { start >= self.moved };
        start < end && fits
    }
}

/// Whether holes are in order, and each can be.
pub(super) fn are_good(holes: &[Hole], block_tokens: usize) -> bool {
    holes.iter().all(|hole| hole.is_good(block_tokens))
        && holes.is_sorted_by(|a, b| a.positions.end <= b.positions.start)
}

/// Rows that are here of the positions before this one.
pub(super) fn rows_before(holes: &[Hole], position: u64) -> u64 {
    let missing = |hole: &Hole| {
        let Range { start, end } = hole.positions;
        position.min(end.into()).saturating_sub(start.into())
    };
    position - holes.iter().map(missing).sum::<u64>()
}

/// Whether none of these positions is in a hole.
pub(super) fn are_outside(holes: &[Hole], positions: Range<u64>) -> bool {
    holes.iter().all(|hole| {
        u64::from(hole.positions.end) <= positions.start
            || u64::from(hole.positions.start) >= positions.end
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hole(positions: Range<u32>, moved: u32) -> Hole {
        Hole { positions, moved }
    }

    #[test]
    fn rows_lie_one_after_another_without_the_holes() {
        let holes = [hole(10..20, 5), hole(20..22, 3), hole(64..128, 0)];
        for (position, rows) in [(0, 0), (10, 10), (15, 10), (22, 10), (23, 11), (200, 124)] {
            assert_eq!(rows_before(&holes, position), rows, "before {position}");
        }
        for (positions, outside) in
            [(0..10, true), (0..11, false), (22..64, true), (19..23, false), (128..129, true)]
        {
            assert_eq!(are_outside(&holes, positions.clone()), outside, "{positions:?}");
        }
    }

    #[test]
    fn holes_that_cannot_be_are_found() {
        let good = |holes: &[Hole]| are_good(holes, 16);
        assert!(good(&[]) && good(&[hole(0..16, 0), hole(16..20, 16), hole(32..64, 0)]));
        let nothing = hole(7..7, 1);
        let not_whole = [hole(0..17, 0), hole(1..16, 0)];
        let before_its_beginning = hole(7..9, 8);
        assert!(!good(&[nothing]) && !good(&[before_its_beginning]));
        assert!(not_whole.into_iter().all(|hole| !good(&[hole])));
        assert!(!good(&[hole(20..30, 1), hole(5..6, 1)]), "not in order");
        assert!(!good(&[hole(5..21, 1), hole(20..30, 1)]), "not disjoint");
    }
}
