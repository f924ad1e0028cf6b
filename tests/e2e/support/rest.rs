//! A cluster at rest: nothing is held, nobody works, nothing is under way. What is left over after a
//! fault shows here.

use std::time::{Duration, Instant};

use super::cluster::Cluster;

type Gauge = (&'static str, &'static [(&'static str, &'static str)]);

/// Zero on every node.
const OF_NODES: [Gauge; 11] = [
    ("kvasir_store_slots", &[("state", "allocated")]),
    ("kvasir_store_slots", &[("state", "releasing")]),
    ("kvasir_store_slots", &[("state", "quarantined")]),
    ("kvasir_store_shares", &[]),
    ("kvasir_store_shares_aborting", &[]),
    ("kvasir_store_quarantine_oldest_age_seconds", &[]),
    ("kvasir_store_pins", &[]),
    ("kvasir_store_tail_used_bytes", &[]),
    ("kvasir_transfer_imm_counters", &[]),
    ("kvasir_transfer_operations_in_flight", &[]),
    ("kvasir_transfer_revocations_pending", &[]),
];
const OF_ENGINES: [Gauge; 2] =
    [("kvasir_engine_running_requests", &[]), ("kvasir_engine_waiting_requests", &[])];
const OF_THE_CONDUCTOR: [Gauge; 2] =
    [("kvasir_conductor_choices_in_flight", &[]), ("kvasir_conductor_abort_calls_in_flight", &[])];

fn gauges(process: &str) -> &'static [Gauge] {
    match process {
        "conductor" => &OF_THE_CONDUCTOR,
        node if node.ends_with("-node") => &OF_NODES,
        _ => &OF_ENGINES,
    }
}

async fn left_over(cluster: &Cluster) -> Vec<String> {
    let mut left = Vec::new();
    for process in cluster.process_names() {
        let Some(metrics) = cluster.try_metrics(&process).await else {
            left.push(format!("{process} does not answer"));
            continue;
        };
        for (metric, labels) in gauges(&process) {
            // A node that has just been started again has none before its engine is back.
            if !metrics.has(metric, labels) {
                left.push(format!("{process} has no {metric}{labels:?}"));
                continue;
            }
            let value = metrics.sum(metric, labels);
            if value != 0.0 {
                left.push(format!("{process}: {metric}{labels:?} is {value}"));
            }
        }
    }
    left
}

/// Waits until nothing is left over. `within` is a bound for a broken system: leases and what
/// follows them, with room for a machine that does other things too.
pub(crate) async fn comes_to_rest(cluster: &Cluster, within: Duration) {
    let began = Instant::now();
    loop {
        let left = left_over(cluster).await;
        if left.is_empty() {
            return;
        }
        assert!(began.elapsed() < within, "left over after {within:?}: {left:#?}");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}
