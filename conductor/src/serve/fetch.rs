//! Brings blocks from another node to the prefill side before it computes.
//!
//! The source pushes them and says how many landed whole. When that is all, the prefill side's
//! node settles by itself; when it is fewer it must be told, and the rest is computed. So a lost
//! or rotten source never fails a request.

use kvasir_proto::{Side, TxId, v1};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tonic::Status;

use super::Serving;
use super::job::Job;
use super::transaction::within;
use crate::cluster::{EngineTarget, FetchSource};

/// A fetch for which both sides were asked.
#[derive(Debug)]
pub(super) struct Fetch {
    pub source: FetchSource,
    /// Where the prefill side wants the blocks.
    pub targets: v1::WriteTargets,
    /// The source has pinned what it has of them.
    pub pinned: bool,
}

/// Bytes moved and microseconds it took; `None` when not all came.
pub(super) type Moved = Option<(u64, u64)>;

/// Runs it to its end. Fails only when the prefill side's node does. `lost` is cancelled when the
/// source does not answer any more.
pub(super) async fn run(
    serving: &Serving,
    job: &Job,
    tx: TxId,
    prefill: &EngineTarget,
    fetch: Option<Fetch>,
    lost: CancellationToken,
) -> Result<Moved, Status> {
    let Some(Fetch { source, targets, pinned }) = fetch else { return Ok(None) };
    let asked = targets.slots.len() as u32;
    let started = Instant::now();
    let push = async {
        tokio::select! {
            pushed = push(job, tx, &source, targets) => pushed,
            () = lost.cancelled() => Err(Status::unavailable("lost the lease of the fetch source")),
        }
    };
    let pushed = if pinned { Some(push.await) } else { None };
    let (valid_blocks, source_lost) = match pushed {
        // Nobody was ever told where to write.
        None => (0, false),
        Some(Ok(good)) if good >= asked => {
            // The prefill side may have held more than was thought.
            let planned = u64::from(source.until_block - source.from_block).max(1);
            let bytes = source.bytes / planned * u64::from(asked);
            let us = u64::try_from(started.elapsed().as_micros()).unwrap_or(u64::MAX);
            return Ok(Some((bytes, us)));
        }
        Some(Ok(good)) => (good, false),
        Some(Err(status)) => {
            tracing::warn!(node = %source.node.node_id, %status, "the store node that is the source of a fetch failed");
            (0, true)
        }
    };
    let request = v1::TxCommitRequest {
        tx: Some(tx.into()),
        side: Side::Prefill.to_wire(),
        valid_blocks,
        source_lost,
    };
    let mut client = prefill.node.client.clone();
    let commit = client.tx_commit(request);
    if source_lost {
        // Waits until that source can write no more; only the request's deadline ends it.
        commit.await?;
    } else {
        within(serving.options.lease, commit).await?;
    }
    Ok(None)
}

/// Blocks that landed whole. Half of the time that is left is for this, the other half for
/// computing what did not come.
async fn push(
    job: &Job,
    tx: TxId,
    source: &FetchSource,
    targets: v1::WriteTargets,
) -> Result<u32, Status> {
    let side = Side::Source.to_wire();
    let request = v1::TxPushRequest { tx: Some(tx.into()), side, targets: Some(targets) };
    let mut client = source.node.client.clone();
    let remaining = job.deadline.saturating_duration_since(Instant::now());
    let reply = within(remaining / 2, client.tx_push(request)).await?;
    if reply.corrupt_blocks > 0 {
        let corrupt_blocks = reply.corrupt_blocks;
        tracing::warn!(node = %source.node.node_id, corrupt_blocks, "a store node dropped corrupt blocks");
    }
    Ok(reply.valid_blocks)
}
