//! A session with one holder, and its exchanges.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use kvasir_transfer::{
    Completion, Expect, PeerId, RegionDesc, Source, SubmitError, TransferEngine, Write, WriteError,
};

use super::gate::Gate;
use super::slot::Slot;
use super::{Grant, Prepared, SessionSize};
use crate::metrics::RequesterMetrics;
use crate::turns::Drive;
use crate::wire::{self, Answer, Asked, Dispatch, Part, QueryHead, WireDtype, WireError};

/// What all sessions of a requester use.
#[derive(Debug)]
pub struct Core {
    pub drive: Drive,
    pub transfer: TransferEngine,
    pub gate: Arc<Gate>,
    pub metrics: RequesterMetrics,
}

/// The state of a session's slots, which the transfer engine's worker changes too.
#[derive(Debug)]
pub struct Rings {
    slots: Vec<Slot>,
    lost: AtomicBool,
}

impl Rings {
    pub fn new(depth: u32) -> Self {
        Rings { slots: (0..depth).map(|_| Slot::default()).collect(), lost: AtomicBool::new(false) }
    }

    /// The holder is gone, or nobody knows what it got: no answer is waited for any more.
    pub fn lose(&self) {
        self.lost.store(true, Ordering::Release);
    }

    fn is_lost(&self) -> bool {
        self.lost.load(Ordering::Acquire)
    }
}

/// Why a query was not sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum DispatchError {
    /// Open another one, or do without the holder.
    #[error("the session with the holder is lost")]
    Lost,
    /// Every slot waits for an answer.
    #[error("as many exchanges as the session has room for are under way")]
    Full,
    #[error("the query takes {bytes} bytes and the session has room for {bytes_max}")]
    TooLong { bytes: usize, bytes_max: usize },
}

/// Why a flight has no answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum FlightError {
    #[error("the holder did not answer in time")]
    Late,
    #[error("the session with the holder is lost")]
    Lost,
    #[error("the holder answered what cannot be: {0}")]
    Wire(#[from] WireError),
}

/// What all parts of a query have in common.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct QueryShape {
    pub step: u32,
    pub layer: u32,
    pub dtype: WireDtype,
    pub d_qk: u32,
    pub d_v: u32,
    pub scale: f32,
}

/// A part and its query rows: `query_rows × d_qk` values.
#[derive(Debug, Clone, Copy)]
pub struct PartRows<'a> {
    pub part: Part,
    pub values: &'a [f32],
}

/// A line to one holder: see [`super`].
#[derive(Debug)]
pub struct Session {
    answers: Prepared,
    rings: Arc<Rings>,
    id: u64,
    peer: PeerId,
    queries: RegionDesc,
    query_imm: u32,
    next_serial: AtomicU64,
}

impl Session {
    pub(super) fn new(
        answers: Prepared,
        rings: Arc<Rings>,
        peer: PeerId,
        grant: &Grant,
        queries: RegionDesc,
    ) -> Self {
        Session {
            answers,
            rings,
            id: grant.session,
            peer,
            queries,
            query_imm: grant.query_imm,
            next_serial: AtomicU64::new(1),
        }
    }

    fn core(&self) -> &Arc<Core> {
        &self.answers.core
    }

    fn size(&self) -> SessionSize {
        self.answers.size
    }

    /// As the holder calls it.
    pub fn id(&self) -> u64 {
        self.id
    }

    /// Nothing comes of it any more.
    pub fn is_lost(&self) -> bool {
        self.rings.is_lost()
    }

