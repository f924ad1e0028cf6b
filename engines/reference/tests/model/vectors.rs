//! The reference checkpoints generate what the transformers library generates from them, however
//! the prompt is cut, wherever its prefix comes from, and whatever else is in the batch.

use crate::arena::{self, Arena, assert_near, best, generate};
use kvasir_engine_reference::model::{KvDtype, LoadOptions, Model, SequenceStep, Workspace};
use safetensors::SafeTensors;
use serde_json::Value;

const BLOCK_TOKENS: u32 = 64;

pub(crate) struct Case {
    pub prompt: Vec<u32>,
    pub greedy: Vec<u32>,
    pub logits: Vec<f32>,
}

/// The model of a variant, and what is expected of it.
pub(crate) fn load(variant: &str, threads: usize) -> (Model, Vec<Case>) {
    let data = arena::root().join("tests/data/deepseek_v2").join(variant);
    let dir = if variant == "plain" { arena::tiny() } else { data.join("model") };
    let model = Model::load(&dir, LoadOptions { threads, ..LoadOptions::default() })
        .expect("the checkpoint");
    let expected = std::fs::read(data.join("expected.json")).expect("test data");
    let expected: Value = serde_json::from_slice(&expected).expect("test data");
    let logits = std::fs::read(data.join("expected_logits.safetensors")).expect("test data");
    let logits = SafeTensors::deserialize(&logits).expect("test data");
    let (logits, _) = logits.tensor("logits").expect("test data").data().as_chunks::<4>();
    let tokens =
        |value: &Value| -> Vec<u32> { serde_json::from_value(value.clone()).expect("token ids") };
    let cases = expected["cases"].as_array().expect("cases");
    let cases = cases.iter().zip(logits.chunks_exact(model.config().vocab));
    let cases = cases.map(|(case, logits)| Case {
        prompt: tokens(&case["prompt"]),
        greedy: tokens(&case["greedy"]),
        logits: logits.iter().map(|b| f32::from_le_bytes(*b)).collect(),
    });
    let cases: Vec<Case> = cases.collect();
    assert_eq!(cases.len(), 12);
    (model, cases)
}

fn tolerance(dtype: KvDtype) -> f32 {
    match dtype {
        KvDtype::F32 => 1e-4,
        KvDtype::Bf16 => 1e-1,
    }
}

fn check_chunks(variant: &str, dtype: KvDtype, chunks: &[usize], block_tokens: u32) {
    let (model, cases) = load(variant, 1);
    for (n, case) in cases.iter().enumerate() {
        for &chunk in chunks {
            let what = format!("{variant} case {n} in chunks of {chunk}, {dtype:?}");
            let mut arena = Arena::new(&model, dtype, block_tokens, 2200 / block_tokens);
            let pages = arena.slots_for(case.prompt.len() + case.greedy.len());
            let prompt = (&case.prompt[..], 0);
            let (logits, tokens) =
                generate(&model, &mut arena, &pages, prompt, chunk, case.greedy.len());
            assert_near(&logits, &case.logits, tolerance(dtype), &what);
            assert_eq!(tokens, case.greedy, "{what}");
        }
    }
}

#[test]
fn plain_generates_every_token_in_any_chunks() {
    check_chunks("plain", KvDtype::F32, &[usize::MAX, 16, 64, 512], BLOCK_TOKENS);
}

#[test]
fn yarn_qlora_generates_every_token_in_any_chunks() {
    check_chunks("yarn_qlora", KvDtype::F32, &[usize::MAX, 16, 64, 512], BLOCK_TOKENS);
}

#[test]
fn every_token_comes_out_of_a_bf16_cache() {
    check_chunks("plain", KvDtype::Bf16, &[512], BLOCK_TOKENS);
    check_chunks("yarn_qlora", KvDtype::Bf16, &[usize::MAX, 64], BLOCK_TOKENS);
}

#[test]
fn every_token_comes_out_of_small_blocks() {
    check_chunks("yarn_qlora", KvDtype::F32, &[100], 8);
    check_chunks("plain", KvDtype::Bf16, &[100], 16);
}

