//! The nodes that write here. Each has regions of its own over the same memory, so that one of them
//! can be shut out for good without the others: when it is lost, its paths are cut off and its
//! regions revoked, and only then is what it might have written to free again. A target that it
//! still knows from before is of no use to it, also over a new connection.

use std::collections::BTreeMap;
use std::sync::Arc;

use kvasir_transfer::{
    Completion, Endpoint, Outcome, PeerId, RegionDesc, RegionHandle, SharedMemory, TransferEngine,
};

use super::command::Refused;
use super::inbox::{End, Post};

/// Writers at once, each with two of the transfer engine's 1,024 regions. Those without open
/// shares make room.
const WRITERS_MAX: usize = 500;
/// Cutting off is: paths, slots region, tails region.
const CUTS: u32 = 3;

/// Memory that a writer is given.
#[derive(Debug)]
pub struct Memories {
    pub slots: Arc<SharedMemory>,
    pub tails: Arc<SharedMemory>,
}

#[derive(Debug)]
struct Writer {
    endpoint: Endpoint,
    peer: PeerId,
    slots: RegionHandle,
    tails: RegionHandle,
    /// Shares that it may write.
    shares: u32,
    state: State,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Open,
    /// Confirmations that are missing.
    Cutting(u32),
    /// A part failed; it is tried again.
    Again,
}

/// See the module. Writers are named by the incarnation of their transfer engine.
#[derive(Debug)]
pub struct Writers {
    memories: Memories,
    writers: BTreeMap<u64, Writer>,
}

/// The regions that one writer may write.
#[derive(Debug, Clone, Copy)]
pub struct Grant {
    pub slots: RegionDesc,
    pub tails: RegionDesc,
}

impl Writers {
    pub fn new(memories: Memories) -> Self {
        Writers { memories, writers: BTreeMap::new() }
    }

    /// Counts one more share that this writer may write.
    ///
    /// # Errors
    /// [`Refused`] when it cannot be reached or is just being cut off.
    pub fn open(
        &mut self,
        engine: &TransferEngine,
        endpoint: &Endpoint,
        post: &Post,
    ) -> Result<Grant, Refused> {
        let name = endpoint.incarnation;
        if !self.writers.contains_key(&name) {
            self.make_room(engine, post)?;
            let refused = |error: &dyn std::fmt::Display| {
                Refused::Precondition(format!("the writing node cannot be used: {error}"))
            };
            let peer = engine.connect(endpoint).map_err(|error| refused(&error))?;
            let register = |memory: &Arc<SharedMemory>| {
                engine.register(Arc::clone(memory)).map_err(|error| refused(&error))
            };
            let (slots, _) = register(&self.memories.slots)?;
            let (tails, _) = match register(&self.memories.tails) {
                Ok(registered) => registered,
                Err(refused) => {
                    let _ = engine.revoke(&slots, Completion::Ignore);
                    return Err(refused);
                }
            };
            let endpoint = endpoint.clone();
            let writer = Writer { endpoint, peer, slots, tails, shares: 0, state: State::Open };
            self.writers.insert(name, writer);
        }
        let writer = self.writers.get_mut(&name).expect("it was just there or inserted");
        if writer.state != State::Open {
            let why = "the writing node is being cut off; try again";
            return Err(Refused::Unavailable(why.into()));
        }
        writer.shares += 1;
        Ok(Grant { slots: writer.slots.descriptor(), tails: writer.tails.descriptor() })
    }

    /// One share less.
    pub fn close(&mut self, name: u64) {
        if let Some(writer) = self.writers.get_mut(&name) {
            writer.shares -= 1;
        }
    }

    /// What a share's targets name; absent when the writer has been cut off since.
    pub fn grant(&self, name: u64) -> Option<Grant> {
        let writer = self.writers.get(&name).filter(|writer| writer.state == State::Open)?;
        Some(Grant { slots: writer.slots.descriptor(), tails: writer.tails.descriptor() })
    }

    /// The session to ask it to stop: the current one, since the first may have been lost. `None`
    /// when it has been cut off: nothing of it can land.
    pub fn peer(&self, engine: &TransferEngine, name: u64) -> Option<PeerId> {
        let writer = self.writers.get(&name)?;
        Some(engine.connect(&writer.endpoint).unwrap_or(writer.peer))
    }

    /// Begins to cut a writer off, unless that is under way. Ends come as [`End::Cut`].
    pub fn cut_off(&mut self, engine: &TransferEngine, name: u64, post: &Post) {
        let Some(writer) = self.writers.get_mut(&name) else { return };
        if matches!(writer.state, State::Cutting(_)) {
            return;
        }
        writer.state = State::Cutting(CUTS);
        let done = || {
            let post = post.clone();
            Completion::callback(move |outcome| post.end(End::Cut { writer: name, outcome }))
        };
        let submitted = [
            engine.cut_off(writer.peer, done()),
            engine.revoke(&writer.slots, done()),
            engine.revoke(&writer.tails, done()),
        ];
        if let Some(error) = submitted.into_iter().find_map(Result::err) {
            tracing::warn!(writer = name, %error, "cutting off could not begin; it is tried again");
            writer.state = State::Again;
        }
    }

    /// One confirmation. True when it was the last: the writer is forgotten, and nothing of it can
    /// land any more.
    pub fn cut_done(&mut self, name: u64, outcome: Outcome) -> bool {
        let Some(writer) = self.writers.get_mut(&name) else { return false };
        match (writer.state, outcome) {
            (State::Cutting(1), Ok(())) => {
                self.writers.remove(&name);
                return true;
            }
            (State::Cutting(missing), Ok(())) => writer.state = State::Cutting(missing - 1),
            (_, Err(error)) => {
                tracing::error!(writer = name, %error, "cutting off failed; it is tried again");
                writer.state = State::Again;
            }
            (State::Open | State::Again, Ok(())) => {}
        }
        false
    }

    /// Writers whose cutting off must begin again.
    pub fn unfinished(&self) -> Vec<u64> {
        let again =
            |(name, writer): (&u64, &Writer)| (writer.state == State::Again).then_some(*name);
        self.writers.iter().filter_map(again).collect()
    }

    pub fn count(&self) -> usize {
        self.writers.len()
    }

    fn make_room(&mut self, engine: &TransferEngine, post: &Post) -> Result<(), Refused> {
        if self.writers.len() < WRITERS_MAX {
            return Ok(());
        }
        let idle = |(name, writer): (&u64, &Writer)| {
            (writer.shares == 0 && writer.state == State::Open).then_some(*name)
        };
        if let Some(name) = self.writers.iter().find_map(idle) {
            self.cut_off(engine, name, post);
        }
        Err(Refused::Unavailable(format!("{WRITERS_MAX} nodes write here; try again")))
    }
}
