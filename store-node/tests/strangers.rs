//! Writers that do not behave: silent ones are cut off for good, and what they send is not believed.

use std::sync::mpsc::{Receiver, sync_channel};
use std::time::Duration;

use crate::common::*;
use kvasir_proto::{Side, v1};
use kvasir_store_node::config::Config;
use kvasir_transfer::{
    Completion, Endpoint, Handlers, Outcome, PeerId, RegionDesc, Source, TransferConfig,
    TransferEngine, Write, WriteError,
};
use prost::Message;

/// A transfer engine with nobody behind it: messages are only kept.
struct Stranger {
    engine: TransferEngine,
    messages: Receiver<(PeerId, Vec<u8>)>,
    _dir: tempfile::TempDir,
}

impl Stranger {
    fn start(domain: Domain) -> Self {
        let dir = tempfile::tempdir().expect("a directory");
        let config = TransferConfig {
            name: "stranger".into(),
            preferred: domain,
            tcp_listen: Some("127.0.0.1:0".parse().expect("an address")),
            run_dir: Some(dir.path().into()),
            ..TransferConfig::default()
        };
        let registry = prometheus::Registry::new();
        let (sender, messages) = sync_channel(16);
        let handlers = Handlers {
            on_message: Box::new(move |peer, bytes| {
                sender.try_send((peer, bytes.to_vec())).expect("room");
            }),
            ..Handlers::default()
        };
        let engine = TransferEngine::start(config, handlers, &registry);
        Stranger { engine: engine.expect("an engine"), messages, _dir: dir }
    }

    async fn write(&self, target: &Target, region: RegionDesc, at: u64, bytes: &[u8]) -> Outcome {
        let endpoint = Endpoint::from_bytes(&target.0.endpoint).expect("an endpoint");
        let write = Write {
            peer: self.engine.connect(&endpoint).expect("a session"),
            source: Source::Inline(bytes.to_vec()),
            target: region,
            target_offset: at,
            imm: Some(target.0.imm),
            checksum: Some(kvasir_transfer::checksum(bytes)),
            group: 1,
            deadline: Duration::from_secs(5),
        };
        let (done, outcome) = Completion::future();
        self.engine.write(write, done).expect("taken");
        outcome.await
    }

    /// Says something about a push. The wire has the kind, the receiver and the immediate.
    async fn say(&self, to: &mut TestNode, kind: u8, receiver: u64, imm: u32) {
        let endpoint = Endpoint::from_bytes(&to.endpoint().await).expect("an endpoint");
        let mut message = vec![8, kind, 0x11];
        message.extend(receiver.to_le_bytes());
        message.push(0x18);
        prost::encoding::encode_varint(imm.into(), &mut message);
        self.send(&endpoint, message).await;
    }

    /// Orders objects. The wire has the kind and the order.
    async fn order(&self, to: &mut TestNode, order: &v1::SendObjects) {
        let endpoint = Endpoint::from_bytes(&to.endpoint().await).expect("an endpoint");
        let mut message = vec![8, SEND_OBJECTS, 0x22];
        message.extend(order.encode_length_delimited_to_vec());
        self.send(&endpoint, message).await;
    }

    async fn send(&self, to: &Endpoint, message: Vec<u8>) {
        let peer = self.engine.connect(to).expect("a session");
        let (done, outcome) = Completion::future();
        self.engine.send(peer, message, Duration::from_secs(5), done).expect("taken");
        outcome.await.expect("delivered");
    }
}

/// Kinds of messages between nodes.
const STOP_PUSH: u8 = 1;
const STOPPED: u8 = 2;
const UNSURE: u8 = 3;
const FAILED: u8 = 4;
const SEND_OBJECTS: u8 = 6;

struct Target(v1::WriteTargets);

impl Target {
    async fn write_page(
        &self,
        stranger: &Stranger,
        page: usize,
        layer: u16,
        bytes: &[u8],
    ) -> Outcome {
        let region = RegionDesc::from_bytes(&self.0.slots_region).expect("a region");
        let run = layout().runs(layer.into())[0];
        let at = u64::from(self.0.slots[page]) * layout().slot_bytes() + run.offset_bytes;
        stranger.write(self, region, at, bytes).await
    }

    async fn write_tail(&self, stranger: &Stranger, bytes: &[u8]) -> Outcome {
        let region = RegionDesc::from_bytes(&self.0.tail_region).expect("a region");
        stranger.write(self, region, self.0.tail_offset_bytes, bytes).await
    }
}

/// A decode share of a prompt of two blocks, to be written by a stranger.
async fn decode_share(node: &mut TestNode, stranger: &Stranger, prompt: &[u32]) -> Target {
    let request = v1::TxAllocateRequest {
        writer_endpoint: stranger.engine.endpoint().to_bytes(),
        ..allocate(share(1, Side::Decode), prompt)
    };
    Target(node.allocate(request).await.expect("room").targets.expect("targets"))
}

