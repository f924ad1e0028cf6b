//! The files of reference vectors, by every kernel and strategy that takes their rows.

use std::io::Write;
use std::path::{Path, PathBuf};

use kvasir_attention::vectors::{Case, CaseError};
use kvasir_attention::{AttentionOptions, Kernel};

fn files(folder: &str) -> Vec<PathBuf> {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/data").join(folder);
    let entries = std::fs::read_dir(dir).expect("test data");
    let mut files: Vec<PathBuf> = entries
        .map(|entry| entry.expect("an entry").path())
        .filter(|path| path.extension().is_some_and(|extension| extension == "safetensors"))
        .collect();
    files.sort();
    files
}

fn check(folder: &str, cases: usize) {
    let files = files(folder);
    assert_eq!(files.len(), cases, "cases of {folder}");
    for kernel in Kernel::ALL.into_iter().filter(|kernel| !kernel.runs_here()) {
        let (name, needs) = (kernel.name(), kernel.needs());
        writeln!(std::io::stderr(), "skipped: {name} needs {needs}, which this processor lacks")
            .ok();
    }
    for path in files {
        let case = Case::parse(&std::fs::read(&path).expect("test data")).expect("a case");
        assert!(case.check_merge().passed, "{}: {:?}", path.display(), case.check_merge());
        for kernel in Kernel::available() {
            if !kernel.takes(case.dtype()) {
                continue;
            }
            for wide_rows_min in [0, usize::MAX] {
                for rows_per_page in [1, 16, 64] {
                    let options = AttentionOptions { kernel, threads: 1, wide_rows_min };
                    let verdict = case.check(options, rows_per_page).expect("pages");
                    assert!(
                        verdict.passed,
                        "{}, {options:?}, pages of {rows_per_page}: {verdict:?}",
                        path.display()
                    );
                }
            }
        }
    }
}

#[test]
fn cases_in_bf16_agree_whole_split_selected_and_merged() {
    check("mla_partial", 7);
}

#[test]
fn cases_in_f16_and_fp8_agree_whole_split_selected_and_merged() {
    check("mla_partial_types", 6);
}

/// A small file, and the same with one byte string put for another of equal length.
fn changed(from: &str, to: &str) -> CaseError {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/data/mla_partial");
    let mut bytes = std::fs::read(dir.join("narrow_model.safetensors")).expect("test data");
    assert_eq!(from.len(), to.len(), "the header keeps its length");
    let at = bytes.windows(from.len()).position(|window| window == from.as_bytes());
    let at = at.expect("the header says so");
    bytes[at..at + to.len()].copy_from_slice(to.as_bytes());
    Case::parse(&bytes).expect_err("a broken file")
}

#[test]
fn broken_files_say_what_is_wrong_with_them() {
    let says = |error: CaseError, part: &str| {
        let text = error.to_string();
        assert!(text.contains(part), "{text} does not contain {part}");
    };
    says(Case::parse(b"").expect_err("nothing"), "not a safetensors file");
    says(Case::parse(&[0xff; 40]).expect_err("noise"), "not a safetensors file");
    says(changed("\"part_m\"", "\"pert_m\""), "`part_m` is missing");
    says(changed("\"scale\"", "\"skale\""), "`scale`");
    says(changed("\"holders\":\"2\"", "\"holders\":\"0\""), "`holders`");
    says(changed("\"holders\":\"2\"", "\"holders\":\"1\""), "`part_o`");
    says(changed("[3,4,80]", "[4,3,80]"), "`o`");
}

#[test]
fn values_that_no_row_has_are_refused_and_wrong_ones_fail() {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/data/mla_partial");
    let good = std::fs::read(dir.join("narrow_model.safetensors")).expect("test data");
    let header = u64::from_le_bytes(good[..8].try_into().expect("eight bytes")) as usize;
    let text = std::str::from_utf8(&good[8..8 + header]).expect("a header");
    let begin = |name: &str| {
        let at = text.find(&format!("\"{name}\"")).expect("a tensor");
        let offsets = text[at..].split("\"data_offsets\":[").nth(1).expect("offsets");
        let begin = offsets.split(',').next().expect("a number");
        8 + header + begin.parse::<usize>().expect("a number")
    };
    let mut bytes = good.clone();
    bytes[begin("split")] = 9;
    assert!(matches!(
        Case::parse(&bytes),
        Err(CaseError::Beyond { name: "split", found: 9, limit: 2 })
    ));
    // The exponent of one value of `o`, of `m` and of `l`.
    for (name, at) in [("o", 3), ("m", 3), ("l", 3), ("part_o", 3), ("part_m", 3), ("part_l", 3)] {
        let mut bytes = good.clone();
        bytes[begin(name) + at] ^= 0x04;
        let case = Case::parse(&bytes).expect("a case");
        let kernel = Kernel::Scalar;
        let verdict = case.check(AttentionOptions { kernel, ..Default::default() }, 64);
        assert!(!verdict.expect("pages").passed, "{name}");
    }
}
