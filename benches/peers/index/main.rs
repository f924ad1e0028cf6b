//! Lookups per second, memory and events per second of the shadow index and of dynamo-kv-router's
//! `ConcurrentRadixTreeCompressed`, interleaved, on the same chains and with equal answers.
//!
//! Usage: `index [rounds]`. Prints Markdown. Hashing tokens into keys is in neither side's time; the keys of a lookup
//! are near as after that.
#![allow(clippy::print_stdout, reason = "its output is its purpose")]

mod ours;
mod peer;
mod workload;

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

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
    alone: Vec<[f64; 3]>,
    beside_events: Vec<[f64; 3]>,
    events_per_s: Vec<f64>,
    filled_per_s: Vec<f64>,
    bytes_per_entry: f64,
}

/// An index with the workload in it.
trait Index: Sync {
    type Query: Clone + Default;
    /// The longest prefix on any node, and on how many nodes there is one.
    fn lookup(&self, query: &Self::Query) -> (u32, usize);
    /// Puts in the passing chains that `pace` gives, and takes out each when half of them have come after it, until
    /// told to stop.
    fn churn(&self, pace: &mut Pace<'_>);
}

/// Which of the passing chains comes next, and when.
struct Pace<'a> {
    stop: &'a AtomicBool,
    began: Instant,
    chains: usize,
    chain_blocks: usize,
    given: usize,
}

impl Pace<'_> {
    /// The chain to put in and the one to take out, no earlier than [`EVENTS_PER_S`] allows.
    fn next(&mut self) -> Option<(usize, usize)> {
        while self.events() > self.began.elapsed().as_secs_f64() * EVENTS_PER_S {
            std::hint::spin_loop();
        }
        let at = self.given % self.chains;
        self.given += 1;
        (!self.stop.load(Ordering::Relaxed)).then_some((at, (at + self.chains / 2) % self.chains))
    }

    /// Blocks put in and blocks taken out.
    fn events(&self) -> f64 {
        (2 * self.given * self.chain_blocks) as f64
    }
}

const ENTRIES: usize = 1_000_000;
/// Block events a second while lookups go on, at most.
const EVENTS_PER_S: f64 = 10e6;
/// All queries are asked again until so much time has passed: so that events do come meanwhile.
const LOOKED_UP_FOR: Duration = Duration::from_millis(500);

fn main() {
    let rounds = std::env::args().nth(1).map_or(5, |text| text.parse().expect("a number"));
    println!(
        "| nodes, blocks | index | lookups/s | p50 us | p99 us | beside events | p50 us | p99 us \
         | these, M blocks/s | filling, M blocks/s | bytes per entry |"
    );
    println!("| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |");
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
            measure(&our_index, &our_queries, &workload, &mut ours);
            measure(&peer_index, &peer_queries, &workload, &mut peer);
            ours::build(&workload, &mut ours);
            peer::build(&workload, &mut peer);
        }
        print(nodes, blocks, "kvasir", &ours);
        print(nodes, blocks, "dynamo-kv-router", &peer);
        if differing > 0 {
            println!("{differing} of {} answers differ", our_queries.len());
        }
    }
}

/// Lookups a second, and what half and 99 in 100 of them took at most, in us.
fn look_up<I: Index>(index: &I, queries: &[I::Query]) -> [f64; 3] {
    let mut took_us = Vec::with_capacity(64 * queries.len());
    let mut given = I::Query::default();
    let began = Instant::now();
    while began.elapsed() < LOOKED_UP_FOR {
        for query in queries {
            given.clone_from(query);
            let before = Instant::now();
            std::hint::black_box(index.lookup(&given));
            took_us.push(before.elapsed().as_nanos() as f64 / 1e3);
        }
    }
    let per_s = took_us.len() as f64 * 1e6 / took_us.iter().sum::<f64>();
    took_us.sort_by(f64::total_cmp);
    [per_s, took_us[took_us.len() / 2], took_us[took_us.len() * 99 / 100]]
}

fn measure<I: Index>(index: &I, queries: &[I::Query], workload: &Workload, side: &mut Side) {
    side.alone.push(look_up(index, queries));
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let began = Instant::now();
        let chains = workload.passing.len();
        let chain_blocks = workload.passing[0].len();
        let mut pace = Pace { stop: &stop, began, chains, chain_blocks, given: 0 };
        let events = scope.spawn(move || {
            index.churn(&mut pace);
            pace.events() / began.elapsed().as_secs_f64()
        });
        side.beside_events.push(look_up(index, queries));
        stop.store(true, Ordering::Relaxed);
        side.events_per_s.push(events.join().expect("the writer ends well"));
    });
}

fn print(nodes: u64, blocks: usize, name: &str, side: &Side) {
    let median = |mut values: Vec<f64>| {
        values.sort_by(f64::total_cmp);
        values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
    };
    let of = |looked_up: &[[f64; 3]]| {
        let [per_s, p50_us, p99_us] =
            [0, 1, 2].map(|at| median(looked_up.iter().map(|all| all[at]).collect()));
        format!("{:.0} k | {p50_us:.2} | {p99_us:.2}", per_s / 1e3)
    };
    println!(
        "| {nodes}, {blocks} | {name} | {} | {} | {:.1} | {:.1} | {:.1} |",
        of(&side.alone),
        of(&side.beside_events),
        median(side.events_per_s.clone()) / 1e6,
        median(side.filled_per_s.clone()) / 1e6,
        side.bytes_per_entry,
    );
}
