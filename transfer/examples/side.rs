//! Kvasir's side of the comparison with other transfer engines (`benches/peers/transfer`): a sender and
//! its target as two processes, which speak the lines that `protocol.py` describes. Also the limits that
//! no engine can pass: `memcpy` in one process, and `plain-tcp`, a loop that reads a socket into the
//! target.
//!
//! `side shm|tcp|memcpy|plain-tcp` is a sender; it starts its own target.

#![allow(clippy::print_stdout)] // a program that speaks through its output

use std::error::Error;
use std::io::{BufRead, BufReader, Read, Write as _};
use std::net::{TcpListener, TcpStream};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvasir_transfer::memory::{Prefault, SharedMemory};
use kvasir_transfer::{
    Completion, Domain, Endpoint, Handlers, PageSide, PeerId, RegionDesc, RegionHandle, Source,
    TransferConfig, TransferEngine, Write, WritePaged,
};
use serde::{Deserialize, Serialize};

type Outcome<T> = Result<T, Box<dyn Error>>;

const REGION_BYTES: usize = 256 << 20;
const DEADLINE: Duration = Duration::from_secs(60);

#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
struct Point {
    bytes: usize,
    pages: usize,
    calls: usize,
    seed: u64,
}

#[derive(Serialize)]
struct Answer {
    seconds: f64,
    latencies_us: Vec<f64>,
    wrong_pages: usize,
}

/// The pages of one call, by index.
struct Places {
    sources: Vec<u32>,
    targets: Vec<u32>,
}

fn main() -> Outcome<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match words[..] {
        ["target", "tcp"] => engine_target(Domain::Tcp),
        ["target", "shm"] => engine_target(Domain::Shm),
        ["target", "plain-tcp"] => plain_target(),
        ["tcp"] => serve(&mut EngineSide::start(Domain::Tcp)?),
        ["shm"] => serve(&mut EngineSide::start(Domain::Shm)?),
        ["plain-tcp"] => serve(&mut PlainSide::start()?),
        ["memcpy"] => serve(&mut Memcpy::start()?),
        _ => Err("usage: side shm|tcp|memcpy|plain-tcp".into()),
    }
}

// ---- what is measured ----

trait Side {
    fn source(&self) -> &SharedMemory;
    /// One write, or all pages of a call. Returns when it is complete.
    fn call(&mut self, bytes: usize, places: &Places) -> Outcome<()>;
    /// Asks the target, which knows what should have landed.
    fn wrong_pages(&mut self, point: Point) -> Outcome<usize>;
}

fn serve(side: &mut dyn Side) -> Outcome<()> {
    println!("READY");
    for line in std::io::stdin().lock().lines() {
        let line = line?;
        let Ok(point) = serde_json::from_str::<Point>(&line) else { return Ok(()) };
        fill(side.source(), point.seed)?;
        let every_call = places(point);
        let mut latencies_us = Vec::with_capacity(point.calls);
        let began = Instant::now();
        for places in &every_call {
            let start = Instant::now();
            side.call(point.bytes, places)?;
            latencies_us.push(start.elapsed().as_secs_f64() * 1e6);
        }
        let seconds = began.elapsed().as_secs_f64();
        let wrong_pages = side.wrong_pages(point)?;
        let answer = Answer { seconds, latencies_us, wrong_pages };
        println!("POINT {}", serde_json::to_string(&answer)?);
    }
    Ok(())
}

struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// So many different numbers below `below`, in random order.
    fn draw(&mut self, count: usize, below: usize) -> Vec<u32> {
        let mut all: Vec<u32> = (0..below as u32).collect();
        for at in 0..count {
            let other = at + (self.next() % (below - at) as u64) as usize;
            all.swap(at, other);
        }
        all.truncate(count);
        all
    }
}

fn places(point: Point) -> Vec<Places> {
    let slots = REGION_BYTES / point.bytes;
    let mut random = Random(point.seed);
    let mut one = |call: usize| match point.pages {
        1 => Places { sources: vec![(call % slots) as u32], targets: vec![(call % slots) as u32] },
        pages => Places { sources: random.draw(pages, slots), targets: random.draw(pages, slots) },
    };
    (0..point.calls).map(&mut one).collect()
}

