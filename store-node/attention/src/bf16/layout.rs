//! Where operands lie: packed queries, rows in place or copied, interleaved values.

use std::arch::x86_64::*;

use half::bf16;

use super::unit::{LINE_BYTES, Rows, TILE_BYTES, TILE_ROWS, Unit};
use super::{PAIR_BLOCKS, PAIR_ROWS, STEP_ROWS, STEP_TILES_MAX, Scratch};
use crate::pages::PageList;
use crate::partial::Query;

/// Values of bf16 in a line.
const LINE_VALUES: usize = LINE_BYTES / size_of::<bf16>();
/// Lines between panels, so that the same tile of all panels does not compete for the same lines of
/// the first-level cache.
const PANEL_GAP_LINES: usize = 3;
/// Row tiles of a following step that are known, and fetched, ahead of it.
const AHEAD_TILES: usize = 4;

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
    /// Cached rows of one step.
    pub step_rows: usize,
    reads_panels: bool,
}

impl Shape {
    pub(super) fn new<U: Unit>(query: &Query<'_>) -> Shape {
        let blocks = query.rows().div_ceil(TILE_ROWS);
        Shape {
            blocks,
            step_rows: if blocks == 1 { U::STEP_ROWS_OF_ONE } else { STEP_ROWS },
            steps: query.d_qk.div_ceil(LINE_VALUES),
            panels: query.d_v.div_ceil(LINE_VALUES),
            reads_panels: U::READS_PANELS,
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

    /// Where a block's scores begin: those of two blocks and of the two after them do not meet.
    pub(super) fn score_line(&self, block: usize) -> usize {
        block % (2 * PAIR_BLOCKS) * self.step_rows
    }

    /// Lines of a block's weights in one step: a tile for each 32 rows.
    pub(super) fn weight_lines(&self) -> usize {
        self.step_rows / PAIR_ROWS * TILE_ROWS
    }

    /// Lines from panel to panel: two tiles for each 32 rows and a gap.
    pub(super) fn panel_lines(&self) -> usize {
        self.step_rows + PANEL_GAP_LINES
    }

    pub(super) fn reserve(&self, scratch: &mut Scratch) {
        scratch.queries.reserve(self.blocks * self.query_lines());
        scratch.scores.reserve(self.blocks.min(2 * PAIR_BLOCKS) * self.step_rows);
        scratch.weights.reserve(self.blocks * self.weight_lines());
        if self.reads_panels {
            scratch.values.reserve(self.panels * self.panel_lines());
        }
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
    pub at: [Rows; STEP_TILES_MAX],
    /// Tiles that are there, a multiple of four: the last ones may hold nothing but zeros.
    pub tiles: usize,
    /// Rows that are there.
    pub rows: usize,
    ahead: [Rows; AHEAD_TILES],
    ahead_tiles: usize,
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
        let rows = shape.step_rows.min(reach - from);
        let tiles = rows.div_ceil(TILE_ROWS).next_multiple_of(4);
        let row_bytes = pages.width() * size_of::<bf16>();
        let can_be_in_place = pages.width().is_multiple_of(LINE_VALUES)
            && pages.rows_in_line().is_multiple_of(TILE_ROWS);
        let in_place = |first: usize| {
            (can_be_in_place && first + TILE_ROWS <= reach)
                .then(|| Rows { at: pages.row(first), stride: pages.row_stride_bytes() })
        };
        let mut at = [Rows { at: std::ptr::null(), stride: 0 }; STEP_TILES_MAX];
        for (tile, at) in at[..tiles].iter_mut().enumerate() {
            let first = tile * TILE_ROWS;
            if let Some(rows) = in_place(from + first) {
                *at = rows;
                continue;
            }
            copies.reserve(shape.step_rows * shape.steps);
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
        let (mut ahead, mut ahead_tiles) = ([at[0]; AHEAD_TILES], 0);
        while ahead_tiles < AHEAD_TILES
            && let Some(rows) = in_place(from + shape.step_rows + ahead_tiles * TILE_ROWS)
        {
            ahead[ahead_tiles] = rows;
            ahead_tiles += 1;
        }
        Located { at, tiles, rows, ahead, ahead_tiles }
    }

    /// Fetches 64 bytes of each row of a tile from byte `column` on, if the step has such a tile, into
    /// the first-level cache.
    #[inline]
    #[target_feature(enable = "avx512f")]
    pub(super) fn fetch(&self, tile: usize, column: usize) {
        if tile < self.tiles {
            let Rows { at, stride } = self.at[tile];
            let mut at = at.wrapping_add(column);
            for _ in 0..TILE_ROWS {
                _mm_prefetch::<_MM_HINT_T0>(at.cast());
                at = at.wrapping_add(stride);
            }
        }
    }

    /// Fetches row `row` of the following step into the second-level cache, if it is known.
    #[inline]
    #[target_feature(enable = "avx512f")]
    pub(super) fn fetch_ahead(&self, row: usize, lines: usize) {
        if row < self.ahead_tiles * TILE_ROWS {
            let tile = self.ahead[row / TILE_ROWS];
            let at = tile.at.wrapping_add(row % TILE_ROWS * tile.stride);
            for line in 0..lines {
                _mm_prefetch::<_MM_HINT_T1>(at.wrapping_add(line * LINE_BYTES).cast());
            }
        }
    }
}

/// Interleaves 64 bytes of each of sixteen rows two by two into half the lines of a panel's two tiles,
/// as the second product's right operand has them. Of each eight columns the first four go to the
/// first tile and the others to the second, which costs one instruction a line; [`in_order`] undoes
/// it.
///
/// # Safety
/// 64 bytes of each row are readable; half the lines of two tiles are writable at `into`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
pub(super) unsafe fn interleave(rows: Rows, into: *mut u8) {
    let Rows { mut at, stride } = rows;
    for pair in 0..TILE_ROWS / 2 {
        // SAFETY: as the caller says; no address is made beyond the last row's.
        unsafe {
            let x = _mm512_loadu_si512(at.cast());
            let y = _mm512_loadu_si512(at.add(stride).cast());
            let to = into.add(pair * LINE_BYTES);
            _mm512_store_si512(to.cast(), _mm512_unpacklo_epi16(x, y));
            _mm512_store_si512(to.add(TILE_BYTES).cast(), _mm512_unpackhi_epi16(x, y));
        }
        at = at.wrapping_add(2 * stride);
    }
}

/// 32 columns of a panel's two tiles in their order.
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn in_order(first: __m512, second: __m512) -> [__m512; 2] {
    [0, 16].map(|from| {
        let source: [i32; 16] = std::array::from_fn(|lane| {
            let column = from + lane as i32;
            let (eight, rest) = (column / 8, column % 8);
            if rest < 4 { 4 * eight + rest } else { 16 + 4 * eight + rest - 4 }
        });
        // SAFETY: 64 bytes either way.
        let source = unsafe { std::mem::transmute::<[i32; 16], __m512i>(source) };
        _mm512_permutex2var_ps(first, source, second)
    })
}
