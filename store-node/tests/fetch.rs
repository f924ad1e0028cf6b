//! Blocks that come from another node before prefill begins.

use crate::common::*;
use kvasir_proto::{Share, Side, v1};
use kvasir_store_node::config::Config;

const P: fn(u64) -> Share = |serial| share(serial, Side::Prefill);
const S: fn(u64) -> Share = |serial| share(serial, Side::Source);

/// A source that holds `blocks` blocks of the prompt, and a target that holds none.
struct Fetch {
    source: TestNode,
    target: TestNode,
    source_engine: FakeEngine,
    target_engine: FakeEngine,
}

impl Fetch {
    async fn start(domain: Domain, prompt: &[u32]) -> Self {
        let (source, target) = (TestNode::start(domain).await, TestNode::start(domain).await);
        Fetch::between(source, target, prompt).await
    }

    async fn between(mut source: TestNode, target: TestNode, prompt: &[u32]) -> Self {
        let mut source_engine = FakeEngine::attach(&source).await;
        let target_engine = FakeEngine::attach(&target).await;
        let pages = prompt.len() as u32 / BLOCK_TOKENS;
        let prompt = &prompt[..(pages * BLOCK_TOKENS) as usize];
        source.allocate(allocate(P(100), prompt)).await.expect("room");
        let slots = source_engine.bind(P(100)).await.slots;
        source_engine.compute(P(100), prompt, &slots, 0..pages);
        source_engine.release(P(100));
        source.has_blocks(&chain(prompt)).await;
        source.is_quiet().await;
        Fetch { source, target, source_engine, target_engine }
    }

    /// Allocates both sides of a fetch of all full blocks.
    async fn allocate(&mut self, serial: u64, prompt: &[u32]) -> v1::WriteTargets {
        let writer_endpoint = self.source.endpoint().await;
        let fetch_until_block = prompt.len() as u32 / BLOCK_TOKENS;
        let request = v1::TxAllocateRequest {
            writer_endpoint,
            fetch_until_block,
            ..allocate(P(serial), prompt)
        };
        let target = self.target.allocate(request).await.expect("room");
        self.source.allocate(allocate(S(serial), prompt)).await.expect("held");
        target.targets.expect("targets")
    }

    async fn is_quiet(&self) {
        self.source.is_quiet().await;
        self.target.is_quiet().await;
    }

    /// Changes one bit of a stored block, as rotten memory would.
    async fn flip_a_bit(&mut self, prompt: &[u32], block: usize) {
        let place = self.source.blocks(&chain(prompt)[block..=block]).await.remove(0);
        let mut bytes = self.source_engine.read(place.slot, 2);
        bytes[17] ^= 4;
        self.source_engine.write(place.slot, 2, &bytes);
    }
}

