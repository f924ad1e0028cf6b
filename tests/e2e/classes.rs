//! Prompts that say that they will not come again take no room from those that may.

use crate::support::answers::cached_tokens;
use crate::support::cluster::Cluster;
use crate::support::hears_of;
use crate::support::vectors::BLOCK_TOKENS;
use serde_json::{Value, json};

const EVENTS: &str = "kvasir_store_block_events_total";
/// Each of a prompt has so many whole blocks, and a part of another one.
const BLOCKS: usize = 5;
const NORMAL: u32 = 4;
/// Many times what a node has room for.
const EPHEMERAL: u32 = 40;

fn prompt(seed: u32) -> Vec<u32> {
    (0..BLOCKS * BLOCK_TOKENS + 10).map(|at| (seed * 37 + at as u32 * 11) % 250).collect()
}

/// Tokens of the prompt that came from the cache.
async fn ask(cluster: &Cluster, prompt: &[u32], class: Option<&str>) -> usize {
    let body = json!({
        "model": cluster.model,
        "prompt": prompt,
        "max_tokens": 2,
        "temperature": 0,
        "ignore_eos": true,
    });
    let mut request = cluster.client.post(format!("{}/v1/completions", cluster.url)).json(&body);
    if let Some(class) = class {
        request = request.header("x-kvasir-cache-class", class);
    }
    let reply = request.send().await.expect("an answer");
    let status = reply.status().as_u16();
    let answer: Value = reply.json().await.expect("JSON");
    assert_eq!(status, 200, "{answer}");
    cached_tokens(&answer)
}

async fn evicted(cluster: &Cluster) -> f64 {
    cluster.sum("-node", EVENTS, &[("event", "evicted")]).await
}

/// A cluster whose nodes have room for 37 blocks, with the normal prompts in it.
async fn with_normal_prompts() -> Cluster {
    let cluster = Cluster::start("--dram-bytes 16MiB").await;
    for seed in 0..NORMAL {
        assert_eq!(ask(&cluster, &prompt(seed), None).await, 0);
    }
    hears_of(&cluster, f64::from(NORMAL) * (2 * BLOCKS) as f64).await;
    cluster
}

#[tokio::test]
async fn ephemeral_prompts_do_not_displace_normal_ones() {
    let cluster = with_normal_prompts().await;
    for seed in 100..100 + EPHEMERAL {
        assert_eq!(ask(&cluster, &prompt(seed), Some("ephemeral")).await, 0);
    }
    // It may use what is there, and leaves nothing: not even for itself.
    let reusable = BLOCKS * BLOCK_TOKENS;
    assert_eq!(ask(&cluster, &prompt(0), Some("ephemeral")).await, reusable);
    assert_eq!(ask(&cluster, &prompt(100), Some("ephemeral")).await, 0);
    for seed in 0..NORMAL {
        assert_eq!(ask(&cluster, &prompt(seed), None).await, reusable, "prompt {seed}");
    }
    assert_eq!(evicted(&cluster).await, 0.0);
    hears_of(&cluster, f64::from(NORMAL) * (2 * BLOCKS) as f64).await;
}

/// Without the header the same requests do.
#[tokio::test]
async fn as_many_normal_prompts_displace_what_came_before() {
    let cluster = with_normal_prompts().await;
    for seed in 100..100 + EPHEMERAL {
        ask(&cluster, &prompt(seed), None).await;
    }
    assert!(evicted(&cluster).await > 0.0);
    let mut found = 0;
    for seed in 0..NORMAL {
        found += ask(&cluster, &prompt(seed), None).await;
    }
    assert!(found < NORMAL as usize * BLOCKS * BLOCK_TOKENS, "all {found} are still there");
}
