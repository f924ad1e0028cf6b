//! Move the query, move the cache, or prefill again: what a decode does about a span of cached rows
//! that lies on other nodes (*Move the Query* §4 and §5). A pure function of a [`Span`], a [`Demand`]
//! and the constants; it allocates nothing and takes well under a microsecond.
//!
//! With `M_q` query rows, `c` tokens, `n` steps and `l` layers:
//!
//! ```text
//! T_route     = T_probe + T_turn + M_q (q + p) / BW + T_compute(M_q, c) + T_merge
//! T_fetch     = c kv_bytes / BW + T_splice        (no splice where the offsets agree)
//! T_gather    = a + b M                           (under selection, of M holders, each layer and step)
//! T_recompute = T_prefill(c)
//!
//! route       = n l max(0, T_route - what overlaps)
//! fetch       = T_fetch + n l T_local(M_q, c)
//! gather      = n l (T_gather + T_local(M_q, selected))
//! recompute   = T_recompute + n l T_local(M_q, c)
//! ```
//!
//! Several holders are asked at once and cost what the slowest does, and one merge. A dispatch holds up
//! the whole batch of its requester, and so does every row that it attends itself; requests that want
//! the same span share the fetch, and their rows go in one dispatch, so that more of them make both
//! sides dearer by the same rule. What would miss the time between tokens, or has no room, is not taken.

use serde::{Deserialize, Serialize};

mod explain;
mod learn;
mod profile;
mod question;

pub(crate) use learn::LearnedRoutes;
pub use learn::{LayerDemand, RouteModel};
pub use profile::{
    Congestion, FabricProfile, GatherProfile, KernelProfile, MergeProfile, SelectedProfile,
    SpliceProfile,
};
pub use question::{Demand, Holder, RowBytes, Span};

/// The constants of one decision.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Constants {
    pub fabric: FabricProfile,
    /// Of the holders.
    pub holder: KernelProfile,
    /// Of the requester.
    pub local: KernelProfile,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Way {
    /// The query goes to the rows, at every layer of every step.
    Route,
    /// The rows come here, once.
    Fetch,
    /// The selected rows come here, at every layer of every step.
    Gather,
    /// The rows are made here again.
    Recompute,
}

impl Way {
    pub const ALL: [Way; 4] = [Way::Route, Way::Fetch, Way::Gather, Way::Recompute];
}

/// Why a way is not open.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Closed {
    /// A step would take longer than the objective allows.
    TooSlow,
    /// The rows have no room with the requester.
    NoRoom,
    /// A holder answers as many as it may.
    HolderFull,
    /// A holder has no kernel for the model.
    NoKernel,
    /// Rows of another offset cannot be used under selection: a rotation would be wrong.
    Moved,
    /// Only a selection is gathered.
    NotSelected,
    /// Nobody has the rows.
    NoHolder,
}

/// What one way costs.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Price {
    pub way: Way,
    /// Before the first step.
    pub once_us: f64,
    /// Added to every step.
    pub step_us: f64,
    /// Over all steps.
    pub total_us: f64,
    pub moved_bytes: u64,
    pub closed: Option<Closed>,
}

/// The terms of one routed layer, of the holder that takes longest.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct RouteTerms {
    pub transport_us: f64,
    pub compute_us: f64,
    pub merge_us: f64,
}

impl RouteTerms {
    pub fn sum_us(&self) -> f64 {
        self.transport_us + self.compute_us + self.merge_us
    }
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Decision {
    /// By [`Way::ALL`].
    pub prices: [Price; 4],
    pub route: RouteTerms,
    /// The cheapest way that is open.
    pub chosen: Option<Way>,
    /// So many ask one holder that a copy of its rows elsewhere would pay (*Move the Query* §6.3).
    pub replicate: bool,
}

impl Decision {
    pub fn price(&self, way: Way) -> &Price {
        &self.prices[way as usize]
    }

    /// With what is known better of a way than the profile says: what it costs before the first step.
    pub fn with_once(mut self, way: Way, once_us: f64) -> Self {
        let price = &mut self.prices[way as usize];
        price.total_us += once_us - price.once_us;
        price.once_us = once_us;
        self.chosen = cheapest(&self.prices);
        self
    }
}

/// Of those that are open.
fn cheapest(prices: &[Price; 4]) -> Option<Way> {
    let open = prices.iter().filter(|price| price.closed.is_none());
    open.min_by(|a, b| a.total_us.total_cmp(&b.total_us)).map(|price| price.way)
}

/// Prices every way and takes the cheapest.
pub fn decide(
    constants: &Constants,
    bytes: RowBytes,
    span: &Span<'_>,
    demand: &Demand,
) -> Decision {
    let question = Question { constants, bytes, span, demand };
    let route = question.route_terms();
    let prices =
        [question.route(&route), question.fetch(), question.gather(), question.recompute()];
    let chosen = cheapest(&prices);
    let concurrent_messages_max = constants.fabric.concurrent_messages_max;
    let replicate = span.holders.iter().any(|holder| holder.flows >= concurrent_messages_max);
    Decision { prices, route, chosen, replicate }
}

struct Question<'a> {
    constants: &'a Constants,
    bytes: RowBytes,
    span: &'a Span<'a>,
    demand: &'a Demand,
}

