//! [`Cluster`]: what the rest of the conductor asks. A cheap clone; all methods return at once.
//!
//! A placed request comes with its [`Booking`]: from then on its work counts in every later
//! decision, until it is dropped.

use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;
use kvasir_placement::{
    AskedChunk, ChunkUse, Fetch, Inputs, InstanceProfile, ModelIndex, ModelSpec, Objectives,
    PlaceRequest, PlacedChunk, Placement, Policy, PrefixMatch, Profile, Refusal, Refused,
    RoutePart, Steering,
};
use kvasir_proto::v1::engine_client::EngineClient;
use kvasir_proto::v1::store_node_client::StoreNodeClient;
use kvasir_proto::{BlockKey, Incarnation, InstanceId, Namespace, NodeId, keys};
use prometheus::Registry;
use tokio_util::sync::CancellationToken;
use tonic::transport::Channel;

use super::balance::{self, BalanceOptions};
use super::booking::{Booking, Predicted};
use super::follow;
use super::metrics::Metrics;
use super::state::{Failed, Shared, State};

/// How the cluster is followed.
#[derive(Debug, Clone)]
pub struct Options {
    /// Store nodes, as "host:port".
    pub nodes: Vec<String>,
    pub policy: Policy,
    /// What costs are taken to be until they are measured.
    pub profile: Profile,
    /// The same for instances of these types.
    pub profiles: Vec<(String, InstanceProfile)>,
    /// Different block keys in the index, at most; about 27 bytes each.
    pub index_blocks_max: usize,
    /// Between attempts to reach a node, growing from the least to the most.
    pub reconnect_ms_min: u64,
    pub reconnect_ms_max: u64,
    pub connect_timeout_ms: u64,
    /// A node that says nothing for this long is lost. Nodes speak at least once a second.
    pub silence_ms_max: u64,
    /// A node whose connection broke is forgotten when it is not followed again for this long.
    pub lost_keep_ms: u64,
    /// A failed instance is avoided for at least this long, then until its next status; for twice
    /// as long each time that it fails again before it has served anything, up to the most. Its
    /// node reports for an engine that hangs, too.
    pub failed_avoid_ms: u64,
    pub failed_avoid_ms_max: u64,
    /// Decisions come with what they were taken from.
    pub captures_inputs: bool,
    /// How many instances prefill and how many decode; nothing is done about it without.
    pub balance: Option<BalanceOptions>,
}

impl Default for Options {
    fn default() -> Self {
        Options {
            nodes: Vec::new(),
            policy: Policy::default(),
            profile: Profile::default(),
            profiles: Vec::new(),
            index_blocks_max: 16 << 20,
            reconnect_ms_min: 50,
            reconnect_ms_max: 2_000,
            connect_timeout_ms: 2_000,
            silence_ms_max: 5_000,
            lost_keep_ms: 1_000,
            failed_avoid_ms: 250,
            failed_avoid_ms_max: 30_000,
            captures_inputs: false,
            balance: None,
        }
    }
}

/// Why a cluster cannot be followed as configured.
#[derive(Debug, thiserror::Error)]
pub enum ClusterError {
    #[error("`{address}` is not the address of a store node; use \"host:port\"")]
    Address { address: String, source: tonic::transport::Error },
    #[error("the store node `{address}` is listed twice; list each node once")]
    Twice { address: String },
    #[error("{nodes} store nodes are listed; the maximum is {nodes_max}")]
    TooMany { nodes: usize, nodes_max: usize },
    #[error("cannot register the metrics of the cluster")]
    Metrics(#[from] prometheus::Error),
}

/// A model that is or was served, as its instances describe it.
#[derive(Debug, Clone)]
pub struct ServedModel {
    pub name: Arc<str>,
    /// BLAKE3 over configuration and weights.
    pub fingerprint: [u8; 32],
    pub kv_dtype: Arc<str>,
    pub vocab_size: u32,
    /// The longest prompt plus answer, in tokens.
    pub context_tokens: u32,
    pub block_tokens: u32,
    /// Instances for prefill and for decode are attached.
    pub ready: bool,
    pub(super) index: ModelIndex,
}

impl ServedModel {
    /// The root of the key chains of this model, of one tenant or of a salt within its.
    pub fn namespace(&self, salt: &str) -> Namespace {
        keys::namespace(&self.fingerprint, &self.kv_dtype, salt, "")
    }

