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

/// Before a holder that had no room is asked again: some of its other requesters have been served by then.
const BUSY_PAUSE_MIN: Duration = Duration::from_micros(50);
const BUSY_PAUSE_MAX: Duration = Duration::from_millis(2);

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
    flights: Vec<Sent<Partial, Place>>,
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

    fn fail<W: OfPlace>(&mut self, parts: &[W], why: &dyn std::fmt::Display) {
        for part in parts {
            let (sequence, _) = self.asked[part.place().asked];
            if !self.failed[sequence] {
                tracing::warn!(step = self.step, sequence, %why, "a partial did not come");
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

/// Adds a part to the message of its holder.
fn add<W>(messages: &mut Vec<Message<W>>, session: &Arc<Session>, part: W) {
    match messages.iter_mut().find(|message| Arc::ptr_eq(&message.session, session)) {
        Some(message) => message.parts.push(part),
        None => messages.push(Message { session: Arc::clone(session), parts: vec![part] }),
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
                add(&mut messages, &routed.session, Place { asked: at, span });
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
        let spans =
            |&(sequence, hole): &(usize, usize)| self.spans(sequence, hole).map_or(0, <[_]>::len);
        let mut partials: Vec<Vec<Option<Partial>>> =
            self.asked.iter().map(|asked| vec![None; spans(asked)]).collect();
        self.each_part(
            sent,
            |exchange, session, places| exchange.dispatch_dense(queries, session, places),
            |_, place, part: Partial| partials[place.asked][place.span] = Some(part),
        );
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
        let part = |place: &Place| {
            let values = queries.sequences[place.asked].values;
            let routed = self.span(*place)?;
            Some(PartRows { part: part_of(routed, values.len() / queries.d_qk), values })
        };
        let parts: Vec<PartRows<'_>> = places.iter().filter_map(part).collect();
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
                self.fail(&parts, &"its holder had no room in all that time");
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
