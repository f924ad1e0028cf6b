//! The shadow index: which node has which block, as the nodes' events tell. Only ever a hint.
//! Tokens are never stored, only keys.
//!
//! One owner applies events; reading is `&self`. Nodes are dense numbers in groups of 64, a bit
//! each; each group has 64 tables ([`table`]), so that growing or sweeping one of them stays
//! short. A node that is retired disappears from every answer at once; its bits are swept out in
//! steps afterwards and its number is used again only then.
//!
//! A node's set is closed under prefix, so the sets along a chain only shrink. A match therefore
//! searches for the places where they do, and does not visit every block.

mod table;

use std::fmt;

use kvasir_proto::BlockKey;

use table::{Inserted, SHARD_BITS, Table, Words};

const GROUP_NODES: usize = 64;
const SHARDS: usize = 1 << SHARD_BITS;
/// Interior keys that one step of a search looks at: the loads of one step do not depend on each
/// other, so that their cache misses overlap, and three steps suffice for 512 blocks.
const PROBES: usize = 7;

/// A store node as the index numbers it. A number is used again only when no trace of its last
/// owner is left.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NodeIndex(pub u16);

impl fmt::Display for NodeIndex {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// The index's bounds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct IndexLimits {
    /// Different keys held at once, for each 64 nodes; about 44 bytes each. Blocks beyond are
    /// left out: their reuse is not seen.
    pub keys_max: usize,
    pub nodes_max: u16,
}

impl Default for IndexLimits {
    fn default() -> Self {
        IndexLimits { keys_max: 16 << 20, nodes_max: 1024 }
    }
}

/// There are as many nodes as the limits allow.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the index has {nodes_max} nodes already")]
pub struct TooManyNodes {
    pub nodes_max: u16,
}

/// See the module.
pub struct ShadowIndex {
    limits: IndexLimits,
    groups: Vec<Group>,
}

struct Group {
    tables: Vec<Table>,
    live: u64,
    /// Retired and not yet swept out.
    leaving: u64,
    /// The next table to sweep; `SHARDS` when none is left.
    sweep_at: usize,
    /// What is being swept out: those that were leaving when the sweep began.
    sweeping: u64,
    keys: usize,
    blocks: [usize; GROUP_NODES],
}

impl Group {
    fn new() -> Self {
        Group {
            tables: (0..SHARDS).map(|_| Table::default()).collect(),
            live: 0,
            leaving: 0,
            sweep_at: SHARDS,
            sweeping: 0,
            keys: 0,
            blocks: [0; GROUP_NODES],
        }
    }

    fn get(&self, key: &BlockKey) -> u64 {
        let key = Words::from(key);
        self.tables[key.shard()].get(key)
    }

    /// Sweeps one table. True when something is left to sweep.
    fn sweep_step(&mut self) -> bool {
        if self.sweep_at == SHARDS {
            if self.leaving == 0 {
                return false;
            }
            self.sweeping = self.leaving;
            self.sweep_at = 0;
        }
        let table = &mut self.tables[self.sweep_at];
        let before = table.used();
        table.clear(self.sweeping);
        self.keys -= before - table.used();
        self.sweep_at += 1;
        if self.sweep_at == SHARDS {
            self.leaving &= !self.sweeping;
            self.sweeping = 0;
        }
        self.leaving != 0
    }

    fn free_bit(&self) -> Option<usize> {
        let bit = (!(self.live | self.leaving)).trailing_zeros() as usize;
        (bit < GROUP_NODES).then_some(bit)
    }
}

impl ShadowIndex {
    pub fn new(limits: IndexLimits) -> Self {
        ShadowIndex { limits, groups: Vec::new() }
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
        self.groups[group].live |= 1 << bit;
        self.groups[group].blocks[bit] = 0;
        Ok(NodeIndex((group * GROUP_NODES + bit) as u16))
    }

    /// The node is gone, or all that was known of it is void: it is in no answer from now on.
    pub fn retire_node(&mut self, node: NodeIndex) {
        let (group, bit) = place_of(node);
        let Some(group) = self.groups.get_mut(group) else { return };
        if group.live & (1 << bit) != 0 {
            group.live &= !(1 << bit);
            group.leaving |= 1 << bit;
            group.blocks[bit] = 0;
        }
    }

    /// Does a bounded part of the cleaning after retired nodes: one table of at most 1/64 of the
    /// keys. True while there is more to do.
    pub fn sweep_step(&mut self) -> bool {
        // `any` stops at the first that still has work: one table a call.
        self.groups.iter_mut().any(Group::sweep_step)
    }

    /// The node has these blocks. Returns how many were left out because the index is full.
    pub fn insert(&mut self, node: NodeIndex, keys: &[BlockKey]) -> usize {
        let keys_max = self.limits.keys_max;
        let Some((group, bit)) = self.live_group(node) else { return keys.len() };
        let mut left_out = 0;
        for key in keys {
            let words = Words::from(key);
            let may_grow = group.keys < keys_max;
            match group.tables[words.shard()].insert(words, 1 << bit, may_grow) {
                Inserted::Already => {}
                Inserted::Shared => group.blocks[bit] += 1,
                Inserted::Fresh => {
                    group.blocks[bit] += 1;
                    group.keys += 1;
                }
                Inserted::Refused => left_out += 1,
            }
        }
        left_out
    }

