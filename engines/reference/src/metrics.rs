//! What the engine counts.

#![forbid(unsafe_code)]

use prometheus::{Histogram, HistogramOpts, IntCounter, IntCounterVec, IntGauge, Opts, Registry};

#[derive(Debug, Clone)]
pub(crate) struct Metrics {
    pub computed_prompt_tokens: IntCounter,
    pub prompt_tokens_cached: IntCounter,
    pub prompt_tokens_spliced: IntCounter,
    pub generated_tokens: IntCounter,
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
        let step_seconds =
            HistogramOpts::new("kvasir_engine_step_duration_seconds", "Duration of a step.")
                .buckets(
                    prometheus::exponential_buckets(0.000_25, 2.0, 16).expect("valid buckets"),
                );
        Metrics {
            computed_prompt_tokens: counter(
                "prompt_tokens_computed_total",
                "Prompt tokens that the engine computed.",
            ),
            prompt_tokens_cached: counter(
                "prompt_tokens_cached_total",
                "Cached prompt tokens of requests in the phases prefill and full.",
            ),
            prompt_tokens_spliced: counter(
                "prompt_tokens_chunk_reused_total",
                "Prompt tokens copied from reusable chunks at another position.",
            ),
            generated_tokens: counter("generated_tokens_total", "Generated tokens."),
            steps: counter("steps_total", "Computed steps."),
            step_seconds: registered(registry, Histogram::with_opts(step_seconds)),
            running: gauge("running_requests", "Sequences that run in steps."),
            waiting: gauge(
                "waiting_requests",
                "Requests that wait for slots, cached blocks or a free place.",
            ),
            attach_epoch: gauge(
                "attach_epoch",
                "Epoch of the attachment to the store node; 0 while detached.",
            ),
            attaches: counter("attaches_total", "Attachments to the store node."),
            sequences_ended: counters(
                "requests_finished_total",
                "Finished requests, by reason.",
                "reason",
            ),
            requests_refused: counters(
                "requests_refused_total",
                "Refused requests, by reason.",
                "reason",
            ),
            recalls: counter(
                "routed_recomputes_total",
                "Recomputations of blocks by sequences whose routed attention failed.",
            ),
            layer_log_dropped: counter(
                "layer_log_lines_dropped_total",
                "Lines of the layer log dropped because the disk was too slow.",
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
