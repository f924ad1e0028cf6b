//! Two engines of one domain, behind one face, so that a case need not know which they are.

use std::cell::{Cell, RefCell};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use kvasir_transfer::memory::{Prefault, SharedMemory};
use kvasir_transfer::scatter::{Barrier, GroupMember, PartOutcomes, PeerGroup, Scatter};
use kvasir_transfer::signalled::{PutWithSignal, SignalOutcomes};
use kvasir_transfer::sim::{SimConfig, SimEngine, SimLane, SimNetwork, SimOrder};
use kvasir_transfer::{
    Completion, CompletionFlag, Domain, Driver, EfaConfig, Endpoint, Expect, Handlers, Handshake,
    Loss, Message, Mirror, Outcome, PeerEvent, PeerId, RegionDesc, RegionHandle, Source,
    SubmitError, TransferConfig, TransferEngine, VerbsConfig, Verify, Write, WritePaged, doorbell,
};

use crate::certificates::Authority;
use crate::{device, provider};

/// Far more than anything here takes.
pub(crate) const LONG: Duration = Duration::from_secs(30);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Shm,
    Tcp,
    TcpTls,
    /// Engines without threads of their own.
    ShmDriven,
    TcpDriven,
    Sim,
    Verbs,
    /// Whose cards tell each other of their queue pairs by datagrams.
    VerbsUd,
    EfaTcp,
    EfaShm,
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct Options {
    pub slice_bytes: usize,
    pub operations_max: usize,
    pub send_bytes_per_s_max: u64,
    pub verify: bool,
    pub message_buffers: usize,
    pub message_bytes_max: usize,
    pub heartbeat_interval: Duration,
    pub heartbeat_timeout: Duration,
    pub failover_grace: Duration,
}

impl Default for Options {
    fn default() -> Self {
        Options {
            slice_bytes: 1 << 20,
            operations_max: 4096,
            send_bytes_per_s_max: 0,
            verify: false,
            message_buffers: 1024,
            message_bytes_max: 64 << 10,
            heartbeat_interval: Duration::from_secs(1),
            heartbeat_timeout: Duration::from_secs(3),
            failover_grace: Duration::from_secs(2),
        }
    }
}

enum Engine {
    Real { engine: Box<TransferEngine>, registry: prometheus::Registry, _turns: Option<TurnsTaken> },
    Sim(SimEngine),
}

/// A thread that takes an engine's turns and does nothing else. It never polls, so that it depends on being woken.
struct TurnsTaken(Option<JoinHandle<()>>);

impl TurnsTaken {
    fn start(mut driver: Driver) -> Self {
        TurnsTaken(Some(std::thread::spawn(move || {
            while driver.wake_fd().is_some() {
                if driver.turn() {
                    continue;
                }
                driver.announce_sleep();
                let patience = driver.patience().unwrap_or(LONG);
                if let Some(fd) = driver.wake_fd() {
                    doorbell::sleep(&[fd], patience);
                }
                driver.awake();
            }
        })))
    }
}

impl Drop for TurnsTaken {
    /// The engine was dropped before.
    fn drop(&mut self) {
        let ended = self.0.take().expect("once").join();
        assert!(ended.is_ok() || std::thread::panicking(), "the worker has panicked");
    }
}

/// Whence it came, and what it says.
pub(crate) type Heard = (PeerId, Vec<u8>);

pub(crate) struct Node {
    engine: RefCell<Option<Engine>>,
    pub messages: Arc<Mutex<Vec<Heard>>>,
    /// While it is set, messages are kept in `held`, and their buffers with them.
    pub holds: Arc<AtomicBool>,
    pub held: Arc<Mutex<Vec<Message>>>,
    /// While it is set, a message makes the worker stand still.
    frozen: Arc<AtomicBool>,
    pub events: Arc<Mutex<Vec<PeerEvent>>>,
}

pub(crate) struct Fabric {
    pub kind: Kind,
    options: Options,
    network: Option<SimNetwork>,
    run_dir: tempfile::TempDir,
    authority: Authority,
    /// Engines so far.
    nodes: Cell<u32>,
    pub a: Node,
    pub b: Node,
}

macro_rules! either {
    ($node:expr, $engine:ident => $call:expr) => {
        match $node.engine.borrow().as_ref().expect("it was not killed") {
            Engine::Real { engine: $engine, .. } => $call,
            Engine::Sim($engine) => $call,
        }
    };
}

