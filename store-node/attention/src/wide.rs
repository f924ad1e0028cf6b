//! Many query rows (prefill): products of large matrices, group by group of cached rows.
//!
//! A group of cached rows is copied into one f32 matrix (widened when they are bf16), then every
//! tile of query rows passes over it with two products and one softmax step between them. The copy
//! costs 1 in 1,000 of the arithmetic and lets the products run at their full speed.

use crate::exp::{Running, softmax_step};
use crate::gather::gather;
use crate::matrix::{Into, View, ViewMut, multiply};
use crate::pages::PageList;
use crate::partial::{PartialMut, Query};
use crate::simd::{Simd, Task};

const GROUP_ROWS: usize = 256;
const TILE_ROWS: usize = 256;

/// Memory that calls reuse.
#[derive(Debug, Default)]
pub(crate) struct Scratch {
    rows: Vec<f32>,
    weights: Vec<f32>,
}

pub(crate) struct Wide<'a, 'q> {
    pub query: &'a Query<'q>,
    pub pages: &'a PageList<'q>,
    pub out: PartialMut<'a>,
    pub scratch: &'a mut Scratch,
}

impl Task for Wide<'_, '_> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Wide { query, pages, mut out, scratch } = self;
        out.clear();
        scratch.rows.resize(GROUP_ROWS * pages.width(), 0.0);
        scratch.weights.resize(TILE_ROWS * GROUP_ROWS, 0.0);
        let reach = (0..query.rows()).map(|row| query.visible.of(row, pages.rows())).max();
        let reach = reach.unwrap_or(0);
        for from in (0..reach).step_by(GROUP_ROWS) {
            let to = (from + GROUP_ROWS).min(reach);
            gather(s, pages, from, to, &mut scratch.rows);
            let group = View::new(&scratch.rows, to - from, pages.width(), pages.width());
            for first in (0..query.rows()).step_by(TILE_ROWS) {
                let rows = TILE_ROWS.min(query.rows() - first);
                let tile = query.slice(first, first + rows);
                let out = PartialMut {
                    o: &mut out.o[first * query.d_v..][..rows * query.d_v],
                    m: &mut out.m[first..first + rows],
                    l: &mut out.l[first..first + rows],
                };
                tile_step(s, &tile, group, from, &mut scratch.weights, out);
            }
        }
        out.normalise(query.d_v);
    }
}

/// One group of cached rows, which begins with row `from` of the list, against one tile of queries.
#[inline(always)]
fn tile_step<S: Simd>(
    s: S,
    tile: &Query<'_>,
    group: View<'_>,
    from: usize,
    weights: &mut [f32],
    out: PartialMut<'_>,
) {
    let (rows, cols, d_v) = (tile.rows(), group.rows(), tile.d_v);
    let visible = |row: usize| tile.visible.of(row, usize::MAX).saturating_sub(from);
    if (0..rows).all(|row| visible(row) == 0) {
        return;
    }
    let queries = View::new(tile.values, rows, tile.d_qk, tile.d_qk);
    let logits = ViewMut::new(weights, rows, cols, cols);
    multiply(logits, Into::Replace, queries, group.transposed(), 1);
    for (row, logits) in weights.chunks_exact_mut(cols).take(rows).enumerate() {
        let mut running = Running { m: out.m[row], l: out.l[row] };
        let correction = softmax_step(s, logits, visible(row), tile.scale, &mut running);
        (out.m[row], out.l[row]) = (running.m, running.l);
        if correction != 1.0 {
            out.o[row * d_v..][..d_v].iter_mut().for_each(|value| *value *= correction);
        }
    }
    let weights = View::new(weights, rows, cols, cols);
    multiply(ViewMut::new(out.o, rows, d_v, d_v), Into::Add, weights, group.first_cols(d_v), 1);
}
