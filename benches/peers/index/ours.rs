//! The shadow index, as the conductor uses it: one writer, and a reader that never waits for it.

use std::sync::Mutex;
use std::time::Instant;

use kvasir_placement::{IndexLimits, IndexReader, NodeIndex, ShadowIndex, Tier};
use kvasir_proto::BlockKey;

use crate::workload::Workload;
use crate::{Index, Pace, Side, bytes_in_use};

pub struct Ours {
    index: Mutex<ShadowIndex>,
    reader: IndexReader,
    nodes: u16,
    passing: Vec<Vec<BlockKey>>,
}

/// Chained keys of a chain: each depends on all before it, as hashes do.
fn keys(chain: &[u64]) -> Vec<BlockKey> {
    let mut state = 0x243f_6a88_85a3_08d3_u64;
    let key = |word: &u64| {
        state = (state ^ word).wrapping_mul(0xff51_afd7_ed55_8ccd);
        state ^= state >> 32;
        let second = state.wrapping_mul(0xc4ce_b9fe_1a85_ec53) ^ state >> 29;
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&second.to_le_bytes());
        bytes[8..].copy_from_slice(&state.to_le_bytes());
        BlockKey(bytes)
    };
    chain.iter().map(key).collect()
}

pub fn build(workload: &Workload, side: &mut Side) -> (Ours, Vec<Vec<BlockKey>>) {
    let chains: Vec<_> = workload.chains.iter().map(|chain| keys(chain)).collect();
    let before = bytes_in_use();
    let mut index = ShadowIndex::new(IndexLimits::default());
    for _ in 0..workload.nodes {
        index.add_node().expect("room for a node");
    }
    let began = Instant::now();
    for (node, chain, from, end) in &workload.events {
        index.insert(NodeIndex(*node as u16), Tier::Dram, &chains[*chain][*from..*end]);
    }
    side.filled_per_s.push(workload.entries as f64 / began.elapsed().as_secs_f64());
    side.bytes_per_entry = (bytes_in_use() - before) as f64 / index.entries() as f64;
    let queries = workload.queries.iter().map(|query| keys(query)).collect();
    let passing = workload.passing.iter().map(|chain| keys(chain)).collect();
    let nodes = workload.nodes as u16;
    let reader = index.reader();
    (Ours { index: Mutex::new(index), reader, nodes, passing }, queries)
}

impl Index for Ours {
    type Query = Vec<BlockKey>;

    fn lookup(&self, query: &Vec<BlockKey>) -> (u32, usize) {
        let matched = self.reader.match_prefix(query);
        let held = (0..self.nodes).map(|node| matched.cached_blocks(NodeIndex(node)));
        held.fold((0, 0), |(most, nodes), held| (most.max(held), nodes + usize::from(held > 0)))
    }

    fn churn(&self, pace: &mut Pace<'_>) {
        let mut index = self.index.lock().expect("nobody panics");
        let node_of = |chain: usize| NodeIndex(chain as u16 % self.nodes);
        while let Some((put, taken)) = pace.next() {
            index.insert(node_of(put), Tier::Dram, &self.passing[put]);
            index.remove(node_of(taken), &self.passing[taken]);
        }
    }
}
