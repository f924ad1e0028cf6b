//! All connections of a worker, both directions and all domains: made, polled, ended.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use kvasir_transfer_core::{OpId, PathId, SessionId};
use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::io::Errno;

use crate::config::Domain;
use crate::doorbell::Bell;
use crate::endpoint::Endpoint;
use crate::engine::PeerEvent;
use crate::hello::Hello;
use crate::metrics::DomainMetrics;
use crate::shared::Bells;
use crate::shm::Copying;
use crate::shm::incoming::ShmIn;
use crate::shm::outgoing::ShmOut;
use crate::tcp::incoming::TcpIn;
use crate::tcp::outgoing::TcpOut;

use super::hub::Hub;
use super::leaving::Leaving;
use super::link::{LinkEnd, Readiness, Turn};

const ACCEPTS_PER_TURN: usize = 64;
/// When the system is out of descriptors or memory.
const ACCEPT_AGAIN_US: u64 = 10_000;

const TOKEN_OWN_BELL: u64 = 0;
const TOKEN_OUTSIDE_BELL: u64 = 1;
const TOKEN_TCP: u64 = 2;
const TOKEN_SHM: u64 = 3;
const FIRST_TOKEN: u64 = 4;

/// Whose readiness a token tells.
#[derive(Debug, Clone, Copy)]
enum Owner {
    OwnBell,
    OutsideBell,
    Listener(Domain),
    Outgoing(SessionId),
    Incoming(PathId),
    /// By which the writer on the other side of a shm connection wakes us.
    WritersBell(PathId),
}

#[derive(Debug)]
pub(super) struct Links {
    epoll: OwnedFd,
    bells: Bells,
    tcp_listener: Option<OwnedFd>,
    shm_listener: Option<OwnedFd>,
    /// By domain: whether connections may wait to be taken.
    accepting: [bool; 2],
    outgoing: BTreeMap<SessionId, Outgoing>,
    incoming: BTreeMap<PathId, Incoming>,
    leaving: Leaving,
    owners: BTreeMap<u64, Owner>,
    next_token: u64,
}

#[derive(Debug)]
struct Outgoing {
    token: u64,
    link: OutLink,
    /// To be tried when this one does not come up.
    candidates: Vec<Domain>,
    /// When something came or went last.
    active_us: u64,
}

#[derive(Debug)]
enum OutLink {
    Shm(ShmOut),
    Tcp(TcpOut),
}

#[derive(Debug)]
struct Incoming {
    token: u64,
    bell_token: Option<u64>,
    link: InLink,
    /// Until then it must have said who it is.
    greet_until_us: u64,
    /// When something came last.
    active_us: u64,
}

#[derive(Debug)]
enum InLink {
    Shm(ShmIn),
    Tcp(TcpIn),
}

impl OutLink {
    fn domain(&self) -> Domain {
        match self {
            OutLink::Shm(_) => Domain::Shm,
            OutLink::Tcp(_) => Domain::Tcp,
        }
    }

    fn fd(&self) -> BorrowedFd<'_> {
        match self {
            OutLink::Shm(link) => link.fd(),
            OutLink::Tcp(link) => link.fd(),
        }
    }

    fn is_up(&self) -> bool {
        match self {
            OutLink::Shm(link) => link.is_up(),
            OutLink::Tcp(link) => link.is_up(),
        }
    }

    fn turn(&mut self, hub: &mut Hub) -> Result<Turn, LinkEnd> {
        match self {
            OutLink::Shm(link) => link.turn(hub),
            OutLink::Tcp(link) => link.turn(hub),
        }
    }
}

impl InLink {
    fn domain(&self) -> Domain {
        match self {
            InLink::Shm(_) => Domain::Shm,
            InLink::Tcp(_) => Domain::Tcp,
        }
    }

