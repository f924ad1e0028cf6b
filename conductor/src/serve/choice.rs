//! One answer from start to end: attempts until one succeeds, under one deadline.
//!
//! Whatever ends it first (the answer, the deadline, a client that went, the shutdown), the
//! attempt that was running is dropped here and gives back what it held.

use std::sync::Arc;
use std::time::Duration;

use kvasir_placement::Refusal;
use kvasir_proto::InstanceId;
use prometheus::IntGauge;
use tokio::time::{Instant, sleep, sleep_until, timeout};
use tracing::Instrument;

use super::attempt::{self, Scene};
use super::fault::{Failure, Fault, FaultKind, InstanceFault};
use super::job::{Ended, Job, Prompt};
use super::outputs::Outlet;
use super::phase::{Phase, PhaseCell};
use super::recorder::{Asked, Trail};
use super::{Entry, Serving, turn};
use crate::cluster::{Expected, NotPlaced, PlaceQuery, Placed, ServedModel};

/// Runs a job and tells its outlet how it ended.
pub(super) async fn run(serving: Arc<Serving>, job: Job, outlet: Outlet, entry: Entry) {
    let span = tracing::info_span!("choice", id = &*job.request_id, tx = tracing::field::Empty);
    run_in_span(serving, job, outlet, entry).instrument(span).await;
}

async fn run_in_span(serving: Arc<Serving>, job: Job, outlet: Outlet, entry: Entry) {
    let phase = PhaseCell::new();
    let trail = serving.recorder.trail(Asked {
        request_id: Arc::clone(&job.request_id),
        model: Arc::clone(&job.model),
        prompt_tokens: job.prompt.length(),
        cache: job.cache,
        is_schedule_only: false,
    });
    let result = tokio::select! {
        result = begin(&serving, &job, &phase, &outlet, &trail, entry) => result,
        () = sleep_until(job.deadline) => Err(Failure::Deadline { phase: phase.get().name() }),
        () = outlet.closed() => Err(Failure::ClientGone),
        () = serving.abandon.cancelled() => Err(Failure::Draining),
    };
    let metrics = &serving.metrics;
    let label = result.as_ref().map_or_else(Failure::label, |_| "ok");
    metrics.choices.with_label_values(&[label]).inc();
    metrics.choice_seconds.observe(job.arrived.elapsed().as_secs_f64());
    trail.ended(label, result.as_ref().ok().map(|(_, ended)| ended));
    match result {
        Ok((text, ended)) => {
            tracing::debug!(?ended, "the conductor finished an answer");
            let tokens = |kind, count| metrics.tokens.with_label_values(&[kind]).inc_by(count);
            tokens("prompt", u64::from(job.prompt.length()));
            tokens("cached", u64::from(ended.cached_tokens));
            tokens("generated", u64::from(ended.generated_tokens));
            // A client that is gone by now has lost nothing that could be helped.
            let last = outlet.ended(text, ended);
            let _ = tokio::time::timeout(serving.options.write_stall, last).await;
        }
        Err(failure) => {
            tracing::info!(%failure, phase = phase.get().name(), "the conductor failed to answer a request");
            outlet.failed(failure, serving.options.write_stall).await;
        }
    }
}

/// Waits for its turn where it has to.
async fn begin(
    serving: &Arc<Serving>,
    job: &Job,
    phase: &PhaseCell,
    outlet: &Outlet,
    trail: &Trail<'_>,
    entry: Entry,
) -> Result<(String, Ended), Failure> {
    let (first, _permit) = match entry {
        Entry::Begins(permit) => (None, permit),
        Entry::Waits(ticket) => {
            phase.set(Phase::Waiting);
            // Not held for as long as it runs.
            let (placed, permit) = Box::pin(turn::wait(serving, job, trail, ticket)).await?;
            (Some(placed), permit)
        }
    };
    let _in_flight = Counted::new(&serving.metrics.choices_in_flight);
    attempts(serving, job, phase, outlet, trail, first).await
}

