//! Chunks of a prompt that are used at another offset than the one that they were computed at: what is asked of
//! a placement about each, and what it answers. Who decides is [`crate::place()`].
//!
//! A request with chunks is served whole, by one instance. For a chunk that the instance's own node has not,
//! the ways are those to a prefix that lies elsewhere, at their prices ([`crate::attend`]): its rows stay there
//! and queries are turned, or they come here, and their keys are; or it is computed alone. Which way it is
//! changes no token.

use kvasir_proto::ROUTED_CHUNKS_MAX;

use crate::attend::{Closed, Decision, LayerDemand, Price, Way};
use crate::decision::Chosen;
use crate::index::PrefixMatch;

/// Of chunks of one prompt, so many stay on other nodes at most.
pub const ROUTED_MAX: usize = ROUTED_CHUNKS_MAX;

/// Whole blocks of a prompt, and who has them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AskedChunk {
    pub first_position: u32,
    pub blocks: u32,
    /// Of a prompt that is the chunk alone.
    pub matched: PrefixMatch,
}

/// How a chunk comes into a prompt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ChunkUse {
    /// The instance's own node has it.
    Here,
    /// This instance's node sends a copy first.
    Fetched(Chosen),
    /// This instance's node attends it.
    Routed(Chosen),
    /// It is computed alone.
    Computed,
}

/// What becomes of a chunk.
#[derive(Debug, Clone, PartialEq)]
pub struct PlacedChunk {
    pub first_position: u32,
    pub blocks: u32,
    pub becomes: ChunkUse,
    /// What the ways cost, where another node has it and that was asked.
    pub decision: Option<Decision>,
    /// Before the first token: of a fetch, or of attending it there.
    pub once_us: u64,
    /// Added to each step.
    pub step_us: u64,
    /// What a layer of a step asks of who attends it.
    pub(crate) layer: Option<LayerDemand>,
    /// What comes with a fetch.
    pub(crate) fetched_bytes: u64,
}

impl PlacedChunk {
    /// Who has it, where that is another node.
    pub fn source(&self) -> Option<&Chosen> {
        match &self.becomes {
            ChunkUse::Fetched(source) | ChunkUse::Routed(source) => Some(source),
            ChunkUse::Here | ChunkUse::Computed => None,
        }
    }

    pub fn is_routed(&self) -> bool {
        matches!(self.becomes, ChunkUse::Routed(_))
    }

    /// Room that it takes where the request is served: rows of its own, and a copy for others too.
    pub(crate) fn slots(&self) -> u32 {
        match self.becomes {
            ChunkUse::Routed(_) => 0,
            ChunkUse::Fetched(_) => self.blocks.saturating_mul(2),
            ChunkUse::Here | ChunkUse::Computed => self.blocks,
        }
    }

    pub fn is_fetched(&self) -> bool {
        matches!(self.becomes, ChunkUse::Fetched(_))
    }

    pub fn is_computed(&self) -> bool {
        self.becomes == ChunkUse::Computed
    }

    /// In a word, as metrics and explanations have it.
    pub fn way(&self) -> &'static str {
        match self.becomes {
            ChunkUse::Here => "local",
            ChunkUse::Fetched(_) => "fetch",
            ChunkUse::Routed(_) => "route",
            ChunkUse::Computed => "recompute",
        }
    }
}

/// Blocks of chunks that take no slots where the request is served.
pub(crate) fn routed_blocks(chunks: &[PlacedChunk]) -> u32 {
    chunks.iter().filter(|chunk| chunk.is_routed()).map(|chunk| chunk.blocks).sum()
}

/// The cheapest of the ways that are open, and that the caller leaves open. Where rows that are here miss the
/// objective between tokens whichever way they come, they come the cheapest way nevertheless.
pub(crate) fn cheapest(decision: &Decision, is_open: impl Fn(Way) -> bool) -> Option<Way> {
    let least = |is_open: &dyn Fn(&Price) -> bool| {
        let open = decision.prices.iter().filter(|price| is_open(price));
        open.min_by(|a, b| a.total_us.total_cmp(&b.total_us)).map(|price| price.way)
    };
    least(&|price| price.closed.is_none() && is_open(price.way)).or_else(|| {
        let comes = |way: Way| matches!(way, Way::Fetch | Way::Recompute) && is_open(way);
        least(&|price| price.closed == Some(Closed::TooSlow) && comes(price.way))
    })
}
