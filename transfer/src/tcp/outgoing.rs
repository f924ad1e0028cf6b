//! The sending end of a tcp connection. Frames are gathered, header and source, into one system call
//! without a copy.

use std::collections::VecDeque;
use std::io::IoSlice;
use std::net::SocketAddr;
use std::num::NonZeroU32;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use kvasir_transfer_core::{CloseRequest, Frame, FrameKind, Next, OpId, Rail, Settled};
use prost::Message;
use rustix::io::Errno;

use super::frame::{ACK_BYTES, Ack, HEADER_BYTES, Header, heartbeat_header, question_header};
use super::stream::{Blocked, Stream};
use super::tls::Tls;
use super::{GREETING_BYTES, greeting, greeting_length};
use crate::closing;
use crate::config::Domain;
use crate::hello::{Admission, HelloReply};
use crate::payload::Payload;
use crate::worker::hub::{Hub, take_answer};
use crate::worker::link::{Lane, LinkEnd, Readiness, Turn, path_limits};

const BATCH_FRAMES_MAX: usize = 32;
const BATCH_BYTES: u64 = 512 << 10;
/// System calls per turn, so that other links have theirs.
const CALLS_PER_TURN: usize = 4;
const ACK_BUFFER_BYTES: usize = 4096;

#[derive(Debug)]
pub(crate) struct TcpOut {
    stream: Stream,
    lane: Lane,
    state: State,
    ready: Readiness,
    /// Encoded, to go before the next frames.
    questions: VecDeque<Vec<u8>>,
    /// A heartbeat is to be asked for.
    wants_heartbeat: bool,
    batch: VecDeque<Pending>,
    batch_bytes: u64,
    /// Every frame before this sequence has been written in full.
    written_before: u64,
    incoming: Vec<u8>,
}

#[derive(Debug)]
enum State {
    Connecting { hello: Vec<u8> },
    AwaitingReply,
    Up,
}

#[derive(Debug)]
struct Pending {
    body: Body,
    header: [u8; HEADER_BYTES],
    /// Of header and body together.
    written: usize,
}

#[derive(Debug)]
enum Body {
    Frame(Frame<Payload>),
    Question(Vec<u8>),
    Heartbeat,
}

impl Pending {
    fn len(&self) -> usize {
        let body = match &self.body {
            Body::Frame(frame) => frame.bytes as usize,
            Body::Question(question) => question.len(),
            Body::Heartbeat => 0,
        };
        HEADER_BYTES + body
    }

    fn body_left(&self) -> &[u8] {
        let done = self.written.saturating_sub(HEADER_BYTES);
        match &self.body {
            Body::Frame(frame) => {
                let at = frame.source_offset as usize + done;
                frame.payload.bytes(at, frame.bytes as usize - done)
            }
            Body::Question(question) => question.get(done..).unwrap_or_default(),
            Body::Heartbeat => &[],
        }
    }
}

impl TcpOut {
    /// `None` when not even a try can be made.
    pub(crate) fn connect(
        lane: Lane,
        address: SocketAddr,
        hello: &[u8],
        tls: Option<&Tls>,
    ) -> Option<Self> {
        let socket = super::start_connecting(address).ok()?;
        Some(TcpOut {
            stream: Stream::connecting(socket, tls).ok()?,
            lane,
            state: State::Connecting { hello: greeting(hello) },
            ready: Readiness::default(),
            questions: VecDeque::new(),
            wants_heartbeat: false,
            batch: VecDeque::new(),
            batch_bytes: 0,
            written_before: 0,
            incoming: Vec::new(),
        })
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }

    pub(crate) fn ready(&mut self, ready: Readiness) {
        self.ready.add(ready);
    }

    pub(crate) fn is_up(&self) -> bool {
        matches!(self.state, State::Up)
    }

    pub(crate) fn turn(&mut self, hub: &mut Hub) -> Result<Turn, LinkEnd> {
        let mut turn = Turn::default();
        self.stream.flush(&mut self.ready)?;
        match &self.state {
            State::Connecting { .. } => turn.busy |= self.greet()?,
            State::AwaitingReply => turn.busy |= self.read_reply(hub)?,
            State::Up => {}
        }
        if self.is_up() {
            turn.busy |= self.read_acks(hub)?;
            self.send(hub, &mut turn)?;
        }
        Ok(turn)
    }

