//! The end of a path that is written to. The card places what comes; here it is counted, messages are put
//! together, and questions are answered. Whatever comes can at worst end this path.
//!
//! A path that ends is drained first: its pipe is cut, what had landed is counted, and only when the card
//! says that nothing is left has the path ended.

use std::collections::VecDeque;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{self, AtomicBool};

use kvasir_transfer_core::signal::Ordering;
use kvasir_transfer_core::{PathId, Refusal, Settled};
use prost::Message;

use super::assembly::{Assembly, Put};
use super::cards::CardId;
use super::control::Control;
use super::nic::CardError;
use super::nic::{Event, PipeId};
use super::seek::Sought;
use super::wire::Said;
use crate::config::Domain;
use crate::endpoint::Endpoint;
use crate::hello::{Admission, HelloReply, Newcomer, WantedCard};
use crate::tcp::stream::Stream;
use crate::worker::hub::Hub;
use crate::worker::link::{LinkEnd, Readiness, Turn};

/// How long a writer may take to say that what it has posted is done. One that does not is cut.
const SETTLE_US: u64 = 1_000_000;

/// How long the card may take to drain a pipe that was cut. It takes microseconds; one that does not
/// answer has failed, and its queue pairs are destroyed.
const DRAIN_US: u64 = 2_000_000;

#[derive(Debug)]
pub(crate) struct RdmaIn {
    control: Control,
    receiving: Receiving,
    /// Tickets that the writer was asked about, and until when it must have answered.
    unsettled: VecDeque<(u64, u64)>,
}

/// What is needed as long as something may come.
#[derive(Debug)]
struct Receiving {
    domain: Domain,
    peer: Endpoint,
    path: PathId,
    card: CardId,
    pipe: PipeId,
    assembly: Assembly,
}

impl RdmaIn {
    /// Begins to look for the way to the card of a newcomer, if that may take a while.
    pub(crate) fn seek(newcomer: &Newcomer, hub: &Hub) -> Result<Option<Sought>, CardError> {
        let (wanted, card, _) = wanted(newcomer, hub)?;
        hub.cards.seek(card, &wanted.writer)
    }

    /// Takes over a connection whose greeting has asked for a pipe: makes its end of it and replies. `way` is
    /// what came of looking for it.
    ///
    /// # Errors
    /// The peer was told no.
    pub(crate) fn admit(
        (stream, newcomer): (Stream, Newcomer),
        way: Result<(), &CardError>,
        hub: &mut Hub,
    ) -> Result<Self, LinkEnd> {
        // Its edges were told to who had the connection before.
        let mut control = Control::new(stream, Readiness { readable: true, writable: true });
        let opened = way.map_err(CardError::sentence).and_then(|()| {
            let opened = open(&newcomer, hub);
            opened.map_err(|error| error.sentence())
        });
        let Opened { domain, card, pipe, address, order } = match opened {
            Ok(opened) => opened,
            Err(error) => {
                tracing::warn!(
                    engine = %hub.shared.config.name,
                    peer = format_args!("{:016x}", newcomer.peer.incarnation),
                    error,
                    "the transfer engine cannot create its end of a peer's RDMA connection"
                );
                return decline(control, &HelloReply::declining(Admission::NoCard, 0));
            }
        };
        match hub.open_path(&newcomer) {
            Ok(path) => {
                let is_relaxed = hub.cards.get(card).is_some_and(|rdma| rdma.bounds.is_relaxed);
                let reply = HelloReply { card: address, is_relaxed, ..HelloReply::admitting() };
                control.greet(&reply.encode_to_vec());
                let receiving = Receiving {
                    domain,
                    peer: newcomer.peer,
                    path,
                    card,
                    pipe,
                    assembly: Assembly::new(order.acknowledges_in_order()),
                };
                Ok(RdmaIn { control, receiving, unsettled: VecDeque::new() })
            }
            Err(reply) => {
                if let Some(card) = hub.cards.get_mut(card) {
                    card.discard(pipe);
                }
                decline(control, &reply)
            }
        }
    }

    pub(crate) fn domain(&self) -> Domain {
        self.receiving.domain
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.control.fd()
    }

    pub(crate) fn ready(&mut self, ready: Readiness) {
        self.control.ready(ready);
    }

