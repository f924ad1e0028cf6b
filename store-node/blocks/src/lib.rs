//! The store node's core: block states, transactions, leases, eviction, pushes; no I/O.
//!
//! [`Blocks`] owns a node's block table. It decides; the shell executes: commands and the time go
//! in, answers and [`Action`]s come out. It knows slots by number and blocks by key, and never sees
//! a byte of them.
//!
//! Reading path:
//! 1. [`Blocks`] (`blocks.rs`): the owner, and the order of its calls; `api.rs`: its words.
//! 2. `share_state.rs` and `slot_state.rs`: the two state machines, as pure functions; their whole
//!    tables are in `tests/golden/` and `docs/concepts/slot-states.md`.
//! 3. `blocks/allocate.rs`, `engine.rs`, `arrival.rs`, `ending.rs`: what the owner does with them.
//! 4. `blocks/tiers.rs`: what sinks to the SSD and rises from it; `ssd.rs` and `tier_work.rs`: what
//!    it remembers for that. `blocks/contexts.rs`: what is kept for tenants, and since when and until when;
//!    `ends.rs`: the marks that say so.
//!    `blocks/bucket.rs`: what is sent to an object store; `bucket.rs`: what is known of it.
//!    `blocks/prefetch.rs`: what rises on a hint.
//!    `blocks/objects.rs`: objects of clients that are no engines; `unseen.rs`: those put before all is known.
//!    `unreached.rs`, `blocks/partial.rs`: an SSD of which a part cannot be read.
//!    `blocks/pools.rs`: engines' own pages; `pools.rs`: who may touch each; `pool_set.rs`: what all engines have there
//!    together; `pool_work.rs`: what is being filled.
//!    `blocks/carries.rs`: what is computed in a pool for a share; `carries.rs`: what it remembers.
//! 5. `blocks/admin.rs`: what administrators ask for; `admin.rs`: its words.
//!    `blocks/replication.rs`: copies on other nodes, and draining; `replicas.rs`: what it remembers.
//!    `blocks/copies.rs`: contexts that are kept on several nodes; `copies.rs`: what it remembers of those.
//! 6. [`moving`]: pushes between nodes, and their ends; copies.
//! 7. `cache.rs`: slots (`slots.rs`), index and eviction order (`index.rs`, `eviction.rs`) and event
//!    log (`events.rs`), which change together; `share.rs`, `gets.rs`, `imms.rs`, `ended.rs`: the rest
//!    of what it remembers.
//! 8. `blocks/invariants.rs`: what must hold between two calls.
#![forbid(unsafe_code)]

mod admin;
mod api;
mod blocks;
mod bucket;
mod cache;
mod carries;
mod compact;
mod copies;
mod ended;
mod ends;
mod events;
mod eviction;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzzing;
mod gets;
mod imms;
mod index;
pub mod moving;
mod pool_set;
mod pool_work;
mod pools;
mod replicas;
mod share;
mod share_state;
mod slot_state;
mod slots;
mod ssd;
mod tier_work;
mod unreached;
mod unseen;

pub use admin::{
    AdminPin, AdminPinError, DramCopy, Evicted, Holder, Inspection, ListFilter, ListFrom, Listed,
    ListedBlock, PIN_MS_MAX,
};
pub use api::{
    AbortOutcome, AbortReason, Action, Allocate, AllocateError, Allocated, Arrival, AttachEpoch,
    BindError, Binding, BlockChange, BlockView, Bound, Busy, Carried, Changes, Commit, ContextName,
    Counts, GetError, GrowError, KeepError, KeepRequest, ObjectAt, Options, Outcome, PoolError,
    PrefetchError, Prefetched, ReserveObjects, RiseError, ShareError, ShareView, SinkError,
    Snapshot, SsdSize, Tier, WritePageError,
};
pub use blocks::Blocks;
pub use bucket::{BucketOptions, UploadFrom};
pub use copies::{CopiedContext, HeldCopies, PeerCopies};
pub use ends::PersistedContext;
pub use eviction::Eviction;
pub use replicas::{
    ChangeReplicaError, CopyCause, CopyError, CopyPlan, DrainRequest, DrainView, Peer, PeerView,
    ReplicaOptions,
};
pub use ssd::SsdBlock;
