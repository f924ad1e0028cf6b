//! The CUDA kernels' source as code of the processor.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

use kvasir_attention::cuda::variant::Variant;

/// A library made of a file of `tests/cuda`, for one kernel; nothing, and a sentence, where there is no
/// C++ compiler. The caller removes it.
pub(crate) fn build(source: &str, variant: &Variant) -> Option<PathBuf> {
    static BUILT: AtomicU32 = AtomicU32::new(0);
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/cuda").join(source);
    let number = BUILT.fetch_add(1, Ordering::Relaxed);
    let name = format!("emulated-{}-{number}.so", std::process::id());
    let file = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let mut command = Command::new("c++");
    command.args(["-O2", "-std=c++17", "-Wno-unknown-pragmas", "-shared", "-fPIC"]);
    // Fibers jump between stacks, which checks of jumps take for a mistake.
    command.arg("-U_FORTIFY_SOURCE").args(variant.defines().iter().map(|of| format!("-D{of}")));
    command.arg(source).arg("-o").arg(&file);
    let output = match command.output() {
        Ok(output) => output,
        Err(error) => {
            writeln!(std::io::stderr(), "skipped: c++ is needed to emulate CUDA: {error}").ok();
            return None;
        }
    };
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    Some(file)
}
