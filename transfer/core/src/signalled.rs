//! Put-with-signal, executed: the plans of [`crate::signal`], put by put and signal by signal, through the
//! operations of the [`Sender`]. Nothing is decided here that a plan has decided; a plan is made for each
//! peer of a batch when it has a path, because it depends on what its domain orders. Peers wait for nothing of
//! each other: one that is slow, silent or not there holds up its own transfers only.
//!
//! What must hold: a signal is put on a path only when each put of its own has landed, or is on that very path
//! before it, on the same queue pair of a domain that keeps their order. So it holds after a failover too:
//! what is sent again has lost its place, and its signal waits until it has landed. A transfer of which a put
//! has failed gets no signal.
//!
//! A word may be stored twice with the same value, and data written twice with the same bytes, as long as
//! the transfer has not ended: what was on a path that failed is sent again where nobody knows of it.

use std::collections::BTreeMap;

use kvasir_mutation::{Mutation, mutated};

use crate::op::{Body, Done, Op, OpId, Operation};
use crate::outcome::{Outcome, WriteError};
use crate::path::Path;
use crate::plan::Shape;
use crate::rails::Rails;
use crate::regions::Target;
use crate::sender::{Action, Sender};
use crate::session::{Session, SessionId};
use crate::signal::{
    self, Fallback, Mode, Options, OrderedBy, Ordering, Peer, Planned, Request, SignalWord, Step,
    Work,
};

/// Several transfers that are planned together.
#[derive(Debug)]
pub struct Signalled<P, C> {
    /// At most [`signal::TRANSFERS_MAX`].
    pub transfers: Vec<SignalledTransfer<P, C>>,
    pub mode: Mode,
    pub ordered_by: OrderedBy,
    /// The immediate of puts that are counted because their signals cannot be ordered.
    pub counter: u32,
    /// Names what can be drained together.
    pub group: u64,
    pub deadline_us: u64,
}

/// Data for one peer, and the word that tells of it.
#[derive(Debug)]
pub struct SignalledTransfer<P, C> {
    pub session: SessionId,
    /// At least one. Each must have passed [`Shape::check`].
    pub puts: Vec<Put<P>>,
    pub word: Word<P>,
    pub done: C,
}

#[derive(Debug)]
pub struct Put<P> {
    pub payload: P,
    pub shape: Shape,
    pub target: Target,
}

#[derive(Debug)]
pub struct Word<P> {
    pub target: Target,
    /// A multiple of 8.
    pub offset: u64,
    pub value: u64,
    /// The bytes of the value, for domains that send nothing but bytes.
    pub payload: P,
}

/// How the peer learns that the data is there.
pub type Told = Result<(), Fallback>;

/// Where an operation belongs that is a part of a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PartOf {
    pub(crate) batch: u64,
    pub(crate) transfer: usize,
}

#[derive(Debug)]
pub(crate) struct Batch<P, C> {
    transfers: Vec<Transfer<P, C>>,
    unfinished: usize,
    /// The run of each session.
    sessions: BTreeMap<SessionId, usize>,
    runs: Vec<Run>,
    mode: Mode,
    ordered_by: OrderedBy,
    counter: u32,
    group: u64,
    deadline_us: u64,
}

#[derive(Debug)]
struct Transfer<P, C> {
    session: SessionId,
    /// That of its session.
    run: usize,
    /// Those of one group and one session share a wait, or a fence.
    group: usize,
    /// Until they are begun.
    puts: Vec<Put<P>>,
    word: Option<Word<P>>,
    /// Taken when the caller is told.
    done: Option<C>,
    /// Once it is planned.
    told: Option<Told>,
    begun: bool,
    ops: Vec<OpId>,
    puts_left: usize,
    /// Its run waits for its puts.
    is_awaited: bool,
    /// Its signal has no place among the others, and goes when its puts have landed.
    is_aside: bool,
    signal: Stage,
    signal_op: Option<OpId>,
    error: Option<WriteError>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// Not begun yet, or never to be.
    Pending,
    Begun,
    Ended,
}

