//! Whether the prefix of one request stays where it is ([`crate::attend`] decides by prices): when a placement
//! asks that, and with what numbers.
//!
//! It is asked for an instance that does both, when nothing of the prefix is on its own node and another
//! node has it in memory. The engine of that instance then has the query rows of what follows attended there,
//! in every layer of every step. Nothing of such a request is cached: its rows have no chain before them here.
//!
//! What this cluster has measured replaces the profile: fetches and prefills have the prices of all
//! placements, and what a routed layer takes and what a step takes over rows that are here are fitted to what
//! they took ([`RouteModel`]). All instances are taken to be alike in that.

use serde::{Deserialize, Serialize};

use crate::attend::{
    self, Constants, Decision, Demand, Holder, LayerDemand, RouteModel, RowBytes, Span, Way,
};
use crate::decision::Chosen;

/// How prefixes are routed.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Routing {
    /// Until routed layers are measured.
    pub constants: Constants,
    /// Route wherever that is open, whatever it costs.
    pub always: bool,
}

/// How queries of a model's engines travel, and their partials: of one token in one layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RoutedRows {
    /// Rows: heads of the rank.
    pub heads: u32,
    pub query_bytes: u32,
    pub partial_bytes: u32,
    pub layers: u32,
}

/// Blocks `[0, blocks)` stay with this instance's node, which answers queries over them.
#[derive(Debug, Clone, PartialEq)]
pub struct Route {
    pub source: Chosen,
    pub blocks: u32,
    /// What a routed layer of one decode step asks, of this request alone.
    pub(crate) layer: LayerDemand,
}

/// What was asked about a prefix, and the answer with all prices.
#[derive(Debug, Clone, PartialEq)]
pub struct Attended {
    /// Who has it: the position among the names of the placement.
    pub(crate) source: u32,
    pub blocks: u32,
    pub decision: Decision,
    pub(crate) layer: LayerDemand,
    /// Added to the prefill when the prefix stays there: opening the route, and its layers.
    pub(crate) prefill_us: u64,
}

/// One request and the node that has its prefix.
pub(crate) struct Question {
    pub rows: RoutedRows,
    pub block_bytes: u64,
    pub block_tokens: u32,
    pub blocks: u32,
    /// They were computed at another offset.
    pub is_moved: bool,
    /// Other instances for which that node attends prefixes.
    pub flows: u32,
    /// Requests of theirs whose rows it attends: their queries come to the same kernel.
    pub beside: u32,
    /// Requests of this instance whose prefix it attends: their queries go in one message.
    pub companions: u32,
    /// Other parts of the request are attended elsewhere: all are opened at the same time.
    pub is_opened: bool,
    /// Prompt tokens after the prefix.
    pub prefill_tokens: u32,
    /// Tokens of the answer, as far as can be foreseen.
    pub answer_tokens: u32,
    pub step_us: u64,
    pub step_max_us: u64,
    pub free_slots: u32,
    pub fetch_us: u64,
    pub recompute_us: u64,
    /// It is routed wherever that is open.
    pub always: bool,
}

impl Question {
    pub fn answer(&self, source: u32, routing: &Routing, learned: &RouteModel) -> Attended {
        let constants = learned.constants(&routing.constants);
        let tokens = 1 + self.companions;
        let decode = self.decide(&constants, tokens, u64::from(self.answer_tokens.max(1)));
        let prefill = self.decide(&constants, self.prefill_tokens.max(1), 1);
        let open_us = if self.is_opened { 0.0 } else { learned.open_us() };
        let prefill_us = open_us + prefill.price(Way::Route).total_us;
        let mut decision = decode
            .with_once(Way::Route, prefill_us)
            .with_once(Way::Fetch, self.fetch_us as f64)
            .with_once(Way::Recompute, self.recompute_us as f64);
        if self.always && decision.price(Way::Route).closed.is_none() {
            decision.chosen = Some(Way::Route);
        }
        let RoutedRows { heads, query_bytes, partial_bytes, .. } = self.rows;
        let rows = f64::from(heads);
        let layer = LayerDemand {
            bytes: rows * (f64::from(query_bytes) + f64::from(partial_bytes)),
            tokens: f64::from(self.blocks) * f64::from(self.block_tokens),
            rows,
        };
        let blocks = self.blocks;
        Attended { source, blocks, decision, layer, prefill_us: prefill_us as u64 }
    }

    fn decide(&self, constants: &Constants, tokens: u32, steps: u64) -> Decision {
        let RoutedRows { heads, query_bytes, partial_bytes, layers } = self.rows;
        let row_bytes = self.block_bytes / u64::from(self.block_tokens.max(1));
        let kv_layer = u32::try_from(row_bytes / u64::from(layers.max(1))).unwrap_or(u32::MAX);
        let bytes = RowBytes { query: query_bytes, partial: partial_bytes, kv_layer, layers };
        let holder = Holder {
            tokens: u64::from(self.blocks) * u64::from(self.block_tokens),
            selected: 0,
            flows: self.flows,
            rows: u64::from(heads) * u64::from(self.beside),
            has_kernel: true,
        };
        let span = Span { holders: &[holder], is_moved: self.is_moved, is_selected: false };
        let demand = Demand {
            rows: u64::from(heads) * u64::from(tokens),
            steps,
            overlap_us: 0.0,
            step_us: self.step_us as f64,
            step_max_us: self.step_max_us as f64,
            free_bytes: u64::from(self.free_slots).saturating_mul(self.block_bytes),
            recompute_us: 0.0,
        };
        attend::decide(constants, bytes, &span, &demand)
    }
}
