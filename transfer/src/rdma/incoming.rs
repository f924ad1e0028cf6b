//! The end of a path that is written to. The card places what comes; here it is counted, messages are put
//! together, and questions are answered. Whatever comes can at worst end this path.
//!
//! A path that ends is drained first: its pipe is cut, what had landed is counted, and only when the card
//! says that nothing is left has the path ended.

use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use kvasir_transfer_core::{PathId, Refusal, Settled};
use prost::Message;

use super::control::Control;
use super::nic::{Event, PipeId};
use super::wire::{PieceHeader, Said};
use crate::config::Domain;
use crate::endpoint::Endpoint;
use crate::hello::{Admission, HelloReply, Newcomer};
use crate::messages::MESSAGE_BYTES_MAX;
use crate::tcp::stream::Stream;
use crate::worker::hub::Hub;
use crate::worker::link::{LinkEnd, Readiness, Turn};

/// How long the card may take to drain a pipe that was cut. It takes microseconds; one that does not
/// answer has failed, and its queue pairs are destroyed.
const DRAIN_US: u64 = 2_000_000;

#[derive(Debug)]
pub(crate) struct RdmaIn {
    control: Control,
    receiving: Receiving,
}

/// What is needed as long as something may come.
#[derive(Debug)]
struct Receiving {
    domain: Domain,
    peer: Endpoint,
    path: PathId,
    pipe: PipeId,
    /// A message of which pieces have come, and what is kept of it.
    partial: Option<Partial>,
    /// Of the next message.
    buffer: Vec<u8>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Partial {
    id: u64,
    come_bytes: u32,
}

/// What a piece has led to.
#[derive(Debug, PartialEq, Eq)]
enum Put {
    More,
    /// The message is in the buffer.
    Whole {
        id: u64,
    },
    /// It has come whole, and is longer than any that is taken.
    TooLong {
        id: u64,
    },
}

impl RdmaIn {
    /// Takes over a connection whose greeting has asked for a pipe: makes its end of it and replies.
    ///
    /// # Errors
    /// The peer was told no.
    pub(crate) fn admit(
        stream: Stream,
        newcomer: Newcomer,
        hub: &mut Hub,
    ) -> Result<Self, LinkEnd> {
        // Its edges were told to who had the connection before.
        let mut control = Control::new(stream, Readiness { readable: true, writable: true });
        let opened = open(&newcomer, hub);
        let (domain, pipe, address) = match opened {
            Ok(opened) => opened,
            Err(error) => {
                tracing::warn!(
                    engine = %hub.shared.config.name,
                    peer = format_args!("{:016x}", newcomer.peer.incarnation),
                    %error,
                    "a peer's connection does not get its end at the device"
                );
                return decline(control, &HelloReply::declining(Admission::NoCard, 0));
            }
        };
        match hub.open_path(&newcomer) {
            Ok(path) => {
                let reply = HelloReply { card: address, ..HelloReply::admitting() };
                control.greet(&reply.encode_to_vec());
                let receiving = Receiving {
                    domain,
                    peer: newcomer.peer,
                    path,
                    pipe,
                    partial: None,
                    buffer: Vec::new(),
                };
                Ok(RdmaIn { control, receiving })
            }
            Err(reply) => {
                if let Some(rdma) = &mut hub.rdma {
                    rdma.discard(pipe);
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
                Said::Closing(question) => hub.asked(self.receiving.path, &question)?,
                Said::Ask { key } => {
                    let found = hub.find_region(key);
                    self.control.say(Said::Region { key, found });
                }
                Said::Heartbeat => self.control.say(Said::Alive),
                Said::Region { .. } | Said::Revoked { .. } | Said::Taken { .. } | Said::Alive => {
                    return Err(LinkEnd::Malformed);
                }
            }
        }
        turn.busy |= self.control.flush()?;
        Ok(turn)
    }

    /// Whether there was anything.
    fn take_events(&mut self, hub: &mut Hub) -> Result<bool, LinkEnd> {
        let Some(rdma) = &mut hub.rdma else { return Err(LinkEnd::Lost) };
        let mut events = rdma.take_events(self.receiving.pipe);
        let any = !events.is_empty();
        let mut end = Ok(());
        while let Some(event) = events.pop_front() {
            if hub.must_tell() {
                events.push_front(event);
                break;
            }
            match self.receiving.take(event, hub) {
                Ok(Some(said)) => self.control.say(said),
                Ok(None) => {}
                // What came before a failure has landed all the same, on whatever lane.
                Err(lost) => end = Err(lost),
            }
        }
        if let Some(rdma) = hub.rdma.as_mut().filter(|_| !events.is_empty()) {
            rdma.return_events(self.receiving.pipe, events);
            return Ok(true);
        }
        end.map(|()| any)
    }

    /// Nothing more is let in, and the peer sees that its connection is closed. What has landed is still
    /// to be counted.
    pub(crate) fn cut(self, hub: &mut Hub) -> Draining {
        let RdmaIn { control: _, receiving } = self;
        if let Some(rdma) = &mut hub.rdma {
            rdma.card.cut(receiving.pipe);
        }
        let until_us = hub.now_us + DRAIN_US;
        Draining { receiving, until_us, over: Arc::default() }
    }
}

fn open(newcomer: &Newcomer, hub: &mut Hub) -> Result<(Domain, PipeId, Vec<u8>), super::CardError> {
    let missing = || super::CardError::new("there is no device here");
    let rdma = hub.rdma.as_mut().ok_or_else(missing)?;
    let wanted = newcomer.card.as_ref().filter(|(domain, _)| *domain == rdma.domain);
    let (_, peer) = wanted.ok_or_else(missing)?;
    let (pipe, address) = rdma.accept(peer)?;
    Ok((rdma.domain, pipe, address))
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
                hub.landed(domain, self.path, imm);
                Ok(None)
            }
            Event::Piece(bytes) => {
                let (id, settled) = match self.put(&bytes, hub.shared.config.message_bytes_max)? {
                    Put::More => return Ok(None),
                    Put::TooLong { id } => (id, hub.refuse_message(domain, Refusal::TooLong)),
                    Put::Whole { id } => {
                        let from = (&self.peer, self.path);
                        let settled = hub.message(domain, from, id, &mut self.buffer);
                        self.buffer.clear();
                        (id, settled)
                    }
                };
                let taken = match settled {
                    Settled::Refused(refusal) => Err(refusal),
                    Settled::Landed | Settled::Corrupt => Ok(()),
                };
                Ok(Some(Said::Taken { id, taken }))
            }
            Event::Failed { .. } => Err(LinkEnd::Lost),
            // A target posts nothing.
            Event::Done { .. } => Ok(None),
        }
    }

    /// Puts a message together, or lets go by what is too long.
    fn put(&mut self, bytes: &[u8], message_bytes_max: usize) -> Result<Put, LinkEnd> {
        let (header, piece) = PieceHeader::decode(bytes).ok_or(LinkEnd::Malformed)?;
        let PieceHeader { id, bytes, offset } = header;
        if bytes as usize > MESSAGE_BYTES_MAX {
            return Err(LinkEnd::Malformed);
        }
        let come_bytes = match self.partial.take() {
            None if offset == 0 => 0,
            Some(partial) if partial.id == id && offset > 0 => partial.come_bytes,
            _ => return Err(LinkEnd::Malformed),
        };
        // An empty piece of a message that has more would never end it.
        if come_bytes != offset || (piece.is_empty() && bytes > 0) {
            return Err(LinkEnd::Malformed);
        }
        let is_too_long = bytes as usize > message_bytes_max;
        if !is_too_long {
            self.buffer.extend_from_slice(piece);
        }
        let come_bytes = come_bytes + piece.len() as u32;
        if come_bytes < bytes {
            self.partial = Some(Partial { id, come_bytes });
            return Ok(Put::More);
        }
        Ok(if is_too_long { Put::TooLong { id } } else { Put::Whole { id } })
    }
}

