//! An attached engine: trusted with nothing, and never missed for long. Of several at once: `engines.rs`.

use std::path::Path;
use std::process::{Command, Stdio};

use crate::common::*;
use kvasir_attach::{AttachError, EngineAttachment, handover};
use kvasir_proto::{BlockKey, Share, Side, SlotLayout, v1};
use kvasir_store_node::config::Config;
use v1::engine_to_node::Message as ToNode;

const P: fn(u64) -> Share = |serial| share(serial, Side::Prefill);

/// Fills the node with the full blocks of a prompt.
async fn fill(node: &mut TestNode, engine: &mut FakeEngine, serial: u64, prompt: &[u32]) {
    let pages = prompt.len() as u32 / BLOCK_TOKENS;
    node.allocate(allocate(P(serial), prompt)).await.expect("room");
    let bound = engine.bind(P(serial)).await;
    let first = bound.cached_tokens / BLOCK_TOKENS;
    engine.compute(P(serial), prompt, &bound.slots, first..pages);
    engine.release(P(serial));
    node.has_blocks(&chain(prompt)).await;
    node.is_quiet().await;
}

/// Waits until the node has noticed that the engine left.
async fn is_alone(node: &mut TestNode) {
    until("the engine is gone", async || node.instances().await.is_empty().then_some(())).await;
}

