//! Where operands lie: packed queries, rows in place or copied, interleaved values.

use std::arch::x86_64::*;

use half::bf16;

use super::tiles::{LINE_BYTES, Rows, TILE_ROWS};
use super::{PAIR_ROWS, STEP_ROWS, STEP_TILES, Scratch};
use crate::pages::PageList;
use crate::partial::Query;

/// Values of bf16 in a line.
const LINE_VALUES: usize = LINE_BYTES / size_of::<bf16>();
/// Lines from panel to panel: two tiles for each 32 rows, and a few more, so that the same tile of
/// all panels does not compete for the same lines of the first-level cache.
pub(super) const PANEL_LINES: usize = STEP_TILES * TILE_ROWS + 3;

#[repr(C, align(64))]
#[derive(Debug, Clone, Copy)]
struct Line([u8; LINE_BYTES]);

/// Memory in aligned lines.
#[derive(Debug, Default)]
pub(super) struct Lines(Vec<Line>);

impl Lines {
    fn reserve(&mut self, lines: usize) {
        if self.0.len() < lines {
            self.0.resize(lines, Line([0; LINE_BYTES]));
        }
    }

    /// Where a line begins, to read.
    pub(super) fn at(&self, line: usize) -> *const u8 {
        debug_assert!(line <= self.0.len());
        self.0.as_ptr().wrapping_add(line).cast()
    }

    /// Where a line begins, to write.
    pub(super) fn at_mut(&mut self, line: usize) -> *mut u8 {
        debug_assert!(line <= self.0.len());
        self.0.as_mut_ptr().wrapping_add(line).cast()
    }
}

/// What a chunk's operands measure.
#[derive(Debug, Clone, Copy)]
pub(super) struct Shape {
    /// Blocks of sixteen query rows.
    pub blocks: usize,
    /// Tiles along a row: 32 values each.
    pub steps: usize,
    /// Panels of 32 columns of values.
    pub panels: usize,
}

impl Shape {
    pub(super) fn new(query: &Query<'_>) -> Shape {
        Shape {
            blocks: query.rows().div_ceil(TILE_ROWS),
            steps: query.d_qk.div_ceil(LINE_VALUES),
            panels: query.d_v.div_ceil(LINE_VALUES),
        }
    }

    /// Lines of a block of packed queries.
    pub(super) fn query_lines(&self) -> usize {
        self.steps * TILE_ROWS
    }

    /// Lines of a block's sums; panels are counted by twos.
    pub(super) fn sum_lines(&self) -> usize {
        self.panels.next_multiple_of(2) * 2 * TILE_ROWS
    }

    pub(super) fn reserve(&self, scratch: &mut Scratch) {
        scratch.queries.reserve(self.blocks * self.query_lines());
        scratch.scores.reserve(2 * STEP_ROWS);
        scratch.weights.reserve(self.blocks * STEP_TILES / 2 * TILE_ROWS);
        scratch.values.reserve(self.panels.next_multiple_of(2) * PANEL_LINES);
        scratch.sums.reserve(self.blocks * self.sum_lines());
    }
}

