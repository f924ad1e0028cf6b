//! The part of a region's descriptor that lets cards write to it: where it lies for each card that it is
//! registered with, and which memory it is.
//!
//! It is sealed: a hash over all that the descriptor says and the cookie of the engine that made it. A
//! descriptor that was put together from parts of others does not fit its seal; then the engine is asked
//! what the region is, as it is when there is no such part. A seal is no signature: whoever has the
//! endpoint can make one, and whoever has the endpoint may write. What a writer claims of memory is checked
//! by the card that is written to.

use prost::Message;

use super::nic::Place;
use crate::endpoint::WireError;
use crate::topology::{CARDS_MAX, Location};

/// Where a region lies, by the index of the card. Not every card takes every region.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub(crate) struct Places([Option<Place>; CARDS_MAX]);

impl Places {
    pub(crate) fn get(&self, card: usize) -> Option<Place> {
        self.0.get(card).copied().flatten()
    }

    /// # Panics
    /// For an index that no engine has.
    pub(crate) fn set(&mut self, card: usize, place: Place) {
        self.0[card] = Some(place);
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.iter().all(Option::is_none)
    }

    fn iter(&self) -> impl Iterator<Item = (usize, Place)> {
        self.0.iter().enumerate().filter_map(|(card, place)| Some((card, (*place)?)))
    }
}

/// Where a region lies for RDMA; see the head of this file. Opaque to callers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct RdmaPlace {
    pub(crate) places: Places,
    /// `None` when it is not known.
    pub(crate) location: Option<Location>,
    pub(crate) seal: u64,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct RdmaPlaceWire {
    /// One bit for each card; addresses and keys follow in their order.
    #[prost(uint32, tag = "1")]
    cards: u32,
    #[prost(fixed64, repeated, tag = "2")]
    addresses: Vec<u64>,
    #[prost(fixed64, repeated, tag = "3")]
    keys: Vec<u64>,
    /// 0: not known.
    #[prost(uint64, tag = "4")]
    location: u64,
    #[prost(fixed64, tag = "5")]
    seal: u64,
}

/// What else a descriptor says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Named {
    pub(crate) incarnation: u64,
    pub(crate) key: u64,
    pub(crate) length_bytes: u64,
}

impl RdmaPlace {
    pub(crate) fn sealed(
        places: Places,
        location: Option<Location>,
        named: Named,
        cookie: &[u8; 16],
    ) -> Self {
        RdmaPlace { places, location, seal: seal(&places, location, named, cookie) }
    }

    /// Where the region lies, when all this was said together by who has the cookie.
    pub(crate) fn opened(&self, named: Named, cookie: &[u8; 16]) -> Option<Places> {
        let fits = self.seal == seal(&self.places, self.location, named, cookie);
        fits.then_some(self.places)
    }

    pub(crate) fn to_wire(self) -> RdmaPlaceWire {
        let RdmaPlace { places, location, seal } = self;
        RdmaPlaceWire {
            cards: places.iter().fold(0, |cards, (card, _)| cards | 1 << card),
            addresses: places.iter().map(|(_, place)| place.address).collect(),
            keys: places.iter().map(|(_, place)| place.key).collect(),
            location: location.map_or(0, Location::code),
            seal,
        }
    }

    /// # Errors
    /// When there are not as many addresses and keys as cards, or more cards than an engine has.
    pub(crate) fn from_wire(wire: &RdmaPlaceWire) -> Result<Self, WireError> {
        let RdmaPlaceWire { cards, addresses, keys, location, seal } = wire;
        let count = cards.count_ones() as usize;
        if cards >> CARDS_MAX != 0 || addresses.len() != count || keys.len() != count {
            return Err(WireError::Field("rdma"));
        }
        let mut places = Places::default();
        let present = (0..CARDS_MAX).filter(|card| cards & (1 << card) != 0);
        for (card, (address, key)) in present.zip(addresses.iter().zip(keys)) {
            places.set(card, Place { address: *address, key: *key });
        }
        // A kind of memory that is not known here is any.
        let location = Location::from_code(*location);
        Ok(RdmaPlace { places, location, seal: *seal })
    }
}

fn seal(places: &Places, location: Option<Location>, named: Named, cookie: &[u8; 16]) -> u64 {
    let location = location.map_or(0, Location::code);
    let mut words = vec![named.incarnation, named.key, named.length_bytes, location];
    words.extend(places.iter().flat_map(|(card, of)| [card as u64, of.address, of.key]));
    let words = words.iter().flat_map(|word| word.to_le_bytes());
    let bytes: Vec<u8> = cookie.iter().copied().chain(words).collect();
    crate::checksum(&bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn two() -> Places {
        let mut places = Places::default();
        places.set(0, Place { address: 4096, key: 9 });
        places.set(3, Place { address: 8192, key: 10 });
        places
    }

    #[test]
    fn only_what_was_said_together_fits_its_seal() {
        let named = Named { incarnation: 1, key: 2, length_bytes: 3 };
        let location = Some(Location::Cpu { node: 1 });
        let sealed = RdmaPlace::sealed(two(), location, named, &[7; 16]);
        assert_eq!(sealed.opened(named, &[7; 16]), Some(two()));
        assert_eq!(sealed.opened(named, &[8; 16]), None);
        for other in [
            Named { incarnation: 2, ..named },
            Named { key: 3, ..named },
            Named { length_bytes: 4, ..named },
        ] {
            assert_eq!(sealed.opened(other, &[7; 16]), None, "{other:?}");
        }
        let mut places = two();
        places.set(3, Place { address: 4096, key: 10 });
        assert_eq!(RdmaPlace { places, ..sealed }.opened(named, &[7; 16]), None);
        assert_eq!(RdmaPlace { location: None, ..sealed }.opened(named, &[7; 16]), None);
        assert_eq!(RdmaPlace::from_wire(&sealed.to_wire()).ok(), Some(sealed));
    }

    #[test]
    fn lists_that_do_not_agree_are_refused() {
        let named = Named { incarnation: 1, key: 2, length_bytes: 3 };
        let check = |change: fn(&mut RdmaPlaceWire)| {
            let mut wire = RdmaPlace::sealed(two(), None, named, &[7; 16]).to_wire();
            change(&mut wire);
            assert!(RdmaPlace::from_wire(&wire).is_err(), "{wire:?}");
        };
        check(|wire| wire.addresses.push(1));
        check(|wire| wire.keys.clear());
        check(|wire| wire.cards |= 1 << CARDS_MAX);
        check(|wire| wire.cards = 1);
    }
}
