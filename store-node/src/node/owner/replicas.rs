//! Copies on other nodes: handing over what the core plans, taking back what became of it; and draining.

use std::collections::BTreeMap;
use std::sync::Arc;

use kvasir_blocks::{
    ChangeReplicaError, CopiedContext, CopyCause, CopyError, CopyPlan, DrainRequest, DrainView,
    Peer, PeerView,
};
use kvasir_proto::{BlockKey, Namespace, Share, Side, v1};

use super::Owner;
use super::admin::block_key;
use super::copies::Awaited;
use crate::clock;
use crate::config::is_address;
use crate::node::SERIALS_OF_CLIENTS;
use crate::node::command::{Refused, Reply};
use crate::node::copier::{Copier, Own};

/// How often it is looked which nodes could take blocks, while that is of use.
const LOOK_MS: u64 = 1_000;
/// Other nodes that one drain may name.
const TARGETS_MAX: usize = 256;

/// What the shell remembers of copies.
#[derive(Debug)]
pub(super) struct Replication {
    copier: Copier,
    /// Where the configuration and a drain say that blocks may go.
    peers: Vec<Peer>,
    targets: Vec<Peer>,
    looked_ms: Option<u64>,
    looking: bool,
    under_way: BTreeMap<u64, CopyPlan>,
    replies: BTreeMap<u64, (u32, Reply<v1::ReplicateReply>)>,
    /// What the drain was found to be when it was last told in the log.
    drained: bool,
    /// When the others were last asked for contexts that are kept there too.
    pub(super) checked_ms: Option<u64>,
    pub(super) checking: bool,
    /// How often they were.
    pub(super) asks: u64,
    /// With keeps that are under way no more than `KEEPS_MAX`.
    pub(super) awaited: Vec<Awaited>,
}

impl Replication {
    pub(super) fn new(copier: Copier, peers: &[String]) -> Self {
        Replication {
            copier,
            peers: peers.iter().map(|peer| Peer(peer.as_str().into())).collect(),
            targets: Vec::new(),
            looked_ms: None,
            looking: false,
            under_way: BTreeMap::new(),
            replies: BTreeMap::new(),
            drained: false,
            checked_ms: None,
            checking: false,
            asks: 0,
            awaited: Vec::new(),
        }
    }

    /// Nodes that the configuration names, but for this one as far as that is known.
    pub(super) fn peers(&self) -> usize {
        self.peers.len()
    }

    pub(super) fn is_no_peer(&mut self, peer: &Peer) {
        self.peers.retain(|of| of != peer);
    }

    /// Whether the answers of that many-th time have come.
    pub(super) fn knows(&self, asks: u64) -> bool {
        self.asks > asks || (self.asks == asks && !self.checking)
    }

    /// Asks them which of these contexts they keep.
    pub(super) fn ask_for(&mut self, contexts: Vec<CopiedContext>, own: u64) {
        self.copier.ask_for(self.peers.clone(), contexts, own);
    }
}

impl From<CopyError> for Refused {
    fn from(error: CopyError) -> Self {
        let why = error.to_string();
        match error {
            CopyError::PeerLost { .. } | CopyError::NotHere(_) => Refused::Unavailable(why),
            CopyError::NoRoom { .. } => Refused::NoSpace(why),
            CopyError::Refused { .. } => Refused::Precondition(why),
        }
    }
}

impl From<ChangeReplicaError> for Refused {
    fn from(error: ChangeReplicaError) -> Self {
        let why = error.to_string();
        match error {
            ChangeReplicaError::NotHere => Refused::NotFound(why),
            ChangeReplicaError::TooMany(_) => Refused::NoSpace(why),
        }
    }
}

