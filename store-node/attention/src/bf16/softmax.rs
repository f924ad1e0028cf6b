//! The running softmax of sixteen query rows, one in each lane.
//!
//! Weights are powers of two of the scaled scores relative to a reference, which follows the largest
//! score only when that has left it by [`SLACK`] bits: bf16 loses nothing below that, and most
//! steps need no correction of what was summed before.

use std::arch::x86_64::*;

use super::PAIR_ROWS;
use super::layout::{in_order, transpose};
use super::unit::{LINE_BYTES, TILE_BYTES, TILE_ROWS};
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
    /// The sums of weights of even and odd rows.
    sums: [[f32; 16]; 2],
    /// By what earlier sums must be multiplied after the last step.
    correction: [f32; 16],
    /// How many cached rows each query row attends.
    visible: [i32; 16],
    /// Bits for each unit of a dot product.
    bits: f32,
    is_first: bool,
    /// What is subtracted from scores in bits in the step under way.
    below: [f32; 16],
    /// How many of the step's rows each query row attends.
    shown: [i32; 16],
    shown_by_all: usize,
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

/// The lanes that are shown a row of a step.
#[inline]
#[target_feature(enable = "avx512f")]
fn shows(shown: __m512i, row: usize) -> __mmask16 {
    _mm512_cmpgt_epi32_mask(shown, _mm512_set1_epi32(row as i32))
}

/// Scores of one or two blocks on their way to weights, in pieces that fit beside other work.
#[derive(Debug)]
pub(super) struct Weighing<'a> {
    pub blocks: &'a mut [Block],
    /// Where each block's scores and weights lie; those of a block that there is not are not used.
    pub scores: [*mut u8; 2],
    pub weights: [*mut u8; 2],
}

/// Pieces of 32 rows: for each of two blocks the pairs of rows and what lays them out as a tile.
pub(super) const PIECES: usize = 2 * (TILE_ROWS + 1);

impl Weighing<'_> {
    /// Piece `piece` of [`PIECES`] of the step's 32 rows `group`.
    ///
    /// # Safety
    /// The blocks have begun the step with these scores, which have a line for each row up to a
    /// multiple of 64; there is room for a tile of weights for every 32 of them. Pieces of a group
    /// come in order.
    #[inline]
    #[target_feature(enable = "avx512f")]
    pub(super) unsafe fn piece(&mut self, group: usize, piece: usize) {
        let (block, pair) = (piece % 2, piece / 2);
        let (scores, weights) = (self.scores[block], self.weights[block]);
        let Some(block) = self.blocks.get_mut(block) else { return };
        let first = group * PAIR_ROWS;
        // SAFETY: as the caller says.
        unsafe {
            if pair < TILE_ROWS {
                block.weigh_pair(first, pair, scores);
            } else {
                let words = scores.add(first * LINE_BYTES).cast_const();
                lay_out(words, weights.add(group * TILE_BYTES));
            }
        }
    }

    /// All pieces of `groups` times 32 rows.
    ///
    /// # Safety
    /// As [`Weighing::piece`].
    #[target_feature(enable = "avx512f")]
    pub(super) unsafe fn finish(&mut self, groups: usize) {
        for group in 0..groups {
            for piece in 0..PIECES {
                // SAFETY: as the caller says.
                unsafe { self.piece(group, piece) };
            }
        }
    }
}

