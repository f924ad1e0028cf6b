//! The nodes that write here. Each has regions of its own over the same memory, so that one of them
//! can be shut out for good without the others: when it is lost, its paths are cut off and its
//! regions revoked, and only then is what it might have written to free again. A target that it
//! still knows from before is of no use to it, also over a new connection.

use std::sync::Arc;

use kvasir_blocks::moving::writers::{self, Admission, CutRound};
use kvasir_transfer::memory::SharedMemory;
use kvasir_transfer::{
    Completion, Endpoint, Outcome, PeerId, RegionDesc, RegionHandle, TransferEngine,
};

use super::command::Refused;
use super::inbox::{End, Post};

/// Writers at once, each with two of the transfer engine's 1,024 regions. Those without open
/// shares make room.
const WRITERS_MAX: usize = 500;

/// Memory that a writer is given.
#[derive(Debug)]
pub(crate) struct Memories {
    pub slots: Arc<SharedMemory>,
    pub tails: Arc<SharedMemory>,
}

/// What is kept of a writer.
#[derive(Debug)]
struct Session {
    endpoint: Endpoint,
    peer: PeerId,
    slots: RegionHandle,
    tails: RegionHandle,
}

/// See the module. Writers are named by the incarnation of their transfer engine.
#[derive(Debug)]
pub(crate) struct Writers {
    memories: Memories,
    writers: writers::Writers<Session>,
}

/// The regions that one writer may write.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Grant {
    pub slots: RegionDesc,
    pub tails: RegionDesc,
}

impl Session {
    fn grant(&self) -> Grant {
        Grant { slots: self.slots.descriptor(), tails: self.tails.descriptor() }
    }
}

impl Writers {
    pub(crate) fn new(memories: Memories) -> Self {
        Writers { memories, writers: writers::Writers::new(WRITERS_MAX) }
    }

    /// Counts one more share that this writer may write.
    ///
    /// # Errors
    /// [`Refused`] when it cannot be reached or is just being cut off.
    pub(crate) fn open(
        &mut self,
        engine: &TransferEngine,
        endpoint: &Endpoint,
        post: &Post,
    ) -> Result<Grant, Refused> {
        let name = endpoint.incarnation;
        match self.writers.admission(name) {
            Admission::Known | Admission::BeingCutOff => {}
            Admission::Unknown => {
                let session = self.connect(engine, endpoint)?;
                self.writers.insert(name, session);
            }
            Admission::Full { idle } => {
                if let Some(idle) = idle {
                    self.cut_off(engine, idle, post);
                }
                let why = format!(
                    "{WRITERS_MAX} nodes are already writing to this node; try again later"
                );
                return Err(Refused::Unavailable(why));
            }
        }
        let being_cut = || {
            let why = "the writing node is being cut off; try again later";
            Refused::Unavailable(why.into())
        };
        self.writers.open(name).map(Session::grant).ok_or_else(being_cut)
    }

    fn connect(&self, engine: &TransferEngine, endpoint: &Endpoint) -> Result<Session, Refused> {
        let refused = |error: &dyn std::fmt::Display| {
            Refused::Precondition(format!("cannot accept writes of the node: {error}"))
        };
        let peer = engine.connect(endpoint).map_err(|error| refused(&error))?;
        let register = |memory: &Arc<SharedMemory>| {
            engine.register(Arc::clone(memory)).map_err(|error| refused(&error))
        };
        let (slots, _) = register(&self.memories.slots)?;
        match register(&self.memories.tails) {
            Ok((tails, _)) => Ok(Session { endpoint: endpoint.clone(), peer, slots, tails }),
            Err(refused) => {
                let _ = engine.revoke(&slots, Completion::Ignore);
                Err(refused)
            }
        }
    }

    /// One share less.
    pub(crate) fn close(&mut self, name: u64) {
        self.writers.close(name);
    }

    /// What a share's targets name; absent when the writer has been cut off since.
    pub(crate) fn grant(&self, name: u64) -> Option<Grant> {
        self.writers.granted(name).map(Session::grant)
    }

    /// The session to ask it to stop: the current one, since the first may have been lost. `None`
    /// when it has been cut off: nothing of it can land.
    pub(crate) fn peer(&self, engine: &TransferEngine, name: u64) -> Option<PeerId> {
        let session = self.writers.get(name)?;
        Some(engine.connect(&session.endpoint).unwrap_or(session.peer))
    }

    /// Begins to cut a writer off, unless that is under way. Ends come as [`End::Cut`].
    pub(crate) fn cut_off(&mut self, engine: &TransferEngine, name: u64, post: &Post) {
        let Some((round, session)) = self.writers.begin_cut(name) else { return };
        let done = || {
            let post = post.clone();
            Completion::callback(move |outcome| post.end(End::Cut { writer: name, round, outcome }))
        };
        let submitted = [
            engine.cut_off(session.peer, done()),
            engine.revoke(&session.slots, done()),
            engine.revoke(&session.tails, done()),
        ];
        if let Some(error) = submitted.into_iter().find_map(Result::err) {
            tracing::warn!(writer = name, %error, "the store node cannot begin to cut off a writer; retrying");
            self.writers.cut_done(name, round, false);
        }
    }

    /// One part of cutting off has ended. True when it was the last that was missing: the writer is
    /// forgotten, and nothing of it can land any more.
    pub(crate) fn cut_done(&mut self, name: u64, round: CutRound, outcome: Outcome) -> bool {
        if let Err(error) = outcome {
            tracing::error!(writer = name, %error, "the store node cannot cut off a writer; retrying");
        }
        self.writers.cut_done(name, round, outcome.is_ok())
    }

    /// Writers whose cutting off must begin again.
    pub(crate) fn unfinished(&self) -> Vec<u64> {
        self.writers.unfinished()
    }

    pub(crate) fn count(&self) -> usize {
        self.writers.count()
    }
}
