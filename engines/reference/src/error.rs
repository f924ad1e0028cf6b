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
    #[error("cannot listen on {address}: {source}")]
    Listen { address: SocketAddr, source: std::io::Error },
    /// Trying again would not help.
    #[error("the store node refused this engine: {0}")]
    Refused(String),
    #[error("cannot write the layer log {}: {source}", path.display())]
    LayerLog { path: PathBuf, source: std::io::Error },
    #[error("the gRPC server stopped: {0}")]
    Serve(#[from] tonic::transport::Error),
    #[error("cannot start {what}: {source}")]
    System { what: &'static str, source: std::io::Error },
    #[error("the compute thread ended unexpectedly")]
    Compute,
}
