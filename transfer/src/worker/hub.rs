//! What all links of a worker share: the core's state machines, the regions, and what is to be told to
//! the callers. Links come and go around it.

use std::collections::BTreeMap;
use std::sync::Arc;

use kvasir_mutation::{Mutation, mutated};
use kvasir_transfer_core::{
    Asked, Expectation, PathId, Rails, Receiver, Refusal, RegionTable, Sender, SessionId, Settled,
    Target, WriteError,
};

use crate::calls::Calls;
use crate::closing;
use crate::config::Domain;
use crate::endpoint::Endpoint;
use crate::engine::PeerId;
use crate::hello::{Admission, HelloReply, Newcomer};
use crate::memory::SharedMemory;
use crate::messages::Messages;
use crate::metrics::Metrics;
use crate::payload::{Payload, Waiter};
use crate::rdma::{CardId, Cards, Known, Named, RdmaPlace, Route};
use crate::shared::Shared;
use crate::shm::directory::Directory;
use crate::tcp::tls::Tls;
use crate::topology::{Location, Nearness};

use super::link::{Lane, LinkEnd};

#[derive(Debug)]
pub(crate) struct Hub {
    pub(crate) shared: Arc<Shared>,
    pub(crate) sender: Sender<Payload, Waiter>,
    pub(crate) receiver: Receiver<Waiter>,
    /// Incoming paths that are to be ended, because their sender asks what has landed.
    pub(crate) draining: Vec<PathId>,
    /// Incoming paths of sessions that others have followed.
    pub(crate) superseded: Vec<PathId>,
    /// How many more connections may be admitted in this turn.
    pub(crate) places: usize,
    /// What is to be told to the senders of these paths, about paths that were drained. As many as those
    /// have askers: a few each.
    pub(crate) answers: Vec<(PathId, Vec<u8>)>,
    pub(crate) metrics: Metrics,
    /// Present when the shm domain is.
    pub(crate) directory: Option<Directory>,
    /// Network cards, of whatever domain.
    pub(crate) cards: Cards,
    /// Which memory here each card is near.
    pub(crate) nearness: Nearness,
    /// Pairs of cards, by session. Of none that the sender does not have.
    routes: BTreeMap<SessionId, Arc<Route>>,
    /// Sessions with a region that a card of theirs does not carry: they need a path without cards, too.
    pub(crate) beside_cards: Vec<SessionId>,
    /// Regions that their peers have refused in this turn, by incarnation and key.
    pub(crate) refused_regions: Vec<(u64, u64)>,
    /// Of the current turn.
    pub(crate) now_us: u64,
    regions: RegionTable<Arc<SharedMemory>>,
    pub(crate) messages: Messages,
    /// Where tcp connections are under TLS.
    pub(crate) tls: Option<Tls>,
    pub(crate) calls: Calls,
}

impl Hub {
    pub(crate) fn new(
        shared: Arc<Shared>,
        sender: Sender<Payload, Waiter>,
        metrics: Metrics,
        directory: Option<Directory>,
        (cards, nearness): (Cards, Nearness),
    ) -> Self {
        Hub {
            sender,
            receiver: Receiver::new(shared.config.early_imms_max),
            draining: Vec::new(),
            superseded: Vec::new(),
            places: 0,
            answers: Vec::new(),
            metrics,
            directory,
            cards,
            nearness,
            routes: BTreeMap::new(),
            beside_cards: Vec::new(),
            refused_regions: Vec::new(),
            now_us: shared.now_us(),
            regions: RegionTable::new(shared.endpoint.incarnation),
            messages: Messages::new(shared.config.message_buffers),
            tls: None,
            calls: Calls::default(),
            shared,
        }
    }

    // ---- regions ----

    /// Takes on the regions that were registered since the last call. A region is known to callers
    /// before the worker hears of it, so this is also done before a key is called unknown.
    pub(crate) fn absorb_regions(&mut self) {
        for (key, memory) in self.shared.take_fresh_regions() {
            let length_bytes = memory.len() as u64;
            if let Some(directory) = &mut self.directory {
                directory.publish(key, length_bytes);
            }
            self.cards.adopt(key);
            self.regions.insert(key, memory, length_bytes);
        }
    }

    pub(crate) fn region(&mut self, key: u64) -> Option<Arc<SharedMemory>> {
        if self.regions.get(key).is_none() {
            self.absorb_regions();
        }
        self.regions.get(key).cloned()
    }

