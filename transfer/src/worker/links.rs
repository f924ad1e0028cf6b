//! All connections of a worker, both directions and all domains: whose readiness is whose, and who gets
//! its turn. How those of peers come and go is in `inward`, how our own do is in `outward`.

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use kvasir_transfer_core::{Avoided, PathId, Patience, SessionId, Sieve};
use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};

use crate::config::Domain;
use crate::doorbell::Bell;
use crate::endpoint::Endpoint;
use crate::metrics::DomainMetrics;
use crate::rdma::incoming::RdmaIn;
use crate::rdma::outgoing::RdmaOut;
use crate::rdma::seek::Sought;
use crate::rdma::{CardId, Cards};
use crate::shared::Bells;
use crate::shm::incoming::ShmIn;
use crate::shm::outgoing::ShmOut;
use crate::tcp::incoming::TcpIn;
use crate::tcp::outgoing::TcpOut;
use crate::topology::CARDS_MAX;

use super::excuses::Excuses;
use super::hub::Hub;
use super::leaving::Leaving;
use super::link::{Lane, LinkEnd, Readiness, Turn};
use super::outward::{Held, Lanes};
use super::ways::{Lack, Way};

const TOKEN_OWN_BELL: u64 = 0;
const TOKEN_OUTSIDE_BELL: u64 = 1;
const TOKEN_TCP: u64 = 2;
const TOKEN_SHM: u64 = 3;
/// Two for each card.
const TOKEN_CARDS: u64 = 4;
const FIRST_TOKEN: u64 = TOKEN_CARDS + 2 * CARDS_MAX as u64;

/// Whose readiness a token tells.
#[derive(Debug, Clone, Copy)]
pub(super) enum Owner {
    OwnBell,
    OutsideBell,
    Listener(Domain),
    Outgoing(Lane),
    Incoming(LinkId),
    /// Something has happened on pipes.
    Card(CardId),
    CardReports(CardId),
    /// By which the writer on the other side of a shm connection wakes us.
    WritersBell(LinkId),
}

/// A connection to here, by its token. It becomes a path when it is admitted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct LinkId(pub(super) u64);

#[derive(Debug)]
pub(super) struct Links {
    pub(super) epoll: OwnedFd,
    bells: Bells,
    pub(super) tcp_listener: Option<OwnedFd>,
    pub(super) shm_listener: Option<OwnedFd>,
    /// By domain: whether connections may wait to be taken.
    pub(super) accepting: [bool; 2],
    pub(super) outgoing: BTreeMap<Lane, Outgoing>,
    pub(super) lanes: BTreeMap<SessionId, Lanes>,
    /// The sessions that have connections or are getting them: which one goes when there are too many.
    pub(super) endpoints: Sieve<SessionId>,
    /// Ways that have failed, by the incarnation of the peer.
    pub(super) avoided: Avoided<(u64, Way)>,
    /// Ways that were of use and have ended, likewise.
    pub(super) flapping: Avoided<(u64, Way)>,
    pub(super) excuses: Excuses<Held>,
    pub(super) incoming: BTreeMap<LinkId, Incoming>,
    /// Of them, those that have not said who they are.
    pub(super) strangers: BTreeSet<LinkId>,
    /// Of those, the ways to whose cards are being looked for.
    pub(super) seeking: BTreeMap<LinkId, Sought>,
    pub(super) leaving: Leaving,
    pub(super) owners: BTreeMap<u64, Owner>,
    pub(super) next_token: u64,
}

/// To make one connection, by whichever way.
#[derive(Debug)]
pub(super) struct Attempt {
    /// To be tried, from the last to the first.
    pub(super) candidates: Vec<Way>,
    /// One that was tried before them did not come up, but was not refused either.
    pub(super) hope: bool,
    /// What it is for.
    pub(super) lack: Lack,
}

#[derive(Debug)]
pub(super) struct Outgoing {
    pub(super) token: u64,
    pub(super) link: OutLink,
    /// Goes on when this one does not come up.
    pub(super) attempt: Attempt,
    /// When something came or went last.
    pub(super) active_us: u64,
    /// Until then it must have come up.
    pub(super) connect_until_us: u64,
    /// When it has been seen to be up.
    pub(super) up_us: Option<u64>,
}

#[derive(Debug)]
pub(super) enum OutLink {
    Shm(ShmOut),
    Tcp(TcpOut),
    Rdma(RdmaOut),
}

#[derive(Debug)]
pub(super) struct Incoming {
    pub(super) bell_token: Option<u64>,
    pub(super) link: InLink,
    /// Until then it must have said who it is.
    pub(super) greet_until_us: u64,
    /// When something came last.
    pub(super) active_us: u64,
}

#[derive(Debug)]
pub(super) enum InLink {
    Shm(ShmIn),
    Tcp(TcpIn),
    Rdma(RdmaIn),
}

