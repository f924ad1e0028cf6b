//! Between the pages of engines' own pools and the slots: what an engine says that its pages hold, what is copied into
//! slots so that others and the tiers below have it too, and what is copied into pages.
//!
//! A block comes from a page into a slot as one comes from the SSD: the slot rises, and is committed when the block
//! before it is there. So whoever wants a block that only the pool has can wait for it as for one of the SSD. Blocks are
//! also copied ahead of need, in the order in which they were held, into slots that are free or whose blocks were last used
//! before: what lies in a pool makes nothing go that was used more lately.

use std::collections::BTreeSet;

use kvasir_proto::{BlockKey, Namespace, Share, Side, SlotIndex};

use super::Blocks;
use crate::api::{AbortReason, Action, Allocate, AttachEpoch, PoolError, WritePageError};
use crate::pool_work::{Fill, PageWrite};
use crate::pools::PoolTable;
use crate::share::Hold;
use crate::share_state::ShareEvent;
use crate::tier_work::RiseFrom;

/// Fills under way at once; one more gets nothing.
const FILLS_MAX: usize = 1_024;
/// What is copied because pages are wanted back may take so many times what is copied ahead of need.
const PRESSED: usize = 4;

impl Blocks {
    /// An engine that has attached has a pool of so many pages.
    pub fn open_pool(&mut self, epoch: AttachEpoch, pages: u32) {
        self.close_fills(epoch);
        self.cache.open_pool(epoch, PoolTable::new(pages));
    }

    /// Nothing of this engine's pool counts any more. Copies under way are answered as ever, and count for nothing.
    /// Shares that miss layers from it are aborted.
    pub fn close_pool(&mut self, now_ms: u64, epoch: AttachEpoch) {
        self.close_fills(epoch);
        self.abort_owed_carries(now_ms, epoch);
        self.cache.close_pool(epoch);
    }

    fn close_fills(&mut self, epoch: AttachEpoch) {
        self.fills.all.values_mut().filter(|fill| fill.epoch == epoch).for_each(Fill::stop);
    }

    /// These pages hold these blocks of a chain, which begins after `parent`, and nobody changes them until they are
    /// dropped.
    ///
    /// # Errors
    /// [`PoolError`]; then the engine's word is worth nothing.
    pub fn hold_pages(
        &mut self,
        now_ms: u64,
        epoch: AttachEpoch,
        (namespace, parent): (Namespace, Option<BlockKey>),
        keys: &[BlockKey],
        pages: &[u32],
    ) -> Result<(), PoolError> {
        if keys.len() != pages.len() {
            return Err(PoolError::Count { keys: keys.len(), pages: pages.len() });
        }
        self.cache.pools().of(epoch)?.check_hold(pages)?;
        if let Some(parent) = parent
            && self.namespace_of(parent).is_some_and(|of| of != namespace)
        {
            return Err(PoolError::OtherBlock(parent));
        }
        self.cache.set_now(now_ms);
        let mut before = parent;
        for (&key, &page) in keys.iter().zip(pages) {
            if !self.may_be(key, namespace, before) {
                return Err(PoolError::OtherBlock(key));
            }
            self.cache.hold(now_ms, (epoch, page), key, (namespace, before));
            if self.brought_from((epoch, page)).is_some() {
                self.cache.pools_mut().looked_after(key);
            }
            before = Some(key);
        }
        Ok(())
    }

    /// No other block is known under this key.
    fn may_be(&self, key: BlockKey, namespace: Namespace, parent: Option<BlockKey>) -> bool {
        let index = self.cache.index();
        let key_of = |slot: SlotIndex| index.entry(slot).map(|entry| entry.key);
        let in_memory = index.find(key).and_then(|slot| index.entry(slot));
        let same_in_memory = in_memory.is_none_or(|entry| {
            entry.namespace == namespace && entry.parent.and_then(key_of) == parent
        });
        same_in_memory && self.cache.pools().fits(key, namespace, parent)
    }

