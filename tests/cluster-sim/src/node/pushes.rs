//! Pages that leave: arming a push, issuing what is due, and seeing to its end.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use kvasir_blocks::AbortReason;
use kvasir_blocks::moving::leaving::Leaving;
use kvasir_blocks::moving::peer_message::PeerMessage;
use kvasir_blocks::moving::push::{Fault, Group, Grouping, Push};
use kvasir_blocks::moving::{PushName, tail};
use kvasir_proto::{Share, Side, SlotIndex};
use kvasir_transfer::{Completion, Outcome, PageSide, Source, Write, WriteError, WritePaged};

use super::stops::Failure;
use super::{End, Leg, Outgoing, Post, Running};
use crate::calls::{Caller, Reply, Targets};
use crate::content::SLOT_BYTES;
use crate::context::Context;
use crate::seen::{Reader, Seen};

/// Of a tail among the writes of its push.
const TAIL_NUMBER: u64 = u64::MAX;

impl Running {
    /// Names the targets of a push. On the source side the answer is given when it is over.
    pub(super) fn push(
        &mut self,
        context: &mut Context,
        share: Share,
        targets: Targets,
        from: Caller,
    ) {
        match self.arm(context, share, targets) {
            Ok(true) => {
                if share.side == Side::Source {
                    let leg = self.legs.get_mut(&share);
                    if let Some(outgoing) = leg.and_then(|leg| leg.outgoing.as_mut()) {
                        outgoing.reply = Some(from);
                    }
                } else {
                    self.answer(context, from, Reply::Done);
                }
                self.pump(context, share);
            }
            Ok(false) => self.answer(context, from, Reply::Done),
            Err(why) => self.answer(context, from, Reply::Refused(why)),
        }
    }

    fn arm(
        &mut self,
        context: &mut Context,
        share: Share,
        targets: Targets,
    ) -> Result<bool, String> {
        let leg = self.legs.get(&share).ok_or("no such share")?;
        self.blocks.may_go_to(share, targets.namespace).map_err(|error| error.to_string())?;
        let name = PushName { receiver: targets.endpoint.incarnation, imm: targets.imm };
        if let Some(outgoing) = &leg.outgoing {
            if outgoing.leaving.name() == name && share.side == Side::Prefill {
                return Ok(false);
            }
            return Err("the share has a push already".into());
        }
        let peer = self.transfer.connect(&targets.endpoint).map_err(|error| error.to_string())?;
        if self.sent.is_stopped(name) {
            context.covers("a push was stopped before it began");
            return Err("the receiver has stopped this push".into());
        }
        if !leg.reading {
            self.blocks.read_begin(share).map_err(|error| error.to_string())?;
        }
        let leg = self.legs.get_mut(&share).expect("it was there above");
        leg.reading = true;
        context.see(Seen::TakenUp { at: self.at, share });
        let end = targets.first_page + targets.slots.len() as u32;
        let mut push = match share.side {
            Side::Source => {
                let held = leg.held_pages.clamp(targets.first_page, end);
                Push::new(Grouping::Pages, targets.first_page..held)
            }
            Side::Prefill | Side::Decode => Push::new(Grouping::Layers, targets.first_page..end),
        };
        if share.side == Side::Source {
            push.give_tail(Vec::new());
        } else if let Some(engine) = leg.tail.take() {
            push.give_tail(engine);
        }
        let leaving = Leaving::new(name, targets.first_page..end, push);
        let id = self.next_push;
        leg.outgoing = Some(Outgoing { id, peer, targets, leaving, reply: None });
        self.next_push += 1;
        Ok(true)
    }

    /// Issues what is due of one push.
    pub(super) fn pump(&mut self, context: &mut Context, share: Share) {
        while let Some(leg) = self.legs.get_mut(&share) {
            let Some(outgoing) = &mut leg.outgoing else { return };
            let Some(group) = outgoing.leaving.push_mut().next_group(&leg.pages) else { break };
            self.issue(context, share, &group);
        }
        self.issue_tail(context, share);
        self.settle_push(context, share);
    }

