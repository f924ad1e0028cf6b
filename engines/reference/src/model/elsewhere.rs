//! Attention over rows that are not in the cache here: the model sends queries and gets partials, and
//! knows nothing of where they go.

#![forbid(unsafe_code)]

use kvasir_attention::Partial;

/// The queries of one layer, in absorbed form, of the sequences that attend rows elsewhere.
#[derive(Debug, Clone, Copy)]
pub struct LayerQueries<'a> {
    pub layer: usize,
    /// Values of a query row and of a cached row.
    pub d_qk: usize,
    /// Leading values of a cached row that are the value.
    pub d_v: usize,
    pub scale: f32,
    /// One for each sequence and hole, in the order of the batch and of positions.
    pub sequences: &'a [SequenceQueries<'a>],
}

/// Query rows of one sequence: `tokens × heads` rows of `d_qk` values. All of them attend all of one
/// hole, and are turned to where its rows were computed: who attends them knows nothing of positions.
#[derive(Debug, Clone, Copy)]
pub struct SequenceQueries<'a> {
    /// Its place in the batch.
    pub sequence: usize,
    /// The hole's place among those of the sequence.
    pub hole: usize,
    pub values: &'a [f32],
}

/// Who attends what is elsewhere.
pub trait Elsewhere {
    /// Sends a layer's queries. Returns at once: the model attends its own rows meanwhile.
    fn send(&mut self, queries: &LayerQueries<'_>);

    /// What came back for what was sent last: for each sequence and hole, in the same order, the partials that
    /// together cover all rows of the hole, in a fixed order. `None` when not all of them came: the sequence's
    /// outputs mean nothing from then on, and its logits must not be used.
    fn receive(&mut self) -> Vec<Option<Vec<Partial>>>;
}
