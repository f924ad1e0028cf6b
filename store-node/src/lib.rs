//! The daemon that owns a host's part of the cache.

pub mod attach;
pub mod config;

pub use config::Config;

/// Why a store node could not start or had to end.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The configuration cannot work: change what the sentence names.
    #[error("{0}")]
    Config(String),
    /// A port, socket or file is not to be had.
    #[error("{what}: {source}")]
    Io { what: String, source: std::io::Error },
}

/// Runs a store node until `shutdown` is cancelled; then it drains and ends.
///
/// # Errors
/// When it cannot start; each error is one sentence.
pub async fn run(
    config: Config,
    shutdown: tokio_util::sync::CancellationToken,
) -> Result<(), Error> {
    config.check().map_err(Error::Config)?;
    shutdown.cancelled().await;
    Ok(())
}
