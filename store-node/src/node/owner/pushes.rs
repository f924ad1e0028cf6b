//! Pages that leave: arming a push, issuing what is due, and seeing to its end.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicUsize, Ordering};
use std::time::Duration;

use kvasir_blocks::moving::PushName;
use kvasir_blocks::moving::leaving::Leaving;
use kvasir_blocks::moving::pages::Pages;
use kvasir_blocks::moving::peer_message::PeerMessage;
use kvasir_blocks::moving::push::{Fault, Group, Grouping, Push};
use kvasir_blocks::moving::tail;
use kvasir_blocks::{AbortReason, ShareError};
use kvasir_proto::{Namespace, Share, Side, SlotIndex, SlotLayout, v1};
use kvasir_transfer::{
    Completion, Endpoint, Outcome, PageSide, Refusal, RegionDesc, Source, Verify, WireError, Write,
    WriteError, WritePaged,
};

use super::Owner;
use crate::clock;
use crate::layer_log::LayerLine;
use crate::node::WRITES_MAX;
use crate::node::arena::Arena;
use crate::node::command::{Refused, Reply};
use crate::node::inbox::{End, GroupEnd, Post};
use crate::node::leg::{Leg, Outgoing, Target};

/// None: a write that waits behind others, or for a slow wire, has not failed. A push ends by a
/// stop (its lease runs out, it is aborted, the receiver asks) or with its peer, which the transfer
/// engine gives up when it owes an answer and shows no life.
const WRITE_DEADLINE: Duration = Duration::MAX;

impl Owner {
    /// Names the targets of a push. On the source side the answer is given when it is over.
    pub(super) fn push(&mut self, request: v1::TxPushRequest, reply: Reply<v1::TxPushReply>) {
        match self.arm(&request) {
            Ok(Armed::Now(share)) => {
                if share.side == Side::Source {
                    let leg = self.legs.get_mut(&share);
                    if let Some(outgoing) = leg.and_then(|leg| leg.outgoing.as_mut()) {
                        outgoing.reply = Some(reply);
                    }
                } else {
                    let _ = reply.send(Ok(v1::TxPushReply::default()));
                }
                self.pump(share);
            }
            Ok(Armed::Nothing) => drop(reply.send(Ok(v1::TxPushReply::default()))),
            Err(refused) => drop(reply.send(Err(refused))),
        }
    }

    pub(super) fn arm(&mut self, request: &v1::TxPushRequest) -> Result<Armed, Refused> {
        let share = Share::from_wire(request.tx, request.side)?;
        let targets = request.targets.as_ref();
        let targets =
            targets.ok_or_else(|| Refused::Invalid("field `targets` is missing".into()))?;
        if share.side == Side::Decode {
            return Err(Refused::Invalid("a decode share cannot push".into()));
        }
        let leg = self.legs.get(&share).ok_or_else(|| Refused::from(ShareError::Unknown))?;
        let target = self.target(share, targets, leg)?;
        if let Some(outgoing) = &leg.outgoing {
            if outgoing.target.name == target.name && share.side == Side::Prefill {
                return Ok(Armed::Nothing);
            }
            return Err(Refused::Precondition("the share already has a push".into()));
        }
        if share.side == Side::Prefill && !self.config.push_enabled {
            return Ok(Armed::Nothing);
        }
        if self.sent.is_stopped(target.name) {
            return Err(Refused::Ended("the receiver stopped this push".into()));
        }
        if !leg.reading {
            self.blocks.read_begin(share)?;
        }
        let leg = self.legs.get_mut(&share).expect("it was there above");
        leg.reading = true;
        let mut push = match share.side {
            Side::Source => {
                // With fewer than are wanted the receiver never counts it as whole.
                let held = leg.held_pages.clamp(target.first_page, target.pages().end);
                Push::new(Grouping::Pages, target.first_page..held)
            }
            Side::Prefill | Side::Decode => Push::new(Grouping::Layers, target.pages()),
        };
        match share.side {
            Side::Source => push.give_tail(Vec::new()),
            Side::Prefill | Side::Decode => {
                if let Some(engine) = leg.tail.take() {
                    push.give_tail(engine);
                }
            }
        }
        leg.outgoing = Some(Outgoing {
            id: self.next_push,
            leaving: Leaving::new(target.name, target.pages(), push),
            target,
            reply: None,
        });
        self.next_push += 1;
        Ok(Armed::Now(share))
    }