    /// The engine wants these pages back: [`Action::PagesDropped`] says when it may have them. What no other tier has is
    /// copied first, as far as there is room now.
    ///
    /// # Errors
    /// [`PoolError`]; then nothing was done.
    pub fn drop_pages(
        &mut self,
        now_ms: u64,
        (epoch, handle): (AttachEpoch, u64),
        pages: &[u32],
    ) -> Result<(), PoolError> {
        let pool = self.cache.pools().of(epoch)?;
        pool.check_drop(pages)?;
        let last = pool.last_of(pages);
        let coming = |page: &u32| self.coming_from((epoch, *page));
        let coming: BTreeSet<BlockKey> = pages.iter().filter_map(coming).collect();
        self.cache.set_now(now_ms);
        let copies_max = PRESSED * self.pool_copies_max();
        for key in last {
            if coming.contains(&key) || self.has_elsewhere(key) || self.another_holds(epoch, key) {
                continue;
            }
            let room = copies_max.saturating_sub(self.pool_copies());
            let path = self.sink_path(key, room).unwrap_or_default();
            let all = path.iter().all(|key| self.sink_page(now_ms, *key));
            self.totals.pool_dropped_unsunk += u64::from(path.is_empty() || !all);
        }
        self.close_carries(epoch, pages);
        self.cache.drop_pages(epoch, handle, pages);
        for fill in self.fills.all.values_mut().filter(|fill| fill.epoch == epoch) {
            fill.give_up(pages);
        }
        self.tell_dropped();
        Ok(())
    }

    /// Copies blocks into pages that are the engine's: the last of the chain's keys, as many as there are pages.
    /// [`Action::PagesFilled`] says when that is over. The share is drawn by the shell, of the source side and never used
    /// again; nothing else is heard of it.
    ///
    /// # Errors
    /// [`PoolError`]; then nothing is done.
    pub fn fill_pages(
        &mut self,
        now_ms: u64,
        (share, epoch, handle): (Share, AttachEpoch, u64),
        keys: &[BlockKey],
        pages: &[u32],
    ) -> Result<(), PoolError> {
        self.forget_until(now_ms);
        self.cache.pools().of(epoch)?.check_free(pages)?;
        let Some(first) = keys.len().checked_sub(pages.len()) else {
            return Err(PoolError::Count { keys: keys.len(), pages: pages.len() });
        };
        if !self.begin_fill(now_ms, (share, epoch, handle), keys, first as u32, pages) {
            self.totals.pool_unfilled += pages.len() as u64;
            self.actions.push_back(Action::PagesFilled { epoch, handle, blocks: 0 });
        }
        Ok(())
    }

    fn begin_fill(
        &mut self,
        now_ms: u64,
        (share, epoch, handle): (Share, AttachEpoch, u64),
        keys: &[BlockKey],
        first: u32,
        pages: &[u32],
    ) -> bool {
        debug_assert_eq!(share.side, Side::Source);
        let Some(namespace) = keys.first().and_then(|key| self.namespace_of(*key)) else {
            return false;
        };
        let lease_ms = self.options.lease_max_ms;
        let request = Allocate {
            share,
            namespace,
            keys: keys.to_vec(),
            prompt_tokens: 0,
            lease_ms,
            fetch_until_block: 0,
            has_remote_writer: false,
            is_ephemeral: false,
            leaves_ssd: false,
        };
        let is_full = self.fills.all.len() >= FILLS_MAX || self.shares.contains_key(&share);
        let Some(plan) = self.plan(now_ms, &request).ok().filter(|plan| plan.pages() > first)
        else {
            return false;
        };
        if is_full {
            return false;
        }
        let allocated = self.take(now_ms, &request, plan);
        if let Some(record) = self.shares.get_mut(&share) {
            record.is_fill = true;
            // Refused by no state of a share that was just made.
            let _ = record.state.on(ShareEvent::ReadBegin);
        }
        if let Some(pool) = self.cache.pools_mut().of_mut(epoch) {
            pool.begin_fill(pages);
        }
        let mut fill = Fill {
            epoch,
            handle,
            share,
            owns_share: true,
            pages: pages.iter().copied().map(Some).collect(),
            first,
            ready: 0,
            is_all: false,
            begun: 0,
            under_way: 0,
            end: pages.len() as u32,
        };
        let here = allocated.held_blocks - allocated.promoting_blocks;
        fill.set_ready(here, allocated.promoting_blocks == 0);
        self.fills.insert(fill);
        true
    }

