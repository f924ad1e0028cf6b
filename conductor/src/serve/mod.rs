//! Serving one answer: place it, reserve on the nodes, call the engines, pass their tokens on, and
//! leave nothing behind however it ends.
//!
//! Reading path:
//! 1. [`job`]: what is to be served and what comes out
//! 2. [`choice`]: one answer from start to end: its turn, attempts, deadline, cancelling
//! 3. [`line`], [`turn`]: where requests of several tenants wait for their turn
//! 4. [`attempt`]: one attempt on chosen instances: allocate, fetch, push, both legs
//! 5. [`transaction`]: what an attempt holds on the nodes; dropped, it gives it all back
//! 6. [`recorder`]: what was decided, and what came of it; [`passed_on`]: that for models that others serve
//! 7. [`schedule`]: decisions for callers with a front door of their own
//! 8. [`arrivals`]: what requests that begin alike bring once for all of them
//! 9. [`reserve`], [`fetch`], [`chunks`], [`legs`], [`renewal`], [`abort`], [`fault`], [`pace`]: its parts
//!
//! No KV bytes are seen here; only ids, places and tokens.

mod abort;
mod arrivals;
mod attempt;
mod choice;
mod chunks;
mod class;
mod fault;
mod fetch;
mod job;
mod legs;
mod line;
mod outputs;
mod pace;
mod passed_on;
mod phase;
mod recorder;
mod renewal;
mod reserve;
mod schedule;
mod transaction;
mod turn;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use kvasir_proto::TxId;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tokio_util::task::task_tracker::TaskTrackerToken;

use crate::cluster::Cluster;
use crate::metrics::Metrics;
use line::{Lines, Ticket};

pub(crate) use class::CacheClass;
pub(crate) use fault::Failure;
use fault::TOO_MANY;
pub(crate) use job::{Ended, FinishReason, Job, Meter, Progress, Prompt, Steered};
pub(crate) use line::{Claim, WaitOptions};
pub(crate) use outputs::{Output, Outputs};
pub(crate) use passed_on::{PassedOn, ServerSeen, ServerState, Why};
pub(crate) use recorder::{Asked, Decision, Record, Recorder, unix_ms};
pub(crate) use schedule::scheduler_service;

/// Bounds of serving.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ServeOptions {
    pub lease: Duration,
    pub attempts_max: u32,
    pub running_choices_max: usize,
    /// How long the end of an answer waits for a client that takes nothing.
    pub write_stall: Duration,
    /// Decisions that are kept to be looked at.
    pub decision_history_max: usize,
    /// Memory for what they were taken from.
    pub decision_inputs_bytes_max: usize,
    /// How requests wait for their turn; without it nobody does.
    pub wait: Option<WaitOptions>,
}

impl ServeOptions {
    fn lease_ms(&self) -> u64 {
        u64::try_from(self.lease.as_millis()).unwrap_or(u64::MAX)
    }
}

/// How a job begins.
#[derive(Debug)]
enum Entry {
    /// It is one of those that are worked on.
    Begins(OwnedSemaphorePermit),
    Waits(Ticket),
}

/// Serves jobs. Shared by all requests.
#[derive(Debug)]
pub(crate) struct Serving {
    cluster: Cluster,
    options: ServeOptions,
    metrics: Arc<Metrics>,
    recorder: Arc<Recorder>,
    /// Drawn when the conductor starts: its transactions are its own.
    incarnation: u64,
    serial: AtomicU64,
    lines: Option<Arc<Lines>>,
    arrivals: arrivals::Arrivals,
    permits: Arc<Semaphore>,
    /// Choices and aborts: what must end before the conductor does.
    tasks: TaskTracker,
    /// Cancelled when draining took too long.
    abandon: CancellationToken,
}

impl Serving {
    pub(crate) fn new(
        cluster: Cluster,
        options: ServeOptions,
        metrics: Arc<Metrics>,
        abandon: CancellationToken,
    ) -> Serving {
        let lines = options.wait.map(|wait| Arc::new(Lines::new(wait, Arc::clone(&metrics))));
        Serving {
            cluster,
            options,
            lines,
            arrivals: arrivals::Arrivals::default(),
            metrics,
            recorder: Arc::new(Recorder::new(
                options.decision_history_max,
                options.decision_inputs_bytes_max,
            )),
            incarnation: rand::random(),
            serial: AtomicU64::new(1),
            permits: Arc::new(Semaphore::new(options.running_choices_max)),
            tasks: TaskTracker::new(),
            abandon,
        }
    }