    fn fd(&self) -> BorrowedFd<'_> {
        match self {
            InLink::Shm(link) => link.fd(),
            InLink::Tcp(link) => link.fd(),
        }
    }

    fn bell(&self) -> Option<&Bell> {
        match self {
            InLink::Shm(link) => Some(link.bell()),
            InLink::Tcp(_) => None,
        }
    }

    fn peer(&self) -> Option<&Endpoint> {
        match self {
            InLink::Shm(link) => link.peer(),
            InLink::Tcp(link) => link.peer(),
        }
    }

    fn turn(&mut self, hub: &mut Hub) -> Result<Turn, LinkEnd> {
        match self {
            InLink::Shm(link) => link.turn(hub),
            InLink::Tcp(link) => link.turn(hub),
        }
    }
}

/// A bell tells as long as it rings.
fn hear(epoll: &OwnedFd, bell: &Bell, token: u64) -> rustix::io::Result<()> {
    epoll::add(epoll, bell, EventData::new_u64(token), EventFlags::IN)
}

fn watch_edges(epoll: &OwnedFd, fd: BorrowedFd<'_>, token: u64) -> rustix::io::Result<()> {
    let flags = EventFlags::IN | EventFlags::OUT | EventFlags::RDHUP | EventFlags::ET;
    epoll::add(epoll, fd, EventData::new_u64(token), flags)
}

