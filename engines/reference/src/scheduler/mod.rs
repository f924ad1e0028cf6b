//! Continuous batching. One scheduler lives as long as one attachment and is owned by the compute
//! thread. Its owner calls, in a loop: `accept` for each new job, `handle` for each message of the
//! node, `sweep`, then `step`; when `step` did nothing it may sleep for `wait_max`.
//!
//! It knows the node and the model only through [`crate::ports`]. When a method answers
//! [`PortLost`] the scheduler is of no more use than `fail_all`.
//!
//! - [`sequence`]: one request and its states
//! - [`plan`]: what a step computes
//! - [`step`]: a step from plan to tokens
//! - [`inbound`]: what the node says
//! - [`fill`]: how chunks get their places
//! - [`answer`], [`growth`], [`answer_blocks`], [`away`]: parts of a sequence

#![forbid(unsafe_code)]

pub(crate) mod answer;
pub(crate) mod answer_blocks;
pub(crate) mod away;
mod fill;
pub(crate) mod growth;
mod inbound;
pub(crate) mod plan;
pub(crate) mod sequence;
mod step;

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use kvasir_proto::v1::engine_to_node::Message;
use kvasir_proto::v1::generate_event::Event;
use kvasir_proto::{Namespace, Share, v1};
use tonic::{Code, Status};

use crate::admission::{Admission, Admitted};
use crate::events::EventSink;
use crate::layer_log::LayerLog;
use crate::metrics::Metrics;
use crate::ports::{CachePort, Clock, Compute, PortLost};
use crate::routes::{RoutedHoles, SpanRequest};
use crate::sampling::Sampler;
use crate::text::Vocabulary;
use answer::{Answer, AnswerOptions};
use answer_blocks::AnswerBlocks;
use away::{Away, Place};
use growth::Growth;
use sequence::{Leg, Sequence, State, Times};

/// Leases are renewed this often from the hand-over on: a good deal more often than they run out.
const ALIVE_EVERY_US: u64 = 250_000;
/// How long an engine that is busy may go on with a node that is gone.
const LOOK_EVERY_US: u64 = 100_000;
/// Leases run on, growth is tried again and the load is published while nothing runs.
const WAIT_WITH_SEQUENCES: Duration = Duration::from_millis(100);
const WAIT_FOR_ROOM: Duration = Duration::from_millis(10);
const WAIT_IDLE: Duration = Duration::from_secs(1);

/// A request as `crate::request` checked it.
#[derive(Debug)]
pub(crate) struct CheckedRequest {
    pub share: Share,
    pub leg: Leg,
    pub request_id: String,
    pub prompt: Vec<u32>,
    pub answer: AnswerOptions,
    /// Absent on a prefill leg.
    pub namespace: Option<Namespace>,
    /// By how much it counts as having come later, while nothing of it is computed.
    pub priority_delay_us: u64,
    /// What of the prompt's beginning is to be attended elsewhere; whole blocks before it are here.
    pub routed: Vec<SpanRequest>,
    /// Behind that, in order.
    pub chunks: Vec<ChunkRequest>,
}

/// Whole blocks of a prompt that are used as if they had been computed alone.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ChunkRequest {
    pub positions: Range<u32>,
    /// Who attends it where it lies; empty where nobody does.
    pub routed: Vec<SpanRequest>,
}

impl CheckedRequest {
    /// Of what is to be attended elsewhere, the spans of each part.
    pub(crate) fn take_routed(&mut self) -> Vec<Vec<SpanRequest>> {
        let chunks = self.chunks.iter_mut().map(|chunk| std::mem::take(&mut chunk.routed));
        let prefix = std::mem::take(&mut self.routed);
        [prefix].into_iter().chain(chunks).filter(|spans| !spans.is_empty()).collect()
    }

