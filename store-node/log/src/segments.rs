//! The segments: what each is doing, and how much of it is live. It knows nothing of keys.
//!
//! It must hold that a segment is free only when nothing in it is live, nothing is being read from
//! it and nothing written to it.

use std::collections::{BTreeMap, BTreeSet};

use crate::index::Location;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Phase {
    /// Holds nothing. Becomes open.
    Free,
    /// Is appended to. Becomes sealed.
    Open,
    /// Is not written any more. Becomes free when nothing of it is live or in use.
    Sealed,
    /// Could not be read whole when the log was opened, so that nobody knows all that is in it. It is read, and not
    /// written until the log is opened again.
    Withheld,
}

#[derive(Debug, Clone)]
pub(crate) struct Segment {
    pub(crate) phase: Phase,
    pub(crate) sequence: u64,
    pub(crate) live_pages: u64,
    /// Reads and writes under way.
    pub(crate) in_use: u32,
    /// Its header is on the disk, though perhaps not durable.
    pub(crate) has_header: bool,
    /// A sync has covered it.
    pub(crate) header_durable: bool,
}

#[derive(Debug)]
pub(crate) struct Segments {
    all: Vec<Segment>,
    free: BTreeSet<u32>,
    pub(crate) segment_pages: u32,
    withheld: u32,
}

impl Segments {
    pub(crate) fn new(count: u32, segment_pages: u32) -> Self {
        let segment = Segment {
            phase: Phase::Free,
            sequence: 0,
            live_pages: 0,
            in_use: 0,
            has_header: false,
            header_durable: false,
        };
        Segments {
            all: vec![segment; count as usize],
            free: (0..count).collect(),
            segment_pages,
            withheld: 0,
        }
    }

    pub(crate) fn count(&self) -> u32 {
        self.all.len() as u32
    }

    pub(crate) fn free(&self) -> u32 {
        self.free.len() as u32
    }

    pub(crate) fn get(&self, segment: u32) -> &Segment {
        &self.all[segment as usize]
    }

    pub(crate) fn get_mut(&mut self, segment: u32) -> &mut Segment {
        &mut self.all[segment as usize]
    }

    pub(crate) fn live_pages(&self) -> u64 {
        self.all.iter().map(|segment| segment.live_pages).sum()
    }

    /// Found on the disk.
    pub(crate) fn found(&mut self, segment: u32, sequence: u64) {
        self.free.remove(&segment);
        let found = self.get_mut(segment);
        (found.phase, found.sequence) = (Phase::Sealed, sequence);
        (found.has_header, found.header_durable) = (true, true);
    }

    /// It was found, and could not be read whole.
    pub(crate) fn withhold(&mut self, segment: u32) {
        self.get_mut(segment).phase = Phase::Withheld;
        self.withheld += 1;
    }

    pub(crate) fn withheld(&self) -> u32 {
        self.withheld
    }

    /// Goes on being appended to after it was found.
    pub(crate) fn reopen(&mut self, segment: u32) {
        self.get_mut(segment).phase = Phase::Open;
    }

    /// What was found and holds nothing is free.
    pub(crate) fn free_what_is_empty(&mut self) {
        (0..self.count()).for_each(|segment| self.free_if_done(segment));
    }

    /// Takes a free segment, when more than `spare` are there.
    pub(crate) fn open(&mut self, sequence: u64, spare: u32) -> Option<u32> {
        if self.free() <= spare {
            return None;
        }
        let segment = self.free.pop_first()?;
        let opened = self.get_mut(segment);
        (opened.phase, opened.sequence) = (Phase::Open, sequence);
        (opened.has_header, opened.header_durable) = (false, false);
        Some(segment)
    }

    pub(crate) fn seal(&mut self, segment: u32) {
        self.get_mut(segment).phase = Phase::Sealed;
        self.free_if_done(segment);
    }

    pub(crate) fn add_live(&mut self, at: Location) {
        self.get_mut(at.segment).live_pages += u64::from(at.pages);
    }

    pub(crate) fn remove_live(&mut self, at: Location) {
        self.get_mut(at.segment).live_pages -= u64::from(at.pages);
        self.free_if_done(at.segment);
    }

    pub(crate) fn begin_use(&mut self, segment: u32) {
        self.get_mut(segment).in_use += 1;
    }

    pub(crate) fn end_use(&mut self, segment: u32) {
        self.get_mut(segment).in_use -= 1;
        self.free_if_done(segment);
    }

    /// The sealed segment with the least that is live, when more than an eighth of it is not. One that is full of
    /// live extents is none, as long as seven of them fit: eight of up to an eighth of it, or seven of more. None of
    /// those in `but`.
    pub(crate) fn to_clean(&self, but: &BTreeMap<u32, u64>) -> Option<u32> {
        let worth = u64::from(self.segment_pages) * 7 / 8;
        let sealed = |(_, segment): &(u32, &Segment)| {
            segment.phase == Phase::Sealed && segment.in_use == 0 && segment.live_pages < worth
        };
        let all = (0..).zip(&self.all).filter(sealed).filter(|(index, _)| !but.contains_key(index));
        all.min_by_key(|(_, segment)| segment.live_pages).map(|(index, _)| index)
    }

    fn free_if_done(&mut self, segment: u32) {
        let of = self.get_mut(segment);
        if of.phase == Phase::Sealed && of.live_pages == 0 && of.in_use == 0 {
            of.phase = Phase::Free;
            self.free.insert(segment);
        }
    }
}
