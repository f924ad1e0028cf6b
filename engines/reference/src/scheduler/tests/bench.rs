//! A scheduler with a fake node, a toy model and a time of its own, and what is asked of it.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use kvasir_proto::v1::engine_to_node::Message;
use kvasir_proto::v1::finished::Reason;
use kvasir_proto::v1::generate_event::Event;
use kvasir_proto::v1::node_to_engine::Message as ToEngine;
use kvasir_proto::{BlockKey, Namespace, Share, Side, TxId, v1};
use prometheus::Registry;
use tokio::sync::mpsc;
use tonic::Code;

use crate::admission::Admission;
use crate::events::{self, EventResult};
use crate::fakes::{FakeNode, ToyModel, VOCAB, vocabulary};
use crate::metrics::Metrics;
use crate::ports::Clock;
use crate::sampling::Sampling;
use crate::scheduler::answer::AnswerOptions;
use crate::scheduler::sequence::Leg;
use crate::scheduler::{CheckedRequest, ChunkRequest, Job, Scheduler, SchedulerOptions, Shared};
use crate::tail::EngineTail;
use crate::text::TextOptions;

pub(super) const NAMESPACE: Namespace = Namespace([9; 16]);
pub(super) const PAGE: u32 = 64;

/// A scheduler with its node, its model and its time.
pub(super) struct Bench {
    pub node: FakeNode,
    pub model: ToyModel,
    pub now_us: Arc<AtomicU64>,
    pub scheduler: Scheduler<FakeNode, ToyModel>,
}

pub(super) fn bench(options: SchedulerOptions) -> Bench {
    let node = FakeNode::default();
    let model = ToyModel::new(options.block_tokens);
    let now_us = Arc::new(AtomicU64::new(1));
    let time = Arc::clone(&now_us);
    let shared = Shared {
        vocabulary: vocabulary(),
        admission: Arc::new(Admission::new(100)),
        metrics: Metrics::new(&Registry::new()),
        clock: Clock::new(move || time.load(Ordering::Relaxed)),
        layer_log: None,
    };
    let scheduler = Scheduler::new(options, shared, node.clone(), model.clone());
    Bench { node, model, now_us, scheduler }
}

pub(super) fn options() -> SchedulerOptions {
    SchedulerOptions {
        prefill_chunk_tokens: 100,
        block_tokens: PAGE,
        running_requests_max: 8,
        grow_wait_us: 1_000_000,
        vocab: VOCAB,
    }
}

/// A request of so many tokens; its serial makes its prompt and its slots its own.
#[derive(Clone)]
pub(super) struct Ask {
    pub serial: u64,
    pub leg: Leg,
    pub prompt_tokens: u32,
    pub answer: AnswerOptions,
    pub priority_delay_us: u64,
    pub chunks: Vec<ChunkRequest>,
}

impl Ask {
    pub(super) fn new(leg: Leg, serial: u64, prompt_tokens: u32, max_tokens: u32) -> Self {
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
        Ask { serial, leg, prompt_tokens, answer, priority_delay_us: 0, chunks: Vec::new() }
    }

    pub(super) fn share(&self) -> Share {
        let side = if self.leg == Leg::Decode { Side::Decode } else { Side::Prefill };
        Share { tx: TxId { conductor_incarnation: 0, serial: self.serial }, side }
    }

    pub(super) fn prompt(&self) -> Vec<u32> {
        (0..u64::from(self.prompt_tokens))
            .map(|at| 1 + ((at * 31 + self.serial * 7) % u64::from(VOCAB - 1)) as u32)
            .collect()
    }

    pub(super) fn slots(&self) -> Vec<u32> {
        let first = self.serial as u32 * 20;
        (first..first + self.prompt_tokens.div_ceil(PAGE)).rev().collect()
    }

    pub(super) fn bound(&self, cached_tokens: u32) -> ToEngine {
        self.bound_to(self.slots(), cached_tokens, v1::BindStatus::Ok)
    }

    pub(super) fn bound_to(
        &self,
        slots: Vec<u32>,
        cached_tokens: u32,
        status: v1::BindStatus,
    ) -> ToEngine {
        let Share { tx, side } = self.share();
        let status = status.into();
        let (tx, side) = (Some(tx.into()), side.to_wire());
        let ephemeral = false;
        ToEngine::Bound(v1::Bound { tx, side, status, slots, cached_tokens, ephemeral })
    }

    pub(super) fn ready(&self, first_token: u32) -> ToEngine {
        let first = v1::TokenOut { id: first_token, logprob: None, top: Vec::new() };
        let tx = Some(self.share().tx.into());
        ToEngine::Ready(v1::Ready { tx, tail: EngineTail::to_bytes(first) })
    }

    pub(super) fn stop(&self) -> ToEngine {
        let Share { tx, side } = self.share();
        let (tx, side) = (Some(tx.into()), side.to_wire());
        ToEngine::Stop(v1::Stop { tx, side, reason: "the lease ran out".into() })
    }

