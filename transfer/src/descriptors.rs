//! Passes file descriptors over a Unix socket (SCM_RIGHTS), together with a short payload.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags,
};

/// At most this many descriptors go with one payload.
pub const DESCRIPTORS_MAX: usize = 16;

/// Why descriptors could not be passed.
#[derive(Debug, thiserror::Error)]
pub enum DescriptorError {
    #[error("{0} file descriptors exceed the maximum of {DESCRIPTORS_MAX}")]
    TooMany(usize),
    #[error("file descriptors need a payload of at least one byte")]
    Empty,
    #[error("only a part of the message was sent or received")]
    Truncated,
    /// Try again when the socket is ready.
    #[error("the socket is not ready")]
    WouldBlock,
    /// The other side closed.
    #[error("the other side closed the connection")]
    Closed,
    #[error("the socket cannot pass file descriptors")]
    System(#[source] rustix::io::Errno),
}

impl From<rustix::io::Errno> for DescriptorError {
    fn from(errno: rustix::io::Errno) -> Self {
        match errno {
            rustix::io::Errno::AGAIN => DescriptorError::WouldBlock,
            rustix::io::Errno::PIPE | rustix::io::Errno::CONNRESET => DescriptorError::Closed,
            other => DescriptorError::System(other),
        }
    }
}

/// Sends the payload, at least one byte, with the descriptors.
///
/// # Errors
/// [`DescriptorError`]; after `Truncated` the connection is of no use any more.
pub fn send(
    socket: impl AsFd,
    payload: &[u8],
    descriptors: &[BorrowedFd<'_>],
) -> Result<(), DescriptorError> {
    if payload.is_empty() {
        return Err(DescriptorError::Empty);
    }
    if descriptors.len() > DESCRIPTORS_MAX {
        return Err(DescriptorError::TooMany(descriptors.len()));
    }
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !descriptors.is_empty() {
        let pushed = control.push(SendAncillaryMessage::ScmRights(descriptors));
        debug_assert!(pushed, "the space holds the largest number");
    }
    let slices = [IoSlice::new(payload)];
    let sent = loop {
        match rustix::net::sendmsg(&socket, &slices, &mut control, SendFlags::NOSIGNAL) {
            Err(rustix::io::Errno::INTR) => {}
            other => break other?,
        }
    };
    if sent == payload.len() { Ok(()) } else { Err(DescriptorError::Truncated) }
}

/// Receives at most `payload.len()` bytes and the descriptors that came with them. Returns how many
/// bytes there were, at least one.
///
/// # Errors
/// [`DescriptorError`]: `Closed` at the end of the stream.
pub fn recv(
    socket: impl AsFd,
    payload: &mut [u8],
) -> Result<(usize, Vec<OwnedFd>), DescriptorError> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let received = loop {
        let mut slices = [IoSliceMut::new(payload)];
        match rustix::net::recvmsg(&socket, &mut slices, &mut control, RecvFlags::CMSG_CLOEXEC) {
            Err(rustix::io::Errno::INTR) => {}
            other => break other?,
        }
    };
    let mut descriptors = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(fds) = message {
            descriptors.extend(fds);
        }
    }
    if received.bytes == 0 {
        return Err(DescriptorError::Closed);
    }
    if received.flags.contains(ReturnFlags::CTRUNC) {
        return Err(DescriptorError::Truncated);
    }
    Ok((received.bytes, descriptors))
}
