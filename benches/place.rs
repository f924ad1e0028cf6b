//! What a decision costs: a placement, a refusal for each of its reasons, and a whole placement by each policy,
//! which matches a prompt against an index of a million blocks first.
//!
//! `cargo bench -p kvasir-placement --bench place` asks a cluster of 64 instances with 256 requests under way
//! and prints microseconds a decision. Expected: under 3 at the median and 25 at the 99th percentile, and
//! no more for a refusal, since a cluster that is overloaded refuses most. What it costs to make the keys of a
//! prompt is stated apart: it is done beside, once for each prompt.
#![allow(clippy::print_stdout, reason = "its output is its purpose")]
#![allow(clippy::disallowed_methods, reason = "the core takes time from outside; this measures it")]

use std::hint::black_box;
use std::sync::Arc;
use std::time::Instant;

use kvasir_placement::attend::Constants;
use kvasir_placement::{
    BookingId, ClusterView, IndexLimits, InstanceReport, ModelIndex, ModelSpec, NodeIndex,
    Objectives, PlaceRequest, Policy, PrefixMatch, Profile, ReportedLoad, Role, RoutedRows,
    Routing, Selection, ShadowIndex, SsdReads, Steering, Tier, place,
};
use kvasir_proto::{BlockKey, InstanceId, NodeId, keys};

const SIDES: u16 = 32;
const BOOKED: u64 = 256;
const DECISIONS: usize = 200_000;
const BLOCK_TOKENS: usize = 64;
/// Of a prompt in the index: as many as [`request`]'s has.
const BLOCKS: usize = 1_000;
/// Of the blocks of a prompt so many are one of a few beginnings, the rest its own.
const SHARED: usize = 300;
const BEGINNINGS: u64 = 64;
const ENTRIES: usize = 1_000_000;

fn report(node: u16) -> InstanceReport {
    let (name, role) = match node < SIDES {
        true => ("prefill", Role::Prefill),
        false => ("decode", Role::Decode),
    };
    InstanceReport {
        instance_id: InstanceId::from(format!("{name}-{node:02}").as_str()),
        instance_type: "".into(),
        node: NodeIndex(node),
        node_id: NodeId::from(format!("{name}-{node:02}-node").as_str()),
        attachment: (1, 1),
        role,
        current_role: None,
        model: ModelSpec {
            name: Arc::from("m"),
            fingerprint: [7; 32],
            kv_dtype: Arc::from("bf16"),
            vocab_size: 100_000,
            context_tokens: 1_000_000,
            block_tokens: BLOCK_TOKENS as u32,
            block_bytes: 4 << 20,
            layout_hash: 1,
            routed: None,
        },
        running_requests_max: 64,
        slots_total: 100_000,
        slots_available: 100_000,
        ssd_reads: SsdReads::default(),
        draining: false,
        load: ReportedLoad::default(),
    }
}

fn request(tie_seed: u64, now_us: u64) -> PlaceRequest<'static> {
    PlaceRequest {
        model: ModelIndex(0),
        prompt_tokens: 64_000,
        max_tokens: 1_000,
        objectives: Objectives::NONE,
        exclude: &[],
        tie_seed,
        now_us,
        may_route: true,
        is_endless: false,
        steering: Steering::default(),
        chunks: &[],
    }
}

/// A cluster at work, as `change` has its instances.
fn busy(matched: &PrefixMatch, policy: Policy, change: fn(&mut InstanceReport)) -> ClusterView {
    let mut view = ClusterView::new(policy, Profile::default());
    for node in 0..2 * SIDES {
        let mut said = report(node);
        change(&mut said);
        view.report(said, 0);
    }
    for id in 0..BOOKED {
        let now_us = id * 1_000;
        let placement =
            place(&view, matched, &request(id, now_us)).expect("nothing speaks against it");
        view.book(BookingId(id), &placement, now_us);
    }
    view
}

fn split(matched: &PrefixMatch) -> ClusterView {
    busy(matched, Policy::default(), |_| {})
}

/// Instances that do both and may leave a prefix where it is.
fn routing(report: &mut InstanceReport) {
    report.role = Role::Both;
    let rows = RoutedRows { heads: 128, query_bytes: 1_152, partial_bytes: 1_032, layers: 60 };
    report.model.routed = Some(rows);
}

/// What routes cost in a cluster of the paper's kind.
fn routes() -> Option<Routing> {
    let fabric = include_str!("../configs/fabrics/h100-ibgda.toml");
    let kernel = include_str!("../configs/kernels/h100-flashmla.toml");
    let fabric = toml::from_str(fabric).expect("a fabric");
    let kernel = toml::from_str(kernel).expect("a kernel");
    let constants = Constants { fabric, holder: kernel, local: kernel };
    Some(Routing { constants, always: false })
}

/// All instances report so.
fn reported(mut view: ClusterView, change: fn(&mut InstanceReport)) -> ClusterView {
    for node in 0..2 * SIDES {
        let mut said = report(node);
        change(&mut said);
        view.report(said, BOOKED * 1_000);
    }
    view
}

