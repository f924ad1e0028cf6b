//! What is refused, with which status, and what it blames.

use serde_json::{Value, json};

use crate::support::{Harness, Pair, Role, Script, World, config};

const CHAT: &str = "/v1/chat/completions";
const COMPLETIONS: &str = "/v1/completions";

async fn cluster() -> (Harness, World, Vec<Pair>) {
    let world = World::default();
    let pairs = vec![
        Pair::start(&world, "p", Role::Prefill, Script::default()).await,
        Pair::start(&world, "d", Role::Decode, Script::default()).await,
    ];
    let harness = Harness::start(config(&[&pairs[0], &pairs[1]])).await;
    (harness, world, pairs)
}

/// Status, parameter and code of an error, whose form is checked.
async fn refused(harness: &Harness, path: &str, body: Vec<u8>) -> (u16, Option<String>, String) {
    let shown = String::from_utf8_lossy(&body[..body.len().min(200)]).into_owned();
    let response = harness.post(path, body).await;
    let json = response.json();
    let error = json["error"].as_object().unwrap_or_else(|| panic!("no error for {shown}: {json}"));
    assert_eq!(error.len(), 4, "{json}");
    assert!(error["message"].as_str().is_some_and(|message| message.len() > 10), "{json}");
    let kind = if response.status < 500 { "invalid_request_error" } else { "server_error" };
    assert_eq!(error["type"], kind, "{json}");
    let param = error["param"].as_str().map(str::to_owned);
    (response.status, param, error["code"].as_str().expect("a code").to_owned())
}

async fn check(harness: &Harness, path: &str, base: &Value, more: Value, want: (&str, &str)) {
    let mut body = base.clone();
    body.as_object_mut().expect("an object").extend(more.as_object().expect("an object").clone());
    let (param, code) = want;
    let got = refused(harness, path, body.to_string().into_bytes()).await;
    assert_eq!(got, (400, Some(param.to_owned()), code.to_owned()), "for {more}");
}

