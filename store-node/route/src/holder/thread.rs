//! The holder's thread: owns sessions, routes and the kernels, and takes the turns of their transfer engine unless it
//! sleeps or computes for long. It takes all that has come before it computes, so that queries which arrive together are
//! computed together.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, TryRecvError};
use std::time::Duration;

use kvasir_proto::{Generation, Namespace, SlotIndex};
use kvasir_transfer::memory::{Prefault, SharedMemory};
use kvasir_transfer::spin::Spin;
use kvasir_transfer::{
    Completion, Endpoint, Expect, PeerId, RegionDesc, RegionHandle, Source, TransferEngine, Write,
    WriteError,
};

use super::batch::{self, Computed, Route, Routes};
use super::kernels::Kernels;
use super::rows::RowShape;
use super::{
    HolderOptions, OpenError, OpenRoute, OpenSession, Place, Reply, RingBytes, RouteOpened,
    SessionOpened, Shared,
};
use crate::metrics::HolderMetrics;
use crate::requester::DEPTH_MAX;
use crate::turns::{Drive, Turns};
use crate::wire::{
    self, Answer, Dispatch, MESSAGE_BYTES_MAX, MessageStatus, PartStatus, Query,
    Reply as PartReply, WireDtype,
};

/// How long the thread looks for queries before it sleeps: a layer of a small model.
const SPIN: Duration = Duration::from_micros(200);
/// Of the transfer engine, before it looks at what has come.
const TURNS_MAX: usize = 16;
/// More is left to compute only where somebody else takes the turns meanwhile: about 10 ms of one core.
const VALUES_BETWEEN_TURNS: u64 = 1 << 28;
/// An answer that cannot land for so long is given up, and its session with it.
const ANSWER_DEADLINE: Duration = Duration::from_secs(10);

/// What comes to the thread.
pub(super) enum Input {
    Arrived {
        session: u64,
        slot: u32,
    },
    OpenSession(Box<OpenSession>, Reply<Result<SessionOpened, OpenError>>),
    CloseSession(u64),
    OpenRoute(Box<OpenRoute>, Reply<Result<RouteOpened, OpenError>>),
    CloseRoute(u64, Reply<()>),
    /// A requester's engine, by its incarnation.
    PeerLost(u64),
    Stop,
}

impl std::fmt::Debug for Input {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Input::Arrived { .. } => "Arrived",
            Input::OpenSession(..) => "OpenSession",
            Input::CloseSession(_) => "CloseSession",
            Input::OpenRoute(..) => "OpenRoute",
            Input::CloseRoute(..) => "CloseRoute",
            Input::PeerLost(_) => "PeerLost",
            Input::Stop => "Stop",
        })
    }
}

/// What was in the queue.
#[derive(Debug, Clone, Copy)]
enum Taken {
    Nothing,
    Some,
    Stop,
}

/// Some, so that what comes together is computed together, and not without end.
fn take_turns(turns: &mut Turns<'_>) -> bool {
    let taken = (0..TURNS_MAX).take_while(|_| turns.turn()).count();
    taken > 0
}

/// A requester's ring.
#[derive(Debug)]
struct Session {
    peer: PeerId,
    answers: RegionDesc,
    answer_bytes_max: u32,
    answer_imm: u32,
    queries: RegionHandle,
    query_bytes_max: u32,
    query_imm: u32,
    depth: u32,
    _ring_bytes: RingBytes,
}

impl Session {
    /// What lies in a slot, if it is a query. It is copied out first: then its writer cannot change it
    /// between a check and a use.
    fn query(&self, slot: u32) -> Option<Query> {
        let (at, size) = (slot as usize * self.query_bytes_max as usize, self.query_bytes_max);
        let memory = self.queries.memory();
        let mut head = [0; wire::QUERY_HEADER_BYTES];
        memory.copy_to(at, &mut head).ok()?;
        let length = wire::query_length(&head).ok().filter(|length| *length <= size as usize)?;
        let mut bytes = vec![0; length];
        memory.copy_to(at, &mut bytes).ok()?;
        wire::read_query(&bytes).ok()
    }
}

