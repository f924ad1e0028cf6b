//! dynamo-kv-router's concurrent compressed radix tree, as its own thread pool feeds it.

use std::sync::Arc;
use std::time::Instant;

use dynamo_kv_router::ConcurrentRadixTreeCompressed;
use dynamo_kv_router::indexer::{KvIndexerInterface, SyncIndexer, ThreadPoolIndexer};
use dynamo_kv_router::protocols::{
    ExternalSequenceBlockHash, KvCacheEvent, KvCacheEventData, KvCacheRemoveData, KvCacheStoreData,
    KvCacheStoredBlockData, LocalBlockHash, RouterEvent, compute_seq_hash_for_block,
};

use crate::workload::Workload;
use crate::{Index, Pace, Side, bytes_in_use};

pub struct Peer {
    tree: Arc<ConcurrentRadixTreeCompressed>,
    /// Feeds the tree; kept while it is used.
    indexer: ThreadPoolIndexer<ConcurrentRadixTreeCompressed>,
    nodes: u64,
    passing: Vec<Vec<LocalBlockHash>>,
    runtime: tokio::runtime::Runtime,
}

fn hashes(chain: &[u64]) -> Vec<LocalBlockHash> {
    chain.iter().map(|word| LocalBlockHash(*word)).collect()
}

fn stored(
    node: u64,
    event_id: u64,
    local: &[LocalBlockHash],
    (from, end): (usize, usize),
) -> RouterEvent {
    let sequence = compute_seq_hash_for_block(local);
    let block = |at: usize| KvCacheStoredBlockData {
        block_hash: ExternalSequenceBlockHash(sequence[at]),
        tokens_hash: local[at],
        mm_extra_info: None,
    };
    let data = KvCacheEventData::Stored(KvCacheStoreData {
        parent_hash: from.checked_sub(1).map(|at| ExternalSequenceBlockHash(sequence[at])),
        start_position: Some(from as u32),
        blocks: (from..end).map(block).collect(),
    });
    RouterEvent::new(node, KvCacheEvent { event_id, dp_rank: 0, data })
}

fn removed(node: u64, local: &[LocalBlockHash]) -> RouterEvent {
    let sequence = compute_seq_hash_for_block(local);
    let block_hashes = sequence.into_iter().map(ExternalSequenceBlockHash).collect();
    let data = KvCacheEventData::Removed(KvCacheRemoveData { block_hashes });
    RouterEvent::new(node, KvCacheEvent { event_id: 0, dp_rank: 0, data })
}

pub fn build(workload: &Workload, side: &mut Side) -> (Peer, Vec<Vec<LocalBlockHash>>) {
    let chains: Vec<_> = workload.chains.iter().map(|chain| hashes(chain)).collect();
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .expect("a runtime");
    let events: Vec<RouterEvent> = workload
        .events
        .iter()
        .enumerate()
        .map(|(id, (node, chain, from, end))| {
            stored(*node, id as u64, &chains[*chain], (*from, *end))
        })
        .collect();
    let event_bytes: usize = events.len() * size_of::<RouterEvent>()
        + workload.entries * size_of::<KvCacheStoredBlockData>();
    let before = bytes_in_use();
    let indexer = ThreadPoolIndexer::new(ConcurrentRadixTreeCompressed::new(), 2, 16);
    let began = Instant::now();
    runtime.block_on(async {
        for event in events {
            indexer.apply_event(event).await;
        }
        indexer.flush().await;
        // A flush may only drain queues: an event that is waited for comes after all others.
        for worker in 0..8 {
            let data = KvCacheEventData::Cleared;
            let event = KvCacheEvent { event_id: 0, dp_rank: 0, data };
            let _ = indexer.apply_event_and_wait(RouterEvent::new(1_000_000 + worker, event)).await;
        }
    });
    side.filled_per_s.push(workload.entries as f64 / began.elapsed().as_secs_f64());
    let bytes = (bytes_in_use() + event_bytes).saturating_sub(before);
    side.bytes_per_entry = bytes as f64 / workload.entries as f64;
    let queries = workload.queries.iter().map(|query| hashes(query)).collect();
    let passing = workload.passing.iter().map(|chain| hashes(chain)).collect();
    let nodes = workload.nodes;
    (Peer { tree: indexer.backend_arc(), indexer, nodes, passing, runtime }, queries)
}

impl Index for Peer {
    type Query = Vec<LocalBlockHash>;

    fn lookup(&self, query: &Vec<LocalBlockHash>) -> (u32, usize) {
        let scores = self.tree.find_matches(query, false).scores;
        (scores.values().copied().max().unwrap_or(0), scores.len())
    }

    fn churn(&self, pace: &mut Pace<'_>) {
        // What its events are made of takes longer than applying them here.
        let node_of = |chain: usize| chain as u64 % self.nodes;
        let put: Vec<RouterEvent> = (self.passing.iter().enumerate())
            .map(|(at, chain)| stored(node_of(at), 0, chain, (0, chain.len())))
            .collect();
        let taken: Vec<RouterEvent> = (self.passing.iter().enumerate())
            .map(|(at, chain)| removed(node_of(at), chain))
            .collect();
        let mut event_id = 0;
        self.runtime.block_on(async {
            while let Some((at, of)) = pace.next() {
                for event in [&put[at], &taken[of]] {
                    event_id += 1;
                    let mut event = event.clone();
                    event.event.event_id = event_id;
                    self.indexer.apply_event(event).await;
                }
                // Its queues have no bound: what is counted as applied is applied.
                if event_id % 1_024 == 0 {
                    self.indexer.flush().await;
                }
            }
            self.indexer.flush().await;
        });
    }
}