/// A plan under way: of those transfers of a batch that go to one peer.
#[derive(Debug)]
struct Run {
    session: SessionId,
    /// `None` as long as it is not known what the peer's domain orders.
    steps: Option<std::vec::IntoIter<Step>>,
    /// Which transfer of the batch each of the plan is.
    transfers: Vec<usize>,
    /// Puts that the next wait is for.
    awaiting: usize,
    /// It has come to a wait.
    is_waiting: bool,
}

impl<P, C> Transfer<P, C> {
    /// Whether nothing more of it is under way, nor will be.
    fn is_over(&self) -> bool {
        if self.puts_left > 0 {
            return false;
        }
        match self.signal {
            Stage::Pending => self.error.is_some() || matches!(self.told, Some(Err(_))),
            Stage::Begun => false,
            Stage::Ended => true,
        }
    }

    /// What of it has not begun never will.
    fn give_up(&mut self, error: WriteError) {
        if !self.begun {
            self.error.get_or_insert(error);
            self.puts_left = 0;
            self.puts.clear();
        } else if self.signal == Stage::Pending && !matches!(self.told, Some(Err(_))) {
            self.error.get_or_insert(error);
        }
    }
}

impl<P: Clone, C> Sender<P, C> {
    // ---- commands ----

    /// Takes a batch on. Each transfer ends for itself, with [`Action::CompleteSignalled`].
    ///
    /// # Panics
    /// For more transfers than a plan has, and for one without a put.
    pub fn begin_signalled(&mut self, signalled: Signalled<P, C>, now_us: u64) {
        let Signalled { transfers, mode, ordered_by, counter, group, deadline_us } = signalled;
        assert!(transfers.len() <= signal::TRANSFERS_MAX, "the shell bounds a batch");
        if transfers.is_empty() {
            return;
        }
        let mut transfers: Vec<Transfer<P, C>> = transfers.into_iter().map(Transfer::new).collect();
        let of_plan: Vec<signal::Transfer> = transfers.iter().map(Transfer::as_planned).collect();
        let groups = signal::group_numbers(&of_plan, mode);
        let mut sessions = BTreeMap::new();
        let mut runs: Vec<Run> = Vec::new();
        for (at, (transfer, group)) in transfers.iter_mut().zip(groups).enumerate() {
            let session = transfer.session;
            transfer.group = group;
            transfer.run = *sessions.entry(session).or_insert(runs.len());
            if transfer.run == runs.len() {
                runs.push(Run::new(session));
            }
            runs[transfer.run].transfers.push(at);
        }
        let id = self.next_batch;
        self.next_batch += 1;
        for (of, run) in &sessions {
            let session = self.session(*of, now_us);
            if session.batches == 0 {
                // Nothing holds to a path any more, and another may be better by now.
                session.pinned_path = None;
            }
            session.batches += 1;
            if !session.paths.is_empty() {
                self.batches_due.insert((id, *run));
            }
        }
        let unfinished = transfers.len();
        let batch = Batch {
            transfers,
            unfinished,
            sessions,
            runs,
            mode,
            ordered_by,
            counter,
            group,
            deadline_us,
        };
        self.batches.insert(id, batch);
        self.note_deadline(deadline_us);
        if self.groups.is_draining(group) {
            self.give_up_batch(id, WriteError::Cancelled, |_| true);
        } else if deadline_us <= now_us {
            self.give_up_batch(id, WriteError::DeadlineExceeded, |_| true);
        }
    }

    // ---- events ----

    /// The session has a path.
    pub(crate) fn batches_know(&mut self, session: SessionId) {
        for (id, batch) in &self.batches {
            if let Some(run) = batch.sessions.get(&session) {
                self.batches_due.insert((*id, *run));
            }
        }
    }

