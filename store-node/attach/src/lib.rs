//! How processes on a store node's host share its memory: slot memory, control memory and the
//! descriptors that carry them.
//!
//! 1. [`mod@line`]: what every such process has: two rings, doorbells, and the connection that stands for it
//! 2. [`engine`]: what an engine links
//! 3. [`control`]: the control memory of one attach: header, progress word, load, two rings of
//!    [`kvasir_transfer::ring`]
//! 4. [`kvasir_transfer::doorbell`]: waking a sleeping side without system calls while both
//!    are awake, and without trusting it
//! 5. [`words`]: what either side reads of the other without a message; `tests/models` runs it under loom
//! 6. [`handover`]: descriptors over a Unix socket
//!
//! Clients of objects are in the package `kvasir-client`. The node's ends are in
//! `kvasir_store_node::node`; nothing that a process writes is trusted there.
#![forbid(unsafe_code)]

pub mod control;
mod engine;
mod error;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzzing;
pub mod handover;
pub mod line;
mod sync;
pub mod words;

pub use engine::{AttachOptions, EngineAttachment, Link, Receiver, Sender};
pub use error::{AttachError, with_causes};

/// The public futures of this package: boxed, so that their code is compiled here and not again in each
/// program that awaits them.
pub type BoxFuture<T> = std::pin::Pin<Box<dyn Future<Output = T> + Send>>;

/// The most an engine may give to `FinishPrefill`: a first token with its log probabilities, many
/// times over. The receiving node reserves as much for each share.
pub use kvasir_blocks::moving::tail::ENGINE_BYTES_MAX as TAIL_BYTES_MAX;
