//! Multi-head latent attention in absorbed form: queries are carried into the space of the cached
//! rows, attend them there, and what they bring back is expanded by each head.

#![forbid(unsafe_code)]

use std::ops::Range;

use kvasir_attention::matrix::{Into, View, ViewMut, multiply};
use kvasir_attention::{Job, Partial, PartialMut, Query, Visible, merge};

use super::indexer::{IndexScratch, Indexer};
use super::math::{Matrix, rms_norm_in_place, scratch};
use super::rope::rotate;
use super::selection::{self, Selection};
use super::{Cache, Elsewhere, LayerQueries, ModelConfig, SequenceQueries};

/// The norms of the low-rank forms have this epsilon, whatever `rms_norm_eps` says.
const LOW_RANK_EPSILON: f32 = 1e-6;

#[derive(Debug)]
pub(super) struct Attention {
    pub query: QueryProjection,
    /// `kv_a_proj_with_mqa`: hidden to the latent and the key to rotate.
    pub latent: Matrix,
    pub latent_norm: Vec<f32>,
    /// `kv_b_proj`: for each head the keys' expansion, then the values'.
    pub expand: Matrix,
    pub output: Matrix,
    pub indexer: Option<Indexer>,
}

#[derive(Debug)]
pub(super) enum QueryProjection {
    Full(Matrix),
    LowRank { down: Matrix, norm: Vec<f32>, up: Matrix },
}

/// The part of a sequence that a layer computes in this step, and the rows that it attends.
#[derive(Debug, Clone)]
pub(super) struct Span {
    /// Rows of the layer's input that are this sequence's.
    pub rows: Range<usize>,
    /// Rows that are cached here once this step's are written.
    pub cached: usize,
    /// Positions up to the last of this step's: what its last token sees, here or elsewhere.
    pub end: usize,
    /// Where the sequence's slots begin, within [`Queries::slot_offsets`].
    pub slots: Range<usize>,
}

/// A hole that the queries of a span attend.
#[derive(Debug, Clone)]
pub(super) struct Away {
    /// The span's place, and the sequence's in the batch.
    pub sequence: usize,
    /// Among the holes of the sequence.
    pub hole: usize,
    pub positions: Range<u32>,
    /// The span's turns as seen from where the hole's rows were computed, within
    /// [`Queries::away_turns`]. Empty where that is their place in this sequence too.
    pub turns: Range<usize>,
}

/// What a layer's queries need to know of the step.
#[derive(Debug, Clone, Copy)]
pub(super) struct Queries<'a> {
    pub config: &'a ModelConfig,
    pub scale: f32,
    pub threads: usize,
    pub layer: usize,
    pub spans: &'a [Span],
    pub slot_offsets: &'a [usize],
    /// How many cached rows each query row (token × head) attends.
    pub visible: &'a [usize],
    /// One row of cosines and sines for each token.
    pub turns: &'a [f32],
    /// In the order of the spans and of positions.
    pub away: &'a [Away],
    pub away_turns: &'a [f32],
}

/// Memory that calls reuse.
#[derive(Debug, Default)]
pub(super) struct AttentionScratch {
    low: Vec<f32>,
    q: Vec<f32>,
    absorbed: Vec<f32>,
    moved: Vec<f32>,
    latent_out: Vec<f32>,
    running: Vec<f32>,
    out: Vec<f32>,
    index: IndexScratch,
}

impl Attention {
    /// The rows to cache: `[norm(latent), rotated key]` for each of `tokens` rows of `x`.
    pub(super) fn latent_rows(
        &self,
        x: &[f32],
        tokens: usize,
        turns: &[f32],
        rows: &mut [f32],
        threads: usize,
    ) {
        self.latent.apply(x, tokens, rows, threads);
        let (rank, turn_len) =
            (self.latent_norm.len(), self.latent.outputs - self.latent_norm.len());
        for (row, turns) in
            rows.chunks_exact_mut(self.latent.outputs).zip(turns.chunks_exact(turn_len))
        {
            let (latent, key) = row.split_at_mut(rank);
            rms_norm_in_place(latent, &self.latent_norm, LOW_RANK_EPSILON);
            rotate(key, turns);
        }
    }

