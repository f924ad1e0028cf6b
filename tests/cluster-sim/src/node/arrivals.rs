//! Pages that come from another node: counting them, believing the tail, telling the engine.

use kvasir_blocks::moving::tail;
use kvasir_blocks::moving::tail_space::TailRange;
use kvasir_blocks::{AbortReason, Arrival, AttachEpoch, Binding, Bound};
use kvasir_proto::{Share, Side, SlotIndex};
use kvasir_transfer::Outcome;

use super::{IncomingState, Running};
use crate::calls::{Caller, Reply, ToEngine};
use crate::content::BLOCK_TOKENS;
use crate::context::Context;
use crate::seen::{Owner, Reader, Seen};

impl Running {
    /// The count is reached: every page and the tail have landed.
    pub(super) fn counted(
        &mut self,
        context: &mut Context,
        share: Share,
        imm: u32,
        outcome: Outcome,
    ) {
        if outcome.is_ok() {
            context.see(Seen::Counted { at: self.at, imm });
        }
        let Some(leg) = self.legs.get_mut(&share) else { return };
        let Some(incoming) = leg.incoming.as_mut().filter(|i| i.imm == imm) else { return };
        if outcome.is_err() || !matches!(incoming.state, IncomingState::Waiting) {
            return;
        }
        let room = tail_room(&self.tails, incoming.tail);
        match tail::decode(&room, share.tx, incoming.pages.len()) {
            Ok(tail) => self.arrived(context, share, tail.checksums, tail.engine),
            Err(_) => {
                context.covers("a tail cannot be read");
                self.blocks.abort(context.now_ms(), share, AbortReason::BadArrival);
            }
        }
    }

    fn arrived(
        &mut self,
        context: &mut Context,
        share: Share,
        checksums: Vec<u64>,
        engine: Vec<u8>,
    ) {
        let copies = checksums.clone();
        let arrived = self.blocks.arrived(context.now_ms(), share, checksums);
        if let Ok(Arrival::Settled { cached_blocks }) = arrived {
            let Some(leg) = self.legs.get_mut(&share) else { return };
            let Some(incoming) = &mut leg.incoming else { return };
            incoming.state = IncomingState::Arrived { engine, told: false };
            for (page, checksum) in incoming.pages.clone().zip(copies) {
                let slot = leg.pages.slot(page);
                leg.pages.set_whole(page, slot, checksum);
            }
            leg.cached_pages = leg.cached_pages.max(cached_blocks);
            let held_blocks = leg.cached_pages;
            self.stops.forget(share);
            self.answer_settling(context, share, held_blocks);
            self.tell_ready(context, share);
            self.pump(context, share);
        }
    }

    /// An engine takes a share over.
    pub(super) fn bind(&mut self, context: &mut Context, share: Share, epoch: AttachEpoch) {
        let bound = self.blocks.bind(share, epoch);
        if bound.is_ok() {
            context.see(Seen::TakenUp { at: self.at, share });
        }
        match bound {
            Ok(Binding::Bound(bound)) => self.bound(context, share, epoch, bound),
            Ok(Binding::Waiting) => context.covers("an engine waits for its slots"),
            Err(_) => self.tell_engine(context, epoch, ToEngine::Bound { share, bound: None }),
        }
    }

    /// The slots are settled: the engine may begin.
    pub(super) fn bound(
        &mut self,
        context: &mut Context,
        share: Share,
        epoch: AttachEpoch,
        bound: Bound,
    ) {
        if self.engine(epoch).is_none() {
            return;
        }
        let Some(leg) = self.legs.get_mut(&share) else { return };
        leg.engine = Some(epoch);
        self.show_other_slots(context, share, &bound);
        let Some(leg) = self.legs.get_mut(&share) else { return };
        leg.pages.set_slots(&bound.slots);
        let cached_pages = bound.cached_tokens / BLOCK_TOKENS;
        // A decode side is written by its peer, until all has arrived.
        let waits_for_peer = share.side == Side::Decode && !bound.arrived;
        self.set_cached(share, cached_pages);
        let at = self.at;
        if !waits_for_peer {
            self.show_engine_slots(context, share, &bound, cached_pages);
        }
        let slots = bound.slots.iter().take(cached_pages as usize).map(|slot| slot.0).collect();
        context.see(Seen::ReadBegan { at, reader: Reader::Engine(share), slots });
        self.tell_engine(context, epoch, ToEngine::Bound { share, bound: Some(bound) });
        self.tell_ready(context, share);
        self.pump(context, share);
    }

    /// From now on the engine may write what of the prompt is not cached.
    fn show_engine_slots(
        &self,
        context: &mut Context,
        share: Share,
        bound: &Bound,
        cached_pages: u32,
    ) {
        let slots = Running::private_slots(&bound.slots, cached_pages);
        context.see(Seen::EngineMayWrite { at: self.at, share, slots });
    }

