//! API keys, quotas and the separation of tenants.

use std::path::PathBuf;
use std::time::Duration;

use kvasir_conductor::{Conductor, Config};
use kvasir_proto::keys::namespace;
use kvasir_proto::v1;
use serde_json::{Value, json};

use crate::support::{Happened, Harness, Leg, Pair, Response, Role, Script, World, config};

const COMPLETIONS: &str = "/v1/completions";
/// A hang, on the slowest of machines.
const GUARD: Duration = Duration::from_secs(120);
/// `printf %s first-key | sha256sum`.
const FIRST_KEY: &str = "first-key";
const FIRST_HASH: &str = "9e24b55356ef2a121ab5fd1a3ee8a3c9191e837f3853e399a369e9044ff183f7";

/// A conductor with a file of keys that can be changed.
struct Keyed {
    world: World,
    pairs: Vec<Pair>,
    harness: Harness,
    file: PathBuf,
    _folder: tempfile::TempDir,
}

impl Keyed {
    async fn start(text: &str) -> Keyed {
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("keys.toml");
        std::fs::write(&file, text).expect("writes");
        std::fs::write(folder.path().join("second"), "second-key\n").expect("writes");
        let world = World::default();
        let pairs = vec![
            Pair::start(&world, "p", Role::Prefill, Script::default()).await,
            Pair::start(&world, "d", Role::Decode, Script::default()).await,
        ];
        let config = Config {
            api_keys_file: Some(file.clone()),
            reload_interval_ms: 10,
            body_bytes_max: 2 << 20,
            ..config(&[&pairs[0], &pairs[1]])
        };
        let harness = Harness::start(config).await;
        Keyed { world, pairs, harness, file, _folder: folder }
    }

    async fn ask(&self, key: &str, body: &Value) -> Response {
        self.send(COMPLETIONS, Some(&format!("Bearer {key}")), Some(body)).await
    }

    async fn send(&self, path: &str, key: Option<&str>, body: Option<&Value>) -> Response {
        let method = if body.is_some() { "POST" } else { "GET" };
        Response::read_from(method, self.open(path, key, body).await).await
    }

    async fn open(&self, path: &str, key: Option<&str>, body: Option<&Value>) -> reqwest::Response {
        let url = format!("{}{path}", self.harness.url);
        let mut request = match body {
            Some(body) => self.harness.client.post(url).body(body.to_string()),
            None => self.harness.client.get(url),
        };
        if let Some(key) = key {
            request = request.header("authorization", key);
        }
        request.send().await.expect("an answer")
    }
}

fn body(prompt: usize, max_tokens: u32) -> Value {
    json!({"model": "tiny", "prompt": vec![1; prompt], "max_tokens": max_tokens})
}

fn two_tenants() -> String {
    format!(
        "[[tenants]]\nname = \"a\"\nkeys = [{{ sha256 = \"{FIRST_HASH}\" }}]\n\
         [[tenants]]\nname = \"b\"\nkeys = [{{ file = \"second\" }}]\n"
    )
}

fn assert_refused(response: &Response, status: u16, code: &str) {
    assert_eq!(response.status, status, "{response:?}");
    let error = &response.json()["error"];
    assert_eq!(error["code"], code, "{response:?}");
    assert!(error["message"].as_str().is_some_and(|message| message.len() > 10), "{response:?}");
}

#[tokio::test]
async fn whoever_has_no_valid_key_is_401_and_told_nothing_else() {
    let keyed = Keyed::start(&two_tenants()).await;
    for path in [COMPLETIONS, "/v1/chat/completions"] {
        for key in [None, Some("Bearer wrong"), Some("Basic first-key"), Some("Bearer ")] {
            let refused = keyed.send(path, key, Some(&body(3, 1))).await;
            assert_refused(&refused, 401, "invalid_api_key");
            assert_eq!(refused.json()["error"]["type"], "invalid_request_error");
            assert_eq!(refused.headers["www-authenticate"], "Bearer");
        }
    }
    // Nor what is served.
    for path in ["/v1/models", "/v1/models/tiny"] {
        assert_refused(&keyed.send(path, None, None).await, 401, "invalid_api_key");
        assert_eq!(keyed.send(path, Some("bearer first-key"), None).await.status, 200);
    }
    assert_eq!(keyed.world.log(), [], "nothing was reserved for any of them");
    for key in [FIRST_KEY, "second-key"] {
        assert_eq!(keyed.ask(key, &body(3, 1)).await.status, 200);
    }
    for path in ["/healthz", "/readyz", "/version", "/metrics"] {
        let open = keyed.send(path, None, None).await;
        assert_eq!(open.status, 200);
        for secret in [FIRST_KEY, FIRST_HASH, "second-key"] {
            assert!(!open.text.contains(secret), "{path} tells {secret}");
        }
    }
    assert_eq!(keyed.harness.metric("kvasir_conductor_unauthenticated_requests_total").await, 10.0);
}

