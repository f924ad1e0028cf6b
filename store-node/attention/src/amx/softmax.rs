//! The running softmax of sixteen query rows, one in each lane.
//!
//! Weights are powers of two of the scaled scores relative to a reference, which follows the largest
//! score only when that has left it by [`SLACK`] bits: bf16 loses nothing below that, and most
//! steps need no correction of what was summed before.

use std::arch::x86_64::*;

use super::PAIR_ROWS;
use super::layout::transpose;
use super::tiles::{LINE_BYTES, TILE_BYTES, TILE_ROWS};
use crate::partial::Query;

/// Bits by which the largest score may lead the reference.
const SLACK: f32 = 8.0;

/// What a block of query rows carries from step to step.
#[derive(Debug)]
#[repr(align(64))]
pub(super) struct Block {
    /// The largest dot product so far.
    largest: [f32; 16],
    /// The dot product that weights are relative to.
    reference: [f32; 16],
    /// The sum of weights.
    sum: [f32; 16],
    /// By what earlier sums must be multiplied after the last step.
    correction: [f32; 16],
    /// How many cached rows each query row attends.
    visible: [i32; 16],
    is_first: bool,
}

/// 2^x for -126 <= x <= 126, within 5e-5, well below the rounding to bf16 that follows.
#[inline]
#[target_feature(enable = "avx512f")]
fn exp2(x: __m512) -> __m512 {
    // Adding this leaves x rounded to a whole number in the low bits.
    const SHIFT: f32 = 12_582_912.0;
    // ln 2 to the k over k!, the series of 2^f for |f| <= 1/2.
    const COEFFICIENTS: [f32; 4] =
        [9.618_129e-3, 5.550_411e-2, 0.240_226_5, std::f32::consts::LN_2];
    let shifted = _mm512_add_ps(x, _mm512_set1_ps(SHIFT));
    let f = _mm512_sub_ps(x, _mm512_sub_ps(shifted, _mm512_set1_ps(SHIFT)));
    let mut e = _mm512_set1_ps(COEFFICIENTS[0]);
    for c in &COEFFICIENTS[1..] {
        e = _mm512_fmadd_ps(e, f, _mm512_set1_ps(*c));
    }
    let e = _mm512_fmadd_ps(e, f, _mm512_set1_ps(1.0));
    let power = _mm512_slli_epi32::<23>(_mm512_castps_si512(shifted));
    _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(e), power))
}

impl Block {
    pub(super) fn new(block: usize, query: &Query<'_>, count: impl Fn(usize) -> usize) -> Block {
        let visible = std::array::from_fn(|lane| {
            let row = block * TILE_ROWS + lane;
            // Lanes without a query row see all, so that they ask for no masks.
            if row < query.rows() {
                i32::try_from(count(row)).unwrap_or(i32::MAX)
            } else {
                i32::MAX
            }
        });
        Block {
            largest: [f32::NEG_INFINITY; 16],
            reference: [f32::NEG_INFINITY; 16],
            sum: [0.0; 16],
            correction: [1.0; 16],
            visible,
            is_first: true,
        }
    }

