//! How the parts of one submission end, each for itself and together. Who submitted them looks at any time;
//! the last one that ends tells of all.

use std::sync::{Arc, PoisonError};

use kvasir_mutation::{Mutation, mutated};
use kvasir_transfer_core::{Outcome, Refusal, WriteError};

use crate::payload::Waiter;
use crate::sync::{AtomicU16, AtomicUsize, Mutex, Ordering};

/// How the parts of a scatter (in the order of its slices) or of a barrier (of its members) have ended.
#[derive(Debug)]
pub struct PartOutcomes(Box<[AtomicU16]>);

impl PartOutcomes {
    pub(crate) fn new(parts: usize) -> Self {
        PartOutcomes((0..parts).map(|_| AtomicU16::new(PENDING)).collect())
    }

    pub fn len(&self) -> usize {
        self.0.len()
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// `None` while the part is under way, and beyond the last one. All are known when the completion is
    /// told, unless the engine has died.
    pub fn get(&self, part: usize) -> Option<Outcome> {
        decode(self.0.get(part)?.load(Ordering::Acquire))
    }

    /// Parts that have failed so far, and why.
    pub fn failed(&self) -> impl Iterator<Item = (usize, WriteError)> {
        let outcomes = (0..self.len()).map(|part| (part, self.get(part)));
        outcomes.filter_map(|(part, outcome)| Some((part, outcome?.err()?)))
    }
}

const PENDING: u16 = 0;
const DONE: u16 = 1;
const CORRUPT: u16 = 2;
const PEER_GONE: u16 = 3;
const DEADLINE_EXCEEDED: u16 = 4;
const CANCELLED: u16 = 5;
/// And the refusal's code.
const REFUSED: u16 = 256;

fn encode(outcome: Outcome) -> u16 {
    match outcome {
        Ok(()) => DONE,
        Err(WriteError::Corrupt) => CORRUPT,
        Err(WriteError::PeerGone) => PEER_GONE,
        Err(WriteError::DeadlineExceeded) => DEADLINE_EXCEEDED,
        Err(WriteError::Cancelled) => CANCELLED,
        Err(WriteError::Refused(refusal)) => REFUSED + u16::from(refusal.code()),
    }
}

fn decode(code: u16) -> Option<Outcome> {
    match code {
        PENDING => None,
        DONE => Some(Ok(())),
        CORRUPT => Some(Err(WriteError::Corrupt)),
        PEER_GONE => Some(Err(WriteError::PeerGone)),
        DEADLINE_EXCEEDED => Some(Err(WriteError::DeadlineExceeded)),
        CANCELLED => Some(Err(WriteError::Cancelled)),
        refused => {
            let code = u8::try_from(refused.checked_sub(REFUSED)?).ok()?;
            Some(Err(WriteError::Refused(Refusal::from_code(code)?)))
        }
    }
}

/// Where the parts of one submission end. Only the worker ends them.
#[derive(Debug)]
pub(crate) struct Join {
    outcomes: Arc<PartOutcomes>,
    left: AtomicUsize,
    first_error: AtomicU16,
    /// Taken when the last part has ended.
    done: Mutex<Option<Waiter>>,
}

impl Join {
    pub(crate) fn new(outcomes: &Arc<PartOutcomes>, done: Waiter) -> Arc<Self> {
        Arc::new(Join {
            outcomes: Arc::clone(outcomes),
            left: AtomicUsize::new(outcomes.len()),
            first_error: AtomicU16::new(PENDING),
            done: Mutex::new(Some(done)),
        })
    }

    pub(crate) fn part_ended(&self, part: u32, outcome: Outcome) {
        let code = encode(outcome);
        let is_early = mutated(Mutation::PartVisibleBeforeItsBytes);
        let order = if is_early { Ordering::Relaxed } else { Ordering::Release };
        self.outcomes.0[part as usize].store(code, order);
        if code != DONE && self.first_error.load(Ordering::Relaxed) == PENDING {
            self.first_error.store(code, Ordering::Relaxed);
        }
        let last = 1 + usize::from(mutated(Mutation::JoinEndsBeforeItsParts));
        if self.left.fetch_sub(1, Ordering::AcqRel) > last {
            return;
        }
        let done = self.done.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(done) = done {
            let first = decode(self.first_error.load(Ordering::Relaxed));
            done.complete(first.unwrap_or(Ok(())));
        }
    }
}