/// Fresh bytes for each sample.
fn pattern(seed: u64) -> Vec<u8> {
    let mut random = Random(seed);
    let block: Vec<u8> =
        std::iter::repeat_with(|| random.next().to_le_bytes()).take(1 << 17).flatten().collect();
    let mut bytes = Vec::with_capacity(REGION_BYTES);
    for at in 0..REGION_BYTES >> 20 {
        let turn = (at * 4099) & 0xf_ffff;
        bytes.extend_from_slice(&block[turn..]);
        bytes.extend_from_slice(&block[..turn]);
    }
    bytes
}

fn fill(memory: &SharedMemory, seed: u64) -> Outcome<()> {
    Ok(memory.copy_from(0, &pattern(seed))?)
}

fn wrong_pages(target: &SharedMemory, point: Point) -> Outcome<usize> {
    let expected = pattern(point.seed);
    let mut seen = vec![0; REGION_BYTES];
    target.copy_to(0, &mut seen)?;
    let mut landed = std::collections::BTreeMap::new();
    for Places { sources, targets } in places(point) {
        landed.extend(targets.into_iter().zip(sources));
    }
    let page = |bytes: &[u8], at: u32| {
        let start = at as usize * point.bytes;
        bytes[start..start + point.bytes].to_vec()
    };
    Ok(landed.iter().filter(|(to, from)| page(&seen, **to) != page(&expected, **from)).count())
}

fn region() -> Outcome<Arc<SharedMemory>> {
    Ok(Arc::new(SharedMemory::create("side", REGION_BYTES, Prefault::Yes)?))
}

// ---- the process of the target ----

struct Target {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Target {
    fn start(kind: &str) -> Outcome<Target> {
        let mut child = Command::new(std::env::current_exe()?)
            .args(["target", kind])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let input = child.stdin.take().ok_or("no pipe")?;
        let output = BufReader::new(child.stdout.take().ok_or("no pipe")?);
        Ok(Target { child, input, output })
    }

    fn hear(&mut self) -> Outcome<String> {
        let mut line = String::new();
        self.output.read_line(&mut line)?;
        Ok(line.trim().to_owned())
    }

    fn wrong_pages(&mut self, point: Point) -> Outcome<usize> {
        writeln!(self.input, "{}", serde_json::to_string(&point)?)?;
        Ok(self.hear()?.parse()?)
    }
}

impl Drop for Target {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn answer_questions(memory: &SharedMemory) -> Outcome<()> {
    for line in std::io::stdin().lock().lines() {
        println!("{}", wrong_pages(memory, serde_json::from_str(&line?)?)?);
    }
    Ok(())
}

// ---- the engine, as it comes ----

fn engine(domain: Domain, run_dir: &std::path::Path) -> Outcome<TransferEngine> {
    let config = TransferConfig {
        preferred: domain,
        run_dir: (domain == Domain::Shm).then(|| run_dir.to_owned()),
        tcp_listen: (domain == Domain::Tcp).then_some(([127, 0, 0, 1], 0).into()),
        ..TransferConfig::default()
    };
    Ok(TransferEngine::start(config, Handlers::default(), &prometheus::Registry::new())?)
}

fn engine_target(domain: Domain) -> Outcome<()> {
    let run_dir = tempfile::tempdir()?;
    let engine = engine(domain, run_dir.path())?;
    let memory = region()?;
    let (_region, descriptor) = engine.register(Arc::clone(&memory))?;
    let offer = [engine.endpoint().to_bytes(), descriptor.to_bytes()];
    println!("{}", serde_json::to_string(&offer)?);
    answer_questions(&memory)
}

struct EngineSide {
    target: Target,
    engine: TransferEngine,
    source: RegionHandle,
    descriptor: RegionDesc,
    peer: PeerId,
    _run_dir: tempfile::TempDir,
}

impl EngineSide {
    fn start(domain: Domain) -> Outcome<EngineSide> {
        let mut target = Target::start(if domain == Domain::Shm { "shm" } else { "tcp" })?;
        let [endpoint, descriptor]: [Vec<u8>; 2] = serde_json::from_str(&target.hear()?)?;
        let run_dir = tempfile::tempdir()?;
        let engine = engine(domain, run_dir.path())?;
        let peer = engine.connect(&Endpoint::from_bytes(&endpoint)?)?;
        let (source, _) = engine.register(region()?)?;
        let descriptor = RegionDesc::from_bytes(&descriptor)?;
        Ok(EngineSide { target, engine, source, descriptor, peer, _run_dir: run_dir })
    }
}

impl Side for EngineSide {
    fn source(&self) -> &SharedMemory {
        self.source.memory()
    }

