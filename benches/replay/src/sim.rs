//! The replay itself: events of virtual time, in order. Requests are placed as they arrive, by
//! `kvasir_placement::place`; what happens then is this:
//!
//! - A fetch begins at once and takes the source's way out and the target's way in, each first
//!   come, first served.
//! - A node prefills one prompt at a time, the one of least rank first, which is the one that came
//!   first unless the policy says otherwise, and waits for that one's fetch. What it reuses is looked up again when it begins. Blocks are there for others
//!   when the prefill ends.
//! - While it prefills, its way out carries the prompt's cache to the decode side, which takes the
//!   sequence in when both have ended.
//!
//! The first token comes from the prefill.
//!
//! Where roles change, every node has both parts, and the one that its role does not need rests.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::sync::Arc;

use kvasir_blocks::BlockChange;
use kvasir_placement::{
    Admission, BookingId, ClusterView, IndexLimits, InstanceReport, ModelIndex, ModelSpec,
    NodeIndex, Objectives, PlaceRequest, Placement, Refusal, Refused, ReportedLoad, Role,
    Selection, ShadowIndex, SsdReads, Steering, Tier, place,
};
use kvasir_proto::{BlockKey, InstanceId, NodeId};

use crate::cluster::Cluster;
use crate::decode::{DecodeNode, Finished, Sequence};
use crate::link::Way;
use crate::model::{DecodeTime, PrefillTime};
use crate::node::{NodeCache, PrefillNode, Running};
use crate::roles::Changing;
use crate::summary::{Outcome, PrefillLoad, Summary};
use crate::trace::{Continuation, Request, Trace, mix};

/// How a trace is replayed.
#[derive(Debug, Clone, Copy)]
pub struct Options {
    pub selection: Selection,
    /// What requests must meet, to be let in and to count as effective.
    pub objectives: Objectives,
    /// All but [`Admission::Calibrated`] look again when a prefill has ended, as *Mooncake* has it.
    pub admission: Admission,
    pub seed: u64,
}

impl Options {
    pub fn new(selection: Selection) -> Self {
        Options {
            selection,
            objectives: Objectives::NONE,
            admission: Admission::default(),
            seed: 1,
        }
    }
}

/// Why a replay cannot begin.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ReplayError {
    #[error(
        "the cluster file has {nodes} nodes, more than one shadow index holds; lower `prefill_nodes` and `decode_nodes`"
    )]
    TooManyNodes { nodes: u32 },
}

/// What is asked of a cluster for one request of a trace, by its place in the trace.
pub(crate) fn wanted(
    model: ModelIndex,
    (at, request): (usize, &Request),
    options: &Options,
    now_us: u64,
) -> PlaceRequest<'static> {
    PlaceRequest {
        model,
        prompt_tokens: request.prompt_tokens,
        max_tokens: request.output_tokens,
        objectives: options.objectives,
        exclude: &[],
        tie_seed: mix(options.seed ^ mix(at as u64)),
        now_us,
        may_route: false,
        is_endless: false,
        steering: Steering::default(),
        chunks: &[],
    }
}

/// Replays a trace from its first arrival until the last answer has ended.
///
/// # Errors
/// [`ReplayError`] when the cluster is larger than a conductor can follow.
pub fn replay(trace: &Trace, cluster: &Cluster, options: Options) -> Result<Summary, ReplayError> {
    let mut replay = Replay::new(trace, cluster, options)?;
    replay.run();
    let load = replay.prefill_load();
    let mut summary = Summary::new(options, trace, &replay.outcomes, load);
    summary.roles = replay.changing.map(|changing| changing.told);
    Ok(summary)
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    PrefillEnded {
        node: usize,
    },
    ChunkEnded {
        node: usize,
    },
    Fetched {
        request: usize,
    },
    Joins {
        request: usize,
    },
    StepEnded {
        node: usize,
    },
    Arrives {
        request: usize,
    },
    /// At the loads.
    Looks,
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
    /// What is left of it, once it has begun.
    left_us: Option<u64>,
    reused_tokens: u32,
    /// What the decode side need not be sent.
    decode_holds_bytes: u64,
    pushed_us: u64,
    first_token_us: u64,
}

