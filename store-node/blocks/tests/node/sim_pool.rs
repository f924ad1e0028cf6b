//! The simulation's engine with pages of its own: it holds blocks there, wants pages back, has pages filled, and dies.
//! What lies in a page is known, and nobody but the engine changes a page that is the engine's.

use std::collections::{BTreeMap, BTreeSet};

use kvasir_blocks::{Action, AttachEpoch, RiseError, Tier, WritePageError};
use kvasir_proto::{BlockKey, Share, Side, SlotIndex, TxId};

use crate::checker::{Hand, tiers};
use crate::simulation::World;

const PAGES: u32 = 12;

/// What a page is, as its engine knows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Page {
    Mine,
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

/// Blocks that are wanted, and in which pages.
#[derive(Debug)]
struct Fill {
    share: Option<Share>,
    wanted: Vec<BlockKey>,
    pages: Vec<u32>,
}

#[derive(Debug, Default)]
pub struct SimPool {
    /// None when there is no pool.
    pages: Vec<Page>,
    contents: Vec<Option<BlockKey>>,
    reads: Vec<Read>,
    writes: Vec<Write>,
    fills: BTreeMap<u64, Fill>,
    drops: BTreeMap<u64, Vec<u32>>,
    /// Shares from which pages of a pool that is gone may still be filled.
    lingering: BTreeSet<Share>,
    next: u64,
    pub sunk_total: u64,
    pub filled_total: u64,
    pub filled_of_shares_total: u64,
    pub dropped_total: u64,
}

impl SimPool {
    pub fn is_idle(&self) -> bool {
        self.reads.is_empty() && self.writes.is_empty()
    }

    /// Pages may be filled from this share.
    pub fn reads(&self, share: Share) -> bool {
        let of_fill = self.fills.values().any(|fill| fill.share == Some(share));
        of_fill || self.lingering.contains(&share)
    }

    /// Those that have a share of their own, at most: also of a pool that is gone, while copies go on.
    pub fn fills_max(&self) -> usize {
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
    pub fn pool_opens(&mut self) {
        if !self.random.one_in(4) {
            self.blocks.open_pool(self.epoch, PAGES);
            self.pool.pages = vec![Page::Mine; PAGES as usize];
            self.pool.contents = vec![None; PAGES as usize];
        }
    }

    /// Its engine is gone. Copies under way go on.
    pub fn pool_closes(&mut self) {
        self.blocks.close_pool(self.epoch);
        self.pool.pages.clear();
        self.pool.contents.clear();
        let fills = std::mem::take(&mut self.pool.fills);
        self.pool.lingering.extend(fills.values().filter_map(|fill| fill.share));
        self.pool.drops.clear();
    }

    pub fn pool_begins(&mut self, action: Action) {
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
            Action::PagesDropped { epoch, handle } if epoch == self.epoch => {
                let pages = self.pool.drops.remove(&handle).expect("a drop");
                for &page in &pages {
                    assert_eq!(self.pool.pages[page as usize], Page::Dropping(handle));
                    assert!(!self.pool.is_touched(epoch, page), "page {page} goes back too early");
                    // The engine uses it for something else.
                    self.pool.contents[page as usize] = None;
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

    pub fn pool_works(&mut self) {
        if self.random.one_in(2) {
            return self.pool_copies_end();
        }
        if self.pool.pages.is_empty() {
            return;
        }
        match self.random.below(8) {
            0..3 => self.hold(),
            3..5 => self.drop_pages(),
            5 | 6 => self.fill(),
            _ => self.fill_from_share(),
        }
    }

    pub fn pool_copies_end(&mut self) {
        if self.random.one_in(2) && !self.pool.reads.is_empty() {
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
        let is_ours = |page| matches!(page, Page::Held(_) | Page::Filling(_));
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
    pub fn check_pool(&self) {
        let held = |page: &Page| match page {
            Page::Held(key) => Some(*key),
            Page::Mine | Page::Filling(_) | Page::Dropping(_) => None,
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
