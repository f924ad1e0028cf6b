//! Copies of blocks on other nodes, in words, and what is remembered for them: which were asked for,
//! which are under way, which blocks many want, and how far a drain is.
//!
//! It decides nothing by itself: see `blocks/replication.rs`.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use kvasir_proto::{BlockKey, Mark, Namespace};

/// A node by the address at which it is called. Never looked into here.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Peer(pub Arc<str>);

impl std::fmt::Display for Peer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.fmt(f)
    }
}

/// A node that could take blocks: it answers, it takes new work, and its blocks lie like ours.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PeerView {
    pub peer: Peer,
    /// Slots that could be had there.
    pub available: u32,
    /// It has an SSD that can be used, so that tenants' blocks can be kept there.
    pub keeps: bool,
}

/// Bounds of replication.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReplicaOptions {
    /// Copies under way at once.
    pub concurrent_copies_max: usize,
    /// Copies that others have asked for and that wait for their turn.
    pub asked_max: usize,
    /// A chain is hot when nodes ask for it so often within `hot_window_ms`; 0 for never.
    pub hot_requests_min: u32,
    pub hot_window_ms: u64,
    /// And it is copied when so many pushes to other nodes are open: before that one node serves all.
    pub hot_pushes_min: usize,
    /// A chain that was copied because it was hot is not copied again for so long.
    pub hot_again_ms: u64,
    /// Chains whose asks are counted; one more takes the place of the one asked for longest ago.
    pub hot_chains_max: usize,
    /// How long a copy that failed waits before it is tried again.
    pub retry_ms: u64,
    /// A node that has not answered for so long has lost the contexts that it kept.
    pub node_lost_after_ms: u64,
}

impl Default for ReplicaOptions {
    fn default() -> Self {
        ReplicaOptions {
            concurrent_copies_max: 2,
            asked_max: 64,
            hot_requests_min: 8,
            hot_window_ms: 10_000,
            hot_pushes_min: 4,
            hot_again_ms: 60_000,
            hot_chains_max: 256,
            retry_ms: 1_000,
            node_lost_after_ms: 60_000,
        }
    }
}

/// Why a chain is copied.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum CopyCause {
    /// Somebody asked for it by name.
    Asked,
    /// Many nodes want it from this one.
    Hot,
    /// It is kept for a tenant on several nodes, and there are too few of them.
    Context,
    /// It was kept for a tenant, and this node shall go.
    DrainKept,
    /// It is likely to be used again, and this node shall go.
    DrainHot,
}

impl CopyCause {
    /// For metrics.
    pub fn label(self) -> &'static str {
        match self {
            CopyCause::Asked => "requested",
            CopyCause::Hot => "hot",
            CopyCause::Context => "context",
            CopyCause::DrainKept => "drain_context",
            CopyCause::DrainHot => "drain_hot",
        }
    }
}

/// One copy to make: what, where to, and what must be true in the end. The shell pins and sends by a
/// share of the source side here, and has a share of the prefill side there, of one transaction.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CopyPlan {
    pub copy: u64,
    pub cause: CopyCause,
    pub namespace: Namespace,
    /// From the first block of a chain on.
    pub keys: Vec<BlockKey>,
    pub to: Peer,
    /// The copy counts when it is durable there with this mark at its end.
    pub kept: Option<Mark>,
}

/// Why a copy was not made.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CopyError {
    /// The other node does not answer, or was lost on the way.
    #[error("the target node {peer} does not answer: {why}")]
    PeerLost { peer: Peer, why: String },
    /// It has no room now.
    #[error("the target node {peer} has no room: {why}")]
    NoRoom { peer: Peer, why: String },
    /// It is there and said no.
    #[error("the target node {peer} refused the copy: {why}")]
    Refused { peer: Peer, why: String },
    /// Not all of the chain could be sent from here.
    #[error("this node cannot send all blocks: {0}")]
    NotHere(String),
}

