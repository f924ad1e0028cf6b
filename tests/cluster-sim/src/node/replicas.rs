//! Copies on other nodes and drains, as `store-node/src/node/owner/replicas.rs` has them, and the calls of
//! copies, as `store-node/src/node/copier.rs` makes them. What is copied, where to and when a copy counts is
//! the core's.

use std::collections::BTreeMap;

use kvasir_blocks::moving::copying::{CopyAnswer, CopyStep, Copying};
use kvasir_blocks::{
    AbortOutcome, AbortReason, ContextName, CopiedContext, CopyCause, CopyError, CopyPlan,
    DrainRequest, DrainView, HeldCopies, Peer, PeerCopies, PeerView,
};
use kvasir_proto::{BlockKey, Namespace, Share, Side, TxId};

use super::Running;
use crate::calls::{AllocateCall, CALL_US, Call, Caller, Party, Reply, Targets, Term};
use crate::content::BLOCK_TOKENS;
use crate::context::{Context, Event};
use crate::seen::Seen;

/// How often it is looked which nodes could take blocks, while that is of use.
const LOOK_MS: u64 = 20;
/// How often the others are asked for contexts that are kept there too, and for how many.
const CHECK_MS: u64 = 60;
const CHECKED_MAX: usize = 16;
/// How long a caller waits for copies.
const AWAITED_US: u64 = 600_000;
/// Blocks that one transaction copies.
const PIECE_BLOCKS: u32 = 3;
/// Short, so that it is renewed on the way now and then.
const LEASE_MS: u64 = 30;
const RENEW_US: u64 = 10_000;
/// How long a call is waited for that waits for a disk.
const KEEP_US: u64 = 480_000;
/// How long after a node has said that it has drained it may be taken away.
const LEAVES_US: u64 = 40_000;
/// Where the serials of copies begin; hints have others.
const SERIALS: u64 = 1 << 32;

/// One copy that is being made.
#[derive(Debug)]
struct Job {
    plan: CopyPlan,
    copying: Copying,
    tx: TxId,
    targets: Option<Box<Targets>>,
    /// The call whose answer is the answer to its step.
    call: u64,
    /// Somebody waited for it when it began.
    awaited: bool,
}

/// Somebody who waits until a context has its copies.
#[derive(Debug)]
struct Awaited {
    name: ContextName,
    /// What is known counts once the others have been asked so often.
    asks: u64,
    until_us: u64,
    kept_blocks: u32,
    from: Caller,
}

/// What a call of this node was about.
#[derive(Debug)]
enum Asked {
    Describe(usize),
    Holds(usize),
    Step(u64),
    Renewal(u64, TxId),
}

/// What is remembered of copies around the core.
#[derive(Debug, Default)]
pub(super) struct Replication {
    looked_ms: Option<u64>,
    /// How many have not answered, and what the others are.
    looking: Option<(usize, Vec<PeerView>)>,
    checked_ms: Option<u64>,
    /// Contexts that the others are asked for, how many have not answered, and what the others have.
    checking: Option<(Vec<CopiedContext>, usize, Vec<PeerCopies>)>,
    /// How often they were.
    asks: u64,
    awaited: Vec<Awaited>,
    jobs: BTreeMap<u64, Job>,
    replies: BTreeMap<u64, Caller>,
    calls: BTreeMap<u64, Asked>,
    next_call: u64,
    next_serial: u64,
    /// What the drain was found to be when it was last said.
    drained: bool,
    leaves: bool,
}

impl Replication {
    fn knows(&self, asks: u64) -> bool {
        self.asks > asks || (self.asks == asks && self.checking.is_none())
    }

    /// Steps that have not been answered yet.
    pub(super) fn copies(&self) -> usize {
        let steps = self.calls.len() - self.questions();
        self.jobs.len() + self.replies.len() + steps + self.awaited.len()
    }

