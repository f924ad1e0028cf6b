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

use crate::attend::{self, Constants, Decision, Demand, Holder, RowBytes, Span, Way};
use crate::cost::DecodeProfile;
use crate::cost::fit::Fit;
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
    /// Added to the prefill when the prefix stays there.
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
    /// Requests of this instance whose prefix it attends: their queries go in one message.
    pub companions: u32,
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
        let prefill_us =
            self.decide(&constants, self.prefill_tokens.max(1), 1).price(Way::Route).total_us;
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
            rows: 0,
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

/// What a layer asks of those that it waits for.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct LayerDemand {
    /// Of queries and partials.
    pub bytes: f64,
    /// Of the span.
    pub tokens: f64,
    /// Query rows.
    pub rows: f64,
}

impl LayerDemand {
    /// Bytes, tokens and rows.
    pub(crate) fn numbers(&self) -> [f64; 3] {
        let LayerDemand { bytes, tokens, rows } = *self;
        [bytes, tokens, rows]
    }
}

/// What routed layers take, and steps over rows that are here: fits that begin with the profile.
#[derive(Debug, Clone)]
pub(crate) struct RouteModel {
    /// A layer: `fixed + bytes + tokens + tokens x rows beyond the flat ones`.
    layer: Fit<4>,
    /// A step: `fixed + sequences + tokens x layers`.
    step: Fit<3>,
    flat_rows: f64,
    has_steps: bool,
}

/// What a [`RouteModel`] has learned.
pub(crate) type LearnedRoutes = ([f64; 4], [f64; 3], bool);

impl RouteModel {
    pub(crate) fn new(constants: &Constants) -> Self {
        let Constants { fabric, holder, local } = constants;
        let layer =
            [fixed_us(constants), 1.0 / fabric.bytes_per_us, holder.token_us, holder.row_token_us];
        let DecodeProfile { base_us, sequence_us, .. } = DecodeProfile::default();
        RouteModel {
            layer: Fit::new(layer),
            step: Fit::new([base_us, sequence_us, local.token_us]),
            flat_rows: holder.flat_rows as f64,
            has_steps: false,
        }
    }

    /// A layer took `measured_us` in the mean.
    pub(crate) fn observe_layer(&mut self, demand: LayerDemand, measured_us: f64) {
        if measured_us.is_finite() && measured_us > 0.0 {
            self.layer.observe(self.features(demand), measured_us);
        }
    }

    /// What such a layer takes by what is known.
    pub(crate) fn layer_us(&self, demand: LayerDemand) -> f64 {
        self.layer.predict(self.features(demand))
    }

    fn features(&self, LayerDemand { bytes, tokens, rows }: LayerDemand) -> [f64; 4] {
        let beyond = (rows - self.flat_rows).max(0.0);
        [1.0, bytes, tokens, tokens * beyond]
    }

    /// A step of so many sequences, with so many rows in each layer, all of them here.
    pub(crate) fn observe_step(&mut self, sequences: f64, row_layers: f64, measured_us: u64) {
        if measured_us > 0 {
            self.step.observe([1.0, sequences, row_layers], measured_us as f64);
            self.has_steps = true;
        }
    }

    /// With what is known by now in place of the profile.
    pub(crate) fn constants(&self, profile: &Constants) -> Constants {
        let mut known = *profile;
        let [layer_us, byte_us, token_us, row_token_us] = self.layer.coefficients();
        // Which part of it is whose is not measured: they keep their shares.
        let scale = layer_us / fixed_us(profile).max(1e-9);
        let Constants { fabric, holder, local } = &mut known;
        fabric.probe_us *= scale;
        fabric.turnaround_us *= scale;
        fabric.merge.base_us *= scale;
        fabric.merge.part_us *= scale;
        holder.launch_us *= scale;
        // So fast that it no longer counts, rather than infinitely.
        fabric.bytes_per_us = 1.0 / byte_us.max(1e-12);
        holder.token_us = token_us;
        holder.row_token_us = row_token_us;
        if self.has_steps {
            // What does not depend on the span is in every step.
            local.launch_us = 0.0;
            local.row_token_us = 0.0;
            local.token_us = self.step.coefficients()[2];
        }
        known
    }

    pub(crate) fn profile(&self) -> LearnedRoutes {
        (self.layer.coefficients(), self.step.coefficients(), self.has_steps)
    }

    /// One that has learned this.
    pub(crate) fn learned((layer, step, has_steps): LearnedRoutes) -> Self {
        let (layer, step) = (Fit::learned(layer), Fit::learned(step));
        RouteModel { layer, step, flat_rows: 0.0, has_steps }
    }
}

/// Of a layer with two parts, whatever is asked.
fn fixed_us(constants: &Constants) -> f64 {
    let Constants { fabric, holder, .. } = constants;
    fabric.probe_us + fabric.turnaround_us + fabric.merge.us(2) + holder.launch_us
}
