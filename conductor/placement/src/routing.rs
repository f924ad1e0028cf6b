//! Whether the prefix of one request stays where it is ([`crate::attend`] decides by prices): when a placement
//! asks that, and with what numbers.
//!
//! It is asked for an instance that does both, when another node has more of the prefix in memory than its own
//! node. The engine of that instance attends what is here itself, and has the query rows of what follows attended
//! there, in every layer of every step. Nothing of such a request is cached: its rows have no chain before them here.
//!
//! An instance without room for all of a prompt, but for what is not elsewhere, is taken when nobody who has room serves
//! in time, and routing is the way that is left.
//!
//! Where several nodes have all of it, each may attend a part: all are asked at once, and a layer takes what
//! the slowest does. It is split over twice as many when that saves a tenth at least, since every holder
//! answers so many and no more, or when fewer would be too slow for the objective.
//!
//! What this cluster has measured replaces the profile: fetches and prefills have the prices of all
//! placements, and what a routed layer takes and what a step takes over rows that are here are fitted to what
//! they took ([`RouteModel`]). All instances are taken to be alike in that.

use serde::{Deserialize, Serialize};

use arrayvec::ArrayVec;

use crate::attend::{
    self, Constants, Decision, Demand, Holder, LayerDemand, RouteModel, RowBytes, Span, Way,
};
use crate::decision::Chosen;
use crate::view::HostRef;

/// Nodes that attend the prefix of one request, at most.
pub(crate) const HOLDERS_MAX: usize = 8;

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

/// Blocks of a prompt's beginning stay where they are: part after part, in their order, each with another node.
#[derive(Debug, Clone, PartialEq)]
pub struct Route {
    /// Those before it are with the instance's own node.
    pub first_block: u32,
    pub parts: Vec<RoutePart>,
}

impl Route {
    /// Of all parts, without those before them.
    pub fn blocks(&self) -> u32 {
        self.parts.iter().map(|part| part.blocks).sum()
    }
}

/// Blocks that stay with this instance's node, which answers queries over them.
#[derive(Debug, Clone, PartialEq)]
pub struct RoutePart {
    pub source: Chosen,
    pub blocks: u32,
    /// What a routed layer of one decode step asks of it, of this request alone.
    pub(crate) layer: LayerDemand,
}

/// What was asked about a prefix, and the answer with all prices.
#[derive(Debug, Clone, PartialEq)]
pub struct Attended {
    /// With those before it the instance has nothing to ask.
    pub(crate) first_block: u32,
    /// Who would attend what, in the order of the blocks.
    pub(crate) parts: ArrayVec<AttendedPart, HOLDERS_MAX>,
    pub decision: Decision,
    /// Added to the prefill when the prefix stays there: opening the route, and its layers.
    pub(crate) prefill_us: u64,
}

impl Attended {
    pub fn blocks(&self) -> u32 {
        self.parts.iter().map(|part| part.blocks).sum()
    }

    /// With what is before them.
    pub(crate) fn end_block(&self) -> u32 {
        self.first_block + self.blocks()
    }
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct AttendedPart {
    /// Who has it: the position among the names of the placement.
    pub source: u32,
    pub blocks: u32,
    pub layer: LayerDemand,
}

/// A node that has the prefix, or as much of it as it is asked about.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Asked {
    /// The position among the names of the placement.
    pub source: u32,
    /// Its node.
    pub host: HostRef,
    /// Other instances for which it attends prefixes.
    pub flows: u32,
    /// Requests of theirs whose rows it attends: their queries come to the same kernel.
    pub beside: u32,
    /// Requests of this instance whose prefix it attends: their queries go in one message.
    pub companions: u32,
}

/// One request and the nodes that have its prefix.
pub(crate) struct Question {
    pub rows: RoutedRows,
    pub block_bytes: u64,
    pub block_tokens: u32,
    pub first_block: u32,
    pub blocks: u32,
    /// They were computed at another offset.
    pub is_moved: bool,
    /// Other parts of the request are attended elsewhere: all are opened at the same time.
    pub is_opened: bool,
    /// Prompt tokens after the prefix.
    pub prefill_tokens: u32,
    /// Tokens of the answer, as far as can be foreseen.
    pub generated_tokens: u32,
    pub step_us: u64,
    pub step_max_us: u64,
    pub free_slots: u32,
    pub fetch_us: u64,
    /// Beside the prefill of the rest as it is where the prefix stays elsewhere.
    pub recompute_us: u64,
    /// What that takes longer where the prefix was fetched, and is attended here.
    pub attend_us: u64,
    /// It is routed wherever that is open.
    pub always: bool,
}

