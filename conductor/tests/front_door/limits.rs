//! Bounds: bodies, connections, requests at once.

use std::time::Duration;

use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::support::{Happened, Harness, Leg, Pair, Role, Script, World, config};

const COMPLETIONS: &str = "/v1/completions";

async fn start(
    decode: Script,
    change: impl FnOnce(&mut kvasir_conductor::Config),
) -> (World, Vec<Pair>, Harness) {
    let world = World::default();
    let pairs = vec![
        Pair::start(&world, "p", Role::Prefill, Script::default()).await,
        Pair::start(&world, "d", Role::Decode, decode).await,
    ];
    let mut config = config(&[&pairs[0], &pairs[1]]);
    change(&mut config);
    (world, pairs, Harness::start(config).await)
}

#[tokio::test]
async fn a_body_that_is_too_large_is_refused_and_the_next_request_served() {
    let (_, _pairs, harness) =
        start(Script::default(), |config| config.body_bytes_max = 1 << 20).await;
    let big = vec![b'a'; 3 << 20];
    let response = harness.post(COMPLETIONS, big.clone()).await;
    assert_eq!(response.status, 413);
    assert_eq!(response.json()["error"]["code"], "body_too_large");
    // Without an announced length, too.
    let pieces = big.chunks(1 << 18).map(|piece| Ok::<_, std::io::Error>(piece.to_vec()));
    let body = reqwest::Body::wrap_stream(futures::stream::iter(pieces.collect::<Vec<_>>()));
    assert_eq!(harness.post(COMPLETIONS, body).await.status, 413);
    // A client that looks for an answer only when all is sent gets one.
    let mut socket = TcpStream::connect(harness.address).await.expect("connects");
    let length = big.len();
    let head =
        format!("POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\ncontent-length: {length}\r\n\r\n");
    socket.write_all(head.as_bytes()).await.expect("sends");
    socket.write_all(&big).await.expect("all of it is taken");
    let mut answer = [0; 12];
    socket.read_exact(&mut answer).await.expect("an answer");
    assert_eq!(&answer, b"HTTP/1.1 413");
    let body = json!({"model": "tiny", "prompt": "x", "max_tokens": 1});
    assert_eq!(harness.ask(COMPLETIONS, body).await.status, 200);
}

#[tokio::test]
async fn bodies_together_are_bounded() {
    let (_, _pairs, harness) = start(Script::default(), |config| {
        config.body_bytes_max = 1 << 20;
        config.buffered_bodies_bytes_max = 1 << 20;
    })
    .await;
    // This one never comes to its end.
    let mut socket = TcpStream::connect(harness.address).await.expect("connects");
    let head = format!("POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000\r\n\r\n");
    socket.write_all(head.as_bytes()).await.expect("sends");
    socket.write_all(&vec![b' '; 900_000]).await.expect("sends");
    let held = "kvasir_conductor_buffered_bodies_bytes";
    harness.until_metric(held, |bytes| bytes >= 900_000.0).await;
    let body = format!("{}{}", " ".repeat(500_000), json!({"model": "tiny", "prompt": "x"}));
    let response = harness.post(COMPLETIONS, body.clone()).await;
    assert_eq!(response.status, 503);
    assert_eq!(response.json()["error"]["code"], "overloaded");
    drop(socket);
    harness.until_metric(held, |bytes| bytes == 0.0).await;
    assert_eq!(harness.post(COMPLETIONS, body.clone()).await.status, 200);
}

#[tokio::test]
async fn a_body_that_does_not_come_is_408_and_headers_that_do_not_come_close() {
    let (_, _pairs, harness) = start(Script::default(), |config| {
        config.body_read_timeout_ms = 100;
        config.header_read_timeout_ms = 3_000;
    })
    .await;
    let ask = async |text: &str| {
        let mut socket = TcpStream::connect(harness.address).await.expect("connects");
        socket.write_all(text.as_bytes()).await.expect("sends");
        let mut answer = String::new();
        let _ = socket.read_to_string(&mut answer).await;
        answer
    };
    let answer =
        ask("POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n{").await;
    assert!(answer.starts_with("HTTP/1.1 408"), "{answer:?}");
    assert!(!ask("POST /v1/completions HTTP/1.1\r\nhos").await.contains("200"));
}

