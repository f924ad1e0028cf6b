//! One operation on its way: what was asked, what of it is where, and how it will end.

use std::collections::BTreeMap;

use kvasir_mutation::{Mutation, mutated};

use crate::outcome::WriteError;
use crate::plan::{Cutter, Shape};
use crate::rails::Rails;
use crate::regions::Target;
use crate::session::SessionId;
use crate::signalled::PartOf;
use crate::waiting::Kind;

/// Names an operation; never mistaken for a later one in the same place.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct OpId {
    index: u32,
    generation: u32,
}

/// What is to be done: `P` is how the shell finds the bytes, `C` is who is told.
#[derive(Debug)]
pub struct Operation<P, C> {
    pub session: SessionId,
    pub deadline_us: u64,
    pub payload: P,
    pub body: Body,
    /// The paths that a write is for.
    pub rails: Rails,
    pub done: C,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Body {
    Write {
        shape: Shape,
        target: Target,
        imm: Option<u32>,
        group: u64,
    },
    Message {
        bytes: u64,
    },
    /// A word that tells of data; see [`crate::signalled`].
    Signal {
        target: Target,
        offset: u64,
        value: u64,
        is_fenced: bool,
        group: u64,
    },
}

/// Who is told of an operation's end.
#[derive(Debug)]
pub(crate) enum Done<C> {
    Caller(C),
    /// The batch that a put belongs to.
    Put(PartOf),
    Signal(PartOf),
}

#[derive(Debug)]
pub(crate) struct Op<P, C> {
    pub(crate) session: SessionId,
    pub(crate) deadline_us: u64,
    pub(crate) payload: P,
    pub(crate) body: Body,
    /// Taken when the caller is told.
    pub(crate) done: Option<Done<C>>,
    pub(crate) cutter: Cutter,
    /// On a path, or undecided since their path failed.
    pub(crate) frames: usize,
    /// Long writes under way: bytes that have not landed, by logical write.
    pub(crate) split: BTreeMap<usize, u64>,
    /// Messages, seals, signals and ranges that wait in the session's queues.
    pub(crate) queued: usize,
    /// All of it goes by one path, and there by one queue pair: which one of those.
    pub(crate) pin: Option<u32>,
    /// Frames of it that have their place in the order of the pin.
    pub(crate) posted: usize,
    /// Some of it goes, or went, without a place in that order: its signal waits until it has landed.
    pub(crate) is_loose: bool,
    /// Of a message, once it was put on a path.
    pub(crate) message: Option<u64>,
    /// Nothing more of it is issued.
    pub(crate) stopped: bool,
    pub(crate) error: Option<WriteError>,
}

impl<P, C> Op<P, C> {
    /// Whether it is a put whose signal follows when it is acknowledged or in its place, or that signal: it takes no
    /// path on which neither means that its bytes are in place.
    pub(crate) fn must_be_placed(&self) -> bool {
        let counts = matches!(self.body, Body::Write { imm: Some(_), .. });
        self.pin.is_some() && !counts
    }

    pub(crate) fn new(operation: Operation<P, Done<C>>) -> Self {
        let Operation { session, deadline_us, payload, body, rails: _, done } = operation;
        let queued = usize::from(!matches!(body, Body::Write { .. }));
        Op {
            session,
            deadline_us,
            payload,
            body,
            done: Some(done),
            cutter: Cutter::default(),
            frames: 0,
            split: BTreeMap::new(),
            queued,
            pin: None,
            posted: 0,
            is_loose: false,
            message: None,
            stopped: false,
            error: None,
        }
    }

    /// What decides which paths may take it, by this advice; none of a message, which may go by any.
    pub(crate) fn kind(&self, rails: Rails) -> Option<Kind> {
        let must_be_placed = self.must_be_placed();
        self.body.target().map(|target| Kind { target, rails, must_be_placed })
    }

    pub(crate) fn group(&self) -> Option<u64> {
        match self.body {
            Body::Write { group, .. } | Body::Signal { group, .. } => Some(group),
            Body::Message { .. } => None,
        }
    }

