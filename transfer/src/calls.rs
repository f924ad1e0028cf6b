//! What callers are to be told, in order. It is gathered while state changes and told when nothing is
//! half done: whoever is told may submit anew.

use std::collections::VecDeque;

use kvasir_transfer_core::Outcome;

use crate::engine::{Handlers, PeerEvent, PeerId};
use crate::messages::Message;
use crate::payload::Waiter;

#[derive(Debug, Default)]
pub(crate) struct Calls {
    calls: VecDeque<Call>,
    /// Messages among them.
    messages: usize,
}

#[derive(Debug)]
enum Call {
    Done(Waiter, Outcome),
    Message(PeerId, Message),
    Peer(PeerEvent),
}

impl Calls {
    pub(crate) fn is_empty(&self) -> bool {
        self.calls.is_empty()
    }

    pub(crate) fn done(&mut self, waiter: Waiter, outcome: Outcome) {
        self.calls.push_back(Call::Done(waiter, outcome));
    }

    pub(crate) fn message(&mut self, from: PeerId, message: Message) {
        self.messages += 1;
        self.calls.push_back(Call::Message(from, message));
    }

    pub(crate) fn has_messages(&self) -> bool {
        self.messages > 0
    }

    pub(crate) fn peer(&mut self, event: PeerEvent) {
        self.calls.push_back(Call::Peer(event));
    }

    /// Whether there was anything to tell.
    pub(crate) fn tell(&mut self, handlers: &mut Handlers) -> bool {
        let any = !self.calls.is_empty();
        self.messages = 0;
        while let Some(call) = self.calls.pop_front() {
            match call {
                Call::Done(waiter, outcome) => waiter.complete(outcome),
                Call::Message(from, message) => (handlers.on_message)(from, message),
                Call::Peer(event) => (handlers.on_peer)(event),
            }
        }
        any
    }
}