#[tokio::test]
async fn beyond_the_connections_allowed_nobody_is_accepted_until_one_ends() {
    let (_, _pairs, harness) = start(Script::default(), |config| {
        config.connections_max = 2;
        config.header_read_timeout_ms = 60_000;
    })
    .await;
    // The client's own idle connection counts, so it is not used here.
    drop(harness.client);
    let get = "GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n";
    let mut answer = [0; 15];
    let mut open = Vec::new();
    for _ in 0..2 {
        let mut socket = TcpStream::connect(harness.address).await.expect("connects");
        socket.write_all(get.as_bytes()).await.expect("sends");
        socket.read_exact(&mut answer).await.expect("an answer");
        assert_eq!(&answer, b"HTTP/1.1 200 OK");
        open.push(socket);
    }
    let mut third = TcpStream::connect(harness.address).await.expect("the kernel takes it");
    third.write_all(get.as_bytes()).await.expect("sends");
    let early = tokio::time::timeout(Duration::from_millis(200), third.read_exact(&mut answer));
    assert!(early.await.is_err(), "it was served beside two others");
    open.pop();
    third.read_exact(&mut answer).await.expect("an answer");
    assert_eq!(&answer, b"HTTP/1.1 200 OK");
}

#[tokio::test]
async fn requests_beyond_those_allowed_at_once_are_429() {
    let decode = Script { decode: Leg::HangAfter(1), ..Script::default() };
    let (world, pairs, harness) = start(decode, |config| config.running_choices_max = 3).await;
    let body =
        |n: u32| json!({"model": "tiny", "prompt": [1], "n": n, "max_tokens": 2, "stream": true});
    let running = harness.open(COMPLETIONS, body(2).to_string()).await;
    assert_eq!(running.status().as_u16(), 200);
    let refused = harness.ask(COMPLETIONS, body(2)).await;
    assert_eq!(refused.status, 429);
    // Two seconds are what the profile gives an answer, less what has passed.
    let seconds = refused.headers["retry-after"].to_str().expect("text");
    assert!(["1", "2"].contains(&seconds), "{seconds}");
    assert_eq!(refused.json()["error"]["code"], "rate_limit_exceeded");
    assert_eq!(refused.json()["error"]["reason"], "too_many_requests");
    // More than there will ever be room for is not told to come back.
    let never = harness.ask(COMPLETIONS, body(4)).await;
    assert_eq!(never.status, 400, "{never:?}");
    assert!(never.text.contains("at most 3"), "{never:?}");
    // One still has room; nothing was taken by the one refused.
    let third = harness.open(COMPLETIONS, body(1).to_string()).await;
    assert_eq!(third.status().as_u16(), 200);
    drop((running, third));
    world.until_all_shares_are_aborted().await;
    pairs[1].change(|script| script.decode = Leg::Do);
    world
        .until("all legs are over", |log| {
            let begun = log.iter().filter(|h| matches!(h, Happened::Generate { .. })).count();
            let over = log.iter().filter(|h| matches!(h, Happened::GenerateOver { .. })).count();
            begun == over
        })
        .await;
    assert_eq!(harness.ask(COMPLETIONS, body(3)).await.status, 200);
}

#[tokio::test]
async fn a_prompt_that_takes_too_long_to_read_is_504() {
    let (world, _pairs, harness) =
        start(Script::default(), |config| config.request_timeout_ms = 1).await;
    // A million ids: parsed on another thread, in more than a millisecond.
    let body = format!("{{\"model\": \"tiny\", \"prompt\": [1{}]}}", ", 1".repeat(1_000_000));
    let response = harness.post(COMPLETIONS, body).await;
    assert_eq!(response.status, 504, "{response:?}");
    assert!(response.text.contains("while reading the prompt"), "{response:?}");
    assert_eq!(world.log(), []);
}
