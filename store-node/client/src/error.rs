//! Why a call had no effect, by what the caller can do.

use kvasir_attach::AttachError;
use kvasir_proto::v1;

/// Nothing was done.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Nobody answers there (yet): try again later.
    #[error("cannot reach a store node: {0}")]
    Unreachable(String),
    /// The node said no to the opening, and will say so again until something is set otherwise.
    #[error("the store node refused: {0}")]
    Refused(String),
    /// The node is gone or has expelled this client: open anew. Objects that are held may be read on.
    #[error("the store node stopped or expelled this client; open a new client")]
    Lost,
    /// There is no room: release objects, or try again later.
    #[error("the store node has no room: {0}")]
    NoCapacity(String),
    /// The node is draining: use another one.
    #[error("{0}")]
    Draining(String),
    /// More than one call takes: split it.
    #[error("{count} objects exceed the maximum of {count_max} per call; split it")]
    TooMany { count: usize, count_max: usize },
    /// It can never be put on this node.
    #[error("object {position} has {bytes} bytes, but a slot holds {bytes_max}")]
    TooLarge { position: usize, bytes: usize, bytes_max: usize },
    /// The request cannot be right.
    #[error("{0}")]
    Invalid(String),
    /// A node of another version, or a bug.
    #[error("the store node violated the protocol: {0}")]
    Protocol(String),
}

impl From<AttachError> for Error {
    fn from(error: AttachError) -> Self {
        let why = error.to_string();
        match error {
            AttachError::Unreachable { .. } => Error::Unreachable(why),
            AttachError::Refused(why) => Error::Refused(why),
            AttachError::Lost => Error::Lost,
            AttachError::Full => Error::NoCapacity(why),
            AttachError::TooLong { .. } => Error::Invalid(why),
            AttachError::Protocol(why) => Error::Protocol(why),
        }
    }
}

impl From<v1::RefusedObjects> for Error {
    fn from(refused: v1::RefusedObjects) -> Self {
        match refused.refusal() {
            v1::ObjectRefusal::NoCapacity => Error::NoCapacity(refused.reason),
            v1::ObjectRefusal::Unavailable => Error::Draining(refused.reason),
            v1::ObjectRefusal::Invalid => Error::Invalid(refused.reason),
            v1::ObjectRefusal::Unreachable => Error::Unreachable(refused.reason),
            v1::ObjectRefusal::NoExchange => Error::Refused(refused.reason),
            v1::ObjectRefusal::Unspecified => Error::Protocol(refused.reason),
        }
    }
}
