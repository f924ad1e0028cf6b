//! The simulated domain: engines that live in one process under virtual time, on a network whose
//! latency, bandwidth, reordering and faults follow from a seed. It drives the same core as the worker
//! does, so what holds here of counters, groups, sessions and deadlines holds there.
//!
//! Nothing moves by itself: [`SimNetwork::run_until`] and [`SimNetwork::advance`] let time pass. Same
//! seed and same calls, same run.

mod config;
mod flights;
mod node;
mod paths;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use kvasir_mutation::{Mutation, mutated};
use kvasir_transfer_core::{Next, PathIndex, Rails, SessionId};

use crate::completion::Completion;
use crate::endpoint::Endpoint;
use crate::engine::{ConnectError, Expect, Handlers, PeerId, RegisterError, SubmitError};
use crate::memory::{Access, SharedMemory};
use crate::messages::Messages;
use crate::payload::{Permit, Waiter};
use crate::progress::Mirror;
use crate::region::{RegionDesc, RegionHandle};
use crate::scatter::{
    Barrier, GroupError, GroupMember, Part, PartOutcomes, Parts, PeerGroup, Scatter, Unjoined,
};
use crate::signalled::{self, PutWithSignal, SignalOutcomes};
use crate::submit::{Submission, deadline_us};
use crate::write::{Write, WritePaged};

pub use config::{SimConfig, SimFaults, SimLane, SimOrder};
use flights::Flight;
pub use node::SimCounts;
use node::{NodeId, SimNode};
use paths::{Event, Key, Link};

/// A network and its engines.
#[derive(Clone)]
pub struct SimNetwork(Arc<Network>);

struct Network {
    world: Mutex<World>,
    /// Apart from the world, because handlers call back into it.
    handlers: Mutex<BTreeMap<NodeId, Handlers>>,
}

impl fmt::Debug for SimNetwork {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SimNetwork").finish_non_exhaustive()
    }
}

#[derive(Debug)]
struct World {
    config: SimConfig,
    now_us: u64,
    random: Random,
    nodes: BTreeMap<NodeId, SimNode>,
    links: BTreeMap<Key, Link>,
    /// By engine and session; indexes are never used twice.
    next_path: BTreeMap<(NodeId, SessionId), u32>,
    flights: BTreeMap<u64, Flight>,
    /// Writes that have arrived on relaxed paths, and that nobody sees yet.
    unplaced: usize,
    events: BTreeMap<(u64, u64), Event>,
    next_serial: u64,
    /// Pairs of engines, the lower one first, between which nothing gets through.
    parted: BTreeSet<(NodeId, NodeId)>,
    /// Of everything that has happened, and when.
    trace: u64,
    /// What has landed since it was asked for last, once somebody wants to know.
    landings: Option<Vec<Landing>>,
}

/// Bytes of a write that came to lie in an engine's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Landing {
    /// Of the engine whose memory it is.
    pub incarnation: u64,
    /// The key of the region that was written.
    pub region: u64,
    pub offset_bytes: u64,
    pub length_bytes: u64,
    /// Absent on a part of a split write, which counts nothing.
    pub imm: Option<u32>,
}

/// SplitMix64.
#[derive(Debug)]
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn percent(&mut self, chance: u64) -> bool {
        self.next() % 100 < chance
    }

    /// Up to `max`, itself included.
    fn upto(&mut self, max: u64) -> u64 {
        match max.checked_add(1) {
            Some(range) => self.next() % range,
            None => self.next(),
        }
    }
}

impl SimNetwork {
    pub fn new(config: SimConfig) -> Self {
        let world = World {
            random: Random(config.seed),
            config,
            now_us: 0,
            nodes: BTreeMap::new(),
            links: BTreeMap::new(),
            unplaced: 0,
            next_path: BTreeMap::new(),
            flights: BTreeMap::new(),
            events: BTreeMap::new(),
            next_serial: 0,
            parted: BTreeSet::new(),
            trace: 0,
            landings: None,
        };
        let handlers = Mutex::new(BTreeMap::new());
        SimNetwork(Arc::new(Network { world: Mutex::new(world), handlers }))
    }

    /// Adds an engine.
    pub fn engine(&self, handlers: Handlers) -> SimEngine {
        let node = self.world().add_node();
        self.handlers().insert(node, handlers);
        SimEngine { network: self.clone(), node }
    }

    pub fn now_us(&self) -> u64 {
        self.world().now_us
    }