#[tokio::test]
async fn parameters_that_are_wrong_are_refused_by_name() {
    let (harness, world, _pairs) = cluster().await;
    let chat =
        json!({"model": "tiny", "messages": [{"role": "user", "content": "x"}], "max_tokens": 1});
    let completion = json!({"model": "tiny", "prompt": "x", "max_tokens": 1});
    let value = "invalid_value";
    let kind = "invalid_type";
    let both = [
        (json!({"temperature": -0.1}), ("temperature", value)),
        (json!({"temperature": 2.1}), ("temperature", value)),
        (json!({"temperature": 1e-30}), ("temperature", value)),
        (json!({"temperature": "hot"}), ("temperature", kind)),
        (json!({"top_p": 0}), ("top_p", value)),
        (json!({"top_p": 1.5}), ("top_p", value)),
        (json!({"top_k": -2}), ("top_k", value)),
        (json!({"top_k": 1.5}), ("top_k", kind)),
        (json!({"n": 0}), ("n", value)),
        (json!({"n": 65}), ("n", value)),
        (json!({"max_tokens": 0}), ("max_tokens", value)),
        (json!({"max_tokens": -1}), ("max_tokens", value)),
        (json!({"max_tokens": 1e30}), ("max_tokens", value)),
        (json!({"max_tokens": 18446744073709551615_u64}), ("max_tokens", value)),
        (json!({"max_tokens": true}), ("max_tokens", kind)),
        (json!({"max_tokens": 3, "max_completion_tokens": 4}), ("max_completion_tokens", value)),
        (json!({"seed": "x"}), ("seed", kind)),
        (json!({"seed": 1.5}), ("seed", kind)),
        (json!({"frequency_penalty": 2.5}), ("frequency_penalty", value)),
        (json!({"presence_penalty": -3}), ("presence_penalty", value)),
        (json!({"stop": 1}), ("stop", kind)),
        (json!({"stop": ["a", 1]}), ("stop", kind)),
        (json!({"stop": ""}), ("stop", value)),
        (json!({"stop": vec!["s"; 17]}), ("stop", value)),
        (json!({"stop": "s".repeat(1025)}), ("stop", value)),
        (json!({"stop_token_ids": [-1]}), ("stop_token_ids", value)),
        (json!({"stop_token_ids": 4}), ("stop_token_ids", kind)),
        (json!({"stream": "yes"}), ("stream", kind)),
        (json!({"stream_options": {"include_usage": true}}), ("stream_options", value)),
        (
            json!({"stream": true, "stream_options": {"include_usge": true}}),
            ("stream_options.include_usge", "unknown_parameter"),
        ),
        (json!({"ignore_eos": 1}), ("ignore_eos", kind)),
        (json!({"logit_bias": {"5": 10}}), ("logit_bias", "unsupported_parameter")),
        (json!({"repetition_penalty": 1.1}), ("repetition_penalty", "unsupported_parameter")),
        (json!({"min_p": 0.1}), ("min_p", "unsupported_parameter")),
        (json!({"min_tokens": 1}), ("min_tokens", "unsupported_parameter")),
        (json!({"best_of": 3}), ("best_of", "unsupported_parameter")),
        (json!({"guided_json": {"a": 1}}), ("guided_json", "unsupported_parameter")),
        (json!({"cache_salt": ""}), ("cache_salt", value)),
        (json!({"cache_salt": "x".repeat(1025)}), ("cache_salt", value)),
        (json!({"cache_salt": 7}), ("cache_salt", kind)),
        (json!({"temprature": 1}), ("temprature", "unknown_parameter")),
        (json!({"max_tokens": 512}), ("", "context_length_exceeded")),
    ];
    for (more, (param, code)) in both {
        let named = |own: &'static str| if param.is_empty() { own } else { param };
        check(&harness, CHAT, &chat, more.clone(), (named("messages"), code)).await;
        check(&harness, COMPLETIONS, &completion, more, (named("prompt"), code)).await;
    }
    let unsupported = "unsupported_parameter";
    for (more, want) in [
        (
            json!({"messages": [{"role": "user", "content": "word ".repeat(2_000)}]}),
            ("messages", "context_length_exceeded"),
        ),
        (json!({"messages": null}), ("messages", "missing_required_parameter")),
        (json!({"messages": []}), ("messages", value)),
        (json!({"messages": "hi"}), ("messages", kind)),
        (json!({"messages": ["hi"]}), ("messages[0]", kind)),
        (
            json!({"messages": [{"content": "x"}]}),
            ("messages[0].role", "missing_required_parameter"),
        ),
        (
            json!({"messages": [{"role": "user"}]}),
            ("messages[0].content", "missing_required_parameter"),
        ),
        (json!({"messages": [{"role": "king", "content": "x"}]}), ("messages[0].role", value)),
        (
            json!({"messages": [{"role": "tool", "content": "x"}]}),
            ("messages[0].role", unsupported),
        ),
        (json!({"messages": [{"role": "user", "content": 5}]}), ("messages[0].content", kind)),
        (
            json!({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}),
            ("messages[0].content[0].type", unsupported),
        ),
        (
            json!({"messages": [{"role": "user", "content": [{"type": "text"}]}]}),
            ("messages[0].content[0].text", "missing_required_parameter"),
        ),
        (
            json!({"messages": [{"role": "user", "content": "x", "mood": "good"}]}),
            ("messages[0].mood", "unknown_parameter"),
        ),
        (
            json!({"messages": [{"role": "assistant", "tool_calls": [{"id": "1"}]}]}),
            ("messages[0].tool_calls", unsupported),
        ),
        (json!({"top_logprobs": 5}), ("top_logprobs", value)),
        (json!({"logprobs": true, "top_logprobs": 21}), ("top_logprobs", value)),
        (json!({"logprobs": 3}), ("logprobs", kind)),
        (json!({"tools": [{"type": "function"}]}), ("tools", unsupported)),
        (json!({"tool_choice": "required"}), ("tool_choice", unsupported)),
        (json!({"response_format": {"type": "json_object"}}), ("response_format", unsupported)),
        (
            json!({"response_format": {"type": "json_schema", "json_schema": {}}}),
            ("response_format", unsupported),
        ),
        (json!({"modalities": ["text", "audio"]}), ("modalities", unsupported)),
        (json!({"audio": {"voice": "x"}}), ("audio", unsupported)),
        (json!({"reasoning_effort": "high"}), ("reasoning_effort", unsupported)),
        (json!({"prompt": "x"}), ("prompt", "unknown_parameter")),
    ] {
        check(&harness, CHAT, &chat, more, want).await;
    }
    for (more, want) in [
        (json!({"prompt": null}), ("prompt", "missing_required_parameter")),
        (json!({"prompt": {}}), ("prompt", kind)),
        (json!({"prompt": 5}), ("prompt", kind)),
        (json!({"prompt": []}), ("prompt", value)),
        (json!({"prompt": ""}), ("prompt", value)),
        (json!({"prompt": [[]]}), ("prompt", value)),
        (json!({"prompt": [1, "a"]}), ("prompt", value)),
        (json!({"prompt": ["a", 1]}), ("prompt[1]", kind)),
        (json!({"prompt": [[1], [2.5]]}), ("prompt[1]", value)),
        (json!({"prompt": [-1]}), ("prompt", value)),
        (json!({"prompt": [4294967296_u64]}), ("prompt", value)),
        (json!({"prompt": [1024]}), ("prompt", value)),
        (json!({"prompt": vec![1; 512]}), ("prompt", "context_length_exceeded")),
        (json!({"prompt": "word ".repeat(2000)}), ("prompt", "context_length_exceeded")),
        (json!({"prompt": vec!["a"; 33], "n": 2}), ("prompt", value)),
        (json!({"logprobs": 21}), ("logprobs", value)),
        (json!({"logprobs": true}), ("logprobs", kind)),
        (json!({"echo": true, "logprobs": 1}), ("echo", unsupported)),
        (json!({"suffix": "end"}), ("suffix", unsupported)),
    ] {
        check(&harness, COMPLETIONS, &completion, more, want).await;
    }
    assert_eq!(world.log(), [], "nothing was reserved for any of them");
}

