//! What the end-to-end tests share: a cluster started by the real binary as a user starts it, its
//! metrics, the reference vectors, load and rest. Each test file uses its part of it.
#![allow(dead_code, reason = "two benchmarks include it, and use a part")]

pub(crate) mod answers;
pub(crate) mod cluster;
pub(crate) mod expected;
pub(crate) mod keyed;
pub(crate) mod load;
pub(crate) mod metrics;
pub(crate) mod peers;
pub(crate) mod rest;
pub(crate) mod second;
pub(crate) mod stored;
pub(crate) mod vectors;

use std::io::Write;
use std::time::{Duration, Instant};

/// Whether whoever runs the tests has named an RDMA device; `tests/verbs-vm/run` provides one.
#[expect(clippy::disallowed_methods, reason = "how whoever runs the tests says so")]
pub(crate) fn has_rdma() -> bool {
    let is_named = std::env::var("KVASIR_VERBS_LOOPBACK").is_ok_and(|name| !name.is_empty());
    if !is_named {
        let what = "clusters over RDMA are skipped: no device is named";
        let remedy = "`tests/verbs-vm/run` runs them in a virtual machine";
        writeln!(std::io::stderr(), "{what}; {remedy}").ok();
    }
    is_named
}

/// Where a process listens that is killed and started again: of its own in the loopback network
/// (all of 127.0.0.0/8), so that nobody else gets its port in between.
pub(crate) fn own_address() -> String {
    let [a, b, c] = rand::random::<[u8; 3]>();
    format!("127.{}.{b}.{c}:7000", 1 + a % 127)
}

/// Asks again and again until it is so; panics with `what` when it has not become so in time. The
/// time is a bound for a broken system, not something that is measured.
pub(crate) async fn eventually<F>(what: &str, mut is_so: impl FnMut() -> F)
where
    F: Future<Output = bool>,
{
    let deadline = Instant::now() + Duration::from_secs(30);
    while !is_so().await {
        assert!(Instant::now() < deadline, "it did not come about that {what}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// Waits until the conductor has heard of so many blocks, counted once for each node.
pub(crate) async fn hears_of(cluster: &cluster::Cluster, blocks: f64) {
    let entries = "kvasir_conductor_index_entries";
    eventually(&format!("the conductor knows {blocks} blocks"), async || {
        cluster.sum("conductor", entries, &[]).await == blocks
    })
    .await;
}

/// Kills a store node, so that all it held is lost, and waits until its successor is at work.
pub(crate) async fn lose_cache(cluster: &cluster::Cluster, node: &str) {
    let of_conductor = async |metric: &str| cluster.sum("conductor", metric, &[]).await;
    let (losses, warm) =
        ("kvasir_conductor_node_disconnects_total", "kvasir_conductor_nodes_synced");
    let instances = "kvasir_conductor_instances";
    let lost_before = of_conductor(losses).await;
    let (warm_before, instances_before) = (of_conductor(warm).await, of_conductor(instances).await);
    cluster.kill(node);
    eventually(&format!("{node} is missed"), async || of_conductor(losses).await > lost_before)
        .await;
    eventually(&format!("{node} is back with its engine"), async || {
        of_conductor(warm).await == warm_before
            && of_conductor(instances).await == instances_before
            && cluster.is_ready().await
    })
    .await;
}