/// A message that waits to be computed.
#[derive(Debug)]
struct Waiting {
    session: u64,
    slot: u32,
    query: Query,
}

/// See the module.
#[derive(Debug)]
pub(super) struct Thread {
    options: HolderOptions,
    place: Place,
    shared: Shared,
    transfer: TransferEngine,
    /// For the transfer engine's callbacks.
    inputs: SyncSender<Input>,
    metrics: HolderMetrics,
    kernels: Kernels,
    sessions: BTreeMap<u64, Session>,
    routes: Routes,
    waiting: Vec<Waiting>,
    /// Sessions and routes as they are in the metrics, which all ranks share.
    counted: (usize, usize),
    next_id: u64,
    next_imm: u32,
}

impl Thread {
    pub(super) fn new(
        options: HolderOptions,
        place: Place,
        shared: Shared,
        transfer: TransferEngine,
        inputs: SyncSender<Input>,
    ) -> Self {
        let threads = options.threads;
        Thread {
            options,
            metrics: shared.metrics.clone(),
            shared,
            // Names of a former process mean nothing here. The remainder is the rank.
            next_id: (transfer.incarnation() | 1) / place.of as u64 * place.of as u64
                + place.number as u64,
            place,
            transfer,
            inputs,
            kernels: Kernels::new(threads),
            sessions: BTreeMap::new(),
            routes: BTreeMap::new(),
            waiting: Vec::new(),
            counted: (0, 0),
            next_imm: 1,
        }
    }

    /// Runs until it is told to stop. Whoever waits for a route's end then is told by what is dropped.
    pub(super) fn run(mut self, queue: &Receiver<Input>, drive: &Drive) {
        let mut spin = Spin::new(SPIN);
        let mut turns = None;
        loop {
            // Where it has none, somebody else takes them, and what comes is in the queue all the same.
            turns = turns.or_else(|| drive.take());
            let mut worked = turns.as_mut().is_some_and(take_turns);
            match self.take_all(queue) {
                Taken::Nothing => {}
                Taken::Some => worked = true,
                Taken::Stop => break,
            }
            if !self.waiting.is_empty() {
                if self.values_waiting() > VALUES_BETWEEN_TURNS {
                    turns = None;
                }
                self.compute();
                worked = true;
            }
            if worked {
                spin.worked();
            } else if !spin.wait() {
                turns = None;
                match queue.recv() {
                    Ok(Input::Stop) | Err(_) => break,
                    Ok(input) => self.take(input),
                }
                spin.worked();
            }
        }
        // Nothing is read any more: who asked for the end of a route hears of it.
        while let Ok(input) = queue.try_recv() {
            match input {
                Input::CloseRoute(_, done) => done(()),
                Input::OpenSession(_, reply) => reply(Err(OpenError::Unavailable)),
                Input::OpenRoute(_, reply) => reply(Err(OpenError::Unavailable)),
                Input::Arrived { .. }
                | Input::CloseSession(_)
                | Input::PeerLost(_)
                | Input::Stop => {}
            }
        }
    }

    fn take_all(&mut self, queue: &Receiver<Input>) -> Taken {
        let mut taken = Taken::Nothing;
        loop {
            match queue.try_recv() {
                Ok(Input::Stop) | Err(TryRecvError::Disconnected) => return Taken::Stop,
                Ok(input) => self.take(input),
                Err(TryRecvError::Empty) => return taken,
            }
            taken = Taken::Some;
        }
    }

    /// About how many values of the cache the queries that wait are multiplied with.
    fn values_waiting(&self) -> u64 {
        self.waiting.iter().map(|waiting| waiting.query.work()).sum()
    }

