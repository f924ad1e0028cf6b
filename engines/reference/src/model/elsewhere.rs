//! Attention over rows that are not in the cache here: the model sends queries and gets partials, and
//! knows nothing of where they go.

#![forbid(unsafe_code)]

use kvasir_attention::Partial;
use kvasir_attention::index::Candidate;

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
    /// Under selection: for each token the rows of the hole that its queries attend, in their order, perhaps
    /// none. Either all sequences of a layer have such lists or none has.
    pub selected: Option<&'a [Vec<u32>]>,
}

/// An indexer's queries of one layer, of the sequences that select among rows elsewhere.
#[derive(Debug, Clone, Copy)]
pub struct IndexQueries<'a> {
    pub layer: usize,
    /// Query rows of a token, and values of each and of a key.
    pub heads: usize,
    pub width: usize,
    /// Rows that are wanted for each token.
    pub topk: usize,
    /// One for each sequence and hole, in the order of the batch and of positions.
    pub sequences: &'a [SequenceIndex<'a>],
}

/// Queries of one sequence over the keys of one hole.
#[derive(Debug, Clone, Copy)]
pub struct SequenceIndex<'a> {
    pub sequence: usize,
    pub hole: usize,
    /// `tokens × heads × width`.
    pub values: &'a [f32],
    /// `tokens × heads`.
    pub weights: &'a [f32],
}

/// Who attends what is elsewhere. Under selection a layer is asked for its best rows first: [`Elsewhere::score`]
/// and [`Elsewhere::best`], and then as any other. Who is never asked that needs neither. The queries are at hand
/// until their answer is, so that they can be sent again.
pub trait Elsewhere {
    /// Sends a layer's indexer queries. Returns at once.
    fn score(&mut self, queries: &IndexQueries<'_>) {
        let _ = queries;
    }

    /// What came back: for each sequence and hole and each of its tokens the rows of the hole that are, or
    /// might be, among the best of all. `None` when not all of that came, as in [`Elsewhere::receive`].
    fn best(&mut self, queries: &IndexQueries<'_>) -> Vec<Option<Vec<Vec<Candidate>>>> {
        let _ = queries;
        Vec::new()
    }

    /// Sends a layer's queries. Returns at once: the model attends its own rows meanwhile.
    fn send(&mut self, queries: &LayerQueries<'_>);

    /// What came back for what was sent last: for each sequence and hole, in the same order, the partials that
    /// together cover all rows of the hole, in a fixed order. `None` when not all of them came: the sequence's
    /// outputs mean nothing from then on, and its logits must not be used.
    fn receive(&mut self, queries: &LayerQueries<'_>) -> Vec<Option<Vec<Partial>>>;
}
