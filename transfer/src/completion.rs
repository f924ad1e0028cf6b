//! How the end of an operation is told: by a callback, a flag or a future. Callbacks run on the engine's
//! worker thread, or on the thread that drives the engine: they must be short and must not wait.

use std::fmt;
use std::pin::Pin;
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use kvasir_transfer_core::{Outcome, WriteError};

use crate::outcome::OutcomeCell;
use crate::spin::Spin;

/// How long a thread that waits polls: about as long as a write of 2 MiB over TCP takes on one host.
const POLL_FOR: Duration = Duration::from_micros(500);

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
        let shared = Arc::new(OutcomeCell::default());
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

/// The engine's end of a future. Dropped unset, the future resolves to `Cancelled`.
#[derive(Debug)]
pub struct OutcomeSender(Arc<OutcomeCell>);

impl Drop for OutcomeSender {
    fn drop(&mut self) {
        self.0.set(Err(WriteError::Cancelled));
    }
}

/// See [`Completion::future`].
#[derive(Debug)]
pub struct CompletionFuture(Arc<OutcomeCell>);

impl CompletionFuture {
    /// Blocks this thread until the operation has ended: polls for a moment, giving its core away between
    /// looks, and then sleeps. Never call it on the worker thread, nor on the thread that drives the engine.
    pub fn wait(self) -> Outcome {
        let mut spin = Spin::new(POLL_FOR);
        self.0.wait(|| spin.wait())
    }

    /// As [`CompletionFuture::wait`], but gives up after `timeout` with `None`.
    pub fn wait_timeout(&self, timeout: Duration) -> Option<Outcome> {
        let begun = Instant::now();
        self.0.wait_while(|| timeout.checked_sub(begun.elapsed()).filter(|left| !left.is_zero()))
    }
}

impl Future for CompletionFuture {
    type Output = Outcome;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Outcome> {
        self.0.poll(context.waker()).map_or(Poll::Pending, Poll::Ready)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_waits_for_longer_than_it_polls_is_woken() {
        let (completion, future) = Completion::future();
        let (told, tells) = std::sync::mpsc::sync_channel(1);
        std::thread::spawn(move || told.send(future.wait()));
        std::thread::sleep(10 * POLL_FOR);
        completion.complete(Err(WriteError::Cancelled));
        let outcome = tells.recv_timeout(Duration::from_secs(10));
        assert_eq!(outcome, Ok(Err(WriteError::Cancelled)));
    }

    #[test]
    fn who_waits_for_a_time_is_woken() {
        let (completion, future) = Completion::future();
        assert_eq!(future.wait_timeout(Duration::from_millis(1)), None);
        std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(5));
            completion.complete(Ok(()));
        });
        assert_eq!(future.wait_timeout(Duration::from_secs(10)), Some(Ok(())));
    }
}
