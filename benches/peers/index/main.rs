//! Lookups per second, memory and events per second of the shadow index and of dynamo-kv-router's
//! `ConcurrentRadixTreeCompressed`, interleaved, on the same chains and with equal answers.
//!
//! Usage: `index [rounds]`. Prints Markdown. Hashing tokens into keys is in neither side's time.
#![allow(clippy::print_stdout, reason = "its output is its purpose")]

mod ours;
mod peer;
mod workload;

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use workload::Workload;

struct Counting;

static BYTES: AtomicUsize = AtomicUsize::new(0);

// SAFETY: hands everything to the system's allocator as it came, and counts.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        BYTES.fetch_add(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller's promises are passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        BYTES.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller's promises are passed on.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

pub fn bytes_in_use() -> usize {
    BYTES.load(Ordering::Relaxed)
}

/// What one side came to in one cell.
#[derive(Debug, Default)]
struct Side {
    lookups_per_s: Vec<f64>,
    p50_us: Vec<f64>,
    p99_us: Vec<f64>,
    beside_events_per_s: Vec<f64>,
    blocks_per_s: Vec<f64>,
    bytes_per_entry: f64,
}

/// An index with the workload in it.
trait Index: Sync {
    type Query;
    /// The longest prefix on any node, and on how many nodes there is one.
    fn lookup(&self, query: &Self::Query) -> (u32, usize);
    /// Takes out what a few chains have and puts it back, until told to stop; answers with the
    /// number of block events a second.
    fn churn(&self, stop: &std::sync::atomic::AtomicBool) -> f64;
}

const ENTRIES: usize = 1_000_000;

fn main() {
    let rounds = std::env::args().nth(1).map_or(5, |text| text.parse().expect("a number"));
    println!("| nodes, blocks | index | lookups/s | p50 us | p99 us | while events are applied | events, M blocks/s | bytes per entry |");
    println!("| --- | --- | --- | --- | --- | --- | --- | --- |");
    for (nodes, blocks) in [(8, 100), (64, 100), (8, 1_000), (64, 1_000)] {
        let workload = Workload::new(nodes, ENTRIES, blocks);
        let (mut ours, mut peer) = (Side::default(), Side::default());
        let (our_index, our_queries) = ours::build(&workload, &mut ours);
        let (peer_index, peer_queries) = peer::build(&workload, &mut peer);
        let differing = our_queries
            .iter()
            .zip(&peer_queries)
            .filter(|(a, b)| our_index.lookup(a) != peer_index.lookup(b))
            .count();
        for _ in 0..rounds {
            measure(&our_index, &our_queries, &mut ours);
            measure(&peer_index, &peer_queries, &mut peer);
            ours::build(&workload, &mut ours);
            peer::build(&workload, &mut peer);
        }
        print(nodes, blocks, "kvasir", ours);
        print(nodes, blocks, "dynamo-kv-router", peer);
        if differing > 0 {
            println!("{differing} of {} answers differ", our_queries.len());
        }
    }
}

fn measure<I: Index>(index: &I, queries: &[I::Query], side: &mut Side) {
    let mut took_us = Vec::with_capacity(queries.len());
    let began = Instant::now();
    for query in queries {
        let before = Instant::now();
        std::hint::black_box(index.lookup(query));
        took_us.push(before.elapsed().as_nanos() as f64 / 1e3);
    }
    side.lookups_per_s.push(queries.len() as f64 / began.elapsed().as_secs_f64());
    took_us.sort_by(f64::total_cmp);
    side.p50_us.push(took_us[took_us.len() / 2]);
    side.p99_us.push(took_us[took_us.len() * 99 / 100]);
    let stop = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        let events = scope.spawn(|| index.churn(&stop));
        let began = Instant::now();
        for query in queries {
            std::hint::black_box(index.lookup(query));
        }
        side.beside_events_per_s.push(queries.len() as f64 / began.elapsed().as_secs_f64());
        stop.store(true, Ordering::Relaxed);
        let _ = events.join().expect("the writer ends well");
    });
}

fn print(nodes: u64, blocks: usize, name: &str, side: Side) {
    let median = |mut values: Vec<f64>| {
        values.sort_by(f64::total_cmp);
        values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
    };
    println!(
        "| {nodes}, {blocks} | {name} | {:.0} k | {:.2} | {:.2} | {:.0} k | {:.1} | {:.1} |",
        median(side.lookups_per_s) / 1e3,
        median(side.p50_us),
        median(side.p99_us),
        median(side.beside_events_per_s) / 1e3,
        median(side.blocks_per_s) / 1e6,
        side.bytes_per_entry,
    );
}
