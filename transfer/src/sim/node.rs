//! One simulated engine: the core's state machines and what its caller is to be told.

use std::sync::Arc;
use std::sync::atomic::AtomicUsize;

use kvasir_transfer_core::{
    Action, Expectation, ImmTable, Limits, Operation, PathId, Refusal, RegionTable, Sender,
    SessionId, WriteError,
};

use super::SimConfig;
use crate::calls::Calls;
use crate::endpoint::Endpoint;
use crate::memory::SharedMemory;
use crate::payload::{Payload, Waiter};
use crate::peers::Peers;
use crate::submit::Submission;

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct NodeId(pub(super) usize);

/// What a simulated engine counts.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SimCounts {
    pub refused: u64,
    pub corrupt: u64,
    pub received_bytes: u64,
}

#[derive(Debug)]
pub(super) struct SimNode {
    pub(super) endpoint: Endpoint,
    pub(super) alive: bool,
    /// Whether it is told what becomes of its frames.
    pub(super) hears: bool,
    pub(super) sender: Sender<Payload, Waiter>,
    pub(super) regions: RegionTable<Arc<SharedMemory>>,
    pub(super) peers: Peers,
    pub(super) calls: Calls,
    pub(super) counts: SimCounts,
    pub(super) in_flight: Arc<AtomicUsize>,
    /// When its wire has put out all that it was given.
    pub(super) wire_free_us: u64,
    pub(super) throttled_until_us: u64,
    imms: ImmTable<Waiter>,
    next_key: u64,
}

/// What a node cannot do by itself.
#[derive(Debug)]
pub(super) enum Wanted {
    Connect(SessionId),
    GiveUp(SessionId),
}

const FRAMES_MAX: usize = 1024;
const EARLY_IMMS_MAX: usize = 4096;

impl SimNode {
    pub(super) fn new(incarnation: u64, config: &SimConfig) -> Self {
        let limits = Limits {
            slice_bytes: config.slice_bytes as u64,
            frames_max: FRAMES_MAX,
            throttle_bytes_per_s: config.throttle_bytes_per_s,
            peer_timeout_us: config.peer_timeout_us,
        };
        SimNode {
            endpoint: Endpoint { incarnation, cookie: [0; 16], shm: None, tcp: None },
            alive: true,
            hears: true,
            sender: Sender::new(limits),
            regions: RegionTable::new(incarnation),
            peers: Peers::default(),
            calls: Calls::default(),
            counts: SimCounts::default(),
            in_flight: Arc::default(),
            wire_free_us: 0,
            throttled_until_us: u64::MAX,
            imms: ImmTable::new(EARLY_IMMS_MAX),
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
        deadline_us: u64,
        done: Waiter,
        now_us: u64,
    ) {
        let Submission { peer, deadline: _, payload, body } = submission;
        if !self.peers.is_current(peer) {
            self.calls.done(done, Err(WriteError::PeerGone));
            return;
        }
        let session = peer.session_id();
        self.sender.begin(Operation { session, deadline_us, payload, body, done }, now_us);
    }

    pub(super) fn expect(&mut self, imm: u32, count: u64, deadline_us: u64, waiter: Waiter) {
        match self.imms.expect(imm, count, deadline_us, waiter) {
            Expectation::Waiting => {}
            Expectation::Reached(waiter) => self.calls.done(waiter, Ok(())),
            Expectation::Taken(waiter) => {
                let refused = WriteError::Refused(Refusal::AlreadyExpected);
                self.calls.done(waiter, Err(refused));
            }
        }
    }

    pub(super) fn cancel_imm(&mut self, imm: u32, done: Waiter) {
        if let Some(waiter) = self.imms.cancel(imm) {
            self.calls.done(waiter, Err(WriteError::Cancelled));
        }
        self.calls.done(done, Ok(()));
    }

    pub(super) fn landed(&mut self, path: PathId, imm: u32) {
        if let Some(waiter) = self.imms.arrived(path, imm, 1) {
            self.calls.done(waiter, Ok(()));
        }
    }

    pub(super) fn next_time_us(&self) -> u64 {
        let deadlines = self.sender.next_time_us().min(self.imms.next_deadline_us());
        deadlines.min(self.throttled_until_us)
    }

    pub(super) fn handle_time(&mut self, now_us: u64) {
        if now_us >= self.throttled_until_us {
            self.throttled_until_us = u64::MAX;
        }
        self.sender.handle_time(now_us);
        while let Some(waiter) = self.imms.poll_expired(now_us) {
            self.calls.done(waiter, Err(WriteError::DeadlineExceeded));
        }
    }

    /// Performs what the core asks for, up to what only the world can do.
    pub(super) fn act(&mut self) -> Option<Wanted> {
        while let Some(action) = self.sender.poll_action() {
            match action {
                Action::Complete(waiter, outcome) => self.calls.done(waiter, outcome),
                Action::Connect(session) => return Some(Wanted::Connect(session)),
                Action::GiveUp(session) => return Some(Wanted::GiveUp(session)),
                // Frames take their bytes along when they depart.
                Action::Detach { .. } => {}
            }
        }
        None
    }
}