struct Replay<'a> {
    requests: &'a [Request],
    options: Options,
    block_tokens: u32,
    /// Of each request, what goes on where its answer ends.
    continued: Vec<Option<Continuation>>,
    token_bytes: u64,
    block_bytes: u64,
    bytes_per_us: f64,
    running_requests_max: u32,
    chunk_us: u64,
    shortest_prefill_first_factor: f64,
    prefill_time: PrefillTime,
    decode_time: DecodeTime,
    view: ClusterView,
    index: ShadowIndex,
    model: ModelIndex,
    prefills: Vec<PrefillNode>,
    decodes: Vec<DecodeNode>,
    /// What decode nodes keep of what was sent to them; empty when nobody asks.
    decode_caches: Vec<NodeCache>,
    decode_ways: Vec<Way>,
    /// The number of the first node that may decode.
    first_decode: usize,
    /// Absent where each node does one thing for ever.
    changing: Option<Changing>,
    events: BinaryHeap<Reverse<(u64, Event)>>,
    jobs: Vec<Option<Job>>,
    outcomes: Vec<Outcome>,
    /// Of all prefill nodes together, by the minute.
    busy_us: Vec<u64>,
    now_us: u64,
}

/// A node with so much room that room decides nothing: queued prompts hold no memory here.
const ROOM: u32 = 1 << 30;

const MINUTE_US: u64 = 60_000_000;

impl<'a> Replay<'a> {
    fn new(trace: &'a Trace, cluster: &Cluster, options: Options) -> Result<Self, ReplayError> {
        let (prefills, decodes) = (cluster.prefill_nodes, cluster.decode_nodes);
        let nodes = u32::from(prefills) + u32::from(decodes);
        let (index, members) = shadow_index(nodes)?;
        let mut view = ClusterView::new(
            cluster.policy(options.selection, options.admission),
            cluster.profile(),
        );
        for node in members {
            let role = if node.0 < prefills { Role::Prefill } else { Role::Decode };
            let mut report = report(cluster, node, role);
            if cluster.balance.is_some() {
                (report.role, report.current_role) = (Role::Both, Some(role));
            }
            view.report(report, 0);
        }
        let mut changing = cluster
            .balance
            .map(|file| Changing::new(&file, options.objectives, prefills.into(), decodes.into()));
        // What each kind of node is there for; where roles change all are there for both.
        let all = prefills + decodes;
        let first_decode = if changing.is_some() { 0 } else { prefills };
        let (prefills, decodes) = if changing.is_some() { (all, all) } else { (prefills, decodes) };
        let model = view.models().map(|(model, _)| model).next().unwrap_or(ModelIndex(0));
        let block_tokens = cluster.block_tokens;
        let slots = cluster.blocks_of(cluster.prefill.cache_tokens);
        let decode_slots = cluster.blocks_of(cluster.decode.cache_tokens);
        let keeps = options.selection == Selection::LeastCost && decode_slots > 0;
        let has_own_caches = keeps && changing.is_none();
        let first_look = |changing: &mut Changing| {
            let first = trace.requests.first()?;
            Some(Reverse((first.arrival_us + changing.next_in_us(), Event::Looks)))
        };
        let looks = changing.as_mut().and_then(first_look);
        let arrivals = trace.requests.iter().enumerate();
        Ok(Replay {
            requests: &trace.requests,
            continued: trace.continuations(cluster.block_tokens),
            options,
            block_tokens,
            token_bytes: cluster.model.token_bytes,
            block_bytes: cluster.block_bytes(),
            bytes_per_us: cluster.network.bytes_per_s / 1e6,
            running_requests_max: cluster.decode.running_requests_max,
            chunk_us: ((cluster.prefill.chunk_ms * 1e3) as u64).max(1),
            shortest_prefill_first_factor: cluster.policy.shortest_prefill_first_factor,
            prefill_time: cluster.prefill_time(),
            decode_time: cluster.decode_time(),
            view,
            index,
            model,
            prefills: (0..prefills)
                .map(|_| PrefillNode::new(slots, block_tokens, cluster.eviction_policy))
                .collect(),
            decodes: (0..decodes).map(|_| DecodeNode::default()).collect(),
            decode_caches: (0..if has_own_caches { decodes } else { 0 })
                .map(|_| NodeCache::new(decode_slots, block_tokens, cluster.eviction_policy))
                .collect(),
            decode_ways: vec![Way::default(); usize::from(decodes)],
            first_decode: first_decode.into(),
            changing,
            events: arrivals
                .map(|(request, r)| Reverse((r.arrival_us, Event::Arrives { request })))
                .chain(looks)
                .collect(),
            jobs: vec![None; trace.requests.len()],
            outcomes: vec![Outcome::default(); trace.requests.len()],
            busy_us: Vec::new(),
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
                Event::ChunkEnded { node } => self.chunk_ended(node),
                Event::Joins { request } => self.joins(request),
                Event::StepEnded { node } => self.step_ended(node),
                Event::Looks => self.look(),
            }
        }
    }

