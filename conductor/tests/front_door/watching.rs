//! What operators look at: decisions with what came of them, the state of the cluster, the page.

use kvasir_placement::RecordedDecision;
use kvasir_proto::v1;
use kvasir_proto::v1::scheduler_client::SchedulerClient;
use serde_json::{Value, json};
use tonic::Code;

use crate::support::{
    BLOCK_TOKENS, Harness, Leg, Pair, Reply, Role, Script, World, config, prompt_keys,
};

struct Cluster {
    harness: Harness,
    prefill: Pair,
    decode: Pair,
}

/// The prefill side holds the first block of [`prompt`].
async fn cluster(decision_history_max: usize) -> Cluster {
    cluster_with(decision_history_max, 0).await
}

async fn cluster_with(decision_history_max: usize, decision_inputs_bytes_max: usize) -> Cluster {
    let world = World::default();
    let keys = prompt_keys(&prompt()[..BLOCK_TOKENS as usize]);
    let holds = Script { cached_blocks: 1, keys, ..Script::default() };
    let prefill = Pair::start(&world, "p", Role::Prefill, holds).await;
    let decode = Pair::start(&world, "d", Role::Decode, Script::default()).await;
    let mut config = config(&[&prefill, &decode]);
    config.decision_history_max = decision_history_max;
    config.decision_inputs_bytes_max = decision_inputs_bytes_max;
    Cluster { harness: Harness::start(config).await, prefill, decode }
}

/// What is in the metrics when something of that kind has been learned.
fn error_ratio(of: &str) -> String {
    format!("kvasir_conductor_prediction_error_ratio{{quantity=\"{of}\"}}")
}

fn prompt() -> Vec<u32> {
    (0..BLOCK_TOKENS * 5 / 2).collect()
}

impl Cluster {
    async fn ask(&self, id: &str) -> u16 {
        let body = json!({"model": "tiny", "prompt": prompt(), "max_tokens": 2});
        let url = format!("{}/v1/completions", self.harness.url);
        let request = self.harness.client.post(url).header("x-request-id", id);
        request.body(body.to_string()).send().await.expect("an answer").status().as_u16()
    }

    async fn open(&self, path: &str) -> reqwest::Response {
        let url = format!("{}{path}", self.harness.watch);
        self.harness.client.get(url).send().await.expect("an answer")
    }

    async fn metrics(&self) -> String {
        self.open("/metrics").await.text().await.expect("text")
    }

    /// Waits until a prediction of this kind has been compared with what came.
    async fn learns(&self, of: &str) {
        for _ in 0..2_000 {
            if self.metrics().await.contains(&error_ratio(of)) {
                return;
            }
            tokio::time::sleep(std::time::Duration::from_millis(2)).await;
        }
        panic!("{of} is never learned");
    }

    async fn look(&self, path: &str) -> (u16, Value) {
        let answer = self.open(path).await;
        (answer.status().as_u16(), answer.json().await.expect("JSON"))
    }

    /// The decisions for a request, once the last of them has ended.
    async fn ended(&self, id: &str) -> Vec<Value> {
        for _ in 0..2_000 {
            let (status, found) = self.look(&format!("/decisions/{id}")).await;
            assert_eq!(status, 200, "{found}");
            let decisions = found["decisions"].as_array().expect("a list").clone();
            let last = decisions.last().expect("one at least");
            if last["outcome"].is_object() || last["refused"].is_string() {
                return decisions;
            }
            tokio::time::sleep(std::time::Duration::from_millis(2)).await;
        }
        panic!("{id} has no outcome");
    }
}

