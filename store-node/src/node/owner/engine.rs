//! One attached engine: acting on what it says. Coming and going of all of them is in `engines`.

use std::ops::Range;
use std::sync::Arc;

use kvasir_blocks::moving::tail;
use kvasir_blocks::{AbortReason, AttachEpoch, GrowError, ShareError};
use kvasir_proto::{BlockKey, FieldError, Share, Side, SlotIndex, v1};
use v1::engine_to_node::Message as FromEngine;
use v1::node_to_engine::Message as ToEngine;

use super::{BATCH, Owner};
use crate::clock;
use crate::node::line::Broken;
use crate::node::steps::{Finished, PlannedPages};

impl From<FieldError> for Broken {
    fn from(error: FieldError) -> Self {
        Broken(error.to_string())
    }
}

impl Owner {
    /// Everything the engine has said, and how far it is. Answers whether there was anything.
    pub(super) fn take_engine(&mut self, epoch: AttachEpoch) -> bool {
        let mut worked = false;
        for _ in 0..BATCH {
            match self.take_engine_one(epoch) {
                Ok(true) => worked = true,
                Ok(false) => break,
                Err(broken) => {
                    self.expel(epoch, &broken);
                    worked = true;
                    break;
                }
            }
        }
        if worked {
            self.run_actions();
        }
        worked
    }

    /// One message, after the progress that was made before it was sent.
    fn take_engine_one(&mut self, epoch: AttachEpoch) -> Result<bool, Broken> {
        let Some(session) = self.engines.get_mut(epoch) else { return Ok(false) };
        let message = session.next()?;
        let mut finished = Vec::new();
        if let Some(progress) = session.progress() {
            session
                .steps
                .progress(progress, &mut finished)
                .map_err(|error| Broken(error.to_string()))?;
        }
        let worked = message.is_some() || !finished.is_empty();
        for layers in finished {
            self.layers_finished(&layers);
        }
        if let Some(message) = message {
            self.take_engine_message(epoch, message)?;
            self.run_actions();
        }
        Ok(worked)
    }

    /// Layers are written: hash them, push them, and commit what is whole. Those in the engine's pool are copied first.
    fn layers_finished(&mut self, finished: &Finished) {
        let Finished { share, step, ref pages, ref layers, in_pool } = *finished;
        if in_pool {
            return self.blocks.layers_computed(share, pages.clone(), layers.end);
        }
        // The share may have ended meanwhile.
        let Some(leg) = self.legs.get_mut(&share) else { return };
        let layout = Arc::clone(leg.pages.layout());
        let prompt_pages = pages.start..pages.end.min(leg.pages.count());
        let arena = &self.arena;
        for page in prompt_pages {
            let hash = |slot: SlotIndex, run| arena.run_checksum(&layout, slot, run);
            if share.side == Side::Prefill && page >= leg.cached_pages {
                leg.pages.finish_layers(page, step, layers.clone(), hash);
            }
        }
        self.pump(share);
        self.commit_whole(share);
    }

    /// Commits what is whole of a prompt, block after block: one is committed behind the one before it.
    pub(super) fn commit_whole(&mut self, share: Share) {
        while let Some(leg) = self.legs.get_mut(&share)
            && let Some(page) = leg.next_to_commit()
        {
            leg.committed_pages = page + 1;
            let Some(checksum) = leg.pages.checksum(page) else { return };
            if let Err(error) = self.blocks.commit_page(share, page, checksum) {
                tracing::debug!(%share, page, %error, "the store node cannot commit a page");
            }
        }
    }

