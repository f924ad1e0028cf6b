//! One step's exchanges with holders: for each layer one message to each holder, with the queries of all
//! sequences of the batch that it attends, while the model attends its own rows. Under selection there is
//! another one before it ([`selection`]).

mod selection;

use std::sync::Arc;
use std::time::{Duration, Instant};

use kvasir_attention::{Candidate, Partial};
use kvasir_route::requester::{
    DispatchError, Flight, FlightError, PartRows, QueryShape, Session, gather,
};
use kvasir_route::wire::{Answer, Reply};
use kvasir_route::{MessageStatus, Part, PartStatus, WireDtype};

use self::selection::Selecting;
use super::{RoutedHoles, RoutedSpan};
use crate::model::{Elsewhere, IndexQueries, LayerQueries};

/// A query that was sent is not taken back early: its answer, late as it is, frees its slot.
const WRITE_DEADLINE_MIN: Duration = Duration::from_secs(10);

/// What exchanges of one attachment share.
#[derive(Debug, Clone, Copy)]
pub struct ExchangeOptions {
    pub dtype: WireDtype,
    /// From the time on at which the model waits for a layer's partials.
    pub deadline: Duration,
}

/// A span of a sequence: where its partial goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Place {
    /// Among the sequences and holes of the layer.
    asked: usize,
    span: usize,
}

/// See the module; for one step.
#[derive(Debug)]
pub struct Exchange<'a> {
    options: ExchangeOptions,
    step: u32,
    /// For each sequence of the batch.
    routed: &'a [Option<&'a RoutedHoles>],
    failed: Vec<bool>,
    /// Of the layer that was sent: which sequences and holes of theirs, what is under way, and where its parts
    /// go.
    asked: Vec<(usize, usize)>,
    flights: Vec<(Flight, Vec<Place>)>,
    selecting: Selecting,
    sent_at: Instant,
    layers: u32,
    took: Duration,
}

impl<'a> Exchange<'a> {
    pub fn new(options: ExchangeOptions, step: u32, routed: &'a [Option<&'a RoutedHoles>]) -> Self {
        Exchange {
            options,
            step,
            routed,
            failed: vec![false; routed.len()],
            asked: Vec::new(),
            flights: Vec::new(),
            selecting: Selecting::default(),
            sent_at: Instant::now(),
            layers: 0,
            took: Duration::ZERO,
        }
    }

    /// Layers whose partials were waited for, and microseconds that they took.
    pub fn exchanged(&self) -> (u32, u64) {
        (self.layers, self.took.as_micros() as u64)
    }

    /// Sequences of the batch that lack a partial: what the model made of them means nothing.
    pub fn failed(self) -> Vec<usize> {
        let failed = |(sequence, failed): (usize, bool)| failed.then_some(sequence);
        self.failed.into_iter().enumerate().filter_map(failed).collect()
    }

    /// Who attends a hole.
    fn spans(&self, sequence: usize, hole: usize) -> Option<&'a [RoutedSpan]> {
        let routed: &'a RoutedHoles = self.routed[sequence]?;
        Some(routed.holes.get(hole)?.as_slice())
    }

    fn fail(&mut self, places: &[Place], why: &dyn std::fmt::Display) {
        for place in places {
            let (sequence, _) = self.asked[place.asked];
            if !self.failed[sequence] {
                tracing::warn!(step = self.step, sequence, %why, "a partial did not come");
            }
            self.failed[sequence] = true;
        }
    }
}

/// What one holder is asked: parts in the order of their places.
struct Message<P, W> {
    session: Arc<Session>,
    parts: Vec<P>,
    places: Vec<W>,
}

/// Adds a part to the message of its holder.
fn add<P, W>(messages: &mut Vec<Message<P, W>>, session: &Arc<Session>, part: P, place: W) {
    match messages.iter_mut().find(|message| Arc::ptr_eq(&message.session, session)) {
        Some(message) => {
            message.parts.push(part);
            message.places.push(place);
        }
        None => messages.push(Message {
            session: Arc::clone(session),
            parts: vec![part],
            places: vec![place],
        }),
    }
}