    /// Copies pages of a share that an engine has, or is about to have, into pages that are the engine's: on the decode side
    /// those of the prompt when they have arrived, on the prefill side those that are cached when that is settled.
    /// [`Action::PagesFilled`] says when it is over.
    ///
    /// # Errors
    /// [`PoolError`]; then nothing is done.
    pub fn fill_from_share(
        &mut self,
        (share, first): (Share, u32),
        (epoch, handle): (AttachEpoch, u64),
        pages: &[u32],
    ) -> Result<(), PoolError> {
        self.cache.pools().of(epoch)?.check_free(pages)?;
        if let Some(record) = self.shares.get(&share) {
            let end = u64::from(first) + pages.len() as u64;
            if end > u64::from(record.prompt_pages) {
                return Err(PoolError::NotOfShare { pages: record.prompt_pages });
            }
        }
        if self.fills.all.len() >= FILLS_MAX || self.read_begin(share).is_err() {
            self.totals.pool_unfilled += pages.len() as u64;
            self.actions.push_back(Action::PagesFilled { epoch, handle, blocks: 0 });
            return Ok(());
        }
        if let Some(pool) = self.cache.pools_mut().of_mut(epoch) {
            pool.begin_fill(pages);
        }
        self.fills.insert(Fill {
            epoch,
            handle,
            share,
            owns_share: false,
            pages: pages.iter().copied().map(Some).collect(),
            first,
            ready: 0,
            is_all: false,
            begun: 0,
            under_way: 0,
            end: pages.len() as u32,
        });
        Ok(())
    }

    /// What there is to copy of an engine's share, once that is settled.
    fn look_at_share(&mut self, number: u64) {
        let Some(fill) = self.fills.all.get_mut(&number).filter(|fill| !fill.owns_share) else {
            return;
        };
        let Some(record) = self.shares.get(&fill.share).filter(|record| !record.is_aborted())
        else {
            fill.stop();
            return;
        };
        if record.state.rising || !record.state.settled() {
            return;
        }
        let pages = match fill.share.side {
            Side::Decode => record.prompt_pages,
            Side::Prefill | Side::Source => record.cached_blocks,
        };
        fill.set_ready(pages, true);
    }

    /// Begins copies between the pool and slots, as far as there may be more. To be called before the actions are drained,
    /// whenever anything has happened.
    pub fn copy_pages(&mut self, now_ms: u64) {
        if self.cache.pools().is_empty() && self.fills.all.is_empty() {
            return;
        }
        let fills: Vec<u64> = self.fills.all.keys().copied().collect();
        for fill in fills {
            self.look_at_share(fill);
            self.write_pages(fill);
            if self.fills.all.get(&fill).is_some_and(Fill::is_over) {
                self.end_fill(now_ms, fill);
            }
        }
        self.begin_carries();
        self.sink_pages(now_ms);
    }

    fn write_pages(&mut self, number: u64) {
        while self.pool_copies() < self.pool_copies_max() {
            let Some(fill) = self.fills.all.get_mut(&number) else { return };
            let Some(at) = fill.next() else { return };
            let (epoch, page) = (fill.epoch, fill.pages[at as usize]);
            let page = page.expect("a fill ends before a page that was given up");
            let record = self.shares.get(&fill.share);
            let of = record.and_then(|record| record.page(fill.first + at));
            let of = of.and_then(|of| {
                let entry = self.cache.index().entry(of.slot);
                let sum = entry.map(|entry| entry.checksum);
                // What was committed and is not any more was dropped: it may be rotten.
                if sum.is_none() && of.hold == Hold::Pinned {
                    return None;
                }
                Some((of.slot, self.cache.slots().generation(of.slot)?, sum))
            });
            let pool = self.cache.pools_mut().of_mut(epoch);
            let may_write = of.is_some() && pool.is_some_and(|pool| pool.begin_write(page));
            let Some((slot, generation, checksum)) = of.filter(|_| may_write) else {
                // The engine wants the page back, or the share has been aborted, or the block dropped.
                fill.stop();
                return;
            };
            fill.begun += 1;
            fill.under_way += 1;
            let write = PageWrite { fill: number, epoch, at, page, slot, generation };
            let copy = self.fills.number();
            self.fills.writes.insert(copy, write);
            self.actions.push_back(Action::WritePage { copy, epoch, page, slot, checksum });
        }
    }