fn measure(
    what: &str,
    view: &ClusterView,
    matched: &PrefixMatch,
    objectives: Objectives,
    is_placed: bool,
) {
    let mut took_ns: Vec<u64> = (0..DECISIONS as u64)
        .map(|seed| {
            let request = PlaceRequest { objectives, ..request(seed, BOOKED * 1_000) };
            let begun = Instant::now();
            let decided = place(view, matched, black_box(&request));
            let decided = black_box(decided);
            // What it allocates is freed elsewhere, and counts too.
            let is_ok = decided.is_ok();
            drop(decided);
            let took_ns = begun.elapsed().as_nanos() as u64;
            assert_eq!(is_ok, is_placed, "{what}");
            took_ns
        })
        .collect();
    took_ns.sort_unstable();
    let us = |part: usize| took_ns[DECISIONS * part / 100] as f64 / 1e3;
    println!("| {what} | {:.2} | {:.2} |", us(50), us(99));
}

/// Keys without a pattern, made quickly.
fn random_keys(seed: u64, count: usize) -> impl Iterator<Item = BlockKey> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let mut word = move || {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb)
    };
    (0..count).map(move |_| BlockKey((u128::from(word()) << 64 | u128::from(word())).to_le_bytes()))
}

/// A million blocks of prompts on all nodes, and those prompts.
fn filled() -> (ShadowIndex, Vec<Vec<BlockKey>>) {
    let mut index = ShadowIndex::new(IndexLimits::default());
    for _ in 0..2 * SIDES {
        index.add_node().expect("room for a node");
    }
    let mut prompts = Vec::new();
    for number in 0.. {
        if index.entries() >= ENTRIES {
            break;
        }
        let beginning = random_keys(number % BEGINNINGS, SHARED);
        let prompt: Vec<_> =
            beginning.chain(random_keys(1_000 + number, BLOCKS - SHARED)).collect();
        // One in five is on two nodes.
        for copy in 0..1 + u64::from(number % 5 == 0) {
            let node = NodeIndex(((number + 7 * copy) % u64::from(2 * SIDES)) as u16);
            index.insert(node, Tier::Dram, &prompt);
        }
        prompts.push(prompt);
    }
    (index, prompts)
}

/// What a request costs whose keys are there: the match and the placement.
fn measure_whole(
    what: &str,
    (policy, change): (Policy, fn(&mut InstanceReport)),
    index: &ShadowIndex,
    prompts: &[Vec<BlockKey>],
) {
    let reader = index.reader();
    let view = busy(&reader.match_prefix(&prompts[0]), policy, change);
    let (mut matches_ns, mut wholes_ns) = (Vec::new(), Vec::new());
    for seed in 0..(DECISIONS / 4) as u64 {
        let prompt = &prompts[(seed as usize * 389) % prompts.len()];
        let begun = Instant::now();
        let matched = reader.match_prefix(black_box(prompt));
        matches_ns.push(begun.elapsed().as_nanos() as u64);
        let decided = black_box(place(&view, &matched, &request(seed, BOOKED * 1_000)));
        let is_ok = decided.is_ok();
        drop((decided, matched));
        wholes_ns.push(begun.elapsed().as_nanos() as u64);
        assert!(is_ok, "{what}");
    }
    let us = |took_ns: &mut Vec<u64>, part: usize| {
        took_ns.sort_unstable();
        took_ns[took_ns.len() * part / 100] as f64 / 1e3
    };
    println!(
        "| {what} | {:.2} | {:.2} | {:.2} | {:.2} |",
        us(&mut matches_ns, 50),
        us(&mut matches_ns, 99),
        us(&mut wholes_ns, 50),
        us(&mut wholes_ns, 99),
    );
}

/// The keys of a prompt, from its tokens.
fn measure_keys() {
    let namespace = keys::namespace(b"model", "bf16", "", "");
    println!("\n| blocks | keys of a prompt, p50 us |\n| --- | ---: |");
    for blocks in [100, BLOCKS] {
        let prompt: Vec<u32> = (0..(blocks * BLOCK_TOKENS) as u32).collect();
        let mut took_ns: Vec<u64> = (0..1_000)
            .map(|_| {
                let begun = Instant::now();
                black_box(keys::chain(namespace, black_box(&prompt), BLOCK_TOKENS));
                begun.elapsed().as_nanos() as u64
            })
            .collect();
        took_ns.sort_unstable();
        println!("| {blocks} | {:.1} |", took_ns[500] as f64 / 1e3);
    }
}

fn main() {
    let held: Vec<_> = (0..2 * SIDES).map(|node| (NodeIndex(node), u32::from(node) * 10)).collect();
    let matched = PrefixMatch::from_pairs(&held);
    let none = Objectives::NONE;
    println!("| decision | p50 us | p99 us |\n| --- | ---: | ---: |");
    measure("placed", &split(&matched), &matched, none, true);
    let late = Objectives { ttft_us: 1_000, ..none };
    measure("refused: first token", &split(&matched), &matched, late, false);
    let running = reported(split(&matched), |report| report.load.running = 64);
    let slow = Objectives { tbt_us: 2_400, ..none };
    measure("refused: between tokens", &running, &matched, slow, false);
    let full = reported(split(&matched), |report| report.slots_available = 0);
    measure("refused: no room", &full, &matched, none, false);
    println!("\n| policy | match p50 us | p99 | match and placement p50 us | p99 |");
    println!("| --- | ---: | ---: | ---: | ---: |");
    let (index, prompts) = filled();
    for selection in Selection::ALL {
        let policy = Policy { selection, ..Policy::default() };
        measure_whole(&selection.to_string(), (policy, |_| {}), &index, &prompts);
    }
    let policy = Policy { routing: routes(), ..Policy::default() };
    measure_whole("kvasir, all do both", (policy, routing), &index, &prompts);
    measure_keys();
}
