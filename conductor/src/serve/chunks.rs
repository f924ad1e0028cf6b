//! Chunks of a prompt, before its engine is called: copies of those that are fetched are brought to its node,
//! and those that stay where they are, are pinned there. What does not succeed costs time and no token: the
//! engine computes what it does not find.

use futures::future::join_all;
use kvasir_proto::{BlockKey, Side, v1};
use tokio::time::Instant;

use super::attempt::Scene;
use super::reserve::pin_keys;
use super::transaction::{Transaction, within};
use crate::cluster::{ChunkTarget, EngineTarget, QueriedChunk};

/// Of the time that a request has left, copies of its chunks may take this part.
const FETCH_SHARE: u32 = 4;

/// The chunks of one attempt.
#[derive(Default)]
pub(super) struct Brought<'a> {
    /// As the engine is told.
    pub wire: Vec<v1::Chunk>,
    pub tokens_elsewhere: u32,
    /// Those, and what is copied or here already, as far as is known.
    pub tokens_reused: u32,
    /// Of what is attended elsewhere. The engine ends the shares with its call.
    held: Vec<Transaction<'a>>,
}

impl Brought<'_> {
    /// The engine has ended its call as it should.
    pub fn finish(self) {
        self.held.into_iter().for_each(Transaction::finish);
    }
}

/// See the module.
pub(super) async fn bring<'a>(
    scene: Scene<'a>,
    targets: &[ChunkTarget],
    engine: &EngineTarget,
) -> Brought<'a> {
    // A model that was replaced meanwhile may have blocks of another size, and so other chunks than were placed.
    let targets = || targets.iter().chain(std::iter::repeat(&ChunkTarget::Computed));
    let chunks = || scene.prompt.chunks().iter().zip(targets());
    // Leases of what is pinned must not wait for copies.
    let fetched = join_all(chunks().map(|(chunk, target)| fetch(scene, chunk, target, engine)));
    let fetched = fetched.await;
    let mut brought = Brought::default();
    for ((chunk, target), fetched) in chunks().zip(fetched) {
        let blocks = chunk.keys.len() as u32;
        let tokens = blocks * scene.prompt.block_tokens();
        let routed = match target {
            ChunkTarget::Routed(node) => pin(scene, chunk, node).await,
            _ => None,
        };
        let is_here = matches!(target, ChunkTarget::Here) || fetched;
        brought.tokens_reused += if is_here || routed.is_some() { tokens } else { 0 };
        brought.tokens_elsewhere += if routed.is_some() { tokens } else { 0 };
        let (span, held) = routed.unzip();
        brought.held.extend(held);
        brought.wire.push(v1::Chunk {
            first_position: chunk.first_position,
            blocks,
            routed: span.into_iter().collect(),
        });
    }
    brought
}

/// Whether a copy is on the engine's node now.
async fn fetch(
    scene: Scene<'_>,
    chunk: &QueriedChunk,
    target: &ChunkTarget,
    engine: &EngineTarget,
) -> bool {
    let ChunkTarget::Fetched(source) = target else { return false };
    let request = v1::ReplicateRequest {
        namespace: scene.prompt.namespace().0.to_vec(),
        keys: BlockKey::concat(&chunk.keys),
        target: engine.node.address.to_string(),
    };
    let remaining = scene.job.deadline.saturating_duration_since(Instant::now());
    let mut client = source.client.clone();
    let copied = within(remaining / FETCH_SHARE, client.replicate(request)).await;
    let is_here = copied.as_ref().is_ok_and(|copied| copied.blocks as usize >= chunk.keys.len());
    if !is_here {
        tracing::info!(node = %source.node_id, ?copied, "a chunk was not fetched");
    }
    is_here
}

/// Pins a chunk where it is to be attended.
async fn pin<'a>(
    scene: Scene<'a>,
    chunk: &QueriedChunk,
    node: &crate::cluster::NodeHandle,
) -> Option<(v1::RoutedSpan, Transaction<'a>)> {
    let shares = vec![(node.clone(), Side::Source)];
    // One of its own: a node has one share of a transaction, and each chunk is a chain of its own.
    let mut held = Transaction::begin(scene.serving, scene.phase, shares);
    if !pin_keys(scene, &mut held, node, &chunk.keys).await {
        held.finish();
        return None;
    }
    let span = v1::RoutedSpan {
        node: node.address.to_string(),
        tx: Some(held.tx.into()),
        lease_ms: scene.serving.options.lease_ms(),
        first_block: 0,
        blocks: chunk.keys.len() as u32,
    };
    Some((span, held))
}
