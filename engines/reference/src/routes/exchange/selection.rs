//! The two exchanges of a layer under selection. First each holder says which of its rows score best for each
//! token; then those that were chosen among everybody's are attended where they lie. Tokens that chose nothing
//! of a holder are not sent to it.

use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use kvasir_attention::Partial;
use kvasir_attention::index::Candidate;
use kvasir_route::requester::{
    DispatchError, Flight, IndexRows, IndexShape, SelectedRows, Session,
};
use kvasir_route::wire::{Best, Part};

use super::{Exchange, Message, OfPlace, Place, Sent, add, part_of, put};
use crate::model::{IndexQueries, LayerQueries, SequenceQueries};
use crate::routes::RoutedSpan;

/// What is under way.
#[derive(Debug, Default)]
pub(super) struct Selecting {
    scores: Vec<Sent<Best, Place>>,
    /// Holders were asked for scores of this layer.
    has_scored: bool,
    /// The layer's queries were sent with chosen rows.
    pub is_sent: bool,
    partials: Vec<Sent<Partial, Chosen>>,
    /// Query rows of each sequence and hole.
    rows: Vec<usize>,
    d_v: usize,
}

/// Tokens that attend something of a span, each with what it has chosen there, and their query rows.
#[derive(Debug)]
struct Chosen {
    place: Place,
    tokens: Vec<usize>,
    part: Part,
    values: Vec<f32>,
    lists: Vec<Vec<u32>>,
}

impl OfPlace for Chosen {
    fn place(&self) -> Place {
        self.place
    }
}

impl Chosen {
    fn lists(&self) -> Vec<&[u32]> {
        self.lists.iter().map(Vec::as_slice).collect()
    }
}

/// Each span with its rows among those of its hole.
fn with_rows(spans: &[RoutedSpan]) -> impl Iterator<Item = (usize, &RoutedSpan, Range<u32>)> {
    let mut end = 0;
    spans.iter().enumerate().map(move |(n, span)| {
        let start = end;
        end += span.rows;
        (n, span, start..end)
    })
}

/// What one token attends of a hole, within these rows of it and numbered from the first of them on.
fn within(selected: &[u32], rows: &Range<u32>) -> Vec<u32> {
    let from = selected.partition_point(|row| *row < rows.start);
    let to = selected.partition_point(|row| *row < rows.end);
    selected[from..to].iter().map(|row| row - rows.start).collect()
}

