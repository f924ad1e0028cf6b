//! Where an outcome is left for a thread that polls and then sleeps, or for a task. It is set once; who finds it
//! missing says so under the lock before he sleeps, so nobody sleeps through it.

use std::sync::PoisonError;
use std::task::Waker;
use std::time::Duration;

use kvasir_mutation::{Mutation, mutated};
use kvasir_transfer_core::Outcome;

use crate::sync::{AtomicBool, Condvar, Mutex, Ordering};

#[derive(Debug, Default)]
pub(crate) struct OutcomeCell {
    /// The state has an outcome: for who polls.
    is_set: AtomicBool,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    outcome: Option<Outcome>,
    /// A thread sleeps until it is set.
    is_waiting: bool,
    waker: Option<Waker>,
}

impl OutcomeCell {
    /// The first outcome counts.
    pub(crate) fn set(&self, outcome: Outcome) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if state.outcome.is_some() {
            return;
        }
        state.outcome = Some(outcome);
        self.is_set.store(true, Ordering::Release);
        let (waker, is_waiting) = (state.waker.take(), state.is_waiting);
        drop(state);
        if is_waiting {
            self.changed.notify_all();
        }
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    /// Looks, as long as `again` says that it is worth it, and then sleeps.
    pub(crate) fn wait(&self, mut again: impl FnMut() -> bool) -> Outcome {
        while !self.is_set.load(Ordering::Acquire) {
            if !again() {
                break;
            }
        }
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            if let Some(outcome) = state.outcome {
                return outcome;
            }
            if !mutated(Mutation::OutcomeWaiterNotWoken) {
                state.is_waiting = true;
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Sleeps, as long as `left` says that there is time.
    pub(crate) fn wait_while(&self, mut left: impl FnMut() -> Option<Duration>) -> Option<Outcome> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            if let Some(outcome) = state.outcome {
                return Some(outcome);
            }
            let left = left()?;
            state.is_waiting = true;
            let waited = self.changed.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// The waker is woken when it is set.
    pub(crate) fn poll(&self, waker: &Waker) -> Option<Outcome> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if state.outcome.is_none() && !mutated(Mutation::WakerNotKept) {
            state.waker = Some(waker.clone());
        }
        state.outcome
    }
}
