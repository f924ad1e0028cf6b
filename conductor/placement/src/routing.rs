//! Whether the prefix of one request stays where it is ([`crate::attend`] decides by prices): when a placement
//! asks that, and with what numbers.
//!
//! It is asked for an instance that does both, when nothing of the prefix is on its own node and another
//! node has it in memory. The engine of that instance then has the query rows of what follows attended there,
//! in every layer of every step. Nothing of such a request is cached: its rows have no chain before them here.
//!
//! What this cluster has measured replaces the profile: fetches and prefills have the prices of all
//! placements, and the time of a routed layer is scaled by what routed layers have taken ([`RouteModel`]).

use serde::{Deserialize, Serialize};

use crate::attend::{self, Constants, Decision, Demand, Holder, RowBytes, Span, Way};
use crate::cost::weight;
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
    /// What a routed layer of one decode step would take by the profile alone.
    pub(crate) layer_us: f64,
}

/// What was asked about a prefix, and the answer with all prices.
#[derive(Debug, Clone, PartialEq)]
pub struct Attended {
    /// Who has it: the position among the names of the placement.
    pub(crate) source: u32,
    pub blocks: u32,
    pub decision: Decision,
    pub(crate) layer_us: f64,
    /// Added to the prefill when the prefix stays there.
    pub(crate) prefill_us: u64,
}

/// One request and the node that has its prefix.
pub(crate) struct Question {
    pub rows: RoutedRows,
    pub block_bytes: u64,
    pub block_tokens: u32,
    pub blocks: u32,
    /// Requests whose prefix that node attends already.
    pub flows: u32,
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
    /// `scale` is what [`RouteModel`] has learned.
    pub fn answer(&self, source: u32, routing: &Routing, scale: f64) -> Attended {
        let constants = scaled(&routing.constants, scale);
        let decode = self.decide(&constants, 1, u64::from(self.answer_tokens.max(1)));
        let prefill_us =
            self.decide(&constants, self.prefill_tokens.max(1), 1).price(Way::Route).total_us;
        let mut decision = decode
            .with_once(Way::Route, prefill_us)
            .with_once(Way::Fetch, self.fetch_us as f64)
            .with_once(Way::Recompute, self.recompute_us as f64);
        if self.always && decision.price(Way::Route).closed.is_none() {
            decision.chosen = Some(Way::Route);
        }
        let layer_us = decision.route.sum_us() / scale;
        let blocks = self.blocks;
        Attended { source, blocks, decision, layer_us, prefill_us: prefill_us as u64 }
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
            rows: 0,
            has_kernel: true,
        };
        let span = Span { holders: &[holder], is_moved: false, is_selected: false };
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

/// Everything that a routed layer waits for takes so many times as long.
fn scaled(constants: &Constants, scale: f64) -> Constants {
    let mut scaled = *constants;
    let Constants { fabric, holder, .. } = &mut scaled;
    fabric.probe_us *= scale;
    fabric.turnaround_us *= scale;
    fabric.bytes_per_us /= scale;
    fabric.merge.base_us *= scale;
    fabric.merge.part_us *= scale;
    holder.launch_us *= scale;
    holder.token_us *= scale;
    holder.row_token_us *= scale;
    scaled
}

/// How much longer routed layers take than the profile says: a fading geometric mean.
#[derive(Debug, Clone)]
pub(crate) struct RouteModel {
    scale: f64,
    samples: u32,
}

impl Default for RouteModel {
    fn default() -> Self {
        RouteModel { scale: 1.0, samples: 0 }
    }
}

impl RouteModel {
    /// A layer that takes `profile_us` by the profile took `measured_us` in the mean.
    pub(crate) fn observe(&mut self, profile_us: f64, measured_us: f64) {
        let sample = measured_us / profile_us;
        if sample.is_finite() && sample > 0.0 {
            let sample = sample.clamp(1e-3, 1e3);
            self.scale *= (sample / self.scale).powf(weight(&mut self.samples));
        }
    }

    /// One that has learned this.
    pub(crate) fn learned(scale: f64) -> Self {
        RouteModel { scale, samples: 0 }
    }

    pub(crate) fn scale(&self) -> f64 {
        self.scale
    }
}
