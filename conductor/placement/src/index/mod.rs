//! The shadow index: which node has which block, and in which tier, as the nodes' events tell.
//! Only ever a hint. Tokens are never stored, only halves of keys.
//!
//! One owner, [`ShadowIndex`], applies events; any number of [`IndexReader`]s match meanwhile
//! without waiting for it. Nodes are dense numbers in groups of 64, a bit each. What a group
//! stores is in [`layer`]s: one of all its blocks, and one each of those that are not in DRAM, so
//! that a block in DRAM takes one slot of 16 bytes ([`table`]). A node that is retired disappears
//! from every answer at once; its bits are swept out in steps afterwards and its number is used
//! again only then.
//!
//! A match searches along the chain ([`search`]), not block by block.

mod layer;
mod matched;
mod search;
mod table;

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use arc_swap::ArcSwap;
use kvasir_proto::{BlockKey, BlockSetDigest, TierDigests};

use layer::{Layer, SHARDS, Tables};
pub use matched::PrefixMatch;

const GROUP_NODES: usize = 64;

/// A store node as the index numbers it. A number is used again only when no trace of its last
/// owner is left.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NodeIndex(pub u16);

impl fmt::Display for NodeIndex {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Where on its node a block lies; of several places the fastest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub enum Tier {
    Vram,
    #[default]
    Dram,
    Ssd,
}

/// The index's bounds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct IndexLimits {
    /// Different keys held at once, for each 64 nodes; 21 to 27 bytes each in DRAM, twice that in
    /// another tier. Blocks beyond are left out: their reuse is not seen.
    pub keys_max: usize,
    pub nodes_max: u16,
}

impl Default for IndexLimits {
    fn default() -> Self {
        IndexLimits { keys_max: 16 << 20, nodes_max: 1024 }
    }
}

/// Blocks of one node by the fastest tier that has them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct TierBlocks {
    pub vram: u64,
    pub dram: u64,
    pub ssd: u64,
}

/// There are as many nodes as the limits allow.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the index already has {nodes_max} nodes, the maximum")]
pub struct TooManyNodes {
    pub nodes_max: u16,
}

/// The one writer. See the module.
pub struct ShadowIndex {
    limits: IndexLimits,
    groups: Vec<Group>,
    published: Arc<ArcSwap<Vec<GroupView>>>,
}

/// Matches chains while the index changes. A cheap clone.
#[derive(Clone)]
pub struct IndexReader {
    published: Arc<ArcSwap<Vec<GroupView>>>,
}

/// What readers see of a group.
#[derive(Debug, Clone)]
struct GroupView {
    live: Arc<AtomicU64>,
    all: Tables,
    /// Blocks in VRAM, and blocks that are on SSD alone; absent while there are none.
    vram: Option<Tables>,
    ssd: Option<Tables>,
}

struct Group {
    all: Layer,
    vram: Layer,
    ssd: Layer,
    /// Written by the owner alone.
    live: Arc<AtomicU64>,
    /// Retired and not yet swept out.
    leaving: u64,
    /// The next table to sweep; `SHARDS` when none is left.
    sweep_at: usize,
    /// What is being swept out: those that were leaving when the sweep began.
    sweeping: u64,
    digests: [NodeDigests; GROUP_NODES],
    /// Nodes of which something was left out since they were added.
    incomplete: u64,
}

/// What one node has in each layer.
#[derive(Debug, Clone, Copy, Default)]
struct NodeDigests {
    all: BlockSetDigest,
    vram: BlockSetDigest,
    ssd: BlockSetDigest,
}

impl Group {
    fn new() -> Self {
        Group {
            all: Layer::new(),
            vram: Layer::new(),
            ssd: Layer::new(),
            live: Arc::default(),
            leaving: 0,
            sweep_at: SHARDS,
            sweeping: 0,
            digests: [NodeDigests::default(); GROUP_NODES],
            incomplete: 0,
        }
    }

    fn view(&self) -> GroupView {
        let unless_empty = |layer: &Layer| (!layer.is_empty()).then(|| layer.tables().clone());
        GroupView {
            live: self.live.clone(),
            all: self.all.tables().clone(),
            vram: unless_empty(&self.vram),
            ssd: unless_empty(&self.ssd),
        }
    }

    fn live(&self) -> u64 {
        self.live.load(Ordering::Relaxed)
    }

    fn take_replaced(&mut self) -> bool {
        let replaced = [&mut self.all, &mut self.vram, &mut self.ssd].map(Layer::take_replaced);
        replaced.contains(&true)
    }

    fn layers(&mut self) -> [&mut Layer; 3] {
        [&mut self.all, &mut self.vram, &mut self.ssd]
    }

