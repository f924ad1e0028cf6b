//! Models of plain OpenAI servers: what arrives there, what comes back, and who is asked.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode, Uri};
use axum::response::Response;
use futures::StreamExt;
use kvasir_conductor::{BackendConfig, Config};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::task::JoinHandle;
use tokio_util::sync::{CancellationToken, DropGuard};

use crate::support::{Harness, Pair, Role, Script, World, config};

/// What arrived.
#[derive(Debug, Clone)]
struct Asked {
    path: String,
    headers: HeaderMap,
    body: Value,
}

/// A server that answers as it is told.
#[derive(Clone)]
struct Fake {
    asked: Arc<Mutex<Vec<Asked>>>,
    status: Arc<Mutex<StatusCode>>,
    /// The last body.
    text: Arc<Mutex<String>>,
    /// One for each further event of a stream.
    events: Arc<Semaphore>,
    /// That are open.
    streams: Arc<AtomicUsize>,
}

/// A stream's body, until it is dropped.
struct Open(Arc<AtomicUsize>);

impl Drop for Open {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Fake {
    fn text(&self) -> String {
        self.text.lock().expect("no panic").clone()
    }
}

struct Server {
    fake: Fake,
    address: std::net::SocketAddr,
    _stop: DropGuard,
}

impl Server {
    async fn start() -> Server {
        // One of its own in the loopback network (all of 127.0.0.0/8): nobody else gets a port there
        // while the server is away.
        let [a, b, c] = rand::random::<[u8; 3]>();
        Server::start_at(&format!("127.{}.{b}.{c}:0", 1 + a % 127)).await
    }

    async fn start_at(address: &str) -> Server {
        let fake = Fake {
            asked: Arc::default(),
            status: Arc::new(Mutex::new(StatusCode::OK)),
            text: Arc::default(),
            events: Arc::new(Semaphore::new(0)),
            streams: Arc::default(),
        };
        let listener = TcpListener::bind(address).await.expect("binds");
        let address = listener.local_addr().expect("an address");
        let router = Router::new().fallback(answer).with_state(fake.clone());
        let stop = CancellationToken::new();
        let stopped = stop.clone();
        tokio::spawn(async move {
            // Connections end with it too, as when a process dies.
            let serving = axum::serve(listener, router);
            stopped.run_until_cancelled(serving.into_future()).await
        });
        Server { fake, address, _stop: stop.drop_guard() }
    }

    fn asked(&self) -> Vec<Asked> {
        self.fake.asked.lock().expect("no panic").clone()
    }

