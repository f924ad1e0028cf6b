//! What everybody in the simulation has at hand: the time, what is to happen when, what was seen, and
//! chance.

use std::collections::BTreeMap;
use std::rc::Rc;

use kvasir_blocks::AttachEpoch;
use kvasir_blocks::moving::writers::CutRound;
use kvasir_proto::{BlockKey, Share, TxId};

use crate::calls::{Call, Caller, FromClient, FromEngine, Reply, ToClient, ToEngine};
use crate::checkers::Books;
use crate::content::Truth;
use crate::plan::Plan;
use crate::random::Random;
use crate::seen::{Life, Seen};

/// Something that happens at its time.
#[derive(Debug, Clone)]
pub enum Event {
    Request(usize),
    /// The client of a request goes away, or its time is over.
    GiveUp {
        conductor: usize,
        incarnation: u64,
        serial: u64,
    },
    /// Over a connection to the process that there is, and lost with it.
    Call {
        to: Life,
        from: Caller,
        call: Call,
    },
    Reply {
        to: Caller,
        reply: Reply,
    },
    /// Nobody has answered a call.
    Unanswered {
        caller: Caller,
    },
    Renew {
        conductor: usize,
        incarnation: u64,
        serial: u64,
    },
    Poll {
        conductor: usize,
        incarnation: u64,
    },
    ToEngine {
        at: Life,
        epoch: AttachEpoch,
        message: ToEngine,
    },
    FromEngine {
        at: Life,
        epoch: AttachEpoch,
        message: FromEngine,
    },
    EngineStep {
        at: Life,
        epoch: AttachEpoch,
    },
    /// A copy out of the engine's pool is over.
    CarryEnds {
        at: Life,
        copy: u64,
    },
    EngineStarts {
        at: Life,
        /// Which of the node's.
        index: usize,
    },
    /// A client of objects is started.
    Client(usize),
    ToClient {
        at: Life,
        epoch: AttachEpoch,
        message: ToClient,
    },
    FromClient {
        at: Life,
        epoch: AttachEpoch,
        request: u64,
        message: FromClient,
    },
    ClientStep {
        at: Life,
        epoch: AttachEpoch,
    },
    Tick {
        at: Life,
    },
    Disk {
        at: Life,
    },
    /// A part of cutting a writer off ends, one way or the other.
    Cut {
        at: Life,
        writer: u64,
        round: CutRound,
        part: u32,
    },
    Job {
        at: Life,
    },
    /// The leases of a copy that is being pushed are renewed.
    RenewCopy {
        at: Life,
        copy: u64,
        tx: TxId,
    },
    /// A node that has said that it has drained is taken away, with its disk.
    Leaves {
        at: Life,
    },
    FaultBegins(usize),
    FaultEnds(usize),
}

#[derive(Debug)]
pub struct Context {
    pub now_us: u64,
    pub plan: Rc<Plan>,
    pub truth: Rc<Truth>,
    pub books: Books,
    /// Which version of an object whoever puts it next at a node writes.
    pub versions: BTreeMap<(usize, BlockKey), u32>,
    /// No call is lost any more.
    pub calm: bool,
    /// Which node a transfer engine is of.
    pub lives: BTreeMap<u64, Life>,
    /// The life that each node is in, or was in last.
    pub processes: BTreeMap<usize, Life>,
    events: BTreeMap<(u64, u64), Event>,
    next_event: u64,
}

impl Context {
    pub fn new(plan: Rc<Plan>) -> Self {
        let truth = Rc::new(Truth::new(&plan));
        Context {
            now_us: 0,
            books: Books::new(&plan, &truth),
            truth,
            plan,
            versions: BTreeMap::new(),
            calm: false,
            lives: BTreeMap::new(),
            processes: BTreeMap::new(),
            events: BTreeMap::new(),
            next_event: 0,
        }
    }

    pub fn life_of(&self, incarnation: u64) -> Option<Life> {
        self.lives.get(&incarnation).copied()
    }

    pub fn now_ms(&self) -> u64 {
        self.now_us / 1_000
    }

    pub fn see(&mut self, seen: Seen) {
        self.books.see(self.now_us, seen);
    }

    pub fn version(&self, node: usize, key: BlockKey) -> u32 {
        self.versions.get(&(node, key)).copied().unwrap_or(0)
    }

    /// Something rare has happened: a run without it proves less.
    pub fn covers(&mut self, what: &'static str) {
        self.books.covers(what);
    }

    /// Chance for one occasion at this moment; see [`Random::of`].
    pub fn chance(&self, name: &str, id: u64, other: u64) -> Random {
        Random::of(self.plan.seed, name, [id, other, self.now_us])
    }

    pub fn after(&mut self, us: u64, event: Event) {
        self.at(self.now_us + us, event);
    }

    pub fn at(&mut self, at_us: u64, event: Event) {
        self.events.insert((at_us, self.next_event), event);
        self.next_event += 1;
    }

    /// Over the network between conductors and nodes: late, lost or twice.
    pub fn send(&mut self, event: &Event) {
        let (lost, twice) = (self.plan.lost_percent, self.plan.twice_percent);
        let (id, other) = concerns(event);
        let mut random = self.chance("call", id, other);
        let (is_lost, comes_twice) = (random.percent(lost), random.percent(twice));
        if !self.calm && is_lost {
            return self.covers("a call is lost");
        }
        let copies = 1 + u64::from(!self.calm && comes_twice);
        if copies > 1 {
            self.covers("a call comes twice");
        }
        for _ in 0..copies {
            // Now and then far behind others.
            let late_us = if random.percent(5) { 60_000 } else { 1_500 };
            let us = random.between(50, late_us);
            self.after(us, event.clone());
        }
    }

    pub fn next_us(&self) -> Option<u64> {
        self.events.keys().next().map(|(at_us, _)| *at_us)
    }

    pub fn pop_due(&mut self) -> Option<Event> {
        let entry = self.events.first_entry()?;
        (entry.key().0 <= self.now_us).then(|| entry.remove())
    }

    /// What is to happen, beside what the plan says, and the ends of calls: those that nobody has answered are
    /// counted where they are waited for.
    pub fn waiting(&self) -> usize {
        let is_left_out = |event: &&Event| {
            use Event::{Client, FaultBegins, Request, Unanswered};
            matches!(event, Request(_) | Client(_) | FaultBegins(_) | Unanswered { .. })
        };
        self.events.values().filter(|event| !is_left_out(event)).count()
    }
}

/// Whom a call or its answer concerns.
fn concerns(event: &Event) -> (u64, u64) {
    let share = |share: &Share| (share.tx.serial, 1 + share.side as u64);
    match event {
        Event::Call { to, from, call: Call::Renew { shares, .. } } => {
            let (id, other) = shares.first().map_or((0, 0), share);
            (id, other ^ (to.node as u64) << 8 ^ from.who.number() << 16)
        }
        Event::Call { from, .. } => (from.call, from.who.number()),
        Event::Reply { to, reply } => {
            let kind = matches!(reply, Reply::Answered { .. });
            (to.call, 1_000 + to.who.number() + 100 * u64::from(kind))
        }
        _ => (0, 0),
    }
}
