//! Connections from here: each is a path of a session. A session has one by shm or `tcp_lanes` by tcp;
//! those that fail are made anew as long as there is hope for the session.

use std::collections::BTreeMap;

use kvasir_transfer_core::{CloseRequest, GivenUp, OpId, PathIndex, SessionId};

use crate::config::Domain;
use crate::endpoint::Endpoint;
use crate::engine::{Loss, PeerEvent};
use crate::hello::Hello;
use crate::rdma::outgoing::RdmaOut;
use crate::shm::outgoing::ShmOut;
use crate::tcp::outgoing::TcpOut;
use crate::tcp::set_patience;

use super::hub::Hub;
use super::link::{Lane, LinkEnd, Turn};
use super::links::{Links, OutLink, Outgoing, Owner, count_end, is_long_ago, watch_edges};

/// Between attempts to make a connection anew; doubled after each that failed.
const AGAIN_US: u64 = 1_000;
const AGAIN_US_MAX: u64 = 500_000;

/// What a session has of connections, beside those in `outgoing`.
#[derive(Debug, Default)]
pub(super) struct Lanes {
    next_path: u32,
    /// Of the connection that came up last.
    domain: Option<Domain>,
    /// When the connections that are missing are to be made.
    due_us: Vec<u64>,
    /// Attempts that failed since one came up.
    failures: u32,
    /// What ended the last one of its connections that has ended.
    last_end: Option<LinkEnd>,
    /// Domains that do not suit this peer, or a region of it.
    unsuited: Vec<Domain>,
}

impl Lanes {
    fn again_us(&self, now_us: u64) -> u64 {
        now_us + (AGAIN_US << self.failures.min(20)).min(AGAIN_US_MAX)
    }
}

impl Links {
    pub(super) fn turn_outward(&mut self, hub: &mut Hub) -> Turn {
        let mut all = Turn { busy: self.connect_due(hub), ..Turn::default() };
        let mut ended = Vec::new();
        let mut came_up = Vec::new();
        for (lane, out) in &mut self.outgoing {
            match out.link.turn(hub) {
                Ok(turn) => {
                    all.add(turn);
                    if turn.busy {
                        out.active_us = hub.now_us;
                    }
                    if !out.was_up && out.link.is_up() {
                        out.was_up = true;
                        came_up.push((*lane, out.link.domain()));
                    }
                    if !out.was_up && hub.now_us >= out.connect_until_us {
                        ended.push((*lane, LinkEnd::Silent));
                    }
                }
                Err(end) => ended.push((*lane, end)),
            }
        }
        for (lane, domain) in came_up {
            all.busy = true;
            self.came_up(lane.session, domain, hub);
        }
        for (lane, end) in ended {
            all.busy = true;
            self.end_outgoing(lane, end, hub);
        }
        all
    }

    pub(super) fn next_connection_us(&self) -> u64 {
        let due = self.lanes.values().flat_map(|lanes| lanes.due_us.iter().copied());
        let connecting = self.outgoing.values().filter(|out| !out.was_up);
        let until = connecting.map(|out| out.connect_until_us);
        due.chain(until).min().unwrap_or(u64::MAX)
    }

    // ---- how they are made ----

    pub(super) fn connect(&mut self, session: SessionId, hub: &mut Hub) {
        self.lanes.insert(session, Lanes::default());
        self.endpoints.insert(session, hub.now_us);
        self.connect_by(session, (all_domains(hub, &[]), false), hub);
    }

    fn connect_due(&mut self, hub: &mut Hub) -> bool {
        let now_us = hub.now_us;
        let mut due = Vec::new();
        for (session, lanes) in &mut self.lanes {
            let found = lanes.due_us.extract_if(.., |due_us| *due_us <= now_us).count();
            due.extend(std::iter::repeat_n(*session, found));
        }
        let mut any = false;
        for session in &due {
            // It may have been lost meanwhile.
            let Some(lanes) = self.lanes.get_mut(session) else { continue };
            if hub.sender.is_idle(*session) {
                lanes.due_us.push(now_us + AGAIN_US_MAX);
                continue;
            }
            any = true;
            // Beside others it is one more of theirs; alone it may take any way.
            let up = self.of_session(*session).find(|(_, out)| out.was_up);
            let unsuited = self.lanes.get(session).map(|lanes| lanes.unsuited.as_slice());
            let candidates = match up.map(|(_, out)| out.link.domain()) {
                Some(domain) => vec![domain],
                None => all_domains(hub, unsuited.unwrap_or_default()),
            };
            self.connect_by(*session, (candidates, false), hub);
        }
        any
    }