    fn issue(&mut self, context: &mut Context, share: Share, group: &Group) {
        let is_sound = self.hash_for_wire(share, group);
        let leg = &self.legs[&share];
        let outgoing = leg.outgoing.as_ref().expect("the group is of its push");
        let (number, push) = (self.next_group, outgoing.id);
        self.next_group += 1;
        let slots = group.pages.clone().map(|page| leg.pages.slot(page).0).collect();
        let reader = Reader::Push(push, number);
        context.see(Seen::ReadBegan { at: self.at, reader, slots });
        if let Some(to) = context.life_of(outgoing.leaving.name().receiver) {
            let imm = outgoing.targets.imm;
            context.see(Seen::WriteBegan { to, imm, write: (push, number) });
        }
        let writes = self.paged_writes(leg, outgoing, group);
        let end = (share, push, number, group.clone());
        if !is_sound {
            context.covers("a source finds its block rotten before it is sent");
            return Tracker::new(1, end, self.post.clone()).part_done(Err(WriteError::Corrupt));
        }
        let tracker = Tracker::new(writes.len(), end, self.post.clone());
        for write in writes {
            let part = Arc::clone(&tracker);
            let done = Completion::callback(move |outcome| part.part_done(outcome));
            if self.transfer.write_paged(write, done).is_err() {
                tracker.part_done(Err(WriteError::Cancelled));
            }
        }
    }

    /// Computes the checksums of runs that are not kept. False when a block is not what it was.
    fn hash_for_wire(&mut self, share: Share, group: &Group) -> bool {
        let Some(mut leg) = self.legs.remove(&share) else { return true };
        let mut is_sound = true;
        for page in group.pages.clone() {
            let hash = |slot, run| self.run_checksum(slot, run);
            is_sound &= leg.pages.hash(page, &group.layers, hash);
        }
        self.legs.insert(share, leg);
        is_sound
    }

    /// One paged write for each run of each layer of the group.
    fn paged_writes(&self, leg: &Leg, outgoing: &Outgoing, group: &Group) -> Vec<WritePaged> {
        let (layout, targets) = (leg.pages.layout(), &outgoing.targets);
        let target = |page: u32| targets.slots[(page - targets.first_page) as usize].0;
        let side = |offset, indices| PageSide { offset, stride: SLOT_BYTES as u64, indices };
        let mut writes = Vec::new();
        for layer in group.layers.clone() {
            for (index, run) in layout.runs(layer.into()).iter().enumerate() {
                let pages = || group.pages.clone();
                let sources = pages().map(|page| leg.pages.slot(page).0).collect();
                let of_run = |page: u32| Some(leg.pages.layer_checksums(page, layer)?[index]);
                writes.push(WritePaged {
                    peer: outgoing.peer,
                    source: self.arena.clone(),
                    source_pages: side(run.offset_bytes, sources),
                    target: targets.slots_region,
                    target_pages: side(run.offset_bytes, pages().map(target).collect()),
                    page_bytes: run.length_bytes as usize,
                    imm: Some(targets.imm),
                    checksums: pages().map(of_run).collect::<Option<_>>().unwrap_or_default(),
                    group: outgoing.id,
                    deadline: Duration::MAX,
                });
            }
        }
        writes
    }

    fn issue_tail(&mut self, context: &mut Context, share: Share) {
        let Some(leg) = self.legs.get_mut(&share) else { return };
        let Some(outgoing) = &mut leg.outgoing else { return };
        let push = outgoing.leaving.push_mut();
        let Some(due) = push.take_due_tail(&leg.pages) else { return };
        let pages = push.tail_pages(&leg.pages);
        let checksums = pages.filter_map(|page| leg.pages.checksum(page)).collect();
        let bytes = tail::encode(share.tx, checksums, due.engine, due.whole_blocks_only);
        let targets = &outgoing.targets;
        if let Some(to) = context.life_of(outgoing.leaving.name().receiver) {
            let write = (outgoing.id, TAIL_NUMBER);
            context.see(Seen::WriteBegan { to, imm: targets.imm, write });
        }
        let write = Write {
            peer: outgoing.peer,
            checksum: Some(kvasir_transfer::checksum(&bytes)),
            source: Source::Inline(bytes),
            target: targets.tail_region,
            target_offset: targets.tail_offset_bytes,
            imm: Some(targets.imm),
            group: outgoing.id,
            deadline: Duration::MAX,
        };
        let (post, push) = (self.post.clone(), outgoing.id);
        let done =
            Completion::callback(move |outcome| post.end(End::Tail { share, push, outcome }));
        if self.transfer.write(write, done).is_err() {
            self.post.end(End::Tail { share, push, outcome: Err(WriteError::PeerGone) });
        }
    }

    fn write_ended(&self, context: &mut Context, share: Share, push: u64, number: u64) {
        let outgoing = self.legs.get(&share).and_then(|leg| leg.outgoing.as_ref());
        let Some(outgoing) = outgoing.filter(|outgoing| outgoing.id == push) else { return };
        if let Some(to) = context.life_of(outgoing.leaving.name().receiver) {
            let (imm, write) = (outgoing.targets.imm, (push, number));
            context.see(Seen::WriteEnded { to, imm, write });
        }
    }

