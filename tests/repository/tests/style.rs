//! The text that users read is in plain English, and comments only get better.
//!
//! `cargo run -p kvasir-tests-repository --example style` prints all counts, and with `--lower` it lowers the ceilings of
//! comments in `style.toml` to the present counts.

use std::collections::BTreeMap;
use std::path::Path;

use kvasir_tests_repository::prose::{
    Passage, comments, documents, literals, rows, settings, words,
};
use kvasir_tests_repository::{assert_none, files, read};

/// Matches of one pattern in 10,000 words of text that users read.
const USER_TEXT_MAX: usize = 5;

fn complaints(kind: &str, passages: &[Passage]) -> Vec<String> {
    let words: usize = passages.iter().map(words).sum();
    let mut found = Vec::new();
    for row in rows() {
        let matched: Vec<&Passage> =
            passages.iter().filter(|passage| row.matches(passage) > 0).collect();
        let count: usize = matched.iter().map(|passage| row.matches(passage)).sum();
        if count * 10_000 > USER_TEXT_MAX * words {
            found.push(format!("{kind}, {}: {count} matches in {words} words", row.name));
            found.extend(matched.iter().map(|Passage { file, line, text }| {
                format!("  {file}:{line}: {}", text.chars().take(200).collect::<String>())
            }));
        }
    }
    found
}

#[test]
fn documents_are_in_plain_english() {
    assert_none("rewrite these sentences", &complaints("documents", &documents()));
}

#[test]
fn errors_logs_metrics_and_help_are_in_plain_english() {
    assert_none("rewrite these sentences", &complaints("string literals", &literals()));
}

#[test]
fn configurations_and_protobuf_are_in_plain_english() {
    assert_none("rewrite these comments", &complaints("settings", &settings()));
}

/// Each package may have as many matches in its comments as `style.toml` says, and no package is left out.
#[test]
fn comments_stay_below_the_ceilings_of_their_packages() {
    let ceilings: BTreeMap<String, BTreeMap<String, usize>> =
        toml::from_str(&read(Path::new("tests/repository/style.toml"))).expect("valid TOML");
    let mut found = Vec::new();
    for manifest in files(&["Cargo.toml"]) {
        let package = manifest.parent().expect("a manifest is in a folder");
        let passages = comments(package);
        let name = if package == Path::new("") { ".".into() } else { package.to_string_lossy() };
        for row in rows() {
            let count: usize = passages.iter().map(|passage| row.matches(passage)).sum();
            let ceiling = ceilings.get(&*name).and_then(|of| of.get(row.name)).copied();
            if count > ceiling.unwrap_or(0) {
                let ceiling = ceiling.unwrap_or(0);
                found.push(format!(
                    "{name}, {}: {count} matches, and {ceiling} are allowed",
                    row.name
                ));
            }
        }
    }
    assert_none("rewrite comments; a ceiling is never raised", &found);
}