    /// Lets time pass until `done` or until nothing is left to happen. Whether it is done.
    pub fn run_until(&self, mut done: impl FnMut() -> bool) -> bool {
        loop {
            self.tell();
            if done() {
                return true;
            }
            let stepped = self.world().step(u64::MAX);
            if !stepped {
                self.tell();
                return done();
            }
        }
    }

    /// Lets so much time pass.
    pub fn advance(&self, by_us: u64) {
        let until_us = self.now_us().saturating_add(by_us);
        loop {
            self.tell();
            let mut world = self.world();
            if !world.step(until_us) {
                world.now_us = until_us;
                return;
            }
        }
    }

    /// When something happens next if nobody does anything; `None` when nothing will.
    pub fn next_us(&self) -> Option<u64> {
        let world = self.world();
        let next_us = world.next_event_us().min(world.next_due_us());
        (next_us < u64::MAX).then_some(next_us)
    }

    /// A hash of everything that has happened so far: the same for the same seed and the same calls.
    pub fn trace(&self) -> u64 {
        self.world().trace
    }

    /// Everything that has landed in any engine's memory since this was called last, in order; nothing
    /// the first time. For checkers that believe only memory itself.
    pub fn take_landings(&self) -> Vec<Landing> {
        self.world().landings.replace(Vec::new()).unwrap_or_default()
    }

    /// From now on nothing fails by itself.
    pub fn end_faults(&self) {
        self.world().config.faults = SimFaults::default();
    }

    /// Ends every engine: what is under way ends with `Cancelled`, and the handlers are dropped.
    pub fn stop(&self) {
        self.world().stop();
        self.tell();
        self.handlers().clear();
    }

    /// The engine's process dies. What it had put on the wire still arrives.
    pub fn kill(&self, engine: &SimEngine) {
        self.world().kill(engine.node);
    }

    /// The engine's host vanishes: nobody is told, and whoever asks gets no answer. What it had put on
    /// the wire still arrives.
    pub fn vanish(&self, engine: &SimEngine) {
        self.world().vanish(engine.node);
    }

    /// From now on nothing that one puts on the wire gets to the other, nor what answers it; what is on
    /// the wire already still arrives. Or no longer so.
    pub fn part(&self, one: &SimEngine, other: &SimEngine, parted: bool) {
        let pair = (one.node.min(other.node), one.node.max(other.node));
        let mut world = self.world();
        match parted {
            true => world.parted.insert(pair),
            false => world.parted.remove(&pair),
        };
    }

    /// From now on nothing that `from` is told by its peers arrives there, though its frames land.
    pub fn lose_acknowledgements(&self, from: &SimEngine) {
        if let Some(node) = self.world().nodes.get_mut(&from.node) {
            node.hears = false;
        }
    }

    fn world(&self) -> MutexGuard<'_, World> {
        self.0.world.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn handlers(&self) -> MutexGuard<'_, BTreeMap<NodeId, Handlers>> {
        self.0.handlers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Tells callers what has happened, while the world is free for them.
    fn tell(&self) {
        loop {
            let calls = self.world().take_calls();
            if calls.is_empty() {
                return;
            }
            for (node, mut calls) in calls {
                let handlers = self.handlers().remove(&node);
                let mut handlers = handlers.unwrap_or_default();
                calls.tell(&mut handlers);
                self.handlers().insert(node, handlers);
            }
        }
    }
}

/// One simulated engine; its methods mean what those of [`crate::TransferEngine`] mean.
#[derive(Debug, Clone)]
pub struct SimEngine {
    network: SimNetwork,
    node: NodeId,
}

impl SimEngine {
    pub fn endpoint(&self) -> Endpoint {
        self.with(|_, node| node.endpoint.clone())
    }

    /// From now on this engine receives messages in so many buffers of so many bytes.
    pub fn set_message_buffers(&self, buffers: usize, message_bytes_max: usize) {
        self.with(|_, node| {
            node.messages = Messages::new(buffers);
            node.message_bytes_max = message_bytes_max;
        });
    }

    pub fn counts(&self) -> SimCounts {
        self.with(|_, node| {
            let (excess, left_order) = (node.receiver.imms().excess(), node.sender.left_order());
            SimCounts { excess, left_order, ..node.counts }
        })
    }

