//! Between the block core and the thread beside the SSD: handing over what the core plans, taking
//! back what became of it, and what of all that others are told. The same for the object store is in
//! [`bucket`](super::bucket); what both have in common is here. What is kept for tenants is asked for in
//! [`contexts`](super::contexts).

use std::collections::BTreeMap;
use std::sync::Arc;

use kvasir_blocks::{PrefetchError, Prefetched, RiseError, SinkError, SsdBlock, SsdSize};
use kvasir_log::{Counts, Recovered, extent_pages};
use kvasir_proto::{BlockKey, Class, Namespace, Share, Side, SlotLayout, TxId, v1};
use prost::Message;

use super::Owner;
use super::bucket::OnBucket;
use super::contexts::Waits;
use crate::bucket::jobs::BucketTask;
use crate::clock;
use crate::node::SERIALS_OF_HINTS;
use crate::node::command::Refused;
use crate::ssd::pace::Reads;
use crate::ssd::thread::{Job, Report, Shape, SsdThread};

/// How long an error is told of after it was met last.
const ERROR_MS: u64 = 10_000;

impl From<PrefetchError> for Refused {
    fn from(error: PrefetchError) -> Self {
        let why = error.to_string();
        match error {
            PrefetchError::NoSsd => Refused::Precondition(why),
            PrefetchError::Draining => Refused::Draining(why),
            PrefetchError::TooMany(_) | PrefetchError::NoRoom => Refused::NoSpace(why),
        }
    }
}

#[derive(Debug)]
enum State {
    Opening,
    Up { how: &'static str },
    Down { why: String },
}

/// The tiers below memory, as far as the node has them.
#[derive(Debug)]
pub(super) struct Tiers {
    ssd: Option<OnSsd>,
    pub(super) bucket: Option<OnBucket>,
    pub(super) shape: Option<Shape>,
    /// Who waits until something is kept, or is not any more.
    pub(super) keeps: BTreeMap<u64, Waits>,
    next_hint: u64,
}

/// So many extents a segment must have room for.
const EXTENTS_OF_A_SEGMENT_MIN: u64 = 7;
const TOO_SMALL: &str = "a block is larger than a seventh of a segment, so no block is written to \
     the SSD; start a new log with a larger `ssd.segment_bytes`";

/// The SSD of a node that has one.
#[derive(Debug)]
struct OnSsd {
    thread: SsdThread,
    state: State,
    extent_bytes_max: u64,
    bytes_max: u64,
    /// Blocks are too large for its segments, so that none goes there.
    is_too_small: bool,
    /// The last error of the disk, and when it was met.
    error: Option<(u64, String)>,
    counts: Counts,
    reads: Reads,
}

impl Tiers {
    pub(super) fn new(ssd: Option<SsdThread>, bucket: Option<BucketTask>) -> Self {
        let on_ssd = |thread| OnSsd {
            thread,
            state: State::Opening,
            extent_bytes_max: 0,
            bytes_max: 0,
            is_too_small: false,
            error: None,
            counts: Counts::default(),
            reads: Reads::default(),
        };
        Tiers {
            ssd: ssd.map(on_ssd),
            bucket: bucket.map(OnBucket::new),
            shape: None,
            keeps: BTreeMap::new(),
            next_hint: SERIALS_OF_HINTS,
        }
    }

    /// What is on the SSD is known, if there is one.
    pub(super) fn knows_ssd(&self) -> bool {
        self.ssd.as_ref().is_none_or(|ssd| matches!(ssd.state, State::Up { .. }))
    }

    pub(super) fn has_ssd(&self) -> bool {
        self.ssd.is_some()
    }

    /// There is something below memory.
    pub(super) fn are_any(&self) -> bool {
        self.ssd.is_some() || self.bucket.is_some()
    }

    /// How the blocks in the slots look.
    pub(super) fn shape(&self) -> &Shape {
        self.shape.as_ref().expect("without a shape there are no slots to move")
    }
}

/// Names a layout in extents: blocks of another one are of no use.
fn layout_hash(layout: &SlotLayout) -> u64 {
    kvasir_transfer::checksum(&v1::SlotLayout::from(layout).encode_to_vec())
}

impl Owner {
    /// Blocks look like this from now on.
    pub(super) fn shape_tiers(&mut self, layout: &Arc<SlotLayout>) {
        if !self.tiers.are_any() {
            return;
        }
        let shape = Shape { layout: Arc::clone(layout), hash: layout_hash(layout) };
        let pages = extent_pages(layout.runs_per_page(), layout.slot_bytes() as usize);
        let extent_bytes = (pages * kvasir_log::PAGE_BYTES) as u64;
        let hash = shape.hash;
        self.tiers.shape = Some(shape);
        // Larger ones would leave too much room at the ends of segments for cleaning to gain anything.
        let largest = |ssd: &OnSsd| ssd.extent_bytes_max / EXTENTS_OF_A_SEGMENT_MIN;
        let ssd = self.tiers.ssd.as_mut();
        let too_large = ssd.is_some_and(|ssd| {
            ssd.is_too_small = ssd.bytes_max > 0 && extent_bytes > largest(ssd);
            ssd.is_too_small
        });
        if too_large {
            tracing::error!(extent_bytes, "{TOO_SMALL}");
        }
        self.blocks.set_extents(hash, if too_large { 0 } else { extent_bytes });
    }

