//! What conductors and administrators see: events, status, HTTP.

use std::collections::BTreeSet;

use crate::common::*;
use kvasir_proto::{BlockKey, Share, Side, TierDigests, v1};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio_stream::StreamExt;

const P: fn(u64) -> Share = |serial| share(serial, Side::Prefill);

/// A conductor's copy of what a node has.
#[derive(Default)]
struct Copy {
    keys: BTreeSet<BlockKey>,
    sequence: u64,
    complete: bool,
    status: Option<v1::NodeDescription>,
    /// How often digests came, and were those of this copy.
    digests: u32,
}

impl Copy {
    fn apply(&mut self, event: v1::NodeEvent) {
        match event.event.expect("an event") {
            v1::node_event::Event::Snapshot(part) => {
                if part.first {
                    self.keys.clear();
                }
                self.keys.extend(BlockKey::list(&part.keys).expect("keys"));
                (self.sequence, self.complete) = (part.sequence, part.last);
            }
            v1::node_event::Event::Changes(changes) => {
                assert_eq!(changes.sequence, self.sequence + 1, "no gap");
                self.sequence += changes.changes.len() as u64;
                for change in changes.changes {
                    let key = BlockKey::list(&change.key).expect("a key")[0];
                    if change.removed {
                        assert!(self.keys.remove(&key));
                    } else {
                        assert!(self.keys.insert(key));
                    }
                }
                if let Some(digests) = &changes.digests {
                    let dram = self.keys.iter().collect();
                    let want = TierDigests { dram, ..TierDigests::default() };
                    assert_eq!(TierDigests::from_wire(digests), Ok(want));
                    self.digests += 1;
                }
            }
            v1::node_event::Event::Status(status) => self.status = Some(status),
        }
    }
}

async fn compute(node: &mut TestNode, engine: &mut FakeEngine, serial: u64, prompt: &[u32]) {
    node.allocate(allocate(P(serial), prompt)).await.expect("room");
    let slots = engine.bind(P(serial)).await.slots;
    engine.compute(P(serial), prompt, &slots, 0..slots.len() as u32);
    engine.release(P(serial));
    node.is_quiet().await;
}

async fn subscribe(
    node: &mut TestNode,
    incarnation: u64,
    from_sequence: u64,
) -> tonic::Streaming<v1::NodeEvent> {
    let request = v1::EventsRequest { incarnation, from_sequence };
    node.client.events(request).await.expect("a stream").into_inner()
}

