//! What the front door counts. The registry is made by `run` and shared with the cluster's own
//! metrics; there is no global one.

use kvasir_placement::waiting::Priority;
use prometheus::{
    Encoder, Histogram, HistogramOpts, HistogramVec, IntCounter, IntCounterVec, IntGauge,
    IntGaugeVec, Opts, Registry, TextEncoder,
};

use crate::proxy::ProxyMetrics;
use crate::reload;

/// Counters of the HTTP side and of the orchestration.
#[derive(Debug)]
pub(crate) struct Metrics {
    registry: Registry,
    /// HTTP requests by path and status.
    pub requests: IntCounterVec,
    pub connections: IntGauge,
    /// Of `watch_listen`.
    pub watchers: IntGauge,
    pub slow_readers_cut: IntCounter,
    /// TLS handshakes that failed, by why.
    pub handshakes_failed: IntCounterVec,
    /// Requests without a valid API key.
    pub unauthenticated: IntCounter,
    /// Requests of tenants that had used up a quota.
    pub over_quota: IntCounterVec,
    /// Requests that wait for their turn, by priority.
    pub waiting: IntGaugeVec,
    /// Requests that waited, if only for a moment, by how that ended.
    pub waited: IntCounterVec,
    /// For how long, by priority.
    pub waited_seconds: HistogramVec,
    /// Files that were read anew, by what they are and how that went.
    pub reloads: IntCounterVec,
    /// Requests to back ends.
    pub proxied: ProxyMetrics,
    /// Of request bodies that are being read or worked on; set when it is read.
    pub bodies_bytes: IntGauge,
    /// Choices (one answer to one prompt) that are worked on.
    pub choices_in_flight: IntGauge,
    /// Choices by how they ended.
    pub choices: IntCounterVec,
    pub ttft: Histogram,
    pub time_between_tokens: Histogram,
    pub choice_seconds: Histogram,
    /// `prompt`, `cached` and `answer`.
    pub tokens: IntCounterVec,
    /// Attempts after the first, by the phase in which the one before failed.
    pub retries: IntCounterVec,
    /// Requests that waited for another one that brought the beginning of their prompt, by how that ended.
    pub awaited: IntCounterVec,
    /// Transactions that were given up, by phase.
    pub abandoned: IntCounterVec,
    /// TxAbort calls by result.
    pub aborts: IntCounterVec,
    pub aborts_in_flight: IntGauge,
    /// Shares that a node did not know at renewal.
    pub renewals_unknown: IntCounter,
    /// Shares that could not be renewed for as long as a lease.
    pub renewals_lost: IntCounter,
    /// Contexts by what was done to them.
    pub contexts: IntCounterVec,
    /// What was not done to contexts, by why.
    pub contexts_refused: IntCounterVec,
}

