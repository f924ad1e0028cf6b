//! The handle that callers hold. It checks what is submitted and queues it for the worker, which owns
//! all state.

use std::fmt;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::JoinHandle;
use std::time::Duration;

use crate::completion::Completion;
use crate::config::{Domain, TlsError, TransferConfig};
use crate::driver::Driver;
use crate::endpoint::Endpoint;
use crate::memory::{Access, MemoryError, SharedMemory};
use crate::messages::Message;
use crate::payload::{Permit, Waiter};
use crate::progress::{Mirror, Raised, Watch, WatchId};
use crate::region::{RegionDesc, RegionHandle};
use crate::scatter::{
    Barrier, GroupError, GroupMember, PartOutcomes, Parts, PeerGroup, Scatter, Unjoined,
};
use crate::shared::{Command, Shared};
use crate::signalled::{self, PutWithSignal, SignalOutcomes};
use crate::start;
use crate::submit::{Submission, deadline_us};
use crate::topology::{Location, TopologyError};
use crate::write::{Write, WritePaged};

/// One session with one peer. After the peer was lost it is of no use any more, except for `cut_off`:
/// `connect` gives another one. So nothing that was submitted for a lost session can reach the peer
/// through a later one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PeerId {
    pub(crate) incarnation: u64,
    pub(crate) session: u64,
}

impl PeerId {
    /// Which engine the session is with: the incarnation in its endpoint, as it was given.
    pub fn incarnation(self) -> u64 {
        self.incarnation
    }
}

impl fmt::Display for PeerId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}.{}", self.incarnation, self.session)
    }
}

/// What happens to peers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PeerEvent {
    /// Our session with the peer has ended: what was outstanding has ended with `PeerGone`. No domain
    /// where none could be connected, or in the simulated one.
    SessionLost { peer: PeerId, incarnation: u64, domain: Option<Domain>, why: Loss },
    /// The last connection through which the peer wrote here has ended, or its session has. Nothing more
    /// arrives through it. A peer that is alive may come back in the same session, with what has not
    /// arrived.
    WriterLost { incarnation: u64, domain: Option<Domain>, why: Loss },
}

/// Why a peer was lost, as far as it can be told from here.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Loss {
    /// Its last connection has ended, by its own will or with its process.
    Closed,
    /// It showed no life for too long: its host or the way to it is gone, or its worker stands still.
    Silent,
    /// It has cut us off.
    CutOff,
    /// Another incarnation listens there now, or the peer has begun another session.
    Replaced,
    /// It has said what cannot be, or speaks another version.
    Misbehaved,
    /// Nothing was under way, and others needed its connection.
    Idle,
    /// No connection to it could be made.
    Unreachable,
}

/// What the engine calls, on the worker's thread or in its driver's turns: short, and never waiting.
pub struct Handlers {
    /// A message has arrived. The session leads back to the sender. Whoever keeps the message keeps its
    /// buffer: see [`crate::messages`].
    pub on_message: Box<dyn FnMut(PeerId, Message) + Send>,
    pub on_peer: Box<dyn FnMut(PeerEvent) + Send>,
}

impl fmt::Debug for Handlers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Handlers").finish_non_exhaustive()
    }
}

impl Default for Handlers {
    fn default() -> Self {
        Handlers { on_message: Box::new(|_, _| {}), on_peer: Box::new(|_| {}) }
    }
}