/// Sixteen lines of words of pairs of rows as a tile with a line for each query row.
///
/// # Safety
/// A tile is readable at `words` and one writable at `weights`.
#[target_feature(enable = "avx512f")]
unsafe fn lay_out(words: *const u8, weights: *mut u8) {
    // SAFETY: sixteen lines each.
    unsafe {
        let mut tile: [__m512i; 16] =
            std::array::from_fn(|i| _mm512_load_si512(words.add(i * LINE_BYTES).cast()));
        transpose(&mut tile);
        for (i, line) in tile.into_iter().enumerate() {
            _mm512_store_si512(weights.add(i * LINE_BYTES).cast(), line);
        }
    }
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
            sums: [[0.0; 16]; 2],
            correction: [1.0; 16],
            visible,
            bits: query.scale * std::f32::consts::LOG2_E,
            is_first: true,
            below: [0.0; 16],
            shown: [0; 16],
            shown_by_all: 0,
        }
    }

    /// Takes in the scores of a step's `rows` rows, the first being row `from` of the list: what
    /// their weights will be relative to.
    ///
    /// # Safety
    /// A line of scores lies at `scores` for each row.
    #[target_feature(enable = "avx512f")]
    pub(super) unsafe fn begin(&mut self, from: usize, rows: usize, scores: *const u8) {
        let left = |visible: i32| (i64::from(visible) - from as i64).clamp(0, rows as i64) as i32;
        self.shown = self.visible.map(left);
        self.shown_by_all = self.shown.into_iter().min().unwrap_or(0) as usize;
        // SAFETY: arrays of sixteen values.
        let (shown, old_largest, reference) = unsafe {
            (
                _mm512_loadu_si512(self.shown.as_ptr().cast()),
                _mm512_loadu_ps(self.largest.as_ptr()),
                _mm512_loadu_ps(self.reference.as_ptr()),
            )
        };
        // SAFETY: a line for each row, by the caller's word.
        let line = |row: usize| unsafe { _mm512_load_ps(scores.add(row * LINE_BYTES).cast()) };
        let mut largest = [old_largest; 4];
        let whole = self.shown_by_all / 4 * 4;
        for row in (0..whole).step_by(4) {
            for (i, largest) in largest.iter_mut().enumerate() {
                *largest = _mm512_max_ps(*largest, line(row + i));
            }
        }
        for row in whole..rows {
            largest[0] = _mm512_mask_max_ps(largest[0], shows(shown, row), largest[0], line(row));
        }
        let largest = _mm512_max_ps(
            _mm512_max_ps(largest[0], largest[1]),
            _mm512_max_ps(largest[2], largest[3]),
        );

        let bits = _mm512_set1_ps(self.bits);
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
        // SAFETY: arrays of sixteen values.
        unsafe {
            _mm512_storeu_ps(self.largest.as_mut_ptr(), largest);
            _mm512_storeu_ps(self.reference.as_mut_ptr(), next);
            _mm512_storeu_ps(self.correction.as_mut_ptr(), correction);
            _mm512_storeu_ps(self.below.as_mut_ptr(), below);
            for sum in &mut self.sums {
                let at = sum.as_mut_ptr();
                _mm512_storeu_ps(at, _mm512_mul_ps(_mm512_loadu_ps(at), correction));
            }
        }
    }

    /// Weights of pair `pair` of the 32 rows from `first` on, rounded, in the pair's words. They take
    /// the place of scores that are spent: line `pair` from `first` on.
    ///
    /// # Safety
    /// The step was begun with these scores, and the pairs before this one are done.
    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn weigh_pair(&mut self, first: usize, pair: usize, scores: *mut u8) {
        let row = first + 2 * pair;
        // SAFETY: lines of the step's scores; arrays of sixteen values.
        unsafe {
            let bits = _mm512_set1_ps(self.bits);
            let below = _mm512_loadu_ps(self.below.as_ptr());
            let mut weights = [row, row + 1].map(|row| {
                let score = _mm512_load_ps(scores.add(row * LINE_BYTES).cast());
                let x = _mm512_fmsub_ps(score, bits, below);
                exp2(_mm512_max_ps(x, _mm512_set1_ps(-126.0)))
            });
            if row + 2 > self.shown_by_all {
                let shown = _mm512_loadu_si512(self.shown.as_ptr().cast());
                for (i, weight) in weights.iter_mut().enumerate() {
                    *weight = _mm512_maskz_mov_ps(shows(shown, row + i), *weight);
                }
            }
            for (sum, weight) in self.sums.iter_mut().zip(weights) {
                let at = sum.as_mut_ptr();
                _mm512_storeu_ps(at, _mm512_add_ps(_mm512_loadu_ps(at), weight));
            }
            let half = _mm512_set1_epi32(0x8000);
            let upper = _mm512_set1_epi32(0xffff_0000_u32 as i32);
            let [even, odd] = weights.map(|p| _mm512_add_epi32(_mm512_castps_si512(p), half));
            // Upper halves: of the odd row where it is, of the even one below it.
            let word = _mm512_ternarylogic_epi32::<0xf8>(_mm512_srli_epi32::<16>(even), odd, upper);
            _mm512_store_si512(scores.add((first + pair) * LINE_BYTES).cast(), word);
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
            let sum = self.sums[0][lane] + self.sums[1][lane];
            let inverse = _mm512_set1_ps(1.0 / sum);
            for (panel, columns) in o.chunks_mut(32).enumerate() {
                let mask = ((1u64 << columns.len()) - 1) as u32;
                // SAFETY: there are two tiles of sums for every 32 columns; masked lanes are not
                // written.
                unsafe {
                    let at = sums.add(2 * panel * TILE_BYTES + lane * LINE_BYTES);
                    let [low, high] = in_order(
                        _mm512_load_ps(at.cast()),
                        _mm512_load_ps(at.add(TILE_BYTES).cast()),
                    )
                    .map(|values| _mm512_mul_ps(values, inverse));
                    let to = columns.as_mut_ptr();
                    _mm512_mask_storeu_ps(to, mask as __mmask16, low);
                    _mm512_mask_storeu_ps(to.wrapping_add(16), (mask >> 16) as __mmask16, high);
                }
            }
            let lead = (self.largest[lane] - self.reference[lane]) * query.scale;
            m[row] = self.largest[lane] * query.scale;
            l[row] = sum * (-lead).exp();
        }
    }
}
