//! What a decision between route, fetch and recompute costs.
//!
//! `cargo bench -p kvasir-placement --bench attend` prices random spans of one and of eight holders and
//! prints nanoseconds a decision: the median of `ROUNDS` rounds. Expected: well under a microsecond.
#![allow(clippy::print_stdout, reason = "its output is its purpose")]
#![allow(clippy::disallowed_methods, reason = "the core takes time from outside; this measures it")]

use std::hint::black_box;
use std::time::Instant;

use kvasir_placement::attend::{
    Congestion, Constants, Demand, FabricProfile, GatherProfile, Holder, KernelProfile,
    MergeProfile, RowBytes, SelectedProfile, Span, SpliceProfile, decide,
};

const ROUNDS: usize = 21;
const DECISIONS: u64 = 100_000;

const KERNEL: KernelProfile = KernelProfile {
    launch_us: 10.0,
    token_us: 0.00244,
    flat_rows: 1_024,
    row_token_us: 5.7e-6,
    selected: SelectedProfile { base_factor: 0.633, token_factor: 9.1e-4 },
};
const CONSTANTS: Constants = Constants {
    fabric: FabricProfile {
        probe_us: 16.0,
        turnaround_us: 9.0,
        bytes_per_us: 25_000.0,
        congestion: Congestion { flat_messages: 2, message_factor: 1.19 },
        concurrent_messages_max: 8,
        splice: SpliceProfile { base_us: 2_766.0, token_us: 0.0718 },
        gather: GatherProfile { base_us: 866.7, holder_us: 433.3, rows: 2_048 },
        merge: MergeProfile { base_us: 5.0, part_us: 3.3 },
    },
    holder: KERNEL,
    local: KERNEL,
};
const BYTES: RowBytes = RowBytes { query: 1_152, partial: 1_032, kv_layer: 1_152, layers: 27 };

fn measure(holders: usize, is_selected: bool) -> f64 {
    let mut state = 7u64;
    let mut next = move |below: u64| {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % below
    };
    let questions: Vec<(Vec<Holder>, Demand)> = (0..1_024)
        .map(|_| {
            let holders = (0..holders)
                .map(|_| Holder {
                    tokens: 1 + next(100_000),
                    selected: next(2_048),
                    flows: next(8) as u32,
                    rows: next(2_048),
                    has_kernel: true,
                })
                .collect();
            let demand = Demand {
                rows: 16 + next(2_048),
                steps: next(2_000),
                overlap_us: next(30) as f64,
                step_us: 10_000.0,
                step_max_us: 100_000.0,
                free_bytes: next(1 << 34),
                recompute_us: next(10_000_000) as f64,
            };
            (holders, demand)
        })
        .collect();
    let mut rounds: Vec<f64> = (0..ROUNDS)
        .map(|_| {
            let begun = Instant::now();
            for at in 0..DECISIONS {
                let (holders, demand) = &questions[(at % 1_024) as usize];
                let span = Span { holders, is_moved: false, is_selected };
                black_box(decide(&CONSTANTS, BYTES, &span, black_box(demand)));
            }
            begun.elapsed().as_secs_f64() * 1e9 / DECISIONS as f64
        })
        .collect();
    rounds.sort_by(f64::total_cmp);
    rounds[ROUNDS / 2]
}

fn main() {
    println!("| holders | dense ns | selected ns |\n| --- | --- | --- |");
    for holders in [1, 8] {
        println!("| {holders} | {:.0} | {:.0} |", measure(holders, false), measure(holders, true));
    }
}
