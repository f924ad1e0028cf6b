//! Making sure that nobody writes any more. The receiver asks the writing node to stop; the writer
//! answers when each write it issued has landed or failed. A writer that does not answer, or that
//! is not sure, is cut off. Only then does the block core hear that its slots are free.

use std::time::Duration;

use kvasir_blocks::AbortReason;
use kvasir_blocks::moving::PushName;
use kvasir_blocks::moving::peer_message::PeerMessage;
use kvasir_blocks::moving::writer_stops::AfterCut;
use kvasir_blocks::moving::writers::CutRound;
use kvasir_proto::Share;
use kvasir_transfer::{Completion, Outcome, PeerEvent, PeerId};

use super::Owner;
use crate::clock;
use crate::node::inbox::End;
use crate::node::leg::IncomingState;
use crate::node::peer_message::{self, Heard};

impl Owner {
    /// Receiver: asks the writer of a share to stop.
    pub(super) fn stop_writer(&mut self, share: Share) {
        let incoming = self.legs.get(&share).and_then(|leg| leg.incoming.as_ref());
        let Some(incoming) = incoming else {
            // Nobody was ever given a place to write.
            self.blocks.writer_stopped(clock::now_ms(), share);
            return;
        };
        let (writer, imm) = (incoming.writer, incoming.imm);
        let session = |name| Some((name, self.writers.peer(&self.transfer, name)?));
        let Some((writer, peer)) = writer.and_then(session) else {
            self.blocks.writer_cut_off(clock::now_ms(), share);
            self.settle_fetch(share);
            return;
        };
        let timeout_ms = self.config.peer_stop_timeout_ms;
        self.stops.ask(share, clock::now_ms() + timeout_ms);
        let name = PushName { receiver: self.transfer.incarnation(), imm };
        let post = self.post.clone();
        let done = Completion::callback(move |outcome| post.end(End::Sent { share, outcome }));
        let message = peer_message::to_bytes(PeerMessage::StopPush(name));
        let deadline = Duration::from_millis(timeout_ms);
        if let Err(error) = self.transfer.send(peer, message, deadline, done) {
            tracing::warn!(%share, %error, "the store node cannot ask the writer to stop; cutting it off");
            self.cut_off(writer);
        }
    }

    /// The ask was handed over, or the writer is not to be reached.
    pub(super) fn stop_sent(&mut self, share: Share, outcome: Outcome) {
        if let Err(error) = outcome
            && self.stops.waits(share)
            && let Some(writer) = self.writer_of(share)
        {
            tracing::warn!(%share, %error, "the store node cannot reach the writer; cutting it off");
            self.cut_off(writer);
        }
    }

    /// The node that may write a share, unless it has been cut off.
    fn writer_of(&self, share: Share) -> Option<u64> {
        self.legs.get(&share)?.incoming.as_ref()?.writer
    }

    /// Begins to cut a writer off; `writer_cut` follows.
    pub(super) fn cut_off(&mut self, writer: u64) {
        self.writers.cut_off(&self.transfer, writer, &self.post);
    }

    /// A part of cutting off is confirmed; with the last one, every share that the writer might
    /// have written is safe.
    pub(super) fn writer_cut(&mut self, writer: u64, round: CutRound, outcome: Outcome) {
        if !self.writers.cut_done(writer, round, outcome) {
            return;
        }
        tracing::warn!(writer, "the store node cut off a lost node");
        self.metrics.writers_cut.inc();
        let of_writer = |share: &Share| self.writer_of(*share) == Some(writer);
        let shares: Vec<Share> = self.legs.keys().copied().filter(of_writer).collect();
        let now_ms = clock::now_ms();
        for share in shares {
            let incoming = self.legs.get_mut(&share).and_then(|leg| leg.incoming.as_mut());
            let Some(incoming) = incoming else { continue };
            incoming.writer = None;
            let waiting = matches!(incoming.state, IncomingState::Waiting);
            match self.stops.cut(share, waiting) {
                AfterCut::Stopped => {
                    self.blocks.writer_cut_off(now_ms, share);
                    self.settle_fetch(share);
                }
                AfterCut::Abort => {
                    self.blocks.abort(now_ms, share, AbortReason::PeerLost);
                }
                AfterCut::Nothing => {}
            }
        }
    }