    /// As long as anything else is to come.
    fn look(&mut self) {
        let (since_us, now_us) = (self.began_us(), self.now_us);
        let Some(changing) = &mut self.changing else { return };
        changing.look(&mut self.view, since_us, now_us);
        let next_us = now_us + changing.next_in_us();
        if !self.events.is_empty() {
            self.at(next_us, Event::Looks);
        }
    }

    fn at(&mut self, at_us: u64, event: Event) {
        self.events.push(Reverse((at_us, event)));
    }

    fn arrives(&mut self, request: usize) {
        let decided = self.place(request);
        if let Some(changing) = &mut self.changing {
            let refused = decided.as_ref().err().and_then(|refused| match refused.refusal {
                Refusal::Overloaded { reason, .. } => Some(reason),
                _ => None,
            });
            changing.decided(self.model, refused);
        }
        match decided {
            Ok(placement) => self.placed(request, &placement),
            Err(_) => self.outcomes[request].refused = true,
        }
    }

    fn place(&self, request: usize) -> Result<Placement, Refused> {
        let matched = self.index.match_prefix(&self.requests[request].keys);
        let request = (request, &self.requests[request]);
        let wanted = wanted(self.model, request, &self.options, self.now_us);
        place(&self.view, &matched, &wanted)
    }

    fn placed(&mut self, request: usize, placement: &Placement) {
        let now_us = self.now_us;
        self.view.book(BookingId(request as u64), placement, now_us);
        self.outcomes[request].predicted_ttft_us = placement.predicted_ttft_us;
        self.outcomes[request].predicted_tbt_us = placement.predicted_tbt_us;
        self.outcomes[request].likely = placement.likely();
        let prefill = usize::from(placement.prefill().node.0);
        let mut job = Job {
            prefill,
            decode: usize::from(placement.decode().node.0) - self.first_decode,
            fetched_blocks: 0,
            fetch_bytes: 0,
            fetch_us: 0,
            waits_for_fetch: false,
            prefill_us: 0,
            left_us: None,
            reused_tokens: 0,
            decode_holds_bytes: u64::from(placement.decode().cached_blocks) * self.block_bytes,
            pushed_us: 0,
            first_token_us: 0,
        };
        if let Some(fetch) = &placement.fetch {
            let source = usize::from(fetch.source.node.0);
            let takes_us = (fetch.bytes as f64 / self.bytes_per_us) as u64;
            let free_us = self.prefills[prefill].way_in.free_us;
            let prefills = self.prefills.len();
            let way = match source < prefills {
                true => &mut self.prefills[source].way_out,
                false => &mut self.decode_ways[source - prefills],
            };
            let (_, ends_us) = way.take(now_us.max(free_us), takes_us);
            self.prefills[prefill].way_in.free_us = ends_us;
            job.waits_for_fetch = true;
            job.fetched_blocks = fetch.until_block as usize;
            (job.fetch_bytes, job.fetch_us) = (fetch.bytes, takes_us);
            self.outcomes[request].fetched_bytes = fetch.bytes;
            self.at(ends_us, Event::Fetched { request });
        }
        self.jobs[request] = Some(job);
        self.prefills[prefill].queue.insert((placement.rank_us, request));
        self.begin_prefill(prefill);
    }

    fn fetched(&mut self, request: usize) {
        let Some(job) = &mut self.jobs[request] else { return };
        job.waits_for_fetch = false;
        let (node, moved) = (job.prefill, (job.fetch_bytes, job.fetch_us));
        self.view.fetched(BookingId(request as u64), Some(moved));
        self.begin_prefill(node);
    }

