//! What others see of the node: its description, its events, its blocks, its gauges.

use kvasir_proto::{BlockKey, v1};

use super::Owner;
use crate::clock;
use crate::node::command::Refused;
use crate::node::session::Session;

/// A status goes out at least so often.
const STATUS_MS: u64 = 1_000;
/// Blocks in one answer: their message stays under what gRPC takes.
const LISTED_MAX: usize = 32_768;

/// What was last reported.
#[derive(Debug, Default)]
pub(super) struct Reported {
    /// Something changed that conductors should know at once.
    pub dirty: bool,
    pub gauges_stale: bool,
    status: Option<v1::NodeDescription>,
    status_ms: u64,
}

impl Owner {
    pub(super) fn describe(&self) -> v1::NodeDescription {
        let counts = self.blocks.counts();
        v1::NodeDescription {
            node_id: self.config.node_id.clone(),
            incarnation: self.incarnation,
            endpoint: self.transfer.endpoint().to_bytes(),
            instances: self.engines.heard().map(Session::describe).collect(),
            layout: self.cache.as_ref().map(|cache| (&*cache.layout).into()),
            slots_total: counts.slots,
            slots_free: counts.free,
            draining: self.drain_until_ms.is_some() || self.blocks.is_draining(),
            load_read_unix_ms: clock::unix_ms(),
            slots_available: self.blocks.available(),
            ssd: self.ssd_status(),
            persists_contexts: self.tiers.are_any(),
        }
    }

    /// Sends the status when it has changed or was last sent a while ago.
    pub(super) fn report_status(&mut self, now_ms: u64) {
        let status = self.describe();
        let same = self.report.status.as_ref().is_some_and(|former| {
            v1::NodeDescription { load_read_unix_ms: status.load_read_unix_ms, ..former.clone() }
                == status
        });
        let due = now_ms.saturating_sub(self.report.status_ms) >= STATUS_MS;
        if !same || due || self.events.lacks_status() {
            self.events.status(&status);
            self.report.status = Some(status);
            self.report.status_ms = now_ms;
        }
        self.report.dirty = false;
        self.metrics.engines.set(self.engines.heard().count() as i64);
        self.metrics.subscribers.set(self.events.count() as i64);
        self.metrics.writers.set(self.writers.count() as i64);
    }

    pub(super) fn set_gauges(&self, now_ms: u64) {
        self.metrics.set_counts(&self.blocks.counts(), now_ms);
        self.metrics.draining.set(self.blocks.is_draining().into());
        self.metrics.tail_bytes.set(self.tail_space.taken_bytes() as i64);
        self.metrics.contexts_short.set(self.blocks.contexts_short_of_copies() as i64);
        if let Some(ssd) = self.ssd_status() {
            self.metrics.ssd_usable.set(ssd.usable.into());
        }
    }

    pub(super) fn list_blocks(
        &self,
        request: &v1::ListBlocksRequest,
    ) -> Result<v1::ListBlocksReply, Refused> {
        let Some(cache) = &self.cache else { return Ok(v1::ListBlocksReply::default()) };
        let slot_bytes = cache.layout.slot_bytes();
        let place = |block: kvasir_blocks::BlockView| v1::BlockLocation {
            key: block.key.0.to_vec(),
            slot: block.slot.0,
            generation: block.generation.0,
            offset_bytes: u64::from(block.slot.0) * slot_bytes,
            length_bytes: slot_bytes,
            pins: block.pins,
        };
        let blocks = if request.keys.is_empty() {
            let blocks: Vec<_> = self.blocks.blocks().take(LISTED_MAX + 1).map(place).collect();
            if blocks.len() > LISTED_MAX {
                return Err(Refused::Precondition(format!(
                    "the node has more than {LISTED_MAX} blocks: set `keys`, or use Admin.List, \
                     which returns pages"
                )));
            }
            blocks
        } else {
            let keys = BlockKey::list(&request.keys)?;
            keys.into_iter().filter_map(|key| self.blocks.block(key)).map(place).collect()
        };
        Ok(v1::ListBlocksReply { blocks })
    }
}
