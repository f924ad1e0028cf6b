//! A conductor: the shipped placement core and a thin driver, which follows the nodes' events, reserves on
//! the nodes that the core names, starts both legs, renews the leases and gives up when the time is over.
//! It is stateless: when it crashes, all it knew is gone.

use std::collections::BTreeMap;
use std::sync::Arc;

use kvasir_blocks::ContextName;
use kvasir_placement::{
    BookingId, ClusterView, IndexLimits, InstanceReport, ModelIndex, ModelSpec, NodeIndex,
    Objectives, PlaceRequest, Placement, Policy, Profile, ReportedLoad, Role, ShadowIndex,
    SsdReads, Steering, place,
};
use kvasir_proto::{BlockKey, InstanceId, NodeId, Share, Side, Tenant, TxId};

use crate::calls::{AllocateCall, CALL_US, Call, Caller, LegStart, Party, Reply, Targets, Term};
use crate::content::{BLOCK_TOKENS, SLOT_BYTES};
use crate::context::{Context, Event};
use crate::engine::Engine;
use crate::node::Node;
use crate::plan::RolePlan;
use crate::seen::Life;

const LEASE_MS: u64 = 300;
const RENEW_US: u64 = 90_000;
/// How often a call is tried.
const TRIES: u32 = 3;
/// Of fetches so many are asked for up to the end of the prompt, whatever the source has.
const BELIEF_PERCENT: u64 = 20;
/// Of the prompts that were answered so many are copied to another node, as an administrator asks for it.
const REPLICATE_PERCENT: u64 = 12;

/// Of the contexts so many are to be kept on two nodes.
const COPIED_PERCENT: u64 = 40;

#[derive(Debug)]
pub struct Conductor {
    pub index: usize,
    pub incarnation: u64,
    starts: u64,
    pub up: bool,
    view: ClusterView,
    shadow: ShadowIndex,
    follows: BTreeMap<usize, Follow>,
    jobs: BTreeMap<u64, Job>,
    calls: BTreeMap<u64, Waiting>,
    /// What it has asked nodes to keep lately.
    contexts: Vec<(usize, ContextName)>,
}

/// What it knows of a node.
#[derive(Debug)]
struct Follow {
    incarnation: u64,
    node: NodeIndex,
    sequence: u64,
}

/// A call that waits for its answer.
#[derive(Debug)]
struct Waiting {
    serial: u64,
    to: usize,
    call: Call,
    tries: u32,
    what: What,
    /// The process that was called first: another one knows nothing of the request.
    process: Option<Life>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum What {
    Allocate(Side),
    Push,
    Fetch,
    Commit,
    Start,
    Copy,
    Rest,
}

/// Contexts that it changes now and then.
const CONTEXTS_MAX: usize = 16;

#[derive(Debug)]
struct Job {
    request: usize,
    tx: TxId,
    prefill: usize,
    /// None when the prefill side answers.
    decode: Option<usize>,
    /// Which engine of each of the two nodes.
    engines: (usize, usize),
    source: Option<usize>,
    /// What is still not reserved.
    reserving: u32,
    targets: BTreeMap<Side, Box<Targets>>,
    held_by_source: u32,
}

impl Job {
    fn share(&self, side: Side) -> Share {
        Share { tx: self.tx, side }
    }

    fn sides(&self) -> Vec<(Side, usize)> {
        let sides = [
            (Side::Prefill, Some(self.prefill)),
            (Side::Decode, self.decode),
            (Side::Source, self.source),
        ];
        sides.into_iter().filter_map(|(side, node)| Some((side, node?))).collect()
    }
}

impl Conductor {
    pub fn new(index: usize) -> Self {
        Conductor {
            index,
            incarnation: 0,
            starts: 0,
            up: false,
            view: ClusterView::new(Policy::default(), Profile::default()),
            shadow: ShadowIndex::new(IndexLimits::default()),
            follows: BTreeMap::new(),
            jobs: BTreeMap::new(),
            calls: BTreeMap::new(),
            contexts: Vec::new(),
        }
    }

