//! What another node holds is fetched and not computed again, and nobody can tell from the tokens.

use crate::support::answers::{cached_tokens, check_case, check_many, reusable_tokens};
use crate::support::cluster::Cluster;
use crate::support::expected::Expected;
use crate::support::vectors::{BLOCK_BYTES, BLOCK_TOKENS, Case, Variant, ids};
use crate::support::{hears_of, lose_cache};

const COMPUTED: &str = "kvasir_engine_prompt_tokens_computed_total";
const PLACED: &str = "kvasir_conductor_placements_total";

async fn placed(cluster: &Cluster, kind: &str) -> f64 {
    cluster.sum("conductor", PLACED, &[("kind", kind)]).await
}

/// What a node has sent by one way, and what by any other.
async fn sent(cluster: &Cluster, node: &str, domain: &str) -> (f64, f64) {
    let bytes = "kvasir_transfer_bytes_total";
    let all = cluster.sum(node, bytes, &[("direction", "sent")]).await;
    let so = cluster.sum(node, bytes, &[("direction", "sent"), ("transport", domain)]).await;
    (so, all - so)
}

/// The prefill node loses all it held; the decode node still has every prompt.
async fn check_fetch(variant: Variant, domain: &str) {
    let model = variant.model();
    let flags = format!("--always-fetch --transport {domain} --model-dir {}", model.display());
    let cluster = Cluster::start(&flags).await;
    let cases = variant.cases();
    for case in &cases {
        check_case(&cluster, case).await;
    }
    assert_eq!(placed(&cluster, "split_fetch").await, 0.0);
    assert_eq!(sent(&cluster, "decode-1-node", domain).await, (0.0, 0.0));
    lose_cache(&cluster, "prefill-1-node").await;

    let computed = cluster.sum("prefill-1", COMPUTED, &[]).await;
    for case in &cases {
        let answer = check_case(&cluster, case).await;
        let length = case.prompt.len();
        assert_eq!(cached_tokens(&answer), reusable_tokens(length), "prompt of {length} tokens");
    }
    let prompts = || cases.iter().map(|case| case.prompt.len());
    let reused: usize = prompts().map(reusable_tokens).sum();
    let computed = cluster.sum("prefill-1", COMPUTED, &[]).await - computed;
    assert_eq!(computed, (prompts().sum::<usize>() - reused) as f64);
    assert_eq!(cluster.sum("decode-1", COMPUTED, &[]).await, 0.0, "decode computed a prompt");

    let fetches = prompts().filter(|length| reusable_tokens(*length) > 0).count();
    assert_eq!(placed(&cluster, "split_fetch").await, fetches as f64);
    let arrived = [("outcome", "arrived")];
    let arrivals =
        cluster.sum("prefill-1-node", "kvasir_store_received_pushes_total", &arrived).await;
    assert_eq!(arrivals, fetches as f64);
    let (bytes, elsewhere) = sent(&cluster, "decode-1-node", domain).await;
    let wanted = reused / BLOCK_TOKENS * BLOCK_BYTES;
    assert!(bytes >= wanted as f64, "{bytes} bytes sent, {wanted} were fetched");
    assert_eq!(elsewhere, 0.0, "bytes were sent outside of {domain}");
}

#[tokio::test]
async fn over_shared_memory_a_fetched_prefix_gives_the_reference_tokens() {
    check_fetch(Variant::Plain, "shm").await;
    check_fetch(Variant::YarnQlora, "shm").await;
}

#[tokio::test]
async fn over_tcp_a_fetched_prefix_gives_the_reference_tokens() {
    check_fetch(Variant::Plain, "tcp").await;
    check_fetch(Variant::YarnQlora, "tcp").await;
}

/// One engine has the prefix. So many want it at once that the other one is the faster choice for
/// some of them, if it fetches the prefix, but never if it computed it.
async fn check_spreading(variant: Variant, domain: &str) {
    const AT_ONCE: usize = 8;
    let model = variant.model();
    let flags = format!("--both 2 --dram-bytes 192MiB --transport {domain}");
    let cluster = Cluster::start(&format!("{flags} --model-dir {}", model.display())).await;
    let case = variant.longest();
    check_many(&cluster, &case, AT_ONCE).await;
    let prompt = case.prompt;
    let fetches = placed(&cluster, "full_fetch").await;
    assert!(fetches > 0.0, "nothing was fetched over {domain}");
    let wanted = reusable_tokens(prompt.len()) / BLOCK_TOKENS * BLOCK_BYTES;
    let (bytes, elsewhere) = sent(&cluster, "-node", domain).await;
    assert!(bytes >= wanted as f64, "{bytes} bytes for {fetches} fetches");
    assert_eq!(elsewhere, 0.0, "bytes were sent outside of {domain}");
    // Nobody computed it again.
    let rest = prompt.len() - reusable_tokens(prompt.len());
    let computed = ["both-1", "both-2"].map(|engine| cluster.sum(engine, COMPUTED, &[]));
    let computed: f64 = futures::future::join_all(computed).await.iter().sum();
    assert_eq!(computed, (prompt.len() + AT_ONCE * rest) as f64);
}

#[tokio::test]
async fn a_prefix_that_many_want_spreads_by_itself() {
    check_spreading(Variant::Plain, "shm").await;
    check_spreading(Variant::YarnQlora, "tcp").await;
}

/// The decode side has the blocks that the answer has filled; the prefill side has the prompt's.
#[tokio::test]
async fn the_next_turn_of_a_conversation_fetches_what_the_answer_has_filled() {
    let variant = Variant::Plain;
    let source = variant.longest().prompt;
    let cluster = Cluster::start("").await;
    // Blocks: 3 of the prompt, 5 of it and its answer, 5 of the second turn's 6.
    let mut turn = source[..200].to_vec();
    let (status, answer) = cluster.complete(&turn, 150).await;
    assert_eq!(status, 200, "{answer}");
    assert_eq!(cached_tokens(&answer), 0);
    turn.extend(ids(&answer["choices"][0]["token_ids"]));
    assert_eq!(turn.len(), 350);
    turn.extend(&source[1000..1035]);
    hears_of(&cluster, 3.0 + 5.0).await;

    let greedy = Expected::of(&variant.model()).greedy(&turn, 16);
    assert!(greedy.len() >= 4, "only {} tokens are far from a tie", greedy.len());
    let answer = check_case(&cluster, &Case { prompt: turn, greedy }).await;
    assert_eq!(cached_tokens(&answer), 5 * BLOCK_TOKENS);
    assert_eq!(placed(&cluster, "split_fetch").await, 1.0);
    assert_eq!(cluster.sum("prefill-1", COMPUTED, &[]).await, 200.0 + 385.0 - 320.0);
    assert_eq!(cluster.sum("decode-1", COMPUTED, &[]).await, 0.0);
}
