//! A process that hangs instead of dying (SIGSTOP): requests end by their deadline, the rest serves
//! on, leases end what the hanging one held, and once it goes on nothing is left over.

use std::time::Duration;

use crate::support::cluster::Cluster;
use crate::support::eventually;
use crate::support::load::{Amount, Fault, Tallies, all_answered, load};
use crate::support::rest::comes_to_rest;
use crate::support::vectors::Variant;
use futures::StreamExt;
use rustix::process::Signal;
use serde_json::json;

const DEADLINE: Duration = Duration::from_secs(8);
const FLAGS: &str = "--prefill 2 --decode 2 --lease-ms 1000 --request-timeout-ms 8000 \
                     --prefill-chunk-tokens 64 --dram-bytes 192MiB \
                     --ttft-objective-ms 3600000 --tbt-objective-ms 3600000";
const LOAD: Amount = Amount { at_once: 24, total: 48, deadline: DEADLINE };
const ENDED_BEFORE: usize = 12;
const REST_WITHIN: Duration = Duration::from_secs(20);

#[expect(clippy::print_stdout, reason = "how well the rest serves on is worth seeing")]
async fn check_hang(cluster: &Cluster, victim: &str) {
    let cases = Variant::Plain.cases();
    let stop = Fault { after: ENDED_BEFORE, act: || cluster.signal(victim, Signal::STOP) };
    let tallies = load(cluster, &cases, LOAD, stop).await;
    println!("{victim}: {tallies:?}");
    let Tallies { before, after } = &tallies;
    assert_eq!(before.cut() + after.cut(), 0, "{victim}: {tallies:?}");
    assert!(before.answered() + after.answered() >= LOAD.total / 3, "{victim}: {tallies:?}");
    cluster.signal(victim, Signal::CONT);
    assert_eq!(cluster.restarts(victim), 0, "{victim} has not ended");
    eventually("the cluster is ready", || cluster.is_ready()).await;
    comes_to_rest(cluster, REST_WITHIN).await;
    let deadline = Duration::from_secs(30);
    all_answered(cluster, &cases, Amount { at_once: 8, total: 24, deadline }).await;
    comes_to_rest(cluster, REST_WITHIN).await;
}

#[tokio::test]
async fn a_hanging_decode_engine_costs_no_wrong_token_and_leaves_nothing() {
    let cluster = Cluster::start(FLAGS).await;
    check_hang(&cluster, "decode-1").await;
}

#[tokio::test]
async fn a_hanging_prefill_engine_costs_no_wrong_token_and_leaves_nothing() {
    let cluster = Cluster::start(FLAGS).await;
    check_hang(&cluster, "prefill-1").await;
}

#[tokio::test]
async fn a_hanging_node_costs_no_wrong_token_and_leaves_nothing() {
    for domain in ["shm", "tcp"] {
        let cluster = Cluster::start(&format!("{FLAGS} --transport {domain}")).await;
        check_hang(&cluster, "prefill-1-node").await;
    }
}

/// Brings an engine to a halt in the middle of an answer. The stream says that its time is over;
/// the lease has ended before, and what the engine could still write is kept from everybody.
async fn hang_in_an_answer() -> Cluster {
    let cluster = Cluster::start("--lease-ms 1000 --request-timeout-ms 6000").await;
    let body = json!({
        "model": cluster.model,
        "prompt": Variant::Plain.longest().prompt,
        "max_tokens": 1_900,
        "ignore_eos": true,
        "stream": true,
    });
    let url = format!("{}/v1/completions", cluster.url);
    let reply = cluster.client.post(url).json(&body).send().await.expect("an answer");
    let mut body = reply.bytes_stream();
    body.next().await.expect("a piece").expect("whole");
    cluster.signal("decode-1", Signal::STOP);
    let on_node = async |metric: &str, labels: &[(&str, &str)]| {
        cluster.metrics("decode-1-node").await.sum(metric, labels)
    };
    eventually("the lease is over", async || {
        on_node("kvasir_store_share_events_total", &[("event", "lease_expired")]).await == 1.0
    })
    .await;
    let mut rest = Vec::new();
    while let Some(bytes) = body.next().await {
        rest.extend(bytes.expect("whole"));
    }
    let rest = String::from_utf8(rest).expect("text");
    assert!(rest.contains("request_timeout") && rest.ends_with("data: [DONE]\n\n"), "{rest}");
    assert_eq!(on_node("kvasir_store_shares_aborting", &[]).await, 1.0);
    assert!(on_node("kvasir_store_slots", &[("state", "quarantined")]).await > 0.0);
    cluster
}

#[tokio::test]
async fn what_a_hanging_engine_may_write_is_free_again_when_it_has_stopped() {
    let cluster = hang_in_an_answer().await;
    cluster.signal("decode-1", Signal::CONT);
    comes_to_rest(&cluster, REST_WITHIN).await;
}

#[tokio::test]
async fn what_a_hanging_engine_may_write_is_free_again_when_it_is_killed() {
    let cluster = hang_in_an_answer().await;
    cluster.kill("decode-1");
    comes_to_rest(&cluster, REST_WITHIN).await;
    eventually("the cluster is ready again", || cluster.is_ready()).await;
}
