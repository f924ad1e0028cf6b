//! The domains whose bytes are placed by a network card: `verbs`, and what else can stand behind the same
//! seam. A path is a *control connection* (TCP) and a *pipe* of the card.
//!
//! - The writer connects, says in its hello that it wants a pipe and how its own end is reached, and is
//!   told how the other one is. It tries the pipe before it says that the path is up, so that hosts whose
//!   cards do not reach each other use the next domain.
//! - Writes are posted to the card, which places them; the target learns of them by their immediates alone.
//!   What is done at the writer's card has landed. The writer checks a write against what it knows of the
//!   region before it posts it (`known`, `outgoing`); the card of the target is the last line, and costs
//!   the path.
//! - What a card refuses ends its path, as every failure does: the target cuts its end off, counts what had
//!   landed, and answers for it through another path (`failover` in the core). Only then is anything sent
//!   again.
//! - Revoking a region ends its registration, on a thread of its own (`janitor`). Cutting off a peer puts
//!   its pipes in error and waits until they are drained.
//! - Sources that are not registered go through registered memory of the engine's own (`bounce`).
//!
//! Reading path: [`nic`] (the seam), [`outgoing`], [`incoming`], then [`verbs`]. `wire` and `control` are
//! the conversation beside the pipe.

mod bounce;
mod config;
mod control;
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) mod fuzzing;
pub(crate) mod incoming;
mod janitor;
mod known;
mod nic;
pub(crate) mod outgoing;
mod place;
mod verbs;
mod wire;

use std::collections::{BTreeMap, VecDeque};
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

pub use self::config::VerbsConfig;
pub(crate) use self::nic::{CardError, CardMemory, PipeId};
pub use self::place::RdmaPlace;
pub(crate) use self::place::{Named, RdmaPlaceWire};

use self::bounce::{BOUNCE_KEY, Bounce};
use self::janitor::Janitor;
pub(crate) use self::known::Known;
pub(crate) use self::nic::Place;

use self::known::Described;
use self::nic::{Bounds, Card, Event, Post};
use crate::config::Domain;

/// How a peer's card is reached, as its endpoint says it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RdmaAddress {
    pub domain: Domain,
    /// What that domain makes of it; it decides whether a connection is tried.
    pub(crate) address: Vec<u8>,
}

/// Of `RdmaAddress::address`; the longest known has 17.
pub(crate) const ADDRESS_BYTES_MAX: usize = 256;

/// One card with what the worker keeps for it.
#[derive(Debug)]
pub(crate) struct Rdma {
    domain: Domain,
    card: Box<dyn Card>,
    bounds: Bounds,
    /// What has happened on each pipe, until its link takes it.
    pipes: BTreeMap<PipeId, VecDeque<Event>>,
    next_pipe: u64,
    polled: Vec<(PipeId, Event)>,
    bounce: Bounce,
    described: Described,
    janitor: Janitor,
    /// It takes no more pipes.
    is_dead: bool,
}

/// Opens the device of the `verbs` domain.
///
/// # Errors
/// A sentence for the person who runs the host.
pub(crate) fn start_verbs(
    config: &VerbsConfig,
    name: &str,
) -> Result<(Rdma, Arc<dyn CardMemory>), CardError> {
    let (card, memory) = verbs::open(config)?;
    let rdma = Rdma::new(Domain::Verbs, card, &*memory, (config.bounce_bytes, name))?;
    Ok((rdma, memory))
}

impl Rdma {
    fn new(
        domain: Domain,
        mut card: Box<dyn Card>,
        memory: &dyn CardMemory,
        (bounce_bytes, name): (usize, &str),
    ) -> Result<Self, CardError> {
        let bounce = Bounce::new(bounce_bytes)
            .map_err(|error| CardError::because("there is no memory to bounce sources", error))?;
        memory.register(BOUNCE_KEY, bounce.memory())?;
        card.adopt(BOUNCE_KEY);
        let janitor = Janitor::start(name)
            .map_err(|error| CardError::because("a thread cannot be started", error))?;
        Ok(Rdma {
            domain,
            bounds: card.bounds(),
            card,
            pipes: BTreeMap::new(),
            next_pipe: 0,
            polled: Vec::new(),
            bounce,
            described: Described::default(),
            janitor,
            is_dead: false,
        })
    }

    pub(crate) fn address(&self) -> RdmaAddress {
        RdmaAddress { domain: self.domain, address: self.card.address() }
    }

    /// Whether a connection is worth a try.
    pub(crate) fn may_reach(&self, peer: &RdmaAddress) -> bool {
        !self.is_dead && peer.domain == self.domain && self.card.may_reach(&peer.address)
    }