    /// A region, and which slot of the directory is its own.
    pub(crate) fn shm_region(&mut self, key: u64) -> Option<(Arc<SharedMemory>, usize)> {
        // In this order: one that the worker had not heard of gets its slot by being found.
        let memory = self.region(key)?;
        let slot = self.directory.as_ref()?.slot(key)?;
        Some((memory, slot))
    }

    /// The memory to write to; a refusal is counted.
    pub(crate) fn check(
        &mut self,
        domain: Domain,
        target: Target,
        offset: u64,
        bytes: u64,
    ) -> Result<Arc<SharedMemory>, Refusal> {
        let mut checked = self.regions.check(target, offset, bytes);
        if matches!(checked, Err(Refusal::UnknownRegion)) {
            self.absorb_regions();
            checked = self.regions.check(target, offset, bytes);
        }
        let checked = checked.cloned();
        if let Err(refusal) = checked {
            self.metrics.of(domain).refused(refusal).inc();
        }
        checked
    }

    /// What a peer that would write by this card must know of a region. `Ok(None)`: the card does not
    /// have it.
    pub(crate) fn find_region(&mut self, card: CardId, key: u64) -> Result<Option<Known>, Refusal> {
        let memory = self.region(key).ok_or_else(|| self.why_unknown(key))?;
        let place = self.cards.get(card).and_then(|card| card.place(key));
        Ok(place.map(|place| Known { place, length_bytes: memory.len() as u64 }))
    }

    /// Learns from the descriptor that a caller writes to.
    pub(crate) fn describe(&mut self, peer: PeerId, named: Named, place: &RdmaPlace) {
        let is_known = || self.cards.knows(named.incarnation, named.key);
        if self.cards.is_empty() || named.incarnation != peer.incarnation || is_known() {
            return;
        }
        let cookie = self.shared.peers().cookie(peer);
        if let Some(cookie) = cookie {
            self.cards.describe(named, place, &cookie);
        }
    }

    // ---- pairs of cards ----

    /// The pairs of a session; none where either side has no cards. They are fixed while it lasts, and not
    /// kept for one that does not come to be, because what was to use it has ended at once.
    pub(crate) fn route(&mut self, peer: PeerId) -> Arc<Route> {
        let session = peer.session_id();
        if let Some(route) = self.routes.get(&session) {
            return Arc::clone(route);
        }
        let rdma = self.shared.peers().rdma(peer);
        let route = rdma.map_or_else(Route::default, |there| Route::new(&self.cards, &there));
        let route = Arc::new(route);
        if self.sender.has_session(session) || mutated(Mutation::RoutesKeptWithoutSession) {
            self.routes.insert(session, Arc::clone(&route));
        }
        route
    }

    /// The peer's card does not have the region. What is named was not sent, and goes by other paths.
    pub(crate) fn unsuited(&mut self, lane: Lane, (target, sequences): (Target, &[u64])) {
        let Lane { session, path } = lane;
        self.sender.unsuited(session, path, (target, sequences), self.now_us);
        self.beside_cards.push(session);
    }

    /// Everything on the session ends.
    pub(crate) fn end_session(&mut self, session: SessionId) {
        self.routes.remove(&session);
        self.sender.session_lost(session);
    }

    /// The rails for a write of a current session.
    pub(crate) fn rails(
        &mut self,
        peer: PeerId,
        source: Option<Location>,
        target: Option<Location>,
    ) -> Rails {
        if self.cards.is_empty() {
            return Rails::ANY;
        }
        let route = self.route(peer);
        route.rails(&self.nearness, source, target)
    }

    /// Why there is no such region.
    pub(crate) fn why_unknown(&self, key: u64) -> Refusal {
        let target = Target { incarnation: self.shared.endpoint.incarnation, key };
        self.regions.check(target, 0, 0).err().unwrap_or(Refusal::UnknownRegion)
    }

    /// No new write is let in from now on. `false` when there is no such region.
    pub(crate) fn revoke(&mut self, key: u64) -> bool {
        self.absorb_regions();
        if let Some(directory) = &mut self.directory
            && !mutated(Mutation::DirectoryKeepsRevoked)
        {
            directory.withdraw(key);
        }
        let known = match mutated(Mutation::RevokedRegionStillFound) {
            true => self.regions.get(key).is_some(),
            false => self.regions.revoke(key).is_some(),
        };
        if known {
            self.shared.region_gone();
        }
        known
    }

    // ---- arrivals ----

