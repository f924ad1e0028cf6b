//! The contents of the binary: the reference configurations that it prints, and no mutations.

use std::path::Path;
use std::process::Command;

use aho_corasick::AhoCorasick;
use kvasir_mutation::POINTS;

#[test]
fn the_reference_configurations_are_up_to_date() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../configs");
    for daemon in ["conductor", "store-node", "engine"] {
        let output = Command::new(env!("CARGO_BIN_EXE_kvasir"))
            .args(["config", daemon])
            .output()
            .expect("the binary can be started");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let path = folder.join(format!("{daemon}.toml"));
        let checked_in = std::fs::read_to_string(&path).unwrap_or_default();
        assert!(
            String::from_utf8_lossy(&output.stdout) == checked_in,
            "{} is stale: cargo run -- config --write configs",
            path.display()
        );
    }
}

/// A mutation build has the name of each mutation in its binary, and the variable that selects one. `kvasir-mutation`
/// runs this test in a mutation build, which shows that the search finds them.
#[test]
fn an_ordinary_binary_contains_no_mutation() {
    let mut names: Vec<&str> = POINTS.iter().map(|point| point.name).collect();
    names.push("KVASIR_MUTATION");
    let binary = std::fs::read(env!("CARGO_BIN_EXE_kvasir")).expect("the binary is readable");
    // Overlapping, because names that begin alike are told apart.
    let names_in = AhoCorasick::new(&names).expect("a search for few short names");
    let mut found: Vec<&str> =
        names_in.find_overlapping_iter(&binary).map(|it| names[it.pattern().as_usize()]).collect();
    found.sort_unstable();
    found.dedup();
    let expected = if cfg!(kvasir_mutations) { names.len() } else { 0 };
    assert_eq!(found.len(), expected, "{found:?}");
}
