//! Making sure that nobody writes any more: asking the writer, believing it, or cutting it off; and telling
//! receivers of pushes that failed.

use std::time::Duration;

use kvasir_blocks::AbortReason;
use kvasir_blocks::moving::PushName;
use kvasir_blocks::moving::peer_message::PeerMessage;
use kvasir_blocks::moving::writer_stops::AfterCut;
use kvasir_blocks::moving::writers::CutRound;
use kvasir_proto::{Share, Side};
use kvasir_transfer::{Completion, Endpoint, Outcome, PeerEvent, PeerId};

use super::{End, IncomingState, Running, STOP_TIMEOUT_MS};
use crate::context::Context;
use crate::seen::Seen;

const TRIES: u32 = 4;

/// A push of which its receiver does not know yet that it has failed.
#[derive(Debug)]
pub struct Failure {
    pub name: PushName,
    pub receiver: Endpoint,
    pub tries: u32,
}

/// What two nodes say to each other, in thirteen bytes.
fn to_bytes(message: PeerMessage) -> Vec<u8> {
    let nameless = PushName { receiver: 0, imm: 0 };
    let (kind, name) = match message {
        PeerMessage::StopPush(name) => (1, name),
        PeerMessage::Stopped(name) => (2, name),
        PeerMessage::Unsure(name) => (3, name),
        PeerMessage::Failed(name) => (4, name),
        PeerMessage::Probe => (5, nameless),
    };
    let mut bytes = vec![kind];
    bytes.extend(name.receiver.to_le_bytes());
    bytes.extend(name.imm.to_le_bytes());
    bytes
}

fn from_bytes(bytes: &[u8]) -> PeerMessage {
    let (receiver, imm) = (&bytes[1..9], &bytes[9..13]);
    let receiver = u64::from_le_bytes(receiver.try_into().expect("eight bytes"));
    let imm = u32::from_le_bytes(imm.try_into().expect("four bytes"));
    let name = PushName { receiver, imm };
    match bytes[0] {
        1 => PeerMessage::StopPush(name),
        2 => PeerMessage::Stopped(name),
        3 => PeerMessage::Unsure(name),
        4 => PeerMessage::Failed(name),
        _ => PeerMessage::Probe,
    }
}

impl Running {
    fn deadline() -> Duration {
        Duration::from_millis(STOP_TIMEOUT_MS)
    }

    /// Receiver: asks the writer of a share to stop.
    pub(super) fn stop_writer(&mut self, context: &mut Context, share: Share) {
        let incoming = self.legs.get(&share).and_then(|leg| leg.incoming.as_ref());
        let Some(incoming) = incoming else {
            self.blocks.writer_stopped(context.now_ms(), share);
            return;
        };
        let (writer, imm) = (incoming.writer, incoming.imm);
        let session = |name| Some((name, self.writers.peer(&self.transfer, name)?));
        let Some((writer, peer)) = writer.and_then(session) else {
            self.blocks.writer_cut_off(context.now_ms(), share);
            self.settle_fetch(context, share);
            return;
        };
        self.stops.ask(share, context.now_ms() + STOP_TIMEOUT_MS);
        let name = PushName { receiver: self.transfer.endpoint().incarnation, imm };
        let post = self.post.clone();
        let done = Completion::callback(move |outcome| post.end(End::Sent { share, outcome }));
        let message = to_bytes(PeerMessage::StopPush(name));
        if self.transfer.send(peer, message, Running::deadline(), done).is_err() {
            self.cut_off(context, writer);
        }
    }

    /// The ask was handed over, or the writer is not to be reached.
    pub(super) fn stop_sent(&mut self, context: &mut Context, share: Share, outcome: Outcome) {
        if outcome.is_err()
            && self.stops.waits(share)
            && let Some(writer) = self.writer_of(share)
        {
            self.cut_off(context, writer);
        }
    }

    fn writer_of(&self, share: Share) -> Option<u64> {
        self.legs.get(&share)?.incoming.as_ref()?.writer
    }