    fn take(&mut self, input: Input) {
        match input {
            Input::Arrived { session, slot } => self.arrived(session, slot),
            Input::OpenSession(request, reply) => reply(self.open_session(&request)),
            Input::CloseSession(session) => self.close_session(session),
            Input::OpenRoute(request, reply) => reply(self.open_route(*request)),
            Input::CloseRoute(route, done) => {
                // Queries that wait for it are refused when their turn comes.
                self.routes.remove(&route);
                self.count();
                done(());
            }
            Input::PeerLost(incarnation) => {
                let of_peer = |(id, session): (&u64, &Session)| {
                    (session.peer.incarnation() == incarnation).then_some(*id)
                };
                let gone: Vec<u64> = self.sessions.iter().filter_map(of_peer).collect();
                gone.into_iter().for_each(|session| self.close_session(session));
            }
            Input::Stop => {}
        }
    }

    fn open_session(&mut self, request: &OpenSession) -> Result<SessionOpened, OpenError> {
        let invalid =
            |what: &str, why: String| OpenError::Invalid(format!("field `{what}`: {why}"));
        let OpenSession { answer_bytes_max, answer_imm, query_bytes_max, depth, .. } = *request;
        if depth == 0 || depth > DEPTH_MAX || query_bytes_max == 0 || answer_bytes_max == 0 {
            return Err(OpenError::Invalid(format!(
                "a ring must have 1 to {DEPTH_MAX} slots of at least one byte"
            )));
        }
        // An answer leaves in one write.
        if answer_bytes_max as usize > MESSAGE_BYTES_MAX {
            let why = format!("{answer_bytes_max} bytes exceed the maximum of {MESSAGE_BYTES_MAX}");
            return Err(invalid("answer_bytes_max", why));
        }
        let endpoint = Endpoint::from_bytes(&request.endpoint)
            .map_err(|error| invalid("endpoint", error.to_string()))?;
        let answers = RegionDesc::from_bytes(&request.answers_region)
            .map_err(|error| invalid("answers_region", error.to_string()))?;
        let answer_ring = u64::from(answer_bytes_max) * u64::from(depth);
        if answers.length_bytes < answer_ring || answers.incarnation != endpoint.incarnation {
            return Err(invalid(
                "answers_region",
                "the region does not contain the answer ring".into(),
            ));
        }
        if self.sessions.len() >= self.options.sessions_max {
            let max = self.options.sessions_max;
            return Err(OpenError::NoSpace(format!(
                "{max} requesters have sessions, the maximum of this holder"
            )));
        }
        let ring = u64::from(query_bytes_max) * u64::from(depth);
        let max = self.options.ring_bytes_max;
        let ring_bytes = self.shared.take_ring(ring, max).map_err(|taken| {
            OpenError::NoSpace(format!(
                "a query ring of {ring} bytes is too large: {taken} of {max} bytes are in use"
            ))
        })?;
        let peer = self.transfer.connect(&endpoint).map_err(|error| {
            OpenError::Invalid(format!("cannot connect to the requester: {error}"))
        })?;
        let no_memory =
            |error: String| OpenError::NoSpace(format!("cannot create the query ring: {error}"));
        let memory = SharedMemory::create("kvasir-queries", ring as usize, Prefault::Yes)
            .map_err(|error| no_memory(error.to_string()))?;
        let (queries, descriptor) = self
            .transfer
            .register(Arc::new(memory))
            .map_err(|error| no_memory(error.to_string()))?;
        let (id, query_imm) = (self.next_id, self.next_imm);
        let ranks = self.place.of as u64;
        // Names that go round begin anew with the rank.
        self.next_id = id.checked_add(ranks).unwrap_or(id % ranks);
        self.next_imm = self.next_imm.wrapping_add(depth);
        let session = Session {
            peer,
            answers,
            answer_bytes_max,
            answer_imm,
            queries,
            query_bytes_max,
            query_imm,
            depth,
            _ring_bytes: ring_bytes,
        };
        self.sessions.insert(id, session);
        self.count();
        for slot in 0..depth {
            self.expect(id, slot);
        }
        // Its loss is noticed also while it asks nothing.
        let _ = self.transfer.set_wanted(peer, true);
        Ok(SessionOpened {
            session: id,
            endpoint: self.transfer.endpoint().to_bytes(),
            queries_region: descriptor.to_bytes(),
            query_imm,
        })
    }