impl Question {
    /// Of the first of these holders, or of as many more as are worth it.
    pub(crate) fn answer_over(
        &self,
        holders: &[Asked],
        routing: &Routing,
        learned: &RouteModel,
    ) -> Attended {
        let mut best = self.answer(&holders[..1], routing, learned);
        let most = holders.len().min(HOLDERS_MAX).min(self.blocks as usize);
        let counts = std::iter::successors(Some(2), |count| Some(count * 2));
        for count in counts.take_while(|count| *count <= most) {
            let more = self.answer(&holders[..count], routing, learned);
            let [few, many] = [&best, &more].map(|asked| asked.decision.price(Way::Route));
            // What is too slow yet may be fast enough with more of them.
            let gains = match (few.closed, many.closed) {
                (None, None) => many.total_us < few.total_us * 0.9,
                (None, Some(_)) => false,
                (Some(_), _) => many.total_us < few.total_us,
            };
            if !gains {
                break;
            }
            best = more;
        }
        best
    }

    /// Each of these holders has an equal part, the first ones a block more where they do not divide. Who has which
    /// does not depend on the request: queries over equal parts come to one kernel.
    pub(crate) fn answer(
        &self,
        holders: &[Asked],
        routing: &Routing,
        learned: &RouteModel,
    ) -> Attended {
        let mut in_order: ArrayVec<Asked, HOLDERS_MAX> = holders.iter().copied().collect();
        in_order.sort_unstable_by_key(|holder| holder.host);
        let holders = &in_order[..];
        let constants = learned.constants(&routing.constants);
        let companions = holders.iter().map(|holder| holder.companions).max().unwrap_or(0);
        let steps = u64::from(self.generated_tokens.max(1));
        let parts: ArrayVec<AttendedPart, HOLDERS_MAX> = self.parts(holders).collect();
        let decode = self.decide(&constants, (holders, &parts), 1 + companions, steps);
        let prefill = self.decide(&constants, (holders, &parts), self.prefill_tokens.max(1), 1);
        let open_us = if self.is_opened { 0.0 } else { learned.open_us() };
        let prefill_us = open_us + prefill.price(Way::Route).total_us;
        let mut decision = decode
            .with_once(Way::Route, prefill_us)
            .with_once(Way::Fetch, self.fetch_us.saturating_add(self.attend_us) as f64)
            .with_once(Way::Recompute, self.recompute_us as f64);
        if self.always && decision.price(Way::Route).closed.is_none() {
            decision.chosen = Some(Way::Route);
        }
        let (first_block, prefill_us) = (self.first_block, prefill_us as u64);
        Attended { first_block, parts, decision, prefill_us }
    }

    fn parts(&self, holders: &[Asked]) -> impl Iterator<Item = AttendedPart> {
        let RoutedRows { heads, query_bytes, partial_bytes, .. } = self.rows;
        let rows = f64::from(heads);
        let bytes = rows * (f64::from(query_bytes) + f64::from(partial_bytes));
        let count = holders.len() as u32;
        (0..).zip(holders).map(move |(at, holder)| {
            let blocks = self.blocks / count + u32::from(at < self.blocks % count);
            let tokens = f64::from(blocks) * f64::from(self.block_tokens);
            AttendedPart {
                source: holder.source,
                blocks,
                layer: LayerDemand { bytes, tokens, rows },
            }
        })
    }

    fn decide(
        &self,
        constants: &Constants,
        (asked, parts): (&[Asked], &[AttendedPart]),
        tokens: u32,
        steps: u64,
    ) -> Decision {
        let RoutedRows { heads, query_bytes, partial_bytes, layers } = self.rows;
        let row_bytes = self.block_bytes / u64::from(self.block_tokens.max(1));
        let kv_layer = u32::try_from(row_bytes / u64::from(layers.max(1))).unwrap_or(u32::MAX);
        let bytes = RowBytes { query: query_bytes, partial: partial_bytes, kv_layer, layers };
        let holder = |(asked, part): (&Asked, &AttendedPart)| Holder {
            tokens: u64::from(part.blocks) * u64::from(self.block_tokens),
            selected: 0,
            flows: asked.flows,
            rows: u64::from(heads) * u64::from(asked.beside),
            has_kernel: true,
        };
        let holders: ArrayVec<Holder, HOLDERS_MAX> = asked.iter().zip(parts).map(holder).collect();
        let span = Span { holders: &holders, is_moved: self.is_moved, is_selected: false };
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
