//! One task for each configured node: connect, subscribe, apply its events, and begin anew with a
//! snapshot when anything is amiss (a gap, another incarnation, a broken or silent stream).
//!
//! Now and then a node says the digests of what it has. When they are not those of what the index
//! has of it, something was lost here or there that nobody has noticed: the index goes on with what
//! it has until a snapshot takes its place.
//!
//! A node whose connection broke is most likely there: for `lost_keep_ms` its instances are taken
//! when there are no others, and what is known of it stays. After that, and at once when it has
//! restarted, is silent or cannot be understood, it is gone from every decision.

use std::collections::{BTreeMap, BTreeSet};
use std::convert::Infallible;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use kvasir_placement::{NodeIndex, ShadowIndex, Tier};
use kvasir_proto::v1::engine_client::EngineClient;
use kvasir_proto::v1::node_event::Event;
use kvasir_proto::v1::store_node_client::StoreNodeClient;
use kvasir_proto::{BlockKey, FieldError, Incarnation, InstanceId, NodeId, TierDigests, v1};
use tokio_util::sync::CancellationToken;
use tonic::transport::{Channel, Endpoint};

use super::handle::{ClusterError, Options};
use super::state::{EngineHandle, NODES_MAX, Node, Shared, State};
use super::status::{self, Attached, StatusError};

/// Keys applied under one hold of the lock: about 0.1 ms.
const KEYS_AT_ONCE: usize = 1024;
/// A part of a snapshot may be large.
const MESSAGE_BYTES_MAX: usize = 64 << 20;
const KEEP_ALIVE: Duration = Duration::from_secs(5);
const SWEEP_INTERVAL: Duration = Duration::from_millis(200);
/// When a snapshot does not make the digests agree, the next one is taken so much later, then twice
/// as late and so on: it costs more than a view that is wrong somewhere.
const RESYNC_MS_MIN: u64 = 10_000;
const RESYNC_MS_MAX: u64 = 600_000;