#[tokio::test]
async fn a_large_body_without_a_key_is_answered_and_not_cut_off() {
    let keyed = Keyed::start(&two_tenants()).await;
    let large = json!({"model": "tiny", "prompt": "x".repeat(1 << 20)});
    let refused = keyed.send(COMPLETIONS, None, Some(&large)).await;
    assert_refused(&refused, 401, "invalid_api_key");
}

#[tokio::test]
async fn tenants_share_no_blocks_whatever_they_ask_for() {
    let keyed = Keyed::start(&two_tenants()).await;
    for key in [FIRST_KEY, "second-key"] {
        assert_eq!(keyed.ask(key, &body(40, 1)).await.status, 200);
        let mut other = body(40, 1);
        other["cache_salt"] = "b".into();
        assert_eq!(keyed.ask(key, &other).await.status, 200);
    }
    let mut namespaces: Vec<Vec<u8>> = Vec::new();
    for happened in keyed.world.log() {
        if let Happened::Allocate { node: "p", request, .. } = happened {
            namespaces.push(request.namespace);
        }
    }
    let of = |salt: &str| namespace(&[7; 32], "f32", salt, "").0.to_vec();
    // Salts of their own are within those of their tenants.
    assert_eq!(namespaces, [of("a"), of("a\0b"), of("b"), of("b\0b")]);
    assert_ne!(of("a"), of(""), "nor with callers of the scheduler");
}

#[tokio::test]
async fn every_endpoint_of_prompts_takes_a_salt() {
    let keyed = Keyed::start(&two_tenants()).await;
    let chat = json!([{"role": "user", "content": "Why?"}]);
    let asks = [
        (COMPLETIONS, json!({"model": "tiny", "prompt": "Why?", "max_tokens": 1})),
        ("/v1/chat/completions", json!({"model": "tiny", "messages": chat, "max_tokens": 1})),
        ("/v1/responses", json!({"model": "tiny", "input": "Why?", "max_output_tokens": 1})),
    ];
    let key = format!("Bearer {FIRST_KEY}");
    for (path, mut body) in asks {
        body["cache_salt"] = "s".into();
        let answered = keyed.send(path, Some(&key), Some(&body)).await;
        assert_eq!(answered.status, 200, "{path}: {answered:?}");
        let log = keyed.world.log();
        let reserved = log.iter().rev().find_map(|happened| match happened {
            Happened::Allocate { node: "p", request, .. } => Some(&request.namespace),
            _ => None,
        });
        let want = namespace(&[7; 32], "f32", "a\0s", "").0.to_vec();
        assert_eq!(reserved, Some(&want), "{path}");
    }
}

async fn limited(limit: &str) -> Keyed {
    let tenant = format!("[[tenants]]\nname = \"a\"\nkeys = [{{ sha256 = \"{FIRST_HASH}\" }}]\n");
    Keyed::start(&format!("{tenant}{limit}\n")).await
}

fn retry_after_s(response: &Response) -> u64 {
    response.headers["retry-after"].to_str().expect("text").parse().expect("a number")
}