    fn of_session(&self, session: SessionId) -> impl Iterator<Item = (&Lane, &Outgoing)> {
        lanes_of(&self.outgoing, session)
    }

    /// Tries the domains from the last to the first. Where there is hope, one that was tried before has
    /// not refused.
    fn connect_by(
        &mut self,
        session: SessionId,
        (mut candidates, hope): (Vec<Domain>, bool),
        hub: &mut Hub,
    ) {
        let found = {
            let mut peers = hub.shared.peers();
            peers.of_session(session).and_then(|peer| peers.connecting(peer))
        };
        // It may have been forgotten just before it was used.
        let Some((endpoint, cut_offs)) = found else {
            self.session_lost(session, None, Loss::Unreachable, hub);
            return;
        };
        // What has failed lately comes last.
        let incarnation = endpoint.incarnation;
        candidates
            .sort_by_key(|domain| !self.avoided.is_avoided((incarnation, *domain), hub.now_us));
        if !self.make_room(session, hub) {
            return;
        }
        let Some(lanes) = self.lanes.get_mut(&session) else { return };
        let lane = Lane { session, path: PathIndex(lanes.next_path) };
        let named = (session, lane.path);
        let hello = Hello::new(&hub.shared.endpoint, &endpoint, cut_offs, named);
        while let Some(domain) = candidates.pop() {
            let Some(link) = open(lane, domain, &endpoint, &hello, hub) else { continue };
            let token = self.next_token;
            self.next_token += 1;
            if domain != Domain::Shm {
                // A matter of time only: what cannot be set here is noticed later.
                let _ = set_patience(link.fd(), hub.shared.config.peer_timeout_ms);
            }
            if watch_edges(&self.epoll, link.fd(), token).is_err() {
                link.close(hub);
                continue;
            }
            lanes.next_path += 1;
            self.owners.insert(token, Owner::Outgoing(lane));
            // The session waits for so long at most: whoever does not answer leaves time for the others.
            let patience_us = hub.shared.config.peer_timeout_ms * 1000;
            let connect_until_us = hub.now_us + patience_us / (candidates.len() as u64 + 1);
            let (active_us, was_up) = (hub.now_us, false);
            let out =
                Outgoing { token, link, candidates, hope, active_us, connect_until_us, was_up };
            self.outgoing.insert(lane, out);
            return;
        }
        self.not_connected(session, hope, hub);
    }

    /// Whether one more connection may be made. If not, the session has to do with those it has.
    fn make_room(&mut self, session: SessionId, hub: &mut Hub) -> bool {
        if self.outgoing.len() < hub.shared.config.connections_max {
            return true;
        }
        if let Some(idle) = self.idle_session(hub) {
            self.end_outgoing(idle, LinkEnd::Idle, hub);
            return true;
        }
        let has_others = self.of_session(session).next().is_some();
        if has_others && let Some(lanes) = self.lanes.get_mut(&session) {
            lanes.due_us.push(hub.now_us + AGAIN_US_MAX);
            return false;
        }
        tracing::warn!(
            engine = %hub.shared.config.name,
            connections_max = hub.shared.config.connections_max,
            "too many connections are in use: one more peer cannot be reached now"
        );
        self.session_lost(session, None, Loss::Unreachable, hub);
        false
    }

    /// A connection of the session that is to go, of those that owe nothing, are owed nothing, and whose
    /// peer nobody wants.
    fn idle_session(&mut self, hub: &Hub) -> Option<Lane> {
        let Links { endpoints, outgoing, .. } = self;
        let gone = endpoints.evict(|session| {
            let used_us = lanes_of(outgoing, session).map(|(_, out)| out.active_us).max()?;
            let idle = hub.sender.is_idle(session) && !hub.sender.is_wanted(session);
            (idle && is_long_ago(used_us, hub)).then_some(used_us)
        });
        self.of_session(gone?).next().map(|(lane, _)| *lane)
    }

    fn came_up(&mut self, session: SessionId, domain: Domain, hub: &mut Hub) {
        let wanted = match domain {
            Domain::Shm | Domain::Verbs => 1,
            Domain::Tcp => hub.shared.config.tcp_lanes,
        };
        let present = self.of_session(session).count();
        let Some(lanes) = self.lanes.get_mut(&session) else { return };
        lanes.domain = Some(domain);
        lanes.failures = 0;
        let missing = wanted.saturating_sub(present + lanes.due_us.len());
        lanes.due_us.extend(std::iter::repeat_n(hub.now_us, missing));
    }