impl CopyError {
    /// Whom another node might replace.
    fn peer(&self) -> Option<&Peer> {
        match self {
            CopyError::PeerLost { peer, .. }
            | CopyError::NoRoom { peer, .. }
            | CopyError::Refused { peer, .. } => Some(peer),
            CopyError::NotHere(_) => None,
        }
    }
}

/// Why a copy that somebody asked for is not even tried.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum ChangeReplicaError {
    #[error("this node does not hold the first block; ask a node that holds it")]
    NotHere,
    #[error("{0} copies are already queued, the maximum of this node; try again later")]
    TooMany(usize),
}

/// What a drain is to do.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct DrainRequest {
    /// Only these nodes may take blocks; any that are known when it is empty.
    pub targets: Vec<Peer>,
    /// The most blocks that move though nobody was promised them.
    pub hot_blocks_max: u32,
    /// This node has an SSD: nothing is known of what is kept while that cannot be used.
    pub has_ssd: bool,
}

/// How far a drain is.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct DrainView {
    pub draining: bool,
    pub drained: bool,
    /// Open shares that are not of copies.
    pub shares: u32,
    pub kept_moved: u32,
    pub kept_left: u32,
    pub hot_moved: u32,
    pub hot_left: u32,
    pub hot_failed: u32,
    pub copies: u32,
    /// Empty when nothing is in the way.
    pub waiting_for: String,
}

/// A chain to copy, before it is known where to.
#[derive(Debug, Clone)]
pub(crate) struct Wanted {
    pub(crate) cause: CopyCause,
    pub(crate) namespace: Namespace,
    pub(crate) keys: Vec<BlockKey>,
    pub(crate) kept: Option<Mark>,
    /// The only node that will do.
    pub(crate) to: Option<Peer>,
    /// One that failed, and shall only be asked again when there is no other.
    pub(crate) avoid: Option<Peer>,
    pub(crate) not_before_ms: u64,
    pub(crate) number: u64,
}

impl Wanted {
    pub(crate) fn last(&self) -> Option<BlockKey> {
        self.keys.last().copied()
    }

    pub(crate) fn failed(&mut self, error: &CopyError, not_before_ms: u64) {
        self.avoid = error.peer().cloned();
        self.not_before_ms = not_before_ms;
    }
}

/// How often a chain was asked for lately.
#[derive(Debug)]
struct Asks {
    namespace: Namespace,
    count: u32,
    since_ms: u64,
    last_ms: u64,
    copied_ms: Option<u64>,
}

/// Chains that other nodes ask for, by their last block.
#[derive(Debug, Default)]
pub(crate) struct HotChains {
    chains: BTreeMap<BlockKey, Asks>,
}

impl HotChains {
    pub(crate) fn asked(
        &mut self,
        now_ms: u64,
        namespace: Namespace,
        last: BlockKey,
        options: &ReplicaOptions,
    ) {
        if options.hot_requests_min == 0 {
            return;
        }
        if !self.chains.contains_key(&last) && self.chains.len() >= options.hot_chains_max {
            let eldest = self.chains.iter().min_by_key(|(key, asks)| (asks.last_ms, **key));
            let Some(eldest) = eldest.map(|(key, _)| *key) else { return };
            self.chains.remove(&eldest);
        }
        let new = Asks { namespace, count: 0, since_ms: now_ms, last_ms: now_ms, copied_ms: None };
        let asks = self.chains.entry(last).or_insert(new);
        if now_ms.saturating_sub(asks.since_ms) >= options.hot_window_ms {
            (asks.count, asks.since_ms) = (0, now_ms);
        }
        asks.count += 1;
        asks.last_ms = now_ms;
    }

    /// The chain that is asked for most of those that are hot, and marks it as copied.
    pub(crate) fn take(
        &mut self,
        now_ms: u64,
        options: &ReplicaOptions,
    ) -> Option<(Namespace, BlockKey)> {
        let is_hot = |(_, asks): &(&BlockKey, &mut Asks)| {
            asks.count >= options.hot_requests_min.max(1)
                && now_ms.saturating_sub(asks.last_ms) < options.hot_window_ms
                && asks
                    .copied_ms
                    .is_none_or(|at_ms| now_ms.saturating_sub(at_ms) >= options.hot_again_ms)
        };
        let hottest = self.chains.iter_mut().filter(is_hot).max_by_key(|(_, asks)| asks.count);
        let (key, asks) = hottest?;
        asks.copied_ms = Some(now_ms);
        asks.count = 0;
        Some((asks.namespace, *key))
    }

