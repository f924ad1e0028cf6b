//! Hints to nodes of what they will be asked for: what only their SSD has of it they read ahead.
//!
//! A hint is sent once and not waited for by anybody. When too many are on their way it is dropped.

use std::sync::Arc;
use std::time::Duration;

use kvasir_placement::{Placement, Refused};
use kvasir_proto::{BlockKey, Namespace, v1};
use tonic::Code;

use super::handle::Cluster;

/// Hints on their way at once.
pub(super) const HINTS_MAX: usize = 64;
/// A node that takes longer to answer is busy with what is there.
const WITHIN: Duration = Duration::from_secs(1);

/// A request that may come later than it was decided upon.
#[derive(Debug)]
pub enum Expected<'a> {
    /// Whoever asked for the decision will send it.
    Planned(&'a Placement),
    /// It may come again.
    Refused(&'a Refused),
}

impl Cluster {
    /// Tells the node that will be asked for these blocks, if its SSD has some of them. To be called within
    /// a tokio runtime.
    pub fn hint(&self, expected: &Expected<'_>, namespace: Namespace, keys: &[BlockKey]) {
        let ahead = match expected {
            Expected::Planned(placement) => placement.ahead(),
            Expected::Refused(refused) => refused.ahead(),
        };
        let Some(ahead) = ahead else { return };
        let client = self.shared().lock().client_of(ahead.node);
        let (Some(mut client), Some(keys)) = (client, keys.get(..ahead.blocks as usize)) else {
            return;
        };
        let hints = self.shared().metrics.hints.clone();
        let count = move |outcome: &str| hints.with_label_values(&[outcome]).inc();
        let Ok(permit) = Arc::clone(&self.shared().hints).try_acquire_owned() else {
            return count("dropped");
        };
        let node = ahead.node.clone();
        let request =
            v1::PrefetchRequest { namespace: namespace.0.to_vec(), keys: BlockKey::concat(keys) };
        tokio::spawn(async move {
            let answer = tokio::time::timeout(WITHIN, client.prefetch(request)).await;
            match answer.map(|answer| answer.map(tonic::Response::into_inner)) {
                Ok(Ok(reply)) => {
                    tracing::debug!(%node, ?reply, "a store node accepted a prefetch hint");
                    count("accepted");
                }
                Ok(Err(status))
                    if matches!(
                        status.code(),
                        Code::ResourceExhausted | Code::FailedPrecondition
                    ) =>
                {
                    tracing::debug!(%node, %status, "a store node refused a prefetch hint");
                    count("refused");
                }
                Ok(Err(_)) | Err(_) => count("failed"),
            }
            drop(permit);
        });
    }
}
