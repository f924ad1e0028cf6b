//! The tcp domain: works everywhere and lands payloads directly in the target (under TLS it decrypts them
//! first, see [`tls`]). A connection carries
//! writes and messages one way, and acknowledgements back; the other direction has a connection of its
//! own, made by the other side.

mod frame;
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) mod fuzzing;
pub(crate) mod incoming;
pub(crate) mod outgoing;
pub(crate) mod stream;
pub(crate) mod tls;

use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use rustix::net::{
    AddressFamily, SocketFlags, SocketType, accept_with, bind, connect, getsockname, ipproto,
    listen, socket_with, sockopt,
};

pub(crate) const GREETING_MAGIC: [u8; 4] = *b"KVT1";
/// Of the magic and the length before a hello and its reply.
pub(crate) const GREETING_BYTES: usize = 8;

const BACKLOG: i32 = 1024;

fn open(address: &SocketAddr) -> rustix::io::Result<OwnedFd> {
    let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    socket_with(family, SocketType::STREAM, flags, Some(ipproto::TCP))
}

/// A socket that takes connections, and its address.
pub(crate) fn start_listening(address: SocketAddr) -> rustix::io::Result<(OwnedFd, SocketAddr)> {
    let socket = open(&address)?;
    sockopt::set_socket_reuseaddr(&socket, true)?;
    bind(&socket, &address)?;
    listen(&socket, BACKLOG)?;
    let bound = SocketAddr::try_from(getsockname(&socket)?)?;
    Ok((socket, bound))
}

pub(crate) fn take_connection(listener: &OwnedFd) -> rustix::io::Result<OwnedFd> {
    let socket = accept_with(listener, SocketFlags::NONBLOCK | SocketFlags::CLOEXEC)?;
    tune(&socket)?;
    Ok(socket)
}

/// Begins to connect; the socket becomes writable when it is done.
pub(crate) fn start_connecting(address: SocketAddr) -> rustix::io::Result<OwnedFd> {
    let socket = open(&address)?;
    tune(&socket)?;
    match connect(&socket, &address) {
        Ok(()) | Err(rustix::io::Errno::INPROGRESS) => Ok(socket),
        Err(errno) => Err(errno),
    }
}

/// Buffers are left to the kernel: it grows them beyond what an unprivileged process may ask for.
fn tune(socket: &OwnedFd) -> rustix::io::Result<()> {
    sockopt::set_tcp_nodelay(socket, true)?;
    // A peer whose host vanished is noticed while nothing is sent, too.
    sockopt::set_socket_keepalive(socket, true)?;
    sockopt::set_tcp_keepidle(socket, Duration::from_secs(5))?;
    sockopt::set_tcp_keepintvl(socket, Duration::from_secs(2))?;
    sockopt::set_tcp_keepcnt(socket, 3)
}

/// While something is sent, a vanished host is noticed a little after the engine's own patience ends: the
/// system's alone would be a quarter of an hour, also for a receiver whose acknowledgements are under way.
pub(crate) fn set_patience(socket: impl AsFd, peer_timeout_ms: u64) -> rustix::io::Result<()> {
    let patience_ms = u32::try_from(peer_timeout_ms).unwrap_or(u32::MAX).saturating_add(1_000);
    sockopt::set_tcp_user_timeout(socket, patience_ms)
}

/// A greeting as it goes over the wire.
pub(crate) fn greeting(body: &[u8]) -> Vec<u8> {
    let length = u32::try_from(body.len()).expect("a greeting has a few hundred bytes");
    [GREETING_MAGIC.as_slice(), &length.to_le_bytes(), body].concat()
}

/// The body's length, or `None` when this is no greeting.
pub(crate) fn greeting_length(prefix: [u8; GREETING_BYTES]) -> Option<usize> {
    let [m0, m1, m2, m3, l0, l1, l2, l3] = prefix;
    let length = u32::from_le_bytes([l0, l1, l2, l3]) as usize;
    let known = [m0, m1, m2, m3] == GREETING_MAGIC && length <= crate::hello::HELLO_BYTES_MAX;
    known.then_some(length)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_socket_is_as_patient_as_its_engine_and_a_little_more() {
        for (peer_timeout_ms, patience_ms) in [(30, 1_030), (60_000, 61_000)] {
            let socket = open(&([127, 0, 0, 1], 0).into()).expect("a socket");
            set_patience(&socket, peer_timeout_ms).expect("set");
            assert_eq!(sockopt::tcp_user_timeout(&socket), Ok(patience_ms));
        }
    }
}
