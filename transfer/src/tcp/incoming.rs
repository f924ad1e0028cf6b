//! The receiving end of a tcp connection. Headers are read through a small buffer, payloads directly
//! into their target once the target is checked. Whatever comes can at worst end this connection.

use std::io::IoSliceMut;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use kvasir_checksum::Checksum;
use kvasir_mutation::{Mutation, mutated};
use kvasir_transfer_core::{FrameKind, PathId, Refusal, Settled, Target};
use prost::Message;

use super::frame::{Ack, Announced, HEADER_BYTES, Header};
use super::stream::{Blocked, Stream};
use super::{GREETING_BYTES, greeting, greeting_length};
use crate::config::Domain;
use crate::endpoint::Endpoint;
use crate::hello::{HELLO_BYTES_MAX, Hello, HelloReply, Newcomer, Verdict};
use crate::memory::SharedMemory;
use crate::messages::MESSAGE_BYTES_MAX;
use crate::worker::hub::Hub;
use crate::worker::link::{LinkEnd, Readiness, Turn};

/// Holds any greeting.
const AHEAD_BYTES: usize = GREETING_BYTES + HELLO_BYTES_MAX;
/// What is read ahead behind a payload: a few headers or messages. It may be the beginning of the next
/// payload, and is copied then.
const BEHIND_PAYLOAD_BYTES: usize = 1024;
const BYTES_PER_TURN: u64 = 2 << 20;
const SKIP_BYTES: usize = 64 << 10;
/// A peer that lets more acknowledgements and answers wait than this is not read from.
const ACKS_WAITING_MAX: usize = 64 << 10;

#[derive(Debug)]
pub(crate) struct TcpIn {
    stream: Stream,
    ready: Readiness,
    /// Known once it is admitted.
    peer: Option<(Endpoint, PathId)>,
    /// What it sends is to be placed by a card: it is not for this domain.
    for_card: Option<Box<Newcomer>>,
    ahead: Box<[u8; AHEAD_BYTES]>,
    /// What is buffered and not used yet.
    ahead_start: usize,
    ahead_end: usize,
    reading: Reading,
    /// For the next message.
    buffer: Vec<u8>,
    /// Landed, and not acknowledged yet.
    landed: Option<u64>,
    acks: Vec<u8>,
}

#[derive(Debug)]
enum Reading {
    Header,
    Payload {
        header: Header,
        into: Landing,
        left: u64,
        hash: Option<Box<Checksum>>,
    },
    Skip {
        header: Header,
        left: u64,
        settled: Settled,
    },
    Message {
        header: Header,
        message: Vec<u8>,
        filled: usize,
    },
    Question {
        question: Vec<u8>,
        filled: usize,
    },
    /// A seal: the whole is read back.
    Verify {
        header: Header,
        into: Landing,
        left: u64,
        hash: Box<Checksum>,
    },
}

/// A checked target.
#[derive(Debug)]
struct Landing {
    target: Target,
    memory: Arc<SharedMemory>,
    at: usize,
}

impl Landing {
    /// So many bytes from where it stands.
    fn add_to(&self, hash: &mut Checksum, bytes: usize) {
        let added = self.memory.add_to(self.at, bytes, hash);
        debug_assert!(added.is_ok(), "the range was checked");
    }
}

impl TcpIn {
    pub(crate) fn new(stream: Stream) -> Self {
        TcpIn {
            stream,
            ready: Readiness::default(),
            peer: None,
            for_card: None,
            ahead: Box::new([0; AHEAD_BYTES]),
            ahead_start: 0,
            ahead_end: 0,
            reading: Reading::Header,
            buffer: Vec::new(),
            landed: None,
            acks: Vec::new(),
        }
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }

    pub(crate) fn ready(&mut self, ready: Readiness) {
        self.ready.add(ready);
    }

    pub(crate) fn peer(&self) -> Option<&Endpoint> {
        self.peer.as_ref().map(|(peer, _)| peer)
    }

    pub(crate) fn path(&self) -> Option<PathId> {
        self.peer.as_ref().map(|(_, path)| *path)
    }