impl Owner {
    /// Begins the copies that are due. What they need to know of other nodes is asked before.
    pub(super) fn plan_copies(&mut self, now_ms: u64) {
        self.look_for_copies(now_ms);
        self.look_at_peers(now_ms);
        while let Some(plan) = self.blocks.poll_copy(now_ms) {
            let (copy, blocks) = (plan.copy, plan.keys.len());
            tracing::info!(copy_id = copy, blocks, target = %plan.to, cause = plan.cause.label(), "the store node copies blocks to another node");
            match self.own() {
                Some(own) => {
                    self.replication.under_way.insert(copy, plan.clone());
                    self.replication.copier.copy(plan, own);
                }
                None => {
                    let why = "no engine has attached to this node, so the block layout is unknown";
                    self.blocks.copied(now_ms, copy, Err(CopyError::NotHere(why.into())));
                    self.answer_copy(copy, Err(CopyError::NotHere(why.into())));
                }
            }
        }
        let drained = self.drain_view().drained;
        if drained && !self.replication.drained {
            tracing::info!(
                node = %self.config.node_id,
                "the store node is drained: no work is in flight and no blocks remain to be copied"
            );
        }
        self.replication.drained = drained;
        self.answer_awaited(now_ms);
    }

    fn own(&self) -> Option<Own> {
        let cache = self.cache.as_ref()?;
        Some(Own {
            incarnation: self.incarnation,
            endpoint: self.transfer.endpoint().to_bytes(),
            layout: Arc::clone(&cache.layout),
        })
    }

    fn look_at_peers(&mut self, now_ms: u64) {
        let replication = &self.replication;
        let due = replication.looked_ms.is_none_or(|at_ms| now_ms >= at_ms + LOOK_MS);
        if replication.looking || !due || !self.blocks.wants_peers() {
            return;
        }
        let mut peers = replication.peers.clone();
        peers.extend(replication.targets.iter().cloned());
        peers.sort();
        peers.dedup();
        self.replication.looked_ms = Some(now_ms);
        if peers.is_empty() {
            self.blocks.peers_seen(now_ms, Vec::new());
            return;
        }
        let own = self.own();
        self.replication.looking = true;
        self.replication.copier.look(peers, own);
    }

    pub(super) fn peers_seen(&mut self, peers: Vec<PeerView>) {
        let now_ms = clock::now_ms();
        self.replication.looking = false;
        self.blocks.peers_seen(now_ms, peers);
        self.make_awaited();
        self.plan_copies(now_ms);
    }

    pub(super) fn copied(&mut self, copy: u64, result: Result<(), CopyError>) {
        let now_ms = clock::now_ms();
        let plan = self.replication.under_way.remove(&copy);
        let cause = plan.as_ref().map_or(CopyCause::Asked, |plan| plan.cause);
        let outcome = match &result {
            Ok(()) => "copied",
            Err(CopyError::PeerLost { .. }) => "peer_lost",
            Err(CopyError::NoRoom { .. }) => "no_capacity",
            Err(CopyError::Refused { .. }) => "refused",
            Err(CopyError::NotHere(_)) => "not_held",
        };
        self.metrics.copies.with_label_values(&[cause.label(), outcome]).inc();
        match &result {
            Ok(()) => tracing::info!(
                copy_id = copy,
                cause = cause.label(),
                "the store node copied blocks to another node"
            ),
            Err(error) => {
                tracing::warn!(copy_id = copy, cause = cause.label(), %error, "a copy of blocks to another node failed");
            }
        }
        self.blocks.copied(now_ms, copy, result.clone());
        self.answer_copy(copy, result);
        self.make_awaited();
        self.plan_copies(now_ms);
    }

    fn answer_copy(&mut self, copy: u64, result: Result<(), CopyError>) {
        let Some((blocks, reply)) = self.replication.replies.remove(&copy) else { return };
        let answer = result.map(|()| v1::ReplicateReply { blocks });
        let _ = reply.send(answer.map_err(Refused::from));
    }

    pub(super) fn replicate(
        &mut self,
        request: &v1::ReplicateRequest,
        reply: Reply<v1::ReplicateReply>,
    ) {
        let begun = self.begin_replicating(request);
        self.answer_when_copied(begun, reply);
    }

    /// For an administrator, who names the last block alone.
    pub(super) fn replicate_block(
        &mut self,
        request: &v1::ReplicateBlockRequest,
        reply: Reply<v1::ReplicateReply>,
    ) {
        let begun = self.begin_replicating_block(request);
        self.answer_when_copied(begun, reply);
    }

    fn answer_when_copied(
        &mut self,
        begun: Result<(u64, u32), Refused>,
        reply: Reply<v1::ReplicateReply>,
    ) {
        match begun {
            Ok((copy, blocks)) => {
                self.replication.replies.insert(copy, (blocks, reply));
                self.plan_copies(clock::now_ms());
            }
            Err(refused) => drop(reply.send(Err(refused))),
        }
    }

