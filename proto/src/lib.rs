//! Ids, layouts, wire types and services that every part of Kvasir shares. No logic beyond what
//! defines an id: what a block key *is* stands in [`keys`].
//!
//! - [`digest`]: what tells in a few bytes whether two sets of blocks are one
//! - [`ids`]: newtypes for everything that is named or numbered
//! - [`keys`]: namespaces and the chain of block keys
//! - [`layout`]: how a block lies in a slot, checked
//! - [`objects`]: blocks that follow no other: their keys, and how their bytes lie in a slot
//! - [`pool`]: where the pages of an engine's own pool lie, checked
//! - [`refusal`]: why a call was refused, where its code does not say it
//! - [`v1`]: the generated messages of `proto/kvasir/v1`, and with the feature `services` their
//!   clients and servers

#![forbid(unsafe_code)]

mod digest;
mod ids;
pub mod keys;
mod layout;
pub mod objects;
mod pool;
pub mod refusal;

/// Generated from `proto/kvasir/v1/*.proto`; `tests/generated.rs` keeps it true.
#[allow(clippy::all, clippy::pedantic, missing_debug_implementations, unreachable_pub)]
pub mod v1 {
    include!("generated/kvasir.v1.rs");
}

/// Chunks of one prompt that are attended elsewhere, at most: rings have room for the queries of so many.
pub const ROUTED_CHUNKS_MAX: usize = 4;
/// Chunks of one prompt, at most.
pub const CHUNKS_MAX: usize = 64;

pub use digest::{BlockSetDigest, TierDigests};
pub use ids::{
    BlockKey, COPIES_MAX, Class, FieldError, Generation, Imm, Incarnation, InstanceId, Mark,
    Namespace, NodeId, Share, Side, SlotIndex, Tenant, TxId,
};
pub use layout::{LayoutError, SlotLayout, SlotRun};
pub use pool::{PoolLayout, PoolLayoutError, PoolRun};
