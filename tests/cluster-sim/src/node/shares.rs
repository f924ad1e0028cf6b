//! Shares of transactions, as conductors ask for them, and the core's actions.

use kvasir_blocks::moving::pages::Pages;
use kvasir_blocks::moving::tail;
use kvasir_blocks::moving::tail_space::TailRange;
use kvasir_blocks::{
    Action, Allocate, AllocateError, Allocated, ContextName, KeepRequest, Prefetched,
};
use kvasir_proto::{BlockKey, Imm, Namespace, Share, Side, SlotIndex, TxId};
use kvasir_transfer::{Completion, Expect};

use super::{End, Incoming, IncomingState, LEASE_MS_MAX, Leg, Promise, Running};
use crate::calls::{AllocateCall, Call, Caller, Party, Reply, Targets, Term, ToEngine};
use crate::content::{BLOCK_TOKENS, LAYERS};
use crate::context::{Context, Event};
use crate::seen::{Owner, Place, Seen};

impl Running {
    /// A call of a conductor.
    pub fn take_call(&mut self, context: &mut Context, unix_ms: u64, from: Caller, call: Call) {
        match call {
            Call::Allocate(call) => {
                let reply = self.allocate(context, &call);
                self.answer(context, from, reply);
            }
            Call::Push { share, targets } => self.push(context, share, *targets, from),
            Call::Commit { share, valid_blocks, source_lost } => {
                self.commit(context, share, valid_blocks, source_lost, from);
            }
            Call::Abort { share } => {
                self.abort_share(context, share);
                self.answer(context, from, Reply::Done);
            }
            Call::Renew { shares, lease_ms } => {
                let mut all = true;
                for share in shares {
                    all &= self.renew(context, share, lease_ms);
                }
                self.answer(context, from, Reply::Renewed { all });
            }
            Call::Prefetch { namespace, keys } => {
                self.prefetch(context, namespace, &keys);
                self.answer(context, from, Reply::Done);
            }
            Call::Keep { namespace, keys, tenant, term, copies, whole } => {
                let here = self.blocks.keepable(context.now_ms(), namespace, &keys);
                if whole && here < keys.len() {
                    return self.answer(context, from, Reply::Refused("not all is here".into()));
                }
                let is_first = matches!(term, Term::Ttl { .. });
                let (expires_unix_ms, created_unix_ms) = match term {
                    Term::Ttl { ttl_ms } => (unix_ms + ttl_ms, Some(unix_ms)),
                    Term::Until { expires_unix_ms, created_unix_ms } => {
                        (expires_unix_ms, created_unix_ms)
                    }
                };
                if expires_unix_ms <= unix_ms {
                    return self.answer(context, from, Reply::Refused("it is over".into()));
                }
                let wanted = KeepRequest {
                    namespace,
                    keys,
                    tenant,
                    expires_unix_ms,
                    created_unix_ms,
                    copies,
                };
                self.keep(context, from, &wanted, is_first && copies > 1);
            }
            Call::Replicate { namespace, keys, to } => {
                self.replicate(context, from, (namespace, &keys, to));
            }
            Call::Holds { contexts } => {
                let reply = self.holds(&contexts);
                self.answer(context, from, reply);
            }
            Call::Describe => {
                let reply = self.describe(context);
                self.answer(context, from, reply);
            }
            Call::Change { context: name, ttl_ms } => {
                let expires_unix_ms = ttl_ms.map(|ttl_ms| unix_ms + ttl_ms);
                self.change(context, from, &name, expires_unix_ms);
            }
            Call::Start { leg } => {
                let mut engines = self.engines.iter_mut();
                if let Some(engine) = engines.find(|engine| engine.index == leg.engine) {
                    let message = ToEngine::Start(leg);
                    engine.tell(context, self.at, message);
                }
            }
        }
        self.run_actions(context);
    }

