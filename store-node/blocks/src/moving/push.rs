//! One push: the pages of one share that go to the slots of another node, then the tail.
//!
//! A plan only: it says which writes are due and keeps what became of them; the owner issues them.
//! Layers are due as they finish, whatever finished before the targets were known is due at once,
//! and nothing is due after a stop. No order between writes is assumed: the receiver counts.

use std::ops::Range;

use kvasir_mutation::{Mutation, mutated};

use super::pages::Pages;

/// How writes are put together: what is written together is known to have landed together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Grouping {
    /// One layer of neighbouring pages, as an engine finishes them.
    Layers,
    /// All layers of one page: each page's fate is known by itself.
    Pages,
}

/// Writes that are issued and counted together.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Group {
    pub pages: Range<u32>,
    pub layers: Range<u16>,
}

impl Group {
    /// Pages put together at most, so that a long prompt does not become one long copy.
    const PAGES_MAX: u32 = 64;
}

/// Why a group did not land.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// The bytes do not hash to what they must.
    Corrupt,
    /// The receiver does not take it (revoked, out of bounds).
    Refused,
    /// The peer is gone or did not answer in time.
    PeerLost,
    /// It was taken back before it was sent.
    NotSent,
}

/// A tail that is to be written now.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DueTail {
    /// The engine's part.
    pub engine: Vec<u8>,
    /// It may arrive before its pages, or without them: it counts only when everything has come.
    pub whole_blocks_only: bool,
}

/// Where the tail stands.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Tail {
    /// The engine has not finished.
    Open,
    /// To be sent as soon as every page's checksums are known.
    Given(Vec<u8>),
    Issued,
    Landed,
}

/// See the module.
#[derive(Debug)]
pub struct Push {
    grouping: Grouping,
    /// Pages that go over.
    pages: Range<u32>,
    /// For each of them, layers issued.
    issued: Vec<u16>,
    /// How many the receiver has places for.
    places: usize,
    /// Groups and tails issued and not yet definite.
    in_flight: u32,
    tail: Tail,
    stopped: bool,
    fault: Option<Fault>,
    /// Pages whose group failed.
    bad_pages: Vec<(u32, Fault)>,
}

impl Push {
    pub fn new(grouping: Grouping, pages: Range<u32>) -> Self {
        Push {
            grouping,
            issued: vec![0; pages.len()],
            places: pages.len(),
            pages,
            in_flight: 0,
            tail: Tail::Open,
            stopped: false,
            fault: None,
            bad_pages: Vec::new(),
        }
    }

    /// The receiver has places for so many pages, and not just for those that go over.
    pub(super) fn set_places(&mut self, places: usize) {
        self.places = places;
    }

    /// The next writes that are due. They count as issued from now on.
    pub fn next_group(&mut self, pages: &Pages) -> Option<Group> {
        if self.stopped {
            return None;
        }
        let due = |page: u32, issued: u16| issued < pages.layers_done(page);
        let first = self.pages.clone().zip(&self.issued).position(|(p, issued)| due(p, *issued))?;
        let layer = self.issued[first];
        let first_page = self.pages.start + first as u32;
        let group = match self.grouping {
            Grouping::Pages => Group {
                pages: first_page..first_page + 1,
                layers: layer..pages.layers_done(first_page),
            },
            Grouping::Layers => {
                let count = (first_page..self.pages.end)
                    .zip(&self.issued[first..])
                    .take(Group::PAGES_MAX as usize)
                    .take_while(|(page, issued)| {
                        **issued == layer
                            && due(*page, **issued)
                            && pages.step(*page) == pages.step(first_page)
                    })
                    .count() as u32;
                Group { pages: first_page..first_page + count, layers: layer..layer + 1 }
            }
        };
        self.issued[first..first + group.pages.len()].fill(group.layers.end);
        self.in_flight += 1;
        Some(group)
    }

