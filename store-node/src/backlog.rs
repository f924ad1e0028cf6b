//! Work for a thread or a task that the node's own thread never waits for.

use std::collections::VecDeque;
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};

use tokio::sync::mpsc;

/// The sending end of a bounded queue.
pub(crate) trait Queue<T> {
    /// Puts a job into the queue.
    ///
    /// # Errors
    /// The job if the queue is full; `None` if the receiver is gone.
    fn try_put(&self, job: T) -> Result<(), Option<T>>;
}

impl<T> Queue<T> for SyncSender<T> {
    fn try_put(&self, job: T) -> Result<(), Option<T>> {
        self.try_send(job).map_err(|error| match error {
            TrySendError::Full(job) => Some(job),
            TrySendError::Disconnected(_) => None,
        })
    }
}

impl<T> Queue<T> for mpsc::Sender<T> {
    fn try_put(&self, job: T) -> Result<(), Option<T>> {
        self.try_send(job).map_err(|error| match error {
            mpsc::error::TrySendError::Full(job) => Some(job),
            mpsc::error::TrySendError::Closed(_) => None,
        })
    }
}

/// A bounded queue, and an overflow queue before it. The caller bounds the overflow. Dropping it ends the receiver.
#[derive(Debug)]
pub(crate) struct Backlog<T, Q = SyncSender<T>> {
    jobs: Q,
    waiting: VecDeque<T>,
}

impl<T> Backlog<T> {
    /// To a thread. `jobs_max` is the capacity of its queue.
    pub(crate) fn new(jobs_max: usize) -> (Self, Receiver<T>) {
        let (jobs, receiver) = sync_channel(jobs_max);
        (Backlog { jobs, waiting: VecDeque::new() }, receiver)
    }
}

#[cfg(any(test, feature = "object-store"))]
impl<T> Backlog<T, mpsc::Sender<T>> {
    /// To a task. `jobs_max` is the capacity of its queue.
    pub(crate) fn to_task(jobs_max: usize) -> (Self, mpsc::Receiver<T>) {
        let (jobs, receiver) = mpsc::channel(jobs_max);
        (Backlog { jobs, waiting: VecDeque::new() }, receiver)
    }
}

impl<T, Q: Queue<T>> Backlog<T, Q> {
    /// Hands a job over without waiting.
    pub(crate) fn give(&mut self, job: T) {
        self.waiting.push_back(job);
        self.flush();
    }

    /// Hands over waiting jobs as far as the queue has room. Returns whether some still wait.
    pub(crate) fn flush(&mut self) -> bool {
        while let Some(job) = self.waiting.pop_front() {
            match self.jobs.try_put(job) {
                Ok(()) => {}
                Err(Some(job)) => {
                    self.waiting.push_front(job);
                    return true;
                }
                // The node notices it by jobs that are never answered.
                Err(None) => return false,
            }
        }
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `take` empties one place of the queue; the queue has two.
    fn jobs_that_find_no_room_wait_in_their_order<Q: Queue<u32>>(
        mut backlog: Backlog<u32, Q>,
        mut take: impl FnMut() -> Option<u32>,
    ) -> Backlog<u32, Q> {
        (0..5).for_each(|job| backlog.give(job));
        assert!(backlog.flush(), "three wait");
        assert_eq!((take(), take()), (Some(0), Some(1)));
        assert!(backlog.flush(), "one waits");
        assert_eq!((take(), take()), (Some(2), Some(3)));
        assert!(!backlog.flush());
        assert_eq!((take(), take()), (Some(4), None));
        backlog
    }

    #[test]
    fn a_thread_gets_all_jobs_in_their_order() {
        let (backlog, receiver) = Backlog::new(2);
        let take = || receiver.try_recv().ok();
        let mut backlog = jobs_that_find_no_room_wait_in_their_order(backlog, take);
        drop(receiver);
        backlog.give(6);
        assert!(!backlog.flush(), "the receiver is gone");
    }

    #[test]
    fn a_task_gets_all_jobs_in_their_order() {
        let (backlog, mut receiver) = Backlog::to_task(2);
        let take = || receiver.try_recv().ok();
        let mut backlog = jobs_that_find_no_room_wait_in_their_order(backlog, take);
        drop(receiver);
        backlog.give(6);
        assert!(!backlog.flush(), "the receiver is gone");
    }
}
