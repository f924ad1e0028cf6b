//! Pushes that will never be whole, so that nobody waits for them: the prefill engine may have done
//! its part and gone on, and then only the two nodes know.
//!
//! A writer whose push has failed tells the receiver. The session that failed carries nothing any more, so it is told over the next one. That one may
//! fail as well (after a cut-off the first one only brings the news of it), so there are a few
//! tries. A receiver that is not reached waits until its lease or the request ends.
//!
//! A receiver that waits for a writer whose connection is lost looks whether it is still there: it
//! may be dead and tell nobody anything.

use std::time::Duration;

use kvasir_blocks::AbortReason;
use kvasir_blocks::moving::PushName;
use kvasir_blocks::moving::peer_message::PeerMessage;
use kvasir_proto::Side;
use kvasir_transfer::{Completion, Endpoint, Outcome};

use super::Owner;
use crate::clock;
use crate::node::SHARES_MAX;
use crate::node::inbox::End;
use crate::node::leg::{IncomingState, Leg};
use crate::node::peer_message;

const TRIES: u32 = 4;

/// A push of which its receiver does not know yet that it has failed.
#[derive(Debug)]
pub(crate) struct Failure {
    name: PushName,
    receiver: Endpoint,
    tries: u32,
}

impl Owner {
    /// Writer: tells the receiver in the background.
    pub(super) fn tell_failed(&mut self, name: PushName, receiver: Endpoint) {
        if self.failures_under_way >= SHARES_MAX {
            tracing::warn!(
                imm = name.imm,
                "too many notifications are in flight; the store node does not tell a receiver that its push failed"
            );
            return;
        }
        self.failures_under_way += 1;
        self.try_to_tell(Box::new(Failure { name, receiver, tries: 0 }));
    }

    fn try_to_tell(&mut self, mut failure: Box<Failure>) {
        failure.tries += 1;
        let deadline = Duration::from_millis(self.config.peer_stop_timeout_ms);
        let message = peer_message::to_bytes(PeerMessage::Failed(failure.name));
        let peer = match self.transfer.connect(&failure.receiver) {
            Ok(peer) => peer,
            Err(error) => {
                tracing::warn!(
                    imm = failure.name.imm, %error,
                    "the store node cannot connect to the receiver of a failed push"
                );
                self.failures_under_way -= 1;
                return;
            }
        };
        let post = self.post.clone();
        let done = Completion::callback(move |outcome| post.end(End::Told { failure, outcome }));
        if let Err(error) = self.transfer.send(peer, message, deadline, done) {
            tracing::warn!(%peer, %error, "the store node cannot notify the receiver of a failed push");
            self.failures_under_way -= 1;
        }
    }

    pub(super) fn failure_told(&mut self, failure: Box<Failure>, outcome: Outcome) {
        match outcome {
            Err(_) if failure.tries < TRIES => return self.try_to_tell(failure),
            Err(error) => {
                tracing::warn!(
                    imm = failure.name.imm, %error,
                    "the store node could not notify the receiver of a failed push"
                );
            }
            Ok(()) => {}
        }
        self.failures_under_way -= 1;
    }

    /// Receiver: what is missing of this push will not come. A fetch is settled by its source's
    /// answer instead.
    pub(super) fn push_failed(&mut self, name: PushName) {
        let waits = self.legs.iter().find(|(share, leg)| {
            share.side == Side::Decode
                && leg.incoming.as_ref().is_some_and(|incoming| {
                    incoming.imm == name.imm && matches!(incoming.state, IncomingState::Waiting)
                })
        });
        if let Some((share, _)) = waits {
            let share = *share;
            tracing::warn!(%share, "a push to this store node failed; aborting the share");
            self.blocks.abort(clock::now_ms(), share, AbortReason::PeerLost);
        }
    }

    /// Receiver: a connection of this writer is lost. A dead one is cut off, and with that what waits
    /// for it ends; a living one says itself which of its pushes have failed.
    pub(super) fn probe_writer(&mut self, writer: u64) {
        let waits = |leg: &Leg| {
            leg.incoming.as_ref().is_some_and(|incoming| {
                incoming.writer == Some(writer) && matches!(incoming.state, IncomingState::Waiting)
            })
        };
        if !self.legs.values().any(waits) {
            return;
        }
        let Some(peer) = self.writers.peer(&self.transfer, writer) else { return };
        let deadline = Duration::from_millis(self.config.peer_stop_timeout_ms);
        let post = self.post.clone();
        let done = Completion::callback(move |outcome| post.end(End::Probed { writer, outcome }));
        let message = peer_message::to_bytes(PeerMessage::Probe);
        if let Err(error) = self.transfer.send(peer, message, deadline, done) {
            tracing::warn!(%peer, %error, "the store node cannot probe a node that writes to it");
        }
    }

    pub(super) fn writer_probed(&mut self, writer: u64, outcome: Outcome) {
        if let Err(error) = outcome {
            tracing::warn!(writer, %error, "a node that writes to this store node does not answer; cutting it off");
            self.cut_off(writer);
        }
    }
}
