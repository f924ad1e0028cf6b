//! Chunks of a prompt, before its engine is called: copies of those that are fetched are brought to its node,
//! and those that stay where they are, are pinned there. What does not succeed costs time and no token: the
//! engine computes what it does not find.
//!
//! What is pinned is renewed from then on until the hand-over: others may still be waited for, and the engine
//! begins to renew only when it is called.

use std::time::Duration;

use futures::future::join_all;
use futures::{StreamExt, stream};
use kvasir_proto::{BlockKey, Side, v1};
use tokio::time::Instant;

use super::attempt::Scene;
use super::renewal::Renewal;
use super::reserve::pin_keys;
use super::transaction::{Transaction, within};
use crate::cluster::{Booking, ChunkTarget, EngineTarget, NodeHandle, QueriedChunk};

/// Of the time that a request has left, copies of all its chunks may take this part.
const FETCH_SHARE: u32 = 4;
/// So many copies are asked for at once: a node makes two, and has a queue that others need too.
const FETCHES_AT_ONCE: usize = 4;

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
    /// Of those, until the hand-over. Which is lost the engine sees: its queries are refused.
    renewals: Vec<Renewal>,
}

impl Brought<'_> {
    /// The engine renews by itself.
    pub(super) fn hand_over(&mut self) {
        self.renewals.clear();
    }

    /// The engine has ended its call as it should.
    pub(super) fn finish(self) {
        self.held.into_iter().for_each(Transaction::finish);
    }
}

/// See the module.
pub(super) async fn bring<'a>(
    scene: Scene<'a>,
    targets: &[ChunkTarget],
    engine: &EngineTarget,
    booking: &Booking,
) -> Brought<'a> {
    // A model that was replaced meanwhile may have blocks of another size, and so other chunks than were placed.
    let targets = || targets.iter().chain(std::iter::repeat(&ChunkTarget::Computed));
    let chunks = || scene.prompt.chunks().iter().zip(targets()).enumerate();
    let fetched = fetch_all(scene, chunks(), engine, booking).await;
    // As many as are routed at most: four.
    let pinned = join_all(chunks().map(|(at, (chunk, target))| async move {
        let ChunkTarget::Routed(node) = target else { return None };
        let pinned = pin(scene, chunk, node).await;
        if pinned.is_none() {
            booking.unrouted_chunk(at);
        }
        pinned
    }));
    let pinned = pinned.await;
    let mut brought = Brought::default();
    for ((at, (chunk, target)), pinned) in chunks().zip(pinned) {
        let blocks = chunk.keys.len() as u32;
        let tokens = blocks * scene.prompt.block_tokens();
        let is_here = matches!(target, ChunkTarget::Here) || fetched.contains(&at);
        brought.tokens_reused += if is_here || pinned.is_some() { tokens } else { 0 };
        brought.tokens_elsewhere += if pinned.is_some() { tokens } else { 0 };
        let mut routed = Vec::new();
        if let Some((span, held, renewal)) = pinned {
            routed.push(span);
            brought.held.push(held);
            brought.renewals.push(renewal);
        }
        brought.wire.push(v1::Chunk { first_position: chunk.first_position, blocks, routed });
    }
    brought
}

/// Brings copies, a few at a time. Answers which of them are on the engine's node now. Together they have a part
/// of the time that is left: what has not come then is not waited for, nor asked for.
async fn fetch_all<'a>(
    scene: Scene<'_>,
    chunks: impl Iterator<Item = (usize, (&'a QueriedChunk, &'a ChunkTarget))>,
    engine: &EngineTarget,
    booking: &Booking,
) -> Vec<usize> {
    let began = Instant::now();
    let remaining = scene.job.deadline.saturating_duration_since(began);
    let until = began + remaining / FETCH_SHARE;
    let copies = chunks.filter_map(|(at, (chunk, target))| match target {
        ChunkTarget::Fetched(source) => Some(async move {
            let is_here = fetch(scene, chunk, (source, engine), until).await;
            let bytes = booking.chunk_fetched(at);
            is_here.then(|| (at, bytes, began.elapsed()))
        }),
        _ => None,
    });
    let copies: Vec<_> = copies.collect();
    let copied: Vec<Option<(usize, u64, Duration)>> =
        stream::iter(copies).buffered(FETCHES_AT_ONCE).collect().await;
    let copied = || copied.iter().flatten();
    // They share the way: what it carries is seen of all of them.
    if let Some(last) = copied().map(|(_, _, after)| *after).max() {
        let us = u64::try_from(last.as_micros()).unwrap_or(u64::MAX);
        booking.moved(copied().map(|(_, bytes, _)| bytes).sum(), us);
    }
    copied().map(|(at, _, _)| *at).collect()
}

/// Whether a copy is on the engine's node now.
async fn fetch(
    scene: Scene<'_>,
    chunk: &QueriedChunk,
    (source, engine): (&NodeHandle, &EngineTarget),
    until: Instant,
) -> bool {
    let left = until.saturating_duration_since(Instant::now());
    if left.is_zero() {
        tracing::info!(node = %source.node_id, "the conductor has no time left to fetch a reusable chunk");
        return false;
    }
    let request = v1::ReplicateRequest {
        namespace: scene.prompt.namespace().0.to_vec(),
        keys: BlockKey::concat(&chunk.keys),
        target: engine.node.address.to_string(),
    };
    let mut client = source.client.clone();
    let copied = within(left, client.replicate(request)).await;
    let is_here = copied.as_ref().is_ok_and(|copied| copied.blocks as usize >= chunk.keys.len());
    if !is_here {
        tracing::info!(node = %source.node_id, reply = ?copied, "the conductor cannot fetch a reusable chunk");
    }
    is_here
}

/// Pins a chunk where it is to be attended.
async fn pin<'a>(
    scene: Scene<'a>,
    chunk: &QueriedChunk,
    node: &NodeHandle,
) -> Option<(v1::RoutedSpan, Transaction<'a>, Renewal)> {
    let shares = vec![(node.clone(), Side::Source)];
    // One of its own: a node has one share of a transaction, and each chunk is a chain of its own.
    let mut held = Transaction::begin(scene.serving, scene.phase, shares);
    if !pin_keys(scene, &mut held, node, &chunk.keys).await {
        held.finish();
        return None;
    }
    let span = v1::RoutedSpan {
        node_address: node.address.to_string(),
        tx: Some(held.tx.into()),
        lease_ms: scene.serving.options.lease_ms(),
        first_block: 0,
        blocks: chunk.keys.len() as u32,
    };
    let renewal = held.renew();
    Some((span, held, renewal))
}
