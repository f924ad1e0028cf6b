//! What is asked of a placement and what it answers: plain values, to be printed, compared and
//! replayed. Nothing is decided here (see [`crate::place()`]).

use std::sync::Arc;

use kvasir_proto::{InstanceId, NodeId};
use serde::{Deserialize, Serialize};

use crate::attend::Way;
use crate::chunks::{AskedChunk, PlacedChunk};
use crate::cost::DecodeLoad;
use crate::growth::Growth;
use crate::index::NodeIndex;
use crate::routing::{Attended, Route, Routing};
use crate::selection::Selection;
use crate::view::{InstanceRef, ModelIndex, Names};

/// One request, as far as its place depends on it. Its block keys are in the match.
#[derive(Debug, Clone)]
pub struct PlaceRequest<'a> {
    pub model: ModelIndex,
    pub prompt_tokens: u32,
    pub max_tokens: u32,
    pub objectives: Objectives,
    /// Instances that failed this request already.
    pub exclude: &'a [InstanceId],
    /// Breaks ties between equals, so that equals share the load.
    pub tie_seed: u64,
    pub now_us: u64,
    /// Its prefix may stay elsewhere, where the policy routes at all.
    pub may_route: bool,
    /// It will have `max_tokens` and not fewer.
    pub is_endless: bool,
    pub steering: Steering<'a>,
    /// In the order of the prompt. The match is of what is before the first of them.
    pub chunks: &'a [AskedChunk],
}

/// What a request says of its own place. Default: nothing.
#[derive(Debug, Clone, Copy, Default)]
pub struct Steering<'a> {
    /// Nobody else computes its prompt.
    pub instance: Option<&'a InstanceId>,
    /// What becomes of the prefix that another node has, whatever that costs: it stays there, is fetched, or is
    /// computed again. Where that is not open the request goes as others do.
    pub prefix: Option<Way>,
}

/// What the request must meet. A request that cannot is refused before it costs anything.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Objectives {
    /// Time to the first token.
    pub ttft_us: u64,
    /// Time between tokens.
    pub tbt_us: u64,
}

impl Objectives {
    /// Every request meets these.
    pub const NONE: Objectives = Objectives { ttft_us: u64::MAX, tbt_us: u64::MAX };
}

/// By what load of the decode side a request is refused.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize,
)]
#[serde(rename_all = "kebab-case")]
pub enum Admission {
    /// None: when its prefill has ended, whoever runs it looks (see
    /// [`ClusterView::look_again`](crate::ClusterView::look_again)).
    Late,
    /// What decodes now (*Mooncake* §4.3, early rejection).
    Early,
    /// What will decode when this request's prefill ends: of those that decode now who will not have
    /// ended, if all answers take one time, and those whose prefill will have ended (early
    /// rejection based on prediction).
    Predicted,
    /// By how likely the request is to meet its objective, beside all that were sent there: see
    /// [`crate::cost::TbtModel`].
    #[default]
    Calibrated,
}

impl Admission {
    pub const ALL: [Admission; 4] =
        [Admission::Late, Admission::Early, Admission::Predicted, Admission::Calibrated];

    /// As it is written on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Admission::Late => "late",
            Admission::Early => "early",
            Admission::Predicted => "predicted",
            Admission::Calibrated => "calibrated",
        }
    }
}

/// How decisions are taken.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Policy {
    /// By what load of the decode side a request is refused.
    pub admission: Admission,
    /// By what the prefill instance is chosen.
    pub selection: Selection,
    /// With [`Selection::KvcacheCentric`], an instance whose own prefix is shorter than the best one by
    /// more than this factor may fetch the difference (*Mooncake* Algorithm 1). No hit counts as
    /// above it.
    pub kvcache_balancing_threshold: f64,
    /// Where a fetch is priced, fetch whatever it costs, as Algorithm 1 is printed. Off: fetch only
    /// where that is cheaper than computing.
    pub always_fetch: bool,
    /// With [`Selection::LeastCost`], a prefill lets others pass that come later by less than so many
    /// times what they take less, which bounds how long it waits. For engines that begin what has
    /// the least rank, and stop for it between two chunks. 0 is first come, first served.
    pub shortest_prefill_first_factor: f64,
    /// Decode instances whose load is within this of the least are equals in load, and the one
    /// with the longest prefix is taken.
    pub decode_load_margin: f64,
    /// Prefixes may stay on another node, and be attended there.
    pub routing: Option<Routing>,
    /// The least and the most that a refused caller is told to wait.
    pub retry_after_ms_min: u64,
    pub retry_after_ms_max: u64,
}