impl Metrics {
    pub(crate) fn new(registry: Registry) -> Result<Metrics, prometheus::Error> {
        let counter = |name, help| registered(&registry, IntCounter::new(name, help)?);
        let counters = |name, help, labels: &[&str]| {
            registered(&registry, IntCounterVec::new(Opts::new(name, help), labels)?)
        };
        let gauge = |name, help| registered(&registry, IntGauge::new(name, help)?);
        let seconds = |name, help| {
            let options = HistogramOpts::new(name, help).buckets(buckets());
            registered(&registry, Histogram::with_opts(options)?)
        };
        Ok(Metrics {
            requests: counters(
                "kvasir_conductor_requests_total",
                "HTTP requests by path and status.",
                &["path", "status"],
            )?,
            connections: gauge("kvasir_conductor_connections", "Open HTTP connections.")?,
            watchers: gauge(
                "kvasir_conductor_watch_connections",
                "Open HTTP connections of those who watch the conductor.",
            )?,
            slow_readers_cut: counter(
                "kvasir_conductor_slow_readers_cut_total",
                "Connections closed because the client took nothing for too long.",
            )?,
            handshakes_failed: counters(
                "kvasir_conductor_tls_handshakes_failed_total",
                "TLS handshakes that were refused or took too long.",
                &["why"],
            )?,
            unauthenticated: counter(
                "kvasir_conductor_unauthenticated_total",
                "Requests without a valid API key.",
            )?,
            over_quota: counters(
                "kvasir_conductor_over_quota_total",
                "Requests refused because a tenant had used up a quota, by quota.",
                &["quota"],
            )?,
            waiting: registered(
                &registry,
                IntGaugeVec::new(
                    Opts::new(
                        "kvasir_conductor_waiting_requests",
                        "Requests that wait for their tenant's turn, by priority.",
                    ),
                    &["priority"],
                )?,
            )?,
            waited: counters(
                "kvasir_conductor_waited_total",
                "Requests that came to where others wait, by how that ended.",
                &["how"],
            )?,
            waited_seconds: registered(
                &registry,
                HistogramVec::new(
                    HistogramOpts::new(
                        "kvasir_conductor_waited_seconds",
                        "How long requests waited for their tenant's turn, by priority.",
                    )
                    .buckets(buckets()),
                    &["priority"],
                )?,
            )?,
            reloads: counters(
                "kvasir_conductor_reloads_total",
                "Changed files of keys and certificates, by whether they were taken.",
                &["file", "result"],
            )?,
            proxied: ProxyMetrics {
                requests: counters(
                    "kvasir_conductor_proxied_total",
                    "Requests passed on to back ends, by model and the status of the answer.",
                    &["model", "result"],
                )?,
                alive: registered(
                    &registry,
                    IntGaugeVec::new(
                        Opts::new("kvasir_conductor_backends_alive", "Back ends that answer."),
                        &["model"],
                    )?,
                )?,
            },
            bodies_bytes: gauge(
                "kvasir_conductor_bodies_bytes",
                "Request bodies in memory, in steps of 1 KiB.",
            )?,
            choices_in_flight: gauge(
                "kvasir_conductor_choices_in_flight",
                "Answers that are being made.",
            )?,
            choices: counters(
                "kvasir_conductor_choices_total",
                "Answers by how they ended.",
                &["result"],
            )?,
            ttft: seconds(
                "kvasir_conductor_ttft_seconds",
                "From the arrival of a request to its first token.",
            )?,
            time_between_tokens: seconds(
                "kvasir_conductor_time_between_tokens_seconds",
                "Between two tokens of one answer.",
            )?,
            choice_seconds: seconds(
                "kvasir_conductor_choice_seconds",
                "From the arrival of a request to the end of its answer.",
            )?,
            tokens: counters(
                "kvasir_conductor_tokens_total",
                "Tokens of prompts, those of them that were cached, and tokens of answers.",
                &["kind"],
            )?,
            retries: counters(
                "kvasir_conductor_retries_total",
                "Further attempts at a request, by the phase in which the former one failed.",
                &["phase"],
            )?,
            awaited: counters(
                "kvasir_conductor_beginnings_awaited_total",
                "Waits for another request that brought the beginning of the same prompt to the same node, by how they ended.",
                &["outcome"],
            )?,
            abandoned: counters(
                "kvasir_conductor_transactions_abandoned_total",
                "Transactions given up before their end, by phase.",
                &["phase"],
            )?,
            aborts: counters(
                "kvasir_conductor_aborts_total",
                "Shares of abandoned transactions by how telling their node went.",
                &["result"],
            )?,
            aborts_in_flight: gauge(
                "kvasir_conductor_aborts_in_flight",
                "Shares of abandoned transactions whose nodes do not know yet.",
            )?,
            renewals_unknown: counter(
                "kvasir_conductor_renewals_unknown_total",
                "Shares that were not alive any more when their lease was to be renewed.",
            )?,
            renewals_lost: counter(
                "kvasir_conductor_renewals_lost_total",
                "Shares whose node answered no renewal for as long as a lease.",
            )?,
            contexts: counters(
                "kvasir_conductor_contexts_total",
                "Contexts that were created, extended and dropped.",
                &["event"],
            )?,
            contexts_refused: counters(
                "kvasir_conductor_contexts_refused_total",
                "Requests for contexts that were refused, by why.",
                &["reason"],
            )?,
            registry,
        })
    }

    /// For the metrics of others.
    pub(crate) fn registry(&self) -> &Registry {
        &self.registry
    }

    /// Requests that wait for their turn.
    pub(crate) fn waiting_now(&self) -> i64 {
        let of = |priority: Priority| self.waiting.with_label_values(&[priority.name()]).get();
        Priority::ALL.into_iter().map(of).sum()
    }

    /// The counters of one followed file.
    pub(crate) fn reloads_of(&self, file: &str) -> reload::Counters {
        let count = |result| self.reloads.with_label_values(&[file, result]);
        reload::Counters { taken: count("taken"), refused: count("refused") }
    }

    /// All of the registry in Prometheus' text format.
    pub(crate) fn text(&self) -> String {
        let mut out = Vec::new();
        // Only a registry with two families of one name fails here; registering refuses that.
        let _ = TextEncoder::new().encode(&self.registry.gather(), &mut out);
        String::from_utf8_lossy(&out).into_owned()
    }
}

fn registered<C>(registry: &Registry, collector: C) -> Result<C, prometheus::Error>
where
    C: prometheus::core::Collector + Clone + 'static,
{
    registry.register(Box::new(collector.clone()))?;
    Ok(collector)
}

/// From a millisecond to two minutes, three to a decade and finer where objectives lie.
fn buckets() -> Vec<f64> {
    vec![
        0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0,
        2.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0,
    ]
}
