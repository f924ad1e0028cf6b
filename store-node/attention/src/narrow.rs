//! Few query rows (decode): tiles in registers, straight over the pages.
//!
//! A step of one group of cached rows (a page, at most [`GROUP_ROWS`]) computes its logits and adds
//! its values while the group is still in the second-level cache, so that memory is read once.
//! Pages are read where they lie; pages of very few rows pass through scratch, and so do bf16 rows
//! that many query rows would widen again and again.

// One index names places in two or three matrices at once; iterators over them would hide that.
#![allow(clippy::needless_range_loop)]

use half::{bf16, f16};

use crate::exp::{Running, softmax_step};
use crate::gather::gather;
use crate::pages::{PageList, RowDtype};
use crate::partial::{PartialMut, Query};
use crate::simd::{Simd, Task};

/// 64 rows of 576 f32 are 147 KB: well inside a second-level cache.
pub(crate) const GROUP_ROWS: usize = 64;
/// Query rows that share each load of a cached row.
const TILE: usize = 4;
/// Below this many rows in a page a tile of logits would be mostly remainder.
const IN_PLACE_ROWS_MIN: usize = 16;
/// Up to two tiles of query rows, widening twice is cheaper than a detour through scratch.
const WIDEN_IN_PLACE_MAX: usize = 2 * TILE;

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
        let few = query.rows() <= WIDEN_IN_PLACE_MAX;
        let in_place = pages.rows_in_line() >= IN_PLACE_ROWS_MIN
            && match pages.dtype() {
                RowDtype::F32 => true,
                RowDtype::Bf16 | RowDtype::F16 => few,
                RowDtype::Fp8Latent => false,
            };
        let reach = (0..query.rows()).map(|row| query.visible.of(row, pages.rows())).max();
        let reach = reach.unwrap_or(0);
        let mut from = 0;
        while from < reach {
            let mut to = (from + GROUP_ROWS).min(reach);
            if in_place {
                to = to.min((from / pages.rows_in_line() + 1) * pages.rows_in_line());
                let (at, stride_bytes) = (pages.row(from), pages.row_stride_bytes());
                let next = if to < reach { pages.row(to) } else { at };
                match pages.dtype() {
                    RowDtype::F32 => {
                        let group = Group::<f32>::new(at, stride_bytes, to - from, next);
                        group_step(s, query, &group, from, &mut out);
                    }
                    RowDtype::Bf16 => {
                        let group = Group::<bf16>::new(at, stride_bytes, to - from, next);
                        group_step(s, query, &group, from, &mut out);
                    }
                    RowDtype::F16 => {
                        let group = Group::<f16>::new(at, stride_bytes, to - from, next);
                        group_step(s, query, &group, from, &mut out);
                    }
                    RowDtype::Fp8Latent => unreachable!("widened in scratch"),
                }
            } else {
                scratch.rows.resize(GROUP_ROWS * pages.width(), 0.0);
                gather(s, pages, from, to, &mut scratch.rows);
                let stride_bytes = pages.width() * size_of::<f32>();
                let at = scratch.rows.as_ptr().cast();
                let group = Group::<f32>::new(at, stride_bytes, to - from, at);
                group_step(s, query, &group, from, &mut out);
            }
            from = to;
        }
        out.normalise(query.d_v);
    }
}

/// A type that cached rows hold.
trait Value: Copy {
    /// Whether asking for the next group's rows while this one computes pays: for bf16 a third
    /// less time over rows that lie in memory, on a Zen 5 core; for f32 the loads that the
    /// arithmetic waits for are as many as the lines asked for, and nothing is won.
    const AHEAD: bool;

    /// # Safety
    /// `from` is readable for `S::LANES` values.
    unsafe fn load<S: Simd>(s: S, from: *const Self) -> S::V;
    fn widen(self) -> f32;
}

impl Value for f32 {
    const AHEAD: bool = false;

    #[inline(always)]
    unsafe fn load<S: Simd>(s: S, from: *const f32) -> S::V {
        // SAFETY: the caller's word.
        unsafe { s.load(from) }
    }
    #[inline(always)]
    fn widen(self) -> f32 {
        self
    }
}