    /// Starts all jobs of one request, or none. Dropping what comes back cancels them.
    ///
    /// # Errors
    /// [`Failure::Overloaded`] when there is no room for so many at once, [`Failure::Rejected`] when
    /// there never is.
    pub(crate) fn start(self: &Arc<Self>, jobs: Vec<Job>) -> Result<Outputs, Failure> {
        let (asked, at_once) = (jobs.len(), self.options.running_choices_max);
        if asked > at_once {
            let reason =
                format!("it asks for {asked} answers, and at most {at_once} can run at once");
            return Err(Failure::Rejected { reason });
        }
        let wait_at_once = self.lines.as_ref().map_or(usize::MAX, |lines| lines.requests_max());
        if asked > wait_at_once {
            let reason = format!(
                "it asks for {asked} answers, and the admission queue holds at most {wait_at_once}"
            );
            return Err(Failure::Rejected { reason });
        }
        let entries = self.enter(&jobs)?;
        let (outlets, outputs) = outputs::channel(jobs.len());
        for ((job, outlet), entry) in jobs.into_iter().zip(outlets).zip(entries) {
            let serving = Arc::clone(self);
            self.tasks.spawn(choice::run(serving, job, outlet, entry));
        }
        Ok(outputs)
    }

    /// Each of them may begin, or has a place where it waits; or none of them has.
    fn enter(&self, jobs: &[Job]) -> Result<Vec<Entry>, Failure> {
        if let Some(first) = jobs.first()
            && let (Some(lines), Some(claim)) = (&self.lines, &first.claim)
        {
            let generated_tokens = self.cluster.generated_tokens(&first.model);
            let cost = |job: &Job| {
                let generated_tokens = job.sampling.max_tokens.min(generated_tokens);
                u64::from(job.prompt.length()) + u64::from(generated_tokens)
            };
            let costs: Vec<u64> = jobs.iter().map(cost).collect();
            let tickets = lines.enter(&first.model, claim, &costs);
            let tickets = tickets
                .map_err(|full| self.refused_turn(&first.model, TOO_MANY, full.to_string()))?;
            return Ok(tickets.into_iter().map(Entry::Waits).collect());
        }
        let mut entries = Vec::with_capacity(jobs.len());
        for had in 0..jobs.len() {
            let permit = Arc::clone(&self.permits).try_acquire_owned();
            entries.push(Entry::Begins(permit.map_err(|_| {
                let retry_after_ms = self.cluster.requests_end_in_ms(jobs.len() - had);
                Failure::too_many("too many requests are running".to_owned(), retry_after_ms)
            })?));
        }
        Ok(entries)
    }

    /// It has no turn: it is told when as many of those that are served are predicted to end as wait for it.
    fn refused_turn(&self, model: &str, limit: &'static str, reason: String) -> Failure {
        let waiting = self.lines.as_ref().map_or(0, |lines| lines.waiting(model));
        let retry_after_ms = self.cluster.requests_end_in_ms(waiting + 1);
        Failure::Overloaded { limit, reason, retry_after_ms }
    }

    /// Calls those that wait, until `shutdown`. Returns at once when nobody does.
    pub(crate) async fn call_waiting(self: Arc<Self>, shutdown: CancellationToken) {
        if let Some(lines) = &self.lines {
            Arc::clone(lines).run(shutdown).await;
        }
    }

    /// Attempts at one request, the first included.
    pub(crate) fn attempts_max(&self) -> u32 {
        self.options.attempts_max
    }

    /// The conductor does not end before this is dropped, as long as it drains.
    pub(crate) fn running(&self) -> TaskTrackerToken {
        self.tasks.token()
    }

    /// All choices have ended and all nodes have been told of what was abandoned.
    pub(crate) async fn finished(&self) {
        self.tasks.close();
        self.tasks.wait().await;
    }

    /// The latest decisions.
    pub(crate) fn recorder(&self) -> &Arc<Recorder> {
        &self.recorder
    }

    fn next_tx(&self) -> TxId {
        let serial = self.serial.fetch_add(1, Ordering::Relaxed);
        TxId { conductor_incarnation: self.incarnation, serial }
    }
}