    fn cut_off(&mut self, context: &mut Context, writer: u64) {
        self.writers.cut_off(context, self.at, writer);
    }

    /// It is a part's turn.
    pub fn cut_part(&mut self, context: &mut Context, part: (u64, CutRound, u32)) {
        self.writers.cut_part(context, &self.transfer, part, &self.post);
    }

    /// With the last confirmation every share that the writer might have written is safe.
    pub(super) fn writer_cut(
        &mut self,
        context: &mut Context,
        writer: u64,
        round: CutRound,
        outcome: Outcome,
    ) {
        if !self.writers.cut_done(writer, round, outcome) {
            return;
        }
        let of_writer = |share: &Share| self.writer_of(*share) == Some(writer);
        let shares: Vec<Share> = self.legs.keys().copied().filter(of_writer).collect();
        let now_ms = context.now_ms();
        let incoming = |share: &Share| Some(self.legs.get(share)?.incoming.as_ref()?.imm);
        let imms = shares.iter().filter_map(incoming).collect();
        context.see(Seen::CutOff { at: self.at, imms });
        for share in shares {
            let incoming = self.legs.get_mut(&share).and_then(|leg| leg.incoming.as_mut());
            let Some(incoming) = incoming else { continue };
            incoming.writer = None;
            let waiting = matches!(incoming.state, IncomingState::Waiting);
            match self.stops.cut(share, waiting) {
                AfterCut::Stopped => {
                    self.blocks.writer_cut_off(now_ms, share);
                    self.settle_fetch(context, share);
                }
                AfterCut::Abort => {
                    self.blocks.abort(now_ms, share, AbortReason::PeerLost);
                }
                AfterCut::Nothing => {}
            }
        }
    }

    /// Cuts off the writers that did not answer in time, and again those where it failed.
    pub(super) fn look_after_stops(&mut self, context: &mut Context) {
        for share in self.stops.take_late(context.now_ms()) {
            if let Some(writer) = self.writer_of(share) {
                context.covers("a writer does not answer");
                self.cut_off(context, writer);
            }
        }
        for writer in self.writers.unfinished() {
            self.cut_off(context, writer);
        }
    }

    pub(super) fn take_message(&mut self, context: &mut Context, peer: PeerId, bytes: &[u8]) {
        let message = from_bytes(bytes);
        if !self.may_say(peer, message) {
            return context.covers("a peer speaks of what is not its own");
        }
        match message {
            PeerMessage::StopPush(name) => self.asked_to_stop(context, peer, name),
            PeerMessage::Stopped(name) => self.writer_answered(context, name, true),
            PeerMessage::Unsure(name) => self.writer_answered(context, name, false),
            PeerMessage::Failed(name) => self.push_failed(context, name),
            PeerMessage::Probe => {}
        }
    }

    /// Whether a message comes from the one whom it concerns.
    fn may_say(&self, peer: PeerId, message: PeerMessage) -> bool {
        let to = self.transfer.endpoint().incarnation;
        message.may_come(peer.incarnation(), to, |imm| {
            let mut incoming = self.legs.values().filter_map(|leg| leg.incoming.as_ref());
            incoming.find(|incoming| incoming.imm == imm)?.writer
        })
    }

    pub(super) fn take_peer_event(&mut self, context: &mut Context, event: PeerEvent) {
        let (PeerEvent::SessionLost { incarnation, .. }
        | PeerEvent::WriterLost { incarnation, .. }) = event;
        if self.stops.shares().any(|share| self.writer_of(share) == Some(incarnation)) {
            self.cut_off(context, incarnation);
        } else {
            self.probe_writer(incarnation);
        }
    }

