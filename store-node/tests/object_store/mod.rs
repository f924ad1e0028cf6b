//! Nodes with an object store: what is kept for a tenant is found there by every node, also after its own is gone,
//! and an object store that fails costs time, never an answer.

// Names of shares that read like those of the block core's tests.
#![allow(non_snake_case)]

mod s3;

use std::path::Path;

use kvasir_proto::{BlockKey, Share, Side, v1};
use kvasir_store_node::config::Config;

use crate::common::*;
use s3::{Mode, S3};

fn P(serial: u64) -> Share {
    share(serial, Side::Prefill)
}

/// A node, its engine, and the object store that it uses.
struct Tiered {
    node: TestNode,
    engine: FakeEngine,
    serial: u64,
}

impl Tiered {
    async fn start(s3: &S3, change: impl FnOnce(&mut Config)) -> Self {
        let settings = s3.settings();
        let node = TestNode::start_with(Domain::Shm, |config| {
            config.object_store = settings;
            change(config);
        })
        .await;
        let engine = FakeEngine::attach(&node).await;
        Tiered { node, engine, serial: 1_000 }
    }

    /// One without an SSD, whose object store answers.
    async fn ready(s3: &S3) -> Self {
        let tiered = Tiered::start(s3, |_| {}).await;
        tiered.says("object store: ready").await;
        tiered
    }

    async fn with_ssd(s3: &S3, dir: &Path) -> Self {
        let dir = dir.to_owned();
        let mut tiered = Tiered::start(s3, |config| {
            config.ssd.dir = Some(dir);
            config.ssd.segment_bytes = 128 << 10;
            config.ssd.capacity_bytes = 64 * (128 << 10) + 8192;
        })
        .await;
        tiered.says("object store: ready").await;
        until("the SSD is ready", async || {
            tiered.node.describe().await.ssd.is_some_and(|ssd| ssd.usable).then_some(())
        })
        .await;
        tiered
    }

