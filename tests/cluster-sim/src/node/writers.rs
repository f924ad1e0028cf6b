//! The nodes that write here, each with regions of its own, as `store-node/src/node/writers.rs` has them.
//! Here the parts of cutting off take their time, as they do in a transfer engine, and fail at times; until
//! then everything lands that lands.

use std::collections::BTreeMap;
use std::sync::Arc;

use kvasir_blocks::moving::writers::{self, Admission, CutRound, PARTS};
use kvasir_transfer::memory::SharedMemory;
use kvasir_transfer::sim::SimEngine;
use kvasir_transfer::{
    Completion, Endpoint, Outcome, PeerId, RegionDesc, RegionHandle, WriteError,
};

use super::{End, Post};
use crate::context::{Context, Event};
use crate::seen::Life;

/// Nodes that write here and are remembered.
const WRITERS_MAX: usize = 16;

#[derive(Debug)]
struct Session {
    endpoint: Endpoint,
    peer: PeerId,
    slots: RegionHandle,
    tails: RegionHandle,
}

#[derive(Debug, Clone, Copy)]
pub(super) struct Grant {
    pub slots: RegionDesc,
    pub tails: RegionDesc,
}

/// Which memory a region is of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Of {
    Slots,
    Tails,
}

#[derive(Debug)]
pub(super) struct Writers {
    slots: Arc<SharedMemory>,
    tails: Arc<SharedMemory>,
    writers: writers::Writers<Session>,
    /// By their keys.
    regions: BTreeMap<u64, Of>,
    /// Cutting off takes long and fails.
    pub cuts_fail: bool,
}

impl Writers {
    pub(super) fn new(slots: Arc<SharedMemory>, tails: Arc<SharedMemory>) -> Self {
        Writers {
            slots,
            tails,
            writers: writers::Writers::new(WRITERS_MAX),
            regions: BTreeMap::new(),
            cuts_fail: false,
        }
    }

    /// One more share that this writer may write.
    ///
    /// # Errors
    /// Why not.
    pub(super) fn open(
        &mut self,
        context: &mut Context,
        engine: &SimEngine,
        (at, endpoint): (Life, &Endpoint),
    ) -> Result<(), String> {
        let name = endpoint.incarnation;
        match self.writers.admission(name) {
            Admission::Known | Admission::BeingCutOff => {}
            Admission::Unknown => {
                let peer = engine.connect(endpoint).map_err(|error| error.to_string())?;
                let register = |memory: &Arc<SharedMemory>| engine.register(Arc::clone(memory));
                let (slots, slots_region) = register(&self.slots).expect("it can be written");
                let (tails, tails_region) = register(&self.tails).expect("it can be written");
                self.regions.insert(slots_region.key, Of::Slots);
                self.regions.insert(tails_region.key, Of::Tails);
                let endpoint = endpoint.clone();
                self.writers.insert(name, Session { endpoint, peer, slots, tails });
            }
            Admission::Full { idle } => {
                context.covers("a writer makes room");
                if let Some(idle) = idle {
                    self.cut_off(context, at, idle);
                }
                return Err("too many nodes write here".into());
            }
        }
        match self.writers.open(name) {
            Some(_) => Ok(()),
            None => Err("the writing node is being cut off".into()),
        }
    }

    pub(super) fn close(&mut self, name: u64) {
        self.writers.close(name);
    }

    pub(super) fn grant(&self, name: u64) -> Option<Grant> {
        let session = self.writers.granted(name)?;
        Some(Grant { slots: session.slots.descriptor(), tails: session.tails.descriptor() })
    }

    /// The current session with it; `None` when it has been cut off.
    pub(super) fn peer(&self, engine: &SimEngine, name: u64) -> Option<PeerId> {
        let session = self.writers.get(name)?;
        Some(engine.connect(&session.endpoint).unwrap_or(session.peer))
    }

    /// Which memory a region is of.
    pub(super) fn region(&self, key: u64) -> Option<Of> {
        self.regions.get(&key).copied()
    }

    pub(super) fn cut_off(&mut self, context: &mut Context, at: Life, writer: u64) {
        let Some((round, _)) = self.writers.begin_cut(writer) else { return };
        let mut random = context.chance("cut off", at.node as u64, writer);
        let late_us = if self.cuts_fail { 60_000 } else { 3_000 };
        for part in 0..PARTS {
            let us = random.between(5, late_us);
            context.after(us, Event::Cut { at, writer, round, part });
        }
    }

    /// A part is carried out, or fails.
    pub(super) fn cut_part(
        &mut self,
        context: &mut Context,
        engine: &SimEngine,
        (writer, round, part): (u64, CutRound, u32),
        post: &Post,
    ) {
        let Some(session) = self.writers.get(writer) else { return };
        let mut random = context.chance("part of a cut", writer, part.into());
        if !context.calm && self.cuts_fail && random.percent(30) {
            context.covers("a part of cutting off fails");
            return post.end(End::Cut { writer, round, outcome: Err(WriteError::Cancelled) });
        }
        let post = post.clone();
        let done =
            Completion::callback(move |outcome| post.end(End::Cut { writer, round, outcome }));
        let begun = match part {
            0 => engine.cut_off(session.peer, done),
            1 => engine.revoke(&session.slots, done),
            _ => engine.revoke(&session.tails, done),
        };
        begun.expect("the simulated engine takes these always");
    }

    /// True with the last confirmation.
    pub(super) fn cut_done(&mut self, name: u64, round: CutRound, outcome: Outcome) -> bool {
        let regions = self
            .writers
            .get(name)
            .map(|session| [session.slots.descriptor().key, session.tails.descriptor().key]);
        let done = self.writers.cut_done(name, round, outcome.is_ok());
        for key in regions.into_iter().flatten().filter(|_| done) {
            self.regions.remove(&key);
        }
        done
    }

    pub(super) fn unfinished(&self) -> Vec<u64> {
        self.writers.unfinished()
    }

    pub(super) fn count(&self) -> usize {
        self.writers.count()
    }
}
