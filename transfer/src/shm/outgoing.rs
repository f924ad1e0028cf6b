//! The sending end of a shm connection: it does the copies.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::num::NonZeroU32;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use kvasir_checksum::Checksum;
use kvasir_mutation::{Mutation, mutated};
use kvasir_transfer_core::{
    CloseRequest, Frame, FrameKind, Next, OpId, Rail, Refusal, Settled, Target, check_bounds,
};
use prost::Message;

use super::{
    DATAGRAMS_PER_TURN, LinkMemory, Record, RegionAnswer, RegionPlace, RegionQuestion,
    SOCKET_BYTES_MAX, SOCKET_FULL_US, TAG_CLOSING, TAG_HEARTBEAT, TAG_REGION, TAG_TAKEN, Taken,
    directory, gate,
};
use crate::closing;
use crate::config::Domain;
use crate::descriptors::{self, DescriptorError};
use crate::doorbell::Ringer;
use crate::hello::{Admission, HelloReply};
use crate::memory::{Access, SharedMemory};
use crate::payload::Payload;
use crate::ring::{Producer, PushError};
use crate::worker::hub::{Hub, take_answer};
use crate::worker::link::{Lane, LinkEnd, Readiness, Turn, path_limits};

const BYTES_PER_TURN: u64 = 1 << 20;
const FRAMES_PER_TURN: usize = 256;
/// How long to leave a full ring alone.
const RING_FULL_US: u64 = 100;
/// Memory from this size on is populated beside, because a page fault for every 4 KiB halves the speed
/// of the first copies.
const POPULATE_BYTES_MIN: usize = 4 << 20;

#[derive(Debug)]
pub(crate) struct ShmOut {
    socket: OwnedFd,
    lane: Lane,
    ready: Readiness,
    peer_incarnation: u64,
    /// About other paths of the session.
    questions: VecDeque<Vec<u8>>,
    up: Option<Up>,
}

#[derive(Debug)]
struct Up {
    link: LinkMemory,
    directory: Arc<SharedMemory>,
    producer: Producer,
    ringer: Ringer,
    regions: BTreeMap<u64, Mapped>,
    epoch: u64,
    /// Waits for the descriptor of its region.
    waiting: Option<Frame<Payload>>,
    /// Since the receiver was woken last.
    has_pushed: bool,
    /// Sequences of messages that were pushed and not acknowledged.
    messages: BTreeSet<u64>,
    /// The longest that the receiver takes.
    message_bytes_max: u64,
}

#[derive(Debug)]
struct Mapped {
    memory: Arc<SharedMemory>,
    slot: usize,
}

impl Mapped {
    /// How much of the region may be written now. `None` once it is withdrawn.
    fn length(&self, directory: &SharedMemory, key: u64) -> Option<u64> {
        directory::lookup(directory, self.slot, key, self.memory.len() as u64)
    }
}

/// What came of trying to land a frame.
enum Landing {
    Done(Settled),
    /// A message is in the ring; the receiver says what becomes of it.
    Pushed,
    /// The region's memory is not mapped yet.
    Unmapped,
}

