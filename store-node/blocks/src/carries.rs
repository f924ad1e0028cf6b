//! Pages of shares that engines compute in their own pools: which of their layers are finished there, which have been
//! carried into the share's slots, and which copies are under way. It only remembers; pages are the pool tables', shares and
//! slots the owner's.
//!
//! A page has at most one copy under way, of all its layers that were finished when it began. So what waits is bounded by
//! the pages of the pools, however far the engine is ahead.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use kvasir_proto::{Share, SlotIndex};

use crate::api::AttachEpoch;

/// A page of an engine's pool.
pub(crate) type Place = (AttachEpoch, u32);
/// A page of a share.
pub(crate) type PageOf = (Share, u32);

/// What is owed to a page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Work {
    /// All that is finished is in the slot.
    Nothing,
    /// A copy, in this turn.
    Due(u64),
    UnderWay,
}

/// A page of a share that is computed in a pool.
#[derive(Debug)]
pub(crate) struct ComputedPage {
    pub(crate) place: Place,
    pub(crate) slot: SlotIndex,
    /// That of the plan by which it is computed.
    pub(crate) step: u32,
    /// Leading layers that are finished, and those that are in the slot.
    pub(crate) computed: u16,
    pub(crate) carried: u16,
    pub(crate) work: Work,
    /// The engine wants the page of its pool back, or a copy has failed: no layer is finished there any more.
    pub(crate) is_closed: bool,
}

/// A copy of finished layers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Carry {
    pub(crate) of: PageOf,
    pub(crate) place: Place,
    pub(crate) layers: Range<u16>,
    /// Its share is open: otherwise nothing comes of it, and only its end is waited for.
    pub(crate) counts: bool,
}

#[derive(Debug, Default)]
pub(crate) struct Carries {
    /// Until their shares end.
    pub(crate) pages: BTreeMap<PageOf, ComputedPage>,
    /// Of them, those whose pages the engine has not asked back.
    by_place: BTreeMap<Place, PageOf>,
    /// By turns.
    due: BTreeMap<u64, PageOf>,
    pub(crate) copies: BTreeMap<u64, Carry>,
    next: u64,
}

impl Carries {
    /// The page is computed there from now on.
    pub(crate) fn insert(&mut self, of: PageOf, place: Place, slot: SlotIndex, step: u32) {
        self.by_place.insert(place, of);
        let page = ComputedPage {
            place,
            slot,
            step,
            computed: 0,
            carried: 0,
            work: Work::Nothing,
            is_closed: false,
        };
        self.pages.insert(of, page);
    }

    /// The page that is computed there.
    pub(crate) fn at(&self, place: Place) -> Option<(PageOf, &ComputedPage)> {
        let of = *self.by_place.get(&place)?;
        Some((of, self.pages.get(&of)?))
    }

    /// The pages of a share.
    pub(crate) fn of_share(&self, share: Share) -> Vec<u32> {
        self.pages.range((share, 0)..=(share, u32::MAX)).map(|((_, at), _)| *at).collect()
    }

    /// Its turn is after all that are due.
    pub(crate) fn set_due(&mut self, of: PageOf) {
        let Some(page) = self.pages.get_mut(&of) else { return };
        self.next += 1;
        page.work = Work::Due(self.next);
        self.due.insert(self.next, of);
    }

    pub(crate) fn due(&self) -> usize {
        self.due.len()
    }

    /// Begins the copy whose turn it is.
    pub(crate) fn begin(&mut self) -> Option<(u64, &Carry, SlotIndex)> {
        let (_, of) = self.due.pop_first()?;
        let page = self.pages.get_mut(&of).expect("due work belongs to a page");
        page.work = Work::UnderWay;
        let layers = page.carried..page.computed;
        self.next += 1;
        let carry = Carry { of, place: page.place, layers, counts: true };
        let slot = page.slot;
        Some((self.next, &*self.copies.entry(self.next).or_insert(carry), slot))
    }

    /// The engine wants the page back. What is owed of it stays so.
    pub(crate) fn close(&mut self, place: Place) {
        if let Some(of) = self.by_place.remove(&place)
            && let Some(page) = self.pages.get_mut(&of)
        {
            page.is_closed = true;
        }
    }

    /// The shares to which something is owed from this engine's pool.
    pub(crate) fn owed_from(&self, epoch: AttachEpoch) -> BTreeSet<Share> {
        let owed = |page: &ComputedPage| page.place.0 == epoch && page.work != Work::Nothing;
        self.pages.iter().filter(|(_, page)| owed(page)).map(|((share, _), _)| *share).collect()
    }

    /// The share wants nothing more of it. Copies under way go on, and count for nothing.
    pub(crate) fn remove(&mut self, of: PageOf) -> Option<ComputedPage> {
        let page = self.pages.remove(&of)?;
        if self.by_place.get(&page.place) == Some(&of) {
            self.by_place.remove(&page.place);
        }
        match page.work {
            Work::Nothing => {}
            Work::Due(turn) => drop(self.due.remove(&turn)),
            Work::UnderWay => {
                let its = self.copies.values_mut().filter(|copy| copy.of == of);
                its.for_each(|copy| copy.counts = false);
            }
        }
        Some(page)
    }

    /// Whether a page is computed in a pool and not all of what is finished of it is in the slot: with what a copy brings
    /// that is just over.
    pub(crate) fn lacks(&self, of: PageOf) -> bool {
        let Some(page) = self.pages.get(&of) else { return false };
        let brings =
            |copy: &Carry| copy.of == of && copy.counts && copy.layers.end == page.computed;
        page.computed == 0
            || match page.work {
                Work::Nothing => page.carried < page.computed,
                Work::Due(_) => true,
                Work::UnderWay => !self.copies.values().any(brings),
            }
    }

    /// Every page that a copy touches or is owed, with where it is computed.
    pub(crate) fn owed(&self) -> BTreeSet<(PageOf, Place)> {
        let due = self.due.values().filter_map(|of| Some((*of, self.pages.get(of)?.place)));
        due.chain(self.copies.values().map(|copy| (copy.of, copy.place))).collect()
    }

    /// Turns, copies and pages are of each other.
    pub(crate) fn check(&self) -> Result<(), String> {
        for (of, page) in &self.pages {
            let copies = self.copies.values().filter(|copy| copy.of == *of && copy.counts).count();
            let owes = page.carried < page.computed;
            let good = match page.work {
                Work::Nothing => copies == 0 && (!owes || page.is_closed),
                Work::Due(turn) => copies == 0 && owes && self.due.get(&turn) == Some(of),
                Work::UnderWay => copies == 1 && owes,
            };
            if !good {
                return Err(format!("{of:?} is {page:?}, but {copies} copies of it are in flight"));
            }
        }
        let is_due = |page: &&ComputedPage| matches!(page.work, Work::Due(_));
        if self.pages.values().filter(is_due).count() != self.due.len() {
            return Err("the list of due pages has an entry that is not due".to_owned());
        }
        match self.by_place.iter().find(|(place, of)| {
            self.pages.get(of).is_none_or(|page| page.place != **place || page.is_closed)
        }) {
            Some((place, of)) => Err(format!("{of:?} is not computed in {place:?}")),
            None => Ok(()),
        }
    }
}
