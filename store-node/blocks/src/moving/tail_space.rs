//! Room for tails: a region of its own, given out in granules, first fit. It is for tails that
//! arrive and for tails that are sent; a range goes back only when no write can touch it any more.

/// Most tails of short prompts take one granule.
const GRANULE_BYTES: u64 = 1024;

/// A range of the tail region.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TailRange {
    pub offset_bytes: u64,
    pub length_bytes: u64,
}

/// Which granules are taken.
#[derive(Debug)]
pub struct TailSpace {
    taken: Vec<bool>,
    taken_count: usize,
}

impl TailSpace {
    pub fn new(region_bytes: u64) -> Self {
        let granules = usize::try_from(region_bytes / GRANULE_BYTES).unwrap_or(usize::MAX);
        TailSpace { taken: vec![false; granules], taken_count: 0 }
    }

    /// Takes room for this many bytes, or `None` when no hole is large enough.
    pub fn take(&mut self, bytes: u64) -> Option<TailRange> {
        let want = usize::try_from(bytes.max(1).div_ceil(GRANULE_BYTES)).ok()?;
        let mut start = 0;
        while start + want <= self.taken.len() {
            match self.taken[start..start + want].iter().rposition(|taken| *taken) {
                Some(blocked) => start += blocked + 1,
                None => {
                    self.taken[start..start + want].fill(true);
                    self.taken_count += want;
                    return Some(TailRange {
                        offset_bytes: start as u64 * GRANULE_BYTES,
                        length_bytes: want as u64 * GRANULE_BYTES,
                    });
                }
            }
        }
        None
    }

    /// Keeps only so much of a range as this many bytes need.
    pub fn shrink(&mut self, range: TailRange, bytes: u64) -> TailRange {
        let keep = (bytes.max(1).div_ceil(GRANULE_BYTES) * GRANULE_BYTES).min(range.length_bytes);
        self.give_back(TailRange {
            offset_bytes: range.offset_bytes + keep,
            length_bytes: range.length_bytes - keep,
        });
        TailRange { length_bytes: keep, ..range }
    }

    /// Gives a range back that [`TailSpace::take`] gave out.
    pub fn give_back(&mut self, range: TailRange) {
        let start = (range.offset_bytes / GRANULE_BYTES) as usize;
        let granules = &mut self.taken[start..][..(range.length_bytes / GRANULE_BYTES) as usize];
        assert!(granules.iter().all(|taken| *taken), "tail room given back twice: {range:?}");
        granules.fill(false);
        self.taken_count -= granules.len();
    }

    pub fn taken_bytes(&self) -> u64 {
        self.taken_count as u64 * GRANULE_BYTES
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn room_is_given_once_and_again_when_it_came_back() {
        let mut space = TailSpace::new(4 * GRANULE_BYTES);
        let first = space.take(1).expect("room");
        let second = space.take(GRANULE_BYTES + 1).expect("room");
        assert_eq!((first.offset_bytes, first.length_bytes), (0, GRANULE_BYTES));
        assert_eq!((second.offset_bytes, second.length_bytes), (1024, 2 * GRANULE_BYTES));
        assert_eq!(space.take(2 * GRANULE_BYTES), None, "one granule is left");
        space.give_back(first);
        assert_eq!(space.take(2 * GRANULE_BYTES), None, "the two free ones are apart");
        space.give_back(second);
        assert_eq!(space.taken_bytes(), 0);
        assert!(space.take(4 * GRANULE_BYTES).is_some());
        assert_eq!(space.take(u64::MAX), None);
    }

    #[test]
    fn what_is_not_needed_after_all_is_given_back_and_the_rest_stays_taken() {
        let mut space = TailSpace::new(4 * GRANULE_BYTES);
        let range = space.take(4 * GRANULE_BYTES).expect("room");
        let same = space.shrink(range, 4 * GRANULE_BYTES);
        assert_eq!(same, range);
        let less = space.shrink(range, GRANULE_BYTES + 1);
        assert_eq!((less.offset_bytes, less.length_bytes), (0, 2 * GRANULE_BYTES));
        let other = space.take(2 * GRANULE_BYTES).expect("room");
        assert_eq!(other.offset_bytes, 2 * GRANULE_BYTES);
        assert_eq!(space.shrink(less, 0).length_bytes, GRANULE_BYTES);
        assert_eq!(space.taken_bytes(), 3 * GRANULE_BYTES);
    }

    #[test]
    #[should_panic(expected = "given back twice")]
    fn giving_back_twice_is_a_programmer_error() {
        let mut space = TailSpace::new(4 * GRANULE_BYTES);
        let range = space.take(1).expect("room");
        space.give_back(range);
        space.give_back(range);
    }
}
