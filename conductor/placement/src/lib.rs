//! The conductor's core: who holds which block, what each choice would cost, and which one is
//! taken. No I/O, no clock, no randomness: time and seeds are passed in, so that the same events
//! give the same decisions, here, in the simulator and in the trace replayer.
//!
//! Reading path:
//! 1. [`place()`]: the decision, a pure function of the three below; [`selection`]: the policies
//! 2. [`index`]: the shadow index; one search answers for all nodes how much of a prompt they hold
//! 3. [`view`]: the instances, their load, and the requests this conductor has sent them; [`Inputs`]: all of
//!    it that one decision reads, to be written down and decided again
//! 4. [`cost`]: what prefill, transfer and a decode step take, fitted to what was measured
//! 5. [`queue`]: the work that is booked on one instance
//! 6. `growth`, `drain`: the room that answers will take, and when it comes back
//! 7. [`explain`]: a decision as text and as values
//! 8. [`attend`]: move the query, move the cache, or prefill again; [`routing`]: when a placement asks that;
//!    [`chunks`]: the same for parts of a prompt that were computed at another offset
//! 9. `ahead`: what a node should read from its SSD before it is asked
//! 10. [`balance`]: how many instances prefill and how many decode
//! 11. [`calibration`]: how true predictions were
//! 12. [`waiting`]: whose turn it is where requests wait
//!
//! Everything in here is a hint: a stale index or view costs time, never correctness.

#![forbid(unsafe_code)]

mod ahead;
pub mod attend;
pub mod balance;
pub mod calibration;
mod chunks;
mod cost;
mod decision;
mod drain;
mod explain;
mod growth;
mod index;
mod place;
pub mod queue;
mod routing;
mod selection;
mod view;
pub mod waiting;

pub use ahead::Ahead;
pub use chunks::{AskedChunk, ChunkUse, PlacedChunk, ROUTED_MAX};
pub use cost::{
    DecodeLoad, DecodeModel, DecodeProfile, InstanceProfile, LinkModel, LinkProfile, LongestTenth,
    PrefillModel, PrefillProfile, Profile, SsdModel, SsdProfile, StepProfile, TbtModel,
};
pub use decision::{
    Admission, Chosen, Considered, DecodeCandidate, Fetch, Missing, Objectives, OverloadReason,
    PlaceRequest, Placement, Policy, PrefillCandidate, Refusal, Refused, Shape, Steering, Verdict,
};
pub use explain::{
    ActionExplanation, ChunkExplanation, DecodeExplanation, Explanation, FetchExplanation,
    PrefillExplanation, PrefixExplanation, RefusalExplanation,
};
pub use index::{
    IndexLimits, IndexReader, NodeIndex, PrefixMatch, ShadowIndex, Tier, TierBlocks, TooManyNodes,
};
pub use place::place;
pub use routing::{Attended, Route, RoutePart, RoutedRows, Routing};
pub use selection::{Selection, UnknownSelection};
pub use view::{
    BookingId, ClusterView, Difference, Inputs, Instance, InstanceRef, InstanceReport, ModelIndex,
    ModelSpec, OpenWork, RecordedDecision, RecordedError, ReportedLoad, Role, SsdReads,
};