    /// What the others are asked again and again: what they keep, for as long as there are contexts, and what they
    /// could take, for as long as there is something that nobody has taken.
    pub(super) fn questions(&self) -> usize {
        let is_question = |asked: &&Asked| matches!(asked, Asked::Holds(_) | Asked::Describe(_));
        self.calls.values().filter(is_question).count()
    }
}

pub(super) fn peer(node: usize) -> Peer {
    Peer(node.to_string().into())
}

fn number(peer: &Peer) -> usize {
    peer.0.parse().expect("named by its number")
}

impl Running {
    /// Begins the copies that are due. What they need to know of other nodes is asked before.
    pub(super) fn plan_copies(&mut self, context: &mut Context) {
        self.look_for_copies(context);
        self.look_at_peers(context);
        while let Some(plan) = self.blocks.poll_copy(context.now_ms()) {
            self.begin_copy(context, plan);
        }
        let drained = self.drain_view().drained;
        if drained && !self.replication.drained {
            self.say_drained(context);
        }
        self.replication.drained = drained;
        self.answer_awaited(context);
    }

    /// The context is durable here, and its caller waits until it is elsewhere too.
    pub(super) fn await_copies(
        &mut self,
        context: &mut Context,
        name: ContextName,
        kept_blocks: u32,
        from: Caller,
    ) {
        let until_us = context.now_us + AWAITED_US;
        let asks = self.replication.asks + 1;
        self.replication.awaited.push(Awaited { name, asks, until_us, kept_blocks, from });
        self.replication.checked_ms = None;
        self.plan_copies(context);
    }

    fn look_for_copies(&mut self, context: &mut Context) {
        let now_ms = context.now_ms();
        let due = self.replication.checked_ms.is_none_or(|at_ms| now_ms >= at_ms + CHECK_MS);
        if self.replication.checking.is_some() || !due {
            return;
        }
        self.replication.checked_ms = Some(now_ms);
        let awaited = self.replication.awaited.iter();
        let awaited: Vec<CopiedContext> =
            awaited.filter_map(|of| self.blocks.copied_context(&of.name)).collect();
        let mut contexts = self.blocks.copied_contexts(CHECKED_MAX);
        contexts.retain(|of| !awaited.contains(of));
        contexts.extend(awaited);
        if contexts.is_empty() {
            return;
        }
        let others: Vec<usize> =
            (0..context.plan.nodes.len()).filter(|node| *node != self.at.node).collect();
        self.replication.asks += 1;
        self.replication.checking = Some((contexts.clone(), others.len(), Vec::new()));
        for node in others {
            let call = Call::Holds { contexts: contexts.clone() };
            self.call_peer(context, node, (Asked::Holds(node), CALL_US), call);
        }
    }

    fn held(&mut self, context: &mut Context, node: usize, reply: Reply) {
        let Some((_, waiting, seen)) = &mut self.replication.checking else { return };
        *waiting -= 1;
        let answer = match reply {
            Reply::Holds(held) => Some(held),
            _ => None,
        };
        seen.push(PeerCopies { peer: peer(node), answer });
        if *waiting == 0
            && let Some((contexts, _, seen)) = self.replication.checking.take()
        {
            self.blocks.copies_seen(context.now_ms(), self.incarnation, &contexts, &seen);
            self.make_awaited();
            self.plan_copies(context);
        }
    }

    fn is_awaited(&self, plan: &CopyPlan) -> bool {
        self.replication.awaited.iter().any(|awaited| Some(&awaited.name.last) == plan.keys.last())
    }

    pub(super) fn make_awaited(&mut self) {
        let is_known = |awaited: &&Awaited| self.replication.knows(awaited.asks);
        for awaited in self.replication.awaited.iter().filter(is_known) {
            self.blocks.make_copies(&awaited.name);
        }
    }

