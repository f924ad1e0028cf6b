//! Measures what the design promises of the engine on this machine, each beside the plain loop that
//! bounds it:
//!
//! | path | promise |
//! | --- | --- |
//! | shm write | 90 % of one-thread memcpy |
//! | tcp write, 1 MiB | 90 % of a plain read loop into the same target |
//! | paged write, 1,024 x 32 KiB | 85 % of the same bytes in one write |
//! | progress word to callback, polling | p50 6 us, p99 13 us |
//!
//! `cargo run --release -p kvasir-transfer --example limits`

#![allow(clippy::print_stdout)] // a program that prints its findings

use std::io::{Read, Write as _};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use kvasir_transfer::doorbell::Ringer;
use kvasir_transfer::memory::{Prefault, SharedMemory};
use kvasir_transfer::{
    Completion, CompletionFlag, Domain, Handlers, PageSide, PeerId, Raised, RegionDesc,
    RegionHandle, Source, TransferConfig, TransferEngine, Verify, Watch, Write, WritePaged,
};

const TOTAL: usize = 256 << 20;
const REGION: usize = 32 << 20;
const ROUNDS: usize = 5;
const LONG: Duration = Duration::from_secs(60);

struct Pair {
    sender: TransferEngine,
    _receiver: TransferEngine,
    source: RegionHandle,
    target: RegionHandle,
    descriptor: RegionDesc,
    peer: PeerId,
}

fn engine(domain: Domain, run_dir: &Path) -> TransferEngine {
    let config = TransferConfig {
        preferred: domain,
        run_dir: Some(run_dir.to_owned()),
        tcp_listen: Some(([127, 0, 0, 1], 0).into()),
        verify: Verify { tcp: false, shm: false, verbs: false, efa: false },
        ..TransferConfig::default()
    };
    let registry = prometheus::Registry::new();
    TransferEngine::start(config, Handlers::default(), &registry).expect("started")
}

fn memory(bytes: usize) -> Arc<SharedMemory> {
    Arc::new(SharedMemory::create("limits", bytes, Prefault::Yes).expect("memory"))
}

fn pair(domain: Domain, run_dir: &Path) -> Pair {
    let (sender, receiver) = (engine(domain, run_dir), engine(domain, run_dir));
    let (source, _) = sender.register(memory(REGION)).expect("room");
    let (target, descriptor) = receiver.register(memory(REGION)).expect("room");
    let peer = sender.connect(&receiver.endpoint()).expect("reachable");
    Pair { sender, _receiver: receiver, source, target, descriptor, peer }
}

impl Pair {
    fn write(&self, offset: usize, bytes: usize) -> Arc<CompletionFlag> {
        let (done, flag) = Completion::flag();
        let write = Write {
            peer: self.peer,
            source: Source::Region { handle: self.source.clone(), offset, bytes },
            target: self.descriptor,
            target_offset: offset as u64,
            imm: Some(1),
            checksum: None,
            group: 0,
            deadline: LONG,
        };
        self.sender.write(write, done).expect("accepted");
        flag
    }

    fn write_pages(&self, page_bytes: usize) -> Arc<CompletionFlag> {
        let (done, flag) = Completion::flag();
        let count = (REGION / page_bytes) as u32;
        let pages = |indices: Vec<u32>| PageSide { offset: 0, stride: page_bytes as u64, indices };
        let write = WritePaged {
            peer: self.peer,
            source: self.source.clone(),
            source_pages: pages((0..count).collect()),
            target: self.descriptor,
            target_pages: pages((0..count).rev().collect()),
            page_bytes,
            imm: Some(1),
            checksums: Vec::new(),
            group: 0,
            deadline: LONG,
        };
        self.sender.write_paged(write, done).expect("accepted");
        flag
    }
}

fn wait(flag: &CompletionFlag) {
    while flag.get().is_none() {
        std::thread::yield_now();
    }
    assert_eq!(flag.get(), Some(Ok(())));
}

/// The best of several rounds, in bytes per second.
fn best(bytes: usize, mut round: impl FnMut()) -> f64 {
    round();
    let rates = (0..ROUNDS).map(|_| {
        let began = Instant::now();
        round();
        bytes as f64 / began.elapsed().as_secs_f64()
    });
    rates.fold(0.0, f64::max)
}

fn report(what: &str, rate: f64, bound: f64) {
    println!("{what:<40} {:>8.2} GB/s   {:>5.1} % of its bound", rate / 1e9, 100.0 * rate / bound);
}

fn writes(pair: &Pair, bytes: usize) -> f64 {
    best(TOTAL, || {
        let flags: Vec<_> =
            (0..TOTAL / bytes).map(|at| pair.write(at * bytes % REGION, bytes)).collect();
        flags.iter().for_each(|flag| wait(flag));
    })
}

