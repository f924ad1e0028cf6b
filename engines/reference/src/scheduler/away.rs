//! Parts of a prompt whose rows are not computed in their place, of one sequence: of its beginning what is
//! attended elsewhere, and chunks that are used at another offset. Each is a *gap* until its rows are here.
//!
//! | a gap is | and becomes |
//! | --- | --- |
//! | elsewhere: holders attend it | to be looked up, or alone, when one of them is lost |
//! | to be looked up: its slots are waited for | asked |
//! | asked: the node looks its blocks up | filled, or alone |
//! | alone: its tokens are computed in its own slots, a chunk from position 0 on, others behind what is before them | filled |
//!
//! Rows that are here lie one after another without the gaps. A gap is whole pages, so that it is filled by
//! putting its slots among the others and moving the rest of one page at most.

use std::ops::Range;

use kvasir_proto::SlotIndex;

use crate::model::{Hole, Splice};
use crate::ports::Exchanged;
use crate::routes::RoutedHoles;

/// Where a part of a prompt stands.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Place {
    pub positions: Range<u32>,
    /// How many positions further back its rows are computed: 0 for blocks of this very sequence.
    pub moved: u32,
    /// Holders attend it.
    pub elsewhere: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Source {
    Elsewhere,
    ToLookUp,
    Asked { handle: u64 },
    Alone { computed: u32 },
}

/// See the module.
#[derive(Debug)]
struct Gap {
    source: Source,
    /// Its own slots, as they are granted, behind those of what it attends when it is computed here.
    pages: Vec<SlotIndex>,
    /// So many of these are not its own.
    before: usize,
}

impl Gap {
    fn own(&self) -> &[SlotIndex] {
        &self.pages[self.before..]
    }
}

/// What is to be done about the first gap that nobody attends.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Next {
    /// There is none.
    Filled,
    /// Slots, or the node's answer, are waited for.
    Waits,
    /// Its blocks are to be looked up.
    LookUp { positions: Range<u32> },
    /// Its tokens are to be computed, in slots of its own, so many positions further back.
    Compute { positions: Range<u32>, moved: u32, computed: u32 },
    /// They are.
    Computed,
}

/// See the module. Default: all rows are here.
#[derive(Debug, Default)]
pub(crate) struct Away {
    routed: Option<RoutedHoles>,
    /// Where nothing is computed in its place, filled or not, in order.
    places: Vec<Range<u32>>,
    /// Those that have no rows here, in the same order, and what the model is told of them.
    gaps: Vec<Gap>,
    holes: Vec<Hole>,
    /// In decode steps, and in steps that computed its prompt, behind all of it, for which nobody else asked.
    exchanged: Exchanged,
    prompt_exchanged: Exchanged,
    /// How long, and whether sessions were made for it.
    opening: (u64, bool),
}

impl Away {
    /// `routed` has as many holes as places are elsewhere.
    pub(crate) fn new(routed: Option<RoutedHoles>, places: Vec<Place>) -> Self {
        let gap = |place: &Place| Gap {
            source: if place.elsewhere { Source::Elsewhere } else { Source::ToLookUp },
            pages: Vec::new(),
            before: 0,
        };
        let hole = |place: &Place| Hole { positions: place.positions.clone(), moved: place.moved };
        let (gaps, holes) = (places.iter().map(gap).collect(), places.iter().map(hole).collect());
        let places = places.into_iter().map(|place| place.positions).collect();
        let opening = routed.as_ref().map_or((0, false), RoutedHoles::opening);
        Away {
            routed,
            places,
            gaps,
            holes,
            exchanged: Exchanged::default(),
            prompt_exchanged: Exchanged::default(),
            opening,
        }
    }

    /// Who attends what is elsewhere; nobody once it has been given up.
    pub(crate) fn routed(&self) -> Option<&RoutedHoles> {
        self.routed.as_ref()
    }

    /// All of the prompt is computed in its place.
    pub(crate) fn is_nothing(&self) -> bool {
        self.places.is_empty()
    }

    /// What has no rows here, as the model takes it.
    pub(crate) fn holes(&self) -> &[Hole] {
        &self.holes
    }

    /// How many gaps the positions from this one on attend elsewhere.
    pub(crate) fn holes_before(&self, position: u32) -> u32 {
        self.holes.iter().filter(|hole| hole.positions.end <= position).count() as u32
    }

