//! The process without a node: what it answers, and how it refuses to start.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;

use kvasir_proto::v1::engine_client::EngineClient;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tonic::Code;

use super::*;

fn config(dir: &Path) -> Config {
    let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../configs/models/tiny-deepseek-v2");
    Config {
        model_dir: model,
        attach_dir: dir.join("no-node"),
        listen: SocketAddr::from((Ipv4Addr::LOCALHOST, 0)),
        ..Config::default()
    }
}

/// Why the engine does not start.
async fn refusal(config: Config) -> String {
    let ended = run(config, CancellationToken::new()).await;
    ended.expect_err("it must not start").to_string()
}

pub(super) async fn get(address: SocketAddr, path: &str) -> String {
    let mut stream = tokio::net::TcpStream::connect(address).await.expect("it listens");
    let request = format!("GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).await.expect("written");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.expect("answered");
    answer
}

#[tokio::test]
async fn without_a_node_it_lives_is_not_ready_and_refuses_calls() {
    let dir = tempfile::tempdir().expect("a folder");
    let config = config(dir.path());
    let listener = TcpListener::bind(config.listen).await.expect("a port");
    let address = listener.local_addr().expect("an address");
    let loaded = load(&config).await.expect("the default model");
    let shutdown = CancellationToken::new();
    let engine = Engine::start(config, loaded).expect("it starts");
    let running = tokio::spawn(engine.serve(listener, address.to_string(), shutdown.clone()));

    assert!(get(address, "/healthz").await.starts_with("HTTP/1.1 200"));
    let ready = get(address, "/readyz").await;
    assert!(ready.starts_with("HTTP/1.1 503") && ready.contains("not attached"), "{ready}");
    let mut client =
        EngineClient::connect(format!("http://{address}")).await.expect("gRPC on the same port");
    let request = v1::GenerateRequest {
        tx: Some(v1::TxId { conductor_incarnation: 1, serial: 1 }),
        phase: v1::Phase::Full.into(),
        request_id: "r".into(),
        prompt: vec![5, 6],
        sampling: Some(v1::SamplingParams {
            top_p: 1.0,
            max_tokens: 4,
            ..v1::SamplingParams::default()
        }),
        namespace: vec![0; 16],
        priority_delay_us: 0,
        routed: Vec::new(),
        chunks: Vec::new(),
    };
    let refused = client.generate(request.clone()).await.expect_err("there is no node");
    assert_eq!(refused.code(), Code::Unavailable);
    let empty = v1::GenerateRequest { prompt: Vec::new(), ..request };
    let refused = client.generate(empty).await.expect_err("there is no prompt");
    assert_eq!(refused.code(), Code::InvalidArgument);
    let metrics = get(address, "/metrics").await;
    for line in [
        "kvasir_engine_prompt_tokens_computed_total 0",
        "kvasir_engine_attach_epoch 0",
        "kvasir_engine_requests_refused_total{reason=\"unattached\"} 1",
        "kvasir_engine_requests_refused_total{reason=\"invalid\"} 1",
    ] {
        assert!(metrics.contains(line), "{line} is not in {metrics}");
    }

    shutdown.cancel();
    drop(client);
    running.await.expect("no panic").expect("it stops as asked");
}

/// A store node of so much memory.
async fn node(dir: &Path, dram_bytes: u64) -> kvasir_store_node::Running {
    let config = kvasir_store_node::config::Config {
        listen: SocketAddr::from((Ipv4Addr::LOCALHOST, 0)),
        attach_dir: dir.join("node"),
        dram_bytes,
        ..kvasir_store_node::config::Config::default()
    };
    kvasir_store_node::start(config).await.expect("a node")
}

#[tokio::test]
async fn a_node_that_will_never_take_it_ends_it_with_what_to_set() {
    let dir = tempfile::tempdir().expect("a folder");
    let _node = node(dir.path(), 4096).await;
    let why = refusal(Config { attach_dir: dir.path().join("node"), ..config(dir.path()) }).await;
    assert!(why.contains("refused this engine") && why.contains("set `dram_bytes` to"), "{why}");
}

#[tokio::test]
async fn a_node_that_has_another_engine_is_asked_again_until_that_one_has_left() {
    let dir = tempfile::tempdir().expect("a folder");
    let _node = node(dir.path(), 64 << 20).await;
    let start = async || {
        let config = Config { attach_dir: dir.path().join("node"), ..config(dir.path()) };
        let listener = TcpListener::bind(config.listen).await.expect("a port");
        let address = listener.local_addr().expect("an address").to_string();
        let engine = Engine::start(config.clone(), load(&config).await.expect("the model"));
        let engine = engine.expect("it starts");
        let (metrics, shutdown) = (engine.shared.metrics.clone(), CancellationToken::new());
        let running = tokio::spawn(engine.serve(listener, address, shutdown.clone()));
        (metrics, shutdown, running)
    };
    let (first, end_first, first_running) = start().await;
    while first.attaches.get() == 0 {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let (second, end_second, second_running) = start().await;
    tokio::time::sleep(2 * crate::attach::BACK_OFF_MIN).await;
    assert!(!second_running.is_finished() && second.attaches.get() == 0, "it waits");
    end_first.cancel();
    first_running.await.expect("no panic").expect("it stops as asked");
    while second.attaches.get() == 0 {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    end_second.cancel();
    second_running.await.expect("no panic").expect("it stops as asked");
}

/// What the server lets one connection have open, as it says first of all.
async fn streams_max(address: SocketAddr) -> u32 {
    let mut stream = tokio::net::TcpStream::connect(address).await.expect("it listens");
    stream.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n").await.expect("written");
    stream.write_all(&[0, 0, 0, 4, 0, 0, 0, 0, 0]).await.expect("settings of our own");
    let mut head = [0; 9];
    stream.read_exact(&mut head).await.expect("a frame");
    assert_eq!((head[0], head[3]), (0, 4), "settings come first");
    let mut settings = vec![0; usize::from(u16::from_be_bytes([head[1], head[2]]))];
    stream.read_exact(&mut settings).await.expect("the settings");
    let max = settings.chunks(6).find(|setting| setting[..2] == [0, 3]).expect("a bound");
    u32::from_be_bytes([max[2], max[3], max[4], max[5]])
}

#[tokio::test]
async fn a_connection_has_room_for_more_calls_than_the_engine_admits_and_not_for_all() {
    let dir = tempfile::tempdir().expect("a folder");
    let config = Config { running_requests_max: 3, waiting_requests_max: 4, ..config(dir.path()) };
    let listener = TcpListener::bind(config.listen).await.expect("a port");
    let address = listener.local_addr().expect("an address");
    let loaded = load(&config).await.expect("the default model");
    let engine = Engine::start(config, loaded).expect("it starts");
    let shutdown = CancellationToken::new();
    let running = tokio::spawn(engine.serve(listener, address.to_string(), shutdown.clone()));
    assert_eq!(streams_max(address).await, 3 + 4 + 256);
    shutdown.cancel();
    running.await.expect("no panic").expect("it stops as asked");
}

#[tokio::test]
async fn what_keeps_it_from_starting_is_said_in_a_sentence() {
    let dir = tempfile::tempdir().expect("a folder");
    let zero = Config { prefill_chunk_tokens: 0, ..config(dir.path()) };
    assert!(refusal(zero).await.contains("`prefill_chunk_tokens` must be at least 1"));
    let everywhere = SocketAddr::from((Ipv4Addr::UNSPECIFIED, 0));
    let unreachable = Config { listen: everywhere, ..config(dir.path()) };
    assert!(refusal(unreachable).await.contains("`advertise_address`"));
    let taken = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.expect("a port");
    let listen = taken.local_addr().expect("an address");
    let twice = Config { listen, ..config(dir.path()) };
    assert!(refusal(twice).await.contains(&format!("cannot listen on {listen}")));
    let nowhere = Config { model_dir: PathBuf::from("no/such/model"), ..config(dir.path()) };
    let why = refusal(nowhere).await;
    assert!(why.contains("cannot load the model") && why.contains("no/such/model"), "{why}");
    let log = dir.path().join("no-folder/layers.jsonl");
    let unwritable = Config { layer_log_file: Some(log), ..config(dir.path()) };
    assert!(refusal(unwritable).await.contains("cannot write the layer log"));
}
