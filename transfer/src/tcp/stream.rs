//! The socket of a tcp connection, plain or under TLS. Plain, each call is one system call on the
//! caller's own memory. Under TLS bytes are gathered and encrypted, or decrypted and copied, here.
//!
//! Nothing waits: a call that cannot go on says [`Blocked::Again`], and then the socket's next edge tells
//! when it can. What was encrypted and is not gone yet goes with the next `flush`.

use std::io::{self, BufRead, IoSlice, IoSliceMut, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::io::{Errno, retry_on_intr};
use rustix::net::{SendAncillaryBuffer, SendFlags};
use rustls::Connection;

use super::tls::Tls;
use crate::memory::WritableRange;
use crate::worker::link::{LinkEnd, Readiness};

#[derive(Debug)]
pub(crate) enum Stream {
    Plain(OwnedFd),
    Tls(Box<Secured>),
}

/// Why a call moved nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Blocked {
    /// Not now.
    Again,
    End(LinkEnd),
}

impl From<Errno> for Blocked {
    fn from(errno: Errno) -> Self {
        if errno == Errno::AGAIN { Blocked::Again } else { Blocked::End(errno.into()) }
    }
}

impl From<LinkEnd> for Blocked {
    fn from(end: LinkEnd) -> Self {
        Blocked::End(end)
    }
}

/// What is read ahead of decryption.
const INBOX_BYTES: usize = 64 << 10;
/// What may wait encrypted.
const OUTBOX_BYTES: usize = 512 << 10;

pub(crate) struct Secured {
    socket: OwnedFd,
    connection: Connection,
    inbox: Vec<u8>,
    /// What of it is not decrypted yet.
    inbox_start: usize,
    inbox_end: usize,
}

impl std::fmt::Debug for Secured {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Secured").field("socket", &self.socket).finish_non_exhaustive()
    }
}

impl Stream {
    /// A connection that we made.
    pub(crate) fn connecting(socket: OwnedFd, tls: Option<&Tls>) -> Result<Self, rustls::Error> {
        let connection = tls.map(Tls::connect).transpose()?;
        Ok(Self::new(socket, connection))
    }

    /// A connection that was made to us.
    pub(crate) fn accepted(socket: OwnedFd, tls: Option<&Tls>) -> Result<Self, rustls::Error> {
        let connection = tls.map(Tls::accept).transpose()?;
        Ok(Self::new(socket, connection))
    }

    fn new(socket: OwnedFd, connection: Option<Connection>) -> Self {
        let Some(mut connection) = connection else { return Stream::Plain(socket) };
        connection.set_buffer_limit(Some(OUTBOX_BYTES));
        let (inbox, inbox_start, inbox_end) = (vec![0; INBOX_BYTES], 0, 0);
        Stream::Tls(Box::new(Secured { socket, connection, inbox, inbox_start, inbox_end }))
    }

    /// Reads at least one byte.
    pub(crate) fn read(&mut self, into: &mut [u8]) -> Result<usize, Blocked> {
        match self {
            Stream::Plain(socket) => some(retry_on_intr(|| rustix::io::read(&*socket, &mut *into))),
            Stream::Tls(secured) => secured.read(into),
        }
    }

    /// As [`Stream::read`], into shared memory and then into what is behind it.
    pub(crate) fn read_placed(
        &mut self,
        into: WritableRange<'_>,
        behind: &mut [u8],
    ) -> Result<usize, Blocked> {
        match self {
            Stream::Plain(socket) => {
                some(retry_on_intr(|| into.read(socket.as_fd(), &mut *behind)))
            }
            Stream::Tls(secured) => secured.read_placed(into),
        }
    }