/// Where the kind is one of efa, and its provider is here.
pub(crate) fn provider_of(kind: Kind) -> Option<&'static EfaConfig> {
    match kind {
        Kind::EfaTcp => provider::shuffled(provider::TCP),
        Kind::EfaShm => provider::shuffled(provider::SHM),
        _ => None,
    }
}

pub(crate) fn config(kind: Kind, options: Options, run_dir: &std::path::Path) -> TransferConfig {
    let is_card = matches!(kind, Kind::Verbs | Kind::VerbsUd | Kind::EfaTcp | Kind::EfaShm);
    let default = TransferConfig::default();
    let both = TransferConfig {
        name: "test".into(),
        // A card whose greeting takes longer is left alone, and tcp is taken: on a host that has much else to do
        // that says nothing of the card.
        peer_timeout_ms: match is_card {
            true => LONG.as_millis() as u64,
            false => default.peer_timeout_ms,
        },
        verify: Verify {
            tcp: options.verify,
            shm: options.verify,
            verbs: options.verify,
            efa: options.verify,
        },
        slice_bytes: options.slice_bytes,
        operations_max: options.operations_max,
        send_bytes_per_s_max: options.send_bytes_per_s_max,
        message_buffers: options.message_buffers,
        message_bytes_max: options.message_bytes_max,
        heartbeat_interval_ms: options.heartbeat_interval.as_millis() as u64,
        heartbeat_timeout_ms: options.heartbeat_timeout.as_millis() as u64,
        failover_grace_ms: options.failover_grace.as_millis() as u64,
        ..default
    };
    match kind {
        Kind::Shm | Kind::ShmDriven => {
            TransferConfig { preferred: Domain::Shm, run_dir: Some(run_dir.to_owned()), ..both }
        }
        Kind::Verbs | Kind::VerbsUd => TransferConfig {
            preferred: Domain::Verbs,
            tcp_listen: Some(([127, 0, 0, 1], 0).into()),
            // So that who polls memory sees it in order.
            verbs: Some(VerbsConfig {
                relaxed_ordering: false,
                handshake: match kind {
                    Kind::VerbsUd => Handshake::Ud,
                    _ => Handshake::Tcp,
                },
                ..device::named().expect("there is a device").clone()
            }),
            ..both
        },
        Kind::EfaTcp | Kind::EfaShm => TransferConfig {
            preferred: Domain::Efa,
            tcp_listen: Some(([127, 0, 0, 1], 0).into()),
            efa: Some(provider_of(kind).expect("it is here").clone()),
            ..both
        },
        Kind::Tcp | Kind::TcpTls | Kind::TcpDriven | Kind::Sim => TransferConfig {
            preferred: Domain::Tcp,
            tcp_listen: Some(([127, 0, 0, 1], 0).into()),
            // So that what holds of one connection is seen to hold of several.
            tcp_lanes: 2,
            ..both
        },
    }
}

impl Fabric {
    pub(crate) fn new(kind: Kind, options: Options) -> Self {
        let run_dir = tempfile::tempdir().expect("a directory");
        let network = (kind == Kind::Sim).then(|| {
            let lane = SimLane {
                latency_us: 10,
                jitter_us: 100,
                bytes_per_s: 10_000_000_000,
                slice_bytes: options.slice_bytes,
                frames_max: 1024,
                order: SimOrder::default(),
            };
            SimNetwork::new(SimConfig {
                seed: 7,
                lanes: vec![lane; 2],
                operations_max: options.operations_max,
                send_bytes_per_s_max: options.send_bytes_per_s_max,
                verify: options.verify,
                heartbeat_interval_us: options.heartbeat_interval.as_micros() as u64,
                heartbeat_timeout_us: options.heartbeat_timeout.as_micros() as u64,
                grace_us: options.failover_grace.as_micros() as u64,
                ..SimConfig::default()
            })
        });
        let mut fabric = Fabric {
            kind,
            options,
            network,
            run_dir,
            authority: Authority::new(),
            nodes: Cell::new(0),
            a: Node::empty(),
            b: Node::empty(),
        };
        fabric.a = fabric.node();
        fabric.b = fabric.node();
        fabric
    }

    /// One more engine.
    pub(crate) fn node(&self) -> Node {
        self.node_with(self.options)
    }