    fn close_session(&mut self, id: u64) {
        let Some(session) = self.sessions.remove(&id) else { return };
        self.routes.retain(|_, route| route.session != id);
        self.waiting.retain(|waiting| waiting.session != id);
        // Nothing lands in the ring any more when this is done, and its memory goes with it.
        let _ = self.transfer.revoke(&session.queries, Completion::Ignore);
        for slot in 0..session.depth {
            let _ = self.transfer.cancel_imm(session.query_imm + slot, Completion::Ignore);
        }
        if !self.sessions.values().any(|other| other.peer == session.peer) {
            // A session that is lost wants nothing.
            let _ = self.transfer.set_wanted(session.peer, false);
        }
        self.count();
    }

    fn open_route(&mut self, request: OpenRoute) -> Result<RouteOpened, OpenError> {
        let OpenRoute { session, route, namespace, blocks, layout, kv_dtype, precision } = request;
        if !self.sessions.contains_key(&session) {
            return Err(OpenError::NoSession);
        }
        if self.routes.len() >= self.options.routes_max {
            let max = self.options.routes_max;
            return Err(OpenError::NoSpace(format!(
                "{max} routes are open, the maximum of this holder"
            )));
        }
        let shape = RowShape::new(&layout, &kv_dtype)?;
        let slots: Vec<SlotIndex> = blocks.iter().map(|(slot, _)| *slot).collect();
        let same = |route: &&Route| {
            route.slots == slots && route.shape == shape && route.precision == precision
        };
        let shared = self.routes.values().find(same).map(|known| known.blocks);
        let (pins, d_qk) = (pins(namespace, &blocks), shape.width as u32);
        let blocks = shared.unwrap_or(route);
        self.routes.insert(route, Route { session, pins, blocks, slots, shape, precision });
        self.count();
        Ok(RouteOpened { pins, d_qk })
    }

    fn count(&mut self) {
        let now = (self.sessions.len(), self.routes.len());
        self.metrics.sessions.add(now.0 as i64 - self.counted.0 as i64);
        self.metrics.routes.add(now.1 as i64 - self.counted.1 as i64);
        self.counted = now;
    }

    /// Waits for the next query in a slot of a ring.
    fn expect(&self, id: u64, slot: u32) {
        let Some(session) = self.sessions.get(&id) else { return };
        let imm = session.query_imm + slot;
        let inputs = self.inputs.clone();
        let landed = Completion::callback(move |outcome| {
            if outcome.is_ok() {
                // There is room for one message of each slot of each session.
                let _ = inputs.try_send(Input::Arrived { session: id, slot });
            }
        });
        // A slot that nobody listens to is one whose query is never answered: its requester goes on
        // without it.
        if let Err(error) =
            self.transfer.expect_imm(Expect { imm, count: 1, deadline: None }, landed)
        {
            tracing::warn!(session = id, slot, %error, "the holder cannot wait for queries in a slot of a query session");
        }
    }

    fn arrived(&mut self, id: u64, slot: u32) {
        let Some(session) = self.sessions.get(&id) else { return };
        let query = session.query(slot).filter(|query| {
            query.head.session == id && query.answer_room() <= session.answer_bytes_max as usize
        });
        match query {
            Some(query) if self.waiting.len() < self.options.concurrent_messages_max => {
                self.waiting.push(Waiting { session: id, slot, query });
            }
            Some(query) => self.refuse(id, slot, query.head.dispatch, MessageStatus::Busy),
            None => {
                let nothing = Dispatch { serial: 0, step: 0, layer: 0 };
                self.refuse(id, slot, nothing, MessageStatus::Malformed);
            }
        }
    }

    fn refuse(&mut self, session: u64, slot: u32, dispatch: Dispatch, status: MessageStatus) {
        let answer: Answer = Answer { dispatch, status, parts: Vec::new() };
        self.answer(session, slot, &answer, WireDtype::F32);
    }