    /// Everything that the thread beside the disk has reported. Answers whether there was anything.
    pub(super) fn take_ssd(&mut self) -> bool {
        let mut worked = false;
        for _ in 0..super::BATCH {
            let Ok(report) = self.inbox.ssd.try_recv() else { break };
            self.take_report(report);
            worked = true;
        }
        worked
    }

    fn take_report(&mut self, report: Report) {
        let now_ms = clock::now_ms();
        match report {
            Report::Up { how, live_bytes_max, extent_bytes_max, blocks, is_whole } => {
                self.ssd_is_up(how, live_bytes_max, extent_bytes_max, (blocks, is_whole));
            }
            Report::Down { why } => {
                if let Some(ssd) = &mut self.tiers.ssd {
                    (ssd.state, ssd.bytes_max) = (State::Down { why }, 0);
                }
                self.blocks.ssd_gone();
                self.report.dirty = true;
            }
            Report::Sunk { sink, result, why } => {
                if result == Err(SinkError::Corrupt) {
                    self.metrics.corrupt_blocks.inc();
                }
                self.note_error(now_ms, why);
                self.blocks.sunk(now_ms, sink, result);
            }
            Report::Risen { rise, result, why } => {
                self.metrics.ssd_rotten.inc_by(u64::from(result == Err(RiseError::Gone)));
                self.note_error(now_ms, why);
                self.blocks.risen(now_ms, rise, result);
            }
            Report::Lost { key } => {
                self.metrics.ssd_rotten.inc();
                self.note_error(now_ms, Some("an extent failed its checksum".into()));
                self.blocks.ssd_lost(key);
            }
            Report::Counts(counts, reads) => {
                if let Some(ssd) = &mut self.tiers.ssd {
                    self.metrics.set_ssd_counts(&ssd.counts, &counts);
                    ssd.counts = counts;
                    ssd.reads = reads;
                }
            }
        }
        self.run_actions();
    }

    fn note_error(&mut self, now_ms: u64, why: Option<String>) {
        let (Some(why), Some(ssd)) = (why, &mut self.tiers.ssd) else { return };
        self.metrics.ssd_errors.inc();
        if ssd.error.as_ref().is_none_or(|(_, known)| *known != why) {
            tracing::warn!(reason = why, "an operation of the store node on the SSD failed");
        }
        ssd.error = Some((now_ms, why));
        self.report.dirty = true;
    }

    fn ssd_is_up(
        &mut self,
        how: &'static str,
        bytes_max: u64,
        extent_bytes_max: u64,
        (blocks, is_whole): (Vec<Recovered>, bool),
    ) {
        let config = &self.config.ssd;
        let context_bytes_max = bytes_max / 100 * u64::from(config.context_percent);
        let tenant_bytes_max = config.tenant_bytes_max.min(context_bytes_max);
        let Some(ssd) = &mut self.tiers.ssd else { return };
        (ssd.state, ssd.counts) = (State::Up { how }, Counts::default());
        (ssd.bytes_max, ssd.extent_bytes_max) = (bytes_max, extent_bytes_max);
        let layout = self.tiers.shape.as_ref().map(|shape| Arc::clone(&shape.layout));
        let block = |found: Recovered| {
            let Recovered { key, namespace, parent, mark, layout, bytes } = found;
            SsdBlock { key, namespace, parent, class: Class::Normal, mark, layout, bytes }
        };
        let blocks = blocks.into_iter().map(block).collect();
        let size = SsdSize { bytes_max, context_bytes_max, tenant_bytes_max };
        match is_whole {
            true => self.blocks.ssd_ready(size, blocks),
            false => self.blocks.ssd_ready_in_part(size, blocks, clock::unix_ms()),
        }
        self.blocks.expire(clock::unix_ms());
        if let Some(layout) = layout {
            self.shape_tiers(&layout);
        }
        self.report.dirty = true;
    }

    pub(super) fn give_ssd(&mut self, job: impl FnOnce(&Shape) -> Job) {
        let job = job(self.tiers.shape());
        self.give_ssd_job(job);
    }

    pub(super) fn give_ssd_job(&mut self, job: Job) {
        if let Some(ssd) = &mut self.tiers.ssd {
            ssd.thread.give(job);
        }
    }

