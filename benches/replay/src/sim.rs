//! The replay itself: events of virtual time, in order. Requests are placed as they arrive, by
//! `kvasir_placement::place`; what happens then is this:
//!
//! - A fetch begins at once and takes the source's way out and the target's way in, each first
//!   come, first served.
//! - A node prefills one prompt at a time, first come, first served, and waits for the fetch of the
//!   one at its head. What it reuses is looked up again when it begins. Blocks are there for others
//!   when the prefill ends.
//! - While it prefills, its way out carries the prompt's cache to the decode side, which takes the
//!   sequence in when both have ended.
//!
//! The first token comes from the prefill.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::sync::Arc;

use kvasir_placement::{
    BookingId, ClusterView, IndexLimits, InstanceReport, ModelIndex, ModelSpec, NodeIndex,
    Objectives, PlaceRequest, Placement, Refusal, ReportedLoad, Role, Selection, ShadowIndex, Tier,
    place,
};
use kvasir_proto::{InstanceId, NodeId};

use crate::cluster::Cluster;
use crate::decode::{DecodeNode, Finished, Sequence};
use crate::model::{DecodeTime, PrefillTime};
use crate::node::PrefillNode;
use crate::summary::{Outcome, Summary};
use crate::trace::{Request, Trace, mix};

/// How a trace is replayed.
#[derive(Debug, Clone, Copy)]
pub struct Options {
    pub selection: Selection,
    pub objectives: Objectives,
    pub seed: u64,
}

impl Options {
    pub fn new(selection: Selection) -> Self {
        Options { selection, objectives: Objectives::NONE, seed: 1 }
    }
}

/// Why a replay cannot begin.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ReplayError {
    #[error("{nodes} nodes are more than one index holds")]
    TooManyNodes { nodes: u32 },
}

/// Replays a trace from its first arrival until the last answer has ended.
///
/// # Errors
/// [`ReplayError`] when the cluster is larger than a conductor can follow.
pub fn replay(trace: &Trace, cluster: &Cluster, options: Options) -> Result<Summary, ReplayError> {
    let mut replay = Replay::new(trace, cluster, options)?;
    replay.run();
    Ok(Summary::new(options.selection, trace, &replay.outcomes))
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    PrefillEnded { node: usize },
    Fetched { request: usize },
    Joins { request: usize },
    StepEnded { node: usize },
    Arrives { request: usize },
}

/// A request that was placed.
#[derive(Debug, Clone, Copy)]
struct Job {
    prefill: usize,
    decode: usize,
    fetched_blocks: usize,
    fetch_bytes: u64,
    fetch_us: u64,
    waits_for_fetch: bool,
    prefill_us: u64,
    reused_tokens: u32,
    pushed_us: u64,
    first_token_us: u64,
}

struct Replay<'a> {
    requests: &'a [Request],
    options: Options,
    block_tokens: u32,
    token_bytes: u64,
    bytes_per_us: f64,
    running_max: u32,
    prefill_time: PrefillTime,
    decode_time: DecodeTime,
    view: ClusterView,
    index: ShadowIndex,
    model: ModelIndex,
    prefills: Vec<PrefillNode>,
    decodes: Vec<DecodeNode>,
    events: BinaryHeap<Reverse<(u64, Event)>>,
    jobs: Vec<Option<Job>>,
    outcomes: Vec<Outcome>,
    now_us: u64,
}

/// A node with so much room that room decides nothing: queued prompts hold no memory here.
const ROOM: u32 = 1 << 30;

impl<'a> Replay<'a> {
    fn new(trace: &'a Trace, cluster: &Cluster, options: Options) -> Result<Self, ReplayError> {
        let (prefills, decodes) = (cluster.prefill_nodes, cluster.decode_nodes);
        let nodes = u32::from(prefills) + u32::from(decodes);
        let mut index = ShadowIndex::new(IndexLimits::default());
        let mut view = ClusterView::new(cluster.policy(options.selection), cluster.profile());
        for number in 0..nodes {
            let role = if number < prefills.into() { Role::Prefill } else { Role::Decode };
            let node = index.add_node().map_err(|_| ReplayError::TooManyNodes { nodes })?;
            view.report(report(cluster, node, role), 0);
        }
        let model = view.models().map(|(model, _)| model).next().unwrap_or(ModelIndex(0));
        let (slots, block_tokens) = (cluster.cache_blocks(), cluster.block_tokens);
        let arrivals = trace.requests.iter().enumerate();
        Ok(Replay {
            requests: &trace.requests,
            options,
            block_tokens,
            token_bytes: cluster.model.token_bytes,
            bytes_per_us: cluster.network.bytes_per_s / 1e6,
            running_max: cluster.decode.running_max,
            prefill_time: cluster.prefill_time(),
            decode_time: cluster.decode_time(),
            view,
            index,
            model,
            prefills: (0..prefills).map(|_| PrefillNode::new(slots, block_tokens)).collect(),
            decodes: (0..decodes).map(|_| DecodeNode::default()).collect(),
            events: arrivals
                .map(|(request, r)| Reverse((r.arrival_us, Event::Arrives { request })))
                .collect(),
            jobs: vec![None; trace.requests.len()],
            outcomes: vec![Outcome::default(); trace.requests.len()],
            now_us: 0,
        })
    }

