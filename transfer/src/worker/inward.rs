//! Connections that peers made to here: taken, polled, ended. When one has ended, its path has not yet,
//! as long as its writer may still be copying.

use std::os::fd::OwnedFd;

use kvasir_mutation::{Mutation, mutated};
use kvasir_transfer_core::PathId;
use rustix::io::Errno;

use crate::config::Domain;
use crate::engine::Loss;
use crate::rdma::incoming::RdmaIn;
use crate::rdma::seek::Sought;
use crate::shm::incoming::ShmIn;
use crate::tcp::incoming::TcpIn;
use crate::tcp::set_patience;
use crate::tcp::stream::Stream;

use super::hub::Hub;
use super::leaving::{Ended, Rest, Tell};
use super::link::{LinkEnd, Turn};
use super::links::{
    InLink, Incoming, LinkId, Links, Owner, count_end, hear, is_long_ago, watch_edges,
};
use super::quiesce::UnderWay;

const ACCEPTS_PER_TURN: usize = 64;
/// When the system is out of descriptors or memory.
const ACCEPT_AGAIN_US: u64 = 10_000;

/// What a connection was.
#[derive(Debug)]
pub(super) struct Removed {
    domain: Domain,
    /// Whose path it was, once it was admitted.
    of: Option<(u64, PathId)>,
    rest: Option<Rest>,
    /// Its socket is closed last, so that whoever sees that it is finds its end counted.
    _link: Option<InLink>,
}

/// How many may be about to say who they are: beyond it the one that takes longest is closed. Enough for a
/// crowd of peers that comes back at once.
fn strangers_max(connections_max: usize) -> usize {
    (connections_max / 4).max(if mutated(Mutation::StrangersUnbounded) { 1 << 16 } else { 16 })
}

