//! The matrix as engines use and exchange it: by the index of a card in its engine's list, not by name.
//! It is advice: whatever it says, and whoever said it, every card reaches every region that is registered
//! with it, and a wrong matrix costs time only.

use std::collections::BTreeMap;

use prost::Message;

use super::{Location, Preference, Topology};

/// Cards of one engine. What one GPU or socket has of them is far below, and a set is one byte.
pub const CARDS_MAX: usize = 8;
/// Rows of a matrix: NUMA nodes and GPUs of one host.
pub const LOCATIONS_MAX: usize = 32;

/// Cards of one engine, by index.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CardSet(u8);

impl CardSet {
    pub fn contains(self, card: usize) -> bool {
        card < CARDS_MAX && self.0 & (1 << card) != 0
    }

    /// # Panics
    /// For an index that no engine has.
    pub fn insert(&mut self, card: usize) {
        assert!(card < CARDS_MAX, "an engine has {CARDS_MAX} cards at most");
        self.0 |= 1 << card;
    }

    pub fn is_empty(self) -> bool {
        self.0 == 0
    }

    fn is_within(self, cards: usize) -> bool {
        u32::from(self.0) >> cards == 0
    }
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Row {
    preferred: CardSet,
    secondary: CardSet,
}

/// For each memory location, which cards are near and which less so.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Nearness {
    rows: BTreeMap<Location, Row>,
}

/// One row, as it travels.
#[derive(Clone, PartialEq, Message)]
struct RowWire {
    #[prost(uint64, tag = "1")]
    location: u64,
    #[prost(uint32, tag = "2")]
    preferred: u32,
    #[prost(uint32, tag = "3")]
    secondary: u32,
}

impl Nearness {
    /// What a matrix says of these cards, by their names. Cards that it does not name come last.
    pub fn of(topology: &Topology, cards: &[String]) -> Self {
        let set = |names: &[String]| {
            let mut set = CardSet::default();
            let named = cards.iter().enumerate().filter(|(_, card)| names.contains(card));
            named.for_each(|(at, _)| set.insert(at));
            set
        };
        let row =
            |of: &Preference| Row { preferred: set(&of.preferred), secondary: set(&of.secondary) };
        let rows = topology.locations().take(LOCATIONS_MAX);
        Nearness { rows: rows.map(|(location, of)| (location, row(of))).collect() }
    }

    /// How near a card is to memory: the greater the nearer. Where it is not known where the memory
    /// lies, or the matrix has no row for that, all are alike.
    pub fn rank(&self, location: Option<Location>, card: usize) -> u32 {
        let row = location.and_then(|location| self.rows.get(&location));
        match row {
            Some(row) if row.preferred.contains(card) => 2,
            Some(row) if row.secondary.contains(card) => 1,
            Some(_) => 0,
            None => 2,
        }
    }

    pub(crate) fn to_wire(&self) -> Vec<Vec<u8>> {
        let row = |(location, row): (&Location, &Row)| {
            let (preferred, secondary) = (row.preferred.0.into(), row.secondary.0.into());
            RowWire { location: location.code(), preferred, secondary }.encode_to_vec()
        };
        self.rows.iter().map(row).collect()
    }

    /// `None` when there are too many rows, or one is malformed or names cards that there are not.
    pub(crate) fn from_wire(rows: &[Vec<u8>], cards: usize) -> Option<Self> {
        if rows.len() > LOCATIONS_MAX {
            return None;
        }
        let read = |row: &Vec<u8>| {
            let row = RowWire::decode(row.as_slice()).ok()?;
            let set = |bits: u32| {
                let set = CardSet(u8::try_from(bits).ok()?);
                set.is_within(cards).then_some(set)
            };
            let (preferred, secondary) = (set(row.preferred)?, set(row.secondary)?);
            Some((Location::from_code(row.location)?, Row { preferred, secondary }))
        };
        let rows: Option<BTreeMap<_, _>> = rows.iter().map(read).collect();
        Some(Nearness { rows: rows? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn two() -> Nearness {
        let cards = ["a".to_owned(), "b".to_owned()];
        let text =
            r#"{"cpu:0":{"preferred":["b"],"secondary":["a"]},"cuda:0":{"preferred":["a"]}}"#;
        let topology = Topology::from_json(text, &cards).expect("a matrix");
        Nearness::of(&topology, &cards)
    }

    #[test]
    fn near_cards_rank_before_far_ones_and_unknown_places_tell_nothing() {
        let near = two();
        let cpu = |node| Some(Location::Cpu { node });
        let gpu = Some(Location::Gpu { index: 0 });
        let ranks = |at| [near.rank(at, 0), near.rank(at, 1)];
        assert_eq!(ranks(cpu(0)), [1, 2]);
        assert_eq!(ranks(gpu), [2, 0]);
        assert_eq!((ranks(cpu(7)), ranks(None)), ([2, 2], [2, 2]));
    }

    #[test]
    fn it_survives_the_wire_and_what_it_cannot_say_is_refused() {
        let near = two();
        assert_eq!(Nearness::from_wire(&near.to_wire(), 2), Some(near.clone()));
        assert_eq!(Nearness::from_wire(&near.to_wire(), 1), None, "there is no second card");
        assert_eq!(Nearness::from_wire(&vec![Vec::new(); LOCATIONS_MAX + 1], 2), None);
        assert_eq!(Nearness::from_wire(&[vec![0xff; 9]], 2), None);
        assert_eq!(Nearness::from_wire(&[Vec::new()], 2), None, "no location");
    }
}
