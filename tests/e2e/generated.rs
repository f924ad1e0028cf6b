//! A checkpoint that is in no file: other sizes, another seed, made here. What a cluster says of it
//! is compared with an independent implementation in float64.

#[path = "../../engines/reference/tests/support/checkpoint.rs"]
#[allow(dead_code, reason = "made for more tests than this one")]
mod checkpoint;
#[path = "../../engines/reference/tests/support/naive.rs"]
#[allow(dead_code, reason = "made for more tests than this one")]
mod naive;
mod support;

use std::path::Path;

use checkpoint::{Sizes, random_checkpoint};
use naive::{Naive, Sequence};
use support::cluster::Cluster;
use support::vectors::{Variant, ids};

const ANSWER_TOKENS: u32 = 16;
/// A nearer tie may fall either way, and then everything behind it differs.
const MARGIN: f64 = 0.05;

/// The greedy answer up to the first near tie.
fn expected(naive: &Naive, prompt: &[u32]) -> Vec<u32> {
    let mut sequence = Sequence::default();
    let mut logits = Vec::new();
    for token in prompt {
        logits = naive.feed(&mut sequence, *token);
    }
    let mut answer = Vec::new();
    for _ in 0..ANSWER_TOKENS {
        let (token, margin) = naive::best(&logits);
        if margin < MARGIN {
            break;
        }
        answer.push(token);
        logits = naive.feed(&mut sequence, token);
    }
    answer
}

fn prompt(seed: u32, length: u32) -> Vec<u32> {
    (0..length).map(|i| (i * 7919 + seed * 104_729 + i * i) % 1000).collect()
}

async fn check(folder: &Path, flags: &str) {
    let naive = Naive::load(folder);
    let cluster = Cluster::start(&format!("{flags} --model {}", folder.display())).await;
    let mut compared = 0;
    for (seed, length) in [(1, 1), (2, 63), (3, 64), (4, 65), (5, 200)] {
        let prompt = prompt(seed, length);
        let expected = expected(&naive, &prompt);
        let (status, answer) = cluster.complete(&prompt, ANSWER_TOKENS).await;
        assert_eq!(status, 200, "{flags}, {length} tokens: {answer}");
        let tokens = ids(&answer["choices"][0]["token_ids"]);
        assert_eq!(tokens.len(), ANSWER_TOKENS as usize);
        assert_eq!(tokens[..expected.len()], expected, "{flags}, {length} tokens");
        compared += expected.len();
    }
    assert!(compared >= 20, "only {compared} tokens were far from a tie");
}

#[tokio::test]
async fn a_checkpoint_of_other_sizes_and_another_seed_gives_its_tokens() {
    let folder = tempfile::tempdir().expect("a folder");
    random_checkpoint(folder.path(), 20_261_120, &Sizes::default(), &Variant::Plain.model());
    check(folder.path(), "--domain shm").await;
    check(folder.path(), "--domain tcp --chunk-tokens 48").await;
    check(folder.path(), "--both 1 --chunk-tokens 64").await;
}
