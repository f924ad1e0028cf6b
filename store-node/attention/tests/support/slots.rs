//! Rows and queries as a GPU's memory holds them: pages in slots that are no neighbours, in an order of
//! their own, rows at a stride, and NaN wherever no row is.

use half::{bf16, f16};
use kvasir_attention::RowDtype;
use kvasir_attention::cuda::variant::ALIGN_BYTES;

/// Sixteen bytes, aligned so.
#[derive(Debug, Clone, Copy)]
#[repr(C, align(16))]
pub(crate) struct Unit([u8; ALIGN_BYTES]);

/// Memory with rows at a stride.
#[derive(Debug)]
pub(crate) struct Slots {
    memory: Vec<Unit>,
    page_offsets_bytes: Vec<u64>,
    pub row_stride_bytes: u32,
    pub rows: u32,
    pub rows_per_page: u32,
}

impl Slots {
    /// Rows as they are stored, each of `row_bytes` bytes.
    pub(crate) fn new<'a>(
        rows: impl ExactSizeIterator<Item = &'a [u8]>,
        row_bytes: usize,
        rows_per_page: usize,
    ) -> Slots {
        let stride = (row_bytes + ALIGN_BYTES).next_multiple_of(ALIGN_BYTES);
        let page_bytes = rows_per_page * stride + 3 * ALIGN_BYTES;
        let count = rows.len();
        let pages = count.div_ceil(rows_per_page);
        let page_at = |page: usize| (pages - 1 - page) * page_bytes + ALIGN_BYTES;
        let units = (pages * page_bytes + ALIGN_BYTES) / ALIGN_BYTES;
        let mut memory = vec![Unit([0xff; ALIGN_BYTES]); units];
        for (at, row) in rows.enumerate() {
            let begin = page_at(at / rows_per_page) + at % rows_per_page * stride;
            write(&mut memory, begin, row);
        }
        Slots {
            memory,
            page_offsets_bytes: (0..pages).map(|page| page_at(page) as u64).collect(),
            row_stride_bytes: stride as u32,
            rows: count as u32,
            rows_per_page: rows_per_page as u32,
        }
    }

    /// Query rows of `d_qk` values, rounded to `dtype`.
    pub(crate) fn queries(values: &[f32], d_qk: usize, dtype: RowDtype) -> Slots {
        let rows: Vec<Vec<u8>> = values.chunks_exact(d_qk).map(|row| stored(row, dtype)).collect();
        let count = rows.len().max(1);
        Slots::new(rows.iter().map(Vec::as_slice), dtype.row_bytes(d_qk), count)
    }

    /// Where each page begins, when the memory begins at `base`.
    pub(crate) fn pages(&self, base: u64) -> Vec<u64> {
        self.page_offsets_bytes.iter().map(|offset| base + offset).collect()
    }

    pub(crate) fn memory(&self) -> &[Unit] {
        &self.memory
    }
}

/// A row of 16-bit values as memory has it.
pub(crate) fn stored(row: &[f32], dtype: RowDtype) -> Vec<u8> {
    match dtype {
        RowDtype::F16 => row.iter().flat_map(|v| f16::from_f32(*v).to_le_bytes()).collect(),
        _ => row.iter().flat_map(|v| bf16::from_f32(*v).to_le_bytes()).collect(),
    }
}

fn write(memory: &mut [Unit], at: usize, row: &[u8]) {
    for (i, byte) in row.iter().enumerate() {
        let at = at + i;
        memory[at / ALIGN_BYTES].0[at % ALIGN_BYTES] = *byte;
    }
}
