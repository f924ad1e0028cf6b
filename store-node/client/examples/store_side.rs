//! Kvasir's side of the comparison with other stores (`benches/peers/store`), which speaks the lines that
//! `protocol.py` there describes. Also the limits that no store can pass: copies between buffers, and a loop
//! that reads a socket into them.
//!
//! `store_side node NAME DIR ARENA_BYTES [SSD_DIR]` is a store node, until its input ends.
//! `store_side client NUMBER BYTES NEAR_DIR FAR_DIR FAR_ADDRESS` is a client on the near node's host; objects of
//! the far node are fetched over TCP. `store_side limits BYTES` measures plain loops.

#![allow(clippy::print_stdout, reason = "a program that speaks through its output")]
#![allow(clippy::disallowed_methods, reason = "it measures time")]

use std::error::Error;
use std::io::{Read, Write as _};
use std::net::{TcpListener, TcpStream};
use std::time::{Duration, Instant};

use kvasir_client::{Class, Client, Key, Object, OpenOptions, Outcome, PutOptions};
use kvasir_store_node::config::Config;
use kvasir_store_node::start;
use kvasir_transfer::Domain;
use kvasir_transfer::memory::{Prefault, SharedMemory};
use serde::{Deserialize, Serialize};

type Done<T> = Result<T, Box<dyn Error>>;

/// As many buffers as the largest batch has objects.
const BUFFERS: usize = 32;
/// Plain copies go round in so much memory, as puts do in a node's.
const ARENA_BYTES: usize = 1 << 30;
const STAMP_BYTES: usize = 16;

#[derive(Debug, Clone, Copy, Deserialize)]
struct Point {
    what: What,
    bytes: usize,
    /// Objects of a call.
    batch: usize,
    calls: usize,
    seed: u64,
}

#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(rename_all = "snake_case")]
enum What {
    /// Puts into the node of this host.
    Put,
    /// Gets from it, and nothing is read.
    Get,
    /// Gets from it, and copies of what was got.
    GetCopy,
    /// Gets of what only another node has.
    GetFar,
    /// Lookups, half of which find something.
    Exists,
    /// Puts that are answered when they are durable.
    PutKept,
    /// Gets of what [`What::PutKept`] put with the same seed, each once, in an order of their own.
    GetSsd,
    /// Forgets it.
    Remove,
}

#[derive(Debug, Default, Serialize)]
struct Answer {
    seconds: f64,
    latencies_us: Vec<f64>,
    /// Objects that came with other bytes.
    wrong: usize,
    /// Objects that were not put, or not found.
    failed: usize,
}

impl Answer {
    fn took(&mut self, time: Duration) {
        self.seconds += time.as_secs_f64();
        self.latencies_us.push(time.as_secs_f64() * 1e6);
    }
}

fn main() -> Done<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match words[..] {
        ["node", name, dir, dram_bytes] => node(name, dir, dram_bytes.parse()?, None),
        ["node", name, dir, dram_bytes, ssd] => node(name, dir, dram_bytes.parse()?, Some(ssd)),
        ["client", number, bytes, near, far, address] => {
            let mut side = Side::open(number.parse()?, bytes.parse()?, near, far, address)?;
            serve(|point| side.measure(point))
        }
        ["limits", bytes] => {
            let mut limits = Limits::new(bytes.parse()?)?;
            serve(|point| limits.measure(point))
        }
        _ => Err("see the documentation of this example for its arguments".into()),
    }
}

fn node(name: &str, dir: &str, dram_bytes: u64, ssd: Option<&str>) -> Done<()> {
    let any_port = ([127, 0, 0, 1], 0).into();
    let mut config = Config {
        node_id: name.into(),
        listen: any_port,
        transfer_listen: any_port,
        attach_dir: format!("{dir}/{name}").into(),
        dram_bytes,
        transport: Domain::Tcp,
        drain_timeout_ms: 1_000,
        ..Config::default()
    };
    config.ssd.dir = ssd.map(Into::into);
    config.ssd.capacity_bytes = 4 << 30;
    config.ssd.context_percent = 90;
    config.ssd.tenant_bytes_max = 8 << 30;
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let mut node = runtime.block_on(start(config))?;
    println!("READY {}", node.address());
    std::io::stdin().read_to_end(&mut Vec::new())?;
    runtime.block_on(node.shut_down());
    Ok(())
}