    /// A copy into a page is over.
    pub fn page_written(&mut self, now_ms: u64, copy: u64, result: Result<(), WritePageError>) {
        let Some(write) = self.fills.writes.remove(&copy) else { return };
        if let Some(pool) = self.cache.pools_mut().of_mut(write.epoch) {
            pool.end_write(write.page);
        }
        if result == Err(WritePageError::Corrupt) {
            self.drop_corrupt(now_ms, write.slot, write.generation);
        }
        if let Some(fill) = self.fills.all.get_mut(&write.fill) {
            fill.under_way -= 1;
            if result.is_err() {
                fill.cut(write.at);
            }
        }
        self.tell_dropped();
    }

    fn end_fill(&mut self, now_ms: u64, number: u64) {
        let Some(fill) = self.fills.remove(number) else { return };
        let Fill { epoch, handle, share, owns_share, ref pages, .. } = fill;
        let blocks = fill.filled();
        if let Some(pool) = self.cache.pools_mut().of_mut(epoch) {
            let pages: Vec<u32> = pages.iter().copied().flatten().collect();
            pool.end_fill(&pages);
            self.actions.push_back(Action::PagesFilled { epoch, handle, blocks });
        }
        self.totals.pool_filled += u64::from(blocks);
        self.totals.pool_unfilled += pages.len() as u64 - u64::from(blocks);
        if self.fills.pushes_stopped.contains(&share) {
            if !self.fills.is_read(share) {
                self.fills.pushes_stopped.remove(&share);
                self.push_stopped(now_ms, share);
            }
            return;
        }
        // Refused where all reads were ended with the share's pushes.
        let _ = self.apply(now_ms, share, ShareEvent::ReadEnd, AbortReason::PeerLost);
        if owns_share {
            let _ = self.apply(now_ms, share, ShareEvent::Release, AbortReason::PeerLost);
        }
    }

    /// More of what a fill waits for is there. False when the share is no fill's.
    pub(super) fn fill_has(&mut self, share: Share, blocks: u32, is_all: bool) -> bool {
        let Some(fill) = self.fills.of_share(share) else { return false };
        fill.set_ready(blocks, is_all);
        true
    }

    /// The share of a fill is being aborted. False when it is none's.
    pub(super) fn stop_own_fill(&mut self, share: Share) -> bool {
        let Some(fill) = self.fills.of_share(share) else { return false };
        fill.stop();
        true
    }

    /// Whose pool a block rises from, where it rises from one.
    pub fn rises_from(&self, rise: u64) -> Option<AttachEpoch> {
        match self.rises.all.get(&rise)?.from {
            RiseFrom::Pool { epoch, .. } => Some(epoch),
            RiseFrom::Ssd | RiseFrom::Bucket => None,
        }
    }

    /// Copies between pools and slots that are not over.
    pub(super) fn pool_copies(&self) -> usize {
        self.rises.of_pool as usize + self.fills.writes.len()
    }

    /// Few enough that the slots they take are a small part of all.
    fn pool_copies_max(&self) -> usize {
        let slots = self.cache.slots().len() as usize;
        self.options.pool_copies_max.min(slots / 8).max(2)
    }

    /// Copies blocks into slots that only the pool has, those first that were held first.
    fn sink_pages(&mut self, now_ms: u64) {
        self.cache.set_now(now_ms);
        while let Some(key) = self.cache.pools().next_waiting() {
            let room = self.pool_copies_max().saturating_sub(self.pool_copies());
            if room == 0 {
                return;
            }
            // What nobody can copy now is copied when it is asked for, or wanted back.
            if !self.has_elsewhere(key)
                && let Some(path) = self.sink_path(key, room)
                && !path.iter().all(|key| self.sink_page(now_ms, *key))
            {
                return;
            }
            self.cache.pools_mut().looked_after(key);
        }
    }

    /// The pool of another engine has it too.
    fn another_holds(&self, epoch: AttachEpoch, key: BlockKey) -> bool {
        let mut others = self.cache.pools().iter().filter(|(of, _)| *of != epoch);
        others.any(|(_, pool)| pool.block(key).is_some())
    }

    /// Another tier has it, or will in a moment.
    fn has_elsewhere(&self, key: BlockKey) -> bool {
        self.cache.index().find(key).is_some()
            || self.rises.of_key(key).is_some()
            || self.cache.is_on_ssd(key)
    }

