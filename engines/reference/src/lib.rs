//! An MLA transformer on the CPU that attaches to a store node like any engine. Its pages are slots
//! of the node's memory: what it computes is cached, pushed and fetched without a copy.
//!
//! Reading path:
//! 1. [`run`]: load, bind, attach, serve, drain
//! 2. `service`: the `Engine` gRPC service; a checked `request` becomes a job for the compute thread
//! 3. `worker`: the compute thread: takes jobs and node messages, steps, sleeps
//! 4. `scheduler`: continuous batching; its `sequence` states, its
//!    `plan` of a step. It knows the model and the node only through `ports`
//! 5. `routes`: blocks that stay on other nodes, and are attended there
//! 6. `sampling` and `text`: logits to tokens, tokens to text
//! 7. [`model`]: the transformer itself
//! 8. `attach`, `tail`, `metrics`, `layer_log`: the node's end, the hand-over, what is seen
//!
//! What must hold: a decode leg computes no prompt token; a share's slots are not touched after its
//! `Release` was sent; every call ends in a definite state.

mod admission;
mod attach;
mod config;
mod error;
mod events;
#[cfg(test)]
mod fakes;
mod http;
mod inbox;
mod layer_log;
mod metrics;
pub mod model;
mod ports;
mod request;
mod routes;
mod run;
mod sampling;
mod scheduler;
mod service;
mod tail;
mod text;
mod worker;

pub use config::{Config, Precision, Role, Routes};
pub use error::Error;
pub use run::run;
