//! The answer of a match: what each node holds of one chain.

use std::sync::atomic::Ordering;

use kvasir_proto::BlockKey;

use super::{GROUP_NODES, GroupView, NodeIndex, search};

/// How much of a chain each node holds.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct PrefixMatch {
    held: Vec<u32>,
    /// As long as `held`, or empty when nothing is outside DRAM: leading blocks that need not be
    /// read from SSD, and leading blocks in VRAM.
    fast: Vec<u32>,
    vram: Vec<u32>,
}

impl PrefixMatch {
    pub(super) fn search(groups: &[GroupView], keys: &[BlockKey]) -> Self {
        let nodes = groups.len() * GROUP_NODES;
        let mut matched = PrefixMatch { held: vec![0; nodes], ..PrefixMatch::default() };
        let range = |at: usize| at * GROUP_NODES..(at + 1) * GROUP_NODES;
        let live = |group: &GroupView| group.live.load(Ordering::Acquire);
        for (at, group) in groups.iter().enumerate() {
            let held = &mut matched.held[range(at)];
            let all = |places: &[usize], sets: &mut [u64]| group.all.get(keys, places, sets);
            search::lengths(keys.len(), live(group), &all, held);
        }
        for (at, group) in groups.iter().enumerate() {
            let Some(ssd) = &group.ssd else { continue };
            if matched.fast.is_empty() {
                matched.fast = matched.held.clone();
            }
            let fast = &mut matched.fast[range(at)];
            fast.fill(0);
            let in_memory = |places: &[usize], sets: &mut [u64]| {
                let mut on_ssd = [0; search::PLACES_MAX];
                ssd.get(keys, places, &mut on_ssd);
                group.all.get(keys, places, sets);
                sets.iter_mut().zip(on_ssd).for_each(|(set, on_ssd)| *set &= !on_ssd);
            };
            search::lengths(keys.len(), live(group), &in_memory, fast);
        }
        for (at, group) in groups.iter().enumerate() {
            let Some(vram) = &group.vram else { continue };
            matched.vram.resize(nodes, 0);
            let in_vram = &mut matched.vram[range(at)];
            let all = |places: &[usize], sets: &mut [u64]| vram.get(keys, places, sets);
            search::lengths(keys.len(), live(group), &all, in_vram);
        }
        matched
    }

    /// Leading blocks of the chain that this node holds.
    pub fn cached_blocks(&self, node: NodeIndex) -> u32 {
        self.held.get(usize::from(node.0)).copied().unwrap_or(0)
    }

    /// Leading blocks that this node holds in VRAM or DRAM.
    pub fn memory_blocks(&self, node: NodeIndex) -> u32 {
        let held = self.cached_blocks(node);
        self.fast.get(usize::from(node.0)).map_or(held, |fast| held.min(*fast))
    }

    /// Leading blocks that this node holds in VRAM.
    pub fn vram_blocks(&self, node: NodeIndex) -> u32 {
        let vram = self.vram.get(usize::from(node.0)).copied().unwrap_or(0);
        vram.min(self.cached_blocks(node))
    }

    /// A match that says this, for replays and tests: `(node, held, held in memory)`.
    pub fn from_memory_and_all(held: &[(NodeIndex, u32, u32)]) -> Self {
        let all: Vec<(NodeIndex, u32)> = held.iter().map(|(node, all, _)| (*node, *all)).collect();
        let fast = held.iter().map(|(node, _, memory)| (*node, *memory)).collect::<Vec<_>>();
        PrefixMatch { fast: PrefixMatch::from_pairs(&fast).held, ..PrefixMatch::from_pairs(&all) }
    }

    /// A match that says this, all in DRAM, for replays and tests.
    pub fn from_pairs(pairs: &[(NodeIndex, u32)]) -> Self {
        let nodes = pairs.iter().map(|(node, _)| usize::from(node.0) + 1).max().unwrap_or(0);
        let mut held = vec![0; nodes];
        for &(node, blocks) in pairs {
            held[usize::from(node.0)] = blocks;
        }
        PrefixMatch { held, ..PrefixMatch::default() }
    }
}
