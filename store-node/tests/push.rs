//! Prefill on one node, decoding on another: every page arrives, byte for byte, whatever the order
//! of events.

use crate::common::*;
use kvasir_proto::{Share, Side, v1};
use kvasir_store_node::config::TransferThread;

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
        Pair::attach(prefill, decode).await
    }

    async fn attach(prefill: TestNode, decode: TestNode) -> Self {
        let prefill_engine = FakeEngine::attach(&prefill).await;
        let decode_engine = FakeEngine::attach(&decode).await;
        Pair { prefill, decode, prefill_engine, decode_engine }
    }

    /// Allocates both sides; answers with the targets and what each holds.
    async fn allocate(&mut self, serial: u64, prompt: &[u32]) -> (v1::WriteTargets, u32, u32) {
        let writer_endpoint = self.prefill.endpoint().await;
        let prefill = self.prefill.allocate(allocate(P(serial), prompt)).await.expect("room");
        let request = v1::TxAllocateRequest { writer_endpoint, ..allocate(D(serial), prompt) };
        let decode = self.decode.allocate(request).await.expect("room");
        (decode.targets.expect("targets"), prefill.cached_blocks, decode.cached_blocks)
    }

    /// One request from allocation to release; answers with the decode side's cached tokens.
    async fn serve(&mut self, serial: u64, prompt: &[u32]) -> u32 {
        let (targets, held, _) = self.allocate(serial, prompt).await;
        self.prefill.push(P(serial), Some(targets)).await.expect("armed");
        let bound = self.prefill_engine.bind(P(serial)).await;
        let pages = held..bound.slots.len() as u32;
        self.prefill_engine.compute(P(serial), prompt, &bound.slots, pages);
        self.prefill_engine.finish(P(serial), b"first token");
        self.prefill_engine.release(P(serial));
        let bound = self.decode_engine.bind(D(serial)).await;
        assert_eq!(self.decode_engine.ready(D(serial)).await, b"first token");
        self.decode_engine.holds(prompt, &bound.slots, 0..bound.slots.len() as u32);
        self.decode_engine.release(D(serial));
        bound.cached_tokens
    }

    async fn is_quiet(&self) {
        self.prefill.is_quiet().await;
        self.decode.is_quiet().await;
    }
}