    pub(super) fn grown(&self, slots: Vec<u32>) -> ToEngine {
        let Share { tx, side } = self.share();
        ToEngine::Grown(v1::Grown { tx: Some(tx.into()), side: side.to_wire(), slots })
    }
}

/// What a caller heard.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Answered {
    pub cached: Option<u32>,
    pub tokens: Vec<u32>,
    pub text: String,
    pub finished: Option<v1::Finished>,
    pub failed: Option<Code>,
}

impl Answered {
    /// What was heard later comes behind.
    pub(super) fn extend(&mut self, later: Answered) {
        let over = self.finished.is_some() || self.failed.is_some();
        assert!(!over || later == Answered::default(), "after the end: {later:?}");
        self.cached = self.cached.or(later.cached);
        self.tokens.extend(later.tokens);
        self.text.push_str(&later.text);
        self.finished = later.finished.or(self.finished.take());
        self.failed = later.failed.or(self.failed);
    }

    pub(super) fn reason(&self) -> Reason {
        self.finished.as_ref().expect("finished").reason()
    }
}

pub(super) struct Caller {
    pub events: mpsc::Receiver<EventResult>,
}

impl Caller {
    pub(super) fn heard(&mut self) -> Answered {
        let mut answered = Answered::default();
        while let Ok(event) = self.events.try_recv() {
            assert!(answered.finished.is_none() && answered.failed.is_none(), "after the end");
            match event.map(|event| event.event.expect("an event")) {
                Ok(Event::Accepted(accepted)) => answered.cached = Some(accepted.cached_tokens),
                Ok(Event::Tokens(tokens)) => {
                    answered.tokens.extend(tokens.tokens.iter().map(|token| token.id));
                    answered.text.push_str(&tokens.text);
                }
                Ok(Event::Finished(finished)) => {
                    answered.text.push_str(&finished.text);
                    answered.finished = Some(finished);
                }
                Err(status) => answered.failed = Some(status.code()),
            }
        }
        answered
    }
}

impl Bench {
    pub(super) fn ask(&mut self, ask: &Ask) -> Caller {
        let (sink, events) = events::channel(ask.answer.max_tokens);
        let request = CheckedRequest {
            share: ask.share(),
            leg: ask.leg,
            request_id: String::new(),
            prompt: ask.prompt(),
            answer: ask.answer.clone(),
            namespace: (ask.leg != Leg::Prefill).then_some(NAMESPACE),
            routed: Vec::new(),
            chunks: ask.chunks.clone(),
            priority_delay_us: ask.priority_delay_us,
        };
        let tokens = if ask.leg == Leg::Decode { 0 } else { ask.prompt_tokens };
        let admitted = self.scheduler.shared.admission.try_admit(tokens).expect("room");
        let (routed, places) = (None, request.places(PAGE));
        let job = Job { request, events: sink, admitted, received_us: 1, routed, places };
        self.scheduler.accept(job).expect("the node is there");
        Caller { events }
    }

    /// One round of the compute thread's loop; says whether a step was computed.
    pub(super) fn turn(&mut self) -> bool {
        self.scheduler.handle_all().expect("the node is there");
        self.scheduler.sweep().expect("the node is there");
        self.scheduler.publish_load();
        self.scheduler.step().expect("the node is there")
    }

    pub(super) fn run(&mut self) {
        let mut turns = 0;
        while self.turn() {
            turns += 1;
            assert!(turns < 10_000, "it never ends");
        }
    }

    /// (step, first page, pages) as the node was told, for one share.
    pub(super) fn planned(&self, share: Share) -> Vec<(u32, u32, u32)> {
        let mut planned = Vec::new();
        for message in self.node.messages() {
            if let Message::Plan(plan) = message {
                for pages in plan.pages {
                    if Share::from_wire(pages.tx, pages.side) == Ok(share) {
                        planned.push((plan.step, pages.first_page, pages.page_count));
                    }
                }
            }
        }
        planned
    }

    pub(super) fn commits(&self) -> Vec<(u32, Vec<BlockKey>)> {
        let commit = |message| match message {
            Message::Commit(commit) => {
                Some((commit.first_page, BlockKey::list(&commit.keys).expect("keys")))
            }
            _ => None,
        };
        self.node.messages().into_iter().filter_map(commit).collect()
    }

    pub(super) fn tail(&self) -> u32 {
        let tail = |message| match message {
            Message::FinishPrefill(finish) => EngineTail::first_token(&finish.tail, VOCAB),
            _ => None,
        };
        self.node.messages().into_iter().find_map(tail).expect("a tail").id
    }

    pub(super) fn computed(&self) -> u64 {
        self.scheduler.shared.metrics.computed_prompt_tokens.get()
    }
}
