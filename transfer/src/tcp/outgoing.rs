//! The sending end of a tcp connection. Frames are gathered, header and source, into one system call
//! without a copy.

use std::collections::VecDeque;
use std::io::IoSlice;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use kvasir_transfer_core::{Frame, FrameKind, Next, OpId, SessionId};
use prost::Message;
use rustix::io::{Errno, retry_on_intr};
use rustix::net::{SendAncillaryBuffer, SendFlags};

use super::frame::{ACK_BYTES, Ack, HEADER_BYTES, Header};
use super::{GREETING_BYTES, greeting, greeting_length};
use crate::hello::{Admission, Hello, HelloReply};
use crate::payload::Payload;
use crate::worker::hub::Hub;
use crate::worker::link::{LinkEnd, ONLY_PATH, Readiness, Turn, path_limits};

const BATCH_FRAMES_MAX: usize = 32;
const BATCH_BYTES: u64 = 512 << 10;
/// System calls per turn, so that other links have theirs.
const CALLS_PER_TURN: usize = 4;
const ACK_BUFFER_BYTES: usize = 4096;

#[derive(Debug)]
pub(crate) struct TcpOut {
    socket: OwnedFd,
    session: SessionId,
    state: State,
    ready: Readiness,
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
    frame: Frame<Payload>,
    header: [u8; HEADER_BYTES],
    /// Of header and payload together.
    written: usize,
}

impl Pending {
    fn len(&self) -> usize {
        HEADER_BYTES + self.frame.bytes as usize
    }

    fn payload_left(&self) -> &[u8] {
        let done = self.written.saturating_sub(HEADER_BYTES);
        let at = self.frame.source_offset as usize + done;
        self.frame.payload.bytes(at, self.frame.bytes as usize - done)
    }
}

impl TcpOut {
    pub(crate) fn connect(
        session: SessionId,
        address: SocketAddr,
        hello: &Hello,
    ) -> rustix::io::Result<Self> {
        Ok(TcpOut {
            socket: super::start_connecting(address)?,
            session,
            state: State::Connecting { hello: greeting(&hello.encode_to_vec()) },
            ready: Readiness::default(),
            batch: VecDeque::new(),
            batch_bytes: 0,
            written_before: 0,
            incoming: Vec::new(),
        })
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    pub(crate) fn ready(&mut self, ready: Readiness) {
        self.ready.add(ready);
    }

    pub(crate) fn is_up(&self) -> bool {
        matches!(self.state, State::Up)
    }

    pub(crate) fn turn(&mut self, hub: &mut Hub) -> Result<Turn, LinkEnd> {
        let mut turn = Turn::default();
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
        for pending in self.batch.iter_mut().filter(|pending| pending.frame.op == op) {
            let (at, bytes) = (pending.frame.source_offset as usize, pending.frame.bytes as usize);
            let copy = pending.frame.payload.bytes(at, bytes).to_vec();
            pending.frame.payload = Payload::Bytes(Arc::new(copy));
            pending.frame.source_offset = 0;
        }
    }

    fn greet(&mut self) -> Result<bool, LinkEnd> {
        if !self.ready.writable {
            return Ok(false);
        }
        if rustix::net::sockopt::socket_error(&self.socket)?.is_err() {
            return Err(LinkEnd::Lost);
        }
        let State::Connecting { hello } = &self.state else { return Ok(false) };
        // It fits any socket's buffer; a connection that takes only a part is of no use.
        let sent = rustix::net::send(&self.socket, hello, SendFlags::NOSIGNAL)?;
        if sent != hello.len() {
            return Err(LinkEnd::Lost);
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
            _ => return Err(LinkEnd::Declined { cut_offs: None }),
        }
        self.incoming.drain(..GREETING_BYTES + length);
        self.state = State::Up;
        let limits = path_limits(hub);
        hub.sender.path_up(self.session, ONLY_PATH, limits, hub.now_us);
        Ok(true)
    }

    /// Appends what has come to `incoming`. `false` when nothing has.
    fn receive(&mut self) -> Result<bool, LinkEnd> {
        if !self.ready.readable {
            return Ok(false);
        }
        let mut buffer = [0; ACK_BUFFER_BYTES];
        match retry_on_intr(|| rustix::io::read(&self.socket, &mut buffer)) {
            Ok(0) => Err(LinkEnd::Lost),
            Ok(bytes) => {
                self.incoming.extend_from_slice(&buffer[..bytes]);
                Ok(true)
            }
            Err(Errno::AGAIN) => {
                self.ready.readable = false;
                Ok(false)
            }
            Err(_) => Err(LinkEnd::Lost),
        }
    }

    fn read_acks(&mut self, hub: &mut Hub) -> Result<bool, LinkEnd> {
        let busy = self.receive()?;
        let (acks, rest) = self.incoming.as_chunks::<ACK_BYTES>();
        for ack in acks {
            let ack = Ack::decode(ack).map_err(|_| LinkEnd::Malformed)?;
            let (Ack::Through { sequence } | Ack::Failed { sequence, .. }) = ack;
            // Acknowledging what was not even sent would let a caller reuse a source under us.
            if sequence >= self.written_before {
                return Err(LinkEnd::Malformed);
            }
            let known = match ack {
                Ack::Through { sequence } => {
                    hub.sender.settle_through(self.session, ONLY_PATH, sequence, hub.now_us)
                }
                Ack::Failed { sequence, settled } => {
                    hub.sender.settle(self.session, ONLY_PATH, sequence, settled, hub.now_us)
                }
            };
            if !known {
                return Err(LinkEnd::Malformed);
            }
        }
        let rest = rest.len();
        self.incoming.drain(..self.incoming.len() - rest);
        Ok(busy)
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
                slices.push(IoSlice::new(pending.payload_left()));
            }
            let mut control = SendAncillaryBuffer::default();
            let sent = retry_on_intr(|| {
                rustix::net::sendmsg(&self.socket, &slices, &mut control, SendFlags::NOSIGNAL)
            });
            drop(slices);
            match sent {
                Ok(bytes) => self.written(bytes, hub),
                Err(Errno::AGAIN) => self.ready.writable = false,
                Err(_) => return Err(LinkEnd::Lost),
            }
            turn.busy = true;
        }
        Ok(())
    }

    fn fill(&mut self, hub: &mut Hub, turn: &mut Turn) {
        while self.batch.len() < BATCH_FRAMES_MAX && self.batch_bytes < BATCH_BYTES {
            match hub.sender.next_frame(self.session, ONLY_PATH, hub.now_us) {
                Next::Frame(frame) => {
                    let (sequence, kind) = (frame.sequence, frame.kind);
                    let header = Header { sequence, kind, payload_bytes: frame.bytes }.encode();
                    self.batch_bytes += frame.bytes;
                    self.batch.push_back(Pending { frame, header, written: 0 });
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
            match pending.frame.kind {
                FrameKind::Write { imm, .. } | FrameKind::Seal { imm, .. } => {
                    metrics.sent_bytes.inc_by(pending.frame.bytes);
                    metrics.sent_writes.inc_by(u64::from(imm.is_some()));
                }
                FrameKind::Message { .. } => metrics.sent_messages.inc(),
            }
            self.written_before = pending.frame.sequence + 1;
            self.batch_bytes -= pending.frame.bytes;
            self.batch.pop_front();
        }
    }
}
