//! Connections from here: each is a path of a session. A session has one by shm, `tcp_lanes` by tcp, or one
//! for each pair of network cards; those that fail are made anew as long as there is hope for the session.
//! What has failed is avoided for a while, and then tried again beside what has come up instead.

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;

use kvasir_mutation::{Mutation, mutated};
use kvasir_transfer_core::{CloseRequest, Failed, GivenUp, OpId, PathIndex, SessionId};

use crate::config::Domain;
use crate::endpoint::Endpoint;
use crate::engine::{Loss, PeerEvent, PeerId};
use crate::hello::Hello;
use crate::rdma::outgoing::RdmaOut;
use crate::shm::outgoing::ShmOut;
use crate::tcp::outgoing::TcpOut;
use crate::tcp::set_patience;

use super::hub::Hub;
use super::link::{Lane, LinkEnd, Turn};
use super::links::{Attempt, Links, OutLink, Outgoing, Owner, count_end, is_long_ago, watch_edges};
use super::ways::{Lack, Way, all_ways, pairs, ways_without_cards};

/// Between attempts to make a connection anew; doubled after each that failed.
const AGAIN_US: u64 = 1_000;
const AGAIN_US_MAX: u64 = 500_000;

/// What a session has of connections, beside those in `outgoing`.
#[derive(Debug, Default)]
pub(super) struct Lanes {
    next_path: u32,
    /// Of the connection that came up last.
    domain: Option<Domain>,
    /// The connections that are missing.
    due: Vec<Due>,
    /// Attempts that failed since one came up.
    failures: u32,
    /// What ended the last one of its connections that has ended.
    last_end: Option<LinkEnd>,
}

/// A connection that is to be made.
#[derive(Debug, Clone, Copy)]
struct Due {
    at_us: u64,
    lack: Lack,
}

/// What is held against a way.
#[derive(Debug, Clone, Copy)]
pub(super) struct Held {
    avoided: Option<Failed>,
    flapping: Option<Failed>,
}