    // ---- memory ----

    pub(crate) fn adopt(&mut self, key: u64) {
        self.card.adopt(key);
    }

    pub(crate) fn place(&self, key: u64) -> Option<Place> {
        self.card.place(key)
    }

    /// The flag is set when nothing lands in the region any more. `None`: it was not registered.
    pub(crate) fn forget(&mut self, key: u64) -> Option<Arc<AtomicBool>> {
        self.card.forget(key).map(|registration| self.janitor.end(registration))
    }

    /// Learns from the descriptor that a caller writes to where its region lies.
    pub(crate) fn describe(&mut self, named: Named, place: &RdmaPlace, cookie: &[u8; 16]) {
        if let Some(place) = place.opened(named, cookie) {
            let known = Known { place, length_bytes: named.length_bytes };
            self.described.learn((named.incarnation, named.key), known);
        }
    }

    pub(crate) fn knows(&self, incarnation: u64, key: u64) -> bool {
        self.described.has((incarnation, key))
    }

    // ---- pipes ----

    /// A writer's end.
    fn open(&mut self) -> Result<(PipeId, Vec<u8>), CardError> {
        self.make(|card, pipe| card.open(pipe))
    }

    /// The end that a peer writes to.
    fn accept(&mut self, writer: &[u8]) -> Result<(PipeId, Vec<u8>), CardError> {
        self.make(|card, pipe| card.accept(pipe, writer))
    }

    fn make(
        &mut self,
        make: impl FnOnce(&mut dyn Card, PipeId) -> Result<Vec<u8>, CardError>,
    ) -> Result<(PipeId, Vec<u8>), CardError> {
        if self.is_dead {
            return Err(CardError::new("the device has failed"));
        }
        let pipe = PipeId(self.next_pipe);
        self.next_pipe += 1;
        let address = make(&mut *self.card, pipe)?;
        self.pipes.insert(pipe, VecDeque::new());
        Ok((pipe, address))
    }

    fn discard(&mut self, pipe: PipeId) {
        self.card.discard(pipe);
        self.pipes.remove(&pipe);
    }

    fn take_events(&mut self, pipe: PipeId) -> VecDeque<Event> {
        self.pipes.get_mut(&pipe).map(std::mem::take).unwrap_or_default()
    }

    /// They come first when they are taken again.
    fn return_events(&mut self, pipe: PipeId, mut events: VecDeque<Event>) {
        if let Some(queue) = self.pipes.get_mut(&pipe) {
            events.append(queue);
            *queue = events;
        }
    }

    fn post(&mut self, pipe: PipeId, lane: usize, posts: &[Post]) -> Result<(), CardError> {
        self.card.post(pipe, lane, posts)
    }

    /// Gathers what has happened. Whether there was anything.
    pub(crate) fn poll(&mut self) -> bool {
        if self.is_dead {
            return false;
        }
        let mut polled = std::mem::take(&mut self.polled);
        let found = self.card.poll(&mut polled);
        for (pipe, event) in polled.drain(..) {
            if let Some(events) = self.pipes.get_mut(&pipe) {
                events.push_back(event);
            }
        }
        self.polled = polled;
        found.unwrap_or_else(|error| {
            self.fail(&error);
            true
        })
    }

    /// Every pipe fails, and no other is made.
    fn fail(&mut self, error: &CardError) {
        let domain = self.domain.label();
        tracing::error!(domain, %error, "the device of a domain has failed");
        self.is_dead = true;
        for events in self.pipes.values_mut() {
            let failure = nic::Failure::Broken;
            events.push_back(Event::Failed { lane: nic::MESSAGES, tag: None, failure });
        }
    }

    // ---- sleeping ----

    /// Before the worker sleeps. Whether something has happened meanwhile, so that it must not.
    pub(crate) fn arm(&mut self) -> bool {
        if self.is_dead {
            return false;
        }
        if let Err(error) = self.card.arm() {
            self.fail(&error);
            return true;
        }
        self.poll()
    }

    pub(crate) fn wake_fd(&self) -> BorrowedFd<'_> {
        self.card.wake_fd()
    }

    pub(crate) fn clear_wake(&mut self) {
        self.card.clear_wake();
    }

    pub(crate) fn report_fd(&self) -> BorrowedFd<'_> {
        self.card.report_fd()
    }

    /// Its card has failed, and takes no more pipes.
    pub(crate) fn is_dead(&self) -> bool {
        self.is_dead
    }

    pub(crate) fn look_at_reports(&mut self) {
        if let Err(error) = self.card.look_at_reports() {
            self.fail(&error);
        }
    }
}
