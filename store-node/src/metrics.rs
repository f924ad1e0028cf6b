//! The node's metrics. Gauges are set from the core's counts, counters where things happen.

use kvasir_blocks::Counts;
use kvasir_log::Counts as LogCounts;
use prometheus::{Gauge, IntCounter, IntCounterVec, IntGauge, IntGaugeVec, Opts, Registry};

/// See the module.
#[derive(Debug, Clone)]
pub(crate) struct Metrics {
    slots: IntGaugeVec,
    evictable_slots: IntGauge,
    shares: IntGauge,
    shares_aborting: IntGauge,
    quarantine_oldest: Gauge,
    pins: IntGauge,
    core: IntCounterVec,
    share_events: IntCounterVec,
    prefetch_hints: IntCounterVec,
    pool_pages: IntGaugeVec,
    pool_copies: IntGauge,
    pool_blocks: IntCounterVec,
    pool_carries: IntGaugeVec,
    staged_layers: IntCounter,
    staging_failures: IntCounter,
    staging_cancelled_pages: IntCounter,
    pub attach_epoch: IntGauge,
    pub engines: IntGauge,
    pub subscribers: IntGauge,
    pub writers: IntGauge,
    pub tail_bytes: IntGauge,
    pub clients: IntGauge,
    pub objects: IntCounterVec,
    pub object_requests_refused: IntCounter,
    pub expelled: IntCounterVec,
    pub hit_blocks: IntCounter,
    pub asked_blocks: IntCounter,
    pub pushes: IntCounterVec,
    pub pushed_bytes: IntCounter,
    pub fetches: IntCounterVec,
    pub corrupt_blocks: IntCounter,
    pub bad_tails: IntCounter,
    pub writers_cut: IntCounter,
    pub messages_dropped: IntCounter,
    pub messages_refused: IntCounter,
    pub draining: IntGauge,
    pub copies: IntCounterVec,
    pub contexts_short: IntGauge,
    pub ssd_usable: IntGauge,
    pub ssd_rotten: IntCounter,
    pub ssd_errors: IntCounter,
    pub bucket_usable: IntGauge,
    pub bucket_wrong: IntCounter,
    pub bucket_errors: IntCounter,
    pub bucket_listed: IntGaugeVec,
    pub bucket_deletes: IntCounterVec,
    bucket_blocks: IntGaugeVec,
    bucket_bytes: IntGauge,
    ssd_blocks: IntGauge,
    ssd_context_blocks: IntGauge,
    ssd_demoting_blocks: IntGauge,
    ssd_overdue_promotions: IntGauge,
    ssd_bytes: IntGauge,
    ssd_context_bytes: IntGauge,
    ssd_live_bytes: IntGauge,
    ssd_tombstone_bytes: IntGauge,
    ssd_segments: IntGaugeVec,
    ssd_operations: IntGaugeVec,
    ssd_log: IntCounterVec,
    ssd_appended_bytes: IntCounter,
    pub layer_lines_dropped: IntCounter,
}