/// `first` is where it goes first, when that was decided with its turn.
async fn attempts(
    serving: &Arc<Serving>,
    job: &Job,
    phase: &PhaseCell,
    outlet: &Outlet,
    trail: &Trail<'_>,
    mut first: Option<Placed>,
) -> Result<(String, Ended), Failure> {
    let mut avoided = Avoided::default();
    let mut last: Option<InstanceFault> = None;
    for _ in 0..serving.options.attempts_max {
        if let Some(fault) = &last {
            serving.metrics.retries.with_label_values(&[fault.phase.name()]).inc();
        }
        if phase.get() == Phase::Decoding {
            job.meter.begins_anew();
            outlet.begins_anew().await?;
        }
        phase.set(Phase::Placing);
        // Anew each time: instances come and go.
        let model = serving.cluster.models().into_iter().find(|model| *model.name == *job.model);
        let model = model.ok_or(Failure::UnknownModel)?;
        let prompt = job.prompt.keyed(&model);
        let keys = prompt.keys();
        let placed = match first.take() {
            Some(placed) => Ok(placed),
            None => place(serving, job, &model, &prompt, &mut avoided).await,
        };
        let mut placed = placed.map_err(|none| {
            serving.cluster.hint(&Expected::Refused(&none.refused), prompt.namespace(), keys);
            let refusal = trail.refused(none);
            refused(serving, &prompt, refusal, last.as_ref())
        })?;
        trail.placed(&placed.placement, placed.inputs.take());
        tracing::debug!(placement = %placed.placement, "the conductor placed a request");
        if job.explain {
            outlet.placed(placed.placement.to_string()).await?;
        }
        let first_token = trail.first_token();
        let scene = Scene { serving, job, prompt: &prompt, phase, outlet, first_token };
        // Thirty kilobytes of it: on the heap, for as long as it runs.
        let began = Instant::now();
        match Box::pin(attempt::run(scene, placed)).await {
            Ok(ended) => {
                phase.set(Phase::Ended);
                return Ok(ended);
            }
            Err(Fault::Final(failure)) => return Err(failure),
            Err(Fault::Instance(fault)) => {
                let InstanceFault { instance, kind, phase, message } = &fault;
                let phase = phase.name();
                tracing::warn!(%instance, ?kind, phase, error = message, "an attempt to serve a request failed");
                trail.ended(&format!("failed while {phase}: {message}"), None);
                avoided.note(&fault, began.elapsed());
                last = Some(fault);
            }
        }
    }
    Err(last.map_or_else(Failure::vanished, |fault| exhausted(serving, &job.prompt, fault)))
}

async fn place(
    serving: &Serving,
    job: &Job,
    model: &ServedModel,
    prompt: &Prompt,
    avoided: &mut Avoided,
) -> Result<Placed, NotPlaced> {
    let place = |avoided: &Avoided| {
        serving.cluster.place(&PlaceQuery {
            model,
            keys: prompt.keys(),
            prompt_tokens: prompt.length(),
            max_tokens: job.sampling.max_tokens,
            objectives: job.objectives,
            exclude: &avoided.all(),
            may_route: !avoided.routes && !job.lies_together,
            is_endless: job.is_endless(),
            steering: job.steering.borrow(),
            chunks: prompt.chunks(),
        })
    };
    let mut placed = place(avoided);
    // Somebody who only said no may have done so for a peer's fault. It is tried again when there is
    // nobody else, and rather than to wait for others that have no time for it.
    let nobody = matches!(
        refusal_of(&placed),
        Some(Refusal::NoInstance { .. } | Refusal::Overloaded { .. } | Refusal::TooLarge { .. })
    );
    if nobody && !avoided.doubtful.is_empty() {
        avoided.doubtful.clear();
        placed = place(avoided);
    }
    let nobody =
        matches!(refusal_of(&placed), Some(Refusal::NoInstance { .. } | Refusal::TooLarge { .. }));
    if nobody && is_one_back(serving, avoided).await {
        avoided.broke_off.clear();
        placed = place(avoided);
    }
    placed
}

