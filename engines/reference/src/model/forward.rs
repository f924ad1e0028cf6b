//! One step of a batch: prefill chunks and decoded tokens together.
//!
//! Rows of a layer are written before anything of that layer is attended, so a step that is told
//! of by `on_layer` may leave the host while the layer still computes. The last layer computes
//! only what the wanted logits need: nobody attends its other outputs.

#![forbid(unsafe_code)]

use kvasir_attention::{AttentionOptions, Kernel, Partial};
use kvasir_proto::SlotIndex;

use super::attention::{AttentionScratch, Away, Queries, Span};
use super::holes::{are_good, are_outside, rows_before};
use super::math::{rms_norm, rms_norm_in_place, scratch};
use super::mlp::MlpScratch;
use super::moe::MoeScratch;
use super::rope::softmax_factor;
use super::weights::{Feed, Layer};
use super::{Cache, Elsewhere, Hole, LayerQueries, Model, StepError};

/// What one sequence does in a step: a prefill chunk or one decoded token.
#[derive(Debug, Clone, Copy)]
pub struct SequenceStep<'a> {
    pub tokens: &'a [u32],
    /// Position of the first of `tokens`; rows of all positions before it are in the cache, or in a
    /// hole.
    pub start: u32,
    /// Positions that have no rows here and are attended elsewhere, in order. None of `tokens` is in
    /// one, and those behind them attend nothing of it.
    pub holes: &'a [Hole],
    /// The slots of the sequence's rows, which lie one after another without the holes; enough for
    /// those up to `start + tokens.len()`. Behind a moved hole a row's place in its page is another
    /// than its position's in a block.
    pub pages: &'a [SlotIndex],
    /// Whether logits after the last token are wanted.
    pub logits: bool,
}

impl<'a> SequenceStep<'a> {
    fn end(&self) -> u64 {
        u64::from(self.start) + self.tokens.len() as u64
    }

    /// Positions up to the last of `tokens` whose rows are here.
    fn rows_here(&self) -> u64 {
        rows_before(self.holes, self.end())
    }

    /// Those that `tokens` attend.
    fn holes_before(&self) -> &'a [Hole] {
        let behind = self.holes.iter().position(|hole| hole.positions.end > self.start);
        &self.holes[..behind.unwrap_or(self.holes.len())]
    }
}

/// For batches that have all their rows here.
struct Nowhere;

impl Elsewhere for Nowhere {
    fn send(&mut self, queries: &LayerQueries<'_>) {
        unreachable!("{} sequences have rows elsewhere", queries.sequences.len());
    }

    fn receive(&mut self, _: &LayerQueries<'_>) -> Vec<Option<Vec<Partial>>> {
        Vec::new()
    }
}

/// Memory that steps reuse; grows to the largest step and stays.
#[derive(Debug, Default)]
pub struct Workspace {
    /// The residual stream, a row for each token.
    x: Vec<f32>,
    normed: Vec<f32>,
    rows: Vec<f32>,
    keys: Vec<f32>,
    turns: Vec<f32>,
    logits: Vec<f32>,
    spans: Vec<Span>,
    away: Vec<Away>,
    away_turns: Vec<f32>,
    slot_offsets: Vec<usize>,
    visible: Vec<usize>,
    attention: AttentionScratch,
    mlp: MlpScratch,
    moe: MoeScratch,
    kernels: Option<kvasir_attention::Attention>,
}

/// Logits of the sequences that wanted them, in batch order.
#[derive(Debug, Clone, Copy)]
pub struct Logits<'w> {
    values: &'w [f32],
    vocab: usize,
}

impl<'w> Logits<'w> {
    pub fn len(&self) -> usize {
        self.values.len() / self.vocab
    }

    pub fn is_empty(&self) -> bool {
        self.values.is_empty()
    }

    /// The n-th row; rows are numbered among the sequences that wanted logits.
    pub fn row(&self, n: usize) -> &'w [f32] {
        &self.values[n * self.vocab..][..self.vocab]
    }

    pub fn rows(&self) -> impl Iterator<Item = &'w [f32]> + use<'w> {
        self.values.chunks_exact(self.vocab)
    }
}