    fn begin_replicating(&mut self, request: &v1::ReplicateRequest) -> Result<(u64, u32), Refused> {
        let namespace = Namespace::try_from(request.namespace.as_slice())?;
        let keys = BlockKey::list(&request.keys)?;
        let to = address("target", &request.target)?;
        Ok(self.blocks.change_replica(namespace, &keys, to)?)
    }

    fn begin_replicating_block(
        &mut self,
        request: &v1::ReplicateBlockRequest,
    ) -> Result<(u64, u32), Refused> {
        let key = block_key(&request.key)?;
        let to = address("target", &request.target)?;
        let (namespace, keys) = self.blocks.chain(key).ok_or(ChangeReplicaError::NotHere)?;
        tracing::info!(?key, blocks = keys.len(), target = %to, "an administrator requested a copy");
        Ok(self.blocks.change_replica(namespace, &keys, to)?)
    }

    /// Many nodes may want the same from this one.
    pub(super) fn note_asked(&mut self, share: Share, namespace: Namespace, held: &[BlockKey]) {
        if share.side == Side::Source && !self.is_of_copy(share) {
            self.blocks.asked_for(clock::now_ms(), namespace, held);
        }
    }

    /// Its transaction is one by which this node copies.
    fn is_of_copy(&self, share: Share) -> bool {
        share.tx.conductor_incarnation == self.incarnation && share.tx.serial < SERIALS_OF_CLIENTS
    }

    pub(super) fn drain_view(&self) -> DrainView {
        self.blocks.drain_view(|share| self.is_of_copy(share))
    }

    pub(super) fn drain_status(&self) -> v1::DrainStatus {
        let view = self.drain_view();
        v1::DrainStatus {
            draining: view.draining,
            drained: view.drained,
            shares: view.shares,
            context_chains_copied: view.kept_moved,
            context_chains_left: view.kept_left,
            hot_chains_copied: view.hot_moved,
            hot_chains_left: view.hot_left,
            hot_chains_failed: view.hot_failed,
            copies_in_flight: view.copies,
            waiting_for: view.waiting_for,
        }
    }

    pub(super) fn begin_drain(
        &mut self,
        request: &v1::DrainRequest,
    ) -> Result<v1::DrainStatus, Refused> {
        if request.targets.len() > TARGETS_MAX {
            return Err(Refused::Invalid(format!(
                "field `targets` must have at most {TARGETS_MAX} entries"
            )));
        }
        let targets = request.targets.iter().map(|target| address("targets", target));
        let targets: Vec<Peer> = targets.collect::<Result<_, _>>()?;
        let hot_bytes =
            request.hot_bytes_max.unwrap_or(self.config.replication.drain_hot_bytes_max);
        let slot_bytes = self.cache.as_ref().map(|cache| cache.layout.slot_bytes());
        let hot_blocks = slot_bytes.map_or(0, |slot_bytes| hot_bytes / slot_bytes.max(1));
        let now_ms = clock::now_ms();
        tracing::info!(node = %self.config.node_id, targets = ?request.targets, "the store node drains");
        self.replication.targets.clone_from(&targets);
        // The targets were not looked at yet.
        self.replication.looked_ms = None;
        self.blocks.drain(
            now_ms,
            DrainRequest {
                targets,
                hot_blocks_max: u32::try_from(hot_blocks).unwrap_or(u32::MAX),
                has_ssd: self.tiers.has_ssd(),
            },
        );
        self.report.dirty = true;
        self.plan_copies(now_ms);
        Ok(self.drain_status())
    }

    pub(super) fn cancel_drain(&mut self) -> v1::DrainStatus {
        if self.blocks.is_draining() {
            tracing::info!(node = %self.config.node_id, "the store node cancelled its drain");
        }
        self.blocks.stop_draining();
        self.replication.targets.clear();
        self.report.dirty = true;
        self.drain_status()
    }
}

fn address(field: &str, text: &str) -> Result<Peer, Refused> {
    match is_address(text) {
        true => Ok(Peer(text.into())),
        false => Err(Refused::Invalid(format!(
            "field `{field}` is {text:?}; it must be an address as in \"10.0.0.7:7401\""
        ))),
    }
}
