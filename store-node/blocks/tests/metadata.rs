//! A million blocks in one node cost under 128 bytes of metadata each, whatever their layout: counted by the
//! allocator, after engines have written them layer by layer through the legs of their shares.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use kvasir_blocks::moving::pages::Pages;
use kvasir_blocks::{Allocate, AttachEpoch, Blocks, Eviction, Options};
use kvasir_proto::{BlockKey, Namespace, Share, Side, SlotIndex, SlotLayout, SlotRun, TxId};

const BLOCKS: u32 = 1_000_000;
const CHAIN: u32 = 1_000;
const BLOCK_TOKENS: u32 = 64;
const BYTES_MAX: f64 = 128.0;

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

/// Keys are hashes; these look like some.
fn key(chain: u32, block: u32) -> BlockKey {
    let number = u64::from(chain) << 32 | u64::from(block);
    let mix = |seed: u64| {
        let mixed = (number ^ seed).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        (mixed ^ (mixed >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9) ^ (number << 1)
    };
    BlockKey((u128::from(mix(1)) << 64 | u128::from(mix(2))).to_le_bytes())
}

/// Each layer of a page is a run of its own.
fn layout(layers: u64) -> Arc<SlotLayout> {
    let run = |layer| vec![SlotRun { offset_bytes: 64 * layer, length_bytes: 64 }];
    let layers: Vec<Vec<SlotRun>> = (0..layers).map(run).collect();
    let bytes = 64 * layers.len() as u64;
    Arc::new(SlotLayout::new(BLOCK_TOKENS, bytes, layers).expect("a layout"))
}

/// A prompt of `CHAIN` blocks, and a token more, which is computed.
fn prompt(chain: u32) -> Allocate {
    let tx = TxId { conductor_incarnation: 1, serial: chain.into() };
    Allocate {
        share: Share { tx, side: Side::Prefill },
        namespace: Namespace([7; 16]),
        keys: (0..CHAIN).map(|block| key(chain, block)).collect(),
        prompt_tokens: CHAIN * BLOCK_TOKENS + 1,
        lease_ms: 60_000,
        fetch_until_block: 0,
        has_remote_writer: false,
        is_ephemeral: false,
        leaves_ssd: false,
    }
}

fn compute(blocks: &mut Blocks, chain: u32, layout: &Arc<SlotLayout>) {
    let request = prompt(chain);
    let now_ms = u64::from(chain) * 10;
    let got = blocks.allocate(now_ms, &request).expect("there is room");
    blocks.bind(request.share, AttachEpoch(1)).expect("an engine takes it");
    let mut pages = Pages::new(Arc::clone(layout), &got.pages);
    for page in 0..CHAIN {
        let sum = |slot: SlotIndex, run: SlotRun| u64::from(slot.0) << 32 | run.offset_bytes;
        assert!(pages.finish_layers(page, 1, 0..pages.layers(), sum));
        let checksum = pages.checksum(page).expect("all of it is hashed");
        blocks.commit_page(request.share, page, checksum).expect("it is written");
    }
    blocks.release(now_ms, request.share).expect("it is bound");
    while blocks.poll_action().is_some() {}
}

fn bytes_of_block(layers: u64, eviction: Eviction) -> f64 {
    let before = ALLOCATED.load(Ordering::Relaxed);
    let options = Options {
        // One more is computed and not kept.
        slots: BLOCKS + 1,
        block_tokens: BLOCK_TOKENS,
        eviction,
        // These are bounded by themselves, and not by the blocks.
        event_log_max: 0,
        finished_max: 0,
        ..Options::default()
    };
    let (mut blocks, layout) = (Blocks::new(options), layout(layers));
    (0..BLOCKS / CHAIN).for_each(|chain| compute(&mut blocks, chain, &layout));
    assert_eq!(blocks.counts().committed, BLOCKS);
    (ALLOCATED.load(Ordering::Relaxed) - before) as f64 / f64::from(BLOCKS)
}

/// In one test, because others would allocate meanwhile.
#[test]
fn a_million_blocks_cost_under_128_bytes_each_whatever_their_layers() {
    let check = |layers: u64, eviction: Eviction| {
        let bytes = bytes_of_block(layers, eviction);
        assert!(bytes < BYTES_MAX, "{bytes:.1} bytes a block of {layers} runs, {eviction:?}");
        bytes
    };
    let one = check(1, Eviction::HitDensity);
    let many = check(61, Eviction::HitDensity);
    check(61, Eviction::Lru);
    assert!((one - many).abs() < 1.0, "{one:.1} bytes of one run, {many:.1} of 61");
}