async fn a_silent_writer_is_shut_out(domain: Domain) {
    let quick = |config: &mut Config| config.peer_stop_timeout_ms = 100;
    let mut node = TestNode::start_with(domain, quick).await;
    let mut engine = FakeEngine::attach(&node).await;
    let stranger = Stranger::start(domain);
    let prompt = prompt(1, 2 * BLOCK_TOKENS);
    let target = decode_share(&mut node, &stranger, &prompt).await;
    let bound = engine.bind(share(1, Side::Decode)).await;
    let first = page_bytes(&prompt, 0, 0);
    assert_eq!(target.write_page(&stranger, 0, 0, &first).await, Ok(()));
    assert_eq!(engine.read(bound.slots[0], 0), first);
    node.abort(share(1, Side::Decode)).await;
    engine.stopped(share(1, Side::Decode)).await;
    engine.release(share(1, Side::Decode));
    node.is_quiet().await;
    node.shows("peer_writers_cut_off_total", 1.0).await;
    // The slots may be anybody's now. It connects anew, and what it knows from before is refused.
    until("a refusal", async || {
        let late = target.write_page(&stranger, 0, 0, &[0xee; 1024]).await;
        assert_ne!(late, Ok(()), "a late write landed");
        matches!(late, Err(WriteError::Refused(_))).then_some(())
    })
    .await;
    let tail = target.write_tail(&stranger, &[0xee; 64]).await;
    assert!(matches!(tail, Err(WriteError::Refused(_))), "{tail:?}");
    assert_eq!(engine.read(bound.slots[0], 0), first);
    // It may be given a new place.
    let request = v1::TxAllocateRequest {
        tx: Some(tx(2).into()),
        writer_endpoint: stranger.engine.endpoint().to_bytes(),
        ..allocate(share(2, Side::Decode), &prompt)
    };
    let again = Target(node.allocate(request).await.expect("room").targets.expect("targets"));
    assert_eq!(again.write_page(&stranger, 0, 0, &first).await, Ok(()));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_silent_writer_is_shut_out_of_shared_memory() {
    a_silent_writer_is_shut_out(Domain::Shm).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_silent_writer_is_shut_out_of_tcp() {
    a_silent_writer_is_shut_out(Domain::Tcp).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_tail_that_cannot_be_believed_aborts_the_share() {
    let quick = |config: &mut Config| config.peer_stop_timeout_ms = 100;
    let mut node = TestNode::start_with(Domain::Tcp, quick).await;
    let mut engine = FakeEngine::attach(&node).await;
    let stranger = Stranger::start(Domain::Tcp);
    let prompt = prompt(1, 2 * BLOCK_TOKENS);
    let target = decode_share(&mut node, &stranger, &prompt).await;
    engine.bind(share(1, Side::Decode)).await;
    for page in 0..2 {
        for layer in 0..LAYERS {
            let bytes = page_bytes(&prompt, page, layer);
            target.write_page(&stranger, page as usize, layer, &bytes).await.expect("landed");
        }
    }
    target.write_tail(&stranger, &[0xff; 64]).await.expect("landed");
    let reason = engine.stopped(share(1, Side::Decode)).await;
    assert!(reason.contains("corrupt data"), "{reason}");
    engine.release(share(1, Side::Decode));
    node.is_quiet().await;
    assert_eq!(node.blocks(&[]).await.len(), 0);
    node.shows("invalid_tails_total", 1.0).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_fetch_without_a_tail_keeps_nothing_whatever_another_share_left_in_its_room() {
    let quick = |config: &mut Config| config.peer_stop_timeout_ms = 100;
    let mut node = TestNode::start_with(Domain::Tcp, quick).await;
    let mut engine = FakeEngine::attach(&node).await;
    let stranger = Stranger::start(Domain::Tcp);
    let prompt = prompt(1, 2 * BLOCK_TOKENS + 1);
    let former = decode_share(&mut node, &stranger, &prompt).await;
    let tail = v1::Tail {
        tx: Some(tx(1).into()),
        checksums: vec![7; 2 * usize::from(LAYERS)],
        engine: Vec::new(),
        whole_blocks_only: false,
    };
    let tail = tail.encode_length_delimited_to_vec();
    assert_eq!(tail[0] as usize, tail.len() - 1, "a length of one byte");
    let framed = [&[tail[0], 0, 0, 0], &tail[1..]].concat();
    former.write_tail(&stranger, &framed).await.expect("landed");
    node.abort(share(1, Side::Decode)).await;
    node.is_quiet().await;

    let request = v1::TxAllocateRequest {
        writer_endpoint: stranger.engine.endpoint().to_bytes(),
        fetch_until_block: 2,
        ..allocate(share(1, Side::Prefill), &prompt)
    };
    let target = node.allocate(request).await.expect("room").targets.expect("targets");
    assert_eq!(target.tail_offset_bytes, former.0.tail_offset_bytes, "the same room");
    let settled = node.commit(share(1, Side::Prefill), 2, true).await.expect("settled");
    assert_eq!(settled.cached_blocks, 0);
    assert_eq!(engine.bind(share(1, Side::Prefill)).await.cached_tokens, 0);
    engine.release(share(1, Side::Prefill));
    node.is_quiet().await;
    assert_eq!(node.blocks(&[]).await.len(), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_peer_that_sends_garbage_disturbs_nobody() {
    let mut node = TestNode::start(Domain::Tcp).await;
    let stranger = Stranger::start(Domain::Tcp);
    let endpoint = Endpoint::from_bytes(&node.endpoint().await).expect("an endpoint");
    for message in [vec![], vec![0xff; 100], vec![8, 1], vec![8, 2, 0x11]] {
        let peer = stranger.engine.connect(&endpoint).expect("a session");
        let (done, outcome) = Completion::future();
        stranger.engine.send(peer, message, Duration::from_secs(5), done).expect("taken");
        outcome.await.expect("delivered");
    }
    let mut engine = FakeEngine::attach(&node).await;
    let prompt = prompt(1, BLOCK_TOKENS);
    node.allocate(allocate(share(1, Side::Prefill), &prompt)).await.expect("room");
    let slots = engine.bind(share(1, Side::Prefill)).await.slots;
    engine.compute(share(1, Side::Prefill), &prompt, &slots, 0..1);
    engine.release(share(1, Side::Prefill));
    node.has_blocks(&chain(&prompt)).await;
    node.is_quiet().await;
}

/// Answers the ask to stop with a message of this kind; answers with how many writers were cut off.
async fn cut_off_after_answer(kind: u8) -> f64 {
    let patient = |config: &mut Config| config.peer_stop_timeout_ms = 600_000;
    let mut node = TestNode::start_with(Domain::Tcp, patient).await;
    let _engine = FakeEngine::attach(&node).await;
    let stranger = Stranger::start(Domain::Tcp);
    decode_share(&mut node, &stranger, &prompt(1, 2 * BLOCK_TOKENS)).await;
    node.abort(share(1, Side::Decode)).await;
    let (peer, mut message) = until("the ask", async || stranger.messages.try_recv().ok()).await;
    // Not before the answer.
    node.shows("slots{state=\"quarantined\"}", 2.0).await;
    // The kind is the first field: one byte of tag, one of value.
    assert_eq!(message[..2], [8, 1]);
    message[1] = kind;
    let (done, outcome) = Completion::future();
    stranger.engine.send(peer, message, Duration::from_secs(5), done).expect("taken");
    outcome.await.expect("delivered");
    node.is_quiet().await;
    node.metric("peer_writers_cut_off_total").await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_writer_that_says_it_has_stopped_is_believed_and_one_that_is_not_sure_is_cut_off() {
    assert_eq!(cut_off_after_answer(STOPPED).await, 0.0);
    assert_eq!(cut_off_after_answer(UNSURE).await, 1.0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_engine_that_has_let_go_is_not_blamed_for_a_writer_that_is_silent() {
    let timeout_ms = 200;
    let change = |config: &mut Config| {
        config.peer_stop_timeout_ms = 600_000;
        config.engine_stop_timeout_ms = timeout_ms;
    };
    let mut node = TestNode::start_with(Domain::Tcp, change).await;
    let mut engine = FakeEngine::attach(&node).await;
    let writer = Stranger::start(Domain::Tcp);
    decode_share(&mut node, &writer, &prompt(1, 2 * BLOCK_TOKENS)).await;
    engine.bind(share(1, Side::Decode)).await;
    node.abort(share(1, Side::Decode)).await;
    engine.stopped(share(1, Side::Decode)).await;
    engine.release(share(1, Side::Decode));
    tokio::time::sleep(Duration::from_millis(5 * timeout_ms)).await;
    node.shows("slots{state=\"quarantined\"}", 2.0).await;
    assert_eq!(node.instances().await.len(), 1, "the engine is still served");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn only_its_writer_can_end_a_share() {
    let patient = |config: &mut Config| config.peer_stop_timeout_ms = 600_000;
    let mut node = TestNode::start_with(Domain::Tcp, patient).await;
    let mut engine = FakeEngine::attach(&node).await;
    let (writer, other) = (Stranger::start(Domain::Tcp), Stranger::start(Domain::Tcp));
    let target = decode_share(&mut node, &writer, &prompt(1, 2 * BLOCK_TOKENS)).await;
    engine.bind(share(1, Side::Decode)).await;
    let receiver = Endpoint::from_bytes(&target.0.endpoint).expect("an endpoint").incarnation;
    let refused = async |node: &TestNode, count: f64| {
        let said =
            async || (node.metric("peer_messages_refused_total").await == count).then_some(());
        until("a refusal", said).await;
    };
    other.say(&mut node, FAILED, receiver, target.0.imm).await;
    refused(&node, 1.0).await;
    assert!(node.renew(share(1, Side::Decode), 30_000).await, "it is still open");
    writer.say(&mut node, FAILED, receiver, target.0.imm).await;
    engine.stopped(share(1, Side::Decode)).await;
    engine.release(share(1, Side::Decode));
    until("the ask", async || writer.messages.try_recv().ok()).await;
    for (count, kind) in [(2.0, STOPPED), (3.0, UNSURE)] {
        other.say(&mut node, kind, receiver, target.0.imm).await;
        refused(&node, count).await;
    }
    node.shows("slots{state=\"quarantined\"}", 2.0).await;
    assert_eq!(node.metric("peer_writers_cut_off_total").await, 0.0);
    writer.say(&mut node, STOPPED, receiver, target.0.imm).await;
    node.is_quiet().await;
    node.shows("peer_messages_refused_total", 3.0).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn only_its_receiver_can_stop_a_push() {
    let mut prefill = TestNode::start(Domain::Tcp).await;
    let mut engine = FakeEngine::attach(&prefill).await;
    let mut decode = TestNode::start(Domain::Tcp).await;
    let mut decode_engine = FakeEngine::attach(&decode).await;
    let prompt = prompt(1, 2 * BLOCK_TOKENS);
    let request = v1::TxAllocateRequest {
        writer_endpoint: prefill.endpoint().await,
        ..allocate(share(1, Side::Decode), &prompt)
    };
    let targets = decode.allocate(request).await.expect("room").targets.expect("targets");
    prefill.allocate(allocate(share(1, Side::Prefill), &prompt)).await.expect("room");
    let receiver = Endpoint::from_bytes(&targets.endpoint).expect("an endpoint").incarnation;
    // Before it has begun, and then in the middle.
    let other = Stranger::start(Domain::Tcp);
    other.say(&mut prefill, STOP_PUSH, receiver, targets.imm).await;
    until("a refusal", async || {
        (prefill.metric("peer_messages_refused_total").await == 1.0).then_some(())
    })
    .await;
    let imm = targets.imm;
    prefill.push(share(1, Side::Prefill), Some(targets)).await.expect("armed");
    other.say(&mut prefill, STOP_PUSH, receiver, imm).await;
    until("a refusal", async || {
        (prefill.metric("peer_messages_refused_total").await == 2.0).then_some(())
    })
    .await;
    let slots = engine.bind(share(1, Side::Prefill)).await.slots;
    engine.compute(share(1, Side::Prefill), &prompt, &slots, 0..2);
    engine.finish(share(1, Side::Prefill), b"tail");
    engine.release(share(1, Side::Prefill));
    decode_engine.bind(share(1, Side::Decode)).await;
    assert_eq!(decode_engine.ready(share(1, Side::Decode)).await, b"tail");
    decode_engine.release(share(1, Side::Decode));
    prefill.is_quiet().await;
    decode.is_quiet().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn objects_are_ordered_by_who_gets_them_and_not_too_many_at_once() {
    let mut node = TestNode::start(Domain::Tcp).await;
    let (stranger, other) = (Stranger::start(Domain::Tcp), Stranger::start(Domain::Tcp));
    let order = |of: &Stranger, count: usize| v1::SendObjects {
        targets: Some(v1::WriteTargets {
            endpoint: of.engine.endpoint().to_bytes(),
            ..v1::WriteTargets::default()
        }),
        objects: vec![v1::SendObject { tx: Some(tx(1).into()), ..Default::default() }; count],
        ..v1::SendObjects::default()
    };
    let refused = async |node: &TestNode, count: f64| {
        until("a refusal", async || {
            (node.metric("peer_messages_refused_total").await == count).then_some(())
        })
        .await;
    };
    // What cannot be sent is answered, which is no offence.
    stranger.order(&mut node, &order(&stranger, 64)).await;
    stranger.order(&mut node, &order(&other, 1)).await;
    refused(&node, 1.0).await;
    stranger.order(&mut node, &order(&stranger, 65)).await;
    refused(&node, 2.0).await;
    node.is_quiet().await;
    node.shows("peer_messages_refused_total", 2.0).await;
}