    /// Sends one message to the holder; it has that long to land. Every part is answered in one write.
    ///
    /// # Errors
    /// [`DispatchError`]; nothing was sent then.
    pub fn dispatch(
        self: &Arc<Self>,
        shape: &QueryShape,
        parts: &[PartRows<'_>],
        deadline: Duration,
    ) -> Result<Flight, DispatchError> {
        let rows: usize = parts.iter().map(|part| part.part.query_rows as usize).sum();
        let bytes = wire::query_room(parts.len(), rows, shape.d_qk as usize, shape.dtype);
        let answer = wire::answer_room(parts.len(), rows, shape.d_v as usize, shape.dtype);
        let (query_max, answer_max) = (self.size().query_bytes_max, self.size().answer_bytes_max);
        if bytes > query_max as usize {
            return Err(DispatchError::TooLong { bytes, bytes_max: query_max as usize });
        }
        if answer > answer_max as usize {
            return Err(DispatchError::TooLong { bytes: answer, bytes_max: answer_max as usize });
        }
        if self.is_lost() {
            return Err(DispatchError::Lost);
        }
        let slot = self.rings.slots.iter().position(Slot::take).ok_or(DispatchError::Full)?;
        let serial = self.next_serial.fetch_add(1, Ordering::Relaxed);
        let dispatch = Dispatch { serial, step: shape.step, layer: shape.layer };
        let head = QueryHead {
            session: self.id,
            dispatch,
            dtype: shape.dtype,
            d_qk: shape.d_qk,
            d_v: shape.d_v,
            scale: shape.scale,
        };
        let list: Vec<Part> = parts.iter().map(|part| part.part).collect();
        let values: Vec<&[f32]> = parts.iter().map(|part| part.values).collect();
        let mut message = Vec::with_capacity(bytes);
        wire::write_query(&mut message, &head, &list, &values);
        debug_assert_eq!(message.len(), bytes, "every part has its rows");
        // It leaves from here.
        let mut turns = self.core().drive.take();
        let sent = self.send(slot, message, deadline);
        if let Some(turns) = &mut turns {
            turns.turn();
        }
        drop(turns);
        if let Err(error) = sent {
            self.rings.slots[slot].put_back();
            tracing::warn!(session = self.id, %error, "a query cannot be sent");
            return Err(match error {
                SubmitError::Full => DispatchError::Full,
                SubmitError::Invalid(_) | SubmitError::Stopped => DispatchError::Lost,
            });
        }
        let d_qk = shape.d_qk as usize;
        self.core().metrics.query_bytes.inc_by(wire::query_bytes(rows, d_qk, shape.dtype) as u64);
        let rows = list.iter().map(|part| part.query_rows).collect();
        let asked = Asked { dispatch, rows, d_v: shape.d_v, dtype: shape.dtype };
        Ok(Flight { session: Arc::clone(self), slot, asked })
    }

    fn send(&self, slot: usize, message: Vec<u8>, deadline: Duration) -> Result<(), SubmitError> {
        let transfer = &self.core().transfer;
        let imm = self.answers.answer_imm + slot as u32;
        // The count of the exchange before, if there was one.
        transfer.cancel_imm(imm, Completion::Ignore)?;
        let (rings, gate) = (Arc::clone(&self.rings), Arc::clone(&self.core().gate));
        let landed = Completion::callback(move |outcome| {
            match outcome {
                Ok(()) => rings.slots[slot].arrived(),
                // By this side, when the session ends.
                Err(WriteError::Cancelled) => {}
                Err(_) => rings.lose(),
            }
            gate.open();
        });
        transfer.expect_imm(Expect { imm, count: 1, deadline: None }, landed)?;
        let (rings, gate) = (Arc::clone(&self.rings), Arc::clone(&self.core().gate));
        let sent = Completion::callback(move |outcome| {
            // Who is late may still answer; whoever was not reached for any other reason will not.
            if !matches!(outcome, Ok(()) | Err(WriteError::DeadlineExceeded)) {
                rings.lose();
                gate.open();
            }
        });
        let write = Write {
            peer: self.peer,
            checksum: Some(kvasir_transfer::checksum(&message)),
            source: Source::Inline(message),
            target: self.queries,
            target_offset: slot as u64 * u64::from(self.size().query_bytes_max),
            imm: Some(self.query_imm + slot as u32),
            group: 0,
            deadline,
        };
        transfer.write(write, sent)
    }
}

/// One exchange under way. Dropped before its answer has come, its slot stays in quarantine.
#[derive(Debug)]
pub struct Flight {
    session: Arc<Session>,
    slot: usize,
    asked: Asked,
}

impl Flight {
    /// The answer, when it is there.
    pub fn poll(&self) -> Option<Result<Answer, FlightError>> {
        if self.session.rings.slots[self.slot].has_arrived() {
            return Some(self.read());
        }
        self.session.is_lost().then_some(Err(FlightError::Lost))
    }

    fn read(&self) -> Result<Answer, FlightError> {
        let size = self.session.size().answer_bytes_max as usize;
        let rows: usize = self.asked.rows.iter().map(|&rows| rows as usize).sum();
        let (parts, d_v) = (self.asked.rows.len(), self.asked.d_v as usize);
        let mut bytes = vec![0; wire::answer_room(parts, rows, d_v, self.asked.dtype)];
        let memory = self.session.answers.answers.memory();
        memory.copy_to(self.slot * size, &mut bytes).expect("the dispatch checked that it fits");
        let answer = wire::read_answer(&bytes, &self.asked)?;
        let used = answer.parts.iter().zip(&self.asked.rows).filter(|(part, _)| part.is_ok());
        let rows: usize = used.map(|(_, &rows)| rows as usize).sum();
        let bytes = wire::partial_bytes(rows, d_v, self.asked.dtype);
        self.session.core().metrics.partial_bytes.inc_by(bytes as u64);
        Ok(answer)
    }
}

impl Drop for Flight {
    fn drop(&mut self) {
        self.session.rings.slots[self.slot].give_back();
    }
}

/// Waits for every flight until that time. Each answer is read when it comes; what has not come by then is
/// [`FlightError::Late`].
pub fn gather(flights: Vec<Flight>, until: Instant) -> Vec<Result<Answer, FlightError>> {
    let mut answers: Vec<Option<Result<Answer, FlightError>>> = vec![None; flights.len()];
    let Some(first) = flights.first() else { return Vec::new() };
    let core = Arc::clone(first.session.core());
    core.gate.wait(until, &core.drive, || {
        let mut all = true;
        for (flight, answer) in flights.iter().zip(&mut answers) {
            if answer.is_none() {
                *answer = flight.poll();
            }
            all &= answer.is_some();
        }
        all
    });
    let outcome = |answer: &Result<Answer, FlightError>| match answer {
        Ok(_) => "answered",
        Err(FlightError::Late) => "late",
        Err(FlightError::Lost) => "lost",
        Err(FlightError::Wire(_)) => "malformed",
    };
    let answers: Vec<_> =
        answers.into_iter().map(|answer| answer.unwrap_or(Err(FlightError::Late))).collect();
    for answer in &answers {
        core.metrics.dispatches.with_label_values(&[outcome(answer)]).inc();
    }
    answers
}
