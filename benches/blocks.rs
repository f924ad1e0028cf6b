//! What a block costs the node that keeps it: bytes of memory beside its pages, and time.
//!
//! `cargo bench -p kvasir-blocks --bench blocks` fills a node's block table with `BLOCKS` blocks in chains of
//! `CHAIN`, and prints
//!
//! - bytes of metadata a block: what was allocated since the empty table, asked of a counting allocator, so
//!   without what the allocator itself adds, for pages of one run and for those of 61 layers that lie apart;
//! - the same of blocks that are on the SSD alone, and how long it takes to know them again after a start;
//! - microseconds for a prompt of `CHAIN` blocks: to reserve it where slots are free, and in a full table,
//!   which evicts as many; to find and pin it where it is cached; and to give it back.
//!
//! Expected: under 128 bytes a block, and under 200 µs to reserve 1,000 blocks.
#![allow(clippy::print_stdout, reason = "its output is its purpose")]
#![allow(clippy::disallowed_methods, reason = "the core takes time from outside; this measures it")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use kvasir_blocks::moving::pages::Pages;
use kvasir_blocks::{Allocate, AttachEpoch, Blocks, Eviction, Options, SsdBlock, SsdSize};
use kvasir_proto::{BlockKey, Class, Namespace, Share, Side, SlotLayout, SlotRun, TxId};

const BLOCKS: u32 = 1_000_000;
const CHAIN: u32 = 1_000;
const ROUNDS: usize = 400;
const BLOCK_TOKENS: u32 = 64;

/// Counts the bytes that are allocated now.
struct Counting;

static ALLOCATED: AtomicUsize = AtomicUsize::new(0);

// SAFETY: what the system's allocator does; only numbers are added.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATED.fetch_add(layout.size(), Ordering::Relaxed);
        // SAFETY: as the caller promises.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        ALLOCATED.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: as the caller promises.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn main() {
    println!("µs of {CHAIN} blocks as p50 / p99");
    println!(
        "| eviction | runs | bytes a block | reserve, free | reserve, full | pin | give back |"
    );
    println!("| --- | ---: | ---: | ---: | ---: | ---: | ---: |");
    for (eviction, name, runs) in [
        (Eviction::Lru, "lru", 1),
        (Eviction::HitDensity, "hit-density", 1),
        (Eviction::HitDensity, "hit-density", 61),
    ] {
        let measured = Table::new(eviction, runs).measure();
        let times = measured.times.map(|times| format!("{:.0} / {:.0}", times.0, times.1));
        println!("| {name} | {runs} | {:.1} | {} |", measured.bytes, times.join(" | "));
    }
    let (bytes, seconds) = on_ssd();
    println!("on the SSD alone: {bytes:.1} bytes a block; known again after {seconds:.2} s");
}

/// Bytes a block that is on the SSD alone, and the seconds until all are known after a start.
fn on_ssd() -> (f64, f64) {
    let chain = |chain: u32| {
        (0..CHAIN).map(move |block| SsdBlock {
            key: key(chain, block),
            namespace: Namespace([7; 16]),
            parent: block.checked_sub(1).map(|before| key(chain, before)),
            class: Class::Normal,
            mark: None,
            layout: 1,
            bytes: 1 << 20,
        })
    };
    let blocks: Vec<SsdBlock> = (0..BLOCKS / CHAIN).flat_map(chain).collect();
    let room = SsdSize { bytes_max: u64::MAX, context_bytes_max: 0, tenant_bytes_max: 0 };
    let mut table = Table::new(Eviction::default(), 1);
    let without = ALLOCATED.load(Ordering::Relaxed) - blocks.len() * size_of::<SsdBlock>();
    let began = Instant::now();
    table.blocks.ssd_ready(room, blocks);
    table.drain();
    let seconds = began.elapsed().as_secs_f64();
    assert_eq!(table.blocks.counts().ssd_blocks, BLOCKS, "all chains are whole");
    let bytes = (ALLOCATED.load(Ordering::Relaxed) - without) as f64;
    (bytes / f64::from(BLOCKS), seconds)
}

struct Measured {
    bytes: f64,
    /// p50 and p99 of reserving in free slots, of reserving where others go, of pinning, and of giving back.
    times: [(f64, f64); 4],
}

struct Table {
    blocks: Blocks,
    layout: Arc<SlotLayout>,
    empty_bytes: usize,
    chains: u32,
    shares: u64,
    now_ms: u64,
}

