//! The part of a region's descriptor that lets a card write to it.
//!
//! It is sealed: a hash over all that the descriptor says and the cookie of the engine that made it. A
//! descriptor that was put together from parts of others does not fit its seal; then the engine is asked
//! what the region is, as it is when there is no such part. A seal is no signature: whoever has the
//! endpoint can make one, and whoever has the endpoint may write. What a writer claims of memory is checked
//! by the card that is written to.

use prost::Message;

use super::nic::Place;

/// Where a region lies for RDMA; see the head of this file. Opaque to callers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct RdmaPlace {
    pub(crate) place: Place,
    pub(crate) seal: u64,
}

#[derive(Clone, Copy, PartialEq, Message)]
pub(crate) struct RdmaPlaceWire {
    #[prost(fixed64, tag = "1")]
    address: u64,
    #[prost(fixed64, tag = "2")]
    key: u64,
    #[prost(fixed64, tag = "3")]
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
    pub(crate) fn sealed(place: Place, named: Named, cookie: &[u8; 16]) -> Self {
        RdmaPlace { place, seal: seal(place, named, cookie) }
    }

    /// Where the region lies, when all this was said together by who has the cookie.
    pub(crate) fn opened(&self, named: Named, cookie: &[u8; 16]) -> Option<Place> {
        (self.seal == seal(self.place, named, cookie)).then_some(self.place)
    }

    pub(crate) fn to_wire(self) -> RdmaPlaceWire {
        let RdmaPlace { place: Place { address, key }, seal } = self;
        RdmaPlaceWire { address, key, seal }
    }

    pub(crate) fn from_wire(wire: RdmaPlaceWire) -> Self {
        let RdmaPlaceWire { address, key, seal } = wire;
        RdmaPlace { place: Place { address, key }, seal }
    }
}

fn seal(place: Place, named: Named, cookie: &[u8; 16]) -> u64 {
    let words = [named.incarnation, named.key, named.length_bytes, place.address, place.key];
    let mut bytes = [0; 16 + 5 * 8];
    bytes[..16].copy_from_slice(cookie);
    for (at, word) in words.iter().enumerate() {
        bytes[16 + at * 8..24 + at * 8].copy_from_slice(&word.to_le_bytes());
    }
    crate::checksum(&bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_was_said_together_fits_its_seal() {
        let place = Place { address: 4096, key: 9 };
        let named = Named { incarnation: 1, key: 2, length_bytes: 3 };
        let sealed = RdmaPlace::sealed(place, named, &[7; 16]);
        assert_eq!(sealed.opened(named, &[7; 16]), Some(place));
        assert_eq!(sealed.opened(named, &[8; 16]), None);
        for other in [
            Named { incarnation: 2, ..named },
            Named { key: 3, ..named },
            Named { length_bytes: 4, ..named },
        ] {
            assert_eq!(sealed.opened(other, &[7; 16]), None, "{other:?}");
        }
        let elsewhere = RdmaPlace { place: Place { address: 8192, ..place }, ..sealed };
        assert_eq!(elsewhere.opened(named, &[7; 16]), None);
        assert_eq!(RdmaPlace::from_wire(sealed.to_wire()), sealed);
    }
}