fn memcpy(pair: &Pair, bytes: usize) -> f64 {
    best(TOTAL, || {
        for at in 0..TOTAL / bytes {
            let offset = at * bytes % REGION;
            let target = pair.target.memory();
            pair.source.memory().copy_between(offset, target, offset, bytes).expect("it fits");
        }
    })
}

/// One thread writes as fast as it can, this one reads into the target.
fn plain_tcp(pair: &Pair) -> f64 {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("its address");
    let chunk = 1 << 20;
    let source = Arc::clone(pair.source.memory());
    let sender = std::thread::spawn(move || {
        let mut stream = std::net::TcpStream::connect(address).expect("connected");
        // SAFETY: nobody writes the source during this measurement.
        let bytes = unsafe { source.slice(0, chunk) }.expect("it fits");
        while stream.write_all(bytes).is_ok() {}
    });
    let (mut stream, _) = listener.accept().expect("connected");
    let rate = best(TOTAL, || {
        for at in 0..TOTAL / chunk {
            let offset = at * chunk % REGION;
            // SAFETY: nobody else touches the target during this measurement.
            let target = unsafe { pair.target.memory().slice_mut(offset, chunk) };
            stream.read_exact(target.expect("it fits")).expect("bytes");
        }
    });
    drop(stream);
    sender.join().expect("the sender");
    rate
}

fn small_writes(what: &str, pair: &Pair) {
    let count = 20_000;
    let rate = best(count, || {
        let flags: Vec<_> = (0..count).map(|at| pair.write(at % 4096 * 64, 64)).collect();
        flags.iter().for_each(|flag| wait(flag));
    });
    println!("{what:<40} {:>8.0} ns each", 1e9 / rate);
}

fn progress(run_dir: &Path) {
    let engine = engine(Domain::Shm, run_dir);
    let memory = memory(4096);
    let began = Instant::now();
    let seen_ns = Arc::new(AtomicU64::new(0));
    let stamp = Arc::clone(&seen_ns);
    let on_progress = Box::new(move |_, _| {
        stamp.store(began.elapsed().as_nanos() as u64, Ordering::Release);
    });
    let raised = Raised::WithBell { sleeping_offset: 64 };
    let watch = Watch { memory: Arc::clone(&memory).into(), offset: 0, raised, on_progress };
    engine.watch(watch).expect("accepted");
    let word = memory.atomic_u64(0).expect("aligned");
    let ringer = Ringer::from_fd(engine.wake_fd().try_clone_to_owned().expect("a descriptor"));
    let sleeping = memory.atomic_u32(64).expect("aligned");
    let mut delays_ns = Vec::new();
    for value in 1..=20_000 {
        seen_ns.store(0, Ordering::Release);
        let raised_ns = began.elapsed().as_nanos() as u64;
        word.store(value, Ordering::Release);
        ringer.ring_if(sleeping);
        while seen_ns.load(Ordering::Acquire) == 0 {
            std::hint::spin_loop();
        }
        delays_ns.push(seen_ns.load(Ordering::Acquire) - raised_ns);
    }
    delays_ns.sort_unstable();
    let at = |part: f64| delays_ns[(delays_ns.len() as f64 * part) as usize] as f64 / 1e3;
    let what = "progress word to callback, polling";
    println!("{what:<40} p50 {:.2} us   p99 {:.2} us", at(0.5), at(0.99));
}

fn main() {
    let run_dir = tempfile::tempdir().expect("a directory");
    let shm = pair(Domain::Shm, run_dir.path());
    for bytes in [32 << 10, 1 << 20, 16 << 20] {
        let bound = memcpy(&shm, bytes);
        report(&format!("shm write, {} KiB", bytes >> 10), writes(&shm, bytes), bound);
    }
    let one = best(REGION, || wait(&shm.write(0, REGION)));
    let paged = best(REGION, || wait(&shm.write_pages(32 << 10)));
    report("shm paged write, 1,024 x 32 KiB", paged, one);
    small_writes("shm write, 64 B, submission included", &shm);
    drop(shm);

    let tcp = pair(Domain::Tcp, run_dir.path());
    let bound = plain_tcp(&tcp);
    report("tcp, a plain loop", bound, bound);
    for bytes in [32 << 10, 1 << 20, 16 << 20] {
        report(&format!("tcp write, {} KiB", bytes >> 10), writes(&tcp, bytes), bound);
    }
    let one = best(REGION, || wait(&tcp.write(0, REGION)));
    let paged = best(REGION, || wait(&tcp.write_pages(32 << 10)));
    report("tcp paged write, 1,024 x 32 KiB", paged, one);
    small_writes("tcp write, 64 B, submission included", &tcp);
    drop(tcp);
    progress(run_dir.path());
}
