//! The simulation's engine with pages of its own: it holds blocks there, wants pages back, has pages filled, and dies.
//! What lies in a page is known, and nobody but the engine changes a page that is the engine's.

use std::collections::{BTreeMap, BTreeSet};

use kvasir_blocks::{Action, AttachEpoch, RiseError, Tier, WritePageError};
use kvasir_proto::{BlockKey, Share, Side, SlotIndex, TxId};

use crate::checker::{Hand, tiers};
use crate::simulation::World;

const PAGES: u32 = 12;
/// Of the model; only what is computed in the pool goes layer by layer.
const LAYERS: u16 = 3;

/// What a page is, as its engine knows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Page {
    Mine,
    Computed,
    Held(BlockKey),
    Filling(u64),
    Dropping(u64),
}

#[derive(Debug)]
struct Read {
    rise: u64,
    epoch: AttachEpoch,
    page: u32,
    slot: SlotIndex,
    /// What was in the page when it began.
    content: Option<BlockKey>,
}

#[derive(Debug)]
struct Write {
    copy: u64,
    epoch: AttachEpoch,
    page: u32,
    slot: SlotIndex,
}

/// A page of a share that the engine computes in its pool.
#[derive(Debug, Clone, Copy)]
struct Computed {
    share: Share,
    at: u32,
    slot: SlotIndex,
    /// None of a page that is not full.
    key: Option<BlockKey>,
    layers_done: u16,
    layers_carried: u16,
}

/// A copy of layers of it.
#[derive(Debug)]
struct Carry {
    copy: u64,
    epoch: AttachEpoch,
    page: u32,
    layers: std::ops::Range<u16>,
    of: Computed,
}

/// Blocks that are wanted, and in which pages.
#[derive(Debug)]
struct Fill {
    share: Option<Share>,
    wanted: Vec<BlockKey>,
    pages: Vec<u32>,
}

#[derive(Debug, Default)]
pub(crate) struct SimPool {
    /// None when there is no pool.
    pages: Vec<Page>,
    contents: Vec<Option<BlockKey>>,
    reads: Vec<Read>,
    writes: Vec<Write>,
    /// By pages of the pool, until those go back.
    computed: BTreeMap<u32, Computed>,
    carries: Vec<Carry>,
    fills: BTreeMap<u64, Fill>,
    drops: BTreeMap<u64, Vec<u32>>,
    /// Shares from which pages of a pool that is gone may still be filled.
    lingering: BTreeSet<Share>,
    next: u64,
    pub sunk_total: u64,
    pub filled_total: u64,
    pub filled_of_shares_total: u64,
    pub dropped_total: u64,
    pub computed_total: u64,
    /// Copies that ended when their shares were aborted or their engine was gone.
    pub carried_for_nothing_total: u64,
}

impl SimPool {
    pub(crate) fn is_idle(&self) -> bool {
        self.reads.is_empty() && self.writes.is_empty() && self.carries.is_empty()
    }

    /// A copy into a slot of this share is under way.
    pub(crate) fn carries(&self, share: Share) -> bool {
        self.carries.iter().any(|carry| carry.of.share == share)
    }

    /// Pages may be filled from this share.
    pub(crate) fn reads(&self, share: Share) -> bool {
        let of_fill = self.fills.values().any(|fill| fill.share == Some(share));
        of_fill || self.lingering.contains(&share)
    }

    /// Those that have a share of their own, at most: also of a pool that is gone, while copies go on.
    pub(crate) fn fills_max(&self) -> usize {
        self.fills.len() + self.writes.len()
    }

    fn those(&self, is: impl Fn(Page) -> bool) -> Vec<u32> {
        (0..self.pages.len() as u32).filter(|page| is(self.pages[*page as usize])).collect()
    }

    fn set(&mut self, pages: &[u32], to: Page) {
        pages.iter().for_each(|page| self.pages[*page as usize] = to);
    }

    fn is_touched(&self, epoch: AttachEpoch, page: u32) -> bool {
        let reads = self.reads.iter().map(|read| (read.epoch, read.page));
        reads
            .chain(self.writes.iter().map(|write| (write.epoch, write.page)))
            .chain(self.carries.iter().map(|carry| (carry.epoch, carry.page)))
            .any(|of| of == (epoch, page))
    }

    fn handle(&mut self) -> u64 {
        self.next += 1;
        self.next
    }
}

/// Stands for a copy in the checker's books.
fn as_share(incarnation: u64, serial: u64) -> Share {
    Share { tx: TxId { conductor_incarnation: incarnation, serial }, side: Side::Source }
}

