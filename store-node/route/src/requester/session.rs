//! A session with one holder, and its exchanges.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use kvasir_attention::Partial;
use kvasir_transfer::{
    Completion, Expect, PeerId, RegionDesc, Source, SubmitError, TransferEngine, Write, WriteError,
};

use super::gate::Gate;
use super::slot::Slot;
use super::{Grant, Prepared, RequesterError, SessionSize};
use crate::metrics::RequesterMetrics;
use crate::turns::Drive;
use crate::wire::{
    self, Answer, Asked, Dispatch, Kind, Part, PartBody, PartialShape, QueryHead, Reply, WireDtype,
    WireError,
};

/// What all sessions of a requester use.
#[derive(Debug)]
pub(super) struct Core {
    pub drive: Drive,
    pub transfer: TransferEngine,
    pub gate: Arc<Gate>,
    pub metrics: RequesterMetrics,
}

/// The state of a session's slots, which the transfer engine's worker changes too.
#[derive(Debug)]
pub(super) struct Rings {
    slots: Vec<Slot>,
    lost: AtomicBool,
}

impl Rings {
    pub(super) fn new(depth: u32) -> Self {
        Rings { slots: (0..depth).map(|_| Slot::default()).collect(), lost: AtomicBool::new(false) }
    }

    /// The holder is gone, or nobody knows what it got: no answer is waited for any more.
    pub(super) fn lose(&self) {
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
    #[error("the maximum number of exchanges of the session is in flight")]
    Full,
    #[error("the query has {bytes} bytes, but the session allows {bytes_max}")]
    TooLong { bytes: usize, bytes_max: usize },
}

/// Why a flight has no answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum FlightError {
    #[error("the holder did not answer the query in time")]
    Late,
    #[error("the session with the holder is lost")]
    Lost,
    #[error("the holder sent an invalid answer: {0}")]
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

impl QueryShape {
    /// Of a message whose session and serial nobody knows yet.
    pub(super) fn head(&self, kind: Kind) -> QueryHead {
        let QueryShape { step, layer, dtype, d_qk, d_v, scale } = *self;
        let dispatch = Dispatch { serial: 0, step, layer };
        QueryHead { session: 0, dispatch, dtype, d_qk, d_v, scale, kind }
    }

    /// What a part is answered with.
    pub(super) fn partial(&self, part: &Part) -> PartialShape {
        PartialShape { rows: part.query_rows, d_v: self.d_v, dtype: self.dtype }
    }
}

/// A part and its query rows: `query_rows × d_qk` values.
#[derive(Debug, Clone, Copy)]
pub struct PartRows<'a> {
    pub part: Part,
    pub values: &'a [f32],
}