    fn new(index: ModelIndex, spec: &ModelSpec, ready: bool) -> Self {
        ServedModel {
            name: spec.name.clone(),
            fingerprint: spec.fingerprint,
            kv_dtype: spec.kv_dtype.clone(),
            vocab_size: spec.vocab_size,
            context_tokens: spec.context_tokens,
            block_tokens: spec.block_tokens,
            ready,
            index,
        }
    }
}

/// A request, as far as its place depends on it.
#[derive(Debug, Clone)]
pub struct PlaceQuery<'a> {
    pub model: &'a ServedModel,
    /// The keys of the prompt's full blocks.
    pub keys: &'a [BlockKey],
    pub prompt_tokens: u32,
    pub max_tokens: u32,
    pub objectives: Objectives,
    /// Instances that failed this request already.
    pub exclude: &'a [InstanceId],
    /// Its prefix may stay on another node, where that is on.
    pub may_route: bool,
    /// It will have `max_tokens` and not fewer.
    pub is_endless: bool,
    pub steering: Steering<'a>,
    /// Parts of the prompt that are used as if each stood alone; `keys` are those of other prompts only before
    /// the first of them.
    pub chunks: &'a [QueriedChunk],
}

/// Whole blocks of a prompt, with the keys that they have as a prompt alone.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct QueriedChunk {
    pub first_position: u32,
    pub keys: Arc<[BlockKey]>,
}

/// A placed request: whom to call. What is in the handles may be stale by the time of the call.
#[derive(Debug)]
pub struct Placed {
    /// The decision, with all its candidates; `Display` explains it.
    pub placement: Placement,
    /// What it was decided from, where that is captured.
    pub inputs: Option<Box<Inputs>>,
    /// Prefill, or all of it when `decode` is absent.
    pub prefill: EngineTarget,
    pub decode: Option<EngineTarget>,
    pub fetch: Option<FetchSource>,
    /// Part after part of the prefix, where it stays.
    pub route: Vec<RouteHolder>,
    /// One for each chunk of the query.
    pub chunks: Vec<ChunkTarget>,
    pub booking: Booking,
}

/// Whence a chunk comes.
#[derive(Debug, Clone)]
pub enum ChunkTarget {
    /// The engine's own node has it, or had it a moment ago.
    Here,
    /// This node sends a copy.
    Fetched(NodeHandle),
    /// This node attends it.
    Routed(NodeHandle),
    Computed,
}

/// An instance and the store node it is attached to.
#[derive(Debug, Clone)]
pub struct EngineTarget {
    pub instance_id: InstanceId,
    /// As "host:port".
    pub engine_address: Arc<str>,
    pub engine: EngineClient<Channel>,
    pub attach_epoch: u32,
    pub node: NodeHandle,
    /// Leading blocks of the prompt that the node is thought to hold.
    pub cached_blocks: u32,
}

/// A store node.
#[derive(Debug, Clone)]
pub struct NodeHandle {
    pub node_id: NodeId,
    pub incarnation: Incarnation,
    /// As configured: "host:port".
    pub address: Arc<str>,
    /// The transfer engine's address, for `writer_endpoint`.
    pub endpoint: Bytes,
    pub client: StoreNodeClient<Channel>,
}

/// The prefill side fetches blocks `[from_block, until_block)` from this node.
#[derive(Debug, Clone)]
pub struct FetchSource {
    pub node: NodeHandle,
    pub from_block: u32,
    pub until_block: u32,
    pub bytes: u64,
}

/// Blocks of the prompt stay with this node, and are attended there.
#[derive(Debug, Clone)]
pub struct RouteHolder {
    pub node: NodeHandle,
    pub first_block: u32,
    pub blocks: u32,
}

/// See the module.
#[derive(Debug, Clone)]
pub struct Cluster {
    shared: Arc<Shared>,
}

