//! How shares end: release, abort, a lease that runs out, an engine that is gone.
//!
//! A share's slots go back in two steps. When nothing on this node touches them any more, its pins
//! are dropped and all private slots go but those that a remote writer may still write; those, and
//! the immediate, go when the writer is known to have finished.

use kvasir_mutation::{Mutation, mutated};
use kvasir_proto::{Generation, Namespace, Share, Side, SlotIndex};

use super::Blocks;
use crate::api::{AbortOutcome, AbortReason, Action, AttachEpoch, Outcome, ShareError};
use crate::share::Aborted;
use crate::share_state::{Asks, ShareEvent};
use crate::slot_state::SlotState;

impl Blocks {
    /// Whoever held the share here will not touch its slots again. Pins are dropped and private
    /// slots freed as soon as reads have ended and the remote writer is known to have finished; if
    /// it has not finished, it is asked to stop as in an abort. Doing it again changes nothing.
    ///
    /// # Errors
    /// [`ShareError::Unknown`] and [`ShareError::Finished`], which need no answer.
    pub fn release(&mut self, now_ms: u64, share: Share) -> Result<(), ShareError> {
        self.apply(now_ms, share, ShareEvent::Release, AbortReason::ReleasedEarly)
    }

    /// Ends a share early; an unknown one leaves a tombstone.
    pub fn abort(&mut self, now_ms: u64, share: Share, reason: AbortReason) -> AbortOutcome {
        self.forget_until(now_ms);
        match self.shares.get(&share) {
            Some(record) if record.is_aborted() => AbortOutcome::AlreadyAborting,
            Some(_) => {
                self.abort_open(now_ms, share, reason);
                AbortOutcome::Aborting
            }
            None if self.finished.get(share).is_some() => AbortOutcome::AlreadyEnded,
            None => {
                if !mutated(Mutation::TombstoneOmitted) {
                    self.tombstones.insert(now_ms, share, Outcome::Aborted);
                }
                AbortOutcome::Tombstoned
            }
        }
    }

    /// Aborts every open share.
    pub fn abort_all(&mut self, now_ms: u64, reason: &AbortReason) {
        let open: Vec<Share> = self.shares.keys().copied().collect();
        open.into_iter().for_each(|share| self.abort_open(now_ms, share, reason.clone()));
    }

    /// The engine of this attachment can write no more: its process is dead, or its epoch is
    /// revoked and confirmed. Releases and aborts its shares, and drops its pins.
    pub fn engine_gone(&mut self, now_ms: u64, epoch: AttachEpoch) {
        let of_engine = |share: &Share| {
            self.shares.get(share).is_some_and(|record| {
                record.state.epoch() == Some(epoch)
                    && (!record.of_objects || !mutated(Mutation::DeadClientPutNotReleased))
            })
        };
        let gone: Vec<Share> = self.shares.keys().copied().filter(of_engine).collect();
        for share in gone {
            if mutated(Mutation::PartialPutCommitted) {
                let put = self.shares.get(&share).filter(|record| record.of_objects);
                for page in 0..put.map_or(0, |record| record.prompt_pages) {
                    let _ = self.commit_page(share, page, 0);
                }
            }
            // Refused by no state.
            let event = ShareEvent::EngineGone(epoch);
            let _ = self.apply(now_ms, share, event, AbortReason::EngineGone);
        }
        if !mutated(Mutation::DeadClientPinsLeaked) {
            for handle in self.gets.handles(epoch) {
                self.unpin(epoch, handle);
            }
        }
        self.close_pool(now_ms, epoch);
    }

