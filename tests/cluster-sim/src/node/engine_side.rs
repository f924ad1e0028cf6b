//! What the node's engines say: taking them on, acting on their words, and seeing to their ends.

use kvasir_blocks::{AbortReason, AttachEpoch};
use kvasir_proto::{BlockKey, Share, Side, SlotIndex};

use super::{ENGINE_STOP_TIMEOUT_MS, Running};
use crate::calls::{FromEngine, ToEngine};
use crate::context::{Context, Event};
use crate::engine::Engine;
use crate::seen::{Owner, Reader, Seen};

/// How long a dead process is not noticed, and no other one is there.
const RESTART_US: u64 = 20_000;

impl Running {
    /// All engines of its plan attach.
    pub(super) fn attach_engines(&mut self, context: &mut Context) {
        for index in 0..context.plan.nodes[self.at.node].engines.len() {
            self.engine_starts(context, index);
        }
    }

    /// A new engine process has come up.
    pub fn engine_starts(&mut self, context: &mut Context, index: usize) {
        if self.engines.iter().all(|engine| engine.index != index) {
            self.next_epoch += 1;
            let epoch = AttachEpoch(self.next_epoch);
            let mut random = context.chance("pool", self.at.node as u64, self.next_epoch.into());
            let pool_pages = if random.percent(60) { random.between(3, 16) as u32 } else { 0 };
            self.engines.push(Engine::new(epoch, index, context.now_us, pool_pages));
            if pool_pages > 0 {
                self.open_pool(epoch, pool_pages);
            }
        }
    }

    pub fn engine(&self, epoch: AttachEpoch) -> Option<&Engine> {
        self.engines.iter().find(|engine| engine.epoch == epoch)
    }

    pub fn engine_mut(&mut self, epoch: AttachEpoch) -> Option<&mut Engine> {
        self.engines.iter_mut().find(|engine| engine.epoch == epoch)
    }

    /// The process dies. What it had said still counts; then the node notices.
    pub fn kill_engine(&mut self, context: &mut Context, epoch: AttachEpoch) {
        let Some(at) = self.engines.iter().position(|engine| engine.epoch == epoch) else { return };
        let mut engine = self.engines.remove(at);
        let index = engine.index;
        engine.say(context, self.at, FromEngine::Gone { epoch, index });
    }

    pub fn kill_engines(&mut self, context: &mut Context) {
        while let Some(epoch) = self.engines.first().map(|engine| engine.epoch) {
            self.kill_engine(context, epoch);
        }
    }

    /// Which of its engines a fault is about.
    pub fn one_of_engines(&self, fault: u64) -> Option<AttachEpoch> {
        let count = self.engines.len().max(1) as u64;
        self.engines.get((fault % count) as usize).map(|engine| engine.epoch)
    }

    pub(super) fn tell_engine(
        &mut self,
        context: &mut Context,
        epoch: AttachEpoch,
        message: ToEngine,
    ) {
        let at = self.at;
        if let Some(engine) = self.engine_mut(epoch).filter(|engine| !engine.expelled) {
            engine.tell(context, at, message);
        }
    }

    /// An engine that does not let go of what it was told to stop is not listened to any more. What it
    /// has is quarantined until its process has ended, which it does when it looks at its connection.
    pub(super) fn look_after_engine_stops(&mut self, context: &mut Context) {
        let epochs: Vec<AttachEpoch> = self.engines.iter().map(|engine| engine.epoch).collect();
        for epoch in epochs {
            self.look_after_stops_of(context, epoch);
        }
    }

    fn look_after_stops_of(&mut self, context: &mut Context, epoch: AttachEpoch) {
        let (at, now_ms) = (self.at, context.now_ms());
        let Some(engine) = self.engine_mut(epoch).filter(|engine| !engine.expelled) else { return };
        let late = engine.stops.late(now_ms, ENGINE_STOP_TIMEOUT_MS, engine.progress);
        if late.is_none() {
            return;
        }
        context.covers("an engine is expelled");
        engine.expelled = true;
        engine.stops.clear();
        engine.wants_step(context, at);
        self.close_pool(context, epoch);
        let bound = |share: &Share| {
            self.blocks.share(*share).is_some_and(|view| view.bound_to == Some(epoch))
        };
        let shares: Vec<Share> = self.blocks.shares().filter(bound).collect();
        for share in shares {
            self.blocks.abort(now_ms, share, AbortReason::EngineGone);
        }
    }

