//! The life of a share, as one pure function: who may still touch its slots, and whom to ask to
//! stop. What happens to slots and pins because of it is the owner's business; the whole table is
//! `tests/golden/share_states.txt`.
//!
//! Four parties may touch a share's slots: the local engine, one remote writer, copies of what the engine
//! computes in its own pool, and pushes that read. A share is over when it has left `Live` and all four are
//! known to have finished.

use kvasir_mutation::{Mutation, mutated};

use crate::api::AttachEpoch;

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Phase {
    /// Allocated and wanted. Becomes released or aborted.
    Live,
    /// Its engine is done with it, and so is the remote writer; pushes may be under way. Becomes
    /// aborted.
    Released,
    /// Nobody may begin anything.
    Aborted,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Engine {
    Unbound,
    /// Took the share, and waits for the fetch before it learns its slots.
    Waiting(AttachEpoch),
    Bound(AttachEpoch),
    /// Asked to stop.
    Stopping(AttachEpoch),
    /// Will not touch the slots again.
    Done,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Writer {
    /// There never was one.
    None,
    Writing,
    /// Asked to stop.
    Stopping,
    /// No write of it can land any more; what came is not settled.
    Stopped,
    /// What came is settled: pages of the share are cached, or to be computed.
    Settled,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ShareEvent {
    Bind(AttachEpoch),
    Release,
    Abort,
    EngineGone(AttachEpoch),
    /// Not all will come: the remote writer shall stop.
    StopWriter,
    /// It has stopped, is cut off, or everything has landed.
    WriterDone,
    Settle,
    ReadBegin,
    ReadEnd,
    PushStopped,
    /// A page has a layer in the engine's pool that is to be copied into its slot.
    CarryBegin,
    /// It has none: all are copied, or given up and no copy is under way.
    CarryEnd,
    /// What was to come from the SSD has come, or will not.
    Risen,
}

/// What to tell the other parties.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Asks {
    pub(crate) bound: Option<AttachEpoch>,
    pub(crate) stop_engine: Option<AttachEpoch>,
    pub(crate) stop_push: bool,
    pub(crate) stop_writer: bool,
    pub(crate) cancel_imm: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// The share is not live any more.
    Ending,
    /// Another bind came first.
    Taken,
    NoWriter,
    MayStillWrite,
    NoRead,
    NoCarry,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct ShareState {
    pub(crate) phase: Phase,
    pub(crate) engine: Engine,
    pub(crate) writer: Writer,
    /// Pushes under way or owed.
    pub(crate) reads: u32,
    /// Pages whose layers are being copied from the engine's pool, or are owed that.
    pub(crate) carries: u32,
    /// Pages are on their way from the SSD: the engine learns its slots when they are there.
    pub(crate) rising: bool,
    /// The engine learns its slots only when the remote writer's pages are settled (a fetch).
    bind_waits: bool,
}

impl ShareState {
    pub(crate) fn new(has_remote_writer: bool, bind_waits: bool, rising: bool) -> Self {
        ShareState {
            phase: Phase::Live,
            engine: Engine::Unbound,
            writer: if has_remote_writer { Writer::Writing } else { Writer::None },
            reads: 0,
            carries: 0,
            rising,
            bind_waits,
        }
    }

    /// A write of the remote writer may still land.
    pub(crate) fn writer_may_write(self) -> bool {
        matches!(self.writer, Writer::Writing | Writer::Stopping)
    }

    /// There is no remote writer, or its pages are settled.
    pub(crate) fn settled(self) -> bool {
        matches!(self.writer, Writer::None | Writer::Settled)
    }

    pub(crate) fn epoch(self) -> Option<AttachEpoch> {
        match self.engine {
            Engine::Waiting(epoch) | Engine::Bound(epoch) | Engine::Stopping(epoch) => Some(epoch),
            Engine::Unbound | Engine::Done => None,
        }
    }

    /// Its engine works on it: what it finishes counts.
    pub(crate) fn computes(self) -> bool {
        self.phase == Phase::Live && matches!(self.engine, Engine::Bound(_))
    }

    /// Nothing on this node touches the slots any more; the remote writer still may.
    pub(crate) fn locally_over(self) -> bool {
        let unread = self.reads == 0 || mutated(Mutation::PushSourceNotPinned);
        let uncopied = self.carries == 0 || mutated(Mutation::PoolCopyNotAwaited);
        let released = self.epoch().is_none() || mutated(Mutation::EngineReleaseNotAwaited);
        self.phase != Phase::Live && released && unread && uncopied
    }

    /// Nothing at all touches the slots any more.
    pub(crate) fn over(self) -> bool {
        self.locally_over()
            && (!self.writer_may_write() || mutated(Mutation::ShareEndsBeforeWriter))
    }

    pub(crate) fn on(&mut self, event: ShareEvent) -> Result<Asks, Refusal> {
        match event {
            ShareEvent::Bind(epoch) => self.bind(epoch),
            ShareEvent::Release => Ok(self.release()),
            ShareEvent::Abort => Ok(self.abort()),
            ShareEvent::EngineGone(epoch) => Ok(self.engine_gone(epoch)),
            ShareEvent::StopWriter => self.stop_writer(),
            ShareEvent::WriterDone => Ok(self.writer_done()),
            ShareEvent::Settle => self.settle(),
            ShareEvent::ReadBegin => self.read_begin(),
            ShareEvent::ReadEnd => self.read_end(),
            ShareEvent::PushStopped => {
                self.reads = 0;
                Ok(Asks::default())
            }
            ShareEvent::CarryBegin => self.carry_begin(),
            ShareEvent::CarryEnd => self.carry_end(),
            ShareEvent::Risen => {
                self.rising = false;
                Ok(self.bind_if_settled())
            }
        }
    }

    /// The engine must not learn its slots yet.
    fn waits(self) -> bool {
        (self.rising && !mutated(Mutation::BindBeforeSsdRead))
            || (self.bind_waits && !self.settled() && !mutated(Mutation::BindBeforeFetchSettled))
    }

    fn bind_if_settled(&mut self) -> Asks {
        match self.engine {
            Engine::Waiting(epoch) if self.phase == Phase::Live && !self.waits() => {
                self.engine = Engine::Bound(epoch);
                Asks { bound: Some(epoch), ..Asks::default() }
            }
            _ => Asks::default(),
        }
    }

    fn bind(&mut self, epoch: AttachEpoch) -> Result<Asks, Refusal> {
        if self.phase != Phase::Live {
            return Err(Refusal::Ending);
        }
        if self.engine != Engine::Unbound {
            return Err(Refusal::Taken);
        }
        self.engine = if self.waits() { Engine::Waiting(epoch) } else { Engine::Bound(epoch) };
        Ok(Asks::default())
    }

    fn release(&mut self) -> Asks {
        self.engine = Engine::Done;
        match self.phase {
            Phase::Live if self.writer_may_write() => self.abort(),
            Phase::Live => {
                self.phase = Phase::Released;
                Asks::default()
            }
            Phase::Released | Phase::Aborted => Asks::default(),
        }
    }

    fn abort(&mut self) -> Asks {
        let mut asks = Asks::default();
        if self.phase == Phase::Aborted {
            return asks;
        }
        self.phase = Phase::Aborted;
        if let Engine::Waiting(epoch) | Engine::Bound(epoch) = self.engine {
            self.engine = Engine::Stopping(epoch);
            asks.stop_engine = Some(epoch);
        }
        asks.stop_push = self.reads > 0;
        asks.cancel_imm = !self.settled();
        if self.writer == Writer::Writing {
            self.writer = Writer::Stopping;
            asks.stop_writer = !mutated(Mutation::WriterStopNotRequested);
        }
        asks
    }

    fn engine_gone(&mut self, epoch: AttachEpoch) -> Asks {
        if self.epoch() != Some(epoch) {
            return Asks::default();
        }
        self.engine = Engine::Done;
        self.abort()
    }

    fn stop_writer(&mut self) -> Result<Asks, Refusal> {
        match self.writer {
            Writer::None => Err(Refusal::NoWriter),
            Writer::Writing => {
                self.writer = Writer::Stopping;
                Ok(Asks { stop_writer: true, ..Asks::default() })
            }
            Writer::Stopping | Writer::Stopped | Writer::Settled => Ok(Asks::default()),
        }
    }

    fn writer_done(&mut self) -> Asks {
        if self.writer_may_write() {
            self.writer = Writer::Stopped;
        }
        Asks::default()
    }

    fn settle(&mut self) -> Result<Asks, Refusal> {
        if self.phase != Phase::Live {
            return Err(Refusal::Ending);
        }
        match self.writer {
            Writer::None => Err(Refusal::NoWriter),
            Writer::Writing | Writer::Stopping if !mutated(Mutation::FetchSettledWhileWriting) => {
                Err(Refusal::MayStillWrite)
            }
            Writer::Settled => Ok(Asks::default()),
            Writer::Writing | Writer::Stopping | Writer::Stopped => {
                self.writer = Writer::Settled;
                Ok(self.bind_if_settled())
            }
        }
    }

    fn read_begin(&mut self) -> Result<Asks, Refusal> {
        if self.phase == Phase::Aborted {
            return Err(Refusal::Ending);
        }
        self.reads = self.reads.checked_add(1).ok_or(Refusal::NoRead)?;
        Ok(Asks::default())
    }

    fn read_end(&mut self) -> Result<Asks, Refusal> {
        self.reads = self.reads.checked_sub(1).ok_or(Refusal::NoRead)?;
        Ok(Asks::default())
    }

    fn carry_begin(&mut self) -> Result<Asks, Refusal> {
        // What is not finished when the engine lets go never will be.
        if !self.computes() {
            return Err(Refusal::Ending);
        }
        self.carries = self.carries.checked_add(1).ok_or(Refusal::NoCarry)?;
        Ok(Asks::default())
    }

    fn carry_end(&mut self) -> Result<Asks, Refusal> {
        self.carries = self.carries.checked_sub(1).ok_or(Refusal::NoCarry)?;
        Ok(Asks::default())
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeSet, VecDeque};
    use std::fmt::Write;

    use super::*;

    const EVENTS: [ShareEvent; 13] = [
        ShareEvent::Bind(AttachEpoch(1)),
        ShareEvent::Release,
        ShareEvent::Abort,
        ShareEvent::EngineGone(AttachEpoch(1)),
        ShareEvent::StopWriter,
        ShareEvent::WriterDone,
        ShareEvent::Settle,
        ShareEvent::ReadBegin,
        ShareEvent::ReadEnd,
        ShareEvent::PushStopped,
        ShareEvent::CarryBegin,
        ShareEvent::CarryEnd,
        ShareEvent::Risen,
    ];

    fn plain(debug: impl std::fmt::Debug) -> String {
        format!("{debug:?}").replace("(AttachEpoch(1))", "")
    }

    fn name(state: ShareState) -> String {
        let ShareState { phase, engine, writer, reads, carries, rising, bind_waits: _ } = state;
        // Most have none, and the lines are long.
        let carries = if carries > 0 { format!(" carries:{carries}") } else { String::new() };
        let rising = if rising { " rising" } else { "" };
        let over = match (state.over(), state.locally_over()) {
            (true, _) => " OVER",
            (false, true) => " over here",
            (false, false) => "",
        };
        let engine = plain(engine);
        format!("{phase:?} engine:{engine} writer:{writer:?} reads:{reads}{carries}{rising}{over}")
    }

    fn names(asks: Asks) -> String {
        let Asks { bound, stop_engine, stop_push, stop_writer, cancel_imm } = asks;
        let all = [
            (bound.is_some(), " +Bound"),
            (stop_engine.is_some(), " +StopEngine"),
            (stop_push, " +StopPush"),
            (stop_writer, " +StopWriter"),
            (cancel_imm, " +CancelImm"),
        ];
        all.iter().filter(|(asked, _)| *asked).map(|(_, name)| *name).collect()
    }

    /// One state with what every event makes of it; answers with the states it leads to.
    fn describe(state: ShareState, table: &mut String) -> Vec<ShareState> {
        writeln!(table, "{}", name(state)).expect("to a string");
        let mut reached = Vec::new();
        let mut same = String::new();
        for event in EVENTS {
            let one_more = match event {
                ShareEvent::ReadBegin => state.reads == 1,
                ShareEvent::CarryBegin => state.carries == 1,
                _ => false,
            };
            if one_more {
                continue;
            }
            let event_name = plain(event);
            let mut next = state;
            let result = next.on(event);
            match result {
                Ok(asks) if next == state && asks == Asks::default() => {
                    write!(same, " {event_name}").expect("to a string");
                    continue;
                }
                Ok(asks) => {
                    writeln!(table, "    {event_name:<12}-> {}{}", name(next), names(asks))
                }
                Err(refusal) => {
                    assert_eq!(next, state, "a refused event changes nothing");
                    writeln!(table, "    {event_name:<12}refused: {refusal:?}")
                }
            }
            .expect("to a string");
            reached.push(next);
        }
        if !same.is_empty() {
            writeln!(table, "    no effect: {}", same.trim_start()).expect("to a string");
        }
        // The owner forgets a share that is over, so nothing happens to it any more.
        reached.retain(|next| !next.over());
        reached
    }

    #[test]
    fn the_table_of_share_states_is_the_one_in_the_file() {
        let starts = [
            ("No remote writer (prefill, source)", ShareState::new(false, false, false)),
            (
                "No remote writer, and pages that rise from the SSD",
                ShareState::new(false, false, true),
            ),
            (
                "A remote writer that bind waits for (prefill with a fetch)",
                ShareState::new(true, true, false),
            ),
            (
                "A remote writer that bind does not wait for (decode)",
                ShareState::new(true, false, false),
            ),
        ];
        let mut table = String::new();
        for (title, start) in starts {
            writeln!(table, "== {title}\n").expect("to a string");
            let mut seen = BTreeSet::from([start]);
            let mut queue = VecDeque::from([start]);
            while let Some(state) = queue.pop_front() {
                for next in describe(state, &mut table) {
                    if seen.insert(next) {
                        queue.push_back(next);
                    }
                }
                table.push('\n');
            }
        }
        let golden = include_str!("../tests/golden/share_states.txt");
        assert!(table.trim_end() == golden.trim_end(), "the table is now:\n{table}");
    }
}
