//! How the end of an operation is told: by a callback, a flag or a future. Callbacks run on the
//! engine's worker thread: they must be short and must not wait.

use std::fmt;
use std::pin::Pin;
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use kvasir_transfer_core::{Outcome, WriteError};

/// Told exactly once. When an operation was not accepted (a [`crate::SubmitError`]), a callback is
/// dropped without a call, and flags and futures show [`WriteError::Cancelled`].
pub enum Completion {
    Callback(Box<dyn FnOnce(Outcome) + Send>),
    Flag(FlagSetter),
    Future(OutcomeSender),
    /// Nobody wants to know.
    Ignore,
}

impl fmt::Debug for Completion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Completion::Callback(_) => "Callback",
            Completion::Flag(_) => "Flag",
            Completion::Future(_) => "Future",
            Completion::Ignore => "Ignore",
        })
    }
}

impl Completion {
    pub fn callback(call: impl FnOnce(Outcome) + Send + 'static) -> Self {
        Completion::Callback(Box::new(call))
    }

    /// A flag that can be polled without a system call.
    pub fn flag() -> (Self, Arc<CompletionFlag>) {
        let flag = Arc::new(CompletionFlag::default());
        (Completion::Flag(FlagSetter(Arc::clone(&flag))), flag)
    }

    /// A future that also can be waited for by a thread.
    pub fn future() -> (Self, CompletionFuture) {
        let shared = Arc::new(Shared::default());
        let sender = OutcomeSender(Arc::clone(&shared));
        (Completion::Future(sender), CompletionFuture(shared))
    }

    pub fn complete(self, outcome: Outcome) {
        match self {
            Completion::Callback(call) => call(outcome),
            Completion::Flag(setter) => setter.0.set(outcome),
            Completion::Future(sender) => sender.0.set(outcome),
            Completion::Ignore => {}
        }
    }
}

/// See [`Completion::flag`].
#[derive(Debug, Default)]
pub struct CompletionFlag(OnceLock<Outcome>);

impl CompletionFlag {
    /// `None` while the operation is under way. One load.
    pub fn get(&self) -> Option<Outcome> {
        self.0.get().copied()
    }

    /// The first outcome counts.
    fn set(&self, outcome: Outcome) {
        let _ = self.0.set(outcome);
    }
}

/// The engine's end of a flag. Dropped unset, it shows `Cancelled`.
#[derive(Debug)]
pub struct FlagSetter(Arc<CompletionFlag>);

impl Drop for FlagSetter {
    fn drop(&mut self) {
        self.0.set(Err(WriteError::Cancelled));
    }
}

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    outcome: Option<Outcome>,
    waker: Option<Waker>,
}

impl Shared {
    fn set(&self, outcome: Outcome) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if state.outcome.is_some() {
            return;
        }
        state.outcome = Some(outcome);
        let waker = state.waker.take();
        drop(state);
        self.changed.notify_all();
        if let Some(waker) = waker {
            waker.wake();
        }
    }
}

/// The engine's end of a future. Dropped unset, the future resolves to `Cancelled`.
#[derive(Debug)]
pub struct OutcomeSender(Arc<Shared>);

impl Drop for OutcomeSender {
    fn drop(&mut self) {
        self.0.set(Err(WriteError::Cancelled));
    }
}

/// See [`Completion::future`].
#[derive(Debug)]
pub struct CompletionFuture(Arc<Shared>);

impl CompletionFuture {
    /// Blocks this thread until the operation has ended. Never call it on the worker thread.
    pub fn wait(self) -> Outcome {
        let mut state = self.0.state.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            if let Some(outcome) = state.outcome {
                return outcome;
            }
            state = self.0.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// As [`CompletionFuture::wait`], but gives up after `timeout` with `None`.
    pub fn wait_timeout(&self, timeout: Duration) -> Option<Outcome> {
        let state = self.0.state.lock().unwrap_or_else(PoisonError::into_inner);
        let waiting = |state: &mut State| state.outcome.is_none();
        let waited = self.0.changed.wait_timeout_while(state, timeout, waiting);
        waited.unwrap_or_else(PoisonError::into_inner).0.outcome
    }
}

impl Future for CompletionFuture {
    type Output = Outcome;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Outcome> {
        let mut state = self.0.state.lock().unwrap_or_else(PoisonError::into_inner);
        match state.outcome {
            Some(outcome) => Poll::Ready(outcome),
            None => {
                state.waker = Some(context.waker().clone());
                Poll::Pending
            }
        }
    }
}
