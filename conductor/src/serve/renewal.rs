//! Renews the leases of a transaction's shares until the hand-over, every third of the lease, and
//! says which of them could not be renewed: a node that hangs, or that nothing reaches any more,
//! says nothing itself, and no call to its engine has to end because of it.

use std::future::pending;
use std::time::Duration;

use futures::future::join_all;
use kvasir_proto::{Share, Side, TxId, v1};
use tokio::sync::mpsc;
use tokio::time::Instant;
use tokio_util::sync::{CancellationToken, DropGuard};
use tokio_util::task::TaskTracker;
use tracing::Instrument;

use crate::cluster::{Cluster, NodeHandle};
use crate::metrics::Metrics;

/// Renews for as long as it lives.
#[derive(Debug)]
pub(super) struct Renewal {
    lost: mpsc::Receiver<Side>,
    _stop: DropGuard,
}

/// What renewing works with.
#[derive(Debug)]
pub(super) struct Renewer {
    pub cluster: Cluster,
    pub metrics: std::sync::Arc<Metrics>,
    pub tx: TxId,
    pub lease: Duration,
}

/// A share and when it was last known to be renewed.
#[derive(Debug)]
struct Held {
    node: NodeHandle,
    side: Side,
    renewed: Instant,
    /// The last renewal was not answered, and its node was not followed then.
    unfollowed: bool,
}

/// What a node said.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Answer {
    Renewed,
    /// It has no such share.
    Unknown,
    /// Nothing that would say that the share is alive.
    Nothing,
}

impl Renewal {
    /// The shares have just been allocated.
    pub(super) fn start(
        tasks: &TaskTracker,
        renewer: Renewer,
        shares: Vec<(NodeHandle, Side)>,
    ) -> Renewal {
        let stop = CancellationToken::new();
        let stopped = stop.clone();
        let (losses, lost) = mpsc::channel(shares.len().max(1));
        let renewed = Instant::now();
        let held = |(node, side)| Held { node, side, renewed, unfollowed: false };
        let held = shares.into_iter().map(held).collect();
        let renew = async move {
            tokio::select! {
                () = renewer.renew(held, losses) => {}
                () = stopped.cancelled() => {}
            }
        };
        tasks.spawn(renew.in_current_span());
        Renewal { lost, _stop: stop.drop_guard() }
    }

    /// The next side whose share could not be renewed for as long as a lease, or whose node does
    /// not answer twice and is followed no more: it is over, or will be before anything comes of it.
    pub(super) async fn lost(&mut self) -> Side {
        match self.lost.recv().await {
            Some(side) => side,
            // No share is left to renew.
            None => pending().await,
        }
    }
}

impl Renewer {
    /// Ends when no share is left to renew.
    async fn renew(self, mut held: Vec<Held>, losses: mpsc::Sender<Side>) {
        let mut due = Instant::now();
        while !held.is_empty() {
            // At fixed times, so that an answer that is waited for does not put off the next
            // question: one that never comes must not use up the lease.
            due = (due + self.lease / 3).max(Instant::now());
            tokio::time::sleep_until(due).await;
            let asked = Instant::now();
            let answers = join_all(held.iter().map(|held| self.renew_one(held))).await;
            let mut answers = answers.into_iter();
            held.retain_mut(|held| match answers.next().unwrap_or(Answer::Nothing) {
                Answer::Renewed => {
                    (held.renewed, held.unfollowed) = (asked, false);
                    true
                }
                Answer::Unknown => {
                    // A share that its engine is done with, or one that was lost: the legs say
                    // which.
                    self.metrics.renewals_unknown.inc();
                    tracing::debug!(share = %self.share(held), node = %held.node.node_id,
                        "a store node no longer has a share");
                    false
                }
                Answer::Nothing => {
                    let lost = self.is_lost(held);
                    if lost {
                        self.metrics.renewals_lost.inc();
                        tracing::warn!(share = %self.share(held), node = %held.node.node_id,
                            "the conductor lost a share: it could not renew the share's lease");
                        // There is room for every share.
                        let _ = losses.try_send(held.side);
                    }
                    !lost
                }
            });
        }
    }

    /// One that answers is not lost, even if its events have just ended: they begin anew. Nor is
    /// one whose connection broke under one renewal: the next one goes over another connection.
    fn is_lost(&self, held: &mut Held) -> bool {
        let was_unfollowed = held.unfollowed;
        held.unfollowed = !self.cluster.follows(&held.node);
        held.renewed.elapsed() >= self.lease || (was_unfollowed && held.unfollowed)
    }

    fn share(&self, held: &Held) -> Share {
        Share { tx: self.tx, side: held.side }
    }

    async fn renew_one(&self, held: &Held) -> Answer {
        let share = v1::TxShare { tx: Some(self.tx.into()), side: held.side.to_wire() };
        let lease_ms = u64::try_from(self.lease.as_millis()).unwrap_or(u64::MAX);
        let request = v1::RenewRequest { shares: vec![share], lease_ms };
        let mut client = held.node.client.clone();
        match tokio::time::timeout(self.lease / 3, client.renew(request)).await {
            Ok(Ok(reply)) if reply.get_ref().unknown.is_empty() => Answer::Renewed,
            Ok(Ok(_)) => Answer::Unknown,
            Ok(Err(error)) => {
                tracing::debug!(%error, node = %held.node.node_id, "the conductor cannot renew leases at a store node");
                Answer::Nothing
            }
            Err(_) => Answer::Nothing,
        }
    }
}