    fn call(&mut self, bytes: usize, places: &Places) -> Outcome<()> {
        let (done, outcome) = Completion::future();
        if let ([source], [target]) = (&places.sources[..], &places.targets[..]) {
            let (peer, handle) = (self.peer, self.source.clone());
            let write = Write {
                peer,
                source: Source::Region { handle, offset: *source as usize * bytes, bytes },
                target: self.descriptor,
                target_offset: u64::from(*target) * bytes as u64,
                imm: None,
                checksum: None,
                group: 0,
                deadline: DEADLINE,
            };
            self.engine.write(write, done)?;
        } else {
            let side = |indices: &Vec<u32>| PageSide {
                offset: 0,
                stride: bytes as u64,
                indices: indices.clone(),
            };
            let write = WritePaged {
                peer: self.peer,
                source: self.source.clone(),
                source_pages: side(&places.sources),
                target: self.descriptor,
                target_pages: side(&places.targets),
                page_bytes: bytes,
                imm: None,
                checksums: Vec::new(),
                group: 0,
                deadline: DEADLINE,
            };
            self.engine.write_paged(write, done)?;
        }
        Ok(outcome.wait()?)
    }

    fn wrong_pages(&mut self, point: Point) -> Outcome<usize> {
        self.target.wrong_pages(point)
    }
}

// ---- the limits ----

struct Memcpy {
    source: Arc<SharedMemory>,
    target: Arc<SharedMemory>,
}

impl Memcpy {
    fn start() -> Outcome<Memcpy> {
        Ok(Memcpy { source: region()?, target: region()? })
    }
}

impl Side for Memcpy {
    fn source(&self) -> &SharedMemory {
        &self.source
    }

    fn call(&mut self, bytes: usize, places: &Places) -> Outcome<()> {
        for (from, to) in places.sources.iter().zip(&places.targets) {
            let (from, to) = (*from as usize * bytes, *to as usize * bytes);
            self.source.copy_between(from, &self.target, to, bytes)?;
        }
        Ok(())
    }

    fn wrong_pages(&mut self, point: Point) -> Outcome<usize> {
        wrong_pages(&self.target, point)
    }
}

/// Before each page its place: where in the target, how many bytes, and whether it is the call's
/// last, which is answered with one byte.
const HEADER_BYTES: usize = 24;

struct PlainSide {
    target: Target,
    source: Arc<SharedMemory>,
    socket: TcpStream,
}

impl PlainSide {
    fn start() -> Outcome<PlainSide> {
        let mut target = Target::start("plain-tcp")?;
        let socket = TcpStream::connect(target.hear()?)?;
        socket.set_nodelay(true)?;
        Ok(PlainSide { target, source: region()?, socket })
    }
}

impl Side for PlainSide {
    fn source(&self) -> &SharedMemory {
        &self.source
    }

    fn call(&mut self, bytes: usize, places: &Places) -> Outcome<()> {
        let pages = places.sources.iter().zip(&places.targets);
        let last = places.sources.len() - 1;
        for (at, (from, to)) in pages.enumerate() {
            let header = [u64::from(*to) * bytes as u64, bytes as u64, u64::from(at == last)];
            self.socket.write_all(header.map(u64::to_le_bytes).as_flattened())?;
            // SAFETY: this process alone has the source, and writes it only between samples.
            self.socket.write_all(unsafe { self.source.slice(*from as usize * bytes, bytes) }?)?;
        }
        Ok(self.socket.read_exact(&mut [0])?)
    }

    fn wrong_pages(&mut self, point: Point) -> Outcome<usize> {
        self.target.wrong_pages(point)
    }
}

fn plain_target() -> Outcome<()> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    println!("{}", listener.local_addr()?);
    let (mut socket, _) = listener.accept()?;
    socket.set_nodelay(true)?;
    let memory = region()?;
    let landing = Arc::clone(&memory);
    std::thread::spawn(move || {
        // Ends with the sender's connection.
        while land(&mut socket, &landing).is_ok() {}
    });
    answer_questions(&memory)
}

fn land(socket: &mut TcpStream, memory: &SharedMemory) -> Outcome<()> {
    let mut header = [0; HEADER_BYTES];
    socket.read_exact(&mut header)?;
    let word = |at: usize| u64::from_le_bytes(header[at * 8..][..8].try_into().expect("8 bytes"));
    // SAFETY: what has landed is looked at only between samples.
    socket.read_exact(unsafe { memory.slice_mut(word(0) as usize, word(1) as usize) }?)?;
    if word(2) == 1 {
        socket.write_all(&[1])?;
    }
    Ok(())
}
