//! One simulated engine: the core's state machines and what its caller is to be told.

use std::sync::Arc;
use std::sync::atomic::AtomicUsize;

use kvasir_transfer_core::{
    Action, CloseRequest, CloseVerdict, Expectation, Heartbeats, Limits, Operation, PathId,
    PathIndex, Rails, Receiver, Refusal, RegionTable, Sender, SessionId, WriteError,
};

use super::SimConfig;
use crate::calls::Calls;
use crate::endpoint::Endpoint;
use crate::memory::SharedMemory;
use crate::messages::Messages;
use crate::payload::{Payload, Waiter};
use crate::peers::Peers;
use crate::signalled::Batch;
use crate::submit::Submission;

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct NodeId(pub(super) usize);

/// What a simulated engine counts.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SimCounts {
    pub refused: u64,
    pub corrupt: u64,
    pub received_bytes: u64,
    /// Arrivals beyond what was expected.
    pub excess: u64,
    /// Paths that were closed because their sender asked.
    pub paths_asked: u64,
    /// Immediates whose undecided counts were found to have landed.
    pub imms_landed: u64,
    /// Immediates whose undecided counts nobody could tell.
    pub imms_unknown: u64,
    /// Frames of this engine that were told to go by another lane, because theirs does not carry their region.
    pub untaken: u64,
    /// Puts and signals of this engine that left the path of the others.
    pub left_order: u64,
}

#[derive(Debug)]
pub(super) struct SimNode {
    pub(super) endpoint: Endpoint,
    pub(super) alive: bool,
    /// It is not alive, and its host does not say so: nobody is told that nobody listens.
    pub(super) has_vanished: bool,
    /// Whether it is told anything by its peers.
    pub(super) hears: bool,
    pub(super) sender: Sender<Payload, Waiter>,
    pub(super) regions: RegionTable<Arc<SharedMemory>>,
    pub(super) peers: Peers,
    pub(super) calls: Calls,
    pub(super) counts: SimCounts,
    pub(super) in_flight: Arc<AtomicUsize>,
    pub(super) expecting: Arc<AtomicUsize>,
    pub(super) throttled_until_us: u64,
    /// Its paths are to be asked for frames once more.
    pub(super) is_offered: bool,
    pub(super) receiver: Receiver<Waiter>,
    pub(super) messages: Messages,
    pub(super) message_bytes_max: usize,
    next_key: u64,
}

/// What a node cannot do by itself.
#[derive(Debug)]
pub(super) enum Wanted {
    Connect(SessionId),
    GiveUpPath(SessionId, PathIndex),
    GiveUpSession(SessionId),
    Heartbeat(SessionId, PathIndex),
    Ask { session: SessionId, through: PathIndex, close: CloseRequest },
}

const EARLY_IMMS_MAX: usize = 4096;

impl SimNode {
    pub(super) fn new(incarnation: u64, config: &SimConfig) -> Self {
        let limits = Limits {
            send_bytes_per_s_max: config.send_bytes_per_s_max,
            peer_timeout_us: config.peer_timeout_us,
            grace_us: config.grace_us,
            path_imms_max: config.path_imms_max,
            heartbeats: Heartbeats {
                interval_us: config.heartbeat_interval_us,
                timeout_us: config.heartbeat_timeout_us,
                always: config.heartbeat_always,
            },
        };
        SimNode {
            endpoint: Endpoint { incarnation, cookie: [0; 16], shm: None, tcp: None, rdma: None },
            alive: true,
            has_vanished: false,
            hears: true,
            sender: Sender::new(limits),
            regions: RegionTable::new(incarnation),
            peers: Peers::default(),
            calls: Calls::default(),
            counts: SimCounts::default(),
            in_flight: Arc::default(),
            expecting: Arc::default(),
            throttled_until_us: u64::MAX,
            is_offered: false,
            receiver: Receiver::new(EARLY_IMMS_MAX),
            messages: Messages::new(config.message_buffers),
            message_bytes_max: config.message_bytes_max,
            next_key: 1,
        }
    }

    pub(super) fn add_region(&mut self, memory: Arc<SharedMemory>) -> (u64, u64) {
        let key = self.next_key;
        self.next_key += 1;
        let length_bytes = memory.len() as u64;
        self.regions.insert(key, memory, length_bytes);
        (key, self.endpoint.incarnation)
    }

