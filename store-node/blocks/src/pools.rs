//! The pages of one engine's own pool: who may touch each, and which blocks they hold.
//!
//! The engine gives pages out and takes them back; the node only knows what it was told. Copies are the
//! shell's, and each is begun and ended here, so that no page goes back to the engine while one touches it.
//! It knows nothing of slots, tiers or time beyond the numbers it is given.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::hash::BuildHasherDefault;

use kvasir_mutation::{Mutation, mutated};
use kvasir_proto::{BlockKey, Namespace};

use crate::api::PoolError;
use crate::index::KeyHasher;

/// Who may touch a page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PageState {
    /// The engine alone. Becomes computed, held or filling.
    Free,
    /// The engine, which computes a page of a share there, layer by layer; so many copies read what is finished, or are
    /// owed. Becomes held or dropping.
    Computed { reads: u32 },
    /// Nobody writes: it holds a finished block, which so many copies read. Becomes dropping.
    Held { key: BlockKey, reads: u32 },
    /// The node alone: a block is to be copied there, or is being copied now. Becomes free or dropping.
    Filling { writing: bool },
    /// Nobody, but for copies that are not over: the engine has asked for it. Becomes free when nothing
    /// touches any page of that request.
    Dropping { drop: u64, touches: u32 },
}

impl PageState {
    fn name(self) -> &'static str {
        match self {
            PageState::Free => "owned by the engine",
            PageState::Computed { .. } => "being computed",
            PageState::Held { .. } => "held",
            PageState::Filling { .. } => "being filled",
            PageState::Dropping { .. } => "being dropped",
        }
    }
}

/// A block that pages hold.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct PoolBlock {
    pub(crate) namespace: Namespace,
    pub(crate) parent: Option<BlockKey>,
    /// When the first of its pages was held.
    pub(crate) since_ms: u64,
    /// Which pages hold it, one at least.
    pages: Vec<u32>,
    /// Its place among those that wait to be copied into a slot.
    waits: Option<u64>,
}

/// Pages that the engine wants back together.
#[derive(Debug)]
struct Drop {
    handle: u64,
    pages: Vec<u32>,
    /// Pages of it that a copy touches.
    touched: usize,
}

/// How many pages are in which state.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct PoolTally {
    pub(crate) pages: u32,
    pub(crate) computed: u32,
    pub(crate) held: u32,
    pub(crate) filling: u32,
    pub(crate) dropping: u32,
}

/// See the module.
#[derive(Debug)]
pub(crate) struct PoolTable {
    pages: Vec<PageState>,
    tally: PoolTally,
    blocks: HashMap<BlockKey, PoolBlock, BuildHasherDefault<KeyHasher>>,
    /// Blocks in the order in which they were held, as far as nobody has looked after them yet.
    waiting: BTreeMap<u64, BlockKey>,
    drops: BTreeMap<u64, Drop>,
    /// Handles of drops that are over.
    dropped: VecDeque<u64>,
    next: u64,
}

impl PoolTable {
    pub(crate) fn new(pages: u32) -> Self {
        PoolTable {
            pages: vec![PageState::Free; pages as usize],
            tally: PoolTally { pages, ..PoolTally::default() },
            blocks: HashMap::default(),
            waiting: BTreeMap::new(),
            drops: BTreeMap::new(),
            dropped: VecDeque::new(),
            next: 0,
        }
    }

    pub(crate) fn tally(&self) -> PoolTally {
        self.tally
    }

    /// A block that is held.
    pub(crate) fn block(&self, key: BlockKey) -> Option<&PoolBlock> {
        self.blocks.get(&key)
    }

