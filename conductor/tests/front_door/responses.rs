//! `/v1/responses`: answers, the events of a stream, and what is refused.

use serde_json::{Value, json};

use crate::support::{Happened, Harness, Leg, Pair, Response, Role, Script, World, config};

const RESPONSES: &str = "/v1/responses";

async fn cluster(decode: Script) -> (World, Vec<Pair>, Harness) {
    let world = World::default();
    let pairs = vec![
        Pair::start(&world, "p", Role::Prefill, Script::default()).await,
        Pair::start(&world, "d", Role::Decode, decode).await,
    ];
    let harness = Harness::start(config(&[&pairs[0], &pairs[1]])).await;
    (world, pairs, harness)
}

fn ask() -> Value {
    json!({"model": "tiny", "input": "Hello", "max_output_tokens": 4, "seed": 4})
}

/// Type and data of each event; their numbers follow each other.
fn events(response: &Response) -> Vec<(String, Value)> {
    let mut events = Vec::new();
    for (number, event) in response.text.split("\n\n").filter(|event| !event.is_empty()).enumerate()
    {
        let (kind, data) = event.split_once('\n').expect("two lines");
        let kind = kind.strip_prefix("event: ").expect("a type");
        let data: Value =
            serde_json::from_str(data.strip_prefix("data: ").expect("data")).expect("JSON");
        assert_eq!(data["sequence_number"], number, "{event}");
        events.push((kind.to_owned(), data));
    }
    events
}

#[tokio::test]
async fn a_response_has_one_message_and_says_why_it_ended() {
    let (_, _pairs, harness) = cluster(Script::default()).await;
    let mut asked = ask();
    let metadata = json!({"a": "b", "ä".repeat(64): "ä".repeat(512)});
    let more =
        json!({"temperature": 0.7, "metadata": metadata, "store": false, "user": "ä".repeat(512)});
    asked.as_object_mut().expect("an object").extend(more.as_object().expect("one").clone());
    let response = harness.ask(RESPONSES, asked).await.json();
    let text = " s4t0 s4t1 s4t2 s4t3";
    assert_eq!(response["output"][0]["content"][0]["text"], text, "{response}");
    assert_eq!(response["status"], "incomplete");
    assert_eq!(response["incomplete_details"], json!({"reason": "max_output_tokens"}));
    assert_eq!(response["usage"]["output_tokens"], 4);
    let total = response["usage"]["input_tokens"].as_u64().expect("a number") + 4;
    assert_eq!(response["usage"]["total_tokens"], total);
    assert_eq!(response["temperature"], 0.7);
    assert_eq!(response["metadata"], metadata);
    assert_eq!((&response["user"], &response["store"]), (&json!("ä".repeat(512)), &json!(false)));
    let stopped = Script { stop_matched: "end", ..Script::default() };
    let (_, _pairs, harness) = cluster(stopped).await;
    let response = harness.ask(RESPONSES, ask()).await.json();
    assert_eq!(
        (&response["status"], &response["incomplete_details"]),
        (&json!("completed"), &Value::Null)
    );
}

#[tokio::test]
async fn a_streamed_response_tells_each_step_and_adds_up_to_the_whole() {
    let (_, _pairs, harness) = cluster(Script::default()).await;
    let whole = harness.ask(RESPONSES, ask()).await.json();
    let mut asked = ask();
    asked["stream"] = true.into();
    let events = events(&harness.ask(RESPONSES, asked).await);
    let kinds: Vec<&str> = events
        .iter()
        .map(|(kind, _)| kind.as_str())
        .filter(|kind| *kind != "response.output_text.delta")
        .collect();
    assert_eq!(
        kinds,
        [
            "response.created",
            "response.in_progress",
            "response.output_item.added",
            "response.content_part.added",
            "response.output_text.done",
            "response.content_part.done",
            "response.output_item.done",
            "response.incomplete",
        ]
    );
    let deltas = events.iter().filter_map(|(_, data)| data["delta"].as_str());
    let text = &whole["output"][0]["content"][0]["text"];
    assert_eq!(deltas.collect::<String>(), *text);
    let last = &events.last().expect("events").1["response"];
    for same in ["usage", "status", "incomplete_details", "model", "object"] {
        assert_eq!(last[same], whole[same], "{same}");
    }
    assert_eq!(last["output"][0]["content"], whole["output"][0]["content"]);
    assert_eq!(last["id"], events[0].1["response"]["id"], "one response");
    assert_eq!(last["output"][0]["id"], events[2].1["item"]["id"], "one message");
}

#[tokio::test]
async fn a_stream_that_breaks_off_ends_with_a_failed_response() {
    let broken =
        Script { decode: Leg::FailAfter(2, tonic::Code::Unavailable), ..Script::default() };
    let (_, _pairs, harness) = cluster(broken).await;
    let mut asked = ask();
    asked["stream"] = true.into();
    let events = events(&harness.ask(RESPONSES, asked).await);
    let (kind, data) = events.last().expect("events");
    assert_eq!(kind, "response.failed");
    assert_eq!(data["response"]["status"], "failed");
    assert_eq!(data["response"]["error"]["code"], "server_error");
}