    pub(super) fn begin(
        &mut self,
        submission: Submission,
        (deadline_us, rails): (u64, Rails),
        done: Waiter,
        now_us: u64,
    ) {
        let Submission { peer, deadline: _, payload, body, described: _ } = submission;
        if !self.peers.is_current(peer) {
            self.calls.done(done, Err(WriteError::PeerGone));
            return;
        }
        let session = peer.session_id();
        let operation = Operation { session, deadline_us, payload, body, rails, done };
        self.sender.begin(operation, now_us);
    }

    pub(super) fn begin_signalled(&mut self, mut batch: Batch, now_us: u64) {
        let peers = &self.peers;
        for done in batch.without(|peer| peers.is_current(peer)) {
            self.calls.done(done, Err(WriteError::PeerGone));
        }
        self.sender.begin_signalled(batch.signalled, now_us);
    }

    pub(super) fn expect(&mut self, imm: u32, count: u64, deadline_us: u64, waiter: Waiter) {
        match self.receiver.imms_mut().expect(imm, count, deadline_us, waiter) {
            Expectation::Waiting => {}
            Expectation::Reached(waiter) => self.calls.done(waiter, Ok(())),
            Expectation::Taken(waiter) => {
                let refused = WriteError::Refused(Refusal::AlreadyExpected);
                self.calls.done(waiter, Err(refused));
            }
        }
    }

    pub(super) fn cancel_imm(&mut self, imm: u32, done: Waiter) {
        if let Some(waiter) = self.receiver.imms_mut().cancel(imm) {
            self.calls.done(waiter, Err(WriteError::Cancelled));
        }
        self.calls.done(done, Ok(()));
    }

    pub(super) fn landed(&mut self, path: PathId, imm: u32) {
        if let Some(waiter) = self.receiver.arrived(path, imm) {
            self.calls.done(waiter, Ok(()));
        }
    }

    pub(super) fn stop(&mut self) {
        self.alive = false;
        self.sender.shut_down();
        while self.act().is_some() {}
        for waiter in self.receiver.imms_mut().drain_waiters() {
            self.calls.done(waiter, Err(WriteError::Cancelled));
        }
    }

    pub(super) fn count_answer(&mut self, verdict: &CloseVerdict) {
        self.counts.paths_asked += 1;
        self.counts.imms_landed += verdict.landed.len() as u64;
        self.counts.imms_unknown += verdict.unknown.len() as u64;
    }

    pub(super) fn next_time_us(&self) -> u64 {
        let deadlines = self.sender.next_time_us().min(self.receiver.imms().next_deadline_us());
        deadlines.min(self.throttled_until_us)
    }

    pub(super) fn handle_time(&mut self, now_us: u64) {
        if now_us >= self.throttled_until_us {
            self.throttled_until_us = u64::MAX;
        }
        self.sender.handle_time(now_us);
        while let Some(waiter) = self.receiver.imms_mut().poll_expired(now_us) {
            self.calls.done(waiter, Err(WriteError::DeadlineExceeded));
        }
    }

    /// Performs what the core asks for, up to what only the world can do.
    pub(super) fn act(&mut self) -> Option<Wanted> {
        while let Some(action) = self.sender.poll_action() {
            match action {
                Action::Complete(waiter, outcome) => self.calls.done(waiter, outcome),
                Action::CompleteSignalled { done, outcome, told } => {
                    done.note(told);
                    self.calls.done(done, outcome);
                }
                Action::Connect(session) => return Some(Wanted::Connect(session)),
                Action::GiveUpPath { session, path, why: _ } => {
                    return Some(Wanted::GiveUpPath(session, path));
                }
                Action::Heartbeat { session, path } => {
                    return Some(Wanted::Heartbeat(session, path));
                }
                Action::GiveUpSession(session) => return Some(Wanted::GiveUpSession(session)),
                Action::ClosePath { session, through, close } => {
                    return Some(Wanted::Ask { session, through, close });
                }
                Action::Offer(_) => self.is_offered = true,
                // Frames take their bytes along when they depart.
                Action::Detach { .. } => {}
            }
        }
        None
    }
}