    /// Reads and checks what another node may have written into the request.
    fn target(
        &self,
        share: Share,
        targets: &v1::WriteTargets,
        leg: &Leg,
    ) -> Result<Target, Refused> {
        let wrong = |field: &str, error: WireError| {
            Refused::Invalid(format!("field `targets.{field}`: {error}"))
        };
        let endpoint = Endpoint::from_bytes(&targets.endpoint).map_err(|e| wrong("endpoint", e))?;
        let slots_region =
            RegionDesc::from_bytes(&targets.slots_region).map_err(|e| wrong("slots_region", e))?;
        let tail_region =
            RegionDesc::from_bytes(&targets.tail_region).map_err(|e| wrong("tail_region", e))?;
        let namespace = Namespace::try_from(targets.namespace.as_slice())?;
        self.blocks.may_go_to(share, namespace)?;
        let layout = leg.pages.layout();
        let theirs = targets.layout.as_ref().map(SlotLayout::try_from);
        if !theirs.is_some_and(|theirs| theirs.is_ok_and(|theirs| theirs == **layout)) {
            let why = "the receiver's slots have another layout";
            return Err(Refused::Precondition(why.into()));
        }
        let pages = u32::try_from(targets.slots.len()).unwrap_or(u32::MAX);
        let end = targets.first_page.checked_add(pages);
        let fits = match share.side {
            // All that the prompt has, so that decoding can begin.
            Side::Prefill | Side::Decode => end == Some(leg.pages.count()),
            Side::Source => end.is_some(),
        };
        let count = u64::from(pages) * layout.runs_per_page() as u64 + 1;
        if !fits || count != u64::from(targets.expected_count) {
            return Err(Refused::Invalid("the targets do not match the share's pages".into()));
        }
        let unreachable = |error: kvasir_transfer::ConnectError| {
            Refused::Precondition(format!("cannot reach the receiver: {error}"))
        };
        Ok(Target {
            tx: share.tx,
            peer: self.transfer.connect(&endpoint).map_err(unreachable)?,
            name: PushName { receiver: endpoint.incarnation, imm: targets.imm },
            verifies: self.transfer.verifies(&endpoint),
            endpoint,
            slots_region,
            first_page: targets.first_page,
            slots: targets.slots.iter().copied().map(SlotIndex).collect(),
            tail_region,
            tail_offset_bytes: targets.tail_offset_bytes,
            tail_bytes_max: targets.tail_bytes_max,
        })
    }

    /// Issues what is due of one push.
    pub(super) fn pump(&mut self, share: Share) {
        while let Some(leg) = self.legs.get_mut(&share) {
            let Some(outgoing) = &mut leg.outgoing else { return };
            if self.writes_in_flight >= WRITES_MAX {
                self.push_waits = true;
                break;
            }
            let Some(group) = outgoing.leaving.push_mut().next_group(&leg.pages) else { break };
            self.issue(share, group);
        }
        self.issue_tail(share);
        self.settle_push(share);
    }

    pub(super) fn pump_all(&mut self) {
        self.push_waits = false;
        let waiting = |(share, leg): (&Share, &Leg)| {
            leg.outgoing
                .as_ref()
                .is_some_and(|outgoing| !outgoing.leaving.is_settled())
                .then_some(*share)
        };
        let shares: Vec<Share> = self.legs.iter().filter_map(waiting).collect();
        for share in shares {
            self.pump(share);
        }
    }

