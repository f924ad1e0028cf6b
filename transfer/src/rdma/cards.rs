//! All cards of an engine, its domain group: each by its index, which is the same in the endpoint, in
//! descriptors and in hellos. What is known of the peers' regions is shared by them, and so is the thread
//! that ends registrations.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use super::janitor::Janitor;
use super::known::Described;
use super::nic::CardMemory;
use super::place::{Named, Places, RdmaPlace};
use super::seek::{Seekers, Sought};
use super::{CardError, Known, Rdma};
use crate::memory::SharedMemory;
use crate::topology::CARDS_MAX;

/// One card of an engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct CardId(pub(crate) u8);

impl CardId {
    pub(crate) fn index(self) -> usize {
        self.0.into()
    }

    /// Of the engine at the other end; `None` beyond what an engine may have.
    pub(crate) fn from_wire(index: u32) -> Option<Self> {
        let index = u8::try_from(index).ok().filter(|index| usize::from(*index) < CARDS_MAX)?;
        Some(CardId(index))
    }
}

#[derive(Debug, Default)]
pub(crate) struct Cards {
    cards: Vec<Rdma>,
    described: Described,
    /// Present when there is a card.
    janitor: Option<Janitor>,
    /// As that.
    seekers: Option<Seekers>,
}

impl Cards {
    /// # Errors
    /// When the thread cannot be started, or there are more than an engine has.
    pub(crate) fn new(cards: Vec<Rdma>, name: &str) -> Result<Self, CardError> {
        if cards.len() > CARDS_MAX {
            let sentence = format!("{} NICs exceed the maximum of {CARDS_MAX}", cards.len());
            return Err(CardError::new(sentence));
        }
        if cards.is_empty() {
            return Ok(Cards::default());
        }
        let janitor = Janitor::start(name)
            .map_err(|error| CardError::because("cannot start a thread", error))?;
        let (janitor, seekers) = (Some(janitor), Some(Seekers::new(name)));
        Ok(Cards { cards, described: Described::default(), janitor, seekers })
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.cards.is_empty()
    }

    pub(crate) fn get(&self, card: CardId) -> Option<&Rdma> {
        self.cards.get(card.index())
    }

    pub(crate) fn get_mut(&mut self, card: CardId) -> Option<&mut Rdma> {
        self.cards.get_mut(card.index())
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (CardId, &Rdma)> {
        (0u8..).map(CardId).zip(&self.cards)
    }

    /// Before a pipe is connected with what the peer has told of its end. `None` where there is nothing to
    /// wait for.
    pub(crate) fn seek(&self, card: CardId, peer: &[u8]) -> Result<Option<Sought>, CardError> {
        let seek = self.get(card).and_then(|rdma| rdma.card.seek(peer));
        let (Some(seek), Some(seekers)) = (seek, &self.seekers) else { return Ok(None) };
        seekers.begin(seek).map(Some)
    }

    // ---- memory ----

    pub(crate) fn adopt(&mut self, key: u64) {
        self.cards.iter_mut().for_each(|card| card.adopt(key));
    }

    /// The flags are set when nothing lands in the region any more, each for one card.
    pub(crate) fn forget(&mut self, key: u64) -> Vec<Arc<AtomicBool>> {
        let registrations = self.cards.iter_mut().filter_map(|card| card.forget(key));
        let Some(janitor) = &mut self.janitor else { return Vec::new() };
        registrations.map(|registration| janitor.end(registration)).collect()
    }

    /// Learns from the descriptor that a caller writes to where its region lies.
    pub(crate) fn describe(&mut self, named: Named, place: &RdmaPlace, cookie: &[u8; 16]) {
        if let Some(places) = place.opened(named, cookie) {
            self.described.learn((named.incarnation, named.key), (places, named.length_bytes));
        }
    }

    pub(crate) fn knows(&self, incarnation: u64, key: u64) -> bool {
        self.described.has((incarnation, key))
    }

    /// What a descriptor has said of a region to this card of its engine.
    pub(crate) fn described(&self, named: (u64, u64), there: CardId) -> Option<Known> {
        let (places, length_bytes) = self.described.get(named)?;
        Some(Known { place: places.get(there.index())?, length_bytes })
    }

    /// From now on its owner is asked.
    pub(crate) fn doubt(&mut self, named: (u64, u64)) {
        self.described.doubt(named);
    }

    // ---- what happens ----

    /// Gathers what has happened. Whether there was anything.
    pub(crate) fn poll(&mut self) -> bool {
        self.janitor.iter_mut().for_each(Janitor::pass_on);
        self.cards.iter_mut().fold(false, |any, card| card.poll() | any)
    }

    /// Gathers all that had happened when it was called.
    pub(crate) fn catch_up(&mut self) {
        self.cards.iter_mut().for_each(Rdma::catch_up);
    }

    /// Before the worker sleeps. Whether something has happened meanwhile, so that it must not.
    pub(crate) fn arm(&mut self) -> bool {
        self.cards.iter_mut().fold(false, |any, card| card.arm() | any)
    }
}

/// Registers memory with every card that takes it.
#[derive(Debug, Default)]
pub(crate) struct Memories(Vec<(String, Arc<dyn CardMemory>)>);

impl Memories {
    /// In the order of the cards, with their names.
    pub(crate) fn new(memories: Vec<(String, Arc<dyn CardMemory>)>) -> Self {
        Memories(memories)
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Memory that a card does not take is reached by the others, or by the other domains.
    pub(crate) fn register(&self, engine: &str, key: u64, memory: &Arc<SharedMemory>) -> Places {
        let mut places = Places::default();
        for (at, (card, of_card)) in self.0.iter().enumerate() {
            match of_card.register(key, memory) {
                Ok(place) => places.set(at, place),
                Err(error) => {
                    let (bytes, error) = (memory.len(), error.sentence());
                    tracing::warn!(
                        %engine, nic = %card, bytes, error,
                        "the transfer engine cannot register a region with a NIC"
                    );
                }
            }
        }
        places
    }
}
