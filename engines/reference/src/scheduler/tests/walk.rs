//! Requests of all legs, a node that grants, refuses, stops and is silent, callers that go away:
//! in a random order, from a seed. Whatever the order, every call ends, every answer is a beginning
//! of the right one, and every share that was granted is given back once and not touched after.

use std::collections::BTreeMap;
use std::sync::atomic::Ordering;

use kvasir_proto::v1::engine_to_node::Message;
use kvasir_proto::{Share, v1};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::bench::*;
use crate::fakes::{FakeNode, Heard, greedy};
use crate::scheduler::SchedulerOptions;
use crate::scheduler::sequence::Leg;

const REQUESTS: u64 = 12;

/// One request as the walk knows it.
struct Walker {
    ask: Ask,
    /// `None` once the caller has gone.
    caller: Option<Caller>,
    answered: Answered,
    bind: Bind,
    ready: bool,
    grows_to_answer: usize,
    stopped: bool,
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Bind {
    NotAsked,
    Asked,
    Granted,
    Refused,
}

struct Walk {
    bench: Bench,
    random: ChaCha8Rng,
    walkers: BTreeMap<Share, Walker>,
    heard: usize,
    next_slot: u32,
}

#[test]
fn in_any_order_calls_end_and_shares_are_given_back_once() {
    for seed in 0..300 {
        let mut walk = Walk::new(seed);
        for _ in 0..150 {
            walk.act();
            walk.bench.turn();
            walk.listen();
        }
        walk.settle(seed);
        walk.check(seed);
    }
}

impl Walk {
    fn new(seed: u64) -> Self {
        let options =
            SchedulerOptions { running_requests_max: 3, grow_wait_us: 50_000, ..options() };
        Walk {
            bench: bench(options),
            random: ChaCha8Rng::seed_from_u64(seed),
            walkers: BTreeMap::new(),
            heard: 0,
            next_slot: 500,
        }
    }

    fn act(&mut self) {
        self.bench.now_us.fetch_add(self.random.random_range(0..5_000), Ordering::Relaxed);
        if (self.walkers.len() as u64) < REQUESTS && self.random.random_bool(0.2) {
            self.ask();
        }
        for share in self.walkers.keys().copied().collect::<Vec<_>>() {
            if self.random.random_bool(0.3) {
                self.answer(share);
            }
            let walker = self.walkers.get_mut(&share).expect("it is there");
            if self.random.random_bool(0.01) {
                walker.caller = None;
            }
            let held = matches!(walker.bind, Bind::Asked | Bind::Granted);
            if held && !walker.stopped && self.random.random_bool(0.01) {
                walker.stopped = true;
                self.bench.node.say(walker.ask.stop());
            }
        }
    }

    fn ask(&mut self) {
        let leg = [Leg::Prefill, Leg::Decode, Leg::Whole][self.random.random_range(0..3)];
        let serial = self.walkers.len() as u64 + 1;
        let (prompt, tokens) = (self.random.random_range(1..300), self.random.random_range(1..90));
        let ask = Ask::new(leg, serial, prompt, tokens);
        let caller = Some(self.bench.ask(&ask));
        let walker = Walker {
            caller,
            answered: Answered::default(),
            bind: Bind::NotAsked,
            ready: false,
            grows_to_answer: 0,
            stopped: false,
            ask,
        };
        self.walkers.insert(walker.ask.share(), walker);
    }

    /// The node says one thing that it owes, if it owes any.
    fn answer(&mut self, share: Share) {
        let walker = self.walkers.get_mut(&share).expect("it is there");
        if walker.stopped {
            return;
        }
        let ask = &walker.ask;
        if walker.bind == Bind::Asked {
            let granted = self.random.random_bool(0.9);
            walker.bind = if granted { Bind::Granted } else { Bind::Refused };
            let refusal = || ask.bound_to(Vec::new(), 0, v1::BindStatus::Gone);
            self.bench.node.say(if granted { ask.bound(0) } else { refusal() });
        } else if walker.bind == Bind::Granted && ask.leg == Leg::Decode && !walker.ready {
            walker.ready = true;
            self.bench.model.fill(&ask.prompt(), &ask.slots());
            self.bench.node.say(ask.ready(greedy(&ask.prompt(), 1)[0]));
        } else if walker.grows_to_answer > 0 {
            walker.grows_to_answer -= 1;
            let granted = self.random.random_bool(0.7) && self.next_slot < FakeNode::SLOTS;
            self.next_slot += u32::from(granted);
            let slots = if granted { vec![self.next_slot - 1] } else { Vec::new() };
            self.bench.node.say(ask.grown(slots));
        }
    }