impl Value for bf16 {
    const AHEAD: bool = true;

    #[inline(always)]
    unsafe fn load<S: Simd>(s: S, from: *const bf16) -> S::V {
        // SAFETY: the caller's word.
        unsafe { s.load_bf16(from) }
    }
    #[inline(always)]
    fn widen(self) -> f32 {
        self.to_f32()
    }
}

impl Value for f16 {
    const AHEAD: bool = true;

    #[inline(always)]
    unsafe fn load<S: Simd>(s: S, from: *const f16) -> S::V {
        // SAFETY: the caller's word.
        unsafe { s.load_f16(from) }
    }
    #[inline(always)]
    fn widen(self) -> f32 {
        self.to_f32()
    }
}

/// Cached rows at a constant stride, in one page or in scratch. Only [`Narrow::run`] makes one, of
/// rows that stay readable while it uses it, each as wide as the query's.
struct Group<T> {
    first: *const T,
    stride: usize,
    rows: usize,
    /// Where the next group begins, or this one when there is none or it is in cache already.
    next: *const T,
}

impl<T: Value> Group<T> {
    #[inline(always)]
    fn new(first: *const u8, stride_bytes: usize, rows: usize, next: *const u8) -> Self {
        let stride = stride_bytes / size_of::<T>();
        Group { first: first.cast(), stride, rows, next: next.cast() }
    }

    /// Where value `col` of a row lies.
    #[inline(always)]
    fn at(&self, row: usize, col: usize) -> *const T {
        self.first.wrapping_add(row * self.stride + col)
    }

    /// Where it lies in the next group, as far as that has such a row.
    #[inline(always)]
    fn next_at(&self, row: usize, col: usize) -> *const T {
        self.next.wrapping_add(row * self.stride + col)
    }
}

#[inline(always)]
fn group_step<S: Simd, T: Value>(
    s: S,
    query: &Query<'_>,
    group: &Group<T>,
    from: usize,
    out: &mut PartialMut<'_>,
) {
    let mut first = 0;
    while first < query.rows() {
        let tile = TILE.min(query.rows() - first);
        match tile {
            4 => tile_step::<S, T, 4>(s, query, group, from, out, first),
            3 => tile_step::<S, T, 3>(s, query, group, from, out, first),
            2 => tile_step::<S, T, 2>(s, query, group, from, out, first),
            _ => tile_step::<S, T, 1>(s, query, group, from, out, first),
        }
        first += tile;
    }
}

/// One group of cached rows, which begins with row `from` of the list, against `H` query rows from
/// `first` on.
#[inline(always)]
fn tile_step<S: Simd, T: Value, const H: usize>(
    s: S,
    query: &Query<'_>,
    group: &Group<T>,
    from: usize,
    out: &mut PartialMut<'_>,
    first: usize,
) {
    let visible: [usize; H] =
        std::array::from_fn(|h| query.visible.of(first + h, usize::MAX).saturating_sub(from));
    if visible.iter().all(|&visible| visible == 0) {
        return;
    }
    // Later tiles find the next group asked for already.
    let ahead = T::AHEAD && first == 0 && group.next != group.first;
    let mut weights = [[0f32; GROUP_ROWS]; H];
    let q: [&[f32]; H] = std::array::from_fn(|h| query.row(first + h));
    let mut row = 0;
    while row < group.rows {
        let left = group.rows - row;
        if S::LOGIT_ROWS == 4 && left >= 4 {
            logits_tile::<S, T, H, 4>(s, &q, group, row, ahead, &mut weights);
            row += 4;
        } else if S::LOGIT_ROWS >= 2 && left >= 2 {
            logits_tile::<S, T, H, 2>(s, &q, group, row, ahead, &mut weights);
            row += 2;
        } else {
            logits_tile::<S, T, H, 1>(s, &q, group, row, ahead, &mut weights);
            row += 1;
        }
    }

    let mut corrections = [0f32; H];
    for h in 0..H {
        let mut running = Running { m: out.m[first + h], l: out.l[first + h] };
        let logits = &mut weights[h][..group.rows];
        corrections[h] = softmax_step(s, logits, visible[h], query.scale, &mut running);
        (out.m[first + h], out.l[first + h]) = (running.m, running.l);
    }

    let d_v = query.d_v;
    let o = &mut out.o[first * d_v..][..H * d_v];
    let mut col = 0;
    while col < d_v {
        let left = d_v - col;
        let columns = Columns { from: col, d_v };
        if S::OUTPUT_VECTORS == 4 && left >= 4 * S::LANES {
            output_tile::<S, T, H, 4>(s, group, columns, &weights, &corrections, o);
            col += 4 * S::LANES;
        } else if S::OUTPUT_VECTORS >= 2 && left >= 2 * S::LANES {
            output_tile::<S, T, H, 2>(s, group, columns, &weights, &corrections, o);
            col += 2 * S::LANES;
        } else if left >= S::LANES {
            output_tile::<S, T, H, 1>(s, group, columns, &weights, &corrections, o);
            col += S::LANES;
        } else {
            output_rest(group, columns, &weights, &corrections, o);
            col = d_v;
        }
    }
}