    fn answer_awaited(&mut self, context: &mut Context) {
        for awaited in std::mem::take(&mut self.replication.awaited) {
            let Awaited { name, asks, until_us, kept_blocks, from } = awaited;
            let is_known = self.replication.knows(asks);
            let copied = self.blocks.copied_context(&name);
            let reply = match (copied, self.blocks.copies_lacking(&name)) {
                (None, _) => Reply::Refused("it was dropped".into()),
                (Some(CopiedContext { expires_unix_ms, .. }), 0) if is_known => {
                    let (node, last) = (self.at.node, name.last);
                    context.covers("a context is kept on two nodes");
                    context.see(Seen::CopiesKept { node, last, expires_unix_ms });
                    Reply::Kept { kept_blocks }
                }
                _ if context.now_us >= until_us => Reply::Refused("copies are lacking".into()),
                _ => {
                    self.replication.awaited.push(awaited);
                    continue;
                }
            };
            self.answer(context, from, reply);
        }
    }

    /// Another node asks which of these are kept here.
    pub(super) fn holds(&self, contexts: &[CopiedContext]) -> Reply {
        if self.ssd.as_ref().is_some_and(|ssd| !ssd.is_up()) {
            return Reply::Refused("the SSD cannot be used".into());
        }
        let holds = contexts.iter().map(|of| self.blocks.keeps_copy(of)).collect();
        Reply::Holds(HeldCopies { incarnation: self.incarnation, holds })
    }

    fn say_drained(&mut self, context: &mut Context) {
        let at = self.at;
        context.see(Seen::Drained { at });
        if !std::mem::replace(&mut self.replication.leaves, true) {
            let us = context.chance("leave", at.node as u64, 0).between(1, LEAVES_US);
            context.after(us, Event::Leaves { at });
        }
    }

    fn drain_view(&self) -> DrainView {
        // Its transaction is this node's own.
        self.blocks.drain_view(|share| share.tx.conductor_incarnation == self.incarnation)
    }

    /// Somebody who operates the cluster wants to take this node away.
    pub fn begin_drain(&mut self, context: &mut Context) {
        let at = self.at;
        let mut random = context.chance("drain", at.node as u64, at.life.into());
        let nodes = context.plan.nodes.len();
        let target = (at.node + 1 + random.below(nodes - 1)) % nodes;
        let targets = if random.percent(20) { vec![peer(target)] } else { Vec::new() };
        let (hot_blocks_max, has_ssd) = (random.between(0, 12) as u32, self.ssd.is_some());
        context.see(Seen::DrainBegan { at });
        self.replication.looked_ms = None;
        let request = DrainRequest { targets, hot_blocks_max, has_ssd };
        self.blocks.drain(context.now_ms(), request);
        self.plan_copies(context);
        self.run_actions(context);
    }

    /// It is to stay. Answers false when it has said that it has drained, and goes.
    pub fn cancel_drain(&mut self, context: &mut Context) -> bool {
        if self.replication.leaves {
            return false;
        }
        if self.blocks.is_draining() {
            context.covers("a drain is given up");
            self.blocks.stop_draining();
            context.see(Seen::DrainStopped { at: self.at });
        }
        true
    }

    fn look_at_peers(&mut self, context: &mut Context) {
        let now_ms = context.now_ms();
        let due = self.replication.looked_ms.is_none_or(|at_ms| now_ms >= at_ms + LOOK_MS);
        if self.replication.looking.is_some() || !due || !self.blocks.wants_peers() {
            return;
        }
        self.replication.looked_ms = Some(now_ms);
        let others: Vec<usize> =
            (0..context.plan.nodes.len()).filter(|node| *node != self.at.node).collect();
        self.replication.looking = Some((others.len(), Vec::new()));
        for node in others {
            self.call_peer(context, node, (Asked::Describe(node), CALL_US), Call::Describe);
        }
    }

    fn described(&mut self, context: &mut Context, node: usize, reply: &Reply) {
        let own = self.incarnation;
        let Some((waiting, seen)) = &mut self.replication.looking else { return };
        *waiting -= 1;
        if let Reply::Described { incarnation, draining: false, available, keeps } = *reply
            && incarnation != own
        {
            seen.push(PeerView { peer: peer(node), available, keeps });
        }
        if *waiting == 0 {
            let seen = std::mem::take(seen);
            self.replication.looking = None;
            self.blocks.peers_seen(context.now_ms(), seen);
            self.make_awaited();
            self.plan_copies(context);
        }
    }