    /// The blocks to copy so that this one can be committed, itself the last: those before it that no slot has. `None`
    /// when one of them is in no pool either, or they are too many.
    fn sink_path(&self, key: BlockKey, blocks_max: usize) -> Option<Vec<BlockKey>> {
        let pools = self.cache.pools();
        let comes = |key: &BlockKey| {
            self.cache.index().find(*key).is_some() || self.rises.of_key(*key).is_some()
        };
        let mut path = Vec::new();
        let mut next = Some(key);
        while let Some(key) = next {
            if path.len() >= blocks_max {
                return None;
            }
            path.push(key);
            next = pools.block(key)?.parent.filter(|parent| !comes(parent));
        }
        path.reverse();
        Some(path)
    }

    /// Begins to copy a block of the pool, where nothing that was used since it was held has to go for it.
    fn sink_page(&mut self, now_ms: u64, key: BlockKey) -> bool {
        let Some(held) = self.cache.pools().block(key) else { return false };
        let (of, since_ms) = ((held.namespace, held.parent), held.since_ms);
        self.cache.has_slot_unused_since(since_ms)
            && self.begin_pool_rise(now_ms, of, key).is_some()
    }

    /// Begins to copy a block of the pool into a slot.
    pub(super) fn begin_pool_rise(
        &mut self,
        now_ms: u64,
        of: (Namespace, Option<BlockKey>),
        key: BlockKey,
    ) -> Option<(u64, SlotIndex)> {
        let slot = self.cache.rise()?;
        let pools = self.cache.pools_mut();
        pools.looked_after(key);
        let epoch = pools.holder(key).expect("a pool holds the block");
        let page = pools.of_mut(epoch).and_then(|pool| pool.begin_read(key));
        let page = page.expect("a page holds the block");
        let rise = self.insert_rise(now_ms, of, key, (RiseFrom::Pool { epoch, page }, slot));
        self.actions.push_back(Action::ReadPage { rise, epoch, page, slot });
        Some((rise, slot))
    }

    /// A copy of a page is over. False when the pool is not there any more.
    pub(super) fn end_pool_read(&mut self, epoch: AttachEpoch, page: u32) -> bool {
        let Some(pool) = self.cache.pools_mut().of_mut(epoch) else { return false };
        pool.end_read(page);
        self.tell_dropped();
        true
    }

    fn tell_dropped(&mut self) {
        for (epoch, pool) in self.cache.pools_mut().iter_mut() {
            while let Some(handle) = pool.next_dropped() {
                self.actions.push_back(Action::PagesDropped { epoch, handle });
            }
        }
    }

    /// The pools' books are those of the copies under way.
    pub(super) fn check_pool(&self) -> Result<(), String> {
        for (number, fill) in &self.fills.all {
            let writes = self.fills.writes.values().filter(|write| write.fill == *number).count();
            let of = self.shares.get(&fill.share);
            let known = match fill.owns_share {
                true => of.is_some_and(|record| record.is_fill),
                false => fill.under_way == 0 || of.is_some_and(|record| record.state.reads > 0),
            };
            if writes != fill.under_way as usize || !known {
                return Err(format!(
                    "the writes of fill {} are wrong, or its share is missing",
                    fill.handle
                ));
            }
        }
        if self.fills.of_share.len() != self.shares.values().filter(|of| of.is_fill).count() {
            return Err("a share of an ended fill still exists".to_owned());
        }
        self.cache.pools().iter().try_for_each(|(of, pool)| {
            let of_page = |from: RiseFrom| match from {
                RiseFrom::Pool { epoch, page } if epoch == of => Some(page),
                _ => None,
            };
            let reading = self.rises.all.values().filter(|rise| rise.landed.is_none());
            let carried = self.carries.owed();
            let carried = carried.iter().filter(|(_, (epoch, _))| *epoch == of);
            let reads = reading.filter_map(|rise| of_page(rise.from));
            let reads: Vec<u32> = reads.chain(carried.map(|(_, (_, page))| *page)).collect();
            let writing = self.fills.writes.values().filter(|write| write.epoch == of);
            let writes: Vec<u32> = writing.map(|write| write.page).collect();
            pool.check(&reads, &writes)
        })
    }
}