    /// Source side: pages from here on will never be there, and the push ends before them. Those that
    /// were issued stay.
    pub fn end_at(&mut self, end: u32) {
        let issued = self.issued.iter().rposition(|issued| *issued > 0).map_or(0, |last| last + 1);
        let kept = (end.saturating_sub(self.pages.start) as usize).max(issued);
        if kept < self.issued.len() {
            self.issued.truncate(kept);
            self.pages.end = self.pages.start + kept as u32;
        }
    }

    /// A group is definite.
    pub fn group_done(&mut self, group: &Group, outcome: Result<(), Fault>) {
        self.in_flight -= 1;
        match outcome {
            Ok(()) => {}
            Err(fault) => {
                self.bad_pages.extend(group.pages.clone().map(|page| (page, fault)));
                if fault == Fault::NotSent && self.stopped {
                    // Nobody wants it any more.
                    return;
                }
                self.fault.get_or_insert(fault);
                // One missing write is one missing count: what follows is in vain, except that a
                // source must learn of every page whether it is intact.
                self.stopped |= self.grouping == Grouping::Layers || fault != Fault::Corrupt;
            }
        }
    }

    /// The engine's part of the tail. Only the first is taken.
    pub fn give_tail(&mut self, engine: Vec<u8>) {
        if self.tail == Tail::Open {
            self.tail = Tail::Given(engine);
        }
    }

    /// The tail, when it is due: all pages are known and (by page) each one's fate is. It counts as issued
    /// from now on.
    ///
    /// Where the receiver has a place for one page only, it is due when that is issued: it comes whole or not at
    /// all, so there is no part whose checksums would have to be known, and nobody waits for another round trip.
    pub fn take_due_tail(&mut self, pages: &Pages) -> Option<DueTail> {
        let whole = || self.pages.clone().all(|page| pages.is_whole(page));
        let (by_page, under_way) = (self.grouping == Grouping::Pages, self.in_flight > 0);
        let known = !by_page || (self.everything_issued(pages) && (!under_way || self.places == 1));
        if self.stopped || !known || !whole() {
            return None;
        }
        match std::mem::replace(&mut self.tail, Tail::Issued) {
            Tail::Given(engine) => {
                self.in_flight += 1;
                Some(DueTail { engine, whole_blocks_only: by_page && under_way })
            }
            other => {
                self.tail = other;
                None
            }
        }
    }

    /// The pages whose checksums the tail carries: all, or (by page) the leading ones that landed.
    pub fn tail_pages(&self, pages: &Pages) -> Range<u32> {
        match self.grouping {
            Grouping::Layers => self.pages.clone(),
            Grouping::Pages => self.pages.start..self.pages.start + self.landed_pages(pages),
        }
    }

    /// The tail is definite.
    pub fn tail_done(&mut self, outcome: Result<(), Fault>) {
        self.in_flight -= 1;
        match outcome {
            Ok(()) => self.tail = Tail::Landed,
            Err(Fault::NotSent) if self.stopped => {}
            Err(fault) => {
                self.fault.get_or_insert(fault);
                self.stopped = true;
            }
        }
    }

    /// Nothing more is issued.
    pub fn stop(&mut self) {
        self.stopped = true;
    }

    pub fn is_stopped(&self) -> bool {
        self.stopped
    }

    /// No write of it is under way, and none will be: the tail ended it, or it was stopped.
    pub fn is_over(&self) -> bool {
        let is_quiet =
            self.in_flight == 0 || mutated(Mutation::StoppedPushEndsEarly) && self.stopped;
        is_quiet && (self.stopped || self.tail == Tail::Landed)
    }

    /// Everything arrived, the tail too.
    pub fn all_landed(&self) -> bool {
        self.tail == Tail::Landed && self.fault.is_none()
    }

    pub fn fault(&self) -> Option<Fault> {
        self.fault
    }

    /// Pages whose group failed, each with why.
    pub fn bad_pages(&self) -> &[(u32, Fault)] {
        &self.bad_pages
    }

    /// Leading pages that landed whole and intact, with their checksums: without those the receiver
    /// keeps none.
    pub fn good_pages(&self, pages: &Pages) -> u32 {
        if self.tail == Tail::Landed { self.landed_pages(pages) } else { 0 }
    }