    /// A committed copy failed its checksum. It and the blocks after it leave the index at once and
    /// are freed when unpinned; open shares that read it are aborted, except source shares (whose
    /// push must itself leave it out). Answers with the number of blocks dropped: 0 when the slot
    /// does not hold that generation of a committed block any more.
    pub fn drop_corrupt(&mut self, now_ms: u64, slot: SlotIndex, generation: Generation) -> u32 {
        let committed = matches!(self.cache.slots().state(slot), Some(SlotState::Committed { .. }));
        if !committed
            || self.cache.slots().generation(slot) != Some(generation)
                && !mutated(Mutation::CorruptReportGenerationIgnored)
        {
            return 0;
        }
        let dropped = self.drop_read(now_ms, slot, &AbortReason::Corrupt);
        self.totals.dropped += u64::from(dropped);
        dropped
    }

    /// Takes a committed block and those after it out of the index, and aborts the shares that read
    /// it, but for source shares. Answers with the number of blocks.
    pub(super) fn drop_read(&mut self, now_ms: u64, slot: SlotIndex, why: &AbortReason) -> u32 {
        let reads = |share: &Share| {
            share.side != Side::Source
                && self.shares.get(share).is_some_and(|record| record.reads_slot(slot))
        };
        let readers: Vec<Share> = self.shares.keys().copied().filter(reads).collect();
        let dropped = self.cache.drop_subtree(slot);
        readers.into_iter().for_each(|share| self.abort_open(now_ms, share, why.clone()));
        dropped
    }

    /// Aborts the shares whose leases ran out, ends pins whose time is over, forgets what is old enough.
    pub fn handle_timeout(&mut self, now_ms: u64) {
        self.forget_until(now_ms);
        self.late_rises(now_ms);
        self.end_admin_pins(now_ms);
        while let Some((at_ms, share)) = self.next_lease()
            && at_ms <= now_ms
        {
            self.totals.leases_over += 1;
            self.abort_open(now_ms, share, AbortReason::LeaseOver);
        }
    }

    /// The lease that expires first.
    fn next_lease(&self) -> Option<(u64, Share)> {
        if mutated(Mutation::LeaseOrderReversed) {
            return self.leases.last().copied();
        }
        self.leases.first().copied()
    }

    /// A push of this share's pages is owed or begins: slots stay until it has ended.
    ///
    /// # Errors
    /// [`ShareError`] when the share is not open: then do not read.
    pub fn read_begin(&mut self, share: Share) -> Result<(), ShareError> {
        self.open(share)?;
        let Some(record) = self.shares.get_mut(&share) else { return Ok(()) };
        if share.side != Side::Source || !mutated(Mutation::FetchSourceNotPinned) {
            record.state.on(ShareEvent::ReadBegin)?;
        }
        Ok(())
    }

    /// Whether the pages of a share may go into slots that another node has for blocks of this namespace.
    ///
    /// # Errors
    /// [`ShareError`] when the share is of another namespace, or not there.
    pub fn may_go_to(&self, share: Share, namespace: Namespace) -> Result<(), ShareError> {
        let record = self.shares.get(&share).ok_or_else(|| self.missing(share))?;
        if record.request.namespace != namespace {
            let why = "the receiver's slots belong to another namespace";
            return Err(ShareError::Refused(why));
        }
        Ok(())
    }

    /// One push has ended: each of its writes has landed or failed.
    ///
    /// # Errors
    /// [`ShareError`] when no read of the share is open (it may have been stopped meanwhile).
    pub fn read_end(&mut self, now_ms: u64, share: Share) -> Result<(), ShareError> {
        self.apply(now_ms, share, ShareEvent::ReadEnd, AbortReason::PeerLost)
    }

    /// Answers [`Action::StopPush`]: all of the share's reads have ended, and none will begin.
    pub fn push_stopped(&mut self, now_ms: u64, share: Share) {
        if self.fills.is_read(share) {
            self.fills.pushes_stopped.insert(share);
            return;
        }
        // Refused by no state; a share that is over has no reads.
        let _ = self.apply(now_ms, share, ShareEvent::PushStopped, AbortReason::PeerLost);
    }

    pub(super) fn abort_open(&mut self, now_ms: u64, share: Share, reason: AbortReason) {
        // Refused by no state.
        let _ = self.apply(now_ms, share, ShareEvent::Abort, reason);
    }

