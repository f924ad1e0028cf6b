//! Which of our cards talks to which of a peer's, and which of these pairs suit a write.
//!
//! The pairs of a session are fixed: within one domain the i-th card here with the i-th there, and where
//! one side has fewer, its cards serve several of the other's in turn ([`pair`]). Each pair is a path, and
//! a *rail* to the core. A write prefers the rails whose two cards are nearest to its source and to its
//! target, by both sides' matrices; the next nearest are used while none of those is up, and any other
//! while none of these is.

use kvasir_transfer_core::{Rail, Rails};

use super::address::RdmaAddress;
use super::cards::{CardId, Cards};
use crate::config::Domain;
use crate::topology::{Location, Nearness, pair};

/// A card of ours and the one of the peer that it talks to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct CardPair {
    pub(crate) here: CardId,
    pub(crate) there: CardId,
}

/// The pairs of one session, by rail.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Route {
    pairs: Vec<(Domain, CardPair)>,
    /// The peer's.
    nearness: Nearness,
}

impl Route {
    pub(crate) fn new(cards: &Cards, peer: &RdmaAddress) -> Self {
        let mut pairs = Vec::new();
        for domain in Domain::OF_CARDS {
            let here: Vec<CardId> = cards
                .iter()
                .filter(|(_, card)| card.domain() == *domain)
                .map(|(id, _)| id)
                .collect();
            let there = (0u8..).map(CardId).zip(&peer.cards);
            let there: Vec<CardId> =
                there.filter(|(_, card)| card.domain == Some(*domain)).map(|(id, _)| id).collect();
            let reached = pair(&here, &there).into_iter().filter(|(here, there)| {
                let card = cards.get(*here);
                card.is_some_and(|card| card.may_reach(&peer.cards[there.index()]))
            });
            pairs.extend(reached.map(|(here, there)| (*domain, CardPair { here, there })));
        }
        Route { pairs, nearness: peer.nearness.clone() }
    }

    /// Each with its rail.
    pub(crate) fn of(&self, domain: Domain) -> impl Iterator<Item = (Rail, CardPair)> {
        let pairs = (0u8..).map(Rail).zip(&self.pairs);
        pairs.filter(move |(_, of)| of.0 == domain).map(|(rail, of)| (rail, of.1))
    }

    pub(crate) fn pair(&self, rail: Rail) -> Option<CardPair> {
        self.pairs.get(usize::from(rail.0)).map(|(_, pair)| *pair)
    }

    /// The rails for a write from `source` to `target`.
    pub(crate) fn rails(
        &self,
        here: &Nearness,
        source: Option<Location>,
        target: Option<Location>,
    ) -> Rails {
        if self.pairs.len() <= 1 {
            return Rails::ANY;
        }
        let rank = |pair: &CardPair| {
            here.rank(source, pair.here.index()) + self.nearness.rank(target, pair.there.index())
        };
        let ranks: Vec<u32> = self.pairs.iter().map(|(_, pair)| rank(pair)).collect();
        let Some(best) = ranks.iter().copied().max() else { return Rails::ANY };
        let of_rank = |wanted: u32| {
            let rails = (0u8..).map(Rail).zip(&ranks);
            rails.filter(move |(_, rank)| **rank == wanted).map(|(rail, _)| rail)
        };
        match ranks.iter().copied().filter(|rank| *rank < best).max() {
            None => Rails::ANY,
            Some(second) => Rails::new(of_rank(best), of_rank(second)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::topology::Topology;

    const NEAR_0: &str = r#"{"cpu:0":{"preferred":["a"],"secondary":["b"]},"cpu:1":{"preferred":["b"],"secondary":["a"]}}"#;

    fn nearness() -> Nearness {
        let cards = ["a".to_owned(), "b".to_owned()];
        Nearness::of(&Topology::from_json(NEAR_0, &cards).expect("a matrix"), &cards)
    }

    fn route(pairs: &[(u8, u8)]) -> Route {
        let pair = |(here, there): &(u8, u8)| {
            (Domain::Verbs, CardPair { here: CardId(*here), there: CardId(*there) })
        };
        Route { pairs: pairs.iter().map(pair).collect(), nearness: nearness() }
    }

    fn cpu(node: u32) -> Option<Location> {
        Some(Location::Cpu { node })
    }

    fn rails(first: &[u8], second: &[u8]) -> Rails {
        let of = |rails: &[u8]| rails.iter().copied().map(Rail).collect::<Vec<_>>();
        Rails::new(of(first), of(second))
    }

    #[test]
    fn a_write_prefers_the_cards_that_are_near_to_its_source_and_its_target() {
        let route = route(&[(0, 0), (1, 1)]);
        let check = |source, target, expected: Rails| {
            assert_eq!(route.rails(&nearness(), source, target), expected, "{source:?} {target:?}");
        };
        check(cpu(0), cpu(0), rails(&[0], &[1]));
        check(cpu(1), cpu(1), rails(&[1], &[0]));
        check(cpu(1), None, rails(&[1], &[0]));
        check(None, cpu(0), rails(&[0], &[1]));
        // One of them is near on either rail.
        check(cpu(0), cpu(1), Rails::ANY);
        // Memory of which nobody knows where it lies, and nodes that no matrix names.
        check(None, None, Rails::ANY);
        check(cpu(5), cpu(6), Rails::ANY);
    }

    #[test]
    fn one_card_serves_several_of_the_peer_and_the_target_decides() {
        let route = route(&[(0, 0), (0, 1)]);
        assert_eq!(route.rails(&nearness(), cpu(1), cpu(1)), rails(&[1], &[0]));
        assert_eq!(route.rails(&nearness(), cpu(1), None), Rails::ANY);
    }

    #[test]
    fn a_single_pair_is_not_ranked() {
        assert_eq!(route(&[(0, 0)]).rails(&nearness(), cpu(0), cpu(1)), Rails::ANY);
        assert_eq!(Route::default().rails(&nearness(), cpu(0), cpu(1)), Rails::ANY);
    }
}
