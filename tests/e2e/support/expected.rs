//! What a model must answer, by an implementation in float64 that shares nothing with the engine.

#[path = "../../../engines/reference/tests/support/naive.rs"]
mod naive;

use std::path::Path;

use naive::{Naive, Sequence};

/// A nearer tie may fall either way, and then everything behind it differs.
const MARGIN: f64 = 0.05;

pub struct Expected {
    naive: Naive,
}

impl Expected {
    pub fn of(model: &Path) -> Expected {
        Expected { naive: Naive::load(model) }
    }

    /// The greedy answer up to the first near tie.
    pub fn greedy(&self, prompt: &[u32], max_tokens: u32) -> Vec<u32> {
        let mut sequence = Sequence::default();
        let mut logits = Vec::new();
        for token in prompt {
            logits = self.naive.feed(&mut sequence, *token);
        }
        let mut answer = Vec::new();
        for _ in 0..max_tokens {
            let (token, margin) = naive::best(&logits);
            if margin < MARGIN {
                break;
            }
            answer.push(token);
            logits = self.naive.feed(&mut sequence, token);
        }
        answer
    }
}
