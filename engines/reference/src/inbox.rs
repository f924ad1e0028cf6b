//! What the rest of the engine hands to the compute thread, and how it wakes it.
//!
//! The compute thread sleeps on the attachment's doorbell while it is attached and on the condition
//! variable here while it is not; `wake` does both.

#![forbid(unsafe_code)]

use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::watch;

use crate::scheduler::Job;

/// Wakes a compute thread that waits for its node. It must not keep the attachment alive.
pub(crate) type WakePort = Box<dyn Fn() + Send>;

/// Shared by the service, the attach loop and the compute thread. `A` is an attachment.
pub(crate) struct Inbox<A> {
    state: Mutex<State<A>>,
    changed: Condvar,
    /// Follows `wake_port`, for calls that come while an attachment is being made.
    attached: watch::Sender<bool>,
}

struct State<A> {
    jobs: VecDeque<Job>,
    attachment: Option<A>,
    /// Present while the compute thread is attached: jobs are taken only then.
    wake_port: Option<WakePort>,
    stopping: bool,
}

/// The engine is not attached, or stopping.
#[derive(Debug)]
pub(crate) struct NoNode;

/// What there is to do for a thread that is not attached.
#[derive(Debug)]
pub(crate) enum Unattached<A> {
    Attach(A),
    Stop,
}

impl<A> Default for Inbox<A> {
    fn default() -> Self {
        let state =
            State { jobs: VecDeque::new(), attachment: None, wake_port: None, stopping: false };
        let (attached, _) = watch::channel(false);
        Inbox { state: Mutex::new(state), changed: Condvar::new(), attached }
    }
}

impl<A> std::fmt::Debug for Inbox<A> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Inbox")
    }
}

impl<A> Inbox<A> {
    /// Hands a job over, or drops it when there is no node to run it on. The number of jobs is
    /// bounded by admission.
    ///
    /// # Errors
    /// [`NoNode`]
    pub(crate) fn put(&self, job: Job) -> Result<(), NoNode> {
        let mut state = self.lock();
        if state.stopping || state.wake_port.is_none() {
            return Err(NoNode);
        }
        state.jobs.push_back(job);
        drop(state);
        self.wake();
        Ok(())
    }

    /// Hands an attachment over. `wake_port` works until the next one, or `detached`.
    pub(crate) fn attach(&self, attachment: A, wake_port: WakePort) {
        let mut state = self.lock();
        state.attachment = Some(attachment);
        state.wake_port = Some(wake_port);
        self.attached.send_replace(true);
        drop(state);
        self.changed.notify_all();
    }

    /// The compute thread has lost its node: jobs that came meanwhile are given back.
    pub(crate) fn detached(&self) -> VecDeque<Job> {
        let mut state = self.lock();
        state.wake_port = None;
        self.attached.send_replace(false);
        std::mem::take(&mut state.jobs)
    }

    /// No more jobs; the compute thread ends when those it has are done.
    pub(crate) fn stop(&self) {
        self.lock().stopping = true;
        self.wake();
    }

    /// Wakes the compute thread wherever it sleeps.
    pub(crate) fn wake(&self) {
        if let Some(wake_port) = &self.lock().wake_port {
            wake_port();
        }
        self.changed.notify_all();
    }

    pub(crate) fn is_attached(&self) -> bool {
        self.lock().wake_port.is_some()
    }

    /// Waits for an attachment, but no longer than `patience`: the node tells the conductor of this
    /// engine a moment before the engine has mapped its memory.
    pub(crate) async fn wait_attached(&self, patience: Duration) {
        let mut attached = self.attached.subscribe();
        // Whoever asked too early is told so by `put`.
        let _ = tokio::time::timeout(patience, attached.wait_for(|attached| *attached)).await;
    }

    pub(crate) fn take_job(&self) -> Option<Job> {
        self.lock().jobs.pop_front()
    }

    pub(crate) fn is_stopping(&self) -> bool {
        self.lock().stopping
    }

    /// Sleeps until there is an attachment, or the engine stops.
    pub(crate) fn wait_unattached(&self) -> Unattached<A> {
        let mut state = self.lock();
        loop {
            // Even when stopping: jobs may have been taken for it, and they are let end.
            if let Some(attachment) = state.attachment.take() {
                return Unattached::Attach(attachment);
            }
            if state.stopping {
                return Unattached::Stop;
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Nothing that can panic runs under the lock, so what it guards is whole even if poisoned.
    fn lock(&self) -> MutexGuard<'_, State<A>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