#[tokio::test]
async fn the_input_of_a_response_is_the_chat_that_it_describes() {
    let (world, _pairs, harness) = cluster(Script::default()).await;
    let messages = json!([
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Yes?"},
        {"role": "user", "content": "More"},
    ]);
    let chat = json!({"model": "tiny", "messages": messages, "max_tokens": 4});
    assert_eq!(harness.ask("/v1/chat/completions", chat).await.status, 200);
    let input = json!([
        {"role": "user", "content": [{"type": "input_text", "text": "Hello"}]},
        {"type": "message", "id": "msg_1", "status": "completed", "role": "assistant",
            "content": [{"type": "output_text", "text": "Yes?", "annotations": [], "logprobs": []}]},
        {"type": "message", "role": "user", "content": "More"},
    ]);
    let response = json!({"model": "tiny", "instructions": "Be brief.", "input": input,
        "max_output_tokens": 4});
    assert_eq!(harness.ask(RESPONSES, response).await.status, 200);
    let mut prompts: Vec<Vec<u32>> = Vec::new();
    for happened in world.log() {
        if let Happened::Generate { node: "p", request, .. } = happened {
            prompts.push(request.prompt);
        }
    }
    assert_eq!(prompts.len(), 2);
    assert_eq!(prompts[0], prompts[1]);
}

#[tokio::test]
async fn what_a_response_cannot_have_is_refused_by_name() {
    let (world, _pairs, harness) = cluster(Script::default()).await;
    let (value, kind) = ("invalid_value", "invalid_type");
    let (unsupported, missing) = ("unsupported_parameter", "missing_required_parameter");
    for (more, param, code) in [
        (json!({"store": true}), "store", unsupported),
        (json!({"previous_response_id": "resp_1"}), "previous_response_id", unsupported),
        (json!({"conversation": "conv_1"}), "conversation", unsupported),
        (json!({"background": true}), "background", unsupported),
        (json!({"prompt": {"id": "x"}}), "prompt", unsupported),
        (json!({"tools": [{"type": "web_search"}]}), "tools", unsupported),
        (json!({"tool_choice": "required"}), "tool_choice", unsupported),
        (json!({"include": ["message.output_text.logprobs"]}), "include", unsupported),
        (json!({"truncation": "auto"}), "truncation", unsupported),
        (json!({"top_logprobs": 1}), "top_logprobs", unsupported),
        (json!({"cache_salt": ""}), "cache_salt", value),
        (json!({"reasoning": {"effort": "high"}}), "reasoning.effort", unsupported),
        (json!({"reasoning": {"summary": "auto"}}), "reasoning.summary", unsupported),
        (json!({"text": {"format": {"type": "json_object"}}}), "text.format", unsupported),
        (json!({"text": {"verbosity": "low"}}), "text.verbosity", unsupported),
        (json!({"max_tokens": 1}), "max_tokens", "unknown_parameter"),
        (json!({"max_output_tokens": 0}), "max_output_tokens", value),
        (json!({"max_output_tokens": 5000}), "input", "context_length_exceeded"),
        (json!({"stream_options": {}}), "stream_options", value),
        (json!({"metadata": {"a": 1}}), "metadata", value),
        (json!({"metadata": {"n".repeat(65): "x"}}), "metadata", value),
        (json!({"metadata": {"n": "x".repeat(513)}}), "metadata", value),
        (json!({"user": "x".repeat(513)}), "user", value),
        (json!({"model": "tiny", "input": "x ".repeat(9_000)}), "input", "context_length_exceeded"),
        (json!({"input": null}), "input", missing),
        (json!({"input": 5}), "input", kind),
        (json!({"input": []}), "input", value),
        (json!({"input": ["x"]}), "input[0]", kind),
        (json!({"input": [{"content": "x"}]}), "input[0].role", missing),
        (json!({"input": [{"role": "user"}]}), "input[0].content", missing),
        (json!({"input": [{"role": "king", "content": "x"}]}), "input[0].role", value),
        (json!({"input": [{"type": "function_call_output"}]}), "input[0].type", unsupported),
        (
            json!({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}),
            "input[0].content[0].type",
            unsupported,
        ),
    ] {
        let mut body = ask();
        body.as_object_mut().expect("an object").extend(more.as_object().expect("one").clone());
        let refused = harness.ask(RESPONSES, body).await;
        assert_eq!(refused.status, 400, "{more}: {refused:?}");
        let error = &refused.json()["error"];
        assert_eq!(
            (error["param"].as_str(), error["code"].as_str()),
            (Some(param), Some(code)),
            "{more}"
        );
    }
    assert_eq!(world.log(), [], "nothing was reserved for any of them");
}
