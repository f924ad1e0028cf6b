//! Objects of clients on a node's host: puts, gets and lookups through the public API, with eviction running.
//!
//! `cargo bench -p kvasir-client --bench objects [-- SIZES]` starts a node in this process, and clients of it
//! on threads of their own, one and then two; `SIZES` are bytes of objects, 131072, 1048576 and 4194304
//! where none is given. It prints
//!
//! - puts in batches of 32 (16 from 1 MiB on, 8 from 4 MiB on): GiB/s of the median batch, and as a part of
//!   what plain copies of the same buffers into shared memory of the same size do, measured in turns with them;
//! - single gets, each timed with its pin, the check of its generation and its release: p50 and p99 in µs.
//!   Nothing is copied;
//! - lookups of 1,000 keys a call, half of which are there: millions of keys a second.
//!
//! Expected: puts at 90 % of the copies, gets under 10 µs with both sides polling. Both ends need a core of
//! their own for that: with fewer cores than clients and one, they wait for each other's slices.
#![allow(clippy::print_stdout, reason = "its output is its purpose")]
#![allow(clippy::disallowed_methods, reason = "a bench measures time")]

use std::error::Error;
use std::path::Path;
use std::time::{Duration, Instant};

use kvasir_client::{Client, Key, Object, OpenOptions, Outcome, PutOptions};
use kvasir_store_node::config::Config;
use kvasir_store_node::start;
use kvasir_transfer::memory::{Prefault, SharedMemory};

const ARENA_BYTES: usize = 1 << 30;
/// So often the arena is filled anew: all but the first time something is evicted for every put.
const FILLS: usize = 3;
const GETS: usize = 20_000;
const LOOKUPS: usize = 200;
const LOOKUP_KEYS: usize = 1_000;

fn main() -> Result<(), Box<dyn Error>> {
    // What Cargo passes to every bench begins with a dash.
    let given = std::env::args().skip(1).filter(|argument| !argument.starts_with('-'));
    let mut sizes = given.map(|size| size.parse()).collect::<Result<Vec<usize>, _>>()?;
    if sizes.is_empty() {
        sizes = vec![128 << 10, 1 << 20, 4 << 20];
    }
    println!(
        "| bytes | clients | put GiB/s | copy GiB/s | put / copy | put batch p50 / p99 µs | \
         get p50 / p99 µs | lookup M keys/s |"
    );
    println!("| ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |");
    for bytes in sizes {
        for clients in [1, 2] {
            println!("{}", measure(bytes, clients)?);
        }
    }
    Ok(())
}

fn measure(bytes: usize, clients: usize) -> Result<String, Box<dyn Error>> {
    let dir = tempfile::tempdir()?;
    let any_port = ([127, 0, 0, 1], 0).into();
    let config = Config {
        listen: any_port,
        transfer_listen: any_port,
        attach_dir: dir.path().join("attach"),
        dram_bytes: ARENA_BYTES as u64,
        drain_timeout_ms: 1_000,
        ..Config::default()
    };
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let mut node = runtime.block_on(start(config))?;
    let attach_dir = dir.path().join("attach");
    let opened: Result<Vec<Bench>, Failed> =
        (0..clients).map(|at| Bench::open(&attach_dir, bytes, at, clients)).collect();
    let measured = opened.and_then(|mut benches| {
        all(&mut benches, Bench::puts)?;
        all(&mut benches, Bench::gets)?;
        all(&mut benches, Bench::lookups)?;
        Ok(benches.into_iter().map(|bench| bench.times).collect::<Vec<Times>>())
    });
    runtime.block_on(node.shut_down());
    let all = measured.map_err(|error| -> Box<dyn Error> { error })?;
    let puts: Vec<Duration> = all.iter().flat_map(|times| times.puts.iter().copied()).collect();
    let copies = all.iter().flat_map(|times| times.copies.iter().copied()).collect();
    let batch_bytes = batch(bytes) * bytes;
    let gib = |times: Vec<Duration>| {
        (batch_bytes * clients) as f64 / median(times).as_secs_f64() / f64::from(1 << 30)
    };
    let (put, copy) = (gib(puts.clone()), gib(copies));
    let lookups: f64 = all
        .iter()
        .map(|times| {
            let seconds: f64 = times.lookups.iter().map(Duration::as_secs_f64).sum();
            (times.lookups.len() * LOOKUP_KEYS) as f64 / seconds / 1e6
        })
        .sum();
    let gets = all.iter().flat_map(|times| times.gets.iter().copied()).collect();
    Ok(format!(
        "| {bytes} | {clients} | {put:.2} | {copy:.2} | {:.2} | {} | {} | {lookups:.2} |",
        put / copy,
        quantiles(puts),
        quantiles(gets),
    ))
}

fn batch(bytes: usize) -> usize {
    match bytes {
        0..0x10_0000 => 32,
        0x10_0000..0x40_0000 => 16,
        _ => 8,
    }
}

