//! A lightning indexer, as DeepSeek-V3.2 has it: a few narrow heads that share one key for each token say
//! which rows a token attends.
//!
//! Its keys are cached as rows are. What follows from them is decided in [`super::selection`].

#![forbid(unsafe_code)]

use super::IndexerConfig;
use super::math::{Matrix, layer_norm_in_place, scratch};
use super::rope::rotate_halves;

/// The keys' norm has this epsilon, whatever `rms_norm_eps` says.
const KEY_EPSILON: f32 = 1e-6;

#[derive(Debug)]
pub(super) struct Indexer {
    pub sizes: IndexerConfig,
    /// Values of a query head and of a key that are rotated: the first.
    pub rope_dims: usize,
    /// `wq_b`: from the queries' low-rank form, or from hidden where there is none.
    pub query: Matrix,
    /// `wk`: from hidden.
    pub key: Matrix,
    pub key_norm: Vec<f32>,
    pub key_bias: Vec<f32>,
    /// `weights_proj`: from hidden, one for each head.
    pub weights: Matrix,
}

/// Memory that calls reuse.
#[derive(Debug, Default)]
pub(super) struct IndexScratch {
    values: Vec<f32>,
    weights: Vec<f32>,
}

/// Queries of some tokens.
#[derive(Debug, Clone, Copy)]
pub(super) struct IndexQueryRows<'a> {
    /// `tokens × heads × width`.
    pub values: &'a [f32],
    /// `tokens × heads`.
    pub weights: &'a [f32],
}

impl Indexer {
    /// The keys to cache: the first values of `norm(key)` turned, for each of `tokens` rows of `x`.
    pub(super) fn keys(
        &self,
        x: &[f32],
        tokens: usize,
        turns: &[f32],
        keys: &mut [f32],
        threads: usize,
    ) {
        self.key.apply(x, tokens, keys, threads);
        let turns = turns.chunks_exact(self.rope_dims);
        for (key, turns) in keys.chunks_exact_mut(self.sizes.width).zip(turns) {
            layer_norm_in_place(key, &self.key_norm, &self.key_bias, KEY_EPSILON);
            rotate_halves(&mut key[..self.rope_dims], turns);
        }
    }

    /// Queries and what each head counts: `x` is hidden, `latent` what queries are made of.
    pub(super) fn queries<'a>(
        &self,
        (x, latent): (&[f32], &[f32]),
        tokens: usize,
        turns: &[f32],
        memory: &'a mut IndexScratch,
        threads: usize,
    ) -> IndexQueryRows<'a> {
        let IndexerConfig { heads, width, .. } = self.sizes;
        let values = scratch(&mut memory.values, tokens * heads * width);
        self.query.apply(latent, tokens, values, threads);
        let turns = turns.chunks_exact(self.rope_dims);
        for (token, turns) in values.chunks_exact_mut(heads * width).zip(turns) {
            for head in token.chunks_exact_mut(width) {
                rotate_halves(&mut head[..self.rope_dims], turns);
            }
        }
        let weights = scratch(&mut memory.weights, tokens * heads);
        self.weights.apply(x, tokens, weights, threads);
        let scale = ((heads * width) as f64).powf(-0.5) as f32;
        weights.iter_mut().for_each(|weight| *weight *= scale);
        IndexQueryRows { values, weights }
    }
}
