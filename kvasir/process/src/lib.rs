//! The memory allocator and the writer of log lines of every process of the binary.
//!
//! They run for each token, so they are compiled with optimisation, while the command lines in `kvasir/` are not
//! (docs/decisions/0063-builds-optimise-only-critical-code.md).
#![forbid(unsafe_code)]

use std::io::IsTerminal;

use tracing_subscriber::EnvFilter;

/// The reasons are in docs/decisions/0040-the-binary-uses-mimalloc.md.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Writes log lines to standard error, in colour if it is a terminal. The filter is `flag`; without it, the environment
/// variable `RUST_LOG`; without that or if it is not a valid filter, `default`.
///
/// # Errors
///
/// A sentence for the user if `flag` is not a valid filter.
///
/// # Panics
///
/// Panics if the process already writes log lines.
pub fn start_logging(flag: Option<&str>, default: &str) -> Result<(), String> {
    let filter = match flag {
        Some(directives) => EnvFilter::try_new(directives)
            .map_err(|error| format!("--log {directives:?} is not a log filter: {error}"))?,
        None => EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new(default)),
    };
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .init();
    Ok(())
}