    pub(crate) fn node_with(&self, options: Options) -> Node {
        let node = Node::empty();
        let (messages, events) = (Arc::clone(&node.messages), Arc::clone(&node.events));
        let (holds, held) = (Arc::clone(&node.holds), Arc::clone(&node.held));
        let frozen = Arc::clone(&node.frozen);
        let handlers = Handlers {
            on_message: Box::new(move |from, message| {
                messages.lock().expect("messages").push((from, message.to_vec()));
                if holds.load(Ordering::Acquire) {
                    held.lock().expect("held").push(message);
                }
                let since = Instant::now();
                while frozen.load(Ordering::Acquire) && since.elapsed() < LONG {
                    std::thread::sleep(Duration::from_millis(1));
                }
            }),
            on_peer: Box::new(move |event| events.lock().expect("events").push(event)),
        };
        let engine = match &self.network {
            Some(network) => {
                let engine = network.engine(handlers);
                engine.set_message_buffers(options.message_buffers, options.message_bytes_max);
                Engine::Sim(engine)
            }
            None => {
                let mut config = config(self.kind, options, self.run_dir.path());
                if self.kind == Kind::TcpTls {
                    let folder = self.run_dir.path().join(self.nodes.get().to_string());
                    config.tcp_tls = Some(self.authority.files(&folder));
                    self.nodes.set(self.nodes.get() + 1);
                }
                let registry = prometheus::Registry::new();
                let (engine, turns) = match self.kind {
                    Kind::ShmDriven | Kind::TcpDriven => {
                        let started = TransferEngine::start_driven(config, handlers, &registry);
                        let (engine, driver) = started.expect("start");
                        (engine, Some(TurnsTaken::start(driver)))
                    }
                    _ => {
                        let started = TransferEngine::start(config, handlers, &registry);
                        (started.expect("start"), None)
                    }
                };
                Engine::Real { engine: Box::new(engine), registry, _turns: turns }
            }
        };
        node.engine.replace(Some(engine));
        node
    }

    /// Waits until it is so.
    pub(crate) fn until(&self, what: &str, mut done: impl FnMut() -> bool) {
        match &self.network {
            Some(network) => assert!(network.run_until(done), "never: {what}"),
            None => {
                let started = Instant::now();
                while !done() {
                    assert!(started.elapsed() < LONG, "not in time: {what}");
                    std::thread::sleep(Duration::from_micros(50));
                }
            }
        }
    }

    pub(crate) fn outcome(&self, flag: &CompletionFlag) -> Outcome {
        self.until("an outcome", || flag.get().is_some());
        flag.get().expect("just seen")
    }

    /// Lets a while pass in which something could go wrong.
    pub(crate) fn pass(&self, time: Duration) {
        match &self.network {
            Some(network) => network.advance(time.as_micros() as u64),
            None => std::thread::sleep(time),
        }
    }

    pub(crate) fn now(&self) -> Duration {
        match &self.network {
            Some(network) => Duration::from_micros(network.now_us()),
            None => {
                let now = std::time::SystemTime::now();
                now.duration_since(std::time::UNIX_EPOCH).expect("after 1970")
            }
        }
    }

    /// A real engine is dropped; a simulated one stays, dead.
    pub(crate) fn kill(&self, node: &Node) {
        let engine = node.engine.take();
        if let (Some(Engine::Sim(engine)), Some(network)) = (&engine, &self.network) {
            network.kill(engine);
            node.engine.replace(Some(Engine::Sim(engine.clone())));
        }
    }

    /// From now on `node` says nothing, though nothing tells that it is gone: a real engine's worker
    /// stands still (until [`Fabric::thaw`]), a simulated one's host has vanished.
    pub(crate) fn freeze(&self, node: &Node) {
        match (node.engine.borrow().as_ref(), &self.network) {
            (Some(Engine::Sim(engine)), Some(network)) => network.vanish(engine),
            _ => {
                node.frozen.store(true, Ordering::Release);
                let before = node.messages.lock().expect("messages").len();
                let someone = self.node();
                someone.send(someone.connect(node), b"stand still").expect("accepted");
                let frozen = || node.messages.lock().expect("messages").len() > before;
                self.until("it stands still", frozen);
            }
        }
    }

    pub(crate) fn thaw(&self, node: &Node) {
        node.frozen.store(false, Ordering::Release);
    }

