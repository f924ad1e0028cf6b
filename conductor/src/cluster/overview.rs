//! The cluster as this conductor sees it, as values for people and scripts.

use kvasir_placement::TierBlocks;
use serde::Serialize;

use super::balance::BalanceOverview;
use super::handle::Cluster;
use super::state::{Node, State};

/// See the module.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Overview {
    /// (node, block) pairs in the index.
    pub index_entries: u64,
    pub index_bytes: u64,
    /// Of each model, how many should play which role; empty before a window of loads was seen.
    pub balance: Vec<BalanceOverview>,
    /// In the order of the configuration.
    pub nodes: Vec<NodeOverview>,
}

/// One configured store node. Of one that was never reached there is the address alone.
#[derive(Debug, Clone, PartialEq, Serialize, Default)]
pub struct NodeOverview {
    /// As configured: "host:port".
    pub address: String,
    pub node: Option<String>,
    /// Its events are followed now.
    pub connected: bool,
    /// Blocks that it holds, in whatever tier, as far as the index knows.
    pub blocks: u64,
    /// The same by the fastest tier that has them.
    pub tiers: TiersOverview,
    /// Of the memory, what nothing lies in.
    pub slots_free: u32,
    pub ssd: Option<SsdOverview>,
    pub instances: Vec<InstanceOverview>,
}

/// Blocks in memory of GPUs, in the node's own, and on its disk alone.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Default)]
pub struct TiersOverview {
    pub vram: u64,
    pub dram: u64,
    pub ssd: u64,
}

/// The tier on disk.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct SsdOverview {
    pub usable: bool,
    /// In words.
    pub state: String,
    pub blocks: u64,
    pub used_bytes: u64,
    pub capacity_bytes: u64,
}

/// One attached engine.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct InstanceOverview {
    pub instance: String,
    /// What it is given to do now: "prefill", "decode" or "both".
    pub current_role: &'static str,
    pub model: String,
    pub draining: bool,
    /// It has not failed recently; the conductor prefers healthy instances.
    pub healthy: bool,
    pub slots_total: u32,
    /// Free, or to be had by evicting.
    pub slots_available: u32,
    /// As the engine said last.
    pub running_requests: u32,
    pub running_requests_max: u32,
    pub waiting_requests: u32,
    pub waiting_prompt_tokens: u64,
    /// Requests of this conductor.
    pub prefills_in_flight: u64,
    pub decodes_in_flight: u64,
    /// Predicted wait of a prompt that comes now.
    pub queue_us: u64,
}

impl Cluster {
    /// The cluster as it is seen now. No lock is held while another one is waited for.
    pub fn overview(&self) -> Overview {
        let shared = self.shared();
        let (indices, mut nodes, balance) = {
            let (state, now_us) = (shared.lock(), shared.now_us());
            let index_of = |node: &Option<Node>| node.as_ref().map(|node| node.index);
            let indices: Vec<_> = state.nodes.iter().map(index_of).collect();
            let nodes = shared.options.nodes.iter().zip(&state.nodes);
            let nodes = nodes.map(|(address, node)| match node {
                None => NodeOverview { address: address.clone(), ..NodeOverview::default() },
                Some(node) => node_overview(&state, node, now_us),
            });
            (indices, nodes.collect::<Vec<_>>(), state.wishes.clone())
        };
        let index = shared.index();
        for (overview, node) in nodes.iter_mut().zip(indices) {
            let Some(node) = node else { continue };
            overview.blocks = index.entries_of(node) as u64;
            let TierBlocks { vram, dram, ssd } = index.tiers_of(node);
            overview.tiers = TiersOverview { vram, dram, ssd };
        }
        Overview {
            index_entries: index.entries() as u64,
            index_bytes: index.bytes() as u64,
            balance,
            nodes,
        }
    }
}

fn node_overview(state: &State, node: &Node, now_us: u64) -> NodeOverview {
    let attached = state.view.instances().iter().filter(|i| i.report().node == node.index);
    let instances = attached.map(|instance| {
        let (report, work) = (instance.report(), instance.open_work(now_us));
        InstanceOverview {
            instance: report.instance_id.to_string(),
            current_role: instance.role().name(),
            model: report.model.name.to_string(),
            draining: report.draining,
            healthy: !instance.avoided(),
            slots_total: report.slots_total,
            slots_available: report.slots_available,
            running_requests: report.load.running,
            running_requests_max: report.running_requests_max,
            waiting_requests: report.load.waiting,
            waiting_prompt_tokens: report.load.waiting_prompt_tokens,
            prefills_in_flight: work.prefills as u64,
            decodes_in_flight: work.decodes as u64,
            queue_us: work.queue_us,
        }
    });
    NodeOverview {
        address: node.address.to_string(),
        node: Some(node.node_id.to_string()),
        connected: node.lost_us.is_none(),
        blocks: 0,
        tiers: TiersOverview::default(),
        slots_free: node.slots_free,
        ssd: node.ssd.as_ref().map(|ssd| SsdOverview {
            usable: ssd.usable,
            state: ssd.state.clone(),
            blocks: ssd.blocks,
            used_bytes: ssd.used_bytes,
            capacity_bytes: ssd.capacity_bytes,
        }),
        instances: instances.collect(),
    }
}