    /// As [`Stream::read`], into one after the other.
    pub(crate) fn read_vectored(
        &mut self,
        into: &mut [IoSliceMut<'_>; 2],
    ) -> Result<usize, Blocked> {
        match self {
            Stream::Plain(socket) => some(retry_on_intr(|| rustix::io::readv(&*socket, into))),
            Stream::Tls(secured) => secured.read(&mut into[0]),
        }
    }

    /// Sends at least one byte, or takes it over.
    pub(crate) fn send(&mut self, bytes: &[u8]) -> Result<usize, Blocked> {
        match self {
            Stream::Plain(socket) => {
                Ok(retry_on_intr(|| rustix::net::send(&*socket, bytes, SendFlags::NOSIGNAL))?)
            }
            Stream::Tls(secured) => secured.send(&[IoSlice::new(bytes)]),
        }
    }

    /// As [`Stream::send`], one after the other.
    pub(crate) fn send_vectored(&mut self, bytes: &[IoSlice<'_>]) -> Result<usize, Blocked> {
        match self {
            Stream::Plain(socket) => {
                let mut control = SendAncillaryBuffer::default();
                let send =
                    || rustix::net::sendmsg(&*socket, bytes, &mut control, SendFlags::NOSIGNAL);
                Ok(retry_on_intr(send)?)
            }
            Stream::Tls(secured) => secured.send(bytes),
        }
    }

    /// Sends what was taken over, as far as the socket takes it.
    pub(crate) fn flush(&mut self, ready: &mut Readiness) -> Result<(), LinkEnd> {
        let Stream::Tls(secured) = self else { return Ok(()) };
        if !ready.writable || !secured.connection.wants_write() {
            return Ok(());
        }
        match secured.flush() {
            Ok(()) => Ok(()),
            Err(Blocked::Again) => {
                ready.writable = false;
                Ok(())
            }
            Err(Blocked::End(end)) => Err(end),
        }
    }
}

impl AsFd for Stream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Stream::Plain(socket) => socket.as_fd(),
            Stream::Tls(secured) => secured.socket.as_fd(),
        }
    }
}

fn some(read: rustix::io::Result<usize>) -> Result<usize, Blocked> {
    match read? {
        0 => Err(Blocked::End(LinkEnd::Lost)),
        bytes => Ok(bytes),
    }
}

impl Secured {
    fn read(&mut self, into: &mut [u8]) -> Result<usize, Blocked> {
        loop {
            match self.connection.reader().read(into) {
                Ok(0) => return Err(LinkEnd::Lost.into()),
                Ok(bytes) => return Ok(bytes),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(_) => return Err(LinkEnd::Lost.into()),
            }
            self.decrypt_some()?;
        }
    }

