//! A node that prefills: its cache, which is the store node's own block table, and its queue.

use std::collections::BTreeSet;

use kvasir_blocks::{Allocate, AttachEpoch, BlockChange, Blocks, Options};
use kvasir_proto::{BlockKey, Namespace, Share, Side, TxId};

use crate::link::Way;

const EPOCH: AttachEpoch = AttachEpoch(1);
const LEASE_MS: u64 = 1_000;

/// See the module.
#[derive(Debug)]
pub(crate) struct PrefillNode {
    pub(crate) cache: NodeCache,
    /// (rank, request) of those that wait.
    pub(crate) queue: BTreeSet<(u64, usize)>,
    pub(crate) running: Option<Running>,
    pub(crate) way_in: Way,
    pub(crate) way_out: Way,
}

/// A prefill that runs.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Running {
    pub(crate) request: usize,
    pub(crate) rank_us: u64,
    pub(crate) began_us: u64,
    pub(crate) ends_us: u64,
}

impl Running {
    /// Its rank by what is left of it.
    pub(crate) fn rank_at(&self, now_us: u64, stretch: f64) -> u64 {
        let done_us = now_us.saturating_sub(self.began_us);
        self.rank_us.saturating_sub((done_us as f64 * stretch) as u64)
    }

    /// When the chunk ends that it computes now, unless it ends with it.
    pub(crate) fn chunk_ends_us(&self, now_us: u64, chunk_us: u64) -> Option<u64> {
        let chunks = (now_us - self.began_us).div_ceil(chunk_us).max(1);
        let at_us = self.began_us + chunks * chunk_us;
        (at_us < self.ends_us).then_some(at_us)
    }
}

impl PrefillNode {
    pub(crate) fn new(blocks: u32, block_tokens: u32) -> Self {
        PrefillNode {
            cache: NodeCache::new(blocks.max(1), block_tokens),
            queue: BTreeSet::new(),
            running: None,
            way_in: Way::default(),
            way_out: Way::default(),
        }
    }
}

/// A node's cache. A prompt comes into it when its prefill ends, all at once.
#[derive(Debug)]
pub(crate) struct NodeCache {
    blocks: Blocks,
    block_tokens: u32,
    slots: u32,
    shares: u64,
    /// Changes that were read.
    sequence: u64,
}

impl NodeCache {
    pub(crate) fn new(slots: u32, block_tokens: u32) -> Self {
        // One slot more than the cache holds: the private one that every share computes into.
        let options = Options {
            slots: slots.saturating_add(1),
            block_tokens,
            finished_ms: 1,
            // One prompt at most replaces all there is.
            event_log_max: 2 * (slots as usize + 1),
            ..Options::default()
        };
        NodeCache { blocks: Blocks::new(options), block_tokens, slots, shares: 0, sequence: 0 }
    }

    /// Leading blocks of the chain that are here.
    pub(crate) fn held(&self, keys: &[BlockKey]) -> usize {
        keys.iter().take_while(|key| self.blocks.block(**key).is_some()).count()
    }

    /// The prompt's blocks are here now; what was used longest ago makes room. A prompt that is
    /// larger than the cache is not taken at all.
    pub(crate) fn commit(&mut self, now_us: u64, keys: &[BlockKey]) {
        let now_ms = now_us / 1_000;
        let keys = match keys.is_empty() || keys.len() > self.slots as usize {
            true => return,
            false => keys.to_vec(),
        };
        self.shares += 1;
        let share = Share {
            tx: TxId { conductor_incarnation: 1, serial: self.shares },
            side: Side::Prefill,
        };
        let pages = keys.len() as u32;
        // One token more, so that the last block, too, may be found here.
        let prompt_tokens = pages * self.block_tokens + 1;
        let request = Allocate {
            share,
            namespace: Namespace([0; 16]),
            keys,
            prompt_tokens,
            lease_ms: LEASE_MS,
            fetch_until_block: 0,
            has_remote_writer: false,
            is_ephemeral: false,
        };
        self.blocks.allocate(now_ms, &request).expect("nothing is pinned between two prompts");
        self.blocks.bind(share, EPOCH).expect("it was just allocated");
        for page in 0..pages {
            self.blocks.commit_page(share, page, Vec::new()).expect("its own page, in order");
        }
        self.blocks.release(now_ms, share).expect("it is bound");
        while self.blocks.poll_action().is_some() {}
        self.blocks.handle_timeout(now_ms);
        while self.blocks.poll_action().is_some() {}
    }

    /// What came and went since the last call, in order.
    pub(crate) fn changes(&mut self) -> Vec<BlockChange> {
        let changes = self.blocks.changes_since(self.sequence, usize::MAX);
        self.sequence = self.blocks.sequence();
        changes.map(|changes| changes.changes).unwrap_or_default()
    }
}
