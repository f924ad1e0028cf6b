//! Renews the leases of a transaction's shares until the hand-over, every third of the lease.

use std::sync::Arc;
use std::time::Duration;

use futures::future::join_all;
use kvasir_proto::{Share, Side, TxId, v1};
use tokio_util::sync::{CancellationToken, DropGuard};
use tokio_util::task::TaskTracker;
use tracing::Instrument;

use crate::cluster::NodeHandle;
use crate::metrics::Metrics;

/// Renews for as long as it lives.
#[derive(Debug)]
pub(super) struct Renewal {
    _stop: DropGuard,
}

impl Renewal {
    pub fn start(
        tasks: &TaskTracker,
        metrics: Arc<Metrics>,
        tx: TxId,
        shares: Vec<(NodeHandle, Side)>,
        lease: Duration,
    ) -> Renewal {
        let stop = CancellationToken::new();
        let stopped = stop.clone();
        let renew = async move {
            tokio::select! {
                () = renew(metrics, tx, shares, lease) => {}
                () = stopped.cancelled() => {}
            }
        };
        tasks.spawn(renew.in_current_span());
        Renewal { _stop: stop.drop_guard() }
    }
}

/// Ends when no share is left to renew.
async fn renew(
    metrics: Arc<Metrics>,
    tx: TxId,
    mut shares: Vec<(NodeHandle, Side)>,
    lease: Duration,
) {
    let every = lease / 3;
    while !shares.is_empty() {
        tokio::time::sleep(every).await;
        let calls = shares.iter().map(|(node, side)| renew_one(node, tx, *side, lease, every));
        let alive = join_all(calls).await;
        let mut alive = alive.into_iter();
        shares.retain(|(node, side)| {
            let alive = alive.next().unwrap_or(true);
            if !alive {
                // A share that its engine is done with, or one that was lost: the legs say which.
                metrics.renewals_unknown.inc();
                let share = Share { tx, side: *side };
                tracing::debug!(%share, node = %node.node_id, "nothing to renew any more");
            }
            alive
        });
    }
}

/// Whether the share may still be alive.
async fn renew_one(
    node: &NodeHandle,
    tx: TxId,
    side: Side,
    lease: Duration,
    within: Duration,
) -> bool {
    let share = v1::TxShare { tx: Some(tx.into()), side: side.to_wire() };
    let lease_ms = u64::try_from(lease.as_millis()).unwrap_or(u64::MAX);
    let request = v1::RenewRequest { shares: vec![share], lease_ms };
    let mut client = node.client.clone();
    match tokio::time::timeout(within, client.renew(request)).await {
        Ok(Ok(reply)) => reply.into_inner().unknown.is_empty(),
        Ok(Err(error)) => {
            tracing::debug!(%error, node = %node.node_id, "a lease was not renewed");
            true
        }
        Err(_) => true,
    }
}