    pub(crate) fn peer(&self) -> &Endpoint {
        &self.receiving.peer
    }

    pub(crate) fn path(&self) -> PathId {
        self.receiving.path
    }

    /// Answers a question that came through it.
    pub(crate) fn tell(&mut self, answer: &[u8]) {
        self.control.say(Said::Closing(answer.to_vec()));
    }

    /// Its writer learns that the region is no more, and does not have to find out by the card.
    pub(crate) fn revoked(&mut self, key: u64) {
        self.control.say(Said::Revoked { key });
    }

    pub(crate) fn turn(&mut self, hub: &mut Hub) -> Result<Turn, LinkEnd> {
        let mut turn = Turn::default();
        // First what came before whatever ends the path.
        turn.busy |= self.take_events(hub)?;
        turn.busy |= self.control.read()?;
        while let Some(said) = self.control.heard()? {
            match said {
                Said::Closing(question) => {
                    if let Some(answer) = hub.asked(self.receiving.path, &question)? {
                        self.tell(&answer);
                    }
                }
                Said::Ask { key } => {
                    let found = hub.find_region(self.receiving.card, key);
                    self.control.say(Said::Region { key, found });
                }
                Said::Heartbeat => self.control.say(Said::Alive),
                Said::Settled { ticket } => self.settled(ticket, hub)?,
                Said::Region { .. }
                | Said::Revoked { .. }
                | Said::Taken { .. }
                | Said::Settle { .. }
                | Said::Alive => {
                    return Err(LinkEnd::Malformed);
                }
            }
        }
        turn.busy |= self.control.flush()?;
        if let Some((_, until_us)) = self.unsettled.front() {
            if hub.now_us >= *until_us {
                return Err(LinkEnd::Silent);
            }
            turn.wait_until_us = turn.wait_until_us.min(*until_us);
        }
        Ok(turn)
    }

    /// What the writer had posted when it was asked is done.
    fn settled(&mut self, ticket: u64, hub: &mut Hub) -> Result<(), LinkEnd> {
        let Some(at) = self.unsettled.iter().position(|(asked, _)| *asked == ticket) else {
            return Err(LinkEnd::Malformed);
        };
        self.unsettled.drain(..=at);
        if let Some(rdma) = hub.cards.get_mut(self.receiving.card) {
            rdma.card.settled(self.receiving.pipe, ticket);
        }
        Ok(())
    }

    /// Whether there was anything.
    fn take_events(&mut self, hub: &mut Hub) -> Result<bool, LinkEnd> {
        let Receiving { card, pipe, .. } = self.receiving;
        let Some(rdma) = hub.cards.get_mut(card) else { return Err(LinkEnd::Lost) };
        let mut events = rdma.take_events(pipe);
        let any = !events.is_empty();
        let mut end = Ok(());
        while let Some(event) = events.pop_front() {
            if hub.must_tell() {
                events.push_front(event);
                break;
            }
            match self.receiving.take(event, hub) {
                Ok(Some(said)) => {
                    if let Said::Settle { ticket } = said {
                        self.unsettled.push_back((ticket, hub.now_us + SETTLE_US));
                    }
                    self.control.say(said);
                }
                Ok(None) => {}
                // What came before a failure has landed all the same, on whatever lane.
                Err(lost) => end = Err(lost),
            }
        }
        if let Some(rdma) = hub.cards.get_mut(card).filter(|_| !events.is_empty()) {
            rdma.return_events(pipe, events);
            return Ok(true);
        }
        end.map(|()| any)
    }

    /// Nothing more is let in. What has landed is still to be counted.
    pub(crate) fn cut(self, hub: &mut Hub) -> Draining {
        let RdmaIn { control, receiving, unsettled: _ } = self;
        if let Some(rdma) = hub.cards.get_mut(receiving.card) {
            rdma.card.cut(receiving.pipe);
        }
        let until_us = hub.now_us + DRAIN_US;
        Draining { control: Some(control), receiving, until_us, over: Arc::default() }
    }
}

/// An end at one of our cards.
struct Opened {
    domain: Domain,
    card: CardId,
    pipe: PipeId,
    /// What its writer must know.
    address: Vec<u8>,
    order: Ordering,
}

