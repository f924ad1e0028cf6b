//! The store node's core: block states, transactions, leases, eviction; no I/O.
//!
//! [`Blocks`] owns a node's block table. It decides; the shell executes: commands and the time go
//! in, answers and [`Action`]s come out. It knows slots by number and blocks by key, and never sees
//! a byte of them.
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

pub use api::{
    AbortOutcome, AbortReason, Action, Allocate, AllocateError, Allocated, Arrival, AttachEpoch,
    BindError, Binding, BlockChange, BlockView, Bound, Busy, Changes, Commit, Counts, GetError,
    GrowError, Options, Outcome, ShareError, ShareView, Snapshot,
};
pub use blocks::Blocks;
