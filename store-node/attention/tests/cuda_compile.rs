//! The CUDA kernels by NVIDIA's compiler, which needs no GPU: every kind of row, for both generations.

use std::io::Write;
use std::path::{Path, PathBuf};

use kvasir_attention::RowDtype;
use kvasir_attention::cuda::CudaError;
use kvasir_attention::cuda::compile::Nvrtc;
use kvasir_attention::cuda::variant::{Arch, Variant};
use kvasir_cuda::DriverError;

/// Registers of a thread that the assembler may keep in memory: some that a CTA uses once for each
/// tile, beside the hundreds of products of one.
const SPILL_BYTES_MAX: u32 = 64;

/// The compiler, of the system or of the virtual environment that `.ci/run` makes; where there is
/// none, a sentence.
fn nvrtc() -> Option<Nvrtc> {
    let lib = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/e2e-venv/lib");
    let pythons = std::fs::read_dir(lib).into_iter().flatten().flatten();
    let mut files = pythons
        .map(|python| python.path().join("site-packages/nvidia/cuda_nvrtc/lib/libnvrtc.so.12"))
        .filter(|file: &PathBuf| file.exists());
    let opened = match files.next() {
        Some(file) => Nvrtc::open_file(&file),
        None => Nvrtc::open(),
    };
    match opened {
        Ok(nvrtc) => Some(nvrtc),
        Err(error @ CudaError::Driver(DriverError::Missing { .. })) => {
            writeln!(std::io::stderr(), "skipped: NVRTC: {error}").ok();
            None
        }
        Err(error) => panic!("{error}"),
    }
}

fn number_before(log: &str, what: &str) -> Vec<u32> {
    let before = log.match_indices(what).map(|(at, _)| &log[..at]);
    before
        .map(|text| {
            let digits = text.trim_end().rsplit(|c: char| !c.is_ascii_digit()).next();
            digits.and_then(|digits| digits.parse().ok()).expect("a number")
        })
        .collect()
}

#[test]
fn every_kernel_compiles_and_keeps_its_sums_in_registers() {
    let Some(nvrtc) = nvrtc() else { return };
    for arch in Arch::ALL {
        for dtype in [RowDtype::Bf16, RowDtype::F16, RowDtype::Fp8Latent] {
            let variant = Variant::new(dtype, 576, 512, arch).expect("a kernel");
            let compiled = nvrtc.compile(&variant, arch).expect("a cubin");
            let what = format!("{dtype:?} for {}: {}", arch.name(), compiled.log);
            assert!(compiled.cubin.starts_with(b"\x7fELF"), "{what}");
            let names = ["kvasir_partial", "kvasir_merge_4", "kvasir_merge_8", "kvasir_merge_16"];
            for name in names {
                let holds = |bytes: &[u8]| bytes == name.as_bytes();
                assert!(compiled.cubin.windows(name.len()).any(holds), "{name}: {what}");
            }
            let spilled = number_before(&compiled.log, "bytes spill stores");
            assert_eq!(spilled.len(), names.len(), "{what}");
            assert!(spilled.iter().all(|&bytes| bytes <= SPILL_BYTES_MAX), "{what}");
            // Registers do not go where they should, or products wait for what they need not wait for.
            assert!(!compiled.log.contains("(C75"), "{what}");
        }
    }
}

#[test]
fn widths_of_other_models_compile() {
    let Some(nvrtc) = nvrtc() else { return };
    for (dtype, d_qk, d_v) in [(RowDtype::Bf16, 80, 64), (RowDtype::F16, 83, 61)] {
        for arch in Arch::ALL {
            let variant = Variant::new(dtype, d_qk, d_v, arch).expect("a kernel");
            nvrtc.compile(&variant, arch).expect("a cubin");
        }
    }
}