    pub(super) fn stop_engine(&mut self, context: &mut Context, share: Share, epoch: AttachEpoch) {
        if let Some(engine) = self.engine_mut(epoch).filter(|engine| !engine.expelled) {
            engine.stops.told(share, context.now_ms(), engine.progress);
            self.tell_engine(context, epoch, ToEngine::Stop { share });
        }
    }

    fn is_its_own(&self, epoch: AttachEpoch, share: Share) -> bool {
        self.blocks.share(share).is_some_and(|view| view.bound_to == Some(epoch))
    }

    pub fn take_engine(&mut self, context: &mut Context, epoch: AttachEpoch, message: FromEngine) {
        let at = self.at;
        let expelled = self.engine(epoch).is_some_and(|engine| engine.expelled);
        if expelled && !matches!(message, FromEngine::Gone { .. }) {
            return;
        }
        match message {
            FromEngine::Bind { share } => self.bind(context, share, epoch),
            FromEngine::Finished { share, pages, layer, in_pool: true, .. } => {
                self.blocks.layers_computed(share, pages, layer + 1);
            }
            FromEngine::Finished { share, step, pages, layer, in_pool: false } => {
                self.layer_finished(context, share, step, pages, layer);
            }
            FromEngine::Compute { share, step, first, pages } => {
                if self.is_its_own(epoch, share) {
                    self.compute_pages(context, epoch, (share, first), step, &pages);
                }
            }
            FromEngine::DropPages { handle, pages } => {
                self.drop_pages(context, epoch, (handle, &pages));
            }
            FromEngine::Grow { share, pages } if self.is_its_own(epoch, share) => {
                let slots = self.blocks.grow(share, pages).unwrap_or_default();
                for slot in &slots {
                    self.give_out(context, *slot, Owner::Share(share));
                }
                let seen = slots.iter().map(|slot| slot.0).collect();
                context.see(Seen::EngineMayWrite { at, share, slots: seen });
                self.tell_engine(context, epoch, ToEngine::Grown { share, slots });
            }
            FromEngine::Grow { share, .. } => {
                self.tell_engine(context, epoch, ToEngine::Grown { share, slots: Vec::new() });
            }
            FromEngine::Commit { share, page, key } => {
                self.commit_extra(context, epoch, share, page, key);
            }
            FromEngine::FinishPrefill { share, tail } => {
                if self.is_its_own(epoch, share) {
                    self.finish_prefill(context, share, tail);
                }
            }
            FromEngine::Release { share } => {
                if let Some(engine) = self.engine_mut(epoch) {
                    engine.stops.let_go(share);
                }
                context.see(Seen::EngineStopped { at, share });
                context.see(Seen::ReadEnded { at, reader: Reader::Engine(share) });
                if self.is_its_own(epoch, share) {
                    self.released(context, share);
                }
            }
            FromEngine::Alive { shares } => {
                for share in shares {
                    let lease_ms = self.legs.get(&share).map(|leg| leg.lease_ms);
                    if let Some(lease_ms) = lease_ms.filter(|_| self.is_its_own(epoch, share)) {
                        self.renew(context, share, lease_ms);
                    }
                }
            }
            FromEngine::Get { handle, keys } => self.get(context, epoch, handle, keys),
            FromEngine::Unpin { handle } => {
                context.see(Seen::ReadEnded { at, reader: Reader::Get(epoch, handle) });
                self.blocks.unpin(epoch, handle);
            }
            FromEngine::Gone { epoch, index } => self.engine_gone(context, epoch, index),
        }
        self.run_actions(context);
    }

