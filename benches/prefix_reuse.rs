//! What the cache saves of a conversation's second turn.
//!
//! `cargo bench -p kvasir --bench prefix_reuse` starts a real cluster with `kvasir up`, prefill and
//! decode apart, and asks each of `LENGTHS` twice, `REPEATS` times with fresh tokens:
//!
//! - *cold*: a prompt of that length that nobody has seen;
//! - *second turn*: a prompt of the same length whose beginning was an earlier prompt, with
//!   `NEW_TOKENS` new ones at its end.
//!
//! Compared is the time to the first token, from sending the request to the first piece of the
//! stream, as medians. Expected: the second turn computes what is new and the rest of the last
//! block, so its ratio falls as prompts grow. Prints Markdown; exits 1 when a second turn is not
//! faster than a cold prompt.
#![allow(clippy::print_stdout, reason = "its output is its purpose")]

#[path = "../tests/e2e/support/mod.rs"]
mod support;

use std::process::ExitCode;
use std::time::Instant;

use serde_json::json;
use support::cluster::Cluster;

/// Named here, so that figures stay comparable when `kvasir up` bundles another model.
const MODEL: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../configs/models/tiny-deepseek-v2");
const LENGTHS: [usize; 4] = [512, 1024, 2048, 4032];
const NEW_TOKENS: usize = 40;
const REPEATS: u64 = 9;

/// Fresh tokens for each seed, so that only what is meant to be is found in the cache.
fn prompt(seed: u64, length: usize) -> Vec<u32> {
    let mut state = seed;
    std::iter::once(0)
        .chain(std::iter::repeat_with(move || {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            5 + (state >> 40) as u32 % 1000
        }))
        .take(length)
        .collect()
}

/// Milliseconds to the first token of the answer.
async fn first_token_ms(cluster: &Cluster, prompt: &[u32]) -> f64 {
    let url = format!("{}/v1/completions", cluster.url);
    let body = json!({
        "model": cluster.model, "prompt": prompt, "max_tokens": 1, "temperature": 0,
        "ignore_eos": true, "stream": true,
    });
    let began = Instant::now();
    let mut reply = cluster.client.post(url).json(&body).send().await.expect("an answer");
    assert_eq!(reply.status(), 200);
    reply.chunk().await.expect("a stream").expect("a first piece");
    let took_ms = began.elapsed().as_secs_f64() * 1e3;
    while reply.chunk().await.expect("a stream").is_some() {}
    took_ms
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

#[tokio::main]
async fn main() -> ExitCode {
    let flags = format!("--model-dir {MODEL} --prefill 1 --decode 1 --dram-bytes 512MiB");
    let cluster = Cluster::start(&flags).await;
    println!("| tokens | cold ms | second turn ms | ratio |");
    println!("| --- | --- | --- | --- |");
    let mut all_faster = true;
    for length in LENGTHS {
        let (mut cold, mut second) = (Vec::new(), Vec::new());
        for repeat in 0..REPEATS {
            let seed = length as u64 * 1_000 + repeat;
            cold.push(first_token_ms(&cluster, &prompt(2 * seed, length)).await);
            let turn = prompt(2 * seed + 1, length);
            first_token_ms(&cluster, &turn[..length - NEW_TOKENS]).await;
            second.push(first_token_ms(&cluster, &turn).await);
        }
        let (cold, second) = (median(cold), median(second));
        all_faster &= second < cold;
        println!("| {length} | {cold:.1} | {second:.1} | {:.2} |", second / cold);
    }
    if all_faster { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
