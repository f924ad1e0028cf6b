//! One turn at a time, against a peer that does what it likes with what it was given.

use std::sync::Barrier;
use std::sync::atomic::AtomicBool;

use kvasir_transfer_core::{CloseRequest, Counted, PathIndex, SessionId};
use rustix::net::{AddressFamily, SocketFlags, SocketType};

use super::super::outgoing::ShmOut;
use super::super::{LANDED_BYTES, take_connection};
use super::*;
use crate::closing;
use crate::identity::Identity;
use crate::memory::Access;
use crate::ring::Producer;
use crate::shm::directory::Directory;
use crate::worker::hub;
use crate::worker::link::Lane;

const READY: Readiness = Readiness { readable: true, writable: true };
const SESSION: SessionId = SessionId(1);

fn hello(hub: &Hub, path: u32) -> Vec<u8> {
    let identity = Identity::from_seed(&[7; 32]);
    let (incarnation, cookie) = (identity.incarnation(), [7; 16]);
    let from = Endpoint { incarnation, cookie, shm: None, tcp: None, rdma: None };
    Hello::new(&from, &hub.shared.endpoint, 0, (SESSION, PathIndex(path))).signed(&identity)
}

/// A writer without an engine behind it.
struct Raw {
    socket: OwnedFd,
    link: LinkMemory,
}

fn admitted(hub: &mut Hub, path: u32) -> (ShmIn, Raw) {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let (own, socket) =
        rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
            .expect("descriptors");
    let mut into = ShmIn::new(own).expect("descriptors");
    descriptors::send(&socket, &hello(hub, path), &[]).expect("sent");
    turn(&mut into, hub).expect("it is admitted");
    let mut reply = [0; HELLO_BYTES_MAX];
    let (length, mut fds) = descriptors::recv(&socket, &mut reply).expect("a reply");
    let reply = HelloReply::decode(&reply[..length]).expect("a reply");
    let link = SharedMemory::from_fd(fds.remove(0), reply.link_bytes as usize, Access::ReadWrite);
    (into, Raw { socket, link: LinkMemory(Arc::new(link.expect("mapped"))) })
}

fn turn(into: &mut ShmIn, hub: &mut Hub) -> Result<Turn, LinkEnd> {
    into.ready(READY);
    hub.places = 1;
    into.turn(hub)
}

/// Everything that waits to be read of a socket, one length each.
fn drained(socket: BorrowedFd<'_>) -> Vec<usize> {
    let mut bytes = vec![0; SOCKET_BYTES_MAX];
    let one = || descriptors::recv(socket, &mut bytes).ok().map(|(length, _)| length);
    std::iter::from_fn(one).collect()
}

fn with_directory() -> (Hub, crate::shared::Bells) {
    hub::tests::hub(Some(Directory::create().expect("memory")))
}

#[test]
fn whoever_always_has_more_to_ask_has_its_turn_and_no_more() {
    let (mut hub, _bells) = with_directory();
    let (mut into, raw) = admitted(&mut hub, 0);
    for _ in 0..DATAGRAMS_PER_TURN + 3 {
        descriptors::send(&raw.socket, &[TAG_HEARTBEAT], &[]).expect("it fits");
    }
    for answered in [DATAGRAMS_PER_TURN, 3, 0] {
        let turn = turn(&mut into, &mut hub).expect("nothing is wrong with it");
        assert_eq!(turn.busy, answered > 0, "the rest is not slept upon");
        assert_eq!(drained(raw.socket.as_fd()).len(), answered);
    }
}

