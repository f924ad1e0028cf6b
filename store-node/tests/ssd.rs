//! A node with an SSD: blocks outlive pressure and restarts, and a bad disk costs time, never an
//! answer.

// Names of shares that read like those of the block core's tests.
#![allow(non_snake_case)]

use std::path::Path;

use crate::common::*;
use kvasir_proto::{Share, Side, SlotLayout, v1};
use kvasir_store_node::config::{Config, SsdIo};

fn P(serial: u64) -> Share {
    share(serial, Side::Prefill)
}

fn S(serial: u64) -> Share {
    share(serial, Side::Source)
}

/// Slots of the arena in these tests.
const SLOTS: u32 = 64;
const SEGMENT_BYTES: u64 = 128 << 10;
/// Longer than it takes until the disk is as its file of faults says.
const FAULTS_SEEN: std::time::Duration = std::time::Duration::from_millis(60);

fn with_ssd(dir: &Path, io: SsdIo) -> impl FnOnce(&mut Config) {
    let dir = dir.to_owned();
    move |config: &mut Config| {
        config.ssd.faults_file = Some(dir.join("faults"));
        config.ssd.dir = Some(dir);
        config.ssd.segment_bytes = SEGMENT_BYTES;
        config.ssd.capacity_bytes = 64 * SEGMENT_BYTES + 8192;
        config.ssd.timeout_ms = 200;
        config.ssd.demote_ahead_percent = 60;
        // How old something is must not decide here.
        config.ssd.prefetch_protected_ms = 0;
        config.ssd.io = io;
    }
}

struct Tiered {
    node: TestNode,
    engine: FakeEngine,
    serial: u64,
}

impl Tiered {
    async fn start(dir: &Path, io: SsdIo) -> Self {
        let mut node = TestNode::start_with(Domain::Shm, with_ssd(dir, io)).await;
        let engine = FakeEngine::attach(&node).await;
        until("the SSD is ready", async || {
            node.describe().await.ssd.is_some_and(|ssd| ssd.usable).then_some(())
        })
        .await;
        Tiered { node, engine, serial: 1_000 }
    }

    /// From when it returns on, the disk does this.
    async fn faults(dir: &Path, words: &str) {
        std::fs::write(dir.join("faults"), words).expect("written");
        tokio::time::sleep(FAULTS_SEEN).await;
    }

    /// Computes a prompt of so many blocks and a little more. Answers with the tokens that were
    /// cached.
    async fn prefill(&mut self, prompt: &[u32]) -> u32 {
        self.serial += 1;
        let share = P(self.serial);
        self.node.allocate(allocate(share, prompt)).await.expect("allocated");
        let bound = self.engine.bind(share).await;
        let cached = bound.cached_tokens / BLOCK_TOKENS;
        self.engine.holds(prompt, &bound.slots, 0..cached);
        let pages = prompt.len().div_ceil(BLOCK_TOKENS as usize) as u32;
        self.engine.compute(share, prompt, &bound.slots, cached..pages);
        self.engine.release(share);
        let keys = chain(prompt);
        self.node.has_blocks(&keys).await;
        bound.cached_tokens
    }

    /// Other prompts, until the blocks of this one are in no slot any more.
    async fn push_out(&mut self, prompt: &[u32]) {
        let keys = chain(prompt);
        for seed in 500.. {
            if self.node.blocks(&keys).await.is_empty() {
                return;
            }
            assert!(seed < 600, "they stay");
            self.settled().await;
            self.prefill(&crate::common::prompt(seed, 6 * BLOCK_TOKENS + 1)).await;
        }
    }

    /// Nothing is on its way to the SSD.
    async fn settled(&self) {
        until("all has sunk that shall", async || {
            (self.node.metric("ssd_demoting_blocks").await == 0.0).then_some(())
        })
        .await;
    }

    async fn keep(&mut self, prompt: &[u32], ttl_ms: u64) -> Result<u32, tonic::Status> {
        let request = v1::PersistContextRequest {
            namespace: namespace().0.to_vec(),
            keys: kvasir_proto::BlockKey::concat(&chain(prompt)),
            tenant: "tenant".into(),
            ttl_ms,
            ..v1::PersistContextRequest::default()
        };
        let kept = self.node.client.persist_context(request).await;
        kept.map(|reply| reply.into_inner().persisted_blocks)
    }

