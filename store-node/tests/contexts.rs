//! Contexts of a node with an SSD, as a conductor sees them: each ends where it was marked, and restarts change
//! nothing of that.

// Names of shares that read like those of the block core's tests.
#![allow(non_snake_case)]

use std::path::Path;

use crate::common::*;
use kvasir_proto::{BlockKey, Share, Side, v1};
use tonic::Code;

const SEGMENT_BYTES: u64 = 128 << 10;
const EXTENT_BYTES: u64 = 8192;

fn P(serial: u64) -> Share {
    share(serial, Side::Prefill)
}

struct Keeper {
    node: TestNode,
    engine: FakeEngine,
    serial: u64,
}

impl Keeper {
    /// Each tenant may keep so many blocks.
    async fn start(dir: &Path, tenant_blocks_max: u64) -> Self {
        let dir = dir.to_owned();
        let node = TestNode::start_with(Domain::Shm, |config| {
            config.ssd.dir = Some(dir);
            config.ssd.segment_bytes = SEGMENT_BYTES;
            config.ssd.capacity_bytes = 64 * SEGMENT_BYTES + 8192;
            config.ssd.tenant_bytes_max = tenant_blocks_max * EXTENT_BYTES;
        });
        let mut node = node.await;
        let engine = FakeEngine::attach(&node).await;
        until("the SSD is ready", async || {
            node.describe().await.ssd.is_some_and(|ssd| ssd.usable).then_some(())
        })
        .await;
        Keeper { node, engine, serial: 0 }
    }

    async fn restart(self, dir: &Path) -> Self {
        let Keeper { node, engine, .. } = self;
        drop(engine);
        node.shut_down().await;
        Keeper::start(dir, 1_000).await
    }

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

    async fn keep(&mut self, prompt: &[u32], ttl_ms: u64) -> Result<v1::PersistContextReply, Code> {
        let request = v1::PersistContextRequest {
            namespace: namespace().0.to_vec(),
            keys: BlockKey::concat(&chain(prompt)),
            tenant: "tenant".into(),
            ttl_ms,
            ..v1::PersistContextRequest::default()
        };
        self.keep_as(request).await
    }

    async fn keep_as(
        &mut self,
        request: v1::PersistContextRequest,
    ) -> Result<v1::PersistContextReply, Code> {
        let kept = self.node.client.persist_context(request).await;
        kept.map(tonic::Response::into_inner).map_err(|status| status.code())
    }

    async fn extend(
        &mut self,
        prompt: &[u32],
        ttl_ms: u64,
    ) -> Result<v1::PersistContextReply, Code> {
        let request = v1::PersistContextRequest {
            namespace: namespace().0.to_vec(),
            last_key: last(prompt),
            tenant: "tenant".into(),
            ttl_ms,
            ..v1::PersistContextRequest::default()
        };
        self.keep_as(request).await
    }

    async fn delete_context(&mut self, tenant: &str, prompt: &[u32]) -> Result<(), Code> {
        let request = v1::DeleteContextRequest {
            tenant: tenant.into(),
            namespace: namespace().0.to_vec(),
            last_key: last(prompt),
        };
        let dropped = self.node.client.delete_context(request).await;
        dropped.map(|_| ()).map_err(|status| status.code())
    }

    async fn page(
        &mut self,
        tenant: &str,
        contexts_max: u32,
        from: &[u8],
    ) -> Result<v1::ListContextsReply, Code> {
        let (tenant, from) = (tenant.to_owned(), from.to_vec());
        let request = v1::ListContextsRequest { tenant, contexts_max, start_at: from };
        let page = self.node.client.list_contexts(request).await;
        page.map(tonic::Response::into_inner).map_err(|status| status.code())
    }

    /// Last keys and blocks of all contexts of the tenant.
    async fn list(&mut self) -> Vec<(Vec<u8>, u32)> {
        let page = self.page("tenant", 0, &[]).await.expect("a list");
        assert_eq!(page.next, [0; 0]);
        page.contexts.into_iter().map(|context| (context.last_key, context.blocks)).collect()
    }

    /// So many blocks are of the context class.
    async fn keeps(&self, blocks: f64) {
        self.node.shows("ssd_context_blocks", blocks).await;
    }
}

fn last(prompt: &[u32]) -> Vec<u8> {
    chain(prompt).last().expect("a block at least").0.to_vec()
}