#[test]
fn whoever_always_has_more_to_tell_has_its_turn_and_no_more() {
    let (mut hub, _bells) = with_directory();
    let run_dir = tempfile::tempdir().expect("a directory");
    let path = run_dir.path().join("tested.sock");
    let listener = super::super::start_listening(&path).expect("listening");
    let lane = Lane { session: SESSION, path: PathIndex(0) };
    let to = (lane, hub.shared.endpoint.incarnation);
    let mut out = ShmOut::connect(to, &path, &hello(&hub, 0)).expect("connected");
    let mut into = ShmIn::new(take_connection(&listener).expect("taken")).expect("descriptors");
    turn(&mut into, &mut hub).expect("it is admitted");
    out.ready(READY);
    out.turn(&mut hub).expect("it is admitted");
    assert!(out.is_up());
    // They tell of no message at all.
    for _ in 0..DATAGRAMS_PER_TURN + 3 {
        descriptors::send(into.fd(), &[TAG_TAKEN], &[]).expect("it fits");
    }
    out.ready(READY);
    let turn = out.turn(&mut hub).expect("nothing is wrong with it");
    assert!(turn.busy, "the rest is not slept upon");
    assert_eq!(drained(out.fd()).len(), 3);
}

#[test]
fn whoever_asks_and_does_not_listen_has_few_bytes_of_answers_waiting() {
    let (mut hub, _bells) = with_directory();
    let failed = admitted(&mut hub, 0).0.path().expect("it is admitted");
    let (mut into, raw) = admitted(&mut hub, 1);
    let imms = 0..closing::FRAMES_MAX as u32;
    imms.clone().for_each(|imm| hub.landed(Domain::Shm, failed, imm));
    hub.path_ended(failed);
    // All of them have landed, and are named in each answer.
    let counted = imms.map(|imm| Counted { imm, landed: 0, undecided: 1 }).collect();
    let path = PathIndex(0);
    let first = closing::question(&CloseRequest { path, counted, messages: Vec::new() });
    let again = closing::question(&CloseRequest { path, counted: vec![], messages: vec![] });
    let ask = |question: &[u8]| {
        descriptors::send(&raw.socket, &super::super::tagged(TAG_CLOSING, question), &[])
    };
    ask(&first).expect("it fits");
    turn(&mut into, &mut hub).expect("nothing is wrong with it");
    let mut asked = 0;
    for _ in 0..100 {
        while ask(&again).is_ok() {
            asked += 1;
        }
        turn(&mut into, &mut hub).expect("nothing is wrong with it");
        let waiting: usize = into.answers.iter().map(|answer| answer.bytes.len()).sum();
        assert_eq!(waiting, into.answer_bytes);
        assert!(waiting < ANSWER_BYTES_WAITING_MAX + SOCKET_BYTES_MAX, "{waiting} bytes wait");
        assert!(hub.answers.is_empty(), "nor do any wait elsewhere");
    }
    // All that was asked is answered once somebody listens.
    let mut answers = Vec::new();
    loop {
        let some = drained(raw.socket.as_fd());
        let turn = turn(&mut into, &mut hub).expect("nothing is wrong with it");
        if some.is_empty() && !turn.busy && into.answers.is_empty() {
            break;
        }
        answers.extend(some);
    }
    assert_eq!(answers.len(), 1 + asked);
    assert!(answers.iter().all(|length| *length > 4 * closing::FRAMES_MAX));
}

#[test]
fn what_is_pushed_while_a_ring_is_read_for_the_last_time_is_left() {
    // Both threads must run at the same time, which a busy machine does not do in every round.
    for _ in 0..50 {
        read_a_ring_for_the_last_time_while_it_is_written_to();
    }
}

fn read_a_ring_for_the_last_time_while_it_is_written_to() {
    let (mut hub, _bells) = with_directory();
    let (mut into, raw) = admitted(&mut hub, 0);
    let mut producer = Producer::open(&raw.link.0, raw.link.ring()).expect("a ring");
    let mut pushed = 0;
    while producer.push(&Record::landed(5)).is_ok() {
        pushed += 1;
    }
    assert!(pushed > raw.link.ring().bytes as u64 / 4 / LANDED_BYTES as u64, "it is full");
    let (begun, over) = (Barrier::new(2), AtomicBool::new(false));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            begun.wait();
            while !over.load(Ordering::Relaxed) {
                let _ = producer.push(&Record::landed(5));
            }
        });
        begun.wait();
        into.read_rest(&mut hub).expect("nothing is wrong with it");
        over.store(true, Ordering::Relaxed);
    });
    assert_eq!(hub.metrics.shm.received_writes.get(), pushed);
    assert_ne!(raw.link.cut().load(Ordering::SeqCst), 0, "and it is told so");
}