    pub(super) fn group_done(
        &mut self,
        context: &mut Context,
        share: Share,
        push: u64,
        number: u64,
        group: &Group,
        outcome: Outcome,
    ) {
        context.see(Seen::ReadEnded { at: self.at, reader: Reader::Push(push, number) });
        self.write_ended(context, share, push, number);
        let Some(leg) = self.legs.get_mut(&share) else { return };
        let Some(outgoing) = leg.outgoing.as_mut().filter(|o| o.id == push) else { return };
        if outgoing.leaving.group_done(group, outcome.map_err(fault)) {
            self.drain_push(share);
        }
        self.pump(context, share);
    }

    pub(super) fn tail_done(
        &mut self,
        context: &mut Context,
        share: Share,
        push: u64,
        outcome: Outcome,
    ) {
        self.write_ended(context, share, push, TAIL_NUMBER);
        let Some(leg) = self.legs.get_mut(&share) else { return };
        let Some(outgoing) = leg.outgoing.as_mut().filter(|o| o.id == push) else { return };
        if outgoing.leaving.tail_done(outcome.map_err(fault)) {
            self.drain_push(share);
        }
        self.settle_push(context, share);
    }

    /// Stops a push: nothing more is issued, and its end is made definite.
    pub(super) fn halt_push(&mut self, context: &mut Context, share: Share) {
        let Some(leg) = self.legs.get_mut(&share) else { return };
        let Some(outgoing) = &mut leg.outgoing else { return };
        if outgoing.leaving.halt() {
            self.drain_push(share);
        }
        self.settle_push(context, share);
    }

    fn drain_push(&mut self, share: Share) {
        let leg = self.legs.get_mut(&share);
        let Some(outgoing) = leg.and_then(|leg| leg.outgoing.as_mut()) else { return };
        let (post, push) = (self.post.clone(), outgoing.id);
        let done =
            Completion::callback(move |outcome| post.end(End::Drained { share, push, outcome }));
        if self.transfer.drain_group(push, done).is_err() {
            outgoing.leaving.drained(false);
        }
    }

    pub(super) fn push_drained(
        &mut self,
        context: &mut Context,
        share: Share,
        push: u64,
        outcome: Outcome,
    ) {
        let leg = self.legs.get_mut(&share);
        let Some(outgoing) = leg.and_then(|leg| leg.outgoing.as_mut()) else { return };
        if outgoing.id == push {
            outgoing.leaving.drained(outcome.is_ok());
            self.settle_push(context, share);
        }
    }

    /// Sees to the end of a push, once each of its writes is definite and none will follow.
    pub(super) fn settle_push(&mut self, context: &mut Context, share: Share) {
        let Some(leg) = self.legs.get_mut(&share) else { return };
        let Some(outgoing) = &mut leg.outgoing else { return };
        let Some(end) = outgoing.leaving.take_end(&leg.pages) else { return };
        let (name, endpoint) = (outgoing.leaving.name(), outgoing.targets.endpoint.clone());
        let reply = outgoing.reply.take();
        let reading = std::mem::replace(&mut leg.reading, false);
        if end.unsure {
            self.sent.unsure(name);
            context.covers("the end of a push is unsure");
        } else if let Some(to) = context.life_of(name.receiver) {
            context.see(Seen::PushOver { to, imm: name.imm });
        }
        let rotten = self.rotten(share);
        if !rotten.is_empty() {
            context.covers("a source finds its block rotten");
        }
        for peer in end.stop_asked {
            self.tell_peer(peer, PeerMessage::ended(name, end.unsure));
        }
        let now_ms = context.now_ms();
        for slot in rotten {
            if let Some(generation) = self.blocks.generation(slot) {
                self.blocks.drop_corrupt(now_ms, slot, generation);
            }
        }
        if end.core_waits {
            self.blocks.push_stopped(now_ms, share);
        } else if reading {
            // Refused when the read had ended by a stop.
            let _ = self.blocks.read_end(now_ms, share);
        }
        match share.side {
            Side::Source => {
                context.see(Seen::Fetched { at: self.at, blocks: end.good_pages });
                if let Some(caller) = reply {
                    self.answer(context, caller, Reply::Pushed { valid_blocks: end.good_pages });
                }
                let _ = self.blocks.release(now_ms, share);
            }
            Side::Prefill | Side::Decode => {
                if end.fault.is_some() {
                    self.try_to_tell(Failure { name, receiver: endpoint, tries: 0 });
                    self.blocks.abort(now_ms, share, AbortReason::PeerLost);
                }
            }
        }
    }