    /// # Errors
    /// [`RegisterError::ReadOnly`].
    pub fn register(
        &self,
        memory: Arc<SharedMemory>,
    ) -> Result<(RegionHandle, RegionDesc), RegisterError> {
        if memory.access() == Access::ReadOnly {
            return Err(RegisterError::ReadOnly);
        }
        let (key, incarnation) = self.with(|_, node| node.add_region(Arc::clone(&memory)));
        let handle = RegionHandle { key, incarnation, memory, rdma: None };
        let descriptor = handle.descriptor();
        Ok((handle, descriptor))
    }

    /// # Errors
    /// [`SubmitError::Invalid`] when the region is another engine's.
    pub fn revoke(&self, region: &RegionHandle, done: Completion) -> Result<(), SubmitError> {
        self.network.world().place_all(self.node);
        self.with(|_, node| {
            if region.incarnation != node.endpoint.incarnation {
                return Err(SubmitError::Invalid("the region belongs to another engine"));
            }
            if !mutated(Mutation::RevocationLeftOut) {
                node.regions.revoke(region.key);
            }
            node.calls.done(Waiter::new(done), Ok(()));
            Ok(())
        })
    }

    /// # Errors
    /// [`ConnectError`].
    pub fn connect(&self, endpoint: &Endpoint) -> Result<PeerId, ConnectError> {
        self.with(|_, node| node.peers.session(endpoint))
    }

    /// # Errors
    /// [`SubmitError`].
    pub fn write(&self, write: Write, done: Completion) -> Result<(), SubmitError> {
        self.begin(Submission::write(write)?, done)
    }

    /// # Errors
    /// [`SubmitError`].
    pub fn write_paged(&self, write: WritePaged, done: Completion) -> Result<(), SubmitError> {
        self.begin(Submission::write_paged(write)?, done)
    }

    /// # Errors
    /// [`SubmitError`].
    pub fn send(
        &self,
        peer: PeerId,
        message: Vec<u8>,
        deadline: Duration,
        done: Completion,
    ) -> Result<(), SubmitError> {
        let max = self.with(|_, node| node.message_bytes_max);
        self.begin(Submission::message(peer, message, deadline, max)?, done)
    }

    fn begin(&self, submission: Submission, done: Completion) -> Result<(), SubmitError> {
        let mut world = self.network.world();
        let (now_us, max) = (world.now_us, world.config.operations_max);
        let node = world.node(self.node);
        if !node.alive {
            return Err(SubmitError::Stopped);
        }
        let permit = Permit::take(&node.in_flight, 1, max).ok_or(SubmitError::Full)?;
        let waiter = Waiter::with_permit(done, permit);
        let deadline_us = deadline_us(now_us, submission.deadline);
        let rails = world.rails();
        world.node(self.node).begin(submission, (deadline_us, rails), waiter, now_us);
        world.settle();
        Ok(())
    }

    /// # Errors
    /// [`SubmitError::Invalid`] when the session is over.
    pub fn set_wanted(&self, peer: PeerId, wanted: bool) -> Result<(), SubmitError> {
        self.with(|now_us, node| {
            if !node.peers.is_current(peer) {
                return Err(SubmitError::Invalid("the session has ended"));
            }
            node.sender.set_wanted(peer.session_id(), wanted, now_us);
            Ok(())
        })
    }

    /// # Errors
    /// [`GroupError`].
    pub fn register_group(&self, members: Vec<GroupMember>) -> Result<PeerGroup, GroupError> {
        PeerGroup::new(self.endpoint().incarnation, members)
    }

    /// # Errors
    /// [`SubmitError`].
    pub fn scatter(
        &self,
        scatter: Scatter,
        done: Completion,
    ) -> Result<Arc<PartOutcomes>, SubmitError> {
        self.begin_all(Unjoined::scatter(scatter, self.endpoint().incarnation)?, done)
    }

    /// # Errors
    /// [`SubmitError`].
    pub fn barrier(
        &self,
        barrier: &Barrier,
        done: Completion,
    ) -> Result<Arc<PartOutcomes>, SubmitError> {
        self.begin_all(Unjoined::barrier(barrier, self.endpoint().incarnation)?, done)
    }