/// Dot products of `H` query rows with `R` cached rows from `row` on.
#[inline(always)]
fn logits_tile<S: Simd, T: Value, const H: usize, const R: usize>(
    s: S,
    q: &[&[f32]; H],
    group: &Group<T>,
    row: usize,
    ahead: bool,
    logits: &mut [[f32; GROUP_ROWS]; H],
) {
    let width = q[0].len();
    let whole = width / S::LANES * S::LANES;
    let mut sums = [[s.splat(0.0); R]; H];
    for i in (0..whole).step_by(S::LANES) {
        if ahead {
            (0..R).for_each(|r| s.prefetch(group.next_at(row + r, i).cast()));
        }
        // SAFETY: `i + LANES <= width`, the length of every query row and of the `R` cached rows,
        // which the caller has left.
        unsafe {
            let rows: [S::V; R] = std::array::from_fn(|r| T::load(s, group.at(row + r, i)));
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
                // SAFETY: `i < width`, and the caller has `R` rows left.
                logit += q[h][i] * unsafe { group.at(row + r, i).read() }.widen();
            }
            logits[h][row + r] = logit;
        }
    }
}

/// Where an output tile lies.
#[derive(Clone, Copy)]
struct Columns {
    from: usize,
    d_v: usize,
}

/// `o = o · correction + weights · values` for `C` vectors of columns.
#[inline(always)]
fn output_tile<S: Simd, T: Value, const H: usize, const C: usize>(
    s: S,
    group: &Group<T>,
    columns: Columns,
    weights: &[[f32; GROUP_ROWS]; H],
    corrections: &[f32; H],
    o: &mut [f32],
) {
    let at = |h: usize, c: usize| h * columns.d_v + columns.from + c * S::LANES;
    let o = o.as_mut_ptr();
    let mut sums = [[s.splat(0.0); C]; H];
    for h in 0..H {
        for c in 0..C {
            // SAFETY: the caller has `C` whole vectors of columns left in each of `H` rows.
            sums[h][c] = s.mul(unsafe { s.load(o.add(at(h, c))) }, s.splat(corrections[h]));
        }
    }
    for row in 0..group.rows {
        // SAFETY: `row` is one of the group's, and `d_v <= d_qk` values of it are readable.
        let values: [S::V; C] = std::array::from_fn(|c| unsafe {
            T::load(s, group.at(row, columns.from + c * S::LANES))
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
fn output_rest<T: Value, const H: usize>(
    group: &Group<T>,
    columns: Columns,
    weights: &[[f32; GROUP_ROWS]; H],
    corrections: &[f32; H],
    o: &mut [f32],
) {
    for h in 0..H {
        for col in columns.from..columns.d_v {
            let mut sum = o[h * columns.d_v + col] * corrections[h];
            for row in 0..group.rows {
                // SAFETY: `row` is one of the group's and `col < d_v <= d_qk`.
                sum += weights[h][row] * unsafe { group.at(row, col).read() }.widen();
            }
            o[h * columns.d_v + col] = sum;
        }
    }
}