impl Exchange<'_> {
    pub(super) fn send_scores(&mut self, queries: &IndexQueries<'_>) {
        self.sent_at = Instant::now();
        let asked = queries.sequences.iter().map(|queries| (queries.sequence, queries.hole));
        self.asked = asked.collect();
        let mut messages: Vec<Message<Place>> = Vec::new();
        for (at, asked) in queries.sequences.iter().enumerate() {
            let Some(spans) = self.spans_of(asked.sequence, asked.hole) else { continue };
            for (span, routed) in spans.iter().enumerate() {
                // Indexers are the same on all ranks: one asks.
                add(&mut messages, &routed.ranks[0].session, Place { asked: at, span, rank: 0 });
            }
        }
        self.selecting.scores = self.send_all(messages, |exchange, session, places| {
            exchange.dispatch_scores(queries, session, places)
        });
        self.selecting.has_scored = !self.selecting.scores.is_empty();
    }

    fn dispatch_scores(
        &self,
        queries: &IndexQueries<'_>,
        session: &Arc<Session>,
        places: &[Place],
    ) -> Result<Flight<Best>, DispatchError> {
        let part = |place: &Place| {
            let asked = &queries.sequences[place.asked];
            let part = part_of(self.span(*place)?, place.rank, asked.weights.len());
            Some(IndexRows { part, values: asked.values, weights: asked.weights })
        };
        let parts: Vec<IndexRows<'_>> = places.iter().filter_map(part).collect();
        let shape = IndexShape {
            step: self.step,
            layer: queries.layer as u32,
            heads: queries.heads as u32,
            width: queries.width as u32,
            topk: queries.topk as u32,
        };
        session.dispatch_scores(&shape, &parts, self.write_deadline())
    }

    pub(super) fn receive_best(
        &mut self,
        queries: &IndexQueries<'_>,
    ) -> Vec<Option<Vec<Vec<Candidate>>>> {
        let sent = std::mem::take(&mut self.selecting.scores);
        let mut best: Vec<Vec<Vec<Candidate>>> = vec![Vec::new(); self.asked.len()];
        let again = |exchange: &Self, session: &Arc<Session>, places: &[Place]| {
            exchange.dispatch_scores(queries, session, places)
        };
        self.each_part(sent, again, |exchange, place, part: Best| {
            let (sequence, hole) = exchange.asked[place.asked];
            let spans = exchange.spans(sequence, hole).unwrap_or_default();
            let Some((_, _, rows)) = with_rows(spans).nth(place.span) else { return };
            let all = &mut best[place.asked];
            all.resize_with(part.0.len(), Vec::new);
            for (all, found) in all.iter_mut().zip(part.0) {
                let row = |row: u32| rows.start + row;
                all.extend(found.iter().map(|found| Candidate { row: row(found.row), ..*found }));
            }
        });
        self.took += self.sent_at.elapsed();
        let known =
            |(best, &(sequence, _)): (_, &(usize, usize))| (!self.failed[sequence]).then_some(best);
        best.into_iter().zip(&self.asked).map(known).collect()
    }

    pub(super) fn send_selected(&mut self, queries: &LayerQueries<'_>) {
        let rows = |asked: &SequenceQueries<'_>| asked.values.len() / queries.d_qk;
        let heads = self.options.heads_of_rank;
        self.selecting.is_sent = true;
        self.selecting.rows = queries.sequences.iter().map(rows).collect();
        self.selecting.d_v = queries.d_v;
        let mut messages: Vec<Message<Chosen>> = Vec::new();
        for (at, asked) in queries.sequences.iter().enumerate() {
            let Some(spans) = self.spans_of(asked.sequence, asked.hole) else { continue };
            let lists = asked.selected.unwrap_or_default();
            for (span, routed, rows) in with_rows(spans) {
                let of_token = |list: &Vec<u32>| within(list, &rows);
                let chosen: Vec<(usize, Vec<u32>)> = lists
                    .iter()
                    .map(of_token)
                    .enumerate()
                    .filter(|(_, list)| !list.is_empty())
                    .collect();
                if chosen.is_empty() {
                    continue;
                }
                let width = heads * queries.d_qk;
                let (tokens, lists): (Vec<usize>, Vec<Vec<u32>>) = chosen.into_iter().unzip();
                let ranks = routed.ranks.len();
                for (rank, of) in routed.ranks.iter().enumerate() {
                    let first = |token: &usize| (token * ranks + rank) * width;
                    let values =
                        tokens.iter().flat_map(|token| &asked.values[first(token)..][..width]);
                    let chosen = Chosen {
                        place: Place { asked: at, span, rank },
                        tokens: tokens.clone(),
                        part: part_of(routed, rank, tokens.len() * heads),
                        values: values.copied().collect(),
                        lists: lists.clone(),
                    };
                    add(&mut messages, &of.session, chosen);
                }
            }
        }
        self.selecting.partials = self.send_all(messages, |exchange, session, chosen| {
            exchange.dispatch_selected(queries, session, chosen)
        });
    }

    fn dispatch_selected(
        &self,
        queries: &LayerQueries<'_>,
        session: &Arc<Session>,
        parts: &[Chosen],
    ) -> Result<Flight, DispatchError> {
        let lists: Vec<Vec<&[u32]>> = parts.iter().map(Chosen::lists).collect();
        let rows = parts.iter().zip(&lists).map(|(chosen, lists)| SelectedRows {
            part: chosen.part,
            values: &chosen.values,
            selected: lists,
        });
        let rows: Vec<SelectedRows<'_>> = rows.collect();
        let (shape, heads) = (self.shape(queries), self.options.heads_of_rank as u32);
        session.dispatch_selected(&shape, heads, &rows, self.write_deadline())
    }

    pub(super) fn receive_selected(
        &mut self,
        queries: &LayerQueries<'_>,
    ) -> Vec<Option<Vec<Partial>>> {
        let sent = std::mem::take(&mut self.selecting.partials);
        let (heads, d_v) = (self.options.heads_of_rank, self.selecting.d_v);
        let was_asked = !sent.is_empty() || self.selecting.has_scored;
        // Over nothing, where nothing was chosen.
        let empty = |(&(sequence, hole), &rows): (&(usize, usize), &usize)| {
            let spans = self.spans(sequence, hole).map_or(0, <[_]>::len);
            vec![Some(Partial::empty(rows, d_v)); spans]
        };
        let mut partials: Vec<Vec<Option<Partial>>> =
            self.asked.iter().zip(&self.selecting.rows).map(empty).collect();
        let again = |exchange: &Self, session: &Arc<Session>, chosen: &[Chosen]| {
            exchange.dispatch_selected(queries, session, chosen)
        };
        self.each_part(sent, again, |exchange, chosen, part: Partial| {
            let place = chosen.place;
            let ranks = exchange.span(place).map_or(1, |routed| routed.ranks.len());
            let Some(all) = &mut partials[place.asked][place.span] else { return };
            for (at, token) in chosen.tokens.iter().enumerate() {
                put(all, (token * ranks + place.rank) * heads, &part, at * heads, heads);
            }
        });
        if was_asked {
            // Whom a token asks is another thing in each layer.
            self.count_layer(0);
        }
        (self.selecting.is_sent, self.selecting.has_scored) = (false, false);
        self.whole(partials)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_chosen_of_a_hole_is_dealt_out_to_its_spans() {
        let selected = [0, 3, 63, 64, 70, 200];
        assert_eq!(within(&selected, &(0..64)), [0, 3, 63]);
        assert_eq!(within(&selected, &(64..128)), [0, 6]);
        assert_eq!(within(&selected, &(128..192)), [0; 0]);
        assert_eq!(within(&selected, &(192..256)), [8]);
    }
}
