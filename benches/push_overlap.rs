//! What is left of the push when a prefill ends, and whether pushing slows the prefill.
//!
//! `cargo bench -p kvasir --bench push_overlap` starts real clusters with `kvasir up`, sends
//! prompts of 512 to 4,032 tokens in chunks of 512, each many times (`repeats`) with fresh tokens, with
//! nothing else running and with 8 streams decoding beside them, and reads the layer logs of
//! engine and node:
//!
//! - *left*: from "the last layer of the last chunk is computed" to "its last byte has landed";
//! - *budget*: the time that the last chunk's last layer itself takes on the wire in that run
//!   (issued to landed), plus 1 ms;
//! - *slowed*: the prefill's own time (first layer of the first chunk to last layer of the last
//!   one) over that of a cluster that does not push, alternating with it run by run.
//!
//! Expected: left within budget everywhere, slowed under 2 %. Prints Markdown; exits 1 when a
//! median is over its budget.
#![allow(clippy::print_stdout, reason = "its output is its purpose")]

#[path = "../tests/e2e/support/mod.rs"]
mod support;

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use serde_json::{Value, json};
use support::cluster::Cluster;

/// Named here, so that figures stay comparable when `kvasir up` bundles another model.
const MODEL: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../configs/models/tiny-deepseek-v2");
const LENGTHS: [u32; 5] = [512, 1024, 2048, 3072, 4032];
const CHUNK_TOKENS: u32 = 512;
const LAYERS: u64 = 3;
const STREAMS: usize = 8;
const SLACK_US: f64 = 1000.0;
const SLOWED_MAX: f64 = 1.02;

/// One prefill as the logs tell it.
#[derive(Debug, Clone, Copy)]
struct Run {
    prefill_us: f64,
    /// `None` where nothing is pushed.
    push: Option<Push>,
}

#[derive(Debug, Clone, Copy)]
struct Push {
    left_us: f64,
    last_layer_us: f64,
}

struct Bench {
    cluster: Cluster,
    logs: PathBuf,
    pushes: bool,
}

impl Bench {
    async fn start(logs: &Path, name: &str, flags: &str) -> Bench {
        let logs = logs.join(name);
        std::fs::create_dir_all(&logs).expect("a folder for logs");
        let flags = format!(
            "{flags} --model-dir {MODEL} --prefill-chunk-tokens {CHUNK_TOKENS} --dram-bytes 512MiB \
             --layer-log-dir {}",
            logs.display()
        );
        let pushes = !flags.contains("--no-push");
        Bench { cluster: Cluster::start(&flags).await, logs, pushes }
    }

    /// Sends one prompt and reads what the logs say of it.
    async fn run(&self, prompt: &[u32]) -> Run {
        let seen = (self.lines("prefill-1").len(), self.lines("prefill-1-node").len());
        let answer = self.cluster.complete(prompt, 1);
        let chunks = prompt.len().div_ceil(CHUNK_TOKENS as usize);
        let wanted = chunks * LAYERS as usize;
        let mut answer = std::pin::pin!(answer);
        let mut answered = false;
        loop {
            tokio::select! {
                reply = &mut answer, if !answered => {
                    assert!(!self.pushes || reply.0 == 200, "{}", reply.1);
                    answered = true;
                }
                () = tokio::time::sleep(Duration::from_millis(50)) => {}
            }
            let computed = self.lines("prefill-1").split_off(seen.0);
            let pushed = self.lines("prefill-1-node").split_off(seen.1);
            if computed.len() >= wanted && (!self.pushes || pushed.len() >= wanted) {
                return run(&computed, &pushed, self.pushes);
            }
        }
    }

    fn lines(&self, process: &str) -> Vec<Value> {
        let path = self.logs.join(format!("{process}.log"));
        let text = std::fs::read_to_string(path).unwrap_or_default();
        text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect()
    }
}

fn number(line: &Value, key: &str) -> f64 {
    line[key].as_f64().unwrap_or_else(|| panic!("{key} is missing in {line}"))
}