impl ShmOut {
    pub(crate) fn connect(
        (lane, peer_incarnation): (Lane, u64),
        path: &Path,
        hello: &[u8],
    ) -> Result<Self, DescriptorError> {
        let socket = super::start_connecting(path)?;
        descriptors::send(&socket, hello, &[])?;
        let (ready, questions, up) = (Readiness::default(), VecDeque::new(), None);
        Ok(ShmOut { socket, lane, ready, peer_incarnation, questions, up })
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    pub(crate) fn ready(&mut self, ready: Readiness) {
        self.ready.add(ready);
    }

    pub(crate) fn is_up(&self) -> bool {
        self.up.is_some()
    }

    pub(crate) fn turn(&mut self, hub: &mut Hub) -> Result<Turn, LinkEnd> {
        let mut turn = Turn::default();
        let mut bytes = Vec::new();
        let datagrams_max =
            if mutated(Mutation::AnswerReadsUnbounded) { usize::MAX } else { DATAGRAMS_PER_TURN };
        for _ in 0..datagrams_max {
            if !self.ready.readable {
                break;
            }
            bytes.resize(SOCKET_BYTES_MAX, 0);
            match descriptors::recv(&self.socket, &mut bytes) {
                Ok((length, fds)) => {
                    turn.busy = true;
                    match &mut self.up {
                        None => self.begin(&bytes[..length], fds, hub)?,
                        Some(up) => match bytes[..length].split_first() {
                            Some((&TAG_REGION, answer)) => {
                                up.take_region(answer, fds, self.lane, hub)?;
                            }
                            Some((&TAG_CLOSING, answer)) => take_answer(self.lane, answer, hub)?,
                            Some((&TAG_HEARTBEAT, [])) => {
                                let Lane { session, path } = self.lane;
                                if !hub.sender.heartbeat_answered(session, path, hub.now_us) {
                                    return Err(LinkEnd::Malformed);
                                }
                            }
                            Some((&TAG_TAKEN, taken)) => up.take_taken(taken, self.lane, hub)?,
                            _ => return Err(LinkEnd::Malformed),
                        },
                    }
                }
                Err(DescriptorError::WouldBlock) => self.ready.readable = false,
                Err(DescriptorError::Closed) => return Err(LinkEnd::Lost),
                Err(_) => return Err(LinkEnd::Malformed),
            }
        }
        if let Some(up) = &mut self.up {
            if super::flush(&self.socket, &mut self.questions)? {
                up.send(&self.socket, self.lane, self.peer_incarnation, hub, &mut turn)?;
            } else {
                turn.wait_until_us = hub.now_us + SOCKET_FULL_US;
            }
        }
        Ok(turn)
    }

    /// Asks about another path of the session.
    pub(crate) fn ask(&mut self, close: &CloseRequest) {
        self.questions.push_back(super::tagged(TAG_CLOSING, &closing::question(close)));
    }

    pub(crate) fn ask_for_heartbeat(&mut self) {
        self.questions.push_back(vec![TAG_HEARTBEAT]);
    }

    /// Copies what waits, if it is the operation's, so that its source is not read any more.
    pub(crate) fn detach(&mut self, op: OpId) {
        let waiting = self.up.as_mut().and_then(|up| up.waiting.as_mut());
        if let Some(frame) = waiting.filter(|frame| frame.op == op) {
            let bytes = frame.payload.bytes(frame.source_offset as usize, frame.bytes as usize);
            frame.payload = Payload::Bytes(Arc::new(bytes.to_vec()));
            frame.source_offset = 0;
        }
    }

    fn begin(&mut self, reply: &[u8], fds: Vec<OwnedFd>, hub: &mut Hub) -> Result<(), LinkEnd> {
        let reply = HelloReply::decode(reply).map_err(|_| LinkEnd::Malformed)?;
        match reply.admission() {
            Admission::Admitted => {}
            Admission::CutOff => return Err(LinkEnd::Declined { cut_offs: Some(reply.cut_offs) }),
            Admission::OtherIncarnation => return Err(LinkEnd::Replaced),
            _ => return Err(LinkEnd::Declined { cut_offs: None }),
        }
        let fds: [OwnedFd; 3] = fds.try_into().map_err(|_| LinkEnd::Malformed)?;
        self.up = Some(Up::map(&reply, fds).ok_or(LinkEnd::Malformed)?);
        let limits = path_limits((Domain::Shm, Rail::BESIDE), NonZeroU32::MIN, hub);
        hub.sender.path_up(self.lane.session, self.lane.path, limits, hub.now_us);
        Ok(())
    }
}

impl Up {
    fn map(reply: &HelloReply, [link, directory, ringer]: [OwnedFd; 3]) -> Option<Self> {
        let map = |fd, bytes: u64, access| {
            SharedMemory::from_fd(fd, usize::try_from(bytes).ok()?, access).ok().map(Arc::new)
        };
        if reply.link_bytes < super::RING as u64 {
            return None;
        }
        let link = LinkMemory(map(link, reply.link_bytes, Access::ReadWrite)?);
        let directory = map(directory, reply.directory_bytes, Access::ReadOnly)?;
        directory::sleeping(&directory)?;
        let ringer = Ringer::from_fd(ringer);
        let producer = Producer::open(&link.0, link.ring()).ok()?;
        Some(Up {
            link,
            directory,
            producer,
            ringer,
            regions: BTreeMap::new(),
            epoch: 0,
            waiting: None,
            has_pushed: false,
            messages: BTreeSet::new(),
            message_bytes_max: reply.message_bytes_max,
        })
    }

