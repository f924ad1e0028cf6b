//! The shm domain: same host, the peer's memory is mapped here. A write is a check in the peer's
//! region directory, a copy, and one record in a ring; nothing is asked of the peer. Descriptors come
//! over a Unix socket, whose end is the end of the connection.
//!
//! The two sides trust each other with their regions (whoever may write a region may spoil it), but
//! not with anything else: the receiver survives whatever a sender does to the ring.

pub(crate) mod directory;
mod entry;
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) mod fuzzing;
mod gate;
pub(crate) mod incoming;
pub(crate) mod outgoing;

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64};

use kvasir_mutation::{Mutation, mutated};
use kvasir_transfer_core::{Refusal, Settled};
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, accept_with, bind, connect, listen,
    socket_with,
};

use crate::closing::CLOSING_BYTES_MAX;
use crate::descriptors::{self, DescriptorError};
use crate::memory::SharedMemory;
use crate::process::Process;
use crate::ring::RingRange;
use crate::worker::link::LinkEnd;

const BACKLOG: i32 = 1024;

fn open() -> rustix::io::Result<OwnedFd> {
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
}

pub(crate) fn start_listening(path: &Path) -> rustix::io::Result<OwnedFd> {
    let socket = open()?;
    bind(&socket, &SocketAddrUnix::new(path)?)?;
    listen(&socket, BACKLOG)?;
    Ok(socket)
}

pub(crate) fn take_connection(listener: &OwnedFd) -> rustix::io::Result<OwnedFd> {
    accept_with(listener, SocketFlags::NONBLOCK | SocketFlags::CLOEXEC)
}

fn start_connecting(path: &Path) -> rustix::io::Result<OwnedFd> {
    let socket = open()?;
    connect(&socket, &SocketAddrUnix::new(path)?)?;
    Ok(socket)
}

/// Names this boot of this host, and the view of its processes that we have: engines that differ in
/// either cannot share memory, because they could not watch each other's processes.
pub(crate) fn host_id() -> std::io::Result<String> {
    let boot_id = std::fs::read_to_string("/proc/sys/kernel/random/boot_id")?;
    let pids = std::fs::read_link("/proc/self/ns/pid")?;
    Ok(format!("{} {}", boot_id.trim(), pids.display()))
}

/// The memory of one connection: made by the receiver, written by both.
#[derive(Debug, Clone)]
struct LinkMemory(Arc<SharedMemory>);

const EPOCH: usize = 0;
const CUT: usize = 64;
const RING: usize = 128;

impl LinkMemory {
    fn ring(&self) -> RingRange {
        RingRange { offset: RING, bytes: self.0.len() - RING }
    }

    /// Odd while the sender copies; see [`gate`].
    fn epoch(&self) -> &AtomicU64 {
        self.0.atomic_u64(EPOCH).expect("link memory is never so small")
    }

    /// Not zero: the sender may not write any more.
    fn cut(&self) -> &AtomicU32 {
        self.0.atomic_u32(CUT).expect("link memory is never so small")
    }
}

/// A copy that may be under way, seen from the receiver.
#[derive(Debug, Clone)]
pub(crate) struct Copying {
    link: LinkMemory,
    epoch: u64,
    process: Arc<Process>,
}

impl Copying {
    /// It has ended, or its process has.
    pub(crate) fn is_over(&self) -> bool {
        gate::is_over(self.link.epoch(), self.epoch)
            || (!mutated(Mutation::DeadWriterWaitedFor) && self.process.has_exited())
    }
}

/// A record in the ring.
#[derive(Debug, PartialEq, Eq)]
enum Record<'a> {
    Landed {
        imm: u32,
    },
    /// It is acknowledged by its sequence; see [`Taken`].
    Message {
        sequence: u64,
        id: u64,
        bytes: &'a [u8],
    },
}

const RECORD_LANDED: u8 = 1;
const RECORD_MESSAGE: u8 = 2;
/// Of the longest record beside a message's bytes.
const RECORD_BYTES: usize = 17;
const LANDED_BYTES: usize = 5;

