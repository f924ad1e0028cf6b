//! The targets on stable Rust: each with arbitrary bytes, and with valid ones that were changed in a
//! few places, which get much farther.

use std::collections::BTreeSet;
use std::path::Path;

use proptest::prelude::*;
use proptest::sample::Index;
use proptest::test_runner::TestRunner;

use crate::Target;

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

/// Every parser accepts what its changes begin with, and bears arbitrary bytes and changed ones.
///
/// # Panics
/// When one does not.
pub fn bear(targets: &[Target]) {
    for target in targets {
        let seeds = (target.seeds)();
        for seed in &seeds {
            assert!((target.run)(seed), "{} does not accept {seed:?}", target.name);
        }
        check(proptest::collection::vec(any::<u8>(), 0..BYTES_MAX), target);
        let seeds = proptest::sample::select(seeds);
        check((seeds, edits()).prop_map(|(seed, edits)| edited(seed, &edits)), target);
    }
}

/// Each target has its file for the fuzzer, and no file is without one: of those that `is_ours`.
///
/// # Panics
/// When they differ.
pub fn has_its_file(targets: &[Target], folder: &Path, is_ours: impl Fn(&str) -> bool) {
    let files = std::fs::read_dir(folder).expect("the folder of the targets").map(|file| {
        let path = file.expect("a readable folder").path();
        path.file_stem().expect("a name").to_string_lossy().into_owned()
    });
    let files: BTreeSet<String> = files.filter(|name| is_ours(name)).collect();
    assert_eq!(files, targets.iter().map(|target| target.name.to_owned()).collect());
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::within;

    fn of(run: fn(&[u8]) -> bool) -> [Target; 1] {
        [Target { name: "here", run, seeds: || vec![b"KV12".to_vec()] }]
    }

    #[test]
    fn a_parser_that_believes_a_length_is_found() {
        let believing = || within(64, || std::hint::black_box(vec![0u8; 1 << 20]).len());
        assert!(std::panic::catch_unwind(believing).is_err());
        assert_eq!(within(64, || std::hint::black_box(vec![0u8; 64]).len()), 64);
    }

    #[test]
    fn a_parser_that_panics_behind_its_magic_is_found() {
        let honest = |bytes: &[u8]| bytes.starts_with(b"KV") && bytes.len() > 3;
        bear(&of(honest));
        let panics = |bytes: &[u8]| bytes.starts_with(b"KV") && bytes[3] > 0;
        assert!(std::panic::catch_unwind(|| bear(&of(panics))).is_err());
        let refuses = |_: &[u8]| false;
        assert!(std::panic::catch_unwind(|| bear(&of(refuses))).is_err());
    }
}