/// Why following a node ended.
#[derive(Debug, thiserror::Error)]
enum Lost {
    #[error(
        "cannot connect to the store node; check that it runs, and `nodes` in the configuration"
    )]
    Connect(#[from] tonic::transport::Error),
    #[error("the node returned an error: {0}")]
    Call(#[from] tonic::Status),
    #[error("the store node ended the event stream")]
    Ended,
    #[error("the node sent nothing for {0} ms")]
    Silent(u64),
    #[error("the event stream has a gap: received change {got}, expected {expected}")]
    Gap { expected: u64, got: u64 },
    #[error("the node has restarted: its incarnation changed")]
    Restarted,
    #[error("cannot parse an event of the store node; check the versions of both")]
    Field(#[from] FieldError),
    #[error("the store node sent an invalid status")]
    Status(#[from] StatusError),
    #[error("the store node sent block changes before a snapshot")]
    NoSnapshot,
    #[error("the address `{0}` leads to the same node; list each node once in `nodes`")]
    SameNode(Arc<str>),
    #[error(transparent)]
    TooManyNodes(#[from] kvasir_placement::TooManyNodes),
}

impl Lost {
    /// It says nothing of the node itself, which may be reached over the next connection.
    fn may_be_the_connection(&self) -> bool {
        matches!(self, Lost::Connect(_) | Lost::Call(_) | Lost::Ended | Lost::Gap { .. })
    }

    /// The label of the metric.
    fn reason(&self) -> &'static str {
        match self {
            Lost::Connect(_) => "connect",
            Lost::Call(_) => "call",
            Lost::Ended => "ended",
            Lost::Silent(_) => "silent",
            Lost::Gap { .. } => "gap",
            Lost::Restarted => "restarted",
            Lost::Field(_) | Lost::Status(_) | Lost::NoSnapshot => "unreadable",
            Lost::SameNode(_) => "same_node",
            Lost::TooManyNodes(_) => "too_many",
        }
    }
}

/// The addresses, checked once.
pub(super) fn endpoints(options: &Options) -> Result<Vec<Endpoint>, ClusterError> {
    let nodes = options.nodes.len();
    let nodes_max = usize::from(NODES_MAX);
    if nodes > nodes_max {
        return Err(ClusterError::TooMany { nodes, nodes_max });
    }
    let mut seen = BTreeSet::new();
    if let Some(address) = options.nodes.iter().find(|address| !seen.insert(*address)) {
        return Err(ClusterError::Twice { address: address.clone() });
    }
    let endpoint = |address: &String| {
        endpoint(address, options)
            .map_err(|source| ClusterError::Address { address: address.clone(), source })
    };
    options.nodes.iter().map(endpoint).collect()
}

fn endpoint(address: &str, options: &Options) -> Result<Endpoint, tonic::transport::Error> {
    Ok(Endpoint::from_shared(format!("http://{address}"))?
        .connect_timeout(Duration::from_millis(options.connect_timeout_ms))
        .tcp_nodelay(true)
        .http2_keep_alive_interval(KEEP_ALIVE)
        .keep_alive_timeout(KEEP_ALIVE)
        .keep_alive_while_idle(true))
}

/// Follows one node until `shutdown`.
pub(super) async fn follow(
    shared: Arc<Shared>,
    at: usize,
    endpoint: Endpoint,
    shutdown: CancellationToken,
) {
    let address: Arc<str> = Arc::from(shared.options.nodes[at].as_str());
    let mut pause_ms = shared.options.reconnect_ms_min;
    loop {
        let mut session = Session::new(&shared, at, address.clone());
        let lost = tokio::select! {
            () = shutdown.cancelled() => return,
            lost = session.run(&endpoint) => lost,
        };
        session.keeps_node = lost.may_be_the_connection();
        let was_warm = session.warm;
        drop(session);
        shared.lock().settle(at);
        shared.metrics.losses.with_label_values(&[lost.reason()]).inc();
        if was_warm {
            tracing::warn!(%address, error = %Causes(&lost), "the conductor lost a store node; reconnecting");
            pause_ms = shared.options.reconnect_ms_min;
        } else {
            tracing::debug!(%address, error = %Causes(&lost), pause_ms, "the conductor cannot follow a store node; retrying");
        }
        tokio::select! {
            () = shutdown.cancelled() => return,
            () = tokio::time::sleep(Duration::from_millis(pause_ms)) => {}
        }
        pause_ms = (pause_ms * 2).min(shared.options.reconnect_ms_max);
    }
}

/// Forgets nodes that did not come back in time, and cleans the index after them, a step at a
/// time, so that decisions go on between steps.
pub(super) async fn sweep(shared: Arc<Shared>, shutdown: CancellationToken) {
    while !shutdown.is_cancelled() {
        tokio::select! {
            () = shutdown.cancelled() => return,
            () = tokio::time::sleep(SWEEP_INTERVAL) => {}
        }
        forget_lost(&shared);
        while shared.index().sweep_step() {
            tokio::task::yield_now().await;
        }
        let bytes = shared.index().bytes();
        shared.metrics.index_bytes.set(bytes as i64);
    }
}

fn forget_lost(shared: &Shared) {
    let keep_us = shared.options.lost_keep_ms * 1_000;
    let now_us = shared.now_us();
    let mut state = shared.lock();
    for at in 0..state.nodes.len() {
        let lost_us = state.nodes[at].as_ref().and_then(|node| node.lost_us);
        if lost_us.is_some_and(|lost_us| now_us.saturating_sub(lost_us) >= keep_us) {
            state.forget_node(at, &mut shared.index());
            count_members(shared, &state);
        }
    }
}

fn count_members(shared: &Shared, state: &State) {
    shared.metrics.count_instances(state);
    shared.metrics.index_entries.set(shared.index().entries() as i64);
}

/// One connection to one incarnation of one node. Dropping it removes the node, or has it
/// forgotten unless it is joined again soon.
struct Session<'a> {
    shared: &'a Shared,
    at: usize,
    address: Arc<str>,
    node_id: NodeId,
    incarnation: Incarnation,
    joined: bool,
    keeps_node: bool,
    /// The sequence of the next change; absent until a whole snapshot is there.
    next_sequence: Option<u64>,
    warm: bool,
    resync: Resync,
}

/// When the next snapshot may be taken because digests differ.
#[derive(Debug, Default)]
struct Resync {
    /// Since digests last agreed.
    in_a_row: u32,
    from_us: u64,
}

impl Resync {
    /// Whether it is time.
    fn take(&mut self, now_us: u64) -> bool {
        if now_us < self.from_us {
            return false;
        }
        let pause_ms = (RESYNC_MS_MIN << self.in_a_row.min(16)).min(RESYNC_MS_MAX);
        *self = Resync { in_a_row: self.in_a_row + 1, from_us: now_us + pause_ms * 1_000 };
        true
    }
}

impl<'a> Session<'a> {
    fn new(shared: &'a Shared, at: usize, address: Arc<str>) -> Self {
        Session {
            shared,
            at,
            address,
            node_id: NodeId::from(""),
            incarnation: Incarnation::default(),
            joined: false,
            keeps_node: false,
            next_sequence: None,
            warm: false,
            resync: Resync::default(),
        }
    }

    /// Runs until the node is lost, and says how.
    async fn run(&mut self, endpoint: &Endpoint) -> Lost {
        match self.try_run(endpoint).await {
            Ok(never) => match never {},
            Err(lost) => lost,
        }
    }

    async fn try_run(&mut self, endpoint: &Endpoint) -> Result<Infallible, Lost> {
        let silence_ms = self.shared.options.silence_ms_max;
        let silence = Duration::from_millis(silence_ms);
        let channel = endpoint.connect().await?;
        let mut client = StoreNodeClient::new(channel).max_decoding_message_size(MESSAGE_BYTES_MAX);
        let described = tokio::time::timeout(silence, client.describe(v1::DescribeRequest {}));
        let status = described.await.map_err(|_| Lost::Silent(silence_ms))??.into_inner();
        self.join(&status, client.clone())?;
        self.apply_status(&status)?;
        let mut events = self.subscribe(&mut client).await?;
        loop {
            let event = tokio::time::timeout(silence, events.message());
            let event = event.await.map_err(|_| Lost::Silent(silence_ms))??.ok_or(Lost::Ended)?;
            if event.incarnation != self.incarnation.0 {
                return Err(Lost::Restarted);
            }
            match event.event {
                Some(Event::Snapshot(part)) => self.apply_snapshot(&part)?,
                Some(Event::Changes(changes)) => {
                    self.apply_changes(&changes)?;
                    if !self.agrees(&changes)? && self.resync.take(self.shared.now_us()) {
                        events = self.subscribe(&mut client).await?;
                    }
                }
                Some(Event::Status(status)) => self.apply_status(&status)?,
                // A kind of event that this version does not know.
                None => {}
            }
        }
    }

    /// From a snapshot on.
    async fn subscribe(
        &self,
        client: &mut StoreNodeClient<Channel>,
    ) -> Result<tonic::Streaming<v1::NodeEvent>, Lost> {
        let silence_ms = self.shared.options.silence_ms_max;
        let subscribed = client.events(v1::EventsRequest::default());
        let subscribed = tokio::time::timeout(Duration::from_millis(silence_ms), subscribed).await;
        Ok(subscribed.map_err(|_| Lost::Silent(silence_ms))??.into_inner())
    }

    fn join(
        &mut self,
        status: &v1::NodeDescription,
        client: StoreNodeClient<Channel>,
    ) -> Result<(), Lost> {
        self.node_id = NodeId::from(status.node_id.as_str());
        self.incarnation = Incarnation(status.incarnation);
        let mut state = self.shared.lock();
        // It could not be reached at first, and is there before anything else is known.
        if !state.was_warm {
            state.unsettled.insert(self.at);
        }
        let named =
            |node: &Option<Node>| node.as_ref().is_some_and(|node| node.node_id == self.node_id);
        let known = state.nodes.iter().position(named);
        if let Some(at) = known
            && let Some(other) = &mut state.nodes[at]
        {
            if other.lost_us.is_none() {
                return Err(Lost::SameNode(other.address.clone()));
            }
            if at == self.at && other.incarnation == self.incarnation {
                // What was booked on it goes on; what it holds comes with the next snapshot.
                other.client = client;
                other.lost_us = None;
                self.joined = true;
                self.shared.metrics.nodes_up.inc();
                return Ok(());
            }
        }
        // What is left of an earlier one, here or under an address that it has no more.
        for at in known.into_iter().chain([self.at]) {
            state.forget_node(at, &mut self.shared.index());
        }
        let index = self.shared.index().add_node()?;
        state.nodes[self.at] = Some(Node {
            node_id: self.node_id.clone(),
            incarnation: self.incarnation,
            address: self.address.clone(),
            endpoint: status.endpoint.clone().into(),
            client,
            index,
            engines: BTreeMap::new(),
            slots_free: status.slots_free,
            ssd: status.ssd.clone(),
            keeps: status.persists_contexts,
            lost_us: None,
        });
        self.joined = true;
        self.shared.metrics.nodes_up.inc();
        Ok(())
    }

    fn apply_snapshot(&mut self, part: &v1::Snapshot) -> Result<(), Lost> {
        let keys = BlockKey::list(&part.keys)?;
        let tier = tier(part.tier)?;
        if part.first {
            self.start_anew()?;
        }
        for keys in keys.chunks(KEYS_AT_ONCE) {
            let left_out = self.with_index(|index, node| index.insert(node, tier, keys));
            self.shared.metrics.index_full.inc_by(left_out.unwrap_or(0) as u64);
        }
        if part.last {
            self.next_sequence = Some(part.sequence.saturating_add(1));
            if !self.warm {
                self.warm = true;
                let mut state = self.shared.lock();
                state.has_snapshot = true;
                state.settle(self.at);
                drop(state);
                self.shared.metrics.nodes_warm.inc();
                tracing::info!(node = %self.node_id, address = %self.address,
                    incarnation = self.incarnation.0, "the conductor loaded the snapshot of a store node");
            }
            self.shared.metrics.snapshots.inc();
        }
        self.count_entries();
        Ok(())
    }

    /// All that was known of the node's blocks is void. Its old number is retired, which takes
    /// no time, and it goes on under a new one.
    fn start_anew(&mut self) -> Result<(), Lost> {
        self.next_sequence = None;
        let mut state = self.shared.lock();
        let State { nodes, view, .. } = &mut *state;
        let Some(node) = &mut nodes[self.at] else { return Ok(()) };
        let mut index = self.shared.index();
        // Also where nothing of it is left but that something was left out.
        if index.entries_of(node.index) > 0 || index.digests(node.index).is_none() {
            index.retire_node(node.index);
            let new = index.add_node()?;
            view.renumber_node(node.index, new);
            node.index = new;
        }
        Ok(())
    }

    fn apply_changes(&mut self, batch: &v1::BlockChanges) -> Result<(), Lost> {
        let expected = self.next_sequence.ok_or(Lost::NoSnapshot)?;
        if batch.sequence > expected {
            return Err(Lost::Gap { expected, got: batch.sequence });
        }
        // Changes that are known already: the stream began a little before the snapshot's end.
        let known = usize::try_from(expected - batch.sequence).unwrap_or(usize::MAX);
        let changes = batch.changes.get(known..).unwrap_or_default();
        for changes in changes.chunks(KEYS_AT_ONCE) {
            // Runs of one kind, in order: a block may come and go within one batch.
            for run in changes.chunk_by(|a, b| (a.removed, a.tier) == (b.removed, b.tier)) {
                let keys = run.iter().map(key).collect::<Result<Vec<_>, _>>()?;
                let tier = tier(run[0].tier)?;
                let left_out = self.with_index(|index, node| match run[0].removed {
                    true => {
                        index.remove(node, &keys);
                        0
                    }
                    false => index.insert(node, tier, &keys),
                });
                self.shared.metrics.index_full.inc_by(left_out.unwrap_or(0) as u64);
            }
        }
        self.next_sequence = Some(expected.saturating_add(changes.len() as u64));
        self.shared.metrics.changes.inc_by(changes.len() as u64);
        self.count_entries();
        Ok(())
    }

    /// The index has of the node what the node says that it has after these changes, as far as that
    /// can be told.
    fn agrees(&mut self, batch: &v1::BlockChanges) -> Result<bool, FieldError> {
        let Some(told) = &batch.digests else { return Ok(true) };
        let told = TierDigests::from_wire(told)?;
        let end = batch.sequence.saturating_add(batch.changes.len() as u64);
        if self.next_sequence != Some(end) {
            // The index is further already.
            return Ok(true);
        }
        let here = self.with_index(|index, node| index.digests(node)).flatten();
        let outcome = match here {
            Some(here) if here == told => "same",
            Some(_) => "differ",
            // The index had no room for all of it.
            None => "incomplete",
        };
        self.shared.metrics.digests.with_label_values(&[outcome]).inc();
        match here {
            Some(here) if here != told => {
                tracing::warn!(node = %self.node_id, sequence = end - 1,
                    node_digests = ?told, index_digests = ?here,
                    "the conductor's shadow index differs from the digests of a store node");
                return Ok(false);
            }
            Some(_) => self.resync.in_a_row = 0,
            None => {}
        }
        Ok(true)
    }

    fn apply_status(&mut self, status: &v1::NodeDescription) -> Result<(), Lost> {
        if status.incarnation != self.incarnation.0 {
            return Err(Lost::Restarted);
        }
        if *status.node_id != *self.node_id.0 {
            let (got, was) = (status.node_id.clone(), self.node_id.clone());
            return Err(StatusError::Renamed { got, was }.into());
        }
        let now_us = self.shared.now_us();
        let mut state = self.shared.lock();
        let state = &mut *state;
        let Some(node) = &mut state.nodes[self.at] else { return Ok(()) };
        node.endpoint = status.endpoint.clone().into();
        node.slots_free = status.slots_free;
        node.ssd = status.ssd.clone();
        node.keeps = status.persists_contexts;
        let attached = status::attached(status, node.index)?;
        let ids: Vec<InstanceId> =
            attached.iter().map(|attached| attached.report.instance_id.clone()).collect();
        if let Some(twice) = ids.iter().enumerate().find(|(at, id)| ids[..*at].contains(id)) {
            return Err(StatusError::SameInstance(twice.1.clone()).into());
        }
        state.view.remove_instances(node.index, &ids);
        node.engines.retain(|id, _| ids.contains(id));
        for attached in attached {
            let (id, handle) = engine(node, &attached, &self.shared.options)?;
            node.engines.insert(id, handle);
            state.view.report(attached.report, now_us);
        }
        self.shared.metrics.count_instances(state);
        Ok(())
    }

    /// This task alone renumbers its node, so that the number stays right between the two locks.
    fn with_index<T>(&self, work: impl FnOnce(&mut ShadowIndex, NodeIndex) -> T) -> Option<T> {
        let node = self.shared.lock().nodes[self.at].as_ref()?.index;
        Some(work(&mut self.shared.index(), node))
    }

    fn count_entries(&self) {
        let entries = self.shared.index().entries();
        self.shared.metrics.index_entries.set(entries as i64);
    }
}

impl Drop for Session<'_> {
    fn drop(&mut self) {
        if !self.joined {
            return;
        }
        let now_us = self.shared.now_us();
        let mut state = self.shared.lock();
        if self.keeps_node {
            state.lose_node(self.at, now_us);
        } else {
            state.forget_node(self.at, &mut self.shared.index());
        }
        count_members(self.shared, &state);
        drop(state);
        let metrics = &self.shared.metrics;
        metrics.nodes_up.dec();
        if self.warm {
            metrics.nodes_warm.dec();
        }
    }
}

fn tier(tier: i32) -> Result<Tier, FieldError> {
    match v1::Tier::try_from(tier) {
        Ok(v1::Tier::Vram) => Ok(Tier::Vram),
        Ok(v1::Tier::Dram | v1::Tier::Unspecified) => Ok(Tier::Dram),
        Ok(v1::Tier::Ssd) => Ok(Tier::Ssd),
        Err(_) => Err(FieldError::Unknown { field: "tier", got: tier }),
    }
}

fn key(change: &v1::BlockChange) -> Result<BlockKey, FieldError> {
    let got = change.key.len();
    let bytes = change.key.as_slice().try_into();
    bytes.map(BlockKey).map_err(|_| FieldError::Length { field: "key", got, want: "16" })
}

/// The engine's channel: the one there is, unless it is another attachment or address.
fn engine(
    node: &Node,
    attached: &Attached,
    options: &Options,
) -> Result<(InstanceId, EngineHandle), StatusError> {
    let id = attached.report.instance_id.clone();
    let Attached { engine_address, attach_epoch, role_version, .. } = attached;
    if let Some(known) = node.engines.get(&id)
        && known.attach_epoch == *attach_epoch
        && *known.address == **engine_address
    {
        return Ok((id, EngineHandle { role_version: *role_version, ..known.clone() }));
    }
    let endpoint = endpoint(engine_address, options)
        .map_err(|_| StatusError::EngineAddress(engine_address.clone()))?;
    tracing::info!(instance = %id, node = %node.node_id, address = %engine_address, attach_epoch,
        "an engine attached to a store node");
    let client = EngineClient::new(endpoint.connect_lazy());
    let address = Arc::from(engine_address.as_str());
    let (attach_epoch, role_version) = (*attach_epoch, *role_version);
    Ok((id, EngineHandle { address, attach_epoch, role_version, client }))
}

/// An error with its causes, in one line.
struct Causes<'a>(&'a Lost);

impl fmt::Display for Causes<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)?;
        let mut cause = std::error::Error::source(self.0);
        while let Some(error) = cause {
            write!(f, ": {error}")?;
            cause = error.source();
        }
        Ok(())
    }
}
