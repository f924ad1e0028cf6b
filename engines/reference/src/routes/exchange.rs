//! One step's exchanges with holders: for each layer one message to each holder, with the queries of all
//! sequences of the batch that it attends, while the model attends its own rows. Under selection there is
//! another one before it ([`selection`]). Of tensor-parallel ranks each sends the rows of its heads, to the
//! holder's rank of its number, and what comes back to each is put together by heads.

mod selection;

use std::borrow::Cow;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvasir_attention::Partial;
use kvasir_attention::index::Candidate;
use kvasir_route::requester::{
    DispatchError, Flight, FlightError, PartRows, QueryShape, Session, gather,
};
use kvasir_route::wire::{Answer, MessageStatus, Part, PartStatus, Reply, WireDtype};

use self::selection::Selecting;
use super::{RankRoute, RoutedHoles, RoutedSpan};
use crate::model::{Elsewhere, IndexQueries, LayerQueries, SequenceQueries};
use crate::ports::Exchanged;

/// A query that was sent is not taken back early: its answer, late as it is, frees its slot.
const WRITE_DEADLINE_MIN: Duration = Duration::from_secs(10);

/// Before a holder that had no room is asked again: some of its other requesters have been served by then.
const BUSY_PAUSE_MIN: Duration = Duration::from_micros(50);
const BUSY_PAUSE_MAX: Duration = Duration::from_millis(2);

/// What exchanges of one attachment share.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ExchangeOptions {
    pub dtype: WireDtype,
    /// Query rows of a token, of one rank.
    pub heads_of_rank: usize,
    /// From the time on at which the model waits for a layer's partials.
    pub deadline: Duration,
}

/// A span of a sequence: where its partial goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Place {
    /// Among the sequences and holes of the layer.
    asked: usize,
    span: usize,
    /// Whose heads.
    rank: usize,
}

/// See the module; for one step.
#[derive(Debug)]
pub(crate) struct Exchange<'a> {
    options: ExchangeOptions,
    step: u32,
    /// For each sequence of the batch.
    routed: &'a [Option<&'a RoutedHoles>],
    failed: Vec<bool>,
    /// Of the layer that was sent: which sequences and holes of theirs, what is under way, and where its parts
    /// go.
    asked: Vec<(usize, usize)>,
    flights: Vec<Sent<Partial, Place>>,
    selecting: Selecting,
    sent_at: Instant,
    exchanged: Exchanged,
    took: Duration,
}

impl<'a> Exchange<'a> {
    pub(crate) fn new(
        options: ExchangeOptions,
        step: u32,
        routed: &'a [Option<&'a RoutedHoles>],
    ) -> Self {
        Exchange {
            options,
            step,
            routed,
            failed: vec![false; routed.len()],
            asked: Vec::new(),
            flights: Vec::new(),
            selecting: Selecting::default(),
            sent_at: Instant::now(),
            exchanged: Exchanged::default(),
            took: Duration::ZERO,
        }
    }

    /// Layers whose partials were waited for.
    pub(crate) fn exchanged(&self) -> Exchanged {
        Exchanged { us: self.took.as_micros() as u64, ..self.exchanged }
    }

    /// All of it is there that so many tokens asked.
    fn count_layer(&mut self, tokens: u64) {
        self.took += self.sent_at.elapsed();
        self.exchanged.layers += 1;
        self.exchanged.queries += tokens;
    }

    /// Tokens whose queries go to all holders; one with several holes counts once.
    fn tokens(&self, queries: &LayerQueries<'_>) -> u64 {
        let of_one = |holes: &[SequenceQueries<'_>]| {
            let SequenceQueries { sequence, hole, values, .. } = holes[0];
            let span = self.spans(sequence, hole).and_then(<[RoutedSpan]>::first);
            let heads = self.options.heads_of_rank * span.map_or(1, |span| span.ranks.len());
            (values.len() / (queries.d_qk * heads).max(1)) as u64
        };
        queries.sequences.chunk_by(|a, b| a.sequence == b.sequence).map(of_one).sum()
    }

    /// Sequences of the batch that lack a partial: what the model made of them means nothing.
    pub(crate) fn failed(self) -> Vec<usize> {
        let failed = |(sequence, failed): (usize, bool)| failed.then_some(sequence);
        self.failed.into_iter().enumerate().filter_map(failed).collect()
    }

    /// Who attends a hole.
    fn spans(&self, sequence: usize, hole: usize) -> Option<&'a [RoutedSpan]> {
        let routed: &'a RoutedHoles = self.routed[sequence]?;
        Some(routed.holes.get(hole)?.as_slice())
    }

    fn fail<W: OfPlace>(&mut self, parts: &[W], why: &dyn std::fmt::Display) {
        for part in parts {
            let (sequence, _) = self.asked[part.place().asked];
            if !self.failed[sequence] {
                tracing::warn!(step = self.step, sequence, reason = %why, "a holder did not return the attention result that the engine needs");
            }
            self.failed[sequence] = true;
        }
    }
}