    fn engine_gone(&mut self, context: &mut Context, epoch: AttachEpoch, index: usize) {
        let at = self.at;
        let bound =
            |share: &Share| self.legs.get(share).is_some_and(|leg| leg.engine == Some(epoch));
        let shares: Vec<Share> = self.legs.keys().copied().filter(bound).collect();
        for share in shares {
            context.see(Seen::EngineStopped { at, share });
            context.see(Seen::ReadEnded { at, reader: Reader::Engine(share) });
        }
        for handle in 0..crate::engine::HANDLES_MAX {
            context.see(Seen::ReadEnded { at, reader: Reader::Get(epoch, handle) });
        }
        self.blocks.engine_gone(context.now_ms(), epoch);
        self.close_pool(context, epoch);
        context.after(RESTART_US, Event::EngineStarts { at, index });
    }

    fn get(&mut self, context: &mut Context, epoch: AttachEpoch, handle: u64, keys: Vec<BlockKey>) {
        let slots = self.blocks.get(epoch, handle, &keys).unwrap_or_default();
        if !slots.is_empty() {
            let (reader, slots) = (Reader::Get(epoch, handle), numbers(&slots));
            context.see(Seen::ReadBegan { at: self.at, reader, slots });
        }
        self.tell_engine(context, epoch, ToEngine::Got { handle, keys, slots });
    }

    /// Commits what is whole of a prompt, block after block.
    pub(super) fn commit_whole(&mut self, context: &mut Context, share: Share) {
        while let Some(leg) = self.legs.get_mut(&share) {
            let page = leg.committed_pages.max(leg.cached_pages);
            let is_there = (page as usize) < leg.keys.len() && page < leg.pages.count();
            if !is_there || !leg.pages.is_whole(page) {
                return;
            }
            leg.committed_pages = page + 1;
            let slot = leg.pages.slot(page);
            let Some(checksum) = leg.pages.checksum(page) else { return };
            context.see(Seen::PageSealed { at: self.at, share, slot: slot.0 });
            // Refused when the share is over.
            let _ = self.blocks.commit_page(share, page, checksum);
        }
    }

    /// A layer of some pages is written: hash it, push it, and commit what is whole.
    fn layer_finished(
        &mut self,
        context: &mut Context,
        share: Share,
        step: u32,
        pages: std::ops::Range<u32>,
        layer: u16,
    ) {
        for page in pages {
            let Some(leg) = self.legs.get(&share) else { return };
            if share.side != Side::Prefill || page < leg.cached_pages || page >= leg.pages.count() {
                continue;
            }
            let slot = leg.pages.slot(page);
            let runs = leg.pages.layout().runs(layer.into()).to_vec();
            let mut hashes: Vec<u64> =
                runs.iter().map(|run| self.run_checksum(slot, *run)).collect();
            hashes.reverse();
            let Some(leg) = self.legs.get_mut(&share) else { return };
            let hash = |_, _| hashes.pop().expect("one for each run");
            leg.pages.finish_layers(page, step, layer..layer + 1, hash);
        }
        self.pump(context, share);
        self.commit_whole(context, share);
    }

    fn commit_extra(
        &mut self,
        context: &mut Context,
        epoch: AttachEpoch,
        share: Share,
        page: u32,
        key: BlockKey,
    ) {
        if !self.is_its_own(epoch, share) {
            return;
        }
        let Some((slot, _)) = self.blocks.page_slot(share, page) else { return };
        context.see(Seen::PageSealed { at: self.at, share, slot: slot.0 });
        let checksum = self.checksum(slot);
        // Refused when the share is over.
        let _ = self.blocks.commit_extra(share, page, key, checksum);
    }

    fn released(&mut self, context: &mut Context, share: Share) {
        if self.legs.get(&share).is_some_and(|leg| !leg.finished) {
            self.halt_push(context, share);
        }
        // Refused when it has ended.
        let _ = self.blocks.release(context.now_ms(), share);
    }
}

pub(super) fn numbers(slots: &[SlotIndex]) -> Vec<u32> {
    slots.iter().map(|slot| slot.0).collect()
}
