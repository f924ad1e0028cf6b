//! Pages that come from another node: counting them, believing the tail, telling the engine.

use kvasir_blocks::moving::tail;
use kvasir_blocks::moving::tail_space::TailRange;
use kvasir_blocks::{AbortReason, Arrival, AttachEpoch, BindError, Binding, Bound, ShareView};
use kvasir_proto::{Share, Side, v1};
use kvasir_transfer::memory::SharedMemory;
use kvasir_transfer::{Completion, Expect, Outcome, SubmitError};

use super::Owner;
use crate::clock;
use crate::node::command::{Refused, Reply};
use crate::node::inbox::End;
use crate::node::leg::{IncomingState, Settling};

impl Owner {
    /// Waits for the writes of a share.
    pub(super) fn expect(&self, share: Share, imm: u32, count: u32) -> Result<(), SubmitError> {
        let post = self.post.clone();
        let done =
            Completion::callback(move |outcome| post.end(End::Counted { share, imm, outcome }));
        self.transfer.expect_imm(Expect { imm, count: count.into(), deadline: None }, done)
    }

    /// The count is reached: every page and the tail have landed.
    pub(super) fn counted(&mut self, share: Share, imm: u32, outcome: Outcome) {
        let Some(leg) = self.legs.get_mut(&share) else { return };
        let Some(incoming) = leg.incoming.as_mut().filter(|i| i.imm == imm) else { return };
        if outcome.is_err() || !matches!(incoming.state, IncomingState::Waiting) {
            return;
        }
        let room = tail_room(&self.tails, incoming.tail);
        match tail::decode(&room, share.tx, incoming.pages.len()) {
            Ok(v1::Tail { checksums, engine, .. }) => self.arrived(share, checksums, engine),
            Err(error) => {
                tracing::error!(%share, %error, "the store node rejected an invalid tail; aborting the share");
                self.metrics.bad_tails.inc();
                self.metrics.fetches.with_label_values(&["invalid_tail"]).inc();
                self.blocks.abort(clock::now_ms(), share, AbortReason::BadArrival);
            }
        }
    }

    fn arrived(&mut self, share: Share, checksums: Vec<u64>, engine: Vec<u8>) {
        let copies = checksums.clone();
        let label = match self.blocks.arrived(clock::now_ms(), share, checksums) {
            Ok(Arrival::Settled { cached_blocks }) => {
                let Some(leg) = self.legs.get_mut(&share) else { return };
                let Some(incoming) = &mut leg.incoming else { return };
                incoming.state = IncomingState::Arrived { engine, told: false };
                for (page, checksum) in incoming.pages.clone().zip(copies) {
                    let slot = leg.pages.slot(page);
                    leg.pages.set_whole(page, slot, checksum);
                }
                leg.cached_pages = leg.cached_pages.max(cached_blocks);
                self.stops.forget(share);
                self.answer_settling(share, cached_blocks);
                self.tell_ready(share);
                self.pump(share);
                "arrived"
            }
            Ok(Arrival::Late) => "share_ended",
            Err(error) => {
                tracing::debug!(%share, %error, "data arrived for a share that has ended");
                "share_ended"
            }
        };
        self.metrics.fetches.with_label_values(&[label]).inc();
    }

    /// An engine takes a share over.
    pub(super) fn bind(&mut self, share: Share, epoch: AttachEpoch) {
        match self.blocks.bind(share, epoch) {
            Ok(Binding::Bound(bound)) => self.bound(share, epoch, bound),
            // `Action::Bound` follows.
            Ok(Binding::Waiting) => {}
            Err(error) => {
                let status = match error {
                    BindError::Gone => v1::BindStatus::Gone,
                    BindError::Taken => v1::BindStatus::Taken,
                };
                let message = v1::Bound {
                    tx: Some(share.tx.into()),
                    side: share.side.to_wire(),
                    status: status.into(),
                    ..v1::Bound::default()
                };
                self.tell_engine(epoch, v1::node_to_engine::Message::Bound(message));
            }
        }
    }

    /// The slots are settled: the engine may begin.
    pub(super) fn bound(&mut self, share: Share, epoch: AttachEpoch, bound: Bound) {
        if self.engines.get(epoch).is_none() {
            return;
        }
        let Some(leg) = self.legs.get_mut(&share) else { return };
        leg.engine = Some(epoch);
        leg.pages.set_slots(&bound.slots);
        let block_tokens = leg.pages.layout().block_tokens();
        self.set_cached(share, bound.cached_tokens / block_tokens);
        let view = self.blocks.share(share);
        let message = v1::Bound {
            tx: Some(share.tx.into()),
            side: share.side.to_wire(),
            status: v1::BindStatus::Ok.into(),
            slots: bound.slots.iter().map(|slot| slot.0).collect(),
            cached_tokens: bound.cached_tokens,
            ephemeral: view.is_some_and(|view| view.request.is_ephemeral),
        };
        self.tell_engine(epoch, v1::node_to_engine::Message::Bound(message));
        self.tell_ready(share);
        // What is cached can be pushed at once.
        self.pump(share);
    }