impl OutLink {
    pub(super) fn way(&self) -> Way {
        match self {
            OutLink::Shm(_) => Way::by(Domain::Shm),
            OutLink::Tcp(_) => Way::by(Domain::Tcp),
            OutLink::Rdma(link) => Way { domain: link.domain(), rail: link.rail() },
        }
    }

    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        match self {
            OutLink::Shm(link) => link.fd(),
            OutLink::Tcp(link) => link.fd(),
            OutLink::Rdma(link) => link.fd(),
        }
    }

    pub(super) fn is_up(&self) -> bool {
        match self {
            OutLink::Shm(link) => link.is_up(),
            OutLink::Tcp(link) => link.is_up(),
            OutLink::Rdma(link) => link.is_up(),
        }
    }

    /// The keys of the regions for which it may have failed, where that is not known.
    pub(super) fn doubted(&self) -> &[u64] {
        match self {
            OutLink::Shm(_) | OutLink::Tcp(_) => &[],
            OutLink::Rdma(link) => link.doubted(),
        }
    }

    pub(super) fn turn(&mut self, hub: &mut Hub) -> Result<Turn, LinkEnd> {
        match self {
            OutLink::Shm(link) => link.turn(hub),
            OutLink::Tcp(link) => link.turn(hub),
            OutLink::Rdma(link) => link.turn(hub),
        }
    }

    /// When this returns it reads no source any more.
    pub(super) fn close(self, hub: &mut Hub) {
        match self {
            // Dropped, and with them their sockets.
            OutLink::Shm(_) | OutLink::Tcp(_) => {}
            OutLink::Rdma(link) => link.close(hub),
        }
    }
}

impl InLink {
    pub(super) fn domain(&self) -> Domain {
        match self {
            InLink::Shm(_) => Domain::Shm,
            InLink::Tcp(_) => Domain::Tcp,
            InLink::Rdma(link) => link.domain(),
        }
    }

    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        match self {
            InLink::Shm(link) => link.fd(),
            InLink::Tcp(link) => link.fd(),
            InLink::Rdma(link) => link.fd(),
        }
    }

    pub(super) fn bell(&self) -> Option<&Bell> {
        match self {
            InLink::Shm(link) => Some(link.bell()),
            InLink::Tcp(_) | InLink::Rdma(_) => None,
        }
    }

    pub(super) fn peer(&self) -> Option<&Endpoint> {
        match self {
            InLink::Shm(link) => link.peer(),
            InLink::Tcp(link) => link.peer(),
            InLink::Rdma(link) => Some(link.peer()),
        }
    }

    /// Once it is admitted.
    pub(super) fn path(&self) -> Option<PathId> {
        match self {
            InLink::Shm(link) => link.path(),
            InLink::Tcp(link) => link.path(),
            InLink::Rdma(link) => Some(link.path()),
        }
    }

    pub(super) fn tell(&mut self, answer: &[u8]) {
        match self {
            InLink::Shm(link) => link.tell(answer),
            InLink::Tcp(link) => link.tell(answer),
            InLink::Rdma(link) => link.tell(answer),
        }
    }

    pub(super) fn turn(&mut self, hub: &mut Hub) -> Result<Turn, LinkEnd> {
        match self {
            InLink::Shm(link) => link.turn(hub),
            InLink::Tcp(link) => link.turn(hub),
            InLink::Rdma(link) => link.turn(hub),
        }
    }
}

/// A bell tells as long as it rings.
pub(super) fn hear(epoll: &OwnedFd, bell: &Bell, token: u64) -> rustix::io::Result<()> {
    epoll::add(epoll, bell, EventData::new_u64(token), EventFlags::IN)
}

pub(super) fn watch_edges(
    epoll: &OwnedFd,
    fd: BorrowedFd<'_>,
    token: u64,
) -> rustix::io::Result<()> {
    let flags = EventFlags::IN | EventFlags::OUT | EventFlags::RDHUP | EventFlags::ET;
    epoll::add(epoll, fd, EventData::new_u64(token), flags)
}

impl Links {
    pub(super) fn new(
        bells: Bells,
        tcp_listener: Option<OwnedFd>,
        shm_listener: Option<OwnedFd>,
        cards: &Cards,
    ) -> rustix::io::Result<Self> {
        let epoll = epoll::create(CreateFlags::CLOEXEC)?;
        hear(&epoll, &bells.own, TOKEN_OWN_BELL)?;
        hear(&epoll, &bells.outside, TOKEN_OUTSIDE_BELL)?;
        let mut owners = BTreeMap::from([
            (TOKEN_OWN_BELL, Owner::OwnBell),
            (TOKEN_OUTSIDE_BELL, Owner::OutsideBell),
        ]);
        for (listener, token, domain) in
            [(&tcp_listener, TOKEN_TCP, Domain::Tcp), (&shm_listener, TOKEN_SHM, Domain::Shm)]
        {
            if let Some(listener) = listener {
                watch_edges(&epoll, listener.as_fd(), token)?;
                owners.insert(token, Owner::Listener(domain));
            }
        }
        for (id, card) in cards.iter() {
            let token = TOKEN_CARDS + 2 * u64::from(id.0);
            for (fd, token, owner) in [
                (card.wake_fd(), token, Owner::Card(id)),
                (card.report_fd(), token + 1, Owner::CardReports(id)),
            ] {
                epoll::add(&epoll, fd, EventData::new_u64(token), EventFlags::IN)?;
                owners.insert(token, owner);
            }
        }
        Ok(Links {
            epoll,
            bells,
            tcp_listener,
            shm_listener,
            accepting: [true; 2],
            outgoing: BTreeMap::new(),
            lanes: BTreeMap::new(),
            endpoints: Sieve::default(),
            avoided: Avoided::new(Patience::USELESS),
            flapping: Avoided::new(Patience::FLAPPING),
            excuses: Excuses::default(),
            incoming: BTreeMap::new(),
            strangers: BTreeSet::new(),
            seeking: BTreeMap::new(),
            leaving: Leaving::default(),
            owners,
            next_token: FIRST_TOKEN,
        })
    }