    fn run(&mut self) {
        while let Some(Reverse((at_us, event))) = self.events.pop() {
            self.now_us = at_us;
            match event {
                Event::Arrives { request } => self.arrives(request),
                Event::Fetched { request } => self.fetched(request),
                Event::PrefillEnded { node } => self.prefill_ended(node),
                Event::Joins { request } => self.joins(request),
                Event::StepEnded { node } => self.step_ended(node),
            }
        }
    }

    fn at(&mut self, at_us: u64, event: Event) {
        self.events.push(Reverse((at_us, event)));
    }

    fn arrives(&mut self, request: usize) {
        match self.place(request) {
            Ok(placement) => self.placed(request, &placement),
            Err(_) => self.outcomes[request].rejected = true,
        }
    }

    fn place(&self, request: usize) -> Result<Placement, Refusal> {
        let Request { prompt_tokens, output_tokens, keys, .. } = &self.requests[request];
        let matched = self.index.match_prefix(keys);
        let wanted = PlaceRequest {
            model: self.model,
            prompt_tokens: *prompt_tokens,
            max_tokens: *output_tokens,
            objectives: self.options.objectives,
            exclude: &[],
            tie_seed: mix(self.options.seed ^ mix(request as u64)),
            now_us: self.now_us,
        };
        place(&self.view, &matched, &wanted)
    }

    fn placed(&mut self, request: usize, placement: &Placement) {
        let now_us = self.now_us;
        self.view.book(BookingId(request as u64), placement, now_us);
        self.outcomes[request].predicted_ttft_us = placement.predicted_ttft_us;
        let prefill = usize::from(placement.prefill().node.0);
        let mut job = Job {
            prefill,
            decode: usize::from(placement.decode().node.0) - self.prefills.len(),
            fetched_blocks: 0,
            fetch_bytes: 0,
            fetch_us: 0,
            waits_for_fetch: false,
            prefill_us: 0,
            reused_tokens: 0,
            pushed_us: 0,
            first_token_us: 0,
        };
        if let Some(fetch) = &placement.fetch {
            let source = usize::from(fetch.source.node.0);
            let takes_us = (fetch.bytes as f64 / self.bytes_per_us) as u64;
            let free_us = self.prefills[prefill].way_in.free_us;
            let (_, ends_us) = self.prefills[source].way_out.take(now_us.max(free_us), takes_us);
            self.prefills[prefill].way_in.free_us = ends_us;
            job.waits_for_fetch = true;
            job.fetched_blocks = fetch.until_block as usize;
            (job.fetch_bytes, job.fetch_us) = (fetch.bytes, takes_us);
            self.outcomes[request].fetched_bytes = fetch.bytes;
            self.at(ends_us, Event::Fetched { request });
        }
        self.jobs[request] = Some(job);
        self.prefills[prefill].queue.push_back(request);
        self.begin_prefill(prefill);
    }

    fn fetched(&mut self, request: usize) {
        let Some(job) = &mut self.jobs[request] else { return };
        job.waits_for_fetch = false;
        let (node, moved) = (job.prefill, (job.fetch_bytes, job.fetch_us));
        self.view.fetched(BookingId(request as u64), Some(moved));
        self.begin_prefill(node);
    }

