//! Measures what one way carries: latency of single small writes and throughput of large ones, as a
//! caller of the transfer engine has them, acknowledgement included.

use std::error::Error;
use std::net::{IpAddr, Ipv4Addr};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvasir_transfer::memory::{Prefault, SharedMemory};
use kvasir_transfer::{
    Completion, CompletionFuture, Domain, EfaConfig, Handlers, PeerId, RegionDesc, RegionHandle,
    Source, TransferConfig, TransferEngine, VerbsConfig, Write,
};

use super::report::{Point, Probe};

/// Memory on each side.
pub(super) const REGION_BYTES: usize = 64 << 20;
/// How long each point is measured.
const POINT: Duration = Duration::from_millis(400);
const DEADLINE: Duration = Duration::from_secs(10);
/// Bytes of each write, and how many are outstanding.
const POINTS: [(usize, usize); 5] =
    [(4 << 10, 1), (64 << 10, 1), (64 << 10, 16), (1 << 20, 8), (16 << 20, 2)];

/// The largest write that is probed and all that are outstanding with it fit the region.
const _: () = assert!((16 << 20) * 2 <= REGION_BYTES);

/// Both sides in this process, by each domain of the engine that this host has.
pub(super) fn loopback(efa: &EfaConfig, temporary: &Path) -> Result<Vec<Probe>, Box<dyn Error>> {
    let here = IpAddr::V4(Ipv4Addr::LOCALHOST);
    let mut probes = Vec::new();
    for domain in [Domain::Shm, Domain::Tcp, Domain::Verbs, Domain::Efa] {
        let run_dir = tempfile::tempdir_in(temporary)?;
        let of = |side: &str| side_of(side, Ways::Only(domain), efa, here, run_dir.path());
        let sender = match (domain, of("probe")) {
            // What keeps a card from being used stands among the devices and the choices.
            (Domain::Verbs | Domain::Efa, Err(_)) => continue,
            (_, sender) => sender?,
        };
        let receiver = of("probed")?;
        let (_, target) = region(&receiver.engine)?;
        let peer = sender.engine.connect(&receiver.engine.endpoint())?;
        let mut probe = probe(&sender.engine, peer, target)?;
        probe.transport = format!("{} on this host", sender.used()?);
        probes.push(probe);
    }
    Ok(probes)
}

/// By what an engine for a probe may be reached.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Ways {
    /// Shared memory on the same host, otherwise TCP.
    Plain,
    Only(Domain),
}

/// An engine for a probe.
pub(super) struct Side {
    pub engine: TransferEngine,
    registry: prometheus::Registry,
}

impl Side {
    /// The domain by which most of what it sent has gone.
    pub(super) fn used(&self) -> Result<&'static str, Box<dyn Error>> {
        let families = self.registry.gather();
        let bytes = families.iter().find(|family| family.name() == "kvasir_transfer_bytes_total");
        let sent = |domain: &Domain| -> f64 {
            let labels = [domain.label(), "sent"];
            let of_domain =
                bytes.into_iter().flat_map(|family| family.get_metric()).find(|metric| {
                    labels
                        .iter()
                        .all(|label| metric.get_label().iter().any(|is| is.value() == *label))
                });
            of_domain.map_or(0.0, |metric| metric.get_counter().get_value())
        };
        let all = [Domain::Shm, Domain::Tcp, Domain::Verbs, Domain::Efa];
        let most = all.into_iter().max_by(|a, b| sent(a).total_cmp(&sent(b)));
        Ok(most.filter(|domain| sent(domain) > 0.0).ok_or("no bytes were sent")?.label())
    }
}

