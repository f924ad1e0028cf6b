//! Contexts: prompts that are kept for a time. What is kept is the nodes' affair; here it is what the
//! conductor asks of them, and what it makes of what they say.

use std::path::PathBuf;
use std::time::Duration;

use kvasir_conductor::Config;
use kvasir_proto::{BlockKey, keys, v1};
use serde_json::{Value, json};
use tonic::Code;

use crate::support::contract::{document, matches};
use crate::support::shelf::{Shelved, now_unix_ms};
use crate::support::{
    BLOCK_TOKENS, Happened, Harness, Leg, Pair, Reply, Response, Role, Script, World, config,
    prompt_keys,
};

const CONTEXTS: &str = "/v1/contexts";
/// Longer than any test takes.
const TTL_S: u64 = 1_000;

/// A node that prefills and one that decodes, which both keep what they are asked to.
struct Kept {
    world: World,
    p: Pair,
    d: Pair,
    harness: Harness,
}

fn keeps() -> Script {
    Script { keeps: true, ..Script::default() }
}

impl Kept {
    async fn start() -> Kept {
        Kept::start_with(keeps(), |_| {}).await
    }

    async fn start_with(script: Script, change: impl FnOnce(&mut Config)) -> Kept {
        let world = World::default();
        let p = Pair::start(&world, "p", Role::Prefill, script.clone()).await;
        let d = Pair::start(&world, "d", Role::Decode, script).await;
        let mut config = config(&[&p, &d]);
        change(&mut config);
        let harness = Harness::start(config).await;
        Kept { world, p, d, harness }
    }

    async fn create(&self, prompt: &[u32]) -> Response {
        let body = json!({"model": "tiny", "prompt": prompt, "ttl_seconds": TTL_S});
        self.harness.ask(CONTEXTS, body).await
    }

    async fn created(&self, prompt: &[u32]) -> Value {
        let created = self.create(prompt).await;
        assert_eq!(created.status, 200, "{created:?}: {:?} were asked", self.asked());
        created.json()
    }

    async fn list(&self) -> Value {
        let listed = self.harness.get(CONTEXTS).await;
        assert_eq!(listed.status, 200, "{listed:?}");
        listed.json()
    }

    /// Nodes that were asked to keep something, in their order.
    fn asked(&self) -> Vec<&'static str> {
        let node = |happened: Happened| match happened {
            Happened::Keep { node, .. } => Some(node),
            _ => None,
        };
        self.world.log().into_iter().filter_map(node).collect()
    }

    fn served(&self) -> usize {
        let is_answer = |leg| leg != v1::Phase::Prefill;
        self.world.count(|one| matches!(one, Happened::Generate { leg, .. } if is_answer(*leg)))
    }

    async fn refused(&self, reason: &str) -> f64 {
        let name = format!("kvasir_conductor_context_refusals_total{{reason=\"{reason}\"}}");
        self.harness.metric(&name).await
    }

    async fn counted(&self, event: &str) -> f64 {
        let name = format!("kvasir_conductor_contexts_total{{event=\"{event}\"}}");
        self.harness.metric(&name).await
    }
}

fn prompt(seed: u32, tokens: u32) -> Vec<u32> {
    (0..tokens).map(|token| (token * 7 + seed) % 1_000).collect()
}