/// What one holder is asked for, in the order of its parts.
struct Message<W> {
    session: Arc<Session>,
    parts: Vec<W>,
}

/// A message under way, with what its answer is of.
#[derive(Debug)]
struct Sent<R: Reply, W> {
    flight: Flight<R>,
    session: Arc<Session>,
    parts: Vec<W>,
}

/// Something that a part of a message is of.
trait OfPlace {
    fn place(&self) -> Place;
}

impl OfPlace for Place {
    fn place(&self) -> Place {
        *self
    }
}

/// Of rows of so many values for each token and rank, those of one rank of so many.
fn of_rank(values: &[f32], width: usize, (rank, ranks): (usize, usize)) -> Cow<'_, [f32]> {
    if ranks == 1 {
        return Cow::Borrowed(values);
    }
    let token = |token: &[f32]| token[rank * width..][..width].to_vec();
    Cow::Owned(values.chunks_exact(ranks * width).flat_map(token).collect())
}

/// What ranks have brought back of the same tokens, each of so many heads, as one.
fn by_heads(mut ranks: Vec<Partial>, heads: usize) -> Partial {
    if ranks.len() == 1 {
        return ranks.remove(0);
    }
    let (rows, d_v) = (ranks[0].m.len(), d_v(&ranks[0]));
    let mut all = Partial::empty(rows * ranks.len(), d_v);
    for (rank, part) in ranks.iter().enumerate() {
        for token in 0..rows / heads {
            let to = (token * ranks.len() + rank) * heads;
            put(&mut all, to, part, token * heads, heads);
        }
    }
    all
}

/// Values of a row.
fn d_v(part: &Partial) -> usize {
    part.o.len() / part.m.len().max(1)
}

/// Copies rows of one partial to another one.
fn put(all: &mut Partial, to: usize, part: &Partial, from: usize, rows: usize) {
    let d_v = d_v(part);
    all.o[to * d_v..(to + rows) * d_v].copy_from_slice(&part.o[from * d_v..(from + rows) * d_v]);
    all.m[to..to + rows].copy_from_slice(&part.m[from..from + rows]);
    all.l[to..to + rows].copy_from_slice(&part.l[from..from + rows]);
}

/// Adds a part to the message of its holder.
fn add<W>(messages: &mut Vec<Message<W>>, session: &Arc<Session>, part: W) {
    match messages.iter_mut().find(|message| Arc::ptr_eq(&message.session, session)) {
        Some(message) => message.parts.push(part),
        None => messages.push(Message { session: Arc::clone(session), parts: vec![part] }),
    }
}

fn part_of(routed: &RoutedSpan, rank: usize, query_rows: usize) -> Part {
    let RankRoute { route, pins, .. } = routed.ranks[rank];
    Part {
        route,
        pins,
        first_block: routed.first_block,
        cached_rows: routed.rows,
        query_rows: query_rows as u32,
    }
}