impl Model {
    /// Computes a step: writes the rows of its positions to the cache, and returns the logits.
    ///
    /// `on_layer(n)` is called when the rows of the first `n` layers of all positions of the step
    /// are in the cache: n = 1, 2, .. layers, in order, each once.
    ///
    /// # Errors
    /// [`StepError`], before anything was written.
    pub fn forward<'w>(
        &self,
        workspace: &'w mut Workspace,
        cache: &mut Cache,
        batch: &[SequenceStep<'_>],
        on_layer: &mut dyn FnMut(usize),
    ) -> Result<Logits<'w>, StepError> {
        if let Some(sequence) = batch.iter().position(|step| !step.holes_before().is_empty()) {
            return Err(StepError::Elsewhere { sequence });
        }
        self.forward_with(workspace, cache, batch, &mut Nowhere, on_layer)
    }

    /// As [`Model::forward`], for a batch with sequences that attend rows elsewhere.
    ///
    /// # Errors
    /// As there.
    pub fn forward_with<'w>(
        &self,
        workspace: &'w mut Workspace,
        cache: &mut Cache,
        batch: &[SequenceStep<'_>],
        elsewhere: &mut dyn Elsewhere,
        on_layer: &mut dyn FnMut(usize),
    ) -> Result<Logits<'w>, StepError> {
        self.check(cache, batch)?;
        workspace.begin(self, cache, batch);
        let last = self.layers.len() - 1;
        for (n, layer) in self.layers.iter().enumerate() {
            self.write_rows(workspace, cache, batch, (n, layer));
            on_layer(n + 1);
            if n == last {
                workspace.keep_wanted(self, batch);
            }
            self.finish_layer(workspace, cache, elsewhere, (n, layer));
        }
        let tokens = workspace.tokens();
        let hidden = scratch(&mut workspace.x, tokens * self.config.hidden);
        for row in hidden.chunks_exact_mut(self.config.hidden) {
            rms_norm_in_place(row, &self.norm, self.config.norm_epsilon);
        }
        let logits = scratch(&mut workspace.logits, tokens * self.config.vocab);
        self.head.as_ref().unwrap_or(&self.embedding).apply(hidden, tokens, logits, self.threads);
        Ok(Logits { values: logits, vocab: self.config.vocab })
    }

    fn check(&self, cache: &Cache, batch: &[SequenceStep<'_>]) -> Result<(), StepError> {
        if !cache.fits(&self.config) {
            return Err(StepError::Layout);
        }
        for (sequence, step) in batch.iter().enumerate() {
            if step.tokens.is_empty() {
                return Err(StepError::NoTokens { sequence });
            }
            let (end, max) = (step.end(), self.config.positions_max);
            if end > u64::from(max) {
                return Err(StepError::Position { sequence, end, max });
            }
            let vocab = self.config.vocab;
            if let Some(&token) = step.tokens.iter().find(|&&token| token as usize >= vocab) {
                return Err(StepError::Token { sequence, token, vocab });
            }
            let outside = are_outside(step.holes, step.start.into()..end);
            // What was chosen of a chunk's rows for one prompt says nothing of another.
            let moves = step.holes.iter().any(|hole| hole.moved > 0);
            let selects = self.config.indexer.is_some();
            if !outside || !are_good(step.holes, cache.block_tokens()) || (selects && moves) {
                return Err(StepError::Elsewhere { sequence });
            }
            let rows = step.rows_here() as u32;
            let (needed, got) = (cache.layout().pages_for(rows), step.pages.len());
            if needed as usize > got {
                return Err(StepError::Pages { sequence, needed, got });
            }
            let slots = cache.slots();
            if let Some(slot) = step.pages[..needed as usize].iter().find(|slot| slot.0 >= slots) {
                return Err(StepError::Slot { sequence, slot: slot.0, slots });
            }
        }
        Ok(())
    }

    /// Computes and caches the layer's rows of this step; leaves the normed input.
    fn write_rows(
        &self,
        workspace: &mut Workspace,
        cache: &mut Cache,
        batch: &[SequenceStep<'_>],
        (n, layer): (usize, &Layer),
    ) {
        let config = &self.config;
        let tokens = workspace.tokens();
        let x = scratch(&mut workspace.x, tokens * config.hidden);
        let normed = scratch(&mut workspace.normed, tokens * config.hidden);
        rms_norm(x, &layer.attention_norm, config.norm_epsilon, normed);
        let rows = scratch(&mut workspace.rows, tokens * config.row_width());
        let turns = &workspace.turns;
        layer.attention.latent_rows(normed, tokens, turns, rows, self.threads);
        let mut rows = rows.chunks_exact(config.row_width());
        let block_tokens = cache.block_tokens();
        for step in batch {
            let end = step.rows_here() as usize;
            for (place, row) in (end - step.tokens.len()..end).zip(&mut rows) {
                cache.write_row(step.pages[place / block_tokens], n, place % block_tokens, row);
            }
        }
        let Some(indexer) = &layer.attention.indexer else { return };
        let keys = scratch(&mut workspace.keys, tokens * indexer.sizes.width);
        indexer.keys(normed, tokens, turns, keys, self.threads);
        let mut keys = keys.chunks_exact(indexer.sizes.width);
        for step in batch {
            let end = step.rows_here() as usize;
            for (place, key) in (end - step.tokens.len()..end).zip(&mut keys) {
                cache.write_key(step.pages[place / block_tokens], n, place % block_tokens, key);
            }
        }
    }

    /// The layer's attention and MLP, added to the residual stream.
    fn finish_layer(
        &self,
        workspace: &mut Workspace,
        cache: &Cache,
        elsewhere: &mut dyn Elsewhere,
        (n, layer): (usize, &Layer),
    ) {
        let config = &self.config;
        let tokens = workspace.tokens();
        if tokens == 0 {
            return;
        }
        let queries = Queries {
            config,
            scale: self.softmax_scale(),
            threads: self.threads,
            layer: n,
            spans: &workspace.spans,
            slot_offsets: &workspace.slot_offsets,
            visible: &workspace.visible,
            turns: &workspace.turns,
            away: &workspace.away,
            away_turns: &workspace.away_turns,
        };
        let kernels = workspace.kernels.get_or_insert_with(|| {
            let (kernel, threads) = (Kernel::best(self.precision), self.threads);
            let options = AttentionOptions { kernel, threads, ..AttentionOptions::default() };
            kvasir_attention::Attention::new(options)
        });
        let x = scratch(&mut workspace.x, tokens * config.hidden);
        let normed = scratch(&mut workspace.normed, tokens * config.hidden);
        let memory = &mut workspace.attention;
        layer.attention.attend_add(normed, x, (cache, elsewhere), &queries, memory, kernels);

        rms_norm(x, &layer.feed_norm, config.norm_epsilon, normed);
        match &layer.feed {
            Feed::Dense(mlp) => {
                mlp.apply_add(normed, tokens, x, &mut workspace.mlp, self.threads);
            }
            Feed::Experts(moe) => {
                moe.apply_add(normed, tokens, x, &mut workspace.moe, self.threads);
            }
        }
    }

    fn softmax_scale(&self) -> f32 {
        let plain = 1.0 / (self.config.query_width() as f64).sqrt();
        (plain * softmax_factor(&self.config.rope)) as f32
    }
}

impl Workspace {
    /// Rows that the current layer computes.
    fn tokens(&self) -> usize {
        self.spans.last().map_or(0, |span| span.rows.end)
    }

    /// Embeds the batch's tokens and lays out who is where.
    fn begin(&mut self, model: &Model, cache: &Cache, batch: &[SequenceStep<'_>]) {
        let hidden = model.config.hidden;
        self.spans.clear();
        self.slot_offsets.clear();
        for step in batch {
            let from = self.tokens();
            let slots_from = self.slot_offsets.len();
            let rows = step.rows_here() as u32;
            let pages = cache.layout().pages_for(rows) as usize;
            let offsets = step.pages[..pages].iter().map(|slot| cache.slot_offset(*slot));
            self.slot_offsets.extend(offsets);
            self.spans.push(Span {
                rows: from..from + step.tokens.len(),
                cached: rows as usize,
                end: step.end() as usize,
                slots: slots_from..self.slot_offsets.len(),
            });
        }
        let tokens = batch.iter().flat_map(|step| {
            step.tokens.iter().zip(step.start..).map(|(token, position)| (*token, position))
        });
        let count = self.tokens();
        let x = scratch(&mut self.x, count * hidden);
        let turn_len = model.rope.turn_len();
        self.turns.resize(count * turn_len, 0.0);
        for (((token, position), x), turns) in
            tokens.zip(x.chunks_exact_mut(hidden)).zip(self.turns.chunks_exact_mut(turn_len))
        {
            x.copy_from_slice(&model.embedding.values[token as usize * hidden..][..hidden]);
            model.rope.turns(position, turns);
        }
        self.fill_visible(model.config.heads);
        self.fill_away(model, batch);
    }

    /// What the rows that are computed attend elsewhere.
    fn fill_away(&mut self, model: &Model, batch: &[SequenceStep<'_>]) {
        let turn_len = model.rope.turn_len();
        self.away.clear();
        self.away_turns.clear();
        for (sequence, (span, step)) in self.spans.iter().zip(batch).enumerate() {
            // Where not all rows are computed, it is the last ones.
            let end = step.end() as u32;
            let positions = end - span.rows.len() as u32..end;
            if positions.is_empty() {
                continue;
            }
            for (hole, held) in step.holes_before().iter().enumerate() {
                let Hole { positions: of_hole, moved } = held.clone();
                let from = self.away_turns.len();
                if moved > 0 {
                    self.away_turns.resize(from + positions.len() * turn_len, 0.0);
                    let turns = self.away_turns[from..].chunks_exact_mut(turn_len);
                    for (position, turns) in positions.clone().zip(turns) {
                        model.rope.turns(position - moved, turns);
                    }
                }
                let turns = from..self.away_turns.len();
                self.away.push(Away { sequence, hole, positions: of_hole, turns });
            }
        }
    }

    fn fill_visible(&mut self, heads: usize) {
        self.visible.clear();
        for span in &self.spans {
            for row in 0..span.rows.len() {
                let visible = span.cached - (span.rows.len() - 1 - row);
                self.visible.extend(std::iter::repeat_n(visible, heads));
            }
        }
    }

    /// Drops all rows but the last of each sequence that wants logits.
    fn keep_wanted(&mut self, model: &Model, batch: &[SequenceStep<'_>]) {
        let mut kept = 0;
        for (span, step) in self.spans.iter_mut().zip(batch) {
            let last = span.rows.end - 1;
            let from = kept;
            if step.logits {
                let turn_len = model.rope.turn_len();
                let hidden = model.config.hidden;
                for (rows, width) in
                    [(&mut self.x, hidden), (&mut self.normed, hidden), (&mut self.turns, turn_len)]
                {
                    rows.copy_within(last * width..(last + 1) * width, kept * width);
                }
                kept += 1;
            }
            span.rows = from..kept;
        }
        self.fill_visible(model.config.heads);
        self.fill_away(model, batch);
    }
}
