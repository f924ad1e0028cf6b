//! The published conversations on the published cluster: the baselines land where an independent
//! simulator of the same model found them, and the default policy keeps what is said of it.

use std::path::PathBuf;

use kvasir_blocks::Eviction;
use kvasir_placement::{Admission, Objectives, Selection};
use kvasir_replay::cluster::Cluster;
use kvasir_replay::sim::{Options, replay};
use kvasir_replay::summary::Summary;
use kvasir_replay::trace::Trace;
use kvasir_replay::{pool, report};

fn file(path: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../..").join(path)
}

fn cluster() -> Cluster {
    Cluster::open(&file("configs/clusters/mooncake-8p8d.toml")).expect("the cluster file is right")
}

fn conversations() -> Trace {
    let path = file("benches/traces/conversation_trace.jsonl.zst");
    Trace::open(&path, 512).expect("the trace is readable")
}

fn run(trace: &Trace, cluster: &Cluster, selection: Selection) -> Summary {
    let summary = replay(trace, cluster, Options::new(selection)).expect("a replay");
    assert_eq!(summary.completed, trace.requests.len(), "nothing is refused or lost");
    summary
}

/// The result of an independent simulator of the model in `docs/operate/size.md`.
struct Found {
    ttft_mean_s: f64,
    ttft_p90_s: f64,
    block_hit_ratio: f64,
    prefill_gpu_s: f64,
}

#[test]
fn the_baselines_land_where_an_independent_simulator_found_them() {
    let (trace, cluster) = (conversations(), cluster());
    let check = |selection: Selection, ttft_within: f64, found: Found| {
        let got = run(&trace, &cluster, selection);
        let near = |what: &str, got: f64, want: f64, within: f64| {
            let off = (got / want - 1.0).abs();
            assert!(off < within, "{selection}: {what} {got:.3}, found {want:.3}");
        };
        near("mean TTFT", got.ttft_s.mean, found.ttft_mean_s, ttft_within);
        near("p90", got.ttft_s.p90, found.ttft_p90_s, ttft_within);
        near("GPU seconds", got.prefill_gpu_s.mean, found.prefill_gpu_s, 0.02);
        let off = (got.block_hit_ratio - found.block_hit_ratio).abs();
        assert!(off < 0.01, "{selection}: hit ratio {:.3}", got.block_hit_ratio);
    };
    let found = |ttft_mean_s, ttft_p90_s, block_hit_ratio, prefill_gpu_s| Found {
        ttft_mean_s,
        ttft_p90_s,
        block_hit_ratio,
        prefill_gpu_s,
    };
    check(Selection::Random, 0.33, found(10.3, 30.4, 0.108, 1.548));
    check(Selection::LeastLoaded, 0.05, found(2.06, 4.44, 0.107, 1.547));
    check(Selection::LongestPrefix, 0.05, found(2.18, 4.82, 0.354, 1.137));
    check(Selection::CacheAware, 0.05, found(1.47, 3.08, 0.294, 1.217));
    check(Selection::KvcacheCentric, 0.05, found(1.30, 2.69, 0.350, 1.142));
}

#[test]
fn the_default_answers_8_percent_sooner_than_algorithm_1_on_the_half_it_was_not_fixed_on() {
    let (trace, cluster) = (conversations().part(0.5, 1.0), cluster());
    let global = run(&trace, &cluster, Selection::KvcacheCentric).ttft_s;
    let ours = run(&trace, &cluster, Selection::LeastCost).ttft_s;
    assert!(ours.mean < 0.92 * global.mean, "{} of {}", ours.mean, global.mean);
    assert!(ours.p90 <= global.p90, "{} of {}", ours.p90, global.p90);
}

#[test]
fn the_default_never_loses_to_what_does_not_use_the_network() {
    let (trace, mut cluster) = (conversations(), cluster());
    for gbps in [10.0, 50.0, 400.0] {
        cluster.network.bytes_per_s = gbps * 1e9 / 8.0;
        let local = run(&trace, &cluster, Selection::CacheAware).ttft_s;
        let ours = run(&trace, &cluster, Selection::LeastCost).ttft_s;
        assert!(ours.mean < local.mean && ours.p90 < local.p90, "{gbps} Gb/s: {ours:?} {local:?}");
    }
}

#[test]
fn the_default_does_as_well_when_arrivals_are_shuffled() {
    let (trace, cluster) = (conversations().shuffled(1), cluster());
    let global = run(&trace, &cluster, Selection::KvcacheCentric).ttft_s;
    let ours = run(&trace, &cluster, Selection::LeastCost).ttft_s;
    assert!(ours.mean < global.mean && ours.p90 < global.p90);
}