    /// Where the prompt is not computed in its place.
    pub(crate) fn places(&self, block_tokens: u32) -> Vec<Place> {
        let ends = self.routed.first().zip(self.routed.last());
        let prefix = ends.map(|(first, last)| {
            let end = (last.first_block + last.blocks) * block_tokens;
            Place { positions: first.first_block * block_tokens..end, moved: 0, elsewhere: true }
        });
        // A chunk lies where it was computed: alone, from position 0 on.
        let chunk = |chunk: &ChunkRequest| Place {
            positions: chunk.positions.clone(),
            moved: chunk.positions.start,
            elsewhere: !chunk.routed.is_empty(),
        };
        prefix.into_iter().chain(self.chunks.iter().map(chunk)).collect()
    }
}

/// A request that was taken in.
#[derive(Debug)]
pub(crate) struct Job {
    pub request: CheckedRequest,
    pub events: EventSink,
    pub admitted: Admitted,
    pub received_us: u64,
    /// What was to be attended elsewhere has led to.
    pub routed: Option<RoutedHoles>,
    /// What of the prompt is not computed in its place.
    pub places: Vec<Place>,
}

/// What the scheduler is told once.
#[derive(Debug, Clone)]
pub(crate) struct SchedulerOptions {
    pub prefill_chunk_tokens: u32,
    pub block_tokens: u32,
    pub running_requests_max: u32,
    pub grow_wait_us: u64,
    pub vocab: u32,
}

/// What outlives an attachment and is shared with the rest of the engine.
#[derive(Debug, Clone)]
pub(crate) struct Shared {
    pub vocabulary: Arc<Vocabulary>,
    pub admission: Arc<Admission>,
    pub metrics: Metrics,
    pub clock: Clock,
    pub layer_log: Option<Arc<LayerLog>>,
}

impl Shared {
    /// What the engine is doing while so many sequences have a seat.
    fn load(&self, running: u32) -> v1::InstanceLoad {
        v1::InstanceLoad {
            running_requests: running,
            waiting_requests: self.admission.requests().saturating_sub(running),
            waiting_prompt_tokens: self.admission.waiting_prompt_tokens(),
            computed_prompt_tokens: self.metrics.computed_prompt_tokens.get(),
        }
    }
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Scheduler<P, C> {
    options: SchedulerOptions,
    shared: Shared,
    port: P,
    compute: C,
    sampler: Sampler,
    /// By a serial that grows with each job.
    sequences: BTreeMap<u64, Sequence>,
    by_share: HashMap<Share, u64>,
    /// Shares whose sequence has ended before the node answered its bind.
    unanswered: BTreeSet<Share>,
    /// Those that can run, in the order in which they became able to. The first `running_requests_max` have
    /// a seat, so a running sequence is never displaced.
    runnable: Vec<u64>,
    serial: u64,
    /// Names look-ups at the node.
    lookups: u64,
    step: u32,
    alive_at_us: u64,
    look_at_us: u64,
}

/// How a sequence ends.
enum End {
    Finished(v1::Finished),
    Failed {
        status: Status,
        label: &'static str,
    },
    /// The caller is gone.
    Cancelled,
}

impl<P: CachePort, C: Compute> Scheduler<P, C> {
    pub(crate) fn new(options: SchedulerOptions, shared: Shared, port: P, compute: C) -> Self {
        Scheduler {
            options,
            shared,
            port,
            compute,
            sampler: Sampler::default(),
            sequences: BTreeMap::new(),
            by_share: HashMap::new(),
            unanswered: BTreeSet::new(),
            runnable: Vec::new(),
            serial: 0,
            lookups: 0,
            step: 0,
            alive_at_us: 0,
            look_at_us: 0,
        }
    }

    pub(crate) fn port(&mut self) -> &mut P {
        &mut self.port
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.sequences.is_empty()
    }