impl<'a> Record<'a> {
    fn landed(imm: u32) -> [u8; LANDED_BYTES] {
        let [a, b, c, d] = imm.to_le_bytes();
        [RECORD_LANDED, a, b, c, d]
    }

    fn message(sequence: u64, id: u64, bytes: &[u8]) -> Vec<u8> {
        let (sequence, id) = (sequence.to_le_bytes(), id.to_le_bytes());
        [&[RECORD_MESSAGE], sequence.as_slice(), &id, bytes].concat()
    }

    fn decode(bytes: &'a [u8]) -> Option<Self> {
        match bytes {
            [RECORD_LANDED, a, b, c, d] => {
                Some(Record::Landed { imm: u32::from_le_bytes([*a, *b, *c, *d]) })
            }
            [RECORD_MESSAGE, rest @ ..] => {
                let (sequence, rest) = rest.split_first_chunk()?;
                let (id, bytes) = rest.split_first_chunk()?;
                let (sequence, id) = (u64::from_le_bytes(*sequence), u64::from_le_bytes(*id));
                Some(Record::Message { sequence, id, bytes })
            }
            _ => None,
        }
    }
}

/// What the Unix socket carries beside the greeting, either way: a tag, and then a question or answer.
const TAG_REGION: u8 = 1;
/// About a path that has failed; see `closing`.
const TAG_CLOSING: u8 = 2;
/// What became of messages; only back.
const TAG_TAKEN: u8 = 3;
/// Asks for a sign of life, and is one.
const TAG_HEARTBEAT: u8 = 4;
/// Of the longest one.
const SOCKET_BYTES_MAX: usize = 1 + CLOSING_BYTES_MAX;
/// How long to leave a full socket alone.
const SOCKET_FULL_US: u64 = 100;
/// What is read of one socket before others have their turn: whoever always has more to say keeps nobody waiting.
const DATAGRAMS_PER_TURN: usize = 64;

fn tagged(tag: u8, body: &[u8]) -> Vec<u8> {
    [&[tag], body].concat()
}

/// Sends what waits, as long as the socket takes it. Whether everything is gone.
fn flush(socket: &OwnedFd, waiting: &mut VecDeque<Vec<u8>>) -> Result<bool, LinkEnd> {
    while let Some(bytes) = waiting.front() {
        match descriptors::send(socket, bytes, &[]) {
            Ok(()) => waiting.pop_front(),
            Err(DescriptorError::WouldBlock) => return Ok(false),
            Err(_) => return Err(LinkEnd::Lost),
        };
    }
    Ok(true)
}

/// What became of one message: the receiver tells of many at once. (Writes need no such word: their
/// sender does them itself.)
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Taken {
    /// Of the frame.
    sequence: u64,
    settled: Settled,
}

const TAKEN_BYTES: usize = 9;

impl Taken {
    fn encode(self) -> [u8; TAKEN_BYTES] {
        let code = match self.settled {
            Settled::Refused(refusal) => refusal.code(),
            Settled::Landed | Settled::Corrupt => 0,
        };
        let mut bytes = [code; TAKEN_BYTES];
        bytes[1..].copy_from_slice(&self.sequence.to_le_bytes());
        bytes
    }

    /// All that are told of.
    fn decode(bytes: &[u8]) -> impl Iterator<Item = Option<Self>> {
        let (all, rest) = bytes.as_chunks::<TAKEN_BYTES>();
        let one = |[code, sequence @ ..]: &[u8; TAKEN_BYTES]| {
            let settled = match code {
                0 => Settled::Landed,
                code => Settled::Refused(Refusal::from_code(*code)?),
            };
            Some(Taken { sequence: u64::from_le_bytes(*sequence), settled })
        };
        all.iter().map(one).chain((!rest.is_empty()).then_some(None))
    }
}

/// Asks for the descriptor of a region.
#[derive(Debug, PartialEq, Eq)]
struct RegionQuestion {
    key: u64,
}

/// Where the region stands in the directory; its descriptor comes along.
#[derive(Debug, PartialEq, Eq)]
struct RegionAnswer {
    key: u64,
    place: Result<RegionPlace, Refusal>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct RegionPlace {
    slot: u64,
    length_bytes: u64,
}

const ANSWER_WORDS: usize = 4;

impl RegionQuestion {
    fn encode(&self) -> [u8; 8] {
        self.key.to_le_bytes()
    }

