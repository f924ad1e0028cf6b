//! What an engine computes in its own pool for a share: each layer that is finished there is copied into the share's slots,
//! and from then on it is as if the engine had written it there.
//!
//! A copy is a writer of the slot and a reader of the page. So a slot is in quarantine until the last copy into it has
//! ended, and a page goes back to its engine when the last copy from it has; what is owed when an engine asks a page back
//! is copied first, and what is owed to a share that is aborted is given up.

use std::ops::Range;

use kvasir_proto::{BlockKey, Share, Side};

use super::Blocks;
use crate::api::{AbortReason, Action, AttachEpoch, Carried, PoolError};
use crate::carries::{ComputedPage, Work};
use crate::share::{Hold, ShareRecord};
use crate::share_state::ShareEvent;

impl Blocks {
    /// The engine computes these pages of a share of the prefill side, from `first` on, in these pages of its pool, by the
    /// plan of this step. It does not write their slots, and has the pages back when [`Action::PagesDropped`] names them.
    /// A share that is ending or not bound to it changes nothing: its pages are the engine's as before.
    ///
    /// # Errors
    /// [`PoolError`]; then nothing was done.
    pub fn compute_pages(
        &mut self,
        epoch: AttachEpoch,
        (share, first): (Share, u32),
        step: u32,
        pages: &[u32],
    ) -> Result<(), PoolError> {
        self.cache.pools().of(epoch)?.check_free(pages)?;
        let Some(record) = self.shares.get(&share).filter(|record| record.state.computes()) else {
            return Ok(());
        };
        if record.state.epoch() != Some(epoch) {
            return Ok(());
        }
        let ats = u64::from(first)..u64::from(first) + pages.len() as u64;
        if ats.end > u64::from(record.prompt_pages) {
            return Err(PoolError::NotOfShare { pages: record.prompt_pages });
        }
        let ats = first..first + pages.len() as u32;
        let computed = |at: &u32| self.carries.pages.contains_key(&(share, *at));
        if let Some(page) = ats.clone().find(|at| !may_be_computed(record, *at) || computed(at)) {
            return Err(PoolError::NotToCompute { page });
        }
        for (at, &page) in ats.zip(pages) {
            let slot = record.pages[at as usize].slot;
            self.carries.insert((share, at), (epoch, page), slot, step);
        }
        if let Some(pool) = self.cache.pools_mut().of_mut(epoch) {
            pool.compute(pages);
        }
        Ok(())
    }

    /// Whether some of these pages of a share are computed in a pool: then their slots are not the engine's to write.
    pub fn is_computed_in_pool(&self, share: Share, pages: Range<u32>) -> bool {
        !pages.is_empty()
            && self.carries.pages.range((share, pages.start)..(share, pages.end)).next().is_some()
    }

    /// So many leading layers of these pages are finished, where they are computed. [`Action::CarryLayers`] follows.
    pub fn layers_computed(&mut self, share: Share, pages: Range<u32>, layers_done: u16) {
        let Some(record) = self.shares.get_mut(&share) else { return };
        if !record.state.computes() {
            return;
        }
        for at in pages {
            let of = (share, at);
            let Some(page) = self.carries.pages.get_mut(&of) else { continue };
            if page.is_closed || page.computed >= layers_done {
                continue;
            }
            if page.work != Work::Nothing {
                page.computed = layers_done;
                continue;
            }
            let (epoch, place) = page.place;
            let pool = self.cache.pools_mut().of_mut(epoch);
            if pool.is_some_and(|pool| pool.begin_carry(place)) {
                page.computed = layers_done;
                self.carries.set_due(of);
                record.state.on(ShareEvent::CarryBegin).expect("its engine computes");
            }
        }
    }

    /// Begins as many copies as there may be.
    pub(super) fn begin_carries(&mut self) {
        while self.carries.copies.len() < self.options.carries_max.max(1) {
            let Some((copy, carry, slot)) = self.carries.begin() else { return };
            let ((epoch, page), layers) = (carry.place, carry.layers.clone());
            self.actions.push_back(Action::CarryLayers { copy, epoch, page, slot, layers });
        }
    }

    /// What a copy brings that has come to a good end, if anybody still wants that: to be asked, pushed and committed
    /// before [`Self::carry_ended`] is told.
    pub fn carried(&self, copy: u64) -> Option<Carried> {
        let carry = self.carries.copies.get(&copy).filter(|carry| carry.counts)?;
        let step = self.carries.pages.get(&carry.of)?.step;
        let ((share, page), (epoch, _)) = (carry.of, carry.place);
        Some(Carried { epoch, share, page, step, layers: carry.layers.clone() })
    }

