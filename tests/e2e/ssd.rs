//! Blocks on disk: what is kept there outlives its node's process, and a bad disk costs time, never an
//! answer.

mod support;

use kvasir_proto::v1;
use support::answers::{cached_tokens, check_case, reusable_tokens};
use support::cluster::Cluster;
use support::stored::Stored;
use support::vectors::{BLOCK_TOKENS, Case, Variant};
use support::{eventually, lose_cache};

const RISEN: &str = "kvasir_store_core_events_total";

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
        let risen = cluster.sum("prefill-1-node", RISEN, &[("event", "risen")]).await;
        assert!(risen > 0.0, "they came from the SSD");
    }
}

#[tokio::test]
async fn a_bad_disk_costs_no_answer_and_is_used_again_when_it_is_good() {
    let cluster = Cluster::start("--ssd-bytes 256MiB --ssd-faults").await;
    let case = kept_case(&cluster).await;
    let faults = cluster.run_dir().join("prefill-1-node.faults");
    // Wrong bytes come last: what is found rotten is dropped.
    for words in ["hang", "read-errors", "wrong"] {
        lose_cache(&cluster, "decode-1-node").await;
        lose_cache(&cluster, "prefill-1-node").await;
        eventually("the SSD is ready", async || ssd_of(&cluster, "prefill-1-node").await.usable)
            .await;
        std::fs::write(&faults, words).expect("written");
        check_case(&cluster, &case).await;
        eventually(&format!("the node says that its disk does {words}"), async || {
            let state = ssd_of(&cluster, "prefill-1-node").await.state;
            state.starts_with("hangs") || state.starts_with("degraded")
        })
        .await;
        std::fs::write(&faults, "").expect("written");
        eventually("the SSD is used again", async || {
            ssd_of(&cluster, "prefill-1-node").await.usable
        })
        .await;
        check_case(&cluster, &case).await;
    }
}