fn run(computed: &[Value], pushed: &[Value], pushes: bool) -> Run {
    let first = number(&computed[0], "computed_us");
    let end = computed.iter().map(|line| number(line, "computed_us")).fold(0.0, f64::max);
    let push = pushes.then(|| {
        let landed = pushed.iter().map(|line| number(line, "landed_us")).fold(0.0, f64::max);
        let last = pushed
            .iter()
            .max_by(|a, b| number(a, "issued_us").total_cmp(&number(b, "issued_us")))
            .expect("something was pushed");
        Push {
            left_us: landed - end,
            last_layer_us: number(last, "landed_us") - number(last, "issued_us"),
        }
    });
    Run { prefill_us: end - first, push }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Streams that decode until they are dropped; each begins anew when its answer has ended.
fn decode_beside(cluster: &Cluster) -> Vec<tokio::task::JoinHandle<()>> {
    (0..STREAMS)
        .map(|stream| {
            let client = cluster.client.clone();
            let url = format!("{}/v1/completions", cluster.url);
            let model = cluster.model.clone();
            tokio::spawn(async move {
                loop {
                    let body = json!({
                        "model": model, "prompt": [0, 5 + stream], "max_tokens": 4000,
                        "temperature": 0, "ignore_eos": true, "stream": true,
                    });
                    let Ok(mut reply) = client.post(&url).json(&body).send().await else { return };
                    while let Ok(Some(_)) = reply.chunk().await {}
                }
            })
        })
        .collect()
}

/// Fresh tokens each time, so that nothing is found in the cache.
fn prompt(seed: u32, length: u32) -> Vec<u32> {
    let mut state = u64::from(seed) << 32 | u64::from(length);
    std::iter::once(0)
        .chain(std::iter::repeat_with(move || {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            5 + (state >> 40) as u32 % 1000
        }))
        .take(length as usize)
        .collect()
}

/// Short prefills vary more from one to the next.
fn repeats(length: u32) -> u32 {
    if length <= 1024 { 27 } else { 9 }
}

async fn table(domain: &str, beside: bool, logs: &Path) -> bool {
    let with = Bench::start(logs, "with", &format!("--transport {domain}")).await;
    let flags = format!("--transport {domain} --no-push --request-timeout-ms 1500");
    let without = Bench::start(logs, "without", &flags).await;
    let streams = if beside { decode_beside(&with.cluster) } else { Vec::new() };
    let what = if beside { "8 streams decoding beside" } else { "nothing beside" };
    println!("\n### {domain}, {what}\n");
    println!("| tokens | prefill ms | left ms | budget ms | largest left ms | slowed |");
    println!("| --- | --- | --- | --- | --- | --- |");
    let mut all_within = true;
    for length in LENGTHS {
        let (mut pushed, mut alone) = (Vec::new(), Vec::new());
        for repeat in 0..repeats(length) {
            pushed.push(with.run(&prompt(2 * repeat + 1, length)).await);
            if !beside {
                alone.push(without.run(&prompt(2 * repeat + 2, length)).await);
            }
        }
        let pushes: Vec<Push> = pushed.iter().filter_map(|run| run.push).collect();
        let left = median(pushes.iter().map(|push| push.left_us).collect());
        let worst = pushes.iter().map(|push| push.left_us).fold(0.0, f64::max);
        let budget = median(pushes.iter().map(|push| push.last_layer_us).collect()) + SLACK_US;
        let prefill = median(pushed.iter().map(|run| run.prefill_us).collect());
        let slowed =
            (!beside).then(|| prefill / median(alone.iter().map(|run| run.prefill_us).collect()));
        all_within &= left <= budget && slowed.is_none_or(|slowed| slowed <= SLOWED_MAX);
        let slowed = slowed.map_or_else(|| "-".to_owned(), |slowed| format!("{slowed:.3}"));
        println!(
            "| {length} | {:.1} | {:.2} | {:.2} | {:.2} | {slowed} |",
            prefill / 1e3,
            left / 1e3,
            budget / 1e3,
            worst / 1e3,
        );
    }
    streams.iter().for_each(tokio::task::JoinHandle::abort);
    all_within
}

#[tokio::main]
async fn main() -> ExitCode {
    let logs = tempfile::tempdir().expect("a temporary folder");
    let mut all_within = true;
    for domain in ["shm", "tcp"] {
        for beside in [false, true] {
            let logs = logs.path().join(format!("{domain}-{beside}"));
            all_within &= table(domain, beside, &logs).await;
        }
    }
    if all_within { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
