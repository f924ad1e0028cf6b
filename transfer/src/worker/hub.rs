//! What all links of a worker share: the core's state machines, the regions, and what is to be told to
//! the callers. Links come and go around it.

use std::sync::Arc;

use kvasir_transfer_core::{
    Asked, Expectation, PathId, Receiver, Refusal, RegionTable, Sender, Settled, Target, WriteError,
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
use crate::rdma::{Known, Named, Rdma, RdmaPlace};
use crate::shared::Shared;
use crate::shm::directory::Directory;
use crate::tcp::tls::Tls;

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
    /// What is to be told to the senders of these paths.
    pub(crate) answers: Vec<(PathId, Vec<u8>)>,
    pub(crate) metrics: Metrics,
    /// Present when the shm domain is.
    pub(crate) directory: Option<Directory>,
    /// Present when a domain with a network card is.
    pub(crate) rdma: Option<Rdma>,
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
        rdma: Option<Rdma>,
    ) -> Self {
        Hub {
            sender,
            receiver: Receiver::new(shared.config.early_imms_max),
            draining: Vec::new(),
            superseded: Vec::new(),
            answers: Vec::new(),
            metrics,
            directory,
            rdma,
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
            if let Some(rdma) = &mut self.rdma {
                rdma.adopt(key);
            }
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

    /// What a peer that would write by card must know of a region. `Ok(None)`: the card does not have it.
    pub(crate) fn find_region(&mut self, key: u64) -> Result<Option<Known>, Refusal> {
        let memory = self.region(key).ok_or_else(|| self.why_unknown(key))?;
        let place = self.rdma.as_ref().and_then(|rdma| rdma.place(key));
        Ok(place.map(|place| Known { place, length_bytes: memory.len() as u64 }))
    }

    /// Learns from the descriptor that a caller writes to.
    pub(crate) fn describe(&mut self, peer: PeerId, named: Named, place: &RdmaPlace) {
        let Some(rdma) = &mut self.rdma else { return };
        if named.incarnation != peer.incarnation || rdma.knows(named.incarnation, named.key) {
            return;
        }
        let cookie = self.shared.peers().cookie(peer);
        if let Some(cookie) = cookie {
            rdma.describe(named, place, &cookie);
        }
    }

    /// Why there is no such region.
    pub(crate) fn why_unknown(&self, key: u64) -> Refusal {
        let target = Target { incarnation: self.shared.endpoint.incarnation, key };
        self.regions.check(target, 0, 0).err().unwrap_or(Refusal::UnknownRegion)
    }

    /// No new write is let in from now on. `false` when there is no such region.
    pub(crate) fn revoke(&mut self, key: u64) -> bool {
        self.absorb_regions();
        if let Some(directory) = &mut self.directory {
            directory.withdraw(key);
        }
        let known = self.regions.revoke(key).is_some();
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
                    "a connection was not taken"
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

    /// A sender asks, through the path `asker`, what has landed through another one.
    pub(crate) fn asked(&mut self, asker: PathId, question: &[u8]) -> Result<(), LinkEnd> {
        let request = closing::read_question(question).ok_or(LinkEnd::Malformed)?;
        let index = request.path;
        match self.receiver.ask(asker, request) {
            Asked::Answer(verdict) => self.answers.push((asker, closing::answer(index, verdict))),
            Asked::Drain(path) => self.draining.push(path),
            Asked::Waiting => {}
            Asked::Malformed => return Err(LinkEnd::Malformed),
        }
        Ok(())
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
mod tests {
    use kvasir_transfer_core::{Heartbeats, Limits};

    use super::*;
    use crate::config::TransferConfig;
    use crate::memory::Prefault;

    #[test]
    fn a_region_is_found_though_the_worker_has_not_heard_of_it() {
        let endpoint =
            Endpoint { incarnation: 9, cookie: [0; 16], shm: None, tcp: None, rdma: None };
        let (shared, _bells) =
            Shared::new(TransferConfig::default(), endpoint, 1, None).expect("descriptors");
        let shared = Arc::new(shared);
        let (throttle_bytes_per_s, peer_timeout_us, grace_us, path_imms_max) = (0, 1, 1, 1);
        let heartbeats = Heartbeats { interval_us: 1, timeout_us: 1, always: false };
        let limits =
            Limits { throttle_bytes_per_s, peer_timeout_us, grace_us, path_imms_max, heartbeats };
        let metrics = Metrics::register(&prometheus::Registry::new()).expect("a fresh registry");
        let directory = Some(Directory::create().expect("memory"));
        let sender = Sender::new(limits);
        let mut hub = Hub::new(Arc::clone(&shared), sender, metrics, directory, None);
        let add = || {
            let memory = SharedMemory::create("test", 4096, Prefault::No).expect("memory");
            shared.add_region(Arc::new(memory)).expect("room").0
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
}