async fn next(events: &mut tonic::Streaming<v1::NodeEvent>, copy: &mut Copy) {
    let event = tokio::time::timeout(PATIENCE, events.next()).await.expect("in time");
    copy.apply(event.expect("not over").expect("no error"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_subscriber_has_what_the_node_has_also_after_evictions() {
    let mut node = TestNode::start(Domain::Shm).await;
    let mut engine = FakeEngine::attach(&node).await;
    compute(&mut node, &mut engine, 1, &prompt(1, 2 * BLOCK_TOKENS)).await;
    let mut events = subscribe(&mut node, 0, 0).await;
    let mut copy = Copy::default();
    while !copy.complete {
        next(&mut events, &mut copy).await;
    }
    assert_eq!(copy.keys.len(), 2);
    // 64 slots: the first blocks must go for these.
    for serial in 2..8 {
        let prompt = prompt(serial as u32, 20 * BLOCK_TOKENS);
        compute(&mut node, &mut engine, serial, &prompt).await;
    }
    let all: BTreeSet<BlockKey> = node
        .blocks(&[])
        .await
        .iter()
        .map(|block| BlockKey(block.key.as_slice().try_into().expect("16 bytes")))
        .collect();
    assert!(node.metric("block_events_total{event=\"evicted\"}").await > 0.0);
    while copy.keys != all {
        next(&mut events, &mut copy).await;
    }
    while copy.digests < 2 {
        next(&mut events, &mut copy).await;
    }
    // Who comes back with a sequence that is still known gets only what it lacks.
    let incarnation = node.describe().await.incarnation;
    let mut events = subscribe(&mut node, incarnation, copy.sequence).await;
    compute(&mut node, &mut engine, 20, &prompt(20, BLOCK_TOKENS)).await;
    let before = copy.sequence;
    copy.complete = false;
    while copy.sequence == before {
        next(&mut events, &mut copy).await;
    }
    assert!(!copy.complete, "no snapshot was needed");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn status_tells_of_engine_load_and_draining() {
    let mut node = TestNode::start(Domain::Shm).await;
    let mut events = subscribe(&mut node, 0, 0).await;
    let mut copy = Copy::default();
    let mut sees = async |copy: &mut Copy, wanted: &dyn Fn(&v1::NodeDescription) -> bool| {
        while !copy.status.as_ref().is_some_and(wanted) {
            next(&mut events, copy).await;
        }
    };
    sees(&mut copy, &|status| status.instances.is_empty()).await;
    let engine = FakeEngine::attach(&node).await;
    sees(&mut copy, &|status| {
        status
            .instances
            .iter()
            .any(|one| one.description.as_ref().is_some_and(|instance| instance.attach_epoch == 1))
            && status.slots_total == 64
            && status.layout == Some((&layout()).into())
    })
    .await;
    let load = v1::InstanceLoad {
        running_requests: 3,
        waiting_requests: 4,
        ..v1::InstanceLoad::default()
    };
    engine.attachment.publish_load(&load);
    let is_said = |one: &v1::AttachedInstance| one.load == Some(load);
    sees(&mut copy, &|status| status.instances.iter().any(is_said)).await;
    // A share that is open holds the end up, so that the new status is seen.
    node.allocate(allocate(P(1), &prompt(1, 10))).await.expect("room");
    let (ended, ()) = tokio::join!(node.shut_down(), async {
        sees(&mut copy, &|status| status.draining).await;
    });
    let () = ended;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn http_answers_beside_grpc_and_unknown_requests_are_refused() {
    let mut node = TestNode::start(Domain::Shm).await;
    assert_eq!(node.get("/healthz").await.0, 200);
    assert_eq!(node.get("/readyz").await.0, 200);
    assert_eq!(node.get("/nothing").await.0, 404);
    let refused = node.allocate(allocate(P(1), &prompt(1, 10))).await.expect_err("no engine");
    assert_eq!(refused.code(), tonic::Code::FailedPrecondition);
    let _engine = FakeEngine::attach(&node).await;
    for (change, code) in [
        (v1::TxAllocateRequest { tx: None, ..allocate(P(1), &[]) }, tonic::Code::InvalidArgument),
        (v1::TxAllocateRequest { side: 9, ..allocate(P(1), &[]) }, tonic::Code::InvalidArgument),
        (
            v1::TxAllocateRequest { keys: vec![1; 7], ..allocate(P(1), &prompt(1, 64)) },
            tonic::Code::InvalidArgument,
        ),
        (
            v1::TxAllocateRequest { writer_endpoint: vec![1; 7], ..allocate(P(1), &[1; 64]) },
            tonic::Code::InvalidArgument,
        ),
        (
            v1::TxAllocateRequest { side: Side::Decode.to_wire(), ..allocate(P(1), &[1; 64]) },
            tonic::Code::InvalidArgument,
        ),
        (allocate(P(1), &prompt(1, 100 * BLOCK_TOKENS)), tonic::Code::InvalidArgument),
    ] {
        let refused = node.allocate(change.clone()).await.expect_err("refused");
        assert_eq!(refused.code(), code, "{refused} for {change:?}");
    }
    let unknown = node.push(P(1), Some(v1::WriteTargets::default())).await.expect_err("unknown");
    assert_eq!(unknown.code(), tonic::Code::NotFound);
    let unknown = node.commit(P(1), 0, false).await.expect_err("unknown");
    assert_eq!(unknown.code(), tonic::Code::NotFound);
    assert!(!node.renew(P(1), 1000).await);
    node.is_quiet().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_connection_may_have_a_bounded_number_of_calls_open() {
    let node = TestNode::start(Domain::Shm).await;
    let mut stream = node.connect().await;
    stream.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n").await.expect("sent");
    stream.write_all(&[0, 0, 0, 4, 0, 0, 0, 0, 0]).await.expect("settings of our own");
    let mut head = [0; 9];
    stream.read_exact(&mut head).await.expect("a frame");
    assert_eq!((head[0], head[3]), (0, 4), "settings come first");
    let mut settings = vec![0; usize::from(u16::from_be_bytes([head[1], head[2]]))];
    stream.read_exact(&mut settings).await.expect("the settings");
    let max = settings.chunks(6).find(|setting| setting[..2] == [0, 3]).expect("a bound");
    assert_eq!(max[2..], 1_024u32.to_be_bytes());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_directory_that_is_served_is_refused_and_one_left_behind_is_taken() {
    let node = TestNode::start(Domain::Shm).await;
    let mut config = node_config(&node.path(""), Domain::Shm);
    let refused = kvasir_store_node::start(config.clone()).await.expect_err("refused");
    assert!(refused.to_string().contains("another node serves it"), "{refused}");
    let dir = tempfile::tempdir().expect("a directory");
    config.attach_dir = dir.path().into();
    // A socket whose process is gone.
    drop(std::os::unix::net::UnixListener::bind(dir.path().join("attach.sock")).expect("bound"));
    let mut other = kvasir_store_node::start(config).await.expect("taken");
    other.shut_down().await;
}