/// A path whose pipe was cut, until nothing is left of it.
#[derive(Debug)]
pub(crate) struct Draining {
    receiving: Receiving,
    until_us: u64,
    over: Arc<AtomicBool>,
}

impl Draining {
    /// Set when nothing of it lands any more.
    pub(crate) fn over(&self) -> Arc<AtomicBool> {
        Arc::clone(&self.over)
    }

    /// Counts what had landed. Whether that was all.
    pub(crate) fn look(&mut self, hub: &mut Hub) -> bool {
        let events = match &mut hub.rdma {
            Some(rdma) => rdma.take_events(self.receiving.pipe),
            None => return true,
        };
        for event in events {
            // What could not be made sense of ends nothing any more, and who sent messages asks about
            // them on another path.
            let _ = self.receiving.take(event, hub);
        }
        let Some(rdma) = &mut hub.rdma else { return true };
        let pipe = self.receiving.pipe;
        let is_late = hub.now_us >= self.until_us;
        if !rdma.card.is_drained(pipe) && !is_late && !rdma.is_dead {
            return false;
        }
        if is_late {
            tracing::warn!("a pipe does not drain, and is destroyed");
        }
        rdma.discard(pipe);
        self.over.store(true, Ordering::Release);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn receiving() -> Receiving {
        let peer = Endpoint { incarnation: 1, cookie: [0; 16], shm: None, tcp: None, rdma: None };
        let (domain, path, pipe) = (Domain::Verbs, PathId(0), PipeId(0));
        Receiving { domain, peer, path, pipe, partial: None, buffer: Vec::new() }
    }

    fn piece(id: u64, bytes: u32, offset: u32, body: &[u8]) -> Vec<u8> {
        [PieceHeader { id, bytes, offset }.encode().as_slice(), body].concat()
    }

    #[test]
    fn a_message_is_put_together_from_its_pieces() {
        let mut receiving = receiving();
        let mut put = |bytes: &[u8]| receiving.put(bytes, 8).expect("in order");
        assert_eq!(put(&piece(1, 5, 0, b"abc")), Put::More);
        assert_eq!(put(&piece(1, 5, 3, b"de")), Put::Whole { id: 1 });
        assert_eq!(receiving.buffer, b"abcde");
        receiving.buffer.clear();
        let mut put = |bytes: &[u8]| receiving.put(bytes, 8).expect("in order");
        assert_eq!(put(&piece(2, 9, 0, b"too")), Put::More);
        assert_eq!(put(&piece(2, 9, 3, b" long!")), Put::TooLong { id: 2 });
        assert_eq!(put(&piece(3, 0, 0, b"")), Put::Whole { id: 3 });
        assert!(receiving.buffer.is_empty(), "nothing is kept of what is too long");
    }

    #[test]
    fn pieces_that_do_not_follow_each_other_are_malformed() {
        let huge = MESSAGE_BYTES_MAX as u32 + 1;
        let cases: [&[Vec<u8>]; 6] = [
            &[piece(1, huge, 0, b"abc")],
            &[piece(1, 5, 3, b"de")],
            &[piece(1, 5, 0, b"abc"), piece(1, 5, 0, b"abc")],
            &[piece(1, 5, 0, b"abc"), piece(2, 5, 3, b"de")],
            &[piece(1, 5, 0, b"abc"), piece(1, 5, 4, b"e")],
            &[piece(1, 5, 0, b"")],
        ];
        for pieces in cases {
            let mut receiving = receiving();
            let last = pieces.iter().map(|bytes| receiving.put(bytes, 8)).last();
            assert_eq!(last, Some(Err(LinkEnd::Malformed)), "{pieces:?}");
        }
    }
}
