//! The leases of one request at its holders: renewed for as long as it lasts, ended with it.

use std::time::Duration;

use kvasir_proto::v1;
use kvasir_proto::v1::store_node_client::StoreNodeClient;
use tokio_util::sync::{CancellationToken, DropGuard};
use tonic::transport::Channel;

use super::SpanRequest;

/// Renewed so many times in the time of one lease.
const RENEWALS: u64 = 4;

/// See the module. Ends them when it is dropped.
#[derive(Debug)]
pub(super) struct Leases {
    ends: CancellationToken,
    _end: DropGuard,
    held: Vec<Held>,
}

#[derive(Debug, Clone)]
struct Held {
    channel: Channel,
    share: v1::TxShare,
    lease_ms: u64,
}

impl Default for Leases {
    fn default() -> Self {
        let ends = CancellationToken::new();
        Leases { _end: ends.clone().drop_guard(), ends, held: Vec::new() }
    }
}

impl Leases {
    /// A share that ends with these; from the next [`Leases::renew`] on it is renewed until then.
    pub(super) fn add(&mut self, channel: Channel, request: &SpanRequest) {
        let side = v1::Side::Source.into();
        let share = v1::TxShare { tx: Some(request.tx.into()), side };
        let held = Held { channel, share, lease_ms: request.lease_ms };
        let (ends, ending) = (self.ends.clone(), held.clone());
        tokio::spawn(async move {
            ends.cancelled().await;
            ending.end().await;
        });
        self.held.push(held);
    }

    /// Begins to renew those that are not renewed yet.
    pub(super) fn renew(&mut self) {
        for held in self.held.drain(..) {
            let ends = self.ends.clone();
            tokio::spawn(async move {
                // Whether it is alive is seen by its queries: a share that is not refuses them.
                let _ = ends.run_until_cancelled(held.renew_for_ever()).await;
            });
        }
    }
}

impl Held {
    async fn renew_for_ever(self) {
        let every = Duration::from_millis((self.lease_ms / RENEWALS).max(1));
        let mut node = StoreNodeClient::new(self.channel);
        loop {
            tokio::time::sleep(every).await;
            let request = v1::RenewRequest { shares: vec![self.share], lease_ms: self.lease_ms };
            match node.renew(request).await {
                Ok(reply) if reply.get_ref().unknown.is_empty() => {}
                Ok(_) => {
                    tracing::warn!(tx = ?self.share.tx, "a lease of the engine at a holder has expired");
                    return;
                }
                // It is tried again while the lease lasts, and longer.
                Err(status) => {
                    tracing::warn!(%status, "the engine cannot renew a lease at a holder; retrying");
                }
            }
        }
    }

    async fn end(self) {
        let v1::TxShare { tx, side } = self.share;
        let reason = "the request has ended".to_owned();
        // When it does not arrive, the lease runs out.
        let _ = StoreNodeClient::new(self.channel)
            .tx_abort(v1::TxAbortRequest { tx, side, reason })
            .await;
    }
}
