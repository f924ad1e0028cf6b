//! foyer's hybrid cache, which speaks the lines that `protocol.py` describes: `foyer_side DIR psync|io_uring [sync]`.
//!
//! As its documentation says for values that are to be on the disk: written when they are inserted, past the
//! page cache; a put is over when the disk has all of its batch, since foyer else drops what comes too fast. With
//! `sync` it is over when the files that it has written are flushed as well, which foyer itself never does.
//!
//! It lives in the process of whoever uses it: two clients are two tasks here.

use std::error::Error;
use std::fs::File;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

use bytes::Bytes;
use foyer::{
    BlockEngineConfig, DeviceBuilder, FsDeviceBuilder, HybridCache, HybridCacheBuilder,
    HybridCachePolicy, HybridCacheProperties, IoEngineConfig, Location, PsyncIoEngineConfig,
    UringIoEngineConfig,
};
use serde::{Deserialize, Serialize};

type Done<T> = Result<T, Box<dyn Error + Send + Sync>>;
type Cache = HybridCache<u64, Bytes>;

const MEMORY_BYTES: usize = 256 << 20;
const DISK_BYTES: usize = 4 << 30;
const STAMP_BYTES: usize = 8;
/// Of what is got from memory.
const OBJECTS: usize = 32;
/// More than the time of a file lies behind what is written to it.
const CLOCK_TICK: Duration = Duration::from_millis(20);

#[derive(Clone, Deserialize)]
struct Point {
    what: String,
    bytes: usize,
    batch: usize,
    calls: usize,
    seed: u64,
    /// Tasks at once.
    clients: u64,
}

#[derive(Default, Serialize)]
struct Answer {
    seconds: f64,
    latencies_us: Vec<f64>,
    wrong: usize,
    failed: usize,
    /// Objects a second, of all clients.
    objects_s: f64,
}

impl Answer {
    fn took(&mut self, time: Duration) {
        self.seconds += time.as_secs_f64();
        self.latencies_us.push(time.as_secs_f64() * 1e6);
    }
}

/// The files of the cache, where they are to be flushed.
struct Files {
    dir: PathBuf,
    flushed: SystemTime,
}

impl Files {
    fn new(dir: &Path) -> Self {
        Files { dir: dir.to_owned(), flushed: SystemTime::UNIX_EPOCH }
    }

    /// Flushes those that were written since the last time.
    fn flush(&mut self) -> Done<()> {
        let now = SystemTime::now();
        for entry in std::fs::read_dir(&self.dir)? {
            let entry = entry?;
            let metadata = entry.metadata()?;
            if metadata.is_file() && metadata.modified()? + CLOCK_TICK >= self.flushed {
                File::open(entry.path())?.sync_data()?;
            }
        }
        self.flushed = now;
        Ok(())
    }
}

fn main() -> Done<()> {
    let mut arguments = std::env::args().skip(1);
    let dir = arguments.next().ok_or("which directory?")?;
    let engine: Box<dyn IoEngineConfig> = match arguments.next().as_deref() {
        Some("psync") => Box::new(PsyncIoEngineConfig::new()),
        Some("io_uring") => Box::new(UringIoEngineConfig::new()),
        _ => return Err("psync or io_uring?".into()),
    };
    let syncs = match arguments.next().as_deref() {
        None => false,
        Some("sync") => true,
        Some(_) => return Err("sync or nothing?".into()),
    };
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    runtime.block_on(async {
        let device =
            FsDeviceBuilder::new(&dir).with_capacity(DISK_BYTES).with_direct(true).build()?;
        let blocks = BlockEngineConfig::new(device)
            .with_block_size(64 << 20)
            .with_buffer_pool_size(256 << 20)
            .with_submit_queue_size_threshold(512 << 20);
        let cache: Cache = HybridCacheBuilder::new()
            .with_policy(HybridCachePolicy::WriteOnInsertion)
            .memory(MEMORY_BYTES)
            .with_weighter(|_: &u64, value: &Bytes| value.len())
            .storage()
            .with_io_engine_config(engine)
            .with_engine_config(blocks)
            .build()
            .await?;
        println!("READY");
        for line in std::io::stdin().lines() {
            let point: Point = serde_json::from_str(&line?)?;
            let mut clients = Vec::new();
            for client in 0..point.clients {
                let files = syncs.then(|| Files::new(Path::new(&dir)));
                clients.push(tokio::spawn(measure(cache.clone(), point.clone(), client, files)));
            }
            let mut answer = Ok(Answer::default());
            for client in clients {
                answer = together(answer, client.await?, &point);
            }
            match answer {
                Ok(answer) => println!("POINT {}", serde_json::to_string(&answer)?),
                Err(error) => println!("POINT {}", serde_json::json!({"error": error.to_string()})),
            }
            std::io::stdout().flush()?;
        }
        Ok(cache.close().await?)
    })
}

