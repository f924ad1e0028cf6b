//! The worker owns every connection and all state of an engine. On a thread of its own it polls while there
//! is something to do and for a short time after, then sleeps until something happens; or its turns are taken by a
//! thread that has other work beside it ([`crate::driver`]). It never waits for a peer.

mod excuses;
pub(crate) mod hub;
mod inward;
mod leaving;
pub(crate) mod link;
mod links;
mod outward;
mod quiesce;
mod ways;

use std::collections::{BTreeMap, VecDeque};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use kvasir_transfer_core::{Action, Operation, Rails, WriteError};
use prometheus::IntCounter;
use rustix::event::{Timespec, epoll};

use crate::doorbell::{announce_sleep, awake};
use crate::engine::Handlers;
use crate::payload::{Payload, Permit, Waiter};
use crate::progress::{POLL_EVERY_MIN, Raised, Watch, WatchId};
use crate::scatter::Part;
use crate::shared::{Bells, Command};
use crate::shm::directory::Directory;
use crate::signalled::Batch;
use crate::spin::Spin;
use crate::submit::Submission;

use hub::Hub;
use link::{Lane, Readiness};
use links::Links;
use quiesce::{Quiescing, UnderWay};

/// Sockets are looked at this often while the worker polls: looking costs a system call.
const EPOLL_INTERVAL_US: u64 = 4;
const EVENTS_PER_WAIT: usize = 64;
/// How often a sleeping worker looks whether a copy under way has ended.
const QUIESCE_POLL_US: u64 = 200;
const GAUGES_INTERVAL_US: u64 = 100_000;

#[derive(Debug)]
pub(crate) struct Worker {
    hub: Hub,
    links: Links,
    handlers: Handlers,
    watches: BTreeMap<WatchId, Watched>,
    quiescing: Vec<Quiescing>,
    commands: VecDeque<Command>,
    looked_us: u64,
    gauges_us: u64,
    /// When something has to be done though nothing will wake us.
    wait_until_us: u64,
    /// Removed in the end.
    socket_path: Option<PathBuf>,
}

#[derive(Debug)]
struct Watched {
    watch: Watch,
    seen: u64,
    _permit: Permit,
}

impl Watched {
    fn word(&self) -> &AtomicU64 {
        let word = self.watch.memory.word(self.watch.offset);
        word.expect("the offset was checked when the watch was submitted")
    }

    fn sleeping(&self) -> Option<&AtomicU32> {
        let Raised::WithBell { sleeping_offset } = self.watch.raised else { return None };
        let flag = self.watch.memory.flag(sleeping_offset);
        Some(flag.expect("the offset was checked when the watch was submitted"))
    }

    /// How long a worker may sleep without a look at it.
    fn poll_every_us(&self) -> Option<u64> {
        let Raised::Silently { poll_every } = self.watch.raised else { return None };
        u64::try_from(poll_every.max(POLL_EVERY_MIN).as_micros()).ok()
    }

    fn has_changed(&self) -> bool {
        self.word().load(Ordering::Acquire) != self.seen
    }
}

/// What the worker listens on.
#[derive(Debug, Default)]
pub(crate) struct Listeners {
    pub(crate) tcp: Option<OwnedFd>,
    pub(crate) shm: Option<OwnedFd>,
    pub(crate) socket_path: Option<PathBuf>,
}

impl Worker {
    pub(crate) fn new(
        hub: Hub,
        handlers: Handlers,
        listeners: Listeners,
        bells: Bells,
    ) -> rustix::io::Result<Self> {
        let Listeners { tcp, shm, socket_path } = listeners;
        Ok(Worker {
            links: Links::new(bells, tcp, shm, &hub.cards)?,
            hub,
            handlers,
            watches: BTreeMap::new(),
            quiescing: Vec::new(),
            commands: VecDeque::new(),
            looked_us: 0,
            gauges_us: 0,
            wait_until_us: 0,
            socket_path,
        })
    }

    pub(crate) fn run(mut self) {
        let mut spin = Spin::new(Duration::from_micros(self.hub.shared.config.spin_us));
        while !self.is_asked_to_stop() {
            if self.turn() || (!spin.wait() && self.sleep()) {
                spin.worked();
            }
        }
        self.stop();
    }

    pub(crate) fn is_asked_to_stop(&self) -> bool {
        self.hub.shared.stop.load(Ordering::Acquire)
    }

