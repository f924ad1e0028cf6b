//! Copies that a node makes by itself, on the nodes that its configuration names.

mod common;

use common::*;
use kvasir_proto::{Share, Side};
use kvasir_store_node::config::Config;

const P: fn(u64) -> Share = |serial| share(serial, Side::Prefill);
const S: fn(u64) -> Share = |serial| share(serial, Side::Source);

/// A node with an engine that has computed this prompt.
async fn with_blocks(change: impl FnOnce(&mut Config), prompt: &[u32]) -> (TestNode, FakeEngine) {
    let mut node = TestNode::start_with(Domain::Shm, change).await;
    let mut engine = FakeEngine::attach(&node).await;
    node.allocate(allocate(P(1), prompt)).await.expect("room");
    let slots = engine.bind(P(1)).await.slots;
    engine.compute(P(1), prompt, &slots, 0..prompt.len() as u32 / BLOCK_TOKENS);
    engine.release(P(1));
    node.has_blocks(&chain(prompt)).await;
    node.is_quiet().await;
    (node, engine)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_chain_that_many_ask_for_at_once_gets_a_copy_on_a_peer_by_itself() {
    let (hot, cold) = (prompt(1, 3 * BLOCK_TOKENS), prompt(2, 3 * BLOCK_TOKENS));
    let mut peer = TestNode::start(Domain::Shm).await;
    let peer_engine = FakeEngine::attach(&peer).await;
    let address = peer.address().to_string();
    let replicas = |config: &mut Config| {
        config.replicas.peers = vec![address];
        (config.replicas.hot_asks, config.replicas.hot_pushes) = (3, 2);
    };
    let (mut node, mut engine) = with_blocks(replicas, &hot).await;
    node.allocate(allocate(P(2), &cold)).await.expect("room");
    let slots = engine.bind(P(2)).await.slots;
    engine.compute(P(2), &cold, &slots, 0..3);
    engine.release(P(2));
    node.has_blocks(&chain(&cold)).await;

    // Other nodes want it, and have not got it yet. Of the other chain one ask is no hurry.
    node.allocate(allocate(S(10), &cold)).await.expect("held");
    for serial in 11..14 {
        node.allocate(allocate(S(serial), &hot)).await.expect("held");
    }
    peer.has_blocks(&chain(&hot)).await;
    let copied = "copies_total{cause=\"hot\",outcome=\"copied\"}";
    node.shows(copied, 1.0).await;
    let places = peer.blocks(&chain(&hot)).await;
    let slots: Vec<u32> = places.iter().map(|place| place.slot).collect();
    peer_engine.holds(&hot, &slots, 0..3);

    for serial in 10..14 {
        node.abort(S(serial)).await;
    }
    node.is_quiet().await;
    peer.is_quiet().await;
    assert_eq!(peer.blocks(&chain(&cold)).await.len(), 0);
    assert_eq!(node.metric(copied).await, 1.0, "and no other");
}