    /// Cuts off the writers that did not answer in time, and again those where it failed.
    pub(super) fn look_after_stops(&mut self, now_ms: u64) {
        for share in self.stops.take_late(now_ms) {
            let Some(writer) = self.writer_of(share) else { continue };
            tracing::warn!(%share, "the node that writes to this store node did not confirm that it stopped; cutting it off");
            self.cut_off(writer);
        }
        for writer in self.writers.unfinished() {
            self.cut_off(writer);
        }
    }

    pub(super) fn take_message(&mut self, peer: PeerId, bytes: &[u8]) {
        match peer_message::from_bytes(bytes) {
            Ok(Heard::OfPush(message)) if !self.may_say(peer, message) => {
                tracing::warn!(
                    %peer, ?message,
                    "the store node refused a message of a peer about a push of another node"
                );
                self.metrics.messages_refused.inc();
            }
            Ok(Heard::OfPush(message)) => match message {
                PeerMessage::StopPush(name) => self.asked_to_stop(peer, name),
                PeerMessage::Stopped(name) => self.writer_answered(name, true),
                PeerMessage::Unsure(name) => self.writer_answered(name, false),
                PeerMessage::Failed(name) => self.push_failed(name),
                PeerMessage::Probe => {}
            },
            Ok(Heard::OfObjects(message)) => self.take_objects_message(peer, *message),
            Err(error) => {
                tracing::warn!(%peer, %error, "the store node cannot decode a message of a peer; check the versions of both");
            }
        }
        self.run_actions();
    }

    /// Whether a message comes from the one whom it concerns.
    fn may_say(&self, peer: PeerId, message: PeerMessage) -> bool {
        message.may_come(peer.incarnation(), self.transfer.incarnation(), |imm| {
            let mut incoming = self.legs.values().filter_map(|leg| leg.incoming.as_ref());
            incoming.find(|incoming| incoming.imm == imm)?.writer
        })
    }

    pub(super) fn take_peer_event(&mut self, event: PeerEvent) {
        match event {
            PeerEvent::SessionLost { incarnation, .. }
            | PeerEvent::WriterLost { incarnation, .. } => {
                if self.stops.shares().any(|share| self.writer_of(share) == Some(incarnation)) {
                    self.cut_off(incarnation);
                } else {
                    self.probe_writer(incarnation);
                }
            }
        }
        self.run_actions();
    }

    /// Writer: stops a push and answers when nothing of it is under way.
    fn asked_to_stop(&mut self, peer: PeerId, name: PushName) {
        // Whatever becomes of it now, it must not begin later.
        self.sent.stop(name);
        let ours = |leg: &crate::node::leg::Leg| {
            leg.outgoing.as_ref().is_some_and(|o| o.target.name == name && !o.leaving.is_settled())
        };
        let share = self.legs.iter().find(|(_, leg)| ours(leg)).map(|(share, _)| *share);
        let Some(share) = share else {
            return self.tell_peer(peer, PeerMessage::ended(name, self.sent.is_unsure(name)));
        };
        let leg = self.legs.get_mut(&share);
        if let Some(outgoing) = leg.and_then(|leg| leg.outgoing.as_mut()) {
            outgoing.leaving.asked_to_stop(peer);
        }
        self.halt_push(share);
    }

    /// Receiver: the writer has said that nothing of it is under way, or that it is not sure.
    fn writer_answered(&mut self, name: PushName, sure: bool) {
        let asked = |share: &Share| {
            let incoming = self.legs.get(share).and_then(|leg| leg.incoming.as_ref());
            incoming.is_some_and(|incoming| incoming.imm == name.imm)
        };
        let Some(share) = self.stops.shares().find(asked) else { return };
        if sure {
            self.stops.forget(share);
            self.blocks.writer_stopped(clock::now_ms(), share);
            self.settle_fetch(share);
        } else if let Some(writer) = self.writer_of(share) {
            self.cut_off(writer);
        }
    }

    /// Says something to another node; if it does not arrive, that node asks again or cuts off.
    pub(super) fn tell_peer(&self, peer: PeerId, message: PeerMessage) {
        let deadline = Duration::from_millis(self.config.peer_stop_timeout_ms);
        let bytes = peer_message::to_bytes(message);
        let sent = self.transfer.send(peer, bytes, deadline, Completion::Ignore);
        if let Err(error) = sent {
            tracing::warn!(%peer, %error, "the store node cannot answer a peer");
        }
    }
}
