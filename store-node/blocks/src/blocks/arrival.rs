//! What a remote writer sent, and when it can write no more.

use kvasir_proto::{Share, Side};

use super::Blocks;
use crate::api::{AbortReason, Action, Arrival, ShareError};
use crate::share_state::{Phase, Refusal, ShareEvent, Writer};

impl Blocks {
    /// The immediate has reached its count: every page in `targets` and the tail have landed, and
    /// the writer will write no more. Commits the full ones. `checksums` has one for each page
    /// in `targets`.
    ///
    /// # Errors
    /// [`ShareError`]; nothing has changed then.
    pub fn arrived(
        &mut self,
        now_ms: u64,
        share: Share,
        checksums: Vec<u64>,
    ) -> Result<Arrival, ShareError> {
        let record = self.shares.get(&share).ok_or_else(|| self.missing(share))?;
        match record.state.writer {
            Writer::None => return Err(Refusal::NoWriter.into()),
            Writer::Settled => {
                return Ok(Arrival::Settled { cached_blocks: record.cached_blocks });
            }
            Writer::Writing | Writer::Stopping | Writer::Stopped => {}
        }
        if record.state.phase != Phase::Live {
            self.writer_done(now_ms, share);
            return Ok(Arrival::Late);
        }
        if checksums.len() != record.targets.len() {
            return Err(ShareError::Refused("there must be a checksum for each page"));
        }
        self.writer_done(now_ms, share);
        let cached_blocks = self.settle(share, checksums)?;
        Ok(Arrival::Settled { cached_blocks })
    }

    /// The remote writer of an open share shall stop, because not all will come: gives
    /// [`Action::StopWriter`] unless it has stopped.
    ///
    /// # Errors
    /// [`ShareError`] when there is no such share or it has no remote writer.
    pub fn stop_writer(&mut self, share: Share) -> Result<(), ShareError> {
        let missing = self.missing(share);
        let record = self.shares.get_mut(&share).ok_or(missing)?;
        if record.state.on(ShareEvent::StopWriter)?.stop_writer {
            self.actions.push_back(Action::StopWriter { share });
        }
        Ok(())
    }

    /// The remote writer says that every write it issued has landed or failed, and that it issues
    /// no more.
    pub fn writer_stopped(&mut self, now_ms: u64, share: Share) {
        self.writer_done(now_ms, share);
    }

    /// The remote writer is lost, and the transfer engine confirmed that none of its writes can
    /// land any more.
    pub fn writer_cut_off(&mut self, now_ms: u64, share: Share) {
        self.writer_done(now_ms, share);
    }

    /// Prefill side, when the writer has stopped before all arrived: the first `checksums.len()`
    /// pages of `targets` are intact and are committed; the others become pages to compute.
    /// Answers with the blocks that are cached, also when it was settled before.
    ///
    /// # Errors
    /// [`ShareError::Refused`] while the writer may still write, or when there is no fetch.
    pub fn settle_fetch(&mut self, share: Share, checksums: Vec<u64>) -> Result<u32, ShareError> {
        let record = self.open(share)?;
        if share.side != Side::Prefill {
            return Err(ShareError::Refused("only the prefill side fetches"));
        }
        if record.state.writer == Writer::Settled {
            return Ok(record.cached_blocks);
        }
        if checksums.len() > record.targets.len() {
            return Err(ShareError::Refused("there are more checksums than fetched pages"));
        }
        self.settle(share, checksums)
    }

    fn writer_done(&mut self, now_ms: u64, share: Share) {
        // Refused by no state; a share that is over needs to hear of nobody.
        let _ = self.apply(now_ms, share, ShareEvent::WriterDone, AbortReason::PeerLost);
    }

    /// The writer has stopped, and these leading targets are intact.
    fn settle(&mut self, share: Share, checksums: Vec<u64>) -> Result<u32, ShareError> {
        let missing = self.missing(share);
        let record = self.shares.get_mut(&share).ok_or(missing)?;
        let asks = record.state.on(ShareEvent::Settle)?;
        let arrived_until = record.targets.start + checksums.len() as u32;
        record.cached_blocks = arrived_until.min(record.request.keys.len() as u32);
        let keys = record.request.keys.clone();
        for (page, checksum) in (record.targets.start..).zip(checksums) {
            if let Some(&key) = keys.get(page as usize) {
                // A page that cannot be indexed stays the share's own, and is as good to it.
                let _ = self.seal_page(share, page, key, checksum);
            }
        }
        let record = self.shares.get(&share).ok_or(ShareError::Unknown)?;
        if let Some(epoch) = asks.bound {
            let bound = record.bound(self.block_tokens);
            self.actions.push_back(Action::Bound { share, epoch, bound });
        }
        Ok(record.cached_blocks)
    }
}