async fn attach_again(node: &TestNode, layout: SlotLayout) -> FakeEngine {
    until("an attach", async || FakeEngine::try_attach(node, layout.clone()).await.ok()).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_engine_that_comes_back_finds_its_blocks_and_another_layout_clears_them() {
    let mut node = TestNode::start(Domain::Shm).await;
    let mut engine = FakeEngine::attach(&node).await;
    let prompt = prompt(1, 2 * BLOCK_TOKENS);
    fill(&mut node, &mut engine, 1, &prompt).await;
    drop(engine);
    let engine = attach_again(&node, layout()).await;
    assert_eq!(node.blocks(&chain(&prompt)).await.len(), 2);
    drop(engine);
    let other = SlotLayout::layer_major(BLOCK_TOKENS, 2, 64).expect("a layout");
    attach_again(&node, other).await;
    assert_eq!(node.blocks(&[]).await.len(), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_arena_that_is_too_small_is_refused_with_what_to_set() {
    let node = TestNode::start(Domain::Shm).await;
    let huge = SlotLayout::layer_major(BLOCK_TOKENS, 4, 256).expect("a layout");
    let refused = FakeEngine::try_attach(&node, huge).await.err().expect("refused");
    let AttachError::Refused(why) = refused else { panic!("{refused}") };
    assert!(why.contains("set `dram_bytes` to 524288 or more"), "{why}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_engine_that_leaves_gives_everything_back() {
    let mut node = TestNode::start(Domain::Shm).await;
    let mut engine = FakeEngine::attach(&node).await;
    let prompt = prompt(1, 2 * BLOCK_TOKENS);
    fill(&mut node, &mut engine, 1, &prompt).await;
    let longer: Vec<u32> = prompt.iter().copied().chain(crate::common::prompt(3, 100)).collect();
    node.allocate(allocate(P(2), &longer)).await.expect("room");
    engine.bind(P(2)).await;
    engine.grow(P(2), 3).await;
    let keys = BlockKey::concat(&chain(&prompt));
    engine.send(ToNode::Get(v1::GetBlocks { handle: 9, keys, skip_promotion: false }));
    until("pins", async || (node.metric("pins").await == 4.0).then_some(())).await;
    drop(engine);
    is_alone(&mut node).await;
    node.is_quiet().await;
    assert_eq!(node.blocks(&chain(&prompt)).await.len(), 2, "what is committed stays");
}

/// Not a test: an engine in a process of its own, for the test below. It attaches to the node in
/// the current directory, says so, and computes nothing until it is killed.
#[test]
#[ignore = "is started by another test"]
fn engine_process() {
    if !Path::new("attach.sock").exists() {
        return;
    }
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    runtime.block_on(async {
        let options = engine_options(Path::new("."), layout());
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
async fn an_engine_that_is_killed_gives_everything_back() {
    let mut node = TestNode::start(Domain::Shm).await;
    let mut engine = Command::new(std::env::current_exe().expect("this test"))
        .args(["--ignored", "--exact", "engine::engine_process"])
        .current_dir(node.attach_dir())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .expect("a process");
    until("an engine", async || node.instances().await.pop()).await;
    node.allocate(allocate(P(1), &prompt(1, 200))).await.expect("room");
    let bound = node.attach_dir().join("bound");
    until("the bind", async || bound.exists().then_some(())).await;
    node.shows("slots{state=\"allocated\"}", 4.0).await;
    engine.kill().expect("killed");
    engine.wait().expect("its end");
    is_alone(&mut node).await;
    node.is_quiet().await;
    FakeEngine::attach(&node).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_connection_that_is_lost_is_not_the_end_of_a_process_that_may_still_write() {
    let mut node = TestNode::start(Domain::Shm).await;
    let dir = node.attach_dir();
    let socket = format!("unix://{}", dir.join("attach.sock").display());
    let mut client = v1::attach_client::AttachClient::connect(socket).await.expect("connected");
    let options = engine_options(&dir, layout());
    let request = v1::AttachRequest {
        instance_id: options.instance_id,
        instance_type: options.instance_type,
        role: options.role.into(),
        model: Some(options.model),
        layout: Some((&options.layout).into()),
        engine_address: options.engine_address,
        running_requests_max: 1,
        pool: None,
        pid: 0,
    };
    let reply = client.attach(request).await.expect("attached").into_inner();
    let path = dir.join(&reply.descriptor_socket);
    let mut connection = std::os::unix::net::UnixStream::connect(path).expect("connected");
    let token = reply.token.as_slice().try_into().expect("16 bytes");
    let descriptors = handover::receive::<4>(&mut connection, &token).expect("descriptors");
    until("an engine", async || node.instances().await.pop()).await;
    // No goodbye: this process holds the memory on.
    drop(connection);
    is_alone(&mut node).await;
    let refused = FakeEngine::try_attach(&node, layout()).await.err().expect("refused");
    assert!(refused.to_string().contains("stop it first"), "{refused}");
    drop(descriptors);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn blocks_are_pinned_for_an_engine_that_asks() {
    let mut node = TestNode::start(Domain::Shm).await;
    let mut engine = FakeEngine::attach(&node).await;
    let prompt = prompt(1, 3 * BLOCK_TOKENS);
    fill(&mut node, &mut engine, 1, &prompt).await;
    let mut keys = chain(&prompt);
    keys[2] = BlockKey([7; 16]);
    engine.send(ToNode::Get(v1::GetBlocks {
        handle: 5,
        keys: BlockKey::concat(&keys),
        skip_promotion: false,
    }));
    let slots = engine
        .wait("blocks", |message| match message {
            v1::node_to_engine::Message::Got(got) if got.handle == 5 => Some(got.slots.clone()),
            _ => None,
        })
        .await;
    assert_eq!(slots.len(), 2, "the longest prefix");
    engine.holds(&prompt, &slots, 0..2);
    node.shows("pins", 2.0).await;
    engine.send(ToNode::Unpin(v1::UnpinBlocks { handle: 5 }));
    node.is_quiet().await;
}

/// Brings an engine to the point where it misbehaves; it must be detached, and what it could still
/// write must stay in quarantine until it is gone.
async fn check_expelled(misbehave: impl AsyncFnOnce(&mut FakeEngine, &[u32])) {
    let mut node = TestNode::start(Domain::Shm).await;
    let mut engine = FakeEngine::attach(&node).await;
    let prompt = prompt(1, 2 * BLOCK_TOKENS);
    fill(&mut node, &mut engine, 1, &prompt).await;
    let longer: Vec<u32> = prompt.iter().copied().chain(crate::common::prompt(3, 100)).collect();
    node.allocate(allocate(P(2), &longer)).await.expect("room");
    let bound = engine.bind(P(2)).await;
    assert_eq!(bound.cached_tokens, 2 * BLOCK_TOKENS);
    misbehave(&mut engine, &bound.slots).await;
    is_alone(&mut node).await;
    node.shows("forced_detaches_total{kind=\"engine\"}", 1.0).await;
    node.shows("slots{state=\"quarantined\"}", 2.0).await;
    until("the engine notices", async || (!engine.attachment.is_connected()).then_some(())).await;
    drop(engine);
    node.is_quiet().await;
    attach_again(&node, layout()).await;
    assert_eq!(node.blocks(&chain(&prompt)).await.len(), 2);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_engine_that_plans_to_write_a_cached_page_is_detached() {
    check_expelled(async |engine, _| {
        engine.plan(&[(P(2), 1..3)]);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_engine_that_plans_pages_it_has_not_is_detached() {
    check_expelled(async |engine, _| {
        engine.plan(&[(P(2), 3..5)]);
    })
    .await;
    check_expelled(async |engine, _| {
        engine.plan(&[(P(2), u32::MAX - 1..u32::MAX)]);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_engine_that_commits_pages_it_has_not_is_detached() {
    check_expelled(async |engine, _| {
        engine.send(ToNode::Commit(v1::CommitBlocks {
            tx: Some(tx(2).into()),
            side: Side::Prefill.to_wire(),
            first_page: 3,
            keys: vec![1; 32],
        }));
    })
    .await;
    check_expelled(async |engine, _| {
        engine.send(ToNode::Commit(v1::CommitBlocks {
            tx: Some(tx(2).into()),
            side: Side::Prefill.to_wire(),
            first_page: 3,
            keys: vec![1; 5],
        }));
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_engine_whose_progress_cannot_be_true_is_detached() {
    check_expelled(async |engine, _| {
        let step = engine.plan(&[(P(2), 2..3)]);
        engine.attachment.progress(step, LAYERS + 1);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_engine_that_names_no_share_is_detached() {
    check_expelled(async |engine, _| {
        engine.send(ToNode::Release(v1::Release { tx: None, side: 1 }));
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_engine_that_does_not_stop_when_it_is_told_is_detached() {
    let timeout_ms = 200;
    let quick = |config: &mut Config| config.engine_stop_timeout_ms = timeout_ms;
    let mut node = TestNode::start_with(Domain::Shm, quick).await;
    let mut engine = FakeEngine::attach(&node).await;
    for serial in [1, 2] {
        let prompt = prompt(serial as u32, 2 * BLOCK_TOKENS);
        node.allocate(allocate(P(serial), &prompt)).await.expect("room");
        engine.bind(P(serial)).await;
    }
    node.abort(P(1)).await;
    engine.stopped(P(1)).await;
    engine.release(P(1));
    tokio::time::sleep(std::time::Duration::from_millis(4 * timeout_ms)).await;
    assert_eq!(node.instances().await.len(), 1, "it has let go");
    node.abort(P(2)).await;
    engine.stopped(P(2)).await;
    // Conductors are told that there is no engine; what it may still write is nobody's.
    is_alone(&mut node).await;
    node.shows("forced_detaches_total{kind=\"engine\"}", 1.0).await;
    node.shows("slots{state=\"quarantined\"}", 2.0).await;
    until("the engine notices", async || (!engine.attachment.is_connected()).then_some(())).await;
    drop(engine);
    node.is_quiet().await;
    attach_again(&node, layout()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn shares_that_have_ended_are_no_reason_to_detach() {
    let mut node = TestNode::start(Domain::Shm).await;
    let mut engine = FakeEngine::attach(&node).await;
    engine.plan(&[(P(77), 0..9)]);
    engine.finish(P(77), b"");
    engine.release(P(77));
    assert!(engine.grow(P(77), 1).await.is_empty());
    engine.ask_bind(P(77));
    assert_eq!(engine.bound(P(77)).await.status(), v1::BindStatus::Gone);
    fill(&mut node, &mut engine, 1, &prompt(1, 64)).await;
    assert_eq!(node.metric("forced_detaches_total{kind=\"engine\"}").await, 0.0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_an_engine_plays_is_compared_and_set_and_ends_with_its_attachment() {
    let mut node = TestNode::start(Domain::Shm).await;
    let alone = node.client.set_role(v1::SetRoleRequest::default()).await.expect_err("nobody");
    assert_eq!(alone.code(), tonic::Code::NotFound);
    let engine = FakeEngine::attach(&node).await;
    let described = node.describe().await;
    let instance = node.instances().await.pop().expect("attached");
    assert_eq!((instance.current_role(), instance.role_version), (v1::Role::Unspecified, 0));
    let wanted = |role: v1::Role, expected_version, dwell_ms| v1::SetRoleRequest {
        incarnation: described.incarnation,
        instance_id: instance.instance_id.clone(),
        attach_epoch: instance.attach_epoch,
        expected_version,
        role: role.into(),
        dwell_ms,
    };
    let first = node.client.set_role(wanted(v1::Role::Prefill, 0, 60_000)).await.expect("set");
    assert_eq!(first.into_inner().role_version, 1);
    let played = async |node: &mut TestNode| {
        let instance = node.instances().await.pop().expect("attached");
        (instance.current_role(), instance.role_version)
    };
    assert_eq!(played(&mut node).await, (v1::Role::Prefill, 1));
    for (request, code) in [
        (wanted(v1::Role::Decode, 0, 0), tonic::Code::Aborted),
        (wanted(v1::Role::Decode, 1, 60_000), tonic::Code::Unavailable),
        (wanted(v1::Role::Unspecified, 1, 0), tonic::Code::InvalidArgument),
        (
            v1::SetRoleRequest { incarnation: 1, ..wanted(v1::Role::Decode, 1, 0) },
            tonic::Code::NotFound,
        ),
        (
            v1::SetRoleRequest { attach_epoch: 9, ..wanted(v1::Role::Decode, 1, 0) },
            tonic::Code::NotFound,
        ),
    ] {
        let refused = node.client.set_role(request.clone()).await.expect_err("refused");
        assert_eq!(refused.code(), code, "{request:?}: {refused}");
    }
    assert_eq!(played(&mut node).await, (v1::Role::Prefill, 1));
    node.client.set_role(wanted(v1::Role::Decode, 1, 0)).await.expect("set");
    assert_eq!(played(&mut node).await, (v1::Role::Decode, 2));
    node.client.set_role(wanted(v1::Role::Both, 2, 0)).await.expect("set");
    assert_eq!(played(&mut node).await, (v1::Role::Unspecified, 3));
    node.client.set_role(wanted(v1::Role::Decode, 3, 0)).await.expect("set");
    drop(engine);
    let _again = attach_again(&node, layout()).await;
    assert_eq!(played(&mut node).await, (v1::Role::Unspecified, 0));
}