fn refusal_of(placed: &Result<Placed, NotPlaced>) -> Option<&Refusal> {
    placed.as_ref().err().map(|none| &none.refused.refusal)
}

/// Waits a moment for the node of one that broke off, if there is any, to be followed again.
async fn is_one_back(serving: &Serving, avoided: &Avoided) -> bool {
    if avoided.broke_off.is_empty() {
        return false;
    }
    let back = async {
        while !avoided.broke_off.iter().any(|instance| serving.cluster.is_followed(instance)) {
            sleep(BACK_POLL).await;
        }
    };
    timeout(BACK_WITHIN, back).await.is_ok()
}

/// A broken connection is made anew within a moment.
const BACK_WITHIN: Duration = Duration::from_secs(1);
const BACK_POLL: Duration = Duration::from_millis(10);
/// An attempt that takes longer than this to fail has waited for an answer that did not come, and
/// would wait as long once more.
const HUNG: Duration = Duration::from_secs(5);

/// Instances that failed this request.
#[derive(Debug, Default)]
struct Avoided {
    certain: Vec<InstanceId>,
    /// It was there and said no, so that its peer may be to blame: tried again when there is
    /// nobody else.
    doubtful: Vec<InstanceId>,
    /// It was lost before it could have hung, perhaps only its connection: tried once more when
    /// there is nobody else and it can be reached again.
    broke_off: Vec<InstanceId>,
    lost_before: Vec<InstanceId>,
    /// A holder could not be asked: the prefix is fetched or computed then.
    routes: bool,
}

impl Avoided {
    fn note(&mut self, fault: &InstanceFault, after: Duration) {
        let instance = &fault.instance;
        let list = match fault.kind {
            FaultKind::Lost if after < HUNG && !self.lost_before.contains(instance) => {
                self.lost_before.push(instance.clone());
                &mut self.broke_off
            }
            FaultKind::NoRoom | FaultKind::Lost | FaultKind::Draining => &mut self.certain,
            FaultKind::Refused => &mut self.doubtful,
            FaultKind::Unrouted => {
                self.routes = true;
                return;
            }
        };
        list.push(instance.clone());
    }

    fn all(&self) -> Vec<InstanceId> {
        let Avoided { certain, doubtful, broke_off, .. } = self;
        certain.iter().chain(doubtful).chain(broke_off).cloned().collect()
    }
}

/// When there is nobody else, what the last one said is what the client should know.
fn refused(
    serving: &Serving,
    prompt: &Prompt,
    refusal: Refusal,
    last: Option<&InstanceFault>,
) -> Failure {
    match (&refusal, last) {
        // Too large for any node without what was to stay elsewhere: it may well stay there next time.
        (Refusal::NoInstance { .. } | Refusal::TooLarge { .. }, Some(fault)) => {
            exhausted(serving, prompt, fault.clone())
        }
        _ => refusal.into(),
    }
}

fn exhausted(serving: &Serving, prompt: &Prompt, fault: InstanceFault) -> Failure {
    // What the call's status says is in the log: it is about connections and nodes.
    let InstanceFault { instance, kind, .. } = fault;
    let reason = match kind {
        FaultKind::NoRoom => format!("instance {instance} has no capacity for the request"),
        FaultKind::Lost => format!("instance {instance} does not answer"),
        FaultKind::Refused => format!("instance {instance} refused the request"),
        FaultKind::Draining => format!("instance {instance} is draining"),
        FaultKind::Unrouted => format!("instance {instance} cannot query a prefix on another node"),
    };
    match kind {
        FaultKind::NoRoom => Failure::no_room(&serving.cluster, &instance, prompt, reason),
        FaultKind::Lost | FaultKind::Refused | FaultKind::Draining | FaultKind::Unrouted => {
            Failure::NoInstance { reason }
        }
    }
}

/// A gauge that is one higher while this lives.
struct Counted(IntGauge);

impl Counted {
    fn new(gauge: &IntGauge) -> Counted {
        gauge.inc();
        Counted(gauge.clone())
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.dec();
    }
}
