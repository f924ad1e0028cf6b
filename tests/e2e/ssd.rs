//! Blocks on disk: what is kept there outlives its node's process, and a bad disk costs time, never an
//! answer.

use std::time::{Duration, Instant};

use crate::support::answers::{cached_tokens, check_case, reusable_tokens};
use crate::support::cluster::Cluster;
use crate::support::stored::Stored;
use crate::support::vectors::{BLOCK_TOKENS, Case, Variant};
use crate::support::{eventually, hears_of, lose_cache};
use kvasir_proto::v1;
use kvasir_proto::v1::scheduler_client::SchedulerClient;

const RISEN: &str = "kvasir_store_block_events_total";

async fn ssd_of(cluster: &Cluster, node: &str) -> v1::SsdStatus {
    Stored::of(cluster, node).await.ssd().await
}

/// A case of some blocks, computed, and its blocks kept by its prefill node.
async fn kept_case(cluster: &Cluster) -> Case {
    let case = Variant::Plain.longest();
    check_case(cluster, &case).await;
    let blocks = case.prompt.len() / BLOCK_TOKENS;
    let mut stored = Stored::of(cluster, "prefill-1-node").await;
    let keys = stored.keys(&case.prompt).await;
    eventually("all blocks are committed", async || {
        Stored::of(cluster, "prefill-1-node").await.blocks(&keys).await.len() == blocks
    })
    .await;
    let over = stored.keep_until(&case.prompt, 1).await.expect_err("that is long past");
    assert_eq!(over.code(), tonic::Code::FailedPrecondition, "{over}");
    assert!(over.message().contains("by this node's clock"), "{over}");
    assert_eq!(stored.keep(&case.prompt).await.expect("kept"), blocks as u32);
    case
}

#[tokio::test]
async fn kept_blocks_outlive_a_killed_node_and_give_the_same_tokens() {
    let cluster = Cluster::start("--ssd-bytes 256MiB").await;
    let case = kept_case(&cluster).await;
    for _ in 0..2 {
        // Nobody else has them either.
        lose_cache(&cluster, "decode-1-node").await;
        lose_cache(&cluster, "prefill-1-node").await;
        eventually("the SSD is ready", async || ssd_of(&cluster, "prefill-1-node").await.usable)
            .await;
        let answer = check_case(&cluster, &case).await;
        assert_eq!(cached_tokens(&answer), reusable_tokens(case.prompt.len()));
        let risen = cluster.sum("prefill-1-node", RISEN, &[("event", "promoted")]).await;
        assert!(risen > 0.0, "they came from the SSD");
        eventually("the node says how fast they came", async || {
            let v1::SsdStatus { read_bytes_total, read_us_total, .. } =
                ssd_of(&cluster, "prefill-1-node").await;
            read_bytes_total > 1 << 20 && read_us_total > 0
        })
        .await;
    }
}

/// How long a disk hangs: longer than anybody waits for it.
const HANGS: Duration = Duration::from_secs(30);

/// What the node says of its disk in its answer to probes, and by its gauge: whether it can be used.
async fn says(cluster: &Cluster, node: &str, state: &[&str], usable: bool) {
    eventually(&format!("{node} says {state:?} of its disk"), async || {
        let (status, text) = cluster.ready_of(node).await;
        let line = text.lines().find_map(|line| line.strip_prefix("ssd: ")).unwrap_or_default();
        let gauge = cluster.sum(node, "kvasir_store_ssd_usable", &[]).await;
        // A node with a bad disk serves on.
        assert_eq!(status, 200, "{text}");
        state.iter().any(|state| line.starts_with(state)) && (gauge > 0.0) == usable
    })
    .await;
}

#[tokio::test]
async fn a_bad_disk_costs_no_answer_and_is_used_again_when_it_is_good() {
    const NODE: &str = "prefill-1-node";
    let cluster = Cluster::start("--ssd-bytes 256MiB --ssd-faults").await;
    let case = kept_case(&cluster).await;
    let faults = cluster.run_dir().join("prefill-1-node.faults");
    // Wrong bytes come last: what is found rotten is dropped.
    for words in ["hang", "read-errors", "full", "wrong"] {
        lose_cache(&cluster, "decode-1-node").await;
        lose_cache(&cluster, NODE).await;
        eventually("the SSD is ready", async || ssd_of(&cluster, NODE).await.usable).await;
        std::fs::write(&faults, words).expect("written");
        let began = Instant::now();
        // The disk looks at the file every 20 ms.
        tokio::time::sleep(Duration::from_millis(50)).await;
        check_case(&cluster, &case).await;
        if words == "full" {
            // What lies there can be read, and nothing more is promised.
            let keeping = Stored::of(&cluster, NODE).await.keep(&case.prompt).await;
            assert_eq!(keeping.expect_err("refused").code(), tonic::Code::Unavailable);
            says(&cluster, NODE, &["degraded: the disk is full"], true).await;
        } else {
            says(&cluster, NODE, &["hangs", "degraded"], words != "hang").await;
        }
        if words == "hang" {
            while began.elapsed() < HANGS {
                check_case(&cluster, &case).await;
                tokio::time::sleep(Duration::from_secs(1)).await;
            }
            says(&cluster, NODE, &["hangs"], false).await;
        }
        std::fs::write(&faults, "").expect("written");
        says(&cluster, NODE, &["ready"], true).await;
        check_case(&cluster, &case).await;
    }
}

/// Where the conductor answers callers with a front door of their own.
fn scheduler_address(cluster: &Cluster) -> String {
    let config = cluster.run_dir().join("conductor.toml");
    let config = std::fs::read_to_string(config).expect("its configuration");
    let line = config.lines().find_map(|line| line.strip_prefix("grpc_listen = "));
    format!("http://{}", line.expect("an address").trim_matches('"'))
}

#[tokio::test]
async fn what_is_planned_is_read_from_the_ssd_before_the_request_comes() {
    let cluster = Cluster::start("--ssd-bytes 256MiB").await;
    let case = kept_case(&cluster).await;
    lose_cache(&cluster, "decode-1-node").await;
    lose_cache(&cluster, "prefill-1-node").await;
    eventually("the SSD is ready", async || ssd_of(&cluster, "prefill-1-node").await.usable).await;
    let blocks = case.prompt.len() / BLOCK_TOKENS;
    hears_of(&cluster, blocks as f64).await;
    let events =
        async |event: &str| cluster.sum("prefill-1-node", RISEN, &[("event", event)]).await;
    assert_eq!(events("promoted").await, 0.0);

    let scheduler = SchedulerClient::connect(scheduler_address(&cluster)).await;
    let plan = v1::ScheduleRequest {
        model: cluster.model.clone(),
        prompt: case.prompt.clone(),
        max_tokens: 1,
        ..v1::ScheduleRequest::default()
    };
    scheduler.expect("it answers").schedule(plan).await.expect("a plan");
    eventually("it is in memory", async || events("prefetched").await > 0.0).await;
    let read_ahead = events("prefetched").await;

    let answer = check_case(&cluster, &case).await;
    assert_eq!(cached_tokens(&answer), reusable_tokens(case.prompt.len()));
    assert_eq!(events("promoted").await, read_ahead, "nothing was left to read");
    assert_eq!(events("prefetched_used").await, read_ahead);
}
