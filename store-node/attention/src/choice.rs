//! Which kernel is fastest here. A processor that runs the newer instructions is not always faster by them: it may
//! lower its clock for them, or split them in two.

use std::ptr::NonNull;
use std::sync::OnceLock;
use std::time::Instant;

use crate::attend::{Attention, AttentionOptions, Kernel, Precision};
use crate::pages::{PageList, PageSpec, RowDtype};
use crate::partial::{Partial, Query, Visible};

/// What is measured: one layer of a small batch, some tenths of a millisecond.
const QUERY_ROWS: usize = 64;
const CACHED_ROWS: usize = 256;
const D_QK: usize = 576;
const D_V: usize = 512;
const ROUNDS: usize = 5;
/// An older kernel is taken when it is so much faster. Times vary, and whoever computes the same prompt elsewhere
/// should come to the same bits.
const FASTER_BY: f64 = 1.25;

/// See [`Kernel::best`].
pub(crate) fn fastest(precision: Precision) -> Kernel {
    static F32: OnceLock<Kernel> = OnceLock::new();
    static BF16: OnceLock<Kernel> = OnceLock::new();
    let known = match precision {
        Precision::F32 => &F32,
        Precision::Bf16 => &BF16,
    };
    *known.get_or_init(|| {
        let available = Kernel::available().into_iter();
        let is_of_vectors = |kernel: &Kernel| !matches!(kernel, Kernel::Scalar | Kernel::Portable);
        let of_this =
            available.filter(is_of_vectors).filter(|kernel| kernel.precision() == precision);
        // What is rounded is to be faster than the best of what is not, which is one whoever asks.
        let exact = (precision == Precision::Bf16).then(|| fastest(Precision::F32));
        match exact.into_iter().chain(of_this).collect::<Vec<_>>().as_slice() {
            [] => Kernel::Portable,
            [only] => *only,
            several => choose(&measure(several)),
        }
    })
}

/// The last one that no earlier one is much faster than.
fn choose(took_us: &[(Kernel, f64)]) -> Kernel {
    let (mut chosen, mut least_us) = took_us[0];
    for &(kernel, us) in &took_us[1..] {
        if us <= least_us * FASTER_BY {
            chosen = kernel;
        }
        least_us = least_us.min(us);
    }
    chosen
}

/// The least time of each: the rounds take turns, so that whatever else runs is beside all of them.
fn measure(kernels: &[Kernel]) -> Vec<(Kernel, f64)> {
    // About 1 in bf16, and not all alike.
    let cached: Vec<u16> = (0..CACHED_ROWS * D_QK).map(|at| 0x3f00 | (at % 251) as u16).collect();
    let values: Vec<f32> = (0..QUERY_ROWS * D_QK).map(|at| (at % 17) as f32 / 64.0).collect();
    let spec = PageSpec {
        base: NonNull::from(cached.as_slice()).cast(),
        len_bytes: size_of_val(cached.as_slice()),
        offsets_bytes: &[0],
        rows_per_page: CACHED_ROWS,
        row_stride_bytes: D_QK * size_of::<u16>(),
        rows: CACHED_ROWS,
        width: D_QK,
        dtype: RowDtype::Bf16,
    };
    // SAFETY: the rows are `cached`, which outlives the pages and is not written.
    let pages = unsafe { PageList::new(spec) }.expect("rows of a shape that is written here");
    let scale = 0.05;
    let query = Query { values: &values, d_qk: D_QK, d_v: D_V, scale, visible: Visible::All };
    let mut partial = Partial::empty(QUERY_ROWS, D_V);
    let with = |kernel: &Kernel| {
        let options = AttentionOptions { kernel: *kernel, threads: 1, wide_rows_min: QUERY_ROWS };
        (*kernel, Attention::new(options), f64::INFINITY)
    };
    let mut sides: Vec<(Kernel, Attention, f64)> = kernels.iter().map(with).collect();
    for round in 0..=ROUNDS {
        for (_, attention, least_us) in &mut sides {
            let began = Instant::now();
            attention.attend(&query, &pages, partial.as_mut());
            // The first one brings the memory.
            if round > 0 {
                *least_us = least_us.min(began.elapsed().as_secs_f64() * 1e6);
            }
        }
    }
    sides.into_iter().map(|(kernel, _, us)| (kernel, us)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_older_kernel_is_taken_when_it_is_much_faster() {
        let of = |avx2, avx512, amx| {
            choose(&[(Kernel::Avx2, avx2), (Kernel::Avx512, avx512), (Kernel::Amx, amx)])
        };
        assert_eq!(of(200.0, 100.0, 20.0), Kernel::Amx);
        assert_eq!(of(200.0, 100.0, 110.0), Kernel::Amx, "times vary");
        assert_eq!(of(200.0, 100.0, 130.0), Kernel::Avx512);
        assert_eq!(of(100.0, 130.0, 124.0), Kernel::Amx);
        assert_eq!(of(100.0, 130.0, 300.0), Kernel::Avx2);
        assert_eq!(of(100.0, 124.0, 154.0), Kernel::Avx512, "not much slower than any");
        let of = |dots| choose(&[(Kernel::Avx512, 100.0), (Kernel::Avx512Bf16, dots)]);
        assert_eq!(of(52.0), Kernel::Avx512Bf16, "as on Zen 5");
        assert_eq!(of(190.0), Kernel::Avx512, "as on Sapphire Rapids");
    }

    #[test]
    fn those_that_run_here_are_measured() {
        let measured = measure(&Kernel::available());
        assert_eq!(measured.len(), Kernel::available().len());
        assert!(measured.iter().all(|(_, us)| *us > 0.0 && us.is_finite()), "{measured:?}");
        let (exact, rounded) = (fastest(Precision::F32), fastest(Precision::Bf16));
        assert_eq!(exact.precision(), Precision::F32);
        assert!(exact.runs_here() && rounded.runs_here());
    }
}