    fn read_placed(&mut self, into: WritableRange<'_>) -> Result<usize, Blocked> {
        loop {
            match self.connection.reader().into_first_chunk() {
                Ok([]) => return Err(LinkEnd::Lost.into()),
                Ok(chunk) => {
                    let bytes = into.fill(chunk);
                    self.connection.reader().consume(bytes);
                    return Ok(bytes);
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(_) => return Err(LinkEnd::Lost.into()),
            }
            self.decrypt_some()?;
        }
    }

    fn decrypt_some(&mut self) -> Result<(), Blocked> {
        if self.inbox_start == self.inbox_end {
            let inbox = &mut self.inbox;
            let read = some(retry_on_intr(|| rustix::io::read(&self.socket, &mut *inbox)))?;
            (self.inbox_start, self.inbox_end) = (0, read);
        }
        let mut waiting = &self.inbox[self.inbox_start..self.inbox_end];
        let taken = self.connection.read_tls(&mut waiting).map_err(|_| LinkEnd::Untrusted)?;
        self.inbox_start += taken;
        let decrypted = self.connection.process_new_packets();
        // An answer to the handshake, or the word why it ends.
        match self.flush() {
            Ok(()) | Err(Blocked::Again) => {}
            Err(end) => return Err(end),
        }
        match decrypted {
            Ok(_) => Ok(()),
            Err(_) => Err(LinkEnd::Untrusted.into()),
        }
    }

    fn send(&mut self, bytes: &[IoSlice<'_>]) -> Result<usize, Blocked> {
        self.flush()?;
        let taken = self.connection.writer().write_vectored(bytes).map_err(|_| LinkEnd::Lost)?;
        match self.flush() {
            Ok(()) | Err(Blocked::Again) => {}
            Err(end) => return Err(end),
        }
        if taken == 0 { Err(Blocked::Again) } else { Ok(taken) }
    }

    fn flush(&mut self) -> Result<(), Blocked> {
        while self.connection.wants_write() {
            if let Err(error) = self.connection.write_tls(&mut Raw(&self.socket)) {
                return Err(match error.kind() {
                    io::ErrorKind::WouldBlock => Blocked::Again,
                    _ => LinkEnd::Lost.into(),
                });
            }
        }
        Ok(())
    }
}

/// A socket as the TLS library writes to it.
struct Raw<'a>(&'a OwnedFd);

impl Write for Raw<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        Ok(retry_on_intr(|| rustix::net::send(self.0, bytes, SendFlags::NOSIGNAL))?)
    }

    fn write_vectored(&mut self, bytes: &[IoSlice<'_>]) -> io::Result<usize> {
        let mut control = SendAncillaryBuffer::default();
        let send = || rustix::net::sendmsg(self.0, bytes, &mut control, SendFlags::NOSIGNAL);
        Ok(retry_on_intr(send)?)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use rcgen::{CertificateParams, KeyPair};
    use rustix::net::sockopt;

    use super::*;
    use crate::tcp::tls::TlsFiles;

    /// A certificate that is its own authority.
    fn tls() -> Tls {
        let dir = tempfile::tempdir().expect("a directory");
        let key = KeyPair::generate().expect("a key");
        let params = CertificateParams::new(vec!["test".into()]).expect("a name");
        let certificate = params.self_signed(&key).expect("signed").pem();
        let write = |file: &str, text: &str| {
            std::fs::write(dir.path().join(file), text).expect("written");
            dir.path().join(file)
        };
        let authority = write("certificate.pem", &certificate);
        let (certificate, key) = (authority.clone(), write("key.pem", &key.serialize_pem()));
        Tls::load(&TlsFiles { certificate, key, authority, name: "test".into() }).expect("loaded")
    }

    fn some_of(read: Result<usize, Blocked>) -> usize {
        match read {
            Ok(bytes) => bytes,
            Err(Blocked::Again) => 0,
            Err(end) => panic!("{end:?}"),
        }
    }

    #[test]
    fn what_a_full_socket_does_not_take_goes_with_a_later_flush() {
        let tls = tls();
        let any_port = ([127, 0, 0, 1], 0).into();
        let (listener, address) = crate::tcp::start_listening(any_port).expect("a port");
        let client = crate::tcp::start_connecting(address).expect("connecting");
        let server = loop {
            if let Ok(socket) = crate::tcp::take_connection(&listener) {
                break socket;
            }
        };
        // Far less than is sent.
        sockopt::set_socket_send_buffer_size(&client, 32 << 10).expect("set");
        let mut client = Stream::connecting(client, Some(&tls)).expect("a client");
        let mut server = Stream::accepted(server, Some(&tls)).expect("a server");

        let sent: Vec<u8> = (0..450_000u32).map(|at| (at / 7) as u8).collect();
        let (mut received, mut buffer, mut taken) = (Vec::new(), vec![0; 10_000], 0);
        while taken < sent.len() {
            taken += some_of(client.send(&sent[taken..]));
            // What comes back while the handshake is under way.
            some_of(client.read(&mut [0; 1]));
            let bytes = some_of(server.read(&mut buffer));
            received.extend_from_slice(&buffer[..bytes]);
        }
        assert!(received.len() < 200_000, "the most of it waits on the sender's side");
        while received.len() < sent.len() {
            some_of(client.read(&mut [0; 1]));
            let mut ready = Readiness { readable: false, writable: true };
            client.flush(&mut ready).expect("the connection lives");
            let bytes = some_of(server.read(&mut buffer));
            received.extend_from_slice(&buffer[..bytes]);
        }
        assert!(received == sent);
    }

    #[test]
    fn a_closed_connection_ends_both_kinds() {
        for tls in [None, Some(tls())] {
            let any_port = ([127, 0, 0, 1], 0).into();
            let (listener, address) = crate::tcp::start_listening(any_port).expect("a port");
            drop(crate::tcp::start_connecting(address).expect("connecting"));
            let server = loop {
                if let Ok(socket) = crate::tcp::take_connection(&listener) {
                    break socket;
                }
            };
            let mut server = Stream::accepted(server, tls.as_ref()).expect("a server");
            let ended = loop {
                match server.read(&mut [0; 8]) {
                    Err(Blocked::Again) => {}
                    other => break other,
                }
            };
            assert_eq!(ended, Err(Blocked::End(LinkEnd::Lost)));
        }
    }
}
