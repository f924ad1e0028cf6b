//! Requests that begin alike and come at once bring their beginning once, and nobody can tell from the tokens.

use std::sync::LazyLock;

use crate::support::answers::{check_case, reusable_tokens};
use crate::support::cluster::Cluster;
use crate::support::expected::Expected;
use crate::support::hears_of;
use crate::support::vectors::{BLOCK_BYTES, BLOCK_TOKENS, Case, Variant, ids};
use futures::StreamExt;
use futures::future::join_all;
use serde_json::{Value, json};

const COMPUTED: &str = "kvasir_engine_prompt_tokens_computed_total";
const AT_ONCE: usize = 4;

/// A document of eight blocks with `AT_ONCE` different endings.
static CASES: LazyLock<Vec<Case>> = LazyLock::new(|| {
    let variant = Variant::Plain;
    let document = variant.longest().prompt[..8 * BLOCK_TOKENS].to_vec();
    let ending = |at: usize| (0..10).map(|token| 100 * (1 + at as u32) + token).collect();
    let endings: Vec<Vec<u32>> = (0..AT_ONCE).map(ending).collect();
    let answers = Expected::of(&variant.model()).greedy_of_endings(&document, &endings, 8);
    let case = |(ending, greedy): (&Vec<u32>, _)| Case {
        prompt: [&document[..], ending].concat(),
        greedy,
    };
    endings.iter().zip(answers).map(case).collect()
});

#[tokio::test]
async fn a_document_is_computed_once_for_all_that_come_at_once() {
    let cases = &*CASES;
    for flags in ["", "--both 1"] {
        let cluster = Cluster::start(flags).await;
        join_all(cases.iter().map(|case| check_case(&cluster, case))).await;
        let computed = cluster.sum("", COMPUTED, &[]).await;
        // Of two that are placed at the same moment both may lead.
        let most = 2 * cases[0].prompt.len() + AT_ONCE * (10 + BLOCK_TOKENS);
        assert!(computed <= most as f64, "{computed} tokens computed, {flags:?}");
    }
}

#[tokio::test]
async fn a_document_is_fetched_once_for_all_that_come_at_once() {
    let cluster = Cluster::start("--both 2 --steering --transport tcp").await;
    let case = Variant::Plain.longest();
    let ask = async |engine: &str, way: Option<&str>, answers: usize| {
        let body = json!({
            "model": cluster.model,
            "prompt": case.prompt,
            "n": answers,
            "max_tokens": case.greedy.len(),
            "temperature": 0,
            "ignore_eos": true,
            "return_token_ids": true,
        });
        let url = format!("{}/v1/completions", cluster.url);
        let request = cluster.client.post(url).json(&body).header("x-kvasir-instance", engine);
        let request = match way {
            Some(way) => request.header("x-kvasir-prefix", way),
            None => request,
        };
        let reply = request.send().await.expect("an answer");
        let (status, answer) = (reply.status().as_u16(), reply.json::<Value>().await);
        let answer = answer.expect("JSON");
        assert_eq!(status, 200, "{answer}");
        for choice in answer["choices"].as_array().expect("a list") {
            assert_eq!(ids(&choice["token_ids"]), case.greedy, "choice {}", choice["index"]);
        }
    };
    ask("both-1", None, 1).await;
    hears_of(&cluster, ((case.prompt.len() + case.greedy.len() - 1) / BLOCK_TOKENS) as f64).await;
    ask("both-2", Some("fetch"), AT_ONCE).await;
    let sent = [("direction", "sent"), ("transport", "tcp")];
    let bytes = cluster.sum("both-1-node", "kvasir_transfer_bytes_total", &sent).await;
    let document = (reusable_tokens(case.prompt.len()) / BLOCK_TOKENS * BLOCK_BYTES) as f64;
    assert!(bytes >= document && bytes < 2.5 * document, "{bytes} bytes, {document} of one copy");
}

/// Whoever waited for a request that its client gave up brings the document itself.
#[tokio::test]
async fn a_client_that_goes_costs_those_no_token_that_waited_for_its_document() {
    let cases = &*CASES;
    let cluster = Cluster::start("").await;
    let body = json!({
        "model": cluster.model, "prompt": cases[0].prompt, "max_tokens": 500, "stream": true, "ignore_eos": true,
    });
    let url = format!("{}/v1/completions", cluster.url);
    let leader = cluster.client.post(url).json(&body).send();
    let others = join_all(cases[1..].iter().map(|case| check_case(&cluster, case)));
    let goes = async {
        // It goes while its document is computed, or after its first token.
        let begun = tokio::time::timeout(std::time::Duration::from_millis(60), leader).await;
        if let Ok(Ok(reply)) = begun {
            let _ = reply.bytes_stream().next().await;
        }
    };
    futures::future::join(goes, others).await;
}