impl Links {
    pub(super) fn new(
        bells: Bells,
        tcp_listener: Option<OwnedFd>,
        shm_listener: Option<OwnedFd>,
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
        Ok(Links {
            epoll,
            bells,
            tcp_listener,
            shm_listener,
            accepting: [true; 2],
            outgoing: BTreeMap::new(),
            incoming: BTreeMap::new(),
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

    pub(super) fn ready(&mut self, token: u64, ready: Readiness) {
        let Some(owner) = self.owners.get(&token).copied() else { return };
        match owner {
            Owner::OwnBell => self.bells.own.clear(),
            Owner::OutsideBell => self.bells.outside.clear(),
            Owner::WritersBell(path) => {
                let bell = self.incoming.get(&path).and_then(|into| into.link.bell());
                bell.into_iter().for_each(Bell::clear);
            }
            Owner::Listener(domain) => self.accepting[domain as usize] = true,
            Owner::Outgoing(session) => {
                match self.outgoing.get_mut(&session).map(|out| &mut out.link) {
                    Some(OutLink::Shm(link)) => link.ready(ready),
                    Some(OutLink::Tcp(link)) => link.ready(ready),
                    None => {}
                }
            }
            Owner::Incoming(path) => {
                match self.incoming.get_mut(&path).map(|into| &mut into.link) {
                    Some(InLink::Shm(link)) => link.ready(ready),
                    Some(InLink::Tcp(link)) => link.ready(ready),
                    None => {}
                }
            }
        }
    }

    /// Whether a ring has something, which wakes nobody who sets his flag too late.
    pub(super) fn has_work(&self) -> bool {
        self.incoming.values().any(|into| match &into.link {
            InLink::Shm(link) => link.has_work(),
            InLink::Tcp(_) => false,
        })
    }

    /// When a connection must have said who it is; `u64::MAX` for never.
    pub(super) fn next_time_us(&self) -> u64 {
        let silent = self.incoming.values().filter(|into| into.link.peer().is_none());
        silent.map(|into| into.greet_until_us).min().unwrap_or(u64::MAX)
    }

    pub(super) fn turn(&mut self, hub: &mut Hub) -> Turn {
        let mut all = self.accept(hub);
        let mut ended = Vec::new();
        for (path, into) in &mut self.incoming {
            match into.link.turn(hub) {
                Ok(turn) => {
                    all.add(turn);
                    if turn.busy {
                        into.active_us = hub.now_us;
                    }
                    if into.link.peer().is_none() && hub.now_us >= into.greet_until_us {
                        ended.push((*path, LinkEnd::Rejected));
                    }
                }
                Err(end) => ended.push((*path, end)),
            }
        }
        for (path, end) in ended {
            all.busy = true;
            self.end_incoming(path, end, hub);
        }
        let mut ended = Vec::new();
        for (session, out) in &mut self.outgoing {
            match out.link.turn(hub) {
                Ok(turn) => {
                    all.add(turn);
                    if turn.busy {
                        out.active_us = hub.now_us;
                    }
                }
                Err(end) => ended.push((*session, end)),
            }
        }
        for (session, end) in ended {
            all.busy = true;
            self.end_outgoing(session, end, hub);
        }
        all.busy |= self.leaving.look(&mut hub.calls);
        all
    }

    /// Whether copies of writers whose connections have ended must be looked after.
    pub(super) fn has_leaving(&self) -> bool {
        !self.leaving.is_empty()
    }

    // ---- incoming ----

    fn accept(&mut self, hub: &mut Hub) -> Turn {
        let mut turn = Turn::default();
        for domain in [Domain::Shm, Domain::Tcp] {
            let mut taken = 0;
            while self.accepting[domain as usize] && taken < ACCEPTS_PER_TURN {
                let Some(socket) = self.take_connection(domain) else { break };
                taken += 1;
                turn.busy = true;
                match socket {
                    Ok(socket) => self.add_incoming(domain, socket, hub),
                    Err(Errno::AGAIN) => self.accepting[domain as usize] = false,
                    Err(Errno::MFILE | Errno::NFILE | Errno::NOBUFS | Errno::NOMEM) => {
                        turn.wait_until_us = hub.now_us + ACCEPT_AGAIN_US;
                        turn.busy = false;
                        break;
                    }
                    // That one was gone before it was taken; there may be others behind it.
                    Err(_) => {}
                }
            }
        }
        turn
    }

    fn take_connection(&self, domain: Domain) -> Option<rustix::io::Result<OwnedFd>> {
        match domain {
            Domain::Shm => self.shm_listener.as_ref().map(crate::shm::take_connection),
            Domain::Tcp => self.tcp_listener.as_ref().map(crate::tcp::take_connection),
        }
    }

    fn add_incoming(&mut self, domain: Domain, socket: OwnedFd, hub: &mut Hub) {
        // Whoever ends connections in the middle of copies does not get more room by it.
        if self.incoming.len() + self.leaving.len() >= hub.shared.config.connections_max {
            let Some(idle) = self.idle_incoming(hub) else {
                hub.metrics.of(domain).not_admitted.inc();
                return;
            };
            self.end_incoming(idle, LinkEnd::Idle, hub);
        }
        let (token, bell_token) = (self.next_token, self.next_token + 1);
        self.next_token += 2;
        let path = PathId(token);
        let link = match domain {
            Domain::Shm => ShmIn::new(path, socket).map(InLink::Shm),
            Domain::Tcp => Ok(InLink::Tcp(TcpIn::new(path, socket))),
        };
        let watched = link.and_then(|link| {
            watch_edges(&self.epoll, link.fd(), token)?;
            link.bell().map_or(Ok(()), |bell| hear(&self.epoll, bell, bell_token))?;
            Ok(link)
        });
        let Ok(link) = watched else {
            hub.metrics.of(domain).not_admitted.inc();
            return;
        };
        self.owners.insert(token, Owner::Incoming(path));
        let bell_token = link.bell().map(|_| bell_token);
        if let Some(token) = bell_token {
            self.owners.insert(token, Owner::WritersBell(path));
        }
        let greet_until_us = hub.now_us + hub.shared.config.peer_timeout_ms * 1000;
        let active_us = hub.now_us;
        self.incoming.insert(path, Incoming { token, bell_token, link, greet_until_us, active_us });
    }

    /// The one that was idle for longest. Those that have not said who they are have their own time;
    /// those of shm stay, because what their writers push at this moment has landed for them. They end
    /// with their processes.
    fn idle_incoming(&self, hub: &Hub) -> Option<PathId> {
        let idle = self.incoming.iter().filter(|(_, into)| {
            let is_tcp = matches!(into.link, InLink::Tcp(_));
            is_tcp && into.link.peer().is_some() && is_long_ago(into.active_us, hub)
        });
        idle.min_by_key(|(_, into)| into.active_us).map(|(path, _)| *path)
    }

    /// Takes a connection out. What of its writer may still land is what is being copied now.
    fn remove_incoming(
        &mut self,
        path: PathId,
        hub: &mut Hub,
    ) -> Option<(Incoming, Option<Copying>)> {
        let into = self.incoming.remove(&path)?;
        self.owners.remove(&into.token);
        into.bell_token.map(|token| self.owners.remove(&token));
        hub.path_closed(path);
        let copying = match &into.link {
            InLink::Shm(link) => link.cut(),
            InLink::Tcp(_) => None,
        };
        Some((into, copying))
    }

    fn end_incoming(&mut self, path: PathId, end: LinkEnd, hub: &mut Hub) {
        let Some((into, copying)) = self.remove_incoming(path, hub) else { return };
        let domain = into.link.domain();
        count_end(hub.metrics.of(domain), end);
        if let Some(peer) = into.link.peer() {
            let incarnation = peer.incarnation;
            tracing::info!(
                engine = %hub.shared.config.name,
                peer = format_args!("{incarnation:016x}"),
                domain = domain.label(),
                ?end,
                "a writer's connection has ended"
            );
            let lost = PeerEvent::WriterLost { incarnation, domain: Some(domain) };
            match copying {
                Some(copying) => self.leaving.add(incarnation, copying, Some(lost)),
                None => hub.calls.peer(lost),
            }
        }
    }

    /// Nothing more is landed in the region, copies under way apart.
    pub(super) fn revoked(&mut self, key: u64) -> Vec<Copying> {
        let mut copying = self.leaving.all();
        for into in self.incoming.values_mut() {
            match &mut into.link {
                InLink::Tcp(link) => link.revoked(key),
                InLink::Shm(link) => copying.extend(link.copying()),
            }
        }
        copying
    }

    /// Ends the peer's connections to here. Nothing more is landed, copies under way apart.
    pub(super) fn cut_off(&mut self, incarnation: u64, hub: &mut Hub) -> Vec<Copying> {
        let of_peer =
            |into: &Incoming| into.link.peer().is_some_and(|peer| peer.incarnation == incarnation);
        let paths: Vec<PathId> =
            self.incoming.iter().filter(|(_, into)| of_peer(into)).map(|(path, _)| *path).collect();
        for path in paths {
            let Some((into, copying)) = self.remove_incoming(path, hub) else { continue };
            hub.metrics.of(into.link.domain()).cut_off.inc();
            if let Some(copying) = copying {
                self.leaving.add(incarnation, copying, None);
            }
        }
        // Those of connections that ended before, too.
        self.leaving.of(incarnation)
    }

    // ---- outgoing ----

    pub(super) fn connect(&mut self, session: SessionId, hub: &mut Hub) {
        let preferred = hub.shared.config.preferred;
        let other = match preferred {
            Domain::Shm => Domain::Tcp,
            Domain::Tcp => Domain::Shm,
        };
        self.connect_by(session, vec![other, preferred], hub);
    }

    /// The one that was idle for longest, of those that owe nothing and are owed nothing.
    fn idle_outgoing(&self, hub: &Hub) -> Option<SessionId> {
        let idle = self.outgoing.iter().filter(|(session, out)| {
            is_long_ago(out.active_us, hub) && hub.sender.is_idle(**session)
        });
        idle.min_by_key(|(_, out)| out.active_us).map(|(session, _)| *session)
    }

    /// Tries the domains from the last to the first.
    fn connect_by(&mut self, session: SessionId, mut candidates: Vec<Domain>, hub: &mut Hub) {
        let found = {
            let mut peers = hub.shared.peers();
            peers.of_session(session).and_then(|peer| peers.connecting(peer))
        };
        // It may have been forgotten just before it was used.
        let Some((endpoint, cut_offs)) = found else {
            self.session_lost(session, None, hub);
            return;
        };
        if self.outgoing.len() >= hub.shared.config.connections_max {
            let Some(idle) = self.idle_outgoing(hub) else {
                tracing::warn!(
                    engine = %hub.shared.config.name,
                    connections_max = hub.shared.config.connections_max,
                    "too many connections are in use: one more peer cannot be reached now"
                );
                self.session_lost(session, None, hub);
                return;
            };
            self.end_outgoing(idle, LinkEnd::Idle, hub);
        }
        let hello = Hello::new(&hub.shared.endpoint, &endpoint, cut_offs);
        while let Some(domain) = candidates.pop() {
            let Some(link) = open(session, domain, &endpoint, &hello, hub) else { continue };
            let token = self.next_token;
            self.next_token += 1;
            if watch_edges(&self.epoll, link.fd(), token).is_err() {
                continue;
            }
            self.owners.insert(token, Owner::Outgoing(session));
            let active_us = hub.now_us;
            self.outgoing.insert(session, Outgoing { token, link, candidates, active_us });
            return;
        }
        self.session_lost(session, None, hub);
    }

    pub(super) fn detach(&mut self, session: SessionId, op: OpId) {
        match self.outgoing.get_mut(&session).map(|out| &mut out.link) {
            Some(OutLink::Shm(link)) => link.detach(op),
            Some(OutLink::Tcp(link)) => link.detach(op),
            None => {}
        }
    }

    pub(super) fn give_up(&mut self, session: SessionId, hub: &mut Hub) {
        if self.outgoing.contains_key(&session) {
            self.end_outgoing(session, LinkEnd::Lost, hub);
        } else {
            self.session_lost(session, None, hub);
        }
    }

    fn end_outgoing(&mut self, session: SessionId, end: LinkEnd, hub: &mut Hub) {
        // Dropped, and with it the socket, before anyone is told.
        let Some(Outgoing { token, link, candidates, .. }) = self.outgoing.remove(&session) else {
            return;
        };
        self.owners.remove(&token);
        let (domain, was_up) = (link.domain(), link.is_up());
        drop(link);
        count_end(hub.metrics.of(domain), end);
        if let LinkEnd::Declined { cut_offs: Some(cut_offs) } = end {
            let mut peers = hub.shared.peers();
            if let Some(peer) = peers.of_session(session) {
                peers.learn_cut_offs(peer, cut_offs);
            }
        }
        let may_try_another = !was_up && !matches!(end, LinkEnd::Declined { .. } | LinkEnd::Idle);
        if may_try_another && !candidates.is_empty() {
            self.connect_by(session, candidates, hub);
        } else {
            self.session_lost(session, Some(domain), hub);
        }
    }

    fn session_lost(&mut self, session: SessionId, domain: Option<Domain>, hub: &mut Hub) {
        hub.sender.session_lost(session);
        if let Some(domain) = domain {
            hub.metrics.of(domain).sessions_lost.inc();
        }
        let peer = {
            let mut peers = hub.shared.peers();
            let peer = peers.of_session(session);
            peer.inspect(|peer| peers.end_session(*peer))
        };
        // One that was forgotten just before it was used has ended for its holders already.
        let Some(peer) = peer else { return };
        let incarnation = peer.incarnation;
        tracing::info!(
            engine = %hub.shared.config.name,
            peer = format_args!("{incarnation:016x}"),
            domain = domain.map_or("none", Domain::label),
            "the session with a peer has ended"
        );
        hub.calls.peer(PeerEvent::SessionLost { peer, incarnation, domain });
    }

    pub(super) fn close_all(&mut self, hub: &mut Hub) {
        self.outgoing.clear();
        let paths: Vec<PathId> = self.incoming.keys().copied().collect();
        for path in paths {
            self.remove_incoming(path, hub);
        }
    }
}

fn open(
    session: SessionId,
    domain: Domain,
    endpoint: &Endpoint,
    hello: &Hello,
    hub: &Hub,
) -> Option<OutLink> {
    match domain {
        Domain::Tcp => TcpOut::connect(session, endpoint.tcp?, hello).ok().map(OutLink::Tcp),
        Domain::Shm => {
            let (there, here) = (endpoint.shm.as_ref()?, hub.shared.endpoint.shm.as_ref()?);
            if there.host_id != here.host_id {
                return None;
            }
            ShmOut::connect(session, &there.socket, hello).ok().map(OutLink::Shm)
        }
    }
}

fn is_long_ago(active_us: u64, hub: &Hub) -> bool {
    hub.now_us >= active_us + hub.shared.config.peer_timeout_ms * 1000
}

fn count_end(metrics: &DomainMetrics, end: LinkEnd) {
    match end {
        LinkEnd::Malformed => metrics.malformed.inc(),
        LinkEnd::Rejected => metrics.not_admitted.inc(),
        LinkEnd::Idle => metrics.idle.inc(),
        LinkEnd::Lost | LinkEnd::Declined { .. } => {}
    }
}