    /// Gives everything its turn. Whether anything was done.
    pub(crate) fn turn(&mut self) -> bool {
        self.hub.now_us = self.hub.shared.now_us();
        let mut busy = false;
        if self.hub.now_us >= self.looked_us + EPOLL_INTERVAL_US {
            busy |= self.look(Some(Duration::ZERO));
        }
        self.hub.absorb_regions();
        busy |= self.take_commands();
        let links = self.links.turn(&mut self.hub);
        busy |= links.busy;
        self.wait_until_us = links.wait_until_us;
        busy |= self.look_at_watches();
        busy |= self.look_at_quiescing();
        self.hub.sender.handle_time(self.hub.now_us);
        self.hub.expire_imms();
        busy |= self.act();
        busy |= self.hub.calls.tell(&mut self.handlers);
        self.set_gauges();
        busy
    }

    // ---- commands and actions ----

    fn take_commands(&mut self) -> bool {
        if !self.hub.shared.has_commands() {
            return false;
        }
        let mut commands = std::mem::take(&mut self.commands);
        // A caller that has the queue and lost its core does not stop the worker: it looks again.
        self.hub.shared.try_take_commands(&mut commands);
        // Regions come first: a command may name one that was registered a moment ago.
        self.hub.absorb_regions();
        if commands.iter().any(|command| matches!(command, Command::CancelImm { .. })) {
            // What a card has placed already is counted before its count is forgotten.
            self.hub.cards.catch_up();
            self.links.turn_inward(&mut self.hub);
        }
        for command in commands.drain(..) {
            self.take(command);
        }
        self.commands = commands;
        true
    }

    fn take(&mut self, command: Command) {
        match command {
            Command::Begin { submission, deadline_us, done } => {
                self.begin(submission, deadline_us, done);
            }
            Command::BeginAll { parts, payload, deadline_us } => {
                self.begin_all(parts, &payload, deadline_us);
            }
            Command::PutWithSignal(batch) => self.begin_signalled(*batch),
            Command::Tell { done } => self.hub.calls.done(done, Ok(())),
            Command::Expect { imm, count, deadline_us, done } => {
                self.hub.expect(imm, count, deadline_us, done);
            }
            Command::CancelImm { imm, done } => self.hub.cancel_imm(imm, done),
            Command::DrainGroup { group, done } => self.hub.sender.drain_group(group, done),
            Command::Revoke { key, done } => {
                self.hub.revoke(key);
                let under_way = self.links.revoked(key, &mut self.hub);
                self.quiesce(under_way, done);
            }
            Command::CutOff { peer, done } => {
                self.hub.shared.peers().cut_off(peer.incarnation);
                let under_way = self.links.cut_off(peer.incarnation, &mut self.hub);
                self.quiesce(under_way, done);
            }
            Command::Want { peer, wanted } => {
                // Who has lost it meanwhile has been told.
                if self.hub.shared.peers().is_current(peer) {
                    self.hub.sender.set_wanted(peer.session_id(), wanted, self.hub.now_us);
                }
            }
            Command::Watch { id, watch, seen, permit } => {
                self.watches.insert(id, Watched { watch, seen, _permit: permit });
            }
            Command::Unwatch { id, done } => {
                self.watches.remove(&id);
                self.hub.calls.done(done, Ok(()));
            }
        }
    }

    fn begin(&mut self, submission: Submission, deadline_us: u64, done: Waiter) {
        let Submission { peer, deadline: _, payload, body, described } = submission;
        if !self.hub.shared.peers().is_current(peer) {
            self.hub.calls.done(done, Err(WriteError::PeerGone));
            return;
        }
        let mut target = None;
        if let Some(described) = described {
            let (named, place) = *described;
            self.hub.describe(peer, named, &place);
            target = place.location;
        }
        let rails = self.hub.rails(peer, payload.location(), target);
        let session = peer.session_id();
        let operation = Operation { session, deadline_us, payload, body, rails, done };
        self.hub.sender.begin(operation, self.hub.now_us);
    }

    fn begin_all(&mut self, parts: Vec<Part>, payload: &Payload, deadline_us: u64) {
        let shared = Arc::clone(&self.hub.shared);
        // Once for all of them.
        let peers = shared.peers();
        for Part { peer, body, done } in parts {
            if !peers.is_current(peer) {
                self.hub.calls.done(done, Err(WriteError::PeerGone));
                continue;
            }
            let (session, payload, rails) = (peer.session_id(), payload.clone(), Rails::ANY);
            let operation = Operation { session, deadline_us, payload, body, rails, done };
            self.hub.sender.begin(operation, self.hub.now_us);
        }
    }