    /// Tokens that holders attend.
    pub(crate) fn tokens_elsewhere(&self) -> u32 {
        let elsewhere = |(gap, hole): (&Gap, &Hole)| {
            (gap.source == Source::Elsewhere).then_some(hole.positions.end - hole.positions.start)
        };
        self.gaps.iter().zip(&self.holes).filter_map(elsewhere).sum()
    }

    /// Blocks of the prompt's beginning that holders attend; those before them are here.
    pub(crate) fn beginning(&self) -> Option<Range<u32>> {
        let first = self.holes.first().filter(|hole| hole.moved == 0);
        first.map(|hole| hole.positions.clone())
    }

    /// The first position from this one on that is computed in its place.
    pub(crate) fn skip(&self, position: u32) -> u32 {
        let skip = |at: u32, place: &Range<u32>| if place.start == at { place.end } else { at };
        self.places.iter().fold(position, skip)
    }

    /// Up to where positions from this one on are computed in their places.
    pub(crate) fn until(&self, position: u32, prompt_tokens: u32) -> u32 {
        let next = self.places.iter().find(|place| place.start >= position);
        next.map_or(prompt_tokens, |place| place.start)
    }

    /// Of one decode step.
    pub(crate) fn exchange(&mut self, exchanged: Exchanged) {
        if self.routed.is_some() {
            self.exchanged += exchanged;
        }
    }

    /// Of a step that computed its prompt from this position on, for which nobody else asked.
    pub(crate) fn exchange_prompt(&mut self, from: u32, exchanged: Exchanged) {
        if self.routed.is_some() && self.holes_before(from) as usize == self.holes.len() {
            self.prompt_exchanged += exchanged;
        }
    }

    /// Before it came here: microseconds until its holders answered, and whether sessions were made for it.
    pub(crate) fn opening(&self) -> (u64, bool) {
        self.opening
    }

    pub(crate) fn exchanged(&self) -> Exchanged {
        self.exchanged
    }

    pub(crate) fn prompt_exchanged(&self) -> Exchanged {
        self.prompt_exchanged
    }

    /// Slots of gaps.
    pub(crate) fn pages(&self) -> u32 {
        self.gaps.iter().map(|gap| gap.own().len() as u32).sum()
    }

    /// Nobody attends anything elsewhere any more. Ends the leases. What was not found here of a prompt's beginning
    /// when it was sent elsewhere is computed, behind the rows before it, which are the first of `slots`.
    pub(crate) fn give_up(&mut self, slots: &[SlotIndex], page_tokens: u32) {
        self.routed = None;
        for (gap, hole) in self.gaps.iter_mut().zip(&self.holes) {
            if gap.source != Source::Elsewhere {
                continue;
            }
            gap.source = match hole.moved {
                0 => {
                    // Whole pages, and no gap is before it.
                    gap.before = (hole.positions.start / page_tokens) as usize;
                    gap.pages.extend(&slots[..gap.before]);
                    Source::Alone { computed: 0 }
                }
                _ => Source::ToLookUp,
            };
        }
    }

    /// Slots that gaps lack that nobody attends.
    pub(crate) fn lacks(&self, page_tokens: u32) -> usize {
        let lacks = |(gap, hole): (&Gap, &Hole)| match gap.source {
            Source::Elsewhere => 0,
            _ => pages_of(hole, page_tokens) - gap.own().len(),
        };
        self.gaps.iter().zip(&self.holes).map(lacks).sum()
    }

    /// Takes granted slots: gaps that nobody attends have theirs first, the others go behind `slots`.
    pub(crate) fn take(
        &mut self,
        granted: Vec<SlotIndex>,
        slots: &mut Vec<SlotIndex>,
        page_tokens: u32,
    ) {
        let mut granted = granted.into_iter();
        for (gap, hole) in self.gaps.iter_mut().zip(&self.holes) {
            if gap.source != Source::Elsewhere {
                let lacks = pages_of(hole, page_tokens) - gap.own().len();
                gap.pages.extend(granted.by_ref().take(lacks));
            }
        }
        slots.extend(granted);
    }

