//! The model equals an independent float64 implementation on checkpoints of other sizes.

use crate::arena::{self, Arena, assert_near, tiny};
use crate::checkpoint::{Sizes, random_checkpoint};
use crate::naive::{self, Naive, Sequence};
use kvasir_engine_reference::model::{KvDtype, LoadOptions, Model, SequenceStep, Workspace};

/// A near tie may fall either way; beyond this it may not.
const MARGIN: f64 = 0.2;

fn check(dir: &std::path::Path, prompts: &[Vec<u32>], steps: usize) {
    let model = Model::load(dir, LoadOptions::default()).expect("the checkpoint");
    let mut naive = Naive::load(dir);
    for (dtype, tolerance) in [(KvDtype::F32, 1e-4), (KvDtype::Bf16, 3e-2)] {
        naive.round_cache = dtype == KvDtype::Bf16;
        let mut compared = 0;
        for prompt in prompts {
            let mut arena = Arena::new(&model, dtype, 16, 40);
            let pages = arena.slots_for(prompt.len() + steps);
            let mut workspace = Workspace::default();
            let mut sequence = Sequence::default();
            let mut wanted = Vec::new();
            for token in prompt {
                wanted = naive.feed(&mut sequence, *token);
            }
            let mut tokens = prompt.clone();
            let mut start = 0;
            for step in 0..steps {
                let batch = SequenceStep {
                    tokens: &tokens[start..],
                    start: start as u32,
                    holes: &[],
                    pages: &pages,
                    logits: true,
                };
                let logits = model.forward(&mut workspace, &mut arena.cache, &[batch], &mut |_| ());
                let logits = logits.expect("a step").row(0).to_vec();
                let what = format!("{dtype:?}, step {step} after {} tokens", prompt.len());
                let want: Vec<f32> = wanted.iter().map(|logit| *logit as f32).collect();
                assert_near(&logits, &want, tolerance, &what);
                let (token, margin) = naive::best(&wanted);
                if margin > MARGIN {
                    assert_eq!(arena::best(&logits), token, "{what}");
                    compared += 1;
                }
                // Both go on with the reference's token, so that a near tie ends nothing.
                start = tokens.len();
                tokens.push(token);
                wanted = naive.feed(&mut sequence, token);
            }
        }
        assert!(compared * 2 > prompts.len() * steps, "too few tokens were clear: {compared}");
    }
}

fn prompt(seed: u32, len: u32) -> Vec<u32> {
    (0..len)
        .map(|i| (seed.wrapping_mul(2_654_435_761).wrapping_add(i * 40_503) >> 7) % 1024)
        .collect()
}

fn check_random(seed: u64, sizes: &Sizes) {
    let dir = tempfile::tempdir().expect("a folder");
    random_checkpoint(dir.path(), seed, sizes, &tiny());
    let prompts: Vec<Vec<u32>> = [1, 2, 17, 150].iter().map(|&len| prompt(len, len)).collect();
    check(dir.path(), &prompts, 8);
}

#[test]
fn the_naive_model_generates_the_reference_tokens_itself() {
    for (variant, dir) in [
        ("plain", tiny()),
        ("yarn_qlora", arena::root().join("tests/data/deepseek_v2/yarn_qlora/model")),
    ] {
        let expected = arena::root().join("tests/data/deepseek_v2").join(variant);
        let expected = std::fs::read(expected.join("expected.json")).expect("test data");
        let expected: serde_json::Value = serde_json::from_slice(&expected).expect("test data");
        let naive = Naive::load(&dir);
        for case in &expected["cases"].as_array().expect("cases")[..3] {
            let ids = |key: &str| -> Vec<u32> {
                serde_json::from_value(case[key].clone()).expect("token ids")
            };
            let mut sequence = Sequence::default();
            let mut logits = Vec::new();
            for token in ids("prompt") {
                logits = naive.feed(&mut sequence, token);
            }
            for want in &ids("greedy")[..4] {
                let (token, _) = naive::best(&logits);
                assert_eq!(token, *want, "{variant}");
                logits = naive.feed(&mut sequence, token);
            }
        }
    }
}

#[test]
fn a_model_of_other_sizes_equals_the_naive_one() {
    check_random(1, &Sizes::default());
}

#[test]
fn a_model_without_low_rank_queries_groups_or_yarn_equals_the_naive_one() {
    let sizes = Sizes {
        query_rank: None,
        groups: None,
        yarn: false,
        layers: 3,
        dense_layers: 0,
        heads: 5,
        rank: 40,
        rope: 8,
        value: 33,
        shared_experts: 2,
        tied: true,
        ..Sizes::default()
    };
    check_random(2, &sizes);
}

#[test]
fn weights_in_several_files_are_the_same_model() {
    let one = tempfile::tempdir().expect("a folder");
    let three = tempfile::tempdir().expect("a folder");
    random_checkpoint(one.path(), 3, &Sizes::default(), &tiny());
    random_checkpoint(three.path(), 3, &Sizes { files: 3, ..Sizes::default() }, &tiny());
    let logits = [one, three].map(|dir| {
        let model = Model::load(dir.path(), LoadOptions::default()).expect("a model");
        let mut arena = Arena::new(&model, KvDtype::F32, 16, 10);
        let pages = arena.slots_for(30);
        arena::generate(&model, &mut arena, &pages, (&prompt(9, 20), 0), 7, 4)
    });
    assert_eq!(logits[0], logits[1]);
}
