//! How long the slices of a write should be: one long write and one of 1 MiB, by each domain, cut in slices of
//! several lengths. The lengths take turns, so that whatever else the machine does meets all of them alike, and
//! the best round of each counts: others can only make it slower.
//!
//! `cargo run --release -p kvasir-transfer --example slices`

#![allow(clippy::print_stdout)] // a program that prints its findings

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvasir_transfer::memory::{Prefault, SharedMemory};
use kvasir_transfer::{
    Completion, Domain, Handlers, PeerId, RegionDesc, RegionHandle, Source, TransferConfig,
    TransferEngine, Write,
};

const LONG: Duration = Duration::from_secs(60);
const REGION: usize = 64 << 20;
/// Mooncake's default first.
const SLICES: [usize; 6] = [16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 64 << 20];
const WRITES: [usize; 2] = [1 << 20, 64 << 20];
const ROUNDS: usize = 15;

struct Pair {
    sender: TransferEngine,
    _receiver: TransferEngine,
    source: RegionHandle,
    target: RegionDesc,
    peer: PeerId,
}

fn pair(domain: Domain, lanes: usize, slice_bytes: usize, run_dir: &Path) -> Pair {
    let engine = || {
        let config = TransferConfig {
            preferred: domain,
            run_dir: (domain == Domain::Shm).then(|| run_dir.to_owned()),
            tcp_listen: Some(([127, 0, 0, 1], 0).into()),
            tcp_lanes: lanes,
            slice_bytes_of: BTreeMap::from([(domain, slice_bytes)]),
            ..TransferConfig::default()
        };
        let registry = prometheus::Registry::new();
        TransferEngine::start(config, Handlers::default(), &registry).expect("started")
    };
    let memory = || Arc::new(SharedMemory::create("s", REGION, Prefault::Yes).expect("memory"));
    let (sender, receiver) = (engine(), engine());
    let (source, _) = sender.register(memory()).expect("room");
    let (_, target) = receiver.register(memory()).expect("room");
    let peer = sender.connect(&receiver.endpoint()).expect("reachable");
    Pair { sender, _receiver: receiver, source, target, peer }
}

impl Pair {
    /// Gigabytes per second of as many writes as fill the region, one after the other.
    fn rate(&self, bytes: usize) -> f64 {
        let began = Instant::now();
        for at in (0..REGION).step_by(bytes) {
            let (done, written) = Completion::future();
            let write = Write {
                peer: self.peer,
                source: Source::Region { handle: self.source.clone(), offset: at, bytes },
                target: self.target,
                target_offset: at as u64,
                imm: Some(1),
                checksum: None,
                group: 0,
                deadline: LONG,
            };
            self.sender.write(write, done).expect("accepted");
            written.wait().expect("it lands");
        }
        REGION as f64 / began.elapsed().as_secs_f64() / 1e9
    }
}

fn main() {
    let run_dir = tempfile::tempdir().expect("a directory");
    println!("GB/s, the best of {ROUNDS} rounds, by length of the slices in KiB");
    let lengths = SLICES.map(|bytes| format!("{:>8}", bytes >> 10)).concat();
    println!("{:<24}{lengths}", "");
    for (domain, lanes) in [(Domain::Shm, 1), (Domain::Tcp, 1), (Domain::Tcp, 2)] {
        let pairs = SLICES.map(|slice_bytes| pair(domain, lanes, slice_bytes, run_dir.path()));
        for bytes in WRITES {
            let mut rates = vec![Vec::new(); SLICES.len()];
            for _ in 0..ROUNDS {
                for (pair, rates) in pairs.iter().zip(&mut rates) {
                    rates.push(pair.rate(bytes));
                }
            }
            let best = |rates: &Vec<f64>| rates.iter().copied().fold(0.0, f64::max);
            let best: String = rates.iter().map(|of| format!("{:>8.2}", best(of))).collect();
            let what = format!("{} x{lanes}, {} KiB", domain.label(), bytes >> 10);
            println!("{what:<24}{best}");
        }
    }
}