    /// Whether its greeting asks for another domain; see [`TcpIn::into_card`].
    pub(crate) fn is_for_card(&self) -> bool {
        self.for_card.is_some()
    }

    /// Who asks for it, and for which card.
    pub(crate) fn for_card(&self) -> Option<&Newcomer> {
        self.for_card.as_deref()
    }

    /// The connection, with what its greeting said. Nothing was answered yet, and nothing comes before.
    pub(crate) fn into_card(self) -> Option<(Stream, Newcomer)> {
        self.for_card.map(|newcomer| (self.stream, *newcomer))
    }

    /// Answers a question that came through it.
    pub(crate) fn tell(&mut self, answer: &[u8]) {
        self.acknowledge_landed();
        self.acks.extend_from_slice(&Ack::Answer { bytes: answer.len() }.encode());
        self.acks.extend_from_slice(answer);
    }

    pub(crate) fn turn(&mut self, hub: &mut Hub) -> Result<Turn, LinkEnd> {
        let mut turn = Turn::default();
        self.stream.flush(&mut self.ready)?;
        if self.peer.is_none() {
            turn.busy = self.for_card.is_none() && self.read_hello(hub)?;
            if self.peer.is_none() {
                return Ok(turn);
            }
        }
        let mut budget = BYTES_PER_TURN;
        let result = loop {
            if budget == 0 || self.acks.len() > ACKS_WAITING_MAX {
                break Ok(());
            }
            if hub.must_tell() {
                turn.busy = true;
                break Ok(());
            }
            match self.step(hub) {
                Ok(0) => break Ok(()),
                Ok(used) => {
                    turn.busy = true;
                    budget = budget.saturating_sub(used);
                }
                Err(end) => break Err(end),
            }
        };
        // What has landed is acknowledged even when the connection ends now.
        turn.busy |= self.flush_acks()?;
        result.map(|()| turn)
    }

    /// Nothing is written to the region any more from now on.
    pub(crate) fn revoked(&mut self, key: u64) {
        let (header, into, left) = match &self.reading {
            Reading::Payload { header, into, left, .. } => (*header, into, *left),
            // Its bytes are on the wire no more: nothing is left to skip.
            Reading::Verify { header, into, .. } => (*header, into, 0),
            Reading::Header
            | Reading::Skip { .. }
            | Reading::Message { .. }
            | Reading::Question { .. } => return,
        };
        if into.target.key == key && !mutated(Mutation::TcpPayloadOutlivesRevocation) {
            let settled = Settled::Refused(Refusal::Revoked);
            self.reading = Reading::Skip { header, left, settled };
        }
    }

    // ---- the greeting ----

    fn read_hello(&mut self, hub: &mut Hub) -> Result<bool, LinkEnd> {
        if self.read_ahead(AHEAD_BYTES)? == 0 {
            return Ok(false);
        }
        let buffered = &self.ahead[self.ahead_start..self.ahead_end];
        let Some(prefix) = buffered.first_chunk::<GREETING_BYTES>() else { return Ok(true) };
        let length = greeting_length(*prefix).ok_or(LinkEnd::Malformed)?;
        let Some(body) = buffered.get(GREETING_BYTES..GREETING_BYTES + length) else {
            return Ok(true);
        };
        let verdict = Hello::judge(body, &hub.shared.endpoint, |incarnation, cut_offs| {
            hub.shared.peers().admit(incarnation, cut_offs)
        });
        let reply = match verdict {
            Verdict::Admit(newcomer) if newcomer.card.is_some() => {
                hub.take_place()?;
                self.for_card = Some(Box::new(newcomer));
                return Ok(true);
            }
            Verdict::Admit(newcomer) => {
                hub.take_place()?;
                match hub.open_path(&newcomer) {
                    Ok(path) => {
                        self.peer = Some((newcomer.peer, path));
                        HelloReply::admitting()
                    }
                    Err(reply) => reply,
                }
            }
            Verdict::Decline(reply) => reply,
            Verdict::Reject => return Err(LinkEnd::Rejected),
        };
        self.acks.extend_from_slice(&greeting(&reply.encode_to_vec()));
        self.flush_acks()?;
        if self.peer.is_none() {
            return Err(LinkEnd::Rejected);
        }
        self.ahead_start += GREETING_BYTES + length;
        Ok(true)
    }

