//! Copies that a node makes by itself, on the nodes that its configuration names: of what many ask for, and of
//! contexts that are to be on several nodes.

use std::net::SocketAddr;
use std::path::Path;

use crate::common::*;
use kvasir_proto::{BlockKey, Share, Side, v1};
use kvasir_store_node::config::{Config, Ssd};
use tonic::Code;

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
        config.replication.peers = vec![address];
        (config.replication.hot_requests_min, config.replication.hot_pushes_min) = (3, 2);
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
    let copied = "replications_total{cause=\"hot\",outcome=\"copied\"}";
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

const TENANT: &str = "tenant";

/// A node with an SSD.
async fn keeper(change: impl FnOnce(&mut Config)) -> TestNode {
    let ssd_of = |config: &mut Config| {
        let dir = config.attach_dir.with_file_name("ssd");
        config.ssd = Ssd {
            dir: Some(dir),
            capacity_bytes: 8 << 20,
            segment_bytes: 256 << 10,
            demote_ahead_percent: 0,
            ..Ssd::default()
        };
        change(config);
    };
    let mut node = TestNode::start_with(Domain::Shm, ssd_of).await;
    until("the SSD is ready", async || {
        node.describe().await.ssd.is_some_and(|ssd| ssd.usable).then_some(())
    })
    .await;
    node
}

fn keep(prompt: &[u32], copies: u32) -> v1::PersistContextRequest {
    v1::PersistContextRequest {
        namespace: namespace().0.to_vec(),
        keys: BlockKey::concat(&chain(prompt)),
        tenant: TENANT.into(),
        ttl_ms: 600_000,
        require_all_blocks: true,
        replicas: copies,
        ..v1::PersistContextRequest::default()
    }
}