    pub(crate) fn batches_lost(&mut self, session: SessionId) {
        let of_session: Vec<u64> = self.batch_ids(|batch| batch.sessions.contains_key(&session));
        for id in of_session {
            self.give_up_batch(id, WriteError::PeerGone, |of| of == session);
        }
    }

    /// Nothing of the group is begun any more.
    pub(crate) fn batches_drained(&mut self, group: u64) {
        if mutated(Mutation::BatchNotCancelledByDrain) {
            return;
        }
        for id in self.batch_ids(|batch| batch.group == group) {
            self.give_up_batch(id, WriteError::Cancelled, |_| true);
        }
    }

    pub(crate) fn batches_run_out(&mut self, now_us: u64) {
        for id in self.batch_ids(|batch| batch.deadline_us <= now_us) {
            self.give_up_batch(id, WriteError::DeadlineExceeded, |_| true);
        }
    }

    pub(crate) fn batches_deadline_us(&self) -> u64 {
        let deadlines = self.batches.values().map(|batch| batch.deadline_us);
        deadlines.min().unwrap_or(u64::MAX)
    }

    pub(crate) fn batches_stop(&mut self) {
        for batch in std::mem::take(&mut self.batches).into_values() {
            for Transfer { done, told, .. } in batch.transfers {
                let Some(done) = done else { continue };
                let outcome = Err(WriteError::Cancelled);
                self.actions.push_back(Action::CompleteSignalled { done, outcome, told });
            }
        }
    }

    fn batch_ids(&self, wanted: impl Fn(&Batch<P, C>) -> bool) -> Vec<u64> {
        let found = self.batches.iter().filter(|(_, batch)| wanted(batch));
        found.map(|(id, _)| *id).collect()
    }

    fn give_up_batch(&mut self, id: u64, error: WriteError, of: impl Fn(SessionId) -> bool) {
        let Some(batch) = self.batches.get_mut(&id) else { return };
        for transfer in batch.transfers.iter_mut().filter(|transfer| of(transfer.session)) {
            transfer.give_up(error);
        }
        for transfer in 0..batch.transfers.len() {
            self.finish_if_told(PartOf { batch: id, transfer });
        }
    }

    /// A put of a transfer has ended.
    pub(crate) fn put_ended(&mut self, part: PartOf, outcome: Outcome) {
        let PartOf { batch: id, transfer } = part;
        let Some(batch) = self.batches.get_mut(&id) else { return };
        let Batch { transfers, runs, .. } = batch;
        let transfer = &mut transfers[transfer];
        let is_missed = mutated(Mutation::SignalAfterFailedPut) && transfer.signal != Stage::Ended;
        let outcome = if is_missed { Ok(()) } else { outcome };
        self.batches_due.insert((id, transfer.run));
        transfer.puts_left -= 1;
        if transfer.is_awaited {
            runs[transfer.run].awaiting -= 1;
        }
        let is_due = transfer.puts_left == 0 && transfer.is_aside;
        let (signal_op, session) = (transfer.signal_op, transfer.session);
        if let Err(error) = outcome {
            transfer.error.get_or_insert(error);
        }
        match (signal_op, outcome) {
            (Some(op), Err(error)) => {
                if let Some(op) = self.ops.get_mut(op) {
                    op.stop(error);
                }
                self.finish_if_over(op);
            }
            (Some(op), Ok(())) if is_due => self.put_aside(session, op),
            _ => {}
        }
        self.finish_if_told(part);
    }

    pub(crate) fn signal_ended(&mut self, part: PartOf, outcome: Outcome) {
        let Some(batch) = self.batches.get_mut(&part.batch) else { return };
        let transfer = &mut batch.transfers[part.transfer];
        transfer.signal = Stage::Ended;
        if let Err(error) = outcome {
            transfer.error.get_or_insert(error);
        }
        self.finish_if_told(part);
    }