    fn issue(&mut self, share: Share, group: Group) {
        let is_sound = self.hash_for_wire(share, &group);
        let leg = &self.legs[&share];
        let outgoing = leg.outgoing.as_ref().expect("the group is of its push");
        let writes = paged_writes(leg, outgoing, &group, &self.arena_region);
        let count = writes.iter().map(|write| write.source_pages.indices.len()).sum();
        self.writes_in_flight += count;
        let end = GroupEnd {
            share,
            push: outgoing.id,
            group,
            writes: count,
            issued_us: clock::now_us(),
            landed_us: 0,
            outcome: Ok(()),
        };
        if !is_sound {
            // Nothing of it is sent: it is as if the receiver had refused it.
            let outcome = Err(WriteError::Corrupt);
            self.writes_in_flight -= count;
            return self.post.end(End::Group(GroupEnd { writes: 0, outcome, ..end }));
        }
        let tracker = Tracker::new(writes.len(), end, self.post.clone());
        for write in writes {
            let part = Arc::clone(&tracker);
            let done = Completion::callback(move |outcome| part.part_done(outcome));
            if let Err(error) = self.transfer.write_paged(write, done) {
                tracing::warn!(%share, %error, "the store node cannot submit a write of a push");
                // Nothing of it was issued.
                tracker.part_done(Err(WriteError::Cancelled));
            }
        }
    }

    /// Where writes are verified they carry the checksums of their runs. Those of blocks that were here are
    /// not kept, and are computed now, in the order in which they leave. False when one is not what it was, on a node
    /// that verifies anything.
    fn hash_for_wire(&mut self, share: Share, group: &Group) -> bool {
        let Some(leg) = self.legs.get_mut(&share) else { return true };
        if !leg.outgoing.as_ref().is_some_and(|outgoing| outgoing.target.verifies) {
            return true;
        }
        let layout = Arc::clone(leg.pages.layout());
        let arena = &self.arena;
        let mut is_sound = true;
        for page in group.pages.clone() {
            let hash = |slot: SlotIndex, run| arena.run_checksum(&layout, slot, run);
            is_sound &= leg.pages.hash(page, &group.layers, hash);
        }
        let Verify { tcp, shm, verbs, efa } = self.config.verify;
        is_sound || !(tcp || shm || verbs || efa)
    }

    fn issue_tail(&mut self, share: Share) {
        let Some(leg) = self.legs.get_mut(&share) else { return };
        let Some(outgoing) = &mut leg.outgoing else { return };
        let push = outgoing.leaving.push_mut();
        let Some(due) = push.take_due_tail(&leg.pages) else { return };
        let pages = push.tail_pages(&leg.pages);
        let checksums = pages.filter_map(|page| leg.pages.checksum(page)).collect();
        let target = &outgoing.target;
        let bytes = tail::encode(target.tx, checksums, due.engine, due.whole_blocks_only);
        if bytes.len() > target.tail_bytes_max as usize {
            tracing::warn!(%share, bytes = bytes.len(), "the tail of a push exceeds the space that the receiver reserved");
            outgoing.leaving.push_mut().tail_done(Err(Fault::Refused));
            return;
        }
        let write = Write {
            peer: target.peer,
            checksum: Some(kvasir_transfer::checksum(&bytes)),
            source: Source::Inline(bytes),
            target: target.tail_region,
            target_offset: target.tail_offset_bytes,
            imm: Some(target.name.imm),
            group: outgoing.id,
            deadline: WRITE_DEADLINE,
        };
        let (post, push) = (self.post.clone(), outgoing.id);
        let done = Completion::callback(move |outcome| {
            post.end(End::Tail { share, push, outcome });
        });
        if let Err(error) = self.transfer.write(write, done) {
            tracing::warn!(%share, %error, "the store node cannot submit the tail of a push");
            outgoing.leaving.push_mut().tail_done(Err(Fault::PeerLost));
        }
    }