impl Metrics {
    /// # Errors
    /// When a name is registered already.
    pub(crate) fn new(registry: &Registry) -> Result<Self, prometheus::Error> {
        let gauge = |name: &str, help: &str| {
            let gauge = IntGauge::new(format!("kvasir_store_{name}"), help)?;
            registry.register(Box::new(gauge.clone()))?;
            Ok::<_, prometheus::Error>(gauge)
        };
        let gauges = |name: &str, help: &str, label: &str| {
            let gauges =
                IntGaugeVec::new(Opts::new(format!("kvasir_store_{name}"), help), &[label])?;
            registry.register(Box::new(gauges.clone()))?;
            Ok::<_, prometheus::Error>(gauges)
        };
        let counter = |name: &str, help: &str| {
            let counter = IntCounter::new(format!("kvasir_store_{name}"), help)?;
            registry.register(Box::new(counter.clone()))?;
            Ok::<_, prometheus::Error>(counter)
        };
        let counters = |name: &str, help: &str, label: &str| {
            let opts = Opts::new(format!("kvasir_store_{name}"), help);
            let counters = IntCounterVec::new(opts, &[label])?;
            registry.register(Box::new(counters.clone()))?;
            Ok::<_, prometheus::Error>(counters)
        };
        let quarantine_oldest = Gauge::new(
            "kvasir_store_quarantine_oldest_age_seconds",
            "Time since the oldest aborting share was aborted; alert above 60 seconds.",
        )?;
        registry.register(Box::new(quarantine_oldest.clone()))?;
        let copies = IntCounterVec::new(
            Opts::new(
                "kvasir_store_replications_total",
                "Finished copies of block chains to other nodes, by cause and outcome.",
            ),
            &["cause", "outcome"],
        )?;
        registry.register(Box::new(copies.clone()))?;
        Ok(Metrics {
            slots: gauges("slots", "Slots by state.", "state")?,
            evictable_slots: gauge("slots_evictable", "Committed slots without a pin.")?,
            shares: gauge("shares", "Shares of transactions that are open or aborting.")?,
            shares_aborting: gauge(
                "shares_aborting",
                "Aborted shares whose slots are quarantined until their writers and readers have stopped.",
            )?,
            quarantine_oldest,
            pins: gauge("pins", "Pins on committed blocks.")?,
            core: counters("block_events_total", "Events of blocks, by event.", "event")?,
            share_events: counters(
                "share_events_total",
                "Events of the shares of transactions, by event.",
                "event",
            )?,
            prefetch_hints: counters(
                "prefetch_hints_total",
                "Hints of conductors and lookups of engines that announce a request for blocks, by outcome.",
                "outcome",
            )?,
            pool_pages: gauges("pool_pages", "Pages of engines' own pools by state.", "state")?,
            pool_copies: gauge(
                "pool_copies",
                "Copies in flight between engines' pools and slots.",
            )?,
            pool_blocks: counters(
                "pool_blocks_total",
                "Blocks of engines' pools, by event.",
                "event",
            )?,
            pool_carries: gauges(
                "pool_staging_pages",
                "Pages of engines' pools whose layers are copied to slots, by state.",
                "state",
            )?,
            staged_layers: counter(
                "pool_staged_layers_total",
                "Layers of pages that the node copied from engines' pools to slots.",
            )?,
            staging_failures: counter(
                "pool_staging_failures_total",
                "Failed copies of layers from engines' pools to slots; the share is aborted.",
            )?,
            staging_cancelled_pages: counter(
                "pool_staging_cancelled_pages_total",
                "Pages whose copy to slots was cancelled because the share was aborted.",
            )?,
            attach_epoch: gauge("attach_epoch", "Epoch of the latest engine attachment.")?,
            engines: gauge("engines", "Attached engines.")?,
            clients: gauge("object_clients", "Connected object clients.")?,
            objects: counters("objects_total", "Objects of clients, by event.", "event")?,
            object_requests_refused: counter(
                "object_requests_refused_total",
                "Requests of object clients that the node refused.",
            )?,
            subscribers: gauge("event_subscribers", "Connected subscribers of block events.")?,
            writers: gauge("peer_writers", "Nodes that may write to this node.")?,
            tail_bytes: gauge("tail_used_bytes", "Allocated bytes of the tail region.")?,
            expelled: counters(
                "forced_detaches_total",
                "Engines and object clients that the node detached because of a protocol violation or a missed stop timeout, by kind.",
                "kind",
            )?,
            hit_blocks: counter(
                "hit_blocks_total",
                "Requested blocks of all allocations that this node had cached, in any tier.",
            )?,
            asked_blocks: counter(
                "requested_blocks_total",
                "Prompt blocks of all allocations: prefill, decode and source.",
            )?,
            pushes: counters(
                "pushes_total",
                "Finished pushes to other nodes, by outcome.",
                "outcome",
            )?,
            pushed_bytes: counter("pushed_bytes_total", "Bytes of pages pushed to other nodes.")?,
            fetches: counters(
                "received_pushes_total",
                "Pushes to this node, by outcome.",
                "outcome",
            )?,
            corrupt_blocks: counter(
                "corrupt_blocks_total",
                "Blocks in memory whose checksum did not match.",
            )?,
            bad_tails: counter(
                "invalid_tails_total",
                "Received push tails that could not be decoded.",
            )?,
            writers_cut: counter(
                "peer_writers_cut_off_total",
                "Unreachable nodes that were cut off from writing to this node.",
            )?,
            messages_dropped: counter(
                "peer_messages_dropped_total",
                "Messages of peers dropped because the queue was full.",
            )?,
            messages_refused: counter(
                "peer_messages_refused_total",
                "Messages of peers refused because they concern a push of another node.",
            )?,
            draining: gauge(
                "draining",
                "1 while the node is draining or drained and accepts no new work.",
            )?,
            copies,
            contexts_short: gauge(
                "contexts_under_replicated",
                "Contexts of this node with fewer replicas than requested, at the latest check.",
            )?,
            ssd_usable: gauge(
                "ssd_usable",
                "1 while blocks can be written to and read from the SSD; 0 also without an SSD tier.",
            )?,
            ssd_rotten: counter(
                "ssd_corrupt_extents_total",
                "Extents of the SSD that were missing or failed their checksum, and were dropped.",
            )?,
            ssd_errors: counter("ssd_errors_total", "Failed SSD operations.")?,
            bucket_usable: gauge(
                "object_store_usable",
                "1 while the object store answers; 0 also without an object store.",
            )?,
            bucket_wrong: counter(
                "object_store_invalid_objects_total",
                "Objects that were missing or whose checksum did not match.",
            )?,
            bucket_errors: counter(
                "object_store_errors_total",
                "Failed requests to the object store.",
            )?,
            bucket_listed: gauges(
                "object_store_listed_objects",
                "Objects of the latest listing: blocks, blocks beyond the limit and foreign names.",
                "kind",
            )?,
            bucket_deletes: counters(
                "object_store_deletes_total",
                "Deletions of expired, replaced or removed objects, by outcome.",
                "outcome",
            )?,
            bucket_blocks: gauges(
                "object_store_blocks",
                "Blocks in the object store and blocks that wait for an operation, by state.",
                "state",
            )?,
            bucket_bytes: gauge("object_store_bytes", "Bytes of blocks in the object store.")?,
            ssd_blocks: gauge("ssd_blocks", "Blocks on the SSD.")?,
            ssd_context_blocks: gauge("ssd_context_blocks", "Blocks of contexts on the SSD.")?,
            ssd_demoting_blocks: gauge(
                "ssd_demoting_blocks",
                "Blocks that the node is writing to the SSD.",
            )?,
            ssd_overdue_promotions: gauge(
                "ssd_overdue_promotions",
                "Reads of blocks from the SSD that have taken longer than their timeout.",
            )?,
            ssd_bytes: gauge("ssd_bytes", "Bytes of blocks on the SSD.")?,
            ssd_context_bytes: gauge(
                "ssd_context_bytes",
                "Bytes of blocks of contexts on the SSD.",
            )?,
            ssd_live_bytes: gauge(
                "ssd_live_bytes",
                "Bytes of the SSD log that are still needed, with tombstones.",
            )?,
            ssd_tombstone_bytes: gauge(
                "ssd_tombstone_bytes",
                "Bytes of tombstones in the SSD log.",
            )?,
            ssd_segments: gauges("ssd_segments", "Segments of the SSD log, by state.", "state")?,
            ssd_operations: gauges(
                "ssd_operations",
                "SSD operations issued or queued, and appends that wait for a free segment, by state.",
                "state",
            )?,
            ssd_log: counters("ssd_log_events_total", "Events of the SSD log, by event.", "event")?,
            ssd_appended_bytes: counter(
                "ssd_appended_bytes_total",
                "Bytes appended to the SSD log.",
            )?,
            layer_lines_dropped: counter(
                "layer_log_lines_dropped_total",
                "Lines of the layer log dropped because the disk was too slow.",
            )?,
        })
    }

