//! What is being copied into pages of an engine's pool. It only remembers; pages are the pool table's, and slots and
//! pins are the cache's.

use std::collections::{BTreeMap, BTreeSet};

use kvasir_proto::{Generation, Share, SlotIndex};

use crate::api::AttachEpoch;

/// Pages that are filled together.
#[derive(Debug)]
pub(crate) struct Fill {
    pub(crate) epoch: AttachEpoch,
    pub(crate) handle: u64,
    /// Pins what is copied.
    pub(crate) share: Share,
    /// It is this fill's alone; otherwise one of the engine, which the fill reads.
    pub(crate) owns_share: bool,
    /// Without those that the engine wanted back meanwhile: they may be another fill's by now.
    pub(crate) pages: Vec<Option<u32>>,
    /// The page of the share that goes into the first of them.
    pub(crate) first: u32,
    /// So many of them could be copied now; when `is_all` is set no more will.
    pub(crate) ready: u32,
    pub(crate) is_all: bool,
    /// So many have been begun, and so many of those are not over.
    pub(crate) begun: u32,
    pub(crate) under_way: u32,
    /// From here on there is nothing to copy any more: all are named, or one has failed.
    pub(crate) end: u32,
}

impl Fill {
    /// Of the share, so many blocks are there.
    pub(crate) fn set_ready(&mut self, blocks: u32, is_all: bool) {
        let pages = self.pages.len() as u32;
        self.ready = blocks.saturating_sub(self.first).min(pages).max(self.ready);
        self.is_all |= is_all;
    }

    /// The next to copy.
    pub(crate) fn next(&self) -> Option<u32> {
        (self.begun < self.ready.min(self.end)).then_some(self.begun)
    }

    /// It does not get this page, nor those after it.
    pub(crate) fn cut(&mut self, at: u32) {
        self.end = self.end.min(at);
    }

    /// The engine wants these pages back.
    pub(crate) fn give_up(&mut self, pages: &[u32]) {
        for at in 0..self.pages.len() {
            if self.pages[at].is_some_and(|page| pages.contains(&page)) {
                self.pages[at] = None;
                self.cut(at as u32);
            }
        }
    }

    /// Begins nothing more.
    pub(crate) fn stop(&mut self) {
        self.cut(self.begun);
    }

    pub(crate) fn is_over(&self) -> bool {
        let begun_all = self.begun >= self.end || (self.is_all && self.begun >= self.ready);
        self.under_way == 0 && begun_all
    }

    /// Pages that have their blocks, when it is over.
    pub(crate) fn filled(&self) -> u32 {
        self.end.min(self.begun)
    }
}

/// A copy of a slot into a page.
#[derive(Debug)]
pub(crate) struct PageWrite {
    pub(crate) fill: u64,
    pub(crate) epoch: AttachEpoch,
    /// Of the fill's pages, this one.
    pub(crate) at: u32,
    pub(crate) page: u32,
    pub(crate) slot: SlotIndex,
    pub(crate) generation: Generation,
}

#[derive(Debug, Default)]
pub(crate) struct Fills {
    pub(crate) all: BTreeMap<u64, Fill>,
    /// Those that have a share of their own.
    pub(crate) of_share: BTreeMap<Share, u64>,
    pub(crate) writes: BTreeMap<u64, PageWrite>,
    /// Shares that are being aborted and whose pushes have stopped, while a copy reads them.
    pub(crate) pushes_stopped: BTreeSet<Share>,
    next: u64,
}

impl Fills {
    pub(crate) fn number(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    pub(crate) fn insert(&mut self, fill: Fill) {
        let number = self.number();
        if fill.owns_share {
            self.of_share.insert(fill.share, number);
        }
        self.all.insert(number, fill);
    }

    pub(crate) fn of_share(&mut self, share: Share) -> Option<&mut Fill> {
        self.all.get_mut(self.of_share.get(&share)?)
    }

    pub(crate) fn remove(&mut self, number: u64) -> Option<Fill> {
        let fill = self.all.remove(&number)?;
        if fill.owns_share {
            self.of_share.remove(&fill.share);
        }
        Some(fill)
    }

    /// A copy reads this share of the engine.
    pub(crate) fn is_read(&self, share: Share) -> bool {
        let reads = |fill: &Fill| !fill.owns_share && fill.share == share && fill.under_way > 0;
        self.all.values().any(reads)
    }
}
