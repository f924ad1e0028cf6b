//! `kill -9` of any one process under 50 requests: no wrong token, every request ends with an answer
//! or a clear error, the rest serves on, and afterwards nothing is left over and the killed process
//! is back at work. Each test loads the machine; see `--nocapture` for how the requests ended.

use std::time::Duration;

use crate::support::cluster::Cluster;
use crate::support::eventually;
use crate::support::load::{Amount, Fault, Tallies, all_answered, load};
use crate::support::rest::comes_to_rest;
use crate::support::vectors::{Variant, ids};

const DEADLINE: Duration = Duration::from_secs(20);
/// Either half has room and time for all of the load, so that what is refused is refused for the fault: how fast a
/// machine with so many processes is, is not what is looked at.
const FLAGS: &str = "--prefill 2 --decode 2 --lease-ms 2000 --request-timeout-ms 20000 \
                     --prefill-chunk-tokens 64 --dram-bytes 192MiB \
                     --ttft-objective-ms 3600000 --tbt-objective-ms 3600000";
const INSTANCES: f64 = 4.0;
/// Two decode engines share the 50, though not to a hair.
const BROKEN_OFF_MAX: usize = 40;
const LOAD: Amount = Amount { at_once: 50, total: 100, deadline: DEADLINE };
/// Leases and what follows them.
const REST_WITHIN: Duration = Duration::from_secs(20);

/// When a process is killed: by then so many requests have ended.
#[derive(Debug, Clone, Copy)]
enum Moment {
    /// Nothing is cached: most of the 50 are queued or compute their prompts.
    Early,
    /// Most prompts are cached: most of the 50 decode.
    Late,
}

impl Moment {
    fn ended_before(self) -> usize {
        match self {
            Moment::Early => 3,
            Moment::Late => 40,
        }
    }
}

/// What the killed process was, as far as its requests are concerned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Part {
    /// Before the hand-over another attempt is made, after it the other side has all it needs.
    Prefill,
    /// Answers break off that it had begun.
    Decode,
    /// Whoever is connected is cut off.
    Conductor,
}

fn part(process: &str) -> Part {
    match process.split('-').next() {
        Some("prefill") => Part::Prefill,
        Some("decode") => Part::Decode,
        _ => Part::Conductor,
    }
}

#[expect(clippy::print_stdout, reason = "how well the rest serves on is worth seeing")]
fn check_tallies(victim: &str, moment: Moment, tallies: &Tallies) {
    println!("{victim} {moment:?}: {tallies:?}");
    let Tallies { before, after } = tallies;
    assert_eq!(before.total() + after.total(), LOAD.total);
    if part(victim) == Part::Conductor {
        return;
    }
    assert_eq!(before.cut() + after.cut(), 0, "{victim} {moment:?}: {tallies:?}");
    // The others serve on as if nothing had happened.
    assert_eq!(after.answered(), after.total(), "{victim} {moment:?}: {tallies:?}");
    match part(victim) {
        Part::Prefill => assert_eq!(before.answered(), before.total(), "{victim}: {tallies:?}"),
        // What the other one decodes is answered, and what was not handed over yet: only what the
        // lost one had begun breaks off.
        _ => {
            let broken_off = before.with_code("instance_failed");
            assert!(broken_off <= BROKEN_OFF_MAX, "{victim}: {tallies:?}");
            assert_eq!(before.answered() + broken_off, before.total(), "{victim}: {tallies:?}");
        }
    }
}

/// What a process counts of the requests that it took part in since it started.
fn work_of(process: &str) -> &'static str {
    match process {
        "conductor" => "kvasir_conductor_choices_total",
        node if node.ends_with("-node") => "kvasir_store_requested_blocks_total",
        _ => "kvasir_engine_requests_finished_total",
    }
}

async fn check_kill(cluster: &Cluster, victim: &str, moment: Moment) {
    let cases = Variant::Plain.cases();
    let restarts = cluster.restarts(victim);
    let kill = Fault { after: moment.ended_before(), act: || cluster.kill(victim) };
    let tallies = load(cluster, &cases, LOAD, kill).await;
    check_tallies(victim, moment, &tallies);

    eventually(&format!("{victim} runs again"), async || {
        cluster.restarts(victim) == restarts + 1 && cluster.pid(victim).is_some()
    })
    .await;
    eventually("all instances are attached again", async || {
        let conductor = cluster.try_metrics("conductor").await;
        conductor.is_some_and(|m| m.sum("kvasir_conductor_instances", &[]) == INSTANCES)
    })
    .await;
    eventually("the cluster is ready again", || cluster.is_ready()).await;
    comes_to_rest(cluster, REST_WITHIN).await;
    eventually(&format!("{victim} works again"), async || {
        all_answered(cluster, &cases, Amount { at_once: 24, total: 24, ..LOAD }).await;
        cluster.metrics(victim).await.sum(work_of(victim), &[]) > 0.0
    })
    .await;
    comes_to_rest(cluster, REST_WITHIN).await;
}

async fn check_kills(victim: &str) {
    let cluster = Cluster::start(FLAGS).await;
    for moment in [Moment::Early, Moment::Late] {
        check_kill(&cluster, victim, moment).await;
    }
}

#[tokio::test]
async fn killing_a_prefill_engine_costs_no_wrong_token_and_leaves_nothing() {
    check_kills("prefill-1").await;
}

#[tokio::test]
async fn killing_a_decode_engine_costs_no_wrong_token_and_leaves_nothing() {
    check_kills("decode-1").await;
}

#[tokio::test]
async fn killing_a_prefill_node_costs_no_wrong_token_and_leaves_nothing() {
    check_kills("prefill-1-node").await;
}

#[tokio::test]
async fn killing_a_decode_node_costs_no_wrong_token_and_leaves_nothing() {
    check_kills("decode-1-node").await;
}

#[tokio::test]
async fn killing_the_conductor_costs_no_wrong_token_and_leaves_nothing() {
    check_kills("conductor").await;
}

#[tokio::test]
async fn over_tcp_killing_one_after_the_other_costs_no_wrong_token_and_leaves_nothing() {
    let cluster = Cluster::start(&format!("{FLAGS} --transport tcp")).await;
    for victim in ["prefill-1", "decode-1", "prefill-2-node", "decode-2-node", "conductor"] {
        check_kill(&cluster, victim, Moment::Early).await;
    }
}

#[tokio::test]
async fn a_restarted_conductor_serves_cached_prefixes_without_having_stored_anything() {
    let cluster = Cluster::start("").await;
    let case = Variant::Plain.longest();
    let cached = async || {
        let (status, answer) = cluster.complete(&case.prompt, 24).await;
        assert_eq!(status, 200, "{answer}");
        assert_eq!(ids(&answer["choices"][0]["token_ids"]), case.greedy);
        answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap_or(0)
    };
    assert_eq!(cached().await, 0);
    let before = cached().await;
    assert!(before > 0);
    cluster.kill("conductor");
    eventually("the conductor runs again", async || cluster.restarts("conductor") == 1).await;
    eventually("the conductor is ready again", || cluster.is_ready()).await;
    assert_eq!(cached().await, before);
}