    pub(super) fn answer(&self, context: &mut Context, to: Caller, reply: Reply) {
        match to.who {
            // Its own: nothing is between.
            Party::Node(node) if node == self.at.node => {
                context.after(1, Event::Reply { to, reply });
            }
            _ => context.send(&Event::Reply { to, reply }),
        }
    }

    pub(super) fn renew(&mut self, context: &mut Context, share: Share, lease_ms: u64) -> bool {
        let renewed = self.blocks.renew(context.now_ms(), share, lease_ms).is_ok();
        if renewed {
            context.see(Seen::Renewed { at: self.at, share, lease_ms });
        }
        renewed
    }

    pub(super) fn allocate(&mut self, context: &mut Context, call: &AllocateCall) -> Reply {
        let share = call.share;
        if share.side != Side::Source && self.engines.is_empty() && !call.is_replica {
            return Reply::Refused("no engine is attached".into());
        }
        let wanted = Allocate {
            share,
            namespace: call.namespace,
            keys: call.keys.clone(),
            prompt_tokens: call.prompt_tokens,
            lease_ms: call.lease_ms,
            fetch_until_block: call.fetch_until_block,
            has_remote_writer: call.writer.is_some(),
            is_ephemeral: call.is_ephemeral,
            leaves_ssd: call.leaves_ssd,
        };
        let now_ms = context.now_ms();
        if self.legs.contains_key(&share) {
            context.covers("an allocation comes twice");
            return match self.blocks.allocate(now_ms, &wanted) {
                Ok(_) => self.allocate_reply(share),
                Err(error) => Reply::Refused(error.to_string()),
            };
        }
        let reserved = match &call.writer {
            Some(endpoint) => {
                let pages = call.prompt_tokens.div_ceil(BLOCK_TOKENS) as usize;
                let room = self.tail_space.take(tail::bytes_max(pages, share.side) as u64);
                let Some(room) = room else { return Reply::Refused("no room for a tail".into()) };
                let emptied = self.tails.copy_from(room.offset_bytes as usize, &tail::NO_TAIL);
                emptied.expect("the room lies in this memory");
                let (at, endpoint) = (self.at, endpoint.clone());
                if let Err(why) = self.writers.open(context, &self.transfer, (at, &endpoint)) {
                    self.tail_space.give_back(room);
                    return Reply::Refused(why);
                }
                Some((endpoint.incarnation, room))
            }
            None => None,
        };
        match self.blocks.allocate(now_ms, &wanted) {
            Ok(allocated) => {
                let held = &wanted.keys[..allocated.held_blocks as usize];
                self.note_asked(context, share, (wanted.namespace, held));
                self.open_leg(context, &wanted, &allocated, reserved);
                let reply = self.allocate_reply(share);
                if call.is_replica {
                    self.open_replica(context, share);
                }
                reply
            }
            Err(error) => {
                match error {
                    AllocateError::Tombstoned => context.covers("a tombstone is met"),
                    AllocateError::Draining => context.covers("a draining node takes no work"),
                    _ => {}
                }
                self.unreserve(reserved);
                Reply::Refused(error.to_string())
            }
        }
    }

    /// A share whose blocks are copies to have: nobody computes anything, so that it is over when nothing
    /// more comes.
    fn open_replica(&mut self, context: &mut Context, share: Share) {
        let Some(leg) = self.legs.get_mut(&share) else { return };
        leg.replica = true;
        if leg.incoming.is_none() {
            self.release_replica(context, share);
        }
    }

    /// All of a copy that comes has come.
    pub(super) fn release_replica(&mut self, context: &mut Context, share: Share) {
        if self.legs.get(&share).is_some_and(|leg| leg.replica) {
            // Refused when it has ended already.
            let _ = self.blocks.release(context.now_ms(), share);
        }
    }

    fn unreserve(&mut self, reserved: Option<(u64, TailRange)>) {
        if let Some((writer, room)) = reserved {
            self.tail_space.give_back(room);
            self.writers.close(writer);
        }
    }