async fn measure(cache: Cache, point: Point, client: u64, files: Option<Files>) -> Done<Answer> {
    match point.what.as_str() {
        "put_kept" => put(&cache, &point, client, files).await,
        "get" => get_from_memory(&cache, &point, client).await,
        "get_ssd" => get(&cache, &point, client).await,
        "remove" => Ok(remove(&cache, &point, client)),
        _ => Err("not measured of foyer".into()),
    }
}

/// Rates add up, and latencies are of all.
fn together(all: Done<Answer>, one: Done<Answer>, point: &Point) -> Done<Answer> {
    let (mut all, mut one) = (all?, one?);
    all.objects_s += (one.latencies_us.len() * point.batch) as f64 / one.seconds;
    all.seconds += one.seconds;
    all.latencies_us.append(&mut one.latencies_us);
    all.wrong += one.wrong;
    all.failed += one.failed;
    Ok(all)
}

fn name(seed: u64, client: u64, place: usize) -> u64 {
    seed << 32 | client << 28 | place as u64
}

fn base(point: &Point) -> Vec<u8> {
    (0..point.bytes).map(|byte| (byte * 31 + byte / 251) as u8).collect()
}

fn stamped(base: &[u8], name: u64) -> Bytes {
    let mut value = base.to_vec();
    value[..STAMP_BYTES].copy_from_slice(&name.to_le_bytes());
    value[base.len() - STAMP_BYTES..].copy_from_slice(&name.to_le_bytes());
    Bytes::from(value)
}

fn is_sound(value: &Bytes, name: u64, point: &Point) -> bool {
    let stamp = name.to_le_bytes();
    value.len() == point.bytes && value.starts_with(&stamp) && value.ends_with(&stamp)
}

/// The task stays on its thread while it flushes: nobody else has anything to do meanwhile.
async fn put(cache: &Cache, point: &Point, client: u64, mut files: Option<Files>) -> Done<Answer> {
    let mut answer = Answer::default();
    let base = base(point);
    for call in 0..point.calls {
        let named = |object| name(point.seed, client, call * point.batch + object);
        let values: Vec<_> =
            (0..point.batch).map(named).map(|name| (name, stamped(&base, name))).collect();
        let begun = Instant::now();
        for (name, value) in values {
            cache.insert(name, value);
        }
        cache.storage().wait().await;
        if let Some(files) = &mut files {
            files.flush()?;
        }
        answer.took(begun.elapsed());
    }
    Ok(answer)
}

/// Gets of what is in memory. As of Kvasir, before each another object is put, which stays in memory too.
async fn get_from_memory(cache: &Cache, point: &Point, client: u64) -> Done<Answer> {
    let mut answer = Answer::default();
    let base = base(point);
    let put = |place| {
        let name = name(point.seed, client, place);
        let in_memory = HybridCacheProperties::default().with_location(Location::InMem);
        cache.insert_with_properties(name, stamped(&base, name), in_memory);
        name
    };
    let names: Vec<u64> = (0..OBJECTS).map(put).collect();
    for call in 0..point.calls {
        put(OBJECTS + call);
        let name = names[call % OBJECTS];
        let begun = Instant::now();
        let got = cache.get(&name).await?;
        let took = begun.elapsed();
        match &got {
            None => answer.failed += 1,
            Some(entry) => answer.wrong += usize::from(!is_sound(entry.value(), name, point)),
        }
        let begun = Instant::now();
        drop(got);
        answer.took(took + begun.elapsed());
    }
    Ok(answer)
}

fn remove(cache: &Cache, point: &Point, client: u64) -> Answer {
    let mut answer = Answer::default();
    let begun = Instant::now();
    (0..point.calls * point.batch).for_each(|place| cache.remove(&name(point.seed, client, place)));
    answer.took(begun.elapsed());
    answer
}

async fn get(cache: &Cache, point: &Point, client: u64) -> Done<Answer> {
    let mut answer = Answer::default();
    let all = point.calls * point.batch;
    // Every place once: the step and their number have no common divisor but 1.
    let step = (all * 5 / 8..).find(|step| greatest_common_divisor(*step, all) == 1).unwrap_or(1);
    for call in 0..point.calls {
        let place = |object: usize| (call * point.batch + object) * step % all;
        let names: Vec<_> =
            (0..point.batch).map(|object| name(point.seed, client, place(object))).collect();
        let begun = Instant::now();
        let gets: Vec<_> = names.iter().map(|name| cache.get(name)).collect();
        let mut got = Vec::with_capacity(names.len());
        for get in gets {
            got.push(get.await?);
        }
        answer.took(begun.elapsed());
        for (entry, name) in got.iter().zip(&names) {
            match entry {
                None => answer.failed += 1,
                Some(entry) => answer.wrong += usize::from(!is_sound(entry.value(), *name, point)),
            }
        }
    }
    Ok(answer)
}

fn greatest_common_divisor(a: usize, b: usize) -> usize {
    if b == 0 { a } else { greatest_common_divisor(b, a % b) }
}