    /// What the first gap that nobody attends waits for.
    pub(crate) fn next(&self, page_tokens: u32) -> Next {
        let Some(at) = self.first() else { return Next::Filled };
        let (gap, hole) = (&self.gaps[at], &self.holes[at]);
        if gap.own().len() < pages_of(hole, page_tokens) {
            return Next::Waits;
        }
        let positions = hole.positions.clone();
        match gap.source {
            Source::ToLookUp => Next::LookUp { positions },
            Source::Alone { computed } if computed == positions.end - positions.start => {
                Next::Computed
            }
            Source::Alone { computed } => Next::Compute { positions, moved: hole.moved, computed },
            Source::Asked { .. } | Source::Elsewhere => Next::Waits,
        }
    }

    /// The node is asked for the blocks of the first gap that nobody attends.
    pub(crate) fn asked(&mut self, handle: u64) {
        self.set_first(Source::Asked { handle });
    }

    /// Whether this is what it was asked for last.
    pub(crate) fn is_asked(&self, handle: u64) -> bool {
        self.gaps.iter().any(|gap| gap.source == Source::Asked { handle })
    }

    /// Of the first gap that nobody attends, so many tokens are computed in its slots.
    pub(crate) fn computed(&mut self, computed: u32) {
        self.set_first(Source::Alone { computed });
    }

    /// Where the tokens of that gap are computed, behind what they attend.
    pub(crate) fn pages_alone(&self) -> &[SlotIndex] {
        self.first().map_or(&[], |at| &self.gaps[at].pages)
    }

    /// The first gap that nobody attends gets its places among `slots`: `fill` brings the rows of its chunk
    /// there, from `chunk`, or from its own slots. Answers how many tokens it had.
    pub(crate) fn fill<E>(
        &mut self,
        chunk: Option<&[SlotIndex]>,
        slots: &mut Vec<SlotIndex>,
        page_tokens: u32,
        fill: impl FnOnce(&Splice<'_>) -> Result<(), E>,
    ) -> Result<u32, E> {
        let Some(at) = self.first() else { return Ok(0) };
        let hole = self.holes.remove(at);
        let gap = self.gaps.remove(at);
        let tokens = hole.positions.end - hole.positions.start;
        let before: u32 =
            self.holes[..at].iter().map(|hole| hole.positions.end - hole.positions.start).sum();
        // Behind the page in which it begins, or where that page would be.
        let row = hole.positions.start - before;
        let page = row.div_ceil(page_tokens) as usize;
        slots.splice(page..page, gap.own().iter().copied());
        // What is of this very sequence lies where it was computed.
        if hole.moved > 0 {
            fill(&Splice {
                chunk: chunk.unwrap_or(&gap.pages),
                tokens: 0..tokens,
                start: hole.positions.start,
                holes: &self.holes,
                pages: slots,
            })?;
        }
        Ok(tokens)
    }

    fn first(&self) -> Option<usize> {
        self.gaps.iter().position(|gap| gap.source != Source::Elsewhere)
    }

    fn set_first(&mut self, source: Source) {
        if let Some(at) = self.first() {
            self.gaps[at].source = source;
        }
    }
}

fn pages_of(hole: &Hole, page_tokens: u32) -> usize {
    ((hole.positions.end - hole.positions.start) / page_tokens) as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    fn slots(numbers: Range<u32>) -> Vec<SlotIndex> {
        numbers.map(SlotIndex).collect()
    }

    /// Of a chunk, or of the whole beginning.
    fn place(positions: Range<u32>, elsewhere: bool) -> Place {
        Place { moved: positions.start, positions, elsewhere }
    }

    /// What a splice was to do: chunk, first position and pages.
    type Filled = (Vec<SlotIndex>, u32, Vec<SlotIndex>);

    fn fill(away: &mut Away, chunk: Option<&[SlotIndex]>, slots: &mut Vec<SlotIndex>) -> Filled {
        let mut filled = Filled::default();
        let note = |splice: &Splice<'_>| {
            filled = (splice.chunk.to_vec(), splice.start, splice.pages.to_vec());
            Ok::<(), ()>(())
        };
        away.fill(chunk, slots, 4, note).expect("filled");
        filled
    }