    /// Tells a share's state what happened, and does what follows from it. `reason` is that of the
    /// abort, should it come to one.
    pub(super) fn apply(
        &mut self,
        now_ms: u64,
        share: Share,
        event: ShareEvent,
        reason: AbortReason,
    ) -> Result<(), ShareError> {
        let missing = self.missing(share);
        let record = self.shares.get_mut(&share).ok_or(missing)?;
        let asks = record.state.on(event)?;
        if record.is_aborted() && record.aborted.is_none() {
            record.aborted = Some(Aborted { since_ms: now_ms, reason });
            let private = record.pages.iter().filter_map(|page| page.private());
            private.for_each(|slot| self.cache.quarantine(slot));
            self.leases.remove(&(record.lease_until_ms, share));
            self.aborting.insert((now_ms, share));
            self.totals.aborts += 1;
            self.give_up_carries(share);
        }
        self.ask(share, asks);
        self.give_back(now_ms, share);
        Ok(())
    }

    fn ask(&mut self, share: Share, asks: Asks) {
        let stop_push = asks.stop_push && !self.stop_own_fill(share);
        let Some(record) = self.shares.get(&share) else { return };
        if let (Some(epoch), Some(aborted)) = (asks.stop_engine, &record.aborted) {
            let reason = aborted.reason.clone();
            self.actions.push_back(Action::StopEngine { share, epoch, reason });
        }
        if stop_push {
            self.actions.push_back(Action::StopPush { share });
        }
        if asks.stop_writer {
            self.actions.push_back(Action::StopWriter { share });
        }
        if let (true, Some(imm)) = (asks.cancel_imm, record.imm) {
            self.actions.push_back(Action::CancelImm { share, imm });
        }
    }

    fn give_back(&mut self, now_ms: u64, share: Share) {
        let Some(record) = self.shares.get_mut(&share) else { return };
        if !record.state.locally_over() {
            return;
        }
        self.cache.set_now(now_ms);
        let mut kept = Vec::new();
        let (is_hint, rising) = (record.is_hint, record.rising.clone());
        let pages = std::mem::take(&mut record.pages);
        for (index, page) in (0..pages.len() as u32).zip(pages) {
            match page.pinned() {
                Some(slot) if is_hint => {
                    let was_read = self.cache.unpin_hinted(slot, rising.contains(&index));
                    self.totals.prefetched += u64::from(was_read);
                }
                Some(slot) => self.cache.unpin(slot),
                None => {}
            }
            let quarantines = !mutated(Mutation::QuarantineOmitted);
            match page.private() {
                Some(_) if quarantines && record.may_be_written_remotely(index) => kept.push(page),
                Some(slot) => self.cache.give_back(slot),
                None => {}
            }
        }
        // What is left are the targets of the remote writer, and nothing else.
        record.targets = 0..kept.len() as u32;
        record.pages = kept;
        if record.state.over() {
            self.end(now_ms, share);
        }
    }

    /// Forgets a share that has given everything back.
    fn end(&mut self, now_ms: u64, share: Share) {
        self.forget_carries(share);
        let Some(record) = self.shares.remove(&share) else { return };
        if let Some(imm) = record.imm {
            self.imms.give_back(imm);
        }
        self.leases.remove(&(record.lease_until_ms, share));
        let outcome = match record.aborted {
            None => Outcome::Released,
            Some(aborted) => {
                self.aborting.remove(&(aborted.since_ms, share));
                Outcome::Aborted
            }
        };
        self.hints -= usize::from(record.is_hint);
        if record.is_fill {
            // Nobody but this owner has heard of it.
            return;
        }
        let is_remembered = !record.of_objects && !record.is_hint;
        if is_remembered && !mutated(Mutation::EndedShareForgotten) {
            self.finished.insert(now_ms, share, outcome);
        }
        self.actions.push_back(Action::Ended { share, imm: record.imm, outcome });
    }
}