/// Of every client at once, each on a thread of its own.
fn all(benches: &mut [Bench], phase: fn(&mut Bench) -> Result<(), Failed>) -> Result<(), Failed> {
    std::thread::scope(|scope| {
        let threads: Vec<_> =
            benches.iter_mut().map(|bench| scope.spawn(move || phase(bench))).collect();
        let mut ends = threads.into_iter().map(|thread| thread.join());
        ends.try_for_each(|end| end.unwrap_or_else(|_| Err("a client has panicked".into())))
    })
}

fn median(mut times: Vec<Duration>) -> Duration {
    times.sort();
    times.get(times.len() / 2).copied().unwrap_or_default()
}

fn quantiles(mut times: Vec<Duration>) -> String {
    times.sort();
    let at = |part: f64| {
        let index = ((times.len() - 1) as f64 * part) as usize;
        times.get(index).map_or(0.0, |time| time.as_secs_f64() * 1e6)
    };
    format!("{:.1} / {:.1}", at(0.5), at(0.99))
}

type Failed = Box<dyn Error + Send + Sync>;

/// What one client measured.
#[derive(Default)]
struct Times {
    puts: Vec<Duration>,
    copies: Vec<Duration>,
    gets: Vec<Duration>,
    lookups: Vec<Duration>,
}

struct Bench {
    client: Client,
    /// Which client it is: its objects have names of their own.
    at: usize,
    contents: Vec<Vec<u8>>,
    /// Plain copies go here, as far apart as puts go.
    memory: SharedMemory,
    batches: usize,
    times: Times,
}

impl Bench {
    fn open(attach_dir: &Path, bytes: usize, at: usize, clients: usize) -> Result<Self, Failed> {
        let client = Client::open(&OpenOptions {
            object_bytes_max: bytes as u64,
            polling: Duration::from_millis(1),
            ..OpenOptions::new(attach_dir)
        })?;
        let batch = batch(bytes);
        let contents = (0..batch).map(|at| vec![at as u8; bytes]).collect();
        let share = ARENA_BYTES / clients / (batch * bytes) * (batch * bytes);
        let memory = SharedMemory::create("kvasir-copies", share, Prefault::Yes)?;
        let batches = FILLS * share / (batch * bytes);
        Ok(Bench { client, at, contents, memory, batches, times: Times::default() })
    }

    fn key(&self, batch: usize, object: usize) -> Key {
        self.client.key(format!("{}/{batch}/{object}", self.at).as_bytes())
    }

    fn puts(&mut self) -> Result<(), Failed> {
        let mut copied = 0;
        for batch in 0..self.batches {
            let took = self.put(batch)?;
            self.times.puts.push(took);
            let took = self.copy(&mut copied)?;
            self.times.copies.push(took);
        }
        Ok(())
    }

    /// A batch of its own, held so that it stays whatever the other client does.
    fn held(&self, batch: usize) -> Result<(Vec<Key>, Vec<Option<Object>>), Failed> {
        let keys: Vec<Key> =
            (0..self.contents.len()).map(|object| self.key(batch, object)).collect();
        self.client.remove(&keys)?;
        self.put(batch)?;
        let held = self.client.get(&keys)?;
        match held.iter().all(Option::is_some) {
            true => Ok((keys, held)),
            false => Err("an object that was just put is not there".into()),
        }
    }

    fn gets(&mut self) -> Result<(), Failed> {
        let (keys, _held) = self.held(self.batches)?;
        for round in 0..GETS {
            let key = &keys[round % keys.len()..][..1];
            let begun = Instant::now();
            let got = self.client.get(key)?;
            let there = got[0].as_ref().is_some_and(|object| object.is_current());
            drop(got);
            self.times.gets.push(begun.elapsed());
            if !there {
                return Err("an object that is held is not there".into());
            }
        }
        Ok(())
    }

    fn lookups(&mut self) -> Result<(), Failed> {
        let (held, _held) = self.held(self.batches)?;
        let key = |at: usize| match at % 2 {
            0 => held[at / 2 % held.len()],
            _ => self.key(usize::MAX, at),
        };
        let keys: Vec<Key> = (0..LOOKUP_KEYS).map(key).collect();
        for _ in 0..LOOKUPS {
            let begun = Instant::now();
            let there = self.client.exists(&keys)?;
            self.times.lookups.push(begun.elapsed());
            if there.iter().filter(|there| **there).count() != LOOKUP_KEYS / 2 {
                return Err("a lookup is wrong".into());
            }
        }
        Ok(())
    }

    fn put(&self, batch: usize) -> Result<Duration, Failed> {
        let objects: Vec<(Key, &[u8])> = self
            .contents
            .iter()
            .enumerate()
            .map(|(object, contents)| (self.key(batch, object), &contents[..]))
            .collect();
        let begun = Instant::now();
        let outcomes = self.client.put(&objects, &PutOptions::default())?;
        let took = begun.elapsed();
        match outcomes.iter().all(|outcome| *outcome == Outcome::Stored) {
            true => Ok(took),
            false => Err("an object was not stored".into()),
        }
    }

    fn copy(&self, at: &mut usize) -> Result<Duration, Failed> {
        let begun = Instant::now();
        for contents in &self.contents {
            self.memory.copy_from(*at, contents)?;
            *at = (*at + contents.len()) % self.memory.len();
        }
        Ok(begun.elapsed())
    }
}