    fn take_engine_message(
        &mut self,
        epoch: AttachEpoch,
        message: FromEngine,
    ) -> Result<(), Broken> {
        let now_ms = clock::now_ms();
        match message {
            FromEngine::Bind(v1::Bind { tx, side }) => {
                self.bind(Share::from_wire(tx, side)?, epoch);
            }
            FromEngine::Plan(plan) => self.plan(epoch, plan)?,
            FromEngine::Grow(grow) => self.grow(epoch, &grow)?,
            FromEngine::Commit(commit) => self.commit_blocks(epoch, &commit)?,
            FromEngine::FinishPrefill(v1::FinishPrefill { tx, tail }) => {
                let share = Share { tx: tx.try_into()?, side: Side::Prefill };
                if tail.len() > tail::ENGINE_BYTES_MAX {
                    return Err(Broken(format!("the tail of {} bytes is too long", tail.len())));
                }
                if self.is_its_own(epoch, share)? {
                    self.finish_prefill(share, tail);
                }
            }
            FromEngine::Release(v1::Release { tx, side }) => {
                let share = Share::from_wire(tx, side)?;
                if self.is_its_own(epoch, share)? {
                    self.released(epoch, share);
                }
            }
            FromEngine::Get(v1::GetBlocks { handle, keys, skip_promotion }) => {
                let keys = BlockKey::list(&keys)?;
                let got = self.blocks.get(epoch, handle, &keys);
                let slots = got.unwrap_or_else(|error| {
                    tracing::warn!(handle, %error, "the store node refused a lookup of the engine");
                    Vec::new()
                });
                // What it has not found it may find when it looks again.
                let promoting_blocks = match !skip_promotion && slots.len() < keys.len() {
                    true => self.read_ahead(None, &keys).map_or(0, |ahead| ahead.promoting_blocks),
                    false => 0,
                };
                let slots = slots.iter().map(|slot| slot.0).collect();
                let got = v1::GotBlocks { handle, slots, promoting_blocks };
                self.tell_engine(epoch, ToEngine::Got(got));
            }
            FromEngine::HoldPages(hold) => self.hold_pages(epoch, &hold)?,
            FromEngine::DropPages(drop) => self.drop_pages(epoch, &drop)?,
            FromEngine::FillPages(fill) => self.fill_pages(epoch, &fill)?,
            FromEngine::Unpin(v1::UnpinBlocks { handle }) => {
                self.blocks.unpin(epoch, handle);
            }
            FromEngine::KeepAlive(v1::KeepAlive { shares }) => {
                for v1::TxShare { tx, side } in shares {
                    let share = Share::from_wire(tx, side)?;
                    // One that has not been bound after all is not the engine's: it may hear of that yet.
                    let is_its_own =
                        self.blocks.share(share).is_some_and(|view| view.bound_to == Some(epoch));
                    let lease_ms = self.legs.get(&share).map(|leg| leg.lease_ms);
                    if let Some(lease_ms) = lease_ms.filter(|_| is_its_own) {
                        // It may be ending; the engine is told by other means.
                        let _ = self.blocks.renew(now_ms, share, lease_ms);
                    }
                }
            }
        }
        Ok(())
    }

    /// Whether an open share is this engine's. False when it has ended, which the engine need not
    /// know yet.
    pub(super) fn is_its_own(&self, epoch: AttachEpoch, share: Share) -> Result<bool, Broken> {
        match self.blocks.share(share) {
            None => Ok(false),
            Some(view) if view.bound_to == Some(epoch) => Ok(true),
            Some(_) => Err(Broken(format!("share {share} is not bound to the engine"))),
        }
    }

    fn plan(&mut self, epoch: AttachEpoch, plan: v1::StepPlan) -> Result<(), Broken> {
        let mut planned = Vec::new();
        for v1::StepPages { tx, side, first_page, page_count, pool_pages } in plan.pages {
            let share = Share::from_wire(tx, side)?;
            if !self.is_its_own(epoch, share)? {
                continue;
            }
            let Some(leg) = self.legs.get(&share) else { continue };
            let (writable, end) = (leg.writable_pages(), first_page.checked_add(page_count));
            let Some(end) = end.filter(|end| *end <= writable.end && first_page >= writable.start)
            else {
                return Err(Broken(format!(
                    "the engine plans to write {page_count} pages from page {first_page} of \
                     {share}; it may write pages {writable:?}"
                )));
            };
            let (pages, in_pool) = (first_page..end, !pool_pages.is_empty());
            if in_pool {
                self.plan_in_pool(epoch, (share, pages.clone()), plan.step, &pool_pages)?;
            } else if self.blocks.is_computed_in_pool(share, pages.clone()) {
                return Err(Broken(format!(
                    "the engine plans to write slots of pages {pages:?} of {share}, but computes \
                     some of them in its pool"
                )));
            }
            planned.push(PlannedPages { share, pages, in_pool });
        }
        let session = self
            .engines
            .get_mut(epoch)
            .ok_or_else(|| Broken("the engine is not attached".into()))?;
        session.steps.plan(plan.step, planned).map_err(|error| Broken(error.to_string()))
    }