impl World {
    /// An engine attaches with a pool, mostly.
    pub(crate) fn pool_opens(&mut self) {
        if !self.random.one_in(4) {
            self.blocks.open_pool(self.epoch, PAGES);
            self.pool.pages = vec![Page::Mine; PAGES as usize];
            self.pool.contents = vec![None; PAGES as usize];
        }
    }

    /// Its engine is gone. Copies under way go on.
    pub(crate) fn pool_closes(&mut self) {
        self.blocks.close_pool(self.now_ms, self.epoch);
        self.pool.pages.clear();
        self.pool.computed.clear();
        self.pool.contents.clear();
        let fills = std::mem::take(&mut self.pool.fills);
        self.pool.lingering.extend(fills.values().filter_map(|fill| fill.share));
        self.pool.drops.clear();
    }

    pub(crate) fn pool_begins(&mut self, action: Action) {
        match action {
            Action::ReadPage { rise, epoch, page, slot } => {
                let state = self.pool.pages[page as usize];
                assert_eq!(epoch, self.epoch);
                assert!(matches!(state, Page::Held(_) | Page::Dropping(_)), "{page} is {state:?}");
                self.checker.hand_out(as_share(5, rise), &[slot]);
                self.checker.may_write(as_share(5, rise), Hand::Remote, &[slot]);
                let content = self.pool.contents[page as usize];
                self.pool.reads.push(Read { rise, epoch, page, slot, content });
            }
            Action::WritePage { copy, epoch, page, slot, .. } => {
                let state = self.pool.pages[page as usize];
                assert_eq!(epoch, self.epoch);
                assert!(matches!(state, Page::Filling(_)), "{page} is {state:?}");
                self.checker.read_begin(&self.blocks, as_share(6, copy), &[slot]);
                self.pool.writes.push(Write { copy, epoch, page, slot });
            }
            Action::CarryLayers { copy, epoch, page, slot, layers } => {
                let state = self.pool.pages[page as usize];
                assert_eq!(epoch, self.epoch);
                let is_there = matches!(state, Page::Computed | Page::Held(_) | Page::Dropping(_));
                assert!(is_there, "{page} is {state:?}");
                let of = self.pool.computed[&page];
                assert_eq!(slot, of.slot);
                assert_eq!(layers.start, of.layers_carried, "each layer is copied once, in order");
                assert!(layers.end <= of.layers_done, "a layer is copied that is not finished");
                self.checker.may_write(as_share(8, copy), Hand::Remote, &[slot]);
                self.pool.carries.push(Carry { copy, epoch, page, layers, of });
            }
            Action::PagesDropped { epoch, handle } if epoch == self.epoch => {
                let pages = self.pool.drops.remove(&handle).expect("a drop");
                for &page in &pages {
                    assert_eq!(self.pool.pages[page as usize], Page::Dropping(handle));
                    assert!(!self.pool.is_touched(epoch, page), "page {page} goes back too early");
                    // The engine uses it for something else.
                    self.pool.contents[page as usize] = None;
                    self.pool.computed.remove(&page);
                }
                self.pool.set(&pages, Page::Mine);
                self.pool.dropped_total += 1;
            }
            Action::PagesFilled { epoch, handle, blocks } if epoch == self.epoch => {
                self.pool_filled(epoch, handle, blocks);
            }
            Action::PagesDropped { .. } | Action::PagesFilled { .. } => {}
            other => panic!("{other:?} is nothing for a pool"),
        }
    }

    fn pool_filled(&mut self, epoch: AttachEpoch, handle: u64, blocks: u32) {
        let fill = self.pool.fills.remove(&handle).expect("a fill");
        for (at, &page) in (0..).zip(&fill.pages) {
            if self.pool.pages[page as usize] != Page::Filling(handle) {
                continue;
            }
            assert!(!self.pool.is_touched(epoch, page), "page {page} is still written");
            if at < blocks {
                let there = self.pool.contents[page as usize];
                assert_eq!(there, fill.wanted.get(at as usize).copied(), "page {page} has others");
            }
            self.pool.pages[page as usize] = Page::Mine;
        }
        self.pool.filled_total += u64::from(blocks);
        if fill.share.is_some() {
            self.pool.filled_of_shares_total += u64::from(blocks);
        }
    }

    pub(crate) fn pool_works(&mut self) {
        if self.random.one_in(2) {
            return self.pool_copies_end();
        }
        if self.pool.pages.is_empty() {
            return;
        }
        if !self.pool.computed.is_empty() && self.random.one_in(2) {
            return self.layers_done();
        }
        match self.random.below(16) {
            0..3 => self.hold(),
            3..5 => self.drop_pages(),
            5 | 6 => self.fill(),
            7 => self.fill_from_share(),
            8..14 => self.compute(),
            _ => self.hold_computed(),
        }
    }