    fn begin_signalled(&mut self, mut batch: Batch) {
        let shared = Arc::clone(&self.hub.shared);
        let over = {
            let peers = shared.peers();
            batch.without(|peer| peers.is_current(peer))
        };
        for done in over {
            self.hub.calls.done(done, Err(WriteError::PeerGone));
        }
        for (peer, described) in std::mem::take(&mut batch.described) {
            let (named, place) = *described;
            self.hub.describe(peer, named, &place);
        }
        self.hub.sender.begin_signalled(batch.signalled, self.hub.now_us);
    }

    fn act(&mut self) -> bool {
        let mut any = false;
        while let Some(action) = self.hub.sender.poll_action() {
            any = true;
            match action {
                Action::Complete(waiter, outcome) => self.hub.calls.done(waiter, outcome),
                Action::CompleteSignalled { done, outcome, told } => {
                    if outcome.is_ok() {
                        self.hub.metrics.signalled(told);
                    }
                    done.note(told);
                    self.hub.calls.done(done, outcome);
                }
                Action::Connect(session) => self.links.connect(session, &mut self.hub),
                Action::Detach { session, op } => self.links.detach(session, op, &mut self.hub),
                Action::GiveUpPath { session, path, why } => {
                    self.links.give_up_path(Lane { session, path }, why, &mut self.hub);
                }
                Action::Heartbeat { session, path } => {
                    self.links.ask_for_heartbeat(Lane { session, path });
                }
                Action::GiveUpSession(session) => {
                    self.links.give_up_session(session, &mut self.hub);
                }
                Action::ClosePath { session, through, close } => {
                    self.links.ask(session, through, &close);
                }
                // That there was something to do is enough for one more turn of all links.
                Action::Offer(_) => {}
            }
        }
        any
    }

    // ---- what is polled ----

    fn look_at_watches(&mut self) -> bool {
        let mut any = false;
        for watched in self.watches.values_mut() {
            let now = watched.word().load(Ordering::Acquire);
            if now != watched.seen {
                any = true;
                let former = std::mem::replace(&mut watched.seen, now);
                (watched.watch.on_progress)(former, now);
            }
        }
        any
    }

    fn quiesce(&mut self, under_way: Vec<UnderWay>, done: Waiter) {
        self.quiescing.push(Quiescing::new(under_way, done));
        self.look_at_quiescing();
    }

    fn look_at_quiescing(&mut self) -> bool {
        let mut any = false;
        for at in (0..self.quiescing.len()).rev() {
            if self.quiescing[at].is_over() {
                any = true;
                let waiter = self.quiescing.swap_remove(at).into_waiter();
                self.hub.calls.done(waiter, Ok(()));
            }
        }
        any
    }

    fn set_gauges(&mut self) {
        if self.hub.now_us < self.gauges_us {
            return;
        }
        self.gauges_us = self.hub.now_us + GAUGES_INTERVAL_US;
        let metrics = &self.hub.metrics;
        let count = |count: usize| i64::try_from(count).unwrap_or(i64::MAX);
        let raise = |counter: &IntCounter, total: u64| {
            counter.inc_by(total.saturating_sub(counter.get()));
        };
        metrics.imm_counters.set(count(self.hub.receiver.imms().len()));
        raise(&metrics.imm_early_discarded, self.hub.receiver.imms().early_forgotten());
        raise(&metrics.imm_excess, self.hub.receiver.imms().excess());
        metrics.operations.set(count(self.hub.shared.in_flight.load(Ordering::Relaxed)));
        metrics.message_buffers.set(count(self.hub.messages.lent()));
        metrics.connections.set(count(self.links.len()));
        metrics.quiescing.set(count(self.quiescing.len()));
    }

    // ---- sleeping ----

    /// Whether something woke us. When only the time came, there may be nothing to stay awake for.
    fn sleep(&mut self) -> bool {
        self.announce_sleep();
        let patience = self.patience();
        let has_work = patience == Some(Duration::ZERO);
        let woken = self.look(patience);
        self.awake();
        woken || has_work
    }

    /// From now on whoever has work for us wakes us.
    pub(crate) fn announce_sleep(&mut self) {
        // What the gauges show must not stay old while we sleep.
        self.gauges_us = 0;
        self.set_gauges();
        self.sleep_flags().for_each(announce_sleep);
    }

