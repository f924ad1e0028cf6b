//! Partial attention in products of bf16: in tiles (AMX), the fastest way on processors that have them,
//! or in dot products of vectors (AVX-512 BF16), where these are faster than f32.
//!
//! Cached rows are an operand of the score product where they lie, sixteen at a time; rows of
//! a selection or of odd shapes are copied into scratch first. Scores come out with
//! query rows in the lanes of a vector, so the softmax needs no reduction across lanes. For the
//! second product the values of two rows at a time are interleaved: for tiles once for up to
//! [`CHUNK_BLOCKS`] blocks of query rows, for vectors as they are loaded.
//!
//! The tile unit is one of several that a core has, so what vectors do is done while it multiplies:
//! beside the scores of the first two blocks the same lines of the rows are interleaved and the next
//! rows fetched, beside those of each following two the weights of the two before are computed.
//!
//! Queries and weights are rounded to bf16, sums are f32. The reference vectors have tolerances of
//! their own for such a kernel.

mod dots;
mod layout;
mod softmax;
mod tiles;
mod unit;

pub(crate) use dots::Avx512Bf16;
pub(crate) use tiles::Amx;

use crate::pages::PageList;
use crate::partial::{PartialMut, Query};
use layout::{Lines, Located, Shape};
use softmax::{Block, PIECES, Weighing};
use unit::{LINE_BYTES, Rows, TILE_ROWS, Unit, Values};

/// Cached rows of one step: the rows, the interleaved values and what the blocks of a chunk keep fit
/// the second-level cache.
const STEP_ROWS: usize = 256;
/// The same for a single block at most, see [`Unit::STEP_ROWS_OF_ONE`].
const STEP_ROWS_MAX: usize = 512;
/// Row tiles of the longest step.
const STEP_TILES_MAX: usize = STEP_ROWS_MAX / TILE_ROWS;
/// Blocks of sixteen query rows that share one pass over the rows.
const CHUNK_BLOCKS: usize = 16;
/// Blocks whose scores are computed together.
const PAIR_BLOCKS: usize = 2;
/// Rows of one product over rows: two row tiles interleaved.
const PAIR_ROWS: usize = 32;

/// Memory that calls reuse.
#[derive(Debug, Default)]
pub(crate) struct Scratch {
    /// Right operand of the scores: for each block and 32 columns a tile.
    queries: Lines,
    /// Rows that could not be read in place.
    rows: Lines,
    /// Scores of one step: for each of four blocks a line of sixteen query rows for each cached row.
    /// Those of two are made while those of the two before become weights.
    scores: Lines,
    /// Left operand of the second product: for each block and 32 rows a tile.
    weights: Lines,
    /// Its right operand, for a unit that reads panels: for each 32 columns one with two tiles for each
    /// 32 rows.
    values: Lines,
    /// Running outputs: for each block and sixteen columns a tile of f32.
    sums: Lines,
}

/// The partial of `query` over `pages`, whose rows are bf16, into `out`, in tiles. The scale is above 0.
pub(crate) fn attend_in_tiles(
    amx: Amx,
    query: &Query<'_>,
    pages: &PageList<'_>,
    out: PartialMut<'_>,
    scratch: &mut Scratch,
) {
    attend(&amx.configure(), query, pages, out, scratch);
}

/// As [`attend_in_tiles`], in dot products.
pub(crate) fn attend_in_dots(
    unit: Avx512Bf16,
    query: &Query<'_>,
    pages: &PageList<'_>,
    out: PartialMut<'_>,
    scratch: &mut Scratch,
) {
    attend(&unit, query, pages, out, scratch);
}

fn attend(
    unit: &impl Unit,
    query: &Query<'_>,
    pages: &PageList<'_>,
    out: PartialMut<'_>,
    scratch: &mut Scratch,
) {
    let chunk_rows = CHUNK_BLOCKS * TILE_ROWS;
    for first in (0..query.rows()).step_by(chunk_rows) {
        let rows = chunk_rows.min(query.rows() - first);
        let out = PartialMut {
            o: &mut out.o[first * query.d_v..][..rows * query.d_v],
            m: &mut out.m[first..first + rows],
            l: &mut out.l[first..first + rows],
        };
        // SAFETY: a unit exists only where all of these vector instructions do.
        unsafe { chunk(unit, &query.slice(first, first + rows), pages, out, scratch) };
    }
}