    fn send(
        &mut self,
        socket: &OwnedFd,
        lane: Lane,
        peer_incarnation: u64,
        hub: &mut Hub,
        turn: &mut Turn,
    ) -> Result<(), LinkEnd> {
        let Lane { session, path } = lane;
        let mut budget = BYTES_PER_TURN;
        let message_bytes_max = hub.shared.config.message_bytes_max as u64;
        let longest = message_bytes_max.min(self.message_bytes_max) as usize;
        let record_bytes_max = longest.max(super::LANDED_BYTES) + super::RECORD_BYTES;
        for _ in 0..FRAMES_PER_TURN {
            if self.link.cut().load(Ordering::Relaxed) != 0 {
                return Err(LinkEnd::Lost);
            }
            if budget == 0 || self.waiting.is_some() {
                break;
            }
            match self.producer.room_for(record_bytes_max) {
                Ok(()) => {}
                Err(PushError::Full) => {
                    turn.wait_until_us = turn.wait_until_us.min(hub.now_us + RING_FULL_US);
                    break;
                }
                Err(PushError::TooLong { .. } | PushError::Corrupt(_)) => {
                    return Err(LinkEnd::Malformed);
                }
            }
            let frame = match hub.sender.next_frame(session, path, hub.now_us) {
                Next::Frame(frame) => frame,
                Next::Wait { until_us } => {
                    turn.wait_until_us = turn.wait_until_us.min(until_us);
                    break;
                }
                Next::Nothing => break,
            };
            turn.busy = true;
            budget = budget.saturating_sub(frame.bytes);
            match self.land(&frame, peer_incarnation, hub)? {
                Landing::Done(settled) => {
                    hub.sender.settle(session, path, frame.sequence, settled, hub.now_us);
                }
                Landing::Pushed => {
                    self.messages.insert(frame.sequence);
                }
                Landing::Unmapped => self.ask(socket, frame)?,
            }
        }
        self.ring();
        Ok(())
    }

    /// Wakes the receiver, if there is something for it in the ring: a write that nobody counts is
    /// none of its business.
    fn ring(&mut self) {
        if !std::mem::take(&mut self.has_pushed) {
            return;
        }
        let sleeping = directory::sleeping(&self.directory);
        self.ringer.ring_if(sleeping.expect("it was looked for when the directory was mapped"));
    }

    fn land(
        &mut self,
        frame: &Frame<Payload>,
        peer_incarnation: u64,
        hub: &Hub,
    ) -> Result<Landing, LinkEnd> {
        let (target, offset, bytes, imm, checksum) = match frame.kind {
            FrameKind::Message { .. } if frame.bytes > self.message_bytes_max => {
                return Ok(refused(Refusal::TooLong, hub));
            }
            FrameKind::Message { id } => {
                let message = frame.payload.bytes(0, frame.bytes as usize);
                self.push(&Record::message(frame.sequence, id, message))?;
                hub.metrics.shm.sent_messages.inc();
                return Ok(Landing::Pushed);
            }
            FrameKind::Write { target, offset, imm, checksum } => {
                (target, offset, frame.bytes, imm, checksum)
            }
            FrameKind::Seal { target, offset, whole_bytes, imm, checksum } => {
                (target, offset, whole_bytes, imm, checksum)
            }
            FrameKind::Signal { target, offset, .. } => (target, offset, frame.bytes, None, None),
        };
        if target.incarnation != peer_incarnation {
            return Ok(refused(Refusal::StaleIncarnation, hub));
        }
        let Some(region) = self.regions.get(&target.key) else { return Ok(Landing::Unmapped) };
        let checksum = checksum.filter(|_| hub.shared.config.verify.shm);

        // The copy is announced before the check; see `gate`.
        self.epoch += 1;
        gate::enter(self.link.epoch(), self.epoch);
        let cut = self.link.cut().load(Ordering::SeqCst) != 0;
        let checked = self.check(region, target, offset, bytes);
        let intact = match checked {
            Ok(()) if !cut => copy(frame, region, offset, (bytes, checksum)),
            Ok(()) | Err(_) => true,
        };
        self.epoch += 1;
        gate::leave(self.link.epoch(), self.epoch);

        if cut {
            return Err(LinkEnd::Lost);
        }
        if let Err(refusal) = checked {
            if refusal == Refusal::Revoked {
                self.regions.remove(&target.key);
            }
            return Ok(refused(refusal, hub));
        }
        if !intact {
            hub.metrics.shm.corrupt.inc();
            return Ok(Landing::Done(Settled::Corrupt));
        }
        hub.metrics.shm.sent_bytes.inc_by(frame.bytes);
        if let Some(imm) = imm {
            hub.metrics.shm.sent_writes.inc();
            self.push(&Record::landed(imm))?;
        }
        Ok(Landing::Done(Settled::Landed))
    }

    fn check(
        &self,
        region: &Mapped,
        target: Target,
        offset: u64,
        bytes: u64,
    ) -> Result<(), Refusal> {
        let length_bytes = region.length(&self.directory, target.key);
        check_bounds(length_bytes.ok_or(Refusal::Revoked)?, offset, bytes)
    }

    fn push(&mut self, record: &[u8]) -> Result<(), LinkEnd> {
        self.has_pushed = true;
        // Room was made sure of before the frame was taken.
        self.producer.push(record).map_err(|_| LinkEnd::Malformed)
    }