    // ---- frames ----

    /// Does one piece of work. Returns how much it was in bytes; 0 when there is nothing to do now.
    fn step(&mut self, hub: &mut Hub) -> Result<u64, LinkEnd> {
        let buffered = self.ahead_end - self.ahead_start;
        match &mut self.reading {
            Reading::Header if buffered < HEADER_BYTES => self.read_ahead(AHEAD_BYTES),
            Reading::Header => self.take_header(hub),
            Reading::Payload { left: 0, .. }
            | Reading::Skip { left: 0, .. }
            | Reading::Verify { left: 0, .. } => self.finish_frame(hub),
            Reading::Message { message, filled, .. } if *filled == message.len() => {
                self.finish_frame(hub)
            }
            Reading::Question { question, filled } if *filled == question.len() => {
                self.finish_frame(hub)
            }
            Reading::Verify { .. } => Ok(self.verify_some()),
            _ if buffered > 0 => Ok(self.take_buffered(hub)),
            _ => self.read_payload(hub),
        }
    }

    fn read_ahead(&mut self, upto: usize) -> Result<u64, LinkEnd> {
        if !self.ready.readable {
            return Ok(0);
        }
        self.ahead.copy_within(self.ahead_start..self.ahead_end, 0);
        self.ahead_end -= self.ahead_start;
        self.ahead_start = 0;
        let room = self.ahead.get_mut(self.ahead_end..upto).unwrap_or_default();
        let bytes = received(self.stream.read(room), &mut self.ready)?;
        self.ahead_end += bytes;
        Ok(bytes as u64)
    }

    fn take_header(&mut self, hub: &mut Hub) -> Result<u64, LinkEnd> {
        let buffered = &self.ahead[self.ahead_start..self.ahead_end];
        let bytes = buffered.first_chunk().ok_or(LinkEnd::Malformed)?;
        let announced = Announced::decode(bytes).map_err(|_| LinkEnd::Malformed)?;
        self.ahead_start += HEADER_BYTES;
        let header = match announced {
            Announced::Frame(header) => header,
            Announced::Question { bytes } => {
                self.reading = Reading::Question { question: vec![0; bytes], filled: 0 };
                return Ok(HEADER_BYTES as u64);
            }
            Announced::Heartbeat => {
                self.acks.extend_from_slice(&Ack::Alive.encode());
                return Ok(HEADER_BYTES as u64);
            }
        };
        let left = header.payload_bytes;
        self.reading = match header.kind {
            FrameKind::Message { .. } if left > MESSAGE_BYTES_MAX as u64 => {
                return Err(LinkEnd::Malformed);
            }
            FrameKind::Message { .. } if left > hub.shared.config.message_bytes_max as u64 => {
                let settled = hub.refuse_message(Domain::Tcp, Refusal::TooLong);
                Reading::Skip { header, left, settled }
            }
            FrameKind::Message { .. } => {
                let mut message = std::mem::take(&mut self.buffer);
                message.resize(left as usize, 0);
                Reading::Message { header, message, filled: 0 }
            }
            FrameKind::Write { target, offset, checksum, .. } => {
                let wanted = checksum.is_some() && hub.shared.config.verify.tcp;
                let hash = wanted.then(Box::default);
                match hub.check(Domain::Tcp, target, offset, left) {
                    Ok(memory) => {
                        let into = Landing { target, memory, at: offset as usize };
                        Reading::Payload { header, into, left, hash }
                    }
                    Err(refusal) => {
                        Reading::Skip { header, left, settled: Settled::Refused(refusal) }
                    }
                }
            }
            FrameKind::Signal { target, offset, value, .. } => {
                let memory = hub.check(Domain::Tcp, target, offset, 8);
                let stored = memory.and_then(|memory| {
                    memory.store_word(offset as usize, value).map_err(|_| Refusal::OutOfBounds)
                });
                let settled = stored.map_or_else(Settled::Refused, |()| Settled::Landed);
                if settled == Settled::Landed {
                    hub.metrics.tcp.received_bytes.inc_by(8);
                }
                Reading::Skip { header, left: 0, settled }
            }
            FrameKind::Seal { target, offset, whole_bytes, checksum, .. } => {
                let wanted = checksum.is_some() && hub.shared.config.verify.tcp;
                match hub.check(Domain::Tcp, target, offset, whole_bytes) {
                    Ok(memory) => {
                        let into = Landing { target, memory, at: offset as usize };
                        let left = if wanted { whole_bytes } else { 0 };
                        let hash = Box::default();
                        if wanted {
                            Reading::Verify { header, into, left, hash }
                        } else {
                            Reading::Payload { header, into, left: 0, hash: None }
                        }
                    }
                    Err(refusal) => {
                        Reading::Skip { header, left: 0, settled: Settled::Refused(refusal) }
                    }
                }
            }
        };
        Ok(HEADER_BYTES as u64)
    }