async fn a_prompt_is_pushed(domain: Domain, transfer_thread: TransferThread) {
    let start = || TestNode::start_with(domain, |config| config.transfer_thread = transfer_thread);
    let mut pair = Pair::attach(start().await, start().await).await;
    // Three full blocks and a part of a fourth.
    let prompt = prompt(1, 3 * BLOCK_TOKENS + 10);
    pair.serve(1, &prompt).await;
    pair.is_quiet().await;
    for node in [&mut pair.prefill, &mut pair.decode] {
        assert_eq!(node.blocks(&chain(&prompt)).await.len(), 3);
    }
    let bytes = pair.prefill.metric("pushed_bytes_total").await;
    assert_eq!(bytes, 4.0 * layout().slot_bytes() as f64, "each page goes over once");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_prompt_is_pushed_over_shared_memory() {
    a_prompt_is_pushed(Domain::Shm, TransferThread::Shared).await;
    a_prompt_is_pushed(Domain::Shm, TransferThread::Dedicated).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_prompt_is_pushed_over_tcp() {
    a_prompt_is_pushed(Domain::Tcp, TransferThread::Shared).await;
    a_prompt_is_pushed(Domain::Tcp, TransferThread::Dedicated).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_held_is_pinned_and_not_pushed_again() {
    let mut pair = Pair::start(Domain::Shm).await;
    let first = prompt(1, 2 * BLOCK_TOKENS + 1);
    pair.serve(1, &first).await;
    pair.is_quiet().await;
    // The same blocks, then two more and a part.
    let longer: Vec<u32> = first[..128].iter().copied().chain(prompt(9, 140)).collect();
    let (targets, held, decode_held) = pair.allocate(2, &longer).await;
    assert_eq!((held, decode_held, targets.first_page), (2, 2, 2));
    assert_eq!(targets.expected_count, 3 * u32::from(LAYERS) + 1);
    pair.prefill.shows("pins", 2.0).await;
    pair.prefill.abort(P(2)).await;
    pair.decode.abort(D(2)).await;
    pair.serve(3, &longer).await;
    pair.is_quiet().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pages_that_the_decode_side_lacks_are_sent_from_the_cache() {
    let mut pair = Pair::start(Domain::Shm).await;
    let tokens = prompt(1, 2 * BLOCK_TOKENS + 1);
    // The prefill node alone has the blocks.
    pair.prefill.allocate(allocate(P(1), &tokens)).await.expect("room");
    let bound = pair.prefill_engine.bind(P(1)).await;
    pair.prefill_engine.compute(P(1), &tokens, &bound.slots, 0..3);
    pair.prefill_engine.release(P(1));
    pair.prefill.has_blocks(&chain(&tokens)).await;
    let (targets, held, decode_held) = pair.allocate(2, &tokens).await;
    assert_eq!((held, decode_held, targets.first_page), (2, 0, 0));
    pair.prefill.abort(P(2)).await;
    pair.decode.abort(D(2)).await;
    pair.serve(3, &tokens).await;
    pair.is_quiet().await;
}

/// Its engine may be done with the share by then, so that the push alone holds the pages.
async fn a_rotten_cached_block_is_dropped(released: bool) {
    let mut pair = Pair::start(Domain::Tcp).await;
    let tokens = prompt(1, 3 * BLOCK_TOKENS + 1);
    let keys = chain(&tokens);
    pair.prefill.allocate(allocate(P(1), &tokens)).await.expect("room");
    let slots = pair.prefill_engine.bind(P(1)).await.slots;
    pair.prefill_engine.compute(P(1), &tokens, &slots, 0..4);
    pair.prefill_engine.release(P(1));
    pair.prefill.has_blocks(&keys).await;
    let mut bytes = pair.prefill_engine.read(slots[1], 2);
    bytes[5] ^= 16;
    pair.prefill_engine.write(slots[1], 2, &bytes);

    let (targets, held, _) = pair.allocate(2, &tokens).await;
    assert_eq!(held, 3);
    if released {
        let slots = pair.prefill_engine.bind(P(2)).await.slots;
        pair.prefill_engine.compute(P(2), &tokens, &slots, 3..4);
        pair.prefill_engine.finish(P(2), b"tail");
        pair.prefill_engine.release(P(2));
    }
    pair.prefill.push(P(2), Some(targets)).await.expect("armed");
    until("the bad block is dropped and what follows it", async || {
        (pair.prefill.blocks(&keys).await.len() == 1).then_some(())
    })
    .await;
    pair.prefill.shows("corrupt_blocks_total", 1.0).await;
    pair.decode.abort(D(2)).await;
    pair.is_quiet().await;
    assert_eq!(pair.decode.blocks(&keys).await.len(), 0, "nothing of it was believed");
    // The next attempt computes it again.
    pair.serve(3, &tokens).await;
    pair.is_quiet().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cached_block_that_is_rotten_is_dropped_when_its_push_is_refused() {
    a_rotten_cached_block_is_dropped(false).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cached_block_that_is_rotten_is_dropped_also_when_its_engine_is_done() {
    a_rotten_cached_block_is_dropped(true).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn layers_that_finish_before_the_targets_are_known_are_pushed_when_they_arrive() {
    let mut pair = Pair::start(Domain::Shm).await;
    let prompt = prompt(1, 2 * BLOCK_TOKENS + 5);
    let (targets, ..) = pair.allocate(1, &prompt).await;
    let bound = pair.prefill_engine.bind(P(1)).await;
    pair.prefill_engine.compute(P(1), &prompt, &bound.slots, 0..3);
    pair.prefill_engine.finish(P(1), b"tail");
    // The engine is done with it long before the targets come.
    pair.prefill_engine.release(P(1));
    pair.prefill.has_blocks(&chain(&prompt)).await;
    assert!(pair.prefill.renew(P(1), 10_000).await, "the push is owed, so the share stays");
    let slots = pair.decode_engine.bind(D(1)).await.slots;
    assert_eq!(pair.decode_engine.unasked(), []);
    pair.prefill.push(P(1), Some(targets)).await.expect("armed");
    assert_eq!(pair.decode_engine.ready(D(1)).await, b"tail");
    pair.decode_engine.holds(&prompt, &slots, 0..3);
    pair.decode_engine.release(D(1));
    pair.is_quiet().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn chunks_smaller_than_a_page_push_it_once_when_it_is_full() {
    let mut pair = Pair::start(Domain::Shm).await;
    let prompt = prompt(1, 2 * BLOCK_TOKENS);
    let (targets, ..) = pair.allocate(1, &prompt).await;
    pair.prefill.push(P(1), Some(targets)).await.expect("armed");
    let slots = pair.prefill_engine.bind(P(1)).await.slots;
    // Chunks of 16 tokens: four steps fill a page, and only the fourth names it.
    for chunk in 0..8u32 {
        let page = chunk / 4;
        let full = chunk % 4 == 3;
        let finishes = if full { page..page + 1 } else { page..page };
        let step = pair.prefill_engine.plan(&[(P(1), finishes)]);
        for layer in 0..LAYERS {
            let bytes = page_bytes(&prompt, page, layer);
            let quarter = bytes.len() / 4;
            let mut written = pair.prefill_engine.read(slots[page as usize], layer);
            let part = (chunk % 4) as usize * quarter..((chunk % 4) as usize + 1) * quarter;
            written[part.clone()].copy_from_slice(&bytes[part]);
            pair.prefill_engine.write(slots[page as usize], layer, &written);
            pair.prefill_engine.attachment.progress(step, layer + 1);
        }
    }
    pair.prefill_engine.finish(P(1), b"tail");
    pair.prefill_engine.release(P(1));
    let slots = pair.decode_engine.bind(D(1)).await.slots;
    pair.decode_engine.ready(D(1)).await;
    pair.decode_engine.holds(&prompt, &slots, 0..2);
    pair.decode_engine.release(D(1));
    pair.is_quiet().await;
    let bytes = pair.prefill.metric("pushed_bytes_total").await;
    assert_eq!(bytes, 2.0 * layout().slot_bytes() as f64, "each page goes over once");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn several_requests_share_steps_and_each_gets_its_own_bytes() {
    let mut pair = Pair::start(Domain::Tcp).await;
    let prompts: Vec<Vec<u32>> = (1..5).map(|seed| prompt(seed, 200)).collect();
    let mut all = Vec::new();
    for (serial, prompt) in (1..).zip(&prompts) {
        let (targets, ..) = pair.allocate(serial, prompt).await;
        pair.prefill.push(P(serial), Some(targets)).await.expect("armed");
        all.push((serial, prompt, pair.prefill_engine.bind(P(serial)).await.slots));
    }
    // Two steps, each with pages of all four; the word jumps over layers and over a step.
    for pages in [0..2, 2..4] {
        let planned: Vec<_> = all.iter().map(|(s, ..)| (P(*s), pages.clone())).collect();
        let step = pair.prefill_engine.plan(&planned);
        for layer in 0..LAYERS {
            for (_, prompt, slots) in &all {
                for page in pages.clone() {
                    let bytes = page_bytes(prompt, page, layer);
                    pair.prefill_engine.write(slots[page as usize], layer, &bytes);
                }
            }
        }
        pair.prefill_engine.attachment.progress(step, if pages.start == 0 { 2 } else { LAYERS });
    }
    for (serial, ..) in &all {
        pair.prefill_engine.finish(P(*serial), &serial.to_le_bytes());
        pair.prefill_engine.release(P(*serial));
    }
    for (serial, prompt, _) in &all {
        let slots = pair.decode_engine.bind(D(*serial)).await.slots;
        assert_eq!(pair.decode_engine.ready(D(*serial)).await, serial.to_le_bytes());
        pair.decode_engine.holds(prompt, &slots, 0..4);
        pair.decode_engine.release(D(*serial));
    }
    pair.is_quiet().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_the_push_the_decode_side_never_becomes_ready() {
    let prefill = TestNode::start_with(Domain::Shm, |config| config.push_enabled = false).await;
    let decode = TestNode::start(Domain::Shm).await;
    let mut pair = Pair::attach(prefill, decode).await;
    let prompt = prompt(1, 100);
    let (targets, ..) = pair.allocate(1, &prompt).await;
    pair.prefill.push(P(1), Some(targets)).await.expect("an answer");
    let slots = pair.prefill_engine.bind(P(1)).await.slots;
    pair.decode_engine.bind(D(1)).await;
    pair.prefill_engine.compute(P(1), &prompt, &slots, 0..2);
    pair.prefill_engine.finish(P(1), b"tail");
    pair.prefill_engine.release(P(1));
    pair.prefill.is_quiet().await;
    assert_eq!(pair.decode_engine.unasked(), []);
    pair.decode.abort(D(1)).await;
    pair.decode_engine.stopped(D(1)).await;
    pair.decode_engine.release(D(1));
    pair.is_quiet().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_layer_log_has_a_line_for_each_layer_pushed() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("layers");
    let log = path.clone();
    let prefill =
        TestNode::start_with(Domain::Shm, |config| config.layer_log_file = Some(log)).await;
    let decode = TestNode::start(Domain::Shm).await;
    let mut pair = Pair::attach(prefill, decode).await;
    pair.serve(1, &prompt(1, 2 * BLOCK_TOKENS)).await;
    let lines = until("the log is written", async || {
        let text = std::fs::read_to_string(&path).unwrap_or_default();
        let lines: Vec<String> = text.lines().map(str::to_owned).collect();
        (lines.len() >= usize::from(LAYERS)).then_some(lines)
    })
    .await;
    for layer in 0..LAYERS {
        let wanted = format!("\"step\":1,\"layer\":{layer},\"first_page\":0,\"pages\":2,");
        assert!(lines.iter().any(|line| line.contains(&wanted)), "{wanted} in {lines:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn blocks_of_the_answer_are_found_by_the_next_turn() {
    let mut pair = Pair::start(Domain::Shm).await;
    let turn = prompt(1, BLOCK_TOKENS + 3);
    let (targets, ..) = pair.allocate(1, &turn).await;
    pair.prefill.push(P(1), Some(targets)).await.expect("armed");
    let slots = pair.prefill_engine.bind(P(1)).await.slots;
    pair.prefill_engine.compute(P(1), &turn, &slots, 0..2);
    pair.prefill_engine.finish(P(1), b"tail");
    pair.prefill_engine.release(P(1));
    let mut slots = pair.decode_engine.bind(D(1)).await.slots;
    pair.decode_engine.ready(D(1)).await;
    // The answer fills the second page and begins a third one.
    slots.extend(pair.decode_engine.grow(D(1), 1).await);
    assert_eq!(slots.len(), 3);
    let next: Vec<u32> = turn.iter().copied().chain(prompt(8, 2 * BLOCK_TOKENS)).collect();
    let keys = chain(&next[..128]);
    pair.decode_engine.send(v1::engine_to_node::Message::Commit(v1::CommitBlocks {
        tx: Some(tx(1).into()),
        side: Side::Decode.to_wire(),
        first_page: 1,
        keys: kvasir_proto::BlockKey::concat(&keys[1..]),
    }));
    pair.decode_engine.release(D(1));
    pair.decode.has_blocks(&keys).await;
    let (_, _, held) = pair.allocate(2, &next).await;
    assert_eq!(held, 2);
    pair.prefill.abort(P(2)).await;
    pair.decode.abort(D(2)).await;
    pair.is_quiet().await;
}

/// Two requests of two tenants for prompts that look alike: all but the namespace agrees.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_push_into_slots_for_another_namespace_is_refused() {
    let mut pair = Pair::start(Domain::Shm).await;
    let prompt = prompt(1, 2 * BLOCK_TOKENS + 5);
    let (own, ..) = pair.allocate(1, &prompt).await;
    pair.prefill.allocate(of_another_tenant(P(2), &prompt)).await.expect("room");
    let writer_endpoint = pair.prefill.endpoint().await;
    let request = v1::TxAllocateRequest { writer_endpoint, ..of_another_tenant(D(2), &prompt) };
    let others = pair.decode.allocate(request).await.expect("room").targets.expect("targets");
    assert_eq!(own.expected_count, others.expected_count);
    for (share, targets) in [(P(1), &others), (P(2), &own)] {
        let refused = pair.prefill.push(share, Some(targets.clone())).await.expect_err("refused");
        assert_eq!(refused.code(), tonic::Code::FailedPrecondition);
        assert!(refused.message().contains("another namespace"), "{refused}");
    }
    let nameless = v1::WriteTargets { namespace: Vec::new(), ..own.clone() };
    let refused = pair.prefill.push(P(1), Some(nameless)).await.expect_err("refused");
    assert_eq!(refused.code(), tonic::Code::InvalidArgument);
    assert!(refused.message().contains("`namespace`"), "{refused}");
    // Nothing was armed: each still goes where it belongs.
    for (serial, targets) in [(1, own), (2, others)] {
        pair.prefill.push(P(serial), Some(targets)).await.expect("armed");
        let slots = pair.prefill_engine.bind(P(serial)).await.slots;
        pair.prefill_engine.compute(P(serial), &prompt, &slots, 0..3);
        pair.prefill_engine.finish(P(serial), b"tail");
        pair.prefill_engine.release(P(serial));
        let slots = pair.decode_engine.bind(D(serial)).await.slots;
        assert_eq!(pair.decode_engine.ready(D(serial)).await, b"tail");
        pair.decode_engine.holds(&prompt, &slots, 0..3);
        pair.decode_engine.release(D(serial));
    }
    pair.is_quiet().await;
}