    fn begin_all(
        &self,
        unjoined: Unjoined,
        done: Completion,
    ) -> Result<Arc<PartOutcomes>, SubmitError> {
        let mut world = self.network.world();
        let (now_us, max) = (world.now_us, world.config.operations_max);
        let node = world.node(self.node);
        if !node.alive {
            return Err(SubmitError::Stopped);
        }
        if unjoined.operations() > max {
            return Err(SubmitError::Invalid("more parts than `operations_max`"));
        }
        let permit = Permit::take(&node.in_flight, unjoined.operations(), max);
        let Parts { parts, payload, nothing_to_do, deadline, outcomes } =
            unjoined.join(done, permit.ok_or(SubmitError::Full)?);
        if let Some(done) = nothing_to_do {
            node.calls.done(done, Ok(()));
        }
        let deadline_us = deadline_us(now_us, deadline);
        for Part { peer, body, done } in parts {
            let payload = payload.clone();
            let submission = Submission { peer, deadline, payload, body, described: None };
            node.begin(submission, (deadline_us, Rails::ANY), done, now_us);
        }
        world.settle();
        Ok(outcomes)
    }

    /// # Errors
    /// [`SubmitError`].
    pub fn put_with_signal(
        &self,
        call: PutWithSignal,
        done: Completion,
    ) -> Result<Arc<SignalOutcomes>, SubmitError> {
        let unjoined = signalled::Unjoined::new(call)?;
        let mut world = self.network.world();
        let (now_us, max) = (world.now_us, world.config.operations_max);
        let node = world.node(self.node);
        if !node.alive {
            return Err(SubmitError::Stopped);
        }
        if unjoined.operations() > max {
            return Err(SubmitError::Invalid("more puts and signals than `operations_max`"));
        }
        let permit = Permit::take(&node.in_flight, unjoined.operations(), max);
        let deadline_us = deadline_us(now_us, unjoined.deadline());
        let (outcomes, batch) = unjoined.join(done, permit.ok_or(SubmitError::Full)?, deadline_us);
        match batch {
            Ok(batch) => node.begin_signalled(batch, now_us),
            Err(done) => node.calls.done(done, Ok(())),
        }
        world.settle();
        Ok(outcomes)
    }

    /// # Errors
    /// [`SubmitError::Invalid`] for a count of 0.
    pub fn expect_imm(&self, expect: Expect, done: Completion) -> Result<(), SubmitError> {
        let Expect { imm, count, deadline } = expect;
        if count == 0 {
            return Err(SubmitError::Invalid("the count must be above 0"));
        }
        let max = self.network.world().config.operations_max;
        self.with(|now_us, node| {
            let permit = Permit::take(&node.expecting, 1, max).ok_or(SubmitError::Full)?;
            let deadline_us = deadline.map_or(u64::MAX, |from_now| deadline_us(now_us, from_now));
            node.expect(imm, count, deadline_us, Waiter::with_permit(done, permit));
            Ok(())
        })
    }

    /// # Errors
    /// [`SubmitError::Invalid`].
    pub fn expect_imm_mirrored(
        &self,
        expect: Expect,
        mirror: Mirror,
        done: Completion,
    ) -> Result<(), SubmitError> {
        self.expect_imm(expect, mirror.before(expect.count, done)?)
    }

    /// # Errors
    /// None; like that of a real engine.
    pub fn cancel_imm(&self, imm: u32, done: Completion) -> Result<(), SubmitError> {
        self.with(|_, node| node.cancel_imm(imm, Waiter::new(done)));
        Ok(())
    }

    /// # Errors
    /// None; like that of a real engine.
    pub fn drain_group(&self, group: u64, done: Completion) -> Result<(), SubmitError> {
        self.with(|_, node| node.sender.drain_group(group, Waiter::new(done)));
        Ok(())
    }

    /// # Errors
    /// None; like that of a real engine.
    pub fn cut_off(&self, peer: PeerId, done: Completion) -> Result<(), SubmitError> {
        let mut world = self.network.world();
        world.node(self.node).peers.cut_off(peer.incarnation);
        world.cut_links(peer.incarnation, self.node);
        world.node(self.node).calls.done(Waiter::new(done), Ok(()));
        world.settle();
        Ok(())
    }

    fn with<T>(&self, change: impl FnOnce(u64, &mut SimNode) -> T) -> T {
        let mut world = self.network.world();
        let now_us = world.now_us;
        let result = change(now_us, world.node(self.node));
        world.settle();
        result
    }
}

impl World {
    fn node(&mut self, id: NodeId) -> &mut SimNode {
        self.nodes.get_mut(&id).expect("engines are never removed")
    }

    fn add_node(&mut self) -> NodeId {
        let id = NodeId(self.nodes.len());
        let incarnation = self.random.next().max(1);
        self.nodes.insert(id, SimNode::new(incarnation, &self.config));
        id
    }

    fn stop(&mut self) {
        self.events.clear();
        self.flights.clear();
        for node in self.nodes.values_mut() {
            node.stop();
        }
    }

