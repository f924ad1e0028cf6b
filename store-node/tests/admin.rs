//! Nodes that are administered: lists, pins and evictions through gRPC, copies on other nodes, and
//! drains that lose nothing.

use std::io::Write;

use crate::common::*;
use kvasir_proto::{BlockKey, Share, Side, v1};
use kvasir_store_node::config::{AdminAccess, Config, Ssd};
use tonic::Code;
use tonic::transport::Channel;
use v1::admin_client::AdminClient;

const P: fn(u64) -> Share = |serial| share(serial, Side::Prefill);

/// A node, its engine, and its administrator.
struct Administered {
    node: TestNode,
    engine: FakeEngine,
    admin: AdminClient<Channel>,
    serial: u64,
}

fn with_ssd(dir: &std::path::Path, config: &mut Config) {
    config.ssd = Ssd {
        dir: Some(dir.join("ssd")),
        capacity_bytes: 8 << 20,
        segment_bytes: 256 << 10,
        demote_ahead_percent: 0,
        ..Ssd::default()
    };
}

impl Administered {
    /// With an SSD in this folder.
    async fn start(dir: &std::path::Path) -> Self {
        Administered::start_with(|config| with_ssd(dir, config)).await
    }

    async fn start_with(change: impl FnOnce(&mut Config)) -> Self {
        let node = TestNode::start_with(Domain::Shm, change).await;
        Administered::of(node).await
    }

    async fn of(mut node: TestNode) -> Self {
        let engine = FakeEngine::attach(&node).await;
        let admin = AdminClient::connect(format!("http://{}", node.address())).await;
        let admin = admin.expect("a connection");
        if node.describe().await.ssd.is_some() {
            until("the SSD is ready", async || {
                node.describe().await.ssd.is_some_and(|ssd| ssd.usable).then_some(())
            })
            .await;
        }
        Administered { node, engine, admin, serial: 0 }
    }

    async fn fill(&mut self, prompt: &[u32]) {
        self.serial += 1;
        let share = P(self.serial);
        self.node.allocate(allocate(share, prompt)).await.expect("room");
        let bound = self.engine.bind(share).await;
        let pages = prompt.len() as u32 / BLOCK_TOKENS;
        let first = bound.cached_tokens / BLOCK_TOKENS;
        self.engine.compute(share, prompt, &bound.slots, first..pages);
        self.engine.release(share);
        self.node.has_blocks(&chain(prompt)).await;
        self.node.is_quiet().await;
    }

    async fn keep(&mut self, prompt: &[u32]) -> Result<u32, tonic::Status> {
        let request = v1::PersistContextRequest {
            namespace: namespace().0.to_vec(),
            keys: BlockKey::concat(&chain(prompt)),
            tenant: "tenant".into(),
            ttl_ms: 600_000,
            ..v1::PersistContextRequest::default()
        };
        Ok(self.node.client.persist_context(request).await?.into_inner().persisted_blocks)
    }

    async fn contexts(&mut self) -> Vec<v1::PersistedContext> {
        let request = v1::ListContextsRequest {
            tenant: "tenant".into(),
            ..v1::ListContextsRequest::default()
        };
        let page = self.node.client.list_contexts(request).await.expect("a list").into_inner();
        assert!(page.next.is_empty());
        page.contexts
    }

    async fn list(&mut self, request: v1::ListRequest) -> Vec<v1::ListedBlock> {
        let (mut blocks, mut from) = (Vec::new(), Vec::new());
        loop {
            let request = v1::ListRequest { start_at: from, ..request.clone() };
            let page = self.admin.list(request).await.expect("a page").into_inner();
            blocks.extend(page.blocks);
            if page.next.is_empty() {
                return blocks;
            }
            from = page.next;
        }
    }

    async fn inspect(&mut self, key: BlockKey) -> Result<v1::BlockInspection, tonic::Status> {
        let request = v1::InspectRequest { key: key.0.to_vec() };
        self.admin.inspect(request).await.map(tonic::Response::into_inner)
    }

    async fn drain(&mut self, to: &[&TestNode], hot_bytes_max: u64) -> v1::DrainStatus {
        let targets = to.iter().map(|node| node.address().to_string()).collect();
        let request = v1::DrainRequest { targets, hot_bytes_max: Some(hot_bytes_max) };
        self.admin.drain(request).await.expect("it drains").into_inner()
    }

