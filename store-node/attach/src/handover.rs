//! Descriptors over a Unix socket, and the connection that stands for the attach.
//!
//! The engine sends the token it was given; the node answers one zero byte with the descriptors.
//! The connection then stays open: its end tells each side that the other is gone. An engine that
//! leaves in good order says [`GOODBYE`] first, which promises that it writes nothing any more.

use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;

use kvasir_transfer::descriptors;
use rustix::net::{RecvFlags, SendFlags};

/// Names one attach on the descriptor socket.
pub type Token = [u8; 16];

/// Said by an engine that has stopped writing.
pub const GOODBYE: u8 = b'G';

/// The other process's end: sends the token, takes the descriptors: memory, then control memory, what
/// rings the node, its own bell. Blocks.
///
/// # Errors
/// When the node refuses the token or answers something else.
pub fn receive<const N: usize>(stream: &mut UnixStream, token: &Token) -> io::Result<[OwnedFd; N]> {
    stream.write_all(token)?;
    let mut byte = [1u8];
    let (_, received) = descriptors::recv(&*stream, &mut byte).map_err(io::Error::other)?;
    let wrong = || io::Error::other("the node refused the token or sent no descriptors");
    if byte != [0] {
        return Err(wrong());
    }
    <[OwnedFd; N]>::try_from(received).map_err(|_| wrong())
}

/// The node's end, first half: reads the token. Blocks.
///
/// # Errors
/// When the engine closes the connection first.
pub fn read_token(stream: &mut UnixStream) -> io::Result<Token> {
    let mut token = [0; 16];
    stream.read_exact(&mut token)?;
    Ok(token)
}

/// The node's end, second half: hands the descriptors over, in the order that [`receive`] says.
///
/// # Errors
/// When the engine has closed the connection.
pub fn send(stream: &UnixStream, descriptors: &[BorrowedFd<'_>]) -> io::Result<()> {
    descriptors::send(stream, &[0], descriptors).map_err(io::Error::other)
}

/// What the connection says now, without waiting.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Connection {
    Open,
    /// The other side left in good order.
    Goodbye,
    /// The other side closed it or died.
    Lost,
}

/// Looks whether the other side is still there.
pub fn look(stream: BorrowedFd<'_>) -> Connection {
    let mut byte = [0u8];
    match rustix::net::recv(stream.as_fd(), &mut byte, RecvFlags::DONTWAIT) {
        Ok((1, _)) if byte == [GOODBYE] => Connection::Goodbye,
        Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => Connection::Open,
        Ok(_) | Err(_) => Connection::Lost,
    }
}

/// Says that this side writes nothing any more.
pub fn say_goodbye(stream: BorrowedFd<'_>) {
    let _ = rustix::net::send(stream, &[GOODBYE], SendFlags::NOSIGNAL | SendFlags::DONTWAIT);
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvasir_transfer::doorbell;
    use kvasir_transfer::memory::{Access, Prefault, SharedMemory};

    #[test]
    fn descriptors_arrive_and_the_end_of_the_connection_is_seen() {
        let (mut engine, mut node) = UnixStream::pair().expect("a pair");
        let memory = SharedMemory::create("test", 4096, Prefault::No).expect("memory");
        let (bell, ringer) = doorbell::pair().expect("descriptors");
        let given =
            std::thread::spawn(move || receive::<4>(&mut engine, &[9; 16]).map(|d| (d, engine)));
        assert_eq!(read_token(&mut node).expect("a token"), [9; 16]);
        send(&node, &[memory.fd(), memory.fd(), ringer.as_fd(), bell.as_fd()]).expect("sent");
        let ([slots, ..], engine) = given.join().expect("no panic").expect("descriptors");
        let theirs = SharedMemory::from_fd(slots, 4096, Access::ReadWrite).expect("a mapping");
        assert_eq!(theirs.len(), 4096);
        assert_eq!(look(node.as_fd()), Connection::Open);
        say_goodbye(engine.as_fd());
        assert_eq!(look(node.as_fd()), Connection::Goodbye);
        drop(engine);
        assert_eq!(look(node.as_fd()), Connection::Lost);
    }

    #[test]
    fn a_refused_token_is_an_error() {
        let (mut engine, node) = UnixStream::pair().expect("a pair");
        drop(node);
        assert!(receive::<4>(&mut engine, &[9; 16]).is_err());
    }
}
