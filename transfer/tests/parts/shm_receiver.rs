//! Whoever is written to over shared memory may lie, about what became of messages and about signs of
//! life. It gains nothing by it.

use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use kvasir_transfer::memory::{Prefault, SharedMemory};
use kvasir_transfer::{
    Completion, CompletionFuture, Endpoint, Source, TransferConfig, TransferEngine, Write,
    WriteError, descriptors, doorbell,
};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use crate::engine::{counter, region, start};

const LONG: Duration = Duration::from_secs(30);
const LINK_BYTES: usize = 256 << 10;
/// Tags of what goes over the socket.
const REGION: u8 = 1;
const TAKEN: u8 = 3;
const HEARTBEAT: u8 = 4;

fn config(run_dir: &std::path::Path) -> TransferConfig {
    TransferConfig { run_dir: Some(run_dir.to_owned()), ..TransferConfig::default() }
}

/// An engine that thinks it writes to another one, and what it writes to.
struct Liar {
    sender: TransferEngine,
    registry: prometheus::Registry,
    socket: OwnedFd,
    endpoint: Endpoint,
    link: SharedMemory,
    _bell: doorbell::Bell,
    _run_dir: tempfile::TempDir,
}

fn varint(mut value: u64) -> Vec<u8> {
    let mut bytes = Vec::new();
    while value >= 0x80 {
        bytes.push(value as u8 | 0x80);
        value >>= 7;
    }
    bytes.push(value as u8);
    bytes
}

impl Liar {
    /// `begin` makes the sender connect.
    fn admit<T>(begin: impl FnOnce(&TransferEngine, &Endpoint) -> T) -> (Self, T) {
        let run_dir = tempfile::tempdir().expect("a directory");
        let (sender, registry) = start(config(run_dir.path()));
        let (other, _) = start(config(run_dir.path()));
        let path = run_dir.path().join("liar.sock");
        let flags = SocketFlags::CLOEXEC;
        let listener =
            rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
                .expect("a socket");
        rustix::net::bind(&listener, &SocketAddrUnix::new(&path).expect("short")).expect("bound");
        rustix::net::listen(&listener, 1).expect("listening");
        let mut endpoint = other.endpoint();
        endpoint.shm.as_mut().expect("it has shm").socket = path;
        let begun = begin(&sender, &endpoint);

        let socket = rustix::net::accept(&listener).expect("the sender");
        let mut hello = [0; 4096];
        descriptors::recv(&socket, &mut hello).expect("a hello");
        let link = SharedMemory::create("link", LINK_BYTES, Prefault::No).expect("memory");
        let directory = SharedMemory::create_for_readers("directory", 64 << 10).expect("memory");
        let (bell, ringer) = doorbell::pair().expect("descriptors");
        let reply = [
            &[0x08, 1][..],
            &[&[0x18][..], &varint(LINK_BYTES as u64)].concat(),
            &[&[0x20][..], &varint(64 << 10)].concat(),
            &[&[0x28][..], &varint(64 << 10)].concat(),
        ]
        .concat();
        let fds = [link.fd(), directory.fd(), ringer.as_fd()];
        descriptors::send(&socket, &reply, &fds).expect("admitted");
        let (_bell, _run_dir) = (bell, run_dir);
        (Liar { sender, registry, socket, endpoint, link, _bell, _run_dir }, begun)
    }

    fn say(&self, bytes: &[u8]) {
        descriptors::send(&self.socket, bytes, &[]).expect("sent");
    }

    /// What was not pushed cannot have been taken.
    fn await_pushed(&self, message: &[u8], times: usize) {
        let began = Instant::now();
        let mut bytes = vec![0; self.link.len()];
        while bytes.windows(message.len()).filter(|found| *found == message).count() < times {
            assert!(began.elapsed() < LONG, "nothing comes");
            std::thread::sleep(Duration::from_millis(1));
            self.link.copy_to(0, &mut bytes).expect("it fits");
        }
    }

    /// The sender believes nothing more, and says that its peer is gone.
    fn is_found_out(&self) {
        let began = Instant::now();
        let name = "kvasir_transfer_connections_closed_total";
        while counter(&self.registry, name, &["shm", "malformed"]) == 0.0 {
            assert!(began.elapsed() < LONG, "it was believed");
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

fn taken(sequence: u64, code: u8) -> Vec<u8> {
    [&[TAKEN, code][..], &sequence.to_le_bytes()].concat()
}

fn send(sender: &TransferEngine, endpoint: &Endpoint) -> CompletionFuture {
    let peer = sender.connect(endpoint).expect("reachable");
    let (done, sent) = Completion::future();
    sender.send(peer, b"hello".to_vec(), LONG, done).expect("accepted");
    sent
}

#[test]
fn a_message_is_acknowledged_or_refused_by_its_receiver() {
    let (liar, first) = Liar::admit(send);
    // An honest one, so far.
    liar.await_pushed(b"hello", 1);
    assert_eq!(first.wait_timeout(Duration::ZERO), None, "pushed is not taken");
    liar.say(&taken(0, 0));
    assert_eq!(first.wait(), Ok(()));
    let second = send(&liar.sender, &liar.endpoint);
    liar.await_pushed(b"hello", 2);
    liar.say(&taken(1, kvasir_transfer::Refusal::NoRoom.code()));
    let refused = WriteError::Refused(kvasir_transfer::Refusal::NoRoom);
    assert_eq!(second.wait(), Err(refused));
    // Once more is once too often.
    liar.say(&taken(1, 0));
    liar.is_found_out();
}

#[test]
fn nobody_acknowledges_a_write_that_its_sender_has_not_made() {
    let (liar, written) = Liar::admit(|sender, endpoint| {
        let (handle, mut target) = sender.register(region(4096)).expect("room");
        target.incarnation = endpoint.incarnation;
        let (done, written) = Completion::future();
        let write = Write {
            peer: sender.connect(endpoint).expect("reachable"),
            source: Source::Region { handle, offset: 0, bytes: 4096 },
            target,
            target_offset: 0,
            imm: None,
            checksum: None,
            group: 0,
            deadline: LONG,
        };
        sender.write(write, done).expect("accepted");
        written
    });
    let mut question = [0; 64];
    descriptors::recv(&liar.socket, &mut question).expect("a question");
    assert_eq!(question[0], REGION, "where is it?");
    // It would be told that its source is free, while it is still to be copied.
    liar.say(&taken(0, 0));
    liar.is_found_out();
    assert_eq!(written.wait(), Err(WriteError::PeerGone));
}

#[test]
fn a_sign_of_life_that_nobody_asked_for_is_none() {
    let (liar, sent) = Liar::admit(send);
    liar.await_pushed(b"hello", 1);
    liar.say(&taken(0, 0));
    assert_eq!(sent.wait(), Ok(()));
    liar.say(&[HEARTBEAT]);
    liar.is_found_out();
}
