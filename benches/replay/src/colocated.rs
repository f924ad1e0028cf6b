//! The cluster without disaggregation, to compare with: every node prefills and decodes what it
//! prefilled, with a cache of its own, and nothing is fetched. `kvasir_placement::place` sees instances
//! that do both.
//!
//! A node does one step at a time, and all that it decodes take part in it:
//!
//! - With whole prompts, a step is the prefill of the prompt that came first, for which all others wait,
//!   or, when none waits, a step of decoding.
//! - With chunked prefill, a step decodes and computes up to so many tokens, less those that it decodes,
//!   of the prompt that came first.
//!
//! A sequence that has been prefilled stays where it is and joins without a stall. A request is refused
//! when its first token is predicted too late; for the time between tokens none is, and a step as long as a
//! prompt is in no model that could.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};

use kvasir_placement::{
    Admission, BookingId, ClusterView, NodeIndex, Role, ShadowIndex, Tier, place,
};

use serde::Serialize;

use crate::cluster::Cluster;
use crate::model::{DecodeTime, PrefillTime};
use crate::node::NodeCache;
use crate::sim::{Options, ReplayError, report, shadow_index, wanted};
use crate::summary::{Outcome, PrefillLoad, Summary};
use crate::trace::{Request, Trace};

/// How a node that does both prefills.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Chunks {
    /// One prompt after another, each in one step.
    Whole,
    /// So many tokens in each step, those that it decodes included.
    Tokens(u32),
}

/// Replays a trace over nodes that do both, as many as the cluster has in all.
///
/// # Errors
/// [`ReplayError`] when the cluster is larger than a conductor can follow.
pub fn replay(
    trace: &Trace,
    cluster: &Cluster,
    chunks: Chunks,
    options: Options,
) -> Result<Summary, ReplayError> {
    let options = Options { admission: Admission::Late, ..options };
    let mut replay = Replay::new(trace, cluster, chunks, options)?;
    replay.run();
    let summary = Summary::new(options, trace, &replay.outcomes, PrefillLoad::default());
    Ok(Summary { colocated: Some(chunks), ..summary })
}

/// A prompt that is being computed.
#[derive(Debug, Clone, Copy)]
struct Prefill {
    request: usize,
    /// Of the prompt, those that are there already: reused ones at first.
    done_tokens: u32,
    reused_tokens: u32,
}

/// A sequence that is decoded.
#[derive(Debug, Clone)]
struct Sequence {
    request: usize,
    last_token_us: u64,
    intervals_us: Vec<u32>,
}

#[derive(Debug)]
struct Node {
    cache: NodeCache,
    waiting: VecDeque<usize>,
    prefill: Option<Prefill>,
    /// Tokens of the prompt that this step computes.
    chunk_tokens: u32,
    /// Whether this step decodes.
    decodes: bool,
    running: Vec<Sequence>,
    stepping: bool,
}

struct Replay<'a> {
    requests: &'a [Request],
    options: Options,
    chunks: Chunks,
    block_tokens: u32,
    running_requests_max: usize,
    prefill_time: PrefillTime,
    decode_time: DecodeTime,
    view: ClusterView,
    index: ShadowIndex,
    nodes: Vec<Node>,
    /// (when, arrivals after steps, which).
    events: BinaryHeap<Reverse<(u64, bool, usize)>>,
    outcomes: Vec<Outcome>,
    now_us: u64,
}

