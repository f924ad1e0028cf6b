//! The targets on stable Rust.

use std::path::Path;

use kvasir_fuzzing::{bear, has_its_file};

use super::*;

#[test]
fn every_parser_bears_arbitrary_bytes_and_valid_ones_that_were_changed() {
    bear(&TARGETS);
}

#[test]
fn every_target_has_its_file_for_the_fuzzer() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/fuzz_targets");
    // Parsers of the crates below have their targets there.
    let is_of_others = |name: &str| name.starts_with("verbs_") || name.starts_with("libfabric_");
    has_its_file(&TARGETS, &folder, |name| !is_of_others(name));
}

/// As many entries as fit, each as short as can be: the most that a peer can make of its bytes.
#[test]
fn a_question_that_is_nothing_but_entries_is_answered_or_refused() {
    for entry in [[0x12, 0].as_slice(), &[0x18, 1], &[0x12, 0, 0x18, 1]] {
        for entries in [1, 4096, 4097, CLOSING_BYTES_MAX / entry.len()] {
            closing_question(&entry.repeat(entries));
        }
    }
}
