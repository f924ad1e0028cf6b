//! The scheduler and the OpenAI-compatible front door. Stateless: all truth is on the store nodes,
//! and several conductors at once are normal. It never sees KV bytes.
//!
//! Reading path:
//! 1. [`Config`], [`run`]: what may be set, and the conductor's life
//! 2. `http`: connections, bodies, routes, each with its bounds
//! 3. `openai`: requests are checked, answers are written
//! 4. `text`: chat templates and tokenizers
//! 5. `serve`: one answer on the cluster, from its place to its last token, and its undoing
//! 6. [`cluster`]: the picture of the nodes, around the placement core in `kvasir-placement`

#![forbid(unsafe_code)]

pub mod cluster;
mod config;
mod error;
mod http;
mod metrics;
mod openai;
mod run;
mod serve;
mod text;

pub use config::{Config, ModelConfig};
pub use error::Error;
pub use run::{Conductor, run};
