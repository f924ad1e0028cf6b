//! Why the conductor could not start or go on. What a client did wrong is in `openai::error`.

use std::net::SocketAddr;

/// Why [`crate::run`] ended without being asked to.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The configuration cannot work; the sentence names the field.
    #[error("invalid configuration of the conductor: {0}")]
    Config(String),
    /// An address could not be bound.
    #[error(
        "the conductor cannot listen on {address}: {source}; free the address or configure another one"
    )]
    Bind { address: SocketAddr, source: std::io::Error },
    /// The files of a model could not be read.
    #[error("model \"{model}\": {reason}")]
    Model { model: String, reason: String },
    /// The file of API keys could not be taken.
    #[error("API keys: {0}")]
    ApiKeys(String),
    /// Certificate or key could not be taken.
    #[error("TLS: {0}")]
    Tls(String),
    /// A metric was registered twice.
    #[error("cannot register metrics: {0}")]
    Metrics(#[from] prometheus::Error),
    /// The gRPC server stopped.
    #[error("the gRPC server of the conductor failed: {0}")]
    Grpc(#[from] tonic::transport::Error),
}