    /// Uses what was read ahead as payload.
    fn take_buffered(&mut self, hub: &mut Hub) -> u64 {
        let buffered = &self.ahead[self.ahead_start..self.ahead_end];
        let used = match &mut self.reading {
            Reading::Payload { into, left, .. } => {
                let used = buffered.len().min(usize::try_from(*left).unwrap_or(usize::MAX));
                let copied = into.memory.copy_from(into.at, &buffered[..used]);
                debug_assert!(copied.is_ok(), "the target was checked");
                used
            }
            Reading::Skip { left, .. } => {
                buffered.len().min(usize::try_from(*left).unwrap_or(usize::MAX))
            }
            Reading::Message { message: into, filled, .. }
            | Reading::Question { question: into, filled } => {
                let used = buffered.len().min(into.len() - *filled);
                into[*filled..*filled + used].copy_from_slice(&buffered[..used]);
                used
            }
            Reading::Header | Reading::Verify { .. } => 0,
        };
        self.ahead_start += used;
        self.account(used, hub);
        used as u64
    }

    fn read_payload(&mut self, hub: &mut Hub) -> Result<u64, LinkEnd> {
        if !self.ready.readable {
            return Ok(0);
        }
        let behind = &mut self.ahead[..BEHIND_PAYLOAD_BYTES];
        let mut scratch = Vec::new();
        let room = match &mut self.reading {
            Reading::Payload { into, left, .. } => {
                let wanted = usize::try_from((*left).min(BYTES_PER_TURN)).unwrap_or(usize::MAX);
                let room = into.memory.writable(into.at, wanted);
                let room = room.map_err(|_| LinkEnd::Malformed)?;
                let bytes = received(self.stream.read_placed(room, behind), &mut self.ready)?;
                return Ok(self.has_read(bytes, wanted, hub));
            }
            Reading::Message { message: into, filled, .. }
            | Reading::Question { question: into, filled } => &mut into[*filled..],
            Reading::Skip { left, .. } => {
                scratch.resize(SKIP_BYTES.min(usize::try_from(*left).unwrap_or(SKIP_BYTES)), 0);
                scratch.as_mut_slice()
            }
            Reading::Header | Reading::Verify { .. } => return Ok(0),
        };
        let wanted = room.len();
        let mut slices = [IoSliceMut::new(room), IoSliceMut::new(behind)];
        let bytes = received(self.stream.read_vectored(&mut slices), &mut self.ready)?;
        Ok(self.has_read(bytes, wanted, hub))
    }

    /// What was wanted of the payload, and what is behind it.
    fn has_read(&mut self, bytes: usize, wanted: usize, hub: &Hub) -> u64 {
        let landed = bytes.min(wanted);
        self.ahead_start = 0;
        self.ahead_end = bytes - landed;
        self.account(landed, hub);
        bytes as u64
    }

    /// So many bytes of the payload have been placed.
    fn account(&mut self, bytes: usize, hub: &Hub) {
        match &mut self.reading {
            Reading::Payload { into, left, hash, .. } => {
                if let Some(hash) = hash {
                    into.add_to(hash, bytes);
                }
                into.at += bytes;
                *left -= bytes as u64;
                hub.metrics.tcp.received_bytes.inc_by(bytes as u64);
            }
            Reading::Skip { left, .. } => *left -= bytes as u64,
            Reading::Message { filled, .. } | Reading::Question { filled, .. } => *filled += bytes,
            Reading::Header | Reading::Verify { .. } => {}
        }
    }