/// What a connection was when it ended.
#[derive(Debug, Clone, Copy)]
struct Was {
    up: bool,
    /// When it came up, if it did.
    up_us: u64,
    /// Nothing waited for it.
    idle: bool,
    /// Something has landed by it.
    of_use: bool,
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
                    if out.up_us.is_none() && out.link.is_up() {
                        out.up_us = Some(hub.now_us);
                        came_up.push((*lane, out.link.way()));
                    }
                    if out.up_us.is_none() && hub.now_us >= out.connect_until_us {
                        ended.push((*lane, LinkEnd::Silent));
                    }
                }
                Err(end) => ended.push((*lane, end)),
            }
        }
        for (lane, way) in came_up {
            all.busy = true;
            self.came_up(lane.session, way, hub);
        }
        for (lane, end) in ended {
            all.busy = true;
            self.end_outgoing(lane, end, hub);
        }
        if !mutated(Mutation::NoPathForUncarriedRegion) {
            self.go_beside_cards(hub);
        }
        self.excuse(hub);
        all
    }

    pub(super) fn next_connection_us(&self) -> u64 {
        let due = self.lanes.values().flat_map(|lanes| &lanes.due).map(|due| due.at_us);
        let connecting = self.outgoing.values().filter(|out| out.up_us.is_none());
        let until = connecting.map(|out| out.connect_until_us);
        due.chain(until).min().unwrap_or(u64::MAX)
    }

    // ---- how they are made ----

    pub(super) fn connect(&mut self, session: SessionId, hub: &mut Hub) {
        self.lanes.insert(session, Lanes::default());
        self.endpoints.insert(session, hub.now_us);
        let (candidates, hope, lack) = (all_ways(session, hub), false, Lack::Any);
        self.connect_by(session, Attempt { candidates, hope, lack }, hub);
    }

    fn connect_due(&mut self, hub: &mut Hub) -> bool {
        let now_us = hub.now_us;
        let mut due = Vec::new();
        for (session, lanes) in &mut self.lanes {
            let found = lanes.due.extract_if(.., |due| due.at_us <= now_us);
            due.extend(found.map(|due| (*session, due.lack)));
        }
        let mut any = false;
        for (session, lack) in due {
            // It may have been lost meanwhile.
            let Some(lanes) = self.lanes.get_mut(&session) else { continue };
            if hub.sender.is_idle(session) {
                lanes.due.push(Due { at_us: now_us + AGAIN_US_MAX, lack });
                continue;
            }
            let is_up = self.of_session(session).any(|(_, out)| out.up_us.is_some());
            let candidates = match (is_up, lack) {
                (false, _) => all_ways(session, hub),
                // Beside others it is the one that is missing, if it still is.
                (true, Lack::This(way)) if self.is_missing(session, way, hub) => vec![way],
                (true, Lack::WithoutCards) if !self.does_without_cards(session) => {
                    ways_without_cards()
                }
                (true, _) => continue,
            };
            any = true;
            let lack = if is_up { lack } else { Lack::Any };
            self.connect_by(session, Attempt { candidates, hope: false, lack }, hub);
        }
        any
    }

    /// Whether one more connection by this way is wanted beside those that there are.
    fn is_missing(&self, session: SessionId, way: Way, hub: &mut Hub) -> bool {
        let present = self.of_session(session).filter(|(_, out)| out.link.way() == way).count();
        let wanted = match way.domain {
            Domain::Shm => 1,
            Domain::Tcp => hub.shared.config.tcp_lanes,
            // As long as our card works.
            Domain::Verbs | Domain::Efa => {
                let peer = hub.shared.peers().of_session(session);
                let pairs = peer.map(|peer| pairs(way.domain, peer, hub));
                usize::from(pairs.is_some_and(|pairs| pairs.contains(&way)))
            }
        };
        present < wanted
    }

    fn of_session(&self, session: SessionId) -> impl Iterator<Item = (&Lane, &Outgoing)> {
        lanes_of(&self.outgoing, session)
    }

    /// Tries the domains from the last to the first. Where there is hope, one that was tried before has
    /// not refused.
    fn connect_by(&mut self, session: SessionId, attempt: Attempt, hub: &mut Hub) {
        let Attempt { mut candidates, hope, lack } = attempt;
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
        candidates.sort_by_key(|way| !self.avoided.is_avoided((incarnation, *way), hub.now_us));
        if !self.make_room(session, lack.after(candidates.last().copied()), hub) {
            return;
        }
        let Some(lanes) = self.lanes.get_mut(&session) else { return };
        let lane = Lane { session, path: PathIndex(lanes.next_path) };
        let named = (session, lane.path);
        let hello = Hello::new(&hub.shared.endpoint, &endpoint, cut_offs, named);
        let mut last = None;
        while let Some(way) = candidates.pop() {
            last = Some(way);
            let Some(link) = open(lane, way, &endpoint, &hello, hub) else { continue };
            let token = self.next_token;
            self.next_token += 1;
            if way.domain != Domain::Shm {
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
            let (active_us, up_us) = (hub.now_us, None);
            let attempt = Attempt { candidates, hope, lack };
            let out = Outgoing { token, link, attempt, active_us, connect_until_us, up_us };
            self.outgoing.insert(lane, out);
            return;
        }
        self.not_connected(session, (last, hope, lack), hub);
    }

    /// Whether one more connection may be made. If not, the session has to do with those it has.
    fn make_room(&mut self, session: SessionId, lack: Lack, hub: &mut Hub) -> bool {
        if self.outgoing.len() < hub.shared.config.connections_max
            || mutated(Mutation::EndpointPoolUnbounded)
        {
            return true;
        }
        if let Some(idle) = self.idle_session(hub) {
            self.end_outgoing(idle, LinkEnd::Idle, hub);
            return true;
        }
        let has_others = self.of_session(session).next().is_some();
        if has_others && let Some(lanes) = self.lanes.get_mut(&session) {
            lanes.due.push(Due { at_us: hub.now_us + AGAIN_US_MAX, lack });
            return false;
        }
        tracing::warn!(
            engine = %hub.shared.config.name,
            connections_max = hub.shared.config.connections_max,
            "the transfer engine cannot connect to another peer: `connections_max` connections are in use"
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

    fn came_up(&mut self, session: SessionId, way: Way, hub: &mut Hub) {
        let Some(lanes) = self.lanes.get_mut(&session) else { return };
        lanes.domain = Some(way.domain);
        lanes.failures = 0;
        let of_tcp = std::iter::repeat_n(Way::by(Domain::Tcp), hub.shared.config.tcp_lanes);
        let mut missing: Vec<Way> = match way.domain {
            Domain::Tcp => of_tcp.collect(),
            Domain::Shm | Domain::Verbs | Domain::Efa => Vec::new(),
        };
        let preferred = hub.shared.config.preferred;
        // Cards are better than what has come up in their place, and all of them better than one.
        if way.domain != preferred || Domain::OF_CARDS.contains(&preferred) {
            let peer = hub.shared.peers().of_session(session);
            let pairs = peer.filter(|_| way.domain != Domain::Shm);
            missing.extend(pairs.map_or_else(Vec::new, |peer| pairs_of_cards(peer, hub)));
        }
        let present = self.of_session(session).map(|(_, out)| out.link.way());
        let present: Vec<Way> = present.chain(self.due_ways(session)).collect();
        for way in present {
            if let Some(at) = missing.iter().position(|missing| *missing == way) {
                missing.swap_remove(at);
            }
        }
        for way in missing {
            self.make_due(session, way, hub.now_us, hub);
        }
        if way.is_of_cards() && needs_more_than_cards(session, hub) {
            hub.beside_cards.push(session);
        }
    }

    fn works(&self, session: SessionId, way: Way) -> bool {
        self.of_session(session).any(|(_, out)| out.up_us.is_some() && out.link.way() == way)
    }

    fn due_ways(&self, session: SessionId) -> impl Iterator<Item = Way> {
        let lanes = self.lanes.get(&session).into_iter();
        lanes.flat_map(|lanes| &lanes.due).filter_map(|due| match due.lack {
            Lack::This(way) => Some(way),
            Lack::Any | Lack::WithoutCards => None,
        })
    }

    fn does_without_cards(&self, session: SessionId) -> bool {
        self.of_session(session).any(|(_, out)| !out.link.way().is_of_cards())
    }

    /// Sessions that need a path without cards get one.
    fn go_beside_cards(&mut self, hub: &mut Hub) {
        for session in std::mem::take(&mut hub.beside_cards) {
            let there_is = self.does_without_cards(session);
            let Some(lanes) = self.lanes.get_mut(&session).filter(|_| !there_is) else { continue };
            if lanes.due.iter().all(|due| due.lack != Lack::WithoutCards) {
                lanes.due.push(Due { at_us: hub.now_us, lack: Lack::WithoutCards });
            }
        }
    }

    /// One that is avoided waits until it may be tried again, unless a connection by it works. Where nothing else
    /// carries what the cards did not take, it does not wait for long.
    fn make_due(&mut self, session: SessionId, way: Way, at_us: u64, hub: &Hub) {
        let peer = hub.shared.peers().of_session(session).filter(|_| !self.works(session, way));
        let mut avoided_us =
            peer.map_or(0, |peer| self.avoided.until_us((peer.incarnation(), way)));
        let for_cards = !way.is_of_cards() && needs_more_than_cards(session, hub);
        if for_cards && !self.does_without_cards(session) {
            avoided_us = avoided_us.min(hub.now_us + AGAIN_US_MAX);
        }
        let Some(lanes) = self.lanes.get_mut(&session) else { return };
        lanes.due.push(Due { at_us: at_us.max(avoided_us), lack: Lack::This(way) });
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
            self.end_outgoing(lane, LinkEnd::Spent, hub);
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
            GivenUp::WornOut => LinkEnd::Spent,
        };
        // One that has gone meanwhile is known to be lost: the core has a path from when its connection comes up
        // until that connection ends.
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
        let Some(out) = self.outgoing.remove(&lane) else { return };
        let Outgoing { token, link, attempt, up_us, .. } = out;
        let Attempt { candidates, hope, lack } = attempt;
        self.owners.remove(&token);
        let (way, was_up, session) = (link.way(), up_us.is_some() || link.is_up(), lane.session);
        let domain = way.domain;
        let doubted = link.doubted().to_vec();
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
        let was_idle = hub.sender.is_idle(session);
        let has_landed = hub.sender.has_landed(session, lane.path);
        let up_us = up_us.unwrap_or(hub.now_us);
        let was = Was { up: was_up, up_us, idle: was_idle, of_use: has_landed };
        self.learn_of_way((session, way), (end, was), &doubted, hub);
        if was_up {
            hub.metrics.of(domain).paths_lost.inc();
            hub.sender.path_lost(session, lane.path, hub.now_us);
            if !way.is_of_cards() && needs_more_than_cards(session, hub) {
                hub.beside_cards.push(session);
            }
        }
        match end {
            // Who says no, or lies, is not asked again; and who is not needed is not kept.
            LinkEnd::Declined { .. }
            | LinkEnd::Replaced
            | LinkEnd::Malformed
            | LinkEnd::Rejected
            | LinkEnd::Untrusted
            | LinkEnd::Idle => self.session_lost(session, Some(domain), end.loss(), hub),
            LinkEnd::Lost
            | LinkEnd::Broken
            | LinkEnd::Silent
            | LinkEnd::Refused
            | LinkEnd::Spent
                if was_up =>
            {
                // The last one is missed at once, unless nobody has a use for it.
                let alone = !self.of_session(session).any(|(_, out)| out.up_us.is_some());
                if alone && was_idle {
                    self.session_lost(session, Some(domain), end.loss(), hub);
                    return;
                }
                let pause_us = self.pause_us(session, way, hub);
                hub.metrics.of(domain).paused.inc_by(u64::from(pause_us > hub.now_us));
                let Some(lanes) = self.lanes.get_mut(&session) else { return };
                lanes.domain = Some(domain);
                if alone {
                    // Others may be tried as well, and there is an end to how long a session has no path.
                    let grace_us = hub.shared.config.failover_grace_ms * 1000;
                    let is_unpaused = mutated(Mutation::FlappingPathNotPaused);
                    let pause_us = if is_unpaused { 0 } else { pause_us };
                    let at_us = hub.now_us.max(pause_us.min(hub.now_us + grace_us / 4));
                    lanes.due.push(Due { at_us, lack: Lack::Any });
                } else {
                    let again_us = lanes.again_us(hub.now_us).max(pause_us);
                    self.make_due(session, way, again_us, hub);
                }
            }
            LinkEnd::Lost
            | LinkEnd::Broken
            | LinkEnd::Silent
            | LinkEnd::Refused
            | LinkEnd::Spent
                if !candidates.is_empty() =>
            {
                let hope = hope || end.is_hopeful();
                self.connect_by(session, Attempt { candidates, hope, lack }, hub);
            }
            LinkEnd::Lost
            | LinkEnd::Broken
            | LinkEnd::Silent
            | LinkEnd::Refused
            | LinkEnd::Spent => {
                self.not_connected(session, (Some(way), hope || end.is_hopeful(), lack), hub);
            }
        }
    }

    /// What the end of a connection says of its way. Nothing, where another one by it works. One that has
    /// been of use may have been ended by the peer, for reasons of its own, unless the card says otherwise.
    fn learn_of_way(
        &mut self,
        (session, way): (SessionId, Way),
        (end, was): (LinkEnd, Was),
        doubted: &[u64],
        hub: &Hub,
    ) {
        let Some(peer) = hub.shared.peers().of_session(session) else { return };
        let named = (peer.incarnation(), way);
        let before =
            Held { avoided: self.avoided.held(named), flapping: self.flapping.held(named) };
        let is_excused = self.excuses.ended(named, doubted, before);
        if is_excused && !mutated(Mutation::PathAvoidedAfterKnownRefusals) {
            return;
        }
        // Those that ended with the last one say nothing that it has not said.
        let ended_since = self.flapping.failed_us(named).is_none_or(|last_us| last_us <= was.up_us);
        if matches!(end, LinkEnd::Lost | LinkEnd::Refused) && was.of_use && ended_since {
            self.flapping.broke(named, hub.now_us);
        }
        match end {
            LinkEnd::Silent | LinkEnd::Malformed => self.avoided.failed(named, hub.now_us),
            LinkEnd::Lost | LinkEnd::Broken | LinkEnd::Refused if !was.up => {
                self.avoided.failed(named, hub.now_us);
            }
            _ if self.works(session, way) => {}
            LinkEnd::Lost | LinkEnd::Refused
                if was.idle || (was.of_use && !mutated(Mutation::PathAvoidedAfterPeerClose)) => {}
            LinkEnd::Lost | LinkEnd::Broken | LinkEnd::Refused => {
                self.avoided.broke(named, hub.now_us);
            }
            _ => {}
        }
    }

    /// What peers have refused was no fault of the ways by which it was written.
    fn excuse(&mut self, hub: &mut Hub) {
        for (incarnation, key) in std::mem::take(&mut hub.refused_regions) {
            for (way, before) in self.excuses.refused(incarnation, key) {
                if !mutated(Mutation::RefusalsBlamedOnPath) {
                    self.flapping.put_back((incarnation, way), before.flapping);
                }
                self.avoided.put_back((incarnation, way), before.avoided);
            }
        }
    }

    /// Until when a way that has been of use, again and again for a moment, is left alone.
    fn pause_us(&self, session: SessionId, way: Way, hub: &Hub) -> u64 {
        let peer = hub.shared.peers().of_session(session);
        peer.map_or(0, |peer| self.flapping.until_us((peer.incarnation(), way)))
    }

    /// An attempt has failed by every way, by this one last.
    fn not_connected(
        &mut self,
        session: SessionId,
        (way, hope, lack): (Option<Way>, bool, Lack),
        hub: &mut Hub,
    ) {
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
        match lack.after(way) {
            Lack::This(way) if others => self.make_due(session, way, again_us, hub),
            lack => {
                let lack = if others { lack } else { Lack::Any };
                lanes.due.push(Due { at_us: again_us, lack });
            }
        }
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
        hub.end_session(session);
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
            transport = domain.map_or("none", Domain::label),
            reason = ?why,
            "the session of the transfer engine with a peer ended"
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

/// Whether its cards do not do: they did not take some region before, of which they do not tell again; or a signal
/// was promised while there was a path that places what it follows, and now there is none.
fn needs_more_than_cards(session: SessionId, hub: &Hub) -> bool {
    hub.sender.has_unsuited(session)
        || (!mutated(Mutation::NoPathForPromisedSignals) && hub.sender.has_unplaced(session))
}

/// Of whatever domain.
fn pairs_of_cards(peer: PeerId, hub: &mut Hub) -> Vec<Way> {
    Domain::OF_CARDS.iter().flat_map(|domain| pairs(*domain, peer, hub)).collect()
}

fn open(
    lane: Lane,
    way: Way,
    endpoint: &Endpoint,
    hello: &Hello,
    hub: &mut Hub,
) -> Option<OutLink> {
    match way.domain {
        Domain::Tcp => {
            let hello = hello.clone().signed(&hub.shared.identity);
            TcpOut::connect(lane, endpoint.tcp?, &hello, hub.tls.as_ref()).map(OutLink::Tcp)
        }
        Domain::Shm => {
            let (there, here) = (endpoint.shm.as_ref()?, hub.shared.endpoint.shm.as_ref()?);
            if there.host_id != here.host_id {
                return None;
            }
            let peer_incarnation = hello.to_incarnation;
            let hello = hello.clone().signed(&hub.shared.identity);
            ShmOut::connect((lane, peer_incarnation), &there.socket, &hello).ok().map(OutLink::Shm)
        }
        Domain::Verbs | Domain::Efa => {
            let peer = hub.shared.peers().of_session(lane.session)?;
            let pair = hub.route(peer).pair(way.rail)?;
            match RdmaOut::connect(lane, endpoint.tcp?, hello.clone(), ((way.rail, pair), hub)) {
                Ok(link) => Some(OutLink::Rdma(link)),
                Err(error) => {
                    let engine = &hub.shared.config.name;
                    tracing::warn!(
                        %engine, error = error.sentence(),
                        "the transfer engine cannot create an RDMA connection to a peer"
                    );
                    None
                }
            }
        }
    }
}
