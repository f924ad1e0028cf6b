//! Why a call had no effect, by what the caller can do.

use kvasir_attach::AttachError;
use kvasir_proto::v1;

/// Nothing was done.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Nobody answers there (yet): try again later.
    #[error("no store node can be reached: {0}")]
    Unreachable(String),
    /// The node said no to the opening, and will say so again until something is set otherwise.
    #[error("the store node refused: {0}")]
    Refused(String),
    /// The node is gone or has expelled this client: open anew. Objects that are held may be read on.
    #[error("the store node is gone or has expelled this client")]
    Lost,
    /// There is no room: release objects, or try again later.
    #[error("no room: {0}")]
    NoSpace(String),
    /// The node is draining: use another one.
    #[error("{0}")]
    Draining(String),
    /// More than one call takes: split it.
    #[error("{count} objects in one call, which takes {count_max}")]
    TooMany { count: usize, count_max: usize },
    /// It can never be put on this node.
    #[error("object {position} has {bytes} bytes, and a slot holds {bytes_max}")]
    TooLarge { position: usize, bytes: usize, bytes_max: usize },
    /// The request cannot be right.
    #[error("{0}")]
    Invalid(String),
    /// A node of another version, or a bug.
    #[error("the store node broke the protocol: {0}")]
    Protocol(String),
}

impl From<AttachError> for Error {
    fn from(error: AttachError) -> Self {
        let why = error.to_string();
        match error {
            AttachError::Unreachable { .. } => Error::Unreachable(why),
            AttachError::Refused(why) => Error::Refused(why),
            AttachError::Lost => Error::Lost,
            AttachError::Full => Error::NoSpace(why),
            AttachError::TooLong { .. } => Error::Invalid(why),
            AttachError::Protocol(why) => Error::Protocol(why),
        }
    }
}

impl From<v1::RefusedObjects> for Error {
    fn from(refused: v1::RefusedObjects) -> Self {
        match refused.refusal() {
            v1::ObjectRefusal::NoSpace => Error::NoSpace(refused.why),
            v1::ObjectRefusal::Unavailable => Error::Draining(refused.why),
            v1::ObjectRefusal::Invalid => Error::Invalid(refused.why),
            v1::ObjectRefusal::Unreachable => Error::Unreachable(refused.why),
            v1::ObjectRefusal::NoExchange => Error::Refused(refused.why),
            v1::ObjectRefusal::Unspecified => Error::Protocol(refused.why),
        }
    }
}
