//! Partial attention in tiles of bf16, the fastest way on processors that have them.
//!
//! Cached rows are the left operand of the score product where they lie, sixteen at a time; rows of
//! a selection or of odd shapes are copied into scratch first. Scores come out with
//! query rows in the lanes of a vector, so the softmax needs no reduction across lanes. For the
//! second product the values of two rows at a time are interleaved, as the unit wants its right
//! operand, once for up to [`CHUNK_BLOCKS`] blocks of query rows.
//!
//! Queries and weights are rounded to bf16, sums are f32. The reference vectors have tolerances of
//! their own for such a kernel.

mod layout;
mod softmax;
mod tiles;

pub(crate) use tiles::Amx;

use crate::pages::PageList;
use crate::partial::{PartialMut, Query};
use layout::{Lines, Located, Shape};
use softmax::Block;
use tiles::{Rows, TILE_ROWS, Tiles};

/// Cached rows of one step. Their scores with two blocks fit the first-level cache, the rows
/// and the interleaved values the second.
const STEP_ROWS: usize = 256;
/// Row tiles of one step.
const STEP_TILES: usize = STEP_ROWS / TILE_ROWS;
/// Blocks of sixteen query rows that share one pass over the rows.
const CHUNK_BLOCKS: usize = 8;
/// Rows of one product over rows: two row tiles interleaved.
const PAIR_ROWS: usize = 32;

/// Memory that calls reuse.
#[derive(Debug, Default)]
pub(crate) struct Scratch {
    /// Right operand of the scores: for each block and 32 columns a tile.
    queries: Lines,
    /// Rows that could not be read in place.
    rows: Lines,
    /// Scores of one step: for each of two blocks `STEP_ROWS` lines of sixteen query rows.
    scores: Lines,
    /// Left operand of the second product: for each block and 32 rows a tile.
    weights: Lines,
    /// Its right operand: for each 32 columns a panel with two tiles for each 32 rows.
    values: Lines,
    /// Running outputs: for each block and sixteen columns a tile of f32.
    sums: Lines,
}

/// The partial of `query` over `pages`, whose rows are bf16, into `out`. The scale is above 0.
pub(crate) fn attend(
    amx: Amx,
    query: &Query<'_>,
    pages: &PageList<'_>,
    out: PartialMut<'_>,
    scratch: &mut Scratch,
) {
    let tiles = amx.configure();
    let chunk_rows = CHUNK_BLOCKS * TILE_ROWS;
    for first in (0..query.rows()).step_by(chunk_rows) {
        let rows = chunk_rows.min(query.rows() - first);
        let out = PartialMut {
            o: &mut out.o[first * query.d_v..][..rows * query.d_v],
            m: &mut out.m[first..first + rows],
            l: &mut out.l[first..first + rows],
        };
        // SAFETY: the tiles are configured, so the processor has the vector instructions too, which
        // `Amx::detect` looked for.
        unsafe { chunk(&tiles, &query.slice(first, first + rows), pages, out, scratch) };
    }
}

/// Up to [`CHUNK_BLOCKS`] blocks of query rows.
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
fn chunk(
    tiles: &Tiles,
    query: &Query<'_>,
    pages: &PageList<'_>,
    out: PartialMut<'_>,
    scratch: &mut Scratch,
) {
    let shape = Shape::new(query);
    shape.reserve(scratch);
    layout::pack_queries(query, &shape, &mut scratch.queries);
    let counts = |row: usize| query.visible.of(row, pages.rows());
    let mut blocks: Vec<Block> =
        (0..shape.blocks).map(|block| Block::new(block, query, counts)).collect();
    let reach = (0..query.rows()).map(counts).max().unwrap_or(0);
    for from in (0..reach).step_by(STEP_ROWS) {
        let located = Located::new(pages, from, reach, &shape, &mut scratch.rows);
        layout::interleave(&located, &shape, &mut scratch.values);
        for first in (0..shape.blocks).step_by(2) {
            let pair = 2.min(shape.blocks - first);
            scores(tiles, &located, &shape, (first, pair), scratch);
            for (at, block) in blocks[first..first + pair].iter_mut().enumerate() {
                let (scores, weights, sums) = (
                    scratch.scores.at(at * STEP_ROWS),
                    scratch.weights.at_mut((first + at) * STEP_TILES / 2 * TILE_ROWS),
                    scratch.sums.at_mut((first + at) * shape.sum_lines()),
                );
                // SAFETY: scratch was reserved for every block of this shape.
                unsafe {
                    block.step(query.scale, from, located.rows, scores, weights);
                    block.correct(sums, shape.sum_lines());
                }
            }
        }
        products(tiles, &located, &shape, from == 0, scratch);
    }
    for (at, block) in blocks.iter().enumerate() {
        let sums = scratch.sums.at(at * shape.sum_lines());
        // SAFETY: the block's sums lie there; where no step was made, they are not read.
        unsafe { block.finish(at, query, sums, out.o, out.m, out.l) };
    }
}

/// Scores of a step's rows with one or two blocks.
#[target_feature(enable = "avx512f,avx512bw")]
fn scores(
    tiles: &Tiles,
    located: &Located,
    shape: &Shape,
    (first, pair): (usize, usize),
    scratch: &mut Scratch,
) {
    let queries = |block: usize| scratch.queries.at(block * shape.query_lines());
    let mut to = |line: usize| scratch.scores.at_mut(line);
    for tile in (0..located.tiles).step_by(if pair == 2 { 2 } else { 4 }) {
        // SAFETY: `Located` has whole groups of four row tiles, as wide as the shape; scratch was
        // reserved for the queries and for the scores of a step.
        unsafe {
            if pair == 2 {
                let to = [to(tile * TILE_ROWS), to(STEP_ROWS + tile * TILE_ROWS)];
                let rows = [located.at[tile], located.at[tile + 1]];
                tiles.scores_two_blocks(
                    rows,
                    [queries(first), queries(first + 1)],
                    shape.steps,
                    to,
                );
            } else {
                let rows: [Rows; 4] = std::array::from_fn(|i| located.at[tile + i]);
                tiles.scores_one_block(rows, queries(first), shape.steps, to(tile * TILE_ROWS));
            }
        }
    }
}

/// Adds a step's weighted values to the sums of all blocks.
fn products(tiles: &Tiles, located: &Located, shape: &Shape, first: bool, scratch: &mut Scratch) {
    let steps = located.tiles / 2;
    let weights = |block: usize| scratch.weights.at(block * STEP_TILES / 2 * TILE_ROWS);
    let values = |panel: usize| scratch.values.at(panel * layout::PANEL_LINES);
    let mut sums = |block: usize, panel: usize| {
        scratch.sums.at_mut(block * shape.sum_lines() + panel * 2 * TILE_ROWS)
    };
    let paired = shape.blocks / 2 * 2;
    for panel in 0..shape.panels {
        for block in (0..paired).step_by(2) {
            // SAFETY: scratch was reserved for these blocks and panels, and holds `steps` tiles of
            // weights and pairs of tiles of values.
            unsafe {
                tiles.values_two_blocks(
                    [sums(block, panel), sums(block + 1, panel)],
                    [weights(block), weights(block + 1)],
                    values(panel),
                    steps,
                    first,
                );
            }
        }
    }
    if paired < shape.blocks {
        for panel in (0..shape.panels).step_by(2) {
            // SAFETY: as above; panels are reserved by twos.
            unsafe {
                let values = [values(panel), values(panel + 1)];
                tiles.values_one_block(sums(paired, panel), weights(paired), values, steps, first);
            }
        }
    }
}
