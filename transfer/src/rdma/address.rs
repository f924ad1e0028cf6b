//! What an endpoint says of its engine's cards: how each is reached, and which memory each is near. It
//! comes from peers: bounded, and refused as a whole when any of it is malformed.

use prost::Message;

use crate::config::Domain;
use crate::endpoint::WireError;
use crate::topology::{CARDS_MAX, Nearness};

/// How a peer's cards are reached, and which of its memory each is near.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RdmaAddress {
    /// One to [`CARDS_MAX`].
    pub cards: Vec<CardAddress>,
    pub nearness: Nearness,
}

/// How one card is reached.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CardAddress {
    /// `None` for one that is not known here, which is not used here.
    pub domain: Option<Domain>,
    /// For people.
    pub name: String,
    /// What that domain makes of it; it decides whether a connection is tried.
    pub(crate) address: Vec<u8>,
}

impl CardAddress {
    pub(crate) fn new(domain: Domain, name: &str, address: Vec<u8>) -> Self {
        CardAddress { domain: Some(domain), name: name.to_owned(), address }
    }
}

/// Of `CardAddress::address`; the longest known has 17.
pub(crate) const ADDRESS_BYTES_MAX: usize = 256;
/// Devices of the kernel have names of up to 63 bytes.
pub(crate) const NAME_BYTES_MAX: usize = 64;

#[derive(Clone, PartialEq, Message)]
struct CardWire {
    /// The code of the domain.
    #[prost(uint32, tag = "1")]
    domain: u32,
    #[prost(string, tag = "2")]
    name: String,
    #[prost(bytes = "vec", tag = "3")]
    address: Vec<u8>,
}

/// Cards and rows of the matrix, each as it travels.
pub(crate) type AddressWire = (Vec<Vec<u8>>, Vec<Vec<u8>>);

impl RdmaAddress {
    pub(crate) fn to_wire(&self) -> AddressWire {
        let card = |card: &CardAddress| {
            let CardAddress { domain, name, address } = card.clone();
            CardWire { domain: domain.map_or(0, Domain::code), name, address }.encode_to_vec()
        };
        (self.cards.iter().map(card).collect(), self.nearness.to_wire())
    }

    /// `None` without any card.
    ///
    /// # Errors
    /// Which field it is that cannot be.
    pub(crate) fn from_wire((cards, rows): &AddressWire) -> Result<Option<Self>, WireError> {
        if cards.len() > CARDS_MAX {
            return Err(WireError::Field("rdma.cards"));
        }
        let nearness = Nearness::from_wire(rows, cards.len());
        let nearness = nearness.ok_or(WireError::Field("rdma.nearness"))?;
        let read = |card: &Vec<u8>| {
            let CardWire { domain, name, address } = CardWire::decode(card.as_slice())?;
            if name.len() > NAME_BYTES_MAX {
                return Err(WireError::Field("rdma.name"));
            }
            if address.len() > ADDRESS_BYTES_MAX {
                return Err(WireError::Field("rdma.address"));
            }
            Ok(CardAddress { domain: Domain::from_code(domain), name, address })
        };
        let cards: Result<Vec<_>, _> = cards.iter().map(read).collect();
        let cards = cards?;
        Ok((!cards.is_empty()).then_some(RdmaAddress { cards, nearness }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::topology::Topology;

    fn address(cards: usize) -> RdmaAddress {
        let card =
            |at: usize| CardAddress::new(Domain::Verbs, &format!("mlx5_{at}"), vec![at as u8; 17]);
        let names = ["mlx5_0".to_owned()];
        let text = r#"{"cpu:1":{"preferred":["mlx5_0"]}}"#;
        let topology = Topology::from_json(text, &names).expect("a matrix");
        let nearness = Nearness::of(&topology, &names);
        RdmaAddress { cards: (0..cards).map(card).collect(), nearness }
    }

    #[test]
    fn it_survives_the_wire_and_is_bounded() {
        let known = address(CARDS_MAX);
        assert_eq!(RdmaAddress::from_wire(&known.to_wire()).ok(), Some(Some(known)));
        assert_eq!(RdmaAddress::from_wire(&AddressWire::default()).ok(), Some(None));
        let check = |change: fn(&mut RdmaAddress), field: &str| {
            let mut changed = address(2);
            change(&mut changed);
            let error = RdmaAddress::from_wire(&changed.to_wire()).expect_err("it cannot be");
            assert!(error.to_string().contains(field), "{error}");
        };
        check(|of| of.cards = vec![of.cards[0].clone(); CARDS_MAX + 1], "rdma.cards");
        check(|of| of.cards.clear(), "rdma.nearness");
        check(|of| of.cards[1].name = "x".repeat(NAME_BYTES_MAX + 1), "rdma.name");
        check(|of| of.cards[1].address = vec![0; ADDRESS_BYTES_MAX + 1], "rdma.address");
    }
}
