//! foyer's hybrid cache, which speaks the lines that `protocol.py` describes: `foyer_side DIR psync|io_uring`.
//!
//! As its documentation says for values that are to be on the disk: written when they are inserted, past the
//! page cache; a put is over when the disk has all of its batch, since foyer else drops what comes too fast.

use std::error::Error;
use std::io::Write as _;
use std::time::{Duration, Instant};

use bytes::Bytes;
use foyer::{
    BlockEngineConfig, DeviceBuilder, FsDeviceBuilder, HybridCache, HybridCacheBuilder, HybridCachePolicy,
    IoEngineConfig, PsyncIoEngineConfig, UringIoEngineConfig,
};
use serde::{Deserialize, Serialize};

type Done<T> = Result<T, Box<dyn Error>>;

const MEMORY_BYTES: usize = 256 << 20;
const DISK_BYTES: usize = 4 << 30;
const STAMP_BYTES: usize = 8;

#[derive(Deserialize)]
struct Point {
    what: String,
    bytes: usize,
    batch: usize,
    calls: usize,
    seed: u64,
}

#[derive(Default, Serialize)]
struct Answer {
    seconds: f64,
    latencies_us: Vec<f64>,
    wrong: usize,
    failed: usize,
}

impl Answer {
    fn took(&mut self, time: Duration) {
        self.seconds += time.as_secs_f64();
        self.latencies_us.push(time.as_secs_f64() * 1e6);
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
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    runtime.block_on(async {
        let device = FsDeviceBuilder::new(dir).with_capacity(DISK_BYTES).with_direct(true).build()?;
        let blocks = BlockEngineConfig::new(device)
            .with_block_size(64 << 20)
            .with_buffer_pool_size(256 << 20)
            .with_submit_queue_size_threshold(512 << 20);
        let cache: HybridCache<u64, Bytes> = HybridCacheBuilder::new()
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
            let answer = match point.what.as_str() {
                "put_kept" => put(&cache, &point).await,
                "get_ssd" => get(&cache, &point).await,
                "remove" => Ok(remove(&cache, &point)),
                _ => Err("not measured of foyer".into()),
            };
            match answer {
                Ok(answer) => println!("POINT {}", serde_json::to_string(&answer)?),
                Err(error) => println!("POINT {}", serde_json::json!({"error": error.to_string()})),
            }
            std::io::stdout().flush()?;
        }
        Ok(cache.close().await?)
    })
}

fn name(seed: u64, place: usize) -> u64 {
    seed << 32 | place as u64
}

async fn put(cache: &HybridCache<u64, Bytes>, point: &Point) -> Done<Answer> {
    let mut answer = Answer::default();
    let base: Vec<u8> = (0..point.bytes).map(|byte| (byte * 31 + byte / 251) as u8).collect();
    for call in 0..point.calls {
        let values = (0..point.batch).map(|object| {
            let name = name(point.seed, call * point.batch + object);
            let mut value = base.clone();
            value[..STAMP_BYTES].copy_from_slice(&name.to_le_bytes());
            value[point.bytes - STAMP_BYTES..].copy_from_slice(&name.to_le_bytes());
            (name, Bytes::from(value))
        });
        let values: Vec<_> = values.collect();
        let begun = Instant::now();
        for (name, value) in values {
            cache.insert(name, value);
        }
        cache.storage().wait().await;
        answer.took(begun.elapsed());
    }
    Ok(answer)
}

fn remove(cache: &HybridCache<u64, Bytes>, point: &Point) -> Answer {
    let mut answer = Answer::default();
    let begun = Instant::now();
    (0..point.calls * point.batch).for_each(|place| cache.remove(&name(point.seed, place)));
    answer.took(begun.elapsed());
    answer
}

async fn get(cache: &HybridCache<u64, Bytes>, point: &Point) -> Done<Answer> {
    let mut answer = Answer::default();
    let all = point.calls * point.batch;
    // Every place once: the step and their number have no common divisor but 1.
    let step = (all * 5 / 8..).find(|step| greatest_common_divisor(*step, all) == 1).unwrap_or(1);
    for call in 0..point.calls {
        let place = |object: usize| (call * point.batch + object) * step % all;
        let names: Vec<_> = (0..point.batch).map(|object| name(point.seed, place(object))).collect();
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
                Some(entry) => {
                    let value = entry.value();
                    let stamp = name.to_le_bytes();
                    let is_sound = value.len() == point.bytes && value.starts_with(&stamp) && value.ends_with(&stamp);
                    answer.wrong += usize::from(!is_sound);
                }
            }
        }
    }
    Ok(answer)
}

fn greatest_common_divisor(a: usize, b: usize) -> usize {
    if b == 0 { a } else { greatest_common_divisor(b, a % b) }
}