/// Measures points until the input ends.
fn serve(mut measure: impl FnMut(Point) -> Done<Answer>) -> Done<()> {
    println!("READY");
    for line in std::io::stdin().lines() {
        let answer = measure(serde_json::from_str(&line?)?);
        match answer {
            Ok(answer) => println!("POINT {}", serde_json::to_string(&answer)?),
            Err(error) => println!("POINT {}", serde_json::json!({"error": error.to_string()})),
        }
    }
    Ok(())
}

/// Buffers with what objects hold: bytes of their own, and at both ends the name of the object.
struct Contents {
    buffers: Vec<Vec<u8>>,
}

impl Contents {
    fn new(bytes: usize) -> Self {
        let buffer =
            |at: usize| (0..bytes).map(|byte| (byte * 31 + byte / 251 + at) as u8).collect();
        Contents { buffers: (0..BUFFERS).map(buffer).collect() }
    }

    /// The first so many, with these names.
    fn stamped(&mut self, names: &[Name]) -> &[Vec<u8>] {
        for (buffer, name) in self.buffers.iter_mut().zip(names) {
            let end = buffer.len() - STAMP_BYTES;
            buffer[..STAMP_BYTES].copy_from_slice(&name.0);
            buffer[end..].copy_from_slice(&name.0);
        }
        &self.buffers[..names.len()]
    }
}

/// Of an object: the seed, the client and its place.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Name([u8; STAMP_BYTES]);

impl Name {
    fn new(seed: u64, client: u32, place: usize) -> Self {
        let mut name = [0; STAMP_BYTES];
        name[..8].copy_from_slice(&seed.to_le_bytes());
        name[8..12].copy_from_slice(&client.to_le_bytes());
        name[12..].copy_from_slice(&(place as u32).to_le_bytes());
        Name(name)
    }

    fn is_of(&self, object: &[u8], bytes: usize) -> bool {
        object.len() == bytes && object.starts_with(&self.0) && object.ends_with(&self.0)
    }
}

struct Side {
    number: u32,
    near: Client,
    far: Client,
    far_address: String,
    contents: Contents,
    copied: Vec<u8>,
}

impl Side {
    fn open(number: u32, bytes: usize, near: &str, far: &str, address: &str) -> Done<Side> {
        let open = |dir: &str| {
            Client::open(&OpenOptions {
                object_bytes_max: bytes as u64,
                polling: Duration::from_millis(1),
                tenant: "bench".into(),
                ..OpenOptions::new(dir)
            })
        };
        let (near, far) = (open(near)?, open(far)?);
        let contents = Contents::new(bytes);
        let far_address = address.into();
        Ok(Side { number, near, far, far_address, contents, copied: vec![0; bytes] })
    }

    fn measure(&mut self, point: Point) -> Done<Answer> {
        match point.what {
            What::Put => self.put(point, Class::Normal),
            What::PutKept => self.put(point, Class::Context { ttl: Duration::from_secs(3_600) }),
            What::Get => self.get(point, false),
            What::GetCopy => self.get(point, true),
            What::GetFar => self.get_far(point),
            What::Exists => self.exists(point),
            What::GetSsd => self.get_ssd(point),
            What::Remove => self.remove(point),
        }
    }

    fn names(&self, point: Point, call: usize) -> Vec<Name> {
        let place = |object| Name::new(point.seed, self.number, call * point.batch + object);
        (0..point.batch).map(place).collect()
    }

    fn keys(&self, names: &[Name]) -> Vec<Key> {
        names.iter().map(|name| self.near.key(&name.0)).collect()
    }