#[test]
fn a_run_is_one_json_object_and_several_are_one_too() {
    let (trace, cluster) = (conversations().part(0.0, 0.01), cluster());
    let runs =
        [Selection::CacheAware, Selection::LeastCost].map(|policy| run(&trace, &cluster, policy));
    let one = report::json(&runs[..1]);
    for path in ["/ttft_s/mean", "/ttft_s/p50", "/ttft_s/p90", "/ttft_s/p99", "/prefill_gpu_s/mean"]
    {
        assert!(one.pointer(path).and_then(|value| value.as_f64()) > Some(0.0), "{path}: {one}");
    }
    assert!(one["block_hit_ratio"].is_f64() && one["policy"] == "cache-aware", "{one}");
    let several = report::json(&runs);
    assert!(several.pointer("/policies/least-cost/ttft_s/p90").is_some(), "{several}");
    assert_eq!(report::table(&runs).lines().count(), 4);
    let plot = report::plot(&runs);
    // Of each run two curves, each with a piece of it beside its name, and a bar.
    assert_eq!((plot.matches("<polyline").count(), plot.matches("<g ").count()), (8, 3), "{plot}");
    for name in ["cache-aware", "least-cost"] {
        assert_eq!(plot.matches(&format!(">{name}</text>")).count(), 3, "{plot}");
    }
}

#[test]
fn runs_with_objectives_are_drawn_with_what_became_of_the_requests() {
    let (trace, cluster) = (conversations().part(0.0, 0.01), cluster());
    let objectives = Objectives { ttft_us: 1, tbt_us: u64::MAX };
    let runs = [Admission::Early, Admission::Calibrated].map(|admission| {
        let options = Options { objectives, admission, ..Options::new(Selection::LeastCost) };
        replay(&trace, &cluster, options).expect("a replay")
    });
    assert!(runs.iter().all(|run| run.refused > 0), "{}", report::table(&runs));
    let plot = report::plot(&runs);
    assert_eq!(plot.matches("<g ").count(), 6, "{plot}");
    assert_eq!(plot.matches(">least-cost/early</text>").count(), 6, "{plot}");
}

#[test]
fn a_replay_follows_from_its_inputs_alone() {
    let (trace, cluster) = (conversations().part(0.0, 0.05), cluster());
    for selection in Selection::ALL {
        let options = Options { seed: 7, ..Options::new(selection) };
        let run = || replay(&trace, &cluster, options).expect("a replay");
        assert_eq!(run(), run(), "{selection}");
    }
}

/// A row of the table of `docs/decisions/0018-hit-density-eviction.md` for pools of one size each: the sizes, or what was found.
fn row(name: &str) -> Vec<f64> {
    let text = std::fs::read_to_string(file("docs/decisions/0018-hit-density-eviction.md"))
        .expect("it is in the repository");
    let start = format!("| {name} |");
    let line = text.lines().find_map(|line| line.strip_prefix(&start)).expect("a row of that name");
    let number = |cell: &str| {
        let number = cell.split_whitespace().next()?;
        number.parse().ok()
    };
    line.split('|').filter_map(number).collect()
}

/// Holds the table of `docs/decisions/0018-hit-density-eviction.md` for one trace. It is deterministic: to its last digit.
fn holds_the_table(trace: &Trace, lru: &str, hit_density: &str) {
    let sizes = row("second half alone");
    let trace = trace.part(0.5, 1.0);
    let mut wrong: Vec<String> = Vec::new();
    for (name, eviction) in [(lru, Eviction::Lru), (hit_density, Eviction::HitDensity)] {
        let said = row(name);
        assert_eq!((said.len(), sizes.len()), (6, 6), "{name}: the table has changed");
        for (said, millions) in said.into_iter().zip(&sizes) {
            let pool = pool::Pool {
                block_tokens: 512,
                tokens: (millions * 1e6) as u64,
                eviction,
                ssd_tokens: 0,
                classes: None,
                count_from: 0.0,
            };
            let found = pool::hit_ratio(&trace, &pool).block_hit_ratio;
            if (found - said).abs() > 0.000_051 {
                wrong.push(format!("{name}, {millions} M: {found:.5}, not {said}"));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn what_is_said_of_eviction_holds_for_the_conversations() {
    holds_the_table(&conversations(), "conversations, lru", "conversations, hit-density");
}

#[test]
fn what_is_said_of_eviction_holds_for_the_coding_sessions() {
    let path = file("benches/traces/weka250_512_trace.jsonl.zst");
    let trace = Trace::open(&path, 512).expect("the trace is readable");
    holds_the_table(&trace, "coding sessions, lru", "coding sessions, hit-density");
}
