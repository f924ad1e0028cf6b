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
    #[error("sequence {sequence} needs {needed} pages for its tokens and has {got}")]
    Pages { sequence: usize, needed: u32, got: usize },
    #[error("slot {slot} of sequence {sequence} lies beyond the {slots} slots of the cache")]
    Slot { sequence: usize, slot: u32, slots: u32 },
    #[error("sequence {sequence} ends at position {end}, beyond the model's {max}")]
    Position { sequence: usize, end: u64, max: u32 },
    #[error(
        "the holes of sequence {sequence} are not in order, not of this cache or not outside its tokens, or nobody attends them"
    )]
    Elsewhere { sequence: usize },
    #[error("the cache has another layout than this model")]
    Layout,
}

/// Why rows of a chunk were not copied. Nothing was written to the cache.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SpliceError {
    #[error("no token of the chunk is named")]
    NoTokens,
    #[error("a hole is filled with whole blocks, from the chunk's first token on")]
    NotWhole,
    #[error("{needed} slots of the chunk are needed, and {got} are given")]
    Chunk { needed: u32, got: usize },
    #[error("{needed} pages of the sequence are needed, and {got} are given")]
    Pages { needed: u32, got: usize },
    #[error("slot {slot} lies beyond the {slots} slots of the cache")]
    Slot { slot: u32, slots: u32 },
    #[error("slot {slot} is the chunk's, and what is committed does not change")]
    Committed { slot: u32 },
    #[error("the positions are in a hole of the sequence, or its holes are not in order")]
    Hole,
    #[error(
        "the model selects rows, and what was chosen of a chunk for one prompt says nothing of another"
    )]
    Selects,
    #[error("the chunk would end at position {end}, beyond the model's {max}")]
    Position { end: u64, max: u32 },
    #[error("the cache has another layout than this model")]
    Layout,
}