    fn landed_pages(&self, pages: &Pages) -> u32 {
        let good = |page: &u32| {
            let issued = self.issued[(page - self.pages.start) as usize];
            issued == pages.layers()
                && (mutated(Mutation::CorruptPageCountedGood)
                    || !self.bad_pages.iter().any(|(bad, _)| bad == page))
        };
        self.pages.clone().take_while(good).count() as u32
    }

    pub fn pages(&self) -> Range<u32> {
        self.pages.clone()
    }

    fn everything_issued(&self, pages: &Pages) -> bool {
        self.issued.iter().all(|issued| *issued == pages.layers())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvasir_proto::{SlotIndex, SlotLayout};
    use std::sync::Arc;

    const LAYERS: u16 = 3;

    fn pages(count: u32) -> Pages {
        let layout = SlotLayout::layer_major(64, LAYERS as usize, 16).expect("a layout");
        Pages::new(Arc::new(layout), &(0..count).map(SlotIndex).collect::<Vec<_>>())
    }

    fn finish(pages: &mut Pages, which: Range<u32>, step: u32, layers: Range<u16>) {
        for page in which {
            assert!(pages.finish_layers(page, step, layers.clone(), |_, _| 7));
        }
    }

    fn due(push: &mut Push, pages: &Pages) -> Vec<(Range<u32>, Range<u16>)> {
        std::iter::from_fn(|| push.next_group(pages)).map(|g| (g.pages, g.layers)).collect()
    }

    #[test]
    fn layers_are_due_once_as_they_finish_and_at_once_when_the_targets_come_late() {
        let mut pages = pages(6);
        finish(&mut pages, 0..3, 1, 0..2);
        let mut push = Push::new(Grouping::Layers, 1..6);
        assert_eq!(due(&mut push, &pages), [(1..3, 0..1), (1..3, 1..2)]);
        assert_eq!(due(&mut push, &pages), []);
        finish(&mut pages, 0..3, 1, 2..3);
        finish(&mut pages, 3..6, 2, 0..3);
        assert_eq!(
            due(&mut push, &pages),
            [(1..3, 2..3), (3..6, 0..1), (3..6, 1..2), (3..6, 2..3)]
        );
    }

    #[test]
    fn the_tail_is_due_when_every_checksum_is_known_and_the_push_is_over_when_all_landed() {
        let mut pages = pages(1);
        let mut push = Push::new(Grouping::Layers, 0..1);
        push.give_tail(b"t".to_vec());
        finish(&mut pages, 0..1, 1, 0..2);
        assert_eq!(push.take_due_tail(&pages), None, "the last layer is missing");
        finish(&mut pages, 0..1, 1, 2..3);
        let due = DueTail { engine: b"t".to_vec(), whole_blocks_only: false };
        assert_eq!(push.take_due_tail(&pages), Some(due));
        assert_eq!(push.take_due_tail(&pages), None);
        let groups: Vec<Group> = std::iter::from_fn(|| push.next_group(&pages)).collect();
        push.tail_done(Ok(()));
        for group in &groups {
            assert!(!push.is_over());
            push.group_done(group, Ok(()));
        }
        assert!(push.is_over() && push.all_landed());
    }

    #[test]
    fn a_stopped_push_issues_nothing_and_is_over_when_drained() {
        let mut pages = pages(2);
        finish(&mut pages, 0..2, 1, 0..1);
        let mut push = Push::new(Grouping::Layers, 0..2);
        push.give_tail(Vec::new());
        let group = push.next_group(&pages).expect("due");
        push.stop();
        finish(&mut pages, 0..2, 1, 1..3);
        assert_eq!((push.next_group(&pages), push.take_due_tail(&pages)), (None, None));
        assert!(!push.is_over(), "one group is under way");
        push.group_done(&group, Err(Fault::NotSent));
        assert!(push.is_over() && !push.all_landed());
        assert_eq!(push.fault(), None, "a cancelled group is not a fault");
        assert_eq!(push.good_pages(&pages), 0, "but it has not landed either");
    }

    /// A push of this many stored pages, with its groups issued and its tail given.
    fn source(count: u32) -> (Pages, Push, Vec<Group>) {
        let mut pages = pages(count);
        for page in 0..count {
            pages.set_whole(page, SlotIndex(page), 7);
        }
        let mut push = Push::new(Grouping::Pages, 0..count);
        push.give_tail(Vec::new());
        let groups = std::iter::from_fn(|| push.next_group(&pages)).collect();
        (pages, push, groups)
    }

    #[test]
    fn pages_are_good_only_with_their_checksums() {
        let (pages, mut push, groups) = source(2);
        push.group_done(&groups[0], Ok(()));
        push.stop();
        push.group_done(&groups[1], Err(Fault::NotSent));
        assert!(push.is_over());
        assert_eq!((push.good_pages(&pages), push.fault()), (0, None));

        let (pages, mut push, groups) = source(2);
        groups.iter().for_each(|group| push.group_done(group, Ok(())));
        assert!(push.take_due_tail(&pages).is_some() && !push.is_over());
        push.tail_done(Err(Fault::PeerLost));
        assert!(push.is_over());
        assert_eq!(push.good_pages(&pages), 0);
    }

    #[test]
    fn a_source_learns_of_every_page_and_sends_the_checksums_before_a_bad_one() {
        let (pages, mut push, groups) = source(4);
        assert_eq!(groups.len(), 4);
        assert_eq!(groups[2], Group { pages: 2..3, layers: 0..3 });
        for (index, group) in groups.iter().enumerate() {
            assert_eq!(push.take_due_tail(&pages), None);
            push.group_done(group, if index == 2 { Err(Fault::Corrupt) } else { Ok(()) });
        }
        let due = DueTail { engine: Vec::new(), whole_blocks_only: false };
        assert_eq!(push.take_due_tail(&pages), Some(due));
        assert_eq!(push.tail_pages(&pages), 0..2);
        push.tail_done(Ok(()));
        assert!(push.is_over() && !push.all_landed());
        assert_eq!(push.good_pages(&pages), 2);
        assert_eq!(push.bad_pages(), [(2, Fault::Corrupt)]);
    }

    #[test]
    fn the_tail_of_one_page_goes_with_it_and_says_so() {
        let (pages, mut push, groups) = source(1);
        let due = DueTail { engine: Vec::new(), whole_blocks_only: true };
        assert_eq!(push.take_due_tail(&pages), Some(due));
        assert_eq!(push.take_due_tail(&pages), None);
        assert_eq!(push.tail_pages(&pages), 0..1);
        push.tail_done(Ok(()));
        assert!(!push.is_over(), "the page is under way");
        push.group_done(&groups[0], Err(Fault::Corrupt));
        assert!(push.is_over() && !push.all_landed());
        assert_eq!(push.good_pages(&pages), 0);

        let (pages, mut push, groups) = source(1);
        push.set_places(2);
        assert_eq!(push.take_due_tail(&pages), None, "only a part of the pages was requested");
        push.group_done(&groups[0], Ok(()));
        let due = DueTail { engine: Vec::new(), whole_blocks_only: false };
        assert_eq!(push.take_due_tail(&pages), Some(due));
    }

    #[test]
    fn a_source_that_has_nothing_sends_an_empty_tail() {
        let (pages, mut push, groups) = source(0);
        assert_eq!(groups, []);
        assert!(push.take_due_tail(&pages).is_some());
        assert_eq!(push.tail_pages(&pages), 0..0);
        push.tail_done(Ok(()));
        assert!(push.is_over());
    }

    #[test]
    fn a_lost_peer_stops_the_push() {
        let mut pages = pages(2);
        finish(&mut pages, 0..2, 1, 0..3);
        let mut push = Push::new(Grouping::Layers, 0..2);
        let group = push.next_group(&pages).expect("due");
        push.group_done(&group, Err(Fault::PeerLost));
        assert_eq!(push.next_group(&pages), None);
        assert!(push.is_over());
        assert_eq!(push.fault(), Some(Fault::PeerLost));
    }
}