impl Links {
    pub(super) fn turn_inward(&mut self, hub: &mut Hub) -> Turn {
        let mut all = self.accept(hub);
        hub.places = self.places(hub);
        let mut ended = Vec::new();
        let mut for_card = Vec::new();
        let Links { incoming, strangers, .. } = self;
        for (id, into) in incoming {
            let turned = into.link.turn(hub);
            if into.link.peer().is_some() {
                strangers.remove(id);
            }
            match turned {
                Ok(_) if matches!(&into.link, InLink::Tcp(link) if link.is_for_card()) => {
                    for_card.push(*id);
                }
                Ok(turn) => {
                    all.add(turn);
                    if turn.busy {
                        into.active_us = hub.now_us;
                    }
                    if into.link.peer().is_none() && hub.now_us >= into.greet_until_us {
                        ended.push((*id, LinkEnd::Rejected));
                    }
                }
                Err(end) => ended.push((*id, end)),
            }
        }
        for id in for_card {
            all.add(self.give_to_card(id, hub));
        }
        for (id, end) in ended {
            all.busy = true;
            self.end_incoming(id, (end, Tell::IfLast), hub);
        }
        while self.admitted() > hub.shared.config.connections_max
            && let Some(idle) = self.idle_incoming(hub)
        {
            self.end_incoming(idle, (LinkEnd::Idle, Tell::IfLast), hub);
        }
        for path in std::mem::take(&mut hub.draining) {
            all.busy = true;
            self.drain(path, hub);
        }
        for path in std::mem::take(&mut hub.superseded) {
            all.busy = true;
            if let Some(id) = self.link_of(path) {
                self.end_incoming(id, (LinkEnd::Replaced, Tell::Loss), hub);
            }
        }
        all
    }

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
            // Its peers connect by TCP.
            Domain::Verbs | Domain::Efa => None,
        }
    }

    fn add_incoming(&mut self, domain: Domain, socket: OwnedFd, hub: &mut Hub) {
        if self.strangers.len() >= strangers_max(hub.shared.config.connections_max)
            && let Some(first) = self.strangers.first().copied()
        {
            self.end_incoming(first, (LinkEnd::Rejected, Tell::IfLast), hub);
        }
        let (token, bell_token) = (self.next_token, self.next_token + 1);
        self.next_token += 2;
        let id = LinkId(token);
        let link = match domain {
            Domain::Shm => ShmIn::new(socket).map(InLink::Shm),
            // Whoever wants a card says so in its greeting.
            Domain::Tcp | Domain::Verbs | Domain::Efa => {
                match Stream::accepted(socket, hub.tls.as_ref()) {
                    Ok(stream) => Ok(InLink::Tcp(TcpIn::new(stream))),
                    Err(_) => Err(Errno::NOMEM),
                }
            }
        };
        let watched = link.and_then(|link| {
            if domain != Domain::Shm {
                set_patience(link.fd(), hub.shared.config.peer_timeout_ms)?;
            }
            watch_edges(&self.epoll, link.fd(), token)?;
            link.bell().map_or(Ok(()), |bell| hear(&self.epoll, bell, bell_token))?;
            Ok(link)
        });
        let Ok(link) = watched else {
            hub.metrics.of(domain).not_admitted.inc();
            return;
        };
        self.owners.insert(token, Owner::Incoming(id));
        let bell_token = link.bell().map(|_| bell_token);
        if let Some(token) = bell_token {
            self.owners.insert(token, Owner::WritersBell(id));
        }
        let greet_until_us = hub.now_us + hub.shared.config.peer_timeout_ms * 1000;
        let active_us = hub.now_us;
        self.incoming.insert(id, Incoming { bell_token, link, greet_until_us, active_us });
        self.strangers.insert(id);
    }

    /// A connection by TCP has said that a card shall place what its writer sends. It stays as it is while the
    /// way to the writer's card is looked for.
    fn give_to_card(&mut self, id: LinkId, hub: &mut Hub) -> Turn {
        let way = match self.seeking.remove(&id) {
            Some(sought) => Ok(Some(sought)),
            None => match self.incoming.get(&id).map(|into| &into.link) {
                Some(InLink::Tcp(link)) => {
                    link.for_card().map_or(Ok(None), |newcomer| RdmaIn::seek(newcomer, hub))
                }
                _ => Ok(None),
            },
        };
        let way = match &way {
            Ok(Some(sought)) => match sought.found() {
                Some(Ok(())) => Ok(()),
                Some(Err(error)) => Err(error),
                None => {
                    self.seeking.extend(way.into_iter().flatten().map(|sought| (id, sought)));
                    let wait_until_us = hub.now_us + Sought::LOOK_AGAIN_US;
                    return Turn { busy: false, wait_until_us };
                }
            },
            Ok(None) => Ok(()),
            Err(error) => Err(error),
        };
        let busy = Turn { busy: true, ..Turn::default() };
        let Some(into) = self.incoming.remove(&id) else { return busy };
        self.strangers.remove(&id);
        let given = match into.link {
            InLink::Tcp(link) => link.into_card(),
            InLink::Shm(_) | InLink::Rdma(_) => None,
        };
        let Some((stream, newcomer)) = given else { return busy };
        let domain = newcomer.card.as_ref().map_or(Domain::Tcp, |card| card.domain);
        match RdmaIn::admit((stream, newcomer), way, hub) {
            Ok(link) => {
                let (link, active_us) = (InLink::Rdma(link), hub.now_us);
                self.incoming.insert(id, Incoming { link, active_us, ..into });
            }
            Err(end) => {
                self.owners.remove(&id.0);
                count_end(hub.metrics.of(domain), end);
            }
        }
        busy
    }

    /// Whoever ends connections in the middle of copies does not get more room by it.
    fn admitted(&self) -> usize {
        let strangers =
            if mutated(Mutation::StrangersEvictPeers) { 0 } else { self.strangers.len() };
        self.incoming.len() - strangers + self.leaving.len()
    }

    /// How many connections may be admitted. Only they make others leave: a stranger cannot.
    fn places(&self, hub: &Hub) -> usize {
        if self.strangers.is_empty() {
            return 0;
        }
        match hub.shared.config.connections_max.saturating_sub(self.admitted()) {
            0 => usize::from(self.idle_incoming(hub).is_some()),
            free => free,
        }
    }

    /// The one that was idle for longest. Those that have not said who they are have their own time;
    /// those of shm stay, because what their writers push at this moment has landed for them. They end
    /// with their processes.
    fn idle_incoming(&self, hub: &Hub) -> Option<LinkId> {
        let idle = self.incoming.iter().filter(|(_, into)| {
            let may_end = matches!(into.link, InLink::Tcp(_) | InLink::Rdma(_));
            may_end && into.link.peer().is_some() && is_long_ago(into.active_us, hub)
        });
        idle.min_by_key(|(_, into)| into.active_us).map(|(link, _)| *link)
    }

    fn link_of(&self, path: PathId) -> Option<LinkId> {
        let found = self.incoming.iter().find(|(_, into)| into.link.path() == Some(path));
        found.map(|(id, _)| *id)
    }

    /// Takes a connection out, and closes it. Nothing more of its writer begins to land; the rest is what
    /// was under way.
    pub(super) fn remove_incoming(&mut self, id: LinkId, hub: &mut Hub) -> Option<Removed> {
        let into = self.incoming.remove(&id)?;
        self.strangers.remove(&id);
        self.seeking.remove(&id);
        self.owners.remove(&id.0);
        into.bell_token.map(|token| self.owners.remove(&token));
        let domain = into.link.domain();
        let incarnation = into.link.peer().map(|peer| peer.incarnation);
        let of = incarnation.zip(into.link.path());
        let (link, rest) = match into.link {
            InLink::Rdma(link) => (None, Some(Rest::Draining(Box::new(link.cut(hub))))),
            InLink::Shm(mut link) => {
                let rest = link.cut().map(|(copying, given)| Rest::Copying { copying, given });
                (Some(InLink::Shm(link)), rest)
            }
            link @ InLink::Tcp(_) => (Some(link), None),
        };
        Some(Removed { domain, of, rest, _link: link })
    }

    fn end_incoming(&mut self, id: LinkId, (end, tell): (LinkEnd, Tell), hub: &mut Hub) {
        let Some(removed) = self.remove_incoming(id, hub) else { return };
        let Removed { domain, of, rest, _link } = removed;
        count_end(hub.metrics.of(domain), end);
        let Some((incarnation, path)) = of else { return };
        tracing::info!(
            engine = %hub.shared.config.name,
            peer = format_args!("{incarnation:016x}"),
            transport = domain.label(),
            ?end,
            "the connection from a peer that writes to this transfer engine ended"
        );
        let why = end.loss();
        let ended = Ended { incarnation, path, domain, tell, why };
        match rest {
            Some(rest) => self.leaving.add(ended, rest),
            None => ended.take_effect(hub),
        }
    }

    /// The sender of a path uses it no more, and asks what has landed through it.
    fn drain(&mut self, path: PathId, hub: &mut Hub) {
        let Some(id) = self.link_of(path) else { return };
        // What was pushed into a ring has landed, and its sender knows it; so has what a card has placed,
        // which is counted while its pipe drains. What is still in a socket has not, and is sent again.
        if let Some(InLink::Shm(link)) = self.incoming.get_mut(&id).map(|into| &mut into.link)
            && let Err(end) = link.read_rest(hub)
        {
            self.end_incoming(id, (end, Tell::IfLast), hub);
            return;
        }
        self.end_incoming(id, (LinkEnd::Lost, Tell::IfLast), hub);
    }

    /// Whether there were any.
    pub(super) fn tell_answers(&mut self, hub: &mut Hub) -> bool {
        let answers = std::mem::take(&mut hub.answers);
        for (asker, answer) in &answers {
            // One that has ended meanwhile is asked through another path again.
            let Some(id) = self.link_of(*asker) else { continue };
            if let Some(into) = self.incoming.get_mut(&id) {
                into.link.tell(answer);
            }
        }
        !answers.is_empty()
    }

    /// Nothing more is landed in the region, what is under way apart. Writers that were never given it are
    /// not waited for: one that stands still in the middle of a copy keeps back what it may write to,
    /// and nothing else.
    pub(super) fn revoked(&mut self, key: u64, hub: &mut Hub) -> Vec<UnderWay> {
        let mut under_way = self.leaving.bound_for(key);
        for into in self.incoming.values_mut() {
            match &mut into.link {
                InLink::Tcp(link) => link.revoked(key),
                InLink::Shm(link) => {
                    let copying = link.revoked(key).map(UnderWay::Copy);
                    let is_waited_for = !mutated(Mutation::RevocationWaitsForNoCopy);
                    under_way.extend(copying.filter(|_| is_waited_for));
                }
                InLink::Rdma(link) => link.revoked(key),
            }
        }
        under_way.extend(hub.cards.forget(key).into_iter().map(UnderWay::Card));
        under_way
    }

    /// Ends the peer's connections to here, and its session. Nothing more is landed, what is under way
    /// apart.
    pub(super) fn cut_off(&mut self, incarnation: u64, hub: &mut Hub) -> Vec<UnderWay> {
        hub.receiver.end_session(incarnation);
        let of_peer = self.incoming.iter().filter(|(_, into)| {
            into.link.peer().is_some_and(|peer| peer.incarnation == incarnation)
        });
        let links: Vec<LinkId> = of_peer.map(|(id, _)| *id).collect();
        for id in links {
            let Some(removed) = self.remove_incoming(id, hub) else { continue };
            let Removed { domain, of, rest, _link } = removed;
            hub.metrics.of(domain).cut_off.inc();
            let Some((_, path)) = of else { continue };
            let (tell, why) = (Tell::Nothing, Loss::CutOff);
            let ended = Ended { incarnation, path, domain, tell, why };
            match rest {
                Some(rest) => self.leaving.add(ended, rest),
                None => ended.take_effect(hub),
            }
        }
        // Those of connections that ended before, too.
        self.leaving.of(incarnation)
    }
}
