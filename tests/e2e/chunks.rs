//! A document in the middle of a prompt that was computed as a prompt of its own is found and used there where
//! the client asks for that; the tokens are the same whichever way it comes, and whatever is lost on the way.

use crate::support::cluster::Cluster;
use crate::support::keyed::Keyed;
use crate::support::vectors::{BLOCK_TOKENS, Case, Variant, ids};
use crate::support::{eventually, hears_of};
use serde_json::{Value, json};

/// Where the document stands, in tokens; neither end is one of a block.
const START: usize = 200;
const BLOCKS: usize = 4;
const END: usize = START + BLOCKS * BLOCK_TOKENS;
const RECALLS: &str = "kvasir_engine_routed_recomputes_total";

fn case() -> Case {
    let mut cases = Variant::Plain.cases().into_iter();
    cases.find(|case| case.prompt.len() == 600).expect("there is one")
}

struct Asked {
    status: u16,
    /// What the decision was.
    placement: String,
    answer: Value,
}

impl Asked {
    fn tokens(&self) -> Vec<u32> {
        assert_eq!(self.status, 200, "{}", self.answer);
        ids(&self.answer["choices"][0]["token_ids"])
    }
}

/// Asks one engine, with the document as a chunk or not, and one way to it.
async fn ask(cluster: &Cluster, body: Value, engine: &str, way: Option<&str>) -> Asked {
    let request = cluster.client.post(format!("{}/v1/completions", cluster.url));
    steered(request, body, engine, way).await
}

/// The same at whoever this asks.
async fn steered(
    request: reqwest::RequestBuilder,
    body: Value,
    engine: &str,
    way: Option<&str>,
) -> Asked {
    let request = request.json(&body).header("x-kvasir-explain", "1");
    let request = request.header("x-kvasir-instance", engine);
    let request = match way {
        Some(way) => request.header("x-kvasir-prefix", way),
        None => request,
    };
    let reply = request.send().await.expect("an answer");
    let placement = reply.headers().get("x-kvasir-placement");
    let placement = placement.and_then(|value| value.to_str().ok()).unwrap_or_default().to_owned();
    Asked { status: reply.status().as_u16(), placement, answer: reply.json().await.expect("JSON") }
}

fn body(cluster: &Cluster, prompt: &[u32], max_tokens: usize) -> Value {
    json!({
        "model": cluster.model,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": true,
        "return_token_ids": true,
    })
}

fn reusing(cluster: &Cluster, prompt: &[u32], max_tokens: usize) -> Value {
    let mut body = body(cluster, prompt, max_tokens);
    body["kvasir_chunks"] = json!([{"start": START, "end": END + 10}]);
    body
}

/// A cluster of which the first engine's node has the document.
async fn start(flags: &str) -> (Cluster, Case) {
    let flags = format!("--both 2 --routes --steering --chunk-reuse {flags}");
    let cluster = Cluster::start(&flags).await;
    let case = case();
    let document = body(&cluster, &case.prompt[START..END], 1);
    assert_eq!(ask(&cluster, document, "both-1", None).await.status, 200);
    hears_of(&cluster, BLOCKS as f64).await;
    (cluster, case)
}

async fn no_share_is_left(cluster: &Cluster) {
    eventually("no share is left", async || {
        cluster.sum("-node", "kvasir_store_shares", &[]).await == 0.0
    })
    .await;
}

