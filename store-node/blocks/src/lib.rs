//! The store node's core: block states, transactions, leases, eviction; no I/O.
//!
//! [`Blocks`] owns a node's block table. It decides; the shell executes: commands and the time go
//! in, answers and [`Action`]s come out. It knows slots by number and blocks by key, and never sees
//! a byte of them.
//!
//! Reading path:
//! 1. [`Blocks`] (`blocks.rs`): the owner, and the order of its calls; `api.rs`: its words.
//! 2. `share_state.rs` and `slot_state.rs`: the two state machines, as pure functions; their whole
//!    tables are in `tests/golden/`.
//! 3. `blocks/allocate.rs`, `engine.rs`, `arrival.rs`, `ending.rs`: what the owner does with them.
//! 4. `blocks/tiers.rs`: what sinks to the SSD and rises from it; `ssd.rs` and `tier_work.rs`: what
//!    it remembers for that.
//! 5. `cache.rs`: slots (`slots.rs`), index and eviction order (`index.rs`) and event log
//!    (`events.rs`), which change together; `share.rs`, `gets.rs`, `imms.rs`, `ended.rs`: the rest
//!    of what it remembers.
//! 6. `blocks/invariants.rs`: what must hold between two calls.
#![forbid(unsafe_code)]

mod api;
mod blocks;
mod cache;
mod ended;
mod events;
mod gets;
mod imms;
mod index;
mod share;
mod share_state;
mod slot_state;
mod slots;
mod ssd;
mod tier_work;

pub use api::{
    AbortOutcome, AbortReason, Action, Allocate, AllocateError, Allocated, Arrival, AttachEpoch,
    BindError, Binding, BlockChange, BlockView, Bound, Busy, Changes, Commit, Counts, GetError,
    GrowError, KeepError, KeepRequest, Options, Outcome, RiseError, ShareError, ShareView,
    SinkError, Snapshot, SsdSize, Tier,
};
pub use blocks::Blocks;
pub use ssd::SsdBlock;