impl Default for Policy {
    fn default() -> Self {
        Policy {
            admission: Admission::default(),
            selection: Selection::default(),
            shortest_prefill_first_factor: 0.0,
            kvcache_balancing_threshold: 1.5,
            always_fetch: false,
            decode_load_margin: 0.1,
            routing: None,
            retry_after_ms_min: 1_000,
            retry_after_ms_max: 60_000,
        }
    }
}

impl Policy {
    /// What a refused caller is told to wait when room is predicted to come in `drain_us`.
    pub fn retry_after_ms(&self, drain_us: u64) -> u64 {
        let least = self.retry_after_ms_min.min(self.retry_after_ms_max);
        drain_us.div_ceil(1_000).clamp(least, self.retry_after_ms_max)
    }
}

/// Where a request goes. A plan: nothing is booked or reserved by it.
#[derive(Debug, Clone, PartialEq)]
pub struct Placement {
    pub shape: Shape,
    /// Blocks that the prefill side brings from elsewhere before it computes.
    pub fetch: Option<Fetch>,
    /// The prefix stays there, and is attended there.
    pub route: Option<Route>,
    /// What becomes of each chunk of the request.
    pub chunks: Vec<PlacedChunk>,
    /// The prefill side is to leave what only its SSD has there: to fetch or to compute it takes less time.
    pub leaves_ssd: bool,
    /// What was asked about the prefix, where it could have stayed.
    pub attended: Option<Attended>,
    /// Prompt tokens that are left to compute.
    pub compute_tokens: u32,
    /// Prompt tokens that are reused: held, fetched or attended elsewhere, chunks among them.
    pub reused_tokens: u32,
    pub queue_us: u64,
    pub transfer_us: u64,
    pub compute_us: u64,
    pub decode_wait_us: u64,
    pub predicted_ttft_us: u64,
    pub predicted_tbt_us: u64,
    /// It misses an objective by estimates that it is there to correct (see [`crate::place()`]).
    pub probe: bool,
    pub considered: Considered,
    /// The engine begins the prefill with the least rank first: when it came, and later the longer
    /// it takes, as the policy says.
    pub rank_us: u64,
    /// The same from when it was placed: engines have clocks of their own.
    pub priority_delay_us: u64,
    /// What the prefill side sends to the decode side.
    pub push_bytes: u64,
    /// Of the answer, on the instance that decodes.
    pub(crate) growth: Growth,
    /// There, when it begins to decode.
    pub(crate) decode_load: DecodeLoad,
}

/// All that were considered for a request, in the order of the view.
#[derive(Debug, Clone, PartialEq)]
pub struct Considered {
    pub prompt_tokens: u32,
    pub prompt_blocks: u32,
    pub prefill_candidates: Vec<PrefillCandidate>,
    pub decode_candidates: Vec<DecodeCandidate>,
    pub(crate) selection: Selection,
    pub(crate) names: Arc<Names>,
}

/// A refusal, and who was considered before it. Nobody was for a model that is not known.
#[derive(Debug, Clone, PartialEq)]
pub struct Refused {
    pub refusal: Refusal,
    pub considered: Considered,
}

/// One instance or two.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Shape {
    /// Prefill and decode on one instance.
    Whole(Chosen),
    Split {
        prefill: Chosen,
        decode: Chosen,
    },
}

/// An instance that was taken.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Chosen {
    pub instance: InstanceRef,
    pub instance_id: InstanceId,
    pub node: NodeIndex,
    pub node_id: NodeId,
    /// Leading blocks of the prompt that its node holds, as far as is known here.
    pub cached_blocks: u32,
    /// Of them, those in memory.
    pub memory_blocks: u32,
}

/// Blocks `[from_block, until_block)` come from this instance's node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fetch {
    pub source: Chosen,
    pub from_block: u32,
    pub until_block: u32,
    pub bytes: u64,
}

impl Placement {
    /// The instance that computes the prompt.
    pub fn prefill(&self) -> &Chosen {
        match &self.shape {
            Shape::Whole(chosen) | Shape::Split { prefill: chosen, .. } => chosen,
        }
    }

    /// The instance that decodes: the same one when the shape is whole.
    pub fn decode(&self) -> &Chosen {
        match &self.shape {
            Shape::Whole(chosen) | Shape::Split { decode: chosen, .. } => chosen,
        }
    }

    pub fn is_whole(&self) -> bool {
        matches!(self.shape, Shape::Whole(_))
    }

    /// How likely the answer meets its objective between tokens, where that has been learned.
    pub fn likely(&self) -> Option<f64> {
        let mut decodes = self.considered.decode_candidates.iter();
        decodes.find(|candidate| candidate.verdict == Verdict::Chosen)?.likely
    }
}