    /// Every block that is held, in no order.
    pub(crate) fn keys(&self) -> impl Iterator<Item = BlockKey> + '_ {
        self.blocks.keys().copied()
    }

    /// How many of the keys are held, each after the one before it.
    pub(crate) fn prefix(
        &self,
        namespace: Namespace,
        mut parent: Option<BlockKey>,
        keys: &[BlockKey],
    ) -> usize {
        let follows = |key: &&BlockKey| {
            let held = self.blocks.get(*key);
            let fits =
                held.is_some_and(|held| held.namespace == namespace && held.parent == parent);
            parent = Some(**key);
            fits
        };
        keys.iter().take_while(follows).count()
    }

    /// Whether all of these pages are the engine's own, and none is named twice.
    pub(crate) fn check_free(&self, pages: &[u32]) -> Result<(), PoolError> {
        self.check_all(pages, |state| state == PageState::Free)
    }

    /// Whether the engine may say of all of these pages that they hold blocks, and none is named twice.
    pub(crate) fn check_hold(&self, pages: &[u32]) -> Result<(), PoolError> {
        self.check_all(pages, |state| matches!(state, PageState::Free | PageState::Computed { .. }))
    }

    fn check_all(&self, pages: &[u32], good: impl Fn(PageState) -> bool) -> Result<(), PoolError> {
        self.check_named(pages)?;
        match pages.iter().find(|page| !good(self.pages[**page as usize])) {
            None => Ok(()),
            Some(&page) => Err(PoolError::Taken { page, state: self.pages[page as usize].name() }),
        }
    }

    /// Whether these pages can be asked back, and none is named twice.
    pub(crate) fn check_drop(&self, pages: &[u32]) -> Result<(), PoolError> {
        self.check_named(pages)?;
        for &page in pages {
            let state = self.pages[page as usize];
            if matches!(state, PageState::Dropping { .. }) {
                return Err(PoolError::Taken { page, state: state.name() });
            }
        }
        Ok(())
    }

    fn check_named(&self, pages: &[u32]) -> Result<(), PoolError> {
        let mut sorted = pages.to_vec();
        sorted.sort_unstable();
        if let Some(twice) = sorted.windows(2).find(|pair| pair[0] == pair[1]) {
            return Err(PoolError::Twice { page: twice[0] });
        }
        match sorted.last() {
            Some(&page) if page >= self.tally.pages => {
                Err(PoolError::NoSuchPage { page, pages: self.tally.pages })
            }
            _ => Ok(()),
        }
    }

    /// Whether a block of this key may be held: it is no other one's.
    pub(crate) fn fits(
        &self,
        key: BlockKey,
        namespace: Namespace,
        parent: Option<BlockKey>,
    ) -> bool {
        let same = |held: &PoolBlock| held.namespace == namespace && held.parent == parent;
        self.blocks.get(&key).is_none_or(same)
    }

    /// A page that is the engine's, or in which it has computed, holds this block from now on. True when no other page
    /// does.
    pub(crate) fn hold(
        &mut self,
        now_ms: u64,
        page: u32,
        key: BlockKey,
        (namespace, parent): (Namespace, Option<BlockKey>),
    ) -> bool {
        let reads = match self.pages[page as usize] {
            PageState::Computed { reads } => reads,
            state => {
                debug_assert_eq!(state, PageState::Free);
                0
            }
        };
        self.set(page, PageState::Held { key, reads });
        if let Some(block) = self.blocks.get_mut(&key) {
            block.pages.push(page);
            return false;
        }
        let block =
            PoolBlock { namespace, parent, since_ms: now_ms, pages: vec![page], waits: None };
        self.blocks.insert(key, block);
        self.wait(key);
        true
    }

    /// A block that is held waits to be copied into a slot from now on, behind those that wait already.
    pub(crate) fn wait(&mut self, key: BlockKey) {
        let Some(block) = self.blocks.get_mut(&key).filter(|block| block.waits.is_none()) else {
            return;
        };
        self.next += 1;
        block.waits = Some(self.next);
        self.waiting.insert(self.next, key);
    }

    /// The block that a page holds.
    pub(crate) fn key_in(&self, page: u32) -> Option<BlockKey> {
        match self.pages[page as usize] {
            PageState::Held { key, .. } => Some(key),
            _ => None,
        }
    }

    /// The block that waits longest to be copied into a slot.
    pub(crate) fn next_waiting(&self) -> Option<BlockKey> {
        self.waiting.first_key_value().map(|(_, key)| *key)
    }

    /// It does not wait any more.
    pub(crate) fn looked_after(&mut self, key: BlockKey) {
        let waits = self.blocks.get_mut(&key).and_then(|block| block.waits.take());
        waits.and_then(|at| self.waiting.remove(&at));
    }

    /// The page in which a copy reads a block now. To be followed by [`Self::end_read`].
    pub(crate) fn begin_read(&mut self, key: BlockKey) -> Option<u32> {
        let page = *self.blocks.get(&key)?.pages.first()?;
        match &mut self.pages[page as usize] {
            PageState::Held { reads, .. } => *reads += 1,
            _ => return None,
        }
        Some(page)
    }

    /// In pages that are the engine's it computes pages of a share from now on.
    pub(crate) fn compute(&mut self, pages: &[u32]) {
        for &page in pages {
            debug_assert_eq!(self.pages[page as usize], PageState::Free);
            self.set(page, PageState::Computed { reads: 0 });
        }
    }

    /// A layer of a page is finished, and a copy reads it from now on, or is owed. To be followed by
    /// [`Self::end_read`]. False when the engine wants the page back: then nobody reads it.
    pub(crate) fn begin_carry(&mut self, page: u32) -> bool {
        match &mut self.pages[page as usize] {
            PageState::Computed { reads } | PageState::Held { reads, .. } => *reads += 1,
            _ => return false,
        }
        true
    }

    /// A copy that read a page is over.
    pub(crate) fn end_read(&mut self, page: u32) {
        match &mut self.pages[page as usize] {
            PageState::Computed { reads } | PageState::Held { reads, .. } => *reads -= 1,
            PageState::Dropping { .. } => self.untouch(page),
            PageState::Free | PageState::Filling { .. } => {
                debug_assert!(false, "no copy read the page");
            }
        }
    }

    /// Pages that are the engine's are to be filled.
    pub(crate) fn begin_fill(&mut self, pages: &[u32]) {
        for &page in pages {
            debug_assert_eq!(self.pages[page as usize], PageState::Free);
            self.set(page, PageState::Filling { writing: false });
        }
    }

    /// A copy writes a page from now on. False when the engine wants it back: then none does.
    pub(crate) fn begin_write(&mut self, page: u32) -> bool {
        let fills = self.pages[page as usize] == PageState::Filling { writing: false };
        if fills {
            self.set(page, PageState::Filling { writing: true });
        }
        fills
    }

    /// The copy that wrote a page is over.
    pub(crate) fn end_write(&mut self, page: u32) {
        match self.pages[page as usize] {
            PageState::Filling { .. } => self.set(page, PageState::Filling { writing: false }),
            PageState::Dropping { .. } => self.untouch(page),
            PageState::Free | PageState::Computed { .. } | PageState::Held { .. } => {
                debug_assert!(false, "no copy wrote the page");
            }
        }
    }

    /// Pages that were to be filled are the engine's again, as far as they are not being dropped. No copy writes
    /// any of them.
    pub(crate) fn end_fill(&mut self, pages: &[u32]) {
        for &page in pages {
            if self.pages[page as usize] == (PageState::Filling { writing: false }) {
                self.set(page, PageState::Free);
            }
        }
    }

    /// The keys that no page would hold any more without these.
    pub(crate) fn last_of(&self, pages: &[u32]) -> Vec<BlockKey> {
        let named: BTreeSet<u32> = pages.iter().copied().collect();
        let held = |page: &u32| Some((*page, self.key_in(*page)?));
        let is_last = |(page, key): &(u32, BlockKey)| {
            let of = self.blocks.get(key).map(|held| &held.pages[..]).unwrap_or_default();
            of.first() == Some(page) && of[1..].iter().all(|page| named.contains(page))
        };
        pages.iter().filter_map(held).filter(is_last).map(|(_, key)| key).collect()
    }

    /// The engine wants these pages back; [`Self::next_dropped`] says when it may have them. Answers with the keys
    /// that no page holds any more.
    pub(crate) fn drop_pages(&mut self, handle: u64, pages: &[u32]) -> Vec<BlockKey> {
        self.next += 1;
        let drop = self.next;
        let (mut gone, mut touched) = (Vec::new(), 0);
        for &page in pages {
            let touches = match self.pages[page as usize] {
                PageState::Held { key, reads } => {
                    gone.extend(self.let_go(page, key));
                    reads
                }
                PageState::Computed { .. } if mutated(Mutation::PoolPageReturnedDuringCopy) => 0,
                PageState::Computed { reads } => reads,
                PageState::Filling { writing } => writing.into(),
                PageState::Free | PageState::Dropping { .. } => 0,
            };
            touched += usize::from(touches > 0);
            self.set(page, PageState::Dropping { drop, touches });
        }
        self.drops.insert(drop, Drop { handle, pages: pages.to_vec(), touched });
        self.end_drop(drop);
        gone
    }

    /// The handle of a drop whose pages nothing touches any more. Each is given once.
    pub(crate) fn next_dropped(&mut self) -> Option<u64> {
        self.dropped.pop_front()
    }

    /// A page holds this block no more. Answers with its key when it was the last one.
    fn let_go(&mut self, page: u32, key: BlockKey) -> Option<BlockKey> {
        let block = self.blocks.get_mut(&key)?;
        block.pages.retain(|of| *of != page);
        if !block.pages.is_empty() {
            return None;
        }
        let block = self.blocks.remove(&key)?;
        block.waits.and_then(|at| self.waiting.remove(&at));
        Some(key)
    }

    fn untouch(&mut self, page: u32) {
        let PageState::Dropping { drop, touches } = self.pages[page as usize] else { return };
        self.pages[page as usize] = PageState::Dropping { drop, touches: touches - 1 };
        if touches == 1 {
            if let Some(of) = self.drops.get_mut(&drop) {
                of.touched -= 1;
            }
            self.end_drop(drop);
        }
    }

    fn end_drop(&mut self, drop: u64) {
        if self.drops.get(&drop).is_none_or(|of| of.touched > 0) {
            return;
        }
        let Some(over) = self.drops.remove(&drop) else { return };
        over.pages.iter().for_each(|page| self.set(*page, PageState::Free));
        self.dropped.push_back(over.handle);
    }

    fn set(&mut self, page: u32, state: PageState) {
        let was = std::mem::replace(&mut self.pages[page as usize], state);
        if let Some(count) = self.tally.of(was) {
            *count -= 1;
        }
        if let Some(count) = self.tally.of(state) {
            *count += 1;
        }
    }

    /// Every copy under way is known to some page: `reads` are the pages of those that read, each as often as it is
    /// read.
    pub(crate) fn check(&self, reads: &[u32], writes: &[u32]) -> Result<(), String> {
        let mut tally = PoolTally { pages: self.pages.len() as u32, ..PoolTally::default() };
        for (page, state) in (0..).zip(&self.pages) {
            if let Some(count) = tally.of(*state) {
                *count += 1;
            }
            let reads = reads.iter().filter(|of| **of == page).count() as u32;
            let writes = writes.iter().filter(|of| **of == page).count() as u32;
            let good = match *state {
                PageState::Free => reads + writes == 0,
                PageState::Computed { reads: known } => writes == 0 && known == reads,
                PageState::Held { key, reads: known } => {
                    let held = self.blocks.get(&key);
                    writes == 0 && known == reads && held.is_some_and(|b| b.pages.contains(&page))
                }
                PageState::Filling { writing } => reads == 0 && writes == u32::from(writing),
                PageState::Dropping { drop, touches } => {
                    self.drops.contains_key(&drop) && touches == reads + writes
                }
            };
            if !good {
                return Err(format!(
                    "page {page} is {state:?} with {reads} reads and {writes} writes"
                ));
            }
        }
        let pages: usize = self.blocks.values().map(|block| block.pages.len()).sum();
        if tally != self.tally || pages != tally.held as usize {
            return Err(format!("the pool's tally is {:?}, but should be {tally:?}", self.tally));
        }
        Ok(())
    }
}

impl std::ops::Add for PoolTally {
    type Output = PoolTally;

    fn add(self, other: PoolTally) -> PoolTally {
        PoolTally {
            pages: self.pages + other.pages,
            computed: self.computed + other.computed,
            held: self.held + other.held,
            filling: self.filling + other.filling,
            dropping: self.dropping + other.dropping,
        }
    }
}

impl PoolTally {
    fn of(&mut self, state: PageState) -> Option<&mut u32> {
        match state {
            PageState::Free => None,
            PageState::Computed { .. } => Some(&mut self.computed),
            PageState::Held { .. } => Some(&mut self.held),
            PageState::Filling { .. } => Some(&mut self.filling),
            PageState::Dropping { .. } => Some(&mut self.dropping),
        }
    }
}

#[cfg(test)]
mod tests;
