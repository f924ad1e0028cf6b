//! What the log asks of a disk: three operations, and their ends in any order.

use std::time::Duration;

use crate::buffer::PageBuf;

/// One operation; `id` comes back with its end. Offsets are multiples of a page.
#[derive(Debug)]
pub enum DiskOp {
    Read {
        id: u64,
        offset_bytes: u64,
        buffer: PageBuf,
    },
    Write {
        id: u64,
        offset_bytes: u64,
        buffer: PageBuf,
    },
    /// Every write whose end was reported before this was submitted is durable when it ends.
    Sync {
        id: u64,
    },
}

impl DiskOp {
    pub fn id(&self) -> u64 {
        match self {
            DiskOp::Read { id, .. } | DiskOp::Write { id, .. } | DiskOp::Sync { id } => *id,
        }
    }
}

/// The end of an operation. After an error of a write or a sync nothing is known of what was
/// written.
#[derive(Debug)]
pub struct DiskDone {
    pub id: u64,
    pub result: Result<(), DiskError>,
    /// That of the operation; none for a sync.
    pub buffer: Option<PageBuf>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum DiskError {
    #[error("the disk is full")]
    NoSpace,
    /// The number is the system's.
    #[error("the disk has failed with error {0}")]
    Io(i32),
    /// Fewer bytes were moved than were asked for.
    #[error("the disk moved fewer bytes than it was asked for")]
    Short,
}

/// A disk that takes some operations at a time.
pub trait Disk {
    fn len_bytes(&self) -> u64;

    /// Operations that it may have at once.
    fn depth(&self) -> usize;

    /// Begins an operation. The caller keeps to [`depth`](Self::depth).
    fn submit(&mut self, op: DiskOp);

    /// What has ended. When nothing has, waits so long for something: an empty answer means that
    /// the disk hangs (or had nothing to do).
    fn complete(&mut self, wait: Duration) -> Vec<DiskDone>;
}
