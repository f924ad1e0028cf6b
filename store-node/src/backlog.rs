//! Work for a thread that the node's own thread never waits for.

use std::collections::VecDeque;
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};

/// A bounded queue to a thread, and an overflow queue before it. The caller bounds the overflow.
#[derive(Debug)]
pub(crate) struct Backlog<T> {
    jobs: SyncSender<T>,
    waiting: VecDeque<T>,
}

impl<T> Backlog<T> {
    /// `jobs_max` is the capacity of the thread's queue.
    pub(crate) fn new(jobs_max: usize) -> (Self, Receiver<T>) {
        let (jobs, receiver) = sync_channel(jobs_max);
        (Backlog { jobs, waiting: VecDeque::new() }, receiver)
    }

    /// Hands a job over without waiting.
    pub(crate) fn give(&mut self, job: T) {
        self.waiting.push_back(job);
        self.flush();
    }

    /// Hands over what there was no room for. Answers whether some still waits.
    pub(crate) fn flush(&mut self) -> bool {
        while let Some(job) = self.waiting.pop_front() {
            match self.jobs.try_send(job) {
                Ok(()) => {}
                Err(TrySendError::Full(job)) => {
                    self.waiting.push_front(job);
                    return true;
                }
                // The thread has died, which the node sees by what is never answered.
                Err(TrySendError::Disconnected(_)) => return false,
            }
        }
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_finds_no_room_waits_in_its_order() {
        let (mut backlog, receiver) = Backlog::new(2);
        (0..5).for_each(|job| backlog.give(job));
        assert!(backlog.flush(), "three wait");
        assert_eq!((receiver.try_recv(), receiver.try_recv()), (Ok(0), Ok(1)));
        assert!(backlog.flush(), "one waits");
        assert_eq!((receiver.try_recv(), receiver.try_recv()), (Ok(2), Ok(3)));
        assert!(!backlog.flush());
        assert_eq!(receiver.try_recv(), Ok(4));
        drop(receiver);
        backlog.give(6);
        assert!(!backlog.flush(), "nobody takes it any more");
    }
}
