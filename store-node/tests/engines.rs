//! Several engines on one node: they share its cache and nothing else. What ends one of them ends nothing of another.

use std::process::{Command, Stdio};

use crate::common::*;
use kvasir_attach::{AttachError, AttachOptions, EngineAttachment};
use kvasir_proto::{BlockKey, Share, Side, SlotLayout, v1};
use kvasir_store_node::config::{Config, TransferThread};
use v1::engine_to_node::Message as ToNode;

const P: fn(u64) -> Share = |serial| share(serial, Side::Prefill);
const D: fn(u64) -> Share = |serial| share(serial, Side::Decode);

async fn names(node: &mut TestNode) -> Vec<String> {
    node.instances().await.into_iter().map(|instance| instance.instance_id).collect()
}

async fn until_only(node: &mut TestNode, name: &str) {
    until("the other one is gone", async || (names(node).await == [name]).then_some(())).await;
}

/// An engine computes a prompt whose blocks are then here.
async fn fill(node: &mut TestNode, engine: &mut FakeEngine, serial: u64, prompt: &[u32]) {
    node.allocate(allocate(P(serial), prompt)).await.expect("room");
    finish(node, engine, serial, prompt).await;
}

/// The same from where it has been allocated.
async fn finish(node: &mut TestNode, engine: &mut FakeEngine, serial: u64, prompt: &[u32]) {
    let bound = engine.bind(P(serial)).await;
    let first = bound.cached_tokens / BLOCK_TOKENS;
    engine.compute(P(serial), prompt, &bound.slots, first..bound.slots.len() as u32);
    engine.release(P(serial));
    node.has_blocks(&chain(prompt)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_engines_serve_at_once_and_find_each_others_blocks() {
    let mut node = TestNode::start(Domain::Shm).await;
    let mut one = FakeEngine::attach_as(&node, "one").await;
    let mut two = FakeEngine::attach_as(&node, "two").await;
    assert_eq!((one.attachment.epoch(), two.attachment.epoch()), (1, 2));
    assert_eq!(names(&mut node).await, ["one", "two"]);
    node.shows("engines", 2.0).await;
    let (first, second) = (prompt(1, 2 * BLOCK_TOKENS), prompt(2, 3 * BLOCK_TOKENS));
    for (serial, tokens) in [(1, &first), (2, &second)] {
        node.allocate(allocate(P(serial), tokens)).await.expect("room");
    }
    // Both are under way before either ends.
    let (of_one, of_two) = (one.bind(P(1)).await, two.bind(P(2)).await);
    two.ask_bind(P(1));
    assert_eq!(two.bound(P(1)).await.status(), v1::BindStatus::Taken);
    two.compute(P(2), &second, &of_two.slots, 0..3);
    one.compute(P(1), &first, &of_one.slots, 0..2);
    one.release(P(1));
    two.release(P(2));
    node.has_blocks(&chain(&first)).await;
    node.has_blocks(&chain(&second)).await;
    // What the one has computed the other one finds.
    let keys = BlockKey::concat(&chain(&first));
    two.send(ToNode::Get(v1::GetBlocks { handle: 1, keys: keys.clone(), skip_promotion: false }));
    one.send(ToNode::Get(v1::GetBlocks { handle: 1, keys, skip_promotion: false }));
    let slots = two.got(1).await.slots;
    two.holds(&first, &slots, 0..2);
    assert_eq!(one.got(1).await.slots, slots);
    node.shows("pins", 4.0).await;
    // The same handle of another engine is another hold.
    one.send(ToNode::Unpin(v1::UnpinBlocks { handle: 1 }));
    node.shows("pins", 2.0).await;
    two.send(ToNode::Unpin(v1::UnpinBlocks { handle: 1 }));
    node.is_quiet().await;
}

/// An engine says something of the other one's share: it is detached, and the other one goes on.
async fn check_touched(touch: impl FnOnce(&mut FakeEngine)) {
    let mut node = TestNode::start(Domain::Shm).await;
    let mut one = FakeEngine::attach_as(&node, "one").await;
    let mut two = FakeEngine::attach_as(&node, "two").await;
    let tokens = prompt(1, 2 * BLOCK_TOKENS);
    node.allocate(allocate(P(1), &tokens)).await.expect("room");
    let bound = one.bind(P(1)).await;
    node.allocate(allocate(P(2), &prompt(2, 2 * BLOCK_TOKENS))).await.expect("room");
    two.bind(P(2)).await;
    touch(&mut two);
    until_only(&mut node, "one").await;
    node.shows("forced_detaches_total{kind=\"engine\"}", 1.0).await;
    // What it held is nobody's until it is gone, and the other one's share is untouched.
    node.shows("slots{state=\"quarantined\"}", 2.0).await;
    one.compute(P(1), &tokens, &bound.slots, 0..2);
    one.release(P(1));
    node.has_blocks(&chain(&tokens)).await;
    until("it notices", async || (!two.attachment.is_connected()).then_some(())).await;
    drop(two);
    node.is_quiet().await;
    FakeEngine::attach_as(&node, "two").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_engine_that_touches_the_share_of_another_is_detached_alone() {
    let (tx, side) = (Some(tx(1).into()), Side::Prefill.to_wire());
    check_touched(|two| {
        two.plan(&[(P(1), 0..1)]);
    })
    .await;
    check_touched(|two| two.release(P(1))).await;
    check_touched(|two| two.finish(P(1), b"")).await;
    check_touched(|two| two.send(ToNode::Grow(v1::Grow { tx, side, page_count: 1 }))).await;
    let commit = v1::CommitBlocks { tx, side, first_page: 0, keys: vec![1; 16] };
    check_touched(|two| two.send(ToNode::Commit(commit))).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_life_of_one_engine_renews_nothing_of_another() {
    let mut node = TestNode::start(Domain::Shm).await;
    let mut one = FakeEngine::attach_as(&node, "one").await;
    let mut two = FakeEngine::attach_as(&node, "two").await;
    let short = v1::TxAllocateRequest { lease_ms: 200, ..allocate(P(1), &prompt(1, 100)) };
    node.allocate(short).await.expect("room");
    one.bind(P(1)).await;
    let shares = vec![v1::TxShare { tx: Some(tx(1).into()), side: Side::Prefill.to_wire() }];
    until("the lease is over", async || {
        two.send(ToNode::KeepAlive(v1::KeepAlive { shares: shares.clone() }));
        let stops = one.unasked();
        stops.iter().any(|m| matches!(m, v1::node_to_engine::Message::Stop(_))).then_some(())
    })
    .await;
    assert_eq!(names(&mut node).await.len(), 2);
}

async fn refused(
    node: &TestNode,
    name: &str,
    change: impl FnOnce(&mut AttachOptions),
) -> AttachError {
    FakeEngine::try_attach_as(node, name, change).await.err().expect("refused")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_engine_that_does_not_agree_with_those_that_are_here_is_refused_with_what_differs() {
    let node = TestNode::start(Domain::Shm).await;
    let one = FakeEngine::attach_as(&node, "one").await;
    let check = async |change: fn(&mut AttachOptions), differs: &str| {
        let AttachError::Refused(why) = refused(&node, "two", change).await else {
            panic!("it is to end, not to try again");
        };
        let want =
            format!("engine `one` is attached to this node, and this one has another {differs}");
        assert!(why.contains(&want), "{why}");
    };
    check(|o| o.model.fingerprint = b"other".to_vec(), "model").await;
    check(|o| o.model.kv_dtype = "bf16".into(), "KV type").await;
    let other = || SlotLayout::layer_major(BLOCK_TOKENS, 2, 64).expect("a layout");
    check(
        |o| o.layout = SlotLayout::layer_major(BLOCK_TOKENS, 2, 64).expect("a layout"),
        "layout of blocks",
    )
    .await;
    drop(one);
    // Alone it may be what it is.
    until("an attach", async || {
        FakeEngine::try_attach_as(&node, "two", |o| o.layout = other()).await.ok()
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_name_is_one_engine_and_the_limit_says_what_to_do() {
    let node = TestNode::start_with(Domain::Shm, |config| config.engines_max = 2).await;
    let one = FakeEngine::attach_as(&node, "one").await;
    let again = refused(&node, "one", |_| {}).await;
    assert!(matches!(again, AttachError::Unreachable { .. }), "it may try again: {again}");
    assert!(again.to_string().contains("engine `one`"), "{again}");
    let _two = FakeEngine::attach_as(&node, "two").await;
    let third = refused(&node, "three", |_| {}).await;
    assert!(matches!(third, AttachError::Unreachable { .. }), "it may try again: {third}");
    let want = "2 engines are attached to this node, and `engines_max` is 2";
    assert!(third.to_string().contains(want), "{third}");
    drop(one);
    until("a place", async || FakeEngine::try_attach_as(&node, "three", |_| {}).await.ok()).await;
}

/// Not a test: an engine in a process of its own, for the test below.
#[test]
#[ignore = "is started by another test"]
fn engine_process() {
    if !std::path::Path::new("attach.sock").exists() {
        return;
    }
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    runtime.block_on(async {
        let mut options = engine_options(std::path::Path::new("."), layout());
        options.instance_id = "killed".into();
        let attachment = EngineAttachment::connect(options).await.expect("attached");
        let mut engine = FakeEngine::new(attachment);
        engine.ask_bind(P(1));
        while engine.bound(P(1)).await.status() != v1::BindStatus::Ok {
            tokio::time::sleep(std::time::Duration::from_millis(5)).await;
            engine.ask_bind(P(1));
        }
        std::fs::write("bound", b"").expect("written");
        tokio::time::sleep(std::time::Duration::from_secs(600)).await;
    });
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_engine_that_is_killed_takes_nothing_of_the_other_with_it() {
    let mut node = TestNode::start(Domain::Shm).await;
    let mut lives = FakeEngine::attach_as(&node, "lives").await;
    let mut killed = Command::new(std::env::current_exe().expect("this test"))
        .args(["--ignored", "--exact", "engines::engine_process"])
        .current_dir(node.attach_dir())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .expect("a process");
    until("both", async || (names(&mut node).await.len() == 2).then_some(())).await;
    node.allocate(allocate(P(1), &prompt(1, 200))).await.expect("room");
    let is_bound = node.attach_dir().join("bound");
    until("the bind", async || is_bound.exists().then_some(())).await;
    let tokens = prompt(2, 3 * BLOCK_TOKENS);
    node.allocate(allocate(P(2), &tokens)).await.expect("room");
    let bound = lives.bind(P(2)).await;
    lives.compute(P(2), &tokens, &bound.slots, 0..1);
    node.shows("slots{state=\"allocated\"}", 6.0).await;
    killed.kill().expect("killed");
    killed.wait().expect("its end");
    until_only(&mut node, "lives").await;
    node.shows("slots{state=\"allocated\"}", 2.0).await;
    lives.compute(P(2), &tokens, &bound.slots, 1..3);
    lives.release(P(2));
    node.has_blocks(&chain(&tokens)).await;
    node.is_quiet().await;
    fill(&mut node, &mut lives, 3, &prompt(3, 100)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_engine_plays_a_role_of_its_own() {
    let mut node = TestNode::start(Domain::Shm).await;
    let _one = FakeEngine::attach_as(&node, "one").await;
    let _two = FakeEngine::attach_as(&node, "two").await;
    let incarnation = node.describe().await.incarnation;
    let wanted = |name: &str, attach_epoch, role: v1::Role| v1::SetRoleRequest {
        incarnation,
        instance_id: name.into(),
        attach_epoch,
        expected_version: 0,
        role: role.into(),
        dwell_ms: 0,
    };
    let odd = node.client.set_role(wanted("one", 2, v1::Role::Prefill)).await.expect_err("whose?");
    assert_eq!(odd.code(), tonic::Code::NotFound);
    node.client.set_role(wanted("two", 2, v1::Role::Decode)).await.expect("set");
    node.client.set_role(wanted("one", 1, v1::Role::Prefill)).await.expect("set");
    let current_role: Vec<v1::Role> =
        node.instances().await.iter().map(|one| one.current_role()).collect();
    assert_eq!(current_role, [v1::Role::Prefill, v1::Role::Decode]);
}

/// Both sides of a prompt on one node.
async fn allocate_pair(node: &mut TestNode, serial: u64, prompt: &[u32]) -> v1::WriteTargets {
    let writer_endpoint = node.endpoint().await;
    node.allocate(allocate(P(serial), prompt)).await.expect("room");
    let request = v1::TxAllocateRequest { writer_endpoint, ..allocate(D(serial), prompt) };
    node.allocate(request).await.expect("room").targets.expect("targets")
}

async fn is_served_within_the_node(domain: Domain, thread: TransferThread) {
    let change = |config: &mut Config| config.transfer_thread = thread;
    let mut node = TestNode::start_with(domain, change).await;
    let mut prefills = FakeEngine::attach_as(&node, "prefills").await;
    let mut decodes = FakeEngine::attach_as(&node, "decodes").await;
    let tokens = prompt(1, 3 * BLOCK_TOKENS + 10);
    for serial in [1, 2] {
        let targets = allocate_pair(&mut node, serial, &tokens).await;
        node.push(P(serial), Some(targets)).await.expect("armed");
        let of_prefill = prefills.bind(P(serial)).await;
        let first = of_prefill.cached_tokens / BLOCK_TOKENS;
        assert_eq!(first, if serial == 1 { 0 } else { 3 }, "what is here is not computed again");
        prefills.compute(P(serial), &tokens, &of_prefill.slots, first..4);
        prefills.finish(P(serial), b"first token");
        prefills.release(P(serial));
        let of_decode = decodes.bind(D(serial)).await;
        assert_eq!(decodes.ready(D(serial)).await, b"first token");
        decodes.holds(&tokens, &of_decode.slots, 0..4);
        decodes.release(D(serial));
        node.is_quiet().await;
        assert_eq!(node.blocks(&chain(&tokens)).await.len(), 3, "each block is here once");
    }
    node.shows("pushes_total{outcome=\"landed\"}", 2.0).await;
    let pages = node.metric("pushed_bytes_total").await / layout().slot_bytes() as f64;
    assert_eq!(pages, 4.0 + 1.0, "the second time only what is no block");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_one_engine_computes_another_one_of_the_node_decodes() {
    for domain in [Domain::Shm, Domain::Tcp] {
        is_served_within_the_node(domain, TransferThread::Shared).await;
        is_served_within_the_node(domain, TransferThread::Dedicated).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_end_of_either_side_of_a_pair_on_one_node_frees_both() {
    for prefill_dies in [true, false] {
        let mut node = TestNode::start(Domain::Shm).await;
        let mut prefills = FakeEngine::attach_as(&node, "prefills").await;
        let mut decodes = FakeEngine::attach_as(&node, "decodes").await;
        let tokens = prompt(1, 3 * BLOCK_TOKENS);
        let targets = allocate_pair(&mut node, 1, &tokens).await;
        node.push(P(1), Some(targets)).await.expect("armed");
        let bound = prefills.bind(P(1)).await;
        decodes.bind(D(1)).await;
        prefills.compute(P(1), &tokens, &bound.slots, 0..2);
        node.has_blocks(&chain(&tokens)[..2]).await;
        let other = match prefill_dies {
            true => {
                drop(prefills);
                until_only(&mut node, "decodes").await;
                node.abort(D(1)).await;
                decodes.stopped(D(1)).await;
                decodes.release(D(1));
                &mut decodes
            }
            false => {
                drop(decodes);
                until_only(&mut node, "prefills").await;
                node.abort(P(1)).await;
                prefills.stopped(P(1)).await;
                prefills.release(P(1));
                &mut prefills
            }
        };
        node.is_quiet().await;
        fill(&mut node, other, 9, &prompt(9, 2 * BLOCK_TOKENS)).await;
    }
}