#[test]
fn a_prefix_that_is_cached_already_need_not_be_computed() {
    for dtype in [KvDtype::F32, KvDtype::Bf16] {
        let (model, cases) = load("yarn_qlora", 1);
        for (n, case) in cases.iter().enumerate().filter(|(_, case)| case.prompt.len() > 64) {
            let mut arena = Arena::new(&model, dtype, BLOCK_TOKENS, 2 * 2200 / BLOCK_TOKENS);
            let first = arena.slots_for(case.prompt.len());
            generate(&model, &mut arena, &first, (&case.prompt, 0), 512, 1);
            let blocks = (case.prompt.len() - 1) / BLOCK_TOKENS as usize;
            let mut pages = first[..blocks].to_vec();
            let needed = case.prompt.len() + case.greedy.len() - blocks * BLOCK_TOKENS as usize;
            pages.extend(arena.slots_for(needed));
            let prompt = (&case.prompt[..], blocks * BLOCK_TOKENS as usize);
            let (logits, tokens) = generate(&model, &mut arena, &pages, prompt, 512, 24);
            assert_near(&logits, &case.logits, tolerance(dtype), &format!("case {n}"));
            assert_eq!(tokens, case.greedy, "case {n}, {dtype:?}");
        }
    }
}

/// All cases in one batch: sequence `n` joins at step `n * stagger`, prefills in chunks, decodes.
fn check_batch(variant: &str, dtype: KvDtype, chunk: usize, stagger: usize, threads: usize) {
    let (model, cases) = load(variant, threads);
    let mut arena = Arena::new(&model, dtype, BLOCK_TOKENS, 80);
    let mut workspace = Workspace::default();
    let pages: Vec<_> =
        cases.iter().map(|case| arena.slots_for(case.prompt.len() + case.greedy.len())).collect();
    // Prompt and answer so far; how much of it is computed.
    let mut sequences: Vec<(Vec<u32>, usize)> =
        cases.iter().map(|case| (case.prompt.clone(), 0)).collect();
    let what = format!("{variant}, {dtype:?}, chunks of {chunk}, stagger {stagger}");
    for step in 0.. {
        let goal = |n: usize| cases[n].prompt.len() + cases[n].greedy.len();
        let active: Vec<usize> = (0..cases.len())
            .filter(|n| n * stagger <= step && sequences[*n].0.len() < goal(*n))
            .collect();
        if active.is_empty() && step > cases.len() * stagger {
            break;
        }
        let end = |n: usize| (sequences[n].1.saturating_add(chunk)).min(sequences[n].0.len());
        let batch: Vec<SequenceStep<'_>> = active
            .iter()
            .map(|&n| SequenceStep {
                tokens: &sequences[n].0[sequences[n].1..end(n)],
                start: sequences[n].1 as u32,
                holes: &[],
                pages: &pages[n],
                logits: end(n) == sequences[n].0.len(),
            })
            .collect();
        let logits = model.forward(&mut workspace, &mut arena.cache, &batch, &mut |_| ());
        let logits = logits.expect("a step");
        let wanted: Vec<usize> =
            active.iter().copied().filter(|&n| end(n) == sequences[n].0.len()).collect();
        let computed: Vec<usize> = active.iter().map(|&n| end(n)).collect();
        assert_eq!(logits.len(), wanted.len());
        for (row, &n) in logits.rows().zip(&wanted) {
            if sequences[n].0.len() == cases[n].prompt.len() {
                assert_near(row, &cases[n].logits, tolerance(dtype), &format!("{what} case {n}"));
            }
            sequences[n].0.push(best(row));
        }
        for (&n, computed) in active.iter().zip(computed) {
            sequences[n].1 = computed;
        }
    }
    for (n, case) in cases.iter().enumerate() {
        assert_eq!(sequences[n].0[case.prompt.len()..], case.greedy, "{what} case {n}");
    }
}

#[test]
fn all_cases_in_one_batch_do_not_disturb_each_other() {
    check_batch("plain", KvDtype::F32, usize::MAX, 0, 1);
    check_batch("yarn_qlora", KvDtype::Bf16, usize::MAX, 0, 1);
}

#[test]
fn prefill_and_decode_mix_in_one_batch() {
    check_batch("plain", KvDtype::Bf16, 512, 3, 1);
    check_batch("yarn_qlora", KvDtype::F32, 100, 2, 1);
}

#[test]
fn threads_change_no_token() {
    check_batch("yarn_qlora", KvDtype::F32, 512, 2, 3);
}
