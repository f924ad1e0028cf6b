//! The products in dot products of pairs of bf16, sixteen of them in a vector (AVX-512 BF16): twice
//! what multiplications of f32 do on some processors, and half of it on others.
//!
//! One operand is a vector, the other a pair that goes to all its lanes. Eight rows of a tile by two
//! vectors are summed in registers: enough sums under way that none waits for the one before, few
//! enough that the operands have room. Other work is done beside the first
//! eight rows of a tile.

// One index names places in two matrices at once; iterators over them would hide that.
#![allow(clippy::needless_range_loop)]

use std::arch::x86_64::*;

use super::STEP_ROWS;
use super::unit::{LINE_BYTES, Rows, TILE_BYTES, TILE_ROWS, Unit, Values};

/// Rows of a tile that are summed in registers at once.
const PART_ROWS: usize = TILE_ROWS / 2;

/// The processor has dot products of bf16 in 512 bits.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Avx512Bf16(());

impl Avx512Bf16 {
    pub(crate) fn detect() -> Option<Self> {
        let found = is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512bf16");
        found.then_some(Avx512Bf16(()))
    }
}

type Pairs = __m512bh;

/// # Safety
/// A line is readable at `at`.
#[inline]
#[target_feature(enable = "avx512f,avx512bf16")]
unsafe fn line(at: *const u8) -> Pairs {
    // SAFETY: 64 bytes either way, by the caller's word.
    unsafe { std::mem::transmute::<__m512i, Pairs>(_mm512_loadu_si512(at.cast())) }
}

/// One pair in all lanes.
///
/// # Safety
/// Two values are readable at `at`.
#[inline]
#[target_feature(enable = "avx512f,avx512bf16")]
unsafe fn pair(at: *const u8) -> Pairs {
    // SAFETY: 64 bytes either way; the caller's word.
    unsafe {
        std::mem::transmute::<__m512i, Pairs>(_mm512_set1_epi32(at.cast::<i32>().read_unaligned()))
    }
}

/// Scores of eight rows with two blocks, a line for each row.
///
/// # Safety
/// As [`Unit::scores_two_blocks`], of one half of a row tile.
#[inline]
#[target_feature(enable = "avx512f,avx512bf16")]
unsafe fn scores_of_two(
    rows: Rows,
    queries: [*const u8; 2],
    steps: usize,
    scores: [*mut u8; 2],
    mut beside: impl FnMut(usize),
) {
    let mut sums = [[_mm512_setzero_ps(); PART_ROWS]; 2];
    // SAFETY: pair `at` of the rows is in step `at / 16` and line `at` of the queries; a line is
    // written for each row.
    unsafe {
        for step in 0..steps {
            beside(step);
            for at in step * TILE_ROWS..(step + 1) * TILE_ROWS {
                let queries = queries.map(|block| line(block.add(at * LINE_BYTES)));
                for row in 0..PART_ROWS {
                    let row_pair = pair(rows.at.add(row * rows.stride + at * 4));
                    for block in 0..2 {
                        sums[block][row] =
                            _mm512_dpbf16_ps(sums[block][row], row_pair, queries[block]);
                    }
                }
            }
        }
        for (scores, sums) in scores.into_iter().zip(sums) {
            for (row, sum) in sums.into_iter().enumerate() {
                _mm512_storeu_ps(scores.add(row * LINE_BYTES).cast(), sum);
            }
        }
    }
}

/// Scores of eight rows with one block: even and odd pairs apart, so that there are as many sums.
///
/// # Safety
/// As [`scores_of_two`].
#[inline]
#[target_feature(enable = "avx512f,avx512bf16")]
unsafe fn scores_of_one(
    rows: Rows,
    queries: *const u8,
    steps: usize,
    scores: *mut u8,
    mut beside: impl FnMut(usize),
) {
    let mut sums = [[_mm512_setzero_ps(); PART_ROWS]; 2];
    // SAFETY: as for two blocks; a step has an even number of pairs.
    unsafe {
        for step in 0..steps {
            beside(step);
            for at in (step * TILE_ROWS..(step + 1) * TILE_ROWS).step_by(2) {
                let queries = [0, 1].map(|odd| line(queries.add((at + odd) * LINE_BYTES)));
                for row in 0..PART_ROWS {
                    let from = rows.at.add(row * rows.stride + at * 4);
                    for odd in 0..2 {
                        sums[odd][row] =
                            _mm512_dpbf16_ps(sums[odd][row], pair(from.add(odd * 4)), queries[odd]);
                    }
                }
            }
        }
        for row in 0..PART_ROWS {
            let sum = _mm512_add_ps(sums[0][row], sums[1][row]);
            _mm512_storeu_ps(scores.add(row * LINE_BYTES).cast(), sum);
        }
    }
}

