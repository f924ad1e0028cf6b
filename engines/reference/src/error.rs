//! Why the engine did not start or did not go on. Each is one sentence for the operator.

#![forbid(unsafe_code)]

use std::net::SocketAddr;
use std::path::PathBuf;

use crate::model::ModelError;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("invalid engine configuration: {0}")]
    Config(&'static str),
    #[error("cannot load the model: {0}")]
    Model(#[from] ModelError),
    #[error("`routes.ranks` is {ranks}; it must divide the model's {heads} heads")]
    Ranks { ranks: u32, heads: usize },
    #[error("cannot use the tokenizer {}: {why}", path.display())]
    Tokenizer { path: PathBuf, why: String },
    #[error(
        "the engine cannot listen on {address}: {source}; free the address or configure another one"
    )]
    Listen { address: SocketAddr, source: std::io::Error },
    /// Trying again would not help.
    #[error("the store node refused this engine: {0}")]
    Refused(String),
    #[error("cannot write the layer log {}: {source}; check `layer_log_file`", path.display())]
    LayerLog { path: PathBuf, source: std::io::Error },
    #[error("the gRPC server of the engine stopped: {0}")]
    Serve(#[from] tonic::transport::Error),
    #[error("the engine cannot start {what}: {source}")]
    System { what: &'static str, source: std::io::Error },
    #[error("the compute thread of the engine ended unexpectedly; see the log")]
    Compute,
}
