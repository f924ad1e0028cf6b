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
use super::state::State;

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
    /// By `quantity`, the predicted quantity.
    prediction_error: GaugeVec,
    prediction_bias: GaugeVec,
    tbt_likely_predicted: Gauge,
    tbt_likely_measured: Gauge,
    tbt_likely_error: Gauge,
    balance_factor: GaugeVec,
    /// By `model`, then `role` or `side`.
    balance_instances: GaugeVec,
    balance_recommended: GaugeVec,
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
            nodes_up: make.gauge("nodes_connected", "Store nodes whose event stream is connected.")?,
            nodes_warm: make.gauge("nodes_synced", "Store nodes whose snapshot is in the index.")?,
            instances: make.gauge("instances", "Attached engines.")?,
            instances_failed: make
                .gauge("instances_unhealthy", "Attached engines that failed and have not served a request since.")?,
            index_entries: make.gauge("index_entries", "Pairs of node and block in the index.")?,
            index_bytes: make.gauge("index_bytes", "Memory of the index in bytes.")?,
            index_full: make
                .counter("index_dropped_blocks_total", "Blocks dropped because the index is full.")?,
            changes: make.counter("index_changes_total", "Block changes applied to the index.")?,
            snapshots: make.counter("index_snapshots_total", "Complete snapshots loaded into the index.")?,
            digests: make.counters(
                "index_digests_total",
                "Comparisons of the index with the digest that a node reports, by outcome.",
                "outcome",
            )?,
            losses: make.counters("node_disconnects_total", "Ends of event streams and failed connection attempts of store nodes, by reason.", "reason")?,
            placements: make.counters("placements_total", "Placed attempts at requests, by kind.", "kind")?,
            prefixes: make.counters(
                "prefix_decisions_total",
                "Decisions about prefixes on other nodes, by the chosen action. Only with `routes.enabled`.",
                "action",
            )?,
            chunks: make.counters(
                "chunk_decisions_total",
                "Decisions about reusable chunks, by the chosen action.",
                "action",
            )?,
            probes: make.counter(
                "probe_placements_total",
                "Requests placed although only unmeasured estimates predict that they miss an objective.",
            )?,
            hints: make.counters(
                "prefetch_hints_total",
                "Hints to store nodes to promote blocks ahead of a request, by outcome.",
                "outcome",
            )?,
            refusals: make.counters("refusals_total", "Requests that the placement refused, by reason.", "reason")?,
            ttft_predicted: make.histogram(
                "ttft_predicted_seconds",
                "Predicted time to first token of requests that got a first token.",
                seconds.clone(),
            )?,
            ttft_real: make.histogram(
                "ttft_measured_seconds",
                "Measured time from the placement of a request to its first token.",
                seconds,
            )?,
            ttft_ratio: make.histogram(
                "ttft_measured_to_predicted_ratio",
                "Measured divided by predicted time to first token of a request.",
                ratio.clone(),
            )?,
            prefill_ratio: make.histogram(
                "prefill_measured_to_predicted_ratio",
                "Prefill time that the engine reports, divided by the predicted time for its length.",
                ratio.clone(),
            )?,
            tbt_predicted: make.histogram(
                "tbt_predicted_seconds",
                "Predicted time between tokens of finished answers.",
                tenths.clone(),
            )?,
            tbt_real: make.histogram(
                "tbt_measured_seconds",
                "Measured time between tokens of a finished answer: the mean of its longest tenth of intervals.",
                tenths,
            )?,
            tbt_ratio: make.histogram(
                "tbt_measured_to_predicted_ratio",
                "Measured divided by predicted time between tokens of a finished answer.",
                ratio,
            )?,
            errors: Mutex::default(),
            prediction_error: make.gauges(
                "prediction_error_ratio",
                "Mean absolute error of the latest predictions, divided by the mean of the measured values.",
                "quantity",
            )?,
            prediction_bias: make.gauges(
                "prediction_bias_ratio",
                "Mean signed error of the latest predictions over the mean measurement; above 0 they are too high.",
                "quantity",
            )?,
            tbt_likely_predicted: make.ratio(
                "tbt_attainment_predicted_ratio",
                "Predicted share of the latest answers that meet their TBT objective.",
            )?,
            tbt_likely_measured: make.ratio(
                "tbt_attainment_measured_ratio",
                "Measured share of the latest answers that met their TBT objective.",
            )?,
            tbt_likely_error: make.ratio(
                "tbt_attainment_calibration_error_ratio",
                "Mean error of the predicted TBT attainment over ten groups of similar predictions.",
            )?,
            balance_factor: make.gauges(
                "balance_adjustment_ratio",
                "Factor by which the ratio of decode to prefill engines of a model should change.",
                "model",
            )?,
            balance_instances: make.gauges_by(
                "balance_instances",
                "Engines of a model, by current role.",
                &["model", "role"],
            )?,
            balance_recommended: make.gauges_by(
                "balance_instances_recommended",
                "Recommended number of engines of a model, by role, for autoscalers.",
                &["model", "role"],
            )?,
            balance_load: make.gauges_by(
                "balance_load_ratio",
                "Load of a role divided by its capacity within the objectives.",
                &["model", "role"],
            )?,
            role_changes: make.counters(
                "role_changes_total",
                "Role changes that the balancer requested, by outcome.",
                "outcome",
            )?,
        })
    }

    pub(super) fn count_instances(&self, state: &State) {
        self.instances.set(state.view.instances().len() as i64);
        self.instances_failed.set(state.count_failed() as i64);
    }

    /// Replaces the values of all models, so that none remains of a model that has left.
    pub(super) fn balanced(&self, plans: &[BalanceOverview]) {
        let gauges = [
            &self.balance_factor,
            &self.balance_instances,
            &self.balance_recommended,
            &self.balance_load,
        ];
        gauges.into_iter().for_each(GaugeVec::reset);
        plans.iter().for_each(|plan| self.balanced_model(plan));
    }

    fn balanced_model(&self, wish: &BalanceOverview) {
        let model = &*wish.model;
        self.balance_factor.with_label_values(&[model]).set(wish.adjustment_ratio);
        let set = |gauges: &GaugeVec, label, value| {
            gauges.with_label_values(&[model, label]).set(value);
        };
        let roles = [
            ("prefill", wish.prefill_instances, wish.prefill_instances_recommended),
            ("decode", wish.decode_instances, wish.decode_instances_recommended),
            ("both", wish.both_instances, wish.both_instances_recommended),
        ];
        for (role, count, wished) in roles {
            set(&self.balance_instances, role, count as f64);
            set(&self.balance_recommended, role, wished as f64);
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
            (true, false) if placement.route.is_some() => "full_route",
            (true, false) => "full",
            (true, true) => "full_fetch",
            (false, false) => "split",
            (false, true) => "split_fetch",
        };
        self.placements.with_label_values(&[kind]).inc();
        self.probes.inc_by(placement.probe.into());
    }

    pub(super) fn refused(&self, refusal: &Refusal) {
        self.refusals.with_label_values(&[refusal.label()]).inc();
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

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(model: &str) -> BalanceOverview {
        BalanceOverview {
            model: model.to_owned(),
            prefill_instances: 1,
            decode_instances: 1,
            both_instances: 0,
            prefill_instances_recommended: 2,
            decode_instances_recommended: 1,
            both_instances_recommended: 0,
            adjustment_ratio: 0.5,
            prefill_load: 1.5,
            decode_load: 0.5,
        }
    }

    #[test]
    fn a_model_that_has_left_has_no_balance_values() {
        let registry = Registry::new();
        let metrics = Metrics::new(&registry).expect("no name twice");
        let series_of = |model: &str| {
            let families = registry.gather();
            let series = families.iter().flat_map(|family| family.get_metric());
            let labels = series.flat_map(|one| one.get_label());
            labels.filter(|label| label.value() == model).count()
        };
        metrics.balanced(&[plan("left"), plan("stays")]);
        assert_eq!(series_of("left"), series_of("stays"));
        assert!(series_of("left") > 0);
        metrics.balanced(&[plan("stays")]);
        assert_eq!(series_of("left"), 0);
        assert!(series_of("stays") > 0);
    }
}