    /// Pages that did not come from the SSD after all have other slots, which are the share's now.
    fn show_other_slots(&mut self, context: &mut Context, share: Share, bound: &Bound) {
        let Some(leg) = self.legs.get(&share) else { return };
        let cached = (bound.cached_tokens / BLOCK_TOKENS) as usize;
        let known = (0..leg.pages.count()).map(|page| leg.pages.slot(page));
        let pages = bound.slots.iter().zip(known).skip(cached);
        let other: Vec<SlotIndex> =
            pages.filter(|(slot, known)| *slot != known).map(|(slot, _)| *slot).collect();
        for slot in other {
            self.give_out(context, slot, Owner::Share(share));
        }
    }

    /// Hands the tail on, once: when all has arrived and the engine has bound the share.
    fn tell_ready(&mut self, context: &mut Context, share: Share) {
        let Some(leg) = self.legs.get_mut(&share) else { return };
        let Some(incoming) = &mut leg.incoming else { return };
        let IncomingState::Arrived { engine, told } = &mut incoming.state else { return };
        let Some(epoch) = leg.engine.filter(|_| share.side == Side::Decode) else { return };
        if std::mem::replace(told, true) {
            return;
        }
        let tail = std::mem::take(engine);
        let (lease_ms, cached_pages) = (leg.lease_ms, leg.cached_pages);
        let slots: Vec<_> = (0..leg.pages.count()).map(|page| leg.pages.slot(page)).collect();
        let cached = slots.iter().take(cached_pages as usize).map(|slot| slot.0).collect();
        context.see(Seen::ReadBegan { at: self.at, reader: Reader::Engine(share), slots: cached });
        let slots = Running::private_slots(&slots, cached_pages);
        context.see(Seen::EngineMayWrite { at: self.at, share, slots });
        self.renew(context, share, lease_ms);
        self.tell_engine(context, epoch, ToEngine::Ready { share, tail });
    }

    /// Settles a fetch whose source sent less than was asked for.
    pub(super) fn commit(
        &mut self,
        context: &mut Context,
        share: Share,
        valid_blocks: u32,
        source_lost: bool,
        from: Caller,
    ) {
        let leg = self.legs.get_mut(&share);
        let cached_pages = leg.as_ref().map_or(0, |leg| leg.cached_pages);
        let incoming = leg.and_then(|leg| leg.incoming.as_mut());
        let Some(incoming) = incoming.filter(|_| share.side == Side::Prefill) else {
            return self.answer(context, from, Reply::Refused("the share has no fetch".into()));
        };
        if !matches!(incoming.state, IncomingState::Waiting) {
            self.answer(context, from, Reply::Committed { held_blocks: cached_pages });
            return self.release_replica(context, share);
        }
        let pages = incoming.pages.len() as u32;
        let good_pages = valid_blocks.min(pages);
        let (least, callers) = incoming.settling.get_or_insert((good_pages, Vec::new()));
        *least = (*least).min(good_pages);
        callers.push(from);
        if good_pages == pages && !source_lost {
            return;
        }
        // Refused when the share is over, of which the caller is told then.
        let _ = self.blocks.stop_writer(share);
        self.run_actions(context);
        self.settle_fetch(context, share);
    }

    /// Settles a fetch with less, once its writer writes no more.
    pub(super) fn settle_fetch(&mut self, context: &mut Context, share: Share) {
        let Some(leg) = self.legs.get_mut(&share) else { return };
        let Some(incoming) = &mut leg.incoming else { return };
        let Some((good_pages, _)) = &incoming.settling else { return };
        if !matches!(incoming.state, IncomingState::Waiting) {
            return;
        }
        let part = tail::decode_part(&tail_room(&self.tails, incoming.tail), share.tx);
        let mut checksums = part.unwrap_or_default();
        checksums.truncate(*good_pages as usize);
        let copies = checksums.clone();
        if let Ok(cached_blocks) = self.blocks.settle_fetch(share, checksums) {
            incoming.state = IncomingState::Settled;
            context.covers("a fetch is settled with less");
            for (page, checksum) in (incoming.pages.start..).zip(copies) {
                let slot = leg.pages.slot(page);
                leg.pages.set_whole(page, slot, checksum);
            }
            leg.cached_pages = leg.cached_pages.max(cached_blocks);
            self.answer_settling(context, share, cached_blocks);
        }
    }

    fn answer_settling(&mut self, context: &mut Context, share: Share, held_blocks: u32) {
        let incoming = self.legs.get_mut(&share).and_then(|leg| leg.incoming.as_mut());
        let settling = incoming.and_then(|incoming| incoming.settling.take());
        let Some((_, callers)) = settling else { return };
        for caller in callers {
            self.answer(context, caller, Reply::Committed { held_blocks });
        }
        self.release_replica(context, share);
    }
}

/// What a writer left in the room for its tail.
fn tail_room(tails: &kvasir_transfer::memory::SharedMemory, room: TailRange) -> Vec<u8> {
    let mut bytes = vec![0; room.length_bytes as usize];
    tails.copy_to(room.offset_bytes as usize, &mut bytes).expect("the room lies in this memory");
    bytes
}