    pub(crate) fn pool_copies_end(&mut self) {
        if self.random.one_in(3) && !self.pool.carries.is_empty() {
            self.carry_ends();
        } else if self.random.one_in(2) && !self.pool.reads.is_empty() {
            let at = self.random.below(self.pool.reads.len());
            let Read { rise, epoch, page, slot, content } = self.pool.reads.swap_remove(at);
            if epoch == self.epoch {
                let now = self.pool.contents[page as usize];
                assert_eq!(now, content, "page {page} was changed under a copy");
            }
            let share = as_share(5, rise);
            let fails = self.random.one_in(8);
            if !fails {
                self.checker.write(share, Hand::Remote, slot, content);
                self.pool.sunk_total += 1;
            }
            self.checker.stopped(share, Hand::Remote);
            let result = if fails { Err(RiseError::Failed) } else { Ok(1) };
            self.blocks.risen(self.now_ms, rise, result);
        } else if !self.pool.writes.is_empty() {
            let at = self.random.below(self.pool.writes.len());
            let Write { copy, epoch, page, slot } = self.pool.writes.swap_remove(at);
            self.checker.reads_end(as_share(6, copy));
            let result = match self.random.below(24) {
                0 => Err(WritePageError::Corrupt),
                1 => Err(WritePageError::Failed),
                _ => Ok(()),
            };
            if epoch == self.epoch {
                let content = self.checker.content(slot).filter(|_| result.is_ok());
                self.pool.contents[page as usize] = content;
            }
            self.blocks.page_written(self.now_ms, copy, result);
        }
        self.learn_of_aborts();
    }

    /// Of one of its shares, some pages that the engine was to write itself.
    fn compute(&mut self) {
        self.learn_of_aborts();
        let nth = self.random.below(4);
        let mut free = self.pool.those(|page| page == Page::Mine);
        free.truncate(1 + self.random.below(3));
        let Some(pages) = self.take_writable(nth, free.len()) else { return };
        free.truncate(pages.len());
        let (share, first, _, _) = pages[0];
        for (&page, &(share, at, slot, key)) in free.iter().zip(&pages) {
            self.pool.pages[page as usize] = Page::Computed;
            self.pool.contents[page as usize] = key;
            let (layers_done, layers_carried) = (0, 0);
            let of = Computed { share, at, slot, key, layers_done, layers_carried };
            self.pool.computed.insert(page, of);
            // From now on the slot is the node's to write.
            self.checker.sealed(slot);
        }
        let computed = self.blocks.compute_pages(self.epoch, (share, first), 7, &free);
        computed.expect("pages that are the engine's, of a share that is");
        assert!(self.blocks.is_computed_in_pool(share, first..first + 1));
        let twice = self.blocks.compute_pages(self.epoch, (share, first), 7, &free);
        assert!(twice.is_err(), "they are being computed already");
    }

    fn layers_done(&mut self) {
        let is_open = |page: &u32| self.pool.pages[*page as usize] == Page::Computed;
        let pages: Vec<u32> = self.pool.computed.keys().copied().filter(is_open).collect();
        let Some(&page) = pages.get(self.random.below(pages.len().max(1))) else { return };
        let jump = 1 + self.random.below(LAYERS.into()) as u16;
        let of = self.pool.computed.get_mut(&page).expect("it is computed");
        of.layers_done = (of.layers_done + jump).min(LAYERS);
        let (share, at, done) = (of.share, of.at, of.layers_done);
        self.blocks.layers_computed(share, at..at + 1, done);
    }

    /// The engine goes on to hold what it has computed, whether or not it is copied yet.
    fn hold_computed(&mut self) {
        let is_open = |page: &u32| self.pool.pages[*page as usize] == Page::Computed;
        let done = |(page, of): (&u32, &Computed)| {
            (is_open(page) && of.layers_done == LAYERS).then_some((*page, of.share, of.key?))
        };
        let Some((page, share, key)) = self.pool.computed.iter().find_map(done) else { return };
        let view = self.blocks.share(share);
        let Some(request) = view.map(|view| view.request).filter(|of| !of.is_ephemeral) else {
            return;
        };
        let of = (request.namespace, self.parent(key));
        self.pool.pages[page as usize] = Page::Held(key);
        let held = self.blocks.hold_pages(self.now_ms, self.epoch, of, &[key], &[page]);
        held.expect("what was computed for this key");
    }