    /// Takes a job over and binds its share.
    ///
    /// # Errors
    /// [`PortLost`]; the job is among those that `fail_all` ends.
    pub(crate) fn accept(&mut self, job: Job) -> Result<(), PortLost> {
        let share = job.request.share;
        if self.by_share.contains_key(&share) || self.unanswered.contains(&share) {
            let status =
                Status::already_exists(format!("share {share} is already bound on this engine"));
            job.events.fail(status);
            return Ok(());
        }
        tracing::debug!(%share, request_id = job.request.request_id, "the engine received a request");
        let sequence = self.sequence_of(job);
        self.serial += 1;
        self.sequences.insert(self.serial, sequence);
        self.by_share.insert(share, self.serial);
        let bind = v1::Bind { tx: Some(share.tx.into()), side: share.side.to_wire() };
        self.port.send(Message::Bind(bind))
    }

    /// Ends what nobody wants any more, and what waited too long for room; renews leases.
    ///
    /// # Errors
    /// [`PortLost`]
    pub(crate) fn sweep(&mut self) -> Result<(), PortLost> {
        self.look_after_node()?;
        let gone = |(&id, sequence): (&u64, &Sequence)| sequence.events.is_closed().then_some(id);
        let cancelled: Vec<u64> = self.sequences.iter().filter_map(gone).collect();
        for id in cancelled {
            self.give_up(id, End::Cancelled)?;
        }
        self.give_up_on_room()?;
        self.renew_leases()
    }

    /// How long the owner may sleep after a step that did nothing.
    pub(crate) fn wait_max(&self) -> Duration {
        let short = |id: &u64| self.sequences[id].growth.short_since_us().is_some();
        if self.seated().any(|id| short(&id)) {
            WAIT_FOR_ROOM
        } else if self.is_empty() {
            WAIT_IDLE
        } else {
            WAIT_WITH_SEQUENCES
        }
    }

    /// Publishes what the engine is doing, to the node and as metrics.
    pub(crate) fn publish_load(&self) {
        let load = self.shared.load(self.seated().count() as u32);
        self.port.publish_load(&load);
        self.shared.metrics.running.set(load.running_requests.into());
        self.shared.metrics.waiting.set(load.waiting_requests.into());
    }

    /// Ends everything, because the node is lost or the engine stops. Shares are released if the
    /// node still listens.
    pub(crate) fn fail_all(&mut self, why: &str) {
        for id in self.sequences.keys().copied().collect::<Vec<_>>() {
            let status = Status::unavailable(why);
            // A lost node needs no release: it sees that the engine has gone.
            let _ = self.give_up(id, End::Failed { status, label: "failed" });
        }
    }

    fn sequence_of(&self, job: Job) -> Sequence {
        let Job { request, events, admitted, received_us, routed, places } = job;
        let prompt_tokens = request.prompt.len() as u32;
        let block_tokens = self.options.block_tokens;
        let blocks = |namespace| AnswerBlocks::new(namespace, prompt_tokens, block_tokens);
        Sequence {
            share: request.share,
            leg: request.leg,
            state: State::Binding,
            tokens: request.prompt,
            prompt_tokens,
            slots: Vec::new(),
            answer_blocks: request.namespace.filter(|_| places.is_empty()).map(blocks),
            namespace: request.namespace,
            away: Away::new(routed, places),
            answer: Answer::new(request.answer, Arc::clone(&self.shared.vocabulary)),
            first_token: None,
            growth: Growth::default(),
            events,
            admitted,
            times: Times { received_us, ..Times::default() },
            priority_delay_us: request.priority_delay_us,
            computed_prompt_tokens: 0,
            cached_tokens: 0,
            accepted: false,
            page_tokens: block_tokens,
        }
    }

    /// Sequences that may take part in steps.
    fn seated(&self) -> impl Iterator<Item = u64> + '_ {
        self.runnable.iter().copied().take(self.options.running_requests_max as usize)
    }