    fn verify_some(&mut self) -> u64 {
        let Reading::Verify { into, left, hash, .. } = &mut self.reading else { return 0 };
        let bytes = (*left).min(BYTES_PER_TURN / 4);
        into.add_to(hash, bytes as usize);
        into.at += bytes as usize;
        *left -= bytes;
        bytes
    }

    /// The frame is complete: count it, or say what is wrong with it.
    fn finish_frame(&mut self, hub: &mut Hub) -> Result<u64, LinkEnd> {
        let (header, settled) = match std::mem::replace(&mut self.reading, Reading::Header) {
            Reading::Payload { header, hash, .. } => {
                let digest = hash.map(|hash| hash.sum());
                (header, verdict(&header, digest))
            }
            Reading::Verify { header, hash, .. } => (header, verdict(&header, Some(hash.sum()))),
            Reading::Skip { header, settled, .. } => (header, settled),
            Reading::Message { header, mut message, .. } => {
                let (peer, path) = self.peer.as_ref().ok_or(LinkEnd::Malformed)?;
                let FrameKind::Message { id } = header.kind else {
                    return Err(LinkEnd::Malformed);
                };
                let settled = hub.message(Domain::Tcp, (peer, *path), id, &mut message);
                // For the next one: what was taken has left another in its place.
                message.clear();
                self.buffer = message;
                (header, settled)
            }
            Reading::Question { question, .. } => {
                let (_, path) = self.peer.as_ref().ok_or(LinkEnd::Malformed)?;
                if let Some(answer) = hub.asked(*path, &question)? {
                    self.tell(&answer);
                }
                return Ok(1);
            }
            Reading::Header => return Err(LinkEnd::Malformed),
        };
        match settled {
            Settled::Landed => {
                if let FrameKind::Write { imm: Some(imm), .. }
                | FrameKind::Seal { imm: Some(imm), .. } = header.kind
                {
                    let (_, path) = self.peer.as_ref().ok_or(LinkEnd::Malformed)?;
                    hub.landed(Domain::Tcp, *path, imm);
                }
                self.landed = Some(header.sequence);
            }
            Settled::Corrupt | Settled::Refused(_) => {
                if settled == Settled::Corrupt {
                    hub.metrics.tcp.corrupt.inc();
                }
                let ack = Ack::Failed { sequence: header.sequence, settled };
                self.acks.extend_from_slice(&ack.encode());
            }
        }
        Ok(1)
    }

    fn acknowledge_landed(&mut self) {
        if let Some(sequence) = self.landed.take() {
            self.acks.extend_from_slice(&Ack::Through { sequence }.encode());
        }
    }

    /// Whether any were sent.
    fn flush_acks(&mut self) -> Result<bool, LinkEnd> {
        self.acknowledge_landed();
        self.stream.flush(&mut self.ready)?;
        if self.acks.is_empty() || !self.ready.writable {
            return Ok(false);
        }
        match self.stream.send(&self.acks) {
            Ok(bytes) => {
                self.acks.drain(..bytes);
                Ok(true)
            }
            Err(Blocked::Again) => {
                self.ready.writable = false;
                Ok(false)
            }
            Err(Blocked::End(end)) => Err(end),
        }
    }
}

fn verdict(header: &Header, digest: Option<u64>) -> Settled {
    let (FrameKind::Write { checksum, .. } | FrameKind::Seal { checksum, .. }) = header.kind else {
        return Settled::Landed;
    };
    match (checksum, digest) {
        (Some(wanted), Some(found)) if wanted != found => Settled::Corrupt,
        _ => Settled::Landed,
    }
}

/// 0 when there is nothing now.
fn received(read: Result<usize, Blocked>, ready: &mut Readiness) -> Result<usize, LinkEnd> {
    match read {
        Ok(bytes) => Ok(bytes),
        Err(Blocked::Again) => {
            ready.readable = false;
            Ok(0)
        }
        Err(Blocked::End(end)) => Err(end),
    }
}

#[cfg(test)]
mod tests;
