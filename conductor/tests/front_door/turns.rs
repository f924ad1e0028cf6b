//! Tenants take turns where their requests wait.

use kvasir_conductor::{AdmissionQueueConfig, Config};
use kvasir_proto::v1;
use serde_json::json;
use tokio::task::JoinHandle;

use crate::support::{Happened, Harness, Leg, Pair, Response, Role, Script, World, config};

/// A conductor that serves one request at a time. The first one does not end before it is told to.
struct Busy {
    world: World,
    pairs: Vec<Pair>,
    harness: Harness,
    _folder: tempfile::TempDir,
}

const WAITING: &str = "kvasir_conductor_choices_queued{priority=\"normal\"}";

impl Busy {
    async fn start(waiting: AdmissionQueueConfig) -> Busy {
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("keys.toml");
        let tenant = |name: &str, more: &str| {
            std::fs::write(folder.path().join(name), format!("{name}-key")).expect("writes");
            format!("[[tenants]]\nname = \"{name}\"\nkeys = [{{ file = \"{name}\" }}]\n{more}\n")
        };
        let tenants =
            [tenant("a", ""), tenant("b", ""), tenant("urgent", "priority_max = \"high\"")];
        std::fs::write(&file, tenants.concat()).expect("writes");
        let world = World::default();
        let script = Script { decode: Leg::Hold, ..Script::default() };
        let pairs = vec![
            Pair::start(&world, "p", Role::Prefill, Script::default()).await,
            Pair::start(&world, "d", Role::Decode, script).await,
        ];
        let config = Config {
            api_keys_file: Some(file),
            running_choices_max: 1,
            ttft_objective_ms: 300_000,
            admission_queue: AdmissionQueueConfig { aging_ms: 3_600_000, ..waiting },
            ..config(&[&pairs[0], &pairs[1]])
        };
        let busy = Busy { world, pairs, harness: Harness::start(config).await, _folder: folder };
        drop(busy.send("a", "a0", &[]));
        busy.world.until("the first one runs", |log| begun(log).contains(&"a0".to_owned())).await;
        busy
    }

    /// Sends a request of this tenant and of this name, and leaves it.
    fn send(&self, tenant: &str, id: &str, headers: &[(&str, &str)]) -> JoinHandle<Response> {
        let url = format!("{}/v1/completions", self.harness.url);
        let body = json!({"model": "tiny", "prompt": [1, 2, 3], "max_tokens": 2});
        let mut request = self.harness.client.post(url).body(body.to_string());
        request = request.header("x-request-id", id).bearer_auth(format!("{tenant}-key"));
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        tokio::spawn(async move { Response::read(request.send().await.expect("an answer")).await })
    }

    /// The same, and waits until so many wait.
    async fn wait(&self, tenant: &str, id: &str, waiting: f64) -> JoinHandle<Response> {
        let sent = self.send(tenant, id, &[]);
        self.harness.until_metric(WAITING, |now| now == waiting).await;
        sent
    }

    /// All go, one after another.
    fn release(&self) {
        self.pairs[1].change(|script| script.decode = Leg::Do);
    }
}

/// Requests whose decoding has begun, in order.
fn begun(log: &[Happened]) -> Vec<String> {
    let of = |happened: &Happened| match happened {
        Happened::Generate { leg: v1::Phase::Decode, request, .. } => {
            Some(request.request_id.clone())
        }
        _ => None,
    };
    log.iter().filter_map(of).collect()
}

/// Each request here costs three tokens and two of an answer.
fn one_each() -> AdmissionQueueConfig {
    AdmissionQueueConfig { quantum_tokens: 5, ..AdmissionQueueConfig::default() }
}