    /// `None` for the simulated one.
    pub(crate) fn domain(&self) -> Option<Domain> {
        match self.kind {
            Kind::Shm | Kind::ShmDriven => Some(Domain::Shm),
            Kind::Tcp | Kind::TcpTls | Kind::TcpDriven => Some(Domain::Tcp),
            Kind::Verbs | Kind::VerbsUd => Some(Domain::Verbs),
            Kind::EfaTcp | Kind::EfaShm => Some(Domain::Efa),
            Kind::Sim => None,
        }
    }

    /// Nothing went by another domain than the one that is tested.
    pub(crate) fn assert_domain(&self) {
        let is_card =
            self.domain().is_some_and(|domain| [Domain::Verbs, Domain::Efa].contains(&domain));
        if is_card {
            assert_eq!((self.a.moved_by("tcp"), self.b.moved_by("tcp")), (0, 0));
        }
    }

    /// Refused and corrupt, on both sides.
    pub(crate) fn refused_and_corrupt(&self) -> (u64, u64) {
        let (a, b) = (self.a.refused_and_corrupt(), self.b.refused_and_corrupt());
        (a.0 + b.0, a.1 + b.1)
    }
}

impl Node {
    fn empty() -> Self {
        Node {
            engine: RefCell::new(None),
            messages: Arc::default(),
            holds: Arc::default(),
            held: Arc::default(),
            frozen: Arc::default(),
            events: Arc::default(),
        }
    }

    pub(crate) fn endpoint(&self) -> Endpoint {
        let endpoint = either!(self, engine => engine.endpoint());
        // As it would come from elsewhere.
        Endpoint::from_bytes(&endpoint.to_bytes()).expect("endpoints survive the wire")
    }

    pub(crate) fn connect(&self, to: &Node) -> PeerId {
        self.connect_to(&to.endpoint())
    }

    pub(crate) fn connect_to(&self, endpoint: &Endpoint) -> PeerId {
        either!(self, engine => engine.connect(endpoint)).expect("reachable")
    }

    pub(crate) fn region(&self, bytes: usize) -> (RegionHandle, RegionDesc) {
        let memory = SharedMemory::create("test", bytes, Prefault::No).expect("memory");
        self.register(Arc::new(memory))
    }

    pub(crate) fn register(&self, memory: Arc<SharedMemory>) -> (RegionHandle, RegionDesc) {
        let registered = either!(self, engine => engine.register(memory));
        let (handle, descriptor) = registered.expect("room");
        let copy = RegionDesc::from_bytes(&descriptor.to_bytes()).expect("it survives the wire");
        assert_eq!(copy, descriptor);
        (handle, copy)
    }

    pub(crate) fn revoke(&self, region: &RegionHandle) -> Arc<CompletionFlag> {
        let (done, flag) = Completion::flag();
        self.revoke_then(region, done);
        flag
    }

    pub(crate) fn revoke_then(&self, region: &RegionHandle, done: Completion) {
        either!(self, engine => engine.revoke(region, done)).expect("accepted");
    }

    pub(crate) fn write(&self, write: Write) -> Arc<CompletionFlag> {
        self.try_write(write).expect("accepted")
    }

    pub(crate) fn try_write(&self, write: Write) -> Result<Arc<CompletionFlag>, SubmitError> {
        let (done, flag) = Completion::flag();
        either!(self, engine => engine.write(write, done)).map(|()| flag)
    }

    pub(crate) fn write_paged(&self, write: WritePaged) -> Arc<CompletionFlag> {
        self.try_write_paged(write).expect("accepted")
    }

    pub(crate) fn try_write_paged(
        &self,
        write: WritePaged,
    ) -> Result<Arc<CompletionFlag>, SubmitError> {
        let (done, flag) = Completion::flag();
        either!(self, engine => engine.write_paged(write, done)).map(|()| flag)
    }

    pub(crate) fn write_then(&self, write: Write, done: Completion) {
        either!(self, engine => engine.write(write, done)).expect("accepted");
    }

    pub(crate) fn write_paged_then(&self, write: WritePaged, done: Completion) {
        either!(self, engine => engine.write_paged(write, done)).expect("accepted");
    }

    pub(crate) fn group(&self, members: Vec<GroupMember>) -> PeerGroup {
        either!(self, engine => engine.register_group(members)).expect("neither none nor too many")
    }