/// What one instance would cost as the prefill side.
#[derive(Debug, Clone, PartialEq)]
pub struct PrefillCandidate {
    /// Its position among the names of the placement.
    pub(crate) at: u32,
    pub cached_blocks: u32,
    pub(crate) memory_blocks: u32,
    /// Blocks that would not be computed: held, or held and fetched.
    pub used_blocks: u32,
    /// Its SSD has some that would be fetched or computed nevertheless.
    pub(crate) leaves_ssd: bool,
    pub(crate) fetch_from: Option<u32>,
    pub queue_us: u64,
    pub transfer_us: u64,
    pub compute_us: u64,
    pub ttft_us: u64,
    pub(crate) latest_ttft_us: u64,
    /// What is compared, unless the policy looks at something else than time.
    pub cost_us: u64,
    pub(crate) rank_us: u64,
    pub verdict: Verdict,
}

/// What one instance would be like as the decode side.
#[derive(Debug, Clone, PartialEq)]
pub struct DecodeCandidate {
    pub(crate) at: u32,
    /// In memory: it does not wait for its SSD.
    pub cached_blocks: u32,
    /// Predicted sequences over the most it decodes at once, this one included, at the time the
    /// prefill ends.
    pub load: f64,
    pub wait_us: u64,
    pub tbt_us: u64,
    /// How likely it meets the objective between tokens, where that has been learned.
    pub likely: Option<f64>,
    pub(crate) misses_tbt: bool,
    pub(crate) decode_load: DecodeLoad,
    pub verdict: Verdict,
}

/// The reason for choosing or rejecting a candidate.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    Chosen,
    /// Another candidate has a lower cost.
    HigherCost,
    MissesTtft,
    MissesTbt,
    /// Its node has too few slots.
    NoCapacity,
    /// It failed this request before.
    Excluded,
    /// The request selects another instance.
    NotRequested,
    /// It failed another request recently.
    Unhealthy,
    /// Its node has room only for the blocks that do not stay on other nodes. It is chosen only if no candidate with
    /// room for the whole prompt meets the objectives.
    RoutedOnly,
    /// Its last report shows no room, but requests have ended since. It is chosen only if there is no other
    /// candidate; its node decides.
    CapacityUnknown,
    Draining,
    /// The request has reusable chunks, which need an instance with both roles.
    NotFull,
    /// No decode instance could be paired with it.
    NoDecode,
    /// No prefill instance could be paired with it in time.
    NoPrefill,
}

/// Why a request was refused, by what the caller can do.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// Nothing meets the objectives now: try again later.
    #[error(
        "{reason}; predicted time to first token {predicted_ttft_us} us; retry after {retry_after_ms} ms"
    )]
    Overloaded { predicted_ttft_us: u64, retry_after_ms: u64, reason: OverloadReason },
    /// Nobody serves the model at the moment.
    #[error("no {missing} instance of model `{model}` is available")]
    NoInstance { model: String, missing: Missing },
    #[error("unknown model `{model}`")]
    UnknownModel { model: String },
    /// No node could ever hold it with the first block of an answer: shorten it.
    #[error("it needs {prompt_blocks} cache blocks, and an instance has at most {blocks_max}")]
    TooLarge { prompt_blocks: u32, blocks_max: u32 },
}

impl Refusal {
    /// For metrics, and for programs that read a decision.
    pub fn label(&self) -> &'static str {
        match self {
            Refusal::Overloaded { reason, .. } => reason.label(),
            Refusal::NoInstance { .. } => "no_instance",
            Refusal::UnknownModel { .. } => "unknown_model",
            Refusal::TooLarge { .. } => "too_long",
        }
    }
}

/// What was over its limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum OverloadReason {
    #[error("no instance can meet the TTFT objective")]
    Ttft,
    #[error("no instance can meet the TBT objective")]
    Tbt,
    #[error("no node has capacity for the prompt")]
    NoRoom,
}

impl OverloadReason {
    /// For metrics, and for programs that read an answer.
    pub fn label(self) -> &'static str {
        match self {
            OverloadReason::Ttft => "ttft",
            OverloadReason::Tbt => "tbt",
            OverloadReason::NoRoom => "no_capacity",
        }
    }
}

/// The role that nobody fills.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Missing {
    #[error("prefill")]
    Prefill,
    #[error("decode")]
    Decode,
    /// The one that the request named.
    #[error("requested")]
    Named,
    /// For a request with chunks, which is served whole.
    #[error("prefill-and-decode")]
    Whole,
}