    /// Copies what is left of the operation's frames, so that its source is not read any more.
    pub(crate) fn detach(&mut self, op: OpId) {
        let frames = self.batch.iter_mut().filter_map(|pending| match &mut pending.body {
            Body::Frame(frame) => Some(frame),
            Body::Question(_) | Body::Heartbeat => None,
        });
        for frame in frames.filter(|frame| frame.op == op) {
            let (at, bytes) = (frame.source_offset as usize, frame.bytes as usize);
            let copy = frame.payload.bytes(at, bytes).to_vec();
            frame.payload = Payload::Bytes(Arc::new(copy));
            frame.source_offset = 0;
        }
    }

    /// Asks about another path of the session.
    pub(crate) fn ask(&mut self, close: &CloseRequest) {
        self.questions.push_back(closing::question(close));
    }

    pub(crate) fn ask_for_heartbeat(&mut self) {
        self.wants_heartbeat = true;
    }

    fn greet(&mut self) -> Result<bool, LinkEnd> {
        if !self.ready.writable {
            return Ok(false);
        }
        match rustix::net::sockopt::socket_error(&self.stream)? {
            Ok(()) => {}
            Err(Errno::CONNREFUSED) => return Err(LinkEnd::Refused),
            Err(errno) => return Err(errno.into()),
        }
        let State::Connecting { hello } = &self.state else { return Ok(false) };
        // It fits any socket's buffer; a connection that takes only a part is of no use.
        match self.stream.send(hello) {
            Ok(sent) if sent == hello.len() => {}
            Ok(_) | Err(Blocked::Again) => return Err(LinkEnd::Lost),
            Err(Blocked::End(end)) => return Err(end),
        }
        self.state = State::AwaitingReply;
        Ok(true)
    }

    fn read_reply(&mut self, hub: &mut Hub) -> Result<bool, LinkEnd> {
        if !self.receive()? {
            return Ok(false);
        }
        let Some(prefix) = self.incoming.first_chunk::<GREETING_BYTES>() else { return Ok(true) };
        let length = greeting_length(*prefix).ok_or(LinkEnd::Malformed)?;
        let Some(body) = self.incoming.get(GREETING_BYTES..GREETING_BYTES + length) else {
            return Ok(true);
        };
        let reply = HelloReply::decode(body).map_err(|_| LinkEnd::Malformed)?;
        match reply.admission() {
            Admission::Admitted => {}
            Admission::CutOff => return Err(LinkEnd::Declined { cut_offs: Some(reply.cut_offs) }),
            Admission::OtherIncarnation => return Err(LinkEnd::Replaced),
            _ => return Err(LinkEnd::Declined { cut_offs: None }),
        }
        self.incoming.drain(..GREETING_BYTES + length);
        self.state = State::Up;
        let limits = path_limits((Domain::Tcp, Rail::LAST), NonZeroU32::MIN, hub);
        hub.sender.path_up(self.lane.session, self.lane.path, limits, hub.now_us);
        Ok(true)
    }

    /// Appends what has come to `incoming`. `false` when nothing has.
    fn receive(&mut self) -> Result<bool, LinkEnd> {
        if !self.ready.readable {
            return Ok(false);
        }
        let mut buffer = [0; ACK_BUFFER_BYTES];
        match self.stream.read(&mut buffer) {
            Ok(bytes) => {
                self.incoming.extend_from_slice(&buffer[..bytes]);
                Ok(true)
            }
            Err(Blocked::Again) => {
                self.ready.readable = false;
                Ok(false)
            }
            Err(Blocked::End(end)) => Err(end),
        }
    }

    fn read_acks(&mut self, hub: &mut Hub) -> Result<bool, LinkEnd> {
        let busy = self.receive()?;
        let mut used = 0;
        while let Some(ack) = self.incoming[used..].first_chunk::<ACK_BYTES>() {
            match Ack::decode(ack).map_err(|_| LinkEnd::Malformed)? {
                Ack::Through { sequence } => self.settle(hub, sequence, None)?,
                Ack::Failed { sequence, settled } => self.settle(hub, sequence, Some(settled))?,
                Ack::Alive => {
                    let Lane { session, path } = self.lane;
                    if !hub.sender.heartbeat_answered(session, path, hub.now_us) {
                        return Err(LinkEnd::Malformed);
                    }
                }
                Ack::Answer { bytes } => {
                    let answer = self.incoming.get(used + ACK_BYTES..used + ACK_BYTES + bytes);
                    let Some(answer) = answer else { break };
                    take_answer(self.lane, answer, hub)?;
                    used += bytes;
                }
            }
            used += ACK_BYTES;
        }
        self.incoming.drain(..used);
        Ok(busy)
    }

