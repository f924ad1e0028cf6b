//! More requests than the cluster can serve in time: what is refused, when, and what it cost by then.

use std::path::PathBuf;

use kvasir_placement::{Admission, Objectives, Selection};
use kvasir_replay::cluster::Cluster;
use kvasir_replay::report;
use kvasir_replay::sim::{Options, replay};
use kvasir_replay::summary::{Effect, Summary};
use kvasir_replay::trace::Trace;

fn file(path: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../..").join(path)
}

fn cluster(prefill_nodes: u16, decode_nodes: u16) -> Cluster {
    let path = file("configs/clusters/mooncake-saturating.toml");
    let cluster = Cluster::open(&path).expect("the cluster file is right");
    Cluster { prefill_nodes, decode_nodes, ..cluster }
}

fn conversations(speed: f64) -> Trace {
    let path = file("benches/traces/conversation_trace.jsonl.zst");
    Trace::open(&path, 512).expect("the trace is readable").sped_up(speed)
}

const OBJECTIVES: Objectives = Objectives { ttft_us: 30_000_000, tbt_us: 100_000 };

fn run(trace: &Trace, cluster: &Cluster, admission: Admission) -> (Summary, Effect) {
    let options =
        Options { objectives: OBJECTIVES, admission, ..Options::new(Selection::LeastCost) };
    let summary = replay(trace, cluster, options).expect("a replay");
    let effect = summary.effect.expect("there are objectives");
    let ended = summary.refused + effect.dropped + summary.completed;
    assert_eq!(ended, summary.requests, "each is refused, dropped or completed");
    (summary, effect)
}

#[test]
fn the_default_wastes_half_the_prefill_and_serves_no_fewer_in_time() {
    for (speed, prefills, decodes) in [(2.0, 8, 8), (3.0, 8, 8), (2.0, 12, 4), (3.0, 12, 4)] {
        let (trace, cluster) = (conversations(speed), cluster(prefills, decodes));
        let [late, early, predicted, ours] =
            Admission::ALL.map(|admission| run(&trace, &cluster, admission));
        let what = format!("{prefills} + {decodes} nodes at {speed}: {:?}", ours.1);
        assert!(ours.1.wasted_prefill_gpu_s <= 0.5 * late.1.wasted_prefill_gpu_s, "{what}");
        for other in [&late, &early, &predicted] {
            assert!(ours.1.effective >= other.1.effective, "{what}, {:?}", other.1);
        }
        assert_eq!(ours.1.dropped, 0, "what is computed is served");
        assert!(ours.1.attainment_calibration_error < 0.03, "{what}");
        // Where it is decoding that saturates, and not only the prefill side.
        if decodes == 4 && speed == 3.0 {
            let (ours, early) = (ours.0.prefill_load, early.0.prefill_load);
            assert!(ours.deviation <= 0.5 * early.deviation, "{ours:?} {early:?}");
        }
    }
}

#[test]
fn what_is_thrown_away_is_counted_by_why() {
    let (trace, cluster) = (conversations(3.0).part(0.0, 0.2), cluster(12, 4));
    let (late, effect) = run(&trace, &cluster, Admission::Late);
    assert!(effect.dropped > 0 && effect.missed_tbt > 0, "{effect:?}");
    let wasted_s = effect.dropped_prefill_gpu_s + effect.missed_prefill_gpu_s;
    assert!((wasted_s - effect.wasted_prefill_gpu_s).abs() < 1e-6, "{effect:?}");
    let all_s = wasted_s + effect.useful_prefill_gpu_s;
    assert!((all_s - late.prefill_gpu_s.sum).abs() < 1e-3, "{effect:?}");
    let (early, _) = run(&trace, &cluster, Admission::Early);
    let json = report::json(&[late.clone(), early.clone()]);
    let dropped = json.pointer("/policies/least-cost~1late/effect/dropped");
    assert_eq!(dropped.and_then(|value| value.as_u64()), Some(effect.dropped as u64), "{json}");
    let text = report::effects(&[late, early]);
    assert_eq!(text.lines().count(), 4, "{text}");
}

#[test]
fn without_objectives_nothing_is_refused_and_no_effect_is_told() {
    let (trace, cluster) = (conversations(3.0).part(0.0, 0.05), cluster(12, 4));
    let summary = replay(&trace, &cluster, Options::new(Selection::LeastCost)).expect("a replay");
    assert_eq!((summary.effect, summary.refused), (None, 0));
    assert!(report::json(&[summary]).get("effect").is_none());
}
