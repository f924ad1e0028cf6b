//! Nodes that prefill and decode, to compare with.

use std::path::PathBuf;

use kvasir_placement::{Admission, Objectives, Selection};
use kvasir_replay::cluster::Cluster;
use kvasir_replay::colocated::{self, Chunks};
use kvasir_replay::sim::{Options, replay};
use kvasir_replay::summary::Summary;
use kvasir_replay::trace::Trace;

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

/// One request after another, as `(when, prompt, output, ids)`.
fn trace(lines: &[(u64, u32, u32, &str)]) -> Trace {
    let line = |(at_ms, prompt, output, ids): &(u64, u32, u32, &str)| {
        format!(
            "{{\"timestamp\":{at_ms},\"input_length\":{prompt},\"output_length\":{output},\"hash_ids\":[{ids}]}}\n"
        )
    };
    let text: String = lines.iter().map(line).collect();
    Trace::read(text.as_bytes(), 512).expect("a trace")
}

fn run(trace: &Trace, cluster: &Cluster, chunks: Chunks) -> Summary {
    let objectives = Objectives { ttft_us: u64::MAX, tbt_us: 100_000 };
    let options = Options { objectives, ..Options::new(Selection::CacheAware) };
    let summary = colocated::replay(trace, cluster, chunks, options).expect("a replay");
    assert_eq!(summary.completed, trace.requests.len(), "nothing is refused or lost");
    summary
}

#[test]
fn a_prompt_stalls_what_decodes_as_a_whole_and_only_by_a_chunk_in_chunks() {
    let cluster = Cluster { prefill_nodes: 1, decode_nodes: 1, ..cluster() };
    // Both nodes decode when two long prompts come.
    let ids: [String; 2] = [10, 30]
        .map(|from| (from..from + 16).map(|id: u32| id.to_string()).collect::<Vec<_>>().join(","));
    let two = [
        (0, 512, 200, "1"),
        (0, 512, 200, "2"),
        (1_000, 8_192, 1, ids[0].as_str()),
        (1_000, 8_192, 1, ids[1].as_str()),
    ];
    let trace = trace(&two);
    let compute_s = cluster.prefill_time().us(8_192, 0) as f64 / 1e6;
    let whole = run(&trace, &cluster, Chunks::Whole);
    let chunks = run(&trace, &cluster, Chunks::Tokens(512));
    // One of the twenty longest intervals has the prompt in it.
    assert!(whole.tbt_s.mean > 0.02 + compute_s / 20.0, "{:?}", whole.tbt_s);
    assert!(whole.tbt_s.mean < 0.03 + compute_s / 20.0, "{:?}", whole.tbt_s);
    // Seventeen of them have a chunk in them, of 40 ms each.
    assert!(chunks.tbt_s.mean < 0.08, "{:?}", chunks.tbt_s);
    assert!(chunks.ttft_s.p99 > whole.ttft_s.p99, "decoding beside it takes time");
}

#[test]
fn a_node_finds_what_it_has_computed_or_decoded_before() {
    let cluster = Cluster { prefill_nodes: 1, decode_nodes: 1, ..cluster() };
    let twice = [(0, 1_024, 2, "1,2"), (60_000, 1_536, 2, "1,2,3")];
    for chunks in [Chunks::Whole, Chunks::Tokens(512)] {
        let summary = run(&trace(&twice), &cluster, chunks);
        assert!((summary.block_hit_ratio - 2.0 / 5.0).abs() < 1e-9, "{summary:?}");
    }
}

#[test]
fn disaggregated_nodes_serve_more_in_time_where_steps_are_to_be_short() {
    let (trace, cluster) = (conversations().part(0.0, 0.3).sped_up(2.0), cluster());
    let objectives = Objectives { ttft_us: 30_000_000, tbt_us: 100_000 };
    let options = Options { objectives, ..Options::new(Selection::LeastCost) };
    assert_eq!(options.admission, Admission::Calibrated);
    let ours = replay(&trace, &cluster, options).expect("a replay").effect.expect("objectives");
    for chunks in [Chunks::Whole, Chunks::Tokens(512), Chunks::Tokens(2_048)] {
        let theirs = run(&trace, &cluster, chunks).effect.expect("objectives");
        assert!(ours.effective > theirs.effective, "{chunks:?}: {theirs:?}, {ours:?}");
    }
}