async fn contexts(node: &mut TestNode) -> Vec<v1::PersistedContext> {
    let request =
        v1::ListContextsRequest { tenant: TENANT.into(), ..v1::ListContextsRequest::default() };
    node.client.list_contexts(request).await.expect("a list").into_inner().contexts
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_context_of_two_copies_is_on_two_nodes_when_it_is_answered_and_a_lost_copy_is_made_again()
{
    let prompt = prompt(1, 3 * BLOCK_TOKENS);
    let mut others = [keeper(|_| {}).await, keeper(|_| {}).await];
    let _engines = [FakeEngine::attach(&others[0]).await, FakeEngine::attach(&others[1]).await];
    let addresses = others.each_ref().map(|node| node.address().to_string());
    let mut node = keeper(|config| {
        config.replication.peers = addresses.to_vec();
        (config.replication.check_interval_ms, config.replication.node_lost_after_ms) = (50, 400);
    })
    .await;
    let mut engine = FakeEngine::attach(&node).await;
    node.allocate(allocate(P(1), &prompt)).await.expect("room");
    let slots = engine.bind(P(1)).await.slots;
    engine.compute(P(1), &prompt, &slots, 0..3);
    engine.release(P(1));
    node.has_blocks(&chain(&prompt)).await;

    let kept = node.client.persist_context(keep(&prompt, 2)).await.expect("kept").into_inner();
    assert_eq!(kept.persisted_blocks, 3);
    let here = contexts(&mut node).await;
    assert_eq!(here.len(), 1);
    let mut there = [contexts(&mut others[0]).await, contexts(&mut others[1]).await];
    let holder = usize::from(there[0].is_empty());
    assert_eq!(there[holder], here, "of the same tenant, since and until when");
    assert_eq!(there[1 - holder], [], "two are enough");
    let copied = "replications_total{cause=\"context\",outcome=\"copied\"}";
    node.shows(copied, 1.0).await;

    // Once more is for longer, with the one that has it.
    node.client.persist_context(keep(&prompt, 2)).await.expect("kept");
    assert_eq!(node.metric(copied).await, 2.0);
    let here = contexts(&mut node).await;
    assert_eq!(contexts(&mut others[holder]).await, here);
    assert_eq!(contexts(&mut others[1 - holder]).await, []);

    // The copy is not there any more, though its node is.
    let drop = v1::DeleteContextRequest {
        tenant: TENANT.into(),
        namespace: namespace().0.to_vec(),
        last_key: here[0].last_key.clone(),
    };
    others[holder].client.delete_context(drop).await.expect("dropped");
    node.shows(copied, 3.0).await;
    there = [contexts(&mut others[0]).await, contexts(&mut others[1]).await];
    let holder = usize::from(there[0].is_empty());
    assert_eq!((there[0].len() + there[1].len(), &there[holder]), (1, &contexts(&mut node).await));

    // The node is gone for good.
    let [first, second] = others;
    let (gone, mut left) = if holder == 0 { (first, second) } else { (second, first) };
    gone.shut_down().await;
    until("the other one has it", async || (contexts(&mut left).await.len() == 1).then_some(()))
        .await;
    node.shows(copied, 4.0).await;
    node.shows("contexts_under_replicated", 0.0).await;
    node.is_quiet().await;
}

/// Checks are soon, and so is what follows from them.
fn looks_after(config: &mut Config, ssd: &Path, peers: &[SocketAddr]) {
    config.ssd.dir = Some(ssd.to_owned());
    config.replication.peers = peers.iter().map(ToString::to_string).collect();
    (config.replication.check_interval_ms, config.replication.node_lost_after_ms) = (50, 400);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_context_of_two_copies_outlives_the_disk_of_the_node_that_made_it_and_is_served_from_the_third()
 {
    let prompt = prompt(1, 3 * BLOCK_TOKENS + 9);
    let disks = [(); 3].map(|()| tempfile::tempdir().expect("a folder"));
    let [one, two, three] = disks.each_ref().map(tempfile::TempDir::path);
    // With less room, so that the copy is made on the second one.
    let third = keeper(|config| {
        looks_after(config, three, &[]);
        config.dram_bytes = 32 * 4096;
    });
    let mut third = third.await;
    let _engine = FakeEngine::attach(&third).await;
    let mut second = keeper(|config| looks_after(config, two, &[third.address()])).await;
    let _engine = FakeEngine::attach(&second).await;
    let peers = [second.address(), third.address()];
    let mut first = keeper(|config| looks_after(config, one, &peers)).await;
    let mut engine = FakeEngine::attach(&first).await;
    first.allocate(allocate(P(1), &prompt)).await.expect("room");
    let slots = engine.bind(P(1)).await.slots;
    engine.compute(P(1), &prompt, &slots, 0..4);
    engine.release(P(1));
    first.has_blocks(&chain(&prompt)).await;
    first.client.persist_context(keep(&prompt, 2)).await.expect("kept");
    let kept = contexts(&mut first).await;
    assert_eq!((contexts(&mut second).await, contexts(&mut third).await), (kept.clone(), vec![]));

    // The first is lost with its disk, and the second knows what is on its own disk and nothing else.
    let gone = first.address();
    first.shut_down().await;
    std::fs::remove_dir_all(one).expect("its disk is lost");
    second.shut_down().await;
    let peers = [gone, third.address()];
    let mut second = keeper(|config| looks_after(config, two, &peers)).await;
    assert_eq!(contexts(&mut second).await, kept);
    let _engine = FakeEngine::attach(&second).await;
    until("the third one has it", async || (contexts(&mut third).await == kept).then_some(()))
        .await;
    second.shows("replications_total{cause=\"context\",outcome=\"copied\"}", 1.0).await;
    second.shows("contexts_under_replicated", 0.0).await;
    second.is_quiet().await;

    // Now it is the only one, and serves it from its disk.
    second.shut_down().await;
    third.shut_down().await;
    let mut third = keeper(|config| looks_after(config, three, &[])).await;
    assert_eq!(contexts(&mut third).await, kept);
    let mut engine = FakeEngine::attach(&third).await;
    third.allocate(allocate(P(2), &prompt)).await.expect("room");
    let bound = engine.bind(P(2)).await;
    assert_eq!(bound.cached_tokens, 3 * BLOCK_TOKENS);
    engine.holds(&prompt, &bound.slots, 0..3);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_copy_for_which_one_node_has_no_quota_is_made_on_another_one() {
    let prompt = prompt(1, 2 * BLOCK_TOKENS);
    // It has the most room in memory, so that it is asked first.
    let mut full = keeper(|config| config.ssd.tenant_bytes_max = 1).await;
    let mut other = keeper(|config| config.dram_bytes = 32 * 4096).await;
    let _engines = [FakeEngine::attach(&full).await, FakeEngine::attach(&other).await];
    let peers = [full.address(), other.address()].map(|address| address.to_string());
    let mut node = keeper(|config| config.replication.peers = peers.to_vec()).await;
    let mut engine = FakeEngine::attach(&node).await;
    node.allocate(allocate(P(1), &prompt)).await.expect("room");
    let slots = engine.bind(P(1)).await.slots;
    engine.compute(P(1), &prompt, &slots, 0..2);
    engine.release(P(1));
    node.has_blocks(&chain(&prompt)).await;
    node.client.persist_context(keep(&prompt, 2)).await.expect("kept");
    assert_eq!(contexts(&mut other).await, contexts(&mut node).await);
    assert_eq!(contexts(&mut full).await, []);
    let refused = "replications_total{cause=\"context\",outcome=\"no_capacity\"}";
    assert_eq!(node.metric(refused).await, 1.0, "and it was not asked again");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn copies_that_cannot_be_are_refused_before_anything_is_kept() {
    let prompt = prompt(1, 2 * BLOCK_TOKENS);
    let mut node = keeper(|_| {}).await;
    let mut engine = FakeEngine::attach(&node).await;
    node.allocate(allocate(P(1), &prompt)).await.expect("room");
    let slots = engine.bind(P(1)).await.slots;
    engine.compute(P(1), &prompt, &slots, 0..2);
    engine.release(P(1));
    node.has_blocks(&chain(&prompt)).await;
    for (copies, code) in [(2, Code::FailedPrecondition), (9, Code::InvalidArgument)] {
        let refused =
            node.client.persist_context(keep(&prompt, copies)).await.expect_err("refused");
        assert_eq!(refused.code(), code, "{refused}");
    }
    assert_eq!(contexts(&mut node).await, []);
    assert_eq!(
        node.client
            .persist_context(keep(&prompt, 1))
            .await
            .expect("kept")
            .into_inner()
            .persisted_blocks,
        2
    );
}
