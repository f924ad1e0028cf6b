//! What the node says, and what becomes of the sequence it is about.

use kvasir_proto::refusal::{REFUSAL, UNROUTED};
use kvasir_proto::v1::node_to_engine::Message;
use kvasir_proto::{Share, Side, SlotIndex, v1};
use tonic::Status;
use tonic::metadata::MetadataValue;

use super::sequence::{Leg, Resume, State};
use super::{End, Scheduler, release};
use crate::ports::{CachePort, Compute, PortLost};
use crate::tail::EngineTail;

impl<P: CachePort, C: Compute> Scheduler<P, C> {
    /// Handles everything the node has said so far.
    ///
    /// # Errors
    /// [`PortLost`]
    pub(crate) fn handle_all(&mut self) -> Result<(), PortLost> {
        while let Some(message) = self.port.try_recv()? {
            self.handle(message)?;
        }
        Ok(())
    }

    fn handle(&mut self, message: Message) -> Result<(), PortLost> {
        let (tx, side) = match &message {
            Message::Bound(bound) => (bound.tx, bound.side),
            Message::Ready(ready) => (ready.tx, Side::Decode.to_wire()),
            Message::Grown(grown) => (grown.tx, grown.side),
            Message::Stop(stop) => (stop.tx, stop.side),
            Message::Got(got) => return self.handle_got(got),
            // This engine computes in slots.
            Message::PagesDropped(_) | Message::PagesFilled(_) => return Ok(()),
        };
        let share = Share::from_wire(tx, side).map_err(|why| PortLost(why.to_string()))?;
        let Some(&id) = self.by_share.get(&share) else {
            return self.handle_ended(share, &message);
        };
        match message {
            Message::Bound(bound) => self.handle_bound(id, bound),
            Message::Ready(ready) => self.handle_ready(id, &ready),
            Message::Grown(grown) => self.handle_grown(id, &grown),
            Message::Stop(stop) => self.handle_stop(id, &stop),
            Message::Got(_) | Message::PagesDropped(_) | Message::PagesFilled(_) => Ok(()),
        }
    }

    /// A share whose sequence has ended. Either it was released, and the message has crossed the
    /// release: then there is nothing to say. Or its bind was not answered yet: it is released as
    /// soon as it is known to be this engine's, and not before, since the node takes a release of
    /// what was never bound for a broken engine.
    fn handle_ended(&mut self, share: Share, message: &Message) -> Result<(), PortLost> {
        if !self.unanswered.remove(&share) {
            return Ok(());
        }
        let bound = match message {
            Message::Bound(bound) => bound.status() == v1::BindStatus::Ok,
            Message::Stop(_) => true,
            Message::Ready(_)
            | Message::Grown(_)
            | Message::Got(_)
            | Message::PagesDropped(_)
            | Message::PagesFilled(_) => false,
        };
        if bound { self.port.send(release(share)) } else { Ok(()) }
    }

