//! Starting and ending a conductor.

use kvasir_conductor::{Conductor, Config, Error};
use kvasir_proto::v1;
use kvasir_proto::v1::scheduler_client::SchedulerClient;
use serde_json::json;

use crate::support::{Happened, Harness, Leg, Pair, Role, Script, World, config};

const COMPLETIONS: &str = "/v1/completions";

async fn streaming(drain_timeout_ms: u64) -> (World, Vec<Pair>, Harness, reqwest::Response) {
    let world = World::default();
    let decode = Script { decode: Leg::Hold, ..Script::default() };
    let pairs = vec![
        Pair::start(&world, "p", Role::Prefill, Script::default()).await,
        Pair::start(&world, "d", Role::Decode, decode).await,
    ];
    pairs[1].change(|script| script.decode = Leg::HangAfter(1));
    let mut config = config(&[&pairs[0], &pairs[1]]);
    config.drain_timeout_ms = drain_timeout_ms;
    let harness = Harness::start(config).await;
    let body = json!({"model": "tiny", "prompt": [1], "max_tokens": 2, "stream": true});
    let response = harness.open(COMPLETIONS, body.to_string()).await;
    assert_eq!(response.status().as_u16(), 200);
    (world, pairs, harness, response)
}

#[tokio::test]
async fn draining_refuses_new_requests_and_cancels_old_ones_when_it_takes_too_long() {
    let (world, _pairs, harness, _response) = streaming(500).await;
    harness.shutdown.cancel();
    harness.until("/readyz", |response| response.status == 503).await;
    let body = json!({"model": "tiny", "prompt": [1], "max_tokens": 2});
    let refused = harness.ask(COMPLETIONS, body).await;
    assert_eq!(refused.status, 503);
    assert_eq!(refused.json()["error"]["code"], "shutting_down");
    harness.served.await.expect("no panic").expect("ends well");
    world.until_all_shares_are_aborted().await;
}

#[tokio::test]
async fn draining_lets_requests_in_flight_end() {
    let world = World::default();
    let prefill = Script { prefill: Leg::Hold, ..Script::default() };
    let pairs = [
        Pair::start(&world, "p", Role::Prefill, prefill).await,
        Pair::start(&world, "d", Role::Decode, Script::default()).await,
    ];
    let harness = Harness::start(config(&[&pairs[0], &pairs[1]])).await;
    let body = json!({"model": "tiny", "prompt": [1], "max_tokens": 2, "seed": 4});
    let asking = harness.ask(COMPLETIONS, body);
    let ending = async {
        world
            .until("the legs begin", |log| {
                log.iter().any(|h| matches!(h, Happened::Generate { .. }))
            })
            .await;
        harness.shutdown.cancel();
        harness.until("/readyz", |response| response.status == 503).await;
        pairs[0].change(|script| script.prefill = Leg::Do);
    };
    let (response, ()) = tokio::join!(asking, ending);
    assert_eq!(response.json()["choices"][0]["text"], " s4t0 s4t1");
    harness.served.await.expect("no panic").expect("ends well");
    assert_eq!(world.count(|h| matches!(h, Happened::Abort { .. })), 0);
}

#[tokio::test]
async fn a_conductor_without_work_ends_at_once() {
    let harness = Harness::start_unready(Config { drain_timeout_ms: 60_000, ..config(&[]) }).await;
    // An idle connection does not hold it up.
    assert_eq!(harness.get("/healthz").await.status, 200);
    harness.shutdown.cancel();
    let ended = tokio::time::timeout(std::time::Duration::from_secs(10), harness.served).await;
    ended.expect("in time").expect("no panic").expect("ends well");
}

#[tokio::test]
async fn what_keeps_it_from_starting_is_one_clear_sentence() {
    let taken = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let address = taken.local_addr().expect("an address");
    let check = async |change: &dyn Fn(&mut Config), want: &str| {
        let mut config = config(&[]);
        change(&mut config);
        let error: Error = Conductor::bind(config).await.expect_err("cannot start");
        let text = error.to_string();
        assert!(text.contains(want), "{text:?} lacks {want:?}");
    };
    check(&|config| config.listen = address, &format!("cannot listen on {address}")).await;
    check(&|config| config.grpc_listen = address, &format!("cannot listen on {address}")).await;
    check(&|config| config.request_timeout_ms = 0, "`request_timeout_ms`").await;
    check(&|config| config.lease_ms = 999, "`lease_ms` must be at least 1000, not 999").await;
    check(&|config| config.kvcache_balancing_threshold = f64::NAN, "`kvcache_balancing_threshold`")
        .await;
    check(&|config| config.shortest_prefill_first_factor = -1.0, "`shortest_prefill_first_factor`")
        .await;
    check(&|config| config.models.push(config.models[0].clone()), "\"tiny\" twice").await;
    check(&|config| config.models[0].tokenizer_dir = "/nowhere".into(), "/nowhere/tokenizer.json")
        .await;
}

#[test]
fn unknown_settings_are_refused() {
    let parse = |text: &str| serde_json::from_str::<Config>(text);
    assert_eq!(parse("{}").expect("all have defaults"), Config::default());
    assert!(parse("{\"lease_ms\": 700}").is_ok());
    let error = parse("{\"lease\": 700}").expect_err("no such field").to_string();
    assert!(error.contains("lease_ms"), "{error}");
}

#[tokio::test]
async fn the_scheduler_answers_beside_the_front_door() {
    let world = World::default();
    let pairs = [
        Pair::start(&world, "p", Role::Prefill, Script::default()).await,
        Pair::start(&world, "d", Role::Decode, Script::default()).await,
    ];
    let harness = Harness::start(config(&[&pairs[0], &pairs[1]])).await;
    let mut client =
        SchedulerClient::connect(format!("http://{}", harness.grpc)).await.expect("connects");
    let request = v1::ScheduleRequest {
        model: "tiny".to_owned(),
        prompt: (0..40).collect(),
        max_tokens: 4,
        ..v1::ScheduleRequest::default()
    };
    let reply = client.schedule(request).await.expect("a plan").into_inner();
    assert_eq!(reply.prefill.expect("prefill").node_id, "p");
    assert_eq!(reply.decode.expect("decode").node_id, "d");
    assert_eq!(world.log(), [], "nothing was reserved");
}

#[tokio::test]
async fn a_connection_to_the_scheduler_may_have_a_bounded_number_of_calls_open() {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let harness = Harness::start_unready(config(&[])).await;
    let mut socket = tokio::net::TcpStream::connect(harness.grpc).await.expect("connects");
    // HTTP/2: the preface and empty settings; the server's come first in return.
    socket.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0").await.expect("sends");
    let mut head = [0; 9];
    socket.read_exact(&mut head).await.expect("a frame");
    let length = usize::from(u16::from_be_bytes([head[1], head[2]]));
    assert_eq!((head[0], head[3]), (0, 4), "a frame of settings: {head:?}");
    let mut settings = vec![0; length];
    socket.read_exact(&mut settings).await.expect("settings");
    let streams = settings.chunks(6).find(|setting| setting[..2] == [0, 3]);
    assert_eq!(streams.expect("MAX_CONCURRENT_STREAMS")[2..], [0, 0, 0, 128]);
}
