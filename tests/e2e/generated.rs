//! Checkpoints that are in no file: other sizes, other seeds, made here. What a cluster says of them
//! is compared with an independent implementation in float64.

use std::path::Path;

use crate::checkpoint::{IndexerSizes, Sizes, random_checkpoint};
use crate::support::answers::{cached_tokens, check_case, reusable_tokens};
use crate::support::cluster::Cluster;
use crate::support::expected::Expected;
use crate::support::lose_cache;
use crate::support::vectors::{Case, Variant};

const ANSWER_TOKENS: u32 = 16;
/// Around a block's end, several blocks, and more than a chunk of every size.
const PROMPT_TOKENS: [u32; 6] = [1, 63, 64, 65, 200, 530];

fn prompt(seed: u32, length: u32) -> Vec<u32> {
    (0..length).map(|i| (i * 7919 + seed * 104_729 + i * i) % 1000).collect()
}

/// Prompts with their answers, each up to its first near tie.
fn cases(model: &Path) -> Vec<Case> {
    let expected = Expected::of(model);
    let case = |(seed, length): (u32, u32)| {
        let prompt = prompt(seed, length);
        let greedy = expected.greedy(&prompt, ANSWER_TOKENS);
        Case { prompt, greedy }
    };
    let cases: Vec<Case> = (1..).zip(PROMPT_TOKENS).map(case).collect();
    let compared: usize = cases.iter().map(|case| case.greedy.len()).sum();
    assert!(compared >= 40, "only {compared} tokens are far from a tie");
    cases.into_iter().filter(|case| !case.greedy.is_empty()).collect()
}

/// Every case twice: computed, and with its prefix cached.
async fn check(cluster: &Cluster, cases: &[Case]) {
    for case in cases {
        assert_eq!(cached_tokens(&check_case(cluster, case).await), 0);
        let again = check_case(cluster, case).await;
        assert_eq!(cached_tokens(&again), reusable_tokens(case.prompt.len()));
    }
}

async fn check_sizes(seed: u64, sizes: &Sizes) {
    let model = tempfile::tempdir().expect("a folder");
    random_checkpoint(model.path(), seed, sizes, &Variant::Plain.model());
    let cases = cases(model.path());
    for flags in [
        "--transport shm",
        "--transport tcp --prefill-chunk-tokens 16",
        "--both 1 --prefill-chunk-tokens 16",
    ] {
        let model = model.path().display();
        let cluster = Cluster::start(&format!("{flags} --always-fetch --model-dir {model}")).await;
        check(&cluster, &cases).await;
        if flags.contains("tcp") {
            // What the decode side has kept is fetched.
            lose_cache(&cluster, "prefill-1-node").await;
            for case in &cases {
                let answer = check_case(&cluster, case).await;
                assert_eq!(cached_tokens(&answer), reusable_tokens(case.prompt.len()));
            }
        }
    }
}

#[tokio::test]
async fn a_checkpoint_of_other_sizes_and_another_seed_gives_its_tokens() {
    check_sizes(20_261_120, &Sizes::default()).await;
}

#[tokio::test]
async fn a_checkpoint_without_query_rank_groups_and_yarn_in_several_files_gives_its_tokens() {
    let sizes = Sizes {
        hidden: 80,
        layers: 3,
        dense_layers: 1,
        heads: 5,
        nope: 16,
        rope: 8,
        value: 24,
        rank: 40,
        query_rank: None,
        groups: None,
        yarn: false,
        files: 3,
        ..Sizes::default()
    };
    check_sizes(7, &sizes).await;
}

#[tokio::test]
async fn a_checkpoint_that_selects_rows_gives_its_tokens() {
    let indexer = Some(IndexerSizes { heads: 8, width: 32, topk: 40 });
    let sizes = Sizes { indexer, layers: 2, dense_layers: 1, heads: 4, ..Sizes::default() };
    check_sizes(22, &sizes).await;
}
