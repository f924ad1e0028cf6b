//! One end of a pipe: an endpoint of its own with its queue. Closing it ends all that moves through it, for
//! certain and for this peer only, whoever places what arrives.
//!
//! Nothing waits here. What the provider does not take now is kept and posted at a later poll; it counts
//! among what is under way.

use std::collections::VecDeque;
use std::sync::Arc;

use kvasir_transfer_libfabric::address::{AddressVector, Peer};
use kvasir_transfer_libfabric::completion::{Completion, Immediate, Operation, Token};
use kvasir_transfer_libfabric::domain::Domain;
use kvasir_transfer_libfabric::endpoint::{Inject, Message, Receive, Write};
use kvasir_transfer_libfabric::error::{OperationError, PostError};
use kvasir_transfer_libfabric::memory::Pages;
use kvasir_transfer_libfabric::region::{Access, MemoryRegion, RemotePlace, Span};

use super::line::Line;
use super::{broken, refused};
use crate::rdma::nic::{CardError, Event, Failure, MESSAGES};

/// Pieces of messages that a target takes before this process has looked at them.
pub(super) const MESSAGE_RECEIVES: usize = 64;
/// Of one piece with its header: 256 KiB for each peer.
pub(super) const RECEIVE_BYTES: usize = 4096;
/// Pieces that a writer has under way; fewer than a target has room for.
pub(super) const MESSAGE_DEPTH: usize = 16;

/// A post as the layer takes it.
#[derive(Debug, Clone)]
pub(super) enum Request {
    Write { local: Span, remote: RemotePlace, imm: Option<u32> },
    Inject { bytes: Vec<u8>, remote: RemotePlace, imm: Option<u32> },
    Send { local: Span },
}

/// One that is to be posted.
#[derive(Debug)]
struct Due {
    lane: usize,
    tag: u32,
    request: Request,
}

#[derive(Debug)]
pub(super) enum End {
    Writer(Writer),
    Target(Target),
}

#[derive(Debug, Default)]
pub(super) struct Writer {
    /// Whom it writes to, when that was told, and where its trials go.
    pub(super) to: Option<(Peer, RemotePlace)>,
    due: VecDeque<Due>,
    /// By lane, what is due included.
    under_way: [usize; 2],
}

#[derive(Debug)]
pub(super) struct Target {
    pages: Arc<Pages>,
    region: MemoryRegion,
    /// Buffers for pieces that the provider has not taken yet.
    unposted: Vec<usize>,
}

#[derive(Debug)]
pub(super) struct Pipe {
    pub(super) line: Option<Line>,
    pub(super) end: End,
    pub(super) vector: AddressVector,
    /// By which it is known among the endpoints that peers write to.
    pub(super) number: Option<u64>,
    told: Vec<Completion>,
}

impl Writer {
    fn token(lane: usize, tag: u32) -> Token {
        Token((lane as u64) << 32 | u64::from(tag))
    }

    fn named(token: Token) -> (usize, u32) {
        // Written by `token`.
        (usize::from(token.0 >> 32 != 0), token.0 as u32)
    }

    /// How many are under way on the lane.
    pub(super) fn under_way(&self, lane: usize) -> usize {
        self.under_way[lane]
    }

    pub(super) fn is_idle(&self) -> bool {
        self.under_way == [0, 0]
    }

    pub(super) fn add(&mut self, lane: usize, tag: u32, request: Request) {
        self.under_way[lane] += 1;
        self.due.push_back(Due { lane, tag, request });
    }

    /// Posts what is due, as far as it is taken.
    fn post(&mut self, line: &mut Line, events: &mut Vec<Event>) -> Result<(), CardError> {
        let Some((peer, _)) = self.to.clone() else { return Ok(()) };
        while let Some(due) = self.due.pop_front() {
            match post(line, &peer, &due) {
                Ok(()) => {}
                Err(PostError::Busy(_)) => {
                    self.due.push_front(due);
                    break;
                }
                Err(PostError::PeerGone(failure)) => {
                    tracing::debug!(%failure, "the transfer engine cannot write to a peer over libfabric");
                    let failure = Failure::Broken;
                    events.push(Event::Failed { lane: due.lane, tag: Some(due.tag), failure });
                }
                Err(error) => return Err(refused("cannot post work requests", error)),
            }
        }
        Ok(())
    }

    fn take(&mut self, completion: Completion, events: &mut Vec<Event>) {
        events.extend(match completion {
            Completion::Done { token, operation: Operation::Write | Operation::Send, .. } => {
                let (lane, tag) = Self::named(token);
                self.under_way[lane] = self.under_way[lane].saturating_sub(1);
                Some(Event::Done { lane, tag })
            }
            Completion::Failed { token, error, .. } => {
                tracing::debug!(%error, "a posted libfabric operation failed");
                let (lane, tag) = Self::named(token);
                let is_refused = matches!(error, OperationError::RemoteAccess(_));
                let failure = if is_refused { Failure::Refused } else { Failure::Broken };
                Some(Event::Failed { lane, tag: Some(tag), failure })
            }
            // Who writes here was not asked to.
            Completion::Arrived { immediate, .. } => {
                Some(Event::Landed { imm: immediate.0, bytes: 0 })
            }
            Completion::Done { .. } | Completion::Trouble { .. } => None,
        });
    }
}