#[tokio::test]
async fn requests_beyond_those_a_minute_are_429_until_there_are_new_ones() {
    let keyed = limited("requests_per_minute = 1").await;
    assert_eq!(keyed.ask(FIRST_KEY, &body(3, 1)).await.status, 200);
    let refused = keyed.ask(FIRST_KEY, &body(3, 1)).await;
    assert_refused(&refused, 429, "rate_limit_exceeded");
    assert_eq!(refused.json()["error"]["type"], "rate_limit_error");
    assert_eq!(refused.json()["error"]["reason"], "quota_requests_per_minute");
    assert!((1..=60).contains(&retry_after_s(&refused)), "{refused:?}");
    assert!(refused.text.contains("1 requests per minute"), "{refused:?}");
    assert_eq!(keyed.send("/v1/models", Some("Bearer first-key"), None).await.status, 200);
    let counted = "kvasir_conductor_quota_refusals_total{quota=\"requests_per_minute\"}";
    assert_eq!(keyed.harness.metric(counted).await, 1.0);
}

#[tokio::test]
async fn tokens_of_prompts_and_answers_count_together() {
    // The first leaves a debt of two tokens: three must come, one every 15 s.
    let keyed = limited("tokens_per_minute = 4").await;
    let mut streamed = body(3, 3);
    streamed["stream"] = true.into();
    let first = keyed.ask(FIRST_KEY, &streamed).await;
    let end = first.events().pop().expect("events");
    assert_eq!(end["choices"][0]["finish_reason"], "length", "what has begun goes on");
    let refused = keyed.ask(FIRST_KEY, &body(1, 1)).await;
    assert_refused(&refused, 429, "rate_limit_exceeded");
    assert!((1..=45).contains(&retry_after_s(&refused)), "{refused:?}");
    assert!(refused.text.contains("4 tokens per minute"), "{refused:?}");
    assert_eq!(refused.json()["error"]["reason"], "quota_tokens_per_minute");
    let prompts = keyed.world.count(|h| matches!(h, Happened::Allocate { node: "p", .. }));
    assert_eq!(prompts, 1, "it is refused before anything is reserved");
}

#[tokio::test]
async fn requests_at_once_are_bounded_and_end_when_their_answers_do() {
    let keyed = limited("running_requests_max = 1").await;
    keyed.pairs[1].change(|script| script.decode = Leg::HangAfter(1));
    let mut streamed = body(3, 2);
    streamed["stream"] = true.into();
    let running = keyed.open(COMPLETIONS, Some("Bearer first-key"), Some(&streamed)).await;
    assert_eq!(running.status().as_u16(), 200);
    let refused = keyed.ask(FIRST_KEY, &body(3, 1)).await;
    assert_refused(&refused, 429, "rate_limit_exceeded");
    assert!(retry_after_s(&refused) >= 1);
    assert_eq!(refused.json()["error"]["reason"], "quota_running_requests");
    drop(running);
    keyed.world.until_all_shares_are_aborted().await;
    keyed.pairs[1].change(|script| script.decode = Leg::Do);
    loop {
        let again = keyed.ask(FIRST_KEY, &body(3, 1)).await;
        if again.status == 200 {
            break;
        }
        assert_refused(&again, 429, "rate_limit_exceeded");
    }
}

#[tokio::test]
async fn a_changed_file_is_taken_without_dropping_a_request() {
    let keyed = Keyed::start(&two_tenants()).await;
    keyed.pairs[1].change(|script| script.decode = Leg::HoldAfter(1));
    let mut streamed = body(3, 2);
    streamed["stream"] = true.into();
    let running = keyed.open(COMPLETIONS, Some("Bearer first-key"), Some(&streamed)).await;
    assert_eq!(running.status().as_u16(), 200);
    let models = async |key: &str| keyed.send("/v1/models", Some(key), None).await.status;

    // What is wrong is not taken.
    std::fs::write(&keyed.file, "[[tenants]]\nname = \"a\"\n").expect("writes");
    let reloads = "kvasir_conductor_reloads_total";
    let refused = format!("{reloads}{{file=\"api_keys\",outcome=\"rejected\"}}");
    keyed.harness.until_metric(&refused, |count| count >= 1.0).await;
    assert_eq!(models("Bearer first-key").await, 200);

    let only_second = two_tenants().split_off(two_tenants().rfind("[[").expect("two"));
    std::fs::write(&keyed.file, only_second).expect("writes");
    let taken = format!("{reloads}{{file=\"api_keys\",outcome=\"accepted\"}}");
    keyed.harness.until_metric(&taken, |count| count == 1.0).await;
    assert_eq!(models("Bearer first-key").await, 401);
    assert_eq!(models("Bearer second-key").await, 200);

    keyed.pairs[1].change(|script| script.decode = Leg::Do);
    let answer = Response::read(running).await;
    let end = answer.events().pop().expect("events");
    assert_eq!(end["choices"][0]["finish_reason"], "length", "{answer:?}");
}

