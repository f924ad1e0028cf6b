//! What the log asks of a disk: three operations, and their ends in any order.

use std::fmt::Debug;
use std::time::Duration;

use crate::buffer::PageBuf;

/// A range of memory that the log never touches and whoever drives the disk knows: a slot of a node. So payloads go
/// between disk and slot without a copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Span {
    pub offset_bytes: usize,
    pub length_bytes: usize,
}

/// One operation; `id` comes back with its end. Offsets are multiples of a page. With `rest` it goes on behind the buffer:
/// what lies there is read into that range, or the range is written there, and then zeros to the end of its last page.
#[derive(Debug)]
pub enum DiskOp {
    Read {
        id: u64,
        offset_bytes: u64,
        buffer: PageBuf,
        rest: Option<Span>,
    },
    Write {
        id: u64,
        offset_bytes: u64,
        buffer: PageBuf,
        rest: Option<Span>,
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
    /// The checksum of what is in the operation's `rest`, computed after it had ended well.
    pub rest_sum: Option<u64>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum DiskError {
    #[error("the disk is full")]
    NoSpace,
    /// The number is the system's.
    #[error("the disk failed with error number {0}")]
    Io(i32),
    /// Fewer bytes were moved than were asked for.
    #[error("the disk transferred fewer bytes than requested")]
    Short,
    /// What was written from memory was not, or is not any more, what its checksum says.
    #[error("the bytes in memory failed their checksum")]
    Changed,
}

/// A disk that takes some operations at a time.
pub trait Disk {
    fn len_bytes(&self) -> u64;

    /// Operations that it may have at once.
    fn depth(&self) -> usize;

    /// Begins an operation, at the latest with the next [`complete`](Self::complete). The caller keeps to [`depth`](Self::depth), and nobody else has to do with its `rest`
    /// until its end is reported.
    fn submit(&mut self, op: DiskOp);

    /// What has ended. When nothing has, waits so long for something: an empty answer means that
    /// the disk hangs (or had nothing to do).
    fn complete(&mut self, wait: Duration) -> Vec<DiskDone>;
}

/// The memory that spans lie in, for disks that move bytes themselves.
pub trait Memory: Debug + Send {
    fn read(&self, span: Span) -> Vec<u8>;
    /// As many bytes as the span has.
    fn write(&self, span: Span, bytes: &[u8]);
}