    fn put_into(&mut self, far: bool, names: &[Name], class: Class) -> Done<(Duration, usize)> {
        let keys = self.keys(names);
        let client = if far { &self.far } else { &self.near };
        let contents = self.contents.stamped(names);
        let objects: Vec<(Key, &[u8])> =
            keys.iter().zip(contents).map(|(key, bytes)| (*key, &bytes[..])).collect();
        let options = PutOptions { class, ..PutOptions::default() };
        let begun = Instant::now();
        let outcomes = client.put(&objects, &options)?;
        let took = begun.elapsed();
        Ok((took, outcomes.iter().filter(|outcome| **outcome != Outcome::Stored).count()))
    }

    fn put(&mut self, point: Point, class: Class) -> Done<Answer> {
        let mut answer = Answer::default();
        for call in 0..point.calls {
            let names = self.names(point, call);
            let (took, failed) = self.put_into(false, &names, class)?;
            answer.took(took);
            answer.failed += failed;
        }
        Ok(answer)
    }

    fn get(&mut self, point: Point, copies: bool) -> Done<Answer> {
        let names: Vec<Name> =
            (0..BUFFERS).map(|at| Name::new(point.seed, self.number, at)).collect();
        let keys = self.keys(&names);
        self.put_into(false, &names, Class::Normal)?;
        let mut answer = Answer::default();
        for call in 0..point.calls {
            // Something else goes for this, and what is got below takes its place in the order of what goes next.
            answer.failed += self
                .put_into(
                    false,
                    &[Name::new(point.seed, self.number, BUFFERS + call)],
                    Class::Normal,
                )?
                .1;
            let at = call % BUFFERS;
            let begun = Instant::now();
            let got = self.near.get(&keys[at..=at])?;
            if copies && let Some(object) = &got[0] {
                self.copied.copy_from_slice(object);
            }
            let is_current = got[0].as_ref().is_some_and(Object::is_current);
            let mut took = begun.elapsed();
            answer.wrong +=
                got.iter().flatten().filter(|got| !names[at].is_of(got, point.bytes)).count();
            answer.failed += usize::from(!is_current);
            let begun = Instant::now();
            drop(got);
            took += begun.elapsed();
            answer.took(took);
        }
        Ok(answer)
    }

    fn get_far(&mut self, point: Point) -> Done<Answer> {
        let mut answer = Answer::default();
        for call in 0..point.calls {
            let names = self.names(point, call);
            answer.failed += self.put_into(true, &names, Class::Normal)?.1;
        }
        for call in 0..point.calls {
            let names = self.names(point, call);
            let keys = self.keys(&names);
            let address = &self.far_address;
            self.timed(&mut answer, &names, point.bytes, |near| near.get_from(&keys, address))?;
        }
        Ok(answer)
    }

    fn get_ssd(&mut self, point: Point) -> Done<Answer> {
        let mut answer = Answer::default();
        let all = point.calls * point.batch;
        // Every place once: the step and their number have no common divisor but 1.
        let step = (all * 5 / 8..).find(|step| greatest_common_divisor(*step, all) == 1);
        let step = step.unwrap_or(1);
        for call in 0..point.calls {
            let place = |object| (call * point.batch + object) * step % all;
            let names: Vec<Name> = (0..point.batch)
                .map(|object| Name::new(point.seed, self.number, place(object)))
                .collect();
            let keys = self.keys(&names);
            self.timed(&mut answer, &names, point.bytes, |near| near.get(&keys))?;
        }
        Ok(answer)
    }

    fn remove(&self, point: Point) -> Done<Answer> {
        let mut answer = Answer::default();
        for call in 0..point.calls {
            let keys = self.keys(&self.names(point, call));
            let begun = Instant::now();
            answer.failed += keys.len() - self.near.remove(&keys)?;
            answer.took(begun.elapsed());
        }
        Ok(answer)
    }