    /// What another node is told of this one.
    pub(super) fn describe(&self, context: &Context) -> Reply {
        let ssd_works = self.blocks.ssd_is_usable(context.now_ms());
        Reply::Described {
            incarnation: self.incarnation,
            draining: self.blocks.is_draining(),
            available: self.blocks.available(),
            keeps: ssd_works && self.ssd.as_ref().is_some_and(super::Ssd::is_up),
        }
    }

    /// Many nodes may want the same from this one.
    pub(super) fn note_asked(
        &mut self,
        context: &Context,
        share: Share,
        (namespace, held): (Namespace, &[BlockKey]),
    ) {
        let is_own = share.tx.conductor_incarnation == self.incarnation;
        if share.side == Side::Source && !is_own {
            self.blocks.asked_for(context.now_ms(), namespace, held);
        }
    }

    pub(super) fn replicate(
        &mut self,
        context: &mut Context,
        from: Caller,
        (namespace, keys, to): (Namespace, &[BlockKey], usize),
    ) {
        match self.blocks.change_replica(namespace, keys, peer(to)) {
            Ok((copy, _)) => {
                self.replication.replies.insert(copy, from);
                self.plan_copies(context);
            }
            Err(error) => self.answer(context, from, Reply::Refused(error.to_string())),
        }
    }

    // ---- one copy ----

    fn begin_copy(&mut self, context: &mut Context, plan: CopyPlan) {
        let copy = plan.copy;
        let copying = Copying::new(&plan, BLOCK_TOKENS, PIECE_BLOCKS);
        let (tx, awaited) = (self.next_tx(), self.is_awaited(&plan));
        let job = Job { plan, copying, tx, targets: None, call: 0, awaited };
        self.replication.jobs.insert(copy, job);
        self.next_step(context, copy);
    }

    fn next_tx(&mut self) -> TxId {
        self.replication.next_serial += 1;
        let serial = SERIALS + self.replication.next_serial;
        TxId { conductor_incarnation: self.incarnation, serial }
    }

    fn next_step(&mut self, context: &mut Context, copy: u64) {
        let Some(job) = self.replication.jobs.get(&copy) else { return };
        let (tx, to) = (job.tx, number(&job.plan.to));
        let (namespace, keys) = (job.plan.namespace, job.plan.keys.clone());
        let source = Share { tx, side: Side::Source };
        let share = Share { tx, side: Side::Prefill };
        let step = (Asked::Step(copy), CALL_US);
        match job.copying.step() {
            CopyStep::Reserve { blocks, prompt_tokens } => {
                let tx = self.next_tx();
                if let Some(job) = self.replication.jobs.get_mut(&copy) {
                    (job.tx, job.targets) = (tx, None);
                }
                let share = Share { tx, side: Side::Prefill };
                let mut call = allocation(share, namespace, &keys[..blocks as usize]);
                (call.prompt_tokens, call.fetch_until_block) = (prompt_tokens, blocks);
                call.writer = Some(self.transfer.endpoint());
                call.is_replica = true;
                self.call_peer(context, to, step, Call::Allocate(Box::new(call)));
            }
            CopyStep::Pin { blocks } => {
                let call = allocation(source, namespace, &keys[..blocks as usize]);
                let answer = match self.allocate(context, &call) {
                    Reply::Refused(why) => CopyAnswer::Failed(CopyError::NotHere(why)),
                    _ => CopyAnswer::Pinned,
                };
                self.run_actions(context);
                self.step_done(context, copy, answer);
            }
            CopyStep::Push => {
                let job = self.replication.jobs.get_mut(&copy);
                let Some(targets) = job.and_then(|job| job.targets.take()) else { return };
                let from = self.asks(Asked::Step(copy));
                context.after(RENEW_US, Event::RenewCopy { at: self.at, copy, tx });
                self.push(context, source, *targets, from);
            }
            CopyStep::Commit { valid_blocks } => {
                let call = Call::Commit { share, valid_blocks, source_lost: false };
                self.call_peer(context, to, (Asked::Step(copy), KEEP_US), call);
            }
            CopyStep::Keep(mark) => {
                let (tenant, expires_unix_ms) = (mark.tenant, mark.expires_unix_ms);
                let term = Term::Until { expires_unix_ms, created_unix_ms: mark.created_unix_ms };
                let copies = mark.copies;
                let call = Call::Keep { namespace, keys, tenant, term, copies, whole: true };
                self.call_peer(context, to, (Asked::Step(copy), KEEP_US), call);
            }
            CopyStep::Abort => {
                self.abort_share(context, source);
                self.call_peer(context, to, step, Call::Abort { share });
            }
            CopyStep::End(result) => self.copied(context, copy, result),
        }
    }