    /// Computes a prompt, and answers with the tokens that were cached, which are right byte for byte.
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
        self.node.has_blocks(&chain(prompt)).await;
        bound.cached_tokens
    }

    async fn keep(&mut self, prompt: &[u32], ttl_ms: u64) -> Result<u32, tonic::Code> {
        let request = v1::PersistContextRequest {
            namespace: namespace().0.to_vec(),
            keys: BlockKey::concat(&chain(prompt)),
            tenant: "tenant".into(),
            ttl_ms,
            ..v1::PersistContextRequest::default()
        };
        let kept = self.node.client.persist_context(request).await;
        kept.map(|reply| reply.into_inner().persisted_blocks).map_err(|status| status.code())
    }

    /// Last keys of the tenant's contexts, and until when each is kept.
    async fn contexts(&mut self) -> Vec<(Vec<u8>, u64)> {
        let request = v1::ListContextsRequest {
            tenant: "tenant".into(),
            ..v1::ListContextsRequest::default()
        };
        let page = self.node.client.list_contexts(request).await.expect("a list").into_inner();
        page.contexts
            .into_iter()
            .map(|context| (context.last_key, context.expires_unix_ms))
            .collect()
    }

    async fn extend(&mut self, prompt: &[u32], ttl_ms: u64) -> Result<u64, tonic::Code> {
        let request = v1::PersistContextRequest {
            namespace: namespace().0.to_vec(),
            last_key: last(prompt),
            tenant: "tenant".into(),
            ttl_ms,
            ..v1::PersistContextRequest::default()
        };
        let kept = self.node.client.persist_context(request).await;
        kept.map(|reply| reply.into_inner().expires_unix_ms).map_err(|status| status.code())
    }

    async fn delete_context(&mut self, prompt: &[u32]) -> Result<(), tonic::Code> {
        let request = v1::DeleteContextRequest {
            tenant: "tenant".into(),
            namespace: namespace().0.to_vec(),
            last_key: last(prompt),
        };
        let dropped = self.node.client.delete_context(request).await;
        dropped.map(|_| ()).map_err(|status| status.code())
    }

    async fn says(&self, words: &str) {
        until(words, async || {
            let (status, text) = self.node.get("/readyz").await;
            assert_eq!(status, 200, "{text}");
            text.contains(words).then_some(())
        })
        .await;
    }

    async fn counts(&self, event: &str, least: f64) {
        let name = format!("block_events_total{{event=\"{event}\"}}");
        until(&name, async || (self.node.metric(&name).await >= least).then_some(())).await;
    }

    async fn event(&self, event: &str) -> f64 {
        self.node.metric(&format!("block_events_total{{event=\"{event}\"}}")).await
    }

    /// So many blocks are known to be in the object store.
    async fn knows(&self, blocks: f64) {
        self.node.shows("object_store_blocks{state=\"stored\"}", blocks).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_one_node_keeps_on_its_ssd_another_one_finds() {
    let s3 = S3::start().await;
    let dir = tempfile::tempdir().expect("a folder");
    let mut keeper = Tiered::with_ssd(&s3, dir.path()).await;
    let kept = prompt(1, 5 * BLOCK_TOKENS + 9);
    keeper.prefill(&kept).await;
    keeper.prefill(&prompt(2, 3 * BLOCK_TOKENS + 9)).await;
    assert_eq!(s3.names(), [""; 0], "what is kept for nobody is not sent");
    assert_eq!(keeper.keep(&kept, 600_000).await, Ok(5));
    keeper.counts("uploaded", 5.0).await;
    assert_eq!(s3.names().len(), 5);
    let namespace: String = namespace().0.iter().map(|byte| format!("{byte:02x}")).collect();
    assert!(s3.names().iter().all(|name| {
        name.starts_with("kv/cache/v1/") && name.contains(&format!("/{namespace}/"))
    }));

    let mut other = Tiered::ready(&s3).await;
    other.knows(5.0).await;
    assert_eq!(other.prefill(&kept).await, 5 * BLOCK_TOKENS);
    assert_eq!(other.event("downloaded").await, 5.0);
    // Now they are in its memory.
    assert_eq!(other.prefill(&kept).await, 5 * BLOCK_TOKENS);
    assert_eq!(other.event("downloaded").await, 5.0);

    // Kept for longer, they are copied where they are.
    let names = s3.names();
    assert_eq!(keeper.keep(&kept, 1_200_000).await, Ok(5));
    keeper.counts("uploaded", 10.0).await;
    until("the former ones are gone", async || (s3.names().len() == 5).then_some(())).await;
    assert!(s3.names().iter().all(|name| !names.contains(name)));
    assert_eq!((s3.served("PUT"), s3.served("COPY")), (5, 5));
    assert_eq!(s3.wrongly_signed(), 0);
    keeper.node.is_quiet().await;
    other.node.is_quiet().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_an_ssd_keeps_already_is_sent_also_before_an_engine_comes() {
    let s3 = S3::start().await;
    s3.set(Mode::Fails);
    let dir = tempfile::tempdir().expect("a folder");
    let on_ssd = |config: &mut Config| {
        config.object_store = s3.settings();
        config.ssd.dir = Some(dir.path().to_owned());
        config.ssd.segment_bytes = 128 << 10;
        config.ssd.capacity_bytes = 64 * (128 << 10) + 8192;
    };
    let node = TestNode::start_with(Domain::Shm, on_ssd).await;
    let engine = FakeEngine::attach(&node).await;
    let mut keeper = Tiered { node, engine, serial: 0 };
    keeper.says("ssd: ready").await;
    let kept = prompt(1, 3 * BLOCK_TOKENS + 9);
    keeper.prefill(&kept).await;
    assert_eq!(keeper.keep(&kept, 600_000).await, Ok(3), "the SSD has it");
    let Tiered { node, engine, .. } = keeper;
    drop(engine);
    node.shut_down().await;

    s3.set(Mode::Good);
    let node = TestNode::start_with(Domain::Shm, on_ssd).await;
    until("all of it is there", async || (s3.names().len() == 3).then_some(())).await;
    drop(node);
    let mut other = Tiered::ready(&s3).await;
    assert_eq!(other.prefill(&kept).await, 3 * BLOCK_TOKENS);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_bucket_that_is_not_there_takes_nothing_from_the_ssd() {
    let s3 = S3::start().await;
    let dir = tempfile::tempdir().expect("a folder");
    let mut keeper = Tiered::with_ssd(&s3, dir.path()).await;
    keeper.says("object store: ready").await;
    s3.set(Mode::NoBucket);
    let kept = prompt(1, 3 * BLOCK_TOKENS + 9);
    keeper.prefill(&kept).await;
    assert_eq!(keeper.keep(&kept, 600_000).await, Ok(3), "the SSD has it");
    keeper.counts("upload_failed", 1.0).await;
    keeper.says("object store: failed").await;
    assert_eq!(keeper.contexts().await.len(), 1);
    let ssd_blocks = keeper.node.describe().await.ssd.expect("it has one").blocks;
    assert_eq!(ssd_blocks, 3);
    s3.set(Mode::Good);
    until("all of it is there", async || (s3.names().len() == 3).then_some(())).await;
    let mut other = Tiered::ready(&s3).await;
    assert_eq!(other.prefill(&kept).await, 3 * BLOCK_TOKENS);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_without_an_ssd_keeps_a_chain_beyond_its_own_end() {
    let s3 = S3::start().await;
    let mut first = Tiered::ready(&s3).await;
    let kept = prompt(1, 4 * BLOCK_TOKENS + 9);
    assert_eq!(first.keep(&kept, 600_000).await, Err(tonic::Code::NotFound));
    first.prefill(&kept).await;
    assert_eq!(first.keep(&kept, 600_000).await, Ok(4));
    assert_eq!(s3.names().len(), 4, "it was answered when they were there");
    let Tiered { node, engine, .. } = first;
    drop(engine);
    node.shut_down().await;

    let mut second = Tiered::ready(&s3).await;
    assert_eq!(second.prefill(&kept).await, 4 * BLOCK_TOKENS);
    assert_eq!(second.keep(&kept, 1).await, Ok(4), "they are kept for longer already");
    assert_eq!(s3.served("PUT"), 4, "nothing was sent twice");
    second.node.is_quiet().await;
}

fn last(prompt: &[u32]) -> Vec<u8> {
    chain(prompt).last().expect("a block at least").0.to_vec()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn contexts_are_found_extended_and_dropped_where_there_is_no_ssd() {
    let s3 = S3::start().await;
    let mut first = Tiered::ready(&s3).await;
    let long = prompt(1, 4 * BLOCK_TOKENS + 9);
    let short = &long[..2 * BLOCK_TOKENS as usize];
    first.prefill(&long).await;
    assert_eq!(first.keep(&long, 600_000).await, Ok(4));
    assert_eq!(first.keep(short, 300_000).await, Ok(2));
    assert_eq!(s3.names().len(), 4, "one block has one name");
    let both = first.contexts().await;
    assert_eq!(both.len(), 2);

    let mut second = Tiered::ready(&s3).await;
    assert_eq!(second.contexts().await, both);
    // An earlier time for one, and no more for the other: whoever starts later finds it so.
    let until = second.extend(short, 100_000).await.expect("it is there");
    assert_eq!(second.delete_context(&long).await, Ok(()));
    assert_eq!(second.delete_context(&long).await, Err(tonic::Code::NotFound));
    assert_eq!(second.contexts().await, [(last(short), until)]);
    let mut third = Tiered::ready(&s3).await;
    assert_eq!(third.contexts().await, [(last(short), until)]);
    // The first one learns of it when it lists the next time.
    let wanted = vec![(last(short), until)];
    crate::common::until("it lists again", async || {
        (first.contexts().await == wanted).then_some(())
    })
    .await;
    assert_eq!(third.prefill(&long).await, 4 * BLOCK_TOKENS, "the blocks have their time");
    assert_eq!(s3.names().len(), 4);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_context_that_is_dropped_from_an_ssd_is_not_found_in_the_object_store_any_more() {
    let s3 = S3::start().await;
    let dir = tempfile::tempdir().expect("a folder");
    let mut keeper = Tiered::with_ssd(&s3, dir.path()).await;
    let kept = prompt(1, 3 * BLOCK_TOKENS + 9);
    keeper.prefill(&kept).await;
    assert_eq!(keeper.keep(&kept, 600_000).await, Ok(3));
    keeper.knows(3.0).await;
    let mut other = Tiered::ready(&s3).await;
    assert_eq!(other.contexts().await.len(), 1);
    until("nothing of it is being sent", async || match keeper.delete_context(&kept).await {
        Ok(()) => Some(()),
        Err(tonic::Code::Unavailable) => None,
        Err(other) => panic!("{other:?}"),
    })
    .await;
    assert_eq!(keeper.contexts().await, []);
    assert_eq!(Tiered::ready(&s3).await.contexts().await, []);
    // While it does not answer, nobody says that it is done.
    assert_eq!(keeper.keep(&kept, 600_000).await, Ok(3));
    let marked = async || {
        let mut found = Tiered::ready(&s3).await;
        (found.contexts().await.len() == 1).then_some(())
    };
    until("it is there again", marked).await;
    keeper.knows(3.0).await;
    s3.set(Mode::Fails);
    keeper.says("object store: failed").await;
    let dropped = keeper.delete_context(&kept).await;
    assert_eq!(dropped, Err(tonic::Code::Unavailable));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn objects_that_are_wrong_or_missing_are_misses_and_deleted() {
    let s3 = S3::start().await;
    let mut keeper = Tiered::ready(&s3).await;
    let kept = prompt(1, 4 * BLOCK_TOKENS + 9);
    keeper.prefill(&kept).await;
    assert_eq!(keeper.keep(&kept, 600_000).await, Ok(4));
    let name = |block: usize| {
        let key: String = chain(&kept)[block].0.iter().map(|byte| format!("{byte:02x}")).collect();
        s3.names().into_iter().find(|name| name.contains(&format!("/{key}/"))).expect("a name")
    };

    // A byte of the third one has changed.
    let rotten = name(2);
    let mut bytes = s3.get(&rotten).expect("an object").to_vec();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 0x40;
    s3.put(&rotten, bytes);
    let mut other = Tiered::ready(&s3).await;
    assert_eq!(other.prefill(&kept).await, 2 * BLOCK_TOKENS);
    assert_eq!(other.node.metric("object_store_invalid_objects_total").await, 1.0);
    assert_eq!(s3.get(&rotten), None);

    // The second one is the first one, under its name.
    let (first, second) = (name(0), name(1));
    s3.put(&second, s3.get(&first).expect("an object"));
    let mut other = Tiered::ready(&s3).await;
    assert_eq!(other.prefill(&kept).await, BLOCK_TOKENS);
    assert_eq!(s3.get(&second), None);

    // The first one goes after it was listed.
    let mut other =
        Tiered::start(&s3, |config| config.object_store.list_interval_ms = 600_000).await;
    other.says("object store: ready").await;
    s3.remove(&first);
    assert_eq!(other.prefill(&kept).await, 0);
    assert_eq!(other.event("object_store_lost").await, 1.0);
    other.says("object store: ready").await;
    other.node.is_quiet().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn blocks_of_another_namespace_are_not_served() {
    let s3 = S3::start().await;
    let mut keeper = Tiered::ready(&s3).await;
    let kept = prompt(1, 2 * BLOCK_TOKENS + 9);
    keeper.prefill(&kept).await;
    assert_eq!(keeper.keep(&kept, 600_000).await, Ok(2));
    let text = |namespace: kvasir_proto::Namespace| -> String {
        namespace.0.iter().map(|byte| format!("{byte:02x}")).collect()
    };
    let theirs = kvasir_proto::keys::namespace(b"model", "f32", "another tenant", "");
    let mut other =
        Tiered::start(&s3, |config| config.object_store.list_interval_ms = 600_000).await;
    other.says("object store: ready").await;
    // Whoever knows the keys and not the namespace.
    let request = v1::TxAllocateRequest { namespace: theirs.0.to_vec(), ..allocate(P(1), &kept) };
    assert_eq!(other.node.allocate(request.clone()).await.expect("allocated").cached_blocks, 0);
    other.node.abort(P(1)).await;

    // Whoever gives the objects names of another namespace.
    for name in s3.names() {
        let moved = name.replace(&text(namespace()), &text(theirs));
        s3.put(&moved, s3.get(&name).expect("an object"));
        s3.remove(&name);
    }
    let mut other = Tiered::ready(&s3).await;
    other.knows(2.0).await;
    let allocated = other.node.allocate(request).await.expect("allocated");
    assert!(allocated.cached_blocks > 0, "a list is believed until an object is read");
    let bound = other.engine.bind(P(1)).await;
    assert_eq!(bound.cached_tokens, 0);
    assert_eq!(other.event("downloaded").await, 0.0);
    let gone = "what says otherwise than its name is deleted";
    until(gone, async || s3.names().is_empty().then_some(())).await;
}

/// The object store goes bad while a chain is there alone: the prompt is computed, the node says so, and comes back
/// by itself.
async fn goes_bad_and_good(mode: Mode) {
    let s3 = S3::start().await;
    let mut keeper = Tiered::ready(&s3).await;
    let kept = prompt(1, 3 * BLOCK_TOKENS + 9);
    keeper.prefill(&kept).await;
    assert_eq!(keeper.keep(&kept, 600_000).await, Ok(3));

    let mut other =
        Tiered::start(&s3, |config| config.object_store.list_interval_ms = 600_000).await;
    other.says("object store: ready").await;
    s3.set(mode);
    assert_eq!(other.prefill(&kept).await, 0, "it computes what it cannot get");
    other.says("object store: failed").await;
    assert_eq!(other.node.metric("object_store_usable").await, 0.0);
    assert_eq!(other.keep(&kept, 900_000).await, Err(tonic::Code::FailedPrecondition));
    // Nothing is tried meanwhile: a hit would have to be waited for.
    let allocated = other.node.allocate(allocate(P(1), &prompt(1, 3 * BLOCK_TOKENS))).await;
    assert_eq!(allocated.expect("allocated").cached_blocks, 2, "of what is in memory by now");
    other.node.abort(P(1)).await;

    s3.set(Mode::Good);
    other.says("object store: ready").await;
    assert_eq!(other.keep(&kept, 900_000).await, Ok(3));
    other.node.is_quiet().await;
    let mut third = Tiered::ready(&s3).await;
    assert_eq!(third.prefill(&kept).await, 3 * BLOCK_TOKENS);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_object_store_that_hangs_costs_time_and_no_answer() {
    goes_bad_and_good(Mode::Hangs).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_object_store_that_fails_costs_time_and_no_answer() {
    goes_bad_and_good(Mode::Fails).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_bucket_that_is_not_there_costs_time_and_no_block() {
    goes_bad_and_good(Mode::NoBucket).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_kept_for_longer_is_not_lost_when_the_bucket_is_not_there() {
    let s3 = S3::start().await;
    let mut keeper =
        Tiered::start(&s3, |config| config.object_store.list_interval_ms = 600_000).await;
    keeper.says("object store: ready").await;
    let kept = prompt(1, 3 * BLOCK_TOKENS + 9);
    keeper.prefill(&kept).await;
    assert_eq!(keeper.keep(&kept, 600_000).await, Ok(3));
    let names = s3.names();
    s3.set(Mode::NoBucket);
    assert_eq!(keeper.keep(&kept, 900_000).await, Err(tonic::Code::Unavailable));
    assert_eq!(keeper.event("object_store_lost").await, 0.0);
    s3.set(Mode::Good);
    keeper.says("object store: ready").await;
    assert_eq!(s3.names(), names, "nothing was copied and nothing deleted");
    assert_eq!(keeper.keep(&kept, 900_000).await, Ok(3));
    let mut other = Tiered::ready(&s3).await;
    assert_eq!(other.prefill(&kept).await, 3 * BLOCK_TOKENS);
}

/// What is said to be dropped is not found again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_context_is_not_dropped_before_its_former_name_is_gone() {
    let s3 = S3::start().await;
    let mut keeper =
        Tiered::start(&s3, |config| config.object_store.list_interval_ms = 600_000).await;
    keeper.says("object store: ready").await;
    let kept = prompt(1, 3 * BLOCK_TOKENS + 9);
    let longer = prompt(1, 2 * BLOCK_TOKENS + 9);
    keeper.prefill(&kept).await;
    assert_eq!(keeper.keep(&kept, 600_000).await, Ok(3));
    assert_eq!(keeper.keep(&longer, 900_000).await, Ok(2));
    s3.set(Mode::NoBucketSoon);
    assert_eq!(keeper.delete_context(&longer).await, Err(tonic::Code::Unavailable));
    s3.set(Mode::Good);
    keeper.says("object store: ready").await;
    assert_eq!(keeper.delete_context(&longer).await, Ok(()));
    let mut other = Tiered::ready(&s3).await;
    other.knows(3.0).await;
    let contexts = other.contexts().await;
    assert_eq!(contexts.iter().map(|(key, _)| key.clone()).collect::<Vec<_>>(), [last(&kept)]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_starts_while_the_object_store_refuses_it_and_uses_it_later() {
    let s3 = S3::start().await;
    s3.set(Mode::Refuses);
    let mut node = Tiered::start(&s3, |_| {}).await;
    node.says("object store: failed").await;
    let kept = prompt(1, 2 * BLOCK_TOKENS + 9);
    node.prefill(&kept).await;
    assert_eq!(node.keep(&kept, 600_000).await, Err(tonic::Code::FailedPrecondition));
    s3.set(Mode::Good);
    node.says("object store: ready").await;
    assert_eq!(node.keep(&kept, 600_000).await, Ok(2));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_nobody_wants_any_more_is_deleted_whoever_sent_it() {
    let s3 = S3::start().await;
    let mut node = Tiered::ready(&s3).await;
    let kept = prompt(1, 2 * BLOCK_TOKENS + 9);
    node.prefill(&kept).await;
    assert_eq!(node.keep(&kept, 600_000).await, Ok(2));
    let good = s3.names();
    // A node that is no more has left one whose time was over long ago; others have nothing to do with it.
    let last = good[0].rsplit_once('/').expect("a name").0;
    let over = format!("{last}/root-18bcfe5687b-0000000000000005");
    let foreign = ["kv/cache/v1/readme".to_owned(), "kv/other".to_owned()];
    for name in foreign.iter().chain([&over]) {
        s3.put(name, "bytes");
    }
    until("it is deleted", async || s3.get(&over).is_none().then_some(())).await;
    assert!(foreign.iter().chain(&good).all(|name| s3.get(name).is_some()));
    node.node.shows("object_store_listed_objects{kind=\"foreign\"}", 1.0).await;
    node.knows(2.0).await;

    // Of one whose time is over now nothing is served any more.
    let soon = prompt(2, 2 * BLOCK_TOKENS + 9);
    node.prefill(&soon).await;
    assert_eq!(node.keep(&soon, 1_500).await, Ok(2));
    node.knows(4.0).await;
    node.knows(2.0).await;
    let mut other = Tiered::ready(&s3).await;
    other.knows(2.0).await;
    assert_eq!(other.prefill(&soon).await, 0);
}
