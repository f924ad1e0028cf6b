//! The compute thread: attaches when it is given an attachment, runs a scheduler on it until the
//! node is lost or the engine has drained, and sleeps whenever there is nothing to do.

#![forbid(unsafe_code)]

#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc;
use tonic::Status;

use crate::inbox::{Inbox, Unattached};
use crate::ports::{CachePort, Compute, PortLost};
use crate::scheduler::{Scheduler, SchedulerOptions, Shared};

const STOPPING: &str = "the engine is stopping";

/// A port that the thread can sleep on.
pub(crate) trait WaitPort: CachePort {
    /// Sleeps until the node said something, somebody woke the thread, or the time is over.
    ///
    /// # Errors
    /// [`PortLost`] when the node is gone.
    fn wait(&mut self, timeout: Duration) -> Result<(), PortLost>;
}

/// A node and the model over its memory.
#[derive(Debug)]
pub(crate) struct Attachment<P, C> {
    pub port: P,
    pub compute: C,
}

/// What the thread is given once.
#[derive(Debug)]
pub(crate) struct Worker<P, C> {
    pub inbox: Arc<Inbox<Attachment<P, C>>>,
    pub options: SchedulerOptions,
    pub shared: Shared,
    pub drain_us: u64,
    /// Hears of each attachment that was lost. Nothing is lost when nobody listens any more.
    pub lost: mpsc::Sender<PortLost>,
}

impl<P: WaitPort, C: Compute> Worker<P, C> {
    /// Runs until the inbox stops.
    pub(crate) fn run(self) {
        while let Unattached::Attach(attachment) = self.inbox.wait_unattached() {
            let Attachment { port, compute } = attachment;
            let mut scheduler =
                Scheduler::new(self.options.clone(), self.shared.clone(), port, compute);
            let ended = self.serve(&mut scheduler);
            let why = match &ended {
                Ok(()) => STOPPING,
                Err(_) => "the engine lost its store node",
            };
            scheduler.fail_all(why);
            // The scheduler holds slot memory: it must be gone before anybody hears of the loss.
            drop(scheduler);
            self.refuse_jobs(why);
            if let Err(lost) = ended {
                // One slot for each attachment that was given, and one is given at a time.
                let _ = self.lost.try_send(lost);
            }
        }
    }

    fn refuse_jobs(&self, why: &str) {
        for job in self.inbox.detached() {
            job.events.fail(Status::unavailable(why));
        }
    }

    fn serve(&self, scheduler: &mut Scheduler<P, C>) -> Result<(), PortLost> {
        let mut drained_at_us = None;
        loop {
            while let Some(job) = self.inbox.take_job() {
                scheduler.accept(job)?;
            }
            scheduler.handle_all()?;
            scheduler.sweep()?;
            scheduler.publish_load();
            if self.inbox.is_stopping() {
                let now_us = self.shared.clock.now_us();
                let until = *drained_at_us.get_or_insert(now_us + self.drain_us);
                if scheduler.is_empty() || now_us >= until {
                    return Ok(());
                }
            }
            if !scheduler.step()? {
                let timeout = scheduler.wait_max();
                scheduler.port().wait(timeout)?;
            }
        }
    }
}
