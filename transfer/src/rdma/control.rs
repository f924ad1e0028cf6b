//! The TCP connection beside each pipe: the greeting goes over it, what is asked and answered, and its end
//! is the end of the path. It never waits: what the socket does not take stays here.

use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd};

use rustix::io::Errno;

use super::wire::{self, LENGTH_BYTES, MESSAGE_BYTES_MAX, Said};
use crate::hello::HELLO_BYTES_MAX;
use crate::rdma::CardError;
use crate::tcp::stream::{Blocked, Stream};
use crate::tcp::tls::Tls;
use crate::tcp::{self, GREETING_BYTES, greeting, greeting_length};
use crate::worker::link::{LinkEnd, Readiness};

const READ_BYTES: usize = 16 << 10;
/// A peer that lets more wait than this is not read from.
const WAITING_BYTES_MAX: usize = 256 << 10;
/// Messages through the card are answered here too, and stopping to read would not stop them. A peer that lets more
/// wait than two hundred thousand of them are told in does not read, and its path ends.
const UNREAD_BYTES_MAX: usize = 4 << 20;
/// Nor is one that has said more than this which nobody has heard yet: any greeting and any saying is shorter.
const UNHEARD_BYTES_MAX: usize = 256 << 10;
const _: () = assert!(MESSAGE_BYTES_MAX + LENGTH_BYTES <= UNHEARD_BYTES_MAX);
const _: () = assert!(HELLO_BYTES_MAX + GREETING_BYTES <= UNHEARD_BYTES_MAX);

#[derive(Debug)]
pub(crate) struct Control {
    stream: Stream,
    ready: Readiness,
    out: Vec<u8>,
    input: Vec<u8>,
    /// Of `input`.
    used: usize,
}

impl Control {
    /// Begins to connect.
    pub(crate) fn connect(address: SocketAddr, tls: Option<&Tls>) -> Result<Self, CardError> {
        let failed = "cannot connect";
        let socket =
            tcp::start_connecting(address).map_err(|errno| CardError::because(failed, errno))?;
        let stream =
            Stream::connecting(socket, tls).map_err(|error| CardError::because(failed, error))?;
        Ok(Control::new(stream, Readiness::default()))
    }

    pub(crate) fn new(stream: Stream, ready: Readiness) -> Self {
        Control { stream, ready, out: Vec::new(), input: Vec::new(), used: 0 }
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }

    pub(crate) fn ready(&mut self, ready: Readiness) {
        self.ready.add(ready);
    }

    /// Whether the connection is made.
    pub(crate) fn is_connected(&self) -> Result<bool, LinkEnd> {
        if !self.ready.writable {
            return Ok(false);
        }
        match rustix::net::sockopt::socket_error(&self.stream)? {
            Ok(()) => Ok(true),
            Err(Errno::CONNREFUSED) => Err(LinkEnd::Refused),
            Err(errno) => Err(errno.into()),
        }
    }

    pub(crate) fn greet(&mut self, body: &[u8]) {
        self.out.extend_from_slice(&greeting(body));
    }

    pub(crate) fn say(&mut self, said: Said) {
        self.out.extend_from_slice(&said.encode());
    }

    /// Whether any went out.
    ///
    /// # Errors
    /// Also for a peer that reads nothing of what is said to it.
    pub(crate) fn flush(&mut self) -> Result<bool, LinkEnd> {
        self.stream.flush(&mut self.ready)?;
        if self.out.len() > UNREAD_BYTES_MAX {
            return Err(LinkEnd::Silent);
        }
        if self.out.is_empty() || !self.ready.writable {
            return Ok(false);
        }
        match self.stream.send(&self.out) {
            Ok(bytes) => {
                self.out.drain(..bytes);
                Ok(true)
            }
            Err(Blocked::Again) => {
                self.ready.writable = false;
                Ok(false)
            }
            Err(Blocked::End(end)) => Err(end),
        }
    }

    /// Whether any came in.
    pub(crate) fn read(&mut self) -> Result<bool, LinkEnd> {
        self.input.drain(..std::mem::take(&mut self.used));
        let is_full = self.out.len() > WAITING_BYTES_MAX || self.input.len() > UNHEARD_BYTES_MAX;
        if !self.ready.readable || is_full {
            return Ok(false);
        }
        let mut buffer = [0; READ_BYTES];
        match self.stream.read(&mut buffer) {
            Ok(bytes) => {
                self.input.extend_from_slice(&buffer[..bytes]);
                Ok(true)
            }
            Err(Blocked::Again) => {
                self.ready.readable = false;
                Ok(false)
            }
            Err(Blocked::End(end)) => Err(end),
        }
    }

    /// The greeting's body, when it has come whole.
    pub(crate) fn greeting(&mut self) -> Result<Option<Vec<u8>>, LinkEnd> {
        let input = &self.input[self.used..];
        let Some(prefix) = input.first_chunk::<GREETING_BYTES>() else { return Ok(None) };
        let length = greeting_length(*prefix).ok_or(LinkEnd::Malformed)?;
        let Some(body) = input.get(GREETING_BYTES..GREETING_BYTES + length) else {
            return Ok(None);
        };
        let body = body.to_vec();
        self.used += GREETING_BYTES + length;
        Ok(Some(body))
    }

    /// The next thing that was said, when it has come whole.
    pub(crate) fn heard(&mut self) -> Result<Option<Said>, LinkEnd> {
        if self.out.len() > WAITING_BYTES_MAX {
            return Ok(None);
        }
        let input = &self.input[self.used..];
        let Some(prefix) = input.first_chunk::<LENGTH_BYTES>() else { return Ok(None) };
        let length = wire::length(*prefix).ok_or(LinkEnd::Malformed)?;
        let Some(body) = input.get(LENGTH_BYTES..LENGTH_BYTES + length) else { return Ok(None) };
        let said = Said::decode(body).ok_or(LinkEnd::Malformed)?;
        self.used += LENGTH_BYTES + length;
        Ok(Some(said))
    }
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};

    use kvasir_transfer_core::Refusal;

    use super::*;

    /// With the other end of its connection, which nobody reads.
    fn unread() -> (Control, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut control = Control::connect(listener.local_addr().unwrap(), None).unwrap();
        let (other, _) = listener.accept().unwrap();
        control.ready(Readiness { readable: false, writable: true });
        (control, other)
    }

    #[test]
    fn answers_that_nobody_reads_do_not_pile_up() {
        let (mut control, _other) = unread();
        let mut said = 0;
        let end = loop {
            for id in 0..1000 {
                control.say(Said::Taken { id, taken: Err(Refusal::TooLong) });
            }
            said += 1000;
            assert!(said < 10_000_000, "{} bytes wait", control.out.len());
            if let Err(end) = control.flush() {
                break end;
            }
        };
        assert_eq!(end, LinkEnd::Silent);
        assert!(said > 200_000, "a burst is no reason to go: {said}");
        assert!(control.out.len() < UNREAD_BYTES_MAX + (64 << 10));
    }
}