impl Elsewhere for Exchange<'_> {
    fn score(&mut self, queries: &IndexQueries<'_>) {
        self.send_scores(queries);
    }

    fn best(&mut self, queries: &IndexQueries<'_>) -> Vec<Option<Vec<Vec<Candidate>>>> {
        self.receive_best(queries)
    }

    fn send(&mut self, queries: &LayerQueries<'_>) {
        self.sent_at = Instant::now();
        let asked = queries.sequences.iter().map(|queries| (queries.sequence, queries.hole));
        self.asked = asked.collect();
        if queries.sequences.iter().any(|queries| queries.selected.is_some()) {
            return self.send_selected(queries);
        }
        let mut messages: Vec<Message<Place>> = Vec::new();
        for (at, asked) in queries.sequences.iter().enumerate() {
            let Some(spans) = self.spans_of(asked.sequence, asked.hole) else { continue };
            for (span, routed) in spans.iter().enumerate() {
                for (rank, of) in routed.ranks.iter().enumerate() {
                    add(&mut messages, &of.session, Place { asked: at, span, rank });
                }
            }
        }
        self.flights = self.send_all(messages, |exchange, session, places| {
            exchange.dispatch_dense(queries, session, places)
        });
    }

    fn receive(&mut self, queries: &LayerQueries<'_>) -> Vec<Option<Vec<Partial>>> {
        if self.selecting.is_sent {
            return self.receive_selected(queries);
        }
        let sent = std::mem::take(&mut self.flights);
        let was_asked = !sent.is_empty();
        let of_span = |routed: &RoutedSpan| vec![None; routed.ranks.len()];
        let of_hole = |&(sequence, hole): &(usize, usize)| {
            self.spans(sequence, hole).unwrap_or_default().iter().map(of_span).collect()
        };
        let mut partials: Vec<Vec<Vec<Option<Partial>>>> = self.asked.iter().map(of_hole).collect();
        self.each_part(
            sent,
            |exchange, session, places| exchange.dispatch_dense(queries, session, places),
            |_, place, part: Partial| partials[place.asked][place.span][place.rank] = Some(part),
        );
        if was_asked {
            self.count_layer(self.tokens(queries));
        }
        let heads = self.options.heads_of_rank;
        let joined = |ranks: Vec<Option<Partial>>| {
            ranks.into_iter().collect::<Option<Vec<_>>>().map(|ranks| by_heads(ranks, heads))
        };
        let joined = |spans: Vec<Vec<Option<Partial>>>| spans.into_iter().map(joined).collect();
        self.whole(partials.into_iter().map(joined).collect())
    }
}