    /// Begins the prefill of least rank, if the node is free and its blocks are there.
    fn begin_prefill(&mut self, node: usize) {
        let now_us = self.now_us;
        let place = &mut self.prefills[node];
        let Some(&(rank_us, request)) = place.queue.first() else { return };
        let Some(job) = self.jobs[request].as_mut().filter(|job| !job.waits_for_fetch) else {
            return;
        };
        if let Some(running) = &place.running {
            if rank_us < running.rank_at(now_us, self.shortest_prefill_first_factor)
                && let Some(at_us) = running.chunk_ends_us(now_us, self.chunk_us)
            {
                self.events.push(Reverse((at_us, Event::ChunkEnded { node })));
            }
            return;
        }
        place.queue.remove(&(rank_us, request));
        let first_time = job.left_us.is_none();
        if first_time {
            let Request { prompt_tokens, keys, .. } = &self.requests[request];
            let hits = place.cache.held(keys).max(job.fetched_blocks);
            let reused = hits as u64 * u64::from(self.block_tokens);
            job.reused_tokens = reused.min(u64::from(prompt_tokens - 1)) as u32;
            job.prefill_us = self.prefill_time.us(*prompt_tokens, job.reused_tokens);
            let prompt_bytes = u64::from(*prompt_tokens) * self.token_bytes;
            let push_bytes = prompt_bytes.saturating_sub(job.decode_holds_bytes);
            let push_us = (push_bytes as f64 / self.bytes_per_us) as u64;
            job.pushed_us = place.way_out.take(now_us, push_us).1;
            let outcome = &mut self.outcomes[request];
            outcome.hit_blocks = hits as u32;
            outcome.prefill_us = job.prefill_us;
        }
        let is_shared = self.changing.is_some() && self.decodes[node].is_busy();
        if first_time && is_shared {
            job.prefill_us *= 2;
        }
        let left_us = job.left_us.unwrap_or(job.prefill_us);
        job.left_us = Some(left_us);
        let (began_us, ends_us) = (now_us, now_us + left_us);
        place.running = Some(Running { request, rank_us, began_us, ends_us });
        let reused_tokens = job.reused_tokens;
        if first_time {
            self.view.revise(BookingId(request as u64), reused_tokens);
        }
        self.at(ends_us, Event::PrefillEnded { node });
    }

    /// Stops a prefill for one of less rank, if such a one waits still.
    fn chunk_ended(&mut self, node: usize) {
        let (now_us, stretch) = (self.now_us, self.shortest_prefill_first_factor);
        let place = &mut self.prefills[node];
        let Some(running) = place.running.filter(|running| running.ends_us > now_us) else {
            return;
        };
        let rank_us = running.rank_at(now_us, stretch);
        let passes = |&(waits_us, waits): &(u64, usize)| {
            waits_us < rank_us && self.jobs[waits].is_some_and(|job| !job.waits_for_fetch)
        };
        if place.queue.first().is_some_and(passes) {
            if let Some(job) = &mut self.jobs[running.request] {
                job.left_us = Some(running.ends_us - now_us);
            }
            place.running = None;
            place.queue.insert((rank_us, running.request));
            self.was_busy(running.began_us, now_us);
            self.begin_prefill(node);
        }
    }

    /// Of the minutes in which arrivals neither begin nor end.
    fn prefill_load(&self) -> PrefillLoad {
        let last = self.requests.last().map_or(0, |last| last.arrival_us - self.began_us());
        let minutes = (last / MINUTE_US) as usize;
        let whole = self.busy_us.get(1..minutes).unwrap_or_default();
        PrefillLoad::new(whole, self.prefills.len(), MINUTE_US)
    }

    fn began_us(&self) -> u64 {
        self.requests.first().map_or(0, |first| first.arrival_us)
    }

    /// A node has prefilled from then to then.
    fn was_busy(&mut self, from_us: u64, until_us: u64) {
        let mut at_us = from_us - self.began_us();
        let until_us = until_us - self.began_us();
        while at_us < until_us {
            let minute = (at_us / MINUTE_US) as usize;
            let end_us = until_us.min((at_us / MINUTE_US + 1) * MINUTE_US);
            if self.busy_us.len() <= minute {
                self.busy_us.resize(minute + 1, 0);
            }
            self.busy_us[minute] += end_us - at_us;
            at_us = end_us;
        }
    }

    fn prefill_ended(&mut self, node: usize) {
        let now_us = self.now_us;
        let place = &mut self.prefills[node];
        // One that was stopped ends at another time.
        let Some(running) = place.running.filter(|running| running.ends_us == now_us) else {
            return;
        };
        let request = running.request;
        if self.jobs[request].is_none() {
            return;
        }
        place.running = None;
        self.was_busy(running.began_us, now_us);
        let place = &mut self.prefills[node];
        let Request { prompt_tokens, keys, .. } = &self.requests[request];
        let kept = match self.options.selection {
            // A partial last block cannot be told from others by what comes after it.
            Selection::LeastCost => (prompt_tokens / self.block_tokens) as usize,
            _ => keys.len(),
        };
        place.cache.commit(now_us, &keys[..kept]);
        let changes = place.cache.changes();
        self.apply(node, &changes);
        self.first_token(request);
        self.begin_prefill(node);
    }