    pub(crate) fn landed(&mut self, domain: Domain, path: PathId, imm: u32) {
        self.metrics.of(domain).received_writes.inc();
        if let Some(waiter) = self.receiver.arrived(path, imm) {
            self.calls.done(waiter, Ok(()));
        }
    }

    /// Takes a message, or says why not. What is taken leaves an empty buffer in its place.
    pub(crate) fn message(
        &mut self,
        domain: Domain,
        (from, path): (&Endpoint, PathId),
        id: u64,
        message: &mut Vec<u8>,
    ) -> Settled {
        if self.receiver.has_message(path, id) {
            self.metrics.of(domain).repeated_messages.inc();
            return Settled::Landed;
        }
        let session = self.shared.peers().session(from);
        // Whoever cannot be answered is not heard either.
        let Ok(peer) = session else { return self.refuse_message(domain, Refusal::NoRoom) };
        let Some(message) = self.messages.lend(message) else {
            return self.refuse_message(domain, Refusal::NoRoom);
        };
        if self.receiver.message(path, id) {
            self.metrics.of(domain).received_messages.inc();
            self.calls.message(peer, message);
        }
        Settled::Landed
    }

    pub(crate) fn refuse_message(&self, domain: Domain, refusal: Refusal) -> Settled {
        self.metrics.of(domain).refused(refusal).inc();
        Settled::Refused(refusal)
    }

    /// Whether links must not go on before callers have been told: messages that wait to be told have
    /// the last buffers, and may give them back at once.
    pub(crate) fn must_tell(&self) -> bool {
        self.calls.has_messages() && self.messages.is_exhausted()
    }

    // ---- paths of peers ----

    /// Whoever has said who it is needs a place among those who have.
    ///
    /// # Errors
    /// There is none, and nobody idle who could make room: the connection is closed.
    pub(crate) fn take_place(&mut self) -> Result<(), LinkEnd> {
        self.places = self.places.checked_sub(1).ok_or(LinkEnd::Rejected)?;
        Ok(())
    }

    /// A connection is admitted as a path of its session, or may not be.
    pub(crate) fn open_path(&mut self, newcomer: &Newcomer) -> Result<PathId, HelloReply> {
        let Newcomer { peer, session, path, card: _ } = newcomer;
        match self.receiver.open_path(peer.incarnation, *session, *path) {
            Ok(opened) => {
                self.superseded.extend(opened.superseded);
                Ok(opened.path)
            }
            Err(refusal) => {
                let incarnation = peer.incarnation;
                tracing::warn!(
                    engine = %self.shared.config.name,
                    peer = format_args!("{incarnation:016x}"),
                    %refusal,
                    "the transfer engine refused a connection of a peer"
                );
                Err(HelloReply::declining(Admission::NoSuchPath, 0))
            }
        }
    }

    /// Nothing comes through the path any more, nor is anything of it under way.
    pub(crate) fn path_ended(&mut self, path: PathId) {
        let Some(closed) = self.receiver.path_ended(path) else { return };
        let answer = closing::answer(closed.index, closed.verdict);
        self.answers.extend(closed.askers.into_iter().map(|asker| (asker, answer.clone())));
    }

    /// A sender asks, through the path `asker`, what has landed through another one. An answer that there is
    /// already goes back the same way, before more is read: it is longer than the question, so what waits
    /// for one connection is bounded where it waits.
    pub(crate) fn asked(
        &mut self,
        asker: PathId,
        question: &[u8],
    ) -> Result<Option<Vec<u8>>, LinkEnd> {
        let request = closing::read_question(question).ok_or(LinkEnd::Malformed)?;
        let index = request.path;
        match self.receiver.ask(asker, request) {
            Asked::Answer(verdict) if mutated(Mutation::AnswerQueueUnbounded) => {
                self.answers.push((asker, closing::answer(index, verdict)));
            }
            Asked::Answer(verdict) => return Ok(Some(closing::answer(index, verdict))),
            Asked::Drain(path) => self.draining.push(path),
            Asked::Waiting => {}
            Asked::Malformed => return Err(LinkEnd::Malformed),
        }
        Ok(None)
    }

    // ---- immediates ----

    pub(crate) fn expect(&mut self, imm: u32, count: u64, deadline_us: u64, waiter: Waiter) {
        match self.receiver.imms_mut().expect(imm, count, deadline_us, waiter) {
            Expectation::Waiting => {}
            Expectation::Reached(waiter) => self.calls.done(waiter, Ok(())),
            Expectation::Taken(waiter) => {
                let refused = WriteError::Refused(Refusal::AlreadyExpected);
                self.calls.done(waiter, Err(refused));
            }
        }
    }

