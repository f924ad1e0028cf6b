//! What callers submit: one-sided writes.

use std::time::Duration;

use crate::engine::PeerId;
use crate::region::{RegionDesc, RegionHandle};

/// Where the bytes come from. A region's range must not change until the write has ended; after
/// `DeadlineExceeded` and `Cancelled` too it is not read any more.
#[derive(Debug, Clone)]
pub enum Source {
    Region { handle: RegionHandle, offset: usize, bytes: usize },
    Inline(Vec<u8>),
}

/// One write: lands whole, and is then counted once.
#[derive(Debug, Clone)]
pub struct Write {
    pub peer: PeerId,
    pub source: Source,
    pub target: RegionDesc,
    pub target_offset: u64,
    /// Counted at the receiver when every byte has landed.
    pub imm: Option<u32>,
    /// XXH3-64 of the bytes, as the caller has stored it.
    pub checksum: Option<u64>,
    /// Names what can be drained together (see `TransferEngine::drain_group`).
    pub group: u64,
    /// From now.
    pub deadline: Duration,
}

/// One side of a paged write: page `i` lies at `offset + indices[i] * stride`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PageSide {
    pub offset: u64,
    pub stride: u64,
    pub indices: Vec<u32>,
}

/// Many writes of equal size, submitted and completed together. Each page is a write of its own, with
/// its own count.
#[derive(Debug, Clone)]
pub struct WritePaged {
    pub peer: PeerId,
    pub source: RegionHandle,
    pub source_pages: PageSide,
    pub target: RegionDesc,
    pub target_pages: PageSide,
    pub page_bytes: usize,
    pub imm: Option<u32>,
    /// One for each page, or none at all.
    pub checksums: Vec<u64>,
    pub group: u64,
    /// From now, for all pages.
    pub deadline: Duration,
}
