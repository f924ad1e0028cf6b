//! The receiving end of a shm connection: it hands out descriptors and reads the ring.

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use kvasir_transfer_core::PathId;
use prost::Message;

use super::{
    Copying, LinkMemory, Record, RegionAnswer, RegionPlace, RegionQuestion, SOCKET_BYTES_MAX,
    SOCKET_FULL_US, TAG_CLOSING, TAG_REGION, gate,
};
use crate::config::Domain;
use crate::descriptors::{self, DescriptorError};
use crate::doorbell::{self, Bell, Ringer};
use crate::endpoint::Endpoint;
use crate::hello::{HELLO_BYTES_MAX, Hello, HelloReply, Verdict};
use crate::memory::{Prefault, SharedMemory};
use crate::process::Process;
use crate::ring::Consumer;
use crate::worker::hub::Hub;
use crate::worker::link::{LinkEnd, Readiness, Turn};

const RECORDS_PER_TURN: usize = 512;
const LINK_BYTES_MIN: usize = 256 << 10;

#[derive(Debug)]
pub(crate) struct ShmIn {
    socket: OwnedFd,
    ready: Readiness,
    /// The writer's alone: what it does to its end is no other writer's trouble.
    bell: Bell,
    /// Until it is handed over.
    ringer: Option<Ringer>,
    /// To questions about other paths.
    answers: VecDeque<Vec<u8>>,
    up: Option<Up>,
}

#[derive(Debug)]
struct Up {
    peer: Endpoint,
    path: PathId,
    link: LinkMemory,
    consumer: Consumer,
    process: Arc<Process>,
    record: Vec<u8>,
}

impl ShmIn {
    pub(crate) fn new(socket: OwnedFd) -> rustix::io::Result<Self> {
        let (bell, ringer) = doorbell::pair()?;
        let ready = Readiness::default();
        let (ringer, answers) = (Some(ringer), VecDeque::new());
        Ok(ShmIn { socket, ready, bell, ringer, answers, up: None })
    }

