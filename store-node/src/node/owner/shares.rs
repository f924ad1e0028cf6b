//! Shares of transactions, as conductors ask for them, and the core's actions.

use std::sync::Arc;

use kvasir_blocks::moving::pages::Pages;
use kvasir_blocks::moving::tail;
use kvasir_blocks::moving::tail_space::TailRange;
use kvasir_blocks::{
    AbortOutcome, AbortReason, Action, Allocate, AllocateError, Allocated, Outcome, ShareError,
};
use kvasir_proto::{BlockKey, FieldError, Namespace, Share, Side, v1};
use kvasir_transfer::{Completion, Endpoint};

use super::Owner;
use crate::clock;
use crate::node::command::Refused;
use crate::node::leg::{Incoming, IncomingState, Leg};
use crate::pool::copier::Way;
use crate::ssd::thread::Job;

impl From<FieldError> for Refused {
    fn from(error: FieldError) -> Self {
        Refused::Invalid(error.to_string())
    }
}

impl From<AllocateError> for Refused {
    fn from(error: AllocateError) -> Self {
        let why = error.to_string();
        match error {
            AllocateError::NoSpace { .. } | AllocateError::TooManyShares(_) => {
                Refused::NoSpace(why)
            }
            AllocateError::Tombstoned | AllocateError::Finished => Refused::Ended(why),
            AllocateError::Draining => Refused::Draining(why),
            AllocateError::TooLarge { .. } | AllocateError::BadRequest(_) => Refused::Invalid(why),
        }
    }
}

impl From<ShareError> for Refused {
    fn from(error: ShareError) -> Self {
        let why = error.to_string();
        match error {
            ShareError::Unknown => Refused::NotFound(why),
            ShareError::Finished | ShareError::Ending => Refused::Ended(why),
            ShareError::Refused(_) => Refused::Precondition(why),
        }
    }
}

/// What is reserved for a writer before the core is asked, so that an allocation succeeds whole or
/// takes nothing.
struct Reserved {
    writer: u64,
    tail: TailRange,
}

impl Owner {
    pub(super) fn allocate(
        &mut self,
        request: v1::TxAllocateRequest,
    ) -> Result<v1::TxAllocateReply, Refused> {
        let share = Share::from_wire(request.tx, request.side)?;
        if self.drain_until_ms.is_some() {
            return Err(Refused::Draining("the node is draining".into()));
        }
        let Some(cache) = &self.cache else {
            return Err(Refused::Precondition("no engine has attached to this node".into()));
        };
        let layout = Arc::clone(&cache.layout);
        let served = self.engines.heard().next().is_some();
        if request.replica && share.side != Side::Prefill {
            return Err(Refused::Invalid("only a prefill share can be a replica".into()));
        }
        // A client fetches objects as an engine's conductor fetches blocks.
        let opened = share.side == Side::Prefill && !self.clients.is_empty();
        if share.side != Side::Source && !served && !opened && !request.replica {
            return Err(Refused::Precondition("no engine is attached to this node".into()));
        }
        let endpoint =
            match request.writer_endpoint.as_slice() {
                [] => None,
                bytes => Some(Endpoint::from_bytes(bytes).map_err(|error| {
                    Refused::Invalid(format!("field `writer_endpoint`: {error}"))
                })?),
            };
        if share.side == Side::Decode && endpoint.is_none() {
            return Err(FieldError::Missing("writer_endpoint").into());
        }
        let wanted = Allocate {
            share,
            namespace: Namespace::try_from(request.namespace.as_slice())?,
            keys: BlockKey::list(&request.keys)?,
            prompt_tokens: request.prompt_tokens,
            lease_ms: request.lease_ms,
            fetch_until_block: request.fetch_until_block,
            has_remote_writer: endpoint.is_some(),
            is_ephemeral: request.cache_class() == v1::CacheClass::Ephemeral,
            leaves_ssd: request.skip_promotion,
        };
        if self.legs.contains_key(&share) {
            // The same again gives the same answer; anything else is refused by the core.
            self.blocks.allocate(clock::now_ms(), &wanted)?;
            return Ok(self.allocate_reply(share));
        }
        let reserved = match &endpoint {
            Some(endpoint) => {
                // What is held is known only when the core has reserved the rest.
                let pages = layout.pages_for(wanted.prompt_tokens) as usize;
                Some(self.reserve(endpoint, tail::bytes_max(pages, share.side))?)
            }
            None => None,
        };
        match self.blocks.allocate(clock::now_ms(), &wanted) {
            Ok(allocated) => {
                self.publish_freed();
                if !request.replica {
                    self.metrics.asked_blocks.inc_by(wanted.keys.len() as u64);
                    self.metrics.hit_blocks.inc_by(allocated.held_blocks.into());
                }
                let held = &wanted.keys[..allocated.held_blocks as usize];
                self.note_asked(share, wanted.namespace, held);
                self.open_leg(&wanted, &allocated, Pages::new(layout, &allocated.pages), reserved)?;
                let reply = self.allocate_reply(share);
                if request.replica {
                    self.open_replica(share);
                }
                Ok(reply)
            }
            Err(error) => {
                self.unreserve(reserved);
                Err(error.into())
            }
        }
    }