    fn open_leg(
        &mut self,
        context: &mut Context,
        wanted: &Allocate,
        allocated: &Allocated,
        reserved: Option<(u64, TailRange)>,
    ) {
        let (share, at) = (wanted.share, self.at);
        let (lease_ms, waits_for_others) = (wanted.lease_ms, wanted.has_remote_writer);
        context.see(Seen::Allocated { at, share, lease_ms, waits_for_others });
        let held = &wanted.keys[..allocated.held_blocks as usize];
        if !held.is_empty() {
            let (namespace, keys) = (wanted.namespace, held.to_vec());
            context.see(Seen::Held { at, share, namespace, keys });
        }
        for slot in &allocated.pages[allocated.held_blocks as usize..] {
            self.give_out(context, *slot, Owner::Share(share));
        }
        let incoming = match (allocated.imm, reserved) {
            (Some(imm), Some((writer, tail))) => {
                self.give_places(context, share, imm, tail, allocated);
                Some(Incoming {
                    writer: Some(writer),
                    imm: imm.0,
                    pages: allocated.targets.clone(),
                    tail,
                    state: IncomingState::Waiting,
                    settling: None,
                })
            }
            (_, reserved) => {
                self.unreserve(reserved);
                None
            }
        };
        let imm = incoming.as_ref().map(|incoming| incoming.imm);
        let leg = Leg {
            pages: Pages::new(self.layout(), &allocated.pages),
            committed_pages: 0,
            cached_pages: 0,
            held_pages: allocated.held_blocks,
            keys: wanted.keys.clone(),
            lease_ms: wanted.lease_ms,
            engine: None,
            incoming,
            outgoing: None,
            tail: None,
            finished: false,
            reading: false,
            replica: false,
        };
        self.legs.insert(share, leg);
        self.set_cached(share, allocated.held_blocks - allocated.promoting_blocks);
        if let Some(imm) = imm {
            let count = (allocated.targets.len() * LAYERS + 1) as u64;
            let post = self.post.clone();
            let done =
                Completion::callback(move |outcome| post.end(End::Counted { share, imm, outcome }));
            let expect = Expect { imm, count, deadline: None };
            self.transfer.expect_imm(expect, done).expect("the count is above zero");
        }
    }

    /// Another node will be told to write here.
    fn give_places(
        &self,
        context: &mut Context,
        share: Share,
        imm: Imm,
        tail: TailRange,
        allocated: &Allocated,
    ) {
        let at = self.at;
        let (tail, counter) = (Place::Tail(tail.offset_bytes), Place::Imm(imm.0));
        for place in [tail, counter] {
            context.see(Seen::GivenOut { at, place, to: Owner::Share(share) });
        }
        let targets = allocated.targets.start as usize..allocated.targets.end as usize;
        let slots = allocated.pages[targets].iter().map(|slot| Place::Slot(slot.0));
        let places = slots.chain([tail]).collect();
        context.see(Seen::PeerMayWrite { at, share, imm: imm.0, places });
    }

    /// The first pages are cached: their checksums are the stored ones.
    pub(super) fn set_cached(&mut self, share: Share, cached_pages: u32) {
        let Some(leg) = self.legs.get_mut(&share) else { return };
        for page in leg.cached_pages..cached_pages.min(leg.pages.count()) {
            let slot = leg.pages.slot(page);
            let Some(stored) = self.blocks.checksum_of(slot) else { return };
            leg.pages.set_whole(page, slot, stored);
        }
        leg.cached_pages = cached_pages;
    }

    fn allocate_reply(&self, share: Share) -> Reply {
        let view = self.blocks.share(share);
        let held_blocks = view.as_ref().map_or(0, |view| view.held_blocks);
        let namespace = view.map(|view| view.request.namespace);
        let leg = self.legs.get(&share);
        let targets = leg.zip(namespace).and_then(|(leg, of)| self.targets(leg, of));
        let targets = targets.map(Box::new);
        Reply::Allocated { held_blocks, targets }
    }