    pub fn start(&mut self, context: &mut Context) {
        if self.up {
            return;
        }
        let starts = self.starts + 1;
        let incarnation = context.chance("conductor", self.index as u64, starts).draw() | 1;
        *self = Conductor { incarnation, starts, up: true, ..Conductor::new(self.index) };
        context.after(0, Event::Poll { conductor: self.index, incarnation });
    }

    pub fn crash(&mut self) {
        self.up = false;
    }

    /// Everything that it keeps a number of.
    pub fn kept(&self) -> BTreeMap<&'static str, usize> {
        BTreeMap::from([
            ("jobs", self.jobs.len()),
            ("calls", self.calls.len()),
            ("bookings", self.view.bookings()),
            ("instances", self.view.instances().len()),
            ("index keys", self.shadow.keys()),
        ])
    }

    // ---- following the nodes ----

    /// Asks every node what is new.
    pub fn poll(&mut self, context: &mut Context, nodes: &[Node]) {
        for node in nodes {
            let known = self.follows.get(&node.index).map(|follow| follow.incarnation);
            let running = node.running.as_ref().filter(|_| !node.unreachable);
            match running {
                Some(running) => {
                    if known.is_some_and(|known| known != running.incarnation) {
                        self.forget(node.index);
                    }
                    self.follow(context, node);
                }
                None if known.is_some() => self.forget(node.index),
                None => {}
            }
        }
        self.shadow.sweep_step();
        let (conductor, incarnation) = (self.index, self.incarnation);
        context.after(context.plan.tick_us, Event::Poll { conductor, incarnation });
    }

    fn forget(&mut self, node: usize) {
        if let Some(follow) = self.follows.remove(&node) {
            self.view.remove_instances(follow.node, &[]);
            self.shadow.retire_node(follow.node);
        }
    }

    fn follow(&mut self, context: &mut Context, node: &Node) {
        let Some(running) = &node.running else { return };
        let shadow = &mut self.shadow;
        let follow = self.follows.entry(node.index).or_insert_with(|| Follow {
            incarnation: running.incarnation,
            node: shadow.add_node().expect("there are few nodes"),
            sequence: 0,
        });
        let changes = running.blocks.changes_since(follow.sequence, 64);
        match changes.filter(|_| follow.sequence > 0) {
            Some(changes) => {
                for change in changes.changes {
                    follow.sequence += 1;
                    match change.removed {
                        true => self.shadow.remove(follow.node, &[change.key]),
                        false => {
                            self.shadow.insert(follow.node, tier(change.tier), &[change.key]);
                        }
                    }
                }
            }
            None => {
                self.shadow.retire_node(follow.node);
                let old = follow.node;
                follow.node = self.shadow.add_node().expect("there are few nodes");
                self.view.renumber_node(old, follow.node);
                let snapshot = running.blocks.snapshot();
                follow.sequence = snapshot.sequence;
                let (dram, ssd) = snapshot.keys.split_at(snapshot.dram_keys);
                self.shadow.insert(follow.node, kvasir_placement::Tier::Dram, dram);
                self.shadow.insert(follow.node, kvasir_placement::Tier::Ssd, ssd);
            }
        }
        let number = follow.node;
        let reports = running.engines.iter().map(|engine| report(node, number, engine));
        let reports: Vec<InstanceReport> = reports.collect();
        let ids: Vec<InstanceId> = reports.iter().map(|of| of.instance_id.clone()).collect();
        self.view.remove_instances(number, &ids);
        for report in reports {
            self.view.report(report, context.now_us);
        }
    }

    // ---- requests ----

