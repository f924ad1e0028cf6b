//! Nodes that can keep what tenants are promised: those with an SSD or an object store.

use std::cmp::Reverse;

use kvasir_proto::{BlockKey, NodeId};

use super::handle::{Cluster, NodeHandle};
use super::state::Node;

/// All of them, as far as this conductor knows.
#[derive(Debug, Clone, Default)]
pub struct Keepers {
    pub nodes: Vec<NodeHandle>,
    /// Configured addresses where no node is connected: whether there is one, and whether it keeps
    /// anything, is not known.
    pub unknown: usize,
}

impl Keepers {
    /// Nothing can be kept here, now or when all nodes answer.
    pub fn are_none(&self) -> bool {
        self.nodes.is_empty() && self.unknown == 0
    }
}

impl Cluster {
    /// The nodes that can keep contexts.
    pub fn keepers(&self) -> Keepers {
        let state = self.shared().lock();
        let nodes = state.nodes.iter().flatten().filter(|node| node.keeps);
        Keepers {
            nodes: nodes.map(Node::handle).collect(),
            unknown: state.nodes.iter().filter(|node| node.is_none()).count(),
        }
    }

    /// Those of them that are thought to have this whole chain, who has most of it in memory first.
    pub fn holders(&self, keys: &[BlockKey]) -> Vec<NodeHandle> {
        let matched = self.shared().reader.match_prefix(keys);
        let state = self.shared().lock();
        let has_all = |node: &&Node| matched.cached_blocks(node.index) as usize == keys.len();
        let nodes =
            state.nodes.iter().flatten().filter(|node| node.keeps && node.lost_us.is_none());
        let mut holders: Vec<&Node> = nodes.filter(has_all).collect();
        holders.sort_by_key(|node| Reverse(matched.memory_blocks(node.index)));
        holders.into_iter().map(Node::handle).collect()
    }

    /// The nodes of these names that can keep contexts, in this order and each once.
    pub fn keepers_among(&self, names: &[NodeId]) -> Vec<NodeHandle> {
        let state = self.shared().lock();
        let mut among: Vec<NodeHandle> = Vec::new();
        for name in names {
            let mut nodes = state.nodes.iter().flatten().filter(|node| node.keeps);
            let named = nodes.find(|node| node.node_id == *name).map(Node::handle);
            among.extend(named.filter(|one| among.iter().all(|had| had.node_id != one.node_id)));
        }
        among
    }
}