    /// When a sequence has waited too long for a slot, the youngest of those that wait is given up:
    /// its slots let the others go on.
    fn give_up_on_room(&mut self) -> Result<(), PortLost> {
        let now_us = self.shared.clock.now_us();
        let short_since = |id: u64| Some((id, self.sequences[&id].growth.short_since_us()?));
        let short: Vec<(u64, u64)> = self.seated().filter_map(short_since).collect();
        let too_long = |&(_, since): &(u64, u64)| now_us >= since + self.options.grow_wait_us;
        let Some(&(youngest, _)) = short.last().filter(|_| short.iter().any(too_long)) else {
            return Ok(());
        };
        let why = "the store node has no free slots for more generated tokens";
        let status = Status::resource_exhausted(why);
        self.end(youngest, End::Failed { status, label: "no_capacity" })?;
        for (id, _) in short {
            if let Some(sequence) = self.sequences.get_mut(&id) {
                sequence.growth.wait_anew(now_us);
            }
        }
        Ok(())
    }

    /// A thread that never sleeps would not hear that the node is gone.
    fn look_after_node(&mut self) -> Result<(), PortLost> {
        let now_us = self.shared.clock.now_us();
        if now_us < self.look_at_us {
            return Ok(());
        }
        self.look_at_us = now_us + LOOK_EVERY_US;
        if self.port.is_connected() {
            return Ok(());
        }
        Err(PortLost("it has closed the connection or detached this engine".into()))
    }

    fn renew_leases(&mut self) -> Result<(), PortLost> {
        let now_us = self.shared.clock.now_us();
        if now_us < self.alive_at_us {
            return Ok(());
        }
        self.alive_at_us = now_us + ALIVE_EVERY_US;
        let alive = alive_message(&self.sequences);
        if alive.shares.is_empty() { Ok(()) } else { self.port.send(Message::KeepAlive(alive)) }
    }

    /// Takes a sequence out, tells its caller how it ended and gives its share back.
    fn end(&mut self, id: u64, end: End) -> Result<(), PortLost> {
        let share = self.forget(id, end);
        self.port.send(release(share))
    }

    /// Ends a sequence by the engine's own will, in whatever state it is.
    fn give_up(&mut self, id: u64, end: End) -> Result<(), PortLost> {
        if self.sequences[&id].state != State::Binding {
            return self.end(id, end);
        }
        let share = self.forget(id, end);
        self.unanswered.insert(share);
        Ok(())
    }

    /// As `end`, for a share that is not this engine's to release.
    fn forget(&mut self, id: u64, end: End) -> Share {
        let sequence = self.sequences.remove(&id).expect("only sequences that are there end");
        self.by_share.remove(&sequence.share);
        self.runnable.retain(|&other| other != id);
        let share = sequence.share;
        let label = match end {
            End::Finished(finished) => {
                sequence.events.send(Event::Finished(finished));
                "finished"
            }
            End::Failed { status, label } => {
                tracing::info!(%share, reason = status.message(), "the engine failed a request");
                sequence.events.fail(status);
                label
            }
            End::Cancelled => "cancelled",
        };
        self.shared.metrics.sequences_ended.with_label_values(&[label]).inc();
        share
    }

    fn broken(&mut self, id: u64, why: String) -> Result<(), PortLost> {
        let share = self.sequences[&id].share;
        tracing::error!(%share, reason = why, "the store node sent an invalid message");
        let status = Status::new(Code::Internal, why);
        self.end(id, End::Failed { status, label: "failed" })
    }
}

fn release(share: Share) -> Message {
    Message::Release(v1::Release { tx: Some(share.tx.into()), side: share.side.to_wire() })
}

fn alive_message(sequences: &BTreeMap<u64, Sequence>) -> v1::KeepAlive {
    let reference = |sequence: &Sequence| v1::TxShare {
        tx: Some(sequence.share.tx.into()),
        side: sequence.share.side.to_wire(),
    };
    let renewed = sequences.values().filter(|sequence| sequence.renews_lease());
    v1::KeepAlive { shares: renewed.map(reference).collect() }
}