async fn blocks_are_fetched(domain: Domain) {
    let prompt = prompt(1, 3 * BLOCK_TOKENS + 9);
    let mut fetch = Fetch::start(domain, &prompt).await;
    let targets = fetch.allocate(1, &prompt).await;
    assert_eq!((targets.first_page, targets.slots.len()), (0, 3));
    // The bind comes first and is answered when the blocks are there.
    fetch.target_engine.ask_bind(P(1));
    let pushed = fetch.source.push(S(1), Some(targets)).await.expect("pushed");
    assert_eq!((pushed.valid_blocks, pushed.corrupt_blocks), (3, 0));
    let bound = fetch.target_engine.bound(P(1)).await;
    assert_eq!(bound.cached_tokens, 3 * BLOCK_TOKENS);
    fetch.target_engine.holds(&prompt, &bound.slots, 0..3);
    let keys = chain(&prompt);
    assert_eq!(fetch.target.blocks(&keys).await.len(), 3);
    fetch.target_engine.compute(P(1), &prompt, &bound.slots, 3..4);
    fetch.target_engine.release(P(1));
    fetch.is_quiet().await;
    // The source closed its share by itself.
    assert_eq!(fetch.source.metric("shares").await, 0.0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn blocks_are_fetched_over_shared_memory() {
    blocks_are_fetched(Domain::Shm).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn blocks_are_fetched_over_tcp() {
    blocks_are_fetched(Domain::Tcp).await;
}

async fn a_flipped_bit_is_found(bytes_per_s: u64) {
    let prompt = prompt(1, 4 * BLOCK_TOKENS + 9);
    let throttle = |config: &mut Config| config.send_bytes_per_s_max = bytes_per_s;
    let source = TestNode::start_with(Domain::Tcp, throttle).await;
    let target = TestNode::start(Domain::Tcp).await;
    let mut fetch = Fetch::between(source, target, &prompt).await;
    let keys = chain(&prompt);
    fetch.flip_a_bit(&prompt, 2).await;
    let targets = fetch.allocate(1, &prompt).await;
    fetch.target_engine.ask_bind(P(1));
    let pushed = fetch.source.push(S(1), Some(targets)).await.expect("an answer");
    assert_eq!((pushed.valid_blocks, pushed.corrupt_blocks), (2, 1));
    // The bad copy is gone, and what could only be reached through it.
    until("the bad block is dropped", async || {
        (fetch.source.blocks(&keys).await.len() == 2).then_some(())
    })
    .await;
    fetch.source.shows("corrupt_blocks_total", 1.0).await;
    assert_eq!(fetch.target_engine.unasked(), [], "nothing is bound before it is settled");
    let settled = fetch.target.commit(P(1), pushed.valid_blocks, false).await.expect("settled");
    assert_eq!(settled.cached_blocks, 2);
    let bound = fetch.target_engine.bound(P(1)).await;
    assert_eq!(bound.cached_tokens, 2 * BLOCK_TOKENS);
    fetch.target_engine.holds(&prompt, &bound.slots, 0..2);
    fetch.target_engine.compute(P(1), &prompt, &bound.slots, 2..5);
    fetch.target_engine.release(P(1));
    fetch.target.has_blocks(&keys).await;
    fetch.is_quiet().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_flipped_bit_is_found_and_the_blocks_before_it_are_kept() {
    a_flipped_bit_is_found(0).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_flipped_bit_is_found_also_when_what_follows_it_has_not_left_yet() {
    // Four pages of 4 KiB in half a second.
    a_flipped_bit_is_found(32 << 10).await;
}

/// A bit rots in memory. The blocks go unverified to a second node, which is asked for this prompt,
/// and from there verified to a third.
async fn rot_is_found_on_a_later_way(asked: &[u32]) {
    let held = prompt(1, 3 * BLOCK_TOKENS + 9);
    let (first, second) = (TestNode::start(Domain::Shm).await, TestNode::start(Domain::Tcp).await);
    let mut fetch = Fetch::between(first, second, &held).await;
    fetch.flip_a_bit(&held, 1).await;
    let targets = fetch.allocate(1, asked).await;
    let wanted = targets.slots.len() as u32;
    let pushed = fetch.source.push(S(1), Some(targets)).await.expect("an answer");
    assert_eq!((pushed.valid_blocks, pushed.corrupt_blocks), (3, 0), "nobody has looked");
    if wanted > 3 {
        let settled = fetch.target.commit(P(1), 3, false).await.expect("settled");
        assert_eq!(settled.cached_blocks, 3);
    }
    assert_eq!(fetch.target_engine.bind(P(1)).await.cached_tokens, 3 * BLOCK_TOKENS);
    fetch.target_engine.release(P(1));
    fetch.is_quiet().await;

    let Fetch { source: first, source_engine: first_engine, target, target_engine } = fetch;
    let third = TestNode::start(Domain::Tcp).await;
    let third_engine = FakeEngine::attach(&third).await;
    let mut fetch = Fetch {
        source: target,
        source_engine: target_engine,
        target: third,
        target_engine: third_engine,
    };
    let targets = fetch.allocate(2, &held).await;
    let pushed = fetch.source.push(S(2), Some(targets)).await.expect("an answer");
    assert_eq!((pushed.valid_blocks, pushed.corrupt_blocks), (1, 1));
    let settled = fetch.target.commit(P(2), 1, false).await.expect("settled");
    assert_eq!(settled.cached_blocks, 1);
    let bound = fetch.target_engine.bind(P(2)).await;
    fetch.target_engine.holds(&held, &bound.slots, 0..1);
    fetch.target_engine.release(P(2));
    fetch.is_quiet().await;
    assert_eq!(fetch.source.blocks(&chain(&held)).await.len(), 1, "its copies are dropped");
    drop(first_engine);
    first.is_quiet().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_rotted_at_the_source_is_refused_later_though_all_of_it_was_fetched_unverified() {
    rot_is_found_on_a_later_way(&prompt(1, 3 * BLOCK_TOKENS + 9)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_rotted_at_the_source_is_refused_later_though_a_part_of_it_was_fetched_unverified() {
    let held = prompt(1, 3 * BLOCK_TOKENS);
    let longer: Vec<u32> = held.iter().copied().chain(prompt(5, 100)).collect();
    rot_is_found_on_a_later_way(&longer).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_source_that_is_only_thought_to_be_lost_is_asked_and_goes_on_writing_for_others() {
    for domain in [Domain::Shm, Domain::Tcp] {
        let prompt = prompt(1, 3 * BLOCK_TOKENS + 9);
        let mut fetch = Fetch::start(domain, &prompt).await;
        fetch.allocate(1, &prompt).await;
        let of_another = fetch.allocate(2, &prompt).await;
        let settled = fetch.target.commit(P(1), 0, true).await.expect("settled");
        assert_eq!(settled.cached_blocks, 0);
        let pushed = fetch.source.push(S(2), Some(of_another)).await.expect("pushed");
        assert_eq!(pushed.valid_blocks, 3, "{domain:?}: its targets are still good");
        assert_eq!(fetch.target_engine.bind(P(2)).await.cached_tokens, 3 * BLOCK_TOKENS);
        assert_eq!(fetch.target.metric("peer_writers_cut_off_total").await, 0.0, "{domain:?}");
        for serial in [1, 2] {
            fetch.target.abort(P(serial)).await;
        }
        fetch.target_engine.stopped(P(2)).await;
        fetch.target_engine.release(P(2));
        fetch.source.abort(S(1)).await;
        fetch.is_quiet().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_source_that_is_gone_is_cut_off_and_nothing_of_it_is_kept() {
    let prompt = prompt(1, 3 * BLOCK_TOKENS + 9);
    let mut fetch = Fetch::start(Domain::Tcp, &prompt).await;
    for serial in [1, 2] {
        fetch.allocate(serial, &prompt).await;
        fetch.target_engine.ask_bind(P(serial));
    }
    let Fetch { source, mut target, source_engine, mut target_engine } = fetch;
    drop(source_engine);
    source.shut_down().await;
    // The second conductor has not noticed that it is lost, only that nothing was sent.
    for (serial, source_lost) in [(1, true), (2, false)] {
        let settled = target.commit(P(serial), 0, source_lost).await.expect("settled");
        assert_eq!(settled.cached_blocks, 0);
        target.shows("peer_writers_cut_off_total", 1.0).await;
    }
    for serial in [1, 2] {
        let bound = target_engine.bound(P(serial)).await;
        assert_eq!(bound.cached_tokens, 0);
        target_engine.compute(P(serial), &prompt, &bound.slots, 0..4);
        target_engine.release(P(serial));
    }
    target.has_blocks(&chain(&prompt)).await;
    target.is_quiet().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_source_that_holds_less_says_so_and_sends_what_it_has() {
    let held = prompt(1, 2 * BLOCK_TOKENS);
    let mut fetch = Fetch::start(Domain::Shm, &held).await;
    let longer: Vec<u32> = held.iter().copied().chain(prompt(5, 100)).collect();
    let targets = fetch.allocate(1, &longer).await;
    assert_eq!(targets.slots.len(), 3);
    let pushed = fetch.source.push(S(1), Some(targets)).await.expect("an answer");
    assert_eq!((pushed.valid_blocks, pushed.corrupt_blocks), (2, 0));
    let settled = fetch.target.commit(P(1), 2, false).await.expect("settled");
    assert_eq!(settled.cached_blocks, 2);
    let bound = fetch.target_engine.bind(P(1)).await;
    fetch.target_engine.holds(&longer, &bound.slots, 0..2);
    fetch.target_engine.release(P(1));
    fetch.is_quiet().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_fetched_goes_on_to_the_decode_side_with_what_is_computed() {
    let prompt = prompt(1, 3 * BLOCK_TOKENS + 9);
    let mut fetch = Fetch::start(Domain::Shm, &prompt).await;
    let mut decode = TestNode::start(Domain::Shm).await;
    let mut decode_engine = FakeEngine::attach(&decode).await;
    let from_source = fetch.allocate(1, &prompt).await;
    let request = v1::TxAllocateRequest {
        writer_endpoint: fetch.target.endpoint().await,
        ..allocate(share(1, Side::Decode), &prompt)
    };
    let from_prefill = decode.allocate(request).await.expect("room").targets;
    // The push is armed before anything has been fetched.
    fetch.target.push(P(1), from_prefill).await.expect("armed");
    let slots = decode_engine.bind(share(1, Side::Decode)).await.slots;
    fetch.source.push(S(1), Some(from_source)).await.expect("pushed");
    let bound = fetch.target_engine.bind(P(1)).await;
    assert_eq!(bound.cached_tokens, 3 * BLOCK_TOKENS);
    fetch.target_engine.compute(P(1), &prompt, &bound.slots, 3..4);
    fetch.target_engine.finish(P(1), b"tail");
    fetch.target_engine.release(P(1));
    assert_eq!(decode_engine.ready(share(1, Side::Decode)).await, b"tail");
    decode_engine.holds(&prompt, &slots, 0..4);
    decode_engine.release(share(1, Side::Decode));
    decode.is_quiet().await;
    fetch.is_quiet().await;
    assert_eq!(decode.blocks(&chain(&prompt)).await.len(), 3);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_source_sends_nothing_into_slots_for_another_namespace() {
    let prompt = prompt(1, 2 * BLOCK_TOKENS + 9);
    let mut fetch = Fetch::start(Domain::Shm, &prompt).await;
    let own = fetch.allocate(1, &prompt).await;
    // Another tenant's request for the same tokens, of which the source has nothing.
    let request = v1::TxAllocateRequest {
        writer_endpoint: fetch.source.endpoint().await,
        fetch_until_block: 2,
        ..of_another_tenant(P(2), &prompt)
    };
    let others = fetch.target.allocate(request).await.expect("room").targets.expect("targets");
    assert_eq!(own.expected_count, others.expected_count);
    fetch.source.allocate(of_another_tenant(S(2), &prompt)).await.expect("nothing is held");
    for (share, targets) in [(S(1), &others), (S(2), &own)] {
        let refused = fetch.source.push(share, Some(targets.clone())).await.expect_err("refused");
        assert_eq!(refused.code(), tonic::Code::FailedPrecondition);
        assert!(refused.message().contains("another namespace"), "{refused}");
    }
    assert_eq!(fetch.source.metric("pushed_bytes_total").await, 0.0);
    // What belongs there is sent after all.
    let pushed = fetch.source.push(S(1), Some(own)).await.expect("pushed");
    assert_eq!(pushed.valid_blocks, 2);
    assert_eq!(fetch.target_engine.bind(P(1)).await.cached_tokens, 2 * BLOCK_TOKENS);
    fetch.target_engine.release(P(1));
    for share in [S(1), S(2)] {
        fetch.source.abort(share).await;
    }
    fetch.target.abort(P(2)).await;
    fetch.is_quiet().await;
}