#[tokio::test]
async fn a_decision_is_explained_with_what_came_of_it() {
    let cluster = cluster(10).await;
    // The last word of a prefill and the answer come on two connections: the answer ends when both are there.
    cluster.decode.change(|script| script.decode = Leg::HoldAfter(1));
    let let_go = async {
        cluster.learns("prefill").await;
        cluster.decode.change(|script| script.decode = Leg::Do);
    };
    assert_eq!(tokio::join!(cluster.ask("one"), let_go).0, 200);
    let decisions = cluster.ended("one").await;
    let [decision] = decisions.as_slice() else { panic!("one attempt in {decisions:?}") };
    assert_eq!(decision["model"], "tiny");
    assert_eq!(decision["prompt_tokens"], BLOCK_TOKENS * 5 / 2);
    let outcome = &decision["outcome"];
    assert_eq!((&outcome["result"], &outcome["generated_tokens"]), (&json!("ok"), &json!(2)));
    assert_eq!(outcome["cached_tokens"], BLOCK_TOKENS);
    assert!(outcome["tbt_us"].is_u64(), "{outcome}");
    assert_eq!(outcome["prefill_us"], 1_000, "as its engine says");
    assert!(outcome["predicted_prefill_us"].is_u64(), "{outcome}");
    assert!(decision["ttft_ms"].as_f64().is_some_and(|ms| ms > 0.0), "{decision}");
    // What came of it has been learned from.
    let metrics = cluster.metrics().await;
    for error in ["ttft", "tbt", "prefill"].map(error_ratio) {
        assert!(metrics.contains(&error), "{error} is not among {metrics}");
    }
    let placement = &decision["placement"];
    assert_eq!(placement["prefill"], "engine-p");
    assert_eq!(placement["decode"], "engine-d");
    assert_eq!(placement["reused_tokens"], BLOCK_TOKENS);
    let cache = placement["cache_summary"].as_str().expect("a sentence");
    assert!(cache.starts_with("1 of 3 blocks are reused, cached at p"), "{cache}");
    let candidate = &placement["prefill_candidates"][0];
    assert_eq!((&candidate["node"], &candidate["verdict"]), (&json!("p"), &json!("chosen")));
    assert_eq!(candidate["cached_blocks"], 1);
    assert_eq!(placement["decode_candidates"][0]["instance"], "engine-d");
    assert!(
        decision["text"].as_str().is_some_and(|text| text.contains("split engine-p -> engine-d"))
    );

    let (_, list) = cluster.look("/decisions").await;
    assert_eq!(list["decisions"][0]["request_id"], "one");
    assert_eq!(list["decisions"][0]["prefill"], "engine-p");
}

#[tokio::test]
async fn attempts_that_fail_are_decisions_of_their_own_and_a_refusal_says_why() {
    let cluster = cluster(10).await;
    let full = Reply::Fail(Code::ResourceExhausted);
    cluster.prefill.change(|script| script.allocate = full);
    assert_eq!(cluster.ask("none").await, 429);
    let decisions = cluster.ended("none").await;
    let how = decisions[0]["outcome"]["result"].as_str().expect("an outcome");
    assert!(how.starts_with("failed while allocating"), "{how}");
    let last = decisions.last().expect("one at least");
    assert!(last["refused"].as_str().is_some_and(|why| why.contains("prefill")), "{last}");
    let refusal = &last["refusal"];
    assert_eq!(
        (&refusal["reason"], &refusal["message"]),
        (&json!("no_instance"), &last["refused"])
    );
    let prefill = &refusal["prefill_candidates"][0];
    assert_eq!((&prefill["node"], &prefill["verdict"]), (&json!("p"), &json!("excluded")));
    assert!(prefill["compute_us"].as_u64().is_some_and(|us| us > 0), "{prefill}");
    assert_eq!(refusal["decode_candidates"][0]["verdict"], "no_prefill");
    let text = last["text"].as_str().expect("text");
    assert!(
        text.contains("prefill engine-p@p: cached 1") && text.contains("refused: no"),
        "{text}"
    );
}

#[tokio::test]
async fn plans_for_other_front_doors_are_recorded_and_are_no_requests() {
    let cluster = cluster(10).await;
    let mut client = SchedulerClient::connect(format!("http://{}", cluster.harness.grpc))
        .await
        .expect("connects");
    let mut plan = async |id: Option<&'static str>| {
        let mut request = tonic::Request::new(v1::ScheduleRequest {
            model: "tiny".to_owned(),
            prompt: prompt(),
            max_tokens: 4,
            ..v1::ScheduleRequest::default()
        });
        if let Some(id) = id {
            request.metadata_mut().insert("x-request-id", id.parse().expect("a value"));
        }
        client.schedule(request).await
    };
    let reply = plan(Some("planned")).await.expect("a plan");
    assert_eq!(reply.metadata().get("x-request-id").expect("an id"), "planned");
    let (_, found) = cluster.look("/decisions/planned").await;
    let decision = &found["decisions"][0];
    assert_eq!((&decision["is_schedule_only"], &decision["outcome"]), (&json!(true), &Value::Null));
    assert_eq!(decision["model"], "tiny");
    assert_eq!(decision["placement"]["prefill"], "engine-p");
    assert_eq!(decision["text"], reply.into_inner().explanation);
    // Without an id of the caller's own, the answer names one.
    let reply = plan(None).await.expect("a plan");
    let id = reply.metadata().get("x-request-id").expect("an id").to_str().expect("text");
    assert_eq!(cluster.look(&format!("/decisions/{id}")).await.0, 200);
    let (_, state) = cluster.look("/state").await;
    assert_eq!(
        (&state["recent"]["schedule_calls"], &state["recent"]["requests"]),
        (&json!(2), &json!(0))
    );
}