fn post(line: &mut Line, peer: &Peer, due: &Due) -> Result<(), PostError> {
    let token = Writer::token(due.lane, due.tag);
    let peer = peer.clone();
    match &due.request {
        Request::Write { local, remote, imm } => {
            let (local, remote, immediate) = (local.clone(), *remote, imm.map(Immediate));
            line.wire().write(&Write { peer, local, remote, immediate, token })
        }
        Request::Inject { bytes, remote, imm } => {
            let (remote, immediate) = (*remote, imm.map(Immediate));
            line.wire().inject(&Inject { peer, bytes, remote, immediate, token })
        }
        Request::Send { local } => line.wire().send(&Message { peer, local: local.clone(), token }),
    }
}

impl Target {
    pub(super) fn new(domain: &Domain) -> Result<Self, CardError> {
        let pages = Arc::new(Pages::new(MESSAGE_RECEIVES * RECEIVE_BYTES));
        let access = Access { local_write: true, ..Access::SOURCE };
        let registered = domain.register(Arc::clone(&pages) as _, access);
        let region =
            registered.map_err(|error| refused("cannot register memory for messages", error))?;
        Ok(Target { pages, region, unposted: (0..MESSAGE_RECEIVES).collect() })
    }

    fn post(&mut self, line: &mut Line) -> Result<(), CardError> {
        while let Some(index) = self.unposted.pop() {
            let local = self
                .region
                .span(index * RECEIVE_BYTES, RECEIVE_BYTES)
                .map_err(|error| refused("a buffer is outside its region", error))?;
            match line.wire().receive(&Receive { local, token: Token(index as u64) }) {
                Ok(()) => {}
                Err(PostError::Busy(_)) => {
                    self.unposted.push(index);
                    break;
                }
                Err(error) => return Err(refused("cannot post receives", error)),
            }
        }
        Ok(())
    }

    fn take(&mut self, completion: Completion, events: &mut Vec<Event>) {
        events.extend(match completion {
            Completion::Arrived { immediate, .. } => {
                Some(Event::Landed { imm: immediate.0, bytes: 0 })
            }
            Completion::Done { token, operation: Operation::Receive, bytes } => {
                let index = token.0 as usize;
                self.unposted.push(index);
                let piece = self.pages.copy_out(index * RECEIVE_BYTES, bytes.min(RECEIVE_BYTES));
                piece.ok().map(Event::Piece)
            }
            Completion::Failed { error, .. } => {
                tracing::debug!(%error, "the transfer engine cannot receive a message over libfabric");
                let failure = Failure::Broken;
                Some(Event::Failed { lane: MESSAGES, tag: None, failure })
            }
            Completion::Trouble { error } => {
                tracing::debug!(%error, "the transfer engine refused an operation of a peer");
                None
            }
            Completion::Done { .. } => None,
        });
    }
}

impl Pipe {
    pub(super) fn new(line: Line, end: End, vector: AddressVector) -> Self {
        Pipe { line: Some(line), end, vector, number: None, told: Vec::new() }
    }

    /// Posts what is due, and says what has happened. Whether anything has.
    pub(super) fn poll(&mut self, events: &mut Vec<Event>) -> Result<bool, CardError> {
        let Some(line) = &mut self.line else { return Ok(false) };
        match &mut self.end {
            End::Writer(writer) => writer.post(line, events)?,
            End::Target(target) => target.post(line)?,
        }
        let any = line.poll(&mut self.told).map_err(broken)?;
        self.tell(events);
        Ok(any)
    }

    fn tell(&mut self, events: &mut Vec<Event>) {
        for completion in self.told.drain(..) {
            match &mut self.end {
                End::Writer(writer) => writer.take(completion, events),
                End::Target(target) => target.take(completion, events),
            }
        }
    }

    /// Nothing moves through it any more when this returns.
    pub(super) fn close(&mut self, events: &mut Vec<Event>) {
        let Some(line) = self.line.take() else { return };
        line.close(&mut self.told);
        self.tell(events);
    }

    /// Whether something of ours is on its way, so that its end is waited for.
    pub(super) fn is_waiting(&self) -> bool {
        match &self.end {
            End::Writer(writer) => !writer.is_idle(),
            End::Target(target) => !target.unposted.is_empty(),
        }
    }

    /// Whether the descriptor of its queue tells of all that happens.
    pub(super) fn may_sleep(&mut self) -> Result<bool, CardError> {
        let Some(line) = &mut self.line else { return Ok(true) };
        line.may_sleep().map_err(broken)
    }
}