    fn targets(&self, leg: &Leg, namespace: Namespace) -> Option<Targets> {
        let incoming = leg.incoming.as_ref()?;
        let grant = self.writers.grant(incoming.writer?)?;
        Some(Targets {
            endpoint: self.transfer.endpoint(),
            slots_region: grant.slots,
            tail_region: grant.tails,
            tail_offset_bytes: incoming.tail.offset_bytes,
            first_page: incoming.pages.start,
            slots: incoming.pages.clone().map(|page| leg.pages.slot(page)).collect(),
            imm: incoming.imm,
            namespace,
        })
    }

    fn prefetch(&mut self, context: &mut Context, namespace: Namespace, keys: &[BlockKey]) {
        self.next_hint += 1;
        let tx = TxId { conductor_incarnation: self.incarnation, serial: self.next_hint };
        let (share, at) = (Share { tx, side: Side::Source }, self.at);
        let result = self.blocks.prefetch(context.now_ms(), share, Some(namespace), keys);
        if self.blocks.share(share).is_some() {
            let (lease_ms, waits_for_others) = (LEASE_MS_MAX, false);
            context.see(Seen::Allocated { at, share, lease_ms, waits_for_others });
        }
        match result {
            Ok(Prefetched { promoting_blocks: 1.., .. }) => context.covers("a hint is followed"),
            Ok(_) => {}
            Err(_) => context.covers("a hint is refused"),
        }
    }

    fn keep(
        &mut self,
        context: &mut Context,
        from: Caller,
        wanted: &KeepRequest,
        awaits_copies: bool,
    ) {
        match self.blocks.keep(context.now_ms(), wanted) {
            Ok(keep) => {
                let (node, keys, expires_unix_ms) =
                    (self.at.node, wanted.keys.clone(), wanted.expires_unix_ms);
                let (asked, version) = (keys.clone(), None);
                context.see(Seen::KeepAsked { node, keys: asked, expires_unix_ms, version });
                let copied = awaits_copies.then_some((wanted.tenant, wanted.namespace));
                self.keeps.insert(keep, (from, Promise::Keep { keys, expires_unix_ms, copied }));
            }
            Err(error) => self.answer(context, from, Reply::Refused(error.to_string())),
        }
    }

    fn change(
        &mut self,
        context: &mut Context,
        from: Caller,
        name: &ContextName,
        expires_unix_ms: Option<u64>,
    ) {
        let now_ms = context.now_ms();
        let begun = match expires_unix_ms {
            Some(expires_unix_ms) => self.blocks.extend_context(now_ms, name, expires_unix_ms),
            None => self.blocks.delete_context(now_ms, name),
        };
        match begun {
            Ok(keep) => {
                let (node, last) = (self.at.node, name.last);
                context.see(Seen::ContextAsked { node, last, expires_unix_ms });
                self.keeps.insert(keep, (from, Promise::Change { last, expires_unix_ms }));
            }
            Err(error) => self.answer(context, from, Reply::Refused(error.to_string())),
        }
    }

    fn keep_ended(&mut self, context: &mut Context, keep: u64, blocks: Option<u32>) {
        let Some((from, promise)) = self.keeps.remove(&keep) else { return };
        let node = self.at.node;
        if let Promise::Keep { keys, .. } = &promise {
            context.see(Seen::KeepEnded { node, keys: keys.clone(), blocks });
        }
        let reply = match (blocks, promise) {
            (Some(blocks), Promise::Keep { mut keys, expires_unix_ms, copied }) => {
                keys.truncate(blocks as usize);
                let last = keys.last().copied();
                context.see(Seen::Kept { node, keys, expires_unix_ms });
                if let (Some((tenant, namespace)), Some(last)) = (copied, last) {
                    let name = ContextName { tenant, namespace, last };
                    return self.await_copies(context, name, blocks, from);
                }
                Reply::Kept { kept_blocks: blocks }
            }
            (Some(kept_blocks), Promise::Change { last, expires_unix_ms }) => {
                context.covers(match expires_unix_ms {
                    Some(_) => "a context gets another time",
                    None => "a context is dropped",
                });
                context.see(Seen::ContextChanged { node, last, expires_unix_ms });
                Reply::Kept { kept_blocks }
            }
            (None, _) => Reply::Refused("the SSD did not take all of it".into()),
        };
        self.answer(context, from, reply);
    }

