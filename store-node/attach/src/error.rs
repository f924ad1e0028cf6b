//! The error of this package.

use std::path::PathBuf;

use kvasir_transfer::memory::MemoryError;
use kvasir_transfer::ring::{Corrupt, PushError};

use crate::control::ControlError;

/// Why an attach failed or ended.
#[derive(Debug, thiserror::Error)]
pub enum AttachError {
    /// No process answers at this address (yet): try again later.
    #[error(
        "no store node answers at {path}: {reason}; check that the node runs and that both use the same `attach_dir`"
    )]
    Unreachable { path: PathBuf, reason: String },
    /// The node refused the attach with this reason. Attach again only after a change of the configuration.
    #[error("the store node refused the attach: {0}")]
    Refused(String),
    /// The node is gone or has detached this engine: attach again.
    #[error("the store node stopped or detached this engine; attach again")]
    Lost,
    /// The node has not taken messages for 50 ms: it is overloaded or stuck.
    #[error("the ring to the store node is full: the node is overloaded or stuck")]
    Full,
    /// Longer than a ring takes: split it.
    #[error(
        "a message of {bytes} bytes exceeds the maximum of the ring ({bytes_max} bytes); split it"
    )]
    TooLong { bytes: usize, bytes_max: usize },
    #[error("the store node violated the protocol: {0}")]
    Protocol(String),
}

impl From<PushError> for AttachError {
    fn from(error: PushError) -> Self {
        match error {
            PushError::Full => AttachError::Full,
            PushError::TooLong { bytes, max } => AttachError::TooLong { bytes, bytes_max: max },
            PushError::Corrupt(_) => AttachError::Protocol(error.to_string()),
        }
    }
}

impl From<Corrupt> for AttachError {
    fn from(error: Corrupt) -> Self {
        AttachError::Protocol(error.to_string())
    }
}

impl From<MemoryError> for AttachError {
    fn from(error: MemoryError) -> Self {
        AttachError::Protocol(format!("cannot map the slot memory: {error}"))
    }
}

impl From<ControlError> for AttachError {
    fn from(error: ControlError) -> Self {
        AttachError::Protocol(error.to_string())
    }
}

/// One line: an error and its causes, outermost first. A `tonic::transport::Error` alone says only
/// "transport error". A cause that its effect already quotes is left out.
pub fn with_causes(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(inner) = cause {
        let reason = inner.to_string();
        if !text.contains(&reason) {
            text = format!("{text}: {reason}");
        }
        cause = inner.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("{text}")]
    struct Caused {
        text: &'static str,
        source: Option<Box<Caused>>,
    }

    #[test]
    fn an_error_names_each_cause_once() {
        let cause = |text, source| Caused { text, source };
        let inner = cause("connection refused", None);
        let middle = cause("cannot connect", Some(Box::new(inner)));
        let outer = cause("cannot reach the holder: cannot connect", Some(Box::new(middle)));
        assert_eq!(
            with_causes(&outer),
            "cannot reach the holder: cannot connect: connection refused"
        );
    }
}