    pub(crate) fn cancel_imm(&mut self, imm: u32, done: Waiter) {
        if let Some(waiter) = self.receiver.imms_mut().cancel(imm) {
            self.calls.done(waiter, Err(WriteError::Cancelled));
        }
        self.calls.done(done, Ok(()));
    }

    pub(crate) fn expire_imms(&mut self) {
        while let Some(waiter) = self.receiver.imms_mut().poll_expired(self.now_us) {
            self.calls.done(waiter, Err(WriteError::DeadlineExceeded));
        }
    }
}

/// The receiver answers, through the path `lane`, what has landed through another one.
pub(crate) fn take_answer(lane: Lane, answer: &[u8], hub: &mut Hub) -> Result<(), LinkEnd> {
    let (index, verdict) = closing::read_answer(answer).ok_or(LinkEnd::Malformed)?;
    // Who was asked through two paths may answer through both.
    hub.sender.path_closed(lane.session, (lane.path, index), &verdict, hub.now_us);
    Ok(())
}

#[cfg(test)]
pub(crate) mod tests {
    use kvasir_transfer_core::{Body, Heartbeats, Limits, Operation};

    use super::*;
    use crate::completion::Completion;
    use crate::config::TransferConfig;
    use crate::memory::Prefault;
    use crate::rdma::Memories;
    use crate::shared::Bells;

    pub(crate) fn hub(directory: Option<Directory>) -> (Hub, Bells) {
        let endpoint =
            Endpoint { incarnation: 9, cookie: [0; 16], shm: None, tcp: None, rdma: None };
        let (shared, bells) = Shared::new(
            TransferConfig::default(),
            (endpoint, crate::identity::Identity::from_seed(&[9; 32])),
            Memories::default(),
        )
        .expect("descriptors");
        let (send_bytes_per_s_max, peer_timeout_us, grace_us, path_imms_max) = (0, 1, 1, 1);
        let heartbeats = Heartbeats { interval_us: 1, timeout_us: 1, always: false };
        let limits =
            Limits { send_bytes_per_s_max, peer_timeout_us, grace_us, path_imms_max, heartbeats };
        let metrics =
            Metrics::register(&prometheus::Registry::new(), "test").expect("a fresh registry");
        let sender = Sender::new(limits);
        let cards = Default::default();
        (Hub::new(Arc::new(shared), sender, metrics, directory, cards), bells)
    }

    #[test]
    fn a_region_is_found_though_the_worker_has_not_heard_of_it() {
        let (mut hub, _bells) = hub(Some(Directory::create().expect("memory")));
        let shared = Arc::clone(&hub.shared);
        let add = || {
            let memory = SharedMemory::create("test", 4096, Prefault::No).expect("memory");
            shared.add_region(Arc::new(memory), None).expect("room").0
        };
        let target = |key| Target { incarnation: 9, key };
        assert!(hub.check(Domain::Tcp, target(add()), 0, 4096).is_ok());
        assert!(hub.region(add()).is_some());
        assert!(hub.shm_region(add()).is_some());
        let unheard_of = add();
        assert!(hub.revoke(unheard_of));
        let refused = hub.check(Domain::Tcp, target(unheard_of), 0, 1);
        assert!(matches!(refused, Err(Refusal::Revoked)));
    }
    #[test]
    fn routes_are_kept_of_sessions_that_there_are() {
        let (mut hub, _bells) = hub(None);
        let there = Endpoint { incarnation: 7, ..hub.shared.endpoint.clone() };
        for round in 0..3 {
            let peer = hub.shared.peers().session(&there).expect("room");
            let session = peer.session_id();
            let operation = |deadline_us| Operation {
                session,
                deadline_us,
                payload: Payload::Bytes(Arc::default()),
                body: Body::Message { bytes: 0 },
                rails: Rails::ANY,
                done: Waiter::new(Completion::Ignore),
            };
            // It has run out of time, so no session is made for it.
            hub.route(peer);
            hub.sender.begin(operation(0), 1);
            assert_eq!((round, hub.routes.len()), (round, 0));
            hub.sender.begin(operation(2), 1);
            let route = hub.route(peer);
            assert!(Arc::ptr_eq(&route, &hub.route(peer)), "kept while it lasts");
            assert_eq!(hub.routes.len(), 1);
            hub.end_session(session);
            hub.shared.peers().end_session(peer);
            assert_eq!(hub.routes.len(), 0);
        }
    }
}
