//! The daemon that owns a host's part of the cache: it keeps the slots, lets an engine on the same
//! host use them, and moves pages between nodes.
//!
//! - [`config`]: what can be set
//! - [`mod@run`]: starting and ending
//! - `kvasir-attach`, a package of its own: what engines and clients link, and the memory they share with the node
//! - `ssd`: the thread beside the disk; `bucket`: the task that talks to an object store
//! - `pool`: pages of engines' own, and the thread that copies them
//! - `node`: the one thread that decides; `grpc`, `routes`, `admin`, `http` and `attach_server` only carry calls to it
//!
//! Reading path: `run`, then `node` and its `owner`.

mod admin;
mod attach_server;
mod backlog;
mod bucket;
mod clock;
pub mod config;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzzing;
mod grpc;
mod http;
mod layer_log;
mod metrics;
mod node;
mod pool;
mod routes;
mod run;
mod ssd;

pub use run::{Running, run, start};
pub use ssd::uring::try_io_uring;

/// Why a store node could not start or had to end.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The configuration cannot work: change what the sentence names.
    #[error("{0}")]
    Config(String),
    /// A port, socket or file is not to be had.
    #[error("{what}: {source}")]
    Io { what: String, source: std::io::Error },
    /// The host has not that much memory: make `dram_bytes` smaller.
    #[error("cannot allocate the memory for slots or tails: {0}")]
    Memory(#[source] kvasir_transfer::memory::MemoryError),
    #[error("cannot start the transfer engine: {0}")]
    Transfer(#[from] kvasir_transfer::StartError),
    #[error("cannot register the memory: {0}")]
    Register(#[from] kvasir_transfer::RegisterError),
    #[error("cannot serve routed queries: {0}")]
    Routes(#[from] kvasir_route::holder::HolderError),
    #[error("cannot register the metrics: {0}")]
    Metrics(#[from] prometheus::Error),
    /// A bug: the log says more.
    #[error("the node's thread ended unexpectedly; see the log")]
    Ended,
    /// A bug: the log says more. Nothing can be moved any more; start the node anew.
    #[error("the transfer engine stopped; restart the node")]
    TransferEnded,
}
