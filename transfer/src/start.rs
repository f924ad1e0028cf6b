//! Starting an engine: the configuration is checked, addresses are taken, the worker is started.

use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::sync_channel;
use std::thread::JoinHandle;

use kvasir_transfer_core::{Heartbeats, Limits, Sender, WriteError};

use rustix::thread::{CpuSet, sched_setaffinity};

use crate::config::{Domain, EfaConfig, TransferConfig, VerbsConfig};
use crate::endpoint::{Endpoint, ShmAddress};
use crate::engine::{Handlers, StartError};
use crate::identity::Identity;
use crate::messages::MESSAGE_BYTES_MAX;
use crate::metrics::Metrics;
use crate::peers::PEERS_MAX;
use crate::rdma::{CardError, Cards, Memories, RdmaAddress};
use crate::shared::Shared;
use crate::shm::directory::Directory;
use crate::tcp::tls::Tls;
use crate::topology::{Nearness, Topology};
use crate::worker::hub::Hub;
use crate::worker::{Listeners, Worker};

/// Different immediates on one path, each remembered as long as the path lasts. A receiver remembers a
/// million, in which each peer has an equal share: 128 writers can be that far at once. Of more, the one that
/// is farthest beyond its share is told, if its path fails, that nobody can say what has landed.
const PATH_IMMS_MAX: usize = 8_192;

fn system(call: &'static str) -> impl Fn(rustix::io::Errno) -> StartError {
    move |errno| StartError::System { call, source: errno.into() }
}

/// Listens; the worker has no thread yet.
pub(crate) fn make(
    config: TransferConfig,
    handlers: Handlers,
    registry: &prometheus::Registry,
) -> Result<(Arc<Shared>, Worker), StartError> {
    check(&config)?;
    let no_random = |_| StartError::System {
        call: "getrandom",
        source: std::io::Error::other("the system has no random bytes"),
    };
    let (identity, cookie) = (Identity::draw().map_err(no_random)?, rand::random());
    let incarnation = identity.incarnation();
    let mut listeners = Listeners::default();
    let mut endpoint = Endpoint { incarnation, cookie, shm: None, tcp: None, rdma: None };
    if let Some(address) = config.tcp_listen {
        let (listener, advertised) = listen_tcp(address, config.tcp_advertise)?;
        listeners.tcp = Some(listener);
        endpoint.tcp = Some(advertised);
    }
    if let Some(run_dir) = &config.run_dir {
        let (listener, path) = listen_shm(run_dir, incarnation)?;
        listeners.shm = Some(listener);
        listeners.socket_path = Some(path.clone());
        let host_id = crate::shm::host_id()
            .map_err(|source| StartError::System { call: "read the boot id", source })?;
        endpoint.shm = Some(ShmAddress { host_id, socket: path });
    }
    let directory = match &endpoint.shm {
        Some(_) => Some(Directory::create()?),
        None => None,
    };
    let tls = config.tcp_tls.as_ref().map(Tls::load).transpose()?;
    let metrics = Metrics::register(registry, config.metrics_prefix)?;
    let (cards, memories, nearness) = open_cards(&config, &metrics)?;
    if !cards.is_empty() {
        let addresses = cards.iter().map(|(_, card)| card.address()).collect();
        endpoint.rdma = Some(RdmaAddress { cards: addresses, nearness: nearness.clone() });
    }
    let sender = Sender::new(Limits {
        send_bytes_per_s_max: config.send_bytes_per_s_max,
        peer_timeout_us: config.peer_timeout_ms * 1000,
        grace_us: config.failover_grace_ms * 1000,
        path_imms_max: PATH_IMMS_MAX,
        heartbeats: Heartbeats {
            interval_us: config.heartbeat_interval_ms * 1000,
            timeout_us: config.heartbeat_timeout_ms * 1000,
            always: config.heartbeat_always,
        },
    });
    tracing::info!(engine = %config.name, ?endpoint, "transfer engine started");
    let (shared, bells) = Shared::new(config, (endpoint, identity), memories)
        .map_err(|source| StartError::System { call: "socketpair", source })?;
    let shared = Arc::new(shared);
    let mut hub = Hub::new(Arc::clone(&shared), sender, metrics, directory, (cards, nearness));
    hub.tls = tls;
    let worker = Worker::new(hub, handlers, listeners, bells).map_err(system("epoll"))?;
    Ok((shared, worker))
}

/// Gives the worker a thread of its own.
pub(crate) fn start(
    config: TransferConfig,
    handlers: Handlers,
    registry: &prometheus::Registry,
) -> Result<(Arc<Shared>, JoinHandle<()>), StartError> {
    let thread = std::thread::Builder::new().name(format!("xfer-{}", config.name));
    let (shared, worker) = make(config, handlers, registry)?;
    let of_worker = Arc::clone(&shared);
    let (said, pinned) = sync_channel(1);
    let spawned = thread.spawn(move || {
        let pinned = pin(of_worker.config.worker_core);
        let is_pinned = pinned.is_ok();
        let _ = said.send(pinned);
        if is_pinned {
            run(worker, &of_worker);
        }
    });
    let thread = spawned.map_err(|source| StartError::System { call: "spawn", source })?;
    let pinned = pinned.recv().expect("the thread says so before it does anything else");
    pinned.map_err(system("pin the worker to its core"))?;
    Ok((shared, thread))
}