impl<'a> PartRows<'a> {
    fn body(&self) -> PartBody<'a> {
        PartBody { values: self.values, ..PartBody::default() }
    }
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

    /// Waits until the holder has taken something: a connection to it is made when it is first used, and who
    /// finds out then that there is none has already computed. To be called before anything is dispatched.
    ///
    /// # Errors
    /// [`RequesterError::Unreached`]. It may be lost or not.
    pub async fn reach(&self, within: Duration) -> Result<(), RequesterError> {
        let (done, outcome) = Completion::future();
        // Slot 0's, which no query is in yet; nothing is counted for it, so nobody reads it.
        let bytes = vec![0; 8];
        let write = Write {
            peer: self.peer,
            checksum: Some(kvasir_transfer::checksum(&bytes)),
            source: Source::Inline(bytes),
            target: self.queries,
            target_offset: 0,
            imm: None,
            group: 0,
            deadline: within,
        };
        self.core().transfer.write(write, done).map_err(|error| match error {
            SubmitError::Full => RequesterError::Unreached(WriteError::DeadlineExceeded),
            SubmitError::Invalid(_) | SubmitError::Stopped => {
                RequesterError::Unreached(WriteError::Cancelled)
            }
        })?;
        outcome.await.map_err(RequesterError::Unreached)
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
        let list: Vec<Part> = parts.iter().map(|part| part.part).collect();
        let bodies: Vec<PartBody<'_>> = parts.iter().map(PartRows::body).collect();
        let asked = list.iter().map(|part| shape.partial(part)).collect();
        self.dispatch_parts(shape.head(Kind::Dense), &list, &bodies, asked, deadline)
    }

    /// As [`Session::dispatch`], whatever is asked. The session and the serial of `head` are filled in here.
    pub(super) fn dispatch_parts<R: Reply>(
        self: &Arc<Self>,
        mut head: QueryHead,
        parts: &[Part],
        bodies: &[PartBody<'_>],
        asked: Vec<R::Shape>,
        deadline: Duration,
    ) -> Result<Flight<R>, DispatchError> {
        let serial = self.next_serial.fetch_add(1, Ordering::Relaxed);
        head.session = self.id;
        head.dispatch.serial = serial;
        let asked = Asked { dispatch: head.dispatch, parts: asked };
        let (bytes, answer) = (wire::query_bytes_of(&head, bodies), asked.room());
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
        let mut message = Vec::with_capacity(bytes);
        wire::write_query(&mut message, &head, parts, bodies);
        debug_assert_eq!(message.len(), bytes, "as it was counted");
        debug_assert_eq!(wire::query_length(&message), Ok(bytes), "every part has its rows");
        // It leaves from here.
        let mut turns = self.core().drive.take();
        let sent = self.send(slot, message, deadline);
        if let Some(turns) = &mut turns {
            turns.turn();
        }
        drop(turns);
        if let Err(error) = sent {
            self.rings.slots[slot].put_back();
            tracing::warn!(session = self.id, %error, "the requester cannot send a query to the holder");
            return Err(match error {
                SubmitError::Full => DispatchError::Full,
                SubmitError::Invalid(_) | SubmitError::Stopped => DispatchError::Lost,
            });
        }
        let descriptions = wire::QUERY_HEADER_BYTES + parts.len() * wire::PART_BYTES;
        self.core().metrics.query_bytes.inc_by((bytes - descriptions) as u64);
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
pub struct Flight<R: Reply = Partial> {
    session: Arc<Session>,
    slot: usize,
    asked: Asked<R>,
}

impl<R: Reply> Flight<R> {
    /// The answer, when it is there.
    pub fn poll(&self) -> Option<Result<Answer<R>, FlightError>> {
        if self.session.rings.slots[self.slot].has_arrived() {
            return Some(self.read());
        }
        self.session.is_lost().then_some(Err(FlightError::Lost))
    }

    fn read(&self) -> Result<Answer<R>, FlightError> {
        let size = self.session.size().answer_bytes_max as usize;
        let mut bytes = vec![0; self.asked.room()];
        let memory = self.session.answers.answers.memory();
        memory.copy_to(self.slot * size, &mut bytes).expect("the dispatch checked that it fits");
        let answer = wire::read_answer(&bytes, &self.asked)?;
        let used = answer.parts.iter().zip(&self.asked.parts).filter(|(part, _)| part.is_ok());
        let bytes: usize = used.map(|(_, shape)| R::room(shape)).sum();
        self.session.core().metrics.partial_bytes.inc_by(bytes as u64);
        Ok(answer)
    }
}

impl<R: Reply> Drop for Flight<R> {
    fn drop(&mut self) {
        self.session.rings.slots[self.slot].give_back();
    }
}

/// Waits for every flight until that time. Each answer is read when it comes; what has not come by then is
/// [`FlightError::Late`].
pub fn gather<R: Reply>(
    flights: Vec<Flight<R>>,
    until: Instant,
) -> Vec<Result<Answer<R>, FlightError>> {
    let mut answers: Vec<Option<Result<Answer<R>, FlightError>>> = Vec::new();
    answers.resize_with(flights.len(), || None);
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
    let outcome = |answer: &Result<Answer<R>, FlightError>| match answer {
        Ok(_) => "answered",
        Err(FlightError::Late) => "timeout",
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
