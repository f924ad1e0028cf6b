//! `kvasir demo agents`, the quick form: what it says has the right shape, and what must hold does. How long
//! anything takes is not looked at.

use std::process::{Command, Stdio};

use serde_json::Value;

const KVASIR: &str = env!("CARGO_BIN_EXE_kvasir");
const WAYS: [&str; 3] = ["route", "fetch", "recompute"];

fn whole(value: &Value) -> u64 {
    value.as_f64().filter(|number| number.fract() == 0.0).expect("a count") as u64
}

#[test]
fn the_demonstration_measures_every_alternative_and_says_what_was_decided() {
    let dir = tempfile::tempdir().expect("a folder");
    let plot = dir.path().join("agents.svg");
    let output = Command::new(KVASIR)
        .args(["demo", "agents", "--quick", "--json", "--plot"])
        .arg(&plot)
        .stdin(Stdio::null())
        .output()
        .expect("it can be started");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let said: Value = serde_json::from_slice(&output.stdout).expect("JSON and nothing else");
    let cells = said["scenarios"].as_array().expect("cells");
    assert_eq!(cells.len(), 4, "two wires, two lengths of answers");
    let (mut least_by, mut right) = ([0; 3], 0);
    for cell in cells {
        let agents = whole(&cell["agents"]);
        let measured = WAYS.map(|way| cell["measured_ms"][way].as_f64().expect("a time"));
        assert!(measured.iter().all(|ms| ms.is_finite() && *ms > 0.0), "{cell}");
        let decided: u64 = WAYS.iter().map(|way| whole(&cell["decisions"][way])).sum();
        assert_eq!(decided, agents, "each agent was given one way: {cell}");
        let least = measured.iter().copied().fold(f64::INFINITY, f64::min);
        let best = WAYS.iter().position(|way| cell["fastest"] == **way).expect("one of them");
        assert_eq!(measured[best], least, "{cell}");
        least_by[best] += 1;
        let regret = cell["regret"].as_f64().expect("a ratio");
        right += u64::from(regret <= 1.1);
        if let Some(chosen) = cell["action"].as_str() {
            assert_eq!(whole(&cell["decisions"][chosen]), agents);
            let took = cell["measured_ms"][chosen].as_f64().expect("a time");
            assert!((regret - took / least).abs() < 1e-9 && regret >= 1.0, "{cell}");
        }
        // 192 tokens are three blocks; 24 follow, and all but the last token of the answer, in 3 layers and 4 rows.
        let steps = whole(&cell["generated_tokens"]) - 1;
        let rows = agents * 4 * (2 * 24 + 1 + 3 * steps);
        for (what, row_bytes) in [("query", 576 * 4), ("partial", 512 * 4 + 8)] {
            let got = whole(&cell[&*format!("{what}_bytes")]);
            assert_eq!(whole(&cell[&*format!("{what}_bytes_expected")]), rows * row_bytes);
            assert!(got.abs_diff(rows * row_bytes) * 20 <= rows * row_bytes, "{cell}");
        }
        assert_eq!(whole(&cell["cache_bytes_routed"]), 0, "{cell}");
        assert!(whole(&cell["cache_bytes_fetched"]) >= 3 * 64 * 576 * 4 * 3, "{cell}");
        assert_eq!(cell["same_tokens"], true, "{cell}");
    }
    for (way, count) in WAYS.iter().zip(least_by) {
        assert_eq!(whole(&said["fastest_counts"][way]), count);
    }
    assert_eq!(whole(&said["within_10_percent"]), right);
    let svg = std::fs::read_to_string(&plot).expect("the plot");
    assert!(svg.starts_with("<svg") && svg.matches("<circle").count() >= 4 * (3 + 1) + 3, "{svg}");
}

#[test]
fn a_wire_that_there_is_not_is_refused_before_anything_starts() {
    let refused = |arguments: &[&str]| {
        let output = Command::new(KVASIR)
            .args(["demo", "agents"])
            .args(arguments)
            .stdin(Stdio::null())
            .output()
            .expect("it can be started");
        assert!(!output.status.success() && output.stdout.is_empty());
        String::from_utf8(output.stderr).expect("UTF-8")
    };
    assert!(refused(&["--transport", "pigeon"]).contains("tcp:20MiB"));
    assert!(refused(&["--document", "32"]).contains("--document 32 is out of range; use 64 to"));
}
