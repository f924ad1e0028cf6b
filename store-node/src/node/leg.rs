//! What the shell keeps for one share that is open or ending: what its bytes are, where they come
//! from and where they go. Who owns which slot and for how long is the block core's.

use std::ops::Range;

use kvasir_blocks::AttachEpoch;
use kvasir_blocks::moving::PushName;
use kvasir_blocks::moving::leaving::Leaving;
use kvasir_blocks::moving::pages::Pages;
use kvasir_blocks::moving::tail_space::TailRange;
use kvasir_proto::{SlotIndex, TxId, v1};
use kvasir_transfer::{Endpoint, PeerId, RegionDesc};

use super::command::Reply;

/// See the module.
#[derive(Debug)]
pub(crate) struct Leg {
    pub pages: Pages,
    /// Leading pages that may only be read.
    pub cached_pages: u32,
    /// Leading pages that are promised: cached, or on their way from the SSD.
    pub held_pages: u32,
    /// Leading pages whose keys came with the allocation.
    pub keyed_pages: u32,
    /// Leading pages that were committed here when they were whole, as far as they could be.
    pub committed_pages: u32,
    /// Pages that the engine added at the end.
    pub grown_pages: u32,
    pub lease_ms: u64,
    pub engine: Option<AttachEpoch>,
    pub incoming: Option<Incoming>,
    pub outgoing: Option<Outgoing>,
    /// The engine's tail, when it came before the targets.
    pub tail: Option<Vec<u8>>,
    /// The engine has said that the prompt is computed.
    pub finished: bool,
    /// A read is open with the block core: a push is owed or under way.
    pub reading: bool,
    /// Source side: the node that has asked for it by itself, and is told when it does not get it.
    pub ordered_by: Option<PeerId>,
    /// Its blocks are copies to have: no engine takes it.
    pub replica: bool,
    /// Source side: routes over its blocks. While there are any, a read is open with the block core for them.
    pub routes: Vec<u64>,
}

impl Leg {
    /// The next page that is to be committed, when it is whole: block follows block.
    pub(crate) fn next_to_commit(&self) -> Option<u32> {
        let page = self.committed_pages.max(self.cached_pages);
        let is_there = page < self.keyed_pages.min(self.pages.count());
        (is_there && self.pages.is_whole(page)).then_some(page)
    }

    /// Pages that the engine may plan to write.
    pub(crate) fn writable_pages(&self) -> Range<u32> {
        self.cached_pages..self.pages.count() + self.grown_pages
    }
}

/// What another node writes here.
#[derive(Debug)]
pub(crate) struct Incoming {
    /// Incarnation of its transfer engine; `None` once it has been cut off.
    pub writer: Option<u64>,
    pub imm: u32,
    pub pages: Range<u32>,
    pub tail: TailRange,
    /// Writes to come: pages x runs + 1.
    pub expected: u32,
    pub state: IncomingState,
    /// Calls that wait for the fetch to be settled, and how many leading pages they know good.
    pub settling: Option<Settling>,
}

#[derive(Debug)]
pub(crate) enum IncomingState {
    Waiting,
    /// All has arrived; the engine is told when it has bound the share.
    Arrived {
        engine: Vec<u8>,
        told: bool,
    },
    /// The fetch ended with less.
    Settled,
}

#[derive(Debug)]
pub(crate) struct Settling {
    pub good_pages: u32,
    pub replies: Vec<Reply<v1::TxCommitReply>>,
}

/// Where this share's pages go.
#[derive(Debug)]
pub(crate) struct Outgoing {
    /// Names it with the transfer engine.
    pub id: u64,
    pub target: Target,
    pub leaving: Leaving<PeerId>,
    /// Source side: the call that waits for the end.
    pub reply: Option<Reply<v1::TxPushReply>>,
}

/// A place on another node, checked.
#[derive(Debug, Clone)]
pub(crate) struct Target {
    pub tx: TxId,
    pub endpoint: Endpoint,
    pub peer: PeerId,
    pub name: PushName,
    /// Writes to it are verified: see [`kvasir_transfer::TransferEngine::verifies`].
    pub verifies: bool,
    pub slots_region: RegionDesc,
    pub first_page: u32,
    pub slots: Vec<SlotIndex>,
    pub tail_region: RegionDesc,
    pub tail_offset_bytes: u64,
    pub tail_bytes_max: u32,
}

impl Target {
    pub(crate) fn pages(&self) -> Range<u32> {
        self.first_page..self.first_page + self.slots.len() as u32
    }

    pub(crate) fn slot(&self, page: u32) -> SlotIndex {
        self.slots[(page - self.first_page) as usize]
    }
}