    fn decode(bytes: &[u8]) -> Option<Self> {
        Some(RegionQuestion { key: u64::from_le_bytes(bytes.try_into().ok()?) })
    }
}

impl RegionAnswer {
    fn encode(&self) -> Vec<u8> {
        let words: [u64; ANSWER_WORDS] = match self.place {
            Ok(RegionPlace { slot, length_bytes }) => [self.key, 0, slot, length_bytes],
            Err(refusal) => [self.key, u64::from(refusal.code()), 0, 0],
        };
        words.into_iter().flat_map(u64::to_le_bytes).collect()
    }

    fn decode(bytes: &[u8]) -> Option<Self> {
        let (words, rest) = bytes.as_chunks::<8>();
        let [key, code, slot, length_bytes] = words else { return None };
        if !rest.is_empty() {
            return None;
        }
        let key = u64::from_le_bytes(*key);
        let place = match u64::from_le_bytes(*code) {
            0 => {
                let slot = u64::from_le_bytes(*slot);
                Ok(RegionPlace { slot, length_bytes: u64::from_le_bytes(*length_bytes) })
            }
            code => Err(Refusal::from_code(u8::try_from(code).ok()?)?),
        };
        Some(RegionAnswer { key, place })
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering;

    use proptest::prelude::*;

    use super::*;
    use crate::memory::Prefault;

    #[test]
    fn a_copy_is_over_when_its_epoch_or_its_process_is() {
        let memory = SharedMemory::create("test", 4096, Prefault::No).expect("memory");
        let link = LinkMemory(Arc::new(memory));
        link.epoch().store(3, Ordering::SeqCst);
        let copying = |process| Copying { link: link.clone(), epoch: 3, process };
        let own = Process::open(std::process::id()).expect("alive");
        let by_us = copying(Arc::new(own));
        assert!(!by_us.is_over());
        let mut child = std::process::Command::new("true").spawn().expect("spawned");
        let process = Arc::new(Process::open(child.id()).expect("not reaped yet"));
        child.wait().expect("reaped");
        assert!(copying(process).is_over(), "its process is gone");
        link.epoch().store(4, Ordering::SeqCst);
        assert!(by_us.is_over());
    }

    #[test]
    fn records_questions_and_answers_survive_the_way() {
        assert_eq!(Record::decode(&Record::landed(7)), Some(Record::Landed { imm: 7 }));
        assert_eq!(
            Record::decode(&Record::message(5, 9, b"hi")),
            Some(Record::Message { sequence: 5, id: 9, bytes: b"hi" })
        );
        let taken = [Settled::Landed, Settled::Refused(Refusal::NoRoom)]
            .map(|settled| Taken { sequence: u64::MAX, settled });
        let told: Vec<_> = Taken::decode(taken.map(Taken::encode).as_flattened()).collect();
        assert_eq!(told, taken.map(Some));
        assert_eq!(
            RegionQuestion::decode(&RegionQuestion { key: 3 }.encode()).map(|q| q.key),
            Some(3)
        );
        let place = RegionPlace { slot: 2, length_bytes: 9 };
        for place in [Ok(place), Err(Refusal::Revoked)] {
            let answer = RegionAnswer { key: 5, place };
            assert_eq!(RegionAnswer::decode(&answer.encode()), Some(answer));
        }
    }

    proptest! {
        #[test]
        fn any_bytes_are_decoded_or_nothing(bytes in proptest::collection::vec(any::<u8>(), 0..40)) {
            let _ = Record::decode(&bytes);
            let _ = RegionQuestion::decode(&bytes);
            prop_assert_eq!(Taken::decode(&bytes).count(), bytes.len().div_ceil(TAKEN_BYTES));
            if let Some(answer) = RegionAnswer::decode(&bytes) {
                prop_assert_eq!(bytes.len(), 32);
                prop_assert_eq!(RegionAnswer::decode(&answer.encode()), Some(answer));
            }
        }
    }
}