impl<'a> Exchange<'a> {
    /// Those of a sequence that nothing has failed of.
    fn spans_of(&mut self, sequence: usize, hole: usize) -> Option<&'a [RoutedSpan]> {
        let spans = self.spans(sequence, hole);
        self.failed[sequence] |= spans.is_none();
        spans.filter(|_| !self.failed[sequence])
    }

    /// The span of a place.
    fn span(&self, place: Place) -> Option<&'a RoutedSpan> {
        let (sequence, hole) = self.asked[place.asked];
        self.spans(sequence, hole)?.get(place.span)
    }

    fn shape(&self, queries: &LayerQueries<'_>) -> QueryShape {
        QueryShape {
            step: self.step,
            layer: queries.layer as u32,
            dtype: self.options.dtype,
            d_qk: queries.d_qk as u32,
            d_v: queries.d_v as u32,
            scale: queries.scale,
        }
    }

    /// For a message to land.
    fn write_deadline(&self) -> Duration {
        self.options.deadline.max(WRITE_DEADLINE_MIN)
    }

    fn dispatch_dense(
        &self,
        queries: &LayerQueries<'_>,
        session: &Arc<Session>,
        places: &[Place],
    ) -> Result<Flight, DispatchError> {
        let width = self.options.heads_of_rank * queries.d_qk;
        let of = |place: &Place| {
            let routed = self.span(*place)?;
            let all = queries.sequences[place.asked].values;
            let values = of_rank(all, width, (place.rank, routed.ranks.len()));
            Some((part_of(routed, place.rank, values.len() / queries.d_qk), values))
        };
        let of: Vec<(Part, Cow<'_, [f32]>)> = places.iter().filter_map(of).collect();
        let parts = of.iter().map(|(part, values)| PartRows { part: *part, values });
        let parts: Vec<PartRows<'_>> = parts.collect();
        session.dispatch(&self.shape(queries), &parts, self.write_deadline())
    }

    /// What cannot be sent has failed.
    fn send_all<R: Reply, W: OfPlace>(
        &mut self,
        messages: Vec<Message<W>>,
        dispatch: impl Fn(&Self, &Arc<Session>, &[W]) -> Result<Flight<R>, DispatchError>,
    ) -> Vec<Sent<R, W>> {
        let mut sent = Vec::with_capacity(messages.len());
        for Message { session, parts } in messages {
            match dispatch(self, &session, &parts) {
                Ok(flight) => sent.push(Sent { flight, session, parts }),
                Err(error) => self.fail(&parts, &error),
            }
        }
        sent
    }

    /// Waits for all of it, and hands on each part that is well. A holder that has no room for a message now is
    /// sent it again, as long as there is time.
    fn each_part<R: Reply, W: OfPlace>(
        &mut self,
        mut sent: Vec<Sent<R, W>>,
        dispatch: impl Fn(&Self, &Arc<Session>, &[W]) -> Result<Flight<R>, DispatchError>,
        mut well: impl FnMut(&mut Self, &W, R),
    ) {
        let until = Instant::now() + self.options.deadline;
        let mut pause = BUSY_PAUSE_MIN;
        while !sent.is_empty() {
            let mut flights = Vec::with_capacity(sent.len());
            let mut messages = Vec::with_capacity(sent.len());
            for Sent { flight, session, parts } in sent {
                flights.push(flight);
                messages.push(Message { session, parts });
            }
            let answers: Vec<Result<Answer<R>, FlightError>> = gather(flights, until);
            let mut busy: Vec<Message<W>> = Vec::new();
            for (answer, mut message) in answers.into_iter().zip(messages) {
                match answer {
                    Ok(answer) if answer.status == MessageStatus::Taken => {
                        for (part, of) in answer.parts.into_iter().zip(&message.parts) {
                            match part {
                                Ok(part) => well(self, of, part),
                                Err(status) => self.refused(of, status),
                            }
                        }
                    }
                    Ok(answer) if answer.status == MessageStatus::Busy => {
                        message.parts.retain(|part| !self.failed[self.asked[part.place().asked].0]);
                        if !message.parts.is_empty() {
                            busy.push(message);
                        }
                    }
                    Ok(answer) => self.fail(&message.parts, &format_args!("{:?}", answer.status)),
                    Err(error) => self.fail(&message.parts, &error),
                }
            }
            if !busy.is_empty() && Instant::now() + pause >= until {
                let parts: Vec<W> = busy.drain(..).flat_map(|message| message.parts).collect();
                self.fail(&parts, &"the holder had no capacity until the timeout");
            }
            if !busy.is_empty() {
                std::thread::sleep(pause);
                pause = (2 * pause).min(BUSY_PAUSE_MAX);
            }
            sent = self.send_all(busy, &dispatch);
        }
    }

    fn refused(&mut self, part: &impl OfPlace, status: PartStatus) {
        self.fail(&[part.place()], &format_args!("{status:?}"));
    }
}

impl Exchange<'_> {
    /// All of a sequence's partials, or none of them.
    fn whole(&self, partials: Vec<Vec<Option<Partial>>>) -> Vec<Option<Vec<Partial>>> {
        let whole = |(partials, &(sequence, _)): (Vec<Option<Partial>>, &(usize, usize))| {
            if self.failed[sequence] { None } else { partials.into_iter().collect() }
        };
        partials.into_iter().zip(&self.asked).map(whole).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Rows of one value, which says whose they are: `token * 10 + head`.
    fn partial(tokens: usize, heads: std::ops::Range<usize>) -> Partial {
        let rows = (0..tokens).flat_map(|token| heads.clone().map(move |head| token * 10 + head));
        let rows: Vec<f32> = rows.map(|row| row as f32).collect();
        let (m, l) = (rows.iter().map(|row| -row).collect(), rows.iter().map(|row| row + 0.5));
        Partial { m, l: l.collect(), o: rows }
    }

    #[test]
    fn ranks_have_the_rows_of_their_heads_and_what_they_bring_is_put_together_again() {
        let all = partial(3, 0..6);
        for ranks in [1, 2, 3] {
            let heads = 6 / ranks;
            let of = |rank: usize| {
                let own = partial(3, rank * heads..(rank + 1) * heads);
                let values = of_rank(&all.o, heads, (rank, ranks));
                assert_eq!(values, own.o, "rank {rank} of {ranks}");
                own
            };
            let joined = by_heads((0..ranks).map(of).collect(), heads);
            assert_eq!(
                (joined.o, joined.m, joined.l),
                (all.o.clone(), all.m.clone(), all.l.clone())
            );
        }
    }
}
