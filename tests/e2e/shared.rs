//! Several engines on one store node: the tokens of the reference, whichever engine computes and whichever decodes; and
//! one of them that is killed takes nothing of the others with it.

use std::time::Duration;

use crate::support::cluster::Cluster;
use crate::support::eventually;
use crate::support::load::{Amount, Fault, Tallies, all_answered, load};
use crate::support::rest::comes_to_rest;
use crate::support::vectors::Variant;

const FLAGS: &str = "--prefill-chunk-tokens 64 --lease-ms 1000 --dram-bytes 192MiB \
                     --ttft-objective-ms 3600000 --tbt-objective-ms 3600000";
const LOAD: Amount = Amount { at_once: 8, total: 32, deadline: Duration::from_secs(60) };
const ENDED_BEFORE: usize = 8;
const REST_WITHIN: Duration = Duration::from_secs(20);

/// All answers are right, before and after one engine is killed.
#[expect(clippy::print_stdout, reason = "how well the rest serves on is worth seeing")]
async fn check_kill(cluster: &Cluster, victim: &str) {
    let cases = Variant::Plain.cases();
    let node = async |metric: &str| cluster.sum("host-1-node", metric, &[]).await;
    let attached_before = node("kvasir_store_attach_epoch").await;
    let kill = Fault { after: ENDED_BEFORE, act: || cluster.kill(victim) };
    let tallies = load(cluster, &cases, LOAD, kill).await;
    println!("{victim}: {tallies:?}");
    let Tallies { before, after } = &tallies;
    assert!(before.answered() + after.answered() >= LOAD.total / 2, "{victim}: {tallies:?}");
    eventually("it is back beside the others", async || {
        node("kvasir_store_attach_epoch").await > attached_before && cluster.is_ready().await
    })
    .await;
    assert_eq!(cluster.restarts("host-1-node"), 0, "the node has lived on");
    comes_to_rest(cluster, REST_WITHIN).await;
    let amount = Amount { at_once: 8, total: 16, ..LOAD };
    all_answered(cluster, &cases, amount).await;
    comes_to_rest(cluster, REST_WITHIN).await;
}

#[tokio::test]
async fn engines_of_one_node_answer_as_the_reference_does_while_one_of_them_is_killed() {
    let cluster =
        Cluster::start(&format!("{FLAGS} --prefill 2 --decode 2 --engines-per-node 4")).await;
    let cases = Variant::Plain.cases();
    all_answered(&cluster, &cases, Amount { at_once: 4, total: 12, ..LOAD }).await;
    let node = async |metric: &str, labels: &[(&str, &str)]| {
        cluster.sum("host-1-node", metric, labels).await
    };
    assert_eq!(node("kvasir_store_engines", &[]).await, 4.0);
    // From one engine to another through memory: all of it is one node's.
    assert!(node("kvasir_store_pushes_total", &[("outcome", "landed")]).await > 0.0);
    assert_eq!(cluster.sum("conductor", "kvasir_conductor_instances", &[]).await, 4.0);
    assert_eq!(cluster.sum("conductor", "kvasir_conductor_nodes_connected", &[]).await, 1.0);
    for victim in ["decode-1", "prefill-1"] {
        check_kill(&cluster, victim).await;
    }
}

#[tokio::test]
async fn of_two_engines_that_do_both_on_one_node_either_may_be_killed() {
    let cluster = Cluster::start(&format!("{FLAGS} --both 2 --engines-per-node 2")).await;
    check_kill(&cluster, "both-1").await;
}