/// What the newcomer asks for, and by which of our cards.
fn wanted<'a>(
    newcomer: &'a Newcomer,
    hub: &Hub,
) -> Result<(&'a WantedCard, CardId, Domain), CardError> {
    let missing = || CardError::new("this node has no NIC of the requested index and transport");
    let wanted = newcomer.card.as_ref().ok_or_else(missing)?;
    let card = CardId::from_wire(wanted.index).ok_or_else(missing)?;
    let rdma = hub.cards.get(card).filter(|card| card.domain == wanted.domain);
    Ok((wanted, card, rdma.ok_or_else(missing)?.domain))
}

fn open(newcomer: &Newcomer, hub: &mut Hub) -> Result<Opened, CardError> {
    let (wanted, card, domain) = wanted(newcomer, hub)?;
    let missing = || CardError::new("this node has no NIC of the requested index and transport");
    let rdma = hub.cards.get_mut(card).ok_or_else(missing)?;
    let (pipe, address) = rdma.accept(&wanted.writer)?;
    Ok(Opened { domain, card, pipe, address, order: rdma.bounds.order })
}

fn decline<T>(mut control: Control, reply: &HelloReply) -> Result<T, LinkEnd> {
    control.greet(&reply.encode_to_vec());
    control.flush()?;
    Err(LinkEnd::Rejected)
}

impl Receiving {
    /// What the sender of a message is to be told, when it has come whole.
    fn take(&mut self, event: Event, hub: &mut Hub) -> Result<Option<Said>, LinkEnd> {
        let domain = self.domain;
        match event {
            Event::Landed { imm, bytes } => {
                hub.metrics.of(domain).received_bytes.inc_by(bytes);
                if let Some(rdma) = hub.cards.get(self.card) {
                    rdma.received_bytes.inc_by(bytes);
                }
                hub.landed(domain, self.path, imm);
                Ok(None)
            }
            Event::Piece(bytes) => {
                let put = self.assembly.put(&bytes, hub.shared.config.message_bytes_max)?;
                let (id, settled) = match put {
                    Put::More => return Ok(None),
                    Put::TooLong { id } => (id, hub.refuse_message(domain, Refusal::TooLong)),
                    Put::Whole { id } => {
                        let from = (&self.peer, self.path);
                        let buffer = self.assembly.buffer();
                        let settled = hub.message(domain, from, id, buffer);
                        buffer.clear();
                        (id, settled)
                    }
                };
                let taken = match settled {
                    Settled::Refused(refusal) => Err(refusal),
                    Settled::Landed | Settled::Corrupt => Ok(()),
                };
                Ok(Some(Said::Taken { id, taken }))
            }
            Event::Settle { ticket } => Ok(Some(Said::Settle { ticket })),
            Event::Failed { .. } => Err(LinkEnd::Lost),
            // A target posts nothing.
            Event::Done { .. } => Ok(None),
        }
    }
}

/// A path whose pipe was cut, until nothing is left of it.
#[derive(Debug)]
pub(crate) struct Draining {
    control: Option<Control>,
    receiving: Receiving,
    until_us: u64,
    over: Arc<AtomicBool>,
}

impl Draining {
    /// The peer sees that its connection is closed; it finds the end counted.
    pub(crate) fn hang_up(&mut self) {
        self.control = None;
    }

    /// Set when nothing of it lands any more.
    pub(crate) fn over(&self) -> Arc<AtomicBool> {
        Arc::clone(&self.over)
    }

    /// Counts what had landed. Whether that was all.
    pub(crate) fn look(&mut self, hub: &mut Hub) -> bool {
        let Receiving { card, pipe, .. } = self.receiving;
        let events = match hub.cards.get_mut(card) {
            Some(rdma) => rdma.take_events(pipe),
            None => return true,
        };
        for event in events {
            // What could not be made sense of ends nothing any more, and who sent messages asks about
            // them on another path.
            let _ = self.receiving.take(event, hub);
        }
        let Some(rdma) = hub.cards.get_mut(card) else { return true };
        let is_late = hub.now_us >= self.until_us;
        if !rdma.card.is_drained(pipe) && !is_late && !rdma.is_dead {
            return false;
        }
        if is_late {
            tracing::warn!(
                "the RDMA connection from a peer does not drain; the transfer engine destroys it"
            );
        }
        rdma.discard(pipe);
        self.over.store(true, atomic::Ordering::Release);
        true
    }
}
