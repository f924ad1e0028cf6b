//! What all tasks of the cluster share: the view and the nodes behind one mutex, and the index
//! behind another. Members of the view, nodes and channels change together, so that a decision
//! always finds the handles of what it chose.
//!
//! Decisions match on the index's reader and never wait for its mutex, which is held by whoever
//! applies events. Who needs both locks takes the state's first.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use bytes::Bytes;
use kvasir_placement::balance::roles::Roles;
use kvasir_placement::{
    BookingId, Chosen, ClusterView, IndexLimits, IndexReader, ModelIndex, NodeIndex, Refusal,
    ShadowIndex,
};
use kvasir_proto::v1;
use kvasir_proto::v1::engine_client::EngineClient;
use kvasir_proto::v1::store_node_client::StoreNodeClient;
use kvasir_proto::{Incarnation, InstanceId, NodeId};
use tokio::sync::Semaphore;
use tonic::transport::Channel;

use super::balance::BalanceOverview;
use super::handle::{EngineTarget, NodeHandle, Options};
use super::hint::HINTS_MAX;
use super::metrics::Metrics;

/// Store nodes that one conductor follows, at most.
pub(super) const NODES_MAX: u16 = 1024;

/// In this time half of what answers have taught is forgotten, of how far predictions of the time between
/// tokens were off.
const FORGETS_IN_US: u64 = 60_000_000;

pub(super) struct Shared {
    pub(super) options: Options,
    pub(super) metrics: Metrics,
    /// What decisions match on.
    pub(super) reader: IndexReader,
    /// Permits to send one.
    pub(super) hints: Arc<Semaphore>,
    index: Mutex<ShadowIndex>,
    state: Mutex<State>,
    started: Instant,
    seed: AtomicU64,
}

/// All of it is a hint, so that a poisoned lock is no reason to stop serving.
impl Shared {
    pub(super) fn new(options: Options, metrics: Metrics) -> Self {
        let limits = IndexLimits { keys_max: options.index_blocks_max, nodes_max: NODES_MAX };
        let index = ShadowIndex::new(limits);
        let mut view = ClusterView::new(options.policy, options.profile);
        for (instance_type, profile) in &options.profiles {
            view.know(instance_type, *profile);
        }
        view.forget_in(FORGETS_IN_US);
        let state = State {
            view,
            nodes: options.nodes.iter().map(|_| None).collect(),
            unsettled: (0..options.nodes.len()).collect(),
            has_snapshot: false,
            was_warm: false,
            failures: BTreeMap::new(),
            roles: options.balance.map(|balance| Roles::new(balance.roles)),
            wishes: Vec::new(),
            bookings: 0,
        };
        Shared {
            options,
            metrics,
            reader: index.reader(),
            hints: Arc::new(Semaphore::new(HINTS_MAX)),
            index: Mutex::new(index),
            state: Mutex::new(state),
            started: Instant::now(),
            seed: AtomicU64::new(rand::random()),
        }
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn index(&self) -> MutexGuard<'_, ShadowIndex> {
        self.index.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The core's time: microseconds since this conductor began.
    pub(super) fn now_us(&self) -> u64 {
        self.started.elapsed().as_micros() as u64
    }

    /// A different one for each decision, and from conductor to conductor.
    pub(super) fn next_seed(&self) -> u64 {
        self.seed.fetch_add(1, Ordering::Relaxed)
    }
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Shared").field("options", &self.options).finish_non_exhaustive()
    }
}

pub(super) struct State {
    pub(super) view: ClusterView,
    /// One for each configured address; absent while nothing is known of it.
    pub(super) nodes: Vec<Option<Node>>,
    /// Addresses of which it is not known yet, since this conductor began, whether there is a
    /// node and what it holds.
    pub(super) unsettled: BTreeSet<usize>,
    /// Some node has said what it holds.
    pub(super) has_snapshot: bool,
    /// All that could be reached had said it once: one that comes later does not make the conductor less ready.
    pub(super) was_warm: bool,
    /// Instances that have failed since they last served anything.
    pub(super) failures: BTreeMap<InstanceId, Failed>,
    /// Absent where nothing is done about roles.
    pub(super) roles: Option<Roles>,
    /// What was planned last, of each model.
    pub(super) wishes: Vec<BalanceOverview>,
    bookings: u64,
}