    fn handle_bound(&mut self, id: u64, bound: v1::Bound) -> Result<(), PortLost> {
        let refusal = match bound.status() {
            v1::BindStatus::Ok => None,
            v1::BindStatus::Taken => Some("another call has already bound this share"),
            v1::BindStatus::Gone | v1::BindStatus::Unspecified => {
                Some("the store node no longer knows this transaction")
            }
        };
        if let Some(why) = refusal {
            let end = End::Failed { status: Status::aborted(why), label: "stopped" };
            self.forget(id, end);
            return Ok(());
        }
        let mut slots = match self.checked(&bound.slots) {
            Ok(slots) => slots,
            Err(why) => return self.broken(id, why),
        };
        let sequence = self.sequences.get_mut(&id).expect("looked up by the caller");
        let prefills = sequence.leg != Leg::Decode;
        // The share has slots, and may have cached rows, for what is not elsewhere. What is computed in its
        // place follows what is elsewhere of the beginning, and ends before the first chunk.
        let elsewhere = sequence.away.tokens_elsewhere();
        let pages = (sequence.prompt_tokens - elsewhere).div_ceil(sequence.page_tokens);
        let beginning = sequence.away.beginning().unwrap_or(0..0);
        if bound.cached_tokens < beginning.start {
            let why = "the store node no longer has the blocks before the routed blocks";
            let mut status = Status::failed_precondition(why);
            status.metadata_mut().insert(REFUSAL, MetadataValue::from_static(UNROUTED));
            return self.end(id, End::Failed { status, label: "unrouted" });
        }
        let begins = beginning.end;
        let cached = (begins - beginning.start).saturating_add(bound.cached_tokens);
        let cached_max = match sequence.away.until(begins, sequence.prompt_tokens) {
            until if until < sequence.prompt_tokens => until,
            prompt => prompt - u32::from(prefills),
        };
        if sequence.state != State::Binding || slots.len() != pages as usize || cached > cached_max
        {
            let (state, prompt, got) = (sequence.state, sequence.prompt_tokens, slots.len());
            let why = format!(
                "the store node bound a share of {prompt} prompt tokens in the state {state:?} to {got} \
                 slots with {cached} cached tokens"
            );
            return self.broken(id, why);
        }
        // The first ones may have cached rows: gaps have the last ones.
        let own = slots.split_off(slots.len() - sequence.away.lacks(sequence.page_tokens));
        sequence.slots = slots;
        sequence.add_slots(own);
        sequence.cached_tokens = bound.cached_tokens + elsewhere;
        if !prefills {
            sequence.state = State::Arriving;
            sequence.accept();
            return Ok(());
        }
        let resume = Resume::Prefilling { computed: sequence.away.skip(cached) };
        sequence.state = State::Filling { resume };
        sequence.admitted.settle(sequence.cached_tokens);
        self.runnable.push(id);
        self.fill(id)
    }

    fn handle_ready(&mut self, id: u64, ready: &v1::Ready) -> Result<(), PortLost> {
        let vocab = self.options.vocab;
        let sequence = self.sequences.get_mut(&id).expect("looked up by the caller");
        if sequence.state != State::Arriving {
            let why = format!(
                "the store node sent `Ready` for a share in the state {:?}",
                sequence.state
            );
            return self.broken(id, why);
        }
        let Some(first) = EngineTail::first_token(&ready.tail, vocab) else {
            return self.broken(id, "cannot read the tail from the prefill engine".into());
        };
        sequence.state = State::Decoding;
        // An answer of one token needs no seat.
        let complete = sequence.answer.ends_with(&first);
        sequence.first_token = Some(first);
        if complete {
            return self.begin_answer(id);
        }
        self.runnable.push(id);
        Ok(())
    }

    fn handle_grown(&mut self, id: u64, grown: &v1::Grown) -> Result<(), PortLost> {
        let slots = match self.checked(&grown.slots) {
            Ok(slots) => slots,
            Err(why) => return self.broken(id, why),
        };
        let now_us = self.shared.clock.now_us();
        let sequence = self.sequences.get_mut(&id).expect("looked up by the caller");
        sequence.growth.handle_grown(!slots.is_empty(), now_us);
        sequence.add_slots(slots);
        Ok(())
    }

    fn handle_stop(&mut self, id: u64, stop: &v1::Stop) -> Result<(), PortLost> {
        let status = Status::aborted(format!("the store node ended the request: {}", stop.reason));
        self.end(id, End::Failed { status, label: "stopped" })
    }

    /// A slot that does not exist would be a write outside the cache.
    pub(super) fn checked(&self, slots: &[u32]) -> Result<Vec<SlotIndex>, String> {
        let total = self.port.slots_total();
        match slots.iter().find(|&&slot| slot >= total) {
            Some(slot) => Err(format!("the store node granted slot {slot} of {total}")),
            None => Ok(slots.iter().copied().map(SlotIndex).collect()),
        }
    }
}