    pub(crate) fn scatter(&self, scatter: Scatter) -> (Arc<CompletionFlag>, Arc<PartOutcomes>) {
        let (done, flag) = Completion::flag();
        (flag, self.try_scatter(scatter, done).expect("accepted"))
    }

    pub(crate) fn try_scatter(
        &self,
        scatter: Scatter,
        done: Completion,
    ) -> Result<Arc<PartOutcomes>, SubmitError> {
        either!(self, engine => engine.scatter(scatter, done))
    }

    pub(crate) fn barrier(&self, barrier: &Barrier) -> (Arc<CompletionFlag>, Arc<PartOutcomes>) {
        let (done, flag) = Completion::flag();
        (flag, self.barrier_then(barrier, done))
    }

    pub(crate) fn barrier_then(&self, barrier: &Barrier, done: Completion) -> Arc<PartOutcomes> {
        either!(self, engine => engine.barrier(barrier, done)).expect("accepted")
    }

    pub(crate) fn put_with_signal(
        &self,
        call: PutWithSignal,
    ) -> (Arc<CompletionFlag>, Arc<SignalOutcomes>) {
        let (done, flag) = Completion::flag();
        (flag, self.try_put_with_signal(call, done).expect("accepted"))
    }

    pub(crate) fn try_put_with_signal(
        &self,
        call: PutWithSignal,
        done: Completion,
    ) -> Result<Arc<SignalOutcomes>, SubmitError> {
        either!(self, engine => engine.put_with_signal(call, done))
    }

    pub(crate) fn expect_mirrored(
        &self,
        imm: u32,
        count: u64,
        mirror: Mirror,
    ) -> Result<Arc<CompletionFlag>, SubmitError> {
        let (done, flag) = Completion::flag();
        let expect = Expect { imm, count, deadline: None };
        either!(self, engine => engine.expect_imm_mirrored(expect, mirror, done)).map(|()| flag)
    }

    pub(crate) fn send_then(&self, peer: PeerId, message: &[u8], done: Completion) {
        let message = message.to_vec();
        either!(self, engine => engine.send(peer, message, LONG, done)).expect("accepted");
    }

    pub(crate) fn expect_then(&self, imm: u32, count: u64, done: Completion) {
        let expect = Expect { imm, count, deadline: None };
        either!(self, engine => engine.expect_imm(expect, done)).expect("accepted");
    }

    pub(crate) fn cancel_imm_then(&self, imm: u32, done: Completion) {
        either!(self, engine => engine.cancel_imm(imm, done)).expect("accepted");
    }

    pub(crate) fn drain_group_then(&self, group: u64, done: Completion) {
        either!(self, engine => engine.drain_group(group, done)).expect("accepted");
    }

    pub(crate) fn send(
        &self,
        peer: PeerId,
        message: &[u8],
    ) -> Result<Arc<CompletionFlag>, SubmitError> {
        let (done, flag) = Completion::flag();
        let message = message.to_vec();
        either!(self, engine => engine.send(peer, message, LONG, done)).map(|()| flag)
    }

    pub(crate) fn expect(&self, imm: u32, count: u64) -> Arc<CompletionFlag> {
        self.expect_within(imm, count, None)
    }

    pub(crate) fn try_expect(
        &self,
        imm: u32,
        count: u64,
    ) -> Result<Arc<CompletionFlag>, SubmitError> {
        let (done, flag) = Completion::flag();
        let expect = Expect { imm, count, deadline: None };
        either!(self, engine => engine.expect_imm(expect, done))?;
        Ok(flag)
    }

    pub(crate) fn expect_within(
        &self,
        imm: u32,
        count: u64,
        deadline: Option<Duration>,
    ) -> Arc<CompletionFlag> {
        let (done, flag) = Completion::flag();
        let expect = Expect { imm, count, deadline };
        either!(self, engine => engine.expect_imm(expect, done)).expect("accepted");
        flag
    }

    pub(crate) fn cancel_imm(&self, imm: u32) -> Arc<CompletionFlag> {
        let (done, flag) = Completion::flag();
        either!(self, engine => engine.cancel_imm(imm, done)).expect("accepted");
        flag
    }

    pub(crate) fn drain_group(&self, group: u64) -> Arc<CompletionFlag> {
        let (done, flag) = Completion::flag();
        either!(self, engine => engine.drain_group(group, done)).expect("accepted");
        flag
    }