/// A prompt of five blocks, and one of two blocks that begins it.
fn long_and_short() -> (Vec<u32>, Vec<u32>) {
    let long = prompt(1, 5 * BLOCK_TOKENS + 9);
    let short = long[..2 * BLOCK_TOKENS as usize].to_vec();
    (long, short)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_shorter_context_stays_when_the_longer_one_is_dropped_also_after_restarts() {
    let dir = tempfile::tempdir().expect("a folder");
    let mut keeper = Keeper::start(dir.path(), 1_000).await;
    let (long, short) = long_and_short();
    keeper.prefill(&long).await;
    assert_eq!(keeper.keep(&long, 600_000).await.map(|kept| kept.persisted_blocks), Ok(5));
    assert_eq!(keeper.keep(&short, 300_000).await.map(|kept| kept.persisted_blocks), Ok(2));
    let mut both = vec![(last(&long), 5), (last(&short), 2)];
    both.sort();
    assert_eq!(keeper.list().await, both);

    let mut keeper = keeper.restart(dir.path()).await;
    assert_eq!(keeper.list().await, both);
    keeper.keeps(5.0).await;
    assert_eq!(keeper.delete_context("tenant", &long).await, Ok(()));
    keeper.keeps(2.0).await;
    assert_eq!(keeper.delete_context("tenant", &long).await, Err(Code::NotFound));

    let mut keeper = keeper.restart(dir.path()).await;
    assert_eq!(keeper.list().await, [(last(&short), 2)]);
    keeper.keeps(2.0).await;
    // Nothing is lost by that, as long as there is room.
    assert_eq!(keeper.prefill(&long).await, 5 * BLOCK_TOKENS);
    keeper.node.is_quiet().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_longer_context_stays_when_the_shorter_one_is_dropped_also_after_a_restart() {
    let dir = tempfile::tempdir().expect("a folder");
    let mut keeper = Keeper::start(dir.path(), 1_000).await;
    let (long, short) = long_and_short();
    keeper.prefill(&long).await;
    keeper.keep(&short, 600_000).await.expect("kept");
    keeper.keep(&long, 300_000).await.expect("kept");
    assert_eq!(keeper.delete_context("tenant", &short).await, Ok(()));
    let mut keeper = keeper.restart(dir.path()).await;
    assert_eq!(keeper.list().await, [(last(&long), 5)]);
    keeper.keeps(5.0).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_chain_is_kept_whole_or_not_at_all_where_that_is_asked() {
    let dir = tempfile::tempdir().expect("a folder");
    let mut keeper = Keeper::start(dir.path(), 1_000).await;
    let (long, short) = long_and_short();
    keeper.prefill(&short).await;
    let whole = |prompt: &[u32]| v1::PersistContextRequest {
        namespace: namespace().0.to_vec(),
        keys: BlockKey::concat(&chain(prompt)),
        tenant: "tenant".into(),
        ttl_ms: 600_000,
        require_all_blocks: true,
        ..v1::PersistContextRequest::default()
    };
    assert_eq!(keeper.keep_as(whole(&long)).await, Err(Code::NotFound));
    assert_eq!(keeper.list().await, []);
    assert_eq!(keeper.keep_as(whole(&short)).await.map(|kept| kept.persisted_blocks), Ok(2));
    assert_eq!(keeper.keep(&long, 600_000).await.map(|kept| kept.persisted_blocks), Ok(2));
    keeper.prefill(&long).await;
    assert_eq!(keeper.keep_as(whole(&long)).await.map(|kept| kept.persisted_blocks), Ok(5));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_another_node_has_promised_is_not_promised_again_when_it_is_over() {
    let dir = tempfile::tempdir().expect("a folder");
    let mut keeper = Keeper::start(dir.path(), 1_000).await;
    let (long, _) = long_and_short();
    keeper.prefill(&long).await;
    let promised = |expires_unix_ms: u64| v1::PersistContextRequest {
        namespace: namespace().0.to_vec(),
        keys: BlockKey::concat(&chain(&long)),
        tenant_hash: 7,
        expires_unix_ms,
        created_unix_ms: 1,
        ..v1::PersistContextRequest::default()
    };
    assert_eq!(keeper.keep_as(promised(1_000)).await, Err(Code::FailedPrecondition));
    let late = u64::MAX / 2;
    assert_eq!(keeper.keep_as(promised(late)).await.map(|kept| kept.expires_unix_ms), Ok(late));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_context_gets_another_time_and_is_over_when_that_is() {
    let dir = tempfile::tempdir().expect("a folder");
    let mut keeper = Keeper::start(dir.path(), 1_000).await;
    let (long, short) = long_and_short();
    keeper.prefill(&long).await;
    let first = keeper.keep(&long, 600_000).await.expect("kept");
    assert!(first.created_unix_ms > 0 && first.expires_unix_ms > first.created_unix_ms);
    let again = keeper.keep(&long, 1_000).await.expect("it is kept");
    assert_eq!(again, first, "never for less long, and since when it was");
    let longer = keeper.extend(&long, 900_000).await.expect("it is there");
    assert!(longer.expires_unix_ms > first.expires_unix_ms);
    assert_eq!((longer.persisted_blocks, longer.created_unix_ms), (5, first.created_unix_ms));
    assert_eq!(keeper.extend(&short, 1_000).await, Err(Code::NotFound));
    let shorter = keeper.extend(&long, 50).await.expect("it is there");
    assert!(shorter.expires_unix_ms < first.expires_unix_ms);
    until("its time is over", async || keeper.list().await.is_empty().then_some(())).await;
    keeper.keeps(0.0).await;
    assert_eq!(keeper.extend(&long, 1_000).await, Err(Code::NotFound));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_drop_frees_the_quota_of_its_tenant() {
    let dir = tempfile::tempdir().expect("a folder");
    let mut keeper = Keeper::start(dir.path(), 6).await;
    let (long, _) = long_and_short();
    let other = prompt(2, 4 * BLOCK_TOKENS + 9);
    keeper.prefill(&long).await;
    keeper.prefill(&other).await;
    keeper.keep(&long, 600_000).await.expect("kept");
    assert_eq!(keeper.keep(&other, 600_000).await, Err(Code::ResourceExhausted));
    assert_eq!(keeper.delete_context("another", &long).await, Err(Code::NotFound));
    assert_eq!(keeper.delete_context("tenant", &long).await, Ok(()));
    assert_eq!(keeper.keep(&other, 600_000).await.map(|kept| kept.persisted_blocks), Ok(4));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn contexts_are_listed_page_by_page_in_the_order_of_their_keys() {
    let dir = tempfile::tempdir().expect("a folder");
    let mut keeper = Keeper::start(dir.path(), 1_000).await;
    let mut want = Vec::new();
    for seed in 1..=7 {
        let prompt = prompt(seed, BLOCK_TOKENS + 3);
        keeper.prefill(&prompt).await;
        keeper.keep(&prompt, 600_000).await.expect("kept");
        want.push(last(&prompt));
    }
    want.sort();
    for contexts_max in [1, 3, 7, 8] {
        let (mut got, mut from) = (Vec::new(), Vec::new());
        loop {
            let page = keeper.page("tenant", contexts_max, &from).await.expect("a page");
            assert!(page.contexts.len() <= contexts_max as usize);
            let is_ours = |context: &v1::PersistedContext| context.namespace == namespace().0;
            assert!(page.contexts.iter().all(is_ours));
            got.extend(page.contexts.into_iter().map(|context| context.last_key));
            from = page.next;
            if from.is_empty() {
                break;
            }
        }
        assert_eq!(got, want, "in pages of {contexts_max}");
    }
    assert_eq!(keeper.page("another", 0, &[]).await, Ok(v1::ListContextsReply::default()));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_cannot_be_right_is_refused() {
    let dir = tempfile::tempdir().expect("a folder");
    let mut keeper = Keeper::start(dir.path(), 1_000).await;
    let (long, _) = long_and_short();
    for (tenant, contexts_max, from) in
        [("", 0, vec![]), ("tenant", 1_001, vec![]), ("tenant", 0, vec![7; 31])]
    {
        let page = keeper.page(tenant, contexts_max, &from).await;
        assert_eq!(page, Err(Code::InvalidArgument), "{tenant} {contexts_max} {from:?}");
    }
    assert_eq!(keeper.delete_context("", &long).await, Err(Code::InvalidArgument));
    assert_eq!(keeper.extend(&long, 0).await, Err(Code::InvalidArgument));
    let good = v1::PersistContextRequest {
        namespace: namespace().0.to_vec(),
        last_key: last(&long),
        tenant: "tenant".into(),
        ttl_ms: 1_000,
        ..v1::PersistContextRequest::default()
    };
    let keys = BlockKey::concat(&chain(&long));
    let wrong = [
        v1::PersistContextRequest { keys: keys.clone(), ..good.clone() },
        v1::PersistContextRequest { last_key: vec![7; 15], ..good.clone() },
        v1::PersistContextRequest { last_key: keys, ..good.clone() },
        v1::PersistContextRequest { namespace: Vec::new(), ..good.clone() },
        v1::PersistContextRequest { tenant: String::new(), ..good },
    ];
    for request in wrong {
        assert_eq!(
            keeper.keep_as(request.clone()).await,
            Err(Code::InvalidArgument),
            "{request:?}"
        );
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_that_keeps_nothing_lists_nothing() {
    let node = TestNode::start(Domain::Shm).await;
    let engine = FakeEngine::attach(&node).await;
    let mut without = Keeper { node, engine, serial: 0 };
    let (long, _) = long_and_short();
    assert_eq!(without.list().await, []);
    assert_eq!(without.delete_context("tenant", &long).await, Err(Code::NotFound));
    assert_eq!(without.extend(&long, 1_000).await, Err(Code::NotFound));
}