    /// A share whose blocks are copies to have: nobody computes anything, so that it is over when nothing
    /// more comes.
    fn open_replica(&mut self, share: Share) {
        let Some(leg) = self.legs.get_mut(&share) else { return };
        leg.replica = true;
        if leg.incoming.is_none() {
            self.release_replica(share);
        }
    }

    /// All of a copy that comes has come.
    pub(super) fn release_replica(&mut self, share: Share) {
        if self.legs.get(&share).is_some_and(|leg| leg.replica)
            && let Err(error) = self.blocks.release(clock::now_ms(), share)
        {
            tracing::debug!(%share, %error, "the share of a copy of blocks has already ended");
        }
    }

    fn reserve(&mut self, endpoint: &Endpoint, tail_bytes: usize) -> Result<Reserved, Refused> {
        let tail = self.tail_space.take(tail_bytes as u64).ok_or_else(|| {
            let bytes = self.config.tail_bytes;
            let taken = self.tail_space.taken_bytes();
            Refused::NoSpace(format!(
                "a tail needs {tail_bytes} bytes, but {taken} of the {bytes} bytes of `tail_bytes` \
                 are in use: try again later, or raise `tail_bytes`"
            ))
        })?;
        // A share that had this room may have left the tail of the same transaction in it.
        let emptied = self.tails.copy_from(tail.offset_bytes as usize, &tail::NO_TAIL);
        emptied.expect("the room was taken in this memory");
        match self.writers.open(&self.transfer, endpoint, &self.post) {
            Ok(_) => Ok(Reserved { writer: endpoint.incarnation, tail }),
            Err(refused) => {
                self.tail_space.give_back(tail);
                Err(refused)
            }
        }
    }

    fn unreserve(&mut self, reserved: Option<Reserved>) {
        if let Some(Reserved { writer, tail }) = reserved {
            self.tail_space.give_back(tail);
            self.writers.close(writer);
        }
    }

