//! Logits to a token. Pure: one answer depends on its logits, its parameters and the tokens before,
//! never on who else is in the batch, on the clock or on what was drawn for other tokens.
//!
//! - here: parameters, penalties, choice
//! - [`logprobs`]: log probabilities of the raw logits

#![forbid(unsafe_code)]

pub(crate) mod logprobs;

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// How tokens are chosen; checked when the request came in.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Sampling {
    /// 0 is greedy.
    pub temperature: f32,
    /// (0, 1]; 1 is off.
    pub top_p: f32,
    /// 0 is off.
    pub top_k: u32,
    pub seed: u64,
    pub frequency_penalty: f32,
    pub presence_penalty: f32,
}

/// How often each token stands in the answer so far.
#[derive(Debug, Clone, Default)]
pub(crate) struct AnswerCounts {
    counts: BTreeMap<u32, u32>,
}

impl AnswerCounts {
    pub(crate) fn add(&mut self, token: u32) {
        *self.counts.entry(token).or_default() += 1;
    }
}

/// One choice: what it depends on besides the logits.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Choice<'a> {
    pub sampling: &'a Sampling,
    pub counts: &'a AnswerCounts,
    /// The token's place in the answer.
    pub index: u32,
}

/// Memory that choices reuse.
#[derive(Debug, Default)]
pub(crate) struct Sampler {
    candidates: Vec<Candidate>,
}

#[derive(Debug, Clone, Copy)]
struct Candidate {
    id: u32,
    /// Its logit, then its weight.
    value: f64,
}

impl Candidate {
    /// The likelier one first, of equal ones the lowest id.
    fn order(a: &Candidate, b: &Candidate) -> std::cmp::Ordering {
        b.value.total_cmp(&a.value).then(a.id.cmp(&b.id))
    }
}

impl Sampler {
    /// Chooses a token. `logits` has at least one value.
    pub(crate) fn choose(&mut self, logits: &[f32], choice: Choice<'_>) -> u32 {
        self.fill(logits, choice);
        let sampling = choice.sampling;
        if sampling.temperature == 0.0 {
            return self.best().id;
        }
        self.keep_top_k(sampling.top_k as usize);
        self.weigh(f64::from(sampling.temperature));
        self.keep_top_p(f64::from(sampling.top_p));
        self.draw(uniform(sampling.seed, choice.index))
    }

    /// Penalised logits of all tokens. A logit that is no number can never be chosen while another is.
    fn fill(&mut self, logits: &[f32], choice: Choice<'_>) {
        let number = |logit: f32| if logit.is_nan() { f64::NEG_INFINITY } else { logit.into() };
        self.candidates.clear();
        let all = (0u32..).zip(logits).map(|(id, &logit)| Candidate { id, value: number(logit) });
        self.candidates.extend(all);
        let Sampling { frequency_penalty, presence_penalty, .. } = *choice.sampling;
        if frequency_penalty == 0.0 && presence_penalty == 0.0 {
            return;
        }
        for (&id, &count) in &choice.counts.counts {
            if let Some(candidate) = self.candidates.get_mut(id as usize) {
                candidate.value -= f64::from(presence_penalty);
                candidate.value -= f64::from(frequency_penalty) * f64::from(count);
            }
        }
    }

    fn best(&self) -> Candidate {
        let best = self.candidates.iter().copied().min_by(Candidate::order);
        best.expect("a vocabulary is not empty")
    }

    fn keep_top_k(&mut self, top_k: usize) {
        if top_k != 0 && top_k < self.candidates.len() {
            self.candidates.select_nth_unstable_by(top_k - 1, Candidate::order);
            self.candidates.truncate(top_k);
            // The draw goes through the candidates in their order, so the order must not depend on
            // how the selection moved them.
            self.candidates.sort_unstable_by(Candidate::order);
        }
    }

    /// Weights relative to the best candidate's 1, so that nothing overflows.
    fn weigh(&mut self, temperature: f64) {
        let best = self.best().value;
        for candidate in &mut self.candidates {
            let below = candidate.value - best;
            // Infinite minus infinite is no number: it stands for the best.
            let below = if below.is_nan() { 0.0 } else { below };
            candidate.value = (below / temperature).exp();
        }
    }

    /// The smallest set of likeliest candidates that together have this much of all weight.
    fn keep_top_p(&mut self, top_p: f64) {
        if top_p >= 1.0 {
            return;
        }
        self.candidates.sort_unstable_by(Candidate::order);
        let enough = top_p * self.weight();
        let mut sum = 0.0;
        let reached = self.candidates.iter().position(|candidate| {
            sum += candidate.value;
            sum >= enough
        });
        if let Some(last) = reached {
            self.candidates.truncate(last + 1);
        }
    }

    fn draw(&self, uniform: f64) -> u32 {
        let mut left = uniform * self.weight();
        for candidate in &self.candidates {
            left -= candidate.value;
            if left < 0.0 {
                return candidate.id;
            }
        }
        // Rounding left nothing over: the best one is as good as any.
        self.best().id
    }

    fn weight(&self) -> f64 {
        self.candidates.iter().map(|candidate| candidate.value).sum()
    }
}

/// The draw of token `index`, in [0, 1): it depends on (seed, index) alone, so an answer goes on
/// alike wherever it is continued.
fn uniform(seed: u64, index: u32) -> f64 {
    let mut stream = ChaCha8Rng::seed_from_u64(seed);
    stream.set_stream(index.into());
    stream.random()
}