    // ---- what is asked of them ----

    /// When this returns, nothing reads the operation's source any more.
    pub(super) fn detach(&mut self, session: SessionId, op: OpId, hub: &mut Hub) {
        let mut reading = Vec::new();
        let of_session = self.outgoing.iter_mut().filter(|(lane, _)| lane.session == session);
        for (lane, out) in of_session {
            match &mut out.link {
                OutLink::Shm(link) => link.detach(op),
                OutLink::Tcp(link) => link.detach(op),
                // What a card was given cannot be taken back one by one.
                OutLink::Rdma(link) if link.is_reading(op) => reading.push(*lane),
                OutLink::Rdma(link) => link.detach(op),
            }
        }
        for lane in reading {
            self.end_outgoing(lane, LinkEnd::Lost, hub);
        }
    }

    pub(super) fn ask(&mut self, session: SessionId, through: PathIndex, close: &CloseRequest) {
        // One that has ended is told to the core, which asks through another one.
        match self.outgoing.get_mut(&Lane { session, path: through }).map(|out| &mut out.link) {
            Some(OutLink::Shm(link)) => link.ask(close),
            Some(OutLink::Tcp(link)) => link.ask(close),
            Some(OutLink::Rdma(link)) => link.ask(close),
            None => {}
        }
    }

    pub(super) fn ask_for_heartbeat(&mut self, lane: Lane) {
        // One that has ended is told to the core.
        match self.outgoing.get_mut(&lane).map(|out| &mut out.link) {
            Some(OutLink::Shm(link)) => link.ask_for_heartbeat(),
            Some(OutLink::Tcp(link)) => link.ask_for_heartbeat(),
            Some(OutLink::Rdma(link)) => link.ask_for_heartbeat(),
            None => {}
        }
    }

    pub(super) fn give_up_path(&mut self, lane: Lane, why: GivenUp, hub: &mut Hub) {
        let end = match why {
            GivenUp::Silent => LinkEnd::Silent,
            GivenUp::WornOut => LinkEnd::Lost,
        };
        self.end_outgoing(lane, end, hub);
    }

    pub(super) fn give_up_session(&mut self, session: SessionId, hub: &mut Hub) {
        let lanes = self.lanes.get(&session);
        let was_up = lanes.is_some_and(|lanes| lanes.domain.is_some());
        let last = lanes.and_then(|lanes| lanes.last_end).filter(|_| was_up);
        self.session_lost(session, None, last.map_or(Loss::Unreachable, LinkEnd::loss), hub);
    }

    // ---- how they end ----

    fn end_outgoing(&mut self, lane: Lane, end: LinkEnd, hub: &mut Hub) {
        // Closed before anyone is told.
        let Some(Outgoing { token, link, candidates, hope, was_up, .. }) =
            self.outgoing.remove(&lane)
        else {
            return;
        };
        self.owners.remove(&token);
        let (domain, was_up, session) = (link.domain(), was_up || link.is_up(), lane.session);
        link.close(hub);
        count_end(hub.metrics.of(domain), end);
        if let LinkEnd::Declined { cut_offs: Some(cut_offs) } = end {
            let mut peers = hub.shared.peers();
            if let Some(peer) = peers.of_session(session) {
                peers.learn_cut_offs(peer, cut_offs);
            }
        }
        if let Some(lanes) = self.lanes.get_mut(&session) {
            lanes.last_end = Some(end);
        }
        // One that merely ended says nothing of its domain.
        let has_failed = match end {
            LinkEnd::Silent | LinkEnd::Malformed => true,
            LinkEnd::Lost | LinkEnd::Refused => !was_up,
            _ => false,
        };
        if has_failed && let Some(peer) = hub.shared.peers().of_session(session) {
            self.avoided.failed((peer.incarnation(), domain), hub.now_us);
        }
        let was_idle = hub.sender.is_idle(session);
        if was_up {
            hub.metrics.of(domain).paths_lost.inc();
            hub.sender.path_lost(session, lane.path, hub.now_us);
        }
        match end {
            // Who says no, or lies, is not asked again; and who is not needed is not kept.
            LinkEnd::Declined { .. }
            | LinkEnd::Replaced
            | LinkEnd::Malformed
            | LinkEnd::Rejected
            | LinkEnd::Untrusted
            | LinkEnd::Idle => self.session_lost(session, Some(domain), end.loss(), hub),
            LinkEnd::Unsuited => {
                let Some(lanes) = self.lanes.get_mut(&session) else { return };
                lanes.unsuited.push(domain);
                if was_up {
                    lanes.due_us.push(hub.now_us);
                } else {
                    self.connect_by(session, (candidates, hope), hub);
                }
            }
            LinkEnd::Lost | LinkEnd::Silent | LinkEnd::Refused if was_up => {
                // The last one is missed at once, unless nobody has a use for it.
                let alone = !self.of_session(session).any(|(_, out)| out.was_up);
                if alone && was_idle {
                    self.session_lost(session, Some(domain), end.loss(), hub);
                    return;
                }
                let Some(lanes) = self.lanes.get_mut(&session) else { return };
                lanes.domain = Some(domain);
                let again_us = if alone { hub.now_us } else { lanes.again_us(hub.now_us) };
                lanes.due_us.push(again_us);
            }
            LinkEnd::Lost | LinkEnd::Silent | LinkEnd::Refused if !candidates.is_empty() => {
                self.connect_by(session, (candidates, hope || end.is_hopeful()), hub);
            }
            LinkEnd::Lost | LinkEnd::Silent | LinkEnd::Refused => {
                self.not_connected(session, hope || end.is_hopeful(), hub);
            }
        }
    }