/// An engine that is reachable at `here` by those ways.
pub(super) fn side_of(
    name: &str,
    ways: Ways,
    efa: &EfaConfig,
    here: IpAddr,
    run_dir: &Path,
) -> Result<Side, Box<dyn Error>> {
    let is = |domain| ways == Ways::Only(domain);
    // Its addresses are those of the host; a device has its own.
    let address = (efa.provider == "tcp").then(|| here.to_string());
    let efa = EfaConfig { address, ..efa.clone() };
    let config = TransferConfig {
        name: name.to_owned(),
        preferred: match ways {
            Ways::Plain => Domain::Shm,
            Ways::Only(domain) => domain,
        },
        tcp_listen: (!is(Domain::Shm)).then_some((here, 0).into()),
        run_dir: (is(Domain::Shm) || ways == Ways::Plain).then(|| run_dir.to_owned()),
        verbs: is(Domain::Verbs).then(VerbsConfig::default),
        efa: is(Domain::Efa).then_some(efa),
        ..TransferConfig::default()
    };
    let registry = prometheus::Registry::new();
    let engine = TransferEngine::start(config, Handlers::default(), &registry)?;
    Ok(Side { engine, registry })
}

pub(super) fn region(
    engine: &TransferEngine,
) -> Result<(RegionHandle, RegionDesc), Box<dyn Error>> {
    let memory = SharedMemory::create("probe", REGION_BYTES, Prefault::Yes)?;
    Ok(engine.register(Arc::new(memory))?)
}

/// Writes to the peer for a few seconds.
pub(super) fn probe(
    engine: &TransferEngine,
    peer: PeerId,
    target: RegionDesc,
) -> Result<Probe, Box<dyn Error>> {
    let (source, _) = region(engine)?;
    let wires = Wires { engine, peer, source, target };
    let points = POINTS.into_iter().map(|(bytes, outstanding)| wires.point(bytes, outstanding));
    let conditions = format!(
        "times include the acknowledgement; a worker polls for {} us and then sleeps; the caller sleeps while it waits",
        TransferConfig::default().spin_us
    );
    Ok(Probe { transport: String::new(), conditions, points: points.collect::<Result<_, _>>()? })
}

struct Wires<'a> {
    engine: &'a TransferEngine,
    peer: PeerId,
    source: RegionHandle,
    target: RegionDesc,
}

impl Wires<'_> {
    fn point(&self, bytes: usize, outstanding: usize) -> Result<Point, Box<dyn Error>> {
        let mut took_us = Vec::new();
        let mut under_way = std::collections::VecDeque::new();
        let began = Instant::now();
        let mut written = 0u64;
        while began.elapsed() < POINT || !under_way.is_empty() {
            while under_way.len() < outstanding && began.elapsed() < POINT {
                let slot = written as usize % (REGION_BYTES / bytes);
                under_way.push_back((Instant::now(), self.write(slot * bytes, bytes)?));
                written += 1;
            }
            let Some((submitted, write)) = under_way.pop_front() else { break };
            write.wait()?;
            took_us.push(submitted.elapsed().as_secs_f64() * 1e6);
        }
        let seconds = began.elapsed().as_secs_f64();
        took_us.sort_by(f64::total_cmp);
        let at = |share: f64| took_us[((took_us.len() - 1) as f64 * share) as usize];
        Ok(Point {
            write_bytes: bytes,
            outstanding,
            gigabytes_per_s: written as f64 * bytes as f64 / seconds / 1e9,
            p50_us: at(0.5),
            p99_us: at(0.99),
        })
    }

    fn write(&self, offset: usize, bytes: usize) -> Result<CompletionFuture, Box<dyn Error>> {
        let (done, future) = Completion::future();
        let write = Write {
            peer: self.peer,
            source: Source::Region { handle: self.source.clone(), offset, bytes },
            target: self.target,
            target_offset: offset as u64,
            imm: None,
            checksum: None,
            group: 0,
            deadline: DEADLINE,
        };
        self.engine.write(write, done)?;
        Ok(future)
    }
}

/// Writes bytes whose order tells, to the beginning of the region. Returns them.
pub(super) fn write_pattern(
    engine: &TransferEngine,
    peer: PeerId,
    target: RegionDesc,
    bytes: usize,
) -> Result<Vec<u8>, Box<dyn Error>> {
    let (source, _) = region(engine)?;
    let pattern: Vec<u8> =
        (0..bytes as u32).flat_map(|at| (at ^ 0x5bd1).to_le_bytes()).take(bytes).collect();
    source.memory().copy_from(0, &pattern)?;
    let wires = Wires { engine, peer, source, target };
    wires.write(0, bytes)?.wait()?;
    Ok(pattern)
}
