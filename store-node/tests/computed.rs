//! Prefill in an engine's own pool: every layer is copied into slots and pushed while the next one is computed, and what
//! ends early ends when the copies have.

use std::ops::Range;
use std::path::Path;
use std::process::{Command, Stdio};

use crate::common::pooled::{LAYER_BYTES, Pooled, description, gpu_memory, on_gpu};
use crate::common::*;
use crate::emulated::Emulated;
use kvasir_proto::{BlockKey, Share, Side, v1};
use v1::engine_to_node::Message as ToNode;

const P: fn(u64) -> Share = |serial| share(serial, Side::Prefill);
const D: fn(u64) -> Share = |serial| share(serial, Side::Decode);

struct Pair {
    prefill: TestNode,
    decode: TestNode,
    computes: Pooled,
    decodes: Pooled,
}

impl Pair {
    async fn start(domain: Domain) -> Self {
        let (prefill, decode) = (TestNode::start(domain).await, TestNode::start(domain).await);
        let computes = Pooled::attach(&prefill).await;
        let decodes = Pooled::attach(&decode).await;
        Pair { prefill, decode, computes, decodes }
    }

    /// The engine that computes has its pool on an emulated GPU.
    async fn on(gpu: &Emulated) -> Self {
        let library = gpu.file().to_owned();
        let prefill =
            TestNode::start_with(Domain::Shm, |config| config.cuda_library = Some(library)).await;
        let memory = gpu_memory();
        let description = on_gpu(&memory);
        let engine = Pooled::connect(&prefill.attach_dir(), description.clone()).await;
        let computes = Pooled::new(engine.expect("attached"), memory, &description);
        let decode = TestNode::start(Domain::Shm).await;
        let decodes = Pooled::attach(&decode).await;
        Pair { prefill, decode, computes, decodes }
    }

    /// Allocates both sides, arms the push, and binds the prefill side. Answers with the pages to compute.
    async fn begin(&mut self, serial: u64, prompt: &[u32]) -> Range<u32> {
        let writer_endpoint = self.prefill.endpoint().await;
        let held = self.prefill.allocate(allocate(P(serial), prompt)).await.expect("room");
        let request = v1::TxAllocateRequest { writer_endpoint, ..allocate(D(serial), prompt) };
        let decode = self.decode.allocate(request).await.expect("room");
        self.prefill.push(P(serial), decode.targets).await.expect("armed");
        let bound = self.computes.engine.bind(P(serial)).await;
        held.cached_blocks..bound.slots.len() as u32
    }

    /// The decode side has all of the prompt, and lets go.
    async fn decoded(&mut self, serial: u64, prompt: &[u32], tail: &[u8]) {
        let slots = self.decodes.engine.bind(D(serial)).await.slots;
        assert_eq!(self.decodes.engine.ready(D(serial)).await, tail);
        self.decodes.engine.holds(prompt, &slots, 0..slots.len() as u32);
        self.decodes.engine.release(D(serial));
    }

    fn finish(&mut self, serial: u64, tail: &[u8]) {
        self.computes.engine.finish(P(serial), tail);
        self.computes.engine.release(P(serial));
    }

    async fn is_quiet(&self) {
        self.prefill.is_quiet().await;
        self.decode.is_quiet().await;
        let left = "pool_staging_pages{state=\"in_flight\"}";
        assert_eq!(self.prefill.metric(left).await, 0.0);
    }
}