    /// Carries out what the core decided, until it wants nothing more.
    pub fn run_actions(&mut self, context: &mut Context) {
        self.blocks.copy_pages(context.now_ms());
        self.run_planned(context);
        if self.ssd.is_some() {
            self.blocks.sink_ahead(context.now_ms());
            self.run_planned(context);
        }
        self.publish_freed();
    }

    fn run_planned(&mut self, context: &mut Context) {
        while let Some(action) = self.blocks.poll_action() {
            self.publish_freed();
            match action {
                Action::Bound { share, epoch, bound } => self.bound(context, share, epoch, bound),
                Action::StopEngine { share, epoch, .. } => {
                    if !self.stop_client(context, share) {
                        self.stop_engine(context, share, epoch);
                    }
                }
                Action::StopWriter { share } => self.stop_writer(context, share),
                Action::StopPush { share } => self.stop_push(context, share),
                Action::CancelImm { .. } => {}
                Action::Ended { share, .. } => self.ended(context, share),
                Action::Sink { sink, slot, block, checksum, .. } => {
                    self.sink(context, sink, slot, block, checksum);
                }
                Action::Rewrite { sink, key, mark } => self.rewrite(context, sink, key, mark),
                Action::Rise { rise, slot, key } => {
                    self.give_out(context, slot, Owner::Rise(rise));
                    self.rise(context, rise, slot, key);
                }
                Action::Forget { key, follows_none } => self.forget(context, key, follows_none),
                Action::Erase { sink, key, namespace } => {
                    self.erase(context, sink, key, namespace);
                }
                Action::Risen { share, blocks, is_all } => {
                    if !is_all || !self.object_risen(context, share) {
                        self.source_risen(context, share, blocks, is_all);
                    }
                }
                Action::Kept { keep, blocks, mark: _ } => {
                    if !self.object_kept(context, keep, blocks) {
                        self.keep_ended(context, keep, blocks);
                    }
                }
                Action::Upload { .. } | Action::Download { .. } | Action::Discard { .. } => {
                    unreachable!("no node of a simulated cluster has an object store")
                }
                Action::CarryLayers { copy, epoch, page, slot, layers } => {
                    self.carry(context, copy, (epoch, page), slot, layers);
                }
                Action::PagesDropped { epoch, handle } => {
                    self.pages_dropped(context, epoch, handle);
                }
                Action::ReadPage { .. } | Action::WritePage { .. } | Action::PagesFilled { .. } => {
                    unreachable!("no engine of a simulated cluster holds blocks in its pool")
                }
            }
        }
    }

    fn ended(&mut self, context: &mut Context, share: Share) {
        context.see(Seen::Ended { at: self.at, share });
        self.stops.forget(share);
        self.engines.iter_mut().for_each(|engine| engine.stops.let_go(share));
        let Some(leg) = self.legs.remove(&share) else { return };
        let mut waiting =
            leg.outgoing.and_then(|outgoing| outgoing.reply).into_iter().collect::<Vec<_>>();
        if let Some(incoming) = leg.incoming {
            let cancelled = self.transfer.cancel_imm(incoming.imm, Completion::Ignore);
            cancelled.expect("the simulated engine takes it always");
            self.tail_space.give_back(incoming.tail);
            if let Some(writer) = incoming.writer {
                self.writers.close(writer);
            }
            waiting.extend(incoming.settling.into_iter().flat_map(|(_, callers)| callers));
        }
        for caller in waiting {
            self.answer(context, caller, Reply::Refused("the share has ended".into()));
        }
    }

    /// The slots of a share as the engine was told them.
    pub(super) fn private_slots(bound: &[SlotIndex], cached_pages: u32) -> Vec<u32> {
        bound.iter().skip(cached_pages as usize).map(|slot| slot.0).collect()
    }
}