impl Cluster {
    /// Follows the nodes from now on, until `shutdown`. Must be called within a tokio runtime.
    ///
    /// # Errors
    /// [`ClusterError`] when the options cannot be right.
    pub fn start(
        options: Options,
        registry: &Registry,
        shutdown: CancellationToken,
    ) -> Result<Cluster, ClusterError> {
        let endpoints = follow::endpoints(&options)?;
        let metrics = Metrics::new(registry)?;
        let shared = Arc::new(Shared::new(options, metrics));
        for (at, endpoint) in endpoints.into_iter().enumerate() {
            tokio::spawn(follow::follow(shared.clone(), at, endpoint, shutdown.clone()));
        }
        if let Some(options) = shared.options.balance {
            tokio::spawn(balance::balance(shared.clone(), options, shutdown.clone()));
        }
        tokio::spawn(follow::sweep(shared.clone(), shutdown));
        Ok(Cluster { shared })
    }

    pub(super) fn shared(&self) -> &Shared {
        &self.shared
    }

    /// Places a request and books its work.
    ///
    /// # Errors
    /// [`NotPlaced`] with what the caller can do.
    pub fn place(&self, query: &PlaceQuery<'_>) -> Result<Placed, NotPlaced> {
        match self.place_within(query, u64::MAX) {
            Ok(placed) => Ok(placed),
            Err(NotNow::Queues { placement }) => Err(gone(query, *placement)),
            Err(NotNow::Refused(none)) => {
                self.count_refused(&none.refused.refusal);
                Err(none)
            }
        }
    }

    /// The same for a request that may wait here: it is placed when its prefill is predicted to begin
    /// within so long. A refusal is not counted as one, since the caller may ask again.
    ///
    /// # Errors
    /// [`NotNow`].
    pub fn place_within(&self, query: &PlaceQuery<'_>, ahead_us: u64) -> Result<Placed, NotNow> {
        let placed_at = Instant::now();
        let matched = self.shared.reader.match_prefix(query.keys);
        let mut state = self.shared.lock();
        let now_us = self.shared.now_us();
        let decided = self.decide(&state, query, &matched, now_us);
        let refused = decided.as_ref().err().map(|none| &none.refused.refusal);
        state.count_decision(query.model.index, refused);
        let Decided { placement, inputs } = decided.map_err(NotNow::Refused)?;
        if placement.queue_us > ahead_us {
            return Err(NotNow::Queues { placement: Box::new(placement) });
        }
        let Some(Targets { prefill, decode, fetch, route, chunks }) = targets(&state, &placement)
        else {
            // Instances and nodes change together under the lock, so this does not happen; were
            // it to, the caller could do no more than with an instance that has just gone.
            return Err(NotNow::Refused(gone(query, placement)));
        };
        let id = state.next_booking();
        state.view.book(id, &placement, now_us);
        drop(state);
        self.shared.metrics.placed(&placement);
        let predicted = Predicted::of(&placement, query.objectives);
        let booking = Booking::new(self.shared.clone(), id, placed_at, predicted);
        Ok(Placed { placement, inputs, prefill, decode, fetch, route, chunks, booking })
    }

    /// The same decision without booking it.
    ///
    /// # Errors
    /// [`NotPlaced`] with what the caller can do.
    pub fn plan(&self, query: &PlaceQuery<'_>) -> Result<Plan, NotPlaced> {
        let matched = self.shared.reader.match_prefix(query.keys);
        let state = self.shared.lock();
        let now_us = self.shared.now_us();
        let decided = self.decide(&state, query, &matched, now_us);
        let Decided { placement, inputs } =
            decided.inspect_err(|none| self.count_refused(&none.refused.refusal))?;
        match targets(&state, &placement) {
            Some(Targets { prefill, decode, fetch, .. }) => {
                Ok(Plan { placement, inputs, prefill, decode, fetch })
            }
            None => Err(gone(query, placement)),
        }
    }

    fn decide(
        &self,
        state: &State,
        query: &PlaceQuery<'_>,
        matched: &PrefixMatch,
        now_us: u64,
    ) -> Result<Decided, NotPlaced> {
        let chunk = |chunk: &QueriedChunk| AskedChunk {
            first_position: chunk.first_position,
            blocks: chunk.keys.len() as u32,
            matched: self.shared.reader.match_prefix(&chunk.keys),
        };
        let chunks: Vec<AskedChunk> = query.chunks.iter().map(chunk).collect();
        let request = PlaceRequest {
            model: query.model.index,
            prompt_tokens: query.prompt_tokens,
            max_tokens: query.max_tokens,
            objectives: query.objectives,
            exclude: query.exclude,
            tie_seed: self.shared.next_seed(),
            now_us,
            may_route: query.may_route,
            is_endless: query.is_endless,
            steering: query.steering,
            chunks: &chunks,
        };
        let captures = self.shared.options.captures_inputs;
        let inputs = captures.then(|| Inputs::capture(&state.view, matched, &request)).flatten();
        let inputs = inputs.map(Box::new);
        match kvasir_placement::place(&state.view, matched, &request) {
            Ok(placement) => Ok(Decided { placement, inputs }),
            Err(refused) => Err(NotPlaced { refused, inputs }),
        }
    }

