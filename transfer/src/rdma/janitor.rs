//! Ends registrations on a thread of its own: it takes long in proportion to the memory, and the worker
//! does not wait. Whoever must know when it is done gets a flag.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{SyncSender, TrySendError, sync_channel};
use std::thread::JoinHandle;

use crate::shared::REGIONS_MAX;

struct Task {
    /// Its drop ends the registration.
    registration: Box<dyn Send>,
    over: Arc<AtomicBool>,
}

impl std::fmt::Debug for Task {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Task").field("over", &self.over).finish_non_exhaustive()
    }
}

impl Task {
    fn run(self) {
        drop(self.registration);
        self.over.store(true, Ordering::Release);
    }
}

#[derive(Debug)]
pub(crate) struct Janitor {
    tasks: Option<SyncSender<Task>>,
    /// What the thread has no room for yet. Those who wait for it are as many.
    waiting: VecDeque<Task>,
    thread: Option<JoinHandle<()>>,
}

impl Janitor {
    pub(crate) fn start(name: &str) -> std::io::Result<Self> {
        let (tasks, receiver) = sync_channel::<Task>(REGIONS_MAX);
        let thread = std::thread::Builder::new()
            .name(format!("xfer-{name}-mem"))
            .spawn(move || receiver.into_iter().for_each(Task::run))?;
        Ok(Janitor { tasks: Some(tasks), waiting: VecDeque::new(), thread: Some(thread) })
    }

    /// The flag is set when the registration has ended.
    pub(crate) fn end(&mut self, registration: Box<dyn Send>) -> Arc<AtomicBool> {
        let over = Arc::new(AtomicBool::new(false));
        self.waiting.push_back(Task { registration, over: Arc::clone(&over) });
        self.pass_on();
        over
    }

    /// To be called now and then. The caller does not end registrations itself: that may wait for the caller.
    pub(crate) fn pass_on(&mut self) {
        while let (Some(task), Some(tasks)) = (self.waiting.pop_front(), &self.tasks) {
            match tasks.try_send(task) {
                Ok(()) => {}
                Err(TrySendError::Full(task)) => {
                    self.waiting.push_front(task);
                    return;
                }
                // The thread has panicked, and that was told.
                Err(TrySendError::Disconnected(task)) => task.run(),
            }
        }
    }
}

impl Drop for Janitor {
    fn drop(&mut self) {
        // Without a sender the thread ends when it has done what waits.
        self.tasks = None;
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!(
                "the transfer engine's thread that ends memory registrations panicked; restart the process"
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Noted(Arc<AtomicBool>);

    impl Drop for Noted {
        fn drop(&mut self) {
            self.0.store(true, Ordering::SeqCst);
        }
    }

    #[test]
    fn what_is_over_was_dropped_before() {
        let mut janitor = Janitor::start("test").expect("a thread");
        let dropped = Arc::new(AtomicBool::new(false));
        let over = janitor.end(Box::new(Noted(Arc::clone(&dropped))));
        drop(janitor);
        assert!(over.load(Ordering::Acquire) && dropped.load(Ordering::SeqCst));
    }
}