    /// An attempt has failed in every domain.
    fn not_connected(&mut self, session: SessionId, hope: bool, hub: &mut Hub) {
        let others = self.of_session(session).next().is_some();
        let Some(lanes) = self.lanes.get_mut(&session) else { return };
        // Where nobody listens any more, nobody will.
        let was_up = lanes.domain.is_some();
        if (!was_up || !hope) && !others {
            let why = if was_up { Loss::Closed } else { Loss::Unreachable };
            self.session_lost(session, None, why, hub);
            return;
        }
        lanes.failures = lanes.failures.saturating_add(1);
        let again_us = lanes.again_us(hub.now_us);
        lanes.due_us.push(again_us);
    }

    fn session_lost(
        &mut self,
        session: SessionId,
        domain: Option<Domain>,
        why: Loss,
        hub: &mut Hub,
    ) {
        let former = self.lanes.remove(&session).and_then(|lanes| lanes.domain);
        self.endpoints.remove(session);
        let domain = domain.or(former);
        let lanes: Vec<Lane> = self.of_session(session).map(|(lane, _)| *lane).collect();
        for lane in lanes {
            if let Some(out) = self.outgoing.remove(&lane) {
                self.owners.remove(&out.token);
                out.link.close(hub);
            }
        }
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
            ?why,
            "the session with a peer has ended"
        );
        hub.calls.peer(PeerEvent::SessionLost { peer, incarnation, domain, why });
    }
}

fn lanes_of(
    outgoing: &BTreeMap<Lane, Outgoing>,
    session: SessionId,
) -> impl Iterator<Item = (&Lane, &Outgoing)> {
    let path = |index| Lane { session, path: PathIndex(index) };
    outgoing.range(path(0)..=path(u32::MAX))
}

/// In the order in which they are taken from the end.
fn all_domains(hub: &Hub, unsuited: &[Domain]) -> Vec<Domain> {
    let preferred = hub.shared.config.preferred;
    let others = [Domain::Tcp, Domain::Verbs, Domain::Shm];
    let others = others.into_iter().filter(|domain| *domain != preferred);
    let all = others.chain([preferred]);
    all.filter(|domain| !unsuited.contains(domain)).collect()
}

fn open(
    lane: Lane,
    domain: Domain,
    endpoint: &Endpoint,
    hello: &Hello,
    hub: &mut Hub,
) -> Option<OutLink> {
    match domain {
        Domain::Tcp => {
            TcpOut::connect(lane, endpoint.tcp?, hello, hub.tls.as_ref()).map(OutLink::Tcp)
        }
        Domain::Shm => {
            let (there, here) = (endpoint.shm.as_ref()?, hub.shared.endpoint.shm.as_ref()?);
            if there.host_id != here.host_id {
                return None;
            }
            ShmOut::connect(lane, &there.socket, hello).ok().map(OutLink::Shm)
        }
        Domain::Verbs => {
            let (card, address) = (endpoint.rdma.as_ref()?, endpoint.tcp?);
            let rdma = hub.rdma.as_mut().filter(|rdma| rdma.may_reach(card))?;
            let way = (rdma, hub.tls.as_ref());
            match RdmaOut::connect(lane, address, hello.clone(), way) {
                Ok(link) => Some(OutLink::Rdma(link)),
                Err(error) => {
                    let engine = &hub.shared.config.name;
                    tracing::warn!(%engine, error = error.sentence(), "no pipe to a peer");
                    None
                }
            }
        }
    }
}
