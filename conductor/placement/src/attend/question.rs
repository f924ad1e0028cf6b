//! What is asked: a span of cached rows that lies elsewhere, who has it, and who wants to attend it.

/// How many bytes things have in one model as one rank sees it. Nothing here knows of an attention
/// variant: MLA, GQA, compressed or selected rows differ in these numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RowBytes {
    /// Of one query row (one head of one token): *Move the Query*'s `q`. MLA in bf16: `2 d_qk`.
    pub query: u32,
    /// Of its partial: `p`. MLA in bf16: `2 d_v + 8`.
    pub partial: u32,
    /// Of one token's cache in one layer.
    pub kv_layer: u32,
    pub layers: u32,
}

impl RowBytes {
    /// Of one token's cache in all layers: what a fetch moves.
    pub fn kv(&self) -> u64 {
        u64::from(self.kv_layer) * u64::from(self.layers)
    }

    /// What one dispatch moves, there and back.
    pub fn dispatch(&self, rows: u64) -> u64 {
        rows * (u64::from(self.query) + u64::from(self.partial))
    }

    /// From how many query rows on routing one layer moves as many bytes as fetching it.
    pub fn break_even_rows(&self, tokens: u64) -> u64 {
        let kv_layer_bytes = tokens * u64::from(self.kv_layer);
        kv_layer_bytes / (u64::from(self.query) + u64::from(self.partial)).max(1)
    }
}

/// One node that has a part of the span.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Holder {
    /// Its part of the span.
    pub tokens: u64,
    /// Under selection: how many of the selected rows it has.
    pub selected: u64,
    /// Requesters beside this one that it answers.
    pub flows: u32,
    /// Query rows of theirs that it batches with ours.
    pub rows: u64,
    /// Without a kernel for the model it only serves fetches.
    pub has_kernel: bool,
}

/// Consecutive tokens of a prompt whose rows are not with the requester.
#[derive(Debug, Clone, Copy)]
pub struct Span<'a> {
    /// Each has another part; together all of it.
    pub holders: &'a [Holder],
    /// The rows were made for another position than the one where they are wanted.
    pub is_moved: bool,
    /// Each step attends only the best rows of the span, and others than the step before.
    pub is_selected: bool,
}

impl Span<'_> {
    pub fn tokens(&self) -> u64 {
        self.holders.iter().map(|holder| holder.tokens).sum()
    }

    pub fn selected(&self) -> u64 {
        self.holders.iter().map(|holder| holder.selected).sum()
    }
}

/// The requests of one instance that want the span: they share a fetch, and a dispatch of each layer.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Demand {
    /// Query tokens times heads of the rank, of all of them: *Move the Query*'s `M_q`.
    pub rows: u64,
    /// Steps that will attend the span.
    pub steps: u64,
    /// Of each layer, what the instance computes while a query is away.
    pub overlap_us: f64,
    /// A whole step without this span.
    pub step_us: f64,
    /// What a step may take: the objective for the time between tokens.
    pub step_max_us: f64,
    /// Room for rows.
    pub free_bytes: u64,
    /// What prefilling the span again would take, its queue included.
    pub recompute_us: f64,
}