#[tokio::test]
async fn bodies_that_are_not_requests_are_refused() {
    let (harness, world, _pairs) = cluster().await;
    let deep = format!("{{\"model\": {}1{}}}", "[".repeat(5_000), "]".repeat(5_000));
    for body in [
        &b""[..],
        b"{",
        b"null",
        b"[]",
        b"\"text\"",
        b"{\"model\": \"tiny\",}",
        b"{\"model\": \"\xff\xfe\"}",
        b"{\"model\": \"\\ud800\"}",
        b"{\"temperature\": NaN}",
        b"{\"temperature\": 1e999}",
        deep.as_bytes(),
    ] {
        for path in [CHAT, COMPLETIONS] {
            let (status, param, code) = refused(&harness, path, body.to_vec()).await;
            assert_eq!((status, param, &*code), (400, None, "invalid_json"), "{body:?}");
        }
    }
    for (body, status, code) in [
        ("{}", 400, "missing_required_parameter"),
        ("{\"model\": 3}", 400, "invalid_type"),
        (
            "{\"model\": \"no/such\", \"messages\": [{\"role\": \"user\", \"content\": \"x\"}]}",
            404,
            "model_not_found",
        ),
    ] {
        let got = refused(&harness, CHAT, body.as_bytes().to_vec()).await;
        assert_eq!(got, (status, Some("model".to_owned()), code.to_owned()));
    }
    assert_eq!(world.log(), []);
}

#[tokio::test]
async fn wrong_paths_and_methods_are_told_apart() {
    let (harness, _, _pairs) = cluster().await;
    for (method, path, status, code) in [
        ("GET", "/v1/nothing", 404, "unknown_url"),
        ("POST", "/", 404, "unknown_url"),
        ("GET", "/v1/completions", 405, "method_not_allowed"),
        ("DELETE", "/v1/chat/completions", 405, "method_not_allowed"),
        ("POST", "/v1/models", 405, "method_not_allowed"),
        ("GET", "/v1/models/other", 404, "model_not_found"),
    ] {
        let method = reqwest::Method::from_bytes(method.as_bytes()).expect("a method");
        let request = harness.client.request(method.clone(), format!("{}{path}", harness.url));
        let response = request.send().await.expect("an answer");
        assert_eq!(response.status().as_u16(), status, "{method} {path}");
        let body: Value =
            serde_json::from_str(&response.text().await.expect("text")).expect("JSON");
        assert_eq!(body["error"]["code"], code, "{method} {path}");
    }
}