    /// What follows whatever took slots; and what waits for room in the thread's queue.
    pub(super) fn plan_tiers(&mut self) {
        self.blocks.copy_pages(clock::now_ms());
        if self.tiers.ssd.is_some() {
            self.blocks.sink_ahead(clock::now_ms());
        }
        if self.tiers.bucket.is_some() {
            self.blocks.upload_ahead(clock::now_ms());
        }
    }

    pub(super) fn tick_tiers(&mut self) {
        if self.tiers.are_any() {
            self.flush_tiers();
            self.blocks.expire(clock::unix_ms());
        }
    }

    pub(super) fn flush_tiers(&mut self) -> bool {
        let ssd = self.tiers.ssd.as_mut().is_some_and(|ssd| ssd.thread.flush());
        ssd | self.tiers.bucket.as_mut().is_some_and(OnBucket::flush)
    }

    /// A conductor says what will be asked for.
    pub(super) fn prefetch(
        &mut self,
        request: &v1::PrefetchRequest,
    ) -> Result<v1::PrefetchReply, Refused> {
        let namespace = Namespace::try_from(request.namespace.as_slice())?;
        // As requests are refused that would come later.
        if self.cache.is_none() {
            return Err(Refused::Precondition("no engine has attached to this node".into()));
        }
        let ahead = self.read_ahead(Some(namespace), &BlockKey::list(&request.keys)?)?;
        let Prefetched { memory_blocks, promoting_blocks } = ahead;
        Ok(v1::PrefetchReply { dram_blocks: memory_blocks, promoting_blocks })
    }

    pub(super) fn read_ahead(
        &mut self,
        namespace: Option<Namespace>,
        keys: &[BlockKey],
    ) -> Result<Prefetched, PrefetchError> {
        if self.drain_until_ms.is_some() {
            return Err(PrefetchError::Draining);
        }
        if !self.tiers.are_any() && !self.engines.have_pools() {
            return Err(PrefetchError::NoSsd);
        }
        let tx = TxId { conductor_incarnation: self.incarnation, serial: self.tiers.next_hint };
        self.tiers.next_hint += 1;
        let share = Share { tx, side: Side::Source };
        self.blocks.prefetch(clock::now_ms(), share, namespace, keys)
    }

    /// Source side: some of what was on its way from the SSD is there; or (`is_all`) the rest never will be.
    pub(super) fn source_risen(&mut self, share: Share, blocks: u32, is_all: bool) {
        if is_all && self.object_risen(share) {
            return;
        }
        // It may have ended in the same call: that it has comes next.
        let Some(slots) = self.blocks.share(share).map(|view| view.slots) else { return };
        let Some(leg) = self.legs.get_mut(&share) else { return };
        leg.pages.set_slots(&slots);
        if is_all {
            leg.held_pages = blocks;
            if let Some(outgoing) = &mut leg.outgoing {
                outgoing.leaving.push_mut().end_at(blocks);
            }
        }
        self.set_cached(share, blocks);
        self.pump(share);
    }

    pub(super) fn ssd_status(&self) -> Option<v1::SsdStatus> {
        let ssd = self.tiers.ssd.as_ref()?;
        let now_ms = clock::now_ms();
        let answers = self.blocks.ssd_is_usable(now_ms);
        let counts = self.blocks.counts();
        let error = ssd.error.as_ref().filter(|(at_ms, _)| now_ms < at_ms + ERROR_MS);
        let state = match (&ssd.state, error) {
            (State::Opening, _) => "opening".to_owned(),
            (State::Down { why }, _) => format!("failed: {why}"),
            (State::Up { .. }, _) if !answers => {
                format!(
                    "hangs: an operation did not finish within {} ms",
                    self.config.ssd.timeout_ms
                )
            }
            (State::Up { .. }, _) if ssd.is_too_small => format!("unused: {TOO_SMALL}"),
            (State::Up { .. }, Some((_, why))) => format!("degraded: {why}"),
            (State::Up { how }, None) if ssd.counts.segments_withheld > 0 => format!(
                "ready, using {how}; {} of its segments could not be read completely at startup: \
                 the next start reads them again",
                ssd.counts.segments_withheld
            ),
            (State::Up { how }, None) => format!("ready, using {how}"),
        };
        Some(v1::SsdStatus {
            usable: matches!(ssd.state, State::Up { .. }) && answers && !ssd.is_too_small,
            state,
            blocks: counts.ssd_blocks.into(),
            used_bytes: counts.ssd_bytes,
            capacity_bytes: ssd.bytes_max,
            read_bytes_total: ssd.reads.bytes,
            read_us_total: ssd.reads.time.as_micros() as u64,
        })
    }
}