/// A file with the hash of a key that many have.
fn sha256_of_everybody(key: &str) -> String {
    let hash = match key {
        "" => "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
        "test" => "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
        _ => "2bb80d537b1da3e38bd30361aa855686bde0eacd7162fef6a25fe97bf527a25b",
    };
    format!("[[tenants]]\nname = \"a\"\nkeys = [{{ sha256 = \"{hash}\" }}]")
}

#[tokio::test]
async fn what_gets_an_error_uses_no_quota() {
    let keyed = limited("requests_per_minute = 1\ntokens_per_minute = 6").await;
    let asked = async |name: &str, value: &str, body: String| {
        let url = format!("{}{COMPLETIONS}", keyed.harness.url);
        let request = keyed.harness.client.post(url).bearer_auth(FIRST_KEY).header(name, value);
        Response::read(request.body(body).send().await.expect("an answer")).await.status
    };
    let three = body(3, 3).to_string();
    assert_eq!(asked("x-llm-d-slo-ttft-ms", "0", three.clone()).await, 400);
    assert_eq!(asked("x-other", "1", " ".repeat(3 << 20)).await, 413);
    assert_eq!(asked("x-other", "1", "{".to_owned()).await, 400);
    // All attempts fail, after the prompt and two tokens of an answer that was not streamed.
    keyed.pairs[1].change(|script| script.decode = Leg::FailAfter(2, tonic::Code::Unavailable));
    assert_eq!(asked("x-other", "1", three.clone()).await, 503);
    keyed.pairs[1].change(|script| script.decode = Leg::Do);
    let answered = tokio::time::timeout(GUARD, async {
        loop {
            // Until the instance that failed is asked again.
            match asked("x-other", "1", three.clone()).await {
                503 => tokio::time::sleep(Duration::from_millis(5)).await,
                status => break status,
            }
        }
    });
    assert_eq!(answered.await.expect("no hang"), 200);
    assert_eq!(asked("x-other", "1", three).await, 429, "that one used it");
}