#[tokio::test]
async fn models_and_health_are_told() {
    let (harness, _, _pairs) = cluster().await;
    let models = harness.get("/v1/models").await.json();
    assert_eq!(models["object"], "list");
    assert_eq!(models["data"][0]["id"], "tiny");
    assert_eq!(models["data"][0]["max_model_len"], 512);
    assert_eq!(harness.get("/v1/models/tiny").await.json(), models["data"][0]);
    assert_eq!(harness.get("/healthz").await.text, "ok\n");
    assert_eq!(harness.get("/version").await.json()["version"], env!("CARGO_PKG_VERSION"));
    let metric = "kvasir_conductor_requests_total{path=\"/v1/models\",status=\"200\"}";
    assert_eq!(harness.metric(metric).await, 1.0);
}

#[tokio::test]
async fn request_ids_are_kept_or_made() {
    let (harness, _, _pairs) = cluster().await;
    let check = async |id: Option<&str>| {
        let mut request = harness.client.get(format!("{}/v1/models", harness.url));
        if let Some(id) = id {
            request = request.header("x-request-id", id);
        }
        let response = request.send().await.expect("an answer");
        response.headers()["x-request-id"].to_str().expect("text").to_owned()
    };
    assert_eq!(check(Some("mine-42")).await, "mine-42");
    let made = check(None).await;
    assert_eq!(made.len(), 32);
    assert_ne!(check(None).await, made);
    // Not fit to be logged.
    assert_eq!(check(Some(&"x".repeat(129))).await.len(), 32);
    assert_eq!(check(Some("two words")).await.len(), 32);
}

#[tokio::test]
async fn without_engines_the_answer_is_503_and_readyz_says_so() {
    let mut config = config(&[]);
    config.nodes = vec!["127.0.0.1:1".to_owned()];
    let harness = Harness::start_unready(config).await;
    assert_eq!(harness.get("/readyz").await.status, 503);
    assert_eq!(harness.get("/healthz").await.status, 200);
    let body = json!({"model": "tiny", "prompt": "x"});
    let response = harness.ask(COMPLETIONS, body).await;
    assert_eq!(response.status, 503);
    assert_eq!(response.json()["error"]["code"], "no_instance");
    assert_eq!(response.headers["retry-after"], "1");
}

#[tokio::test]
async fn readyz_waits_for_a_model_that_clients_may_ask_for() {
    let world = World::default();
    let pair = Pair::start(&world, "b", Role::Both, Script::default()).await;
    let mut config = config(&[&pair]);
    config.models[0].name = "other".to_owned();
    let harness = Harness::start_unready(config).await;
    harness.until_metric("kvasir_conductor_nodes_synced", |nodes| nodes == 1.0).await;
    harness.until_metric("kvasir_conductor_instances", |instances| instances == 1.0).await;
    let response = harness.get("/readyz").await;
    assert_eq!(response.status, 503, "{response:?}");
    assert!(response.text.contains("no configured model is available"), "{response:?}");
}

#[tokio::test]
async fn an_error_repeats_only_a_little_of_what_a_client_wrote() {
    let (harness, _world, _pairs) = cluster().await;
    let long = "x".repeat(50_000);
    let content = json!([{"type": long, "text": "x"}]);
    for (path, body) in [
        (CHAT, json!({"model": long, "messages": [{"role": "user", "content": "x"}]})),
        (CHAT, json!({"model": "tiny", "messages": [{"role": long, "content": "x"}]})),
        (CHAT, json!({"model": "tiny", "messages": [{"role": "user", "content": content}]})),
        (COMPLETIONS, json!({"model": "tiny", "prompt": "x", long.as_str(): 1})),
        ("/v1/responses", json!({"model": "tiny", "input": [{"type": long}]})),
        ("/v1/responses", json!({"model": "tiny", "input": [{"role": long, "content": "x"}]})),
        (
            "/v1/responses",
            json!({"model": "tiny", "input": [{"role": "user", "content": content}]}),
        ),
    ] {
        let refused = harness.ask(path, body).await;
        assert!((400..=404).contains(&refused.status), "{path}: {}", refused.status);
        assert!(refused.text.contains(&long[..200]), "{}", refused.text);
        assert!(refused.text.len() < 1_000, "{} bytes", refused.text.len());
    }
    let refused = harness.get(&format!("/{long}")).await;
    assert_eq!(refused.status, 404);
    assert!(refused.text.len() < 1_000, "{} bytes", refused.text.len());
}
