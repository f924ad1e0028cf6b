//! Nodes that change between prefill and decode as the balance of a live conductor says.

use std::path::PathBuf;

use kvasir_placement::{Objectives, Selection};
use kvasir_replay::cluster::Cluster;
use kvasir_replay::report;
use kvasir_replay::roles::BalanceFile;
use kvasir_replay::sim::{Options, replay};
use kvasir_replay::summary::{Effect, Summary};
use kvasir_replay::trace::Trace;

fn file(path: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../..").join(path)
}

fn run(prefill_nodes: u16, decode_nodes: u16, balance: Option<BalanceFile>) -> (Summary, Effect) {
    let path = file("configs/clusters/mooncake-saturating.toml");
    let cluster = Cluster::open(&path).expect("the cluster file is right");
    let cluster = Cluster { prefill_nodes, decode_nodes, balance, ..cluster };
    let trace = file("benches/traces/conversation_trace.jsonl.zst");
    let trace = Trace::open(&trace, 512).expect("the trace is readable");
    let objectives = Objectives { ttft_us: 30_000_000, tbt_us: 100_000 };
    let options = Options { objectives, ..Options::new(Selection::LeastCost) };
    let summary = replay(&trace.part(0.0, 0.5).sped_up(3.0), &cluster, options).expect("a replay");
    let effect = summary.effect.expect("there are objectives");
    let ended = summary.refused + effect.dropped + summary.completed;
    assert_eq!(ended, summary.requests, "each is refused, dropped or completed");
    (summary, effect)
}

#[test]
fn a_wrong_ratio_is_mended_and_changes_are_a_window_apart() {
    let file = BalanceFile::default();
    let (fixed, of_fixed) = run(4, 12, None);
    assert_eq!(fixed.roles, None);
    let (moved, of_moved) = run(4, 12, Some(file));
    assert!(of_moved.effective > of_fixed.effective * 105 / 100, "{of_moved:?} {of_fixed:?}");
    let told = moved.roles.clone().expect("roles change");
    assert_eq!(told.changes + 1, told.steps.len());
    let window_s = file.window_ms as f64 / 1e3;
    for pair in told.steps.windows(2) {
        let [(from_s, prefills, decodes), (until_s, more, fewer)] = pair else { panic!("a pair") };
        assert!(until_s - from_s >= window_s, "{told:?}");
        assert_eq!((prefills + decodes, more + fewer), (16, 16), "{told:?}");
        assert_eq!(prefills.abs_diff(*more), file.concurrent_role_changes_max, "{told:?}");
    }
    assert!(told.steps[1].1 > 4, "prefill was short: {told:?}");
    let again = run(4, 12, Some(file)).0;
    assert_eq!(again, moved, "the same again");
    let text = report::roles(&[fixed, moved]);
    assert!(
        text.starts_with("least-cost/calibrated: ") && text.contains(" 0 s: 4 + 12,"),
        "{text}"
    );
}

#[test]
fn a_window_that_cannot_be_sampled_is_refused() {
    let path = file("configs/clusters/mooncake-saturating.toml");
    let text = std::fs::read_to_string(path).expect("it is there");
    let with = |lines: &str| Cluster::parse(&format!("{text}\n[balance]\n{lines}\n"));
    assert!(with("window_ms = 20_000").is_ok_and(|cluster| cluster.balance.is_some()));
    for wrong in ["window_ms = 499", "sample_interval_ms = 0", "windows_ms = 1"] {
        assert!(with(wrong).is_err(), "{wrong}");
    }
}