/// The id of the context of a prompt's whole blocks.
fn id_of(prompt: &[u32], salt: &str) -> String {
    let namespace = keys::namespace(&[7; 32], "f32", salt, "");
    let chain = keys::chain(namespace, prompt, BLOCK_TOKENS as usize);
    let last = chain.last().expect("a block");
    format!("ctx_{}{}", hex(&namespace.0), hex(&last.0))
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The namespace and the last key of an id, as nodes have them.
fn parts_of(id: &str) -> (Vec<u8>, Vec<u8>) {
    let bytes: Vec<u8> = (4..id.len())
        .step_by(2)
        .map(|at| u8::from_str_radix(&id[at..at + 2], 16).expect("digits"))
        .collect();
    (bytes[..16].to_vec(), bytes[16..].to_vec())
}

fn at(id: &str) -> String {
    format!("{CONTEXTS}/{id}")
}

fn assert_refused(response: &Response, status: u16, code: &str, says: &str) {
    assert_eq!(response.status, status, "{response:?}");
    let error = &response.json()["error"];
    assert_eq!(error["code"], code, "{response:?}");
    assert!(error["message"].as_str().expect("text").contains(says), "{response:?}");
}

#[tokio::test]
async fn a_prompt_is_served_once_and_its_whole_blocks_are_kept_where_it_was_computed() {
    let kept = Kept::start().await;
    let prompt = prompt(1, 2 * BLOCK_TOKENS + 8);
    let before_s = now_unix_ms() / 1_000;
    let created = kept.created(&prompt).await;
    assert_eq!(created["id"], id_of(&prompt, ""));
    assert_eq!(created["object"], "context");
    assert_eq!(created["model"], "tiny");
    assert_eq!(created["tokens"], 2 * BLOCK_TOKENS);
    assert_eq!(created["prompt_tokens"], 2 * BLOCK_TOKENS + 8);
    let created_s = created["created_at"].as_u64().expect("a time");
    assert!((before_s..=now_unix_ms() / 1_000).contains(&created_s), "{created}");
    let expires_s = created["expires_at"].as_u64().expect("a time");
    assert_eq!(expires_s - created_s, TTL_S);
    assert_eq!((kept.served(), kept.asked()), (1, vec!["p"]));
    let asked = kept.world.log().into_iter().find_map(|happened| match happened {
        Happened::Keep { request, .. } => Some(request),
        _ => None,
    });
    let asked = asked.expect("it was asked");
    assert_eq!(BlockKey::list(&asked.keys).expect("keys").len(), 2);
    assert_eq!((asked.ttl_ms, asked.last_key.len()), (TTL_S * 1_000, 0));

    let mut known = created.clone();
    known.as_object_mut().expect("an object").remove("prompt_tokens");
    let id = created["id"].as_str().expect("an id");
    assert_eq!(kept.harness.get(&at(id)).await.json(), known);
    let listed = kept.list().await;
    assert_eq!(
        listed,
        json!({"object": "list", "data": [known], "first_id": id, "last_id": id,
            "has_more": false, "complete": true})
    );
    assert_eq!(kept.counted("created").await, 1.0);
}

#[tokio::test]
async fn a_context_is_kept_on_as_many_nodes_as_is_asked_for_or_as_the_configuration_says() {
    let asked = async |kept: &Kept, replicas: Value| {
        let mut body =
            json!({"model": "tiny", "prompt": prompt(1, BLOCK_TOKENS), "ttl_seconds": TTL_S});
        if !replicas.is_null() {
            body["replicas"] = replicas;
        }
        kept.harness.ask(CONTEXTS, body).await
    };
    let last = |kept: &Kept| {
        let replicas = |happened: Happened| match happened {
            Happened::Keep { request, .. } => Some(request.replicas),
            _ => None,
        };
        kept.world.log().into_iter().filter_map(replicas).next_back()
    };
    let check = async |default: u8, asks: Value, want: u32| {
        let change = |config: &mut Config| config.contexts.replicas_default = default;
        let kept = Kept::start_with(keeps(), change).await;
        let created = asked(&kept, asks).await;
        assert_eq!((created.status, last(&kept)), (200, Some(want)), "{created:?}");
    };
    check(1, Value::Null, 1).await;
    check(2, Value::Null, 2).await;
    check(2, json!(3), 3).await;
    let kept = Kept::start().await;
    for wrong in [json!(0), json!(9), json!("two")] {
        let refused = asked(&kept, wrong).await;
        assert_eq!((refused.status, last(&kept)), (400, None), "{refused:?}");
    }
}

#[tokio::test]
async fn a_node_that_has_all_of_it_is_asked_and_nothing_is_computed() {
    let prompt = prompt(1, 3 * BLOCK_TOKENS);
    let kept = Kept::start_with(Script { keys: prompt_keys(&prompt), ..keeps() }, |_| {}).await;
    let created = kept.created(&prompt).await;
    assert_eq!((kept.served(), kept.asked().len()), (0, 1));
    // Once more: its time begins anew, and it is the same one.
    let again = kept.created(&prompt).await;
    assert_eq!((&again["id"], &again["created_at"]), (&created["id"], &created["created_at"]));
    assert!(again["expires_at"].as_u64() >= created["expires_at"].as_u64());
    assert_eq!(kept.served(), 0);
    // For less than is left it stays as it is.
    let body = json!({"model": "tiny", "prompt": prompt, "ttl_seconds": 1});
    let shorter = kept.harness.ask(CONTEXTS, body).await.json();
    assert_eq!(shorter["expires_at"], again["expires_at"]);
    // What the index believed is not there any more: then it is computed.
    kept.p.change(|script| script.keeps_next = vec![Reply::Fail(Code::NotFound)]);
    kept.d.change(|script| script.keeps_next = vec![Reply::Fail(Code::NotFound)]);
    kept.created(&prompt).await;
    assert_eq!(kept.served(), 1);
}

#[tokio::test]
async fn messages_are_written_as_a_chat_that_begins_with_them_is() {
    let kept = Kept::start().await;
    let words = "Once upon a time there was a cache. ".repeat(8);
    let messages = json!([{"role": "system", "content": words}]);
    let created = kept.harness.ask(CONTEXTS, json!({"model": "tiny", "messages": messages})).await;
    assert_eq!(created.status, 200, "{created:?}");
    let chat = json!({"model": "tiny", "max_tokens": 1, "messages":
        [{"role": "system", "content": words}, {"role": "user", "content": "Whose?"}]});
    assert_eq!(kept.harness.ask("/v1/chat/completions", chat).await.status, 200);
    let prompts = kept.world.log().into_iter().filter_map(|happened| match happened {
        Happened::Generate { leg: v1::Phase::Decode, request, .. } => Some(request.prompt),
        _ => None,
    });
    let prompts: Vec<Vec<u32>> = prompts.collect();
    let [of_context, of_chat] = prompts.as_slice() else { panic!("{prompts:?}") };
    let blocks = of_context.len() / BLOCK_TOKENS as usize;
    assert!(blocks > 1 && of_chat.len() > of_context.len());
    assert_eq!(of_context[..], of_chat[..of_context.len()]);
    assert_eq!(created.json()["id"], id_of(of_chat.get(..blocks * 16).expect("long"), ""));
    // Nobody said how long.
    let created = created.json();
    let (from, until) = (&created["created_at"], &created["expires_at"]);
    assert_eq!(until.as_u64().expect("a time") - from.as_u64().expect("a time"), 3_600);
}

#[tokio::test]
async fn what_cannot_be_read_is_refused_with_the_parameter_to_blame() {
    let kept = Kept::start_with(keeps(), |config| config.contexts.ttl_max_ms = 7_200_999).await;
    let long = prompt(1, 100);
    let messages = json!([{"role": "user", "content": "x"}]);
    for (body, param, says) in [
        (json!({"prompt": long}), "model", "`model` is required"),
        (json!({"model": "tiny"}), "messages", "`messages` or `prompt` is required"),
        (json!({"model": "tiny", "prompt": long, "messages": messages}), "prompt", "not both"),
        (json!({"model": "tiny", "prompt": ["a", "b"]}), "prompt", "token ids"),
        (json!({"model": "tiny", "prompt": 7}), "prompt", "a string or a list of token ids"),
        (json!({"model": "tiny", "prompt": vec![5_000; 64]}), "prompt", "vocabulary"),
        (json!({"model": "tiny", "messages": []}), "messages", "must not be empty"),
        (
            json!({"model": "tiny", "prompt": long, "ttl_seconds": 0}),
            "ttl_seconds",
            "between 1 and 7200",
        ),
        (
            json!({"model": "tiny", "prompt": long, "ttl_seconds": -1}),
            "ttl_seconds",
            "between 1 and 7200",
        ),
        (
            json!({"model": "tiny", "prompt": long, "ttl_seconds": 7_201}),
            "ttl_seconds",
            "between 1 and 7200",
        ),
        (
            json!({"model": "tiny", "prompt": long, "ttl_seconds": "1h"}),
            "ttl_seconds",
            "an integer",
        ),
        (json!({"model": "tiny", "prompt": long, "ttl": 7}), "ttl", "not a known parameter"),
        (
            json!({"model": "tiny", "prompt": long, "chat_template_kwargs": {}}),
            "chat_template_kwargs",
            "requires `messages`",
        ),
    ] {
        let refused = kept.harness.ask(CONTEXTS, body.clone()).await;
        assert_eq!(refused.status, 400, "{body}: {refused:?}");
        let error = &refused.json()["error"];
        assert_eq!(error["param"], param, "{body}");
        assert!(error["message"].as_str().expect("text").contains(says), "{body}: {error}");
    }
    let longer = prompt(1, 512);
    let refused = kept.create(&longer).await;
    assert_refused(&refused, 400, "context_length_exceeded", "at least 1 for the answer");
    let other = json!({"model": "other", "prompt": long});
    assert_refused(&kept.harness.ask(CONTEXTS, other).await, 404, "model_not_found", "other");

    let short = kept.create(&prompt(1, BLOCK_TOKENS - 1)).await;
    assert_refused(
        &short,
        400,
        "context_too_short",
        "has 15 tokens; a context needs at least one block of 16 tokens",
    );
    assert_eq!(short.json()["error"]["param"], "prompt");
    let body = json!({"model": "tiny", "messages": messages});
    let short = kept.harness.ask(CONTEXTS, body).await;
    assert_eq!(short.json()["error"]["param"], "messages", "{short:?}");
    assert_eq!(kept.refused("too_short").await, 2.0);

    let id = id_of(&long, "");
    for (body, param) in [
        (json!({}), "ttl_seconds"),
        (json!({"ttl_seconds": 0}), "ttl_seconds"),
        (json!({"ttl_seconds": 7, "x": 1}), "x"),
    ] {
        let refused = kept.harness.ask(&at(&id), body).await;
        assert_eq!((refused.status, &refused.json()["error"]["param"]), (400, &json!(param)));
    }
    for (query, param) in [
        ("limit=0", json!("limit")),
        ("limit=101", json!("limit")),
        ("limit=x", json!("limit")),
        ("after=ctx_1", json!("after")),
        ("order=asc", Value::Null),
        ("limit=1&limit=2", Value::Null),
    ] {
        let refused = kept.harness.get(&format!("{CONTEXTS}?{query}")).await;
        assert_eq!((refused.status, &refused.json()["error"]["param"]), (400, &param), "{query}");
    }
    assert_eq!(kept.world.log(), [], "no node was asked for anything");
}

#[tokio::test]
async fn a_context_is_given_another_time_and_ended_at_all_nodes_that_have_it() {
    let kept = Kept::start().await;
    let prompt = prompt(1, 2 * BLOCK_TOKENS);
    let created = kept.created(&prompt).await;
    let id = created["id"].as_str().expect("an id");
    // Another node has it too, for longer.
    let mut there = kept.p.shelf().contexts[&parts_of(id)].clone();
    there.created_unix_ms -= 50_000;
    there.expires_unix_ms += 50_000;
    kept.d.shelf().contexts.insert(parts_of(id), there);
    let merged = kept.harness.get(&at(id)).await.json();
    let time = |of: &Value, name: &str| of[name].as_u64().expect("a time");
    assert_eq!(time(&merged, "created_at") + 50, time(&created, "created_at"));
    assert_eq!(time(&merged, "expires_at"), time(&created, "expires_at") + 50);
    let listed = kept.list().await["data"].clone();
    assert_eq!(listed, json!([merged]));

    for (ttl_s, event) in [(5_000, 1.0), (10, 2.0)] {
        let before_s = now_unix_ms() / 1_000;
        let extended = kept.harness.ask(&at(id), json!({"ttl_seconds": ttl_s})).await;
        assert_eq!(extended.status, 200, "{extended:?}");
        let until_s = time(&extended.json(), "expires_at");
        assert!((before_s..=now_unix_ms() / 1_000).contains(&(until_s - ttl_s)), "{extended:?}");
        assert_eq!(extended.json()["tokens"], 2 * BLOCK_TOKENS);
        assert_eq!(kept.harness.get(&at(id)).await.json()["expires_at"], until_s);
        assert_eq!(kept.counted("extended").await, event);
    }

    let ended = kept.harness.delete(&at(id)).await;
    assert_eq!(ended.json(), json!({"id": id, "object": "context.deleted", "deleted": true}));
    assert!(kept.p.shelf().contexts.is_empty() && kept.d.shelf().contexts.is_empty());
    assert_eq!(kept.counted("deleted").await, 1.0);
    assert_refused(&kept.harness.delete(&at(id)).await, 404, "context_not_found", id);
    assert_refused(&kept.harness.get(&at(id)).await, 404, "context_not_found", id);
    let extended = kept.harness.ask(&at(id), json!({"ttl_seconds": 1})).await;
    assert_refused(&extended, 404, "context_not_found", id);
    assert_eq!(extended.json()["error"]["param"], "id");
    assert_eq!(kept.list().await["data"], json!([]));
    assert_eq!(kept.refused("not_found").await, 3.0);
}

#[tokio::test]
async fn a_context_that_moves_while_it_is_ended_is_ended_where_it_has_come() {
    let kept = Kept::start().await;
    let created = kept.created(&prompt(1, 2 * BLOCK_TOKENS)).await;
    let id = created["id"].as_str().expect("an id");
    kept.p.change(|script| script.drop = Reply::Hold);
    let path = at(id);
    let moves = async {
        // The other node has said that it has none.
        let dropped = |one: &Happened| matches!(one, Happened::Drop { node, .. } if *node == "d");
        kept.world.until("the other one was asked", |log| log.iter().any(dropped)).await;
        tokio::time::sleep(Duration::from_millis(50)).await;
        let moved = kept.p.shelf().contexts[&parts_of(id)].clone();
        kept.d.shelf().contexts.insert(parts_of(id), moved);
        kept.p.change(|script| script.drop = Reply::Do);
    };
    let (ended, ()) = tokio::join!(kept.harness.delete(&path), moves);
    assert_eq!(ended.status, 200, "{ended:?}");
    assert!(kept.p.shelf().contexts.is_empty() && kept.d.shelf().contexts.is_empty());
    assert_refused(&kept.harness.delete(&path).await, 404, "context_not_found", id);
}

#[tokio::test]
async fn what_no_context_is_called_is_not_found() {
    let kept = Kept::start().await;
    let id = id_of(&prompt(1, 16), "");
    for wrong in ["x", "ctx_", &id[..67], &id.to_uppercase(), &format!("{id}0"), "%ff", "%00"] {
        let at = at(wrong);
        assert_refused(&kept.harness.get(&at).await, 404, "context_not_found", "does not exist");
        assert_refused(&kept.harness.delete(&at).await, 404, "context_not_found", "does not exist");
        let extended = kept.harness.ask(&at, json!({"ttl_seconds": 1})).await;
        assert_refused(&extended, 404, "context_not_found", "does not exist");
    }
}

#[tokio::test]
async fn pages_of_several_nodes_are_one_list() {
    let kept = Kept::start().await;
    let namespace = keys::namespace(&[7; 32], "f32", "", "").0.to_vec();
    let of = |tenant: &str, expires_unix_ms| Shelved {
        tenant: tenant.to_owned(),
        blocks: 3,
        created_unix_ms: 5_000,
        expires_unix_ms,
    };
    let mut ids = Vec::new();
    for number in 0..45_u8 {
        let mut key = vec![number; 16];
        key[0] = number.reverse_bits();
        let place = (namespace.clone(), key.clone());
        ids.push(format!("ctx_{}{}", hex(&namespace), hex(&key)));
        // Every third one at both.
        if number % 3 != 1 {
            kept.p.shelf().contexts.insert(place.clone(), of("(anonymous)", 10_000));
        }
        if number % 3 != 2 {
            kept.d.shelf().contexts.insert(place, of("(anonymous)", 20_000));
        }
        let other = (namespace.clone(), vec![number, 1]);
        kept.p.shelf().contexts.insert(other, of("another", 10_000));
    }
    ids.sort();
    let pages = async |limit: usize| {
        let (mut seen, mut query) = (Vec::new(), format!("?limit={limit}"));
        loop {
            let page = kept.harness.get(&format!("{CONTEXTS}{query}")).await.json();
            let data = page["data"].as_array().expect("a list").clone();
            assert!(data.len() <= limit);
            assert_eq!(
                (&page["first_id"], &page["last_id"]),
                (&data[0]["id"], &data[data.len() - 1]["id"])
            );
            seen.extend(data);
            if page["has_more"] == false {
                return seen;
            }
            query = format!("?limit={limit}&after={}", page["last_id"].as_str().expect("an id"));
        }
    };
    for limit in [1, 7, 44, 45, 46, 100] {
        let seen = pages(limit).await;
        let names: Vec<&str> = seen.iter().map(|one| one["id"].as_str().expect("an id")).collect();
        assert_eq!(names, ids, "{limit} at a time");
        let later = seen.iter().filter(|one| one["expires_at"] == 20).count();
        assert_eq!(later, 30, "the latest time counts");
        assert!(seen.iter().all(|one| one["tokens"] == 3 * BLOCK_TOKENS));
    }
    assert_eq!(kept.list().await["data"].as_array().expect("a list").len(), 20);
}

#[tokio::test]
async fn a_context_of_a_model_that_is_gone_has_no_name_for_it() {
    let kept = Kept::start().await;
    let kept_there = Shelved {
        tenant: "(anonymous)".to_owned(),
        blocks: 3,
        created_unix_ms: 5_000,
        expires_unix_ms: 10_000,
    };
    kept.p.shelf().contexts.insert((vec![1; 16], vec![2; 16]), kept_there);
    let id = format!("ctx_{}{}", "01".repeat(16), "02".repeat(16));
    let known = json!({"id": id, "object": "context", "model": null, "tokens": null,
        "created_at": 5, "expires_at": 10});
    assert_eq!(kept.harness.get(&at(&id)).await.json(), known);
    assert_eq!(kept.harness.delete(&at(&id)).await.status, 200);
}

#[tokio::test]
async fn nodes_that_do_not_answer_are_not_taken_for_nodes_that_have_nothing() {
    let kept = Kept::start_with(keeps(), |config| config.contexts.node_call_timeout_ms = 200).await;
    let mine = prompt(1, 2 * BLOCK_TOKENS);
    let created = kept.created(&mine).await;
    let id = created["id"].as_str().expect("an id");
    let unknown = id_of(&prompt(2, 16), "");
    for silent in [Reply::Hang, Reply::Fail(Code::Unavailable), Reply::Fail(Code::Internal)] {
        kept.d.change(|script| {
            (script.list, script.drop, script.keep) = (silent, silent, silent);
        });
        let listed = kept.list().await;
        assert_eq!((&listed["complete"], &listed["data"][0]["id"]), (&json!(false), &json!(id)));
        assert_eq!(kept.harness.get(&at(id)).await.status, 200, "one that has it is enough");
        let says = "A store node that may hold this context does not answer";
        assert_refused(&kept.harness.get(&at(&unknown)).await, 503, "node_unavailable", says);
        let extended = kept.harness.ask(&at(id), json!({"ttl_seconds": TTL_S})).await;
        assert_eq!(extended.status, 200, "{extended:?}");
        let extended = kept.harness.ask(&at(&unknown), json!({"ttl_seconds": 9})).await;
        assert_refused(&extended, 503, "node_unavailable", says);
        assert_refused(&kept.harness.delete(&at(&unknown)).await, 503, "node_unavailable", says);
    }
    let ended = kept.harness.delete(&at(id)).await;
    assert_refused(&ended, 503, "node_unavailable", "try again");
    assert_eq!(ended.headers["retry-after"], "1");
    kept.d.change(|script| {
        (script.list, script.drop, script.keep) = (Reply::Do, Reply::Do, Reply::Do);
    });
    assert_eq!(kept.list().await["complete"], true);
    assert_refused(&kept.harness.get(&at(&unknown)).await, 404, "context_not_found", "ctx_");
}

#[tokio::test]
async fn a_node_that_was_never_reached_may_have_contexts() {
    let world = World::default();
    let pair = Pair::start(&world, "b", Role::Both, keeps()).await;
    let mut config = config(&[&pair]);
    config.nodes.push("127.0.0.1:9".to_owned());
    let harness = Harness::start_unready(config).await;
    let knows = |listed: &Response| listed.json()["data"] == json!([]);
    harness.until(CONTEXTS, knows).await;
    assert_eq!(harness.get(CONTEXTS).await.json()["complete"], false);
    let id = id_of(&prompt(1, 16), "");
    assert_refused(&harness.get(&at(&id)).await, 503, "node_unavailable", "may hold");
}

#[tokio::test]
async fn where_nothing_can_be_kept_nothing_is_computed_and_the_option_is_named() {
    let kept = Kept::start_with(Script::default(), |_| {}).await;
    let refused = kept.create(&prompt(1, 64)).await;
    assert_refused(&refused, 503, "no_durable_tier", "`dir` in `[ssd]`");
    assert!(kept.world.log().is_empty(), "{:?}", kept.world.log());
    assert_eq!(kept.refused("no_durable_tier").await, 1.0);
    assert_eq!(kept.list().await["complete"], true);
    let id = id_of(&prompt(1, 16), "");
    assert_eq!(kept.harness.get(&at(&id)).await.status, 404);
}

#[tokio::test]
async fn a_quota_of_what_is_kept_is_429_with_the_nodes_reason() {
    let kept = Kept::start().await;
    for pair in [&kept.p, &kept.d] {
        pair.change(|script| script.keep = Reply::Fail(Code::ResourceExhausted));
    }
    let refused = kept.create(&prompt(1, 64)).await;
    assert_refused(&refused, 429, "context_quota_exceeded", "as the script says");
    assert_eq!(refused.json()["error"]["reason"], "quota_contexts");
    assert_eq!(refused.json()["error"]["type"], "rate_limit_error");
    assert_eq!((kept.served(), kept.asked()), (1, vec!["p", "d"]));
    assert_eq!(kept.refused("quota").await, 1.0);
    // One with room is enough.
    kept.d.change(|script| script.keep = Reply::Do);
    assert_eq!(kept.create(&prompt(1, 64)).await.status, 200);
}

#[tokio::test]
async fn a_node_that_does_not_keep_it_is_followed_by_the_next_one() {
    let kept = Kept::start_with(keeps(), |config| config.contexts.persist_timeout_ms = 100).await;
    for (nth, reply) in [Reply::Hang, Reply::Fail(Code::FailedPrecondition)].into_iter().enumerate()
    {
        kept.p.change(|script| script.keep = reply);
        kept.created(&prompt(nth as u32, 64)).await;
        assert_eq!(kept.d.shelf().contexts.len(), nth + 1);
    }
    kept.d.change(|script| script.keep = Reply::Hang);
    let before = kept.served();
    let refused = kept.create(&prompt(7, 64)).await;
    assert_refused(&refused, 503, "node_unavailable", "does not answer");
    assert_eq!(refused.headers["retry-after"], "1");
    assert_eq!(kept.served() - before, 3, "as many attempts as a request has");
    assert_eq!(kept.refused("node_unavailable").await, 1.0);
    kept.d.change(|script| script.keep = Reply::Fail(Code::FailedPrecondition));
    let refused = kept.create(&prompt(8, 64)).await;
    assert_refused(&refused, 503, "context_not_persisted", "refused it: as the script says");
}

#[tokio::test]
async fn a_chain_that_is_kept_just_now_is_asked_for_again() {
    let kept = Kept::start().await;
    for pair in [&kept.p, &kept.d] {
        pair.change(|script| script.keeps_next = vec![Reply::Fail(Code::Unavailable); 2]);
    }
    kept.created(&prompt(1, 64)).await;
    assert_eq!((kept.served(), kept.asked()), (1, vec!["p", "d", "p", "d", "p"]));
}

#[tokio::test]
async fn of_a_part_nothing_is_kept() {
    let kept = Kept::start().await;
    for pair in [&kept.p, &kept.d] {
        pair.change(|script| script.keep_blocks_max = 2);
    }
    let mine = prompt(1, 4 * BLOCK_TOKENS);
    let refused = kept.create(&mine).await;
    assert_refused(
        &refused,
        503,
        "context_not_persisted",
        "evicted before they could be persisted",
    );
    assert!(kept.p.shelf().contexts.is_empty() && kept.d.shelf().contexts.is_empty());
    assert_eq!(kept.refused("not_persisted").await, 1.0);

    let part = kept.created(&mine[..2 * BLOCK_TOKENS as usize]).await;
    let part = part["id"].as_str().expect("an id");
    assert_eq!(kept.create(&mine).await.status, 503);
    assert_eq!(kept.harness.get(&at(part)).await.status, 200, "it was promised");
    // All of it is there: both are contexts of their own.
    kept.p.change(|script| script.keep_blocks_max = usize::MAX);
    kept.created(&mine).await;
    assert_eq!(kept.list().await["data"].as_array().expect("a list").len(), 2);
}

#[tokio::test]
async fn a_prompt_that_cannot_be_served_is_refused_as_any_request_is() {
    let kept = Kept::start().await;
    kept.p.change(|script| script.prefill = Leg::Fail(Code::InvalidArgument));
    assert_refused(&kept.create(&prompt(1, 64)).await, 400, "invalid_value", "as the script says");
    assert_eq!(kept.asked(), [""; 0]);
    kept.p.change(|script| script.prefill = Leg::Fail(Code::Unavailable));
    assert_refused(&kept.create(&prompt(1, 64)).await, 503, "no_instance", "does not answer");
}

#[tokio::test]
async fn so_many_are_created_at_once_and_no_more() {
    let kept = Kept::start_with(keeps(), |config| config.contexts.concurrent_creates_max = 1).await;
    kept.d.change(|script| script.decode = Leg::Hold);
    let first = prompt(1, 64);
    let (first, second) = tokio::join!(kept.create(&first), async {
        kept.world
            .until("it is served", |log| {
                log.iter()
                    .any(|one| matches!(one, Happened::Generate { leg: v1::Phase::Decode, .. }))
            })
            .await;
        let second = kept.create(&prompt(2, 64)).await;
        kept.d.change(|script| script.decode = Leg::Do);
        second
    });
    assert_eq!(first.status, 200, "{first:?}");
    assert_refused(&second, 429, "rate_limit_exceeded", "Too many contexts");
    assert_eq!(second.json()["error"]["reason"], "too_many_contexts");
    assert_eq!(second.headers["retry-after"], "1");
    assert_eq!(kept.refused("too_many").await, 1.0);
    assert_eq!(kept.create(&prompt(2, 64)).await.status, 200);
}

#[tokio::test]
async fn a_deadline_ends_a_create() {
    let kept = Kept::start_with(keeps(), |config| {
        config.request_timeout_ms = 1_000;
        config.ttft_objective_ms = 1_000;
    })
    .await;
    for pair in [&kept.p, &kept.d] {
        pair.change(|script| script.keep = Reply::Hang);
    }
    let refused = kept.create(&prompt(1, 64)).await;
    assert_refused(&refused, 504, "request_timeout", "while persisting the context");
}

/// A conductor with two tenants, `a` and `b`, in front of the same nodes.
async fn keyed(kept: &Kept) -> (Harness, tempfile::TempDir) {
    let folder = tempfile::tempdir().expect("a folder");
    let file: PathBuf = folder.path().join("keys.toml");
    let mut text = String::new();
    for name in ["a", "b"] {
        std::fs::write(folder.path().join(name), format!("the-key-of-{name}")).expect("writes");
        text += &format!("[[tenants]]\nname = \"{name}\"\nkeys = [{{ file = \"{name}\" }}]\n");
    }
    text += "requests_per_minute = 5\n";
    std::fs::write(&file, text).expect("writes");
    let config = Config { api_keys_file: Some(file), ..config(&[&kept.p, &kept.d]) };
    (Harness::start(config).await, folder)
}

async fn send(
    harness: &Harness,
    method: &str,
    path: &str,
    tenant: &str,
    body: Option<Value>,
) -> Response {
    let url = format!("{}{path}", harness.url);
    let mut request = harness.client.request(method.parse().expect("a method"), url);
    if !tenant.is_empty() {
        request = request.header("authorization", format!("Bearer the-key-of-{tenant}"));
    }
    if let Some(body) = body {
        request = request.body(body.to_string());
    }
    Response::read_from(method, request.send().await.expect("an answer")).await
}

#[tokio::test]
async fn nobody_sees_or_touches_the_contexts_of_others() {
    let kept = Kept::start().await;
    let (keyed, _folder) = keyed(&kept).await;
    let mine = prompt(1, 2 * BLOCK_TOKENS);
    let body = json!({"model": "tiny", "prompt": mine, "ttl_seconds": TTL_S});
    let of_a = send(&keyed, "POST", CONTEXTS, "a", Some(body.clone())).await;
    assert_eq!(of_a.status, 200, "{of_a:?}");
    let id = of_a.json()["id"].as_str().expect("an id").to_owned();
    assert_eq!(id, id_of(&mine, "a"));
    let of_nobody = kept.created(&mine).await;
    assert_ne!(of_nobody["id"], id);
    // Without a key nobody is anybody.
    for (method, path) in [("GET", CONTEXTS), ("GET", &at(&id)), ("DELETE", &at(&id))] {
        let refused = send(&keyed, method, path, "", None).await;
        assert_refused(&refused, 401, "invalid_api_key", "API key");
    }
    for path in [CONTEXTS, &at(&id)] {
        let refused = send(&keyed, "POST", path, "", Some(body.clone())).await;
        assert_refused(&refused, 401, "invalid_api_key", "API key");
    }
    // Another tenant, and whoever comes through a conductor that asks for no keys.
    let not_theirs = |response: Response| {
        assert_refused(&response, 404, "context_not_found", &id);
    };
    not_theirs(send(&keyed, "GET", &at(&id), "b", None).await);
    not_theirs(send(&keyed, "DELETE", &at(&id), "b", None).await);
    not_theirs(send(&keyed, "POST", &at(&id), "b", Some(json!({"ttl_seconds": 1}))).await);
    not_theirs(kept.harness.get(&at(&id)).await);
    not_theirs(kept.harness.delete(&at(&id)).await);
    not_theirs(kept.harness.ask(&at(&id), json!({"ttl_seconds": 1})).await);
    let of_b = send(&keyed, "GET", CONTEXTS, "b", None).await;
    assert_eq!(of_b.json()["data"], json!([]));
    let listed = kept.list().await;
    assert_eq!(listed["data"].as_array().expect("a list").len(), 1);
    assert_eq!(listed["data"][0]["id"], of_nobody["id"]);
    let listed = send(&keyed, "GET", CONTEXTS, "a", None).await.json();
    assert_eq!(
        (&listed["data"][0]["id"], &listed["data"][0]["model"]),
        (&json!(id), &json!("tiny"))
    );
    assert_eq!(send(&keyed, "DELETE", &at(&id), "a", None).await.status, 200);
    assert_eq!(kept.list().await["data"][0]["id"], of_nobody["id"]);
    // Requests of this kind count like others, also those that found nothing: of its five a minute `b` has used four.
    assert_eq!(send(&keyed, "GET", CONTEXTS, "b", None).await.status, 200);
    let over = send(&keyed, "GET", CONTEXTS, "b", None).await;
    assert_refused(&over, 429, "rate_limit_exceeded", "5 requests per minute");
}

#[test]
fn the_examples_of_the_document_are_as_its_schemas_say() {
    let mut examples = 0;
    for (path, methods) in document()["paths"].as_object().expect("paths") {
        for operation in methods.as_object().expect("methods").values() {
            let bodies = operation["responses"].as_object().into_iter().flatten();
            let bodies = bodies.map(|(_, response)| response).chain([&operation["requestBody"]]);
            for body in bodies {
                let body = &body["content"]["application/json"];
                let Some(example) = body.get("example") else { continue };
                matches(&body["schema"], example, path).expect("an example");
                examples += 1;
            }
        }
    }
    assert!(examples >= 7, "{examples}");
}

#[tokio::test]
async fn what_is_computed_for_a_context_is_to_be_kept_whatever_is_said_of_requests() {
    let kept = Kept::start().await;
    let body = json!({"model": "tiny", "prompt": prompt(1, 200), "ttl_seconds": TTL_S});
    let request = kept.harness.client.post(format!("{}{CONTEXTS}", kept.harness.url));
    let request = request.header("x-kvasir-cache-class", "ephemeral").body(body.to_string());
    let created = Response::read(request.send().await.expect("an answer")).await;
    assert_eq!(created.status, 200, "{created:?}");
    let is_normal =
        |request: &v1::TxAllocateRequest| request.cache_class() == v1::CacheClass::Normal;
    let normal =
        |one: &Happened| matches!(one, Happened::Allocate { request, .. } if is_normal(request));
    assert_eq!(kept.world.count(normal), 2);
}