impl Question<'_> {
    fn route_terms(&self) -> RouteTerms {
        let mut slowest = RouteTerms::default();
        for holder in self.span.holders {
            let transport_us = self
                .constants
                .fabric
                .transport_us(self.bytes.dispatch(self.demand.rows), holder.flows);
            let rows = self.demand.rows + holder.rows;
            let compute_us = if self.span.is_selected {
                self.constants.holder.selected_us(rows, holder.selected)
            } else {
                self.constants.holder.dense_us(rows, holder.tokens)
            };
            let terms = RouteTerms { transport_us, compute_us, merge_us: 0.0 };
            if terms.sum_us() > slowest.sum_us() {
                slowest = terms;
            }
        }
        // The requester's own part is one more.
        slowest.merge_us = self.constants.fabric.merge.us(self.span.holders.len() + 1);
        slowest
    }

    fn route(&self, terms: &RouteTerms) -> Price {
        let exposed_us = (terms.sum_us() - self.demand.overlap_us).max(0.0);
        let step_us = f64::from(self.bytes.layers) * exposed_us;
        let dispatches = self.span.holders.len() as u64 * u64::from(self.bytes.layers);
        let step_bytes = self.bytes.dispatch(self.demand.rows) * dispatches;
        let concurrent_messages_max = self.constants.fabric.concurrent_messages_max;
        let of_holders = if self.span.holders.iter().any(|holder| !holder.has_kernel) {
            Some(Closed::NoKernel)
        } else if self.span.holders.iter().any(|holder| holder.flows >= concurrent_messages_max) {
            Some(Closed::HolderFull)
        } else {
            None
        };
        let closed = self.unusable().or(of_holders);
        self.price(Way::Route, (0.0, step_us), (0, step_bytes), closed)
    }

    fn fetch(&self) -> Price {
        let tokens = self.span.tokens();
        let moved_bytes = tokens * self.bytes.kv();
        let flows = self.span.holders.iter().map(|holder| holder.flows).max().unwrap_or(0);
        let splice_us =
            if self.span.is_moved { self.constants.fabric.splice.us(tokens) } else { 0.0 };
        let once_us = self.constants.fabric.pull_us(moved_bytes, flows) + splice_us;
        let closed = self.unusable().or(self.no_room(moved_bytes));
        self.price(Way::Fetch, (once_us, self.local_step_us()), (moved_bytes, 0), closed)
    }

    fn gather(&self) -> Price {
        let selected = self.span.selected();
        let holders = self.span.holders.iter().filter(|holder| holder.selected > 0).count();
        let layer_us = self.constants.fabric.gather.us(holders, selected)
            + self.constants.local.selected_us(self.demand.rows, selected);
        let layers = u64::from(self.bytes.layers);
        let layer_bytes = selected * u64::from(self.bytes.kv_layer);
        let closed = if self.span.is_selected { None } else { Some(Closed::NotSelected) };
        let closed = closed.or(self.unusable()).or(self.no_room(layer_bytes));
        let step_us = layers as f64 * layer_us;
        self.price(Way::Gather, (0.0, step_us), (0, layers * layer_bytes), closed)
    }

    fn recompute(&self) -> Price {
        let closed = self.no_room(self.span.tokens() * self.bytes.kv());
        let once_us = self.demand.recompute_us;
        self.price(Way::Recompute, (once_us, self.local_step_us()), (0, 0), closed)
    }

    /// Attention over the span where the requester has it, all layers.
    fn local_step_us(&self) -> f64 {
        let (local, rows) = (&self.constants.local, self.demand.rows);
        let layer_us = if self.span.is_selected {
            local.selected_us(rows, self.span.selected())
        } else {
            local.dense_us(rows, self.span.tokens())
        };
        f64::from(self.bytes.layers) * layer_us
    }

    /// Why rows of others cannot be used at all.
    fn unusable(&self) -> Option<Closed> {
        if self.span.holders.is_empty() {
            return Some(Closed::NoHolder);
        }
        (self.span.is_selected && self.span.is_moved).then_some(Closed::Moved)
    }

    fn no_room(&self, bytes: u64) -> Option<Closed> {
        (bytes > self.demand.free_bytes).then_some(Closed::NoRoom)
    }

    fn price(
        &self,
        way: Way,
        (once_us, step_us): (f64, f64),
        (once_bytes, step_bytes): (u64, u64),
        closed: Option<Closed>,
    ) -> Price {
        let too_slow = self.demand.step_us + step_us > self.demand.step_max_us;
        Price {
            way,
            once_us,
            step_us,
            total_us: once_us + self.demand.steps as f64 * step_us,
            moved_bytes: once_bytes.saturating_add(self.demand.steps.saturating_mul(step_bytes)),
            closed: closed.or(too_slow.then_some(Closed::TooSlow)),
        }
    }
}