    /// Pages of a share are computed in pages of the engine's pool, from their first layer on.
    fn plan_in_pool(
        &mut self,
        epoch: AttachEpoch,
        (share, pages): (Share, Range<u32>),
        step: u32,
        pool_pages: &[u32],
    ) -> Result<(), Broken> {
        if pool_pages.len() != pages.len() {
            return Err(Broken(format!(
                "the engine names {} pages of its pool for pages {pages:?} of {share}",
                pool_pages.len()
            )));
        }
        let leg = self.legs.get(&share).filter(|leg| pages.end <= leg.pages.count());
        let begun = |page: &u32| leg.is_some_and(|leg| leg.pages.layers_done(*page) > 0);
        if let Some(page) = pages.clone().find(begun) {
            return Err(Broken(format!(
                "the engine computes page {page} of {share} in its pool, but has already written \
                 the page's slot"
            )));
        }
        Ok(self.blocks.compute_pages(epoch, (share, pages.start), step, pool_pages)?)
    }

    fn grow(&mut self, epoch: AttachEpoch, grow: &v1::Grow) -> Result<(), Broken> {
        let share = Share::from_wire(grow.tx, grow.side)?;
        let slots = if self.is_its_own(epoch, share)? {
            match self.blocks.grow(share, grow.page_count) {
                Ok(slots) => slots,
                Err(GrowError::NoSpace { available, wanted }) => {
                    tracing::debug!(
                        %share, available, wanted,
                        "the store node has no slots available to grow a share"
                    );
                    Vec::new()
                }
                Err(GrowError::Share(ShareError::Refused(why))) => {
                    return Err(Broken(format!("cannot grow {share}: {why}")));
                }
                // Ending; a stop is on its way.
                Err(GrowError::Share(_)) => Vec::new(),
            }
        } else {
            Vec::new()
        };
        if let Some(leg) = self.legs.get_mut(&share) {
            leg.grown_pages += slots.len() as u32;
        }
        let slots = slots.iter().map(|slot| slot.0).collect();
        let grown = v1::Grown { tx: grow.tx, side: grow.side, slots };
        self.tell_engine(epoch, ToEngine::Grown(grown));
        Ok(())
    }

    /// Blocks that the answer filled; their keys come from the engine.
    fn commit_blocks(
        &mut self,
        epoch: AttachEpoch,
        commit: &v1::CommitBlocks,
    ) -> Result<(), Broken> {
        let share = Share::from_wire(commit.tx, commit.side)?;
        let keys = BlockKey::list(&commit.keys)?;
        if !self.is_its_own(epoch, share)? {
            return Ok(());
        }
        let Some(leg) = self.legs.get(&share) else { return Ok(()) };
        let (writable, layout) = (leg.writable_pages(), Arc::clone(leg.pages.layout()));
        let count = u32::try_from(keys.len()).unwrap_or(u32::MAX);
        let end = commit.first_page.checked_add(count);
        if commit.first_page < writable.start || end.is_none_or(|end| end > writable.end) {
            let first = commit.first_page;
            return Err(Broken(format!(
                "the engine commits {count} pages from page {first} of {share}; it may commit \
                 pages {writable:?}"
            )));
        }
        for (page, key) in (commit.first_page..).zip(keys) {
            let Some((slot, _)) = self.blocks.page_slot(share, page) else { break };
            let checksum = self.arena.checksum(&layout, slot);
            if let Err(error) = self.blocks.commit_extra(share, page, key, checksum) {
                tracing::debug!(%share, page, %error, "the store node cannot commit a block of generated tokens");
                break;
            }
        }
        Ok(())
    }

    fn released(&mut self, epoch: AttachEpoch, share: Share) {
        if let Some(session) = self.engines.get_mut(epoch) {
            session.stops.let_go(share);
        }
        if let Some(leg) = self.legs.get(&share)
            && !leg.finished
        {
            // It gives up: the rest of the prompt will never be there to push.
            self.halt_push(share);
        }
        if let Err(error) = self.blocks.release(clock::now_ms(), share) {
            tracing::debug!(%share, %error, "the engine released a share that has ended");
        }
    }

    pub(super) fn stop_engine(&mut self, share: Share, epoch: AttachEpoch, reason: &AbortReason) {
        if self.stop_client(share) {
            return;
        }
        if let Some(session) = self.engines.get_mut(epoch) {
            tracing::info!(%share, %reason, "the store node tells the engine to stop its work on a share");
            let progress = session.progress();
            session.stops.told(share, clock::now_ms(), progress);
            let stop = v1::Stop {
                tx: Some(share.tx.into()),
                side: share.side.to_wire(),
                reason: reason.to_string(),
            };
            self.tell_engine(epoch, ToEngine::Stop(stop));
        }
    }
}