impl<'a> Replay<'a> {
    fn new(
        trace: &'a Trace,
        cluster: &Cluster,
        chunks: Chunks,
        options: Options,
    ) -> Result<Self, ReplayError> {
        let nodes = u32::from(cluster.prefill_nodes) + u32::from(cluster.decode_nodes);
        let policy = cluster.policy(options.selection, options.admission);
        let mut view = ClusterView::new(policy, cluster.profile());
        let (index, members) = shadow_index(nodes)?;
        for node in members {
            view.report(report(cluster, node, Role::Both), 0);
        }
        let slots = cluster.blocks_of(cluster.prefill.cache_tokens).max(1);
        let node = |_| Node {
            cache: NodeCache::new(slots, cluster.block_tokens, cluster.eviction_policy),
            waiting: VecDeque::new(),
            prefill: None,
            chunk_tokens: 0,
            decodes: false,
            running: Vec::new(),
            stepping: false,
        };
        let arrivals = trace.requests.iter().enumerate();
        Ok(Replay {
            requests: &trace.requests,
            options,
            chunks,
            block_tokens: cluster.block_tokens,
            running_requests_max: cluster.decode.running_requests_max as usize,
            prefill_time: cluster.prefill_time(),
            decode_time: DecodeTime { join_us: 0.0, ..cluster.decode_time() },
            view,
            index,
            nodes: (0..nodes).map(node).collect(),
            events: arrivals.map(|(at, r)| Reverse((r.arrival_us, true, at))).collect(),
            outcomes: vec![Outcome::default(); trace.requests.len()],
            now_us: 0,
        })
    }

    fn run(&mut self) {
        while let Some(Reverse((at_us, arrives, which))) = self.events.pop() {
            self.now_us = at_us;
            match arrives {
                true => self.arrives(which),
                false => self.step_ended(which),
            }
        }
    }

    fn arrives(&mut self, request: usize) {
        let matched = self.index.match_prefix(&self.requests[request].keys);
        let Some(model) = self.view.models().map(|(model, _)| model).next() else { return };
        let wanted = wanted(model, (request, &self.requests[request]), &self.options, self.now_us);
        let Ok(placement) = place(&self.view, &matched, &wanted) else {
            self.outcomes[request].refused = true;
            return;
        };
        self.view.book(BookingId(request as u64), &placement, self.now_us);
        self.outcomes[request].predicted_ttft_us = placement.predicted_ttft_us;
        self.outcomes[request].predicted_tbt_us = placement.predicted_tbt_us;
        let node = usize::from(placement.prefill().node.0);
        self.nodes[node].waiting.push_back(request);
        if !self.nodes[node].stepping {
            self.begin_step(node);
        }
    }

    fn begin_step(&mut self, at: usize) {
        let node = &mut self.nodes[at];
        if node.prefill.is_none() && node.running.len() < self.running_requests_max {
            node.prefill = node.waiting.pop_front().map(|request| {
                let Request { prompt_tokens, keys, .. } = &self.requests[request];
                let hits = node.cache.held(keys);
                let reused = hits as u64 * u64::from(self.block_tokens);
                let reused_tokens = reused.min(u64::from(prompt_tokens - 1)) as u32;
                self.outcomes[request].hit_blocks = hits as u32;
                Prefill { request, done_tokens: reused_tokens, reused_tokens }
            });
        }
        let running = node.running.len() as u32;
        let left_tokens =
            node.prefill.map_or(0, |p| self.requests[p.request].prompt_tokens - p.done_tokens);
        node.chunk_tokens = match self.chunks {
            Chunks::Whole => left_tokens,
            Chunks::Tokens(tokens) => left_tokens.min(tokens.saturating_sub(running).max(1)),
        };
        node.decodes = running > 0 && (self.chunks != Chunks::Whole || left_tokens == 0);
        node.stepping = node.decodes || node.chunk_tokens > 0;
        if node.stepping {
            let (takes_us, prefill_us) = self.step_us(at);
            if let Some(prefill) = self.nodes[at].prefill {
                self.outcomes[prefill.request].prefill_us += prefill_us;
            }
            self.events.push(Reverse((self.now_us + takes_us.max(1), false, at)));
        }
    }