    pub(super) fn epoll(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }

    pub(super) fn len(&self) -> usize {
        self.outgoing.len() + self.incoming.len()
    }

    pub(super) fn ready(&mut self, token: u64, ready: Readiness, hub: &mut Hub) {
        let Some(owner) = self.owners.get(&token).copied() else { return };
        match owner {
            Owner::OwnBell => self.bells.own.clear(),
            Owner::OutsideBell => self.bells.outside.clear(),
            Owner::Card(card) => {
                if let Some(card) = hub.cards.get_mut(card) {
                    card.clear_wake();
                }
            }
            Owner::CardReports(card) => {
                let Some(card) = hub.cards.get_mut(card) else { return };
                card.look_at_reports();
                if card.is_dead() {
                    // It may report for ever, and nobody would sleep any more.
                    let _ = epoll::delete(&self.epoll, card.report_fd());
                    let _ = epoll::delete(&self.epoll, card.wake_fd());
                }
            }
            Owner::WritersBell(link) => {
                let bell = self.incoming.get(&link).and_then(|into| into.link.bell());
                bell.into_iter().for_each(Bell::clear);
            }
            Owner::Listener(domain) => self.accepting[domain as usize] = true,
            Owner::Outgoing(lane) => match self.outgoing.get_mut(&lane).map(|out| &mut out.link) {
                Some(OutLink::Shm(link)) => link.ready(ready),
                Some(OutLink::Tcp(link)) => link.ready(ready),
                Some(OutLink::Rdma(link)) => link.ready(ready),
                None => {}
            },
            Owner::Incoming(link) => {
                match self.incoming.get_mut(&link).map(|into| &mut into.link) {
                    Some(InLink::Shm(link)) => link.ready(ready),
                    Some(InLink::Tcp(link)) => link.ready(ready),
                    Some(InLink::Rdma(link)) => link.ready(ready),
                    None => {}
                }
            }
        }
    }

    /// Whether a ring has something, which wakes nobody who sets his flag too late.
    pub(super) fn has_work(&self) -> bool {
        self.incoming.values().any(|into| match &into.link {
            InLink::Shm(link) => link.has_work(),
            InLink::Tcp(_) | InLink::Rdma(_) => false,
        })
    }

    /// When a connection must have said who it is, or have come up, or is to be made; `u64::MAX` for
    /// never.
    pub(super) fn next_time_us(&self) -> u64 {
        let silent = self.incoming.values().filter(|into| into.link.peer().is_none());
        let silent_us = silent.map(|into| into.greet_until_us).min().unwrap_or(u64::MAX);
        silent_us.min(self.next_connection_us())
    }

    pub(super) fn turn(&mut self, hub: &mut Hub) -> Turn {
        let mut all = Turn::default();
        all.busy |= hub.cards.poll();
        all.add(self.turn_inward(hub));
        all.add(self.turn_outward(hub));
        all.busy |= self.leaving.look(hub);
        all.busy |= self.tell_answers(hub);
        all
    }

    /// Whether what is left of writers whose connections have ended must be looked after.
    pub(super) fn has_leaving(&self) -> bool {
        !self.leaving.is_empty()
    }

    pub(super) fn close_all(&mut self, hub: &mut Hub) {
        for (_, out) in std::mem::take(&mut self.outgoing) {
            out.link.close(hub);
        }
        self.lanes.clear();
        let incoming: Vec<LinkId> = self.incoming.keys().copied().collect();
        for link in incoming {
            self.remove_incoming(link, hub);
        }
    }
}

pub(super) fn is_long_ago(active_us: u64, hub: &Hub) -> bool {
    hub.now_us >= active_us + hub.shared.config.peer_timeout_ms * 1000
}

pub(super) fn count_end(metrics: &DomainMetrics, end: LinkEnd) {
    match end {
        LinkEnd::Malformed => metrics.malformed.inc(),
        LinkEnd::Rejected => metrics.not_admitted.inc(),
        LinkEnd::Idle => metrics.idle.inc(),
        LinkEnd::Silent => metrics.silent.inc(),
        LinkEnd::Untrusted => metrics.untrusted.inc(),
        LinkEnd::Lost
        | LinkEnd::Broken
        | LinkEnd::Spent
        | LinkEnd::Refused
        | LinkEnd::Replaced
        | LinkEnd::Declined { .. } => {}
    }
}
