//! A client that goes away, a deadline that passes: in whatever phase, every share that was asked
//! for is given back and both engines are let go.

use std::time::Duration;

use serde_json::{Value, json};

use crate::support::{
    Happened, Harness, Leg, Pair, Reply, Role, Script, World, config, prompt_keys,
};

const COMPLETIONS: &str = "/v1/completions";

/// A long prompt, so that a fetch is worth it.
fn prompt() -> Vec<u32> {
    (0..400).map(|id| id % 1000).collect()
}

fn body() -> Value {
    json!({"model": "tiny", "prompt": prompt(), "max_tokens": 20, "stream": true})
}

struct Case {
    prefill: Script,
    decode: Script,
    /// What has happened when the request is to be cancelled.
    reached: fn(&[Happened]) -> bool,
    phase: &'static str,
}

fn cases() -> Vec<Case> {
    let normal = Script::default;
    let generating = |log: &[Happened]| {
        log.iter().filter(|happened| matches!(happened, Happened::Generate { .. })).count() == 2
    };
    vec![
        Case {
            prefill: normal(),
            decode: Script { allocate: Reply::Hang, ..normal() },
            reached: |log| {
                log.iter().filter(|h| matches!(h, Happened::Allocate { .. })).count() == 2
            },
            phase: "allocating",
        },
        Case {
            // The source is never seen to be cut off, so the engine is never bound.
            prefill: Script { commit: Reply::Hang, prefill: Leg::Hang, ..normal() },
            // It holds the blocks, and never lets them go.
            decode: Script { push: Reply::Hang, keys: prompt_keys(&prompt()), ..normal() },
            reached: |log| {
                let push = |h: &Happened| matches!(h, Happened::Push { node: "d", .. });
                log.iter().any(push)
            },
            phase: "fetching",
        },
        Case {
            prefill: Script { prefill: Leg::Hang, ..normal() },
            decode: normal(),
            reached: generating,
            phase: "prefilling",
        },
        Case {
            prefill: normal(),
            decode: Script { decode: Leg::HangAfter(2), ..normal() },
            reached: generating,
            phase: "decoding",
        },
    ]
}

async fn start(case: &Case, deadline_ms: u64) -> (World, Vec<Pair>, Harness) {
    let world = World::default();
    let pairs = vec![
        Pair::start(&world, "p", Role::Prefill, case.prefill.clone()).await,
        Pair::start(&world, "d", Role::Decode, case.decode.clone()).await,
    ];
    let mut config = config(&[&pairs[0], &pairs[1]]);
    config.request_timeout_ms = deadline_ms;
    // So that no lease plays a part, and a hanging allocation is not given up first.
    config.lease_ms = 60_000;
    (world, pairs, Harness::start(config).await)
}

async fn engines_are_let_go(world: &World) {
    world
        .until("an end of each leg that began", |log| {
            let begun = log.iter().filter(|h| matches!(h, Happened::Generate { .. })).count();
            let over = log.iter().filter(|h| matches!(h, Happened::GenerateOver { .. })).count();
            begun == over
        })
        .await;
}

#[tokio::test]
async fn a_client_that_goes_leaves_nothing_behind_in_any_phase() {
    for case in cases() {
        let (world, _pairs, harness) = start(&case, 60_000).await;
        let phase = case.phase;
        let request = harness.client.post(format!("{}{COMPLETIONS}", harness.url));
        let request = request.body(body().to_string()).send();
        let asking = tokio::spawn(async move {
            let mut response = request.await.expect("an answer begins");
            while response.chunk().await.expect("a chunk").is_some() {}
        });
        world.until(phase, case.reached).await;
        if phase == "decoding" {
            // The client has seen text before it goes.
            let choices = "kvasir_conductor_ttft_seconds_count";
            harness.until_metric(choices, |count| count >= 1.0).await;
        }
        assert_eq!(world.count(|h| matches!(h, Happened::Abort { .. })), 0, "{phase}");
        asking.abort();
        world.until_all_shares_are_aborted().await;
        engines_are_let_go(&world).await;
        let metric = format!("kvasir_conductor_transactions_aborted_total{{phase=\"{phase}\"}}");
        assert_eq!(harness.metric(&metric).await, 1.0, "{metric}");
        assert_eq!(harness.metric("kvasir_conductor_choices_in_flight").await, 0.0);
        let gone = "kvasir_conductor_choices_total{outcome=\"client_disconnected\"}";
        assert_eq!(harness.metric(gone).await, 1.0);
    }
}