    /// `target += attention(x)`, over rows that the cache holds already, this step's among them.
    pub(super) fn attend_add(
        &self,
        x: &[f32],
        target: &mut [f32],
        (cache, elsewhere): (&Cache, &mut dyn Elsewhere),
        queries: &Queries<'_>,
        memory: &mut AttentionScratch,
        kernels: &mut kvasir_attention::Attention,
    ) {
        let config = queries.config;
        let (heads, rank, value) = (config.heads, config.rank, config.value);
        let tokens = x.len() / config.hidden;
        let AttentionScratch { low, q, absorbed, moved, latent_out, running, out, index } = memory;
        let q = scratch(q, tokens * heads * config.query_width());
        self.query.apply(x, tokens, q, low, queries.threads);
        let absorbed = scratch(absorbed, tokens * heads * config.row_width());
        self.absorb(q, absorbed, queries, tokens);

        let indexer = self.indexer.as_ref();
        let selection = indexer.filter(|indexer| selection::is_needed(&indexer.sizes, queries));
        let selection = selection.map(|indexer| {
            let inputs = (x, self.query.latent(x, low, tokens));
            let asked = indexer.queries(inputs, tokens, queries.turns, index, queries.threads);
            selection::choose(indexer, &asked, (cache, &mut *elsewhere), queries, kernels)
        });
        let selection = selection.as_ref();

        let latent_out = scratch(latent_out, tokens * heads * rank);
        let running = scratch(running, 2 * tokens * heads);
        turn_moved(q, absorbed, moved, queries);
        let sequences = sequences_away(absorbed, moved, selection, queries);
        let away = LayerQueries {
            layer: queries.layer,
            d_qk: config.row_width(),
            d_v: config.rank,
            scale: queries.scale,
            sequences: &sequences,
        };
        if !sequences.is_empty() {
            elsewhere.send(&away);
        }
        kernels.attend_all(jobs(absorbed, (latent_out, running), cache, selection, queries));
        if !sequences.is_empty() {
            add_elsewhere(latent_out, running, queries, elsewhere.receive(&away));
        }

        let out = scratch(out, tokens * heads * value);
        for head in 0..heads {
            let at = (head * (config.nope + value) + config.nope) * rank;
            let expand = View::new(&self.expand.values[at..], value, rank, rank);
            let latent = View::new(&latent_out[head * rank..], tokens, rank, heads * rank);
            let out = ViewMut::new(&mut out[head * value..], tokens, value, heads * value);
            multiply(out, Into::Replace, latent, expand.transposed(), queries.threads);
        }
        self.output.apply_add(out, tokens, target, queries.threads);
    }

    /// Query heads, carried into the rows' space: `[q_nope W_K, rotated q_rope]`.
    fn absorb(&self, q: &[f32], absorbed: &mut [f32], queries: &Queries<'_>, tokens: usize) {
        let config = queries.config;
        let (heads, nope, rank) = (config.heads, config.nope, config.rank);
        let (width, row) = (config.query_width(), config.row_width());
        for head in 0..heads {
            let at = head * (nope + config.value) * rank;
            let expand = View::new(&self.expand.values[at..], nope, rank, rank);
            let q = View::new(&q[head * width..], tokens, nope, heads * width);
            let absorbed = ViewMut::new(&mut absorbed[head * row..], tokens, rank, heads * row);
            multiply(absorbed, Into::Replace, q, expand, queries.threads);
        }
        rotate_queries(q, absorbed, queries.turns, config);
    }
}

/// The last values of each absorbed query head: its `q_rope`, turned as its token's turns say.
fn rotate_queries(q: &[f32], absorbed: &mut [f32], turns: &[f32], config: &ModelConfig) {
    let (heads, width, row) = (config.heads, config.query_width(), config.row_width());
    for ((q, absorbed), turns) in q
        .chunks_exact(heads * width)
        .zip(absorbed.chunks_exact_mut(heads * row))
        .zip(turns.chunks_exact(config.rope_dims))
    {
        for (q, absorbed) in q.chunks_exact(width).zip(absorbed.chunks_exact_mut(row)) {
            absorbed[config.rank..].copy_from_slice(&q[config.nope..]);
            rotate(&mut absorbed[config.rank..], turns);
        }
    }
}

impl QueryProjection {
    fn apply(&self, x: &[f32], tokens: usize, q: &mut [f32], low: &mut Vec<f32>, threads: usize) {
        match self {
            QueryProjection::Full(matrix) => matrix.apply(x, tokens, q, threads),
            QueryProjection::LowRank { down, norm, up } => {
                let low = scratch(low, tokens * down.outputs);
                down.apply(x, tokens, low, threads);
                for row in low.chunks_exact_mut(down.outputs) {
                    rms_norm_in_place(row, norm, LOW_RANK_EPSILON);
                }
                up.apply(low, tokens, q, threads);
            }
        }
    }

    /// What queries of these tokens are made of, which [`QueryProjection::apply`] has left in `low`.
    fn latent<'a>(&self, x: &'a [f32], low: &'a [f32], tokens: usize) -> &'a [f32] {
        match self {
            QueryProjection::Full(_) => x,
            QueryProjection::LowRank { down, .. } => &low[..tokens * down.outputs],
        }
    }
}