    /// The node does not have these blocks any more.
    pub fn remove(&mut self, node: NodeIndex, keys: &[BlockKey]) {
        let Some((group, bit)) = self.live_group(node) else { return };
        for key in keys {
            let words = Words::from(key);
            let table = &mut group.tables[words.shard()];
            let before = table.used();
            if table.remove(words, 1 << bit) {
                group.blocks[bit] -= 1;
            }
            group.keys -= before - table.used();
        }
    }

    /// How many leading keys of the chain each node holds.
    ///
    /// Exact when every node's set is closed under prefix. When one is not, the length given for
    /// it still ends between a key that it has and one that it lacks, or at the end of the chain.
    pub fn match_prefix(&self, keys: &[BlockKey]) -> PrefixMatch {
        let mut held = vec![0; self.groups.len() * GROUP_NODES];
        if let (Some(first), Some(last)) = (keys.first(), keys.last()) {
            for (group, held) in self.groups.iter().zip(held.chunks_exact_mut(GROUP_NODES)) {
                let at_first = group.get(first) & group.live;
                if at_first == 0 {
                    continue;
                }
                let at_last = group.get(last) & at_first;
                set_lengths(held, at_last, keys.len());
                search(group, keys, Span { from: 0, to: keys.len() - 1, at_first, at_last }, held);
            }
        }
        PrefixMatch { held }
    }

    /// (node, block) pairs of live nodes.
    pub fn entries(&self) -> usize {
        self.groups.iter().flat_map(|group| group.blocks).sum()
    }

    /// Blocks of one node.
    pub fn entries_of(&self, node: NodeIndex) -> usize {
        let (group, bit) = place_of(node);
        self.groups.get(group).map_or(0, |group| group.blocks[bit])
    }

    /// Memory of the tables.
    pub fn bytes(&self) -> usize {
        self.groups.iter().flat_map(|group| &group.tables).map(Table::bytes).sum()
    }

    /// Live nodes.
    pub fn nodes(&self) -> usize {
        self.groups.iter().map(|group| group.live.count_ones() as usize).sum()
    }

    fn free_place(&self) -> Option<(usize, usize)> {
        self.groups.iter().enumerate().find_map(|(at, group)| Some((at, group.free_bit()?)))
    }

    fn live_group(&mut self, node: NodeIndex) -> Option<(&mut Group, usize)> {
        let (group, bit) = place_of(node);
        let group = self.groups.get_mut(group)?;
        (group.live & (1 << bit) != 0).then_some((group, bit))
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

/// The answer of a match.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct PrefixMatch {
    held: Vec<u32>,
}

impl PrefixMatch {
    /// Leading blocks of the chain that this node holds.
    pub fn held_blocks(&self, node: NodeIndex) -> u32 {
        self.held.get(usize::from(node.0)).copied().unwrap_or(0)
    }

    /// A match that says this, for replays and tests.
    pub fn from_pairs(pairs: &[(NodeIndex, u32)]) -> Self {
        let nodes = pairs.iter().map(|(node, _)| usize::from(node.0) + 1).max().unwrap_or(0);
        let mut held = vec![0; nodes];
        for &(node, blocks) in pairs {
            held[usize::from(node.0)] = blocks;
        }
        PrefixMatch { held }
    }
}

/// A stretch of the chain with the sets at both ends. Nodes in `at_first` and not in `at_last`
/// end within it.
#[derive(Clone, Copy)]
struct Span {
    from: usize,
    to: usize,
    at_first: u64,
    at_last: u64,
}

/// Finds where each node of the span ends. The depth is the logarithm of the span.
fn search(group: &Group, keys: &[BlockKey], span: Span, held: &mut [u32]) {
    let Span { from, to, at_first, at_last } = span;
    let ending = at_first & !at_last;
    if ending == 0 {
        return;
    }
    if to == from + 1 {
        set_lengths(held, ending, to);
        return;
    }
    let probes = PROBES.min(to - from - 1);
    let place = |probe: usize| from + (probe + 1) * (to - from) / (probes + 1);
    let mut sets = [0; PROBES];
    for (probe, set) in sets[..probes].iter_mut().enumerate() {
        *set = group.get(&keys[place(probe)]);
    }
    let mut left = (from, at_first);
    for (probe, set) in sets[..probes].iter().enumerate() {
        let here = (place(probe), (set & left.1) | at_last);
        let inner = Span { from: left.0, to: here.0, at_first: left.1, at_last: here.1 };
        search(group, keys, inner, held);
        left = here;
    }
    search(group, keys, Span { from: left.0, to, at_first: left.1, at_last }, held);
}

fn set_lengths(held: &mut [u32], mut nodes: u64, blocks: usize) {
    while nodes != 0 {
        held[nodes.trailing_zeros() as usize] = blocks as u32;
        nodes &= nodes - 1;
    }
}

fn place_of(node: NodeIndex) -> (usize, usize) {
    (usize::from(node.0) / GROUP_NODES, usize::from(node.0) % GROUP_NODES)
}
