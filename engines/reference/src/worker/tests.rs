//! The compute thread with a fake node and a toy model: it sleeps, wakes, loses its node, takes the
//! next one and drains.

use std::collections::BTreeSet;
use std::thread::JoinHandle;

use kvasir_proto::v1::generate_event::Event;
use kvasir_proto::v1::node_to_engine::Message as ToEngine;
use kvasir_proto::{Namespace, Share, Side, TxId, v1};
use prometheus::Registry;
use tonic::Code;

use super::*;
use crate::admission::Admission;
use crate::events::{self, EventResult};
use crate::fakes::{FakeNode, ToyModel, VOCAB, greedy, vocabulary};
use crate::metrics::Metrics;
use crate::ports::Clock;
use crate::sampling::Sampling;
use crate::scheduler::answer::AnswerOptions;
use crate::scheduler::sequence::Leg;
use crate::scheduler::{CheckedRequest, Job};
use crate::text::TextOptions;

const SHARE: Share =
    Share { tx: TxId { conductor_incarnation: 0, serial: 1 }, side: Side::Prefill };
const PROMPT: [u32; 3] = [4, 5, 6];

struct Engine {
    inbox: Arc<Inbox<Attachment<FakeNode, ToyModel>>>,
    shared: Shared,
    lost: mpsc::Receiver<PortLost>,
    thread: JoinHandle<()>,
}

fn start(drain_us: u64) -> Engine {
    let shared = Shared {
        vocabulary: vocabulary(),
        admission: Arc::new(Admission::new(4)),
        metrics: Metrics::new(&Registry::new()),
        clock: Clock::monotonic(),
        layer_log: None,
    };
    let inbox = Arc::new(Inbox::default());
    let (sender, lost) = mpsc::channel(1);
    let options = SchedulerOptions {
        prefill_chunk_tokens: 8,
        block_tokens: 16,
        running_requests_max: 4,
        grow_wait_us: 1_000_000,
        vocab: VOCAB,
    };
    let (worker_inbox, worker_shared) = (Arc::clone(&inbox), shared.clone());
    let worker =
        Worker { inbox: worker_inbox, options, shared: worker_shared, drain_us, lost: sender };
    Engine { inbox, shared, lost, thread: std::thread::spawn(|| worker.run()) }
}

impl Engine {
    fn attach(&self) -> FakeNode {
        let node = FakeNode::default();
        let waker = node.clone();
        let attachment = Attachment { port: node.clone(), compute: ToyModel::new(16) };
        self.inbox.attach(attachment, Box::new(move || waker.wake()));
        node
    }

    fn job(&self, max_tokens: u32) -> (Job, mpsc::Receiver<EventResult>) {
        let (sink, events) = events::channel(max_tokens);
        let sampling = Sampling {
            temperature: 0.0,
            top_p: 1.0,
            top_k: 0,
            seed: 0,
            frequency_penalty: 0.0,
            presence_penalty: 0.0,
        };
        let answer = AnswerOptions {
            sampling,
            max_tokens,
            stop_tokens: BTreeSet::new(),
            logprobs: None,
            text: TextOptions::default(),
        };
        let request = CheckedRequest {
            share: SHARE,
            leg: Leg::Whole,
            request_id: String::new(),
            prompt: PROMPT.to_vec(),
            answer,
            namespace: Some(Namespace([0; 16])),
            routed: Vec::new(),
            chunks: Vec::new(),
            priority_delay_us: 0,
        };
        let admitted = self.shared.admission.try_admit(PROMPT.len() as u32).expect("room");
        let (routed, places) = (None, Vec::new());
        (Job { request, events: sink, admitted, received_us: 0, routed, places }, events)
    }
}

fn bound() -> ToEngine {
    ToEngine::Bound(v1::Bound {
        tx: Some(SHARE.tx.into()),
        side: SHARE.side.to_wire(),
        status: v1::BindStatus::Ok.into(),
        slots: vec![7],
        ..v1::Bound::default()
    })
}

/// Everything until the call ends.
fn read(mut events: mpsc::Receiver<EventResult>) -> (Vec<u32>, Option<Code>) {
    let mut tokens = Vec::new();
    while let Some(event) = events.blocking_recv() {
        match event.map(|event| event.event) {
            Ok(Some(Event::Tokens(out))) => tokens.extend(out.tokens.iter().map(|token| token.id)),
            Ok(_) => {}
            Err(status) => return (tokens, Some(status.code())),
        }
    }
    (tokens, None)
}

#[test]
fn a_sleeping_thread_is_woken_by_a_job_and_by_the_node() {
    let engine = start(0);
    let node = engine.attach();
    let (job, events) = engine.job(5);
    engine.inbox.put(job).expect("attached");
    node.say(bound());
    assert_eq!(read(events), (greedy(&PROMPT, 5), None));
    engine.inbox.stop();
    engine.thread.join().expect("the thread ends");
}

#[test]
fn a_lost_node_ends_its_calls_and_the_next_one_is_taken() {
    let mut engine = start(0);
    let (job, _events) = engine.job(5);
    assert!(engine.inbox.put(job).is_err(), "there is no node yet");
    let node = engine.attach();
    let (job, events) = engine.job(5);
    engine.inbox.put(job).expect("attached");
    node.lose();
    assert_eq!(read(events), (Vec::new(), Some(Code::Unavailable)));
    assert_eq!(engine.lost.blocking_recv(), Some(PortLost("lost".into())));
    assert!(!engine.inbox.is_attached());

    let node = engine.attach();
    let (job, events) = engine.job(5);
    engine.inbox.put(job).expect("attached again");
    node.say(bound());
    assert_eq!(read(events), (greedy(&PROMPT, 5), None));
    engine.inbox.stop();
    engine.thread.join().expect("the thread ends");
}

#[test]
fn a_stopping_engine_lets_requests_end_and_takes_no_more() {
    let engine = start(60_000_000);
    let node = engine.attach();
    let (job, events) = engine.job(5);
    engine.inbox.put(job).expect("attached");
    engine.inbox.stop();
    let (job, _events) = engine.job(5);
    assert!(engine.inbox.put(job).is_err(), "it takes no more");
    node.say(bound());
    assert_eq!(read(events), (greedy(&PROMPT, 5), None));
    engine.thread.join().expect("the thread ends");
}

#[test]
fn what_has_not_ended_when_the_time_to_drain_is_over_fails() {
    let engine = start(0);
    let _node = engine.attach();
    let (job, events) = engine.job(5);
    engine.inbox.put(job).expect("attached");
    engine.inbox.stop();
    assert_eq!(read(events), (Vec::new(), Some(Code::Unavailable)));
    engine.thread.join().expect("the thread ends");
}