/// Keys are hashes; these look like some.
fn key(chain: u32, block: u32) -> BlockKey {
    let number = u64::from(chain) << 32 | u64::from(block);
    let mix = |seed: u64| {
        let mixed = (number ^ seed).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        (mixed ^ (mixed >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9) ^ (number << 1)
    };
    let halves = u128::from(mix(1)) << 64 | u128::from(mix(2));
    BlockKey(halves.to_le_bytes())
}

impl Table {
    fn new(eviction: Eviction, runs: u64) -> Self {
        let empty_bytes = ALLOCATED.load(Ordering::Relaxed);
        let options = Options {
            slots: BLOCKS,
            block_tokens: BLOCK_TOKENS,
            eviction,
            // These are bounded by themselves, and not by the blocks.
            event_log_max: 0,
            finished_max: 0,
            ..Options::default()
        };
        let run = |at| vec![SlotRun { offset_bytes: 64 * at, length_bytes: 64 }];
        let layers: Vec<Vec<SlotRun>> = (0..runs).map(run).collect();
        let layout = Arc::new(SlotLayout::new(BLOCK_TOKENS, 64 * runs, layers).expect("a layout"));
        let blocks = Blocks::new(options);
        Table { blocks, layout, empty_bytes, chains: 0, shares: 0, now_ms: 0 }
    }

    fn request(&mut self, chain: u32) -> Allocate {
        self.shares += 1;
        self.now_ms += 10;
        let tx = TxId { conductor_incarnation: 1, serial: self.shares };
        Allocate {
            share: Share { tx, side: Side::Prefill },
            namespace: Namespace([7; 16]),
            keys: (0..CHAIN).map(|block| key(chain, block)).collect(),
            // A token more than the blocks have, which is computed.
            prompt_tokens: CHAIN * BLOCK_TOKENS + 1,
            lease_ms: 60_000,
            fetch_until_block: 0,
            has_remote_writer: false,
            is_ephemeral: false,
            leaves_ssd: false,
        }
    }

    fn drain(&mut self) {
        while self.blocks.poll_action().is_some() {}
    }

    /// Microseconds to reserve or pin, and to give back.
    fn serve(&mut self, chain: u32) -> (f64, f64) {
        let request = self.request(chain);
        let began = Instant::now();
        let got = self.blocks.allocate(self.now_ms, &request).expect("there is room");
        let taken = began.elapsed();
        self.drain();
        self.blocks.bind(request.share, AttachEpoch(1)).expect("an engine takes it");
        let mut pages = Pages::new(Arc::clone(&self.layout), &got.pages);
        for page in got.held_blocks..CHAIN {
            pages.finish_layers(page, 1, 0..pages.layers(), |_, run| run.offset_bytes);
            let checksum = pages.checksum(page).expect("all of it is hashed");
            self.blocks.commit_page(request.share, page, checksum).expect("it is written");
        }
        drop(pages);
        self.drain();
        let began = Instant::now();
        self.blocks.release(self.now_ms, request.share).expect("it is bound");
        let given_back = began.elapsed();
        self.drain();
        (taken.as_secs_f64() * 1e6, given_back.as_secs_f64() * 1e6)
    }

    fn fresh(&mut self) -> (f64, f64) {
        self.chains += 1;
        self.serve(self.chains)
    }

    fn measure(mut self) -> Measured {
        let mut free = Vec::new();
        while self.blocks.counts().committed + CHAIN < BLOCKS {
            free.push(self.fresh().0);
        }
        free.drain(..free.len().saturating_sub(ROUNDS));
        let committed = self.blocks.counts().committed;
        let bytes = (ALLOCATED.load(Ordering::Relaxed) - self.empty_bytes) as f64;
        // From here on each evicts as many as it brings.
        for _ in 0..3 {
            self.fresh();
        }
        let (reserve, give_back): (Vec<f64>, Vec<f64>) = (0..ROUNDS).map(|_| self.fresh()).unzip();
        let newest = self.chains;
        let pin = (0..ROUNDS as u32).map(|back| self.serve(newest - back % 300).0).collect();
        Measured {
            bytes: bytes / f64::from(committed),
            times: [free, reserve, pin, give_back].map(p50_and_p99),
        }
    }
}

fn p50_and_p99(mut times: Vec<f64>) -> (f64, f64) {
    times.sort_by(f64::total_cmp);
    (times[times.len() / 2], times[times.len() * 99 / 100])
}
