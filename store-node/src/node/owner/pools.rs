//! Engines' own pages: what each says of its own, and the copies that the core asks for.

use std::collections::BTreeSet;
use std::sync::Arc;

use kvasir_blocks::{AttachEpoch, Carried, RiseError, WritePageError};
use kvasir_proto::{BlockKey, Namespace, Share, Side, SlotIndex, TxId, v1};
use v1::node_to_engine::Message as ToEngine;

use super::Owner;
use crate::clock;
use crate::node::SERIALS_OF_FILLS;
use crate::node::inbox::{End, Post};
use crate::node::line::Broken;
use crate::pool::Pool;
use crate::pool::copier::{Copied, Copy, PageCopier, Way};

impl From<kvasir_blocks::PoolError> for Broken {
    fn from(error: kvasir_blocks::PoolError) -> Self {
        Broken(format!("the engine's pool: {error}"))
    }
}

/// Who copies between pools and slots. The pools are with their engines' sessions.
#[derive(Debug)]
pub(super) struct Pools {
    /// Started with the first pool.
    copier: Option<PageCopier>,
    next_fill: u64,
}

impl Pools {
    pub(super) fn new() -> Self {
        Pools { copier: None, next_fill: SERIALS_OF_FILLS }
    }

    fn next_share(&mut self, incarnation: u64) -> Share {
        self.next_fill += 1;
        let tx = TxId { conductor_incarnation: incarnation, serial: self.next_fill };
        Share { tx, side: Side::Source }
    }

    /// Answers whether something waits for room.
    pub(super) fn flush(&mut self) -> bool {
        self.copier.as_mut().is_some_and(PageCopier::flush)
    }
}

impl Owner {
    /// There is a thread that copies pages.
    pub(super) fn start_page_copier(&mut self) -> std::io::Result<()> {
        if self.pools.copier.is_none() {
            let post: Post = self.post.clone();
            let report = move |copied: Vec<Copied>| post.end(End::PagesCopied(copied));
            self.pools.copier = Some(PageCopier::start(self.arena.clone(), report)?);
        }
        Ok(())
    }

    pub(super) fn open_pool(&mut self, epoch: AttachEpoch, pool: Arc<Pool>) {
        self.blocks.open_pool(epoch, pool.layout.pages());
        if let Some(session) = self.engines.get_mut(epoch) {
            session.pool = Some(pool);
        }
    }

    /// The engine is not listened to any more, or gone. Copies under way go on.
    pub(super) fn close_pool(&mut self, epoch: AttachEpoch) {
        let session = self.engines.get_mut(epoch);
        let Some(pool) = session.and_then(|session| session.pool.take()) else { return };
        self.blocks.close_pool(clock::now_ms(), epoch);
        pool.close();
        if let Some(copier) = &mut self.pools.copier {
            copier.let_go(pool);
        }
    }

    pub(super) fn hold_pages(
        &mut self,
        epoch: AttachEpoch,
        hold: &v1::HoldPages,
    ) -> Result<(), Broken> {
        let namespace = Namespace::try_from(hold.namespace.as_slice())?;
        let parent = match &*BlockKey::list(&hold.parent)? {
            [] => None,
            [parent] => Some(*parent),
            more => {
                return Err(Broken(format!(
                    "field `parent` has {} keys; it must have at most one",
                    more.len()
                )));
            }
        };
        let keys = BlockKey::list(&hold.keys)?;
        let of = (namespace, parent);
        Ok(self.blocks.hold_pages(clock::now_ms(), epoch, of, &keys, &hold.pages)?)
    }

    pub(super) fn drop_pages(
        &mut self,
        epoch: AttachEpoch,
        drop: &v1::DropPages,
    ) -> Result<(), Broken> {
        Ok(self.blocks.drop_pages(clock::now_ms(), (epoch, drop.handle), &drop.pages)?)
    }