    /// Hands the tail on, once: when all has arrived and the engine has bound the share.
    fn tell_ready(&mut self, share: Share) {
        let Some(leg) = self.legs.get_mut(&share) else { return };
        let Some(incoming) = &mut leg.incoming else { return };
        let IncomingState::Arrived { engine, told } = &mut incoming.state else { return };
        let Some(epoch) = leg.engine.filter(|_| share.side == Side::Decode) else { return };
        if std::mem::replace(told, true) {
            return;
        }
        let message = v1::Ready { tx: Some(share.tx.into()), tail: std::mem::take(engine) };
        // From now on the engine renews, at the next of its regular times.
        let _ = self.blocks.renew(clock::now_ms(), share, leg.lease_ms);
        self.tell_engine(epoch, v1::node_to_engine::Message::Ready(message));
    }

    /// Settles a fetch whose source sent less than was asked for.
    pub(super) fn commit(
        &mut self,
        request: &v1::TxCommitRequest,
        reply: Reply<v1::TxCommitReply>,
    ) {
        if let Err((refused, reply)) = self.begin_settling(request, reply) {
            let _ = reply.send(Err(refused));
        }
    }

    fn begin_settling(
        &mut self,
        request: &v1::TxCommitRequest,
        reply: Reply<v1::TxCommitReply>,
    ) -> Result<(), (Refused, Reply<v1::TxCommitReply>)> {
        let share = match Share::from_wire(request.tx, request.side) {
            Ok(share) => share,
            Err(error) => return Err((error.into(), reply)),
        };
        let Some(leg) = self.legs.get_mut(&share) else {
            return Err((Refused::NotFound("no such share".into()), reply));
        };
        let Some(incoming) = leg.incoming.as_mut().filter(|_| share.side == Side::Prefill) else {
            return Err((Refused::Precondition("the share has no fetch".into()), reply));
        };
        if !matches!(incoming.state, IncomingState::Waiting) {
            let _ = reply.send(Ok(v1::TxCommitReply { cached_blocks: leg.cached_pages }));
            self.release_replica(share);
            return Ok(());
        }
        let good_pages = request.valid_blocks.min(incoming.pages.len() as u32);
        let settling =
            incoming.settling.get_or_insert(Settling { good_pages, replies: Vec::new() });
        settling.good_pages = settling.good_pages.min(good_pages);
        settling.replies.push(reply);
        if good_pages == incoming.pages.len() as u32 && !request.source_lost {
            // All of it landed: the count is about to be reached.
            return Ok(());
        }
        // A source that is lost does not answer, and is cut off then. That a call to it failed is no
        // reason yet: it may be writing for others.
        if let Err(error) = self.blocks.stop_writer(share) {
            tracing::debug!(%share, %error, "the store node cannot ask the writer to stop");
        }
        self.run_actions();
        // It may have stopped before.
        self.settle_fetch(share);
        Ok(())
    }

    /// Tries to settle a fetch with less, once its writer writes no more. The checksums are those
    /// that the source had stored: to hash what came would make a block good that was rotten there.
    /// Without them nothing is kept.
    pub(super) fn settle_fetch(&mut self, share: Share) {
        let Some(leg) = self.legs.get_mut(&share) else { return };
        let Some(incoming) = &mut leg.incoming else { return };
        let Some(settling) = &incoming.settling else { return };
        if !matches!(incoming.state, IncomingState::Waiting) {
            return;
        }
        let writing = |view: ShareView<'_>| view.writer_may_write;
        if self.blocks.share(share).is_none_or(writing) {
            return;
        }
        let room = tail_room(&self.tails, incoming.tail);
        let mut checksums = tail::decode_part(&room, share.tx).unwrap_or_else(|error| {
            tracing::warn!(%share, %error, "the store node cannot read the checksums of fetched pages");
            Vec::new()
        });
        checksums.truncate(settling.good_pages as usize);
        let copies = checksums.clone();
        match self.blocks.settle_fetch(share, checksums) {
            Ok(cached_blocks) => {
                incoming.state = IncomingState::Settled;
                for (page, checksum) in (incoming.pages.start..).zip(copies) {
                    let slot = leg.pages.slot(page);
                    leg.pages.set_whole(page, slot, checksum);
                }
                leg.cached_pages = leg.cached_pages.max(cached_blocks);
                self.metrics.fetches.with_label_values(&["partial"]).inc();
                self.answer_settling(share, cached_blocks);
            }
            Err(error) => {
                tracing::debug!(%share, %error, "the store node cannot settle a fetch yet");
            }
        }
    }

    fn answer_settling(&mut self, share: Share, held_blocks: u32) {
        let incoming = self.legs.get_mut(&share).and_then(|leg| leg.incoming.as_mut());
        let settling = incoming.and_then(|incoming| incoming.settling.take());
        let Some(settling) = settling else { return };
        for reply in settling.replies {
            let _ = reply.send(Ok(v1::TxCommitReply { cached_blocks: held_blocks }));
        }
        self.release_replica(share);
    }
}

/// What a writer left in the room for its tail.
fn tail_room(tails: &SharedMemory, range: TailRange) -> Vec<u8> {
    let mut room = vec![0; range.length_bytes as usize];
    let copied = tails.copy_to(range.offset_bytes as usize, &mut room);
    copied.expect("the room was taken in this memory");
    room
}