#[tokio::test]
async fn a_file_that_cannot_be_right_keeps_the_conductor_from_starting() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("keys.toml");
    let start = async || {
        let config = Config { api_keys_file: Some(file.clone()), ..config(&[]) };
        Conductor::bind(config).await.expect_err("cannot start").to_string()
    };
    assert!(start().await.contains("cannot read "), "{}", start().await);
    std::fs::write(folder.path().join("empty"), "\n").expect("writes");
    let other = "0".repeat(64);
    for (text, want) in [
        ("tenants = 1".to_owned(), "line 1: invalid type"),
        ("[[tenants]]\nname = \"a\"\nkeys = [\"secret\"]".to_owned(), "line 3: "),
        ("[[tenants]]\nname = secret".to_owned(), "line 2: "),
        ("[[tenants]]\nname = \"a\"".to_owned(), "missing field `keys`"),
        ("[[tenants]]\nname = \"\"\nkeys = []".to_owned(), "`name` must have"),
        (
            "[[tenants]]\nname = \"a\\u0000b\"\nkeys = []".to_owned(),
            "must not contain control characters",
        ),
        ("[[tenants]]\nname = \"a\"\nkeys = []\nkey = 1".to_owned(), "line 4: unknown field"),
        ("[[tenants]]\nname = \"a\"\nkeys = [{ sha256 = \"secret\" }]".to_owned(), "64 hex"),
        ("[[tenants]]\nname = \"a\"\nkeys = [{}]".to_owned(), "either `sha256` or `file`"),
        (
            "[[tenants]]\nname = \"a\"\nkeys = [{ file = \"secret\" }]".to_owned(),
            "tenant \"a\": `keys[0]`: cannot read the file: entity not found",
        ),
        ("[[tenants]]\nname = \"a\"\nkeys = []\nsecret = 1".to_owned(), "line 4: unknown field"),
        (
            "[[tenants]]\nname = \"a\"\nkeys = [{ file = \"empty\" }]".to_owned(),
            "one key of visible",
        ),
        (sha256_of_everybody("secret"), "`keys[0]` is a well-known key"),
        (sha256_of_everybody("test"), "`keys[0]` is a well-known key"),
        (sha256_of_everybody(""), "`keys[0]` is a well-known key"),
        (
            "[[tenants]]\nname = \"a\"\nkeys = []\nrequests_per_minute = 0".to_owned(),
            "`requests_per_minute` must be at least 1",
        ),
        (
            format!(
                "[[tenants]]\nname = \"a\"\nkeys = [{{ sha256 = \"{other}\" }}, {{ sha256 = \"{other}\" }}]"
            ),
            "`keys[1]` is already defined",
        ),
        (
            "[[tenants]]\nname = \"(anonymous)\"\nkeys = []".to_owned(),
            "`name` is reserved for callers without a key",
        ),
        (
            format!("{0}{0}", "[[tenants]]\nname = \"a\"\nkeys = []\n"),
            "tenant \"a\" is defined twice",
        ),
        (
            "[[tenants]]\nname = \"a\"\nkeys = []\nweight = 0".to_owned(),
            "`weight` must be between 1 and 1000",
        ),
        (
            "[[tenants]]\nname = \"a\"\nkeys = []\npriority = \"secret\"".to_owned(),
            "line 4: unknown variant",
        ),
        (
            "[[tenants]]\nname = \"a\"\nkeys = []\npriority_max = \"low\"".to_owned(),
            "`priority_max` (low) must not be lower than `priority` (normal)",
        ),
    ] {
        std::fs::write(&file, &text).expect("writes");
        let said = start().await;
        assert!(said.contains(want) && said.contains("keys.toml"), "{said:?} lacks {want:?}");
        assert!(!said.contains("secret"), "{said}");
    }
}

#[tokio::test]
async fn a_key_says_whether_blocks_are_kept_and_a_header_says_otherwise() {
    let keys = format!(
        "[[tenants]]\nname = \"a\"\nkeys = [\n\
         {{ sha256 = \"{FIRST_HASH}\" }},\n\
         {{ file = \"second\", cache_class = \"ephemeral\" }},\n]\n"
    );
    let keyed = Keyed::start(&keys).await;
    let url = format!("{}{COMPLETIONS}", keyed.harness.url);
    let classes = async |key: &str, header: Option<&str>| {
        let begun = keyed.world.log().len();
        let mut request = keyed.harness.client.post(&url).bearer_auth(key);
        if let Some(header) = header {
            request = request.header("x-kvasir-cache-class", header);
        }
        let answer = request.body(body(3, 1).to_string()).send().await.expect("an answer");
        assert_eq!(Response::read(answer).await.status, 200);
        let class = |happened: &Happened| match happened {
            Happened::Allocate { request, .. } => Some(request.cache_class()),
            _ => None,
        };
        keyed.world.log()[begun..].iter().filter_map(class).collect::<Vec<_>>()
    };
    use v1::CacheClass::{Ephemeral, Normal};
    for (key, header, want) in [
        (FIRST_KEY, None, Normal),
        (FIRST_KEY, Some("ephemeral"), Ephemeral),
        ("second-key", None, Ephemeral),
        ("second-key", Some("ephemeral"), Ephemeral),
        ("second-key", Some("normal"), Normal),
    ] {
        assert_eq!(classes(key, header).await, [want; 2], "{key} {header:?}");
    }
    // A class that there is not is not taken.
    std::fs::write(&keyed.file, keys.replace("ephemeral", "context")).expect("writes");
    let refused = "kvasir_conductor_reloads_total{file=\"api_keys\",outcome=\"rejected\"}";
    keyed.harness.until_metric(refused, |count| count >= 1.0).await;
    assert_eq!(classes("second-key", None).await, [Ephemeral; 2]);
}
