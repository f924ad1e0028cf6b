//! What a decision costs: a placement, and a refusal for each of its reasons.
//!
//! `cargo bench --workspace --profile dev --bench place` asks a cluster of 64 instances with 256 requests under way
//! and prints microseconds a decision. Expected: under 3 at the median and 25 at the 99th percentile, and
//! no more for a refusal, since a cluster that is overloaded refuses most.
#![allow(clippy::print_stdout, reason = "its output is its purpose")]
#![allow(clippy::disallowed_methods, reason = "the core takes time from outside; this measures it")]

use std::hint::black_box;
use std::sync::Arc;
use std::time::Instant;

use kvasir_placement::{
    BookingId, ClusterView, InstanceReport, ModelIndex, ModelSpec, NodeIndex, Objectives,
    PlaceRequest, Policy, PrefixMatch, Profile, ReportedLoad, Role, Steering, place,
};
use kvasir_proto::{InstanceId, NodeId};

const SIDES: u16 = 32;
const BOOKED: u64 = 256;
const DECISIONS: usize = 200_000;

fn report(node: u16) -> InstanceReport {
    let (name, role) = match node < SIDES {
        true => ("prefill", Role::Prefill),
        false => ("decode", Role::Decode),
    };
    InstanceReport {
        instance_id: InstanceId::from(format!("{name}-{node:02}").as_str()),
        node: NodeIndex(node),
        node_id: NodeId::from(format!("{name}-{node:02}-node").as_str()),
        attachment: (1, 1),
        role,
        plays: None,
        model: ModelSpec {
            name: Arc::from("m"),
            fingerprint: [7; 32],
            kv_dtype: Arc::from("bf16"),
            vocab_size: 100_000,
            context_tokens: 1_000_000,
            block_tokens: 64,
            block_bytes: 4 << 20,
            layout_hash: 1,
            routed: None,
        },
        max_running: 64,
        slots_total: 100_000,
        slots_available: 100_000,
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
        conversation: tie_seed,
        may_route: true,
        is_endless: false,
        steering: Steering::default(),
    }
}

/// A cluster at work.
fn busy(matched: &PrefixMatch) -> ClusterView {
    let mut view = ClusterView::new(Policy::default(), Profile::default());
    for node in 0..2 * SIDES {
        view.report(report(node), 0);
    }
    for id in 0..BOOKED {
        let now_us = id * 1_000;
        let placement =
            place(&view, matched, &request(id, now_us)).expect("nothing speaks against it");
        view.book(BookingId(id), &placement, now_us);
    }
    view
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

fn main() {
    let held: Vec<_> = (0..2 * SIDES).map(|node| (NodeIndex(node), u32::from(node) * 10)).collect();
    let matched = PrefixMatch::from_pairs(&held);
    let none = Objectives::NONE;
    println!("| decision | p50 us | p99 us |\n| --- | ---: | ---: |");
    measure("placed", &busy(&matched), &matched, none, true);
    let late = Objectives { ttft_us: 1_000, ..none };
    measure("refused: first token", &busy(&matched), &matched, late, false);
    let running = reported(busy(&matched), |report| report.load.running = 64);
    let slow = Objectives { tbt_us: 2_400, ..none };
    measure("refused: between tokens", &running, &matched, slow, false);
    let full = reported(busy(&matched), |report| report.slots_available = 0);
    measure("refused: no room", &full, &matched, none, false);
}