    async fn ready(&self) -> String {
        let (status, text) = self.node.get("/readyz").await;
        assert_eq!(status, 200, "{text}");
        text
    }

    async fn says(&self, word: &str) {
        until(word, async || self.ready().await.contains(word).then_some(())).await;
    }
}

async fn blocks_rise_again(io: SsdIo) {
    let dir = tempfile::tempdir().expect("a folder");
    let mut tiered = Tiered::start(dir.path(), io).await;
    let prompt = prompt(1, 5 * BLOCK_TOKENS + 9);
    assert_eq!(tiered.prefill(&prompt).await, 0);
    tiered.push_out(&prompt).await;
    assert_eq!(tiered.prefill(&prompt).await, 5 * BLOCK_TOKENS);
    assert!(tiered.node.metric("block_events_total{event=\"promoted\"}").await >= 5.0);
    tiered.node.is_quiet().await;
    assert!(tiered.ready().await.contains("ssd: ready"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_was_pushed_out_of_memory_comes_back_from_the_ssd() {
    blocks_rise_again(SsdIo::Auto).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn plain_calls_do_as_well() {
    blocks_rise_again(SsdIo::Plain).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_says_when_its_blocks_are_too_large_for_the_segments_of_its_ssd() {
    let dir = tempfile::tempdir().expect("a folder");
    let mut node = TestNode::start_with(Domain::Shm, with_ssd(dir.path(), SsdIo::Auto)).await;
    // Six pages with its head, of segments of 32.
    let large = SlotLayout::layer_major(BLOCK_TOKENS, LAYERS.into(), 80).expect("a layout");
    let _engine = FakeEngine::try_attach(&node, large).await.expect("attached");
    let says = "unused: a block is larger than a seventh of a segment";
    until(says, async || node.get("/readyz").await.1.contains(says).then_some(())).await;
    assert!(!node.describe().await.ssd.expect("there is one").usable);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_kept_chain_is_there_after_a_restart() {
    let dir = tempfile::tempdir().expect("a folder");
    let mut tiered = Tiered::start(dir.path(), SsdIo::Auto).await;
    let kept = prompt(1, 4 * BLOCK_TOKENS + 9);
    tiered.prefill(&kept).await;
    let nobody = tiered.keep(&prompt(9, BLOCK_TOKENS), 60_000).await;
    assert_eq!(nobody.map_err(|status| status.code()), Err(tonic::Code::NotFound));
    assert_eq!(tiered.keep(&kept, 60_000).await.expect("kept"), 4);
    let Tiered { node, engine, .. } = tiered;
    drop(engine);
    node.shut_down().await;

    // An index that was lost is made anew.
    std::fs::remove_dir_all(dir.path().join("index")).expect("removed");
    let mut tiered = Tiered::start(dir.path(), SsdIo::Auto).await;
    tiered.node.shows("ssd_context_blocks", 4.0).await;
    assert_eq!(tiered.prefill(&kept).await, 4 * BLOCK_TOKENS);
    tiered.node.is_quiet().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_tenant_has_a_quota_and_a_node_without_an_ssd_keeps_nothing() {
    let dir = tempfile::tempdir().expect("a folder");
    let quota = |config: &mut Config| {
        with_ssd(dir.path(), SsdIo::Auto)(config);
        config.ssd.tenant_bytes_max = 3 * 8192;
    };
    let mut node = TestNode::start_with(Domain::Shm, quota).await;
    let engine = FakeEngine::attach(&node).await;
    until("the SSD is ready", async || {
        node.describe().await.ssd.is_some_and(|ssd| ssd.usable).then_some(())
    })
    .await;
    let mut tiered = Tiered { node, engine, serial: 0 };
    let prompt = prompt(1, 4 * BLOCK_TOKENS + 9);
    tiered.prefill(&prompt).await;
    let over = tiered.keep(&prompt, 60_000).await.map_err(|status| status.code());
    assert_eq!(over, Err(tonic::Code::ResourceExhausted));
    let part = &prompt[..3 * BLOCK_TOKENS as usize];
    assert_eq!(tiered.keep(part, 60_000).await.expect("kept"), 3);

    let node = TestNode::start(Domain::Shm).await;
    let engine = FakeEngine::attach(&node).await;
    let mut without = Tiered { node, engine, serial: 0 };
    without.prefill(&prompt).await;
    let none = without.keep(&prompt, 60_000).await.map_err(|status| status.code());
    assert_eq!(none, Err(tonic::Code::FailedPrecondition));
}

/// The disk goes bad while a prompt's blocks are on it alone: the prompt is computed, the node says
/// so, and goes on when the disk is good again.
async fn a_bad_disk(words: &str, says: &str) {
    let dir = tempfile::tempdir().expect("a folder");
    let mut tiered = Tiered::start(dir.path(), SsdIo::Auto).await;
    let (first, second) = (prompt(1, 5 * BLOCK_TOKENS + 9), prompt(2, 5 * BLOCK_TOKENS + 9));
    tiered.prefill(&first).await;
    tiered.prefill(&second).await;
    tiered.push_out(&first).await;
    tiered.push_out(&second).await;
    tiered.settled().await;
    Tiered::faults(dir.path(), words).await;
    assert_eq!(tiered.prefill(&first).await, 0, "{words}");
    tiered.says(says).await;
    Tiered::faults(dir.path(), "").await;
    // Without a restart: what is still there is used again.
    until("the SSD is used again", async || {
        tiered.node.describe().await.ssd.is_some_and(|ssd| ssd.usable).then_some(())
    })
    .await;
    assert_eq!(tiered.prefill(&second).await, 5 * BLOCK_TOKENS, "{words}");
    tiered.node.is_quiet().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_disk_that_gives_wrong_bytes_costs_no_answer() {
    a_bad_disk("wrong", "degraded").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_disk_that_fails_to_read_costs_no_answer() {
    a_bad_disk("read-errors", "degraded").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_disk_that_hangs_costs_no_answer() {
    a_bad_disk("hang", "hangs").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_disk_that_is_full_keeps_nothing_and_takes_blocks_again_later() {
    let dir = tempfile::tempdir().expect("a folder");
    let mut tiered = Tiered::start(dir.path(), SsdIo::Auto).await;
    let prompt = prompt(1, 4 * BLOCK_TOKENS + 9);
    tiered.prefill(&prompt).await;
    Tiered::faults(dir.path(), "full").await;
    let full = tiered.keep(&prompt, 60_000).await.map_err(|status| status.code());
    assert_eq!(full, Err(tonic::Code::Unavailable));
    tiered.says("the disk is full").await;
    Tiered::faults(dir.path(), "").await;
    let kept = until("it keeps again", async || tiered.keep(&prompt, 60_000).await.ok()).await;
    assert_eq!(kept, 4);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_source_sends_what_it_has_on_its_ssd() {
    let dir = tempfile::tempdir().expect("a folder");
    let mut source = Tiered::start(dir.path(), SsdIo::Auto).await;
    let prompt = prompt(1, 3 * BLOCK_TOKENS + 9);
    source.prefill(&prompt).await;
    source.push_out(&prompt).await;
    let mut target = TestNode::start(Domain::Shm).await;
    let mut engine = FakeEngine::attach(&target).await;
    let held = source.node.allocate(allocate(S(1), &prompt)).await.expect("allocated");
    assert_eq!(held.cached_blocks, 3);
    let mut request = allocate(P(1), &prompt);
    request.fetch_until_block = 3;
    request.writer_endpoint = source.node.endpoint().await;
    let targets = target.allocate(request).await.expect("allocated").targets;
    engine.ask_bind(P(1));
    let pushed = source.node.push(S(1), targets).await.expect("pushed");
    assert_eq!((pushed.valid_blocks, pushed.corrupt_blocks), (3, 0));
    let bound = engine.bound(P(1)).await;
    assert_eq!(bound.cached_tokens, 3 * BLOCK_TOKENS);
    engine.holds(&prompt, &bound.slots, 0..3);
    engine.release(P(1));
    target.is_quiet().await;
    source.node.is_quiet().await;
}

/// A source whose SSD goes bad when it is asked: the target is told what came of it, and computes.
async fn a_source_with_a_bad_disk(words: &str) {
    let dir = tempfile::tempdir().expect("a folder");
    let mut source = Tiered::start(dir.path(), SsdIo::Auto).await;
    let prompt = prompt(1, 3 * BLOCK_TOKENS + 9);
    source.prefill(&prompt).await;
    source.push_out(&prompt).await;
    source.settled().await;
    let mut target = TestNode::start(Domain::Shm).await;
    let mut engine = FakeEngine::attach(&target).await;
    Tiered::faults(dir.path(), words).await;
    let held = source.node.allocate(allocate(S(1), &prompt)).await.expect("allocated");
    assert_eq!(held.cached_blocks, 3, "{words}: nobody knows yet");
    let mut request = allocate(P(1), &prompt);
    request.fetch_until_block = 3;
    request.writer_endpoint = source.node.endpoint().await;
    let targets = target.allocate(request).await.expect("allocated").targets;
    engine.ask_bind(P(1));
    let pushed = source.node.push(S(1), targets).await.expect("an answer");
    assert_eq!((pushed.valid_blocks, pushed.corrupt_blocks), (0, 0), "{words}");
    target.commit(P(1), pushed.valid_blocks, false).await.expect("settled");
    assert_eq!(engine.bound(P(1)).await.cached_tokens, 0, "{words}");
    engine.release(P(1));
    target.is_quiet().await;
    Tiered::faults(dir.path(), "").await;
    source.node.is_quiet().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_source_whose_ssd_hangs_says_so_in_time() {
    a_source_with_a_bad_disk("hang").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_source_sends_nothing_that_its_ssd_has_spoiled() {
    a_source_with_a_bad_disk("wrong").await;
}

async fn prefetch(node: &mut TestNode, prompt: &[u32]) -> Result<v1::PrefetchReply, tonic::Status> {
    let request = v1::PrefetchRequest {
        namespace: namespace().0.to_vec(),
        keys: kvasir_proto::BlockKey::concat(&chain(prompt)),
    };
    node.client.prefetch(request).await.map(tonic::Response::into_inner)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_hinted_at_is_in_memory_before_it_is_asked_for() {
    let dir = tempfile::tempdir().expect("a folder");
    let mut tiered = Tiered::start(dir.path(), SsdIo::Auto).await;
    let prompt = prompt(1, 5 * BLOCK_TOKENS + 9);
    tiered.prefill(&prompt).await;
    tiered.push_out(&prompt).await;
    let reply = prefetch(&mut tiered.node, &prompt).await.expect("it reads");
    assert_eq!((reply.dram_blocks, reply.promoting_blocks), (0, 5));
    tiered.node.has_blocks(&chain(&prompt)).await;
    tiered.node.is_quiet().await;
    let of = |event: &str| format!("block_events_total{{event=\"{event}\"}}");
    tiered.node.shows(&of("prefetched"), 5.0).await;
    let risen = tiered.node.metric(&of("promoted")).await;
    assert_eq!(tiered.prefill(&prompt).await, 5 * BLOCK_TOKENS);
    tiered.node.shows(&of("prefetched_used"), 5.0).await;
    assert_eq!(tiered.node.metric(&of("promoted")).await, risen, "it was there already");
    let reply = prefetch(&mut tiered.node, &prompt).await.expect("it is there");
    assert_eq!((reply.dram_blocks, reply.promoting_blocks), (5, 0));
    tiered.node.is_quiet().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_engine_that_looks_again_finds_what_was_on_the_ssd() {
    use v1::engine_to_node::Message as ToNode;
    let dir = tempfile::tempdir().expect("a folder");
    let mut tiered = Tiered::start(dir.path(), SsdIo::Auto).await;
    let prompt = prompt(1, 4 * BLOCK_TOKENS + 9);
    tiered.prefill(&prompt).await;
    tiered.push_out(&prompt).await;
    let keys = kvasir_proto::BlockKey::concat(&chain(&prompt));
    let engine = &mut tiered.engine;
    let get = v1::GetBlocks { handle: 3, keys: keys.clone(), skip_promotion: true };
    engine.send(ToNode::Get(get));
    let got = engine.got(3).await;
    assert_eq!(
        (got.slots.len(), got.promoting_blocks),
        (0, 0),
        "nothing is read that nobody waits for"
    );
    engine.send(ToNode::Get(v1::GetBlocks {
        handle: 1,
        keys: keys.clone(),
        skip_promotion: false,
    }));
    let got = engine.got(1).await;
    assert_eq!((got.slots.len(), got.promoting_blocks), (0, 4));
    tiered.node.has_blocks(&chain(&prompt)).await;
    engine.send(ToNode::Get(v1::GetBlocks { handle: 2, keys, skip_promotion: false }));
    let got = engine.got(2).await;
    assert_eq!((got.slots.len(), got.promoting_blocks), (4, 0));
    engine.holds(&prompt, &got.slots, 0..4);
    engine.send(ToNode::Unpin(v1::UnpinBlocks { handle: 2 }));
    tiered.node.is_quiet().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hint_that_cannot_be_followed_is_refused_with_the_reason() {
    let dir = tempfile::tempdir().expect("a folder");
    let off = |config: &mut Config| {
        with_ssd(dir.path(), SsdIo::Auto)(config);
        config.ssd.prefetch_chains_max = 0;
    };
    let node = TestNode::start_with(Domain::Shm, off).await;
    let engine = FakeEngine::attach(&node).await;
    let mut tiered = Tiered { node, engine, serial: 0 };
    until("the SSD is ready", async || {
        tiered.node.describe().await.ssd.is_some_and(|ssd| ssd.usable).then_some(())
    })
    .await;
    let prompt = prompt(1, 2 * BLOCK_TOKENS + 9);
    tiered.prefill(&prompt).await;
    tiered.push_out(&prompt).await;
    let refused = prefetch(&mut tiered.node, &prompt).await.map_err(|status| status.code());
    assert_eq!(refused, Err(tonic::Code::ResourceExhausted));
    assert_eq!(tiered.node.blocks(&chain(&prompt)).await, []);
    let mut without = TestNode::start(Domain::Shm).await;
    let refused = prefetch(&mut without, &prompt).await.map_err(|status| status.code());
    assert_eq!(refused, Err(tonic::Code::FailedPrecondition));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hint_to_a_node_to_which_no_engine_has_attached_is_refused() {
    let dir = tempfile::tempdir().expect("a folder");
    let mut node = TestNode::start_with(Domain::Shm, with_ssd(dir.path(), SsdIo::Auto)).await;
    until("the SSD is ready", async || {
        node.describe().await.ssd.is_some_and(|ssd| ssd.usable).then_some(())
    })
    .await;
    let refused = prefetch(&mut node, &prompt(1, 2 * BLOCK_TOKENS)).await.expect_err("a refusal");
    assert_eq!(refused.code(), tonic::Code::FailedPrecondition);
    assert!(refused.message().contains("no engine has attached"), "{}", refused.message());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_told_to_leave_the_ssd_reads_nothing() {
    let dir = tempfile::tempdir().expect("a folder");
    let mut tiered = Tiered::start(dir.path(), SsdIo::Auto).await;
    let prompt = prompt(1, 3 * BLOCK_TOKENS + 9);
    tiered.prefill(&prompt).await;
    tiered.push_out(&prompt).await;
    let request = v1::TxAllocateRequest { skip_promotion: true, ..allocate(P(1), &prompt) };
    assert_eq!(tiered.node.allocate(request).await.expect("allocated").cached_blocks, 0);
    assert_eq!(tiered.engine.bind(P(1)).await.cached_tokens, 0);
    tiered.engine.release(P(1));
    tiered.node.is_quiet().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_ephemeral_request_leaves_no_block() {
    let dir = tempfile::tempdir().expect("a folder");
    let mut tiered = Tiered::start(dir.path(), SsdIo::Auto).await;
    let prompt = prompt(1, 3 * BLOCK_TOKENS + 9);
    let mut request = allocate(P(1), &prompt);
    request.set_cache_class(v1::CacheClass::Ephemeral);
    tiered.node.allocate(request).await.expect("allocated");
    let bound = tiered.engine.bind(P(1)).await;
    // For an engine with a pool of its own, which is to keep nothing either.
    assert!(bound.ephemeral);
    tiered.engine.compute(P(1), &prompt, &bound.slots, 0..4);
    tiered.engine.release(P(1));
    tiered.node.is_quiet().await;
    assert_eq!(tiered.node.blocks(&chain(&prompt)).await, []);
    assert_eq!(tiered.node.describe().await.slots_free, SLOTS);
}