    /// Sets the gauges that mirror the core.
    pub(crate) fn set_counts(&self, counts: &Counts, now_ms: u64) {
        let states = [
            ("free", counts.free),
            ("allocated", counts.allocated),
            ("promoting", counts.rising),
            ("committed", counts.committed),
            ("releasing", counts.leaving),
            ("quarantined", counts.quarantined),
        ];
        set_all(&self.slots, &states);
        self.evictable_slots.set(counts.evictable.into());
        self.shares.set(counts.shares.into());
        self.shares_aborting.set(counts.aborting.into());
        let age_ms = counts.aborting_since_ms.map_or(0, |since| now_ms.saturating_sub(since));
        self.quarantine_oldest.set(age_ms as f64 / 1e3);
        self.pins.set(counts.pins.into());
        let busy = counts.pool_filling + counts.pool_dropping;
        let taken = counts.pool_computed + counts.pool_held + busy;
        let pages = [
            ("free", counts.pool_pages.saturating_sub(taken)),
            ("computed", counts.pool_computed),
            ("held", counts.pool_held),
            ("filling", counts.pool_filling),
            ("dropping", counts.pool_dropping),
        ];
        set_all(&self.pool_pages, &pages);
        self.pool_copies.set(counts.pool_copies.into());
        let blocks = [
            ("demoted", counts.pool_sunk_total),
            ("demote_failed", counts.pool_sinks_failed_total),
            ("dropped_not_demoted", counts.pool_dropped_unsunk_total),
            ("filled", counts.pool_filled_total),
            ("fill_failed", counts.pool_unfilled_total),
        ];
        raise_all(&self.pool_blocks, &blocks);
        let carries = [("in_flight", counts.carries), ("waiting", counts.carries_waiting)];
        set_all(&self.pool_carries, &carries);
        raise(&self.staged_layers, counts.layers_carried_total);
        raise(&self.staging_failures, counts.carries_failed_total);
        raise(&self.staging_cancelled_pages, counts.carries_given_up_total);
        let events = [
            ("committed", counts.committed_total),
            ("duplicate", counts.duplicates_total),
            ("evicted", counts.evicted_total),
            ("dropped", counts.dropped_total),
            ("demoted", counts.sunk_total),
            ("demote_failed", counts.sinks_failed_total),
            ("promoted", counts.risen_total),
            ("promote_failed", counts.rises_failed_total),
            ("promote_timeout", counts.rises_late_total),
            ("ssd_evicted", counts.ssd_evicted_total),
            ("ssd_lost", counts.ssd_lost_total),
            ("context_expired", counts.context_expired_total),
            ("uploaded", counts.uploaded_total),
            ("upload_failed", counts.uploads_failed_total),
            ("upload_refused", counts.uploads_refused_total),
            ("downloaded", counts.downloaded_total),
            ("download_failed", counts.downloads_failed_total),
            ("download_timeout", counts.downloads_late_total),
            ("object_store_lost", counts.bucket_lost_total),
            ("evicted_not_demoted", counts.evicted_unsunk_total),
            ("prefetched", counts.prefetched_total),
            ("prefetched_used", counts.prefetched_used_total),
            ("prefetched_unused", counts.prefetched_unused_total),
        ];
        self.ssd_blocks.set(counts.ssd_blocks.into());
        self.ssd_context_blocks.set(counts.context_blocks.into());
        self.ssd_demoting_blocks.set(counts.sinking.into());
        self.ssd_overdue_promotions.set(counts.rises_late.into());
        self.ssd_bytes.set(counts.ssd_bytes as i64);
        self.ssd_context_bytes.set(counts.context_bytes as i64);
        let bucket_blocks = [
            ("stored", counts.bucket_blocks),
            ("uploading", counts.uploading),
            ("waiting", counts.uploads_waiting),
            ("deleting", counts.discarding),
        ];
        set_all(&self.bucket_blocks, &bucket_blocks);
        self.bucket_bytes.set(counts.bucket_bytes as i64);
        raise_all(&self.core, &events);
        let shares = [
            ("aborted", counts.aborts_total),
            ("lease_expired", counts.leases_over_total),
            ("refused_no_capacity", counts.refused_no_space_total),
            ("tombstone_discarded", counts.tombstones_forgotten_total),
            ("finished_discarded", counts.finished_forgotten_total),
        ];
        raise_all(&self.share_events, &shares);
        let accepted = counts.hints_total.saturating_sub(counts.hints_refused_total);
        raise_all(
            &self.prefetch_hints,
            &[("accepted", accepted), ("refused", counts.hints_refused_total)],
        );
    }

