//! What conductors, nodes and engines say to each other in the simulation: the services of `proto`, as
//! far as they are used here, as plain values.

use kvasir_blocks::{AttachEpoch, Bound, ContextName, CopiedContext, HeldCopies};
use kvasir_proto::{BlockKey, Generation, Namespace, Share, SlotIndex, Tenant};
use kvasir_transfer::{Endpoint, RegionDesc};

/// How long an answer is waited for, where no disk has to be.
pub const CALL_US: u64 = 120_000;

/// Who calls nodes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Party {
    Conductor(usize),
    Node(usize),
}

impl Party {
    /// For what is drawn for its calls.
    pub fn number(self) -> u64 {
        match self {
            Party::Conductor(conductor) => conductor as u64,
            Party::Node(node) => 32 + node as u64,
        }
    }
}

/// Names a call, so that its answer finds who asked; the same for each of its tries.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Caller {
    pub who: Party,
    pub incarnation: u64,
    pub call: u64,
}

/// Until when a chain is kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Term {
    Ttl {
        ttl_ms: u64,
    },
    /// As another node has promised it.
    Until {
        expires_unix_ms: u64,
        created_unix_ms: Option<u64>,
    },
}

/// From a conductor or a node to a node, or to the engine on it.
#[derive(Debug, Clone)]
pub enum Call {
    Allocate(Box<AllocateCall>),
    Push {
        share: Share,
        targets: Box<Targets>,
    },
    Commit {
        share: Share,
        valid_blocks: u32,
        source_lost: bool,
    },
    Abort {
        share: Share,
    },
    Renew {
        shares: Vec<Share>,
        lease_ms: u64,
    },
    /// A hint that these will be asked for.
    Prefetch {
        namespace: Namespace,
        keys: Vec<BlockKey>,
    },
    Keep {
        namespace: Namespace,
        keys: Vec<BlockKey>,
        tenant: Tenant,
        term: Term,
        /// On so many nodes.
        copies: u8,
        /// All of it or nothing.
        whole: bool,
    },
    /// Which of these contexts are kept there?
    Holds {
        contexts: Vec<CopiedContext>,
    },
    /// Another node shall have a copy of these.
    Replicate {
        namespace: Namespace,
        keys: Vec<BlockKey>,
        to: usize,
    },
    /// What are you?
    Describe,
    /// A context gets another time from now, or (none) is dropped.
    Change {
        context: ContextName,
        ttl_ms: Option<u64>,
    },
    /// To the engine: begin with a leg. Told again, nothing happens.
    Start {
        leg: LegStart,
    },
}

#[derive(Debug, Clone)]
pub struct AllocateCall {
    pub share: Share,
    pub namespace: Namespace,
    pub keys: Vec<BlockKey>,
    pub prompt_tokens: u32,
    pub lease_ms: u64,
    pub fetch_until_block: u32,
    pub writer: Option<Endpoint>,
    pub is_ephemeral: bool,
    pub leaves_ssd: bool,
    /// Its blocks are copies to have: nobody computes anything.
    pub is_replica: bool,
}

/// What an engine is to do for a request.
#[derive(Debug, Clone)]
pub struct LegStart {
    pub share: Share,
    /// Which engine of the node is to do it.
    pub engine: usize,
    pub request: usize,
    /// Prefill side: it answers too.
    pub answers: bool,
    pub reply: Caller,
}

/// Where another node may write.
#[derive(Debug, Clone)]
pub struct Targets {
    pub endpoint: Endpoint,
    pub slots_region: RegionDesc,
    pub tail_region: RegionDesc,
    pub tail_offset_bytes: u64,
    pub first_page: u32,
    pub slots: Vec<SlotIndex>,
    pub imm: u32,
    pub namespace: Namespace,
}

#[derive(Debug, Clone)]
pub enum Reply {
    Allocated {
        held_blocks: u32,
        targets: Option<Box<Targets>>,
    },
    /// Source side: pages that landed intact.
    Pushed {
        valid_blocks: u32,
    },
    Committed {
        held_blocks: u32,
    },
    Kept {
        kept_blocks: u32,
    },
    /// Of the contexts that were asked for.
    Holds(HeldCopies),
    /// Whether all of them are alive.
    Renewed {
        all: bool,
    },
    Replicated {
        blocks: u32,
    },
    Described {
        incarnation: u64,
        draining: bool,
        available: u32,
        keeps: bool,
    },
    Done,
    /// From the engine that answers.
    Answered {
        tokens: Vec<u32>,
    },
    Refused(String),
}

/// What becomes of what a client puts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kept {
    Normal,
    /// As long as its client lives.
    Ephemeral,
    For {
        ttl_ms: u64,
    },
}

/// From a client of objects to its node.
#[derive(Debug, Clone)]
pub enum FromClient {
    Reserve {
        keys: Vec<BlockKey>,
        lease_ms: u64,
    },
    /// These of what was reserved are written, with these checksums.
    Commit {
        reserve: u64,
        objects: Vec<u32>,
        checksums: Vec<Vec<u64>>,
        kept: Kept,
    },
    Get {
        keys: Vec<BlockKey>,
    },
    Unpin {
        get: u64,
    },
    Find {
        keys: Vec<BlockKey>,
    },
    Remove {
        keys: Vec<BlockKey>,
    },
    /// The process has ended; the last that is heard of it.
    Gone,
}

/// From a node to a client, in answer to what it said last.
#[derive(Debug, Clone)]
pub enum ToClient {
    /// A slot for each object that is not there, and the version of it that is put.
    Reserved {
        slots: Vec<Option<SlotIndex>>,
        versions: Vec<u32>,
    },
    Committed,
    Got {
        slots: Vec<Option<(SlotIndex, Generation)>>,
    },
    Found,
    Removed,
    Refused,
}

/// From a node to its engine.
#[derive(Debug, Clone)]
pub enum ToEngine {
    Start(LegStart),
    Bound { share: Share, bound: Option<Bound> },
    Ready { share: Share, tail: Vec<u8> },
    Stop { share: Share },
    Grown { share: Share, slots: Vec<SlotIndex> },
    Got { handle: u64, keys: Vec<BlockKey>, slots: Vec<SlotIndex> },
    PagesDropped { handle: u64 },
}

/// From an engine to its node.
#[derive(Debug, Clone)]
pub enum FromEngine {
    Bind {
        share: Share,
    },
    /// Layers of pages are written.
    Finished {
        share: Share,
        step: u32,
        pages: std::ops::Range<u32>,
        layer: u16,
        /// Where they were computed: in its pool, or in their slots.
        in_pool: bool,
    },
    /// From this page of a share on, it computes in these pages of its pool.
    Compute {
        share: Share,
        step: u32,
        first: u32,
        pages: Vec<u32>,
    },
    DropPages {
        handle: u64,
        pages: Vec<u32>,
    },
    Grow {
        share: Share,
        pages: u32,
    },
    Commit {
        share: Share,
        page: u32,
        key: BlockKey,
    },
    FinishPrefill {
        share: Share,
        tail: Vec<u8>,
    },
    Release {
        share: Share,
    },
    Alive {
        shares: Vec<Share>,
    },
    Get {
        handle: u64,
        keys: Vec<BlockKey>,
    },
    Unpin {
        handle: u64,
    },
    /// The process has ended; the last that is heard of it.
    Gone {
        epoch: AttachEpoch,
        /// Which of its node's.
        index: usize,
    },
}
