//! Ways to a peer: a domain, and with network cards which pair of them. In what order they are tried, and
//! which of them belong together.

use kvasir_transfer_core::{Rail, SessionId};

use super::hub::Hub;
use crate::config::Domain;
use crate::engine::PeerId;

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Way {
    pub(super) domain: Domain,
    /// Of the session's pairs of cards; that of `shm` and `tcp` is no pair.
    pub(super) rail: Rail,
}

/// What a session lacks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Lack {
    /// Any connection at all, while there is no other.
    Any,
    /// This one beside others.
    This(Way),
    /// One that needs no card, beside those that do.
    WithoutCards,
}

impl Lack {
    /// What is lacking still when this way has not mended it: other ways may, where none is meant in particular.
    pub(super) fn after(self, way: Option<Way>) -> Lack {
        match (self, way) {
            (Lack::WithoutCards, _) => Lack::WithoutCards,
            (_, Some(way)) => Lack::This(way),
            (_, None) => Lack::Any,
        }
    }
}

impl Way {
    pub(super) fn by(domain: Domain) -> Self {
        Way { domain, rail: Rail::default() }
    }

    pub(super) fn is_of_cards(self) -> bool {
        Domain::OF_CARDS.contains(&self.domain)
    }
}

/// In the order in which they are taken from the end: the preferred domain last, and of a domain of cards
/// the first pair last. Without those that lead through a card that has failed.
pub(super) fn all_ways(session: SessionId, hub: &mut Hub) -> Vec<Way> {
    let peer = hub.shared.peers().of_session(session);
    let preferred = hub.shared.config.preferred;
    let others = [Domain::Tcp, Domain::Efa, Domain::Verbs, Domain::Shm];
    let others = others.into_iter().filter(|domain| *domain != preferred);
    let mut ways = Vec::new();
    for domain in others.chain([preferred]) {
        match (domain, peer) {
            (Domain::Shm | Domain::Tcp, _) => ways.push(Way::by(domain)),
            (Domain::Verbs | Domain::Efa, Some(peer)) => {
                ways.extend(pairs(domain, peer, hub).into_iter().rev());
            }
            (Domain::Verbs | Domain::Efa, None) => {}
        }
    }
    ways
}

/// Those that carry every region, in the same order.
pub(super) fn ways_without_cards() -> Vec<Way> {
    vec![Way::by(Domain::Tcp), Way::by(Domain::Shm)]
}

/// One for each pair of cards, as long as ours works.
pub(super) fn pairs(domain: Domain, peer: PeerId, hub: &mut Hub) -> Vec<Way> {
    let route = hub.route(peer);
    let works = |card| hub.cards.get(card).is_some_and(|card| !card.is_dead());
    let working = route.of(domain).filter(|(_, pair)| works(pair.here));
    working.map(|(rail, _)| Way { domain, rail }).collect()
}