    /// One get with its release, which is looked at in between.
    fn timed(
        &self,
        answer: &mut Answer,
        names: &[Name],
        bytes: usize,
        get: impl Fn(&Client) -> Result<Vec<Option<Object>>, kvasir_client::Error>,
    ) -> Done<()> {
        let begun = Instant::now();
        let got = get(&self.near)?;
        let are_current = got.iter().flatten().filter(|object| object.is_current()).count();
        let mut took = begun.elapsed();
        answer.failed += names.len() - are_current;
        let pairs =
            got.iter().zip(names).filter_map(|(object, name)| Some((object.as_ref()?, name)));
        answer.wrong += pairs.filter(|(object, name)| !name.is_of(object, bytes)).count();
        let begun = Instant::now();
        drop(got);
        took += begun.elapsed();
        answer.took(took);
        Ok(())
    }

    fn exists(&mut self, point: Point) -> Done<Answer> {
        let names = self.names(point, 0);
        let keys = self.keys(&names);
        // Every second one is there.
        let there: Vec<Name> = names.iter().copied().step_by(2).collect();
        let mut answer = Answer::default();
        for part in there.chunks(BUFFERS) {
            answer.failed += self.put_into(false, part, Class::Normal)?.1;
        }
        for _ in 0..point.calls {
            let begun = Instant::now();
            let found = self.near.exists(&keys)?;
            answer.took(begun.elapsed());
            let wrong = found.iter().enumerate().filter(|(at, found)| **found != (at % 2 == 0));
            answer.wrong += wrong.count();
        }
        Ok(answer)
    }
}

fn greatest_common_divisor(a: usize, b: usize) -> usize {
    if b == 0 { a } else { greatest_common_divisor(b, a % b) }
}

/// Plain loops with the same buffers.
struct Limits {
    contents: Contents,
    memory: SharedMemory,
    at: usize,
    stream: TcpStream,
    target: Vec<u8>,
}

impl Limits {
    fn new(bytes: usize) -> Done<Limits> {
        let memory = SharedMemory::create("kvasir-copies", ARENA_BYTES, Prefault::Yes)?;
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let stream = TcpStream::connect(listener.local_addr()?)?;
        let (server, _) = listener.accept()?;
        for end in [&stream, &server] {
            end.set_nodelay(true)?;
        }
        let memory_there = vec![7; bytes * BUFFERS];
        std::thread::spawn(move || send_what_is_asked_for(server, &memory_there));
        let target = vec![0; bytes * BUFFERS];
        Ok(Limits { contents: Contents::new(bytes), memory, at: 0, stream, target })
    }

    fn measure(&mut self, point: Point) -> Done<Answer> {
        let mut answer = Answer::default();
        for _ in 0..point.calls {
            let begun = Instant::now();
            match point.what {
                What::Put => {
                    for buffer in &self.contents.buffers[..point.batch] {
                        if self.at + buffer.len() > self.memory.len() {
                            self.at = 0;
                        }
                        self.memory.copy_from(self.at, buffer)?;
                        self.at += buffer.len();
                    }
                }
                What::GetCopy => {
                    for buffer in &self.contents.buffers[..point.batch] {
                        self.target[..buffer.len()].copy_from_slice(buffer);
                    }
                }
                What::GetFar => {
                    let wanted = point.batch * point.bytes;
                    self.stream.write_all(&(wanted as u64).to_le_bytes())?;
                    self.stream.read_exact(&mut self.target[..wanted])?;
                }
                _ => return Err("there is no such limit".into()),
            }
            answer.took(begun.elapsed());
        }
        Ok(answer)
    }
}

/// Until the other end has gone.
fn send_what_is_asked_for(mut stream: TcpStream, memory: &[u8]) {
    let mut wanted = [0; 8];
    while stream.read_exact(&mut wanted).is_ok() {
        let wanted = (u64::from_le_bytes(wanted) as usize).min(memory.len());
        if stream.write_all(&memory[..wanted]).is_err() {
            return;
        }
    }
}