    pub(super) fn fill_pages(
        &mut self,
        epoch: AttachEpoch,
        fill: &v1::FillPages,
    ) -> Result<(), Broken> {
        let keys = BlockKey::list(&fill.keys)?;
        if let Some(v1::SharePages { tx, side, first_page }) = fill.of_share {
            let share = Share::from_wire(tx, side)?;
            if !keys.is_empty() {
                return Err(Broken(format!(
                    "the engine fills pages both from {share} and from keys"
                )));
            }
            if !self.is_its_own(epoch, share)? {
                // It has ended, and a stop is on its way.
                self.pages_filled(epoch, fill.handle, 0);
                return Ok(());
            }
            let (of, by) = ((share, first_page), (epoch, fill.handle));
            return Ok(self.blocks.fill_from_share(of, by, &fill.pages)?);
        }
        let share = self.pools.next_share(self.incarnation);
        let of = (share, epoch, fill.handle);
        Ok(self.blocks.fill_pages(clock::now_ms(), of, &keys, &fill.pages)?)
    }

    pub(super) fn copy_page(&mut self, epoch: AttachEpoch, page: u32, slot: SlotIndex, way: Way) {
        let pool = self.engines.get(epoch).and_then(|session| session.pool.as_ref());
        let (Some(pool), Some(cache)) = (pool, &self.cache) else {
            // It was closed after the core has asked for this.
            let failed = WritePageError::Failed;
            return self.page_copied(match way {
                Way::IntoSlot { rise } => Copied::IntoSlot { rise, result: Err(RiseError::Failed) },
                Way::Layers { copy, .. } => Copied::Layers { copy, result: Err(failed) },
                Way::IntoPage { copy, .. } => Copied::IntoPage { copy, result: Err(failed) },
            });
        };
        let (pool, layout) = (Arc::clone(pool), Arc::clone(&cache.layout));
        if let Some(copier) = &mut self.pools.copier {
            copier.copy(Copy { pool, page, slot, layout, way });
        }
    }

    /// Copies are over, some at once.
    pub(super) fn pages_copied(&mut self, copied: Vec<Copied>) {
        self.look_who_left(&copied);
        self.take_layers(&copied);
        copied.into_iter().for_each(|copied| self.page_copied(copied));
    }

    /// An engine that has left may use its memory for something else, and leaves before it does: what was copied counts
    /// only if it has not left by now.
    fn look_who_left(&mut self, copied: &[Copied]) {
        let source = |copied: &Copied| match copied {
            Copied::IntoSlot { rise, result: Ok(_) } => self.blocks.rises_from(*rise),
            Copied::Layers { copy, result: Ok(_) } => {
                self.blocks.carried(*copy).map(|carried| carried.epoch)
            }
            _ => None,
        };
        let sources: BTreeSet<AttachEpoch> = copied.iter().filter_map(source).collect();
        sources.into_iter().for_each(|epoch| self.look_after_engine(epoch));
    }

    /// What engines have computed in their pools has come into the slots: from now on it is as if they had written it
    /// there. What came together is pushed together.
    fn take_layers(&mut self, copied: &[Copied]) {
        let mut shares = BTreeSet::new();
        for copied in copied {
            let Copied::Layers { copy, result: Ok(sums) } = copied else { continue };
            let Some(carried) = self.blocks.carried(*copy) else { continue };
            let Carried { share, page, step, layers, .. } = carried;
            let Some(leg) = self.legs.get_mut(&share) else { continue };
            match leg.pages.take_layers(page, step, layers.clone(), sums) {
                true => drop(shares.insert(share)),
                false => {
                    tracing::error!(
                        %share, page, ?layers,
                        "the store node staged layers that the page does not lack; report this as a bug"
                    );
                }
            }
        }
        for share in shares {
            self.pump(share);
            self.commit_whole(share);
        }
    }

    fn page_copied(&mut self, copied: Copied) {
        let now_ms = clock::now_ms();
        match copied {
            Copied::IntoSlot { rise, result } => self.blocks.risen(now_ms, rise, result),
            Copied::Layers { copy, result } => {
                self.blocks.carry_ended(now_ms, copy, result.is_ok());
            }
            Copied::IntoPage { copy, result } => {
                if result == Err(WritePageError::Corrupt) {
                    self.metrics.corrupt_blocks.inc();
                }
                self.blocks.page_written(now_ms, copy, result);
            }
        }
    }

    pub(super) fn pages_dropped(&mut self, epoch: AttachEpoch, handle: u64) {
        self.tell_engine(epoch, ToEngine::PagesDropped(v1::PagesDropped { handle }));
    }

    pub(super) fn pages_filled(&mut self, epoch: AttachEpoch, handle: u64, blocks: u32) {
        self.tell_engine(epoch, ToEngine::PagesFilled(v1::PagesFilled { handle, blocks }));
    }
}
