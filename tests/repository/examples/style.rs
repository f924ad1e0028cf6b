//! Prints the counts that `tests/style.rs` checks. With `--lower` it lowers the ceilings of comments.

#![allow(clippy::print_stdout, reason = "its output is a table")]

use std::collections::BTreeMap;
use std::path::Path;

use kvasir_tests_repository::prose::{
    Passage, comments, documents, literals, rows, settings, words,
};
use kvasir_tests_repository::{files, root};

type Counts = BTreeMap<&'static str, usize>;

fn counts(passages: &[Passage]) -> Counts {
    rows().iter().map(|row| (row.name, passages.iter().map(|one| row.matches(one)).sum())).collect()
}

fn print(name: &str, passages: &[Passage]) {
    let total: usize = passages.iter().map(words).sum();
    let rate = |count: usize| count as f64 * 1e4 / total.max(1) as f64;
    let cells: Vec<String> =
        counts(passages).values().map(|n| format!("{:.1}", rate(*n))).collect();
    println!("| {name} | {total} | {} |", cells.join(" | "));
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let lowers = std::env::args().any(|argument| argument == "--lower");
    let names: Vec<&str> = counts(&[]).keys().copied().collect();
    println!("Matches per 10,000 words:\n\n| text | words | {} |", names.join(" | "));
    println!("| --- | {} ---: |", "---: |".repeat(names.len()));
    print("documents", &documents());
    print("string literals and help", &literals());
    print("configuration and protobuf comments", &settings());
    let path = root().join("tests/repository/style.toml");
    let old = std::fs::read_to_string(&path).unwrap_or_default();
    let old: BTreeMap<String, BTreeMap<String, usize>> = toml::from_str(&old)?;
    let mut new = BTreeMap::new();
    let mut all = Vec::new();
    for manifest in files(&["Cargo.toml"]) {
        let package = manifest.parent().unwrap_or(Path::new(""));
        let passages = comments(package);
        let name = if package == Path::new("") { ".".into() } else { package.to_string_lossy() };
        let before = old.get(&*name);
        let lowered: BTreeMap<&str, usize> = counts(&passages)
            .into_iter()
            .map(|(row, count)| {
                (row, before.map_or(count, |of| count.min(of.get(row).copied().unwrap_or(0))))
            })
            .filter(|(_, count)| *count > 0)
            .collect();
        new.insert(name.into_owned(), lowered);
        all.extend(passages);
    }
    print("comments in code", &all);
    if lowers {
        let head = "# Matches of each pattern in the comments of each package: the most that tests/style.rs allows.\n\n";
        std::fs::write(path, format!("{head}{}", toml::to_string(&new)?))?;
    }
    Ok(())
}