    /// Sweeps one shard. True when something is left to sweep.
    fn sweep_step(&mut self) -> bool {
        if self.sweep_at == SHARDS {
            if self.leaving == 0 {
                return false;
            }
            self.sweeping = self.leaving;
            self.sweep_at = 0;
        }
        let (shard, nodes) = (self.sweep_at, self.sweeping);
        for layer in self.layers().into_iter().filter(|layer| !layer.is_empty()) {
            layer.clear(shard, nodes);
        }
        self.sweep_at += 1;
        if self.sweep_at == SHARDS {
            self.leaving &= !self.sweeping;
            self.sweeping = 0;
        }
        self.leaving != 0
    }

    fn free_bit(&self) -> Option<usize> {
        let bit = (!(self.live() | self.leaving)).trailing_zeros() as usize;
        (bit < GROUP_NODES).then_some(bit)
    }

    fn insert(&mut self, bit: usize, tier: Tier, keys: &[BlockKey], keys_max: usize) -> usize {
        let node = 1 << bit;
        let digests = &mut self.digests[bit];
        let added = self.all.insert(node, keys, keys_max);
        digests.all = digests.all.with(added.digest);
        let mut is_complete = added.left_out == 0;
        // A key that `all` has no room for may be in another layer: nobody asks for it there.
        let of_tiers = [
            (Tier::Vram, &mut self.vram, &mut digests.vram),
            (Tier::Ssd, &mut self.ssd, &mut digests.ssd),
        ];
        for (its_tier, layer, digest) in of_tiers {
            if tier == its_tier {
                let added = layer.insert(node, keys, keys_max);
                *digest = digest.with(added.digest);
                is_complete &= added.left_out == 0;
            } else if !layer.is_empty() {
                *digest = digest.without(layer.remove(node, keys).digest);
            }
        }
        self.incomplete |= u64::from(!is_complete) << bit;
        added.left_out
    }

    fn remove(&mut self, bit: usize, keys: &[BlockKey]) {
        let node = 1 << bit;
        let NodeDigests { all, vram, ssd } = &mut self.digests[bit];
        let layers = [(&mut self.all, all), (&mut self.vram, vram), (&mut self.ssd, ssd)];
        for (layer, digest) in layers.into_iter().filter(|(layer, _)| !layer.is_empty()) {
            *digest = digest.without(layer.remove(node, keys).digest);
        }
    }

    fn forget(&mut self, bit: usize) {
        self.digests[bit] = NodeDigests::default();
        self.incomplete &= !(1 << bit);
    }
}

impl ShadowIndex {
    pub fn new(limits: IndexLimits) -> Self {
        ShadowIndex { limits, groups: Vec::new(), published: Arc::default() }
    }

    /// Matches for others while this one changes.
    pub fn reader(&self) -> IndexReader {
        IndexReader { published: self.published.clone() }
    }

    /// A new node, which has nothing yet.
    ///
    /// # Errors
    /// [`TooManyNodes`] when the limit is reached.
    pub fn add_node(&mut self) -> Result<NodeIndex, TooManyNodes> {
        let nodes_max = self.limits.nodes_max;
        if self.nodes() >= usize::from(nodes_max) {
            return Err(TooManyNodes { nodes_max });
        }
        if self.free_place().is_none() {
            // Sweeping everything at once takes long, but a further group would make every match
            // dearer for good. It comes to that only when nodes come and go faster than steps.
            while self.sweep_step() {}
        }
        let (group, bit) = self.free_place().unwrap_or_else(|| {
            self.groups.push(Group::new());
            (self.groups.len() - 1, 0)
        });
        let place = &mut self.groups[group];
        place.forget(bit);
        place.live.store(place.live() | 1 << bit, Ordering::Release);
        self.publish();
        Ok(NodeIndex((group * GROUP_NODES + bit) as u16))
    }

    /// The node is gone, or all that was known of it is void: it is in no answer from now on.
    pub fn retire_node(&mut self, node: NodeIndex) {
        if let Some((group, bit)) = self.live_group(node) {
            group.live.store(group.live() & !(1 << bit), Ordering::Release);
            group.leaving |= 1 << bit;
            group.forget(bit);
        }
    }

    /// Does a bounded part of the cleaning after retired nodes: one shard of at most 1/64 of the
    /// keys. True while there is more to do.
    pub fn sweep_step(&mut self) -> bool {
        // `any` stops at the first that still has work: one shard a call.
        let more = self.groups.iter_mut().any(Group::sweep_step);
        self.publish_replaced();
        more
    }

