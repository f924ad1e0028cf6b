//! The scheduler and the OpenAI-compatible front door.

mod config;
mod error;

pub use config::{Config, ModelConfig};
pub use error::Error;

/// Serves until `shutdown` is cancelled, then drains and returns.
///
/// # Errors
/// [`Error`] when the configuration is wrong, an address is taken or a model cannot be read.
pub async fn run(
    config: Config,
    shutdown: tokio_util::sync::CancellationToken,
) -> Result<(), Error> {
    config.check().map_err(Error::Config)?;
    shutdown.cancelled().await;
    Ok(())
}