/// How often an instance has failed in a row, each time after it was avoided for the time before.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Failed {
    pub(super) in_a_row: u32,
    pub(super) avoid_until_us: u64,
}

/// A connected node, or one whose connection was lost a moment ago.
pub(super) struct Node {
    pub(super) node_id: NodeId,
    pub(super) incarnation: Incarnation,
    pub(super) address: Arc<str>,
    pub(super) endpoint: Bytes,
    pub(super) client: StoreNodeClient<Channel>,
    pub(super) index: NodeIndex,
    pub(super) engines: BTreeMap<InstanceId, EngineHandle>,
    /// What its last status says beside its engine.
    pub(super) slots_free: u32,
    pub(super) ssd: Option<v1::SsdStatus>,
    pub(super) keeps: bool,
    /// Since when it is not followed, though it may well be there. It is forgotten after a while.
    pub(super) lost_us: Option<u64>,
}

/// The channel to an attached engine.
#[derive(Clone)]
pub(super) struct EngineHandle {
    pub(super) address: Arc<str>,
    pub(super) attach_epoch: u32,
    /// Of what it plays, as its node counts.
    pub(super) role_version: u64,
    pub(super) client: EngineClient<Channel>,
}

impl Node {
    pub(super) fn handle(&self) -> NodeHandle {
        NodeHandle {
            node_id: self.node_id.clone(),
            incarnation: self.incarnation,
            address: self.address.clone(),
            endpoint: self.endpoint.clone(),
            client: self.client.clone(),
        }
    }
}

impl State {
    /// An address is not waited for any more: what is there is known, or nothing is there.
    pub(super) fn settle(&mut self, at: usize) {
        self.unsettled.remove(&at);
        self.was_warm |= self.has_snapshot && self.unsettled.is_empty();
    }

    pub(super) fn next_booking(&mut self) -> BookingId {
        self.bookings += 1;
        BookingId(self.bookings)
    }

    pub(super) fn count_decision(&mut self, model: ModelIndex, refused: Option<&Refusal>) {
        let reason = match refused {
            None => None,
            Some(Refusal::Overloaded { reason, .. }) => Some(*reason),
            Some(_) => return,
        };
        if let Some(roles) = &mut self.roles {
            roles.decided(model, reason);
        }
    }

    pub(super) fn node_handle(&self, index: NodeIndex) -> Option<NodeHandle> {
        Some(self.node(index)?.handle())
    }

    /// Of a node that is followed.
    pub(super) fn client_of(&self, node_id: &NodeId) -> Option<StoreNodeClient<Channel>> {
        let mut followed = self.nodes.iter().flatten().filter(|node| node.lost_us.is_none());
        followed.find(|node| node.node_id == *node_id).map(|node| node.client.clone())
    }

    pub(super) fn engine_target(&self, chosen: &Chosen) -> Option<EngineTarget> {
        let engine = self.node(chosen.node)?.engines.get(&chosen.instance_id)?;
        Some(EngineTarget {
            instance_id: chosen.instance_id.clone(),
            engine_address: engine.address.clone(),
            engine: engine.client.clone(),
            attach_epoch: engine.attach_epoch,
            node: self.node_handle(chosen.node)?,
            cached_blocks: chosen.cached_blocks,
        })
    }

    /// Attached instances that failed and have not served a request since.
    pub(super) fn count_failed(&self) -> usize {
        let instances = self.view.instances().iter();
        instances.filter(|i| self.failures.contains_key(&i.report().instance_id)).count()
    }

    /// The node at this place is not followed now: others are preferred until it is again.
    pub(super) fn lose_node(&mut self, at: usize, now_us: u64) {
        let State { nodes, view, failures, .. } = self;
        if let Some(node) = &mut nodes[at] {
            node.lost_us = Some(now_us);
            for instance in node.engines.keys() {
                let failed = failures.get(instance).copied().unwrap_or_default();
                view.mark_failed(instance, failed.avoid_until_us.max(now_us));
            }
        }
    }

    /// The node at this place is gone, and nothing is known of it any more.
    pub(super) fn forget_node(&mut self, at: usize, index: &mut ShadowIndex) {
        if let Some(node) = self.nodes[at].take() {
            self.view.remove_instances(node.index, &[]);
            index.retire_node(node.index);
        }
    }

    fn node(&self, index: NodeIndex) -> Option<&Node> {
        self.nodes.iter().flatten().find(|node| node.index == index)
    }
}