    fn open_leg(
        &mut self,
        wanted: &Allocate,
        allocated: &Allocated,
        pages: Pages,
        reserved: Option<Reserved>,
    ) -> Result<(), Refused> {
        let share = wanted.share;
        let runs = pages.layout().runs_per_page() as u32;
        let incoming = match (allocated.imm, reserved) {
            (Some(imm), Some(Reserved { writer, tail })) => {
                let bytes = tail::bytes_max(allocated.targets.len(), share.side) as u64;
                Some(Incoming {
                    writer: Some(writer),
                    imm: imm.0,
                    pages: allocated.targets.clone(),
                    tail: self.tail_space.shrink(tail, bytes),
                    expected: allocated.targets.len() as u32 * runs + 1,
                    state: IncomingState::Waiting,
                    settling: None,
                })
            }
            // Nothing is to be written after all.
            (_, reserved) => {
                self.unreserve(reserved);
                None
            }
        };
        let expected = incoming.as_ref().map(|incoming| (incoming.imm, incoming.expected));
        self.legs.insert(
            share,
            Leg {
                pages,
                cached_pages: 0,
                held_pages: allocated.held_blocks,
                keyed_pages: wanted.keys.len() as u32,
                committed_pages: 0,
                grown_pages: 0,
                lease_ms: wanted.lease_ms,
                engine: None,
                incoming,
                outgoing: None,
                tail: None,
                finished: false,
                reading: false,
                ordered_by: None,
                replica: false,
                routes: Vec::new(),
            },
        );
        // What is on its way from the SSD is cached when it is there.
        self.set_cached(share, allocated.held_blocks - allocated.promoting_blocks);
        if let Some((imm, count)) = expected
            && let Err(error) = self.expect(share, imm, count)
        {
            self.blocks.abort(clock::now_ms(), share, AbortReason::PeerLost);
            return Err(Refused::NoSpace(format!(
                "cannot register a counter with the transfer engine: {error}"
            )));
        }
        Ok(())
    }

    /// The first pages are cached: their checksums are the stored ones.
    pub(super) fn set_cached(&mut self, share: Share, cached_pages: u32) {
        let Some(leg) = self.legs.get_mut(&share) else { return };
        for page in leg.cached_pages..cached_pages.min(leg.pages.count()) {
            let slot = leg.pages.slot(page);
            let Some(stored) = self.blocks.checksum_of(slot) else {
                tracing::error!(%share, page, "the store node has no checksum of a cached block; report this as a bug");
                return;
            };
            leg.pages.set_whole(page, slot, stored);
        }
        leg.cached_pages = cached_pages;
    }

    fn allocate_reply(&self, share: Share) -> v1::TxAllocateReply {
        let view = self.blocks.share(share);
        let held_blocks = view.as_ref().map_or(0, |view| view.held_blocks);
        let namespace = view.map(|view| view.request.namespace);
        let leg = self.legs.get(&share);
        let targets = leg.zip(namespace).and_then(|(leg, of)| self.write_targets(leg, of));
        v1::TxAllocateReply { incarnation: self.incarnation, cached_blocks: held_blocks, targets }
    }

    fn write_targets(&self, leg: &Leg, namespace: Namespace) -> Option<v1::WriteTargets> {
        let incoming = leg.incoming.as_ref()?;
        let grant = self.writers.grant(incoming.writer?)?;
        Some(v1::WriteTargets {
            endpoint: self.transfer.endpoint().to_bytes(),
            slots_region: grant.slots.to_bytes(),
            layout: Some((&**leg.pages.layout()).into()),
            first_page: incoming.pages.start,
            slots: incoming.pages.clone().map(|page| leg.pages.slot(page).0).collect(),
            imm: incoming.imm,
            expected_count: incoming.expected,
            tail_region: grant.tails.to_bytes(),
            tail_offset_bytes: incoming.tail.offset_bytes,
            tail_bytes_max: u32::try_from(incoming.tail.length_bytes).unwrap_or(u32::MAX),
            namespace: namespace.0.to_vec(),
        })
    }

    pub(super) fn abort(
        &mut self,
        request: v1::TxAbortRequest,
    ) -> Result<v1::TxAbortReply, Refused> {
        let share = Share::from_wire(request.tx, request.side)?;
        let reason = AbortReason::Asked(request.reason);
        let outcome = self.blocks.abort(clock::now_ms(), share, reason);
        Ok(v1::TxAbortReply { known: outcome != AbortOutcome::Tombstoned })
    }

    pub(super) fn renew(&mut self, request: &v1::RenewRequest) -> Result<v1::RenewReply, Refused> {
        let now_ms = clock::now_ms();
        let mut unknown = Vec::new();
        for share in &request.shares {
            let renewed = Share::from_wire(share.tx, share.side)?;
            if self.blocks.renew(now_ms, renewed, request.lease_ms).is_err() {
                unknown.push(*share);
            }
        }
        Ok(v1::RenewReply { unknown })
    }

