//! Greedy answers of a cluster, compared with what they must be.

use serde_json::{Value, json};

use super::cluster::Cluster;
use super::hears_of;
use super::vectors::{BLOCK_TOKENS, Case, ids};

/// Asks for a case and compares every token of the answer.
pub(crate) async fn check_case(cluster: &Cluster, case: &Case) -> Value {
    let max_tokens = u32::try_from(case.greedy.len()).expect("a few");
    let (status, answer) = cluster.complete(&case.prompt, max_tokens).await;
    let length = case.prompt.len();
    assert_eq!(status, 200, "prompt of {length} tokens: {answer}");
    assert_eq!(ids(&answer["choices"][0]["token_ids"]), case.greedy, "prompt of {length} tokens");
    assert_eq!(answer["usage"]["prompt_tokens"], length);
    assert_eq!(answer["usage"]["completion_tokens"], case.greedy.len());
    answer
}

/// Asks for a case, and then, when the conductor has heard where its blocks are, for so many answers to it
/// at once. Compares every token, and all that can be reused must be.
pub(crate) async fn check_many(cluster: &Cluster, case: &Case, answers: usize) {
    check_case(cluster, case).await;
    let Case { prompt, greedy } = case;
    hears_of(cluster, ((prompt.len() + greedy.len() - 1) / BLOCK_TOKENS) as f64).await;
    let body = json!({
        "model": cluster.model,
        "prompt": prompt,
        "n": answers,
        "max_tokens": greedy.len(),
        "temperature": 0,
        "ignore_eos": true,
        "return_token_ids": true,
    });
    let (status, answer) = cluster.post("/v1/completions", &body).await;
    assert_eq!(status, 200, "{answer}");
    let choices = answer["choices"].as_array().expect("a list");
    assert_eq!(choices.len(), answers);
    for choice in choices {
        assert_eq!(ids(&choice["token_ids"]), *greedy, "choice {}", choice["index"]);
    }
    assert_eq!(cached_tokens(&answer), reusable_tokens(prompt.len()));
}

/// What the answer says of its prompt.
pub(crate) fn cached_tokens(answer: &Value) -> usize {
    let cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64();
    usize::try_from(cached.expect("a count")).expect("a few")
}

/// What can be reused of a prompt of so many tokens: whole blocks, and at least one token is left
/// to compute.
pub(crate) fn reusable_tokens(prompt_tokens: usize) -> usize {
    (prompt_tokens - 1) / BLOCK_TOKENS * BLOCK_TOKENS
}
