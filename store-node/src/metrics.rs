//! The node's metrics. Gauges are set from the core's counts, counters where things happen.

use kvasir_blocks::Counts;
use kvasir_log::Counts as LogCounts;
use prometheus::{Gauge, IntCounter, IntCounterVec, IntGauge, IntGaugeVec, Opts, Registry};

/// See the module.
#[derive(Debug, Clone)]
pub(crate) struct Metrics {
    slots: IntGaugeVec,
    shares: IntGauge,
    shares_ending: IntGauge,
    quarantine_oldest: Gauge,
    pins: IntGauge,
    core: IntCounterVec,
    pool_pages: IntGaugeVec,
    pool_copies: IntGauge,
    pool_blocks: IntCounterVec,
    pool_carries: IntGaugeVec,
    pool_layers: IntCounterVec,
    pub attach_epoch: IntGauge,
    pub engines: IntGauge,
    pub subscribers: IntGauge,
    pub writers: IntGauge,
    pub tail_bytes: IntGauge,
    pub clients: IntGauge,
    pub objects: IntCounterVec,
    pub expelled: IntCounter,
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
    bucket: IntGaugeVec,
    ssd: IntGaugeVec,
    ssd_log: IntCounterVec,
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
            "kvasir_store_quarantine_oldest_seconds",
            "Age of the oldest quarantine; alarm when it grows beyond a minute.",
        )?;
        registry.register(Box::new(quarantine_oldest.clone()))?;
        let copies = IntCounterVec::new(
            Opts::new(
                "kvasir_store_copies_total",
                "Copies of chains to other nodes that ended, by their cause and outcome.",
            ),
            &["cause", "outcome"],
        )?;
        registry.register(Box::new(copies.clone()))?;
        Ok(Metrics {
            slots: gauges("slots", "Slots by state.", "state")?,
            shares: gauge("shares", "Shares of transactions that are open or ending.")?,
            shares_ending: gauge(
                "shares_ending",
                "Shares whose slots are quarantined until a writer or reader has stopped.",
            )?,
            quarantine_oldest,
            pins: gauge("pins", "Pins on committed blocks.")?,
            core: counters("core_events_total", "What the block core has counted.", "event")?,
            pool_pages: gauges("pool_pages", "Pages of engines' own pools by state.", "state")?,
            pool_copies: gauge("pool_copies", "Copies between engines' pools and slots.")?,
            pool_blocks: counters(
                "pool_blocks_total",
                "Blocks of engines' pools by what became of them.",
                "event",
            )?,
            pool_carries: gauges(
                "pool_carries",
                "Pages computed in engines' pools by the copy of their layers into slots that is under way or waits.",
                "state",
            )?,
            pool_layers: counters(
                "pool_layers_total",
                "Layers of pages computed in engines' pools that were copied into slots, copies that failed, and pages given up with their requests.",
                "event",
            )?,
            attach_epoch: gauge("attach_epoch", "Engines that have attached so far.")?,
            engines: gauge("engines", "Engines that are attached.")?,
            clients: gauge("clients", "Clients of objects.")?,
            objects: counters(
                "objects_total",
                "Objects of clients by what became of them.",
                "event",
            )?,
            subscribers: gauge("event_subscribers", "Subscribers of block events.")?,
            writers: gauge("writers", "Nodes that have regions here to write to.")?,
            tail_bytes: gauge("tail_bytes", "Bytes of the tail region that are taken.")?,
            expelled: counter(
                "engines_expelled_total",
                "Engines that were detached because they broke the protocol or did not stop.",
            )?,
            hit_blocks: counter("hit_blocks_total", "Blocks asked for that were held here.")?,
            asked_blocks: counter("asked_blocks_total", "Blocks asked for by allocations.")?,
            pushes: counters("pushes_total", "Pushes that ended, by outcome.", "outcome")?,
            pushed_bytes: counter("pushed_bytes_total", "Bytes of pages that landed elsewhere.")?,
            fetches: counters("arrivals_total", "Pushes to this node, by outcome.", "outcome")?,
            corrupt_blocks: counter(
                "corrupt_blocks_total",
                "Stored blocks that failed their checksum and were dropped.",
            )?,
            bad_tails: counter("bad_tails_total", "Tails that arrived and could not be read.")?,
            writers_cut: counter("writers_cut_off_total", "Lost nodes that were cut off.")?,
            messages_dropped: counter(
                "peer_messages_dropped_total",
                "Messages of peers dropped because too many waited.",
            )?,
            messages_refused: counter(
                "peer_messages_refused_total",
                "Messages of peers about pushes that are not theirs; they have no effect.",
            )?,
            draining: gauge("draining", "1 while the node is drained: it takes no new work.")?,
            copies,
            contexts_short: gauge(
                "contexts_short_of_copies",
                "Contexts that were on fewer nodes than they are to be when it was last looked.",
            )?,
            ssd_usable: gauge("ssd_usable", "1 while blocks can be written to the SSD and read.")?,
            ssd_rotten: counter(
                "ssd_rotten_total",
                "Extents of the SSD that were not as they were written, and were dropped.",
            )?,
            ssd_errors: counter("ssd_errors_total", "Operations of the SSD that failed.")?,
            bucket_usable: gauge(
                "object_store_usable",
                "1 while blocks can be sent to the object store and read from it.",
            )?,
            bucket_wrong: counter(
                "object_store_wrong_total",
                "Objects that were missing or not as they were written.",
            )?,
            bucket_errors: counter(
                "object_store_errors_total",
                "Requests to the object store that came to nothing.",
            )?,
            bucket_listed: gauges(
                "object_store_listed",
                "Objects that the last list has found: blocks, those left out, those that are none of ours.",
                "of",
            )?,
            bucket_deletes: counters(
                "object_store_deletes_total",
                "Objects whose time was over, or that were replaced or removed, by outcome.",
                "outcome",
            )?,
            bucket: gauges(
                "object_store",
                "What is known to be in the object store, and what is on its way there.",
                "of",
            )?,
            ssd: gauges(
                "ssd",
                "What is on the SSD and on its way: blocks, bytes, segments.",
                "of",
            )?,
            ssd_log: counters("ssd_log_total", "What the log of the SSD has counted.", "event")?,
            layer_lines_dropped: counter(
                "layer_log_lines_dropped_total",
                "Lines of the layer log dropped because the disk did not keep up.",
            )?,
        })
    }

    /// Sets the gauges that mirror the core.
    pub(crate) fn set_counts(&self, counts: &Counts, now_ms: u64) {
        let states = [
            ("free", counts.free),
            ("allocated", counts.allocated),
            ("rising", counts.rising),
            ("committed", counts.committed),
            ("evictable", counts.evictable),
            ("leaving", counts.leaving),
            ("quarantined", counts.quarantined),
        ];
        for (state, slots) in states {
            self.slots.with_label_values(&[state]).set(slots.into());
        }
        self.shares.set(counts.shares.into());
        self.shares_ending.set(counts.aborting.into());
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
        for (state, pages) in pages {
            self.pool_pages.with_label_values(&[state]).set(pages.into());
        }
        self.pool_copies.set(counts.pool_copies.into());
        let blocks = [
            ("sunk", counts.pool_sunk_total),
            ("sink_failed", counts.pool_sinks_failed_total),
            ("dropped_unsunk", counts.pool_dropped_unsunk_total),
            ("filled", counts.pool_filled_total),
            ("unfilled", counts.pool_unfilled_total),
        ];
        for (event, count) in blocks {
            let counter = self.pool_blocks.with_label_values(&[event]);
            counter.inc_by(count.saturating_sub(counter.get()));
        }
        let carries = [("under_way", counts.carries), ("waiting", counts.carries_waiting)];
        for (state, pages) in carries {
            self.pool_carries.with_label_values(&[state]).set(pages.into());
        }
        let layers = [
            ("carried", counts.layers_carried_total),
            ("failed", counts.carries_failed_total),
            ("given_up", counts.carries_given_up_total),
        ];
        for (event, count) in layers {
            let counter = self.pool_layers.with_label_values(&[event]);
            counter.inc_by(count.saturating_sub(counter.get()));
        }
        let events = [
            ("committed", counts.committed_total),
            ("duplicate", counts.duplicates_total),
            ("evicted", counts.evicted_total),
            ("dropped", counts.dropped_total),
            ("lease_over", counts.leases_over_total),
            ("abort", counts.aborts_total),
            ("refused_no_space", counts.refused_no_space_total),
            ("tombstone_forgotten", counts.tombstones_forgotten_total),
            ("finished_forgotten", counts.finished_forgotten_total),
            ("sunk", counts.sunk_total),
            ("sink_failed", counts.sinks_failed_total),
            ("risen", counts.risen_total),
            ("rise_failed", counts.rises_failed_total),
            ("rise_late", counts.rises_late_total),
            ("ssd_evicted", counts.ssd_evicted_total),
            ("ssd_lost", counts.ssd_lost_total),
            ("context_expired", counts.context_expired_total),
            ("uploaded", counts.uploaded_total),
            ("upload_failed", counts.uploads_failed_total),
            ("upload_refused", counts.uploads_refused_total),
            ("downloaded", counts.downloaded_total),
            ("download_failed", counts.downloads_failed_total),
            ("download_late", counts.downloads_late_total),
            ("object_store_lost", counts.bucket_lost_total),
            ("evicted_unsunk", counts.evicted_unsunk_total),
            ("hint", counts.hints_total),
            ("hint_refused", counts.hints_refused_total),
            ("prefetched", counts.prefetched_total),
            ("prefetched_used", counts.prefetched_used_total),
            ("prefetched_unused", counts.prefetched_unused_total),
        ];
        let tiers = [
            ("blocks", u64::from(counts.ssd_blocks)),
            ("bytes", counts.ssd_bytes),
            ("context_blocks", counts.context_blocks.into()),
            ("context_bytes", counts.context_bytes),
            ("sinking", counts.sinking.into()),
            ("rises_late", counts.rises_late.into()),
        ];
        let bucket = [
            ("blocks", u64::from(counts.bucket_blocks)),
            ("bytes", counts.bucket_bytes),
            ("uploading", counts.uploading.into()),
            ("waiting", counts.uploads_waiting.into()),
            ("removing", counts.discarding.into()),
        ];
        for (of, value) in bucket {
            self.bucket.with_label_values(&[of]).set(value as i64);
        }
        for (of, value) in tiers {
            self.ssd.with_label_values(&[of]).set(value as i64);
        }
        for (event, count) in events {
            let counter = self.core.with_label_values(&[event]);
            counter.inc_by(count.saturating_sub(counter.get()));
        }
    }

    /// Sets what mirrors the log of the SSD. `before` is what it last said; a log that was recovered begins at nothing.
    pub(crate) fn set_ssd_counts(&self, before: &LogCounts, counts: &LogCounts) {
        let gauges = [
            ("segments", counts.segments.into()),
            ("segments_free", counts.segments_free.into()),
            ("segments_withheld", counts.segments_withheld.into()),
            ("live_bytes", counts.live_bytes),
            ("buried_bytes", counts.buried_bytes),
            ("operations", counts.operations),
            ("waiting", counts.waiting),
        ];
        for (of, value) in gauges {
            self.ssd.with_label_values(&[of]).set(value as i64);
        }
        let events = [
            ("appended", before.appended_total, counts.appended_total),
            ("appended_bytes", before.appended_bytes_total, counts.appended_bytes_total),
            ("moved", before.moved_total, counts.moved_total),
            ("cleaned_segments", before.cleaned_segments_total, counts.cleaned_segments_total),
            ("rotten", before.rotten_total, counts.rotten_total),
            ("disk_errors", before.disk_errors_total, counts.disk_errors_total),
        ];
        for (event, before, count) in events {
            self.ssd_log.with_label_values(&[event]).inc_by(count.saturating_sub(before));
        }
    }
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