fn part_of(routed: &RoutedSpan, query_rows: usize) -> Part {
    Part {
        route: routed.route,
        pins: routed.pins,
        first_block: routed.first_block,
        cached_rows: routed.rows,
        query_rows: query_rows as u32,
    }
}

impl Elsewhere for Exchange<'_> {
    fn score(&mut self, queries: &IndexQueries<'_>) {
        self.send_scores(queries);
    }

    fn best(&mut self) -> Vec<Option<Vec<Vec<Candidate>>>> {
        self.receive_best()
    }

    fn send(&mut self, queries: &LayerQueries<'_>) {
        self.sent_at = Instant::now();
        let asked = queries.sequences.iter().map(|queries| (queries.sequence, queries.hole));
        self.asked = asked.collect();
        if queries.sequences.iter().any(|queries| queries.selected.is_some()) {
            return self.send_selected(queries);
        }
        let mut messages: Vec<Message<PartRows<'_>, Place>> = Vec::new();
        for (at, asked) in queries.sequences.iter().enumerate() {
            let Some(spans) = self.spans_of(asked.sequence, asked.hole) else { continue };
            for (span, routed) in spans.iter().enumerate() {
                let part = part_of(routed, asked.values.len() / queries.d_qk);
                let part = PartRows { part, values: asked.values };
                add(&mut messages, &routed.session, part, Place { asked: at, span });
            }
        }
        let shape = QueryShape {
            step: self.step,
            layer: queries.layer as u32,
            dtype: self.options.dtype,
            d_qk: queries.d_qk as u32,
            d_v: queries.d_v as u32,
            scale: queries.scale,
        };
        for Message { session, parts, places } in messages {
            let sent: Result<Flight, DispatchError> =
                session.dispatch(&shape, &parts, self.options.deadline.max(WRITE_DEADLINE_MIN));
            match sent {
                Ok(flight) => self.flights.push((flight, places)),
                Err(error) => self.fail(&places, &error),
            }
        }
    }

    fn receive(&mut self) -> Vec<Option<Vec<Partial>>> {
        if self.selecting.is_sent {
            return self.receive_selected();
        }
        let sent = std::mem::take(&mut self.flights);
        let was_asked = !sent.is_empty();
        let spans =
            |&(sequence, hole): &(usize, usize)| self.spans(sequence, hole).map_or(0, <[_]>::len);
        let mut partials: Vec<Vec<Option<Partial>>> =
            self.asked.iter().map(|asked| vec![None; spans(asked)]).collect();
        self.each_part(sent, |_, place, part: Partial| {
            partials[place.asked][place.span] = Some(part);
        });
        if was_asked {
            self.layers += 1;
            self.took += self.sent_at.elapsed();
        }
        self.whole(partials)
    }
}

impl<'a> Exchange<'a> {
    /// Those of a sequence that nothing has failed of.
    fn spans_of(&mut self, sequence: usize, hole: usize) -> Option<&'a [RoutedSpan]> {
        let spans = self.spans(sequence, hole);
        self.failed[sequence] |= spans.is_none();
        spans.filter(|_| !self.failed[sequence])
    }

    /// Waits for all of it, and hands on each part that is well.
    fn each_part<R: Reply>(
        &mut self,
        sent: Vec<(Flight<R>, Vec<Place>)>,
        mut well: impl FnMut(&mut Self, Place, R),
    ) {
        let (flights, places): (Vec<Flight<R>>, Vec<Vec<Place>>) = sent.into_iter().unzip();
        let answers: Vec<Result<Answer<R>, FlightError>> =
            gather(flights, Instant::now() + self.options.deadline);
        for (answer, places) in answers.into_iter().zip(places) {
            match answer {
                Ok(answer) if answer.status == MessageStatus::Taken => {
                    for (part, place) in answer.parts.into_iter().zip(places) {
                        match part {
                            Ok(part) => well(self, place, part),
                            Err(status) => self.refused(place, status),
                        }
                    }
                }
                Ok(answer) => self.fail(&places, &format_args!("{:?}", answer.status)),
                Err(error) => self.fail(&places, &error),
            }
        }
    }

    fn refused(&mut self, place: Place, status: PartStatus) {
        self.fail(&[place], &format_args!("{status:?}"));
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