    /// What the node tells its conductors.
    fn apply(&mut self, node: usize, changes: &[BlockChange]) {
        let node = NodeIndex(node as u16);
        for run in changes.chunk_by(|a, b| a.removed == b.removed) {
            let keys: Vec<_> = run.iter().map(|change| change.key).collect();
            match run[0].removed {
                true => self.index.remove(node, &keys),
                false => _ = self.index.insert(node, Tier::Dram, &keys),
            }
        }
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

    /// Whether the decode side takes it, where one looks when its prefill has ended.
    fn is_taken(&mut self, request: usize) -> bool {
        if self.options.admission == Admission::Calibrated {
            return true;
        }
        let id = BookingId(request as u64);
        let tbt_us = self.view.look_again(id, self.now_us).unwrap_or(0);
        self.outcomes[request].predicted_tbt_us = tbt_us;
        let taken = tbt_us <= self.options.objectives.tbt_us;
        if !taken {
            self.outcomes[request].dropped = true;
            self.view.unbook(id, None, self.now_us);
            self.jobs[request] = None;
        }
        taken
    }

    fn joins(&mut self, request: usize) {
        if !self.is_taken(request) {
            return;
        }
        let Some(job) = self.jobs[request] else { return };
        let Request { prompt_tokens, output_tokens, .. } = self.requests[request];
        let sequence = Sequence {
            request,
            context_tokens: prompt_tokens,
            tokens: output_tokens - 1,
            first_token_us: job.first_token_us,
        };
        let blocks = (prompt_tokens / self.block_tokens) as usize;
        self.keep_where_decoded(job.decode, &self.requests[request].keys[..blocks]);
        let time = self.decode_time_of(job.decode);
        let node = &mut self.decodes[job.decode];
        let ends_us = node.join(sequence, self.now_us, &time, self.running_requests_max);
        if let Some(ends_us) = ends_us {
            self.at(ends_us, Event::StepEnded { node: job.decode });
        }
    }

    /// The node that decodes keeps them, where others look for them.
    fn keep_where_decoded(&mut self, decode: usize, keys: &[BlockKey]) {
        let cache = match self.changing {
            Some(_) => self.prefills.get_mut(decode).map(|node| &mut node.cache),
            None => self.decode_caches.get_mut(decode),
        };
        if let Some(cache) = cache.filter(|_| self.options.selection == Selection::LeastCost) {
            cache.commit(self.now_us, keys);
            let changes = cache.changes();
            self.apply(self.first_decode + decode, &changes);
        }
    }

    /// How long a step takes there that begins now.
    fn decode_time_of(&self, node: usize) -> DecodeTime {
        let is_shared = self.changing.is_some() && self.prefills[node].running.is_some();
        if is_shared { self.decode_time.slower(2.0) } else { self.decode_time }
    }

    fn step_ended(&mut self, node: usize) {
        let time = self.decode_time_of(node);
        let (finished, ends_us) =
            self.decodes[node].step_ended(self.now_us, &time, self.running_requests_max);
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
            self.view.paced(id, finished.tbt_us, self.now_us);
        }
        // Blocks that the answer completes are there for the prompt that goes on with it.
        if let (Some(job), Some(next)) = (self.jobs[request], self.continued[request]) {
            self.keep_where_decoded(job.decode, &self.requests[next.request].keys[..next.blocks]);
        }
        self.outcomes[request].ended_us = Some(self.now_us);
        self.view.unbook(id, Some(self.requests[request].output_tokens), self.now_us);
        self.jobs[request] = None;
    }
}

/// An index of so many nodes.
pub(crate) fn shadow_index(nodes: u32) -> Result<(ShadowIndex, Vec<NodeIndex>), ReplayError> {
    let mut index = ShadowIndex::new(IndexLimits::default());
    let added: Result<Vec<_>, _> = (0..nodes).map(|_| index.add_node()).collect();
    Ok((index, added.map_err(|_| ReplayError::TooManyNodes { nodes })?))
}

pub(crate) fn report(cluster: &Cluster, node: NodeIndex, role: Role) -> InstanceReport {
    let name = match role {
        Role::Prefill => format!("prefill-{:04}", node.0),
        Role::Decode | Role::Both => format!("decode-{:04}", node.0),
    };
    InstanceReport {
        instance_id: InstanceId::from(name.as_str()),
        instance_type: "".into(),
        node,
        node_id: NodeId::from(format!("node-{:04}", node.0).as_str()),
        attachment: (1, 1),
        role,
        current_role: None,
        model: ModelSpec {
            name: Arc::from(cluster.model.name.as_str()),
            fingerprint: [0; 32],
            kv_dtype: Arc::from("any"),
            vocab_size: 0,
            context_tokens: u32::MAX,
            block_tokens: cluster.block_tokens,
            block_bytes: cluster.block_bytes(),
            layout_hash: 0,
            routed: None,
        },
        running_requests_max: cluster.decode.running_requests_max,
        slots_total: ROOM,
        slots_available: ROOM,
        ssd_reads: SsdReads::default(),
        draining: false,
        load: ReportedLoad::default(),
    }
}