    pub(crate) fn is_issued(&self) -> bool {
        let cut = match &self.body {
            Body::Write { shape, .. } => self.cutter.is_done(shape),
            Body::Message { .. } | Body::Signal { .. } => true,
        };
        cut && self.split.is_empty() && self.queued == 0
    }

    /// Whether all that has not landed of it has its place in the order of the pin.
    pub(crate) fn is_posted(&self) -> bool {
        let cut = match &self.body {
            Body::Write { shape, .. } => self.cutter.is_done(shape),
            Body::Message { .. } | Body::Signal { .. } => true,
        };
        cut && !self.stopped && self.queued == 0 && self.frames == self.posted
    }

    pub(crate) fn stop(&mut self, error: WriteError) {
        self.error.get_or_insert(error);
        self.stopped = true;
        self.cutter.stop();
        self.split.clear();
        self.queued = 0;
    }

    /// So many bytes of a long write have landed. Whether all have now.
    pub(crate) fn slice_landed(&mut self, write: usize, bytes: u64) -> bool {
        let Some(left) = self.split.get_mut(&write) else { return false };
        *left -= bytes;
        if *left > 0 && !mutated(Mutation::SealBeforeAllSlices) {
            return false;
        }
        self.split.remove(&write);
        true
    }
}

/// Operations by their name.
#[derive(Debug)]
pub(crate) struct Ops<P, C> {
    slots: Vec<Slot<P, C>>,
    free: Vec<u32>,
}

#[derive(Debug)]
struct Slot<P, C> {
    generation: u32,
    op: Option<Op<P, C>>,
}

impl<P, C> Ops<P, C> {
    pub(crate) fn new() -> Self {
        Ops { slots: Vec::new(), free: Vec::new() }
    }

    pub(crate) fn insert(&mut self, op: Op<P, C>) -> OpId {
        let index = self.free.pop().unwrap_or_else(|| {
            self.slots.push(Slot { generation: 0, op: None });
            u32::try_from(self.slots.len() - 1).expect("operations are bounded by the shell")
        });
        let slot = &mut self.slots[index as usize];
        slot.op = Some(op);
        OpId { index, generation: slot.generation }
    }

    pub(crate) fn get_mut(&mut self, id: OpId) -> Option<&mut Op<P, C>> {
        let slot = self.slots.get_mut(id.index as usize)?;
        if slot.generation == id.generation { slot.op.as_mut() } else { None }
    }

    /// Whether more of it may be issued.
    pub(crate) fn is_running(&self, id: OpId) -> bool {
        let slot = self.slots.get(id.index as usize);
        let op =
            slot.filter(|slot| slot.generation == id.generation).and_then(|slot| slot.op.as_ref());
        op.is_some_and(|op| !op.stopped)
    }

    /// One of which more may be issued.
    pub(crate) fn running(&mut self, id: OpId) -> Option<&mut Op<P, C>> {
        self.get_mut(id).filter(|op| !op.stopped)
    }

    pub(crate) fn remove(&mut self, id: OpId) -> Option<Op<P, C>> {
        let slot = self.slots.get_mut(id.index as usize)?;
        let op = slot.op.take()?;
        slot.generation = slot.generation.wrapping_add(1);
        self.free.push(id.index);
        Some(op)
    }

    pub(crate) fn ids(&self, wanted: impl Fn(&Op<P, C>) -> bool) -> Vec<OpId> {
        let slots = self.slots.iter().zip(0u32..);
        let found = slots.filter(|(slot, _)| slot.op.as_ref().is_some_and(&wanted));
        found.map(|(slot, index)| OpId { index, generation: slot.generation }).collect()
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &Op<P, C>> {
        self.slots.iter().filter_map(|slot| slot.op.as_ref())
    }

    pub(crate) fn take_all(&mut self) -> impl Iterator<Item = Op<P, C>> + '_ {
        self.slots.iter_mut().filter_map(|slot| slot.op.take())
    }
}
