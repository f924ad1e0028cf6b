//! Tells the nodes that a transaction is over. Tried a few times in the background, because the
//! request that held it has ended; a node that hears nothing lets the lease run out.

use std::sync::Arc;
use std::time::Duration;

use kvasir_proto::{Share, v1};
use tokio::runtime::Handle;
use tokio_util::task::TaskTracker;

use crate::cluster::NodeHandle;
use crate::metrics::Metrics;

const TRIES: u32 = 4;
const TRY_WITHIN: Duration = Duration::from_secs(2);
const FIRST_PAUSE: Duration = Duration::from_millis(50);

/// Starts telling one node; `tasks` knows of it until it is done.
pub(super) fn spawn(
    runtime: &Handle,
    tasks: &TaskTracker,
    metrics: Arc<Metrics>,
    node: NodeHandle,
    share: Share,
    reason: &'static str,
) {
    metrics.aborts_in_flight.inc();
    let task = async move {
        let result = if abort(node, share, reason).await { "confirmed" } else { "failed" };
        metrics.aborts.with_label_values(&[result]).inc();
        metrics.aborts_in_flight.dec();
    };
    tasks.spawn_on(task, runtime);
}

async fn abort(node: NodeHandle, share: Share, reason: &'static str) -> bool {
    let mut pause = FIRST_PAUSE;
    for attempt in 1..=TRIES {
        let request = v1::TxAbortRequest {
            tx: Some(share.tx.into()),
            side: share.side.to_wire(),
            reason: reason.to_owned(),
        };
        let mut client = node.client.clone();
        match tokio::time::timeout(TRY_WITHIN, client.tx_abort(request)).await {
            Ok(Ok(_)) => return true,
            Ok(Err(error)) => {
                tracing::debug!(%share, node = %node.node_id, attempt, %error, "the conductor's call to abort a share failed");
            }
            Err(_) => {
                tracing::debug!(%share, node = %node.node_id, attempt, "the conductor's call to abort a share timed out");
            }
        }
        if attempt < TRIES {
            tokio::time::sleep(pause).await;
            pause *= 4;
        }
    }
    tracing::warn!(%share, node = %node.node_id, "the conductor cannot abort a share; its lease will expire");
    false
}