async fn each_layer_is_pushed_while_the_next_one_is_computed(domain: Domain) {
    let mut pair = Pair::start(domain).await;
    // Three full blocks and a part of a fourth.
    let prompt = prompt(1, 3 * BLOCK_TOKENS + 10);
    assert_eq!(pair.begin(1, &prompt).await, 0..4);
    let step = pair.computes.engine.plan_in_pool(&[(P(1), 0..4, 5)]);
    for layer in 0..LAYERS {
        pair.computes.write_layer(&prompt, 0..4, layer, 5);
        pair.computes.engine.attachment.progress(step, layer + 1);
        // The engine does nothing more, and the layer goes over.
        let bytes = 4 * u64::from(layer + 1) * LAYER_BYTES;
        pair.prefill.shows("pushed_bytes_total", bytes as f64).await;
    }
    pair.prefill.shows("pool_pages{state=\"computed\"}", 4.0).await;
    pair.finish(1, b"first token");
    pair.decoded(1, &prompt, b"first token").await;
    pair.prefill.has_blocks(&chain(&prompt)).await;
    pair.decode.has_blocks(&chain(&prompt)).await;
    pair.computes.drop_pages(1, 5..9).await;
    pair.is_quiet().await;
    pair.prefill.shows("pool_staged_layers_total", 16.0).await;
    pair.prefill.shows("pool_pages{state=\"computed\"}", 0.0).await;
    // The next prompt that begins alike finds them.
    let longer: Vec<u32> =
        prompt[..192].iter().copied().chain(crate::common::prompt(9, 70)).collect();
    assert_eq!(pair.begin(2, &longer).await, 3..5);
    pair.computes.compute(P(2), &longer, 3..5, 0);
    pair.finish(2, b"2");
    pair.decoded(2, &longer, b"2").await;
    pair.computes.drop_pages(2, 0..2).await;
    pair.is_quiet().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_layer_is_pushed_while_the_next_one_is_computed_over_shared_memory() {
    each_layer_is_pushed_while_the_next_one_is_computed(Domain::Shm).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_layer_is_pushed_while_the_next_one_is_computed_over_tcp() {
    each_layer_is_pushed_while_the_next_one_is_computed(Domain::Tcp).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn chunks_of_several_requests_share_steps_and_a_jump_copies_all_between() {
    let mut pair = Pair::start(Domain::Tcp).await;
    let prompts: Vec<Vec<u32>> = (1..5).map(|seed| prompt(seed, 200)).collect();
    for (serial, prompt) in (1..).zip(&prompts) {
        assert_eq!(pair.begin(serial, prompt).await, 0..4);
    }
    // Two steps, each with pages of all four; the word jumps over layers and over a step.
    let place = |serial: u64, page: u32| serial as u32 * 6 + page;
    for pages in [0..2u32, 2..4] {
        let of = |serial: u64| (P(serial), pages.clone(), place(serial, pages.start));
        let planned: Vec<_> = (1..5).map(of).collect();
        let step = pair.computes.engine.plan_in_pool(&planned);
        for (serial, prompt) in (1..).zip(&prompts) {
            for layer in 0..LAYERS {
                let page = place(serial, pages.start);
                pair.computes.write_layer(prompt, pages.clone(), layer, page);
            }
        }
        let layers_done = if pages.start == 0 { 2 } else { LAYERS };
        pair.computes.engine.attachment.progress(step, layers_done);
    }
    (1..5).for_each(|serial| pair.finish(serial, &serial.to_le_bytes()));
    // They are asked back before all is copied, and written over as soon as they are back.
    pair.computes.drop_pages(1, 0..32).await;
    pair.computes.write(&prompt(99, 32 * BLOCK_TOKENS), 0..32, 0);
    for (serial, prompt) in (1..).zip(&prompts) {
        pair.decoded(serial, prompt, &serial.to_le_bytes()).await;
        pair.prefill.has_blocks(&chain(prompt)).await;
    }
    pair.is_quiet().await;
    let bytes = pair.prefill.metric("pushed_bytes_total").await;
    assert_eq!(bytes, 16.0 * layout().slot_bytes() as f64, "each page goes over once");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pages_are_held_when_they_are_computed_and_copied_once() {
    let mut pair = Pair::start(Domain::Shm).await;
    let prompt = prompt(1, 3 * BLOCK_TOKENS);
    pair.begin(1, &prompt).await;
    pair.computes.compute(P(1), &prompt, 0..3, 4);
    pair.computes.hold(&prompt, 0..3, 4);
    pair.finish(1, b"tail");
    pair.decoded(1, &prompt, b"tail").await;
    pair.prefill.has_blocks(&chain(&prompt)).await;
    pair.is_quiet().await;
    assert_eq!(pair.prefill.metric("pool_blocks_total{event=\"demoted\"}").await, 0.0);
    pair.prefill.shows("pool_pages{state=\"held\"}", 3.0).await;
    pair.computes.drop_pages(1, 4..7).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pages_that_were_named_before_the_prompt_arrives_are_filled_when_it_has() {
    let mut pair = Pair::start(Domain::Shm).await;
    let prompt = prompt(3, 4 * BLOCK_TOKENS + 9);
    pair.begin(1, &prompt).await;
    pair.decodes.engine.bind(D(1)).await;
    pair.decodes.ask_fill_of(7, D(1), 0, 10..15);
    let step = pair.computes.engine.plan_in_pool(&[(P(1), 0..5, 0)]);
    for layer in 0..LAYERS {
        assert_eq!(pair.decodes.engine.unasked(), [], "nothing is there yet");
        pair.computes.write_layer(&prompt, 0..5, layer, 0);
        pair.computes.engine.attachment.progress(step, layer + 1);
    }
    pair.finish(1, b"tail");
    assert_eq!(pair.decodes.filled(7).await, 5);
    assert!(pair.decodes.has(&prompt, 0..5, 10));
    assert_eq!(pair.decodes.engine.ready(D(1)).await, b"tail");
    pair.decodes.engine.release(D(1));
    pair.computes.drop_pages(1, 0..5).await;
    pair.is_quiet().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pages_of_a_gpu_go_back_when_no_copy_reads_them() {
    let Some(gpu) = Emulated::build() else { return };
    let mut pair = Pair::on(&gpu).await;
    let prompt = prompt(1, 2 * BLOCK_TOKENS + 5);
    pair.begin(1, &prompt).await;
    let step = pair.computes.engine.plan_in_pool(&[(P(1), 0..3, 4)]);
    pair.computes.write_layer(&prompt, 0..3, 0, 4);
    gpu.set_copies_held(true);
    pair.computes.engine.attachment.progress(step, 1);
    until("a copy is under way", async || gpu.holds_copies().then_some(())).await;
    for layer in 1..LAYERS {
        pair.computes.write_layer(&prompt, 0..3, layer, 4);
    }
    pair.computes.engine.attachment.progress(step, LAYERS);
    pair.finish(1, b"tail");
    pair.computes.ask_drop(1, 4..7);
    // What is asked later is answered, and the pages are not back.
    let get =
        v1::GetBlocks { handle: 5, keys: BlockKey::concat(&chain(&prompt)), skip_promotion: false };
    pair.computes.engine.send(ToNode::Get(get));
    assert!(pair.computes.engine.got(5).await.slots.is_empty());
    assert_eq!(pair.computes.engine.unasked(), []);
    pair.prefill.shows("pool_pages{state=\"dropping\"}", 3.0).await;
    gpu.set_copies_held(false);
    pair.computes.dropped(1).await;
    pair.computes.write(&crate::common::prompt(9, 3 * BLOCK_TOKENS), 0..3, 4);
    pair.decoded(1, &prompt, b"tail").await;
    pair.prefill.has_blocks(&chain(&prompt)).await;
    pair.is_quiet().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cancelled_prefill_has_its_slots_in_quarantine_until_its_copies_have_ended() {
    let Some(gpu) = Emulated::build() else { return };
    let mut pair = Pair::on(&gpu).await;
    let prompt = prompt(1, 3 * BLOCK_TOKENS);
    pair.begin(1, &prompt).await;
    let step = pair.computes.engine.plan_in_pool(&[(P(1), 0..3, 4)]);
    pair.computes.write_layer(&prompt, 0..3, 0, 4);
    gpu.set_copies_held(true);
    pair.computes.engine.attachment.progress(step, 1);
    until("a copy is under way", async || gpu.holds_copies().then_some(())).await;
    assert!(pair.prefill.abort(P(1)).await);
    assert!(pair.decode.abort(D(1)).await);
    pair.computes.engine.stopped(P(1)).await;
    // What is finished after that is not copied.
    pair.computes.engine.attachment.progress(step, LAYERS);
    pair.computes.engine.release(P(1));
    pair.computes.ask_drop(1, 4..7);
    pair.prefill.shows("shares_aborting", 1.0).await;
    pair.prefill.shows("slots{state=\"quarantined\"}", 3.0).await;
    gpu.set_copies_held(false);
    pair.computes.dropped(1).await;
    pair.is_quiet().await;
    assert_eq!(pair.prefill.metric("pool_staged_layers_total").await, 0.0);
    assert_eq!(pair.prefill.blocks(&chain(&prompt)).await.len(), 0);
    // The engine goes on with another request.
    pair.begin(2, &prompt).await;
    pair.computes.compute(P(2), &prompt, 0..3, 4);
    pair.finish(2, b"tail");
    pair.decoded(2, &prompt, b"tail").await;
    pair.computes.drop_pages(2, 4..7).await;
    pair.is_quiet().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_engine_that_leaves_while_a_copy_reads_its_pool_is_waited_for_by_nobody_but_the_copy() {
    let Some(gpu) = Emulated::build() else { return };
    let mut pair = Pair::on(&gpu).await;
    let prompt = prompt(1, 3 * BLOCK_TOKENS);
    pair.begin(1, &prompt).await;
    let step = pair.computes.engine.plan_in_pool(&[(P(1), 0..3, 4)]);
    pair.computes.write_layer(&prompt, 0..3, 0, 4);
    gpu.set_copies_held(true);
    pair.computes.engine.attachment.progress(step, 1);
    until("a copy is under way", async || gpu.holds_copies().then_some(())).await;
    let Pair { prefill, mut decode, computes, decodes } = pair;
    drop(computes);
    prefill.shows("shares_aborting", 1.0).await;
    prefill.shows("slots{state=\"quarantined\"}", 3.0).await;
    gpu.set_copies_held(false);
    prefill.is_quiet().await;
    until("its memory is closed", async || (gpu.live() == 2).then_some(())).await;
    assert!(decode.abort(D(1)).await);
    decode.is_quiet().await;
    drop(decodes);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_gpu_that_fails_to_copy_costs_the_request_and_no_more() {
    let Some(gpu) = Emulated::build() else { return };
    let mut pair = Pair::on(&gpu).await;
    let prompt = prompt(1, 2 * BLOCK_TOKENS);
    pair.begin(1, &prompt).await;
    gpu.set_copies_fail(true);
    pair.computes.compute(P(1), &prompt, 0..2, 0);
    let reason = pair.computes.engine.stopped(P(1)).await;
    assert_eq!(reason, "cannot copy the computed pages from the engine's pool");
    pair.computes.engine.release(P(1));
    gpu.set_copies_fail(false);
    pair.computes.drop_pages(1, 0..2).await;
    pair.decode.abort(D(1)).await;
    pair.is_quiet().await;
    assert!(pair.prefill.metric("pool_staging_failures_total").await >= 1.0);
    pair.begin(2, &prompt).await;
    pair.computes.compute(P(2), &prompt, 0..2, 0);
    pair.finish(2, b"tail");
    pair.decoded(2, &prompt, b"tail").await;
    pair.computes.drop_pages(2, 0..2).await;
    pair.is_quiet().await;
}

/// Not a test: an engine in a process of its own, for the test below. It attaches to the node in the current directory,
/// and computes a prompt there, without ever coming to its end.
#[test]
#[ignore = "is started by another test"]
fn computing_process() {
    if !Path::new("attach.sock").exists() {
        return;
    }
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    runtime.block_on(async {
        let mut pooled = Pooled::attach_in(Path::new("."), description()).await.expect("attached");
        // The test allocates when it sees that the engine is there.
        loop {
            pooled.engine.ask_bind(P(1));
            if pooled.engine.bound(P(1)).await.status() == v1::BindStatus::Ok {
                break;
            }
            tokio::time::sleep(std::time::Duration::from_millis(2)).await;
        }
        let prompt = prompt(1, 20 * BLOCK_TOKENS);
        for page in 0..19 {
            pooled.compute(P(1), &prompt, page..page + 1, page);
            tokio::time::sleep(std::time::Duration::from_millis(2)).await;
        }
        tokio::time::sleep(std::time::Duration::from_secs(600)).await;
    });
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_engine_that_is_killed_while_it_computes_leaves_nothing_behind() {
    let (mut prefill, mut decode) =
        (TestNode::start(Domain::Shm).await, TestNode::start(Domain::Shm).await);
    let mut decodes = FakeEngine::attach(&decode).await;
    let mut engine = Command::new(std::env::current_exe().expect("this test"))
        .args(["--ignored", "--exact", "computed::computing_process"])
        .current_dir(prefill.attach_dir())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .expect("a process");
    let prompt = prompt(1, 20 * BLOCK_TOKENS);
    until("the engine is attached", async || prefill.allocate(allocate(P(1), &prompt)).await.ok())
        .await;
    let writer_endpoint = prefill.endpoint().await;
    let request = v1::TxAllocateRequest { writer_endpoint, ..allocate(D(1), &prompt) };
    let targets = decode.allocate(request).await.expect("room").targets;
    prefill.push(P(1), targets).await.expect("armed");
    decodes.bind(D(1)).await;
    until("some of it went over", async || {
        (prefill.metric("pushed_bytes_total").await > 4096.0).then_some(())
    })
    .await;
    engine.kill().expect("killed");
    engine.wait().expect("its end");
    prefill.is_quiet().await;
    decode.abort(D(1)).await;
    decodes.stopped(D(1)).await;
    decodes.release(D(1));
    decode.is_quiet().await;
    // What it had finished is a prefix of the prompt, byte for byte.
    let keys = chain(&prompt);
    let kept = prefill.blocks(&keys).await.len();
    let mut next = Pooled::attach(&prefill).await;
    assert_eq!(
        next.fill(1, &prompt[..kept * BLOCK_TOKENS as usize], 0..kept as u32).await,
        kept as u32
    );
    assert!(next.has(&prompt, 0..kept as u32, 0));
    assert_eq!(prefill.metric("corrupt_blocks_total").await, 0.0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_engine_that_plans_what_cannot_be_is_detached() {
    type Plan = fn(&mut Pooled);
    let cases: [(&str, Plan); 5] = [
        ("a page for each", |pooled| plan(pooled, 9, vec![1])),
        ("a page that is there", |pooled| plan(pooled, 9, vec![31, 32])),
        ("pages of its own", |pooled| {
            pooled.hold(&prompt(7, BLOCK_TOKENS), 0..1, 3);
            plan(pooled, 9, vec![3, 4]);
        }),
        ("each page once", |pooled| {
            plan(pooled, 9, vec![3, 4]);
            plan(pooled, 10, vec![5, 6]);
        }),
        ("slots that it does not leave to the node", |pooled| {
            plan(pooled, 9, vec![3, 4]);
            plan(pooled, 10, Vec::new());
        }),
    ];
    for (why, says) in cases {
        let mut node = TestNode::start(Domain::Shm).await;
        let mut pooled = Pooled::attach(&node).await;
        node.allocate(allocate(P(1), &prompt(1, 2 * BLOCK_TOKENS))).await.expect("room");
        pooled.engine.bind(P(1)).await;
        says(&mut pooled);
        until(why, async || (!pooled.engine.attachment.is_connected()).then_some(())).await;
        drop(pooled);
        node.is_quiet().await;
    }
}

fn plan(pooled: &mut Pooled, step: u32, pool_pages: Vec<u32>) {
    let pages = vec![v1::StepPages {
        tx: Some(tx(1).into()),
        side: Side::Prefill.to_wire(),
        first_page: 0,
        page_count: 2,
        pool_pages,
    }];
    pooled.engine.send(ToNode::Plan(v1::StepPlan { step, pages }));
}