    pub(super) fn group_done(&mut self, end: &GroupEnd) {
        self.writes_in_flight -= end.writes;
        let Some(leg) = self.legs.get_mut(&end.share) else { return };
        let Some(outgoing) = leg.outgoing.as_mut().filter(|o| o.id == end.push) else { return };
        let drain = outgoing.leaving.group_done(&end.group, end.outcome.map_err(fault));
        if end.outcome.is_ok() {
            self.metrics.pushed_bytes.inc_by(group_bytes(leg, &end.group));
            if let Some(log) = &self.layer_log {
                for layer in end.group.layers.clone() {
                    log.line(LayerLine {
                        share: end.share,
                        step: leg.pages.step(end.group.pages.start),
                        layer: layer.into(),
                        first_page: end.group.pages.start,
                        pages: end.group.pages.len() as u32,
                        issued_us: end.issued_us,
                        landed_us: end.landed_us,
                    });
                }
            }
        }
        if drain {
            self.drain_push(end.share);
        }
        self.pump(end.share);
    }

    pub(super) fn tail_done(&mut self, share: Share, push: u64, outcome: Outcome) {
        let Some(leg) = self.legs.get_mut(&share) else { return };
        let Some(outgoing) = leg.outgoing.as_mut().filter(|o| o.id == push) else { return };
        if outgoing.leaving.tail_done(outcome.map_err(fault)) {
            self.drain_push(share);
        }
        self.settle_push(share);
    }

    /// Stops a push: nothing more is issued, and its end is made definite.
    pub(super) fn halt_push(&mut self, share: Share) {
        let Some(leg) = self.legs.get_mut(&share) else { return };
        let Some(outgoing) = &mut leg.outgoing else { return };
        if outgoing.leaving.halt() {
            self.drain_push(share);
        }
        self.settle_push(share);
    }

    /// Asks whether all that was issued has landed or failed: the transfer engine knows, also when a
    /// session was lost, which of its writes were on the wire.
    fn drain_push(&mut self, share: Share) {
        let leg = self.legs.get_mut(&share);
        let Some(outgoing) = leg.and_then(|leg| leg.outgoing.as_mut()) else { return };
        let (post, push) = (self.post.clone(), outgoing.id);
        let done = Completion::callback(move |outcome| {
            post.end(End::Drained { share, push, outcome });
        });
        if let Err(error) = self.transfer.drain_group(push, done) {
            tracing::warn!(%share, %error, "the store node cannot drain a push");
            outgoing.leaving.drained(false);
        }
    }

    pub(super) fn push_drained(&mut self, share: Share, push: u64, outcome: Outcome) {
        let leg = self.legs.get_mut(&share);
        let Some(outgoing) = leg.and_then(|leg| leg.outgoing.as_mut()) else { return };
        if outgoing.id == push {
            outgoing.leaving.drained(outcome.is_ok());
            self.settle_push(share);
        }
    }

    /// Sees to the end of a push, once each of its writes is definite and none will follow.
    pub(super) fn settle_push(&mut self, share: Share) {
        let Some(leg) = self.legs.get_mut(&share) else { return };
        let Some(outgoing) = &mut leg.outgoing else { return };
        let Some(end) = outgoing.leaving.take_end(&leg.pages) else { return };
        let (name, endpoint) = (outgoing.target.name, outgoing.target.endpoint.clone());
        if end.unsure {
            self.sent.unsure(name);
        }
        let reply = outgoing.reply.take();
        let (valid_blocks, fault) = (end.good_pages, end.fault);
        let (reading, ordered_by) = (std::mem::replace(&mut leg.reading, false), leg.ordered_by);
        let answer = PeerMessage::ended(name, end.unsure);
        let rotten = rotten(&self.arena, &leg.pages, outgoing.leaving.push());
        for peer in end.stop_asked {
            self.tell_peer(peer, answer);
        }
        let label = match fault {
            Some(Fault::Corrupt) => "corrupt",
            Some(Fault::Refused) => "refused",
            Some(Fault::PeerLost) => "peer_lost",
            Some(Fault::NotSent) => "not_sent",
            None if !end.all_landed => "stopped",
            None if end.is_part => "partial",
            None => "landed",
        };
        self.metrics.pushes.with_label_values(&[label]).inc();
        tracing::debug!(%share, outcome = label, "the store node ended a push");
        let now_ms = clock::now_ms();
        // While the read holds them: afterwards a slot may be another block's.
        self.drop_rotten(share, &rotten);
        if end.core_waits {
            self.blocks.push_stopped(now_ms, share);
        } else if reading && let Err(error) = self.blocks.read_end(now_ms, share) {
            tracing::debug!(%share, %error, "the read of the share had already ended");
        }
        match share.side {
            Side::Source => {
                let corrupt_blocks = rotten.len() as u32;
                if let Some(reply) = reply {
                    let _ = reply.send(Ok(v1::TxPushReply { valid_blocks, corrupt_blocks }));
                }
                if let Some(peer) = ordered_by.filter(|_| label != "landed") {
                    self.order_failed(peer, share.tx);
                }
                // The conductor has its answer; an abort that follows finds the share finished.
                let _ = self.blocks.release(now_ms, share);
            }
            Side::Prefill | Side::Decode => {
                if let Some(fault) = fault {
                    tracing::warn!(%share, ?fault, "a push of the store node failed; aborting the share");
                    self.tell_failed(name, endpoint);
                    self.blocks.abort(now_ms, share, AbortReason::PeerLost);
                }
            }
        }
    }

