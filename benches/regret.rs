//! How far from the best of three the conductor is that decides about a prefix that another node has.
//!
//! `cargo bench -p kvasir --bench regret` has `kvasir demo agents` measure every cell of a grid over wires,
//! lengths of documents, agents that come at once, and steps that remain. *Regret* is what was decided over the least
//! of what was measured by force. Expected: within 10 % in 95 % of the cells. Prints Markdown: the share, for one
//! agent and for several, and each cell that is beyond it with what was predicted. Ends with 1 when less is reached.
#![allow(clippy::print_stdout, reason = "its output is its purpose")]

use std::process::{Command, ExitCode, Stdio};

use serde_json::Value;

const GRID: [&str; 9] = [
    "--model-dir=configs/models/tiny-deepseek-v2",
    "--transport=shm,tcp,tcp:20MiB",
    "--document=128,512,1536",
    "--agents=1,4",
    "--answer=4,32,128",
    "--repeat=3",
    "--json",
    "--plot=target/regret.svg",
    "agents",
];
const WITHIN: f64 = 1.10;
const SHARE: f64 = 0.95;
const WAYS: [&str; 3] = ["route", "fetch", "recompute"];

fn regret(cell: &Value) -> f64 {
    cell["regret"].as_f64().expect("a ratio")
}

fn share(cells: &[&Value]) -> f64 {
    let right = cells.iter().filter(|cell| regret(cell) <= WITHIN).count();
    right as f64 / cells.len().max(1) as f64
}

fn times(of: &Value) -> String {
    let time = |way: &&str| of[*way].as_f64().map_or("-".to_owned(), |ms| format!("{ms:.0}"));
    WAYS.iter().map(time).collect::<Vec<_>>().join(" / ")
}

fn main() -> ExitCode {
    let [rest @ .., which] = GRID;
    let output = Command::new(env!("CARGO_BIN_EXE_kvasir"))
        .args(["demo", which])
        .args(rest)
        .current_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/.."))
        .stdin(Stdio::null())
        .stderr(Stdio::inherit())
        .output()
        .expect("it can be started");
    assert!(output.status.success(), "the demonstration failed");
    let said: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let cells: Vec<&Value> = said["scenarios"].as_array().expect("cells").iter().collect();
    let alone = |is_alone: bool| {
        let cells = cells.iter().filter(|cell| (cell["agents"] == 1) == is_alone);
        share(&cells.copied().collect::<Vec<_>>()) * 100.0
    };
    println!("| cells | within 10 % | one agent | several at once | mean regret |");
    println!("| ---: | ---: | ---: | ---: | ---: |");
    println!(
        "| {} | {:.0} % | {:.0} % | {:.0} % | {:.3} |\n",
        cells.len(),
        share(&cells) * 100.0,
        alone(true),
        alone(false),
        cells.iter().map(|cell| regret(cell)).sum::<f64>() / cells.len().max(1) as f64,
    );
    println!("| beyond | route / fetch / recompute ms | predicted for one | decided | regret |");
    println!("| --- | --- | --- | --- | ---: |");
    for cell in cells.iter().filter(|cell| regret(cell) > WITHIN) {
        let number = |field: &str| cell[field].as_u64().unwrap_or(0);
        println!(
            "| {}, {} tokens, {} x {} | {} | {} | {} | {:.2} |",
            cell["transport"].as_str().unwrap_or_default(),
            number("document_tokens"),
            number("agents"),
            number("generated_tokens"),
            times(&cell["measured_ms"]),
            times(&cell["predicted_ms"]),
            times(&cell["decisions"]),
            regret(cell),
        );
    }
    if share(&cells) >= SHARE { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