#[tokio::test]
async fn a_deadline_is_504_and_leaves_nothing_behind_in_any_phase() {
    for case in cases() {
        let (world, _pairs, harness) = start(&case, 400).await;
        let response = harness.ask(COMPLETIONS, body()).await;
        if case.phase == "decoding" {
            // The status was sent already.
            assert_eq!(response.status, 200);
            let events = response.events();
            let last = events.last().expect("an error");
            assert_eq!(last["error"]["code"], "request_timeout", "{events:?}");
            assert!(events.len() > 1, "text came first");
        } else {
            assert_eq!(response.status, 504, "{response:?}");
            let error = &response.json()["error"];
            assert_eq!(error["code"], "request_timeout");
            assert!(error["message"].as_str().expect("text").contains(case.phase), "{error}");
        }
        world.until_all_shares_are_aborted().await;
        engines_are_let_go(&world).await;
    }
}

#[tokio::test]
async fn a_client_that_reads_nothing_is_cut_off_and_its_request_cancelled() {
    let world = World::default();
    // More text than sockets can hold, so that the client's silence is felt.
    let big = Script { padding: "x".repeat(64 << 10), ..Script::default() };
    let prefill = Pair::start(&world, "p", Role::Prefill, Script::default()).await;
    let decode = Pair::start(&world, "d", Role::Decode, big).await;
    let mut config = config(&[&prefill, &decode]);
    config.write_stall_timeout_ms = 300;
    let harness = Harness::start(config).await;
    let body =
        json!({"model": "tiny", "prompt": [1, 2], "max_tokens": 400, "stream": true}).to_string();
    let mut socket = tokio::net::TcpStream::connect(harness.address).await.expect("connects");
    let request = format!(
        "POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    );
    tokio::io::AsyncWriteExt::write_all(&mut socket, request.as_bytes()).await.expect("sends");
    world.until_all_shares_are_aborted().await;
    engines_are_let_go(&world).await;
    assert_eq!(harness.metric("kvasir_conductor_slow_clients_disconnected_total").await, 1.0);
    // Others are not disturbed.
    decode.change(|script| script.padding.clear());
    let body = json!({"model": "tiny", "prompt": [1, 2], "max_tokens": 2});
    assert_eq!(harness.ask(COMPLETIONS, body).await.status, 200);
    drop(socket);
}

#[tokio::test]
async fn a_client_that_reads_late_gets_everything_and_keeps_nobody_waiting() {
    const PADDING_BYTES: usize = 64 << 10;
    const TOKENS: usize = 400;
    let world = World::default();
    // More text than sockets can hold: most of it waits in the engine until the client reads.
    let big = Script { padding: "x".repeat(PADDING_BYTES), ..Script::default() };
    let prefill = Pair::start(&world, "p", Role::Prefill, Script::default()).await;
    let decode = Pair::start(&world, "d", Role::Decode, big).await;
    let mut config = config(&[&prefill, &decode]);
    config.write_stall_timeout_ms = 60_000;
    let harness = Harness::start(config).await;
    let body = json!({"model": "tiny", "prompt": [1, 2], "max_tokens": TOKENS, "stream": true});
    let body = body.to_string();
    let mut socket = tokio::net::TcpStream::connect(harness.address).await.expect("connects");
    let request = format!(
        "POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    );
    tokio::io::AsyncWriteExt::write_all(&mut socket, request.as_bytes()).await.expect("sends");
    for _ in 0..20 {
        let body = json!({"model": "tiny", "prompt": [1, 2], "max_tokens": 2, "stream": true});
        let response = harness.ask(COMPLETIONS, body).await;
        assert_eq!(response.status, 200);
        assert!(response.text.ends_with("data: [DONE]\n\n"));
    }
    let mut answer = Vec::new();
    let read = tokio::io::AsyncReadExt::read_to_end(&mut socket, &mut answer);
    tokio::time::timeout(Duration::from_secs(60), read).await.expect("in time").expect("a body");
    let answer = String::from_utf8(answer).expect("text");
    assert!(answer.contains("data: [DONE]"), "it ends as it should");
    assert!(answer.len() > TOKENS * PADDING_BYTES, "{} bytes", answer.len());
    assert_eq!(harness.metric("kvasir_conductor_slow_clients_disconnected_total").await, 0.0);
}

#[tokio::test]
async fn one_choice_that_fails_takes_the_others_with_it() {
    let case = Case {
        prefill: Script::default(),
        decode: Script { decode: Leg::HangAfter(2), ..Script::default() },
        reached: |_| true,
        phase: "",
    };
    let (world, _pairs, harness) = start(&case, 400).await;
    let body = json!({"model": "tiny", "prompt": [[1, 2], [3]], "n": 2, "max_tokens": 5});
    assert_eq!(harness.ask(COMPLETIONS, body).await.status, 504);
    world.until_all_shares_are_aborted().await;
    assert_eq!(world.count(|h| matches!(h, Happened::Allocate { .. })), 8, "four transactions");
}