    /// Drops stored copies that failed: the next request would find them again.
    fn drop_rotten(&mut self, share: Share, rotten: &[(u32, SlotIndex)]) {
        for (page, slot) in rotten {
            let Some(generation) = self.blocks.generation(*slot) else { continue };
            let dropped = self.blocks.drop_corrupt(clock::now_ms(), *slot, generation);
            if dropped == 0 {
                // Dropped with one before it, or never committed.
                continue;
            }
            self.end_routes_over(*slot);
            self.metrics.corrupt_blocks.inc();
            tracing::error!(
                %share, page, slot = slot.0, dropped,
                "a stored block failed its checksum; the store node dropped it and the blocks after it"
            );
        }
    }

    /// The engine's tail: the push owes it, now or when the targets come.
    pub(super) fn finish_prefill(&mut self, share: Share, engine: Vec<u8>) {
        let Some(leg) = self.legs.get_mut(&share) else { return };
        leg.finished = true;
        if !self.config.push_enabled {
            return;
        }
        if let Some(outgoing) = &mut leg.outgoing {
            outgoing.leaving.push_mut().give_tail(engine);
            self.pump(share);
        } else if leg.tail.is_none() {
            leg.tail = Some(engine);
            match self.blocks.read_begin(share) {
                Ok(()) => leg.reading = true,
                Err(error) => {
                    tracing::debug!(
                        %share, %error,
                        "cannot read the share; its pages are not pushed"
                    );
                }
            }
        }
    }

    /// The block core wants no more of this share's bytes to be read.
    pub(super) fn stop_push(&mut self, share: Share) {
        if !self.close_routes(share) {
            self.stop_pages(share);
        }
    }

    /// As above, when no query reads the share any more.
    pub(super) fn stop_pages(&mut self, share: Share) {
        let leg = self.legs.get_mut(&share);
        let outgoing = leg.and_then(|leg| leg.outgoing.as_mut());
        if outgoing.is_some_and(|outgoing| outgoing.leaving.core_waits()) {
            return self.halt_push(share);
        }
        // Targets that are named later find no read to go on with.
        if let Some(leg) = self.legs.get_mut(&share) {
            leg.reading = false;
        }
        self.blocks.push_stopped(clock::now_ms(), share);
    }
}

/// What became of the targets of a push.
pub(super) enum Armed {
    Now(Share),
    /// It is under way already, or pushing is off.
    Nothing,
}

fn fault(error: WriteError) -> Fault {
    match error {
        WriteError::Corrupt => Fault::Corrupt,
        WriteError::Refused(_) => Fault::Refused,
        WriteError::PeerGone | WriteError::DeadlineExceeded => Fault::PeerLost,
        WriteError::Cancelled => Fault::NotSent,
    }
}

