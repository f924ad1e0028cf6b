//! The cluster's metrics, beside what they measure.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use kvasir_placement::calibration::{LikelyError, TimeError};
use kvasir_placement::{Placement, Refusal};
use prometheus::{
    Gauge, GaugeVec, Histogram, HistogramOpts, IntCounter, IntCounterVec, IntGauge, Opts, Registry,
    exponential_buckets,
};

use super::balance::BalanceOverview;
use super::booking::Predicted;

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
    /// By what came of them.
    pub(super) digests: IntCounterVec,
    pub(super) losses: IntCounterVec,
    placements: IntCounterVec,
    /// By `way`, also `none`.
    prefixes: IntCounterVec,
    /// By what became of them.
    chunks: IntCounterVec,
    probes: IntCounter,
    /// By what became of them.
    pub(super) hints: IntCounterVec,
    refusals: IntCounterVec,
    ttft_predicted: Histogram,
    ttft_real: Histogram,
    ttft_ratio: Histogram,
    prefill_ratio: Histogram,
    tbt_predicted: Histogram,
    tbt_real: Histogram,
    tbt_ratio: Histogram,
    errors: Mutex<Errors>,
    /// By `of`, the thing predicted.
    prediction_error: GaugeVec,
    prediction_bias: GaugeVec,
    tbt_likely_predicted: Gauge,
    tbt_likely_measured: Gauge,
    tbt_likely_error: Gauge,
    balance_factor: GaugeVec,
    /// By `model`, then `role` or `side`.
    balance_instances: GaugeVec,
    balance_wished: GaugeVec,
    balance_load: GaugeVec,
    /// By what came of them.
    pub(super) role_changes: IntCounterVec,
}

/// How true predictions were lately.
#[derive(Debug, Default)]
struct Errors {
    ttft: TimeError,
    queue: TimeError,
    fetch: TimeError,
    prefill: TimeError,
    tbt: TimeError,
    likely: LikelyError,
}

