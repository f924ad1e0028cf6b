//! A client that goes away, in every phase of its request: the work stops, and nothing is left over
//! on any process. Leases are long here, so that it is not they that clean up.

use std::time::Duration;

use crate::support::cluster::Cluster;
use crate::support::eventually;
use crate::support::load::{Amount, all_answered};
use crate::support::rest::comes_to_rest;
use crate::support::vectors::Variant;
use futures::StreamExt;
use serde_json::{Value, json};
use tokio::task::JoinHandle;

const REST_WITHIN: Duration = Duration::from_secs(20);
const PROMPT_TOKENS: usize = 1_800;
/// What nobody will wait for.
const ANSWER_TOKENS: usize = 2_000;

const COMPUTED: &str = "kvasir_engine_prompt_tokens_computed_total";
const ANSWERED: &str = "kvasir_engine_generated_tokens_total";

/// A cluster whose steps are short, so that every phase takes many of them.
struct Slow {
    cluster: Cluster,
    prefill: &'static str,
    decode: &'static str,
}

impl Slow {
    async fn start(flags: &str) -> Slow {
        let flags =
            format!("--prefill-chunk-tokens 16 --lease-ms 60000 --dram-bytes 128MiB {flags}");
        let both = flags.contains("--both");
        let (prefill, decode) = if both { ("both-1", "both-1") } else { ("prefill-1", "decode-1") };
        Slow { cluster: Cluster::start(&flags).await, prefill, decode }
    }

    async fn count(&self, process: &str, metric: &str, labels: &[(&str, &str)]) -> f64 {
        self.cluster.metrics(process).await.sum(metric, labels)
    }

    /// Requests that were given up because their clients had gone.
    async fn gone(&self) -> f64 {
        let labels = [("outcome", "client_disconnected")];
        self.count("conductor", "kvasir_conductor_choices_total", &labels).await
    }

    async fn given_up_in(&self, phase: &str) -> f64 {
        let metric = "kvasir_conductor_transactions_aborted_total";
        self.count("conductor", metric, &[("phase", phase)]).await
    }

    /// Sends a request on a connection of its own. Dropping what comes back closes it.
    fn send(&self, body: Value) -> Client {
        let url = format!("{}/v1/completions", self.cluster.url);
        Client(tokio::spawn(async move {
            let reply = reqwest::Client::new().post(url).json(&body).send().await;
            panic!("it was to be cut off, and has {:?}", reply.map(|reply| reply.status()));
        }))
    }

    /// A request that would take long. Each `serial` has a prompt of its own.
    fn request(&self, serial: u32, prompt_tokens: usize, streamed: bool) -> Value {
        let mut prompt = Variant::Plain.longest().prompt;
        prompt.truncate(prompt_tokens);
        prompt[1] = 5 + serial;
        json!({
            "model": self.cluster.model,
            "prompt": prompt,
            "max_tokens": ANSWER_TOKENS,
            "temperature": 0,
            "ignore_eos": true,
            "stream": streamed,
        })
    }
}

struct Client(JoinHandle<()>);

impl Drop for Client {
    fn drop(&mut self) {
        self.0.abort();
    }
}

async fn left_while_queued(slow: &Slow) {
    let gone = slow.gone().await;
    // More than take part in steps at once.
    let clients: Vec<Client> =
        (100..140).map(|serial| slow.send(slow.request(serial, 150, false))).collect();
    eventually("some are queued", async || {
        slow.count(slow.prefill, "kvasir_engine_waiting_requests", &[]).await > 0.0
    })
    .await;
    let asked = clients.len() as f64;
    drop(clients);
    comes_to_rest(&slow.cluster, REST_WITHIN).await;
    assert_eq!(slow.gone().await, gone + asked);
}

async fn left_during_prefill(slow: &Slow, streamed: bool) {
    let (gone, given_up) = (slow.gone().await, slow.given_up_in("prefilling").await);
    let computed = slow.count(slow.prefill, COMPUTED, &[]).await;
    let answered = slow.count(slow.decode, ANSWERED, &[]).await;
    let client = slow.send(slow.request(u32::from(streamed), PROMPT_TOKENS, streamed));
    eventually("the prompt is being computed", async || {
        slow.count(slow.prefill, COMPUTED, &[]).await > computed
    })
    .await;
    drop(client);
    comes_to_rest(&slow.cluster, REST_WITHIN).await;
    assert_eq!(slow.gone().await, gone + 1.0);
    assert_eq!(slow.given_up_in("prefilling").await, given_up + 1.0);
    let computed = slow.count(slow.prefill, COMPUTED, &[]).await - computed;
    assert!(computed < PROMPT_TOKENS as f64, "all {computed} tokens were computed");
    assert_eq!(slow.count(slow.decode, ANSWERED, &[]).await, answered);
}

async fn left_during_decode(slow: &Slow) {
    let (gone, given_up) = (slow.gone().await, slow.given_up_in("decoding").await);
    let answered = slow.count(slow.decode, ANSWERED, &[]).await;
    let client = slow.send(slow.request(2, 150, false));
    eventually("the answer is being made", async || {
        slow.count(slow.decode, ANSWERED, &[]).await > answered
    })
    .await;
    drop(client);
    check_broken_off(slow, answered, gone, given_up).await;
}

async fn left_during_a_stream(slow: &Slow) {
    let (gone, given_up) = (slow.gone().await, slow.given_up_in("decoding").await);
    let answered = slow.count(slow.decode, ANSWERED, &[]).await;
    let url = format!("{}/v1/completions", slow.cluster.url);
    let client = reqwest::Client::new();
    let reply = client.post(url).json(&slow.request(3, 150, true)).send().await;
    let mut body = reply.expect("an answer").bytes_stream();
    for _ in 0..3 {
        assert!(matches!(body.next().await, Some(Ok(_))));
    }
    drop((body, client));
    check_broken_off(slow, answered, gone, given_up).await;
}

async fn check_broken_off(slow: &Slow, answered: f64, gone: f64, given_up: f64) {
    comes_to_rest(&slow.cluster, REST_WITHIN).await;
    assert_eq!(slow.gone().await, gone + 1.0);
    assert_eq!(slow.given_up_in("decoding").await, given_up + 1.0);
    let answered = slow.count(slow.decode, ANSWERED, &[]).await - answered;
    assert!(answered < ANSWER_TOKENS as f64, "all {answered} tokens were made");
}

async fn check_all_phases(flags: &str) {
    let slow = Slow::start(flags).await;
    left_while_queued(&slow).await;
    left_during_prefill(&slow, false).await;
    left_during_prefill(&slow, true).await;
    left_during_decode(&slow).await;
    left_during_a_stream(&slow).await;
    // And it is as good as new.
    let deadline = Duration::from_secs(60);
    let amount = Amount { at_once: 24, total: 24, deadline };
    all_answered(&slow.cluster, &Variant::Plain.cases(), amount).await;
    comes_to_rest(&slow.cluster, REST_WITHIN).await;
}

#[tokio::test]
async fn over_shared_memory_a_client_that_leaves_in_any_phase_leaves_nothing_behind() {
    check_all_phases("--transport shm").await;
}

#[tokio::test]
async fn over_tcp_a_client_that_leaves_in_any_phase_leaves_nothing_behind() {
    check_all_phases("--transport tcp").await;
}

#[tokio::test]
async fn with_one_engine_for_both_a_client_that_leaves_in_any_phase_leaves_nothing_behind() {
    check_all_phases("--both 1").await;
}