    fn set(&self, status: StatusCode) {
        *self.fake.status.lock().expect("no panic") = status;
    }
}

async fn answer(State(fake): State<Fake>, uri: Uri, headers: HeaderMap, body: Bytes) -> Response {
    if uri.path() == "/v1/models" {
        return Response::new(Body::from("{}"));
    }
    *fake.text.lock().expect("no panic") = String::from_utf8(body.to_vec()).expect("text");
    let body: Value = serde_json::from_slice(&body).expect("JSON");
    let asked = Asked { path: uri.path().to_owned(), headers, body };
    fake.asked.lock().expect("no panic").push(asked.clone());
    let status = *fake.status.lock().expect("no panic");
    if asked.body["stream"] == true {
        fake.streams.fetch_add(1, Ordering::SeqCst);
        let first = (0, Open(Arc::clone(&fake.streams)));
        let events = futures::stream::unfold(first, move |(at, open)| {
            let events = Arc::clone(&fake.events);
            async move {
                // A closed one ends the stream.
                if at > 0 {
                    events.acquire().await.ok()?.forget();
                }
                let event = format!("data: {{\"at\":{at}}}\n\n");
                Some((Ok::<_, Infallible>(event), (at + 1, open)))
            }
        });
        let kind = ("content-type", "text/event-stream");
        return Response::builder()
            .header(kind.0, kind.1)
            .body(Body::from_stream(events))
            .expect("one");
    }
    let said = json!({"id": "theirs", "status": status.as_u16(), "usage": {"total_tokens": 30}});
    Response::builder().status(status).body(Body::from(said.to_string())).expect("a response")
}

fn backend(address: std::net::SocketAddr) -> BackendConfig {
    BackendConfig {
        model: "other".to_owned(),
        url: format!("http://{address}"),
        upstream_model: Some("upstream".to_owned()),
        api_key_file: None,
        running_requests_max: 8,
    }
}

async fn start(servers: &[&Server], change: impl FnOnce(&mut Config)) -> Harness {
    let mut config = config(&[]);
    config.backends = servers.iter().map(|server| backend(server.address)).collect();
    change(&mut config);
    Harness::start(config).await
}

/// Fails when it is never so.
async fn eventually(is_so: impl AsyncFn() -> bool) {
    for _ in 0..10_000 {
        if is_so().await {
            return;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    panic!("it is never so");
}

/// Without the document: these answers are the server's own.
async fn post(harness: &Harness, path: &str, key: Option<&str>, body: &Value) -> reqwest::Response {
    let request = harness.client.post(format!("{}{path}", harness.url)).body(body.to_string());
    let request = request.header("x-request-id", "mine");
    let request = key.iter().fold(request, |request, key| request.bearer_auth(key));
    request.send().await.expect("an answer")
}

/// A tenant's.
const KEY: &str = "a key for proxying";

/// For a tenant with [`KEY`].
async fn start_with_quota(server: &Server, tokens_per_minute: u64) -> (Harness, tempfile::TempDir) {
    let folder = tempfile::tempdir().expect("a folder");
    let keys = folder.path().join("keys.toml");
    // Of [`KEY`].
    let hash = "e78f9d852b620a621a4652ff801b79687ef6e417eeb0ae1efa133975e99b5e4b";
    let tenant = format!(
        "[[tenants]]\nname = \"acme\"\nkeys = [{{ sha256 = \"{hash}\" }}]\n\
         tokens_per_minute = {tokens_per_minute}\n"
    );
    std::fs::write(&keys, tenant).expect("writes");
    (start(&[server], |config| config.api_keys_file = Some(keys)).await, folder)
}

fn chat(text: &str) -> Value {
    json!({"model": "other", "messages": [{"role": "user", "content": text}], "tools": [{"x": 1}]})
}

#[tokio::test]
async fn a_request_is_passed_on_whole_and_its_answer_comes_back_as_it_is() {
    let server = Server::start().await;
    let folder = tempfile::tempdir().expect("a folder");
    let key = folder.path().join("key");
    std::fs::write(&key, "theirs\n").expect("writes");
    let harness = start(&[&server], |config| config.backends[0].api_key_file = Some(key)).await;
    let embed = json!({"model": "other", "input": ["a"]});
    for (path, body) in [("/v1/chat/completions", chat("hi")), ("/v1/embeddings", embed)] {
        let answer = post(&harness, path, Some("mine"), &body).await;
        assert_eq!(answer.status(), 200);
        assert_eq!(answer.headers()["x-request-id"], "mine");
        assert_eq!(answer.json::<Value>().await.expect("JSON")["id"], "theirs");
        let asked = server.asked().pop().expect("it was asked");
        assert_eq!(asked.path, path);
        assert_eq!(asked.headers["authorization"], "Bearer theirs");
        assert_eq!(asked.headers["x-request-id"], "mine");
        let mut want = body;
        want["model"] = "upstream".into();
        assert_eq!(asked.body, want);
    }
    let text = r#"{"model":"other","z":{"b":1.0,"a":2},"n":123456789012345678901}"#;
    let url = format!("{}/v1/completions", harness.url);
    harness.client.post(url).body(text).send().await.expect("an answer");
    let (written, want) = (server.fake.text(), text.replace("other", "upstream"));
    assert_eq!(written, want, "as it was written");
    for (field, status) in [("background", 400), ("previous_response_id", 400), ("user", 200)] {
        let mut body = json!({"model": "other", "input": "x"});
        body[field] = "x".into();
        assert_eq!(post(&harness, "/v1/responses", None, &body).await.status(), status, "{field}");
    }
    assert_eq!(server.asked().pop().expect("it was asked").body["store"], false);
    server.set(StatusCode::IM_A_TEAPOT);
    assert_eq!(post(&harness, "/v1/completions", None, &chat("hi")).await.status(), 418);
    let models = harness.get("/v1/models").await.json();
    let ids: Vec<&Value> =
        models["data"].as_array().expect("a list").iter().map(|model| &model["id"]).collect();
    assert_eq!(ids, ["tiny", "other"]);
    assert_eq!(harness.get("/v1/models/other").await.status, 200);
}

#[tokio::test]
async fn events_come_as_the_server_sends_them_and_a_client_that_leaves_ends_the_request_there() {
    let server = Server::start().await;
    let harness = start(&[&server], |_| {}).await;
    let mut body = chat("hi");
    body["stream"] = true.into();
    let answer = post(&harness, "/v1/chat/completions", None, &body).await;
    assert_eq!(answer.headers()["content-type"], "text/event-stream");
    let mut events = answer.bytes_stream();
    for at in 0..3 {
        let event = events.next().await.expect("an event").expect("bytes");
        assert_eq!(event, format!("data: {{\"at\":{at}}}\n\n"));
        // The next one is sent only now.
        server.fake.events.add_permits(1);
    }
    drop(events);
    // It notices when it sends again.
    eventually(async || {
        server.fake.events.add_permits(1);
        server.fake.streams.load(Ordering::SeqCst) == 0
    })
    .await;
}

#[tokio::test]
async fn prompts_that_begin_alike_go_to_one_server_and_others_spread() {
    let (one, two) = (Server::start().await, Server::start().await);
    let harness = start(&[&one, &two], |_| {}).await;
    harness.until_metric("kvasir_conductor_backends_healthy{model=\"other\"}", |n| n == 2.0).await;
    for round in 0..4 {
        for document in 0..4 {
            let text = format!("{}: question {round}", document.to_string().repeat(2_000));
            let answer = post(&harness, "/v1/chat/completions", None, &chat(&text)).await;
            assert_eq!(answer.status(), 200);
        }
    }
    let mut servers: BTreeMap<char, Vec<usize>> = BTreeMap::new();
    for (at, server) in [&one, &two].into_iter().enumerate() {
        assert!(!server.asked().is_empty(), "server {at} was never asked");
        for asked in server.asked() {
            let text = asked.body["messages"][0]["content"].as_str().expect("text").to_owned();
            let seen = servers.entry(text.chars().next().expect("text")).or_default();
            seen.push(at);
        }
    }
    for (document, seen) in servers {
        assert_eq!(seen.len(), 4);
        assert!(seen.iter().all(|at| *at == seen[0]), "{document} went to {seen:?}");
    }
}

#[tokio::test]
async fn prompts_of_one_key_go_to_one_server_though_they_begin_differently() {
    let (one, two) = (Server::start().await, Server::start().await);
    let harness = start(&[&one, &two], |_| {}).await;
    harness.until_metric("kvasir_conductor_backends_healthy{model=\"other\"}", |n| n == 2.0).await;
    for round in 0..6 {
        for key in ["a", "b"] {
            let mut body = chat(&format!("{round}{key}"));
            body["prompt_cache_key"] = key.into();
            assert_eq!(post(&harness, "/v1/chat/completions", None, &body).await.status(), 200);
        }
    }
    let keys = |server: &Server| -> Vec<String> {
        let key = |asked: Asked| asked.body["prompt_cache_key"].as_str().expect("a key").to_owned();
        server.asked().into_iter().map(key).collect()
    };
    let mut keys = [keys(&one), keys(&two)];
    keys.sort();
    assert_eq!(keys, [vec!["a"; 6], vec!["b"; 6]]);
}

#[tokio::test]
async fn a_server_that_fails_is_passed_over_and_asked_again_when_it_is_back() {
    let (one, two) = (Server::start().await, Server::start().await);
    let harness = start(&[&one, &two], |_| {}).await;
    harness.until_metric("kvasir_conductor_backends_healthy{model=\"other\"}", |n| n == 2.0).await;
    one.set(StatusCode::SERVICE_UNAVAILABLE);
    for _ in 0..4 {
        assert_eq!(post(&harness, "/v1/completions", None, &chat("hi")).await.status(), 200);
    }
    two.set(StatusCode::TOO_MANY_REQUESTS);
    let said = post(&harness, "/v1/completions", None, &chat("hi")).await.status();
    assert!(said == 503 || said == 429, "the last one's own word, not {said}");

    let address = one.address.to_string();
    drop((one, two));
    // Connections that were open may bring one more answer.
    eventually(async || {
        let answer = post(&harness, "/v1/completions", None, &chat("hi")).await;
        answer.status() == 503 && answer.text().await.expect("a body").contains("no_instance")
    })
    .await;
    assert_eq!(harness.get("/readyz").await.status, 503);
    let _back = Server::start_at(&address).await;
    harness.until_metric("kvasir_conductor_backends_healthy{model=\"other\"}", |n| n == 1.0).await;
    assert_eq!(post(&harness, "/v1/completions", None, &chat("hi")).await.status(), 200);
}

/// The decisions for all that [`post`] has asked, in their order, once none is open.
async fn decisions(harness: &Harness) -> Vec<Value> {
    for _ in 0..2_000 {
        let url = format!("{}/decisions/mine", harness.watch);
        let answer = harness.client.get(url).send().await.expect("an answer");
        let found: Value = answer.json().await.expect("JSON");
        let found = found["decisions"].as_array().expect("a list").clone();
        if found.iter().all(|one| one["outcome"].is_object() || one["refused"].is_string()) {
            return found;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    panic!("some decision has no outcome");
}

#[tokio::test]
async fn it_is_explained_why_a_request_was_passed_on_to_which_server_and_what_came_of_it() {
    let (one, two) = (Server::start().await, Server::start().await);
    let harness = start(&[&one, &two], |config| config.decision_history_max = 100).await;
    harness.until_metric("kvasir_conductor_backends_healthy{model=\"other\"}", |n| n == 2.0).await;
    let ask = async |body: &Value| {
        let answer = post(&harness, "/v1/chat/completions", None, body).await;
        let status = answer.status().as_u16();
        answer.bytes().await.expect("a body");
        status
    };
    let long = chat(&"a".repeat(2_000));
    assert_eq!(ask(&long).await, 200);
    assert_eq!(ask(&long).await, 200);
    let found = decisions(&harness).await;
    let [first, again] = found.as_slice() else { panic!("two in {found:?}") };
    assert_eq!((&first["model"], &first["prompt_tokens"]), (&json!("other"), &json!(508)));
    assert_eq!(first["backend_choice"]["reason"], "least_busy");
    assert_eq!(first["outcome"]["result"], "ok");
    assert_eq!(first["ttft_ms"], Value::Null, "nothing came before the whole");
    let (url, passed) = (&first["backend_choice"]["forwarded_to"], &again["backend_choice"]);
    assert_eq!((&passed["forwarded_to"], &passed["matched_prefix_bytes"]), (url, &json!(7 * 256)));
    let text = again["text"].as_str().expect("text");
    assert!(text.contains("0 of at most 8 requests running: chosen\n"), "{text}");
    assert!(text.contains("0 of at most 8 requests running: not preferred\n"), "{text}");
    assert!(text.ends_with("the longest common prefix, 1792 of 2030 bytes"), "{text}");

    // The one that has seen it fails, and the other one takes its place.
    let (seen, other) =
        if *url == json!(format!("http://{}", one.address)) { (&one, &two) } else { (&two, &one) };
    seen.set(StatusCode::SERVICE_UNAVAILABLE);
    let before = found.len();
    assert_eq!(ask(&long).await, 200);
    let found = decisions(&harness).await;
    let [failed, instead] = &found[before..] else { panic!("two more in {found:?}") };
    assert_eq!(failed["outcome"]["result"], "the backend returned 503 Service Unavailable");
    let to = format!("http://{}", other.address);
    assert_eq!(
        (&instead["backend_choice"]["forwarded_to"], &instead["outcome"]["result"]),
        (&json!(to), &json!("ok"))
    );
    assert!(instead["text"].as_str().expect("text").contains(": failed this request\n"));

    // A stream has a first token, and a client that leaves.
    let mut stream = chat("hi");
    stream["stream"] = true.into();
    stream["prompt_cache_key"] = "k".into();
    let before = found.len();
    seen.set(StatusCode::OK);
    let mut events = post(&harness, "/v1/chat/completions", None, &stream).await.bytes_stream();
    events.next().await.expect("an event").expect("bytes");
    drop(events);
    eventually(async || {
        one.fake.events.add_permits(1);
        two.fake.events.add_permits(1);
        let open = |server: &Server| server.fake.streams.load(Ordering::SeqCst);
        open(&one) + open(&two) == 0
    })
    .await;
    stream["stream"] = false.into();
    assert_eq!(ask(&stream).await, 200);
    let found = decisions(&harness).await;
    let [left, same_key] = &found[before..] else { panic!("two more in {found:?}") };
    assert_eq!(left["outcome"]["result"], "client_disconnected");
    assert!(left["ttft_ms"].as_f64().is_some_and(|ms| ms > 0.0), "{left}");
    assert_eq!(same_key["backend_choice"]["reason"], "same_cache_key");
    assert_eq!(same_key["backend_choice"]["forwarded_to"], left["backend_choice"]["forwarded_to"]);
    let recent = async || {
        let url = format!("{}/state", harness.watch);
        let state = harness.client.get(url).send().await.expect("an answer");
        state.json::<Value>().await.expect("JSON")["recent"].clone()
    };
    // All of one id: that is one request.
    assert_eq!((&recent().await["requests"], &recent().await["answered"]), (&json!(1), &json!(4)));

    // Nobody is left.
    let before = found.len();
    drop((one, two));
    harness.until_metric("kvasir_conductor_backends_healthy{model=\"other\"}", |n| n == 0.0).await;
    assert_eq!(ask(&long).await, 503);
    let found = decisions(&harness).await;
    assert!(found.len() > before);
    let nobody = found.last().expect("one");
    assert_eq!(nobody["refused"], "no backend of the model is healthy");
    assert_eq!(nobody["backend_choice"]["forwarded_to"], Value::Null);
    assert!(nobody["text"].as_str().expect("text").contains("unhealthy"));
}

#[tokio::test]
async fn where_no_decisions_are_kept_none_is_recorded_of_what_is_passed_on() {
    let server = Server::start().await;
    let harness = start(&[&server], |config| config.decision_history_max = 0).await;
    let answer = post(&harness, "/v1/completions", None, &chat("hi")).await;
    assert_eq!(answer.status(), 200);
    answer.bytes().await.expect("a body");
    let url = format!("{}/decisions", harness.watch);
    let kept = harness.client.get(url).send().await.expect("an answer");
    assert_eq!(kept.json::<Value>().await.expect("JSON")["decisions"], json!([]));
}

#[tokio::test]
async fn a_server_that_answers_makes_nobody_ready_whose_own_nodes_are_cold() {
    let (server, world) = (Server::start().await, World::default());
    let script = Script { silent: true, ..Script::default() };
    let pair = Pair::start(&world, "b", Role::Both, script).await;
    let mut config = config(&[&pair]);
    config.backends = vec![backend(server.address)];
    let harness = Harness::start_unready(config).await;
    let alive = "kvasir_conductor_backends_healthy{model=\"other\"}";
    harness.until_metric(alive, |n| n == 1.0).await;
    harness.until_metric("kvasir_conductor_instances", |n| n == 1.0).await;
    let unready = harness.get("/readyz").await;
    assert_eq!(unready.status, 503);
    assert!(unready.text.contains("waiting for the snapshots"), "{unready:?}");
    // Whoever asks nevertheless is answered.
    assert_eq!(post(&harness, "/v1/completions", None, &chat("hi")).await.status(), 200);
    pair.change(|script| script.silent = false);
    harness.until("/readyz", |response| response.status == 200).await;
}

#[tokio::test]
async fn a_node_that_is_there_a_moment_late_is_waited_for() {
    let world = World::default();
    let script = Script { away: true, silent: true, ..Script::default() };
    let pair = Pair::start(&world, "b", Role::Both, script).await;
    let harness = Harness::start_unready(config(&[&pair])).await;
    harness
        .until_metric("kvasir_conductor_node_disconnects_total{reason=\"call\"}", |n| n > 0.0)
        .await;
    pair.change(|script| script.away = false);
    harness.until_metric("kvasir_conductor_instances", |n| n == 1.0).await;
    let unready = harness.get("/readyz").await;
    assert_eq!(unready.status, 503);
    assert!(unready.text.contains("waiting for the snapshots"), "{unready:?}");
    pair.change(|script| script.silent = false);
    harness.until("/readyz", |response| response.status == 200).await;
}

#[tokio::test]
async fn nodes_that_cannot_be_reached_do_not_keep_it_from_passing_on() {
    let server = Server::start().await;
    // `start` waits until it is ready.
    let harness = start(&[&server], |config| config.nodes = vec!["127.0.0.1:1".to_owned()]).await;
    assert_eq!(post(&harness, "/v1/completions", None, &chat("hi")).await.status(), 200);
}

#[tokio::test]
async fn no_server_has_more_under_way_than_it_may() {
    let server = Server::start().await;
    let harness = start(&[&server], |config| config.backends[0].running_requests_max = 1).await;
    let mut body = chat("hi");
    body["stream"] = true.into();
    let running = post(&harness, "/v1/chat/completions", None, &body).await;
    let refused = harness.ask("/v1/chat/completions", chat("hi")).await;
    assert_eq!(refused.status, 429);
    assert!(refused.headers.contains_key("retry-after"));
    drop(running);
    server.fake.events.add_permits(1 << 20);
    eventually(async || {
        post(&harness, "/v1/chat/completions", None, &chat("hi")).await.status() == 200
    })
    .await;
}

#[tokio::test]
async fn tenants_are_kept_apart_and_pay_for_what_the_server_says() {
    let server = Server::start().await;
    let (harness, _folder) = start_with_quota(&server, 50).await;
    let ask = async || {
        let mut body = chat("hi");
        body["cache_salt"] = "its own".into();
        post(&harness, "/v1/chat/completions", Some(KEY), &body).await
    };
    assert_eq!(post(&harness, "/v1/completions", None, &chat("hi")).await.status(), 401);
    // 30 tokens each, of 50.
    for _ in 0..2 {
        let answer = ask().await;
        assert_eq!(answer.status(), 200);
        answer.bytes().await.expect("a body");
    }
    assert_eq!(server.asked()[0].body["cache_salt"], "acme\0its own");
    assert!(!server.asked()[0].headers.contains_key("authorization"));
    eventually(async || ask().await.status() == 429).await;
}

#[tokio::test]
async fn an_error_of_a_server_costs_a_tenant_nothing() {
    let server = Server::start().await;
    let (harness, _folder) = start_with_quota(&server, 50).await;
    let ask = async || post(&harness, "/v1/completions", Some(KEY), &chat("hi")).await;
    // Each names 30 tokens, of 50.
    for status in [400, 418, 422, 500, 503] {
        server.set(StatusCode::from_u16(status).expect("a status"));
        for _ in 0..2 {
            let answer = ask().await;
            assert_eq!(answer.status(), status);
            assert_eq!(answer.json::<Value>().await.expect("JSON")["id"], "theirs");
        }
    }
    server.set(StatusCode::OK);
    assert_eq!(ask().await.status(), 200);
}

#[tokio::test]
async fn a_prompt_is_paid_for_before_it_is_sent() {
    let server = Server::start().await;
    // Of such a debt nothing to speak of comes back while the test runs.
    let (harness, _folder) = start_with_quota(&server, 50).await;
    let mut body = chat(&"word ".repeat(1_000));
    body["stream"] = true.into();
    let running = post(&harness, "/v1/chat/completions", Some(KEY), &body).await;
    assert_eq!(running.status(), 200);
    let refused = post(&harness, "/v1/chat/completions", Some(KEY), &chat("hi")).await;
    assert_eq!(refused.status(), 429);
    assert!(refused.headers().contains_key("retry-after"));
    let said = refused.json::<Value>().await.expect("JSON");
    assert_eq!(said["error"]["code"], "rate_limit_exceeded", "{said}");
    assert_eq!(server.asked().len(), 1, "what is refused is not sent");
    drop(running);
}

#[tokio::test]
async fn draining_waits_for_a_stream_that_is_under_way() {
    let server = Server::start().await;
    let harness = start(&[&server], |config| config.drain_timeout_ms = 600_000).await;
    let mut body = chat("hi");
    body["stream"] = true.into();
    let answer = post(&harness, "/v1/chat/completions", None, &body).await;
    let mut events = answer.bytes_stream();
    events.next().await.expect("an event").expect("bytes");
    harness.shutdown.cancel();
    // Only while it drains does it take new connections and refuse what they ask for.
    let fresh = reqwest::Client::builder().no_proxy().pool_max_idle_per_host(0).build();
    let fresh = fresh.expect("a client");
    let ready = async || {
        let answer = fresh.get(format!("{}/readyz", harness.url)).send().await;
        answer.expect("it listens").status()
    };
    eventually(async || ready().await == 503).await;
    for at in 1..20 {
        server.fake.events.add_permits(1);
        let event = events.next().await.expect("an event").expect("bytes");
        assert_eq!(event, format!("data: {{\"at\":{at}}}\n\n"));
        assert_eq!(ready().await, 503);
    }
    server.fake.events.close();
    assert!(events.next().await.is_none(), "it ends, and is not cut off");
    harness.served.await.expect("no panic").expect("ends well");
}

/// What accepts a [`Raw`]'s connections, until somebody takes and ends it.
type Accepting = Arc<Mutex<Option<JoinHandle<()>>>>;

/// What a [`Raw`] does with what is posted.
#[derive(Clone)]
enum Then {
    /// Reads it and closes the connection.
    BreakOff,
    /// Answers 429, when nobody can reach the other one any more.
    RefuseAndEnd(Accepting),
}

/// A server that takes one request on each connection. Probes find it well.
struct Raw {
    address: std::net::SocketAddr,
    posts: Arc<AtomicUsize>,
}

impl Raw {
    async fn start(then: Then, accepting: &Accepting) -> Raw {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("binds");
        let address = listener.local_addr().expect("an address");
        let posts = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&posts);
        let accept = tokio::spawn(async move {
            while let Ok((socket, _)) = listener.accept().await {
                tokio::spawn(Raw::answer(socket, then.clone(), Arc::clone(&counted)));
            }
        });
        *accepting.lock().expect("no panic") = Some(accept);
        Raw { address, posts }
    }

    async fn answer(mut socket: TcpStream, then: Then, posts: Arc<AtomicUsize>) {
        let mut read = vec![0; 64 << 10];
        let mut filled = 0;
        // These requests end with their JSON.
        loop {
            match socket.read(&mut read[filled..]).await {
                Ok(more) if more > 0 => filled += more,
                _ => return,
            }
            let text = &read[..filled];
            if text.starts_with(b"GET") && text.ends_with(b"\r\n\r\n") || text.ends_with(b"}") {
                break;
            }
        }
        let (status, body) = match (read.starts_with(b"GET"), then) {
            (true, _) => ("200 OK", "{}"),
            (false, Then::BreakOff) => {
                posts.fetch_add(1, Ordering::SeqCst);
                return;
            }
            (false, Then::RefuseAndEnd(other)) => {
                let other = other.lock().expect("no panic").take();
                if let Some(other) = other {
                    other.abort();
                    let _ = other.await;
                }
                ("429 Too Many Requests", "{\"id\": \"theirs\"}")
            }
        };
        let length = body.len();
        let answer = format!(
            "HTTP/1.1 {status}\r\nconnection: close\r\ncontent-length: {length}\r\n\r\n{body}"
        );
        socket.write_all(answer.as_bytes()).await.expect("sends");
    }
}

async fn start_before(addresses: &[std::net::SocketAddr]) -> Harness {
    let mut config = config(&[]);
    config.backends = addresses.iter().copied().map(backend).collect();
    let harness = Harness::start(config).await;
    let all = addresses.len() as f64;
    harness.until_metric("kvasir_conductor_backends_healthy{model=\"other\"}", |n| n == all).await;
    harness
}

#[tokio::test]
async fn a_request_whose_connection_breaks_off_is_tried_once_more_elsewhere() {
    let (breaks, works) =
        (Raw::start(Then::BreakOff, &Accepting::default()).await, Server::start().await);
    let harness = start_before(&[breaks.address, works.address]).await;
    // Those that begin unlike take turns, the second tries included.
    for at in 0..8 {
        let text = at.to_string().repeat(1_000);
        assert_eq!(post(&harness, "/v1/chat/completions", None, &chat(&text)).await.status(), 200);
    }
    assert_eq!(works.asked().len(), 8);
    assert!(breaks.posts.load(Ordering::SeqCst) > 1, "it is condemned");
}

#[tokio::test]
async fn a_request_that_breaks_connections_off_is_given_up_and_no_server_is_condemned_for_it() {
    let none = Accepting::default();
    let one = Raw::start(Then::BreakOff, &none).await;
    let harness = start_before(&[one.address]).await;
    for round in 1..=5 {
        let answer = post(&harness, "/v1/chat/completions", None, &chat("hi")).await;
        assert_eq!(answer.status(), 502);
        let said = answer.json::<Value>().await.expect("JSON");
        assert_eq!(said["error"]["code"], "instance_failed", "{said}");
        assert_eq!(one.posts.load(Ordering::SeqCst), 2 * round, "once more, where none else is");
    }
    let all =
        [one, Raw::start(Then::BreakOff, &none).await, Raw::start(Then::BreakOff, &none).await];
    let harness = start_before(&all.each_ref().map(|server| server.address)).await;
    let posts = || all.each_ref().map(|server| server.posts.load(Ordering::SeqCst));
    // Of one conversation, which otherwise stays where it was.
    let long = chat(&"word ".repeat(1_000));
    for _ in 0..5 {
        let before = posts();
        assert_eq!(post(&harness, "/v1/chat/completions", None, &long).await.status(), 502);
        let asked = posts().into_iter().zip(before).map(|(now, before)| now - before);
        let mut asked: Vec<usize> = asked.collect();
        asked.sort_unstable();
        assert_eq!(asked, [0, 1, 1], "two servers, once each");
    }
}

/// Answers what is asked on a connection, one after the other, with so many bytes of JSON. Counts connections on
/// which something was posted.
async fn answer_at_length(mut socket: TcpStream, bytes: usize, posted_on: Arc<AtomicUsize>) {
    let (mut read, mut is_counted) = (Vec::new(), false);
    while socket.read_buf(&mut read).await.is_ok_and(|more| more > 0) {
        let is_get = read.starts_with(b"GET");
        // A post ends with its JSON.
        if !(is_get && read.ends_with(b"\r\n\r\n") || read.ends_with(b"}")) {
            continue;
        }
        if !is_get && !std::mem::replace(&mut is_counted, true) {
            posted_on.fetch_add(1, Ordering::SeqCst);
        }
        let body = format!("{:<bytes$}", "{}");
        let answer = format!("HTTP/1.1 200 OK\r\ncontent-length: {bytes}\r\n\r\n{body}");
        socket.write_all(answer.as_bytes()).await.expect("sends");
        read.clear();
    }
}

#[tokio::test]
async fn an_answer_of_known_length_is_read_to_its_end_and_leaves_its_connection_to_the_next() {
    const BYTES: usize = 40_000;
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("binds");
    let address = listener.local_addr().expect("an address");
    let posted_on = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&posted_on);
    tokio::spawn(async move {
        while let Ok((socket, _)) = listener.accept().await {
            tokio::spawn(answer_at_length(socket, BYTES, Arc::clone(&counted)));
        }
    });
    let harness = start_before(&[address]).await;
    for _ in 0..5 {
        let answer = post(&harness, "/v1/chat/completions", None, &chat("hi")).await;
        assert_eq!(answer.headers()["content-length"], BYTES.to_string().as_str());
        assert_eq!(answer.bytes().await.expect("all of it").len(), BYTES);
    }
    assert_eq!(posted_on.load(Ordering::SeqCst), 1, "one connection served them all");
}

#[tokio::test]
async fn the_last_answer_that_there_was_is_passed_on_when_the_next_server_cannot_be_reached() {
    let (first, second) = (Accepting::default(), Accepting::default());
    // Whichever is asked first, the other one has gone then.
    let one = Raw::start(Then::RefuseAndEnd(Arc::clone(&second)), &first).await;
    let two = Raw::start(Then::RefuseAndEnd(first), &second).await;
    let harness = start_before(&[one.address, two.address]).await;
    let answer = post(&harness, "/v1/chat/completions", None, &chat("hi")).await;
    assert_eq!(answer.status(), 429);
    assert_eq!(answer.json::<Value>().await.expect("JSON")["id"], "theirs");
}

#[tokio::test]
async fn what_cannot_work_is_refused_at_the_start_and_a_model_without_embeddings_says_so() {
    let server = Server::start().await;
    let refused = async |change: fn(&mut BackendConfig), want: &str| {
        let mut config = config(&[]);
        let mut backend = backend(server.address);
        change(&mut backend);
        config.backends = vec![backend];
        let error =
            kvasir_conductor::Conductor::bind(config).await.expect_err("refused").to_string();
        assert!(error.contains(want), "{error}");
    };
    refused(|backend| backend.url = "https://x".to_owned(), "must begin with http://").await;
    refused(|backend| backend.url = "http://x/v1/".to_owned(), "must not end with /v1").await;
    refused(|backend| backend.model = "tiny".to_owned(), "is also in `models`").await;
    refused(|backend| backend.api_key_file = Some("/nowhere/key".into()), "/nowhere/key").await;

    let harness = start(&[&server], |_| {}).await;
    for (body, status) in [
        (json!({"model": "tiny", "input": "x"}), 400),
        (json!({"model": "nobody", "input": "x"}), 404),
        (json!([]), 400),
    ] {
        assert_eq!(harness.ask("/v1/embeddings", body).await.status, status);
    }
}