    /// Tells the caller, when the transfer is over.
    fn finish_if_told(&mut self, part: PartOf) {
        let PartOf { batch: id, transfer } = part;
        let Some(batch) = self.batches.get_mut(&id) else { return };
        let transfer = &mut batch.transfers[transfer];
        if !transfer.is_over() {
            return;
        }
        let Some(done) = transfer.done.take() else { return };
        let (outcome, told) = (transfer.error.map_or(Ok(()), Err), transfer.told);
        self.actions.push_back(Action::CompleteSignalled { done, outcome, told });
        batch.unfinished -= 1;
        if batch.unfinished > 0 {
            return;
        }
        let Some(batch) = self.batches.remove(&id) else { return };
        for (session, run) in batch.sessions {
            self.batches_due.remove(&(id, run));
            if let Some(session) = self.sessions.get_mut(&session) {
                session.batches -= 1;
            }
        }
    }

    // ---- plans and their steps ----

    /// Does what has become possible. Not done at once, so that nothing is begun while something ends.
    pub(crate) fn advance_batches(&mut self) {
        while let Some((id, run)) = self.batches_due.pop_first() {
            self.plan_run(id, run);
            while let Some(request) = self.next_request(id, run) {
                match request.work {
                    Work::Put { counted, .. } => self.begin_puts((id, run), request, counted),
                    Work::Signal(_) => self.begin_signal((id, run), request),
                }
            }
        }
    }

    /// As soon as it is known what the peer's domain orders.
    fn plan_run(&mut self, id: u64, run: usize) {
        let Sender { batches, sessions, .. } = self;
        let Some(batch) = batches.get_mut(&id) else { return };
        let Batch { transfers, runs, mode, ordered_by, .. } = batch;
        let run = &mut runs[run];
        let is_up = |of| sessions.get(of).is_some_and(|of: &Session| !of.paths.is_empty());
        if mutated(Mutation::BatchWaitsForLastPeer) && !batch.sessions.keys().all(is_up) {
            return;
        }
        // Not before it has a path again, if its paths have all failed meanwhile.
        let path = sessions.get(&run.session).and_then(Session::orders_least);
        let Some(limits) = path.map(|path| path.limits).filter(|_| run.steps.is_none()) else {
            return;
        };
        run.transfers.retain(|at| transfers[*at].done.is_some());
        let of_run = || run.transfers.iter().map(|at| &transfers[*at]);
        let of_plan: Vec<signal::Transfer> = of_run().map(Transfer::as_planned).collect();
        let groups: Vec<usize> = of_run().map(|transfer| transfer.group).collect();
        let (ordering, queue_pairs) = (limits.ordering, limits.queue_pairs);
        let options = Options { mode: *mode, ordered_by: *ordered_by, ordering, queue_pairs };
        let (plan, told) = match signal::plan_apart(&of_plan, &groups, options) {
            Planned::Signals(plan) => (plan, Ok(())),
            Planned::Counters { plan, .. } if mutated(Mutation::CountingFallbackNotReported) => {
                (plan, Ok(()))
            }
            Planned::Counters { plan, reason } => (plan, Err(reason)),
        };
        for at in &run.transfers {
            transfers[*at].told = Some(told);
        }
        run.steps = Some(plan.steps.into_iter());
    }

    /// Up to the next wait that is not over.
    fn next_request(&mut self, id: u64, at: usize) -> Option<Request> {
        let runs = &mut self.batches.get_mut(&id)?.runs;
        let others_await =
            mutated(Mutation::PeersWaitForEachOther) && runs.iter().any(|run| run.awaiting > 0);
        let run = runs.get_mut(at)?;
        let steps = run.steps.as_mut()?;
        loop {
            if run.is_waiting && (run.awaiting > 0 || others_await) {
                return None;
            }
            match steps.next()? {
                Step::Post(request) => {
                    run.is_waiting = false;
                    return Some(request);
                }
                Step::Wait => run.is_waiting = true,
            }
        }
    }

