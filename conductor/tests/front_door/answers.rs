//! Answers as they should be, in both endpoints, whole and streamed.

use kvasir_proto::v1;
use serde_json::{Value, json};

use crate::support::{BLOCK_TOKENS, Happened, Harness, Pair, Role, Script, World, config};

const CHAT: &str = "/v1/chat/completions";
const COMPLETIONS: &str = "/v1/completions";

struct Cluster {
    world: World,
    harness: Harness,
    _pairs: Vec<Pair>,
}

async fn cluster_with(prefill: Script, decode: Script) -> Cluster {
    let world = World::default();
    let pairs = vec![
        Pair::start(&world, "p", Role::Prefill, prefill).await,
        Pair::start(&world, "d", Role::Decode, decode).await,
    ];
    let harness = Harness::start(config(&pairs.iter().collect::<Vec<_>>())).await;
    Cluster { world, harness, _pairs: pairs }
}

async fn cluster() -> Cluster {
    cluster_with(Script::default(), Script::default()).await
}

fn chat() -> Value {
    json!({
        "model": "tiny", "seed": 5, "max_tokens": 7,
        "messages": [{"role": "user", "content": "Hello there"}],
    })
}

fn with(mut body: Value, more: Value) -> Value {
    let more = more.as_object().expect("an object").clone();
    body.as_object_mut().expect("an object").extend(more);
    body
}

const ANSWER: &str = " s5t0 s5t1 s5t2 s5t3 s5t4 s5t5 s5t6";

#[tokio::test]
async fn a_chat_is_answered_in_the_shape_of_openai() {
    let cluster =
        cluster_with(Script { cached_blocks: 1, ..Script::default() }, Script::default()).await;
    let long = "words and words and words and more words again and again for a long time";
    let body = with(chat(), json!({"messages": [{"role": "user", "content": long}]}));
    let response = cluster.harness.ask(CHAT, body).await;
    assert_eq!(response.status, 200, "{response:?}");
    let answer = response.json();
    assert!(answer["id"].as_str().expect("an id").starts_with("chatcmpl-"));
    assert_eq!(answer["object"], "chat.completion");
    assert_eq!(answer["model"], "tiny");
    assert!(answer["created"].as_u64().expect("a time") > 1_700_000_000);
    let choice = &answer["choices"][0];
    assert_eq!(choice["index"], 0);
    assert_eq!(choice["message"], json!({"role": "assistant", "content": ANSWER, "refusal": null}));
    assert_eq!(choice["finish_reason"], "length");
    assert_eq!(choice["logprobs"], Value::Null);
    assert!(choice.get("token_ids").is_none(), "nobody asked for them");
    let usage = &answer["usage"];
    assert_eq!(usage["completion_tokens"], 7);
    assert_eq!(usage["prompt_tokens_details"]["cached_tokens"], BLOCK_TOKENS);
    let prompt = usage["prompt_tokens"].as_u64().expect("a count");
    assert!(prompt > u64::from(BLOCK_TOKENS));
    assert_eq!(usage["total_tokens"], prompt + 7);
}

#[tokio::test]
async fn what_a_client_writes_reaches_the_engine_as_tokens_of_the_rendered_template() {
    let cluster = cluster().await;
    let messages = json!([
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
    ]);
    let asked = [
        cluster.harness.ask(CHAT, with(chat(), json!({"messages": messages}))).await,
        // The same text as a completion gives the same tokens: the special ones are in it.
        cluster
            .harness
            .ask(
                COMPLETIONS,
                json!({"model": "tiny", "prompt": "<|begin|><|system|>be brief<|user|>a\nb<|assistant|>"}),
            )
            .await,
        // A role that the template does not know is given as the one it means.
        cluster
            .harness
            .ask(
                CHAT,
                with(
                    chat(),
                    json!({"messages": [
                        {"role": "developer", "content": "be brief"},
                        {"role": "user", "content": "a\nb", "name": null},
                    ]}),
                ),
            )
            .await,
    ];
    assert!(asked.iter().all(|response| response.status == 200), "{asked:?}");
    let log = cluster.world.log();
    let prompts: Vec<&Vec<u32>> = log
        .iter()
        .filter_map(|happened| match happened {
            Happened::Generate { node: "p", request, .. } => Some(&request.prompt),
            _ => None,
        })
        .collect();
    assert_eq!(prompts.len(), 3);
    assert_eq!((prompts[0][0], prompts[0][1]), (0, 4), "begin, system");
    assert_eq!(*prompts[0].last().expect("tokens"), 3, "assistant");
    assert_eq!(prompts[0], prompts[1]);
    assert_eq!(prompts[0], prompts[2]);
}