/// Up to [`CHUNK_BLOCKS`] blocks of query rows.
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
fn chunk<U: Unit>(
    unit: &U,
    query: &Query<'_>,
    pages: &PageList<'_>,
    out: PartialMut<'_>,
    scratch: &mut Scratch,
) {
    let shape = Shape::new::<U>(query);
    shape.reserve(scratch);
    layout::pack_queries(query, &shape, &mut scratch.queries);
    let counts = |row: usize| query.visible.of(row, pages.rows());
    let mut blocks: Vec<Block> =
        (0..shape.blocks).map(|block| Block::new(block, query, counts)).collect();
    let reach = (0..query.rows()).map(counts).max().unwrap_or(0);
    for from in (0..reach).step_by(shape.step_rows) {
        let located = Located::new(pages, from, reach, &shape, &mut scratch.rows);
        for first in (0..shape.blocks).step_by(PAIR_BLOCKS) {
            let (before, now) = blocks.split_at_mut(first);
            scores(unit, &located, &shape, before, scratch);
            for (at, block) in now.iter_mut().take(PAIR_BLOCKS).enumerate() {
                let scores = scratch.scores.at(shape.score_line(first + at));
                let sums = scratch.sums.at_mut((first + at) * shape.sum_lines());
                // SAFETY: scratch was reserved for every block of this shape.
                unsafe {
                    block.begin(from, located.rows, scores);
                    block.correct(sums, shape.sum_lines());
                }
            }
        }
        // SAFETY: all blocks have begun the step; scratch was reserved for this shape.
        unsafe { weighing(&mut blocks, &shape, scratch).finish(located.tiles / 2) };
        products(unit, &located, &shape, from == 0, scratch);
    }
    for (at, block) in blocks.iter().enumerate() {
        let sums = scratch.sums.at(at * shape.sum_lines());
        // SAFETY: the block's sums lie there; where no step was made, they are not read.
        unsafe { block.finish(at, query, sums, out.o, out.m, out.l) };
    }
}

/// The last one or two of `blocks`, whose scores are there.
fn weighing<'a>(blocks: &'a mut [Block], shape: &Shape, scratch: &mut Scratch) -> Weighing<'a> {
    let first = blocks.len().saturating_sub(1) / PAIR_BLOCKS * PAIR_BLOCKS;
    // Where there is one block, its place stands for the missing one's, which is not used.
    let block = |at: usize| (first + at).min(shape.blocks - 1);
    Weighing {
        scores: [0, 1].map(|at| scratch.scores.at_mut(shape.score_line(block(at)))),
        weights: [0, 1].map(|at| scratch.weights.at_mut(block(at) * shape.weight_lines())),
        blocks: &mut blocks[first..],
    }
}

