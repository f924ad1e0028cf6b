//! Pages of engines' own: what they compute there, copied layer by layer into slots by a thread beside the node.

use std::ops::Range;

use kvasir_blocks::{AttachEpoch, Carried};
use kvasir_proto::{Share, SlotIndex};

use super::Running;
use crate::calls::ToEngine;
use crate::content::{LAYERS, PageBytes, SLOT_BYTES};
use crate::context::{Context, Event};
use crate::seen::Seen;

const LAYER_BYTES: usize = SLOT_BYTES / LAYERS;

/// A copy of layers that is under way. What lies in the page is read when it ends.
#[derive(Debug)]
pub(super) struct Carry {
    epoch: AttachEpoch,
    page: u32,
    slot: SlotIndex,
    layers: Range<u16>,
}

impl Running {
    /// Memory that the node makes for an engine. It stays until the last copy out of it has ended.
    pub(super) fn open_pool(&mut self, epoch: AttachEpoch, pages: u32) {
        self.blocks.open_pool(epoch, pages);
        self.open_pools.insert(epoch);
        self.pools.insert(epoch, vec![crate::checkers::UNWRITTEN; pages as usize]);
    }

    /// Nobody listens to the engine any more.
    pub(super) fn close_pool(&mut self, context: &Context, epoch: AttachEpoch) {
        self.blocks.close_pool(context.now_ms(), epoch);
        self.open_pools.remove(&epoch);
        self.let_pools_go();
    }

    fn let_pools_go(&mut self) {
        let Running { carries, open_pools, .. } = self;
        let used = |epoch: &AttachEpoch| carries.values().any(|carry| carry.epoch == *epoch);
        self.pools.retain(|epoch, _| open_pools.contains(epoch) || used(epoch));
    }

    pub fn write_pool(&mut self, epoch: AttachEpoch, page: u32, offset: usize, bytes: &[u8]) {
        // One that is not listened to any more has nothing that anybody reads.
        let Some(pages) = self.pools.get_mut(&epoch) else { return };
        pages[page as usize][offset..offset + bytes.len()].copy_from_slice(bytes);
    }

    pub fn read_pool(&self, epoch: AttachEpoch, page: u32) -> PageBytes {
        self.pools[&epoch][page as usize]
    }

    pub(super) fn compute_pages(
        &mut self,
        context: &mut Context,
        epoch: AttachEpoch,
        (share, first): (Share, u32),
        step: u32,
        pages: &[u32],
    ) {
        let computed = self.blocks.compute_pages(epoch, (share, first), step, pages);
        computed.expect("pages that the engine has, of a prompt that it computes");
        let of = first..first + pages.len() as u32;
        if !self.blocks.is_computed_in_pool(share, of.clone()) {
            return;
        }
        context.covers("a prompt is computed in a pool");
        for page in of {
            let slot = self.blocks.page_slot(share, page).expect("a page of an open share").0;
            // The engine's no more: it is the node's to write.
            context.see(Seen::PageSealed { at: self.at, share, slot: slot.0 });
        }
    }

    pub(super) fn drop_pages(
        &mut self,
        context: &Context,
        epoch: AttachEpoch,
        drop: (u64, &[u32]),
    ) {
        let dropped = self.blocks.drop_pages(context.now_ms(), (epoch, drop.0), drop.1);
        dropped.expect("pages that the engine has");
    }

    pub(super) fn pages_dropped(&mut self, context: &mut Context, epoch: AttachEpoch, handle: u64) {
        let engine = self.engine(epoch);
        if let Some(pages) = engine.and_then(|engine| engine.dropping(handle)) {
            let pages = pages.to_vec();
            context.see(Seen::PoolPagesBack { at: self.at, epoch, pages });
        }
        self.tell_engine(context, epoch, ToEngine::PagesDropped { handle });
    }

    pub(super) fn carry(
        &mut self,
        context: &mut Context,
        copy: u64,
        (epoch, page): (AttachEpoch, u32),
        slot: SlotIndex,
        layers: Range<u16>,
    ) {
        let at = self.at;
        context.see(Seen::CarryBegan { at, copy, epoch, page, slot: slot.0 });
        let mut random = context.chance("carry", at.node as u64, copy);
        let us =
            if random.percent(5) { random.between(2_000, 20_000) } else { random.between(5, 200) };
        self.carries.insert(copy, Carry { epoch, page, slot, layers });
        context.after(us, Event::CarryEnds { at, copy });
    }

    /// The thread has copied, whatever has become of the share and the engine meanwhile.
    pub fn carry_ends(&mut self, context: &mut Context, copy: u64) {
        let at = self.at;
        let Some(Carry { epoch, page, slot, layers }) = self.carries.remove(&copy) else { return };
        let bytes = self.read_pool(epoch, page);
        let of = usize::from(layers.start) * LAYER_BYTES..usize::from(layers.end) * LAYER_BYTES;
        self.write_slot(slot, of.start, &bytes[of]);
        context.see(Seen::CarryEnded { at, copy });
        let is_good = context.calm || !context.chance("carried", at.node as u64, copy).percent(1);
        match self.blocks.carried(copy).filter(|_| is_good) {
            Some(carried) => self.take_layers(context, slot, &carried),
            None if is_good => context.covers("a copy out of a pool ends for nobody"),
            None => context.covers("a copy out of a pool fails"),
        }
        self.blocks.carry_ended(context.now_ms(), copy, is_good);
        self.let_pools_go();
        self.run_actions(context);
    }

    /// As if the engine had written them into the slot.
    fn take_layers(&mut self, context: &mut Context, slot: SlotIndex, carried: &Carried) {
        let Carried { share, page, step, ref layers, .. } = *carried;
        let layout = self.layout();
        let runs = layers.clone().flat_map(|layer| layout.runs(layer.into()).to_vec());
        let sums: Vec<u64> = runs.map(|run| self.run_checksum(slot, run)).collect();
        let Some(leg) = self.legs.get_mut(&share) else { return };
        let follow = leg.pages.take_layers(page, step, layers.clone(), &sums);
        assert!(follow, "layers {layers:?} of page {page} of {share} come out of order");
        self.pump(context, share);
        self.commit_whole(context, share);
    }
}