    fn begin_puts(&mut self, (id, run): (u64, usize), request: Request, counted: bool) {
        let Some(batch) = self.batches.get_mut(&id) else { return };
        let at = batch.runs[run].transfers[request.transfer];
        let (counter, group, deadline_us) = (batch.counter, batch.group, batch.deadline_us);
        let transfer = &mut batch.transfers[at];
        if transfer.error.is_some() || transfer.begun {
            return;
        }
        transfer.begun = true;
        let puts = std::mem::take(&mut transfer.puts);
        let session = transfer.session;
        if request.awaited {
            transfer.is_awaited = true;
            batch.runs[run].awaiting += puts.len();
        }
        let imm = counted.then_some(counter);
        let part = PartOf { batch: id, transfer: at };
        for Put { payload, shape, target } in puts {
            let body = Body::Write { shape, target, imm, group };
            let done = Done::Put(part);
            let operation =
                Operation { session, deadline_us, payload, body, rails: Rails::ANY, done };
            let op = self.begin_pinned(operation, request.queue_pair.0);
            let transfer = self.batches.get_mut(&id).map(|batch| &mut batch.transfers[at]);
            if let (Some(op), Some(transfer)) = (op, transfer) {
                transfer.ops.push(op);
            }
        }
    }

    fn begin_signal(&mut self, (id, run): (u64, usize), request: Request) {
        let Some(batch) = self.batches.get_mut(&id) else { return };
        let at = batch.runs[run].transfers[request.transfer];
        let (group, deadline_us) = (batch.group, batch.deadline_us);
        let transfer = &mut batch.transfers[at];
        if transfer.error.is_some() {
            return;
        }
        let Some(Word { target, offset, value, payload }) = transfer.word.take() else { return };
        transfer.signal = Stage::Begun;
        let (session, part) = (transfer.session, PartOf { batch: id, transfer: at });
        let body = Body::Signal { target, offset, value, is_fenced: request.fenced, group };
        let done = Done::Signal(part);
        let operation = Operation { session, deadline_us, payload, body, rails: Rails::ANY, done };
        let op = self.begin_pinned(operation, request.queue_pair.0);
        if let Some(batch) = self.batches.get_mut(&id) {
            batch.transfers[at].signal_op = op;
        }
    }

    /// `None` when it has ended before it began.
    fn begin_pinned(&mut self, operation: Operation<P, Done<C>>, queue_pair: u32) -> Option<OpId> {
        let deadline_us = operation.deadline_us;
        // Whoever has not begun it by its deadline, or drains its group, has given the batch up.
        let Operation { session, .. } = operation;
        let Some(of) = self.sessions.get_mut(&session) else {
            self.tell(operation.done, Err(WriteError::PeerGone));
            return None;
        };
        if let Body::Write { shape, .. } = &operation.body
            && shape.writes() == 0
        {
            self.tell(operation.done, Ok(()));
            return None;
        }
        let op = Op { pin: Some(queue_pair), ..Op::new(operation) };
        if let Some(group) = op.group() {
            self.groups.operation_begun(group);
        }
        let op = self.ops.insert(op);
        of.pinned.push_back(op);
        self.note_deadline(deadline_us);
        self.sweep_if_crowded(session);
        Some(op)
    }

    // ---- what may go ----

    /// Whether a signal may be put on this path now: see the head of this file.
    pub(crate) fn may_signal(&mut self, part: PartOf, keeps_order: bool) -> bool {
        let Some(batch) = self.batches.get(&part.batch) else { return false };
        let transfer = &batch.transfers[part.transfer];
        if transfer.puts_left == 0 || mutated(Mutation::SignalBeforeItsPuts) {
            return true;
        }
        let ops = &mut self.ops;
        let mut is_ahead = |op: &OpId| ops.get_mut(*op).is_none_or(|op| op.is_posted());
        keeps_order && transfer.ops.iter().all(&mut is_ahead)
    }
}

impl<P: Clone, C> Sender<P, C> {
    // ---- what has no place in the order of the others ----

