//! The jobs that the node's thread gives to the task of the object store, and the reports that come back.

use kvasir_blocks::{RiseError, SinkError, SsdBlock};
use kvasir_proto::{BlockKey, Namespace, SlotIndex};
use tokio::sync::{mpsc, oneshot};

use crate::backlog::Backlog;
use crate::ssd::thread::{ReadBlock, Shape};

/// Jobs that wait for the task. The node keeps further ones.
pub(super) const JOBS_MAX: usize = 1_024;
/// Reports that wait for the node. If there are more, the task waits.
pub(crate) const REPORTS_MAX: usize = 1_024;

/// A request of the node's thread.
#[derive(Debug)]
pub(crate) enum Job {
    Upload {
        upload: u64,
        block: SsdBlock,
        from: Source,
    },
    Download {
        rise: u64,
        slot: SlotIndex,
        block: SsdBlock,
        shape: Shape,
    },
    /// Delete an object under all its names.
    Discard {
        discard: u64,
        namespace: Namespace,
        key: BlockKey,
    },
}

/// Where the bytes of a block come from.
#[derive(Debug)]
pub(crate) enum Source {
    /// With the checksum that it must have.
    Slot { slot: SlotIndex, checksum: Option<u64>, shape: Shape },
    /// Read by the thread beside the SSD.
    Ssd(oneshot::Receiver<Result<ReadBlock, SinkError>>),
    /// The object store has them under another name, which is not there any more when the upload has ended well.
    Bucket(SsdBlock),
}

/// The outcome of a job, or a change of the object store's state.
#[derive(Debug)]
pub(crate) enum Report {
    /// The objects that the object store holds and that have not expired. `left_out` more were not listed, and `foreign`
    /// names are not the cluster's.
    Listed {
        blocks: Vec<SsdBlock>,
        left_out: u64,
        foreign: u64,
    },
    /// Whether the object store can be used, and a sentence for the operator.
    State {
        usable: bool,
        state: String,
    },
    Uploaded {
        upload: u64,
        result: Result<(), SinkError>,
        why: Option<String>,
    },
    Risen {
        rise: u64,
        result: Result<u64, RiseError>,
        why: Option<String>,
    },
    /// Counts of names: deleted, and not deleted because of an error.
    Deleted {
        deleted: u64,
        failed: u64,
    },
    /// The number of names that were deleted, and whether the object is gone.
    Discarded {
        discard: u64,
        deleted: u64,
        is_gone: bool,
        why: Option<String>,
    },
}

/// Where reports go; the task waits while there is no room.
pub(crate) struct Reports {
    pub sender: mpsc::Sender<Report>,
    /// Wakes the node.
    pub ring: Box<dyn Fn() + Send + Sync>,
}

impl Reports {
    pub(crate) async fn post(&self, report: Report) {
        // Refused only when the node's thread has ended.
        let _ = self.sender.send(report).await;
        (self.ring)();
    }
}

/// The node's end. Dropping it ends the task. The block core bounds its jobs in flight, and so the overflow.
pub(crate) type BucketTask = Backlog<Job, mpsc::Sender<Job>>;
