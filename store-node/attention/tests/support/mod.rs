//! What the kernels' tests share: rows in pages, and ways to compute over them.

mod paged;

use kvasir_attention::{
    Attention, AttentionOptions, Kernel, PageList, Partial, Precision, Query, RowDtype, Visible,
};

pub(crate) use paged::Paged;

/// A way to compute a partial.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Way {
    pub kernel: Kernel,
    pub wide: bool,
    pub threads: usize,
}

impl Way {
    /// Every kernel of this processor with both strategies, and one with threads.
    pub(crate) fn all() -> Vec<Way> {
        let mut ways = Vec::new();
        for kernel in Kernel::available() {
            for wide in [false, true] {
                // The reference and products of bf16 know no strategies.
                if !wide || !matches!(kernel, Kernel::Scalar | Kernel::Avx512Bf16 | Kernel::Amx) {
                    ways.push(Way { kernel, wide, threads: 1 });
                }
            }
        }
        ways.push(Way { kernel: Kernel::best(Precision::F32), wide: true, threads: 3 });
        ways
    }

    /// The way that callers get who choose nothing.
    pub(crate) fn best() -> Way {
        Way { kernel: Kernel::best(Precision::F32), wide: false, threads: 1 }
    }

    /// What the way computes with over rows of this type.
    pub(crate) fn precision(self, dtype: RowDtype) -> Precision {
        if self.kernel.takes(dtype) { self.kernel.precision() } else { Precision::F32 }
    }

    pub(crate) fn attention(self) -> Attention {
        Attention::new(AttentionOptions {
            kernel: self.kernel,
            threads: self.threads,
            wide_rows_min: if self.wide { 0 } else { usize::MAX },
        })
    }

    pub(crate) fn attend(self, query: &Query<'_>, pages: &PageList<'_>) -> Partial {
        let mut partial = Partial::empty(query.rows(), query.d_v);
        // What was there before must not matter.
        partial.o.fill(f32::NAN);
        partial.l.fill(7.0);
        self.attention().attend(query, pages, partial.as_mut());
        partial
    }
}

/// A query that sees every row.
pub(crate) fn query(values: &[f32], d_qk: usize, d_v: usize, scale: f32) -> Query<'_> {
    Query { values, d_qk, d_v, scale, visible: Visible::All }
}

/// What the reference vectors allow an output of an f32 kernel, relative to the largest one.
pub(crate) const TOLERANCE: f32 = 1e-5;

/// Compares with the tolerances of the reference vectors for an f32 kernel.
pub(crate) fn assert_close(got: &Partial, want: &Partial, what: &str) {
    assert_within(TOLERANCE, got, want, what);
}

/// As [`assert_close`], with another tolerance for `o`, relative to its largest value.
pub(crate) fn assert_within(tolerance: f32, got: &Partial, want: &Partial, what: &str) {
    let largest = want.o.iter().fold(0f32, |largest, value| largest.max(value.abs()));
    for (i, (got, want)) in got.o.iter().zip(&want.o).enumerate() {
        assert!((got - want).abs() <= tolerance * largest, "{what}: o[{i}] is {got}, not {want}");
    }
    for (i, (got, want)) in got.m.iter().zip(&want.m).enumerate() {
        let near = got == want || (got - want).abs() <= 1e-4 + 1e-6 * want.abs();
        assert!(near, "{what}: m[{i}] is {got}, not {want}");
    }
    for (i, (got, want)) in got.l.iter().zip(&want.l).enumerate() {
        let near = got == want || (got.ln() - want.ln()).abs() <= 1e-4;
        assert!(near, "{what}: l[{i}] is {got}, not {want}");
    }
    assert!(got.o.len() == want.o.len() && got.m.len() == want.m.len(), "{what}: shape");
}
