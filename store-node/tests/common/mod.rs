//! Nodes in this process, and engines that are made of a few calls.

#![allow(dead_code, reason = "an example and an end-to-end test include it, and use a part")]

mod engine;
mod node;
pub(super) mod pooled;

use std::time::{Duration, Instant};

use kvasir_proto::{BlockKey, Namespace, Share, Side, SlotLayout, TxId, keys, v1};

pub(super) use engine::{FakeEngine, engine_options};
pub(super) use kvasir_transfer::Domain;
pub(super) use node::{TestNode, node_config};

/// Long enough that a slow machine never meets it.
pub(super) const PATIENCE: Duration = Duration::from_secs(20);

pub(super) const BLOCK_TOKENS: u32 = 64;
pub(super) const LAYERS: u16 = 4;
const ROW_BYTES: u64 = 16;

pub(super) fn layout() -> SlotLayout {
    SlotLayout::layer_major(BLOCK_TOKENS, LAYERS.into(), ROW_BYTES).expect("a layout")
}

pub(super) fn namespace() -> Namespace {
    keys::namespace(b"model", "f32", "", "")
}

/// The same share of the same prompt for another tenant.
pub(super) fn of_another_tenant(share: Share, prompt: &[u32]) -> v1::TxAllocateRequest {
    let namespace = keys::namespace(b"model", "f32", "another tenant", "");
    let keys = keys::chain(namespace, prompt, BLOCK_TOKENS as usize);
    v1::TxAllocateRequest {
        namespace: namespace.0.to_vec(),
        keys: BlockKey::concat(&keys),
        ..allocate(share, prompt)
    }
}

/// A prompt that differs from others from its first token on.
pub(super) fn prompt(seed: u32, tokens: u32) -> Vec<u32> {
    (0..tokens).map(|at| seed * 100_000 + at).collect()
}

pub(super) fn chain(prompt: &[u32]) -> Vec<BlockKey> {
    keys::chain(namespace(), prompt, BLOCK_TOKENS as usize)
}

pub(super) fn tx(serial: u64) -> TxId {
    TxId { conductor_incarnation: 7, serial }
}

pub(super) fn share(serial: u64, side: Side) -> Share {
    Share { tx: tx(serial), side }
}

/// What an allocation asks for; the rest is set by the test.
pub(super) fn allocate(share: Share, prompt: &[u32]) -> v1::TxAllocateRequest {
    v1::TxAllocateRequest {
        tx: Some(share.tx.into()),
        side: share.side.to_wire(),
        namespace: namespace().0.to_vec(),
        keys: BlockKey::concat(&chain(prompt)),
        prompt_tokens: prompt.len() as u32,
        lease_ms: 30_000,
        ..v1::TxAllocateRequest::default()
    }
}

/// Looks again and again until it is so.
pub(super) async fn until<T>(what: &str, mut look: impl AsyncFnMut() -> Option<T>) -> T {
    let started = Instant::now();
    loop {
        if let Some(found) = look().await {
            return found;
        }
        assert!(started.elapsed() < PATIENCE, "not in time: {what}");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

/// The bytes of one layer of one page of a prompt: every page and layer differs.
pub(super) fn page_bytes(prompt: &[u32], page: u32, layer: u16) -> Vec<u8> {
    let first = prompt[(page * BLOCK_TOKENS) as usize];
    let length = u64::from(BLOCK_TOKENS) * ROW_BYTES;
    (0..length as u32)
        .map(|at| (at ^ (at >> 8) ^ first.wrapping_mul(31) ^ (u32::from(layer) << 5)) as u8)
        .collect()
}
