//! Which cached rows a query attends under selection: an indexer's scores over its own cached keys, and
//! the rows that score best.
//!
//! The score of a token's query over a key is `Σ_h w_h · max(q_h · k, 0)`: a few narrow heads that share
//! one key, as DeepSeek-V3.2 has it. It is computed in f32 and depends on the two rows alone, never on
//! what is scored beside them; and of equal scores the lower row is the better one. So the best rows of
//! a set are the best among the best of its parts, to the bit, however the set was cut.

use std::cmp::Ordering;

use crate::gather::gather;
use crate::pages::PageList;
use crate::partial::Visible;
use crate::simd::{Simd, Task};
use crate::{Attention, Kernel};

/// Queries of an indexer.
#[derive(Debug, Clone, Copy)]
pub struct IndexQuery<'a> {
    /// `tokens × heads × width`.
    pub values: &'a [f32],
    /// `tokens × heads`: what the product of each head counts.
    pub weights: &'a [f32],
    pub heads: usize,
    pub width: usize,
    /// Keys that each token sees.
    pub visible: Visible<'a>,
}

/// A row that scores well.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Candidate {
    pub row: u32,
    pub score: f32,
}

impl Candidate {
    /// The better one first.
    fn order(&self, other: &Self) -> Ordering {
        other.score.total_cmp(&self.score).then(self.row.cmp(&other.row))
    }
}

/// The best `topk` of the candidates, or all when there are no more, in the order of their rows.
pub fn best(mut candidates: Vec<Candidate>, topk: usize) -> Vec<Candidate> {
    keep_best(&mut candidates, topk);
    candidates
}

fn keep_best(candidates: &mut Vec<Candidate>, topk: usize) {
    if candidates.len() > topk {
        candidates.select_nth_unstable_by(topk, Candidate::order);
        candidates.truncate(topk);
    }
    candidates.sort_unstable_by_key(|candidate| candidate.row);
}

impl IndexQuery<'_> {
    fn tokens(&self) -> usize {
        self.weights.len() / self.heads
    }

    fn check(&self) {
        assert!(self.heads > 0 && self.width > 0, "an indexer has heads and they have width");
        assert_eq!(
            self.weights.len(),
            self.tokens() * self.heads,
            "a token's weights are incomplete"
        );
        assert_eq!(self.values.len(), self.weights.len() * self.width, "each head has its weight");
        if let Visible::First(counts) = self.visible {
            assert_eq!(counts.len(), self.tokens(), "each token has its count");
        }
    }
}

/// Tokens that pass over the keys together: enough that copying a key is a small part of it.
const TILE_TOKENS: usize = 16;
/// Keys that are copied at once.
const GROUP_ROWS: usize = 64;
/// Values of keys times heads below which another thread costs more than it brings.
const THREAD_WORK_MIN: usize = 1 << 20;

impl Attention {
    /// For each token the `topk` keys that score best, in the order of rows.
    ///
    /// # Panics
    /// When shapes disagree, which is the caller's mistake.
    pub fn candidates(
        &self,
        query: &IndexQuery<'_>,
        keys: &PageList<'_>,
        topk: usize,
    ) -> Vec<Vec<Candidate>> {
        query.check();
        assert_eq!(keys.width(), query.width, "query and keys differ in width");
        let tokens = query.tokens();
        let work = query.values.len() * keys.rows();
        let threads = self.threads().min(work / THREAD_WORK_MIN).min(tokens).max(1);
        let kernel = self.kernel().exact();
        if threads == 1 {
            return of_tokens(kernel, query, keys, topk, 0..tokens);
        }
        let share = tokens.div_ceil(threads);
        std::thread::scope(|scope| {
            let parts: Vec<_> = (0..tokens)
                .step_by(share)
                .map(|from| {
                    let tokens = from..(from + share).min(tokens);
                    scope.spawn(move || of_tokens(kernel, query, keys, topk, tokens))
                })
                .collect();
            parts.into_iter().flat_map(|part| part.join().expect("no panic")).collect()
        })
    }
}

fn of_tokens(
    kernel: Kernel,
    query: &IndexQuery<'_>,
    keys: &PageList<'_>,
    topk: usize,
    tokens: std::ops::Range<usize>,
) -> Vec<Vec<Candidate>> {
    let (mut scores, mut scratch, mut candidates) = (Vec::new(), Vec::new(), Vec::new());
    let mut all = Vec::with_capacity(tokens.len());
    let seen = |token: usize| query.visible.of(token, keys.rows());
    for first in tokens.clone().step_by(TILE_TOKENS) {
        let tile = first..(first + TILE_TOKENS).min(tokens.end);
        let reach = tile.clone().map(seen).max().unwrap_or(0);
        scores.resize(tile.len() * reach, 0.0);
        scratch.resize(GROUP_ROWS * keys.width(), 0.0);
        let (tokens, scratch) = (tile.clone(), &mut scratch);
        kernel.run(Scores { query, keys, tokens, reach, out: &mut scores, scratch });
        for (n, token) in tile.enumerate() {
            let scores = &scores[n * reach..][..seen(token)];
            let candidate =
                |(row, score): (usize, &f32)| Candidate { row: row as u32, score: *score };
            candidates.clear();
            candidates.extend(scores.iter().enumerate().map(candidate));
            keep_best(&mut candidates, topk);
            // With room for these and not for all that were looked at.
            all.push(candidates.clone());
        }
    }
    all
}

/// Scores of some tokens over the first `reach` keys.
struct Scores<'a, 'q> {
    query: &'a IndexQuery<'q>,
    keys: &'a PageList<'q>,
    tokens: std::ops::Range<usize>,
    reach: usize,
    out: &'a mut [f32],
    scratch: &'a mut [f32],
}

impl Task for Scores<'_, '_> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Scores { query, keys, tokens, reach, out, scratch } = self;
        let IndexQuery { values, weights, heads, width, .. } = *query;
        for from in (0..reach).step_by(GROUP_ROWS) {
            let to = (from + GROUP_ROWS).min(reach);
            gather(s, keys, from, to, scratch);
            for (token, out) in tokens.clone().zip(out.chunks_exact_mut(reach)) {
                let weights = &weights[token * heads..][..heads];
                let values = &values[token * heads * width..][..heads * width];
                for (key, out) in scratch.chunks_exact(width).zip(&mut out[from..to]) {
                    // From +0 on, so that no score is -0 and all zeros are equal.
                    let mut score = 0f32;
                    for (weight, head) in weights.iter().zip(values.chunks_exact(width)) {
                        score += weight * dot(s, head, key).max(0.0);
                    }
                    *out = score;
                }
            }
        }
    }
}

/// The product of two rows of one length, always added up in the same order.
#[inline(always)]
fn dot<S: Simd>(s: S, a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len(), "rows of one width");
    let whole = a.len() / S::LANES * S::LANES;
    let mut sum = s.splat(0.0);
    for i in (0..whole).step_by(S::LANES) {
        // SAFETY: `i + LANES` is within both rows.
        let (a, b) = unsafe { (s.load(a.as_ptr().add(i)), s.load(b.as_ptr().add(i))) };
        sum = s.mul_add(a, b, sum);
    }
    let rest: f32 = a[whole..].iter().zip(&b[whole..]).map(|(a, b)| a * b).sum();
    s.sum(sum) + rest
}