#[tokio::test]
async fn a_streamed_chat_joins_to_the_whole_one() {
    let decode = Script { held_back: " tail", stop_matched: "END", ..Script::default() };
    let cluster = cluster_with(Script::default(), decode).await;
    let more = json!({"logprobs": true, "top_logprobs": 2, "return_token_ids": true});
    let whole = cluster.harness.ask(CHAT, with(chat(), more.clone())).await.json();
    let more = with(more, json!({"stream": true, "stream_options": {"include_usage": true}}));
    let streamed = cluster.harness.ask(CHAT, with(chat(), more)).await;
    assert_eq!(streamed.status, 200);
    assert_eq!(streamed.headers["content-type"], "text/event-stream; charset=utf-8");
    let mut events = streamed.events();

    let last = events.pop().expect("the usage");
    assert_eq!(last["choices"], json!([]));
    assert_eq!(last["usage"], whole["usage"]);
    assert!(events.iter().all(|event| event["usage"].is_null()));
    assert!(events.iter().all(|event| event["object"] == "chat.completion.chunk"));
    assert_eq!(events[0]["choices"][0]["delta"], json!({"role": "assistant", "content": ""}));
    assert_eq!(events[0]["prompt_token_ids"], whole["prompt_token_ids"]);
    let end = events.last().expect("an end");
    assert_eq!(end["choices"][0]["delta"], json!({}));
    assert_eq!(end["choices"][0]["finish_reason"], "stop");
    assert_eq!(end["choices"][0]["stop_reason"], "END");
    let others = &events[..events.len() - 1];
    assert!(others.iter().all(|event| event["choices"][0]["finish_reason"].is_null()));

    let choice = &whole["choices"][0];
    let text: String =
        others.iter().filter_map(|e| e["choices"][0]["delta"]["content"].as_str()).collect();
    assert_eq!(text, choice["message"]["content"].as_str().expect("text"));
    assert_eq!(text, format!("{ANSWER} tail"));
    let joined = |path: fn(&Value) -> &Value| -> Vec<Value> {
        let lists = events.iter().filter_map(|event| path(&event["choices"][0]).as_array());
        lists.flatten().cloned().collect()
    };
    assert_eq!(Value::from(joined(|c| &c["token_ids"])), choice["token_ids"]);
    assert_eq!(Value::from(joined(|c| &c["logprobs"]["content"])), choice["logprobs"]["content"]);
    assert_eq!(choice["token_ids"], json!([100, 101, 102, 103, 104, 105, 106]));
    assert_eq!(choice["logprobs"]["content"][1]["token"], " s5t1");
    assert_eq!(choice["logprobs"]["content"][1]["top_logprobs"][1]["token"], "top1");
}

#[tokio::test]
async fn a_streamed_completion_joins_to_the_whole_one() {
    let decode = Script { held_back: " tail", ..Script::default() };
    let cluster = cluster_with(Script::default(), decode).await;
    let body = json!({
        "model": "tiny", "prompt": ["one", "two three"], "n": 2, "seed": 40, "max_tokens": 5,
        "logprobs": 1, "return_token_ids": true,
    });
    let whole = cluster.harness.ask(COMPLETIONS, body.clone()).await.json();
    let body = with(body, json!({"stream": true, "stream_options": {"include_usage": true}}));
    let mut events = cluster.harness.ask(COMPLETIONS, body).await.events();
    let usage = events.pop().expect("the usage");
    assert_eq!(usage["usage"], whole["usage"]);
    assert_eq!(usage["usage"]["completion_tokens"], 20);
    let mut choices = whole["choices"].as_array().expect("choices").clone();
    choices.sort_by_key(|choice| choice["index"].as_u64());
    assert_eq!(choices.len(), 4);
    for (index, choice) in choices.iter().enumerate() {
        let of_choice: Vec<&Value> =
            events.iter().map(|e| &e["choices"][0]).filter(|c| c["index"] == index).collect();
        let text: String = of_choice.iter().filter_map(|c| c["text"].as_str()).collect();
        // Two choices a prompt, each with a seed of its own.
        let seed = 40 + index % 2;
        let want: String = (0..5).map(|t| format!(" s{seed}t{t}")).collect();
        assert_eq!(text, format!("{want} tail"));
        assert_eq!(text, choice["text"].as_str().expect("text"));
        let joined = |path: fn(&Value) -> &Value| -> Value {
            let lists = of_choice.iter().filter_map(|choice| path(choice).as_array());
            lists.flatten().cloned().collect::<Vec<_>>().into()
        };
        assert_eq!(joined(|c| &c["token_ids"]), choice["token_ids"]);
        for list in ["tokens", "token_logprobs", "top_logprobs", "text_offset"] {
            let lists = of_choice.iter().filter_map(|c| c["logprobs"][list].as_array());
            let joined: Value = lists.flatten().cloned().collect::<Vec<_>>().into();
            assert_eq!(joined, choice["logprobs"][list], "{list}");
        }
        assert_eq!(joined(|c| &c["prompt_token_ids"]), choice["prompt_token_ids"]);
        assert_eq!(choice["finish_reason"], "length");
        assert_eq!(of_choice.last().expect("an end")["finish_reason"], "length");
    }
    assert_eq!(choices[0]["prompt_token_ids"], choices[1]["prompt_token_ids"]);
    assert_ne!(choices[0]["prompt_token_ids"], choices[2]["prompt_token_ids"]);
}