    /// A request was refused for good.
    pub fn count_refused(&self, refusal: &Refusal) {
        self.shared.metrics.refused(refusal);
    }

    /// How many tokens an answer of this model has, in the mean of what its instances have seen.
    pub fn generated_tokens(&self, model: &str) -> u32 {
        self.shared.lock().view.generated_tokens(model)
    }

    /// All models that are or were served, by name. Of several under one name the one that is
    /// ready comes first.
    pub fn models(&self) -> Vec<ServedModel> {
        let state = self.shared.lock();
        let mut models: Vec<ServedModel> = state
            .view
            .models()
            .map(|(index, spec)| ServedModel::new(index, spec, state.view.serves(index)))
            .collect();
        drop(state);
        models.sort_by(|a, b| {
            let order = |model: &ServedModel| (model.name.clone(), !model.ready, model.index);
            order(a).cmp(&order(b))
        });
        models
    }

    /// The model of this name.
    ///
    /// # Errors
    /// [`Refusal::UnknownModel`] when no instance has ever served it.
    pub fn model(&self, name: &str) -> Result<ServedModel, Refusal> {
        self.models().into_iter().find(|model| &*model.name == name).ok_or_else(|| {
            let refusal = Refusal::UnknownModel { model: name.to_string() };
            self.shared.metrics.refused(&refusal);
            refusal
        })
    }

    /// What every node holds that can be reached has been taken in, or had been once: one that comes later
    /// changes nothing.
    pub fn is_warm(&self) -> bool {
        self.shared.lock().unsettled.is_empty()
    }

    /// One of these models is served from prompt to answer.
    pub fn serves<'a>(&self, mut names: impl Iterator<Item = &'a str>) -> bool {
        let state = self.shared.lock();
        let served = |name: &str| {
            let named = |spec: &ModelSpec| *spec.name == *name;
            state.view.models().any(|(index, spec)| named(spec) && state.view.serves(index))
        };
        names.any(served)
    }

    /// This incarnation of this node is followed now.
    pub fn follows(&self, node: &NodeHandle) -> bool {
        let state = self.shared.lock();
        let mut followed = state.nodes.iter().flatten().filter(|node| node.lost_us.is_none());
        followed.any(|n| n.node_id == node.node_id && n.incarnation == node.incarnation)
    }

    /// The node that this instance is attached to is followed now.
    pub fn is_followed(&self, instance: &InstanceId) -> bool {
        let state = self.shared.lock();
        let mut followed = state.nodes.iter().flatten().filter(|node| node.lost_us.is_none());
        followed.any(|node| node.engines.contains_key(instance))
    }

    /// What a caller is told to wait until so many of the placed requests have ended, by what is
    /// predicted of them.
    pub fn requests_end_in_ms(&self, count: usize) -> u64 {
        let state = self.shared.lock();
        let drain_us = state.view.requests_end_in_us(count, self.shared.now_us());
        state.view.policy().retry_after_ms(drain_us)
    }

    /// What a caller is told to wait for room for a prompt of this length on an instance that has
    /// just said that it has none.
    pub fn room_in_ms(&self, instance: &InstanceId, prompt_tokens: u32, block_tokens: u32) -> u64 {
        let slots = prompt_tokens.div_ceil(block_tokens.max(1)).saturating_add(1);
        let state = self.shared.lock();
        let drain_us = state.view.slots_free_in_us(instance, slots, self.shared.now_us());
        state.view.policy().retry_after_ms(drain_us)
    }

    /// Prefer others to this instance for a while.
    pub fn mark_failed(&self, instance: &InstanceId) {
        let Options { failed_avoid_ms, failed_avoid_ms_max, .. } = self.shared.options;
        let now_us = self.shared.now_us();
        let mut state = self.shared.lock();
        let state = &mut *state;
        let failures = &mut state.failures;
        // Who is gone is not remembered.
        failures
            .retain(|id, _| state.view.instances().iter().any(|i| i.report().instance_id == *id));
        let failed = failures.entry(instance.clone()).or_default();
        // Requests that were placed before it was avoided say nothing new.
        if now_us >= failed.avoid_until_us {
            let avoid_ms = (failed_avoid_ms << failed.in_a_row.min(16)).min(failed_avoid_ms_max);
            *failed =
                Failed { in_a_row: failed.in_a_row + 1, avoid_until_us: now_us + avoid_ms * 1_000 };
            tracing::info!(%instance, avoid_ms, "the conductor avoids an instance after a failure");
        }
        state.view.mark_failed(instance, failed.avoid_until_us);
        self.shared.metrics.instances_failed.set(state.count_failed() as i64);
    }

    /// These instances have just done what they were asked to.
    pub fn mark_served(&self, instances: &[&InstanceId]) {
        let mut state = self.shared.lock();
        for instance in instances {
            state.failures.remove(*instance);
        }
        self.shared.metrics.instances_failed.set(state.count_failed() as i64);
    }
}

