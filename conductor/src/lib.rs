//! The scheduler and the OpenAI-compatible front door. Stateless: all truth is on the store nodes,
//! and several conductors at once are normal. It never sees KV bytes.
//!
//! Reading path:
//! 1. [`Config`], [`run`]: what may be set, and the conductor's life
//! 2. `http`: connections, bodies, routes, each with its bounds
//! 3. `access`: API keys and quotas; `reload`: files that may change
//! 4. `openai`: requests are checked, answers are written; `openapi`: how both look
//! 5. `text`: chat templates and tokenizers
//! 6. `proxy`: models of plain OpenAI servers, whose requests are passed on
//! 7. `serve`: one answer on the cluster, from its place to its last token, and its undoing
//! 8. `contexts`: prompts that store nodes have promised to keep
//! 9. `watch`: what operators look at
//! 10. [`cluster`]: the picture of the nodes, around the placement core in `kvasir-placement`

#![forbid(unsafe_code)]

mod access;
pub mod cluster;
mod config;
mod contexts;
mod error;
mod http;
mod metrics;
mod openai;
mod openapi;
mod proxy;
mod reload;
mod run;
mod serve;
mod text;
mod watch;

pub use config::{BackendConfig, Config, ModelConfig, TlsConfig};
pub use error::Error;
pub use openapi::openapi_document;
pub use run::{Conductor, run};

pub use crate::config::{
    AdmissionQueueConfig, BalanceConfig, BalanceMode, ContextsConfig, RoutesConfig,
};
