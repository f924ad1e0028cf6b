//! What the owner knows of one open share: its request, its pages and who holds them.
//!
//! A page is one slot of the share. Its `Hold` says by what right the share has it, and so what to
//! do when the share ends.

use std::ops::Range;

use kvasir_proto::{BlockKey, Imm, SlotIndex};

use crate::api::{AbortReason, Allocate, Allocated, Bound, ShareView};
use crate::share_state::{Phase, ShareState};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Hold {
    /// The slot is reserved for this share alone.
    Private,
    /// The slot is committed, and the share has one pin.
    Pinned,
    /// The slot is reserved for this share alone and full; its key was indexed before, and the
    /// share has one pin of that copy, so that the blocks it commits next have a parent.
    Duplicate { kept: SlotIndex },
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct Page {
    pub(crate) slot: SlotIndex,
    pub(crate) hold: Hold,
}

impl Page {
    /// The committed copy that the share has a pin of.
    pub(crate) fn pinned(self) -> Option<SlotIndex> {
        match self.hold {
            Hold::Private => None,
            Hold::Pinned => Some(self.slot),
            Hold::Duplicate { kept } => Some(kept),
        }
    }

    /// The slot that is reserved for the share alone.
    pub(crate) fn private(self) -> Option<SlotIndex> {
        match self.hold {
            Hold::Private | Hold::Duplicate { .. } => Some(self.slot),
            Hold::Pinned => None,
        }
    }
}

#[derive(Debug)]
pub(crate) struct ShareRecord {
    pub(crate) request: Allocate,
    pub(crate) state: ShareState,
    /// Blocks that were committed here at `allocate`.
    pub(crate) held_blocks: u32,
    /// Leading blocks whose rows are there: held, and then those that arrived.
    pub(crate) cached_blocks: u32,
    /// Pages that come from the SSD: when that fails for one it ends there.
    pub(crate) rising: Range<u32>,
    pub(crate) prompt_pages: u32,
    /// Of the prompt, then grown. Once nothing here touches the share any more, only the targets
    /// that its remote writer may still write (see `blocks::ending`).
    pub(crate) pages: Vec<Page>,
    /// Pages of the remote writer.
    pub(crate) targets: Range<u32>,
    pub(crate) imm: Option<Imm>,
    pub(crate) lease_until_ms: u64,
    pub(crate) aborted: Option<Aborted>,
    /// Its blocks follow no other, and nobody asks for it once it has ended.
    pub(crate) of_objects: bool,
    /// It only waits for what is read ahead, and nobody asks for it at all.
    pub(crate) is_hint: bool,
    /// It only pins what is copied into pages of the engine's pool, and nobody asks for it at all.
    pub(crate) is_fill: bool,
}

#[derive(Debug, Clone)]
pub(crate) struct Aborted {
    pub(crate) since_ms: u64,
    pub(crate) reason: AbortReason,
}

impl ShareRecord {
    pub(crate) fn allocated(&self) -> Allocated {
        Allocated {
            held_blocks: self.held_blocks,
            promoting_blocks: match self.state.rising {
                true => self.held_blocks - self.cached_blocks,
                false => 0,
            },
            pages: self.prompt_slots(),
            targets: self.targets.clone(),
            imm: self.imm,
        }
    }

    pub(crate) fn bound(&self, block_tokens: u32) -> Bound {
        Bound {
            slots: self.prompt_slots(),
            cached_tokens: self.cached_blocks * block_tokens,
            arrived: self.imm.is_some() && self.state.settled(),
        }
    }

    pub(crate) fn page(&self, page: u32) -> Option<Page> {
        self.pages.get(page as usize).copied()
    }

    pub(crate) fn key_of_prompt(&self, page: u32) -> Option<BlockKey> {
        self.request.keys.get(page as usize).copied()
    }

    /// A write of another node may still land in this page.
    pub(crate) fn may_be_written_remotely(&self, page: u32) -> bool {
        self.state.writer_may_write() && self.targets.contains(&page)
    }

    /// Has a pin of this slot.
    pub(crate) fn reads_slot(&self, slot: SlotIndex) -> bool {
        self.pages.iter().any(|page| page.pinned() == Some(slot))
    }

    pub(crate) fn is_aborted(&self) -> bool {
        self.state.phase == Phase::Aborted
    }

    pub(crate) fn view(&self) -> ShareView<'_> {
        ShareView {
            request: &self.request,
            held_blocks: self.held_blocks,
            slots: self.pages.iter().map(|page| page.slot).collect(),
            targets: self.targets.clone(),
            imm: self.imm,
            settled: self.state.settled(),
            writer_may_write: self.state.writer_may_write(),
            bound_to: self.state.epoch(),
            reads: self.state.reads,
            aborting: self.is_aborted(),
        }
    }

    fn prompt_slots(&self) -> Vec<SlotIndex> {
        self.pages.iter().take(self.prompt_pages as usize).map(|page| page.slot).collect()
    }
}