impl Metrics {
    pub(super) fn new(registry: &Registry) -> prometheus::Result<Self> {
        let seconds = exponential_buckets(0.001, 2.0, 18)?;
        let ratio = exponential_buckets(1.0 / 16.0, 2f64.sqrt(), 17)?;
        let tenths = exponential_buckets(0.001, 2f64.sqrt(), 28)?;
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
            digests: make.counters(
                "index_digests_total",
                "Comparisons of what the index says of a node with what the node says of itself",
                "outcome",
            )?,
            losses: make.counters("node_losses_total", "Ends of a node's events", "reason")?,
            placements: make.counters("placements_total", "Requests placed", "kind")?,
            prefixes: make.counters(
                "prefixes_total",
                "Prefixes that could have stayed on another node, by what was cheapest",
                "way",
            )?,
            chunks: make.counters(
                "chunks_total",
                "Chunks of prompts, by what was to become of them: here, fetch, route or recompute",
                "way",
            )?,
            probes: make.counter(
                "probes_total",
                "Requests placed beyond an objective because only estimates forbade it",
            )?,
            hints: make.counters(
                "hints_total",
                "Hints to nodes to read from their SSD ahead of a request",
                "outcome",
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
                ratio.clone(),
            )?,
            prefill_ratio: make.histogram(
                "prefill_real_over_predicted_ratio",
                "What a prefill took by its engine's word over what was predicted for its length",
                ratio.clone(),
            )?,
            tbt_predicted: make.histogram(
                "tbt_predicted_seconds",
                "Time between tokens as predicted when the request was placed, of finished answers",
                tenths.clone(),
            )?,
            tbt_real: make.histogram(
                "tbt_real_seconds",
                "Time between tokens of a finished answer: the mean of the longest tenth of its intervals",
                tenths,
            )?,
            tbt_ratio: make.histogram(
                "tbt_real_over_predicted_ratio",
                "Real over predicted time between tokens, of one finished answer",
                ratio,
            )?,
            errors: Mutex::default(),
            prediction_error: make.gauges(
                "prediction_error_ratio",
                "Of the latest predictions, the mean of what they were off, over the mean of what came",
                "of",
            )?,
            prediction_bias: make.gauges(
                "prediction_bias_ratio",
                "The same with its sign: above 0 more is predicted than comes",
                "of",
            )?,
            tbt_likely_predicted: make.ratio(
                "tbt_likely_predicted_ratio",
                "How likely the latest answers were to meet their objective between tokens, as predicted",
            )?,
            tbt_likely_measured: make.ratio(
                "tbt_likely_measured_ratio",
                "The share of them that met it",
            )?,
            tbt_likely_error: make.ratio(
                "tbt_likely_error_ratio",
                "Calibration error: in groups about equally likely, the mean of what a group's share was off",
            )?,
            balance_factor: make.gauges(
                "balance_factor_ratio",
                "By what the ratio of decoding to prefilling engines of a model is to move",
                "model",
            )?,
            balance_instances: make.gauges_by(
                "balance_instances",
                "Engines of a model by the role that they play",
                &["model", "role"],
            )?,
            balance_wished: make.gauges_by(
                "balance_instances_wished",
                "How many there should be, for autoscalers",
                &["model", "role"],
            )?,
            balance_load: make.gauges_by(
                "balance_load_ratio",
                "What a side has to do, of what it can do within the objectives",
                &["model", "side"],
            )?,
            role_changes: make.counters(
                "role_changes_total",
                "Engines that were told to play another role",
                "outcome",
            )?,
        })
    }

    pub(super) fn balanced(&self, wish: &BalanceOverview) {
        let model = &*wish.model;
        self.balance_factor.with_label_values(&[model]).set(wish.factor);
        let set = |gauges: &GaugeVec, label, value| {
            gauges.with_label_values(&[model, label]).set(value);
        };
        let roles = [
            ("prefill", wish.prefills, wish.prefills_wished),
            ("decode", wish.decodes, wish.decodes_wished),
            ("both", wish.both, wish.both_wished),
        ];
        for (role, count, wished) in roles {
            set(&self.balance_instances, role, count as f64);
            set(&self.balance_wished, role, wished as f64);
        }
        set(&self.balance_load, "prefill", wish.prefill_load);
        set(&self.balance_load, "decode", wish.decode_load);
    }

    pub(super) fn placed(&self, placement: &Placement) {
        if let Some(asked) = &placement.attended {
            let way = asked.decision.chosen.map(|way| way.to_string());
            self.prefixes.with_label_values(&[way.as_deref().unwrap_or("none")]).inc();
        }
        for chunk in &placement.chunks {
            self.chunks.with_label_values(&[chunk.way()]).inc();
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
            Refusal::Overloaded { reason, .. } => reason.label(),
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
        let real_us = u64::try_from(real.as_micros()).unwrap_or(u64::MAX);
        self.came("ttft", predicted_us, real_us, |errors| &mut errors.ttft);
    }

    /// How long a prefill waited by its engine's word.
    pub(super) fn queued(&self, predicted_us: u64, measured_us: u64) {
        self.came("queue", predicted_us, measured_us, |errors| &mut errors.queue);
    }

    /// How long the copy of a prefix took.
    pub(super) fn fetched(&self, predicted_us: u64, measured_us: u64) {
        self.came("fetch", predicted_us, measured_us, |errors| &mut errors.fetch);
    }

    /// What a prefill took by its engine's word.
    pub(super) fn prefilled(&self, predicted_us: u64, measured_us: u64) {
        self.prefill_ratio.observe(measured_us as f64 / predicted_us.max(1) as f64);
        self.came("prefill", predicted_us, measured_us, |errors| &mut errors.prefill);
    }

    /// What an answer saw between its tokens.
    pub(super) fn paced(&self, predicted: &Predicted, tbt_us: u64) {
        let seconds = |us: u64| Duration::from_micros(us.max(1)).as_secs_f64();
        self.tbt_predicted.observe(seconds(predicted.tbt_us));
        self.tbt_real.observe(seconds(tbt_us));
        self.tbt_ratio.observe(seconds(tbt_us) / seconds(predicted.tbt_us));
        self.came("tbt", predicted.tbt_us, tbt_us, |errors| &mut errors.tbt);
        if let Some(likely) = predicted.likely {
            let mut errors = self.errors.lock().unwrap_or_else(PoisonError::into_inner);
            errors.likely.came(likely, tbt_us <= predicted.tbt_objective_us);
            let set = |gauge: &Gauge, value: Option<f64>| gauge.set(value.unwrap_or(0.0));
            set(&self.tbt_likely_predicted, errors.likely.predicted());
            set(&self.tbt_likely_measured, errors.likely.measured());
            set(&self.tbt_likely_error, errors.likely.error());
        }
    }

    fn came(
        &self,
        of: &str,
        predicted_us: u64,
        real_us: u64,
        which: impl FnOnce(&mut Errors) -> &mut TimeError,
    ) {
        let mut errors = self.errors.lock().unwrap_or_else(PoisonError::into_inner);
        let error = which(&mut errors);
        error.came(predicted_us, real_us);
        self.prediction_error.with_label_values(&[of]).set(error.error().unwrap_or(0.0));
        self.prediction_bias.with_label_values(&[of]).set(error.bias().unwrap_or(0.0));
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

    fn ratio(&self, name: &str, help: &str) -> prometheus::Result<Gauge> {
        let gauge = Gauge::new(full(name), help)?;
        self.registry.register(Box::new(gauge.clone()))?;
        Ok(gauge)
    }

    fn gauges(&self, name: &str, help: &str, label: &str) -> prometheus::Result<GaugeVec> {
        self.gauges_by(name, help, &[label])
    }

    fn gauges_by(&self, name: &str, help: &str, labels: &[&str]) -> prometheus::Result<GaugeVec> {
        let gauges = GaugeVec::new(Opts::new(full(name), help), labels)?;
        self.registry.register(Box::new(gauges.clone()))?;
        Ok(gauges)
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