    async fn status(&mut self) -> v1::DrainStatus {
        let status = self.admin.status(v1::AdminStatusRequest {}).await.expect("a status");
        status.into_inner().drain.expect("of the drain")
    }

    async fn drained(&mut self) -> v1::DrainStatus {
        until("the node has drained", async || {
            Some(self.status().await).filter(|status| status.drained)
        })
        .await
    }

    /// What is here and kept, of a chain, with the same promise as there.
    async fn keeps_like(&mut self, other: &mut Administered, prompt: &[u32]) {
        for key in chain(prompt) {
            let ours = self.inspect(key).await.expect("it is here").ssd.expect("on the SSD");
            let theirs = other.inspect(key).await.expect("it is there").ssd.expect("on the SSD");
            let of =
                |copy: &v1::SsdCopy| (copy.block_class, copy.tenant_hash, copy.expires_unix_ms);
            assert_eq!(of(&ours), of(&theirs));
            assert_eq!(ours.block_class(), v1::BlockClass::Context);
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn blocks_are_listed_inspected_pinned_and_evicted() {
    let dir = tempfile::tempdir().expect("a folder");
    let mut node = Administered::start(dir.path()).await;
    let (kept, other) = (prompt(1, 3 * BLOCK_TOKENS), prompt(2, 2 * BLOCK_TOKENS));
    node.fill(&kept).await;
    node.fill(&other).await;
    assert_eq!(node.keep(&kept[..2 * BLOCK_TOKENS as usize]).await.expect("kept"), 2);
    // Two a page.
    let request = v1::ListRequest { blocks_max: 2, ..v1::ListRequest::default() };
    let mut listed: Vec<Vec<u8>> =
        node.list(request.clone()).await.into_iter().map(|block| block.key).collect();
    listed.sort();
    let mut all: Vec<Vec<u8>> =
        chain(&kept).iter().chain(&chain(&other)).map(|key| key.0.to_vec()).collect();
    all.sort();
    assert_eq!(listed, all);
    let class = v1::BlockClass::Context.into();
    let context = node.list(v1::ListRequest { block_class: class, ..request.clone() }).await;
    assert_eq!(context.len(), 2);
    let namespace = vec![9; 16];
    assert_eq!(node.list(v1::ListRequest { namespace, ..request }).await, []);

    let last = *chain(&kept).last().expect("a block");
    let pin = v1::PinRequest { key: last.0.to_vec(), ttl_ms: 60_000 };
    let pin = node.admin.pin(pin).await.expect("pinned").into_inner();
    assert_eq!(pin.blocks, 3);
    let found = node.inspect(last).await.expect("it is here");
    assert!(found.checksum_matches && found.checksum.is_some(), "{found:?}");
    assert_eq!(found.parent, chain(&kept)[1].0);
    let holders: Vec<_> = found.holders.into_iter().filter_map(|holder| holder.holder).collect();
    assert_eq!(holders, [v1::block_holder::Holder::Pin(pin.pin)]);

    let what = v1::evict_request::Target::Namespace(crate::common::namespace().0.to_vec());
    let evict = v1::EvictRequest { target: Some(what) };
    let evicted = node.admin.evict(evict.clone()).await.expect("evicted").into_inner();
    assert_eq!((evicted.dram_blocks, evicted.pinned_blocks, evicted.retained_blocks), (2, 3, 2));
    node.admin.unpin(v1::UnpinRequest { pin: pin.pin }).await.expect("unpinned");
    let evicted = node.admin.evict(evict).await.expect("evicted").into_inner();
    assert_eq!((evicted.dram_blocks, evicted.pinned_blocks, evicted.retained_blocks), (3, 0, 2));
    assert_eq!(node.inspect(last).await.expect_err("gone").code(), Code::NotFound);
    node.node.is_quiet().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_administrators_ask_wrongly_is_refused_with_what_to_do() {
    let mut node = Administered::start_with(|_| {}).await;
    node.fill(&prompt(1, BLOCK_TOKENS)).await;
    let key = chain(&prompt(1, BLOCK_TOKENS))[0].0.to_vec();
    let code = |status: tonic::Status| status.code();
    let pin = |key: &[u8], ttl_ms| v1::PinRequest { key: key.to_vec(), ttl_ms };
    assert_eq!(node.admin.pin(pin(&key, 0)).await.map_err(code).err(), Some(Code::InvalidArgument));
    let short = node.admin.pin(pin(&[1; 7], 1)).await.map_err(code).err();
    assert_eq!(short, Some(Code::InvalidArgument));
    let nobody = node.admin.pin(pin(&[1; 16], 1)).await.map_err(code).err();
    assert_eq!(nobody, Some(Code::NotFound));
    let unpin = node.admin.unpin(v1::UnpinRequest { pin: 7 }).await.map_err(code).err();
    assert_eq!(unpin, Some(Code::NotFound));
    let evict = node.admin.evict(v1::EvictRequest { target: None }).await.map_err(code).err();
    assert_eq!(evict, Some(Code::InvalidArgument));
    for wrong in [
        v1::ListRequest { start_at: vec![2; 5], ..v1::ListRequest::default() },
        v1::ListRequest { blocks_max: 10_001, ..v1::ListRequest::default() },
        v1::ListRequest { tier: 9, ..v1::ListRequest::default() },
        v1::ListRequest { namespace: vec![1], ..v1::ListRequest::default() },
    ] {
        let refused = node.admin.list(wrong.clone()).await.map_err(code).err();
        assert_eq!(refused, Some(Code::InvalidArgument), "{wrong:?}");
    }
    let request = v1::DrainRequest { targets: vec!["nowhere".into()], hot_bytes_max: None };
    let refused = node.admin.drain(request).await.expect_err("no address");
    assert!(refused.message().contains("10.0.0.7:7401"), "{refused}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_is_nobody_is_not_answered() {
    let node =
        TestNode::start_with(Domain::Shm, |config| config.admin_access = AdminAccess::Disabled)
            .await;
    let mut admin =
        AdminClient::connect(format!("http://{}", node.address())).await.expect("there");
    let refused = admin.status(v1::AdminStatusRequest {}).await.expect_err("refused");
    assert_eq!(refused.code(), Code::PermissionDenied);
    let refused = admin.cancel_drain(v1::CancelDrainRequest {}).await.expect_err("refused");
    assert_eq!(refused.code(), Code::PermissionDenied);
    let copy = v1::ReplicateBlockRequest { key: vec![1; 16], target: "127.0.0.1:1".into() };
    let refused = admin.replicate(copy).await.expect_err("refused");
    assert_eq!(refused.code(), Code::PermissionDenied);
}

/// An address of this host that is no loopback address. Nothing is sent to find it.
fn outer_address() -> Option<std::net::IpAddr> {
    let socket = std::net::UdpSocket::bind("0.0.0.0:0").ok()?;
    socket.connect("192.0.2.1:9").ok()?;
    let address = socket.local_addr().ok()?.ip();
    (!address.is_loopback() && !address.is_unspecified()).then_some(address)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_that_listens_on_no_loopback_address_is_administered_from_its_own_host() {
    let Some(outer) = outer_address() else {
        let why = "this host has no address but those of loopback";
        writeln!(std::io::stderr(), "a test is skipped: {why}").ok();
        return;
    };
    let listen = |config: &mut Config| config.listen = (outer, 0).into();
    let node = TestNode::start_with(Domain::Shm, listen).await;
    assert_eq!(node.address().ip(), outer);
    let mut admin =
        AdminClient::connect(format!("http://{}", node.address())).await.expect("there");
    admin.status(v1::AdminStatusRequest {}).await.expect("it comes from this host");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_copy_that_is_asked_for_is_there_with_the_same_bytes() {
    let mut from = Administered::start_with(|_| {}).await;
    let mut to = Administered::start_with(|_| {}).await;
    let prompt = prompt(1, 5 * BLOCK_TOKENS);
    from.fill(&prompt).await;
    // A part of it is there already.
    to.fill(&prompt[..2 * BLOCK_TOKENS as usize]).await;
    let request = v1::ReplicateRequest {
        namespace: namespace().0.to_vec(),
        keys: BlockKey::concat(&chain(&prompt)),
        target: to.node.address().to_string(),
    };
    for _ in 0..2 {
        let copied = from.node.client.replicate(request.clone()).await.expect("copied");
        assert_eq!(copied.into_inner().blocks, 5);
    }
    let slots: Vec<u32> =
        to.node.blocks(&chain(&prompt)).await.iter().map(|place| place.slot).collect();
    to.engine.holds(&prompt, &slots, 0..5);
    assert_eq!(slots.len(), 5);
    from.node.is_quiet().await;
    to.node.is_quiet().await;

    let nothing = v1::ReplicateRequest { keys: vec![7; 16], ..request.clone() };
    let refused = from.node.client.replicate(nothing).await.expect_err("not here");
    assert_eq!(refused.code(), Code::NotFound);
    let nobody = v1::ReplicateRequest { target: "127.0.0.1:1".into(), ..request.clone() };
    let refused = from.node.client.replicate(nobody).await.expect_err("nobody is there");
    assert_eq!(refused.code(), Code::Unavailable);
    to.drain(&[], 0).await;
    let more = crate::common::prompt(2, BLOCK_TOKENS);
    from.fill(&more).await;
    let keys = BlockKey::concat(&chain(&more));
    let refused = from.node.client.replicate(v1::ReplicateRequest { keys, ..request }).await;
    let refused = refused.expect_err("it drains");
    assert_eq!(refused.code(), Code::FailedPrecondition);
    from.node.is_quiet().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_administrator_copies_a_chain_by_its_last_block_from_memory_and_from_the_ssd() {
    let dir = tempfile::tempdir().expect("a folder");
    let mut from = Administered::start(dir.path()).await;
    let mut to = Administered::start_with(|_| {}).await;
    let (stored, other) = (prompt(1, 4 * BLOCK_TOKENS), prompt(2, 3 * BLOCK_TOKENS));
    from.fill(&stored).await;
    from.fill(&other).await;
    assert_eq!(from.keep(&stored).await.expect("kept"), 4);
    // Of that chain the SSD alone has something.
    let what = v1::evict_request::Target::Key(chain(&stored)[0].0.to_vec());
    from.admin.evict(v1::EvictRequest { target: Some(what) }).await.expect("evicted");
    assert_eq!(from.node.blocks(&chain(&stored)).await.len(), 0);

    let target = to.node.address().to_string();
    let request =
        |key: BlockKey| v1::ReplicateBlockRequest { key: key.0.to_vec(), target: target.clone() };
    // All of the one, a part of the other.
    for (prompt, blocks) in [(&stored, 4), (&other, 2)] {
        let keys = chain(prompt);
        let copied = from.admin.replicate(request(keys[blocks - 1])).await.expect("copied");
        assert_eq!(copied.into_inner().blocks, blocks as u32);
        let places = to.node.blocks(&keys).await;
        let slots: Vec<u32> = places.iter().map(|place| place.slot).collect();
        assert_eq!(slots.len(), blocks);
        to.engine.holds(prompt, &slots, 0..blocks as u32);
    }

    let code = |status: tonic::Status| status.code();
    let nobody = from.admin.replicate(request(BlockKey([7; 16]))).await.map_err(code).err();
    assert_eq!(nobody, Some(Code::NotFound));
    let nowhere =
        v1::ReplicateBlockRequest { target: "nowhere".into(), ..request(chain(&stored)[0]) };
    let nowhere = from.admin.replicate(nowhere).await.map_err(code).err();
    assert_eq!(nowhere, Some(Code::InvalidArgument));
    let short = v1::ReplicateBlockRequest { key: vec![1; 7], target: target.clone() };
    let short = from.admin.replicate(short).await.map_err(code).err();
    assert_eq!(short, Some(Code::InvalidArgument));
    from.node.is_quiet().await;
    to.node.is_quiet().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_drained_node_has_moved_what_it_had_promised_and_what_is_hot() {
    let dirs = [tempfile::tempdir().expect("a folder"), tempfile::tempdir().expect("a folder")];
    let mut from = Administered::start(dirs[0].path()).await;
    let mut to = Administered::start(dirs[1].path()).await;
    let (kept, hot) = (prompt(1, 9 * BLOCK_TOKENS), prompt(2, 3 * BLOCK_TOKENS));
    from.fill(&kept).await;
    from.fill(&hot).await;
    assert_eq!(from.keep(&kept).await.expect("kept"), 9);
    // One that begins the other moves with a time of its own.
    assert_eq!(from.keep(&kept[..4 * BLOCK_TOKENS as usize]).await.expect("kept"), 4);
    let contexts = from.contexts().await;
    assert_eq!(contexts.len(), 2);
    // Of the kept chain only the SSD has something any more.
    let what = v1::evict_request::Target::Key(chain(&kept)[0].0.to_vec());
    from.admin.evict(v1::EvictRequest { target: Some(what) }).await.expect("evicted");
    assert_eq!(from.node.blocks(&chain(&kept)).await.len(), 0);

    // Somebody is at work meanwhile.
    from.serial += 1;
    let busy = P(from.serial);
    from.node.allocate(allocate(busy, &prompt(3, BLOCK_TOKENS))).await.expect("room");
    from.engine.bind(busy).await;
    let status = from.drain(&[&to.node], 1 << 30).await;
    assert!(status.draining && !status.drained, "{status:?}");
    assert_eq!(from.node.get("/readyz").await.0, 503);
    let refused = from.node.allocate(allocate(P(90), &hot)).await.expect_err("it drains");
    let why = refused.metadata().get(kvasir_proto::refusal::REFUSAL);
    assert_eq!(why.expect("a reason"), kvasir_proto::refusal::DRAINING);
    assert_eq!(from.keep(&hot).await.expect_err("it drains").code(), Code::FailedPrecondition);
    until("all has moved", async || {
        let status = from.status().await;
        (status.context_chains_left + status.hot_chains_left == 0).then_some(())
    })
    .await;
    assert!(!from.status().await.drained, "a share is open");
    from.engine.release(busy);
    let status = from.drained().await;
    assert_eq!((status.context_chains_copied, status.hot_chains_failed), (2, 0), "{status:?}");
    from.keeps_like(&mut to, &kept).await;
    assert_eq!(to.contexts().await, contexts);
    let slots: Vec<u32> =
        to.node.blocks(&chain(&hot)).await.iter().map(|place| place.slot).collect();
    to.engine.holds(&hot, &slots, 0..3);
    let slots: Vec<u32> =
        to.node.blocks(&chain(&kept)).await.iter().map(|place| place.slot).collect();
    to.engine.holds(&kept, &slots, 0..9);
    to.node.is_quiet().await;

    let stopped = from.admin.cancel_drain(v1::CancelDrainRequest {}).await.expect("stopped");
    assert!(!stopped.into_inner().draining);
    assert_eq!(from.node.get("/readyz").await.0, 200);
    let more = prompt(4, BLOCK_TOKENS);
    from.fill(&more).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_drain_waits_for_a_node_that_can_keep_and_says_so() {
    let dirs = [tempfile::tempdir().expect("a folder"), tempfile::tempdir().expect("a folder")];
    let mut from = Administered::start(dirs[0].path()).await;
    let without = Administered::start_with(|_| {}).await;
    let kept = prompt(1, 3 * BLOCK_TOKENS);
    from.fill(&kept).await;
    from.keep(&kept).await.expect("kept");
    let says = async |from: &mut Administered, what: &str| {
        until(what, async || {
            let status = from.status().await;
            assert!(!status.drained, "{status:?}");
            status.waiting_for.contains(what).then_some(())
        })
        .await;
    };
    from.drain(&[], 0).await;
    says(&mut from, "no other node is known").await;
    from.drain(&[&without.node], 0).await;
    says(&mut from, "has a usable SSD").await;
    let mut to = Administered::start(dirs[1].path()).await;
    from.drain(&[&without.node, &to.node], 0).await;
    from.drained().await;
    from.keeps_like(&mut to, &kept).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_drain_that_either_side_interrupted_is_done_again() {
    let dirs: [_; 2] = std::array::from_fn(|_| tempfile::tempdir().expect("a folder"));
    let mut from = Administered::start(dirs[0].path()).await;
    let mut to = Administered::start(dirs[1].path()).await;
    let chains: Vec<Vec<u32>> = (1..5).map(|seed| prompt(seed, 4 * BLOCK_TOKENS)).collect();
    for kept in &chains {
        from.fill(kept).await;
        assert_eq!(from.keep(kept).await.expect("kept"), 4);
    }
    from.drain(&[&to.node], 0).await;
    until("something has moved", async || {
        (from.status().await.context_chains_copied > 0).then_some(())
    })
    .await;
    // The one goes in the middle of it, and comes back with its disk.
    let Administered { node, engine, .. } = to;
    drop(engine);
    node.shut_down().await;
    to = Administered::start(dirs[1].path()).await;
    // And the other too, which has forgotten that it drains.
    let Administered { node, engine, .. } = from;
    drop(engine);
    node.shut_down().await;
    from = Administered::start(dirs[0].path()).await;
    assert!(!from.status().await.draining);
    from.drain(&[&to.node], 0).await;
    let status = from.drained().await;
    assert_eq!(status.context_chains_copied, 4);
    for kept in &chains {
        from.keeps_like(&mut to, kept).await;
    }
    from.node.is_quiet().await;
    to.node.is_quiet().await;
}
