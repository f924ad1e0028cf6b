//! Greedy answers of a cluster, compared with what they must be.

use serde_json::Value;

use super::cluster::Cluster;
use super::vectors::{BLOCK_TOKENS, Case, ids};

/// Asks for a case and compares every token of the answer.
pub async fn check_case(cluster: &Cluster, case: &Case) -> Value {
    let max_tokens = u32::try_from(case.greedy.len()).expect("a few");
    let (status, answer) = cluster.complete(&case.prompt, max_tokens).await;
    let length = case.prompt.len();
    assert_eq!(status, 200, "prompt of {length} tokens: {answer}");
    assert_eq!(ids(&answer["choices"][0]["token_ids"]), case.greedy, "prompt of {length} tokens");
    assert_eq!(answer["usage"]["prompt_tokens"], length);
    assert_eq!(answer["usage"]["completion_tokens"], case.greedy.len());
    answer
}

/// What the answer says of its prompt.
pub fn cached_tokens(answer: &Value) -> usize {
    let cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64();
    usize::try_from(cached.expect("a count")).expect("a few")
}

/// What can be reused of a prompt of so many tokens: whole blocks, and at least one token is left
/// to compute.
pub fn reusable_tokens(prompt_tokens: usize) -> usize {
    (prompt_tokens - 1) / BLOCK_TOKENS * BLOCK_TOKENS
}
