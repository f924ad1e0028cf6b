//! What is chosen, by small vocabularies.

use super::logprobs::logprobs;
use super::*;

const OFF: Sampling = Sampling {
    temperature: 0.0,
    top_p: 1.0,
    top_k: 0,
    seed: 0,
    frequency_penalty: 0.0,
    presence_penalty: 0.0,
};

fn choose(logits: &[f32], sampling: &Sampling, index: u32) -> u32 {
    let counts = AnswerCounts::default();
    Sampler::default().choose(logits, Choice { sampling, counts: &counts, index })
}

/// How often each token came in many draws.
fn tally(logits: &[f32], sampling: &Sampling) -> Vec<u32> {
    let mut tally = vec![0; logits.len()];
    for index in 0..4000 {
        tally[choose(logits, sampling, index) as usize] += 1;
    }
    tally
}

#[test]
fn greedy_takes_the_best_and_of_equal_ones_the_lowest_id() {
    assert_eq!(choose(&[0.0, 3.0, 1.0], &OFF, 0), 1);
    assert_eq!(choose(&[0.0, 3.0, 3.0], &OFF, 0), 1);
    assert_eq!(choose(&[-0.0, 0.0], &OFF, 0), 1, "as total order has it");
    assert_eq!(choose(&[f32::NAN, -5.0], &OFF, 0), 1);
    assert_eq!(choose(&[f32::NAN, f32::NAN], &OFF, 0), 0);
}

#[test]
fn the_draw_of_a_token_depends_on_seed_and_index_alone() {
    let drawn = |seed: u64| -> Vec<f64> { (0..64).map(|index| uniform(seed, index)).collect() };
    assert_eq!(drawn(7), drawn(7));
    let backwards: Vec<f64> = (0..64).rev().map(|index| uniform(7, index)).collect();
    assert!(drawn(7).into_iter().rev().eq(backwards));
    assert_ne!(drawn(7), drawn(8));
    let mut distinct = drawn(7);
    distinct.sort_by(f64::total_cmp);
    distinct.dedup();
    assert_eq!(distinct.len(), 64);
    // Pinned: an answer must not change with a new version of a dependency.
    assert_eq!([uniform(0, 0), uniform(7, 3)], [0.709_075_415_426_561_8, 0.181_541_863_951_255_38]);
}

#[test]
fn frequencies_follow_the_softmax_at_the_temperature() {
    let logits = [1.0f32.ln(), 2.0f32.ln(), 5.0f32.ln()];
    let tally_of = |temperature| tally(&logits, &Sampling { temperature, ..OFF });
    let check = |tally: &[u32], weights: [f64; 3]| {
        let sum: f64 = weights.iter().sum();
        for (count, weight) in tally.iter().zip(weights) {
            let share = f64::from(*count) / 4000.0;
            assert!((share - weight / sum).abs() < 0.03, "{tally:?} {weights:?}");
        }
    };
    check(&tally_of(1.0), [1.0, 2.0, 5.0]);
    check(&tally_of(0.5), [1.0, 4.0, 25.0]);
    assert_eq!(tally_of(1e-30), [0, 0, 4000]);
}

#[test]
fn top_k_and_top_p_keep_the_likeliest_only() {
    let logits = [1.0f32.ln(), 4.0f32.ln(), 3.0f32.ln(), 2.0f32.ln()];
    let kept = |sampling: Sampling| -> Vec<bool> {
        tally(&logits, &sampling).iter().map(|&count| count > 0).collect()
    };
    let hot = Sampling { temperature: 1.0, ..OFF };
    assert_eq!(kept(hot), [true, true, true, true]);
    assert_eq!(kept(Sampling { top_k: 1, ..hot }), [false, true, false, false]);
    assert_eq!(kept(Sampling { top_k: 2, ..hot }), [false, true, true, false]);
    assert_eq!(kept(Sampling { top_k: 9, ..hot }), [true, true, true, true]);
    assert_eq!(kept(Sampling { top_p: 0.39, ..hot }), [false, true, false, false]);
    assert_eq!(kept(Sampling { top_p: 0.41, ..hot }), [false, true, true, false]);
    // Of the two that top-k leaves, the first has 4/7 of the weight.
    let both = Sampling { top_k: 2, top_p: 0.5, ..hot };
    assert_eq!(kept(both), [false, true, false, false]);
}

#[test]
fn penalties_count_the_answer_and_presence_counts_once() {
    let mut counts = AnswerCounts::default();
    for token in [0, 0, 0, 1] {
        counts.add(token);
    }
    let check = |sampling: Sampling, logits: &[f32]| {
        let choice = Choice { sampling: &sampling, counts: &counts, index: 4 };
        Sampler::default().choose(logits, choice)
    };
    let frequency = Sampling { frequency_penalty: 1.0, ..OFF };
    assert_eq!(check(frequency, &[3.5, 1.0, 0.0]), 0);
    assert_eq!(check(frequency, &[2.9, 1.0, 0.0]), 1);
    assert_eq!(check(frequency, &[2.9, 0.9, 0.0]), 2);
    let presence = Sampling { presence_penalty: 1.0, ..OFF };
    assert_eq!(check(presence, &[1.5, 1.0, 0.0]), 0);
    assert_eq!(check(presence, &[0.5, 0.5, 0.0]), 2);
    assert_eq!(check(OFF, &[0.5, 0.0, 0.0]), 0);
}

#[test]
fn log_probabilities_are_those_of_the_raw_logits() {
    let logits = [1.0f32.ln(), 4.0f32.ln(), 3.0f32.ln(), 4.0f32.ln()];
    let (chosen, top) = logprobs(&logits, 2, 3);
    assert_eq!((chosen.id, top.len()), (2, 3));
    assert!((chosen.logprob - (3.0f32 / 12.0).ln()).abs() < 1e-6);
    let ids: Vec<u32> = top.iter().map(|logprob| logprob.id).collect();
    assert_eq!(ids, [1, 3, 2]);
    assert!((top[0].logprob - (4.0f32 / 12.0).ln()).abs() < 1e-6);
    assert!(logprobs(&logits, 0, 0).1.is_empty());
    assert_eq!(logprobs(&logits, 0, 20).1.len(), 4);
    let large: Vec<f32> = logits.iter().map(|logit| logit + 1e4).collect();
    assert!((logprobs(&large, 2, 0).0.logprob - chosen.logprob).abs() < 1e-2);
}
