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
    /// Of `monitor_listen`.
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
    /// Requests to backends.
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
                "HTTP requests by path and status code.",
                &["path", "status"],
            )?,
            connections: gauge("kvasir_conductor_connections", "Open HTTP connections.")?,
            watchers: gauge(
                "kvasir_conductor_monitor_connections",
                "Open HTTP connections of the monitoring API.",
            )?,
            slow_readers_cut: counter(
                "kvasir_conductor_slow_clients_disconnected_total",
                "Connections closed because the client did not read its answer.",
            )?,
            handshakes_failed: counters(
                "kvasir_conductor_tls_handshake_failures_total",
                "TLS handshakes that failed, by reason.",
                &["reason"],
            )?,
            unauthenticated: counter(
                "kvasir_conductor_unauthenticated_requests_total",
                "Requests without a valid API key.",
            )?,
            over_quota: counters(
                "kvasir_conductor_quota_refusals_total",
                "Requests refused because a tenant exceeded a quota, by quota.",
                &["quota"],
            )?,
            waiting: registered(
                &registry,
                IntGaugeVec::new(
                    Opts::new(
                        "kvasir_conductor_choices_queued",
                        "Answers in the admission queue, by priority.",
                    ),
                    &["priority"],
                )?,
            )?,
            waited: counters(
                "kvasir_conductor_queue_exits_total",
                "Answers that left the admission queue or were refused by it, by reason.",
                &["reason"],
            )?,
            waited_seconds: registered(
                &registry,
                HistogramVec::new(
                    HistogramOpts::new(
                        "kvasir_conductor_queue_wait_seconds",
                        "Time of requests in the admission queue, by priority.",
                    )
                    .buckets(buckets()),
                    &["priority"],
                )?,
            )?,
            reloads: counters(
                "kvasir_conductor_reloads_total",
                "Reloads of changed API-key and certificate files, by outcome.",
                &["file", "outcome"],
            )?,
            proxied: ProxyMetrics {
                requests: counters(
                    "kvasir_conductor_backend_requests_total",
                    "Requests forwarded to backends, by model and status of the answer.",
                    &["model", "status"],
                )?,
                alive: registered(
                    &registry,
                    IntGaugeVec::new(
                        Opts::new(
                            "kvasir_conductor_backends_healthy",
                            "Backends that answer, by model.",
                        ),
                        &["model"],
                    )?,
                )?,
            },
            bodies_bytes: gauge(
                "kvasir_conductor_buffered_bodies_bytes",
                "Bytes of request bodies in memory, in steps of 1 KiB.",
            )?,
            choices_in_flight: gauge(
                "kvasir_conductor_choices_in_flight",
                "Answers that engines work on; a request has one for each prompt, times n.",
            )?,
            choices: counters(
                "kvasir_conductor_choices_total",
                "Finished answers, by outcome.",
                &["outcome"],
            )?,
            ttft: seconds(
                "kvasir_conductor_ttft_seconds",
                "Time from the arrival of a request to its first token.",
            )?,
            time_between_tokens: seconds(
                "kvasir_conductor_tbt_seconds",
                "Time between two tokens of one answer.",
            )?,
            choice_seconds: seconds(
                "kvasir_conductor_choice_duration_seconds",
                "Time from the arrival of a request to the end of its answer.",
            )?,
            tokens: counters(
                "kvasir_conductor_tokens_total",
                "Tokens of complete answers: of prompts, the cached ones of these, and generated ones.",
                &["kind"],
            )?,
            retries: counters(
                "kvasir_conductor_retries_total",
                "Retries of requests, by the phase in which the earlier attempt failed.",
                &["phase"],
            )?,
            awaited: counters(
                "kvasir_conductor_coalesced_prefixes_total",
                "Requests that waited for another request to compute or fetch a shared prefix, by outcome.",
                &["outcome"],
            )?,
            abandoned: counters(
                "kvasir_conductor_transactions_aborted_total",
                "Transactions aborted before their end, by phase.",
                &["phase"],
            )?,
            aborts: counters(
                "kvasir_conductor_abort_calls_total",
                "Aborts of shares at store nodes, by whether the node confirmed.",
                &["outcome"],
            )?,
            aborts_in_flight: gauge(
                "kvasir_conductor_abort_calls_in_flight",
                "Aborts of shares that their store node has not confirmed yet.",
            )?,
            renewals_unknown: counter(
                "kvasir_conductor_lease_renewals_unknown_total",
                "Lease renewals of shares that the store node did not know.",
            )?,
            renewals_lost: counter(
                "kvasir_conductor_lease_renewals_failed_total",
                "Shares that failed because their store node did not answer renewals.",
            )?,
            contexts: counters(
                "kvasir_conductor_contexts_total",
                "Contexts created, extended and deleted.",
                &["event"],
            )?,
            contexts_refused: counters(
                "kvasir_conductor_context_refusals_total",
                "Refused requests for contexts, by reason.",
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
        let count = |outcome| self.reloads.with_label_values(&[file, outcome]);
        reload::Counters { taken: count("accepted"), refused: count("rejected") }
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