    fn carry_ends(&mut self) {
        let at = self.random.below(self.pool.carries.len());
        let Carry { copy, epoch, page, layers, of } = self.pool.carries.swap_remove(at);
        if epoch == self.epoch {
            let now = self.pool.contents[page as usize];
            assert_eq!(now, of.key, "page {page} was changed under a copy");
        }
        let is_good = !self.random.one_in(48);
        let is_whole = layers.end == LAYERS;
        let (writer, content) = (as_share(8, copy), of.key.filter(|_| is_whole && is_good));
        self.checker.write(writer, Hand::Remote, of.slot, content);
        self.checker.stopped(writer, Hand::Remote);
        match self.blocks.carried(copy) {
            Some(carried) if is_good => {
                assert_eq!(epoch, self.epoch, "what a dead engine left counts");
                let said = (carried.share, carried.page, carried.step, carried.layers);
                assert_eq!(said, (of.share, of.at, 7, layers.clone()));
                if let Some(page) = self.pool.computed.get_mut(&page) {
                    page.layers_carried = layers.end;
                }
                self.carried(of.share, of.at, is_whole);
            }
            Some(_) => {}
            None => self.pool.carried_for_nothing_total += 1,
        }
        self.blocks.carry_ended(self.now_ms, copy, is_good);
    }

    fn hold(&mut self) {
        let (namespace, keys) = self.keys(5);
        let first = self.random.below(3).min(keys.len());
        let parent = first.checked_sub(1).map(|before| keys[before]);
        let mut pages = self.pool.those(|page| page == Page::Mine);
        let keys = &keys[first..keys.len().min(first + pages.len())];
        pages.truncate(keys.len());
        for (&key, &page) in keys.iter().zip(&pages) {
            self.pool.pages[page as usize] = Page::Held(key);
            self.pool.contents[page as usize] = Some(key);
        }
        let held =
            self.blocks.hold_pages(self.now_ms, self.epoch, (namespace, parent), keys, &pages);
        held.expect("pages that are the engine's, and blocks that are what they are");
    }

    fn drop_pages(&mut self) {
        // Also while a share is computed there, but not often.
        let early = self.random.one_in(6);
        let is_ours = |page| match page {
            Page::Held(_) | Page::Filling(_) => true,
            Page::Computed => early,
            Page::Mine | Page::Dropping(_) => false,
        };
        let mut pages = self.pool.those(is_ours);
        while pages.len() > 1 + self.random.below(4) {
            pages.swap_remove(self.random.below(pages.len()));
        }
        if pages.is_empty() {
            return;
        }
        let handle = self.pool.handle();
        self.pool.set(&pages, Page::Dropping(handle));
        self.pool.drops.insert(handle, pages.clone());
        self.blocks
            .drop_pages(self.now_ms, (self.epoch, handle), &pages)
            .expect("pages that the node has");
    }

    fn fill(&mut self) {
        let (_, keys) = self.keys(4);
        let mut pages = self.pool.those(|page| page == Page::Mine);
        pages.truncate(1 + self.random.below(4));
        if pages.is_empty() {
            return;
        }
        self.serial += 1;
        let handle = self.pool.handle();
        let share = as_share(7, self.serial);
        let wanted = keys[keys.len() - pages.len()..].to_vec();
        self.pool.set(&pages, Page::Filling(handle));
        self.pool.fills.insert(handle, Fill { share: None, wanted, pages: pages.clone() });
        let filled =
            self.blocks.fill_pages(self.now_ms, (share, self.epoch, handle), &keys, &pages);
        filled.expect("pages that are the engine's");
    }

    /// Whole pages of the prompt: the engine may write the one that is not full.
    fn fill_from_share(&mut self) {
        let nth = self.random.below(8);
        let Some((share, keys)) = self.prompt_of_engine(nth) else { return };
        let mut pages = self.pool.those(|page| page == Page::Mine);
        let first = self.random.below(2).min(keys.len());
        pages.truncate((keys.len() - first).min(1 + self.random.below(4)));
        if pages.is_empty() {
            return;
        }
        let handle = self.pool.handle();
        let wanted = keys[first..first + pages.len()].to_vec();
        self.pool.set(&pages, Page::Filling(handle));
        let fill = Fill { share: Some(share), wanted, pages: pages.clone() };
        self.pool.fills.insert(handle, fill);
        let filled =
            self.blocks.fill_from_share((share, first as u32), (self.epoch, handle), &pages);
        filled.expect("pages of a prompt");
    }

    /// What is announced is what is held.
    pub(crate) fn check_pool(&self) {
        let held = |page: &Page| match page {
            Page::Held(key) => Some(*key),
            Page::Mine | Page::Computed | Page::Filling(_) | Page::Dropping(_) => None,
        };
        let mut held: Vec<BlockKey> = self.pool.pages.iter().filter_map(held).collect();
        held.sort();
        held.dedup();
        let announced = tiers(&self.blocks.snapshot());
        let announced = announced.iter().filter(|(_, tier)| **tier == Tier::Vram);
        let announced: Vec<BlockKey> = announced.map(|(key, _)| *key).collect();
        assert_eq!(announced, held, "other blocks of the pool are announced");
    }
}