#[tokio::test]
async fn a_tenant_with_many_requests_lets_one_with_few_have_its_turn() {
    let busy = Busy::start(one_each()).await;
    let mut sent = Vec::new();
    for (tenant, id) in [("a", "a1"), ("a", "a2"), ("a", "a3"), ("b", "b1"), ("b", "b2")] {
        sent.push(busy.wait(tenant, id, sent.len() as f64 + 1.0).await);
    }
    assert_eq!(begun(&busy.world.log()), ["a0"], "one at a time");
    let state = busy.harness.client.get(format!("{}/state", busy.harness.watch));
    let state = state.send().await.expect("an answer").text().await.expect("a whole body");
    let state: serde_json::Value = serde_json::from_str(&state).expect("JSON");
    assert_eq!((&state["choices_in_flight"], &state["choices_queued"]), (&json!(1), &json!(5)));
    busy.release();
    for sent in sent {
        let response = sent.await.expect("no panic");
        assert_eq!(response.status, 200, "{response:?}");
    }
    assert_eq!(begun(&busy.world.log()), ["a0", "a1", "b1", "a2", "b2", "a3"]);
    let metric = async |name| busy.harness.metric(name).await;
    assert_eq!(metric("kvasir_conductor_queue_exits_total{reason=\"dispatched\"}").await, 6.0);
    assert_eq!(metric(WAITING).await, 0.0);
}

#[tokio::test]
async fn an_urgent_request_goes_first_and_only_whose_key_allows_it_is_urgent() {
    let busy = Busy::start(one_each()).await;
    let first = busy.wait("a", "a1", 1.0).await;
    let second = busy.wait("urgent", "u1", 2.0).await;
    let high = &[("x-kvasir-priority", "high")];
    let third = busy.send("urgent", "u2", high);
    let waiting = "kvasir_conductor_choices_queued{priority=\"high\"}";
    busy.harness.until_metric(waiting, |now| now == 1.0).await;
    let refused = busy.send("a", "a2", high).await.expect("no panic");
    assert_eq!(refused.status, 400, "{refused:?}");
    assert_eq!(refused.json()["error"]["param"], "x-kvasir-priority");
    busy.release();
    for sent in [first, second, third] {
        assert_eq!(sent.await.expect("no panic").status, 200);
    }
    assert_eq!(begun(&busy.world.log()), ["a0", "u2", "a1", "u1"]);
}

#[tokio::test]
async fn beyond_the_places_there_are_it_is_429_for_the_tenant_that_has_most() {
    let busy = Busy::start(AdmissionQueueConfig { choices_max: 2, ..one_each() }).await;
    let first = busy.wait("a", "a1", 1.0).await;
    let second = busy.wait("a", "a2", 2.0).await;
    let refused = busy.send("a", "a3", &[]).await.expect("no panic");
    assert_eq!(refused.status, 429, "{refused:?}");
    assert!(
        refused.text.contains("the admission queue is full: 2 requests are waiting"),
        "{refused:?}"
    );
    assert!(refused.headers.contains_key("retry-after"), "{refused:?}");
    let other = busy.send("b", "b1", &[]);
    let displaced = second.await.expect("no panic");
    assert_eq!(displaced.status, 429, "{displaced:?}");
    assert_eq!(displaced.json()["error"]["code"], "rate_limit_exceeded");
    assert!(displaced.headers.contains_key("retry-after"), "{displaced:?}");
    busy.release();
    for sent in [first, other] {
        assert_eq!(sent.await.expect("no panic").status, 200);
    }
    let metric = async |how: &str| {
        busy.harness
            .metric(&format!("kvasir_conductor_queue_exits_total{{reason=\"{how}\"}}"))
            .await
    };
    assert_eq!((metric("full").await, metric("displaced").await), (1.0, 1.0));
}

#[tokio::test]
async fn who_waits_until_its_first_token_would_come_too_late_is_429_and_who_leaves_makes_room() {
    let busy = Busy::start(one_each()).await;
    let left = busy.wait("a", "a1", 1.0).await;
    let late = busy.send("b", "b1", &[("x-llm-d-slo-ttft-ms", "50")]).await.expect("no panic");
    assert_eq!(late.status, 429, "{late:?}");
    assert!(late.text.contains("missed its TTFT objective"), "{late:?}");
    assert_eq!(late.json()["error"]["reason"], "ttft");
    left.abort();
    busy.harness.until_metric(WAITING, |now| now == 0.0).await;
    busy.release();
    let next = busy.send("b", "b2", &[]).await.expect("no panic");
    assert_eq!(next.status, 200, "{next:?}");
    assert_eq!(begun(&busy.world.log()), ["a0", "b2"]);
}