    /// How long we may sleep, having announced it: no time while there is work.
    pub(crate) fn patience(&mut self) -> Option<Duration> {
        let has_work = self.hub.shared.has_commands()
            || self.is_asked_to_stop()
            || self.links.has_work()
            || self.hub.cards.arm()
            || self.watches.values().any(Watched::has_changed);
        if has_work {
            return Some(Duration::ZERO);
        }
        let mut until_us = self.wait_until_us;
        until_us = until_us.min(self.hub.sender.next_time_us());
        until_us = until_us.min(self.hub.receiver.imms().next_deadline_us());
        until_us = until_us.min(self.links.next_time_us());
        if !self.quiescing.is_empty() || self.links.has_leaving() {
            until_us = until_us.min(self.hub.now_us + QUIESCE_POLL_US);
        }
        if let Some(every_us) = self.watches.values().filter_map(Watched::poll_every_us).min() {
            until_us = until_us.min(self.hub.now_us.saturating_add(every_us));
        }
        let now_us = self.hub.shared.now_us();
        // What is due now is no work that was found.
        let left = |until_us: u64| Duration::from_micros(until_us.saturating_sub(now_us).max(1));
        (until_us < u64::MAX).then(|| left(until_us))
    }

    pub(crate) fn awake(&mut self) {
        self.sleep_flags().for_each(awake);
    }

    /// The sockets may be what has woken whoever takes our turns.
    pub(crate) fn look_at_once(&mut self) {
        self.looked_us = 0;
    }

    /// Can be read when a socket or a bell is ready.
    pub(crate) fn wake_fd(&self) -> BorrowedFd<'_> {
        self.links.epoll()
    }

    /// Whoever has work for us looks at one of these.
    fn sleep_flags(&self) -> impl Iterator<Item = &AtomicU32> {
        let own = std::iter::once(self.hub.shared.sleeping());
        let of_peers = self.hub.directory.iter().map(Directory::sleeping);
        own.chain(of_peers).chain(self.watches.values().filter_map(Watched::sleeping))
    }

    /// Learns what the sockets are ready for. Whether there was anything.
    fn look(&mut self, timeout: Option<Duration>) -> bool {
        let timeout = timeout.map(|timeout| Timespec {
            tv_sec: i64::try_from(timeout.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: i64::from(timeout.subsec_nanos()),
        });
        self.looked_us = self.hub.now_us;
        let mut events = [MaybeUninit::uninit(); EVENTS_PER_WAIT];
        // An interrupted wait is a short one.
        let Ok((events, _)) = epoll::wait(self.links.epoll(), &mut events, timeout.as_ref()) else {
            return false;
        };
        for event in &*events {
            let (token, flags) = (event.data.u64(), event.flags);
            self.links.ready(token, Readiness::of(flags), &mut self.hub);
        }
        !events.is_empty()
    }

    // ---- the end ----

    pub(crate) fn stop(mut self) {
        self.links.close_all(&mut self.hub);
        if let Some(path) = &self.socket_path {
            let _ = std::fs::remove_file(path);
        }
        self.hub.sender.shut_down();
        self.act_at_the_end();
        for quiescing in std::mem::take(&mut self.quiescing) {
            self.hub.calls.done(quiescing.into_waiter(), Err(WriteError::Cancelled));
        }
        for waiter in self.hub.receiver.imms_mut().drain_waiters() {
            self.hub.calls.done(waiter, Err(WriteError::Cancelled));
        }
        self.hub.shared.take_commands(&mut self.commands);
        for command in std::mem::take(&mut self.commands) {
            match command {
                Command::BeginAll { parts, .. } => {
                    for part in parts {
                        self.hub.calls.done(part.done, Err(WriteError::Cancelled));
                    }
                }
                Command::PutWithSignal(mut batch) => {
                    for done in batch.without(|_| false) {
                        self.hub.calls.done(done, Err(WriteError::Cancelled));
                    }
                }
                Command::Begin { done, .. }
                | Command::Tell { done }
                | Command::Expect { done, .. }
                | Command::CancelImm { done, .. }
                | Command::DrainGroup { done, .. }
                | Command::Revoke { done, .. }
                | Command::CutOff { done, .. }
                | Command::Unwatch { done, .. } => {
                    self.hub.calls.done(done, Err(WriteError::Cancelled));
                }
                Command::Watch { .. } | Command::Want { .. } => {}
            }
        }
        self.hub.calls.tell(&mut self.handlers);
    }

    fn act_at_the_end(&mut self) {
        while let Some(action) = self.hub.sender.poll_action() {
            match action {
                Action::Complete(done, outcome)
                | Action::CompleteSignalled { done, outcome, .. } => {
                    self.hub.calls.done(done, outcome);
                }
                _ => {}
            }
        }
    }
}