    /// Sets the metrics of the SSD log. `before` are its last counts; a recovered log starts at 0.
    pub(crate) fn set_ssd_counts(&self, before: &LogCounts, counts: &LogCounts) {
        let unused = counts.segments_free + counts.segments_withheld;
        let used = counts.segments.saturating_sub(unused);
        let segments = [
            ("used", used),
            ("free", counts.segments_free),
            ("withheld", counts.segments_withheld),
        ];
        set_all(&self.ssd_segments, &segments);
        self.ssd_live_bytes.set(counts.live_bytes as i64);
        self.ssd_tombstone_bytes.set(counts.buried_bytes as i64);
        let operations = [("in_flight", counts.operations), ("waiting", counts.waiting)];
        set_all(&self.ssd_operations, &operations);
        let events = [
            ("appended", before.appended_total, counts.appended_total),
            ("moved", before.moved_total, counts.moved_total),
            ("segment_cleaned", before.cleaned_segments_total, counts.cleaned_segments_total),
            ("corrupt", before.rotten_total, counts.rotten_total),
            ("disk_error", before.disk_errors_total, counts.disk_errors_total),
        ];
        for (event, before, count) in events {
            self.ssd_log.with_label_values(&[event]).inc_by(count.saturating_sub(before));
        }
        let appended = counts.appended_bytes_total.saturating_sub(before.appended_bytes_total);
        self.ssd_appended_bytes.inc_by(appended);
    }
}

fn set_all<N: Copy + Into<u64>>(gauges: &IntGaugeVec, values: &[(&str, N)]) {
    for (label, value) in values {
        gauges.with_label_values(&[label]).set((*value).into() as i64);
    }
}

/// Raises each counter to a total that the core has counted.
fn raise_all(counters: &IntCounterVec, totals: &[(&str, u64)]) {
    for (label, total) in totals {
        raise(&counters.with_label_values(&[label]), *total);
    }
}

/// Raises a counter to a total that the core has counted.
fn raise(counter: &IntCounter, total: u64) {
    counter.inc_by(total.saturating_sub(counter.get()));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_log_has_counted_before_it_was_recovered_stays_counted() {
        let metrics = Metrics::new(&Registry::new()).expect("no name twice");
        let shown = || metrics.ssd_log.with_label_values(&["appended"]).get();
        let of = |appended_total| LogCounts { appended_total, ..LogCounts::default() };
        metrics.set_ssd_counts(&of(0), &of(10));
        metrics.set_ssd_counts(&of(10), &of(12));
        assert_eq!(shown(), 12);
        // A log that was recovered begins at nothing.
        metrics.set_ssd_counts(&of(0), &of(3));
        assert_eq!(shown(), 15);
    }
}
