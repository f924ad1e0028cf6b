//! Few query rows (decode): tiles in registers, straight over the pages.
//!
//! A step of one group of cached rows (a page, at most [`GROUP_ROWS`]) computes its logits and adds
//! its values while the group is still in the second-level cache, so that memory is read once.
//! Pages of f32 are read where they lie; bf16 rows, and pages of very few rows, pass through
//! scratch.

use crate::exp::{Running, softmax_step};
use crate::pages::{PageList, RowDtype};
use crate::partial::{PartialMut, Query};
use crate::simd::{Simd, Task};

/// 64 rows of 576 f32 are 147 KB: well inside a second-level cache.
pub(crate) const GROUP_ROWS: usize = 64;
/// Query rows that share each load of a cached row.
const TILE: usize = 4;
/// Below this many rows in a page a tile of logits would be mostly remainder.
const IN_PLACE_ROWS_MIN: usize = 16;

/// Memory that calls reuse.
#[derive(Debug, Default)]
pub(crate) struct Scratch {
    rows: Vec<f32>,
}

pub(crate) struct Narrow<'a, 'q> {
    pub query: &'a Query<'q>,
    pub pages: &'a PageList<'q>,
    pub out: PartialMut<'a>,
    pub scratch: &'a mut Scratch,
}

impl Task for Narrow<'_, '_> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Narrow { query, pages, mut out, scratch } = self;
        out.clear();
        let in_place = pages.dtype() == RowDtype::F32 && pages.rows_per_page() >= IN_PLACE_ROWS_MIN;
        let reach = (0..query.rows()).map(|row| query.visible.of(row, pages.rows())).max();
        let reach = reach.unwrap_or(0);
        let mut from = 0;
        while from < reach {
            let mut to = (from + GROUP_ROWS).min(reach);
            let group = if in_place {
                to = to.min((from / pages.rows_per_page() + 1) * pages.rows_per_page());
                // SAFETY: the rows from..to lie in one page, and the list's rows stay readable
                // while it is borrowed.
                unsafe {
                    Group::new(pages.row(from).cast(), pages.row_stride_bytes() / size_of::<f32>())
                }
            } else {
                scratch.rows.resize(GROUP_ROWS * pages.width(), 0.0);
                gather(s, pages, from, to, &mut scratch.rows);
                // SAFETY: `gather` filled to - from rows, one after another, and scratch is not
                // touched before the group is done with.
                unsafe { Group::new(scratch.rows.as_ptr(), pages.width()) }
            };
            group_step(s, query, &group, from, to - from, &mut out);
            from = to;
        }
        out.normalise(query.d_v);
    }
}

/// Copies rows into one matrix of f32.
#[inline(always)]
pub(crate) fn gather<S: Simd>(
    s: S,
    pages: &PageList<'_>,
    from: usize,
    to: usize,
    into: &mut [f32],
) {
    let width = pages.width();
    for (row, into) in (from..to).zip(into.chunks_exact_mut(width)) {
        let at = pages.row(row);
        match pages.dtype() {
            RowDtype::F32 => {
                // SAFETY: a row is `width` aligned values; `into` is another memory of that length.
                unsafe { at.cast::<f32>().copy_to_nonoverlapping(into.as_mut_ptr(), width) };
            }
            RowDtype::Bf16 => {
                let at = at.cast::<half::bf16>();
                let whole = width / S::LANES * S::LANES;
                for i in (0..whole).step_by(S::LANES) {
                    // SAFETY: `i + LANES <= width`, the length of the row and of `into`.
                    unsafe { s.store(into.as_mut_ptr().add(i), s.load_bf16(at.add(i))) };
                }
                for (i, value) in into.iter_mut().enumerate().skip(whole) {
                    // SAFETY: `i < width`.
                    *value = unsafe { at.add(i).read() }.to_f32();
                }
            }
        }
    }
}

/// Cached rows at a constant stride.
struct Group {
    rows: *const f32,
    stride: usize,
}

impl Group {
    /// # Safety
    /// All rows that are used later lie at `rows + i · stride` and stay readable till then.
    unsafe fn new(rows: *const f32, stride: usize) -> Self {
        Group { rows, stride }
    }
}

#[inline(always)]
fn group_step<S: Simd>(
    s: S,
    query: &Query<'_>,
    group: &Group,
    from: usize,
    rows: usize,
    out: &mut PartialMut<'_>,
) {
    let mut first = 0;
    while first < query.rows() {
        let tile = TILE.min(query.rows() - first);
        match tile {
            4 => tile_step::<S, 4>(s, query, group, from, rows, out, first),
            3 => tile_step::<S, 3>(s, query, group, from, rows, out, first),
            2 => tile_step::<S, 2>(s, query, group, from, rows, out, first),
            _ => tile_step::<S, 1>(s, query, group, from, rows, out, first),
        }
        first += tile;
    }
}