    pub(crate) fn cut_off(&self, peer: PeerId) -> Arc<CompletionFlag> {
        let (done, flag) = Completion::flag();
        self.cut_off_then(peer, done);
        flag
    }

    pub(crate) fn cut_off_then(&self, peer: PeerId, done: Completion) {
        either!(self, engine => engine.cut_off(peer, done)).expect("accepted");
    }

    pub(crate) fn set_wanted(&self, peer: PeerId, wanted: bool) -> Result<(), SubmitError> {
        either!(self, engine => engine.set_wanted(peer, wanted))
    }

    /// Why sessions were lost, in order.
    pub(crate) fn losses(&self) -> Vec<(PeerId, Loss)> {
        let events = self.events.lock().expect("events");
        let lost = events.iter().filter_map(|event| match event {
            PeerEvent::SessionLost { peer, why, .. } => Some((*peer, *why)),
            PeerEvent::WriterLost { .. } => None,
        });
        lost.collect()
    }

    pub(crate) fn lost_sessions(&self) -> Vec<PeerId> {
        let events = self.events.lock().expect("events");
        let lost = events.iter().filter_map(|event| match event {
            PeerEvent::SessionLost { peer, .. } => Some(*peer),
            PeerEvent::WriterLost { .. } => None,
        });
        lost.collect()
    }

    pub(crate) fn lost_writers(&self) -> Vec<u64> {
        let events = self.events.lock().expect("events");
        let lost = events.iter().filter_map(|event| match event {
            PeerEvent::WriterLost { incarnation, .. } => Some(*incarnation),
            PeerEvent::SessionLost { .. } => None,
        });
        lost.collect()
    }

    /// Bytes, writes and messages together.
    fn moved_by(&self, domain: &str) -> u64 {
        let engine = self.engine.borrow();
        let Some(Engine::Real { registry, .. }) = engine.as_ref() else { return 0 };
        let families = registry.gather();
        let names = ["bytes_total", "writes_total", "messages_total"];
        let of = |name| families.iter().find(|family| family.name().ends_with(name));
        let moved = names.into_iter().flat_map(|name| of(name).expect("registered").get_metric());
        let of_domain =
            moved.filter(|metric| metric.get_label().iter().any(|label| label.value() == domain));
        of_domain.map(|metric| metric.get_counter().get_value() as u64).sum()
    }

    pub(crate) fn refused_and_corrupt(&self) -> (u64, u64) {
        match self.engine.borrow().as_ref() {
            Some(Engine::Sim(engine)) => (engine.counts().refused, engine.counts().corrupt),
            Some(Engine::Real { registry, .. }) => (
                total(registry, "kvasir_transfer_refused_total"),
                total(registry, "kvasir_transfer_corrupt_writes_total"),
            ),
            None => (0, 0),
        }
    }
}

fn total(registry: &prometheus::Registry, name: &str) -> u64 {
    let families = registry.gather();
    let family = families.iter().find(|family| family.name() == name).expect("it is registered");
    family.get_metric().iter().map(|metric| metric.get_counter().get_value() as u64).sum()
}

/// Bytes that differ from place to place.
pub(crate) fn pattern(seed: u8, bytes: usize) -> Vec<u8> {
    (0..bytes).map(|at| (at as u8).wrapping_mul(31).wrapping_add(seed) ^ (at >> 8) as u8).collect()
}

pub(crate) fn fill(region: &RegionHandle, seed: u8) -> Vec<u8> {
    let bytes = pattern(seed, region.memory().len());
    region.memory().copy_from(0, &bytes).expect("it fits");
    bytes
}

pub(crate) fn read(region: &RegionHandle, offset: usize, bytes: usize) -> Vec<u8> {
    let mut copy = vec![0; bytes];
    region.memory().copy_to(offset, &mut copy).expect("it fits");
    copy
}

/// A write of a whole region to the start of another; cases change what they need.
pub(crate) fn whole(peer: PeerId, source: &RegionHandle, target: RegionDesc, imm: u32) -> Write {
    let bytes = source.memory().len();
    Write {
        peer,
        source: Source::Region { handle: source.clone(), offset: 0, bytes },
        target,
        target_offset: 0,
        imm: Some(imm),
        checksum: None,
        group: 0,
        deadline: LONG,
    }
}