    /// Those that the next write prefers.
    fn rails(&mut self) -> Rails {
        let lanes = self.config.lanes() as u64;
        if !self.config.writes_prefer_lanes || lanes == 1 {
            return Rails::ANY;
        }
        let mut one = || paths::rail(self.random.upto(lanes - 1) as usize);
        let (first, second) = (one(), one());
        Rails::new([first], [second])
    }

    fn find(&self, incarnation: u64) -> Option<NodeId> {
        let found = self.nodes.iter().find(|(_, node)| node.endpoint.incarnation == incarnation);
        found.map(|(id, _)| *id)
    }

    fn at(&mut self, at_us: u64, event: Event) {
        self.events.insert((at_us, self.next_serial), event);
        self.next_serial += 1;
    }

    fn take_calls(&mut self) -> Vec<(NodeId, crate::calls::Calls)> {
        let nodes = self.nodes.iter_mut().filter(|(_, node)| !node.calls.is_empty());
        nodes.map(|(id, node)| (*id, std::mem::take(&mut node.calls))).collect()
    }

    /// Lets the next thing happen, if it happens by `until_us`.
    fn step(&mut self, until_us: u64) -> bool {
        let (event_us, due_us) = (self.next_event_us(), self.next_due_us());
        let next_us = event_us.min(due_us);
        if next_us == u64::MAX || next_us > until_us {
            return false;
        }
        self.now_us = self.now_us.max(next_us);
        if event_us <= due_us {
            if let Some((when, event)) = self.events.pop_first() {
                let mut hasher = DefaultHasher::new();
                (self.trace, when, std::mem::discriminant(&event)).hash(&mut hasher);
                self.trace = hasher.finish();
                self.happen(event);
            }
        } else {
            let now_us = self.now_us;
            for node in self.nodes.values_mut().filter(|node| node.alive) {
                node.handle_time(now_us);
            }
        }
        self.settle();
        true
    }

    fn next_event_us(&self) -> u64 {
        self.events.keys().next().map_or(u64::MAX, |(at_us, _)| *at_us)
    }

    /// The next deadline of any engine.
    fn next_due_us(&self) -> u64 {
        let due = self.nodes.values().filter(|node| node.alive).map(SimNode::next_time_us);
        due.min().unwrap_or(u64::MAX)
    }

    fn are_parted(&self, one: NodeId, other: NodeId) -> bool {
        self.parted.contains(&(one.min(other), one.max(other)))
    }

    /// Does what follows at once: connects, puts frames on the wire, ends sessions.
    fn settle(&mut self) {
        let alive = self.nodes.iter().filter(|(_, node)| node.alive);
        let ids: Vec<NodeId> = alive.map(|(id, _)| *id).collect();
        for id in ids {
            self.act(id);
            loop {
                self.node(id).is_offered = false;
                self.pull_all(id);
                self.act(id);
                if !self.node(id).is_offered {
                    break;
                }
            }
        }
    }

    /// Each path takes one frame, then the next one does, as long as any can.
    fn pull_all(&mut self, id: NodeId) {
        let first = Key { from: id, session: SessionId(0), index: PathIndex(0) };
        let last = Key { from: id, session: SessionId(u64::MAX), index: PathIndex(u32::MAX) };
        let own = self.links.range(first..=last);
        let mut pulling: Vec<Key> =
            own.filter(|(_, link)| link.is_up()).map(|(key, _)| *key).collect();
        while !pulling.is_empty() {
            pulling.retain(|key| self.pull(*key));
        }
    }

    fn act(&mut self, id: NodeId) {
        while let Some(wanted) = self.node(id).act() {
            self.perform(id, wanted);
        }
    }

    /// Whether the path took a frame.
    fn pull(&mut self, key: Key) -> bool {
        if !self.has_room(key) {
            return false;
        }
        let now_us = self.now_us;
        let node = self.node(key.from);
        match node.sender.next_frame(key.session, key.index, now_us) {
            Next::Frame(frame) => {
                let sequence = frame.sequence;
                let lane = self.links.get(&key).map_or(0, |link| link.lane);
                if !self.depart(key, frame) {
                    return true;
                }
                if self.config.lane(lane).order.keeps_pins() {
                    self.node(key.from).sender.posted(key.session, key.index, sequence);
                }
                true
            }
            Next::Wait { until_us } => {
                node.throttled_until_us = until_us;
                false
            }
            Next::Nothing => false,
        }
    }
}