/// One group of cached rows against `H` query rows from `first` on.
#[inline(always)]
fn tile_step<S: Simd, const H: usize>(
    s: S,
    query: &Query<'_>,
    group: &Group,
    from: usize,
    rows: usize,
    out: &mut PartialMut<'_>,
    first: usize,
) {
    let visible: [usize; H] =
        std::array::from_fn(|h| query.visible.of(first + h, usize::MAX).saturating_sub(from));
    if visible.iter().all(|&visible| visible == 0) {
        return;
    }
    let mut weights = [[0f32; GROUP_ROWS]; H];
    let q: [&[f32]; H] = std::array::from_fn(|h| query.row(first + h));
    let mut row = 0;
    while row < rows {
        let left = rows - row;
        // SAFETY: `row + tile rows <= rows`, the rows of the group, each `d_qk` values wide.
        let k = unsafe { group.rows.add(row * group.stride) };
        if S::LOGIT_ROWS == 4 && left >= 4 {
            logits_tile::<S, H, 4>(s, &q, k, group.stride, row, &mut weights);
            row += 4;
        } else if S::LOGIT_ROWS >= 2 && left >= 2 {
            logits_tile::<S, H, 2>(s, &q, k, group.stride, row, &mut weights);
            row += 2;
        } else {
            logits_tile::<S, H, 1>(s, &q, k, group.stride, row, &mut weights);
            row += 1;
        }
    }

    let mut corrections = [0f32; H];
    for h in 0..H {
        let mut running = Running { m: out.m[first + h], l: out.l[first + h] };
        corrections[h] =
            softmax_step(s, &mut weights[h][..rows], visible[h], query.scale, &mut running);
        (out.m[first + h], out.l[first + h]) = (running.m, running.l);
    }

    let d_v = query.d_v;
    let o = &mut out.o[first * d_v..][..H * d_v];
    let mut col = 0;
    while col < d_v {
        let left = d_v - col;
        let place = Place { group, rows, col, d_v };
        if S::OUTPUT_VECTORS == 4 && left >= 4 * S::LANES {
            output_tile::<S, H, 4>(s, &place, &weights, &corrections, o);
            col += 4 * S::LANES;
        } else if S::OUTPUT_VECTORS >= 2 && left >= 2 * S::LANES {
            output_tile::<S, H, 2>(s, &place, &weights, &corrections, o);
            col += 2 * S::LANES;
        } else if left >= S::LANES {
            output_tile::<S, H, 1>(s, &place, &weights, &corrections, o);
            col += S::LANES;
        } else {
            output_rest(&place, &weights, &corrections, o);
            col = d_v;
        }
    }
}

/// Dot products of `H` query rows with `R` cached rows from `k` on, into columns `at..at + R`.
#[inline(always)]
fn logits_tile<S: Simd, const H: usize, const R: usize>(
    s: S,
    q: &[&[f32]; H],
    k: *const f32,
    stride: usize,
    at: usize,
    logits: &mut [[f32; GROUP_ROWS]; H],
) {
    let width = q[0].len();
    let whole = width / S::LANES * S::LANES;
    let mut sums = [[s.splat(0.0); R]; H];
    for i in (0..whole).step_by(S::LANES) {
        // SAFETY: `i + LANES <= width`, the length of every query row and of the `R` cached rows.
        unsafe {
            let rows: [S::V; R] = std::array::from_fn(|r| s.load(k.add(r * stride + i)));
            for h in 0..H {
                let q = s.load(q[h].as_ptr().add(i));
                for r in 0..R {
                    sums[h][r] = s.mul_add(q, rows[r], sums[h][r]);
                }
            }
        }
    }
    for h in 0..H {
        for r in 0..R {
            let mut logit = s.sum(sums[h][r]);
            for i in whole..width {
                // SAFETY: `i < width`, and row `r` is one of the `R`.
                logit += q[h][i] * unsafe { k.add(r * stride + i).read() };
            }
            logits[h][at + r] = logit;
        }
    }
}

/// The part of the values that an output tile adds.
struct Place<'a> {
    group: &'a Group,
    rows: usize,
    col: usize,
    d_v: usize,
}

/// `o = o · correction + weights · values` for `C` vectors of columns.
#[inline(always)]
fn output_tile<S: Simd, const H: usize, const C: usize>(
    s: S,
    place: &Place<'_>,
    weights: &[[f32; GROUP_ROWS]; H],
    corrections: &[f32; H],
    o: &mut [f32],
) {
    let at = |h: usize, c: usize| h * place.d_v + place.col + c * S::LANES;
    let o = o.as_mut_ptr();
    let mut sums = [[s.splat(0.0); C]; H];
    for h in 0..H {
        for c in 0..C {
            // SAFETY: the caller has `C` whole vectors of columns left in each of `H` rows.
            sums[h][c] = s.mul(unsafe { s.load(o.add(at(h, c))) }, s.splat(corrections[h]));
        }
    }
    for row in 0..place.rows {
        // SAFETY: `row` is one of the group's, and `d_v <= d_qk` values of it are readable.
        let values: [S::V; C] = std::array::from_fn(|c| unsafe {
            s.load(place.group.rows.add(row * place.group.stride + place.col + c * S::LANES))
        });
        for h in 0..H {
            let weight = s.splat(weights[h][row]);
            for c in 0..C {
                sums[h][c] = s.mul_add(weight, values[c], sums[h][c]);
            }
        }
    }
    for h in 0..H {
        for c in 0..C {
            // SAFETY: as for the load.
            unsafe { s.store(o.add(at(h, c)), sums[h][c]) };
        }
    }
}

/// The columns that fill no vector.
#[inline(always)]
fn output_rest<const H: usize>(
    place: &Place<'_>,
    weights: &[[f32; GROUP_ROWS]; H],
    corrections: &[f32; H],
    o: &mut [f32],
) {
    for h in 0..H {
        for col in place.col..place.d_v {
            let mut sum = o[h * place.d_v + col] * corrections[h];
            for row in 0..place.rows {
                // SAFETY: `row` is one of the group's and `col < d_v <= d_qk`.
                let value = unsafe { place.group.rows.add(row * place.group.stride + col).read() };
                sum += weights[h][row] * value;
            }
            o[h * place.d_v + col] = sum;
        }
    }
}