    /// Carries out what the core decided, until it wants nothing more.
    pub(super) fn run_actions(&mut self) {
        self.run_planned();
        self.plan_tiers();
        self.run_planned();
        self.publish_freed();
    }

    fn run_planned(&mut self) {
        while let Some(action) = self.blocks.poll_action() {
            // Before whoever is told of a slot writes there.
            self.publish_freed();
            match action {
                Action::Bound { share, epoch, bound } => self.bound(share, epoch, bound),
                Action::StopEngine { share, epoch, reason } => {
                    self.stop_engine(share, epoch, &reason);
                }
                Action::StopWriter { share } => self.stop_writer(share),
                Action::StopPush { share } => self.stop_push(share),
                // The counter stays until the share has ended; what arrives is late.
                Action::CancelImm { .. } => {}
                Action::Ended { share, outcome, .. } => self.ended(share, outcome),
                Action::Sink { sink, slot, block, checksum, .. } => self.give_ssd(|shape| {
                    let shape = shape.clone();
                    Job::Sink { sink, slot, block, checksum, shape }
                }),
                Action::Rewrite { sink, key, mark } => {
                    self.give_ssd_job(Job::Rewrite { sink, key, mark });
                }
                Action::Rise { rise, slot, key } => self.give_ssd(|shape| {
                    let shape = shape.clone();
                    Job::Rise { rise, slot, key, shape }
                }),
                Action::Forget { key, follows_none } => {
                    self.give_ssd_job(Job::Forget { key, follows_none });
                }
                Action::Erase { sink, key, namespace } => {
                    self.give_ssd_job(Job::Erase { sink, key, namespace });
                }
                Action::Upload { upload, block, from, checksum } => {
                    self.upload(upload, block, from, checksum);
                }
                Action::Download { rise, slot, block } => self.download(rise, slot, block),
                Action::Discard { discard, namespace, key } => {
                    self.discard(discard, namespace, key);
                }
                Action::Risen { share, blocks, is_all } => {
                    self.source_risen(share, blocks, is_all);
                }
                Action::Kept { keep, blocks, mark } => self.kept(keep, blocks, mark),
                Action::ReadPage { rise, epoch, page, slot } => {
                    self.copy_page(epoch, page, slot, Way::IntoSlot { rise });
                }
                Action::WritePage { copy, epoch, page, slot, checksum } => {
                    self.copy_page(epoch, page, slot, Way::IntoPage { copy, checksum });
                }
                Action::CarryLayers { copy, epoch, page, slot, layers } => {
                    self.copy_page(epoch, page, slot, Way::Layers { copy, layers });
                }
                Action::PagesDropped { epoch, handle } => self.pages_dropped(epoch, handle),
                Action::PagesFilled { epoch, handle, blocks } => {
                    self.pages_filled(epoch, handle, blocks);
                }
            }
        }
    }

    fn ended(&mut self, share: Share, outcome: Outcome) {
        self.stops.forget(share);
        self.engines.let_go(share);
        self.object_risen(share);
        self.clients.shares.remove(&share);
        self.end_leg(share, outcome);
        self.fetch_share_ended(share);
    }

    fn end_leg(&mut self, share: Share, outcome: Outcome) {
        let Some(leg) = self.legs.remove(&share) else { return };
        tracing::debug!(%share, ?outcome, "the store node ended a share");
        if let Some(incoming) = leg.incoming {
            if let Err(error) = self.transfer.cancel_imm(incoming.imm, Completion::Ignore) {
                tracing::warn!(%share, %error, "the store node cannot cancel the counter of landed writes of a share");
            }
            self.tail_space.give_back(incoming.tail);
            if let Some(writer) = incoming.writer {
                self.writers.close(writer);
            }
            let replies = incoming.settling.into_iter().flat_map(|settling| settling.replies);
            for reply in replies {
                let _ = reply.send(Err(Refused::Ended("the share has ended".into())));
            }
        }
        if let Some(reply) = leg.outgoing.and_then(|outgoing| outgoing.reply) {
            let _ = reply.send(Err(Refused::Ended("the share has ended".into())));
        }
    }
}
