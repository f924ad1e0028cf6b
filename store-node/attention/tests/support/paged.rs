//! Rows in pages of a test's own memory, as slot memory would hold them.

use std::ptr::NonNull;

use half::{bf16, f16};
use kvasir_attention::{PageList, PageSpec, RowDtype};

/// Pages of `rows_per_page` rows with gaps between rows and pages, in shuffled order.
pub(crate) struct Paged {
    memory: Vec<u64>,
    offsets_bytes: Vec<usize>,
    rows_per_page: usize,
    row_stride_bytes: usize,
    rows: usize,
    width: usize,
    dtype: RowDtype,
}

impl Paged {
    pub(crate) fn new(
        rows: &[&[f32]],
        width: usize,
        rows_per_page: usize,
        dtype: RowDtype,
    ) -> Paged {
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

    pub(crate) fn spec(&self) -> PageSpec<'_> {
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

    pub(crate) fn list(&self) -> PageList<'_> {
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