#[tokio::test]
async fn a_document_in_the_middle_is_found_and_gives_the_same_tokens_every_way() {
    let (cluster, case) = start("--route-timeout-ms 600000").await;
    let spliced = "kvasir_engine_prompt_tokens_chunk_reused_total";
    let tokens = case.greedy.len();
    let mut answers = Vec::new();
    for (way, became) in
        [("recompute", "recompute"), ("route", "route"), ("fetch", "fetch"), ("route", "local")]
    {
        let asked = ask(&cluster, reusing(&cluster, &case.prompt, tokens), "both-2", Some(way));
        let asked = asked.await;
        let said = format!("chunk of {BLOCKS} blocks at {START}: {became}");
        assert!(asked.placement.contains(&said), "{became}: {}", asked.placement);
        let cached = asked.answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64();
        let reused = if way == "recompute" { 0 } else { BLOCKS * BLOCK_TOKENS };
        assert_eq!(cached, Some(reused as u64), "{became}");
        answers.push(asked.tokens());
        match became {
            "route" => {
                let queries = cluster.sum("-node", "kvasir_route_query_bytes_total", &[]).await;
                assert!(queries > 0.0);
                assert_eq!(cluster.sum("both-2", spliced, &[]).await, 0.0);
            }
            // Until the conductor has heard of the copies.
            "fetch" => hears_of(&cluster, 2.0 * BLOCKS as f64).await,
            _ => {}
        }
    }
    assert_eq!(cluster.sum("both-2", spliced, &[]).await, (2 * BLOCKS * BLOCK_TOKENS) as f64);
    assert_eq!(cluster.sum("both-2", RECALLS, &[]).await, 0.0);
    assert!(answers.iter().all(|answer| *answer == answers[0]), "{answers:?}");
    assert_ne!(answers[0], case.greedy, "the document did not see what is before it");

    // Who does not ask for it gets what a whole computation gives, and finds nothing of the above.
    let exact = ask(&cluster, body(&cluster, &case.prompt, tokens), "both-2", None).await;
    assert_eq!(exact.tokens(), case.greedy);
    let cached = exact.answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64();
    assert_eq!(cached, Some(0));
    // And what a whole computation has left is not taken for what is behind a chunk.
    let again = ask(&cluster, reusing(&cluster, &case.prompt, tokens), "both-2", None).await;
    assert_eq!(again.tokens(), answers[0]);
    let exact = ask(&cluster, body(&cluster, &case.prompt, tokens), "both-2", None).await;
    assert_eq!(exact.tokens(), case.greedy);
    no_share_is_left(&cluster).await;
}

#[tokio::test]
async fn a_tenants_document_is_neither_attended_nor_fetched_nor_copied_for_another() {
    let flags = "--both 2 --routes --steering --chunk-reuse --route-timeout-ms 600000";
    let cluster = Cluster::start(flags).await;
    let (keyed, case) = (Keyed::start(&cluster).await, case());
    let ask = async |tenant: &str, body: Value, engine: &str, way: Option<&str>| {
        let request = keyed.request("POST", "/v1/completions", tenant);
        steered(request, body, engine, way).await
    };
    let document = body(&cluster, &case.prompt[START..END], 1);
    assert_eq!(ask("a", document, "both-1", None).await.status, 200);
    eventually("the conductor with keys knows of the document", async || {
        let metrics = keyed.request("GET", "/metrics", "a").send().await.expect("an answer");
        let metrics = metrics.text().await.expect("text");
        metrics.lines().any(|line| line == format!("kvasir_conductor_index_entries {BLOCKS}"))
    })
    .await;
    let (spliced, queries) =
        ("kvasir_engine_prompt_tokens_chunk_reused_total", "kvasir_route_query_bytes_total");
    let short = || reusing(&cluster, &case.prompt, 8);
    let mut answers = Vec::new();
    // Neither from where it is not, nor where it is.
    for (engine, way) in [("both-2", "route"), ("both-2", "fetch"), ("both-1", "recompute")] {
        let asked = ask("b", short(), engine, Some(way)).await;
        assert!(asked.placement.contains(": recompute"), "{way}: {}", asked.placement);
        let cached = asked.answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64();
        assert_eq!(cached, Some(0), "{way} at {engine}");
        answers.push(asked.tokens());
    }
    for engine in ["both-1", "both-2"] {
        assert_eq!(cluster.sum(engine, spliced, &[]).await, 0.0, "{engine}");
    }
    assert_eq!(cluster.sum("-node", queries, &[]).await, 0.0);
    // Whose it is has it both ways, and the same tokens.
    for (engine, way, became) in [("both-2", "route", "route"), ("both-1", "route", "local")] {
        let asked = ask("a", short(), engine, Some(way)).await;
        assert!(asked.placement.contains(&format!(": {became}")), "{way}: {}", asked.placement);
        answers.push(asked.tokens());
    }
    assert!(cluster.sum("-node", queries, &[]).await > 0.0);
    assert!(cluster.sum("both-1", spliced, &[]).await > 0.0);
    assert!(answers.iter().all(|answer| *answer == answers[0]), "{answers:?}");
    no_share_is_left(&cluster).await;
}