    fn settle(
        &mut self,
        hub: &mut Hub,
        sequence: u64,
        failed: Option<Settled>,
    ) -> Result<(), LinkEnd> {
        // Acknowledging what was not even sent would let a caller reuse a source under us.
        if sequence >= self.written_before {
            return Err(LinkEnd::Malformed);
        }
        let Lane { session, path } = self.lane;
        let known = match failed {
            None => hub.sender.settle_through(session, path, sequence, hub.now_us),
            Some(settled) => hub.sender.settle(session, path, sequence, settled, hub.now_us),
        };
        if known { Ok(()) } else { Err(LinkEnd::Malformed) }
    }

    fn send(&mut self, hub: &mut Hub, turn: &mut Turn) -> Result<(), LinkEnd> {
        for _ in 0..CALLS_PER_TURN {
            if !self.ready.writable {
                return Ok(());
            }
            self.fill(hub, turn);
            if self.batch.is_empty() {
                return Ok(());
            }
            let mut slices = Vec::with_capacity(2 * self.batch.len());
            for pending in &self.batch {
                if let Some(header) = pending.header.get(pending.written..) {
                    slices.push(IoSlice::new(header));
                }
                slices.push(IoSlice::new(pending.body_left()));
            }
            let sent = self.stream.send_vectored(&slices);
            drop(slices);
            match sent {
                Ok(bytes) => self.written(bytes, hub),
                Err(Blocked::Again) => self.ready.writable = false,
                Err(Blocked::End(end)) => return Err(end),
            }
            turn.busy = true;
        }
        Ok(())
    }

    fn fill(&mut self, hub: &mut Hub, turn: &mut Turn) {
        while let Some(question) = self.questions.pop_front() {
            let header = question_header(question.len());
            self.batch.push_back(Pending { body: Body::Question(question), header, written: 0 });
        }
        if std::mem::take(&mut self.wants_heartbeat) {
            let (body, header) = (Body::Heartbeat, heartbeat_header());
            self.batch.push_back(Pending { body, header, written: 0 });
        }
        let Lane { session, path } = self.lane;
        while self.batch.len() < BATCH_FRAMES_MAX && self.batch_bytes < BATCH_BYTES {
            match hub.sender.next_frame(session, path, hub.now_us) {
                Next::Frame(mut frame) => {
                    if let FrameKind::Signal { .. } = frame.kind {
                        // Its header has the word.
                        frame.bytes = 0;
                    }
                    let (sequence, kind) = (frame.sequence, frame.kind);
                    let header = Header { sequence, kind, payload_bytes: frame.bytes }.encode();
                    self.batch_bytes += frame.bytes;
                    self.batch.push_back(Pending { body: Body::Frame(frame), header, written: 0 });
                }
                Next::Wait { until_us } => {
                    turn.wait_until_us = turn.wait_until_us.min(until_us);
                    return;
                }
                Next::Nothing => return,
            }
        }
    }

    fn written(&mut self, mut bytes: usize, hub: &mut Hub) {
        let metrics = &hub.metrics.tcp;
        while let Some(pending) = self.batch.front_mut() {
            let taken = bytes.min(pending.len() - pending.written);
            pending.written += taken;
            bytes -= taken;
            if pending.written < pending.len() {
                return;
            }
            if let Body::Frame(frame) = &pending.body {
                match frame.kind {
                    FrameKind::Write { imm, .. } | FrameKind::Seal { imm, .. } => {
                        metrics.sent_bytes.inc_by(frame.bytes);
                        metrics.sent_writes.inc_by(u64::from(imm.is_some()));
                    }
                    FrameKind::Signal { .. } => metrics.sent_bytes.inc_by(8),
                    FrameKind::Message { .. } => metrics.sent_messages.inc(),
                }
                self.written_before = frame.sequence + 1;
                self.batch_bytes -= frame.bytes;
            }
            self.batch.pop_front();
        }
    }
}
