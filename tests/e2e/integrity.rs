//! Stored bytes that have changed are found by their checksums before anybody computes with them:
//! the copy is dropped and the request computes what is missing.

use crate::support::answers::{cached_tokens, check_case, reusable_tokens};
use crate::support::cluster::Cluster;
use crate::support::lose_cache;
use crate::support::stored::Stored;
use crate::support::vectors::{BLOCK_BYTES, BLOCK_TOKENS, Case, Variant, ids};
use kvasir_proto::v1;
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};

const COMPUTED: &str = "kvasir_engine_prompt_tokens_computed_total";
const CORRUPT: &str = "kvasir_store_corrupt_blocks_total";

/// Prompts with blocks to rot.
fn cases(variant: Variant) -> Vec<Case> {
    let cases = variant.cases().into_iter();
    cases.filter(|case| reusable_tokens(case.prompt.len()) > 0).collect()
}

async fn blocks_of(stored: &mut Stored, case: &Case) -> Vec<v1::BlockLocation> {
    let keys = stored.keys(&case.prompt).await;
    let reusable = reusable_tokens(case.prompt.len()) / BLOCK_TOKENS;
    let blocks = stored.blocks(&keys[..reusable]).await;
    assert_eq!(blocks.len(), reusable, "all of the prompt is there");
    blocks
}

/// Flips one bit of a case's blocks on the node `holder`, then asks for the case.
async fn check_flip(cluster: &Cluster, holder: &str, case: &Case, random: &mut ChaCha8Rng) {
    let mut stored = Stored::of(cluster, holder).await;
    let blocks = blocks_of(&mut stored, case).await;
    let rotten = random.next_u64() as usize % blocks.len();
    let bit = random.next_u64() as usize % (8 * BLOCK_BYTES);
    let place = &blocks[rotten];
    assert_eq!(place.length_bytes, BLOCK_BYTES as u64);
    stored.change(place, |bytes| bytes[bit / 8] ^= 1 << (bit % 8));
    let what = format!("{} tokens, block {rotten}, bit {bit}", case.prompt.len());

    let found = cluster.sum(holder, CORRUPT, &[]).await;
    let computed = cluster.sum("prefill-1", COMPUTED, &[]).await;
    check_case(cluster, case).await;
    assert_eq!(cluster.sum(holder, CORRUPT, &[]).await - found, 1.0, "{what}");
    let computed = cluster.sum("prefill-1", COMPUTED, &[]).await - computed;
    let lost = case.prompt.len() - rotten * BLOCK_TOKENS;
    assert!(computed >= lost as f64, "{what}: {computed} tokens were computed");
    // What is stored there now is another copy.
    let now = blocks_of(&mut stored, case).await;
    let same = |block: &v1::BlockLocation| {
        (block.slot, block.generation) == (place.slot, place.generation)
    };
    assert!(!now.iter().any(same), "{what}: the rotten copy is still there");
}

/// The prefill node has lost all it held, and fetches from the decode node, which has a rotten copy.
async fn check_fetched(variant: Variant, seed: u64) {
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    let flags = format!("--transport tcp --always-fetch --model-dir {}", variant.model().display());
    let cluster = Cluster::start(&flags).await;
    let cases = cases(variant);
    for case in &cases {
        check_case(&cluster, case).await;
    }
    for _ in 0..2 {
        lose_cache(&cluster, "prefill-1-node").await;
        for case in &cases {
            check_flip(&cluster, "decode-1-node", case, &mut random).await;
        }
    }
}

#[tokio::test]
async fn any_flipped_bit_of_a_stored_block_is_refused_when_it_is_fetched() {
    check_fetched(Variant::Plain, 1).await;
    check_fetched(Variant::YarnQlora, 2).await;
}

/// The decode node has lost all it held, and is sent the prefill node's copy, which is rotten.
#[tokio::test]
async fn any_flipped_bit_of_a_stored_block_is_refused_when_it_is_handed_over() {
    let mut random = ChaCha8Rng::seed_from_u64(3);
    let cluster = Cluster::start("--transport tcp").await;
    let cases = cases(Variant::Plain);
    for case in &cases {
        check_case(&cluster, case).await;
    }
    for _ in 0..2 {
        lose_cache(&cluster, "decode-1-node").await;
        for case in &cases {
            check_flip(&cluster, "prefill-1-node", case, &mut random).await;
        }
    }
}

/// The tests above could not fail if wrong bytes gave the right tokens.
#[tokio::test]
async fn without_the_check_a_changed_exponent_changes_tokens() {
    let cluster = Cluster::start("--transport tcp --always-fetch --no-verify").await;
    let case = Variant::Plain.longest();
    check_case(&cluster, &case).await;
    lose_cache(&cluster, "prefill-1-node").await;
    let mut stored = Stored::of(&cluster, "decode-1-node").await;
    for block in blocks_of(&mut stored, &case).await {
        // The second lowest bit of a float's exponent: times or through four.
        stored.change(&block, |bytes| bytes.chunks_exact_mut(4).for_each(|value| value[3] ^= 1));
    }
    let (status, answer) = cluster.complete(&case.prompt, 24).await;
    assert_eq!(status, 200, "{answer}");
    assert_eq!(cached_tokens(&answer), reusable_tokens(case.prompt.len()), "nobody noticed");
    assert_ne!(ids(&answer["choices"][0]["token_ids"]), case.greedy);
    assert_eq!(cluster.sum("-node", CORRUPT, &[]).await, 0.0);
}