/// A request that nobody can serve.
#[derive(Debug, Clone)]
pub struct NotPlaced {
    pub refused: Refused,
    /// What it was decided from, where that is captured.
    pub inputs: Option<Box<Inputs>>,
}

/// Why a request that may wait is not placed now.
#[derive(Debug)]
pub enum NotNow {
    /// Its prefill would wait at its instance for too long. This is where it would go.
    Queues { placement: Box<Placement> },
    /// Nobody can serve it.
    Refused(NotPlaced),
}

/// A decision, and what it was taken from.
struct Decided {
    placement: Placement,
    inputs: Option<Box<Inputs>>,
}

/// A decision that is not booked.
#[derive(Debug, Clone)]
pub struct Plan {
    pub placement: Placement,
    /// What it was decided from, where that is captured.
    pub inputs: Option<Box<Inputs>>,
    pub prefill: EngineTarget,
    pub decode: Option<EngineTarget>,
    pub fetch: Option<FetchSource>,
}

/// There is no handle for what was chosen.
fn gone(query: &PlaceQuery<'_>, placement: Placement) -> NotPlaced {
    let model = query.model.name.to_string();
    let refusal = Refusal::NoInstance { model, missing: kvasir_placement::Missing::Prefill };
    NotPlaced { refused: Refused { refusal, considered: placement.considered }, inputs: None }
}

struct Targets {
    prefill: EngineTarget,
    decode: Option<EngineTarget>,
    fetch: Option<FetchSource>,
    route: Vec<RouteHolder>,
    chunks: Vec<ChunkTarget>,
}

/// The handles of what was chosen.
fn targets(state: &State, placement: &Placement) -> Option<Targets> {
    let prefill = state.engine_target(placement.prefill())?;
    let decode = match placement.is_whole() {
        true => None,
        false => Some(state.engine_target(placement.decode())?),
    };
    let source = |fetch: &Fetch| {
        let node = state.node_handle(fetch.source.node)?;
        let Fetch { from_block, until_block, bytes, .. } = *fetch;
        Some(FetchSource { node, from_block, until_block, bytes })
    };
    let fetch = match &placement.fetch {
        None => None,
        Some(fetch) => Some(source(fetch)?),
    };
    let mut next_block = placement.route.as_ref().map_or(0, |route| route.first_block);
    let part = |part: &RoutePart| {
        let node = state.node_handle(part.source.node)?;
        let first_block = next_block;
        next_block += part.blocks;
        Some(RouteHolder { node, first_block, blocks: part.blocks })
    };
    let parts = placement.route.iter().flat_map(|route| &route.parts);
    let route = parts.map(part).collect::<Option<_>>()?;
    let chunk = |chunk: &PlacedChunk| {
        Some(match &chunk.becomes {
            ChunkUse::Here => ChunkTarget::Here,
            ChunkUse::Computed => ChunkTarget::Computed,
            ChunkUse::Fetched(source) => ChunkTarget::Fetched(state.node_handle(source.node)?),
            ChunkUse::Routed(source) => ChunkTarget::Routed(state.node_handle(source.node)?),
        })
    };
    let chunks = placement.chunks.iter().map(chunk).collect::<Option<_>>()?;
    Some(Targets { prefill, decode, fetch, route, chunks })
}