    pub fn request(&mut self, context: &mut Context, request: usize, nodes: &[Node]) {
        let plan = context.plan.requests[request].clone();
        let full = plan.prompt.len() / BLOCK_TOKENS as usize;
        let keys: Vec<BlockKey> = context.truth.requests[request].keys[..full].to_vec();
        let matched = self.shadow.match_prefix(&keys);
        let asked = PlaceRequest {
            model: ModelIndex(0),
            prompt_tokens: plan.prompt.len() as u32,
            max_tokens: plan.generated_tokens,
            objectives: Objectives::NONE,
            exclude: &[],
            tie_seed: context.chance("tie", plan.id, 0).draw(),
            now_us: context.now_us,
            may_route: false,
            is_endless: false,
            steering: Steering::default(),
            chunks: &[],
        };
        let Ok(placement) = place(&self.view, &matched, &asked) else { return };
        // Each request is tried once by one conductor.
        let serial = plan.id + 1;
        self.view.book(BookingId(serial), &placement, context.now_us);
        let tx = TxId { conductor_incarnation: self.incarnation, serial };
        self.hint(context, serial, (request, &placement), &keys);
        let job = self.reserve(context, serial, (request, tx), (&placement, &keys), nodes);
        self.jobs.insert(serial, job);
        let (conductor, incarnation) = (self.index, self.incarnation);
        let give_up = Event::GiveUp { conductor, incarnation, serial };
        let deadline_us = plan.abort_after_us.unwrap_or(u64::MAX).min(plan.deadline_us);
        context.after(deadline_us, give_up);
        context.after(RENEW_US, Event::Renew { conductor, incarnation, serial });
    }

    /// Now and then a node is told first, also when nothing has to be read there; that may come late, twice or
    /// never.
    fn hint(
        &mut self,
        context: &mut Context,
        serial: u64,
        (request, placement): (usize, &Placement),
        keys: &[BlockKey],
    ) {
        let plan = context.plan.requests[request].clone();
        if !context.chance("hint", plan.id, 0).percent(30) {
            return;
        }
        let number = |node: &NodeId| node.0[1..].parse::<usize>().expect("named by its number");
        let to = number(&placement.prefill().node_id);
        let call = Call::Prefetch { namespace: plan.label(), keys: keys.to_vec() };
        self.call(context, serial, to, What::Rest, call);
    }

    /// Asks all nodes that take part, at once.
    fn reserve(
        &mut self,
        context: &mut Context,
        serial: u64,
        (request, tx): (usize, TxId),
        (placement, keys): (&Placement, &[BlockKey]),
        nodes: &[Node],
    ) -> Job {
        let plan = context.plan.requests[request].clone();
        let number = |node: &NodeId| node.0[1..].parse::<usize>().expect("named by its number");
        let endpoint = |node: usize| {
            let running = nodes[node].running.as_ref();
            running.map(|running| running.transfer.endpoint())
        };
        let prefill = number(&placement.prefill().node_id);
        let decode = (!placement.is_whole()).then(|| number(&placement.decode().node_id));
        let fetch = placement.fetch.as_ref();
        let source = fetch.map(|fetch| number(&fetch.source.node_id)).filter(|of| *of != prefill);
        let mut fetch_until_block = fetch.filter(|_| source.is_some()).map_or(0, |f| f.until_block);
        // It may believe that the source has what it has given away.
        if fetch_until_block > 0 && context.chance("belief", plan.id, 0).percent(BELIEF_PERCENT) {
            fetch_until_block = keys.len() as u32;
        }
        let left_out = usize::from(plan.headless && keys.len() > 1);
        let fetch_until_block = fetch_until_block.saturating_sub(left_out as u32);
        let wanted = |side, fetch_until_block, writer: Option<usize>| AllocateCall {
            share: Share { tx, side },
            namespace: plan.label(),
            keys: keys[left_out..].to_vec(),
            prompt_tokens: plan.prompt.len() as u32 - left_out as u32 * BLOCK_TOKENS,
            lease_ms: LEASE_MS,
            fetch_until_block,
            writer: writer.and_then(endpoint),
            is_ephemeral: plan.ephemeral,
            leaves_ssd: placement.leaves_ssd,
            is_replica: false,
        };
        let mut calls = vec![(prefill, wanted(Side::Prefill, fetch_until_block, source))];
        calls.extend(decode.map(|decode| (decode, wanted(Side::Decode, 0, Some(prefill)))));
        calls.extend(source.map(|source| {
            let mut call = wanted(Side::Source, 0, None);
            call.keys.truncate(fetch_until_block as usize);
            (source, call)
        }));
        let reserving = calls.len() as u32;
        for (to, call) in calls {
            let what = What::Allocate(call.share.side);
            self.call(context, serial, to, what, Call::Allocate(Box::new(call)));
        }
        let (targets, held_by_source) = (BTreeMap::new(), 0);
        let engines =
            [placement.prefill(), placement.decode()].map(|of| engine_of(&of.instance_id));
        let engines = engines.into();
        if decode == Some(prefill) {
            context.covers("a pair is on one node");
        }
        Job { request, tx, prefill, decode, engines, source, reserving, targets, held_by_source }
    }