    /// Begins the prefill at the head of the node's queue, if it can.
    fn begin_prefill(&mut self, node: usize) {
        let now_us = self.now_us;
        let place = &mut self.prefills[node];
        let Some(&request) = place.queue.front().filter(|_| !place.running) else { return };
        let Some(job) = self.jobs[request].as_mut().filter(|job| !job.waits_for_fetch) else {
            return;
        };
        place.running = true;
        let Request { prompt_tokens, keys, .. } = &self.requests[request];
        let hits = place.cache.held(keys).max(job.fetched_blocks);
        let reused = (hits as u64 * u64::from(self.block_tokens)).min(u64::from(prompt_tokens - 1));
        job.reused_tokens = reused as u32;
        job.prefill_us = self.prefill_time.us(*prompt_tokens, job.reused_tokens);
        let push_bytes = u64::from(*prompt_tokens) * self.token_bytes;
        let push_us = (push_bytes as f64 / self.bytes_per_us) as u64;
        job.pushed_us = place.way_out.take(now_us, push_us).1;
        let outcome = &mut self.outcomes[request];
        outcome.hit_blocks = hits as u32;
        outcome.prefill_us = job.prefill_us;
        let (ends_us, reused_tokens) = (now_us + job.prefill_us, job.reused_tokens);
        self.view.revise(BookingId(request as u64), reused_tokens);
        self.at(ends_us, Event::PrefillEnded { node });
    }

    fn prefill_ended(&mut self, node: usize) {
        let now_us = self.now_us;
        let place = &mut self.prefills[node];
        place.running = false;
        let Some(request) = place.queue.pop_front() else { return };
        place.cache.commit(now_us, &self.requests[request].keys);
        for change in place.cache.changes().chunk_by(|a, b| a.removed == b.removed) {
            let keys: Vec<_> = change.iter().map(|change| change.key).collect();
            match change[0].removed {
                true => self.index.remove(NodeIndex(node as u16), &keys),
                false => _ = self.index.insert(NodeIndex(node as u16), Tier::Dram, &keys),
            }
        }
        self.first_token(request);
        self.begin_prefill(node);
    }

    fn first_token(&mut self, request: usize) {
        let now_us = self.now_us;
        let Some(job) = &mut self.jobs[request] else { return };
        job.first_token_us = now_us;
        let Request { prompt_tokens, output_tokens, arrival_us, .. } = self.requests[request];
        let measured = (prompt_tokens - job.reused_tokens, job.prefill_us);
        let joins_us = job.pushed_us.max(now_us);
        self.outcomes[request].ttft_us = Some(now_us - arrival_us);
        self.view.prefilled(BookingId(request as u64), Some(measured), now_us);
        match output_tokens {
            1 => self.answered(request, None),
            _ => self.at(joins_us, Event::Joins { request }),
        }
    }

    fn joins(&mut self, request: usize) {
        let Some(job) = self.jobs[request] else { return };
        let Request { prompt_tokens, output_tokens, .. } = self.requests[request];
        let sequence = Sequence {
            request,
            context_tokens: prompt_tokens,
            tokens: output_tokens - 1,
            first_token_us: job.first_token_us,
        };
        let node = &mut self.decodes[job.decode];
        let ends_us = node.join(sequence, self.now_us, &self.decode_time, self.running_max);
        if let Some(ends_us) = ends_us {
            self.at(ends_us, Event::StepEnded { node: job.decode });
        }
    }

    fn step_ended(&mut self, node: usize) {
        let (finished, ends_us) =
            self.decodes[node].step_ended(self.now_us, &self.decode_time, self.running_max);
        if let Some(ends_us) = ends_us {
            self.at(ends_us, Event::StepEnded { node });
        }
        for finished in finished {
            self.answered(finished.request, Some(finished));
        }
    }

    fn answered(&mut self, request: usize, finished: Option<Finished>) {
        let id = BookingId(request as u64);
        if let Some(finished) = finished {
            self.outcomes[request].tbt_us = finished.tbt_us;
            self.view.stepped(id, finished.interval_us, self.now_us);
        }
        self.outcomes[request].ended_us = Some(self.now_us);
        self.view.unbook(id, Some(self.requests[request].output_tokens), self.now_us);
        self.jobs[request] = None;
    }
}

fn report(cluster: &Cluster, node: NodeIndex, role: Role) -> InstanceReport {
    let name = match role {
        Role::Prefill => format!("prefill-{:04}", node.0),
        Role::Decode | Role::Both => format!("decode-{:04}", node.0),
    };
    InstanceReport {
        instance_id: InstanceId::from(name.as_str()),
        node,
        node_id: NodeId::from(format!("node-{:04}", node.0).as_str()),
        attachment: (1, 1),
        role,
        model: ModelSpec {
            name: Arc::from(cluster.model.name.as_str()),
            fingerprint: [0; 32],
            kv_dtype: Arc::from("any"),
            vocab_size: 0,
            context_tokens: u32::MAX,
            block_tokens: cluster.block_tokens,
            block_bytes: cluster.block_bytes(),
            layout_hash: 0,
        },
        max_running: cluster.decode.running_max,
        slots_total: ROOM,
        slots_available: ROOM,
        draining: false,
        load: ReportedLoad::default(),
    }
}
