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

use super::rope::rotate;
use super::{Cache, Model, SpliceError};

/// Which rows of a chunk, and where they go.
#[derive(Debug, Clone)]
pub struct Splice<'a> {
    /// The chunk's slots, from its first token on. They are read and never written.
    pub chunk: &'a [SlotIndex],
    /// Which of its tokens.
    pub tokens: Range<u32>,
    /// The position of the first of them in the sequence; it need not begin a block.
    pub start: u32,
    /// The sequence's slots, from position 0 on. Those that get rows are the sequence's own.
    pub pages: &'a [SlotIndex],
}

impl Splice<'_> {
    fn end(&self) -> u64 {
        u64::from(self.start) + self.tokens.len() as u64
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
        for (old, new) in splice.tokens.clone().zip(splice.start..) {
            self.rope.delta_turns(old, new, &mut turns);
            let (from, from_token) = place(splice.chunk, old);
            let (to, to_token) = place(splice.pages, new);
            for layer in 0..self.config.layers {
                cache.read_row(from, layer, from_token, &mut row);
                rotate(&mut row[self.config.rank..], &turns);
                cache.write_row(to, layer, to_token, &row);
            }
        }
        Ok(())
    }

    fn check_splice(&self, cache: &Cache, splice: &Splice<'_>) -> Result<(), SpliceError> {
        if !cache.fits(&self.config) {
            return Err(SpliceError::Layout);
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
        let needed = cache.layout().pages_for(splice.end() as u32);
        let pages = splice.pages.get(splice.start as usize / block_tokens..needed as usize);
        let pages = pages.ok_or(SpliceError::Pages { needed, got: splice.pages.len() })?;
        let slots = cache.slots();
        if let Some(slot) = chunk.iter().chain(pages).find(|slot| slot.0 >= slots) {
            return Err(SpliceError::Slot { slot: slot.0, slots });
        }
        let committed: BTreeSet<u32> = splice.chunk.iter().map(|slot| slot.0).collect();
        match pages.iter().find(|slot| committed.contains(&slot.0)) {
            Some(slot) => Err(SpliceError::Committed { slot: slot.0 }),
            None => Ok(()),
        }
    }
}
