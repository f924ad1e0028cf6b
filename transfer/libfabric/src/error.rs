//! What can go wrong, by what the caller can do about it.

use std::fmt;

use crate::bindings::*;

/// What libfabric said.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure {
    /// The call that failed, as libfabric names it.
    pub call: &'static str,
    /// libfabric's error number, positive; below 256 it is the system's.
    pub errno: i32,
    pub text: String,
    /// What the provider added, where it did: its own number and text.
    pub provider: Option<(i32, String)>,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {} ({})", self.call, self.text, self.errno)?;
        match &self.provider {
            Some((number, text)) if !text.is_empty() => write!(f, "; provider: {text} ({number})"),
            _ => Ok(()),
        }
    }
}

impl std::error::Error for Failure {}

/// Why something could not be opened or registered.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum OpenError {
    /// Choose another provider, or ask for less.
    #[error("the libfabric provider does not support the call; choose another provider")]
    Unsupported(#[source] Failure),
    /// Close something, or raise a limit (locked memory, descriptors, the device's own).
    #[error("the system or the device has no resources left: close something or raise a limit")]
    Exhausted(#[source] Failure),
    /// A person must look: permissions, a device that is down, a wrong address.
    #[error(
        "the libfabric provider refused the call; check the device, its permissions and its address"
    )]
    Refused(#[source] Failure),
}

impl From<Failure> for OpenError {
    fn from(failure: Failure) -> Self {
        match failure.errno {
            FI_ENOSYS | FI_EOPNOTSUPP | FI_ENOPROTOOPT | FI_ENODATA => {
                OpenError::Unsupported(failure)
            }
            FI_ENOMEM | FI_EMFILE | FI_ENOSPC | FI_EAGAIN => OpenError::Exhausted(failure),
            _ => OpenError::Refused(failure),
        }
    }
}

/// A range that does not lie in its region.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("offset {offset} with {bytes} bytes is outside the region of {region_bytes} bytes")]
pub struct OutOfRange {
    pub offset: u64,
    pub bytes: u64,
    pub region_bytes: u64,
}

/// What an operation waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Busy {
    /// As many operations are outstanding as the queue was opened for.
    Outstanding,
    /// The provider takes no more now: its queue is full, or the connection is being made.
    Provider,
}

/// Why an operation was not posted. Nothing happened, and nothing will.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PostError {
    /// Poll the completion queue, which is what makes room, and post again.
    #[error("busy ({0:?}): poll the completion queue and post again")]
    Busy(Busy),
    /// Split it.
    #[error("{bytes} bytes are more than the {bytes_max} that one such operation can carry")]
    TooLong { bytes: usize, bytes_max: usize },
    /// The region was registered without what this operation does to it.
    #[error("the local region was not registered for this operation")]
    Access,
    /// Treat the peer as lost.
    #[error("cannot reach the peer")]
    PeerGone(#[source] Failure),
    /// A person must look.
    #[error(
        "the libfabric provider refused the operation; set FI_LOG_LEVEL=warn to see its reason"
    )]
    Refused(#[source] Failure),
}

/// Why an operation that was posted failed. What of it landed is not known.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum OperationError {
    /// The peer is gone or the way to it broke, maybe because it refused another operation. Treat the
    /// path as lost.
    #[error("the peer is gone, or the path to it failed")]
    PeerGone(#[source] Failure),
    /// The other side does not let this key or range be accessed (any more).
    #[error("the peer refused the access")]
    RemoteAccess(#[source] Failure),
    /// The message was longer than the buffer that received it.
    #[error("the message was longer than the receiver's buffer")]
    Truncated(#[source] Failure),
    /// Anything else; the text says what.
    #[error("the libfabric operation failed")]
    Other(#[source] Failure),
}

impl OperationError {
    pub fn failure(&self) -> &Failure {
        match self {
            OperationError::PeerGone(failure)
            | OperationError::RemoteAccess(failure)
            | OperationError::Truncated(failure)
            | OperationError::Other(failure) => failure,
        }
    }
}

impl From<Failure> for OperationError {
    fn from(failure: Failure) -> Self {
        match failure.errno {
            errno if is_peer_gone(errno) => OperationError::PeerGone(failure),
            // Nobody cancels here: it is how providers over connections end what was under way when
            // one broke.
            FI_ECANCELED => OperationError::PeerGone(failure),
            FI_EACCES | FI_EPERM | FI_EKEYREJECTED | FI_EINVAL | FI_EFAULT | FI_EREMOTEIO => {
                OperationError::RemoteAccess(failure)
            }
            FI_ETRUNC | FI_EMSGSIZE | FI_ETOOSMALL => OperationError::Truncated(failure),
            _ => OperationError::Other(failure),
        }
    }
}

/// The completion queue itself failed: close it and the endpoints on it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the completion queue failed; close it and its endpoints")]
pub struct QueueError(#[source] pub Failure);

/// Whether an error number means that the other end, or the way to it, is not there.
pub(crate) fn is_peer_gone(errno: i32) -> bool {
    matches!(
        errno,
        FI_ECONNABORTED
            | FI_ECONNREFUSED
            | FI_ECONNRESET
            | FI_EHOSTDOWN
            | FI_EHOSTUNREACH
            | FI_ENETDOWN
            | FI_ENETUNREACH
            | FI_ENOTCONN
            | FI_ESHUTDOWN
            | FI_ETIMEDOUT
    )
}
