//! What can be wrong with a model's folder, and with a step that is asked of the model.

use std::path::PathBuf;

/// Why a folder is not a model that this engine can run. Each is one sentence for the operator.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    /// A file that must be there is not, or cannot be read.
    #[error("cannot read {}: {source}", path.display())]
    Read { path: PathBuf, source: std::io::Error },
    /// A file is there and does not hold what it must.
    #[error("{} is not usable: {why}", path.display())]
    Damaged { path: PathBuf, why: String },
    /// The model is whole, but of a kind that this engine does not run.
    #[error("{} describes a model that is not supported: {why}", path.display())]
    Unsupported { path: PathBuf, why: String },
}

/// Why a step was refused. Nothing was written to the cache.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum StepError {
    #[error("sequence {sequence} of the batch has no tokens")]
    NoTokens { sequence: usize },
    #[error("token {token} of sequence {sequence} is not in the vocabulary of {vocab}")]
    Token { sequence: usize, token: u32, vocab: usize },
    #[error("sequence {sequence} needs {needed} pages for its tokens, but has {got}")]
    Pages { sequence: usize, needed: u32, got: usize },
    #[error("slot {slot} of sequence {sequence} is beyond the {slots} slots of the cache")]
    Slot { sequence: usize, slot: u32, slots: u32 },
    #[error("sequence {sequence} ends at position {end}, beyond the model's {max}")]
    Position { sequence: usize, end: u64, max: u32 },
    #[error(
        "sequence {sequence} has a hole that no step can use: holes must be in order, start and end at a block unless moved, be outside the tokens of the step, and have a holder"
    )]
    Elsewhere { sequence: usize },
    #[error("the layout of the cache differs from the layout of this model")]
    Layout,
}

/// Why rows of a chunk were not copied. Nothing was written to the cache.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SpliceError {
    #[error("the copy contains no token of the chunk")]
    NoTokens,
    #[error("a hole must be filled with whole blocks, from the first token of the chunk on")]
    NotWhole,
    #[error("the copy needs {needed} slots of the chunk, but has {got}")]
    Chunk { needed: u32, got: usize },
    #[error("the copy needs {needed} pages of the sequence, but has {got}")]
    Pages { needed: u32, got: usize },
    #[error("slot {slot} is beyond the {slots} slots of the cache")]
    Slot { slot: u32, slots: u32 },
    #[error("slot {slot} belongs to the chunk, and committed blocks are immutable")]
    Committed { slot: u32 },
    #[error(
        "the chunk cannot be copied to these positions: they overlap a hole of the sequence, or its holes are out of order"
    )]
    Hole,
    #[error(
        "the model has an indexer, so it selects rows by the whole prompt and cannot reuse the rows of a chunk"
    )]
    Selects,
    #[error("the chunk would end at position {end}, beyond the model's {max}")]
    Position { end: u64, max: u32 },
    #[error("the layout of the cache differs from the layout of this model")]
    Layout,
}
