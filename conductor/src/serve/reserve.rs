//! Allocates the shares of one attempt on all nodes at once.

use kvasir_proto::{BlockKey, Side, v1};
use tonic::Status;

use super::attempt::Scene;
use super::fault::{Fault, node_fault};
use super::fetch::Fetch;
use super::transaction::Transaction;
use crate::cluster::{EngineTarget, FetchSource};

/// What the nodes answered.
pub(super) struct Reserved {
    held_blocks: u32,
    /// Empty when prefill and decode are one.
    pub decode_targets: v1::WriteTargets,
    /// Absent when nothing is to be fetched.
    pub fetch: Option<Fetch>,
}

impl Reserved {
    /// Leading blocks that will not be computed, if all goes well.
    pub fn reused_blocks(&self) -> u32 {
        let fetched = self.fetch.as_ref().filter(|fetch| fetch.pinned);
        fetched.map_or(0, |fetch| fetch.source.until_block).max(self.held_blocks)
    }
}

/// Asks all nodes at once; fails when one that is needed does.
pub(super) async fn reserve(
    scene: Scene<'_>,
    transaction: &Transaction<'_>,
    prefill: &EngineTarget,
    decode: Option<&EngineTarget>,
    source: Option<&FetchSource>,
) -> Result<Reserved, Fault> {
    let max_tokens = scene.job.sampling.max_tokens;
    let keys = BlockKey::concat(scene.prompt.keys());
    let until = source.map_or(0, |source| source.until_block);
    let request = |side: Side| v1::TxAllocateRequest {
        tx: Some(transaction.tx.into()),
        side: side.to_wire(),
        namespace: scene.prompt.namespace().0.to_vec(),
        keys: keys.clone(),
        prompt_tokens: scene.prompt.length(),
        lease_ms: u64::try_from(scene.serving.options.lease.as_millis()).unwrap_or(u64::MAX),
        ..v1::TxAllocateRequest::default()
    };
    let on_prefill = async {
        let request = v1::TxAllocateRequest {
            fetch_until_block: until,
            writer_endpoint: source.map_or_else(Vec::new, |s| s.node.endpoint.to_vec()),
            answer_tokens_max: if decode.is_none() { max_tokens } else { 0 },
            ..request(Side::Prefill)
        };
        let reply = transaction.allocate(&prefill.node, request).await;
        reply.map_err(|status| node_fault(scene, &status, prefill))
    };
    let on_decode = async {
        let Some(decode) = decode else { return Ok(v1::WriteTargets::default()) };
        let request = v1::TxAllocateRequest {
            writer_endpoint: prefill.node.endpoint.to_vec(),
            answer_tokens_max: max_tokens,
            ..request(Side::Decode)
        };
        let reply = transaction.allocate(&decode.node, request).await;
        let targets = reply.and_then(|reply| {
            reply.targets.ok_or_else(|| Status::internal("the node named no place to write to"))
        });
        targets.map_err(|status| node_fault(scene, &status, decode))
    };
    // A source that has nothing costs time, not the request: the prompt is computed then.
    let on_source = async {
        let Some(source) = source else { return Ok(false) };
        let mut request = request(Side::Source);
        request.keys.truncate(until as usize * 16);
        request.fetch_until_block = until;
        let reply = transaction.allocate(&source.node, request).await;
        if let Err(status) = &reply {
            tracing::info!(node = %source.node.node_id, %status, "the source of a fetch declined");
        }
        Ok(reply.is_ok())
    };
    let (prefill_reply, decode_targets, pinned) =
        tokio::try_join!(on_prefill, on_decode, on_source)?;
    let held_blocks = prefill_reply.held_blocks;
    let fetch = source.zip(prefill_reply.targets).map(|(source, targets)| Fetch {
        source: source.clone(),
        targets,
        pinned,
    });
    Ok(Reserved { held_blocks, decode_targets, fetch })
}
