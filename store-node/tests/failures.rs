//! Pushes that will never be whole: the decode side hears of it, long before its lease is over.

use crate::common::*;
use kvasir_proto::{Share, Side, v1};
use v1::node_to_engine::Message as FromNode;

const P: fn(u64) -> Share = |serial| share(serial, Side::Prefill);
const D: fn(u64) -> Share = |serial| share(serial, Side::Decode);

struct Pair {
    prefill: TestNode,
    decode: TestNode,
    prefill_engine: FakeEngine,
    decode_engine: FakeEngine,
}

impl Pair {
    async fn start(domain: Domain) -> Self {
        let (prefill, decode) = (TestNode::start(domain).await, TestNode::start(domain).await);
        let prefill_engine = FakeEngine::attach(&prefill).await;
        let decode_engine = FakeEngine::attach(&decode).await;
        Pair { prefill, decode, prefill_engine, decode_engine }
    }

    async fn targets(&mut self, serial: u64, prompt: &[u32]) -> v1::WriteTargets {
        let writer_endpoint = self.prefill.endpoint().await;
        let request = v1::TxAllocateRequest { writer_endpoint, ..allocate(D(serial), prompt) };
        self.decode.allocate(request).await.expect("room").targets.expect("targets")
    }

    /// A whole prefill, after which its engine is done with it. Whether all has arrived, or the
    /// decode engine was told to stop.
    async fn arrives(&mut self, serial: u64, change: impl FnOnce(&mut v1::WriteTargets)) -> bool {
        let prompt = prompt(serial as u32, 2 * BLOCK_TOKENS + 9);
        self.prefill.allocate(allocate(P(serial), &prompt)).await.expect("room");
        let mut targets = self.targets(serial, &prompt).await;
        change(&mut targets);
        self.decode_engine.bind(D(serial)).await;
        let slots = self.prefill_engine.bind(P(serial)).await.slots;
        self.prefill_engine.compute(P(serial), &prompt, &slots, 0..3);
        self.prefill_engine.finish(P(serial), b"tail");
        self.prefill_engine.release(P(serial));
        self.prefill.push(P(serial), Some(targets)).await.expect("armed");
        let tx = tx(serial).into();
        let end = self.decode_engine.wait("its end", |message| match message {
            FromNode::Ready(ready) if ready.tx == Some(tx) => Some(true),
            FromNode::Stop(stop) if stop.tx == Some(tx) => Some(false),
            _ => None,
        });
        let arrived = end.await;
        self.decode_engine.release(D(serial));
        self.prefill.is_quiet().await;
        self.decode.is_quiet().await;
        arrived
    }

    /// A region that the decode node does not have.
    async fn foreign_region(&mut self) -> Vec<u8> {
        let request = v1::TxAllocateRequest {
            writer_endpoint: self.decode.endpoint().await,
            ..allocate(D(1), &prompt(1, 9))
        };
        let targets = self.prefill.allocate(request).await.expect("room").targets;
        self.prefill.abort(D(1)).await;
        targets.expect("targets").slots_region
    }
}

async fn check(domain: Domain) {
    let mut pair = Pair::start(domain).await;
    let foreign = pair.foreign_region().await;
    assert!(pair.arrives(2, |_| {}).await);
    assert!(!pair.arrives(3, |targets| targets.slots_region = foreign.clone()).await);
    assert!(!pair.arrives(4, |targets| targets.tail_region = foreign.clone()).await);
    assert!(pair.arrives(5, |_| {}).await, "the two go on as before");
    assert_eq!(pair.decode.metric("peer_writers_cut_off_total").await, 0.0);
}

/// The prefill engine has done its part, as far as the conductor knows; the tail is not written.
async fn check_lost_writer(domain: Domain) {
    let mut pair = Pair::start(domain).await;
    assert!(pair.arrives(2, |_| {}).await);
    let prompt = prompt(3, 2 * BLOCK_TOKENS + 9);
    pair.prefill.allocate(allocate(P(3), &prompt)).await.expect("room");
    let targets = pair.targets(3, &prompt).await;
    pair.decode_engine.bind(D(3)).await;
    pair.prefill.push(P(3), Some(targets)).await.expect("armed");
    let slots = pair.prefill_engine.bind(P(3)).await.slots;
    pair.prefill_engine.compute(P(3), &prompt, &slots, 0..2);
    until("a part of it has landed", async || {
        (pair.prefill.metric("pushed_bytes_total").await > 0.0).then_some(())
    })
    .await;
    pair.prefill.shut_down().await;
    pair.decode_engine.stopped(D(3)).await;
    pair.decode_engine.release(D(3));
    pair.decode.is_quiet().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn over_shared_memory_a_decode_side_finds_that_its_writer_is_gone() {
    check_lost_writer(Domain::Shm).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn over_tcp_a_decode_side_finds_that_its_writer_is_gone() {
    check_lost_writer(Domain::Tcp).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn over_shared_memory_a_decode_side_hears_of_a_failed_push() {
    check(Domain::Shm).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn over_tcp_a_decode_side_hears_of_a_failed_push() {
    check(Domain::Tcp).await;
}
