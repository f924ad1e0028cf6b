//! The beginning of a prompt that is attended elsewhere, of one sequence, and the slots that are gathered
//! for it when it has to be computed here after all.

use kvasir_proto::SlotIndex;

use crate::model::Hole;
use crate::routes::RoutedPrefix;

/// See the module. Default: all rows are here.
#[derive(Debug, Default)]
pub struct Away {
    prefix: Option<RoutedPrefix>,
    /// What has no rows here: the first positions, whole pages.
    hole: Option<Hole>,
    /// Slots for those, as they are granted.
    front: Vec<SlotIndex>,
    /// Layers of decode steps that were attended elsewhere, and microseconds that they took.
    exchanged: (u32, u64),
}

impl Away {
    pub fn new(prefix: Option<RoutedPrefix>) -> Self {
        let rows = |prefix: &RoutedPrefix| prefix.spans.iter().map(|span| span.rows).sum();
        let hole = prefix.as_ref().and_then(|prefix| hole(rows(prefix)));
        Away { prefix, hole, ..Away::default() }
    }

    /// Who attends them; nobody once they have been given up.
    pub fn prefix(&self) -> Option<&RoutedPrefix> {
        self.prefix.as_ref()
    }

    /// Positions before this one have no rows here.
    pub fn tokens(&self) -> u32 {
        self.hole.as_ref().map_or(0, |hole| hole.positions.end)
    }

    /// The same, as the model takes it.
    pub fn holes(&self) -> &[Hole] {
        self.hole.as_slice()
    }

    /// Of one decode step.
    pub fn exchange(&mut self, (layers, us): (u32, u64)) {
        if self.prefix.is_some() {
            self.exchanged.0 += layers;
            self.exchanged.1 += us;
        }
    }

    pub fn exchanged(&self) -> (u32, u64) {
        self.exchanged
    }

    /// Slots that were granted for them and are not in use yet.
    pub fn pages(&self) -> u32 {
        self.front.len() as u32
    }

    /// Nobody attends them elsewhere any more. Ends the leases.
    pub fn give_up(&mut self) {
        self.prefix = None;
    }

    /// Takes granted slots; what it does not need goes behind `slots`. With the last one that it needs, all of
    /// them come before `slots`, and every position has its place here.
    pub fn take(&mut self, granted: Vec<SlotIndex>, slots: &mut Vec<SlotIndex>, page_tokens: u32) {
        let mut granted = granted.into_iter();
        if self.prefix.is_none() {
            let lacks = (self.tokens() / page_tokens) as usize - self.front.len();
            self.front.extend(granted.by_ref().take(lacks));
        }
        slots.extend(granted);
        if self.hole.is_some() && self.front.len() as u32 * page_tokens == self.tokens() {
            self.front.append(slots);
            std::mem::swap(&mut self.front, slots);
            self.hole = None;
        }
    }
}

/// So many positions, the first ones; `None` for none.
fn hole(tokens: u32) -> Option<Hole> {
    (tokens > 0).then_some(Hole { positions: 0..tokens, moved: 0 })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn slots(numbers: std::ops::Range<u32>) -> Vec<SlotIndex> {
        numbers.map(SlotIndex).collect()
    }

    #[test]
    fn slots_for_what_was_elsewhere_come_first_once_they_are_all_there() {
        let mut away = Away { hole: hole(12), ..Away::default() };
        let mut here = slots(0..2);
        away.take(slots(10..12), &mut here, 4);
        assert_eq!((away.tokens(), away.pages(), here.len()), (12, 2, 2));
        away.take(slots(12..15), &mut here, 4);
        assert_eq!((away.tokens(), away.pages()), (0, 0));
        let expected = [10, 11, 12, 0, 1, 13, 14].map(SlotIndex);
        assert_eq!(here, expected);
        away.take(slots(20..21), &mut here, 4);
        assert_eq!((here.len(), here[7]), (8, SlotIndex(20)));
    }
}
