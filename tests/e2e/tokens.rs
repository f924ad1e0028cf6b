//! Every token of the reference vectors comes out of a real cluster, however its cache travelled.

use crate::support::answers::{cached_tokens, check_case, reusable_tokens};
use crate::support::cluster::Cluster;
use crate::support::vectors::{BLOCK_BYTES, Case, Variant};
use futures::future::join_all;

/// Longer prompts take longer than a request may, in a virtual machine without acceleration.
const EMULATED_TOKENS_MAX: usize = 400;

fn flags_for(variant: Variant, flags: &str) -> String {
    format!("{flags} --model-dir {}", variant.model().display())
}

/// All cases one after another; then what the counters say of where the work was done.
async fn check_apart(variant: Variant, flags: &str, domain: &str) {
    check_cases_apart(&variant.cases(), &flags_for(variant, flags), domain).await;
}

async fn check_cases_apart(cases: &[Case], flags: &str, domain: &str) {
    let cluster = Cluster::start(flags).await;
    for case in cases {
        check_case(&cluster, case).await;
    }
    let computed = "kvasir_engine_prompt_tokens_computed_total";
    assert!(cluster.metrics("decode-1").await.has(computed, &[]));
    assert_eq!(cluster.sum("decode-1", computed, &[]).await, 0.0, "decode computed a prompt");
    let prompt_tokens: usize = cases.iter().map(|case| case.prompt.len()).sum();
    assert_eq!(cluster.sum("prefill-1", computed, &[]).await, prompt_tokens as f64);

    let pages: usize = cases.iter().map(Case::prompt_pages).sum();
    let moved = "kvasir_transfer_bytes_total";
    // Counted where they are sent from: in shared memory the sender does the copying.
    let sent = [("direction", "sent"), ("transport", domain)];
    let bytes = cluster.sum("prefill-1-node", moved, &sent).await;
    assert!(bytes >= (pages * BLOCK_BYTES) as f64, "{bytes} bytes sent for {pages} pages");
    let elsewhere = cluster.sum("prefill-1-node", moved, &sent[..1]).await - bytes;
    assert_eq!(elsewhere, 0.0, "bytes sent outside of {domain}");
}

#[tokio::test]
async fn prefill_and_decode_apart_over_shared_memory_give_the_reference_tokens() {
    check_apart(Variant::Plain, "--transport shm", "shm").await;
    check_apart(Variant::YarnQlora, "--transport shm", "shm").await;
}

#[tokio::test]
async fn prefill_and_decode_apart_over_tcp_give_the_reference_tokens() {
    check_apart(Variant::Plain, "--transport tcp", "tcp").await;
    check_apart(Variant::YarnQlora, "--transport tcp", "tcp").await;
}

#[tokio::test]
async fn prefill_and_decode_apart_over_verbs_give_the_reference_tokens() {
    if !crate::support::has_rdma() {
        return;
    }
    // Where devices are emulated, processors are too.
    let mut cases = Variant::Plain.cases();
    cases.retain(|case| case.prompt.len() <= EMULATED_TOKENS_MAX);
    assert!(cases.iter().any(|case| case.prompt_pages() > 1), "a prompt of several pages");
    let patient = "--transport verbs --request-timeout-ms 600000 --ttft-objective-ms 600000";
    check_cases_apart(&cases, &flags_for(Variant::Plain, patient), "verbs").await;
}

#[tokio::test]
async fn chunks_of_16_tokens_give_the_reference_tokens() {
    check_apart(Variant::Plain, "--prefill-chunk-tokens 16", "shm").await;
    check_apart(Variant::YarnQlora, "--prefill-chunk-tokens 16 --transport tcp", "tcp").await;
}

#[tokio::test]
async fn chunks_of_64_tokens_give_the_reference_tokens() {
    check_apart(Variant::Plain, "--prefill-chunk-tokens 64 --transport tcp", "tcp").await;
    check_apart(Variant::YarnQlora, "--prefill-chunk-tokens 64", "shm").await;
}

#[tokio::test]
async fn a_cache_in_bf16_gives_the_reference_tokens() {
    // Half the bytes move, so only the tokens are checked.
    for variant in [Variant::Plain, Variant::YarnQlora] {
        let cluster = Cluster::start(&flags_for(variant, "--kv-dtype bf16")).await;
        for case in &variant.cases() {
            check_case(&cluster, case).await;
        }
    }
}

#[tokio::test]
async fn one_engine_for_both_gives_the_reference_tokens_and_moves_nothing() {
    for variant in [Variant::Plain, Variant::YarnQlora] {
        let cluster = Cluster::start(&flags_for(variant, "--both 1")).await;
        for case in &variant.cases() {
            check_case(&cluster, case).await;
        }
        assert_eq!(cluster.sum("-node", "kvasir_transfer_bytes_total", &[]).await, 0.0);
    }
}

#[tokio::test]
async fn a_prefix_hit_on_the_same_node_gives_the_same_tokens_and_is_reported() {
    for flags in ["--both 1", "--transport shm", "--transport tcp"] {
        let cluster = Cluster::start(flags).await;
        let case = Variant::Plain.longest();
        let first = check_case(&cluster, &case).await;
        assert_eq!(cached_tokens(&first), 0, "{flags}");
        let second = check_case(&cluster, &case).await;
        assert_eq!(cached_tokens(&second), reusable_tokens(case.prompt.len()), "{flags}");
    }
}

#[tokio::test]
async fn thirty_two_requests_at_once_give_the_reference_tokens() {
    for flags in ["--transport shm", "--transport tcp --prefill-chunk-tokens 64", "--both 1"] {
        let cluster = Cluster::start(flags).await;
        let cases: Vec<Case> = Variant::Plain.cases().into_iter().cycle().take(32).collect();
        join_all(cases.iter().map(|case| check_case(&cluster, case))).await;
    }
}

#[tokio::test]
async fn without_the_push_no_request_is_answered() {
    let cluster = Cluster::start("--no-push --request-timeout-ms 2000").await;
    let case = &Variant::Plain.cases()[0];
    let (status, answer) = cluster.complete(&case.prompt, 4).await;
    assert_eq!(status, 504, "{answer}");
    assert_eq!(answer["error"]["code"], "request_timeout", "{answer}");
    assert!(answer["choices"].is_null(), "{answer}");
}
