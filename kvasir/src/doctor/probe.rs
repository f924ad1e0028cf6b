//! Measures what one way carries: latency of single small writes and throughput of large ones, as a
//! caller of the transfer engine has them, acknowledgement included.

use std::error::Error;
use std::net::{IpAddr, Ipv4Addr};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvasir_transfer::memory::Prefault;
use kvasir_transfer::{
    Completion, CompletionFuture, Domain, Handlers, PeerId, RegionDesc, RegionHandle, SharedMemory,
    Source, TransferConfig, TransferEngine, VerbsConfig, Write,
};

use super::report::{Point, Probe};

/// Memory on each side.
pub const REGION_BYTES: usize = 64 << 20;
/// How long each point is measured.
const POINT: Duration = Duration::from_millis(400);
const DEADLINE: Duration = Duration::from_secs(10);
/// Bytes of each write, and how many are outstanding.
const POINTS: [(usize, usize); 5] =
    [(4 << 10, 1), (64 << 10, 1), (64 << 10, 16), (1 << 20, 8), (16 << 20, 2)];

/// The largest write that is probed and all that are outstanding with it fit the region.
const _: () = assert!((16 << 20) * 2 <= REGION_BYTES);

/// Both sides in this process, by each domain of the engine that this host has.
pub fn loopback(temporary: &Path) -> Result<Vec<Probe>, Box<dyn Error>> {
    let here = IpAddr::V4(Ipv4Addr::LOCALHOST);
    // What keeps an RDMA device from being used stands among the devices and the choices.
    let is_here = |domain: &Domain| {
        *domain != Domain::Verbs || engine("trial", Some(*domain), here, temporary).is_ok()
    };
    [Domain::Shm, Domain::Tcp, Domain::Verbs]
        .into_iter()
        .filter(is_here)
        .map(|domain| {
            let run_dir = tempfile::tempdir_in(temporary)?;
            let of = |side: &str| engine(side, Some(domain), here, run_dir.path());
            let (sender, receiver) = (of("probe")?, of("probed")?);
            let (_, target) = region(&receiver)?;
            let peer = sender.connect(&receiver.endpoint())?;
            let way = format!("{} on this host", domain.label());
            probe(&sender, peer, target, way)
        })
        .collect()
}

/// An engine for a probe, reachable at `here`. Without a domain it prefers shared memory and is
/// reachable by TCP too.
pub fn engine(
    name: &str,
    domain: Option<Domain>,
    here: IpAddr,
    run_dir: &Path,
) -> Result<TransferEngine, Box<dyn Error>> {
    let config = TransferConfig {
        name: name.to_owned(),
        preferred: domain.unwrap_or(Domain::Shm),
        tcp_listen: (domain != Some(Domain::Shm)).then_some((here, 0).into()),
        run_dir: matches!(domain, None | Some(Domain::Shm)).then(|| run_dir.to_owned()),
        verbs: (domain == Some(Domain::Verbs)).then(VerbsConfig::default),
        ..TransferConfig::default()
    };
    Ok(TransferEngine::start(config, Handlers::default(), &prometheus::Registry::new())?)
}

pub fn region(engine: &TransferEngine) -> Result<(RegionHandle, RegionDesc), Box<dyn Error>> {
    let memory = SharedMemory::create("probe", REGION_BYTES, Prefault::Yes)?;
    Ok(engine.register(Arc::new(memory))?)
}

/// Writes to the peer for a few seconds.
pub fn probe(
    engine: &TransferEngine,
    peer: PeerId,
    target: RegionDesc,
    way: String,
) -> Result<Probe, Box<dyn Error>> {
    let (source, _) = region(engine)?;
    let wires = Wires { engine, peer, source, target };
    let points = POINTS.into_iter().map(|(bytes, outstanding)| wires.point(bytes, outstanding));
    let conditions = format!(
        "until acknowledged by the receiver; a worker polls for {} us, then sleeps; the caller waits asleep",
        TransferConfig::default().spin_us
    );
    Ok(Probe { way, conditions, points: points.collect::<Result<_, _>>()? })
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
pub fn write_pattern(
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
