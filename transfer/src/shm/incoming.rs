//! The receiving end of a shm connection: it hands out descriptors and reads the ring.

use std::collections::{BTreeSet, VecDeque};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use kvasir_mutation::{Mutation, mutated};
use kvasir_transfer_core::PathId;
use prost::Message;

use super::{
    Copying, DATAGRAMS_PER_TURN, LinkMemory, Record, RegionAnswer, RegionPlace, RegionQuestion,
    SOCKET_BYTES_MAX, SOCKET_FULL_US, TAG_CLOSING, TAG_HEARTBEAT, TAG_REGION, TAG_TAKEN, Taken,
    gate,
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
/// Of what the sender is to be told: while more waits, neither its ring nor its socket is read.
const ANSWERS_WAITING_MAX: usize = 256;
/// Likewise. An answer about a failed path may have tens of KiB.
const ANSWER_BYTES_WAITING_MAX: usize = 256 << 10;

#[derive(Debug)]
pub(crate) struct ShmIn {
    socket: OwnedFd,
    ready: Readiness,
    /// The writer's alone: what it does to its end is no other writer's trouble.
    bell: Bell,
    /// Until it is handed over.
    ringer: Option<Ringer>,
    /// What the sender is to be told, in order.
    answers: VecDeque<Answer>,
    /// Of `answers`.
    answer_bytes: usize,
    up: Option<Up>,
}

#[derive(Debug)]
struct Answer {
    bytes: Vec<u8>,
    /// Its descriptor goes along.
    memory: Option<Arc<SharedMemory>>,
}

#[derive(Debug)]
struct Up {
    peer: Endpoint,
    path: PathId,
    link: LinkMemory,
    consumer: Consumer,
    process: Arc<Process>,
    record: Vec<u8>,
    /// Of the next message.
    buffer: Vec<u8>,
    /// Encoded: what became of messages that were read and not told of yet.
    taken: Vec<u8>,
    /// Keys of the regions that it was given, until they are revoked: it copies into no others.
    given: BTreeSet<u64>,
}

impl ShmIn {
    pub(crate) fn new(socket: OwnedFd) -> rustix::io::Result<Self> {
        let (bell, ringer) = doorbell::pair()?;
        let ready = Readiness::default();
        let (ringer, answers) = (Some(ringer), VecDeque::new());
        Ok(ShmIn { socket, ready, bell, ringer, answers, answer_bytes: 0, up: None })
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
        self.answer_with(super::tagged(TAG_CLOSING, answer), None);
    }

    fn answer_with(&mut self, bytes: Vec<u8>, memory: Option<Arc<SharedMemory>>) {
        self.answer_bytes += bytes.len();
        self.answers.push_back(Answer { bytes, memory });
    }

    /// Whoever does not take what it is told is not read from.
    fn is_heard(&self) -> bool {
        self.answers.len() < ANSWERS_WAITING_MAX && self.answer_bytes < ANSWER_BYTES_WAITING_MAX
    }

    /// Tells what became of messages.
    fn tell_taken(&mut self) {
        let Some(up) = self.up.as_mut().filter(|up| !up.taken.is_empty()) else { return };
        let bytes = super::tagged(TAG_TAKEN, &up.taken);
        up.taken.clear();
        self.answer_with(bytes, None);
    }

    /// Sends what waits, as long as the socket takes it. Whether everything is gone.
    fn flush(&mut self) -> Result<bool, LinkEnd> {
        while let Some(Answer { bytes, memory }) = self.answers.front() {
            let fds: Vec<BorrowedFd<'_>> = memory.iter().map(|memory| memory.fd()).collect();
            match descriptors::send(&self.socket, bytes, &fds) {
                Ok(()) => self.answer_bytes -= bytes.len(),
                Err(DescriptorError::WouldBlock) => return Ok(false),
                Err(_) => return Err(LinkEnd::Lost),
            }
            self.answers.pop_front();
        }
        Ok(true)
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
        let is_heard = self.is_heard();
        if let Some(up) = self.up.as_mut().filter(|_| is_heard) {
            turn.busy |= up.read_ring(hub)?;
        }
        self.tell_taken();
        if !self.flush()? {
            turn.wait_until_us = hub.now_us + SOCKET_FULL_US;
        }
        let mut bytes = Vec::new();
        let is_bounded = !mutated(Mutation::QuestionReadsUnbounded);
        for _ in 0..if is_bounded { DATAGRAMS_PER_TURN } else { usize::MAX } {
            if !self.ready.readable || !self.is_heard() {
                break;
            }
            bytes.resize(SOCKET_BYTES_MAX, 0);
            match descriptors::recv(&self.socket, &mut bytes) {
                Ok((length, _)) => {
                    turn.busy = true;
                    match &self.up {
                        None if length > HELLO_BYTES_MAX => return Err(LinkEnd::Malformed),
                        None => self.begin(&bytes[..length], hub)?,
                        Some(up) => match bytes[..length].split_first() {
                            Some((&TAG_REGION, question)) => {
                                let question = RegionQuestion::decode(question);
                                self.answer(question.ok_or(LinkEnd::Malformed)?, hub)?;
                            }
                            Some((&TAG_CLOSING, question)) => {
                                if let Some(answer) = hub.asked(up.path, question)? {
                                    self.tell(&answer);
                                    self.flush()?;
                                }
                            }
                            Some((&TAG_HEARTBEAT, [])) => {
                                self.answer_with(vec![TAG_HEARTBEAT], None);
                                self.flush()?;
                            }
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

    /// Forbids further copies. What may be under way is returned, and the keys of the regions that it may
    /// go to.
    pub(crate) fn cut(&mut self) -> Option<(Copying, BTreeSet<u64>)> {
        let up = self.up.as_mut()?;
        up.link.cut().store(1, Ordering::SeqCst);
        Some((up.copying()?, std::mem::take(&mut up.given)))
    }

    /// The region may not be written to any more: the copy that may be under way into it.
    pub(crate) fn revoked(&mut self, key: u64) -> Option<Copying> {
        let waits_for_all = mutated(Mutation::RevocationWaitsForEveryCopy);
        let up = self.up.as_mut().filter(|up| up.given.contains(&key) || waits_for_all)?;
        let copying = up.copying();
        if copying.is_none() {
            up.given.remove(&key);
        }
        copying
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
        hub.take_place()?;
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
            message_bytes_max: hub.shared.config.message_bytes_max as u64,
            ..HelloReply::admitting()
        };
        let ringer = self.ringer.take().ok_or(LinkEnd::Rejected)?;
        let directory = Arc::clone(directory);
        let path = match hub.open_path(&newcomer) {
            Ok(path) => path,
            Err(reply) => return self.decline(&reply),
        };
        // From here on it is a path, and ends as one.
        self.up = Some(Up {
            peer: newcomer.peer,
            path,
            link: link.clone(),
            consumer,
            process: Arc::new(process),
            record: Vec::new(),
            buffer: Vec::new(),
            taken: Vec::new(),
            given: BTreeSet::new(),
        });
        let fds = [link.0.fd(), directory.fd(), ringer.as_fd()];
        descriptors::send(&self.socket, &reply.encode_to_vec(), &fds).map_err(|_| LinkEnd::Lost)
    }

    fn decline(&self, reply: &HelloReply) -> Result<(), LinkEnd> {
        let told = descriptors::send(&self.socket, &reply.encode_to_vec(), &[]);
        Err(told.err().map_or(LinkEnd::Rejected, |_| LinkEnd::Lost))
    }

    fn answer(&mut self, question: RegionQuestion, hub: &mut Hub) -> Result<(), LinkEnd> {
        let RegionQuestion { key } = question;
        let (place, memory) = match hub.shm_region(key) {
            Some((memory, slot)) => {
                let length_bytes = memory.len() as u64;
                self.up.as_mut().map(|up| up.given.insert(key));
                (Ok(RegionPlace { slot: slot as u64, length_bytes }), Some(memory))
            }
            None => (Err(hub.why_unknown(key)), None),
        };
        let answer = super::tagged(TAG_REGION, &RegionAnswer { key, place }.encode());
        self.answer_with(answer, memory);
        self.flush().map(drop)
    }

    /// Reads for the last time what the sender has pushed: that has landed, and must be counted. One that
    /// pushes all the same while this goes on does so in vain.
    pub(crate) fn read_rest(&mut self, hub: &mut Hub) -> Result<(), LinkEnd> {
        let Some(up) = &mut self.up else { return Ok(()) };
        up.link.cut().store(1, Ordering::SeqCst);
        let end = up.consumer.end().map_err(|_| LinkEnd::Malformed)?;
        // The factor is finite, so that the test of the mutation ends.
        let end =
            if mutated(Mutation::LastRingReadUnbounded) { end.saturating_mul(99) } else { end };
        while up.consumer.position() < end && up.read_record(hub)? {
            // Nobody is told of messages any more: what was taken is asked about on another path.
            up.taken.clear();
        }
        Ok(())
    }
}

impl Up {
    /// The copy that is under way now, if there is one.
    fn copying(&self) -> Option<Copying> {
        let epoch = gate::under_way(self.link.epoch())?;
        Some(Copying { link: self.link.clone(), epoch, process: Arc::clone(&self.process) })
    }

    /// Whether there was anything, or may be.
    fn read_ring(&mut self, hub: &mut Hub) -> Result<bool, LinkEnd> {
        for read in 0..RECORDS_PER_TURN {
            // Left alone until its messages have room.
            if hub.must_tell() {
                return Ok(true);
            }
            if !self.read_record(hub)? {
                return Ok(read > 0);
            }
        }
        Ok(true)
    }

    /// Whether there was one.
    fn read_record(&mut self, hub: &mut Hub) -> Result<bool, LinkEnd> {
        if !self.consumer.pop(&mut self.record).map_err(|_| LinkEnd::Malformed)? {
            return Ok(false);
        }
        match Record::decode(&self.record).ok_or(LinkEnd::Malformed)? {
            Record::Landed { imm } => hub.landed(Domain::Shm, self.path, imm),
            Record::Message { bytes, .. } if bytes.len() > hub.shared.config.message_bytes_max => {
                return Err(LinkEnd::Malformed);
            }
            Record::Message { sequence, id, bytes } => {
                self.buffer.clear();
                self.buffer.extend_from_slice(bytes);
                let from = (&self.peer, self.path);
                let settled = hub.message(Domain::Shm, from, id, &mut self.buffer);
                self.taken.extend_from_slice(&Taken { sequence, settled }.encode());
            }
        }
        Ok(true)
    }
}

#[cfg(test)]
mod tests;