#[tokio::test]
async fn the_oldest_decisions_go_first_and_none_are_kept_where_none_are_wanted() {
    let two = cluster(2).await;
    for id in ["a", "b", "c"] {
        assert_eq!(two.ask(id).await, 200);
    }
    let (_, list) = two.look("/decisions?last=9").await;
    let ids: Vec<&Value> = list["decisions"]
        .as_array()
        .expect("a list")
        .iter()
        .map(|one| &one["request_id"])
        .collect();
    assert_eq!(ids, ["c", "b"]);
    let (status, said) = two.look("/decisions/a").await;
    assert_eq!(status, 404);
    assert!(said["error"].as_str().is_some_and(|why| why.contains("\"a\"")), "{said}");

    let none = cluster(0).await;
    assert_eq!(none.ask("a").await, 200);
    assert_eq!(none.look("/decisions").await.1["decisions"], json!([]));
}

#[tokio::test]
async fn what_decisions_were_taken_from_is_kept_where_it_is_wanted_and_the_oldest_goes_first() {
    // One takes between one and two KiB.
    let cluster = cluster_with(10, 2_000).await;
    for id in ["a", "b"] {
        assert_eq!(cluster.ask(id).await, 200);
    }
    let (status, found) = cluster.look("/decisions/b/inputs").await;
    assert_eq!(status, 200, "{found}");
    let decision = found["decisions"][0].clone();
    assert_eq!(decision["inputs"]["request"]["prompt_tokens"], BLOCK_TOKENS * 5 / 2);
    assert_eq!(decision["decision"]["prefill"], "engine-p");
    let recorded = RecordedDecision::read(decision).expect("it can be read");
    assert_eq!(recorded.replay(), []);
    let (status, said) = cluster.look("/decisions/a/inputs").await;
    assert_eq!(status, 404, "{said}");
    assert!(said["error"].as_str().is_some_and(|why| why.contains("decision_inputs_bytes_max")));
    assert_eq!(cluster.look("/decisions/a").await.0, 200, "the decision itself is kept");
}

#[tokio::test]
async fn the_state_names_nodes_and_engines_and_sums_up_the_last_minute() {
    let cluster = cluster(10).await;
    assert_eq!(cluster.ask("one").await, 200);
    cluster.ended("one").await;
    let (status, state) = cluster.look("/state").await;
    assert_eq!((status, &state["ready"]), (200, &json!(true)));
    let recent = &state["recent"];
    assert_eq!((&recent["requests"], &recent["answered"]), (&json!(1), &json!(1)));
    assert_eq!((&recent["refused"], &recent["failed"]), (&json!(0), &json!(0)));
    assert_eq!(recent["hit_ratio"], json!(0.4));
    assert_eq!(state["tokens"]["cached"], BLOCK_TOKENS);
    let nodes = state["cluster"]["nodes"].as_array().expect("nodes");
    let [p, d] = nodes.as_slice() else { panic!("two nodes in {state}") };
    assert_eq!((&p["node"], &p["connected"], &p["blocks"]), (&json!("p"), &json!(true), &json!(1)));
    assert_eq!(p["tiers"], json!({"vram": 0, "dram": 1, "ssd": 0}));
    assert_eq!(p["instances"][0]["current_role"], "prefill");
    assert_eq!((&d["instances"][0]["instance"], &d["blocks"]), (&json!("engine-d"), &json!(0)));
}

#[tokio::test]
async fn the_page_loads_nothing_else_and_what_is_wrong_is_said() {
    let cluster = cluster(10).await;
    let page = cluster.open("/").await;
    let policy = page.headers()["content-security-policy"].to_str().expect("text").to_owned();
    assert!(policy.starts_with("default-src 'none'"), "{policy}");
    assert!(page.text().await.expect("a page").starts_with("<!doctype html>"));
    for (path, want) in [("/nothing", 404), ("/decisions?last=x", 400), ("/decisions?lest=1", 400)]
    {
        let (status, said) = cluster.look(path).await;
        assert_eq!(status, want, "{path}");
        assert!(said["error"].is_string(), "{path}: {said}");
    }
    for path in ["/healthz", "/readyz", "/metrics"] {
        assert_eq!(cluster.open(path).await.status(), 200, "{path}");
    }
}