    fn caller(&self, call: u64) -> Caller {
        Caller { who: Party::Conductor(self.index), incarnation: self.incarnation, call }
    }

    fn call(&mut self, context: &mut Context, serial: u64, to: usize, what: What, call: Call) {
        let number = number(serial, &call);
        let process = context.processes.get(&to).copied();
        self.calls.insert(number, Waiting { serial, to, call, tries: 0, what, process });
        self.try_call(context, number);
    }

    fn try_call(&mut self, context: &mut Context, number: u64) {
        let from = self.caller(number);
        let Some(waiting) = self.calls.get_mut(&number) else { return };
        waiting.tries += 1;
        if let Some(to) = waiting.process {
            context.send(&Event::Call { to, from, call: waiting.call.clone() });
        }
        // A fetch takes as long as it takes; it is not asked for twice.
        let slow = matches!(waiting.what, What::Fetch | What::Commit | What::Copy);
        context.after(if slow { 4 * CALL_US } else { CALL_US }, Event::Unanswered { caller: from });
    }

    pub fn unanswered(&mut self, context: &mut Context, number: u64) {
        let Some(waiting) = self.calls.get(&number) else { return };
        let lives = context.processes.get(&waiting.to).copied() == waiting.process;
        if waiting.tries < TRIES && waiting.what != What::Fetch && lives {
            context.covers("a call is tried again");
            return self.try_call(context, number);
        }
        self.take_reply(context, number, Reply::Refused("no answer".into()));
    }

    pub fn take_reply(&mut self, context: &mut Context, number: u64, reply: Reply) {
        let Some(waiting) = self.calls.get(&number) else { return };
        let (serial, what) = (waiting.serial, waiting.what);
        // That the engine has begun is its first answer; the other one is what it computes.
        if what == What::Start && matches!(reply, Reply::Done) {
            return;
        }
        self.calls.remove(&number);
        let Some(job) = self.jobs.get_mut(&serial) else { return };
        match (what, reply) {
            (What::Allocate(side), Reply::Allocated { held_blocks, targets }) => {
                if let Some(targets) = targets {
                    job.targets.insert(side, targets);
                }
                if side == Side::Source {
                    job.held_by_source = held_blocks;
                }
                job.reserving -= 1;
                if job.reserving == 0 {
                    self.begin(context, serial);
                }
            }
            (What::Allocate(Side::Source), _) => {
                job.source = None;
                job.reserving -= 1;
                if job.reserving == 0 {
                    self.begin(context, serial);
                }
            }
            (What::Fetch, reply) => {
                let valid_blocks = match reply {
                    Reply::Pushed { valid_blocks } => Some(valid_blocks),
                    _ => None,
                };
                self.fetched(context, serial, valid_blocks);
            }
            (What::Start, Reply::Answered { .. }) => self.finish(context, serial),
            (What::Allocate(_) | What::Commit | What::Push | What::Start, Reply::Refused(_)) => {
                self.give_up(context, serial);
            }
            _ => {}
        }
    }

    /// Everything is reserved: both legs begin.
    fn begin(&mut self, context: &mut Context, serial: u64) {
        let Some(job) = self.jobs.get(&serial) else { return };
        let plan = &context.plan.requests[job.request];
        if plan.mislabelled || plan.headless {
            // Whoever names another namespace, or keys that nothing begins with, is to find nothing; there
            // is nothing more to see.
            return self.give_up(context, serial);
        }
        let (request, prefill, decode, source) = (job.request, job.prefill, job.decode, job.source);
        let engines = job.engines;
        let (at_decode, at_prefill) =
            (job.targets.get(&Side::Decode).cloned(), job.targets.get(&Side::Prefill).cloned());
        let [share, decode_share, source_share] =
            [Side::Prefill, Side::Decode, Side::Source].map(|side| job.share(side));
        let pinned = job.held_by_source > 0;
        if let Some(targets) = at_decode {
            self.call(context, serial, prefill, What::Push, Call::Push { share, targets });
        }
        match (source, at_prefill) {
            (Some(source), Some(targets)) if pinned => {
                let call = Call::Push { share: source_share, targets };
                self.call(context, serial, source, What::Fetch, call);
            }
            // Nobody was ever told where to write.
            (_, Some(_)) => self.settle(context, serial, 0, source.is_none()),
            (Some(source), None) => {
                self.call(context, serial, source, What::Rest, Call::Abort { share: source_share });
            }
            (None, None) => {}
        }
        let (of_prefill, of_decode) = engines;
        self.start_leg(context, serial, (prefill, of_prefill), (share, request, decode.is_none()));
        if let Some(decode) = decode {
            let leg = (decode_share, request, true);
            self.start_leg(context, serial, (decode, of_decode), leg);
        }
    }

