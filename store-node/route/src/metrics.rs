//! What is counted on either side. Bytes of queries and partials are those of rows, without heads.

use prometheus::{IntCounter, IntCounterVec, IntGauge, Opts, Registry};

fn counter(registry: &Registry, name: &str, help: &str) -> Result<IntCounter, prometheus::Error> {
    let counter = IntCounter::new(name, help)?;
    registry.register(Box::new(counter.clone()))?;
    Ok(counter)
}

fn counters(
    registry: &Registry,
    name: &str,
    help: &str,
) -> Result<IntCounterVec, prometheus::Error> {
    let counters = IntCounterVec::new(Opts::new(name, help), &["outcome"])?;
    registry.register(Box::new(counters.clone()))?;
    Ok(counters)
}

fn gauge(registry: &Registry, name: &str, help: &str) -> Result<IntGauge, prometheus::Error> {
    let gauge = IntGauge::new(name, help)?;
    registry.register(Box::new(gauge.clone()))?;
    Ok(gauge)
}

/// Of a node that answers queries.
#[derive(Debug, Clone)]
pub struct HolderMetrics {
    pub sessions: IntGauge,
    pub routes: IntGauge,
    pub messages: IntCounterVec,
    pub parts_refused: IntCounter,
    pub batches: IntCounter,
    pub groups: IntCounter,
    pub query_bytes: IntCounter,
    pub partial_bytes: IntCounter,
}

impl HolderMetrics {
    /// # Errors
    /// When a name is registered already.
    pub fn new(registry: &Registry) -> Result<Self, prometheus::Error> {
        Ok(HolderMetrics {
            sessions: gauge(
                registry,
                "kvasir_route_query_sessions",
                "Requesters with a query ring at this node.",
            )?,
            routes: gauge(
                registry,
                "kvasir_route_open_routes",
                "Open routes over blocks of this node.",
            )?,
            messages: counters(
                registry,
                "kvasir_route_messages_total",
                "Answered query messages, by outcome.",
            )?,
            parts_refused: counter(
                registry,
                "kvasir_route_parts_refused_total",
                "Parts of query messages refused because the lease expired or the blocks are not pinned.",
            )?,
            batches: counter(
                registry,
                "kvasir_route_batches_total",
                "Batches of query messages that were computed.",
            )?,
            groups: counter(
                registry,
                "kvasir_route_groups_total",
                "Attention computations, each for all queries over the same rows.",
            )?,
            query_bytes: counter(
                registry,
                "kvasir_route_query_bytes_total",
                "Received bytes of query rows.",
            )?,
            partial_bytes: counter(
                registry,
                "kvasir_route_partial_bytes_total",
                "Sent bytes of partial results.",
            )?,
        })
    }
}

/// Of an engine that sends queries.
#[derive(Debug, Clone)]
pub struct RequesterMetrics {
    pub dispatches: IntCounterVec,
    pub query_bytes: IntCounter,
    pub partial_bytes: IntCounter,
}

impl RequesterMetrics {
    /// # Errors
    /// When a name is registered already.
    pub fn new(registry: &Registry) -> Result<Self, prometheus::Error> {
        Ok(RequesterMetrics {
            dispatches: counters(
                registry,
                "kvasir_route_dispatches_total",
                "Sent query messages, by outcome.",
            )?,
            query_bytes: counter(
                registry,
                "kvasir_route_query_bytes_total",
                "Sent bytes of query rows.",
            )?,
            partial_bytes: counter(
                registry,
                "kvasir_route_partial_bytes_total",
                "Received bytes of partial results that were used.",
            )?,
        })
    }
}
