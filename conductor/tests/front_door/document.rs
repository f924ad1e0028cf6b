//! The OpenAPI document against the server: routes, methods and statuses. That answers have the form
//! that it says is checked wherever a test reads one.

use kvasir_conductor::Config;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::support::contract::document;
use crate::support::{Harness, Leg, Pair, Role, Script, World, config};

const ASKING: [&str; 3] = ["/v1/chat/completions", "/v1/completions", "/v1/responses"];

fn body(path: &str, prompt: &str) -> Value {
    match path {
        "/v1/completions" => json!({"model": "tiny", "prompt": prompt, "max_tokens": 1}),
        "/v1/responses" => json!({"model": "tiny", "input": prompt, "max_output_tokens": 1}),
        _ => {
            let messages = json!([{"role": "user", "content": prompt}]);
            json!({"model": "tiny", "messages": messages, "max_tokens": 1})
        }
    }
}

#[tokio::test]
async fn the_document_is_served_and_its_routes_take_the_methods_that_it_says_and_no_others() {
    let harness = Harness::start_unready(config(&[])).await;
    let served = harness.get("/openapi.json").await;
    assert_eq!(served.json(), *document());
    assert_eq!(served.json()["info"]["version"], env!("CARGO_PKG_VERSION"));
    for (path, methods) in document()["paths"].as_object().expect("paths") {
        let path = path.replace("{name}", "some/name").replace("{id}", "some-id");
        for method in ["GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS"] {
            let known: reqwest::Method = method.parse().expect("a method");
            let url = format!("{}{path}", harness.url);
            let status = harness.client.request(known, url).send().await.expect("an answer");
            let taken = !methods[method.to_lowercase()].is_null();
            assert_eq!(status.status().as_u16() != 405, taken, "{method} {path}");
        }
    }
}

/// Statuses that each way to ask has answered, provoked one by one.
struct Answered {
    harness: Harness,
    pairs: Vec<Pair>,
}

impl Answered {
    async fn start(change: impl FnOnce(&mut Config)) -> Answered {
        let world = World::default();
        let pairs = vec![
            Pair::start(&world, "p", Role::Prefill, Script::default()).await,
            Pair::start(&world, "d", Role::Decode, Script::default()).await,
        ];
        let mut config = config(&[&pairs[0], &pairs[1]]);
        change(&mut config);
        Answered { harness: Harness::start(config).await, pairs }
    }

    /// The same status from all of them.
    async fn expect(&self, status: u16, body: impl Fn(&str) -> Value) -> u16 {
        assert_eq!(self.pairs.len(), 2);
        for path in ASKING {
            let answer = self.harness.ask(path, body(path)).await;
            assert_eq!(answer.status, status, "{path}: {answer:?}");
        }
        status
    }
}

#[tokio::test]
async fn every_status_in_the_document_is_answered() {
    let mut seen = Vec::new();
    let plain = Answered::start(|config| {
        config.body_bytes_max = 2 << 20;
        config.body_read_timeout_ms = 60_000;
    })
    .await;
    seen.push(plain.expect(200, |path| body(path, "x")).await);
    seen.push(plain.expect(400, |_| json!([])).await);
    let other = |path: &str| {
        let mut body = body(path, "x");
        body["model"] = "other".into();
        body
    };
    seen.push(plain.expect(404, other).await);
    seen.push(plain.expect(413, |path| body(path, &"x".repeat(3 << 20))).await);

    let folder = tempfile::tempdir().expect("a folder");
    let keys = folder.path().join("keys.toml");
    std::fs::write(&keys, "[[tenants]]\nname = \"a\"\nkeys = []\n").expect("writes");
    let keyed = Answered::start(|config| config.api_keys_file = Some(keys)).await;
    seen.push(keyed.expect(401, |path| body(path, "x")).await);
    for path in ["/v1/models", "/v1/models/tiny"] {
        assert_eq!(keyed.harness.get(path).await.status, 401);
    }

    let full = Answered::start(|config| config.running_choices_max = 1).await;
    full.pairs[1].change(|script| script.decode = Leg::HangAfter(1));
    let mut streamed = body(ASKING[1], "x");
    streamed["max_tokens"] = 2.into();
    streamed["stream"] = true.into();
    let running = full.harness.open(ASKING[1], streamed.to_string()).await;
    seen.push(full.expect(429, |path| body(path, "x")).await);
    drop(running);

    let short = Answered::start(|config| config.request_timeout_ms = 1).await;
    // Megabytes take more than a millisecond to read.
    seen.push(short.expect(504, |path| body(path, &"x".repeat(6 << 20))).await);

    let alone = Harness::start_unready(config(&[])).await;
    for path in ASKING {
        assert_eq!(alone.ask(path, body(path, "x")).await.status, 503, "{path}");
    }
    assert_eq!(alone.get("/readyz").await.status, 503);
    seen.push(503);

    let waiting = Answered::start(|config| config.body_read_timeout_ms = 50).await;
    for path in ASKING {
        let mut socket =
            tokio::net::TcpStream::connect(waiting.harness.address).await.expect("connects");
        let head = format!("POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n{{");
        socket.write_all(head.as_bytes()).await.expect("sends");
        let mut answer = [0; 12];
        socket.read_exact(&mut answer).await.expect("an answer");
        assert_eq!(&answer, b"HTTP/1.1 408", "{path}");
    }
    seen.push(408);

    // These two are for what breaks here: a task of the conductor's that panics.
    seen.extend([500, 502]);
    seen.sort_unstable();
    for path in ASKING {
        let responses = document()["paths"][path]["post"]["responses"].as_object();
        let mut documented: Vec<u16> = responses
            .expect("responses")
            .keys()
            .map(|status| status.parse().expect("a status"))
            .collect();
        documented.sort_unstable();
        assert_eq!(documented, seen, "{path}");
    }
    let models = "/v1/models/nobody";
    assert_eq!(plain.harness.get(models).await.status, 404);
    assert_eq!(plain.harness.get("/v1/models/%ff").await.status, 404);
    assert_eq!(plain.harness.get("/v1/models/tiny").await.status, 200);
    assert_eq!(plain.harness.get("/v1/models").await.status, 200);
    for path in ["/healthz", "/readyz", "/metrics", "/version"] {
        assert_eq!(plain.harness.get(path).await.status, 200);
    }
}