#[tokio::test]
async fn a_holder_that_is_killed_in_mid_answer_costs_time_and_no_token() {
    let (cluster, case) = start("--route-timeout-ms 600000").await;
    let long = || reusing(&cluster, &case.prompt, 400);
    let expected = ask(&cluster, long(), "both-2", Some("recompute")).await.tokens();
    let answered = "kvasir_engine_generated_tokens_total";
    let before = cluster.sum("both-2", answered, &[]).await;
    let kill = async {
        eventually("the answer has begun", async || {
            cluster.sum("both-2", answered, &[]).await > before
        })
        .await;
        cluster.kill("both-1-node");
    };
    let (asked, ()) =
        futures::future::join(ask(&cluster, long(), "both-2", Some("route")), kill).await;
    assert!(asked.placement.contains(": route"), "{}", asked.placement);
    assert_eq!(asked.tokens(), expected);
    assert!(cluster.sum("both-2", RECALLS, &[]).await <= 1.0, "it may have been at its end");
}

#[tokio::test]
async fn partials_beyond_the_deadline_cost_time_and_no_token() {
    let (cluster, case) = start("--route-timeout-ms 0").await;
    let short = || reusing(&cluster, &case.prompt, 24);
    let expected = ask(&cluster, short(), "both-2", Some("recompute")).await.tokens();
    let asked = ask(&cluster, short(), "both-2", Some("route")).await;
    assert!(asked.placement.contains(": route"), "{}", asked.placement);
    assert_eq!(asked.tokens(), expected);
    assert_eq!(cluster.sum("both-2", RECALLS, &[]).await, 1.0);
    no_share_is_left(&cluster).await;
}

#[tokio::test]
async fn documents_in_chats_are_found_by_their_text_and_nothing_is_taken_where_it_is_off() {
    let cluster = Cluster::start("--both 1 --chunk-reuse").await;
    let document = "Lorem ipsum dolor sit amet, consectetur adipiscing elit. ".repeat(20);
    let alone = json!({"model": cluster.model, "prompt": document, "max_tokens": 1,
        "add_special_tokens": false, "ignore_eos": true});
    let (status, answer) = cluster.post("/v1/completions", &alone).await;
    assert_eq!(status, 200, "{answer}");
    let tokens = answer["usage"]["prompt_tokens"].as_u64().expect("a count");
    let blocks = tokens / BLOCK_TOKENS as u64;
    assert!(blocks > 0);
    hears_of(&cluster, blocks as f64).await;
    let chat = json!({"model": cluster.model, "max_tokens": 4, "temperature": 0,
        "messages": [{"role": "user", "content": [
            {"type": "text", "text": "What follows is a document."},
            {"type": "text", "text": document},
            {"type": "text", "text": "What does it say?"}]}],
        "kvasir_chunks": [{"text": document}]});
    let (status, answer) = cluster.post("/v1/chat/completions", &chat).await;
    assert_eq!(status, 200, "{answer}");
    let cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64();
    assert_eq!(cached, Some(blocks * BLOCK_TOKENS as u64));

    let off = Cluster::start("--both 1").await;
    let prompt = case().prompt;
    let (status, answer) = off.post("/v1/completions", &reusing(&off, &prompt, 4)).await;
    assert_eq!(status, 400, "{answer}");
    assert_eq!(answer["error"]["param"], "kvasir_chunks");
    assert!(
        answer["error"]["message"]
            .as_str()
            .expect("words")
            .contains("`chunk_reuse_enabled` is off")
    );
}