    #[test]
    fn a_beginning_that_was_elsewhere_is_computed_in_slots_that_come_first() {
        let mut away = Away::new(None, vec![place(0..12, true)]);
        let mut here = slots(0..2);
        away.take(slots(5..6), &mut here, 4);
        assert_eq!((away.tokens_elsewhere(), away.pages(), here.len()), (12, 0, 3));
        away.give_up(&here, 4);
        away.take(slots(10..12), &mut here, 4);
        assert_eq!((away.next(4), away.pages(), here.len()), (Next::Waits, 2, 3));
        away.take(slots(12..15), &mut here, 4);
        assert_eq!(away.next(4), Next::Compute { positions: 0..12, moved: 0, computed: 0 });
        assert_eq!(away.pages_alone(), slots(10..13));
        away.computed(12);
        assert_eq!(away.next(4), Next::Computed);
        assert_eq!(fill(&mut away, None, &mut here), Filled::default(), "nothing is moved");
        assert_eq!(away.next(4), Next::Filled);
        assert_eq!(here, [10, 11, 12, 0, 1, 5, 13, 14].map(SlotIndex));
        assert!(away.holes().is_empty());
    }

    #[test]
    fn blocks_behind_others_that_are_here_are_computed_behind_those() {
        let behind = Place { positions: 8..16, moved: 0, elsewhere: true };
        let mut away = Away::new(None, vec![behind, place(18..22, true)]);
        assert_eq!((away.beginning(), away.skip(8), away.until(0, 30)), (Some(8..16), 16, 8));
        // Rows of 0..8, 16..18 and 22.. are here.
        let mut here = slots(0..4);
        away.give_up(&here, 4);
        assert_eq!((away.pages(), away.lacks(4)), (0, 3), "attended pages are not its own");
        away.take(slots(10..11), &mut here, 4);
        assert_eq!((away.next(4), away.pages(), away.lacks(4)), (Next::Waits, 1, 2));
        away.take(slots(11..14), &mut here, 4);
        assert_eq!((away.pages(), away.lacks(4)), (3, 0));
        assert_eq!(away.next(4), Next::Compute { positions: 8..16, moved: 0, computed: 0 });
        assert_eq!(away.pages_alone(), [0, 1, 10, 11].map(SlotIndex));
        away.computed(8);
        assert_eq!(fill(&mut away, None, &mut here), Filled::default(), "nothing is moved");
        assert_eq!(here, [0, 1, 10, 11, 2, 3, 13].map(SlotIndex));
        assert_eq!((away.beginning(), away.next(4)), (None, Next::LookUp { positions: 18..22 }));
    }

    #[test]
    fn chunks_are_filled_one_after_another_each_into_its_place_among_the_others() {
        let places = vec![place(5..13, false), place(14..18, true), place(18..22, false)];
        let mut away = Away::new(None, places);
        assert_eq!((away.until(0, 30), away.skip(5), away.until(13, 30)), (5, 13, 14));
        assert_eq!((away.skip(14), away.until(22, 30), away.tokens_elsewhere()), (22, 30, 4));
        // Rows of 0..5, 13 and 22.. are here.
        let mut here = Vec::new();
        away.take(slots(0..8), &mut here, 4);
        assert_eq!(away.next(4), Next::LookUp { positions: 5..13 });
        away.asked(7);
        assert!(away.is_asked(7) && !away.is_asked(8) && away.next(4) == Next::Waits);
        let (chunk, start, pages) = fill(&mut away, Some(&slots(90..92)), &mut here);
        assert_eq!((chunk, start), (slots(90..92), 5));
        assert_eq!(pages, [3, 4, 0, 1, 5, 6, 7].map(SlotIndex), "behind the page of its first row");
        away.computed(4);
        let (chunk, start, pages) = fill(&mut away, None, &mut here);
        assert_eq!((chunk, start), (slots(2..3), 18));
        assert_eq!(pages, [3, 4, 0, 1, 2, 5, 6, 7].map(SlotIndex));
        assert_eq!(away.next(4), Next::Filled);
        assert_eq!(away.holes(), [Hole { positions: 14..18, moved: 14 }]);
        assert_eq!((away.holes_before(17), away.holes_before(18)), (0, 1));
        away.give_up(&here, 4);
        away.take(slots(20..22), &mut here, 4);
        assert_eq!(away.next(4), Next::LookUp { positions: 14..18 });
        away.computed(4);
        let (_, _, pages) = fill(&mut away, None, &mut here);
        assert_eq!(pages[..6], [3, 4, 0, 1, 20, 2].map(SlotIndex));
    }
}