    /// Turns the scores of a step's `rows` rows, the first being row `from` of the list, into weights.
    ///
    /// # Safety
    /// A line of scores lies at `scores` for each row up to a multiple of 64, and a tile of weights
    /// is writable at `weights` for every 32 of them.
    #[target_feature(enable = "avx512f,avx512bw")]
    pub(super) unsafe fn step(
        &mut self,
        scale: f32,
        from: usize,
        rows: usize,
        scores: *const u8,
        weights: *mut u8,
    ) {
        let left = |visible: i32| (i64::from(visible) - from as i64).clamp(0, rows as i64) as i32;
        let counts = self.visible.map(left);
        let shown_by_all = counts.into_iter().min().unwrap_or(0) as usize;
        // SAFETY: arrays of sixteen values.
        let (counts, old_largest, reference) = unsafe {
            (
                _mm512_loadu_si512(counts.as_ptr().cast()),
                _mm512_loadu_ps(self.largest.as_ptr()),
                _mm512_loadu_ps(self.reference.as_ptr()),
            )
        };
        let shows = |row: usize| _mm512_cmpgt_epi32_mask(counts, _mm512_set1_epi32(row as i32));
        // SAFETY: a line for each row, by the caller's word.
        let line = |row: usize| unsafe { _mm512_load_ps(scores.add(row * LINE_BYTES).cast()) };

        let mut largest = [old_largest; 4];
        let whole = shown_by_all / 4 * 4;
        for row in (0..whole).step_by(4) {
            for (i, largest) in largest.iter_mut().enumerate() {
                *largest = _mm512_max_ps(*largest, line(row + i));
            }
        }
        for row in whole..rows {
            largest[0] = _mm512_mask_max_ps(largest[0], shows(row), largest[0], line(row));
        }
        let largest = _mm512_max_ps(
            _mm512_max_ps(largest[0], largest[1]),
            _mm512_max_ps(largest[2], largest[3]),
        );

        let bits = _mm512_set1_ps(scale * std::f32::consts::LOG2_E);
        let lead = _mm512_mul_ps(_mm512_sub_ps(largest, reference), bits);
        // A lane without a reference leads by infinity, one that has seen nothing by no number.
        let moves = _mm512_cmp_ps_mask::<_CMP_GT_OQ>(lead, _mm512_set1_ps(SLACK));
        let next = _mm512_mask_mov_ps(reference, moves, largest);
        let has_sums =
            _mm512_cmp_ps_mask::<_CMP_GT_OQ>(reference, _mm512_set1_ps(f32::NEG_INFINITY));
        let drop = _mm512_mul_ps(_mm512_sub_ps(reference, next), bits);
        let correction = exp2(_mm512_max_ps(drop, _mm512_set1_ps(-126.0)));
        let correction = _mm512_mask_mov_ps(_mm512_set1_ps(1.0), moves & has_sums, correction);
        // What is subtracted from scores in bits; any number where nothing is shown.
        let seen = _mm512_cmp_ps_mask::<_CMP_GT_OQ>(next, _mm512_set1_ps(f32::NEG_INFINITY));
        let below = _mm512_maskz_mul_ps(seen, next, bits);

        let floor = _mm512_set1_ps(-126.0);
        let half = _mm512_set1_epi32(0x8000);
        let upper = _mm512_set1_epi32(0xffff_0000_u32 as i32);
        // SAFETY: an array of sixteen values.
        let mut sums = [
            _mm512_mul_ps(unsafe { _mm512_loadu_ps(self.sum.as_ptr()) }, correction),
            _mm512_setzero_ps(),
        ];
        let weight =
            |row: usize| exp2(_mm512_max_ps(_mm512_fmsub_ps(line(row), bits, below), floor));
        for step in 0..rows.next_multiple_of(64) / PAIR_ROWS {
            let mut tile = [_mm512_setzero_si512(); 16];
            let first = step * PAIR_ROWS;
            let is_whole = first + PAIR_ROWS <= shown_by_all;
            for (i, word) in tile.iter_mut().enumerate() {
                let row = first + 2 * i;
                let pair = if is_whole {
                    [weight(row), weight(row + 1)]
                } else {
                    [row, row + 1].map(|row| _mm512_maskz_mov_ps(shows(row), weight(row)))
                };
                sums[0] = _mm512_add_ps(sums[0], pair[0]);
                sums[1] = _mm512_add_ps(sums[1], pair[1]);
                let [even, odd] = pair.map(|p| _mm512_add_epi32(_mm512_castps_si512(p), half));
                // Upper halves: of the odd row where it is, of the even one below it.
                *word =
                    _mm512_ternarylogic_epi32::<0xf8>(_mm512_srli_epi32::<16>(even), odd, upper);
            }
            transpose(&mut tile);
            for (i, line) in tile.into_iter().enumerate() {
                // SAFETY: a tile for every 32 rows, by the caller's word.
                unsafe {
                    _mm512_store_si512(
                        weights.add(step * TILE_BYTES + i * LINE_BYTES).cast(),
                        line,
                    );
                };
            }
        }
        // SAFETY: arrays of sixteen values.
        unsafe {
            _mm512_storeu_ps(self.largest.as_mut_ptr(), largest);
            _mm512_storeu_ps(self.reference.as_mut_ptr(), next);
            _mm512_storeu_ps(self.sum.as_mut_ptr(), _mm512_add_ps(sums[0], sums[1]));
            _mm512_storeu_ps(self.correction.as_mut_ptr(), correction);
        }
    }

    /// Applies the last step's correction to earlier sums, of which there are none at first.
    ///
    /// # Safety
    /// `lines` lines of sums, tiles with a line for each query row, lie at `sums`.
    #[target_feature(enable = "avx512f")]
    pub(super) unsafe fn correct(&mut self, sums: *mut u8, lines: usize) {
        if std::mem::replace(&mut self.is_first, false) {
            return;
        }
        for (lane, &factor) in self.correction.iter().enumerate() {
            if factor == 1.0 {
                continue;
            }
            for line in (lane..lines).step_by(TILE_ROWS) {
                // SAFETY: the line is below `lines`.
                unsafe {
                    let at = sums.add(line * LINE_BYTES).cast::<f32>();
                    _mm512_store_ps(at, _mm512_mul_ps(_mm512_load_ps(at), _mm512_set1_ps(factor)));
                }
            }
        }
    }

    /// Writes what came out for the query rows of block `block`.
    ///
    /// # Safety
    /// The block's sums lie at `sums`, if there was a step.
    #[target_feature(enable = "avx512f")]
    pub(super) unsafe fn finish(
        &self,
        block: usize,
        query: &Query<'_>,
        sums: *const u8,
        o: &mut [f32],
        m: &mut [f32],
        l: &mut [f32],
    ) {
        let first = block * TILE_ROWS;
        for lane in 0..TILE_ROWS.min(query.rows() - first) {
            let row = first + lane;
            let o = &mut o[row * query.d_v..][..query.d_v];
            if self.visible[lane] == 0 {
                o.fill(0.0);
                (m[row], l[row]) = (f32::NEG_INFINITY, 0.0);
                continue;
            }
            let inverse = _mm512_set1_ps(1.0 / self.sum[lane]);
            for (tile, columns) in o.chunks_mut(16).enumerate() {
                let mask = ((1u32 << columns.len()) - 1) as __mmask16;
                // SAFETY: there is a tile of sums for every sixteen columns; masked lanes are not
                // written.
                unsafe {
                    let at = sums.add(tile * TILE_BYTES + lane * LINE_BYTES).cast::<f32>();
                    let values = _mm512_mul_ps(_mm512_load_ps(at), inverse);
                    _mm512_mask_storeu_ps(columns.as_mut_ptr(), mask, values);
                }
            }
            let lead = (self.largest[lane] - self.reference[lane]) * query.scale;
            m[row] = self.largest[lane] * query.scale;
            l[row] = self.sum[lane] * (-lead).exp();
        }
    }
}