    fn compute(&mut self) {
        let waiting = std::mem::take(&mut self.waiting);
        let (places, queries): (Vec<(u64, u32)>, Vec<Query>) = waiting
            .into_iter()
            .map(|waiting| ((waiting.session, waiting.slot), waiting.query))
            .unzip();
        let (answers, groups) =
            batch::compute(&queries, &self.routes, &self.shared.slots, &mut self.kernels);
        self.metrics.batches.inc();
        self.metrics.groups.inc_by(groups as u64);
        for ((place, query), computed) in places.into_iter().zip(&queries).zip(answers) {
            match computed {
                Computed::Partials(parts) => self.taken(place, query, parts),
                Computed::Best(parts) => self.taken(place, query, parts),
            }
        }
    }

    fn taken<R: PartReply>(
        &mut self,
        (session, slot): (u64, u32),
        query: &Query,
        parts: Vec<Result<R, PartStatus>>,
    ) {
        self.metrics.query_bytes.inc_by(query.bytes() as u64);
        let refused = parts.iter().filter(|part| part.is_err()).count();
        self.metrics.parts_refused.inc_by(refused as u64);
        let answer = Answer { dispatch: query.head.dispatch, status: MessageStatus::Taken, parts };
        self.answer(session, slot, &answer, query.head.dtype);
    }

    /// One write, whatever the message asked. The slot is listened to again before the requester can know
    /// that it is free.
    fn answer<R: PartReply>(&mut self, id: u64, slot: u32, answer: &Answer<R>, dtype: WireDtype) {
        let label = match answer.status {
            MessageStatus::Taken => "answered",
            MessageStatus::Busy => "busy",
            MessageStatus::Malformed => "malformed",
        };
        self.metrics.messages.with_label_values(&[label]).inc();
        let Some(session) = self.sessions.get(&id) else { return };
        let _ = self.transfer.cancel_imm(session.query_imm + slot, Completion::Ignore);
        self.expect(id, slot);
        let mut bytes = Vec::new();
        wire::write_answer(&mut bytes, answer, dtype);
        if answer.status == MessageStatus::Taken {
            let descriptions = wire::ANSWER_HEADER_BYTES + 4 * answer.parts.len();
            self.metrics.partial_bytes.inc_by((bytes.len() - descriptions) as u64);
        }
        let inputs = self.inputs.clone();
        let done = Completion::callback(move |outcome| {
            if matches!(outcome, Err(error) if error != WriteError::Cancelled) {
                // When there is no room for that, its next answer closes it.
                let _ = inputs.try_send(Input::CloseSession(id));
            }
        });
        let write = Write {
            peer: session.peer,
            checksum: Some(kvasir_transfer::checksum(&bytes)),
            source: Source::Inline(bytes),
            target: session.answers,
            target_offset: u64::from(slot) * u64::from(session.answer_bytes_max),
            imm: Some(session.answer_imm + slot),
            group: 0,
            deadline: ANSWER_DEADLINE,
        };
        if let Err(error) = self.transfer.write(write, done) {
            tracing::warn!(session = id, %error, "the holder cannot send an answer; closing the query session");
            self.close_session(id);
        }
    }
}

/// Stands for what a route is over: the same for the same namespace, slots and generations.
fn pins(namespace: Namespace, blocks: &[(SlotIndex, Generation)]) -> u64 {
    let mut bytes = namespace.0.to_vec();
    for (slot, generation) in blocks {
        bytes.extend(slot.0.to_le_bytes());
        bytes.extend(generation.0.to_le_bytes());
    }
    kvasir_transfer::checksum(&bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pins_differ_with_the_namespace_each_slot_and_each_generation() {
        let blocks = [(SlotIndex(1), Generation(5)), (SlotIndex(2), Generation(6))];
        let known = pins(Namespace([1; 16]), &blocks);
        assert_eq!(known, pins(Namespace([1; 16]), &blocks));
        let others = [
            pins(Namespace([2; 16]), &blocks),
            pins(Namespace([1; 16]), &blocks[..1]),
            pins(Namespace([1; 16]), &[blocks[1], blocks[0]]),
            pins(Namespace([1; 16]), &[(SlotIndex(1), Generation(4)), blocks[1]]),
        ];
        assert!(others.iter().all(|other| *other != known));
    }
}