    fn ask(&mut self, socket: &OwnedFd, frame: Frame<Payload>) -> Result<(), LinkEnd> {
        let (FrameKind::Write { target, .. }
        | FrameKind::Seal { target, .. }
        | FrameKind::Signal { target, .. }) = frame.kind
        else {
            return Err(LinkEnd::Malformed);
        };
        // Regions that were revoked meanwhile need not stay mapped: their owner wants the pages back.
        self.regions.retain(|key, region| region.length(&self.directory, *key).is_some());
        let question = RegionQuestion { key: target.key }.encode();
        descriptors::send(socket, &super::tagged(TAG_REGION, &question), &[])
            .map_err(|_| LinkEnd::Lost)?;
        self.waiting = Some(frame);
        Ok(())
    }

    fn take_region(
        &mut self,
        bytes: &[u8],
        fds: Vec<OwnedFd>,
        lane: Lane,
        hub: &mut Hub,
    ) -> Result<(), LinkEnd> {
        let Lane { session, path } = lane;
        let answer = RegionAnswer::decode(bytes).ok_or(LinkEnd::Malformed)?;
        let frame = self.waiting.take().ok_or(LinkEnd::Malformed)?;
        let region = match answer.place {
            Ok(place) => map_region(place, fds).ok_or(LinkEnd::Malformed)?,
            Err(refusal) => {
                hub.metrics.shm.refused(refusal).inc();
                let settled = Settled::Refused(refusal);
                hub.sender.settle(session, path, frame.sequence, settled, hub.now_us);
                return Ok(());
            }
        };
        self.regions.insert(answer.key, region);
        match self.land(&frame, self.peer_of(&frame), hub)? {
            Landing::Done(settled) => {
                hub.sender.settle(session, path, frame.sequence, settled, hub.now_us);
                self.ring();
                Ok(())
            }
            // The answer was for another region than the question.
            Landing::Unmapped | Landing::Pushed => Err(LinkEnd::Malformed),
        }
    }

    /// The receiver says what became of messages.
    fn take_taken(&mut self, bytes: &[u8], lane: Lane, hub: &mut Hub) -> Result<(), LinkEnd> {
        let Lane { session, path } = lane;
        for taken in Taken::decode(bytes) {
            let Taken { sequence, settled } = taken.ok_or(LinkEnd::Malformed)?;
            // Acknowledging something else would let a caller reuse a source under us.
            if !self.messages.remove(&sequence) {
                return Err(LinkEnd::Malformed);
            }
            hub.sender.settle(session, path, sequence, settled, hub.now_us);
        }
        Ok(())
    }

    /// A frame that waits was found to be of the peer's incarnation before it was asked for.
    fn peer_of(&self, frame: &Frame<Payload>) -> u64 {
        match frame.kind {
            FrameKind::Write { target, .. }
            | FrameKind::Seal { target, .. }
            | FrameKind::Signal { target, .. } => target.incarnation,
            FrameKind::Message { .. } => 0,
        }
    }
}

fn refused(refusal: Refusal, hub: &Hub) -> Landing {
    hub.metrics.of(Domain::Shm).refused(refusal).inc();
    Landing::Done(Settled::Refused(refusal))
}

/// Places the frame's bytes. Whether they (of a seal: the whole) have their checksum.
fn copy(
    frame: &Frame<Payload>,
    region: &Mapped,
    offset: u64,
    (whole_bytes, checksum): (u64, Option<u64>),
) -> bool {
    let (offset, bytes) = (offset as usize, frame.bytes as usize);
    if let FrameKind::Signal { value, .. } = frame.kind {
        let stored = region.memory.store_word(offset, value);
        debug_assert!(stored.is_ok(), "no more is found than is mapped, and signals are aligned");
    } else if bytes > 0 {
        let copied = match &frame.payload {
            Payload::Memory { memory, .. } => {
                let source_offset = frame.source_offset as usize;
                memory.copy_between(source_offset, &region.memory, offset, bytes)
            }
            Payload::Bytes(_) => {
                let source = frame.payload.bytes(frame.source_offset as usize, bytes);
                region.memory.copy_from(offset, source)
            }
        };
        debug_assert!(copied.is_ok(), "no more is found than is mapped");
    }
    let Some(wanted) = checksum else { return true };
    let mut landed = Checksum::new();
    let added = region.memory.add_to(offset, whole_bytes as usize, &mut landed);
    added.is_ok() && landed.sum() == wanted
}

fn map_region(place: RegionPlace, fds: Vec<OwnedFd>) -> Option<Mapped> {
    let [fd]: [OwnedFd; 1] = fds.try_into().ok()?;
    let bytes = usize::try_from(place.length_bytes).ok()?;
    let memory = Arc::new(SharedMemory::from_fd(fd, bytes, Access::ReadWrite).ok()?);
    if bytes >= POPULATE_BYTES_MIN {
        let memory = Arc::clone(&memory);
        let populate = std::thread::Builder::new().name("kvasir-populate".into());
        // A matter of speed only.
        let _ = populate.spawn(move || memory.populate());
    }
    Some(Mapped { memory, slot: usize::try_from(place.slot).ok()? })
}
