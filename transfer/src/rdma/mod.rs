//! The domains whose bytes are placed by a network card: `verbs`, and `efa`, which stands behind the same
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
//! - Where a card keeps no order (`efa`) every post is told by itself: what is counted is one post, or is
//!   counted by a post of its own when all the others have landed.
//!
//! Reading path: [`nic`] (the seam), [`outgoing`], [`incoming`], then [`verbs`] and [`efa`]. `wire` and
//! `control` are the conversation beside the pipe.

mod address;
mod assembly;
mod bounce;
mod cards;
mod config;
mod control;
mod datagrams;
mod efa;
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) mod fuzzing;
mod handshake;
pub(crate) mod incoming;
mod janitor;
mod known;
mod nic;
pub(crate) mod outgoing;
mod pairs;
mod place;
pub(crate) mod seek;
mod verbs;
mod wire;

use std::collections::{BTreeMap, VecDeque};
use std::os::fd::BorrowedFd;
use std::sync::Arc;

pub use self::address::{CardAddress, RdmaAddress};
pub(crate) use self::cards::{CardId, Cards, Memories};
pub use self::config::{DeviceSpec, DeviceSpecError, Handshake, VerbsConfig};
pub use self::efa::EfaConfig;
pub(crate) use self::nic::{CardError, CardMemory, PipeId};
pub(crate) use self::pairs::{CardPair, Route};
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) use self::place::Places;
pub use self::place::RdmaPlace;
pub(crate) use self::place::{Named, RdmaPlaceWire};

use prometheus::IntCounter;

use self::bounce::{BOUNCE_KEY, Bounce};
pub(crate) use self::known::Known;
pub(crate) use self::nic::Place;

use self::nic::{Bounds, Card, Event, Post};
use crate::config::Domain;
use crate::metrics::CardBytes;

/// More than anything is kept back for.
const CATCH_UP_POLLS: usize = 64;

/// One card with what the worker keeps for it.
/// The RDMA devices of this host, as the domain `verbs` sees them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RdmaDevices {
    /// By name, in the order in which they are taken: the first one where none is named, all of them for `all`.
    pub usable: Vec<String>,
    /// Why others are not, a sentence each.
    pub unusable: Vec<String>,
}

/// What `verbs` could use here.
///
/// # Errors
/// A sentence, where libibverbs is missing or cannot say.
pub fn rdma_devices() -> Result<RdmaDevices, String> {
    verbs::devices().map_err(|error| error.sentence())
}

#[derive(Debug)]
pub(crate) struct Rdma {
    domain: Domain,
    /// Of the device, for people.
    name: String,
    card: Box<dyn Card>,
    bounds: Bounds,
    /// What has happened on each pipe, until its link takes it.
    pipes: BTreeMap<PipeId, VecDeque<Event>>,
    next_pipe: u64,
    polled: Vec<(PipeId, Event)>,
    bounce: Bounce,
    /// Of writes, as far as the card tells: the bytes of counted ones are told to who receives them.
    sent_bytes: IntCounter,
    received_bytes: IntCounter,
    /// Datagrams of strangers, and what makes no sense.
    refused_datagrams: IntCounter,
    /// It takes no more pipes.
    is_dead: bool,
}

/// A card that is open, and what registers memory with it.
pub(crate) type Started = (Rdma, Arc<dyn CardMemory>);

/// Opens the devices of the `verbs` domain.
///
/// # Errors
/// A sentence for the person who runs the host.
pub(crate) fn start_verbs(
    config: &VerbsConfig,
    bytes: &CardBytes,
) -> Result<Vec<Started>, CardError> {
    let opened = verbs::open(config)?;
    let start = |(name, (card, memory)): (String, nic::Opened)| {
        let rdma = Rdma::new(Domain::Verbs, name, card, (&*memory, config.bounce_bytes), bytes)?;
        Ok((rdma, memory))
    };
    opened.into_iter().map(start).collect()
}

/// Opens the network of the `efa` domain.
///
/// # Errors
/// A sentence for the person who runs the host.
pub(crate) fn start_efa(config: &EfaConfig, bytes: &CardBytes) -> Result<Vec<Started>, CardError> {
    let (name, (card, memory)) = efa::open(config)?;
    let rdma = Rdma::new(Domain::Efa, name, card, (&*memory, config.bounce_bytes), bytes)?;
    Ok(vec![(rdma, memory)])
}

impl Rdma {
    fn new(
        domain: Domain,
        name: String,
        mut card: Box<dyn Card>,
        (memory, bounce_bytes): (&dyn CardMemory, usize),
        bytes: &CardBytes,
    ) -> Result<Self, CardError> {
        let bounce = Bounce::new(bounce_bytes).map_err(|error| {
            CardError::because("cannot allocate memory for bounce buffers", error)
        })?;
        memory.register(BOUNCE_KEY, bounce.memory())?;
        card.adopt(BOUNCE_KEY);
        let counter = |direction| bytes.0.with_label_values(&[domain.label(), &name, direction]);
        Ok(Rdma {
            domain,
            sent_bytes: counter("sent"),
            received_bytes: counter("received"),
            refused_datagrams: bytes.1.with_label_values(&[domain.label(), &name]),
            name,
            bounds: card.bounds(),
            card,
            pipes: BTreeMap::new(),
            next_pipe: 0,
            polled: Vec::new(),
            bounce,
            is_dead: false,
        })
    }

    pub(crate) fn domain(&self) -> Domain {
        self.domain
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    pub(crate) fn address(&self) -> CardAddress {
        CardAddress::new(self.domain, &self.name, self.card.address())
    }

    /// Whether a connection is worth a try.
    pub(crate) fn may_reach(&self, peer: &CardAddress) -> bool {
        peer.domain == Some(self.domain) && self.card.may_reach(&peer.address)
    }

    // ---- memory ----

    pub(crate) fn adopt(&mut self, key: u64) {
        self.card.adopt(key);
    }

    pub(crate) fn place(&self, key: u64) -> Option<Place> {
        self.card.place(key)
    }

    /// What ends its registration when it is dropped. `None`: it was not registered.
    fn forget(&mut self, key: u64) -> Option<Box<dyn Send>> {
        self.card.forget(key)
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
            return Err(CardError::new(
                "the device failed earlier and accepts no connections until the node restarts",
            ));
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
        self.refused_datagrams.inc_by(self.card.take_refused_datagrams());
        found.unwrap_or_else(|error| {
            self.fail(&error);
            true
        })
    }

    /// Gathers all that had happened when it was called. Bounded: whoever goes on meanwhile is not waited for.
    pub(crate) fn catch_up(&mut self) {
        for _ in 0..CATCH_UP_POLLS {
            if !self.poll() && !self.card.holds_back() {
                return;
            }
        }
    }

    /// Every pipe fails, and no other is made.
    fn fail(&mut self, error: &CardError) {
        let domain = self.domain.label();
        tracing::error!(transport = domain, nic = self.name, %error, "a NIC of the transfer engine failed; its connections end");
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
