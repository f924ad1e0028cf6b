//! A chunk's rows at another place of a prompt: copied there, and only their rotated keys changed.
//!
//! The chunk was computed alone, from position 0 on, and lies in slots of its own. Its latents know
//! nothing of positions; its keys were rotated for the positions that they had, and are turned on by
//! the difference. What the chunk's tokens would have seen before them they have not: from the second
//! layer on the rows are near those that a whole prompt has, and not the same.

#![forbid(unsafe_code)]

use std::collections::BTreeSet;
use std::ops::Range;

use kvasir_proto::SlotIndex;

use super::holes::{are_good, are_outside, rows_before};
use super::rope::rotate;
use super::{Cache, Hole, Model, SpliceError};

/// Which rows of a chunk, and where they go.
#[derive(Debug, Clone)]
pub struct Splice<'a> {
    /// The chunk's slots, from its first token on. They are read and never written.
    pub chunk: &'a [SlotIndex],
    /// Which of its tokens.
    pub tokens: Range<u32>,
    /// The position of the first of them in the sequence; it need not begin a block.
    pub start: u32,
    /// As [`SequenceStep`](super::SequenceStep) has them; the rows go into none of them.
    pub holes: &'a [Hole],
    /// As there. Those that get rows are the sequence's own.
    pub pages: &'a [SlotIndex],
}

impl Splice<'_> {
    fn end(&self) -> u64 {
        u64::from(self.start) + self.tokens.len() as u64
    }

    /// Which of the sequence's rows they become.
    fn rows(&self) -> Range<u32> {
        let end = rows_before(self.holes, self.end()) as u32;
        end - self.tokens.len() as u32..end
    }
}

impl Model {
    /// Copies rows of a chunk, all layers of them.
    ///
    /// # Errors
    /// [`SpliceError`], before anything was written.
    pub fn splice(&self, cache: &mut Cache, splice: &Splice<'_>) -> Result<(), SpliceError> {
        self.check_splice(cache, splice)?;
        let block_tokens = cache.block_tokens();
        let place = |slots: &[SlotIndex], at: u32| {
            (slots[at as usize / block_tokens], at as usize % block_tokens)
        };
        let mut row = vec![0.0; self.config.row_width()];
        let mut turns = vec![0.0; self.rope.turn_len()];
        let news = (splice.start..).zip(splice.rows());
        for (old, (new, to)) in splice.tokens.clone().zip(news) {
            self.rope.delta_turns(old, new, &mut turns);
            let (from, from_token) = place(splice.chunk, old);
            let (to, to_token) = place(splice.pages, to);
            for layer in 0..self.config.layers {
                cache.read_row(from, layer, from_token, &mut row);
                rotate(&mut row[self.config.rank..], &turns);
                cache.write_row(to, layer, to_token, &row);
            }
        }
        Ok(())
    }

    /// As [`Model::splice`] of a chunk's leading whole blocks, into a sequence that has rows behind them
    /// already: a hole is filled. `pages` has the new pages behind the one in which the chunk begins; what
    /// lies there from its beginning on goes to the end of the last new one first. The chunk may lie in
    /// the new pages, and be no more after this.
    ///
    /// # Errors
    /// [`SpliceError`], before anything was written.
    pub fn fill(&self, cache: &mut Cache, splice: &Splice<'_>) -> Result<(), SpliceError> {
        let block_tokens = cache.block_tokens();
        let tokens = splice.tokens.len();
        if splice.tokens.start != 0 || !tokens.is_multiple_of(block_tokens) {
            return Err(SpliceError::NotWhole);
        }
        self.check_places(cache, splice)?;
        let (width, rank) = (self.config.row_width(), self.config.rank);
        let rows = splice.rows();
        let (begins, ends) = (rows.start as usize, rows.end as usize);
        let in_page = begins % block_tokens;
        // Of one layer: the chunk, then what was behind it in its first page.
        let behind = if in_page == 0 { 0 } else { block_tokens - in_page };
        let mut held = vec![0.0; (tokens + behind) * width];
        let mut turns = vec![0.0; tokens * self.rope.turn_len()];
        for (old, turns) in turns.chunks_exact_mut(self.rope.turn_len()).enumerate() {
            self.rope.delta_turns(old as u32, splice.start + old as u32, turns);
        }
        for layer in 0..self.config.layers {
            let (chunk, rest) = held.split_at_mut(tokens * width);
            for (at, row) in chunk.chunks_exact_mut(width).enumerate() {
                cache.read_row(splice.chunk[at / block_tokens], layer, at % block_tokens, row);
            }
            for (at, row) in (in_page..).zip(rest.chunks_exact_mut(width)) {
                cache.read_row(splice.pages[begins / block_tokens], layer, at, row);
            }
            let turns = turns.chunks_exact(self.rope.turn_len());
            for ((at, row), turns) in (begins..).zip(chunk.chunks_exact_mut(width)).zip(turns) {
                rotate(&mut row[rank..], turns);
                cache.write_row(splice.pages[at / block_tokens], layer, at % block_tokens, row);
            }
            for (at, row) in (in_page..).zip(rest.chunks_exact(width)) {
                cache.write_row(splice.pages[ends / block_tokens], layer, at, row);
            }
        }
        Ok(())
    }

    fn check_splice(&self, cache: &Cache, splice: &Splice<'_>) -> Result<(), SpliceError> {
        self.check_places(cache, splice)?;
        let rows = splice.rows();
        let first = rows.start as usize / cache.block_tokens();
        let pages = &splice.pages[first..cache.layout().pages_for(rows.end) as usize];
        let committed: BTreeSet<u32> = splice.chunk.iter().map(|slot| slot.0).collect();
        match pages.iter().find(|slot| committed.contains(&slot.0)) {
            Some(slot) => Err(SpliceError::Committed { slot: slot.0 }),
            None => Ok(()),
        }
    }

    fn check_places(&self, cache: &Cache, splice: &Splice<'_>) -> Result<(), SpliceError> {
        if !cache.fits(&self.config) {
            return Err(SpliceError::Layout);
        }
        if self.config.indexer.is_some() {
            return Err(SpliceError::Selects);
        }
        if splice.tokens.is_empty() {
            return Err(SpliceError::NoTokens);
        }
        let max = self.config.positions_max;
        let end = splice.end().max(splice.tokens.end.into());
        if end > u64::from(max) {
            return Err(SpliceError::Position { end, max });
        }
        let block_tokens = cache.block_tokens();
        let needed = cache.layout().pages_for(splice.tokens.end);
        let chunk = splice.chunk.get(..needed as usize);
        let chunk = chunk.ok_or(SpliceError::Chunk { needed, got: splice.chunk.len() })?;
        let outside = are_outside(splice.holes, splice.start.into()..splice.end());
        if !outside || !are_good(splice.holes, block_tokens) {
            return Err(SpliceError::Hole);
        }
        let rows = splice.rows();
        let needed = cache.layout().pages_for(rows.end);
        let pages = splice.pages.get(rows.start as usize / block_tokens..needed as usize);
        let pages = pages.ok_or(SpliceError::Pages { needed, got: splice.pages.len() })?;
        let slots = cache.slots();
        if let Some(slot) = chunk.iter().chain(pages).find(|slot| slot.0 >= slots) {
            return Err(SpliceError::Slot { slot: slot.0, slots });
        }
        Ok(())
    }
}
