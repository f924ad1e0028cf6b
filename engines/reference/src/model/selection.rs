//! Which rows each token of a step attends: the best among all before it and itself, wherever they lie.
//!
//! Those who have rows elsewhere say which of theirs are best; with the best ones here they are more than
//! enough. A score depends on two rows alone, and of equal scores the earlier position is the better one:
//! so the choice does not depend on who has which rows.

#![forbid(unsafe_code)]

use std::ops::Range;

use kvasir_attention::Visible;
use kvasir_attention::index::{Candidate, IndexQuery, best};

use super::attention::{Away, Queries, Span};
use super::indexer::{IndexQueryRows, Indexer};
use super::{Cache, Elsewhere, IndexQueries, IndexerConfig, SequenceIndex};

/// For each token of a span rows in their order.
pub(super) type Lists = Vec<Vec<u32>>;

/// See the module.
#[derive(Debug)]
pub(super) struct Selection {
    /// Of each span the rows that are here; `None` where tokens attend all that they see.
    pub here: Vec<Option<Lists>>,
    /// Of each hole, as [`Queries::away`] has them, its own rows.
    pub away: Vec<Lists>,
}

impl Span {
    /// Whether some token sees more rows than it attends.
    fn selects(&self, sizes: &IndexerConfig) -> bool {
        !self.rows.is_empty() && self.end > sizes.topk
    }
}

/// Whether any token of a step sees more rows than it attends.
pub(super) fn is_needed(sizes: &IndexerConfig, queries: &Queries<'_>) -> bool {
    queries.spans.iter().any(|span| span.selects(sizes))
}

/// Chooses, with the keys of this step in the cache already.
pub(super) fn choose(
    indexer: &Indexer,
    asked: &IndexQueryRows<'_>,
    (cache, elsewhere): (&Cache, &mut dyn Elsewhere),
    queries: &Queries<'_>,
    kernels: &kvasir_attention::Attention,
) -> Selection {
    let sizes = &indexer.sizes;
    let is_asked = |away: &Away| queries.spans[away.sequence].selects(sizes);
    let sequences: Vec<SequenceIndex<'_>> = (queries.away.iter())
        .filter(|away| is_asked(away))
        .map(|away| {
            let rows = rows_of(asked, sizes, &queries.spans[away.sequence]);
            let (sequence, hole) = (away.sequence, away.hole);
            SequenceIndex { sequence, hole, values: rows.values, weights: rows.weights }
        })
        .collect();
    let IndexerConfig { heads, width, topk } = *sizes;
    let away = IndexQueries { layer: queries.layer, heads, width, topk, sequences: &sequences };
    if !sequences.is_empty() {
        elsewhere.score(&away);
    }
    let here: Vec<Option<Vec<Vec<Candidate>>>> = queries
        .spans
        .iter()
        .map(|span| {
            span.selects(sizes).then(|| best_here(asked, sizes, cache, queries, span, kernels))
        })
        .collect();
    let received = if sequences.is_empty() { Vec::new() } else { elsewhere.best(&away) };
    let mut received = received.into_iter();
    let mut selection = Selection { here: Vec::new(), away: Vec::new() };
    for (sequence, (span, here)) in queries.spans.iter().zip(here).enumerate() {
        let holes: Vec<&Away> =
            queries.away.iter().filter(|away| away.sequence == sequence).collect();
        let Some(here) = here else {
            let all = |away: &&Away| (0..away.positions.len() as u32).collect::<Vec<u32>>();
            selection.away.extend(holes.iter().map(|away| vec![all(away); span.rows.len()]));
            selection.here.push(None);
            continue;
        };
        let positions: Vec<Range<u32>> = holes.iter().map(|away| away.positions.clone()).collect();
        // Without what one of them knows, nothing that comes of this sequence is used.
        let theirs: Vec<Vec<Vec<Candidate>>> =
            holes.iter().map(|_| received.next().flatten().unwrap_or_default()).collect();
        let (here, away) = merge(here, &theirs, &positions, sizes.topk);
        selection.here.push(Some(here));
        selection.away.extend(away);
    }
    selection
}

/// The span's part of the queries.
fn rows_of<'a>(
    asked: &IndexQueryRows<'a>,
    sizes: &IndexerConfig,
    span: &Span,
) -> IndexQueryRows<'a> {
    let (from, to) = (span.rows.start * sizes.heads, span.rows.end * sizes.heads);
    IndexQueryRows {
        values: &asked.values[from * sizes.width..to * sizes.width],
        weights: &asked.weights[from..to],
    }
}

