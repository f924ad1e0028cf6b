//! `kvasir replay` on the command line: what it prints, what it draws, and what it says of flags that cannot be.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::Value;

const KVASIR: &str = env!("CARGO_BIN_EXE_kvasir");
/// A few hundred requests.
const PART: [&str; 2] = ["--part", "0..0.02"];

fn file(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(path)
}

fn replay(flags: &[&str]) -> Output {
    let mut command = Command::new(KVASIR);
    command.arg("replay").arg("--trace");
    command.arg(file("benches/traces/conversation_trace.jsonl.zst")).arg("--cluster");
    command.arg(file("configs/clusters/mooncake-8p8d.toml")).args(PART).args(flags);
    command.output().expect("it can be started")
}

fn said(output: &Output) -> &str {
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{errors}");
    assert_eq!(errors, "", "nothing went wrong");
    std::str::from_utf8(&output.stdout).expect("UTF-8")
}

/// All that it says, which is one object.
fn object(flags: &[&str]) -> Value {
    let output = replay(flags);
    let object: Value = serde_json::from_str(said(&output)).expect("JSON and nothing else");
    assert!(object.is_object(), "{object}");
    object
}

fn number(of: &Value, path: &str) -> f64 {
    let found = of.pointer(path).and_then(Value::as_f64);
    found.unwrap_or_else(|| panic!("there is no number {path} in {of}"))
}

#[test]
fn each_policy_prints_one_object_with_what_its_users_would_have_seen() {
    for policy in
        ["random", "least-loaded", "longest-prefix", "cache-aware", "kvcache-centric", "least-cost"]
    {
        let object = object(&["--policy", policy, "--json"]);
        assert_eq!(object["policy"], policy);
        let at = |path| number(&object, path);
        assert!(at("/ttft_s/mean") > 0.0 && at("/prefill_gpu_s/mean") > 0.0, "{object}");
        assert!(at("/ttft_s/p50") <= at("/ttft_s/p90"), "{object}");
        assert!(at("/ttft_s/p90") <= at("/ttft_s/p99"), "{object}");
        assert!(at("/tbt_s/p50") > 0.0, "{object}");
        assert!((0.0..1.0).contains(&at("/block_hit_ratio")), "{object}");
        assert!(at("/requests") > 100.0 && at("/requests") == at("/completed"), "{object}");
    }
}

#[test]
fn the_same_flags_give_the_same_numbers_and_another_seed_others() {
    let run = |seed| object(&["--policy", "random", "--json", "--seed", seed]);
    assert_eq!(run("1"), run("1"));
    assert_ne!(run("1"), run("2"));
}

#[test]
fn policies_are_compared_in_one_call() {
    let dir = tempfile::tempdir().expect("a directory");
    let plot = dir.path().join("plot.svg");
    let flags = ["--policy", "cache-aware,least-cost", "--admission", "early,calibrated"];
    let objectives = ["--ttft-objective-ms", "30000", "--tbt-objective-ms", "100"];
    let drawn = ["--plot", plot.to_str().expect("UTF-8")];
    let all = object(&[&flags[..], &objectives, &drawn, &["--json"]].concat());
    let names = [
        "cache-aware/early",
        "cache-aware/calibrated",
        "least-cost/early",
        "least-cost/calibrated",
    ];
    let policies = all["policies"].as_object().expect("an object of policies");
    assert_eq!(policies.len(), names.len(), "{all}");
    for name in names {
        assert!(number(&policies[name], "/effect/effective") > 0.0, "{all}");
        assert!(number(&policies[name], "/effect/wasted_prefill_gpu_s") >= 0.0, "{all}");
    }
    let svg = std::fs::read_to_string(plot).expect("it is drawn");
    assert!(svg.starts_with("<svg ") && svg.trim_end().ends_with("</svg>"), "{svg}");
    for name in names {
        assert_eq!(svg.matches(&format!(">{name}</text>")).count(), 6, "once a panel: {svg}");
    }
    let table = replay(&[&flags[..], &objectives].concat());
    for name in names {
        assert_eq!(said(&table).matches(&format!("| {name} |")).count(), 2, "{}", said(&table));
    }
}

#[test]
fn pools_of_several_sizes_are_printed_and_drawn() {
    let dir = tempfile::tempdir().expect("a directory");
    let plot = dir.path().join("plot.svg");
    let drawn = ["--plot", plot.to_str().expect("UTF-8")];
    let pools = object(&[&["--cache-tokens", "1024,1000000", "--json"], &drawn[..]].concat());
    let pools = pools["caches"].as_array().expect("a list of caches");
    assert_eq!(pools.len(), 4, "{pools:?}");
    let ratio = |at: usize| number(&pools[at], "/block_hit_ratio");
    assert!(ratio(0) < ratio(1) && ratio(2) < ratio(3), "more finds more: {pools:?}");
    let svg = std::fs::read_to_string(plot).expect("it is drawn");
    assert!(svg.contains(">lru</text>") && svg.contains(">hit-density</text>"), "{svg}");
}

#[test]
fn flags_that_cannot_be_are_refused_with_a_word_about_them() {
    for (flags, want) in [
        (&["--policy", "best"][..], "best"),
        (&["--admission", "never"], "use one of late, early, predicted, calibrated"),
        (&["--speed", "0"], "--speed must be above 0"),
        (&["--colocated", "half"], "--colocated half"),
        (&["--eviction-policy", "fifo", "--cache-tokens", "1000"], "use lru or hit-density"),
        (&["--prefill-nodes", "0"], "prefill_nodes"),
    ] {
        let output = replay(flags);
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && output.stdout.is_empty(), "{flags:?}: {errors}");
        assert!(errors.contains(want), "{flags:?}: {errors}");
        assert!(!errors.contains("panicked"), "{flags:?}: {errors}");
    }
}