    fn step_done(&mut self, context: &mut Context, copy: u64, answer: CopyAnswer) {
        if let Some(job) = self.replication.jobs.get_mut(&copy) {
            job.copying.answer(answer);
            self.next_step(context, copy);
        }
    }

    fn copied(&mut self, context: &mut Context, copy: u64, result: Result<(), CopyError>) {
        let Some(job) = self.replication.jobs.remove(&copy) else { return };
        context.covers(match (job.plan.cause, &result) {
            (CopyCause::Asked, Ok(())) => "a copy that was asked for is made",
            (CopyCause::Hot, Ok(())) => "a hot chain is copied",
            (CopyCause::Context, Ok(())) if job.awaited => "a copy of a context is made",
            (CopyCause::Context, Ok(())) => "a copy of a context is made that nobody waits for",
            (CopyCause::DrainKept, Ok(())) => "a kept chain moves",
            (CopyCause::DrainHot, Ok(())) => "a chain moves that nobody was promised",
            (_, Err(CopyError::PeerLost { .. })) => "the receiver of a copy is lost",
            (_, Err(CopyError::NotHere(_))) => "a copy is not sent whole",
            (_, Err(CopyError::NoRoom { .. })) => "a copy is not kept",
            (_, Err(CopyError::Refused { .. })) => "a copy is refused",
        });
        let blocks = job.plan.keys.len() as u32;
        self.blocks.copied(context.now_ms(), copy, result.clone());
        if let Some(from) = self.replication.replies.remove(&copy) {
            let reply = result.map(|()| Reply::Replicated { blocks });
            let reply = reply.unwrap_or_else(|error| Reply::Refused(error.to_string()));
            self.answer(context, from, reply);
        }
        self.make_awaited();
        self.plan_copies(context);
    }

    pub(super) fn abort_share(&mut self, context: &mut Context, share: Share) {
        let reason = AbortReason::Asked(String::new());
        let outcome = self.blocks.abort(context.now_ms(), share, reason);
        if outcome == AbortOutcome::Tombstoned {
            context.covers("a tombstone is left");
            context.see(Seen::Tombstoned { at: self.at, share });
        }
        self.run_actions(context);
    }

    /// Both leases of a copy are renewed while it is being pushed.
    pub fn renew_copy(&mut self, context: &mut Context, copy: u64, tx: TxId) {
        let Some(job) = self.pushing(copy, tx) else { return };
        let to = number(&job.plan.to);
        let shares = vec![Share { tx, side: Side::Prefill }];
        let call = Call::Renew { shares, lease_ms: LEASE_MS };
        self.call_peer(context, to, (Asked::Renewal(copy, tx), CALL_US), call);
    }

    fn pushing(&self, copy: u64, tx: TxId) -> Option<&Job> {
        let job = self.replication.jobs.get(&copy)?;
        (job.tx == tx && job.copying.step() == CopyStep::Push).then_some(job)
    }