    /// The first one of the session's queue leaves it: a put for whichever path takes it, and a signal when its puts
    /// have landed.
    pub(crate) fn leave_order(&mut self, id: SessionId, op_id: OpId) {
        if let Some(session) = self.sessions.get_mut(&id) {
            session.pinned.pop_front();
        }
        let Some(op) = self.ops.running(op_id) else { return };
        op.is_loose = true;
        self.left_order += 1;
        if let Some(Done::Signal(part)) = op.done
            && let Some(batch) = self.batches.get_mut(&part.batch)
        {
            let transfer = &mut batch.transfers[part.transfer];
            transfer.is_aside = true;
            if transfer.puts_left > 0 && !mutated(Mutation::UnorderedSignalBeforeItsPuts) {
                return;
            }
        }
        self.put_aside(id, op_id);
    }

    fn put_aside(&mut self, id: SessionId, op_id: OpId) {
        let kind = self.ops.running(op_id).and_then(|op| op.kind(Rails::ANY));
        if let (Some(session), Some(kind)) = (self.sessions.get_mut(&id), kind) {
            session.push_aside(op_id, kind);
            if !mutated(Mutation::UnpinnedOperationNotOffered) {
                self.actions.push_back(Action::Offer(id));
            }
        }
    }

    /// Whether signals are promised to the peer, and none of the paths that there are places what they follow.
    pub fn has_unplaced(&self, id: SessionId) -> bool {
        let Some(session) = self.sessions.get(&id) else { return false };
        if session.paths.is_empty() || session.paths.values().any(Path::places) {
            return false;
        }
        let transfers = self.batches.values().flat_map(|batch| &batch.transfers);
        let mut of_session = transfers.filter(|transfer| transfer.session == id);
        of_session.any(|transfer| transfer.done.is_some() && transfer.told == Some(Ok(())))
    }

    /// Whether a put of the transfer will not have its place in the order before it has landed.
    pub(crate) fn has_loose(&mut self, part: PartOf) -> bool {
        let Some(batch) = self.batches.get(&part.batch) else { return false };
        let ops = &mut self.ops;
        let of_transfer = &batch.transfers[part.transfer].ops;
        of_transfer.iter().any(|op| ops.get_mut(*op).is_some_and(|op| op.is_loose))
    }
}

impl Run {
    fn new(session: SessionId) -> Self {
        Run { session, steps: None, transfers: Vec::new(), awaiting: 0, is_waiting: false }
    }
}

impl<P, C> Transfer<P, C> {
    fn new(transfer: SignalledTransfer<P, C>) -> Self {
        let SignalledTransfer { session, puts, word, done } = transfer;
        assert!(!puts.is_empty(), "a signal is for data");
        Transfer {
            session,
            run: 0,
            group: 0,
            puts_left: puts.len(),
            puts,
            word: Some(word),
            done: Some(done),
            told: None,
            begun: false,
            ops: Vec::new(),
            is_awaited: false,
            is_aside: false,
            signal: Stage::Pending,
            signal_op: None,
            error: None,
        }
    }

    fn as_planned(&self) -> signal::Transfer {
        // Two sessions that are alike here share a place in the plan, and nothing else.
        let peer = Peer(self.session.0 as u32);
        let bytes = self.puts.iter().map(|put| put.shape.bytes()).sum();
        let value = self.word.as_ref().map_or(0, |word| word.value);
        signal::Transfer { peer, bytes, signal: SignalWord(value) }
    }
}

impl Path {
    /// Whether what is posted later on one of its queue pairs lands later, though nobody waits.
    pub(crate) fn keeps_order(&self) -> bool {
        self.limits.ordering == Ordering::RcQueuePair
    }

    /// Whether what is acknowledged is in place for who polls memory.
    pub(crate) fn places(&self) -> bool {
        self.limits.ordering != Ordering::None || mutated(Mutation::SignalWithoutPlacement)
    }
}

/// Batches by their number.
pub(crate) type Batches<P, C> = BTreeMap<u64, Batch<P, C>>;