    /// The node has these blocks in this tier, and in no faster one. Returns how many were left
    /// out because the index is full.
    pub fn insert(&mut self, node: NodeIndex, tier: Tier, keys: &[BlockKey]) -> usize {
        let keys_max = self.limits.keys_max;
        let Some((group, bit)) = self.live_group(node) else { return keys.len() };
        let left_out = group.insert(bit, tier, keys, keys_max);
        self.publish_replaced();
        left_out
    }

    /// The node does not have these blocks any more.
    pub fn remove(&mut self, node: NodeIndex, keys: &[BlockKey]) {
        if let Some((group, bit)) = self.live_group(node) {
            group.remove(bit, keys);
            self.publish_replaced();
        }
    }

    /// How many leading keys of the chain each node holds, as [`IndexReader::match_prefix`].
    pub fn match_prefix(&self, keys: &[BlockKey]) -> PrefixMatch {
        PrefixMatch::search(&self.published.load(), keys)
    }

    /// (node, block) pairs of live nodes.
    pub fn entries(&self) -> usize {
        let digests = self.groups.iter().flat_map(|group| &group.digests);
        digests.map(|digests| digests.all.blocks as usize).sum()
    }

    /// Blocks of one node.
    pub fn entries_of(&self, node: NodeIndex) -> usize {
        let (group, bit) = place_of(node);
        self.groups.get(group).map_or(0, |group| group.digests[bit].all.blocks as usize)
    }

    /// The same by tiers, each block in the fastest one that has it.
    pub fn tiers_of(&self, node: NodeIndex) -> TierBlocks {
        let (group, bit) = place_of(node);
        let Some(group) = self.groups.get(group) else { return TierBlocks::default() };
        let NodeDigests { all, vram, ssd } = group.digests[bit];
        // What the index had no room for may be missing in one layer and not in another.
        let dram = all.blocks.saturating_sub(vram.blocks).saturating_sub(ssd.blocks);
        TierBlocks { vram: vram.blocks, dram, ssd: ssd.blocks }
    }

    /// What was applied to this node, to be compared with what it says of itself; `None` when some
    /// of it was left out, so that there is nothing to compare.
    pub fn digests(&self, node: NodeIndex) -> Option<TierDigests> {
        let (group, bit) = place_of(node);
        let Some(group) = self.groups.get(group) else { return Some(TierDigests::default()) };
        if group.incomplete & (1 << bit) != 0 {
            return None;
        }
        let NodeDigests { all, vram, ssd } = group.digests[bit];
        Some(TierDigests { vram, dram: all.without(vram).without(ssd), ssd })
    }

    /// Memory of the tables.
    pub fn bytes(&self) -> usize {
        let layers = self.groups.iter().flat_map(|group| [&group.all, &group.vram, &group.ssd]);
        layers.map(Layer::bytes).sum()
    }

    /// Different keys, counted once for each 64 nodes.
    pub fn keys(&self) -> usize {
        self.groups.iter().map(|group| group.all.keys()).sum()
    }

    /// Live nodes.
    pub fn nodes(&self) -> usize {
        self.groups.iter().map(|group| group.live().count_ones() as usize).sum()
    }

    fn free_place(&self) -> Option<(usize, usize)> {
        self.groups.iter().enumerate().find_map(|(at, group)| Some((at, group.free_bit()?)))
    }

    fn live_group(&mut self, node: NodeIndex) -> Option<(&mut Group, usize)> {
        let (group, bit) = place_of(node);
        let group = self.groups.get_mut(group)?;
        (group.live() & (1 << bit) != 0).then_some((group, bit))
    }

    fn publish_replaced(&mut self) {
        let mut replaced = false;
        for group in &mut self.groups {
            replaced |= group.take_replaced();
        }
        if replaced {
            self.publish();
        }
    }

    fn publish(&self) {
        self.published.store(Arc::new(self.groups.iter().map(Group::view).collect()));
    }
}

impl IndexReader {
    /// How many leading keys of the chain each node holds, and in which tiers.
    ///
    /// Exact when every node's set is closed under prefix, in each tier and those above it, and
    /// nothing changes meanwhile. When one is not, the length given for it still ends between a
    /// key that it has and one that it lacks, or at the end of the chain.
    pub fn match_prefix(&self, keys: &[BlockKey]) -> PrefixMatch {
        PrefixMatch::search(&self.published.load(), keys)
    }
}

impl fmt::Debug for ShadowIndex {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ShadowIndex")
            .field("limits", &self.limits)
            .field("nodes", &self.nodes())
            .field("entries", &self.entries())
            .finish_non_exhaustive()
    }
}

impl fmt::Debug for IndexReader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("IndexReader").finish_non_exhaustive()
    }
}

fn place_of(node: NodeIndex) -> (usize, usize) {
    (usize::from(node.0) / GROUP_NODES, usize::from(node.0) % GROUP_NODES)
}
