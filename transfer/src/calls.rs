//! What callers are to be told, in order. It is gathered while state changes and told when nothing is
//! half done: whoever is told may submit anew.

use std::collections::VecDeque;

use kvasir_transfer_core::Outcome;

use crate::engine::{Handlers, PeerEvent, PeerId};
use crate::payload::Waiter;

#[derive(Debug, Default)]
pub(crate) struct Calls(VecDeque<Call>);

#[derive(Debug)]
enum Call {
    Done(Waiter, Outcome),
    Message(PeerId, Vec<u8>),
    Peer(PeerEvent),
}

impl Calls {
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(crate) fn done(&mut self, waiter: Waiter, outcome: Outcome) {
        self.0.push_back(Call::Done(waiter, outcome));
    }

    pub(crate) fn message(&mut self, from: PeerId, message: Vec<u8>) {
        self.0.push_back(Call::Message(from, message));
    }

    pub(crate) fn peer(&mut self, event: PeerEvent) {
        self.0.push_back(Call::Peer(event));
    }

    /// Whether there was anything to tell.
    pub(crate) fn tell(&mut self, handlers: &mut Handlers) -> bool {
        let any = !self.0.is_empty();
        while let Some(call) = self.0.pop_front() {
            match call {
                Call::Done(waiter, outcome) => waiter.complete(outcome),
                Call::Message(from, message) => (handlers.on_message)(from, message),
                Call::Peer(event) => (handlers.on_peer)(event),
            }
        }
        any
    }
}
