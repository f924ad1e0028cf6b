//! A node that prefills: its cache, which is the store node's own block table, and its queue.

use std::collections::BTreeSet;

use kvasir_blocks::{
    Action, Allocate, AttachEpoch, BlockChange, Blocks, Eviction, KeepRequest, Options, SsdSize,
};
use kvasir_proto::{BlockKey, Namespace, Share, Side, Tenant, TxId};

use crate::link::Way;

const EPOCH: AttachEpoch = AttachEpoch(1);
const LEASE_MS: u64 = 1_000;
const NAMESPACE: Namespace = Namespace([0; 16]);
/// How blocks lie in slots, and what one takes on the SSD: nothing has bytes here.
const LAYOUT: u64 = 1;
const EXTENT_BYTES: u64 = 1;
/// Who has the context cache, for longer than any trace.
const CONTEXT_TENANT: Tenant = Tenant(1);
const CONTEXT_UNTIL_MS: u64 = u64::MAX;

/// What a client says of a prompt: how long its blocks shall stay.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RequestClass {
    /// Not beyond the request.
    Ephemeral,
    /// While there is room.
    Normal,
    /// For sure, on the SSD.
    Context,
}

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
    pub(crate) fn new(blocks: u32, block_tokens: u32, eviction: Eviction) -> Self {
        PrefillNode {
            cache: NodeCache::new(blocks.max(1), block_tokens, eviction),
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
    pub(crate) fn new(slots: u32, block_tokens: u32, eviction: Eviction) -> Self {
        // One slot more than the cache holds: the private one that every share computes into.
        let options = Options {
            slots: slots.saturating_add(1),
            block_tokens,
            finished_ms: 1,
            eviction,
            // All that a prompt lacks may come from the SSD.
            rises_max: slots as usize,
            // One prompt at most replaces all there is.
            event_log_max: 2 * (slots as usize + 1),
            ..Options::default()
        };
        NodeCache { blocks: Blocks::new(options), block_tokens, slots, shares: 0, sequence: 0 }
    }

    /// With an SSD of so many blocks, on which the context cache may have half.
    pub(crate) fn with_ssd(mut self, blocks: u64) -> Self {
        self.blocks.set_extents(LAYOUT, EXTENT_BYTES);
        let size = SsdSize {
            bytes_max: blocks * EXTENT_BYTES,
            context_bytes_max: blocks / 2 * EXTENT_BYTES,
            tenant_bytes_max: blocks / 2 * EXTENT_BYTES,
        };
        self.blocks.ssd_ready(size, Vec::new());
        self
    }

    /// Leading blocks of the chain that are in memory or on the SSD.
    pub(crate) fn held_anywhere(&self, keys: &[BlockKey]) -> usize {
        let is_here = |key: &&BlockKey| {
            self.blocks.block(**key).is_some() || self.blocks.ssd_block(**key).is_some()
        };
        keys.iter().take_while(is_here).count()
    }

    /// Leading blocks of the chain that are here.
    pub(crate) fn held(&self, keys: &[BlockKey]) -> usize {
        keys.iter().take_while(|key| self.blocks.block(**key).is_some()).count()
    }

    /// The prompt's blocks are here now; others make room. A prompt that is
    /// larger than the cache is not taken at all.
    pub(crate) fn commit(&mut self, now_us: u64, keys: &[BlockKey]) {
        self.commit_as(now_us, keys, RequestClass::Normal);
    }

    /// The same for a prompt of any class.
    pub(crate) fn commit_as(&mut self, now_us: u64, keys: &[BlockKey], class: RequestClass) {
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
            namespace: NAMESPACE,
            keys,
            prompt_tokens,
            lease_ms: LEASE_MS,
            fetch_until_block: 0,
            has_remote_writer: false,
            is_ephemeral: class == RequestClass::Ephemeral,
            leaves_ssd: false,
        };
        self.blocks.allocate(now_ms, &request).expect("nothing is pinned between two prompts");
        self.act(now_ms);
        self.blocks.bind(share, EPOCH).expect("it was just allocated");
        for page in 0..pages {
            self.blocks.commit_page(share, page, 0).expect("its own page, in order");
        }
        self.blocks.release(now_ms, share).expect("it is bound");
        self.act(now_ms);
        self.blocks.handle_timeout(now_ms);
        if class == RequestClass::Context {
            let keep = KeepRequest {
                namespace: NAMESPACE,
                keys: request.keys,
                tenant: CONTEXT_TENANT,
                expires_unix_ms: CONTEXT_UNTIL_MS,
                created_unix_ms: Some(now_ms),
                copies: 1,
            };
            // Refused where the context cache is full: then it is a prompt like others.
            let _ = self.blocks.keep(now_ms, &keep);
            self.act(now_ms);
        }
        loop {
            self.blocks.sink_ahead(now_ms);
            if !self.act(now_ms) {
                break;
            }
        }
    }

    /// Does what the table asks for. The SSD takes no time. Whether there was anything.
    fn act(&mut self, now_ms: u64) -> bool {
        let mut any = false;
        while let Some(action) = self.blocks.poll_action() {
            any = true;
            match action {
                Action::Sink { sink, .. } | Action::Rewrite { sink, .. } => {
                    self.blocks.sunk(now_ms, sink, Ok(()));
                }
                Action::Rise { rise, .. } => self.blocks.risen(now_ms, rise, Ok(0)),
                _ => {}
            }
        }
        any
    }

    /// What came and went since the last call, in order.
    pub(crate) fn changes(&mut self) -> Vec<BlockChange> {
        let changes = self.blocks.changes_since(self.sequence, usize::MAX);
        self.sequence = self.blocks.sequence();
        changes.map(|changes| changes.changes).unwrap_or_default()
    }
}