#[tokio::test]
async fn prompts_come_as_text_or_ids_one_or_many() {
    let cluster = cluster().await;
    let check = async |prompt: Value, choices: usize, prompt_tokens: u64| {
        let body = json!({"model": "tiny", "prompt": prompt, "max_tokens": 1});
        let response = cluster.harness.ask(COMPLETIONS, body).await;
        assert_eq!(response.status, 200, "{prompt}: {response:?}");
        let answer = response.json();
        assert_eq!(answer["object"], "text_completion");
        assert_eq!(answer["choices"].as_array().expect("choices").len(), choices, "{prompt}");
        assert_eq!(answer["usage"]["prompt_tokens"], prompt_tokens, "{prompt}");
    };
    check(json!([5, 6, 7]), 1, 3).await;
    check(json!([[5, 6, 7], [8]]), 2, 4).await;
    check(json!("<|user|>"), 1, 1).await;
    check(json!(["<|user|>", "<|user|><|end|>"]), 2, 3).await;
    check(json!(["<|user|>", [1, 2]]), 2, 3).await;
}

#[tokio::test]
async fn echo_puts_the_prompt_first_streamed_or_not() {
    let cluster = cluster().await;
    let body =
        json!({"model": "tiny", "prompt": "once upon", "seed": 1, "max_tokens": 2, "echo": true});
    let whole = cluster.harness.ask(COMPLETIONS, body.clone()).await.json();
    assert_eq!(whole["choices"][0]["text"], "once upon s1t0 s1t1");
    let events =
        cluster.harness.ask(COMPLETIONS, with(body, json!({"stream": true}))).await.events();
    let text: String = events.iter().filter_map(|e| e["choices"][0]["text"].as_str()).collect();
    assert_eq!(text, "once upon s1t0 s1t1");
    let ids = json!({"model": "tiny", "prompt": [2, 3], "max_tokens": 1, "echo": true, "seed": 1});
    assert_eq!(cluster.harness.ask(COMPLETIONS, ids).await.json()["choices"][0]["text"], " s1t0");
}

#[tokio::test]
async fn parameters_reach_the_engine_as_they_are_meant() {
    let cluster = cluster().await;
    let body = json!({
        "model": "tiny", "prompt": [1, 2, 3], "max_tokens": 3, "temperature": 0.5, "top_p": 0.9,
        "top_k": 40, "seed": -1, "stop": ["x", "yy"], "ignore_eos": true, "logprobs": 3,
        "frequency_penalty": 0.5, "presence_penalty": -0.5, "skip_special_tokens": false,
        "include_stop_str_in_output": true, "stop_token_ids": [9], "user": "u", "metadata": {"a": "b"},
        "best_of": 1, "repetition_penalty": 1.0, "min_p": 0, "logit_bias": {}, "suffix": null,
    });
    assert_eq!(cluster.harness.ask(COMPLETIONS, body).await.status, 200);
    let requests = |node: &str| -> Vec<v1::GenerateRequest> {
        let of = |happened: &Happened| match happened {
            Happened::Generate { node: at, request, .. } if *at == node => Some(request.clone()),
            _ => None,
        };
        cluster.world.log().iter().filter_map(of).collect()
    };
    let want = v1::SamplingParams {
        temperature: 0.5,
        top_p: 0.9,
        top_k: 40,
        seed: u64::MAX,
        max_tokens: 3,
        stop: vec!["x".to_owned(), "yy".to_owned()],
        ignore_eos: true,
        logprobs: true,
        top_logprobs: 3,
        keep_special_tokens: true,
        stop_token_ids: vec![9],
        frequency_penalty: 0.5,
        presence_penalty: -0.5,
        include_stop_str_in_output: true,
    };
    assert_eq!(requests("p")[0].sampling, Some(want.clone()));
    assert_eq!(requests("d")[0].sampling, Some(want));
    assert_eq!(requests("p")[0].tx, requests("d")[0].tx);

    // Without a seed each request draws one; chats may be as long as there is room.
    for _ in 0..2 {
        let body = json!({"model": "tiny", "messages": [{"role": "user", "content": "x"}]});
        assert_eq!(cluster.harness.ask(CHAT, body).await.status, 200);
    }
    let drawn: Vec<v1::SamplingParams> =
        requests("d")[1..].iter().map(|request| request.sampling.clone().expect("set")).collect();
    assert_ne!(drawn[0].seed, drawn[1].seed);
    let prompt = requests("d")[1].prompt.len() as u32;
    assert_eq!(drawn[0].max_tokens, 512 - prompt);
    assert_eq!((drawn[0].temperature, drawn[0].top_p, drawn[0].top_k), (1.0, 1.0, 0));
}