    /// What the engine has said to the node, and the callers have heard.
    fn listen(&mut self) {
        let heard: Vec<Heard> = self.bench.node.state().heard[self.heard..].to_vec();
        self.heard += heard.len();
        for heard in heard {
            let Heard::Message(message) = heard else { continue };
            match message {
                Message::Bind(bind) => self.walker(bind.tx, bind.side).bind = Bind::Asked,
                Message::Grow(grow) => self.walker(grow.tx, grow.side).grows_to_answer += 1,
                _ => {}
            }
        }
        for walker in self.walkers.values_mut() {
            if let Some(caller) = &mut walker.caller {
                walker.answered.extend(caller.heard());
            }
        }
    }

    fn walker(&mut self, tx: Option<v1::TxId>, side: i32) -> &mut Walker {
        let share = Share::from_wire(tx, side).expect("a share");
        self.walkers.get_mut(&share).expect("a share that was asked for")
    }

    /// The node says all it owes, until nothing is left.
    fn settle(&mut self, seed: u64) {
        for _ in 0..20_000 {
            self.bench.now_us.fetch_add(10_000, Ordering::Relaxed);
            for share in self.walkers.keys().copied().collect::<Vec<_>>() {
                self.answer(share);
            }
            let idle = !self.bench.turn();
            self.listen();
            if idle && self.bench.scheduler.is_empty() {
                return;
            }
        }
        panic!("seed {seed}: it never ends");
    }

    fn check(&self, seed: u64) {
        for (share, walker) in &self.walkers {
            let Walker { ask, answered, .. } = walker;
            let about = format!("seed {seed}, {share}, {:?}", ask.leg);
            let right = greedy(&ask.prompt(), ask.answer.max_tokens as usize);
            assert!(right.starts_with(&answered.tokens), "{about}");
            if walker.caller.is_some() {
                let ends = [answered.finished.is_some(), answered.failed.is_some()];
                assert_eq!(ends.iter().filter(|ended| **ended).count(), 1, "{about}");
            }
            if answered.finished.is_some() && ask.leg != Leg::Prefill {
                assert_eq!(answered.tokens, right, "{about}");
            }
            let granted = walker.bind == Bind::Granted || walker.stopped;
            let releases = self.messages_about(*share).into_iter().filter(|last| *last).count();
            assert_eq!(releases, usize::from(granted), "{about}");
            let after = self.messages_about(*share).into_iter().skip_while(|last| !*last).count();
            assert_eq!(after, releases, "{about}: something was said after the release");
        }
    }

    /// For each message about a share whether it is its release.
    fn messages_about(&self, share: Share) -> Vec<bool> {
        let is = |tx: Option<v1::TxId>, side: i32| Share::from_wire(tx, side) == Ok(share);
        let about = |message: Message| match message {
            Message::Release(release) => is(release.tx, release.side).then_some(true),
            Message::Bind(bind) => is(bind.tx, bind.side).then_some(false),
            Message::Grow(grow) => is(grow.tx, grow.side).then_some(false),
            Message::Commit(commit) => is(commit.tx, commit.side).then_some(false),
            Message::Plan(plan) => {
                plan.pages.iter().any(|pages| is(pages.tx, pages.side)).then_some(false)
            }
            Message::KeepAlive(alive) => {
                alive.shares.iter().any(|other| is(other.tx, other.side)).then_some(false)
            }
            Message::FinishPrefill(finish) => {
                is(finish.tx, kvasir_proto::Side::Prefill.to_wire()).then_some(false)
            }
            Message::Get(_)
            | Message::Unpin(_)
            | Message::HoldPages(_)
            | Message::DropPages(_)
            | Message::FillPages(_) => None,
        };
        self.bench.node.messages().into_iter().filter_map(about).collect()
    }
}