fn best_here(
    asked: &IndexQueryRows<'_>,
    sizes: &IndexerConfig,
    cache: &Cache,
    queries: &Queries<'_>,
    span: &Span,
    kernels: &kvasir_attention::Attention,
) -> Vec<Vec<Candidate>> {
    let rows = rows_of(asked, sizes, span);
    let heads = queries.config.heads;
    let visible: Vec<usize> =
        span.rows.clone().map(|token| queries.visible[token * heads]).collect();
    let query = IndexQuery {
        values: rows.values,
        weights: rows.weights,
        heads: sizes.heads,
        width: sizes.width,
        visible: Visible::First(&visible),
    };
    let slots = &queries.slot_offsets[span.slots.clone()];
    let keys = cache.keys(queries.layer, slots, span.cached);
    kernels.candidates(&query, &keys, sizes.topk)
}

/// The best of all for each token: rows here, and of each hole.
fn merge(
    here: Vec<Vec<Candidate>>,
    theirs: &[Vec<Vec<Candidate>>],
    holes: &[Range<u32>],
    topk: usize,
) -> (Lists, Vec<Lists>) {
    let mut away: Vec<Lists> = vec![Vec::with_capacity(here.len()); holes.len()];
    let mut own = Vec::with_capacity(here.len());
    for (token, here) in here.into_iter().enumerate() {
        let at = |row: u32, candidate: &Candidate| Candidate { row, ..*candidate };
        let mut all: Vec<Candidate> =
            here.iter().map(|candidate| at(position(holes, candidate.row), candidate)).collect();
        for (theirs, hole) in theirs.iter().zip(holes) {
            let of_token = theirs.get(token).into_iter().flatten();
            all.extend(of_token.map(|candidate| at(hole.start + candidate.row, candidate)));
        }
        let chosen: Vec<u32> = best(all, topk).iter().map(|candidate| candidate.row).collect();
        for (away, hole) in away.iter_mut().zip(holes) {
            let of_hole = chosen.iter().filter(|position| hole.contains(position));
            away.push(of_hole.map(|position| position - hole.start).collect());
        }
        let is_here = |position: &u32| holes.iter().all(|hole| !hole.contains(position));
        own.push(chosen.into_iter().filter(is_here).map(|position| row(holes, position)).collect());
    }
    (own, away)
}

/// The position of a row that is here: those of holes before it lie between.
fn position(holes: &[Range<u32>], row: u32) -> u32 {
    let skip =
        |at: u32, hole: &Range<u32>| if hole.start <= at { at + hole.len() as u32 } else { at };
    holes.iter().fold(row, skip)
}

/// The row here of a position outside the holes.
fn row(holes: &[Range<u32>], position: u32) -> u32 {
    let before = holes.iter().filter(|hole| hole.end <= position);
    position - before.map(|hole| hole.len() as u32).sum::<u32>()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn candidate(row: u32, score: f32) -> Candidate {
        Candidate { row, score }
    }

    #[test]
    fn rows_and_positions_are_one_another_around_holes() {
        let holes = [0..4, 6..8, 9..10];
        for (row_here, at) in [(0, 4), (1, 5), (2, 8), (3, 10), (4, 11)] {
            assert_eq!((position(&holes, row_here), row(&holes, at)), (at, row_here));
        }
        assert_eq!((position(&[], 7), row(&[], 7)), (7, 7));
    }

    #[test]
    fn the_best_of_all_are_taken_and_of_equal_ones_the_earlier() {
        let holes = [0..4, 6..8];
        let here = vec![vec![candidate(0, 1.0), candidate(1, 2.0), candidate(2, 3.0)]; 2];
        let theirs = [
            vec![vec![candidate(1, 2.0), candidate(3, 0.5)], vec![candidate(0, 9.0)]],
            vec![vec![candidate(1, 2.0)], vec![]],
        ];
        // Positions 4, 5, 8 are here; in the first token 1, 5 and 7 score the same.
        let (own, away) = merge(here, &theirs, &holes, 3);
        assert_eq!(own, [vec![1, 2], vec![1, 2]]);
        assert_eq!(away, [vec![vec![1], vec![0]], vec![vec![], vec![]]]);
    }
}
