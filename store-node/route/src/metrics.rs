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
                "kvasir_route_sessions",
                "Requesters that have a query ring here.",
            )?,
            routes: gauge(registry, "kvasir_route_routes", "Routes over blocks of this node.")?,
            messages: counters(
                registry,
                "kvasir_route_messages_total",
                "Query messages that were answered, by what the answer says.",
            )?,
            parts_refused: counter(
                registry,
                "kvasir_route_parts_refused_total",
                "Parts of query messages that were refused: a lease that is over, other pins.",
            )?,
            batches: counter(
                registry,
                "kvasir_route_batches_total",
                "Times that what had arrived was computed.",
            )?,
            groups: counter(
                registry,
                "kvasir_route_groups_total",
                "Attentions over the same rows, each for all queries that asked for them.",
            )?,
            query_bytes: counter(
                registry,
                "kvasir_route_query_bytes_total",
                "Bytes of query rows that arrived.",
            )?,
            partial_bytes: counter(
                registry,
                "kvasir_route_partial_bytes_total",
                "Bytes of partials that were answered.",
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
                "Query messages that were sent, by how they ended.",
            )?,
            query_bytes: counter(
                registry,
                "kvasir_route_query_bytes_total",
                "Bytes of query rows that were sent.",
            )?,
            partial_bytes: counter(
                registry,
                "kvasir_route_partial_bytes_total",
                "Bytes of partials that came back and were used.",
            )?,
        })
    }
}