/// Sixteen vectors of sixteen words, rows and columns exchanged.
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn transpose(rows: &mut [__m512i; 16]) {
    let mut t = [_mm512_setzero_si512(); 16];
    for i in 0..8 {
        t[2 * i] = _mm512_unpacklo_epi32(rows[2 * i], rows[2 * i + 1]);
        t[2 * i + 1] = _mm512_unpackhi_epi32(rows[2 * i], rows[2 * i + 1]);
    }
    for i in 0..4 {
        rows[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
        rows[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
        rows[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
        rows[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
    }
    for i in 0..4 {
        t[i] = _mm512_shuffle_i32x4::<0x88>(rows[i], rows[4 + i]);
        t[4 + i] = _mm512_shuffle_i32x4::<0xdd>(rows[i], rows[4 + i]);
        t[8 + i] = _mm512_shuffle_i32x4::<0x88>(rows[8 + i], rows[12 + i]);
        t[12 + i] = _mm512_shuffle_i32x4::<0xdd>(rows[8 + i], rows[12 + i]);
    }
    for i in 0..4 {
        rows[i] = _mm512_shuffle_i32x4::<0x88>(t[i], t[8 + i]);
        rows[8 + i] = _mm512_shuffle_i32x4::<0xdd>(t[i], t[8 + i]);
        rows[4 + i] = _mm512_shuffle_i32x4::<0x88>(t[4 + i], t[12 + i]);
        rows[12 + i] = _mm512_shuffle_i32x4::<0xdd>(t[4 + i], t[12 + i]);
    }
}

/// 32 values from `at`, of which `len` are there, rounded to bf16.
///
/// # Safety
/// `len` values are readable at `at`.
#[inline]
#[target_feature(enable = "avx512f,avx512bf16")]
unsafe fn rounded(at: *const f32, len: usize) -> __m512i {
    let mask = |from: usize| ((1u32 << len.saturating_sub(from).min(16)) - 1) as __mmask16;
    // SAFETY: masked lanes are not read. The conversion's result is the same 512 bits.
    unsafe {
        let low = _mm512_maskz_loadu_ps(mask(0), at);
        let high = _mm512_maskz_loadu_ps(mask(16), at.wrapping_add(16));
        std::mem::transmute::<__m512bh, __m512i>(_mm512_cvtne2ps_pbh(high, low))
    }
}

/// Packs query rows as the score product's right operand; rows and columns that are missing are 0.
#[target_feature(enable = "avx512f,avx512bf16")]
pub(super) fn pack_queries(query: &Query<'_>, shape: &Shape, into: &mut Lines) {
    for block in 0..shape.blocks {
        for step in 0..shape.steps {
            let len = (query.d_qk - step * LINE_VALUES).min(LINE_VALUES);
            let mut rows: [__m512i; 16] = std::array::from_fn(|i| {
                let row = block * TILE_ROWS + i;
                if row >= query.rows() {
                    return _mm512_setzero_si512();
                }
                // SAFETY: `len` values of the row are left from this column on.
                unsafe { rounded(query.row(row).as_ptr().add(step * LINE_VALUES), len) }
            });
            transpose(&mut rows);
            for (i, row) in rows.into_iter().enumerate() {
                let line = block * shape.query_lines() + step * TILE_ROWS + i;
                // SAFETY: `Shape::reserve` made room for every block.
                unsafe { _mm512_store_si512(into.at_mut(line).cast(), row) };
            }
        }
    }
}

/// A step's rows, sixteen by sixteen, in place or copied.
#[derive(Debug)]
pub(super) struct Located {
    pub at: [Rows; STEP_TILES],
    /// Tiles that are there, a multiple of four: the last ones may hold nothing but zeros.
    pub tiles: usize,
    /// Rows that are there.
    pub rows: usize,
}

impl Located {
    /// Rows of bf16 from `from` on, below `reach`.
    pub(super) fn new(
        pages: &PageList<'_>,
        from: usize,
        reach: usize,
        shape: &Shape,
        copies: &mut Lines,
    ) -> Located {
        let rows = STEP_ROWS.min(reach - from);
        let tiles = rows.div_ceil(TILE_ROWS).next_multiple_of(4);
        let row_bytes = pages.width() * size_of::<bf16>();
        let in_place = pages.width().is_multiple_of(LINE_VALUES)
            && pages.rows_in_line().is_multiple_of(TILE_ROWS);
        let mut at = [Rows { at: std::ptr::null(), stride: 0 }; STEP_TILES];
        for (tile, at) in at[..tiles].iter_mut().enumerate() {
            let first = tile * TILE_ROWS;
            if in_place && first + TILE_ROWS <= rows {
                *at = Rows { at: pages.row(from + first), stride: pages.row_stride_bytes() };
                continue;
            }
            copies.reserve(STEP_ROWS * shape.steps);
            for row in first..first + TILE_ROWS {
                let to = copies.at_mut(row * shape.steps);
                let filled = if row < rows { row_bytes } else { 0 };
                // SAFETY: there are `steps` lines for each row of a step, and a row fills no more;
                // scratch is other memory than the list's.
                unsafe {
                    if row < rows {
                        pages.row(from + row).copy_to_nonoverlapping(to, row_bytes);
                    }
                    to.add(filled).write_bytes(0, shape.steps * LINE_BYTES - filled);
                }
            }
            *at = Rows { at: copies.at(first * shape.steps), stride: shape.steps * LINE_BYTES };
        }
        Located { at, tiles, rows }
    }
}

/// Interleaves the values of rows two by two, as the second product's right operand.
#[target_feature(enable = "avx512f,avx512bw")]
pub(super) fn interleave(located: &Located, shape: &Shape, into: &mut Lines) {
    let index = |from: u16| {
        let lanes: [u16; 32] = std::array::from_fn(|i| from + (i as u16) / 2 + (i as u16 % 2) * 32);
        // SAFETY: 64 bytes either way.
        unsafe { std::mem::transmute::<[u16; 32], __m512i>(lanes) }
    };
    let (low, high) = (index(0), index(16));
    let into = into.at_mut(0);
    for pair in 0..located.tiles * TILE_ROWS / 2 {
        let tile = located.at[2 * pair / TILE_ROWS];
        let row = 2 * pair % TILE_ROWS;
        let (step, line) = (2 * pair / PAIR_ROWS, pair % TILE_ROWS);
        // SAFETY: both rows are as wide as the panels, which the shape counted; a panel has two
        // tiles for each pair of row tiles.
        unsafe {
            let upper = tile.at.add(row * tile.stride);
            let lower = upper.add(tile.stride);
            let to = into.add((step * 2 * TILE_ROWS + line) * LINE_BYTES);
            for panel in 0..shape.panels {
                let x = _mm512_loadu_si512(upper.add(panel * LINE_BYTES).cast());
                let y = _mm512_loadu_si512(lower.add(panel * LINE_BYTES).cast());
                let to = to.add(panel * PANEL_LINES * LINE_BYTES);
                _mm512_store_si512(to.cast(), _mm512_permutex2var_epi16(x, low, y));
                _mm512_store_si512(
                    to.add(TILE_ROWS * LINE_BYTES).cast(),
                    _mm512_permutex2var_epi16(x, high, y),
                );
            }
        }
    }
}