    pub(crate) fn bell(&self) -> &Bell {
        &self.bell
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    pub(crate) fn ready(&mut self, ready: Readiness) {
        self.ready.add(ready);
    }

    pub(crate) fn peer(&self) -> Option<&Endpoint> {
        self.up.as_ref().map(|up| &up.peer)
    }

    pub(crate) fn path(&self) -> Option<PathId> {
        self.up.as_ref().map(|up| up.path)
    }

    /// Answers a question that came through it.
    pub(crate) fn tell(&mut self, answer: &[u8]) {
        self.answers.push_back(super::tagged(TAG_CLOSING, answer));
    }

    pub(crate) fn has_work(&self) -> bool {
        self.up.as_ref().is_some_and(|up| !up.consumer.is_empty())
    }

    pub(crate) fn turn(&mut self, hub: &mut Hub) -> Result<Turn, LinkEnd> {
        let result = self.serve(hub);
        // However the sender was found to be gone: what it had pushed has landed all the same.
        if matches!(result, Err(LinkEnd::Lost)) {
            self.read_rest(hub)?;
        }
        result
    }

    fn serve(&mut self, hub: &mut Hub) -> Result<Turn, LinkEnd> {
        let mut turn = Turn::default();
        if let Some(up) = &mut self.up {
            turn.busy |= up.read_ring(hub)?;
        }
        if !super::flush(&self.socket, &mut self.answers)? {
            turn.wait_until_us = hub.now_us + SOCKET_FULL_US;
        }
        let mut bytes = Vec::new();
        while self.ready.readable {
            bytes.resize(SOCKET_BYTES_MAX, 0);
            match descriptors::recv(&self.socket, &mut bytes) {
                Ok((length, _)) => {
                    turn.busy = true;
                    match &self.up {
                        None if length > HELLO_BYTES_MAX => return Err(LinkEnd::Malformed),
                        None => self.begin(&bytes[..length], hub)?,
                        Some(up) => match bytes[..length].split_first() {
                            Some((&TAG_REGION, question)) => self.answer(question, hub)?,
                            Some((&TAG_CLOSING, question)) => hub.asked(up.path, question)?,
                            _ => return Err(LinkEnd::Malformed),
                        },
                    }
                }
                Err(DescriptorError::WouldBlock) => self.ready.readable = false,
                Err(DescriptorError::Closed) => return Err(LinkEnd::Lost),
                Err(_) => return Err(LinkEnd::Malformed),
            }
        }
        Ok(turn)
    }

    /// Forbids further copies. What may be under way is returned.
    pub(crate) fn cut(&self) -> Option<Copying> {
        let up = self.up.as_ref()?;
        up.link.cut().store(1, Ordering::SeqCst);
        self.copying()
    }

    /// The copy that is under way now, if there is one.
    pub(crate) fn copying(&self) -> Option<Copying> {
        let up = self.up.as_ref()?;
        let epoch = gate::under_way(up.link.epoch())?;
        Some(Copying { link: up.link.clone(), epoch, process: Arc::clone(&up.process) })
    }

    fn begin(&mut self, hello: &[u8], hub: &mut Hub) -> Result<(), LinkEnd> {
        let verdict = Hello::judge(hello, &hub.shared.endpoint, |incarnation, cut_offs| {
            hub.shared.peers().admit(incarnation, cut_offs)
        });
        let newcomer = match verdict {
            Verdict::Admit(newcomer) => newcomer,
            Verdict::Decline(reply) => return self.decline(&reply),
            Verdict::Reject => return Err(LinkEnd::Rejected),
        };
        // Without its process we could never be sure that a copy has ended.
        let credentials = rustix::net::sockopt::socket_peercred(&self.socket)?;
        let id = u32::try_from(credentials.pid.as_raw_nonzero().get()).unwrap_or(0);
        let process = Process::open(id).map_err(|_| LinkEnd::Rejected)?;

        let record_bytes = hub.shared.config.message_bytes_max + super::RECORD_BYTES;
        let bytes = LINK_BYTES_MIN.max(8 * record_bytes.next_multiple_of(64));
        let memory = SharedMemory::create("kvasir-link", bytes, Prefault::Yes);
        let link = LinkMemory(Arc::new(memory.map_err(|_| LinkEnd::Lost)?));
        let consumer = Consumer::open(&link.0, link.ring()).map_err(|_| LinkEnd::Lost)?;
        let directory = hub.directory.as_ref().ok_or(LinkEnd::Rejected)?.memory();
        let reply = HelloReply {
            link_bytes: bytes as u64,
            directory_bytes: directory.len() as u64,
            ..HelloReply::admitting()
        };
        let ringer = self.ringer.take().ok_or(LinkEnd::Rejected)?;
        let directory = Arc::clone(directory);
        let path = match hub.open_path(&newcomer) {
            Ok(path) => path,
            Err(reply) => return self.decline(&reply),
        };
        // From here on it is a path, and ends as one.
        let (peer, process, record) = (newcomer.peer, Arc::new(process), Vec::new());
        self.up = Some(Up { peer, path, link: link.clone(), consumer, process, record });
        let fds = [link.0.fd(), directory.fd(), ringer.as_fd()];
        descriptors::send(&self.socket, &reply.encode_to_vec(), &fds).map_err(|_| LinkEnd::Lost)
    }

    fn decline(&self, reply: &HelloReply) -> Result<(), LinkEnd> {
        let told = descriptors::send(&self.socket, &reply.encode_to_vec(), &[]);
        Err(told.err().map_or(LinkEnd::Rejected, |_| LinkEnd::Lost))
    }

    fn answer(&self, question: &[u8], hub: &mut Hub) -> Result<(), LinkEnd> {
        let RegionQuestion { key } = RegionQuestion::decode(question).ok_or(LinkEnd::Malformed)?;
        let memory = hub.region(key);
        let slot = hub.directory.as_ref().and_then(|directory| directory.slot(key));
        let (place, fds) = match (&memory, slot) {
            (Some(memory), Some(slot)) => {
                let length_bytes = memory.len() as u64;
                (Ok(RegionPlace { slot: slot as u64, length_bytes }), vec![memory.fd()])
            }
            _ => (Err(hub.why_unknown(key)), Vec::new()),
        };
        let answer = super::tagged(TAG_REGION, &RegionAnswer { key, place }.encode());
        descriptors::send(&self.socket, &answer, &fds).map_err(|_| LinkEnd::Lost)
    }

    /// Reads what the sender has pushed, when it pushes no more.
    pub(crate) fn read_rest(&mut self, hub: &mut Hub) -> Result<(), LinkEnd> {
        let Some(up) = &mut self.up else { return Ok(()) };
        let turns = up.link.0.len() / RECORDS_PER_TURN;
        for _ in 0..turns {
            if !up.read_ring(hub)? {
                break;
            }
        }
        Ok(())
    }
}

impl Up {
    fn read_ring(&mut self, hub: &mut Hub) -> Result<bool, LinkEnd> {
        let mut any = false;
        for _ in 0..RECORDS_PER_TURN {
            if !self.consumer.pop(&mut self.record).map_err(|_| LinkEnd::Malformed)? {
                break;
            }
            any = true;
            match Record::decode(&self.record).ok_or(LinkEnd::Malformed)? {
                Record::Landed { imm } => hub.landed(Domain::Shm, self.path, imm),
                Record::Message { bytes, .. }
                    if bytes.len() > hub.shared.config.message_bytes_max =>
                {
                    return Err(LinkEnd::Malformed);
                }
                Record::Message { id, bytes } => {
                    hub.message(Domain::Shm, (&self.peer, self.path), id, bytes.to_vec());
                }
            }
        }
        Ok(any)
    }
}