    fn renewed(&mut self, context: &mut Context, copy: u64, tx: TxId, reply: &Reply) {
        let Some(job) = self.pushing(copy, tx) else { return };
        let why = "it has given the copy up".to_owned();
        let lost = CopyError::PeerLost { peer: job.plan.to.clone(), why };
        let failed = match reply {
            Reply::Renewed { all: true } => {
                let share = Share { tx, side: Side::Source };
                let ours = self.renew(context, share, LEASE_MS);
                (!ours).then(|| CopyError::NotHere("its share here has ended".into()))
            }
            _ => Some(lost),
        };
        match failed {
            Some(error) => {
                context.covers("a copy is given up on the way");
                self.step_done(context, copy, CopyAnswer::Failed(error));
            }
            None => {
                context.after(RENEW_US, Event::RenewCopy { at: self.at, copy, tx });
            }
        }
    }

    // ---- calls ----

    fn asks(&mut self, asked: Asked) -> Caller {
        self.replication.next_call += 1;
        let call = self.replication.next_call;
        if let Asked::Step(copy) = &asked
            && let Some(job) = self.replication.jobs.get_mut(copy)
        {
            job.call = call;
        }
        self.replication.calls.insert(call, asked);
        Caller { who: Party::Node(self.at.node), incarnation: self.incarnation, call }
    }

    /// Of the process that is there now; nothing is tried again.
    fn call_peer(
        &mut self,
        context: &mut Context,
        node: usize,
        (asked, wait_us): (Asked, u64),
        call: Call,
    ) {
        let from = self.asks(asked);
        if let Some(to) = context.processes.get(&node).copied() {
            context.send(&Event::Call { to, from, call });
        }
        context.after(wait_us, Event::Unanswered { caller: from });
    }

    /// Another node has answered, or nobody has.
    pub fn take_reply(&mut self, context: &mut Context, call: u64, reply: Option<Reply>) {
        let Some(asked) = self.replication.calls.remove(&call) else { return };
        let is_lost = reply.is_none();
        let reply = reply.unwrap_or_else(|| Reply::Refused("no answer in time".into()));
        match asked {
            Asked::Describe(node) => self.described(context, node, &reply),
            Asked::Holds(node) => self.held(context, node, reply),
            Asked::Renewal(copy, tx) => self.renewed(context, copy, tx, &reply),
            Asked::Step(copy) => {
                let job = self.replication.jobs.get_mut(&copy);
                if let Some(job) = job.filter(|job| job.call == call) {
                    let answer = job.understand(reply, is_lost);
                    self.step_done(context, copy, answer);
                }
            }
        }
        self.run_actions(context);
    }
}

impl Job {
    /// What a reply says of the step that it answers.
    fn understand(&mut self, reply: Reply, is_lost: bool) -> CopyAnswer {
        let peer = self.plan.to.clone();
        match (self.copying.step(), reply) {
            (CopyStep::Abort, _) => CopyAnswer::Aborted,
            (CopyStep::Push, Reply::Refused(why)) => CopyAnswer::Failed(CopyError::NotHere(why)),
            (_, Reply::Allocated { targets, .. }) => {
                self.targets = targets;
                let slots = self.targets.as_ref().map(|targets| targets.slots.len() as u32);
                CopyAnswer::Reserved { targets: slots }
            }
            (_, Reply::Pushed { valid_blocks }) => CopyAnswer::Pushed { valid_blocks },
            (_, Reply::Committed { held_blocks }) => CopyAnswer::Committed { held_blocks },
            (_, Reply::Kept { kept_blocks }) => CopyAnswer::Kept { kept_blocks },
            (_, Reply::Refused(why)) if is_lost => {
                CopyAnswer::Failed(CopyError::PeerLost { peer, why })
            }
            (_, reply) => {
                CopyAnswer::Failed(CopyError::Refused { peer, why: format!("{reply:?}") })
            }
        }
    }
}

/// Of a copy, on either side.
fn allocation(share: Share, namespace: Namespace, keys: &[BlockKey]) -> AllocateCall {
    AllocateCall {
        share,
        namespace,
        keys: keys.to_vec(),
        prompt_tokens: 0,
        lease_ms: LEASE_MS,
        fetch_until_block: 0,
        writer: None,
        is_ephemeral: false,
        leaves_ssd: false,
        is_replica: false,
    }
}