    /// How long the step takes, and how much of that the prompt in it.
    fn step_us(&self, at: usize) -> (u64, u64) {
        let node = &self.nodes[at];
        let PrefillTime { token_us, pair_us, reused_us, .. } = self.prefill_time;
        if !node.decodes {
            let prefill = node.prefill.map_or(0, |p| {
                let Request { prompt_tokens, .. } = self.requests[p.request];
                match self.chunks {
                    Chunks::Whole => self.prefill_time.us(prompt_tokens, p.reused_tokens),
                    Chunks::Tokens(_) => 0,
                }
            });
            if prefill > 0 {
                return (prefill, prefill);
            }
        }
        let DecodeTime { base_us, weights_us, sequence_us, context_us, .. } = self.decode_time;
        let running = node.running.len() as f64;
        let context: u64 = node
            .running
            .iter()
            .map(|s| {
                u64::from(self.requests[s.request].prompt_tokens) + s.intervals_us.len() as u64
            })
            .sum();
        let (mut computing_us, mut loading_us) = (0.0, 0.0);
        if let Some(prefill) = node.prefill {
            let (n, p) = (f64::from(node.chunk_tokens), f64::from(prefill.done_tokens));
            computing_us = token_us * n + pair_us * n * (2.0 * p + n);
            // What is before the chunk is attended by it, and what is reused comes from the node's
            // memory once.
            loading_us = context_us * p;
            if prefill.done_tokens == prefill.reused_tokens {
                computing_us = computing_us.max(reused_us * p);
            }
        }
        let decoding_us = sequence_us * running;
        let step_us = base_us
            + weights_us.max(decoding_us + computing_us)
            + context_us * context as f64
            + loading_us;
        let alone_us = base_us + weights_us.max(decoding_us) + context_us * context as f64;
        (step_us as u64, (step_us - if running > 0.0 { alone_us } else { 0.0 }) as u64)
    }

    fn step_ended(&mut self, at: usize) {
        self.nodes[at].stepping = false;
        if self.nodes[at].decodes {
            self.decoded(at);
        }
        let node = &mut self.nodes[at];
        if let Some(prefill) = &mut node.prefill {
            prefill.done_tokens += node.chunk_tokens;
            if prefill.done_tokens >= self.requests[prefill.request].prompt_tokens {
                let request = prefill.request;
                node.prefill = None;
                self.prefilled(at, request);
            }
        }
        self.begin_step(at);
    }

    /// Each sequence has a token more.
    fn decoded(&mut self, at: usize) {
        let now_us = self.now_us;
        let mut finished = Vec::new();
        self.nodes[at].running.retain_mut(|sequence| {
            let interval_us = now_us - sequence.last_token_us;
            sequence.intervals_us.push(u32::try_from(interval_us).unwrap_or(u32::MAX));
            sequence.last_token_us = now_us;
            let ends = sequence.intervals_us.len() as u32 + 1
                >= self.requests[sequence.request].output_tokens;
            if ends {
                finished.push((sequence.request, std::mem::take(&mut sequence.intervals_us)));
            }
            !ends
        });
        for (request, intervals_us) in finished {
            self.answered(request, intervals_us);
        }
    }

    fn prefilled(&mut self, at: usize, request: usize) {
        let now_us = self.now_us;
        let Request { arrival_us, output_tokens, keys, .. } = &self.requests[request];
        let cache = &mut self.nodes[at].cache;
        cache.commit(now_us, keys);
        let node = NodeIndex(at as u16);
        for change in cache.changes().chunk_by(|a, b| a.removed == b.removed) {
            let keys: Vec<_> = change.iter().map(|change| change.key).collect();
            match change[0].removed {
                true => self.index.remove(node, &keys),
                false => _ = self.index.insert(node, Tier::Dram, &keys),
            }
        }
        self.outcomes[request].ttft_us = Some(now_us - arrival_us);
        self.view.prefilled(BookingId(request as u64), None, now_us);
        match output_tokens {
            1 => self.answered(request, Vec::new()),
            _ => self.nodes[at].running.push(Sequence {
                request,
                last_token_us: now_us,
                intervals_us: Vec::new(),
            }),
        }
    }

    fn answered(&mut self, request: usize, mut intervals_us: Vec<u32>) {
        if !intervals_us.is_empty() {
            let longest = intervals_us.len().div_ceil(10);
            let at = intervals_us.len() - longest;
            intervals_us.select_nth_unstable(at);
            let sum: u64 = intervals_us[at..].iter().map(|us| u64::from(*us)).sum();
            self.outcomes[request].tbt_us = sum / longest as u64;
        }
        self.outcomes[request].ended_us = Some(self.now_us);
        let tokens = self.requests[request].output_tokens;
        self.view.unbook(BookingId(request as u64), Some(tokens), self.now_us);
    }
}