/// Opens the network cards that are configured.
fn open_cards(
    config: &TransferConfig,
    metrics: &Metrics,
) -> Result<(Cards, Memories, Nearness), StartError> {
    let unusable =
        |domain: Domain| move |error: CardError| StartError::Card(domain.label(), error.sentence());
    let (mut domain, mut opened) = (Domain::Verbs, Vec::new());
    if let Some(verbs) = &config.verbs {
        let started = crate::rdma::start_verbs(verbs, &metrics.card_bytes);
        opened.extend(started.map_err(unusable(domain))?);
    }
    if let Some(efa) = &config.efa {
        domain = Domain::Efa;
        let started = crate::rdma::start_efa(efa, &metrics.card_bytes);
        opened.extend(started.map_err(unusable(domain))?);
    }
    let (mut cards, mut memories) = (Vec::new(), Vec::new());
    for (card, memory) in opened {
        memories.push((card.name().to_owned(), memory));
        cards.push(card);
    }
    let names: Vec<String> = cards.iter().map(|card| card.name().to_owned()).collect();
    let topology = match &config.topology {
        Some(topology) => {
            topology.check(&names)?;
            topology.clone()
        }
        None if names.is_empty() => Topology::default(),
        None => Topology::of_this_host(),
    };
    let cards = Cards::new(cards, &config.name).map_err(unusable(domain))?;
    Ok((cards, Memories::new(memories), Nearness::of(&topology, &names)))
}

/// Of this thread.
fn pin(core: Option<usize>) -> rustix::io::Result<()> {
    let Some(core) = core else { return Ok(()) };
    let mut cores = CpuSet::new();
    cores.set(core);
    sched_setaffinity(None, &cores)
}

/// The worker's thread. Whether the worker ends as it should or dies, by a panic of its own or in a
/// callback, nothing is accepted any more and whoever wants to know of its end is told.
fn run(worker: Worker, shared: &Shared) {
    // What the worker owned is gone when it has unwound, and nothing else looks at it.
    let ended = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| worker.run()));
    shared.close();
    shared.ended(if ended.is_ok() { Ok(()) } else { Err(WriteError::Cancelled) });
    if let Err(panic) = ended {
        std::panic::resume_unwind(panic);
    }
}

fn check(config: &TransferConfig) -> Result<(), StartError> {
    if config.tcp_listen.is_none() && config.run_dir.is_none() {
        return Err(StartError::NoDomain);
    }
    if (config.verbs.is_some() || config.efa.is_some()) && config.tcp_listen.is_none() {
        return Err(StartError::RdmaWithoutTcp);
    }
    if config.verbs.is_some() && config.efa.is_some() {
        return Err(StartError::TwoCards);
    }
    let of_verbs = config.verbs.as_ref().and_then(VerbsConfig::out_of_range);
    if let Some(name) = of_verbs.or(config.efa.as_ref().and_then(EfaConfig::out_of_range)) {
        return Err(StartError::Config(name));
    }
    let in_range = |name, ok| if ok { Ok(()) } else { Err(StartError::Config(name)) };
    in_range("operations_max", (1..=1 << 24).contains(&config.operations_max))?;
    in_range("message_bytes_max", (1..=MESSAGE_BYTES_MAX).contains(&config.message_bytes_max))?;
    in_range("message_buffers", (1..=1 << 20).contains(&config.message_buffers))?;
    for slice_bytes in config.slice_bytes_of.values().chain([&config.slice_bytes]) {
        in_range("slice_bytes", (4096..=1 << 30).contains(slice_bytes))?;
    }
    in_range("worker_core", config.worker_core.is_none_or(|core| core < CpuSet::MAX_CPU))?;
    // Half of the peers that are remembered, so that there are always some that can be forgotten.
    in_range("connections_max", (1..=PEERS_MAX / 2).contains(&config.connections_max))?;
    in_range("early_imms_max", config.early_imms_max >= 1)?;
    in_range("tcp_lanes", (1..=16).contains(&config.tcp_lanes))?;
    in_range("failover_grace_ms", (1..=3_600_000).contains(&config.failover_grace_ms))?;
    in_range("heartbeat_interval_ms", (1..=3_600_000).contains(&config.heartbeat_interval_ms))?;
    in_range("heartbeat_timeout_ms", (1..=3_600_000).contains(&config.heartbeat_timeout_ms))?;
    in_range("peer_timeout_ms", (1..=3_600_000).contains(&config.peer_timeout_ms))
}

fn listen_tcp(
    address: SocketAddr,
    advertise: Option<SocketAddr>,
) -> Result<(OwnedFd, SocketAddr), StartError> {
    if address.ip().is_unspecified() && advertise.is_none() {
        return Err(StartError::Advertise(address));
    }
    let (listener, bound) = crate::tcp::start_listening(address)
        .map_err(|errno| StartError::Listen { what: address.to_string(), source: errno.into() })?;
    Ok((listener, advertise.unwrap_or(bound)))
}

fn listen_shm(run_dir: &Path, incarnation: u64) -> Result<(OwnedFd, PathBuf), StartError> {
    // Endpoints carry it as text.
    if run_dir.to_str().is_none() {
        return Err(StartError::Config("run_dir"));
    }
    let path = run_dir.join(format!("transfer-{incarnation:016x}.sock"));
    let listening = crate::shm::start_listening(&path);
    let listener = listening.map_err(|errno| StartError::Listen {
        what: path.display().to_string(),
        source: errno.into(),
    })?;
    Ok((listener, path))
}
