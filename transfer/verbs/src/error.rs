//! Why a call failed, told apart by what the caller can do.

use std::io;

use rustix::io::Errno;

/// A call into libibverbs, and through it the driver and the kernel, failed.
#[derive(Debug, thiserror::Error)]
pub enum VerbsError {
    /// Do without: it will not work later either.
    #[error("{call}: not supported by this device, its driver or this kernel")]
    Unsupported {
        call: &'static str,
        #[source]
        source: io::Error,
    },
    /// Free something, or have the limit raised; it may work later.
    #[error(
        "{call}: out of memory, of lockable memory (`ulimit -l`) or of resources of the device"
    )]
    Exhausted {
        call: &'static str,
        #[source]
        source: io::Error,
    },
    /// A person must give the process the right.
    #[error("{call}: not permitted; the process needs access to /dev/infiniband")]
    Denied {
        call: &'static str,
        #[source]
        source: io::Error,
    },
    /// Close what was opened on the device, and leave it.
    #[error("{call}: the device has failed or was removed")]
    DeviceLost {
        call: &'static str,
        #[source]
        source: io::Error,
    },
    /// The arguments exceed what the device can do, or do not fit the state of the object.
    #[error("{call}: refused; the arguments exceed the device's limits or do not fit the state")]
    Refused {
        call: &'static str,
        #[source]
        source: io::Error,
    },
    /// Make a larger completion queue, or fewer or shorter queue pairs on it.
    #[error(
        "the completion queue has room for the completions of {free} more work requests, but the \
         queue pair may have {wanted}"
    )]
    CompletionQueueTooSmall { wanted: u32, free: u32 },
    /// The range does not lie in the memory.
    #[error(transparent)]
    Range(#[from] RangeError),
}

impl VerbsError {
    pub(crate) fn new(call: &'static str, source: io::Error) -> Self {
        let errno = Errno::from_io_error(&source).unwrap_or(Errno::IO);
        match errno {
            Errno::OPNOTSUPP | Errno::NOSYS | Errno::PROTONOSUPPORT | Errno::NOTTY => {
                VerbsError::Unsupported { call, source }
            }
            Errno::NOMEM | Errno::NOSPC | Errno::MFILE | Errno::NFILE | Errno::AGAIN => {
                VerbsError::Exhausted { call, source }
            }
            Errno::PERM | Errno::ACCESS => VerbsError::Denied { call, source },
            Errno::IO | Errno::NODEV | Errno::NXIO => VerbsError::DeviceLost { call, source },
            _ => VerbsError::Refused { call, source },
        }
    }

    /// For calls that set `errno`.
    pub(crate) fn last(call: &'static str) -> Self {
        VerbsError::new(call, io::Error::last_os_error())
    }

    /// For calls that answer with an `errno`, which some drivers negate.
    pub(crate) fn check(call: &'static str, answer: i32) -> Result<(), VerbsError> {
        match answer {
            0 => Ok(()),
            // What sets `errno` too answers -1, which as an `errno` would be a missing permission.
            -1 => Err(VerbsError::last(call)),
            errno => {
                Err(VerbsError::new(call, io::Error::from_raw_os_error(errno.saturating_abs())))
            }
        }
    }
}

/// A range that does not lie in its memory or region, or is longer than one message may be.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "{bytes} bytes at offset {offset} exceed the available {available} bytes or the maximum of one \
     message"
)]
pub struct RangeError {
    pub offset: u64,
    pub bytes: u64,
    pub available: u64,
}

/// Nothing, or only the beginning, of what was posted has been taken.
#[derive(Debug, thiserror::Error)]
pub enum PostError {
    /// Nothing was posted. Poll the completion queue, retire what comes, and post again.
    #[error("the queue has room for {room} more work requests, not for {wanted}")]
    Full { wanted: usize, room: usize },
    /// Nothing was posted. Connect first; drivers do not all notice.
    #[error("the queue pair is not connected")]
    NotConnected,
    /// Nothing was posted. The queue pair had an error or was cut off: make another.
    #[error("the queue pair is in the error state and accepts no more work")]
    Broken,
    /// Nothing was posted. Use registered memory, or ask for more when making the queue pair.
    #[error("{bytes} inline bytes exceed the maximum of the queue pair ({bytes_max})")]
    InlineTooLong { bytes: usize, bytes_max: usize },
    /// Nothing was posted.
    #[error(
        "{slices} slices of a work request exceed the maximum of the queue pair ({slices_max})"
    )]
    TooManySlices { slices: usize, slices_max: usize },
    /// The device took the first `posted`, whose completions will come, and refused the next.
    #[error("the device took {posted} work requests and refused the next")]
    Refused {
        posted: usize,
        #[source]
        source: VerbsError,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kind(errno: Errno) -> &'static str {
        match VerbsError::check("call", errno.raw_os_error()) {
            Ok(()) => "fine",
            Err(VerbsError::Unsupported { .. }) => "unsupported",
            Err(VerbsError::Exhausted { .. }) => "exhausted",
            Err(VerbsError::Denied { .. }) => "denied",
            Err(VerbsError::DeviceLost { .. }) => "lost",
            Err(_) => "refused",
        }
    }

    #[test]
    fn errors_are_told_apart_by_what_the_caller_can_do() {
        assert_eq!(kind(Errno::OPNOTSUPP), "unsupported");
        assert_eq!(kind(Errno::NOMEM), "exhausted");
        assert_eq!(kind(Errno::ACCESS), "denied");
        assert_eq!(kind(Errno::NODEV), "lost");
        assert_eq!(kind(Errno::INVAL), "refused");
        assert!(VerbsError::check("call", 0).is_ok());
    }

    #[test]
    fn an_answer_may_be_negated() {
        let error = VerbsError::check("call", -Errno::NOMEM.raw_os_error());
        assert!(matches!(error, Err(VerbsError::Exhausted { .. })));
    }
}
