//! The targets on stable Rust: each with arbitrary bytes, and with valid ones that were changed in a
//! few places, which get much farther.

use std::collections::BTreeSet;
use std::path::Path;

use proptest::prelude::*;
use proptest::sample::Index;
use proptest::test_runner::TestRunner;

use super::*;

const CASES: u32 = 1000;
const BYTES_MAX: usize = 300;

/// A change of an input.
#[derive(Debug, Clone)]
enum Edit {
    Flip(Index, u8),
    /// A number where a parser may expect one: long ones claim what is not there.
    Number(Index, u64, u8),
    Cut(Index),
    Insert(Index, Vec<u8>),
    /// Some of it again at its end.
    Repeat(Index),
}

fn edits() -> impl Strategy<Value = Vec<Edit>> {
    let number = prop_oneof![any::<u64>(), Just(0), Just(1 << 32), Just(u64::MAX), 0..200u64];
    let bytes = proptest::collection::vec(any::<u8>(), 1..12);
    let edit = prop_oneof![
        4 => (any::<Index>(), 0..8u8).prop_map(|(at, bit)| Edit::Flip(at, bit)),
        3 => (any::<Index>(), number, 1..=8u8).prop_map(|(at, n, bytes)| Edit::Number(at, n, bytes)),
        1 => any::<Index>().prop_map(Edit::Cut),
        1 => (any::<Index>(), bytes).prop_map(|(at, bytes)| Edit::Insert(at, bytes)),
        1 => any::<Index>().prop_map(Edit::Repeat),
    ];
    proptest::collection::vec(edit, 0..5)
}

fn edited(mut bytes: Vec<u8>, edits: &[Edit]) -> Vec<u8> {
    for edit in edits {
        let len = bytes.len();
        let at = |index: &Index| index.index(len + 1);
        match edit {
            Edit::Flip(index, bit) if len > 0 => bytes[index.index(len)] ^= 1 << bit,
            Edit::Flip(..) => {}
            Edit::Number(index, number, width) => {
                let room = &mut bytes[at(index)..];
                let width = room.len().min((*width).into());
                room[..width].copy_from_slice(&number.to_le_bytes()[..width]);
            }
            Edit::Cut(index) => bytes.truncate(at(index)),
            Edit::Insert(index, more) => {
                let at = at(index);
                bytes.splice(at..at, more.iter().copied());
            }
            Edit::Repeat(index) => bytes.extend_from_within(at(index)..),
        }
    }
    bytes
}

fn check(strategy: impl Strategy<Value = Vec<u8>>, target: &Target) {
    let config = ProptestConfig { cases: CASES, failure_persistence: None, ..Default::default() };
    let run = |bytes: Vec<u8>| {
        (target.run)(&bytes);
        Ok(())
    };
    if let Err(failure) = TestRunner::new(config).run(&strategy, run) {
        panic!("{}: {failure}", target.name);
    }
}

#[test]
fn every_parser_bears_arbitrary_bytes() {
    for target in &TARGETS {
        check(proptest::collection::vec(any::<u8>(), 0..BYTES_MAX), target);
    }
}

#[test]
fn every_parser_bears_valid_bytes_that_were_changed() {
    for target in &TARGETS {
        let seeds = proptest::sample::select((target.seeds)());
        check((seeds, edits()).prop_map(|(seed, edits)| edited(seed, &edits)), target);
    }
}

#[test]
fn what_the_changes_begin_with_is_valid() {
    for target in &TARGETS {
        for seed in (target.seeds)() {
            assert!((target.run)(&seed), "{} does not accept {seed:?}", target.name);
        }
    }
}

#[test]
fn every_target_has_its_file_for_the_fuzzer() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/fuzz_targets");
    let files = std::fs::read_dir(folder).expect("the folder of the targets").map(|file| {
        let path = file.expect("a readable folder").path();
        path.file_stem().expect("a name").to_string_lossy().into_owned()
    });
    // Parsers of the crates below have their targets there.
    let of_others = |name: &String| name.starts_with("verbs_") || name.starts_with("libfabric_");
    let files: BTreeSet<String> = files.filter(|name| !of_others(name)).collect();
    assert_eq!(files, TARGETS.iter().map(|target| target.name.to_owned()).collect());
}

#[test]
fn a_parser_that_believes_a_length_is_found() {
    let believing = || within(64, || std::hint::black_box(vec![0u8; 1 << 20]).len());
    assert!(std::panic::catch_unwind(believing).is_err());
    assert_eq!(within(64, || std::hint::black_box(vec![0u8; 64]).len()), 64);
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
