//! `kvasir doctor --attention FILE...`: every attention kernel of this processor against files of
//! reference vectors. It prints the largest error of each, and fails when one is beyond its tolerance or
//! a file is not what it should be.

use std::error::Error;
use std::path::{Path, PathBuf};

use kvasir_attention::vectors::{Case, Verdict};
use kvasir_attention::{AttentionOptions, Kernel, Precision};

use crate::output::{complain, say, sentence};

/// As a page of the reference engine.
const ROWS_PER_PAGE: usize = 64;

/// Checks all files, also those behind one that failed.
pub(super) fn run(files: &[PathBuf]) -> Result<(), Box<dyn Error>> {
    for kernel in Kernel::ALL.into_iter().filter(|kernel| !kernel.runs_here()) {
        say(&format!(
            "{}: skipped, because this processor lacks {}",
            kernel.name(),
            kernel.needs()
        ));
    }
    let mut failed = 0;
    for file in files {
        match check(file) {
            Ok(true) => {}
            Ok(false) => failed += 1,
            Err(error) => {
                complain(&format!("{}: {}", file.display(), sentence(error.as_ref())));
                failed += 1;
            }
        }
    }
    match failed {
        0 => Ok(()),
        _ => Err(format!("attention: {failed} of {} files failed", files.len()).into()),
    }
}

/// Whether all kernels that take the file's rows passed.
fn check(file: &Path) -> Result<bool, Box<dyn Error>> {
    let case = Case::parse(&std::fs::read(file)?)?;
    say(&format!("{} (rows of {:?})", file.display(), case.dtype()));
    let merged = case.check_merge();
    say(&line("merge of partials", &merged, Precision::F32));
    let mut passed = merged.passed;
    for kernel in Kernel::available() {
        if !kernel.takes(case.dtype()) {
            say(&format!("  {:20} skipped, because it rounds these rows to bf16", kernel.name()));
            continue;
        }
        let options = AttentionOptions { kernel, ..AttentionOptions::default() };
        let verdict = case.check(options, ROWS_PER_PAGE)?;
        say(&line(kernel.name(), &verdict, kernel.precision()));
        passed &= verdict.passed;
    }
    Ok(passed)
}

/// The errors by which a kernel of this precision is judged.
fn line(what: &str, verdict: &Verdict, precision: Precision) -> String {
    let errors = verdict.errors;
    let o = match precision {
        Precision::F32 => format!("o {:.1e} of its maximum", errors.o),
        Precision::Bf16 => format!("o {:.1e}, norm {:.1e}", errors.o_absolute, errors.o_norm),
    };
    let end = match (verdict.passed, errors.is_broken) {
        (true, _) => "ok",
        (false, true) => "failed: a value is not a number, or a set is empty on one side only",
        (false, false) => "failed",
    };
    format!("  {what:20} {o}, m {:.1e}, ln l {:.1e}: {end}", errors.m, errors.l)
}