/// One paged write for each run of each layer of the group.
fn paged_writes(
    leg: &Leg,
    outgoing: &Outgoing,
    group: &Group,
    source: &kvasir_transfer::RegionHandle,
) -> Vec<WritePaged> {
    let layout = leg.pages.layout();
    let target = &outgoing.target;
    let sources: Vec<u32> = group.pages.clone().map(|page| leg.pages.slot(page).0).collect();
    let targets: Vec<u32> = group.pages.clone().map(|page| target.slot(page).0).collect();
    let mut writes = Vec::new();
    for layer in group.layers.clone() {
        for (index, run) in layout.runs(layer.into()).iter().enumerate() {
            let side = |indices: &[u32]| PageSide {
                offset: run.offset_bytes,
                stride: layout.slot_bytes(),
                indices: indices.to_vec(),
            };
            let of_run = |page: u32| Some(leg.pages.layer_checksums(page, layer)?[index]);
            writes.push(WritePaged {
                peer: target.peer,
                source: source.clone(),
                source_pages: side(&sources),
                target: target.slots_region,
                target_pages: side(&targets),
                page_bytes: run.length_bytes as usize,
                imm: Some(target.name.imm),
                // All of them or none.
                checksums: group
                    .pages
                    .clone()
                    .map(of_run)
                    .collect::<Option<_>>()
                    .unwrap_or_default(),
                group: outgoing.id,
                deadline: WRITE_DEADLINE,
            });
        }
    }
    writes
}

/// Of the pages that were refused as corrupt, those whose bytes are not what they were: a group is
/// refused as a whole, though one page of it may be to blame, or the way there.
fn rotten(arena: &Arena, pages: &Pages, push: &Push) -> Vec<(u32, SlotIndex)> {
    let refused = push.bad_pages().iter().filter(|(_, fault)| *fault == Fault::Corrupt);
    refused
        .map(|(page, _)| (*page, pages.slot(*page)))
        .filter(|(page, slot)| {
            pages.is_whole(*page)
                && pages.checksum(*page) != Some(arena.checksum(pages.layout(), *slot))
        })
        .collect()
}

fn group_bytes(leg: &Leg, group: &Group) -> u64 {
    let layout = leg.pages.layout();
    let runs = group.layers.clone().flat_map(|layer| layout.runs(layer.into()));
    runs.map(|run| run.length_bytes).sum::<u64>() * group.pages.len() as u64
}

/// Counts the parts of a group until all have ended; the last one posts the end. Shared with the
/// transfer engine.
#[derive(Debug)]
struct Tracker {
    missing: AtomicUsize,
    /// The worst outcome so far, as an index into [`OUTCOMES`].
    worst: AtomicU8,
    end: GroupEnd,
    post: Post,
}

/// From harmless to what needs most care.
const OUTCOMES: [Option<WriteError>; 6] = [
    None,
    Some(WriteError::Corrupt),
    Some(WriteError::Cancelled),
    Some(WriteError::Refused(Refusal::Malformed)),
    Some(WriteError::DeadlineExceeded),
    Some(WriteError::PeerGone),
];

impl Tracker {
    fn new(parts: usize, end: GroupEnd, post: Post) -> Arc<Self> {
        let (missing, worst) = (AtomicUsize::new(parts), AtomicU8::new(0));
        Arc::new(Tracker { missing, worst, end, post })
    }

    fn part_done(&self, outcome: Outcome) {
        // Which refusal it was is logged here and not needed further on.
        let error = outcome.err().map(|error| match error {
            WriteError::Refused(refusal) => {
                tracing::warn!(share = %self.end.share, %refusal, "a receiver refused a write of the store node");
                WriteError::Refused(Refusal::Malformed)
            }
            other => other,
        });
        let index = OUTCOMES.iter().position(|known| *known == error).unwrap_or(OUTCOMES.len() - 1);
        self.worst.fetch_max(index as u8, Ordering::Relaxed);
        if self.missing.fetch_sub(1, Ordering::AcqRel) == 1 {
            let worst = OUTCOMES[usize::from(self.worst.load(Ordering::Relaxed))];
            let GroupEnd { share, push, ref group, writes, issued_us, .. } = self.end;
            self.post.end(End::Group(GroupEnd {
                share,
                push,
                group: group.clone(),
                writes,
                issued_us,
                landed_us: clock::now_us(),
                outcome: worst.map_or(Ok(()), Err),
            }));
        }
    }
}