    /// Forgets chains that nobody has asked for lately.
    pub(crate) fn forget(&mut self, now_ms: u64, options: &ReplicaOptions) {
        let kept_ms = options.hot_window_ms.max(options.hot_again_ms);
        self.chains.retain(|_, asks| now_ms.saturating_sub(asks.last_ms) < kept_ms);
    }

    pub(crate) fn len(&self) -> usize {
        self.chains.len()
    }
}

/// A drain that was begun and not stopped.
#[derive(Debug)]
pub(crate) struct Drain {
    pub(crate) request: DrainRequest,
    pub(crate) since_ms: u64,
    /// Kept chains that have not moved, as they were found when it was last looked.
    pub(crate) kept: VecDeque<Wanted>,
    /// Last blocks of kept chains that are durable elsewhere, and until when.
    pub(crate) moved: BTreeMap<BlockKey, Mark>,
    pub(crate) hot: VecDeque<Wanted>,
    pub(crate) hot_moved: u32,
    pub(crate) hot_failed: u32,
    /// When what is kept was last looked at; `None` when it has changed since.
    pub(crate) looked_ms: Option<u64>,
    pub(crate) waiting_for: String,
}

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct Replicas {
    /// Nodes that could take blocks, and when they were last looked at.
    pub(crate) peers: Vec<PeerView>,
    pub(crate) peers_ms: Option<u64>,
    pub(crate) asked: VecDeque<Wanted>,
    pub(crate) under_way: BTreeMap<u64, (Peer, Wanted)>,
    pub(crate) hot: HotChains,
    pub(crate) drain: Option<Drain>,
    pub(crate) next: u64,
}

impl Replicas {
    pub(crate) fn number(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    /// Whether a node is known to take blocks and to keep them.
    pub(crate) fn can_keep(&self, peer: &Peer) -> bool {
        self.peers.iter().any(|view| view.peer == *peer && view.keeps)
    }

    /// Who should take a chain: the one with the most room, what is on its way there taken off; one
    /// that failed only when there is no other. Or why nobody can. Those that keep it already are no more copies,
    /// and what moves goes there only when there is no other.
    pub(crate) fn choose(
        &self,
        wanted: &Wanted,
        targets: &[Peer],
        holders: &[Peer],
    ) -> Result<Peer, &'static str> {
        if let Some(to) = &wanted.to {
            return Ok(to.clone());
        }
        let allowed = |view: &&PeerView| targets.is_empty() || targets.contains(&view.peer);
        let known: Vec<&PeerView> = self.peers.iter().filter(allowed).collect();
        if known.is_empty() {
            return Err(
                "no other node is known that answers, accepts work and has the same layout",
            );
        }
        let keeping: Vec<&PeerView> =
            known.into_iter().filter(|view| wanted.kept.is_none() || view.keeps).collect();
        if keeping.is_empty() {
            return Err("no other node has a usable SSD for persisted blocks");
        }
        let left = |view: &PeerView| {
            let to_it = self.under_way.values().filter(|(peer, _)| *peer == view.peer);
            let coming: usize = to_it.map(|(_, wanted)| wanted.keys.len()).sum();
            i64::from(view.available) - coming as i64
        };
        let is_new = |view: &&PeerView| !holders.contains(&view.peer);
        let may_hold = wanted.cause != CopyCause::Context;
        let new = keeping.into_iter().filter(|view| may_hold || is_new(view));
        let best = new.max_by_key(|view| {
            let is_other = wanted.avoid.as_ref() != Some(&view.peer);
            (is_new(view), is_other, left(view), std::cmp::Reverse(&view.peer))
        });
        best.map(|view| view.peer.clone()).ok_or("no other node is known")
    }
}