/// Adds weighted values to the sums of eight query rows in two tiles of columns. Rows are interleaved
/// in registers, the way that [`layout::interleave`](super::layout::interleave) does, beside the
/// products: another unit does that.
///
/// # Safety
/// Eight lines of sums are readable and writable at each of `at`, eight lines of weights readable
/// in a tile for each step of `values`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
unsafe fn add_values(
    at: [*mut u8; 2],
    weights: *const u8,
    values: Values<'_>,
    first: bool,
    mut beside: impl FnMut(),
) {
    // SAFETY: eight lines each, by the caller's word; two rows of each row tile at a time, whose words
    // of weights are the first or second eight of a line.
    unsafe {
        let mut sums = at.map(|at| {
            std::array::from_fn::<_, PART_ROWS, _>(|row| {
                if first {
                    _mm512_setzero_ps()
                } else {
                    _mm512_loadu_ps(at.add(row * LINE_BYTES).cast())
                }
            })
        });
        for (tile, Rows { at, stride }) in values.rows.iter().enumerate() {
            if tile % 2 == 0 {
                beside();
            }
            let weights = weights.add(tile / 2 * TILE_BYTES + tile % 2 * LINE_BYTES / 2);
            let from = at.add(values.column);
            for two in 0..TILE_ROWS / 2 {
                let upper = _mm512_loadu_si512(from.add(2 * two * stride).cast());
                let lower = _mm512_loadu_si512(from.add((2 * two + 1) * stride).cast());
                let columns =
                    [_mm512_unpacklo_epi16(upper, lower), _mm512_unpackhi_epi16(upper, lower)]
                        .map(|pairs| std::mem::transmute::<__m512i, Pairs>(pairs));
                for row in 0..PART_ROWS {
                    let weight = pair(weights.add(row * LINE_BYTES + two * 4));
                    for tile in 0..2 {
                        sums[tile][row] = _mm512_dpbf16_ps(sums[tile][row], weight, columns[tile]);
                    }
                }
            }
        }
        for (at, sums) in at.into_iter().zip(sums) {
            for (row, sum) in sums.into_iter().enumerate() {
                _mm512_storeu_ps(at.add(row * LINE_BYTES).cast(), sum);
            }
        }
    }
}

// SAFETY: `detect` saw the instructions.
unsafe impl Unit for Avx512Bf16 {
    const STEP_ROWS_OF_ONE: usize = STEP_ROWS;
    const READS_PANELS: bool = false;

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
    unsafe fn scores_two_blocks(
        &self,
        rows: [Rows; 2],
        queries: [*const u8; 2],
        steps: usize,
        scores: [*mut u8; 2],
        mut beside: impl FnMut(usize, usize),
    ) {
        for (tile, Rows { at, stride }) in rows.into_iter().enumerate() {
            for part in [0, PART_ROWS] {
                // SAFETY: rows and lines of the caller's tiles.
                unsafe {
                    let rows = Rows { at: at.add(part * stride), stride };
                    let line = tile * TILE_ROWS + part;
                    let scores = scores.map(|block| block.add(line * LINE_BYTES));
                    scores_of_two(rows, queries, steps, scores, |step| {
                        // Work for both row tiles, in order, beside the first part.
                        if (tile, part) == (0, 0) {
                            (0..2).for_each(|tile| beside(step, tile));
                        }
                    });
                }
            }
        }
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
    unsafe fn scores_one_block(
        &self,
        rows: [Rows; 4],
        queries: *const u8,
        steps: usize,
        scores: *mut u8,
        mut beside: impl FnMut(usize, usize),
    ) {
        for (tile, Rows { at, stride }) in rows.into_iter().enumerate() {
            for part in [0, PART_ROWS] {
                // SAFETY: as for two blocks.
                unsafe {
                    let rows = Rows { at: at.add(part * stride), stride };
                    let line = tile * TILE_ROWS + part;
                    scores_of_one(rows, queries, steps, scores.add(line * LINE_BYTES), |step| {
                        if part == 0 {
                            beside(step, tile);
                        }
                    });
                }
            }
        }
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
    unsafe fn values_two_blocks(
        &self,
        sums: [*mut u8; 2],
        weights: [*const u8; 2],
        values: Values<'_>,
        first: bool,
        mut beside: impl FnMut(),
    ) {
        for (block, (sums, weights)) in sums.into_iter().zip(weights).enumerate() {
            for part in [0, PART_ROWS] {
                // SAFETY: halves of the caller's tiles.
                unsafe {
                    let sums = [0, TILE_BYTES].map(|tile| sums.add(tile + part * LINE_BYTES));
                    add_values(sums, weights.add(part * LINE_BYTES), values, first, || {
                        if (block, part) == (0, 0) {
                            beside();
                        }
                    });
                }
            }
        }
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
    unsafe fn values_one_block(
        &self,
        sums: *mut u8,
        weights: *const u8,
        values: [Values<'_>; 2],
        first: bool,
        mut beside: impl FnMut(),
    ) {
        for (panel, values) in values.into_iter().enumerate() {
            for part in [0, PART_ROWS] {
                // SAFETY: as for two blocks.
                unsafe {
                    let sums = [0, TILE_BYTES]
                        .map(|tile| sums.add(2 * panel * TILE_BYTES + tile + part * LINE_BYTES));
                    add_values(sums, weights.add(part * LINE_BYTES), values, first, || {
                        if (panel, part) == (0, 0) {
                            beside();
                        }
                    });
                }
            }
        }
    }
}
