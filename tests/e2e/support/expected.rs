//! What a model must answer, by an implementation in float64 that shares nothing with the engine.

#[path = "../../../engines/reference/tests/support/naive.rs"]
mod naive;

use std::path::Path;

use naive::{Naive, Sequence};

/// A nearer tie may fall either way, and then everything behind it differs.
const MARGIN: f64 = 0.05;
/// The same of scores by which rows are chosen.
const CHOICE_MARGIN: f64 = 1e-6;

pub(crate) struct Expected {
    naive: Naive,
}

impl Expected {
    pub(crate) fn of(model: &Path) -> Expected {
        Expected { naive: Naive::load(model) }
    }

    /// The greedy answer up to the first near tie.
    pub(crate) fn greedy(&self, prompt: &[u32], max_tokens: u32) -> Vec<u32> {
        self.greedy_from(Sequence::default(), prompt, max_tokens)
    }

    /// The greedy answers to prompts with a common prefix, which is computed once. No ending is empty.
    pub(crate) fn greedy_of_endings(
        &self,
        prefix: &[u32],
        endings: &[Vec<u32>],
        max_tokens: u32,
    ) -> Vec<Vec<u32>> {
        let mut common = Sequence::default();
        for token in prefix {
            self.naive.feed(&mut common, *token);
        }
        let answer = |ending: &Vec<u32>| self.greedy_from(common.clone(), ending, max_tokens);
        endings.iter().map(answer).collect()
    }

    fn greedy_from(&self, mut sequence: Sequence, tokens: &[u32], max_tokens: u32) -> Vec<u32> {
        let mut logits = Vec::new();
        for token in tokens {
            logits = self.naive.feed(&mut sequence, *token);
        }
        let mut answer = Vec::new();
        for _ in 0..max_tokens {
            let (token, margin) = naive::best(&logits);
            let is_near = |choice: &f64| *choice < CHOICE_MARGIN;
            if margin < MARGIN || sequence.choices.iter().any(is_near) {
                break;
            }
            answer.push(token);
            logits = self.naive.feed(&mut sequence, token);
        }
        answer
    }
}
