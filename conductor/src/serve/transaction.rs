//! What one attempt may hold on the nodes. Whoever drops it before [`Transaction::finish`], for
//! whatever reason and in whatever phase, makes every node that was ever asked give its share
//! back. A node that has not heard of the transaction yet keeps a tombstone, so the order in which
//! an allocation and its abort arrive does not matter.

use std::sync::Arc;
use std::time::Duration;

use kvasir_proto::{Share, Side, TxId, v1};
use tokio::runtime::Handle;
use tonic::Status;

use super::phase::PhaseCell;
use super::renewal::{Renewal, Renewer};
use super::{Serving, abort};
use crate::cluster::NodeHandle;

/// See the module.
#[derive(Debug)]
pub(super) struct Transaction<'a> {
    pub tx: TxId,
    serving: &'a Serving,
    phase: &'a PhaseCell,
    runtime: Handle,
    /// What must be given back.
    shares: Vec<(NodeHandle, Side)>,
}

impl<'a> Transaction<'a> {
    /// Takes note of all shares before any is asked for.
    pub(super) fn begin(
        serving: &'a Serving,
        phase: &'a PhaseCell,
        shares: Vec<(NodeHandle, Side)>,
    ) -> Transaction<'a> {
        let tx = serving.next_tx();
        Transaction { tx, serving, phase, runtime: Handle::current(), shares }
    }

    /// Asks one node for its share.
    pub(super) async fn allocate(
        &self,
        node: &NodeHandle,
        request: v1::TxAllocateRequest,
    ) -> Result<v1::TxAllocateReply, Status> {
        let mut client = node.client.clone();
        let reply = within(self.serving.options.lease, client.tx_allocate(request)).await?;
        // What was said to its peers of a node that has restarted since is wrong.
        if reply.incarnation != node.incarnation.0 {
            return Err(Status::aborted("the node has restarted"));
        }
        Ok(reply)
    }

    /// Renews all shares from now on.
    pub(super) fn renew(&self) -> Renewal {
        let Serving { tasks, metrics, options, cluster, .. } = self.serving;
        let renewer = Renewer {
            cluster: cluster.clone(),
            metrics: Arc::clone(metrics),
            tx: self.tx,
            lease: options.lease,
        };
        Renewal::start(tasks, renewer, self.shares.clone())
    }

    /// Ends one share now; the rest goes on without it.
    pub(super) fn abort_share(&mut self, side: Side, reason: &'static str) {
        let (ended, kept) = self.shares.drain(..).partition(|(_, other)| *other == side);
        self.shares = kept;
        self.abort(ended, reason);
    }

    /// One share has ended by itself.
    pub(super) fn share_ended(&mut self, side: Side) {
        self.shares.retain(|(_, other)| *other != side);
    }

    /// All shares have ended, or their engines end them.
    pub(super) fn finish(mut self) {
        self.shares.clear();
    }

    fn abort(&self, shares: Vec<(NodeHandle, Side)>, reason: &'static str) {
        for (node, side) in shares {
            let share = Share { tx: self.tx, side };
            let Serving { tasks, metrics, .. } = self.serving;
            abort::spawn(&self.runtime, tasks, Arc::clone(metrics), node, share, reason);
        }
    }
}

impl Drop for Transaction<'_> {
    fn drop(&mut self) {
        if self.shares.is_empty() {
            return;
        }
        let phase = self.phase.get().name();
        self.serving.metrics.abandoned.with_label_values(&[phase]).inc();
        tracing::debug!(tx = %self.tx, phase, "the conductor aborts a transaction");
        let shares = std::mem::take(&mut self.shares);
        self.abort(shares, phase);
    }
}

/// A call that has to be answered at once, with a bound on what that means.
pub(super) async fn within<T>(
    limit: Duration,
    call: impl Future<Output = Result<tonic::Response<T>, Status>>,
) -> Result<T, Status> {
    match tokio::time::timeout(limit, call).await {
        Ok(reply) => reply.map(tonic::Response::into_inner),
        Err(_) => Err(Status::deadline_exceeded("the node did not answer in time")),
    }
}
