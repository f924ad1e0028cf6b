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

/// Writes the log lines that `filter` selects to standard error, in colour if it is a terminal. `source` names the filter
/// in errors: the flag or the environment variable that it comes from.
///
/// # Errors
///
/// A sentence for the user if the filter is invalid.
///
/// # Panics
///
/// Panics if the process already writes log lines.
pub fn start_logging(source: &str, filter: &str) -> Result<(), String> {
    tracing_subscriber::fmt()
        .with_env_filter(parse(source, filter)?)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .init();
    Ok(())
}

fn parse(source: &str, filter: &str) -> Result<EnvFilter, String> {
    EnvFilter::try_new(filter).map_err(|error| {
        format!("{source} {filter:?} is not a log filter: {error}; write for example \"info\" or \"warn,kvasir_conductor=debug\"")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_invalid_filter_is_refused_with_its_source_and_an_example() {
        let error = parse("--log", "kvasir=loud").expect_err("`loud` is not a level");
        assert!(error.starts_with("--log \"kvasir=loud\" is not a log filter: "), "{error}");
        assert!(error.contains("warn,kvasir_conductor=debug"), "{error}");
        assert!(parse("RUST_LOG", "warn,kvasir_conductor=debug").is_ok());
    }
}