/// Scores of a step's rows with the one or two blocks that follow `before`. Beside those of the first
/// ones the rows' values are interleaved, beside others the blocks before get their weights.
#[target_feature(enable = "avx512f,avx512bw")]
fn scores<U: Unit>(
    unit: &U,
    located: &Located,
    shape: &Shape,
    before: &mut [Block],
    scratch: &mut Scratch,
) {
    let first = before.len();
    let mut weighing = weighing(before, shape, scratch);
    let queries = |block: usize| scratch.queries.at(block * shape.query_lines());
    let mut to = |at: usize, tile: usize| {
        scratch.scores.at_mut(shape.score_line(first + at) + tile * TILE_ROWS)
    };
    let values = scratch.values.at_mut(0);
    // Interleaves the values of a tile's rows in one panel and fetches as much of the next group's.
    let spread = |tile: usize, step: usize, group: usize| {
        let (Rows { at, stride }, column) = (located.at[tile], step * LINE_BYTES);
        if U::READS_PANELS && step < shape.panels {
            // A panel has two tiles for two row tiles, and half of their lines are of this one's rows.
            let line =
                step * shape.panel_lines() + tile / 2 * PAIR_ROWS + tile % 2 * (TILE_ROWS / 2);
            // SAFETY: rows are as wide as the panels, which the shape counted and scratch was
            // reserved for.
            unsafe {
                let rows = Rows { at: at.add(column), stride };
                layout::interleave(rows, values.add(line * LINE_BYTES));
            }
        }
        located.fetch(tile + group, column);
    };
    if first + 1 == shape.blocks {
        // SAFETY: the blocks before have begun the step.
        unsafe { weighing.finish(if first == 0 { 0 } else { located.tiles / 2 }) };
        for tile in (0..located.tiles).step_by(4) {
            let rows: [Rows; 4] = std::array::from_fn(|i| located.at[tile + i]);
            let beside = |step: usize, i: usize| {
                if first == 0 {
                    spread(tile + i, step, 4);
                }
            };
            // SAFETY: `Located` has whole groups of four row tiles, as wide as the shape; scratch
            // was reserved for the queries and for the scores of a step.
            unsafe {
                unit.scores_one_block(rows, queries(first), shape.steps, to(0, tile), beside);
            }
        }
        return;
    }
    // One beside each row tile of each step, where rows have 576 values.
    let pieces = PIECES.div_ceil(shape.steps * 2);
    for tile in (0..located.tiles).step_by(2) {
        let rows = [located.at[tile], located.at[tile + 1]];
        let queries = [queries(first), queries(first + 1)];
        let to = [to(0, tile), to(1, tile)];
        let beside_first = |step: usize, i: usize| spread(tile + i, step, 2);
        let beside_others = |step: usize, i: usize| {
            let piece = (2 * step + i) * pieces;
            for piece in piece..(piece + pieces).min(PIECES) {
                // SAFETY: the blocks before have begun the step, and each of a group's pieces has its
                // turn.
                unsafe { weighing.piece(tile / 2, piece) };
            }
        };
        // SAFETY: `Located` has whole pairs of row tiles, as wide as the shape; scratch was reserved
        // for the queries and for the scores of a step.
        unsafe {
            if first == 0 {
                unit.scores_two_blocks(rows, queries, shape.steps, to, beside_first);
            } else {
                unit.scores_two_blocks(rows, queries, shape.steps, to, beside_others);
            }
        }
    }
}

/// Adds a step's weighted values to the sums of all blocks. Beside them the first rows of the next
/// step are fetched.
#[target_feature(enable = "avx512f,avx512bw")]
fn products<U: Unit>(
    unit: &U,
    located: &Located,
    shape: &Shape,
    first: bool,
    scratch: &mut Scratch,
) {
    let weights = |block: usize| scratch.weights.at(block * shape.weight_lines());
    let values = |panel: usize| Values {
        rows: &located.at[..located.tiles],
        column: panel * LINE_BYTES,
        panel: match U::READS_PANELS {
            true => scratch.values.at(panel * shape.panel_lines()),
            false => std::ptr::null(),
        },
    };
    let mut sums = |block: usize, panel: usize| {
        scratch.sums.at_mut(block * shape.sum_lines() + panel * 2 * TILE_ROWS)
    };
    let mut fetched = 0;
    let mut beside = || {
        located.fetch_ahead(fetched, shape.steps);
        fetched += 1;
    };
    let paired = shape.blocks / PAIR_BLOCKS * PAIR_BLOCKS;
    for panel in 0..shape.panels {
        for block in (0..paired).step_by(PAIR_BLOCKS) {
            // SAFETY: scratch was reserved for these blocks and panels, and holds a tile of weights and
            // two of values for each two row tiles, which are as wide as the panels.
            unsafe {
                unit.values_two_blocks(
                    [sums(block, panel), sums(block + 1, panel)],
                    [weights(block), weights(block + 1)],
                    values(panel),
                    first,
                    &mut beside,
                );
            }
        }
    }
    if paired < shape.blocks {
        for panel in (0..shape.panels).step_by(2) {
            // SAFETY: as above; sums are reserved for panels by twos.
            unsafe {
                unit.values_one_block(
                    sums(paired, panel),
                    weights(paired),
                    // Where the second one is missing, nobody reads what comes of another in its place.
                    [values(panel), values((panel + 1).min(shape.panels - 1))],
                    first,
                    &mut beside,
                );
            }
        }
    }
}
