//! What a copy with its checksum costs: buffers of 128 KiB, copied one after the other into a GiB of memory.
//!
//!     cargo run --release -p kvasir-checksum --example copy_and_sum

use std::hint::black_box;
use std::io::Write;
use std::time::Instant;

use kvasir_checksum::{Checksum, Stores};
use xxhash_rust::xxh3::Xxh3;

const BUFFER_BYTES: usize = 128 << 10;
const MEMORY_BYTES: usize = 1 << 30;
/// Well inside the first level of cache with their copy.
const PIECE_BYTES: usize = 8 << 10;
/// As slots are.
const ALIGN_BYTES: usize = 4096;
const ROUNDS: usize = 3;

fn fused(source: &[u8], target: &mut [u8], stores: Stores) {
    let mut sum = Checksum::new();
    // SAFETY: two slices of one length.
    unsafe { sum.add_and_copy(source.as_ptr(), target.as_mut_ptr(), source.len(), stores) };
    black_box(sum.sum());
}

fn main() -> std::io::Result<()> {
    let sources: Vec<Vec<u8>> = (0..32).map(|at| vec![at; BUFFER_BYTES]).collect();
    let mut memory = vec![1; MEMORY_BYTES + ALIGN_BYTES];
    let aligned = memory.as_ptr().align_offset(ALIGN_BYTES);
    let memory = &mut memory[aligned..aligned + MEMORY_BYTES];
    type Way = (&'static str, fn(&[u8], &mut [u8]));
    let ways: [Way; 5] = [
        ("copy alone", |source, target| target.copy_from_slice(source)),
        ("copy, then the library's checksum, by pieces", |source, target| {
            let mut sum = Xxh3::new();
            for (from, to) in source.chunks(PIECE_BYTES).zip(target.chunks_mut(PIECE_BYTES)) {
                to.copy_from_slice(from);
                sum.update(from);
            }
            black_box(sum.digest());
        }),
        ("in one pass", |source, target| fused(source, target, Stores::Cached)),
        ("in one pass, past the caches", |source, target| fused(source, target, Stores::Streaming)),
        ("the checksum alone, of memory", |_, target| {
            black_box(kvasir_checksum::checksum(target));
        }),
    ];
    let mut out = std::io::stdout().lock();
    for (name, way) in ways {
        let mut best = 0.0_f64;
        for _ in 0..ROUNDS {
            let began = Instant::now();
            for (at, target) in memory.chunks_exact_mut(BUFFER_BYTES).enumerate() {
                way(&sources[at % sources.len()], target);
            }
            best = best.max(MEMORY_BYTES as f64 / began.elapsed().as_secs_f64() / 1e9);
        }
        writeln!(out, "{best:6.2} GB/s  {name}")?;
    }
    Ok(())
}
