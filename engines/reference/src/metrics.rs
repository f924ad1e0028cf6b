//! What the engine counts.

#![forbid(unsafe_code)]

use prometheus::{Histogram, HistogramOpts, IntCounter, IntCounterVec, IntGauge, Opts, Registry};

#[derive(Debug, Clone)]
pub(crate) struct Metrics {
    pub prompt_tokens_computed: IntCounter,
    pub prompt_tokens_cached: IntCounter,
    pub prompt_tokens_spliced: IntCounter,
    pub answer_tokens: IntCounter,
    pub steps: IntCounter,
    pub step_seconds: Histogram,
    pub running: IntGauge,
    pub waiting: IntGauge,
    pub attach_epoch: IntGauge,
    pub attaches: IntCounter,
    /// By `end`: finished, cancelled, stopped, no_room, failed.
    pub sequences_ended: IntCounterVec,
    /// By `reason`: invalid, full, unattached.
    pub requests_refused: IntCounterVec,
    pub layer_log_dropped: IntCounter,
    pub recalls: IntCounter,
}

impl Metrics {
    /// Panics when the registry has them already: one engine, one registry.
    pub(crate) fn new(registry: &Registry) -> Self {
        let counter = |name: &str, help: &str| {
            registered(registry, IntCounter::new(format!("kvasir_engine_{name}"), help))
        };
        let gauge = |name: &str, help: &str| {
            registered(registry, IntGauge::new(format!("kvasir_engine_{name}"), help))
        };
        let counters = |name: &str, help: &str, label: &str| {
            let opts = Opts::new(format!("kvasir_engine_{name}"), help);
            registered(registry, IntCounterVec::new(opts, &[label]))
        };
        let step_seconds = HistogramOpts::new("kvasir_engine_step_seconds", "Duration of a step")
            .buckets(prometheus::exponential_buckets(0.000_25, 2.0, 16).expect("valid buckets"));
        Metrics {
            prompt_tokens_computed: counter(
                "prompt_tokens_computed_total",
                "Prompt tokens whose rows were computed here",
            ),
            prompt_tokens_cached: counter(
                "prompt_tokens_cached_total",
                "Prompt tokens of prefill and whole legs whose rows were there already",
            ),
            prompt_tokens_spliced: counter(
                "prompt_tokens_spliced_total",
                "Prompt tokens of chunks whose rows were copied from another offset",
            ),
            answer_tokens: counter("answer_tokens_total", "Tokens given to callers"),
            steps: counter("steps_total", "Steps computed"),
            step_seconds: registered(registry, Histogram::with_opts(step_seconds)),
            running: gauge("running", "Sequences that take part in steps"),
            waiting: gauge("waiting", "Requests that wait for slots, rows or a seat"),
            attach_epoch: gauge("attach_epoch", "Epoch of the attachment; 0 while there is none"),
            attaches: counter("attaches_total", "Times the engine attached to its node"),
            sequences_ended: counters("sequences_ended_total", "Requests that ended", "end"),
            requests_refused: counters("requests_refused_total", "Requests refused", "reason"),
            recalls: counter(
                "recalls_total",
                "Times that a sequence lost blocks that were attended elsewhere, and computed them",
            ),
            layer_log_dropped: counter(
                "layer_log_dropped_total",
                "Lines of the layer log that were dropped because its writer was behind",
            ),
        }
    }
}

fn registered<C: prometheus::core::Collector + Clone + 'static>(
    registry: &Registry,
    collector: prometheus::Result<C>,
) -> C {
    let collector = collector.expect("names and labels are valid");
    registry.register(Box::new(collector.clone())).expect("names are distinct");
    collector
}
