//! The conductor's picture of the cluster, kept alive: one task for each store node follows its
//! events into the placement core; [`Cluster`] is the handle that the front door asks.
//!
//! Nothing here is truth: the truth is on the nodes, and a stale picture costs time, never
//! correctness. The state is behind one mutex that is held for microseconds and never across an
//! await.
//!
//! - [`handle`]: places requests, answers what is served and whether all is ready
//! - [`hint`]: what a node is told to read ahead
//! - [`keepers`]: nodes that can keep what tenants are promised
//! - [`booking`]: a placed request's work, counted until it is dropped
//! - [`follow`]: connect, subscribe, apply, and start anew when anything is amiss
//! - [`balance`]: what roles there should be, and telling nodes
//! - [`status`]: one status of a node, read and checked
//! - [`state`]: what the tasks share
//! - [`overview`]: all of it as values, for people to look at

mod balance;
mod booking;
mod follow;
mod handle;
mod hint;
mod keepers;
mod metrics;
mod overview;
mod state;
mod status;
#[cfg(test)]
mod tests;

pub use balance::{BalanceOptions, BalanceOverview};
pub use booking::{Booking, PrefillTime};
pub use handle::{
    ChunkTarget, Cluster, ClusterError, EngineTarget, FetchSource, NodeHandle, NotNow, NotPlaced,
    Options, PlaceQuery, Placed, Plan, QueriedChunk, RouteHolder, ServedModel,
};
pub use hint::Expected;
pub use keepers::Keepers;
pub use overview::{InstanceOverview, NodeOverview, Overview, SsdOverview, TiersOverview};