    /// Writer: stops a push and answers when nothing of it is under way.
    fn asked_to_stop(&mut self, context: &mut Context, peer: PeerId, name: PushName) {
        self.sent.stop(name);
        let ours = self.legs.iter_mut().find_map(|(share, leg)| {
            let outgoing = leg.outgoing.as_mut()?;
            let ours = outgoing.leaving.name() == name && !outgoing.leaving.is_settled();
            ours.then_some((*share, outgoing))
        });
        let Some((share, outgoing)) = ours else {
            let unsure = self.sent.is_unsure(name);
            if !unsure && let Some(to) = context.life_of(name.receiver) {
                context.see(Seen::PushOver { to, imm: name.imm });
            }
            return self.tell_peer(peer, PeerMessage::ended(name, unsure));
        };
        outgoing.leaving.asked_to_stop(peer);
        self.halt_push(context, share);
    }

    /// Receiver: the writer has said that nothing of it is under way, or that it is not sure.
    fn writer_answered(&mut self, context: &mut Context, name: PushName, sure: bool) {
        let asked = |share: &Share| {
            let incoming = self.legs.get(share).and_then(|leg| leg.incoming.as_ref());
            incoming.is_some_and(|incoming| incoming.imm == name.imm)
        };
        let Some(share) = self.stops.shares().find(asked) else { return };
        if sure {
            self.stops.forget(share);
            self.blocks.writer_stopped(context.now_ms(), share);
            self.settle_fetch(context, share);
        } else if let Some(writer) = self.writer_of(share) {
            context.covers("a writer is not sure");
            self.cut_off(context, writer);
        }
    }

    pub(super) fn tell_peer(&self, peer: PeerId, message: PeerMessage) {
        // When it does not arrive, that node asks again or cuts off.
        let _ =
            self.transfer.send(peer, to_bytes(message), Running::deadline(), Completion::Ignore);
    }

    // ---- pushes that will never be whole ----

    pub(super) fn try_to_tell(&mut self, mut failure: Failure) {
        failure.tries += 1;
        let Ok(peer) = self.transfer.connect(&failure.receiver) else { return };
        let message = to_bytes(PeerMessage::Failed(failure.name));
        let post = self.post.clone();
        let done = Completion::callback(move |outcome| post.end(End::Told { failure, outcome }));
        // Not taken only when this engine has ended.
        let _ = self.transfer.send(peer, message, Running::deadline(), done);
    }

    pub(super) fn failure_told(&mut self, failure: Failure, outcome: Outcome) {
        if outcome.is_err() && failure.tries < TRIES {
            self.try_to_tell(failure);
        }
    }

    /// Receiver: what is missing of this push will not come.
    fn push_failed(&mut self, context: &mut Context, name: PushName) {
        let waits = self.legs.iter().find(|(share, leg)| {
            share.side == Side::Decode
                && leg.incoming.as_ref().is_some_and(|incoming| {
                    incoming.imm == name.imm && matches!(incoming.state, IncomingState::Waiting)
                })
        });
        if let Some((share, _)) = waits {
            context.covers("a receiver is told that a push has failed");
            self.blocks.abort(context.now_ms(), *share, AbortReason::PeerLost);
        }
    }

    /// Receiver: a connection of this writer is lost.
    fn probe_writer(&mut self, writer: u64) {
        let waits = self.legs.values().filter_map(|leg| leg.incoming.as_ref()).any(|incoming| {
            incoming.writer == Some(writer) && matches!(incoming.state, IncomingState::Waiting)
        });
        let Some(peer) = self.writers.peer(&self.transfer, writer).filter(|_| waits) else {
            return;
        };
        let post = self.post.clone();
        let done = Completion::callback(move |outcome| post.end(End::Probed { writer, outcome }));
        let message = to_bytes(PeerMessage::Probe);
        // Not taken only when this engine has ended.
        let _ = self.transfer.send(peer, message, Running::deadline(), done);
    }

    pub(super) fn writer_probed(&mut self, context: &mut Context, writer: u64, outcome: Outcome) {
        if outcome.is_err() {
            context.covers("a writer is not there any more");
            self.cut_off(context, writer);
        }
    }
}