/// One job for each span, or for each token where tokens select. `running` holds the largest logits and the
/// denominators, which only a merge with what is elsewhere needs.
fn jobs<'a>(
    absorbed: &'a [f32],
    (mut latent_out, running): (&'a mut [f32], &'a mut [f32]),
    cache: &'a Cache,
    selection: Option<&'a Selection>,
    queries: &Queries<'a>,
) -> Vec<Job<'a>> {
    let config = queries.config;
    let (heads, rank, row) = (config.heads, config.rank, config.row_width());
    let (mut m, mut l) = running.split_at_mut(running.len() / 2);
    let mut jobs = Vec::new();
    let mut job = |from: usize, rows: usize, visible, pages| {
        let values = &absorbed[from * row..][..rows * row];
        let query = Query { values, d_qk: row, d_v: rank, scale: queries.scale, visible };
        let out = PartialMut {
            o: split_off(&mut latent_out, rows * rank),
            m: split_off(&mut m, rows),
            l: split_off(&mut l, rows),
        };
        jobs.push(Job { query, pages, out });
    };
    for (n, span) in queries.spans.iter().enumerate().filter(|(_, span)| !span.rows.is_empty()) {
        let (rows, from) = (span.rows.len() * heads, span.rows.start * heads);
        let slots = &queries.slot_offsets[span.slots.clone()];
        let pages = cache.rows(queries.layer, slots, span.cached);
        match selection.and_then(|selection| selection.here[n].as_ref()) {
            None => job(from, rows, Visible::First(&queries.visible[from..][..rows]), pages),
            Some(lists) => {
                for (token, list) in span.rows.clone().zip(lists) {
                    let pages = pages.select(list).expect("rows that the span has");
                    job(token * heads, heads, Visible::All, pages);
                }
            }
        }
    }
    jobs
}

/// Fills `moved` with the queries for holes that are moved, one hole after another.
fn turn_moved(q: &[f32], absorbed: &[f32], moved: &mut Vec<f32>, queries: &Queries<'_>) {
    let config = queries.config;
    let (q_width, width) = (config.heads * config.query_width(), config.heads * config.row_width());
    moved.clear();
    for away in queries.away.iter().filter(|away| !away.turns.is_empty()) {
        let rows = &queries.spans[away.sequence].rows;
        let from = moved.len();
        moved.extend_from_slice(&absorbed[rows.start * width..rows.end * width]);
        let q = &q[rows.start * q_width..rows.end * q_width];
        let turns = &queries.away_turns[away.turns.clone()];
        rotate_queries(q, &mut moved[from..], turns, config);
    }
}

/// What is to be attended elsewhere.
fn sequences_away<'a>(
    absorbed: &'a [f32],
    mut moved: &'a [f32],
    selection: Option<&'a Selection>,
    queries: &Queries<'_>,
) -> Vec<SequenceQueries<'a>> {
    let config = queries.config;
    let width = config.heads * config.row_width();
    queries
        .away
        .iter()
        .enumerate()
        .map(|(n, away)| {
            let rows = &queries.spans[away.sequence].rows;
            let values = if away.turns.is_empty() {
                &absorbed[rows.start * width..rows.end * width]
            } else {
                let (values, rest) = moved.split_at(rows.len() * width);
                moved = rest;
                values
            };
            let selected = selection.map(|selection| &selection.away[n][..]);
            SequenceQueries { sequence: away.sequence, hole: away.hole, values, selected }
        })
        .collect()
}

/// Merges what came back into what was attended here. The order of the parts is fixed, so that equal
/// parts give equal bits whichever came first.
fn add_elsewhere(
    latent_out: &mut [f32],
    running: &[f32],
    queries: &Queries<'_>,
    received: Vec<Option<Vec<Partial>>>,
) {
    let (heads, rank) = (queries.config.heads, queries.config.rank);
    let (m, l) = running.split_at(running.len() / 2);
    let mut received = received.into_iter();
    for holes in queries.away.chunk_by(|a, b| a.sequence == b.sequence) {
        let parts: Vec<Option<Vec<Partial>>> = received.by_ref().take(holes.len()).collect();
        let parts: Option<Vec<Vec<Partial>>> = parts.into_iter().collect();
        let Some(parts) = parts else { continue };
        let mut parts: Vec<Partial> = parts.into_iter().flatten().collect();
        let span = &queries.spans[holes[0].sequence].rows;
        let rows = span.start * heads..span.end * heads;
        let out = &mut latent_out[rows.start * rank..rows.end * rank];
        let here = Partial { o: out.to_vec(), m: m[rows.clone()].to_vec(), l: l[rows].to_vec() };
        // A part's place is where it ends: holes in their order, and rows here, which end with the
        // query's own.
        parts.push(here);
        out.copy_from_slice(&merge(&parts, rank).o);
    }
}

/// Takes the first values off a slice.
fn split_off<'a>(slice: &mut &'a mut [f32], len: usize) -> &'a mut [f32] {
    let (first, rest) = std::mem::take(slice).split_at_mut(len);
    *slice = rest;
    first
}