    /// Of the pages that were refused as corrupt, those whose bytes are not what they were.
    fn rotten(&self, share: Share) -> Vec<SlotIndex> {
        let Some(leg) = self.legs.get(&share) else { return Vec::new() };
        let Some(outgoing) = &leg.outgoing else { return Vec::new() };
        let bad = outgoing.leaving.push().bad_pages().iter();
        let corrupt = bad.filter(|(_, fault)| *fault == Fault::Corrupt);
        corrupt
            .filter(|(page, _)| {
                let pages = &leg.pages;
                pages.is_whole(*page)
                    && pages.checksum(*page) != Some(self.checksum(pages.slot(*page)))
            })
            .map(|(page, _)| leg.pages.slot(*page))
            .collect()
    }

    /// The engine's tail: the push owes it, now or when the targets come.
    pub(super) fn finish_prefill(&mut self, context: &mut Context, share: Share, engine: Vec<u8>) {
        let Some(leg) = self.legs.get_mut(&share) else { return };
        leg.finished = true;
        if let Some(outgoing) = &mut leg.outgoing {
            outgoing.leaving.push_mut().give_tail(engine);
            self.pump(context, share);
        } else if leg.tail.is_none() {
            leg.tail = Some(engine);
            if self.blocks.read_begin(share).is_ok() {
                leg.reading = true;
                context.see(Seen::TakenUp { at: self.at, share });
            }
        }
    }

    /// The block core wants no more of this share's bytes to be read.
    pub(super) fn stop_push(&mut self, context: &mut Context, share: Share) {
        let leg = self.legs.get_mut(&share);
        let outgoing = leg.and_then(|leg| leg.outgoing.as_mut());
        if outgoing.is_some_and(|outgoing| outgoing.leaving.core_waits()) {
            return self.halt_push(context, share);
        }
        if let Some(leg) = self.legs.get_mut(&share) {
            leg.reading = false;
        }
        self.blocks.push_stopped(context.now_ms(), share);
    }

    /// Source side: some of what was on its way from the SSD is there; or (`is_all`) the rest never will be.
    pub(super) fn source_risen(
        &mut self,
        context: &mut Context,
        share: Share,
        blocks: u32,
        is_all: bool,
    ) {
        if !is_all {
            context.covers("a source sends while its SSD reads");
        }
        // It may have ended in the same call: that it has comes next.
        let Some(slots) = self.blocks.share(share).map(|view| view.slots) else { return };
        let Some(leg) = self.legs.get_mut(&share) else { return };
        leg.pages.set_slots(&slots);
        if is_all {
            leg.held_pages = blocks;
            if let Some(outgoing) = &mut leg.outgoing {
                outgoing.leaving.push_mut().end_at(blocks);
            }
        }
        self.set_cached(share, blocks);
        self.pump(context, share);
    }
}

fn fault(error: WriteError) -> Fault {
    match error {
        WriteError::Corrupt => Fault::Corrupt,
        WriteError::Refused(_) => Fault::Refused,
        WriteError::PeerGone | WriteError::DeadlineExceeded => Fault::PeerLost,
        WriteError::Cancelled => Fault::NotSent,
    }
}

/// Counts the parts of a group until all have ended; the last one posts the end, with the worst outcome.
#[derive(Debug)]
struct Tracker {
    left: Mutex<(usize, Outcome)>,
    end: (Share, u64, u64, Group),
    post: Post,
}

impl Tracker {
    fn new(parts: usize, end: (Share, u64, u64, Group), post: Post) -> Arc<Self> {
        Arc::new(Tracker { left: Mutex::new((parts, Ok(()))), end, post })
    }

    fn part_done(&self, outcome: Outcome) {
        let mut left = self.left.lock().unwrap_or_else(PoisonError::into_inner);
        left.0 -= 1;
        if rank(outcome) > rank(left.1) {
            left.1 = outcome;
        }
        if left.0 == 0 {
            let (share, push, number, group) = self.end.clone();
            self.post.end(End::Group { share, push, number, group, outcome: left.1 });
        }
    }
}

/// From harmless to what needs most care.
fn rank(outcome: Outcome) -> u8 {
    match outcome {
        Ok(()) => 0,
        Err(WriteError::Corrupt) => 1,
        Err(WriteError::Cancelled) => 2,
        Err(WriteError::Refused(_)) => 3,
        Err(WriteError::DeadlineExceeded) => 4,
        Err(WriteError::PeerGone) => 5,
    }
}