    fn start_leg(
        &mut self,
        context: &mut Context,
        serial: u64,
        (to, engine): (usize, usize),
        (share, request, answers): (Share, usize, bool),
    ) {
        let reply = self.caller(0);
        let mut leg = LegStart { share, engine, request, answers, reply };
        leg.reply.call = number(serial, &Call::Start { leg: leg.clone() });
        let what = if answers { What::Start } else { What::Rest };
        self.call(context, serial, to, what, Call::Start { leg });
    }

    fn fetched(&mut self, context: &mut Context, serial: u64, valid_blocks: Option<u32>) {
        let Some(job) = self.jobs.get(&serial) else { return };
        let asked = job.targets.get(&Side::Prefill).map_or(0, |targets| targets.slots.len() as u32);
        match valid_blocks {
            Some(good) if good >= asked => {}
            Some(good) => self.settle(context, serial, good, false),
            None => self.settle(context, serial, 0, true),
        }
    }

    fn settle(&mut self, context: &mut Context, serial: u64, valid_blocks: u32, source_lost: bool) {
        let Some(job) = self.jobs.get(&serial) else { return };
        let (to, share) = (job.prefill, job.share(Side::Prefill));
        let call = Call::Commit { share, valid_blocks, source_lost };
        self.call(context, serial, to, What::Commit, call);
    }

    /// It is answered.
    fn finish(&mut self, context: &mut Context, serial: u64) {
        let Some(job) = self.jobs.remove(&serial) else { return };
        self.calls.retain(|_, waiting| waiting.serial != serial);
        self.view.unbook(BookingId(serial), Some(1), context.now_us);
        let plan = context.plan.requests[job.request].clone();
        let full = plan.prompt.len() / BLOCK_TOKENS as usize;
        if full == 0 {
            return;
        }
        let (namespace, tenant) = (plan.namespace(), Tenant(plan.tenant));
        let to = job.decode.filter(|_| plan.id.is_multiple_of(2)).unwrap_or(job.prefill);
        let mut chance = context.chance("context", plan.id, 0);
        // Often it is the beginning of others, of which some end where another one does.
        let mut blocks = || match chance.percent(60) {
            true => full,
            false => 1 + chance.below(full),
        };
        if let Some(ttl_ms) = plan.keep_ms {
            let keys = context.truth.requests[job.request].keys[..blocks()].to_vec();
            let last = *keys.last().expect("one block at least");
            let term = Term::Ttl { ttl_ms };
            let two = context.chance("copies", plan.id, 0).percent(COPIED_PERCENT);
            let copies = if two { 2 } else { 1 };
            let call = Call::Keep { namespace, keys, tenant, term, copies, whole: false };
            self.call(context, serial, to, What::Rest, call);
            if self.contexts.len() == CONTEXTS_MAX {
                self.contexts.remove(0);
            }
            self.contexts.push((to, ContextName { tenant, namespace, last }));
        } else if !self.contexts.is_empty() && chance.percent(60) {
            let (mut to, name) = self.contexts[chance.below(self.contexts.len())];
            // It may have moved.
            if chance.percent(30) {
                to = chance.below(context.plan.nodes.len());
            }
            let ttl_ms = chance.percent(50).then(|| chance.between(200, 100_000));
            self.call(context, serial, to, What::Rest, Call::Change { context: name, ttl_ms });
        }
        let mut chance = context.chance("replicate", plan.id, 0);
        if chance.percent(REPLICATE_PERCENT) {
            let keys = context.truth.requests[job.request].keys[..full].to_vec();
            let nodes = context.plan.nodes.len();
            let other = (to + 1 + chance.below(nodes - 1)) % nodes;
            let call = Call::Replicate { namespace, keys, to: other };
            self.call(context, serial, to, What::Copy, call);
        }
    }