#[tokio::test]
async fn both_sides_are_told_what_they_need_and_nothing_is_aborted_after_success() {
    let cluster = cluster().await;
    let prompt: Vec<u32> = (0..40).collect();
    let body = json!({"model": "tiny", "prompt": prompt, "max_tokens": 3});
    assert_eq!(cluster.harness.ask(COMPLETIONS, body).await.status, 200);
    cluster
        .world
        .until("the legs end", |log| {
            log.iter().filter(|h| matches!(h, Happened::GenerateOver { .. })).count() == 2
        })
        .await;
    let log = cluster.world.log();
    let allocated: Vec<(&str, v1::TxAllocateRequest)> = log
        .iter()
        .filter_map(|happened| match happened {
            Happened::Allocate { node, request, .. } => Some((*node, request.clone())),
            _ => None,
        })
        .collect();
    assert_eq!(allocated.len(), 2);
    for (node, request) in allocated {
        assert_eq!(request.keys, crate::support::prompt_keys(&prompt));
        assert_eq!(request.keys.len(), 2 * 16);
        assert_eq!(request.prompt_tokens, 40);
        assert_eq!(request.lease_ms, 5_000);
        let (writer, answer) = if node == "d" { (&b"p"[..], 3) } else { (&b""[..], 0) };
        assert_eq!(request.writer_endpoint, writer);
        assert_eq!(request.generated_tokens_max, answer);
    }
    assert_eq!(cluster.world.count(|h| matches!(h, Happened::Push { node: "p", .. })), 1);
    assert_eq!(cluster.world.count(|h| matches!(h, Happened::Abort { .. })), 0);
}

#[tokio::test]
async fn who_asks_is_told_where_the_request_went_and_why() {
    let cluster = cluster().await;
    let ask = async |explain: bool, stream: bool| {
        let body = json!({"model": "tiny", "prompt": [1, 2], "max_tokens": 1, "stream": stream});
        let url = format!("{}{COMPLETIONS}", cluster.harness.url);
        let mut request = cluster.harness.client.post(url).body(body.to_string());
        if explain {
            request = request.header("x-kvasir-explain", "1");
        }
        let response = request.send().await.expect("an answer");
        assert_eq!(response.status().as_u16(), 200);
        let header = response.headers().get("x-kvasir-placement");
        header.map(|why| why.to_str().expect("text").to_owned())
    };
    for stream in [false, true] {
        let why = ask(true, stream).await.expect("an explanation");
        assert!(why.contains("| split engine-p -> engine-d, first token in"), "{why}");
        assert_eq!(ask(false, stream).await, None);
    }
}

#[tokio::test]
async fn an_instance_of_both_roles_serves_alone() {
    let world = World::default();
    let both =
        Pair::start(&world, "b", Role::Both, Script { cached_blocks: 1, ..Script::default() })
            .await;
    let harness = Harness::start(config(&[&both])).await;
    let prompt: Vec<u32> = (0..40).collect();
    let body = json!({"model": "tiny", "prompt": prompt, "max_tokens": 2, "seed": 3});
    let answer = harness.ask(COMPLETIONS, body).await.json();
    assert_eq!(answer["choices"][0]["text"], " s3t0 s3t1");
    assert_eq!(answer["usage"]["prompt_tokens_details"]["cached_tokens"], BLOCK_TOKENS);
    assert_eq!(world.count(|h| matches!(h, Happened::Generate { leg: v1::Phase::Full, .. })), 1);
    assert_eq!(world.count(|h| matches!(h, Happened::Allocate { .. })), 1);
    assert_eq!(world.count(|h| matches!(h, Happened::Push { .. } | Happened::Abort { .. })), 0);
}
