//! The cluster's metrics, beside what they measure.

use std::time::Duration;

use kvasir_placement::{OverloadReason, Placement, Refusal};
use prometheus::{
    Histogram, HistogramOpts, IntCounter, IntCounterVec, IntGauge, Opts, Registry,
    exponential_buckets,
};

pub(super) struct Metrics {
    pub(super) nodes_up: IntGauge,
    pub(super) nodes_warm: IntGauge,
    pub(super) instances: IntGauge,
    pub(super) instances_failed: IntGauge,
    pub(super) index_entries: IntGauge,
    pub(super) index_bytes: IntGauge,
    pub(super) index_full: IntCounter,
    pub(super) changes: IntCounter,
    pub(super) snapshots: IntCounter,
    pub(super) losses: IntCounterVec,
    placements: IntCounterVec,
    /// By `way`, also `none`.
    prefixes: IntCounterVec,
    probes: IntCounter,
    refusals: IntCounterVec,
    ttft_predicted: Histogram,
    ttft_real: Histogram,
    ttft_ratio: Histogram,
}

impl Metrics {
    pub(super) fn new(registry: &Registry) -> prometheus::Result<Self> {
        let seconds = exponential_buckets(0.001, 2.0, 18)?;
        let ratio = exponential_buckets(1.0 / 16.0, 2f64.sqrt(), 17)?;
        let make = Maker { registry };
        Ok(Metrics {
            nodes_up: make.gauge("nodes_up", "Store nodes whose events are followed")?,
            nodes_warm: make.gauge("nodes_warm", "Store nodes whose snapshot is taken in")?,
            instances: make.gauge("instances", "Attached engines")?,
            instances_failed: make
                .gauge("instances_failed", "Engines that have failed since they last served")?,
            index_entries: make.gauge("index_entries", "(node, block) pairs in the index")?,
            index_bytes: make.gauge("index_bytes", "Memory of the index")?,
            index_full: make
                .counter("index_full_total", "Blocks left out of the index because it is full")?,
            changes: make.counter("index_changes_total", "Block changes applied")?,
            snapshots: make.counter("index_snapshots_total", "Whole snapshots taken in")?,
            losses: make.counters("node_losses_total", "Ends of a node's events", "reason")?,
            placements: make.counters("placements_total", "Requests placed", "kind")?,
            prefixes: make.counters(
                "prefixes_total",
                "Prefixes that could have stayed on another node, by what was cheapest",
                "way",
            )?,
            probes: make.counter(
                "probes_total",
                "Requests placed beyond an objective because only estimates forbade it",
            )?,
            refusals: make.counters("refusals_total", "Requests refused", "reason")?,
            ttft_predicted: make.histogram(
                "ttft_predicted_seconds",
                "Time to first token as predicted when the request was placed",
                seconds.clone(),
            )?,
            ttft_real: make.histogram(
                "ttft_real_seconds",
                "Time from placing a request to its first token",
                seconds,
            )?,
            ttft_ratio: make.histogram(
                "ttft_real_over_predicted_ratio",
                "Real over predicted time to first token, of one request",
                ratio,
            )?,
        })
    }

    pub(super) fn placed(&self, placement: &Placement) {
        if let Some(asked) = &placement.attended {
            let way = asked.decision.chosen.map(|way| way.to_string());
            self.prefixes.with_label_values(&[way.as_deref().unwrap_or("none")]).inc();
        }
        let kind = match (placement.is_whole(), placement.fetch.is_some()) {
            (true, false) if placement.route.is_some() => "whole_route",
            (true, false) => "whole",
            (true, true) => "whole_fetch",
            (false, false) => "split",
            (false, true) => "split_fetch",
        };
        self.placements.with_label_values(&[kind]).inc();
        self.probes.inc_by(placement.probe.into());
    }

    pub(super) fn refused(&self, refusal: &Refusal) {
        let reason = match refusal {
            Refusal::Overloaded { reason: OverloadReason::Ttft, .. } => "ttft",
            Refusal::Overloaded { reason: OverloadReason::Tbt, .. } => "tbt",
            Refusal::Overloaded { reason: OverloadReason::NoRoom, .. } => "no_room",
            Refusal::NoInstance { .. } => "no_instance",
            Refusal::UnknownModel { .. } => "unknown_model",
            Refusal::TooLarge { .. } => "too_large",
        };
        self.refusals.with_label_values(&[reason]).inc();
    }

    pub(super) fn first_token(&self, predicted_us: u64, real: Duration) {
        let predicted = Duration::from_micros(predicted_us.max(1)).as_secs_f64();
        self.ttft_predicted.observe(predicted);
        self.ttft_real.observe(real.as_secs_f64());
        self.ttft_ratio.observe(real.as_secs_f64() / predicted);
    }
}

/// Makes and registers in one go.
struct Maker<'a> {
    registry: &'a Registry,
}

impl Maker<'_> {
    fn gauge(&self, name: &str, help: &str) -> prometheus::Result<IntGauge> {
        let gauge = IntGauge::new(full(name), help)?;
        self.registry.register(Box::new(gauge.clone()))?;
        Ok(gauge)
    }

    fn counter(&self, name: &str, help: &str) -> prometheus::Result<IntCounter> {
        let counter = IntCounter::new(full(name), help)?;
        self.registry.register(Box::new(counter.clone()))?;
        Ok(counter)
    }

    fn counters(&self, name: &str, help: &str, label: &str) -> prometheus::Result<IntCounterVec> {
        let counters = IntCounterVec::new(Opts::new(full(name), help), &[label])?;
        self.registry.register(Box::new(counters.clone()))?;
        Ok(counters)
    }

    fn histogram(
        &self,
        name: &str,
        help: &str,
        buckets: Vec<f64>,
    ) -> prometheus::Result<Histogram> {
        let histogram =
            Histogram::with_opts(HistogramOpts::new(full(name), help).buckets(buckets))?;
        self.registry.register(Box::new(histogram.clone()))?;
        Ok(histogram)
    }
}

fn full(name: &str) -> String {
    format!("kvasir_conductor_{name}")
}
