//! DeepSeek-V2 on the CPU: a Hugging Face folder in, logits out.
//!
//! The latent cache is not owned here: its rows lie in slot memory that a store node made, see
//! [`Cache`]. Nothing in this module knows of nodes, transactions or sockets.
//!
//! Reading path: `config` (what config.json must say), `files` and `weights` (what the folder must
//! hold), `forward` (a step), `holes` and `elsewhere` (rows that are not here), `attention`,
//! `indexer` and `selection` (which rows a token attends), `moe` and `mlp` (its layers), `rope` and `math`
//! (their parts), `splice` (rows used again at another place), `cache` (the rim to the shared memory),
//! `fingerprint`.

mod attention;
mod cache;
mod config;
mod elsewhere;
mod error;
mod files;
mod fingerprint;
mod forward;
mod holes;
mod indexer;
mod math;
mod mlp;
mod moe;
mod rope;
mod selection;
mod splice;
mod weights;

pub use cache::{Cache, CacheSpec, KvDtype};
pub use config::{ExpertsConfig, Groups, IndexerConfig, ModelConfig, Weighting};
pub use elsewhere::{Elsewhere, IndexQueries, LayerQueries, SequenceIndex, SequenceQueries};
pub use error::{ModelError, SpliceError, StepError};
pub use forward::{Logits, SequenceStep, Workspace};
pub use holes::Hole;
pub use rope::{RopeConfig, Yarn};
pub use splice::Splice;
pub use weights::{LoadOptions, Model, ModelDescription};
