//! Rows in pages of a test's own memory, as slot memory would hold them.

use std::ptr::NonNull;

use half::{bf16, f16};
use kvasir_attention::{
    Attention, AttentionOptions, Kernel, PageList, PageSpec, Partial, Precision, Query, RowDtype,
    Visible,
};

/// Pages of `rows_per_page` rows with gaps between rows and pages, in shuffled order.
pub struct Paged {
    memory: Vec<u64>,
    offsets_bytes: Vec<usize>,
    rows_per_page: usize,
    row_stride_bytes: usize,
    rows: usize,
    width: usize,
    dtype: RowDtype,
}

impl Paged {
    pub fn new(rows: &[&[f32]], width: usize, rows_per_page: usize, dtype: RowDtype) -> Paged {
        let row_stride_bytes = (dtype.row_bytes(width) + 3 * dtype.align_bytes())
            .next_multiple_of(dtype.align_bytes());
        let page_bytes = (rows_per_page * row_stride_bytes + 16).next_multiple_of(8);
        let pages = rows.len().div_ceil(rows_per_page);
        // What no row covers is NaN: a kernel that reads it says so.
        let mut memory = vec![u64::MAX; (pages + 1) * page_bytes / 8];
        let offsets_bytes: Vec<usize> =
            (0..pages).map(|page| (pages - page) * page_bytes).collect();
        let bytes: &mut [u8] = bytes_of(&mut memory);
        for (i, row) in rows.iter().enumerate() {
            let at = offsets_bytes[i / rows_per_page] + i % rows_per_page * row_stride_bytes;
            store(row, dtype, &mut bytes[at..]);
        }
        let rows = rows.len();
        Paged { memory, offsets_bytes, rows_per_page, row_stride_bytes, rows, width, dtype }
    }

    pub fn spec(&self) -> PageSpec<'_> {
        PageSpec {
            base: NonNull::from(self.memory.as_slice()).cast(),
            len_bytes: self.memory.len() * 8,
            offsets_bytes: &self.offsets_bytes,
            rows_per_page: self.rows_per_page,
            row_stride_bytes: self.row_stride_bytes,
            rows: self.rows,
            width: self.width,
            dtype: self.dtype,
        }
    }

    pub fn list(&self) -> PageList<'_> {
        // SAFETY: the memory is this value's own, and borrowed for as long as the list.
        unsafe { PageList::new(self.spec()) }.expect("pages within their memory")
    }
}

/// Writes a row as memory of its type has it, rounded.
fn store(row: &[f32], dtype: RowDtype, bytes: &mut [u8]) {
    let (pairs, _) = bytes.as_chunks_mut::<2>();
    match dtype {
        RowDtype::F32 => {
            let (words, _) = bytes.as_chunks_mut::<4>();
            words.iter_mut().zip(row).for_each(|(to, value)| *to = value.to_ne_bytes());
        }
        RowDtype::Bf16 => pairs
            .iter_mut()
            .zip(row)
            .for_each(|(to, value)| *to = bf16::from_f32(*value).to_ne_bytes()),
        RowDtype::F16 => pairs
            .iter_mut()
            .zip(row)
            .for_each(|(to, value)| *to = f16::from_f32(*value).to_ne_bytes()),
        RowDtype::Fp8Latent => {
            // A scale of its own for each group of each row, near 2^-8: values reach 1.75.
            let scale = |group: usize| (1.0 + row[group].abs()) / 256.0;
            for (i, value) in row[..512].iter().enumerate() {
                bytes[i] = nearest_e4m3(value / scale(i / 128));
            }
            for group in 0..4 {
                bytes[512 + 4 * group..][..4].copy_from_slice(&scale(group).to_ne_bytes());
            }
            for (i, value) in row[512..].iter().enumerate() {
                bytes[528 + 2 * i..][..2].copy_from_slice(&bf16::from_f32(*value).to_ne_bytes());
            }
        }
    }
}

/// The byte of e4m3 next below or at a value's magnitude, with its sign.
fn nearest_e4m3(value: f32) -> u8 {
    let magnitude = |byte: u8| match byte >> 3 {
        0 => f32::from(byte & 7) / 512.0,
        exponent => (1.0 + f32::from(byte & 7) / 8.0) * 2f32.powi(i32::from(exponent) - 7),
    };
    let mut byte = 0u8;
    for bit in (0..7).rev() {
        let next = byte | 1 << bit;
        if next < 0x7f && magnitude(next) <= value.abs() {
            byte = next;
        }
    }
    byte | if value < 0.0 { 0x80 } else { 0 }
}

fn bytes_of(memory: &mut [u64]) -> &mut [u8] {
    let (len, at) = (memory.len() * 8, memory.as_mut_ptr().cast());
    // SAFETY: the same memory, borrowed alone, as bytes.
    unsafe { std::slice::from_raw_parts_mut(at, len) }
}

/// A way to compute a partial.
#[derive(Debug, Clone, Copy)]
pub struct Way {
    pub kernel: Kernel,
    pub wide: bool,
    pub threads: usize,
}

impl Way {
    /// Every kernel of this processor with both strategies, and one with threads.
    pub fn all() -> Vec<Way> {
        let mut ways = Vec::new();
        for kernel in Kernel::available() {
            for wide in [false, true] {
                // The reference and the tiles know no strategies.
                if !wide || !matches!(kernel, Kernel::Scalar | Kernel::Amx) {
                    ways.push(Way { kernel, wide, threads: 1 });
                }
            }
        }
        ways.push(Way { kernel: Kernel::best(Precision::F32), wide: true, threads: 3 });
        ways
    }

    /// The way that callers get who choose nothing.
    pub fn best() -> Way {
        Way { kernel: Kernel::best(Precision::F32), wide: false, threads: 1 }
    }

    /// What the way computes with over rows of this type.
    pub fn precision(self, dtype: RowDtype) -> Precision {
        if self.kernel.takes(dtype) { self.kernel.precision() } else { Precision::F32 }
    }

    pub fn attention(self) -> Attention {
        Attention::new(AttentionOptions {
            kernel: self.kernel,
            threads: self.threads,
            wide_rows_min: if self.wide { 0 } else { usize::MAX },
        })
    }

    pub fn attend(self, query: &Query<'_>, pages: &PageList<'_>) -> Partial {
        let mut partial = Partial::empty(query.rows(), query.d_v);
        // What was there before must not matter.
        partial.o.fill(f32::NAN);
        partial.l.fill(7.0);
        self.attention().attend(query, pages, partial.as_mut());
        partial
    }
}

/// A query that sees every row.
pub fn query(values: &[f32], d_qk: usize, d_v: usize, scale: f32) -> Query<'_> {
    Query { values, d_qk, d_v, scale, visible: Visible::All }
}

/// What the reference vectors allow an output of an f32 kernel, relative to the largest one.
pub const TOLERANCE: f32 = 1e-5;

/// Compares with the tolerances of the reference vectors for an f32 kernel.
pub fn assert_close(got: &Partial, want: &Partial, what: &str) {
    assert_within(TOLERANCE, got, want, what);
}

/// As [`assert_close`], with another tolerance for `o`, relative to its largest value.
pub fn assert_within(tolerance: f32, got: &Partial, want: &Partial, what: &str) {
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
