//! One step's exchanges with holders: for each layer one message to each holder, with the queries of all
//! sequences of the batch that it attends, while the model attends its own rows.

use std::sync::Arc;
use std::time::{Duration, Instant};

use kvasir_attention::Partial;
use kvasir_route::requester::{
    DispatchError, Flight, FlightError, PartRows, QueryShape, Session, gather,
};
use kvasir_route::{MessageStatus, Part, WireDtype};

use super::RoutedPrefix;
use crate::model::{Elsewhere, LayerQueries};

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
#[derive(Debug, Clone, Copy)]
struct Place {
    /// Among the sequences of the layer.
    sequence: usize,
    span: usize,
}

/// See the module; for one step.
#[derive(Debug)]
pub struct Exchange<'a> {
    options: ExchangeOptions,
    step: u32,
    /// For each sequence of the batch.
    routed: &'a [Option<&'a RoutedPrefix>],
    failed: Vec<bool>,
    /// Of the layer that was sent: which sequences, what is under way, and where its parts go.
    sequences: Vec<usize>,
    flights: Vec<(Flight, Vec<Place>)>,
    sent_at: Instant,
    layers: u32,
    took: Duration,
}

impl<'a> Exchange<'a> {
    pub fn new(
        options: ExchangeOptions,
        step: u32,
        routed: &'a [Option<&'a RoutedPrefix>],
    ) -> Self {
        Exchange {
            options,
            step,
            routed,
            failed: vec![false; routed.len()],
            sequences: Vec::new(),
            flights: Vec::new(),
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

    fn fail(&mut self, places: &[Place], why: &dyn std::fmt::Display) {
        for place in places {
            let sequence = self.sequences[place.sequence];
            if !self.failed[sequence] {
                tracing::warn!(step = self.step, sequence, %why, "a partial did not come");
            }
            self.failed[sequence] = true;
        }
    }
}

/// What one holder is asked.
struct Message<'q> {
    session: Arc<Session>,
    parts: Vec<PartRows<'q>>,
    places: Vec<Place>,
}

impl Elsewhere for Exchange<'_> {
    fn send(&mut self, queries: &LayerQueries<'_>) {
        self.sent_at = Instant::now();
        self.sequences = queries.sequences.iter().map(|queries| queries.sequence).collect();
        let mut messages: Vec<Message<'_>> = Vec::new();
        for (sequence, asked) in queries.sequences.iter().enumerate() {
            // A sequence has no hole but its prefix.
            let prefix = self.routed[asked.sequence].filter(|_| asked.hole == 0);
            let Some(prefix) = prefix else {
                self.failed[asked.sequence] = true;
                continue;
            };
            if self.failed[asked.sequence] {
                continue;
            }
            for (span, routed) in prefix.spans.iter().enumerate() {
                let part = Part {
                    route: routed.route,
                    pins: routed.pins,
                    first_block: routed.first_block,
                    cached_rows: routed.rows,
                    query_rows: (asked.values.len() / queries.d_qk) as u32,
                };
                let part = PartRows { part, values: asked.values };
                let place = Place { sequence, span };
                let same =
                    |message: &&mut Message<'_>| Arc::ptr_eq(&message.session, &routed.session);
                match messages.iter_mut().find(same) {
                    Some(message) => {
                        message.parts.push(part);
                        message.places.push(place);
                    }
                    None => messages.push(Message {
                        session: Arc::clone(&routed.session),
                        parts: vec![part],
                        places: vec![place],
                    }),
                }
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
        let (flights, places): (Vec<Flight>, Vec<Vec<Place>>) =
            std::mem::take(&mut self.flights).into_iter().unzip();
        let answers = gather(flights, Instant::now() + self.options.deadline);
        if !answers.is_empty() {
            self.layers += 1;
            self.took += self.sent_at.elapsed();
        }
        let spans = |&sequence: &usize| {
            self.routed[sequence].map_or(0, |prefix: &RoutedPrefix| prefix.spans.len())
        };
        let mut partials: Vec<Vec<Option<Partial>>> =
            self.sequences.iter().map(|sequence| vec![None; spans(sequence)]).collect();
        for (answer, places) in answers.into_iter().zip(places) {
            match answer {
                Ok(answer) if answer.status == MessageStatus::Taken => {
                    for (part, place) in answer.parts.into_iter().zip(&places) {
                        match part {
                            Ok(partial) => partials[place.sequence][place.span] = Some(partial),
                            Err(status) => self.fail(&[*place], &format_args!("{status:?}")),
                        }
                    }
                }
                Ok(answer) => self.fail(&places, &format_args!("{:?}", answer.status)),
                Err(error @ (FlightError::Late | FlightError::Lost | FlightError::Wire(_))) => {
                    self.fail(&places, &error);
                }
            }
        }
        // All of a sequence's partials, or none of them.
        let whole = |(partials, &sequence): (Vec<Option<Partial>>, &usize)| {
            if self.failed[sequence] { None } else { partials.into_iter().collect() }
        };
        partials.into_iter().zip(&self.sequences).map(whole).collect()
    }
}
