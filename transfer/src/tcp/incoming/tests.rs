//! One turn at a time, against a peer that does what it likes.

use std::os::fd::OwnedFd;

use kvasir_transfer_core::{CloseRequest, Counted, PathIndex, SessionId};
use rustix::net::{AddressFamily, SendFlags, SocketFlags, SocketType};

use super::*;
use crate::closing::{self, CLOSING_BYTES_MAX};
use crate::identity::Identity;
use crate::tcp::frame::{ACK_BYTES, question_header};
use crate::worker::hub;

const READY: Readiness = Readiness { readable: true, writable: true };

fn send(socket: &OwnedFd, bytes: &[u8]) -> rustix::io::Result<usize> {
    rustix::net::send(socket, bytes, SendFlags::NOSIGNAL)
}

/// A writer without an engine behind it, and the connection that it was admitted by.
fn admitted(hub: &mut Hub, path: u32) -> (TcpIn, OwnedFd) {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let (own, socket) =
        rustix::net::socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None)
            .expect("descriptors");
    let identity = Identity::from_seed(&[7; 32]);
    let (incarnation, cookie) = (identity.incarnation(), [7; 16]);
    let from = Endpoint { incarnation, cookie, shm: None, tcp: None, rdma: None };
    let lane = (SessionId(1), PathIndex(path));
    let hello = Hello::new(&from, &hub.shared.endpoint, 0, lane).signed(&identity);
    send(&socket, &greeting(&hello)).expect("it fits");
    let mut into = TcpIn::new(Stream::accepted(own, None).expect("no TLS"));
    turn(&mut into, hub);
    assert!(into.path().is_some(), "it is admitted");
    (into, socket)
}

fn turn(into: &mut TcpIn, hub: &mut Hub) -> Turn {
    into.ready(READY);
    hub.places = 1;
    into.turn(hub).expect("nothing is wrong with it")
}

/// Reads everything that is there.
fn drain(socket: &OwnedFd, into: &mut Vec<u8>) {
    let mut bytes = [0; 64 << 10];
    while let Ok(length) = rustix::io::read(socket, &mut bytes) {
        into.extend_from_slice(&bytes[..length]);
    }
}

#[test]
fn whoever_asks_and_does_not_listen_has_few_bytes_of_answers_waiting() {
    let (mut hub, _bells) = hub::tests::hub(None);
    let failed = admitted(&mut hub, 0).0.path().expect("it is admitted");
    let (mut into, socket) = admitted(&mut hub, 1);
    let imms = 0..closing::FRAMES_MAX as u32;
    imms.clone().for_each(|imm| hub.landed(Domain::Tcp, failed, imm));
    hub.path_ended(failed);
    let mut told = Vec::new();
    turn(&mut into, &mut hub);
    drain(&socket, &mut told);
    told.clear();
    // All of them have landed, and are named in each answer.
    let counted = imms.map(|imm| Counted { imm, landed: 0, undecided: 1 }).collect();
    let question = |counted| {
        let request = CloseRequest { path: PathIndex(0), counted, messages: Vec::new() };
        let question = closing::question(&request);
        [question_header(question.len()).as_slice(), &question].concat()
    };
    let first = question(counted);
    assert_eq!(send(&socket, &first), Ok(first.len()));
    turn(&mut into, &mut hub);
    let again = question(Vec::new());
    let many = again.repeat(500);
    let mut asked_bytes = 0;
    let mut unsent = Vec::new();
    for _ in 0..100 {
        loop {
            if unsent.is_empty() {
                unsent.extend_from_slice(&many);
            }
            let Ok(sent) = send(&socket, &unsent) else { break };
            unsent.drain(..sent);
            asked_bytes += sent;
        }
        turn(&mut into, &mut hub);
        let waiting = into.acks.len();
        let most = ACKS_WAITING_MAX + ACK_BYTES + CLOSING_BYTES_MAX;
        assert!(waiting <= most, "{waiting} bytes wait");
        assert!(hub.answers.is_empty(), "nor do any wait elsewhere");
    }
    // All that was asked is answered once somebody listens.
    loop {
        let before = told.len();
        drain(&socket, &mut told);
        if !turn(&mut into, &mut hub).busy && told.len() == before {
            break;
        }
    }
    let mut answers = 0;
    let mut rest = told.as_slice();
    while let Some((ack, after)) = rest.split_first_chunk::<ACK_BYTES>() {
        let Ok(Ack::Answer { bytes }) = Ack::decode(ack) else { panic!("no answer") };
        assert!(bytes > 4 * closing::FRAMES_MAX);
        rest = &after[bytes..];
        answers += 1;
    }
    assert_eq!(answers, 1 + asked_bytes / again.len());
}