/// Why an engine did not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    #[error("neither `tcp_listen` nor `run_dir` is set: peers cannot reach this engine")]
    NoDomain,
    #[error("`{0}` is out of range")]
    Config(&'static str),
    #[error(
        "`tcp_advertise` is required because `tcp_listen` ({0}) is not the address of one host"
    )]
    Advertise(std::net::SocketAddr),
    #[error("cannot listen on {what}")]
    Listen {
        what: String,
        #[source]
        source: std::io::Error,
    },
    #[error("cannot create the memory of the shm transport")]
    Memory(#[from] MemoryError),
    #[error("`{call}` failed")]
    System {
        call: &'static str,
        #[source]
        source: std::io::Error,
    },
    #[error("invalid TLS configuration of the transfer engine")]
    Tls(#[from] TlsError),
    #[error("cannot use the {0} transport: {1}")]
    Card(&'static str, String),
    #[error("cannot use the topology")]
    Topology(#[from] TopologyError),
    #[error("the verbs and efa transports need `tcp_listen`: peers connect there first")]
    RdmaWithoutTcp,
    #[error("`verbs` and `efa` cannot both be set: an engine uses NICs of one kind")]
    TwoCards,
    #[error("cannot register the metrics of the transfer engine")]
    Metrics(#[from] prometheus::Error),
}

/// Why an operation was not accepted. Its completion is not called.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum SubmitError {
    /// Too much is under way: try again later.
    #[error("too many operations are in flight; submit again when one has completed")]
    Full,
    /// It could never succeed.
    #[error("invalid operation: {0}")]
    Invalid(&'static str),
    #[error("the transfer engine has stopped")]
    Stopped,
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ConnectError {
    #[error("this host cannot reach any address of the peer; set `tcp_listen` of the peer")]
    Unreachable,
    #[error("the transfer engine has connections to too many peers; try again later")]
    TooMany,
}

#[derive(Debug, thiserror::Error)]
pub enum RegisterError {
    #[error("read-only memory cannot be a target; map it writable")]
    ReadOnly,
    #[error("the transfer engine has too many regions; drop one first")]
    TooMany,
}

/// A count to wait for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Expect {
    pub imm: u32,
    /// At least 1.
    pub count: u64,
    /// From now; then the counter is forgotten. `None`: until `cancel_imm`.
    pub deadline: Option<Duration>,
}

/// A transfer engine. Dropping it stops the worker's thread, or ends it in its driver's next turn; what is under way
/// ends with `Cancelled`.
#[derive(Debug)]
pub struct TransferEngine {
    shared: Arc<Shared>,
    /// Where it has a thread of its own.
    worker: Option<JoinHandle<()>>,
}

impl TransferEngine {
    /// Listens and starts the worker.
    ///
    /// # Errors
    /// [`StartError`] when the configuration cannot be or the system refuses.
    pub fn start(
        config: TransferConfig,
        handlers: Handlers,
        registry: &prometheus::Registry,
    ) -> Result<Self, StartError> {
        start::start(config, handlers, registry)
            .map(|(shared, worker)| TransferEngine { shared, worker: Some(worker) })
    }

    /// Listens, and leaves it to the caller to give the worker its turns; see [`crate::driver`].
    /// [`TransferConfig::worker_core`] is for threads of its own.
    ///
    /// # Errors
    /// As [`TransferEngine::start`].
    pub fn start_driven(
        config: TransferConfig,
        handlers: Handlers,
        registry: &prometheus::Registry,
    ) -> Result<(Self, Driver), StartError> {
        let (shared, worker) = start::make(config, handlers, registry)?;
        let driver = Driver::new(Arc::clone(&shared), worker);
        Ok((TransferEngine { shared, worker: None }, driver))
    }

    /// How peers reach this engine.
    pub fn endpoint(&self) -> Endpoint {
        self.shared.endpoint.clone()
    }

    pub fn incarnation(&self) -> u64 {
        self.shared.endpoint.incarnation
    }

    /// Makes memory a region that peers may write, from now until `revoke`. With RDMA it is registered
    /// with the device, which makes all its pages present and keeps them so: it takes long for much
    /// memory, and is not for a hot path. Where the device does not take it, other domains reach it.
    ///
    /// # Errors
    /// [`RegisterError`].
    pub fn register(
        &self,
        memory: Arc<SharedMemory>,
    ) -> Result<(RegionHandle, RegionDesc), RegisterError> {
        self.register_at(memory, None)
    }

    /// As [`TransferEngine::register`], for who knows where the memory lies: cards near to it are used
    /// first. Without a location the engine asks the system for the NUMA node of its pages; memory of
    /// which it does not say that, or whose pages lie on several nodes, is near to every card.
    ///
    /// # Errors
    /// [`RegisterError`].
    pub fn register_at(
        &self,
        memory: Arc<SharedMemory>,
        location: Option<Location>,
    ) -> Result<(RegionHandle, RegionDesc), RegisterError> {
        if memory.access() == Access::ReadOnly {
            return Err(RegisterError::ReadOnly);
        }
        let added = self.shared.add_region(Arc::clone(&memory), location);
        let (key, rdma) = added.ok_or(RegisterError::TooMany)?;
        let handle =
            RegionHandle { key, incarnation: self.incarnation(), memory, rdma: rdma.map(Arc::new) };
        let descriptor = handle.descriptor();
        Ok((handle, descriptor))
    }

    /// Ends a registration. When it completes, no write to the region is under way, and none will
    /// land any more.
    ///
    /// # Errors
    /// [`SubmitError`]; `Invalid` when the region was registered with another engine.
    pub fn revoke(&self, region: &RegionHandle, done: Completion) -> Result<(), SubmitError> {
        if region.incarnation != self.incarnation() {
            return Err(SubmitError::Invalid("the region belongs to another engine"));
        }
        self.shared.submit(Command::Revoke { key: region.key, done: Waiter::new(done) })
    }

    /// The current session with a peer, or a new one. The connection is made when it is first used.
    /// A peer that was not used for long may be forgotten while it has no connection: its session is
    /// over then, as if it had been lost.
    ///
    /// # Errors
    /// [`ConnectError`]: `TooMany` while there are connections to 4096 others.
    pub fn connect(&self, endpoint: &Endpoint) -> Result<PeerId, ConnectError> {
        let by_shm = self.shared.endpoint.is_on_host_of(endpoint);
        if !by_shm && endpoint.tcp.is_none() {
            return Err(ConnectError::Unreachable);
        }
        self.shared.peers().session(endpoint)
    }

    /// Whether writes to this peer that carry checksums are verified, so that it is worth computing them: not
    /// where the preferred domain leads there and its verification, which is the sender's, is off. Over TCP the
    /// receiver decides.
    ///
    /// A write without checksums stays one: should the preferred domain fail under way, it goes on over TCP
    /// unverified.
    #[must_use]
    pub fn verifies(&self, endpoint: &Endpoint) -> bool {
        let (config, here) = (&self.shared.config, &self.shared.endpoint);
        let leads_there = match config.preferred {
            Domain::Shm => here.is_on_host_of(endpoint),
            Domain::Verbs | Domain::Efa => here.rdma.is_some() && endpoint.rdma.is_some(),
            Domain::Tcp => return true,
        };
        !leads_there || config.verify.by(config.preferred)
    }

    /// Submits a write.
    ///
    /// # Errors
    /// [`SubmitError`]; `done` is not called then.
    pub fn write(&self, write: Write, done: Completion) -> Result<(), SubmitError> {
        self.begin(Submission::write(write)?, done)
    }

    /// Submits a write of many pages. It completes when every page has ended: with the first error
    /// if there was one. A page that is corrupt does not keep the others; a refusal does.
    ///
    /// # Errors
    /// [`SubmitError`]; `done` is not called then.
    pub fn write_paged(&self, write: WritePaged, done: Completion) -> Result<(), SubmitError> {
        self.begin(Submission::write_paged(write)?, done)
    }

    /// Sends a short message. `Ok` means that the peer's engine has taken it and gives it to its handler,
    /// once, not that anyone acted on it. `Refused(NoRoom)` and `Refused(TooLong)` mean that it was not
    /// taken (see [`crate::messages`]). Messages are not ordered.
    ///
    /// # Errors
    /// [`SubmitError`]; `done` is not called then.
    pub fn send(
        &self,
        peer: PeerId,
        message: Vec<u8>,
        deadline: Duration,
        done: Completion,
    ) -> Result<(), SubmitError> {
        let max = self.shared.config.message_bytes_max;
        self.begin(Submission::message(peer, message, deadline, max)?, done)
    }

    fn begin(&self, submission: Submission, done: Completion) -> Result<(), SubmitError> {
        let max = self.shared.config.operations_max;
        let permit = Permit::take(&self.shared.in_flight, 1, max).ok_or(SubmitError::Full)?;
        let done = Waiter::with_permit(done, permit);
        let deadline_us = deadline_us(self.shared.now_us(), submission.deadline);
        self.shared.submit(Command::Begin { submission, deadline_us, done })
    }

    /// Says whether the peer's loss is to be noticed while nothing is under way, too. A wanted session is
    /// connected, asked for heartbeats, and not closed for being idle, until it is lost
    /// ([`PeerEvent::SessionLost`]) or wanted no more; a later session has to be wanted anew.
    ///
    /// # Errors
    /// [`SubmitError::Invalid`] when the session is over.
    pub fn set_wanted(&self, peer: PeerId, wanted: bool) -> Result<(), SubmitError> {
        if !self.shared.peers().is_current(peer) {
            return Err(SubmitError::Invalid("the session has ended"));
        }
        self.shared.submit(Command::Want { peer, wanted })
    }

    /// Makes a group of peers that can be written to together.
    ///
    /// # Errors
    /// [`GroupError`] when it has no member, or more than [`crate::scatter::GROUP_MEMBERS_MAX`].
    pub fn register_group(&self, members: Vec<GroupMember>) -> Result<PeerGroup, GroupError> {
        PeerGroup::new(self.incarnation(), members)
    }

    /// Submits a slice for each of many peers. It completes once, when every slice has ended: with the
    /// first error if there was one. What became of each is in the outcomes.
    ///
    /// # Errors
    /// [`SubmitError`]; nothing was sent and `done` is not called then.
    pub fn scatter(
        &self,
        scatter: Scatter,
        done: Completion,
    ) -> Result<Arc<PartOutcomes>, SubmitError> {
        self.begin_all(Unjoined::scatter(scatter, self.incarnation())?, done)
    }

    /// Submits an immediate for every member of a group. It completes once, as a scatter does; each
    /// member's outcome is in the outcomes.
    ///
    /// # Errors
    /// [`SubmitError`]; nothing was sent and `done` is not called then.
    pub fn barrier(
        &self,
        barrier: &Barrier,
        done: Completion,
    ) -> Result<Arc<PartOutcomes>, SubmitError> {
        self.begin_all(Unjoined::barrier(barrier, self.incarnation())?, done)
    }

    /// Submits data, and words that tell of it and are never seen before it; see [`crate::signalled`]. It
    /// completes once, when every transfer has ended: with the first error if there was one. What became of each, and
    /// whether its peer is told by a signal or by the counter, is in the outcomes.
    ///
    /// # Errors
    /// [`SubmitError`]; nothing was sent and `done` is not called then.
    pub fn put_with_signal(
        &self,
        call: PutWithSignal,
        done: Completion,
    ) -> Result<Arc<SignalOutcomes>, SubmitError> {
        let unjoined = signalled::Unjoined::new(call)?;
        let (operations, max) = (unjoined.operations(), self.shared.config.operations_max);
        if operations > max {
            return Err(SubmitError::Invalid("more puts and signals than `operations_max`"));
        }
        let permit = Permit::take(&self.shared.in_flight, operations, max);
        let deadline_us = deadline_us(self.shared.now_us(), unjoined.deadline());
        let (outcomes, batch) = unjoined.join(done, permit.ok_or(SubmitError::Full)?, deadline_us);
        self.shared.submit(match batch {
            Ok(batch) => Command::PutWithSignal(Box::new(batch)),
            Err(done) => Command::Tell { done },
        })?;
        Ok(outcomes)
    }

    fn begin_all(
        &self,
        unjoined: Unjoined,
        done: Completion,
    ) -> Result<Arc<PartOutcomes>, SubmitError> {
        let (operations, max) = (unjoined.operations(), self.shared.config.operations_max);
        if operations > max {
            return Err(SubmitError::Invalid("more parts than `operations_max`"));
        }
        let permit = Permit::take(&self.shared.in_flight, operations, max);
        let Parts { parts, payload, nothing_to_do, deadline, outcomes } =
            unjoined.join(done, permit.ok_or(SubmitError::Full)?);
        let deadline_us = deadline_us(self.shared.now_us(), deadline);
        self.shared.submit(match nothing_to_do {
            Some(done) => Command::Tell { done },
            None => Command::BeginAll { parts, payload, deadline_us },
        })?;
        Ok(outcomes)
    }

    /// Completes when writes with this immediate have landed `count` times, those before the call
    /// included. An immediate is used anew only after `cancel_imm` (whether or not it was reached) has
    /// completed; otherwise it ends with `Refused(AlreadyExpected)`.
    ///
    /// # Errors
    /// [`SubmitError`]; `done` is not called then.
    pub fn expect_imm(&self, expect: Expect, done: Completion) -> Result<(), SubmitError> {
        let Expect { imm, count, deadline } = expect;
        if count == 0 {
            return Err(SubmitError::Invalid("the count must be above 0"));
        }
        let deadline_us =
            deadline.map_or(u64::MAX, |from_now| deadline_us(self.shared.now_us(), from_now));
        let (expecting, max) = (&self.shared.expecting, self.shared.config.operations_max);
        let permit = Permit::take(expecting, 1, max).ok_or(SubmitError::Full)?;
        let done = Waiter::with_permit(done, permit);
        self.shared.submit(Command::Expect { imm, count, deadline_us, done })
    }

    /// As `expect_imm`, for whoever polls a word and is not told: when the count is reached, and its bytes are
    /// visible to this host, it is stored in the word, and then `done` is told. Before that, and when it is
    /// never reached, the word stays as it is: counts on the way may be taken back (a path that fails), one that
    /// is reached is not. Where the bytes lie in the memory of a device, the word is to be one that the device
    /// reads behind them.
    ///
    /// # Errors
    /// [`SubmitError`]; `Invalid` too when the word does not fit its memory.
    pub fn expect_imm_mirrored(
        &self,
        expect: Expect,
        mirror: Mirror,
        done: Completion,
    ) -> Result<(), SubmitError> {
        self.expect_imm(expect, mirror.before(expect.count, done)?)
    }

    /// Forgets a counter: what has been counted, and the expectation, which ends with `Cancelled`
    /// before `done` is called and is never called afterwards.
    ///
    /// # Errors
    /// [`SubmitError`].
    pub fn cancel_imm(&self, imm: u32, done: Completion) -> Result<(), SubmitError> {
        self.shared.submit(Command::CancelImm { imm, done: Waiter::new(done) })
    }

    /// Stops issuing writes of the group (those not issued end with `Cancelled`, also those submitted
    /// while it drains) and completes when each issued one has landed or failed for certain. With
    /// `PeerGone` when a path was lost with writes on it: then only the receiver can make sure, by
    /// cutting off.
    ///
    /// # Errors
    /// [`SubmitError`].
    pub fn drain_group(&self, group: u64, done: Completion) -> Result<(), SubmitError> {
        self.shared.submit(Command::DrainGroup { group, done: Waiter::new(done) })
    }

    /// Makes sure that nothing the peer has submitted so far, for its sessions up to now, lands here
    /// any more: its connections are closed and their readers past them when `done` is called. The
    /// peer may connect anew, in a new session. Works for sessions that are lost.
    ///
    /// # Errors
    /// [`SubmitError`].
    pub fn cut_off(&self, peer: PeerId, done: Completion) -> Result<(), SubmitError> {
        self.shared.submit(Command::CutOff { peer, done: Waiter::new(done) })
    }

    /// Polls a progress word from now on: a change from the value that it has now is told.
    ///
    /// # Errors
    /// [`SubmitError::Invalid`] when the offsets do not fit the memory, or the flag cannot be set there;
    /// [`SubmitError::Full`] while `operations_max` words are watched.
    pub fn watch(&self, watch: Watch) -> Result<WatchId, SubmitError> {
        let invalid = SubmitError::Invalid("the watched words do not fit their memory");
        let word = watch.memory.word(watch.offset).map_err(|_| invalid)?;
        let seen = word.load(Ordering::Acquire);
        if let Raised::WithBell { sleeping_offset } = watch.raised {
            watch.memory.flag(sleeping_offset).map_err(|_| invalid)?;
            if !watch.memory.is_writable() {
                return Err(SubmitError::Invalid("the flag is in memory mapped read-only"));
            }
        }
        let (watching, max) = (&self.shared.watching, self.shared.config.operations_max);
        let permit = Permit::take(watching, 1, max).ok_or(SubmitError::Full)?;
        let id = self.shared.next_watch();
        self.shared.submit(Command::Watch { id, watch, seen, permit })?;
        Ok(id)
    }

    /// Stops polling; the callback is not called any more when `done` is.
    ///
    /// # Errors
    /// [`SubmitError`].
    pub fn unwatch(&self, watch: WatchId, done: Completion) -> Result<(), SubmitError> {
        self.shared.submit(Command::Unwatch { id: watch, done: Waiter::new(done) })
    }

    #[cfg(feature = "test-hooks")]
    pub(crate) fn shared(&self) -> &Shared {
        &self.shared
    }

    /// What wakes the worker: a [`crate::doorbell::Ringer`]'s descriptor, for whoever raises a watched
    /// word (see [`Watch`]). Nothing that is done to it keeps the worker from its other work.
    pub fn wake_fd(&self) -> BorrowedFd<'_> {
        self.shared.outside.as_fd()
    }

    /// Completes `done` when the worker has ended: with `Ok` after the engine was dropped, with
    /// `Cancelled` when the worker has died of a panic. After that everything is refused with
    /// [`SubmitError::Stopped`], callbacks of what was under way are dropped without a call, and the
    /// engine is of no use any more: whoever depends on it must end too, or start another one.
    pub fn when_ended(&self, done: Completion) {
        self.shared.when_ended(done);
    }
}

impl Drop for TransferEngine {
    fn drop(&mut self) {
        self.shared.ask_to_stop();
        if let Some(worker) = self.worker.take()
            && worker.thread().id() != std::thread::current().id()
            && worker.join().is_err()
        {
            tracing::error!(engine = %self.shared.config.name, "the worker of the transfer engine panicked; restart the process");
        }
    }
}
