//! A client that goes away, in every phase of its request, and an engine that hangs: the work stops,
//! and nothing is left over on any process.

mod support;

use std::time::Duration;

use futures::StreamExt;
use futures::future::join_all;
use rustix::process::Signal;
use serde_json::{Value, json};
use support::cluster::Cluster;
use support::eventually;
use support::load::{Amount, Ask, Fault, Outcome, Tally, all_answered, ask, load};
use support::rest::comes_to_rest;
use support::vectors::Variant;
use tokio::task::JoinHandle;

const REST_WITHIN: Duration = Duration::from_secs(20);
/// What nobody wants to wait for.
const ANSWER_TOKENS: u32 = 1_900;

/// Steps are short, so that every phase lasts for many of them.
async fn slow_cluster(domain: &str) -> Cluster {
    Cluster::start(&format!("--chunk-tokens 16 --lease-ms 60000 --domain {domain}")).await
}

/// A request for a long answer to a long prompt.
fn long_request(cluster: &Cluster, streamed: bool) -> Value {
    let mut prompt = Variant::Plain.longest().prompt;
    // A prompt of its own each time: nothing of it is cached.
    prompt[0] = 5 + rand_below(900);
    json!({
        "model": cluster.model,
        "prompt": prompt,
        "max_tokens": ANSWER_TOKENS,
        "temperature": 0,
        "ignore_eos": true,
        "stream": streamed,
    })
}

fn rand_below(end: u32) -> u32 {
    let nanos = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    nanos.map_or(0, |since| since.subsec_nanos()) / 64 % end
}

/// Sends it on a connection of its own. Aborting the task closes the connection.
fn send(cluster: &Cluster, body: Value) -> JoinHandle<Option<u16>> {
    let url = format!("{}/v1/completions", cluster.url);
    tokio::spawn(async move {
        let client = reqwest::Client::builder().pool_max_idle_per_host(0).build().ok()?;
        Some(client.post(url).json(&body).send().await.ok()?.status().as_u16())
    })
}

async fn engine(cluster: &Cluster, engine: &str, metric: &str) -> f64 {
    cluster.metrics(engine).await.sum(&format!("kvasir_engine_{metric}"), &[]).await_free()
}

trait AwaitFree {
    fn await_free(self) -> Self;
}