    pub fn give_up(&mut self, context: &mut Context, serial: u64) {
        let Some(job) = self.jobs.remove(&serial) else { return };
        self.calls.retain(|_, waiting| waiting.serial != serial);
        self.view.unbook(BookingId(serial), None, context.now_us);
        for (side, node) in job.sides() {
            let share = job.share(side);
            self.call(context, serial, node, What::Rest, Call::Abort { share });
        }
    }

    pub fn renew(&mut self, context: &mut Context, serial: u64) {
        let Some(job) = self.jobs.get(&serial) else { return };
        let (conductor, incarnation) = (self.index, self.incarnation);
        for (side, to) in job.sides() {
            let call = Call::Renew { shares: vec![job.share(side)], lease_ms: LEASE_MS };
            let from = self.caller(0);
            if let Some(to) = context.processes.get(&to).copied() {
                context.send(&Event::Call { to, from, call });
            }
        }
        context.after(RENEW_US, Event::Renew { conductor, incarnation, serial });
    }
}

/// Names a call among those of its request, so that it has the same name whatever else is asked.
fn number(serial: u64, call: &Call) -> u64 {
    let kind = match call {
        Call::Allocate(call) => call.share.side as u64,
        Call::Abort { share } => 4 + share.side as u64,
        Call::Push { share, .. } => 8 + share.side as u64,
        Call::Start { leg } => 12 + leg.share.side as u64,
        Call::Commit { .. } => 16,
        Call::Keep { .. } => 17,
        Call::Renew { .. } => 18,
        Call::Prefetch { .. } => 19,
        Call::Change { .. } => 20,
        Call::Replicate { .. } => 21,
        Call::Describe => 22,
        Call::Holds { .. } => 23,
    };
    serial * 32 + kind
}

fn tier(tier: kvasir_blocks::Tier) -> kvasir_placement::Tier {
    match tier {
        kvasir_blocks::Tier::Vram => kvasir_placement::Tier::Vram,
        kvasir_blocks::Tier::Dram => kvasir_placement::Tier::Dram,
        kvasir_blocks::Tier::Ssd => kvasir_placement::Tier::Ssd,
    }
}

/// Which engine of its node an instance is.
fn engine_of(instance: &InstanceId) -> usize {
    let (_, index) = instance.0.split_once('.').expect("named by its node and its number");
    index.parse().expect("a number")
}

fn report(node: &Node, number: NodeIndex, engine: &Engine) -> InstanceReport {
    let (epoch, running) = (engine.epoch.0, engine.tasks() as u32);
    let counts = node.running.as_ref().map(|running| running.blocks.counts()).unwrap_or_default();
    let incarnation = node.running.as_ref().map_or(0, |running| running.incarnation);
    let draining = node.running.as_ref().is_some_and(|running| running.blocks.is_draining());
    InstanceReport {
        instance_id: InstanceId::from(format!("i{}.{}", node.index, engine.index).as_str()),
        instance_type: "".into(),
        node: number,
        node_id: NodeId::from(format!("n{}", node.index).as_str()),
        attachment: (incarnation, epoch),
        role: match node.plan.engines[engine.index] {
            RolePlan::Prefill => Role::Prefill,
            RolePlan::Decode => Role::Decode,
            RolePlan::Both => Role::Both,
        },
        model: ModelSpec {
            name: Arc::from("simulated"),
            fingerprint: [7; 32],
            kv_dtype: Arc::from("u8"),
            vocab_size: u32::MAX,
            context_tokens: 1_000,
            block_tokens: BLOCK_TOKENS,
            block_bytes: SLOT_BYTES as u64,
            layout_hash: 1,
            routed: None,
        },
        running_requests_max: 16,
        slots_total: counts.slots,
        slots_available: counts.free + counts.evictable,
        current_role: None,
        ssd_reads: SsdReads::default(),
        draining,
        load: ReportedLoad { running, waiting: 0, waiting_prompt_tokens: 0 },
    }
}
