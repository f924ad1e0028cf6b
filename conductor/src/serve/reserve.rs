//! Allocates the shares of one attempt on all nodes at once.

use futures::future::try_join_all;
use kvasir_proto::{BlockKey, Side, v1};
use tonic::Status;

use super::attempt::Scene;
use super::fault::{Fault, node_fault};
use super::fetch::Fetch;
use super::transaction::Transaction;
use crate::cluster::{EngineTarget, FetchSource, NodeHandle, RouteHolder};

/// What the nodes answered.
pub(super) struct Reserved {
    cached_blocks: u32,
    /// Empty when prefill and decode are one.
    pub decode_targets: v1::WriteTargets,
    /// Absent when nothing is to be fetched.
    pub fetch: Option<Fetch>,
    /// Blocks that are attended elsewhere.
    routed_blocks: u32,
}

impl Reserved {
    /// Whether the node of the prefill side has what is before those that are attended elsewhere.
    pub(super) fn has_before(&self, first_routed: u32) -> bool {
        self.cached_blocks >= first_routed
    }

    /// Leading blocks that will not be computed, if all goes well.
    pub(super) fn reused_blocks(&self) -> u32 {
        let fetched = self.fetch.as_ref().filter(|fetch| fetch.pinned);
        let held = self.cached_blocks + self.routed_blocks;
        fetched.map_or(0, |fetch| fetch.source.until_block).max(held)
    }
}

/// What all allocations of an attempt have in common.
fn request(
    scene: Scene<'_>,
    transaction: &Transaction<'_>,
    side: Side,
    keys: &[BlockKey],
) -> v1::TxAllocateRequest {
    v1::TxAllocateRequest {
        tx: Some(transaction.tx.into()),
        side: side.to_wire(),
        namespace: scene.prompt.namespace().0.to_vec(),
        keys: BlockKey::concat(keys),
        prompt_tokens: scene.prompt.length(),
        lease_ms: scene.serving.options.lease_ms(),
        cache_class: scene.job.cache.to_wire().into(),
        ..v1::TxAllocateRequest::default()
    }
}

/// Pins the blocks that are to be attended where they are, with all holders at once, each with what is before its
/// own. Answers whether all of them are there: otherwise nothing is held of them.
pub(super) async fn pin(
    scene: Scene<'_>,
    transaction: &mut Transaction<'_>,
    holders: &[RouteHolder],
) -> bool {
    let shared = &*transaction;
    let pinned = holders.iter().map(async |holder| {
        let keys = &scene.prompt.keys()[..(holder.first_block + holder.blocks) as usize];
        is_pinned(scene, shared, &holder.node, keys).await.then_some(()).ok_or(())
    });
    // The first no is enough: what the others have pinned meanwhile nobody renews yet.
    let are_pinned = try_join_all(pinned).await.is_ok();
    if !are_pinned {
        transaction.abort_share(Side::Source, "route");
    }
    are_pinned
}

/// The same for any chain, with one node.
pub(super) async fn pin_keys(
    scene: Scene<'_>,
    transaction: &mut Transaction<'_>,
    node: &NodeHandle,
    keys: &[BlockKey],
) -> bool {
    let pinned = is_pinned(scene, transaction, node, keys).await;
    if !pinned {
        transaction.abort_share(Side::Source, "route");
    }
    pinned
}

async fn is_pinned(
    scene: Scene<'_>,
    transaction: &Transaction<'_>,
    node: &NodeHandle,
    keys: &[BlockKey],
) -> bool {
    let wanted = v1::TxAllocateRequest {
        prompt_tokens: keys.len() as u32 * scene.prompt.block_tokens(),
        ..request(scene, transaction, Side::Source, keys)
    };
    let reply = transaction.allocate(node, wanted).await;
    let pinned = match &reply {
        Ok(reply) => reply.cached_blocks as usize >= keys.len(),
        Err(_) => false,
    };
    if !pinned {
        tracing::info!(node = %node.node_id, ?reply, "a store node cannot pin routed blocks");
    }
    pinned
}

/// The prefill side of an attempt.
#[derive(Debug, Clone, Copy)]
pub(super) struct Computing<'a> {
    pub target: &'a EngineTarget,
    /// From this one on so many are attended elsewhere: slots are for the others.
    pub first_routed: u32,
    pub routed_blocks: u32,
    /// So are these, of its chunks.
    pub chunk_tokens_elsewhere: u32,
    /// What only its SSD has is fetched or computed.
    pub skip_promotion: bool,
}

/// Asks all nodes at once; fails when one that is needed does.
pub(super) async fn reserve(
    scene: Scene<'_>,
    transaction: &Transaction<'_>,
    Computing {
        target: prefill,
        first_routed,
        routed_blocks,
        chunk_tokens_elsewhere,
        skip_promotion,
    }: Computing<'_>,
    decode: Option<&EngineTarget>,
    source: Option<&FetchSource>,
) -> Result<Reserved, Fault> {
    let max_tokens = scene.job.sampling.max_tokens;
    let until = source.map_or(0, |source| source.until_block);
    let request = |side: Side| request(scene, transaction, side, scene.prompt.keys());
    let on_prefill = async {
        let mut request = request(Side::Prefill);
        if routed_blocks > 0 {
            let first = first_routed as usize;
            request.keys.drain(first * 16..(first + routed_blocks as usize) * 16);
            request.prompt_tokens -= routed_blocks * scene.prompt.block_tokens();
            // Without all before them nobody could find them.
            request.cache_class = v1::CacheClass::Ephemeral.into();
        }
        if !scene.prompt.chunks().is_empty() {
            // Rows lie one after another without what is elsewhere, and nobody finds them: the keys of what is behind
            // a chunk only count the slots.
            request.prompt_tokens -= chunk_tokens_elsewhere;
            let blocks = request.prompt_tokens / scene.prompt.block_tokens();
            request.keys.truncate(blocks as usize * 16);
            request.cache_class = v1::CacheClass::Ephemeral.into();
        }
        let request = v1::TxAllocateRequest {
            fetch_until_block: until,
            writer_endpoint: source.map_or_else(Vec::new, |s| s.node.endpoint.to_vec()),
            generated_tokens_max: if decode.is_none() { max_tokens } else { 0 },
            skip_promotion,
            ..request
        };
        let reply = transaction.allocate(&prefill.node, request).await;
        reply.map_err(|status| node_fault(scene, &status, prefill))
    };
    let on_decode = async {
        let Some(decode) = decode else { return Ok(v1::WriteTargets::default()) };
        let request = v1::TxAllocateRequest {
            writer_endpoint: prefill.node.endpoint.to_vec(),
            generated_tokens_max: max_tokens,
            ..request(Side::Decode)
        };
        let reply = transaction.allocate(&decode.node, request).await;
        let targets = reply.and_then(|reply| {
            reply.targets.ok_or_else(|| Status::internal("the node returned no write targets"))
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
            tracing::info!(node = %source.node.node_id, %status, "a store node refused to be the source of a fetch");
        }
        Ok(reply.is_ok())
    };
    let (prefill_reply, decode_targets, pinned) =
        tokio::try_join!(on_prefill, on_decode, on_source)?;
    let cached_blocks = prefill_reply.cached_blocks;
    let fetch = source.zip(prefill_reply.targets).map(|(source, targets)| Fetch {
        source: source.clone(),
        targets,
        pinned,
    });
    Ok(Reserved { cached_blocks, decode_targets, fetch, routed_blocks })
}