    /// A copy is over: it touches its page and its slot no more. One that has failed aborts its share.
    pub fn carry_ended(&mut self, now_ms: u64, copy: u64, is_good: bool) {
        let Some(carry) = self.carries.copies.remove(&copy) else { return };
        let (share, _) = carry.of;
        if let Some(page) = self.carries.pages.get_mut(&carry.of).filter(|_| carry.counts) {
            page.work = Work::Nothing;
            page.is_closed |= !is_good;
            if is_good {
                page.carried = carry.layers.end;
                self.totals.layers_carried += carry.layers.len() as u64;
                if page.carried < page.computed {
                    // The page and the slot are touched until that has ended too.
                    return self.carries.set_due(carry.of);
                }
            }
        }
        let (epoch, page) = carry.place;
        self.end_pool_read(epoch, page);
        // Refused by no state: it was begun.
        let _ = self.apply(now_ms, share, ShareEvent::CarryEnd, AbortReason::PoolFailed);
        if !is_good && carry.counts {
            self.totals.carries_failed += 1;
            let _ = self.apply(now_ms, share, ShareEvent::Abort, AbortReason::PoolFailed);
        }
    }

    /// The share is being aborted: copies under way are waited for, and none begins.
    pub(super) fn give_up_carries(&mut self, share: Share) {
        for at in self.carries.of_share(share) {
            let Some(page) = self.carries.remove((share, at)) else { continue };
            if let Work::Due(_) = page.work {
                let (epoch, place) = page.place;
                self.end_pool_read(epoch, place);
                if let Some(record) = self.shares.get_mut(&share) {
                    record.state.on(ShareEvent::CarryEnd).expect("one was begun");
                }
                self.totals.carries_given_up += 1;
            }
            self.wait_for_room(&page);
        }
    }

    /// The share is over, and with it what is remembered of its pages.
    pub(super) fn forget_carries(&mut self, share: Share) {
        for at in self.carries.of_share(share) {
            if let Some(page) = self.carries.remove((share, at)) {
                self.wait_for_room(&page);
            }
        }
    }

    /// A block that the share has not brought into a slot is copied like any other that the pool holds.
    fn wait_for_room(&mut self, page: &ComputedPage) {
        let (epoch, place) = page.place;
        let Some(pool) = self.cache.pools_mut().of_mut(epoch).filter(|_| !page.is_closed) else {
            return;
        };
        if let Some(key) = pool.key_in(place) {
            pool.wait(key);
        }
    }

    /// The block that the engine holds in this page, when it is what a share computes there and brings into a slot.
    pub(super) fn brought_from(&self, place: (AttachEpoch, u32)) -> Option<BlockKey> {
        let ((share, at), _) = self.carries.at(place)?;
        let record = self.shares.get(&share).filter(|record| !record.request.is_ephemeral)?;
        let held = self.cache.pools().of(place.0).ok()?.key_in(place.1)?;
        (record.key_of_prompt(at) == Some(held)).then_some(held)
    }

    /// The same, where copies are under way or owed.
    pub(super) fn coming_from(&self, place: (AttachEpoch, u32)) -> Option<BlockKey> {
        let (_, page) = self.carries.at(place)?;
        self.brought_from(place).filter(|_| page.work != Work::Nothing)
    }

    /// The engine wants these pages back: nothing more is finished there.
    pub(super) fn close_carries(&mut self, epoch: AttachEpoch, pages: &[u32]) {
        pages.iter().for_each(|page| self.carries.close((epoch, *page)));
    }

    /// Nothing comes from this engine's pool any more. What is owed from it makes its shares worth nothing.
    pub(super) fn abort_owed_carries(&mut self, now_ms: u64, epoch: AttachEpoch) {
        for share in self.carries.owed_from(epoch) {
            // Refused by no state.
            let _ = self.apply(now_ms, share, ShareEvent::Abort, AbortReason::EngineGone);
        }
    }

    /// The books of copies are those of shares, and none is begun for one that is being aborted.
    pub(super) fn check_carries(&self) -> Result<(), String> {
        self.carries.check()?;
        let owed = self.carries.owed();
        for (share, record) in &self.shares {
            let of_share = owed.iter().filter(|((of, _), _)| of == share).count();
            if of_share != record.state.carries as usize {
                return Err(format!("{share} has {of_share} pages to stage: {:?}", record.state));
            }
        }
        for (share, at) in self.carries.pages.keys() {
            let record = self.shares.get(share).filter(|record| !record.is_aborted());
            let of = record.and_then(|record| record.page(*at));
            if of.is_none_or(|page| page.slot != self.carries.pages[&(*share, *at)].slot) {
                return Err(format!("page {at} of {share} is staged into another slot"));
            }
        }
        Ok(())
    }
}

/// Nobody else writes the slot, and its bytes are not final.
fn may_be_computed(record: &ShareRecord, at: u32) -> bool {
    let private = record.page(at).is_some_and(|page| page.hold == Hold::Private);
    record.request.share.side == Side::Prefill && private && !record.may_be_written_remotely(at)
}
