//! What the two ends of a path say over its control connection, after the greeting: each message is its
//! length (u32, little-endian) and a protobuf message with exactly one of its fields. And the header of a
//! message's piece, which goes through the card.

use kvasir_transfer_core::Refusal;
use prost::Message;

use super::known::Known;
use super::nic::Place;
use crate::closing::CLOSING_BYTES_MAX;

/// Of a message beside what it carries of `closing`.
const REST_BYTES_MAX: usize = 64;
pub(crate) const LENGTH_BYTES: usize = 4;
pub(crate) const MESSAGE_BYTES_MAX: usize = CLOSING_BYTES_MAX + REST_BYTES_MAX;

/// What is said.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Said {
    /// From the writer the question about a path that has failed, from the target its answer; see
    /// `closing`.
    Closing(Vec<u8>),
    /// By the writer: what is the region with this key?
    Ask { key: u64 },
    /// By the target. `None`: it is one, but this card cannot write it.
    Region { key: u64, found: Result<Option<Known>, Refusal> },
    /// By the target: do not write it any more.
    Revoked { key: u64 },
    /// By the target: what has become of a message.
    Taken { id: u64, taken: Result<(), Refusal> },
    /// By the target: say when all that was posted until now is done.
    Settle { ticket: u64 },
    /// By the writer: it is.
    Settled { ticket: u64 },
    /// By the writer: are you there?
    Heartbeat,
    /// By the target: yes.
    Alive,
}

#[derive(Clone, PartialEq, Message)]
struct SaidWire {
    #[prost(bytes = "vec", optional, tag = "1")]
    closing: Option<Vec<u8>>,
    #[prost(fixed64, optional, tag = "2")]
    ask: Option<u64>,
    #[prost(message, optional, tag = "3")]
    region: Option<RegionWire>,
    #[prost(fixed64, optional, tag = "4")]
    revoked: Option<u64>,
    #[prost(message, optional, tag = "5")]
    taken: Option<TakenWire>,
    #[prost(uint32, optional, tag = "6")]
    beat: Option<u32>,
    #[prost(fixed64, optional, tag = "7")]
    settle: Option<u64>,
    #[prost(fixed64, optional, tag = "8")]
    settled: Option<u64>,
}

const BEAT_ASKED: u32 = 1;
const BEAT_ALIVE: u32 = 2;

#[derive(Clone, Copy, PartialEq, Message)]
struct TakenWire {
    #[prost(uint64, tag = "1")]
    id: u64,
    /// 0: it was taken.
    #[prost(uint32, tag = "2")]
    refusal: u32,
}

impl TakenWire {
    fn taken(&self) -> Option<Result<(), Refusal>> {
        match self.refusal {
            0 => Some(Ok(())),
            code => Some(Err(Refusal::from_code(u8::try_from(code).ok()?)?)),
        }
    }
}

#[derive(Clone, Copy, PartialEq, Message)]
struct RegionWire {
    #[prost(fixed64, tag = "1")]
    key: u64,
    /// 0: it may be written.
    #[prost(uint32, tag = "2")]
    refusal: u32,
    /// The card can write it.
    #[prost(bool, tag = "3")]
    is_placed: bool,
    #[prost(fixed64, tag = "4")]
    address: u64,
    #[prost(fixed64, tag = "5")]
    card_key: u64,
    #[prost(fixed64, tag = "6")]
    length_bytes: u64,
}

impl RegionWire {
    fn new(key: u64, found: Result<Option<Known>, Refusal>) -> Self {
        let none = RegionWire { key, ..RegionWire::default() };
        match found {
            Err(refusal) => RegionWire { refusal: refusal.code().into(), ..none },
            Ok(None) => none,
            Ok(Some(Known { place: Place { address, key: card_key }, length_bytes })) => {
                RegionWire { is_placed: true, address, card_key, length_bytes, ..none }
            }
        }
    }

    fn found(&self) -> Option<Result<Option<Known>, Refusal>> {
        let place = Place { address: self.address, key: self.card_key };
        let known = Known { place, length_bytes: self.length_bytes };
        let found = match self.refusal {
            0 => Ok(self.is_placed.then_some(known)),
            code => Err(Refusal::from_code(u8::try_from(code).ok()?)?),
        };
        (*self == RegionWire::new(self.key, found)).then_some(found)
    }
}

impl Said {
    fn into_wire(self) -> SaidWire {
        let mut wire = SaidWire::default();
        match self {
            Said::Closing(bytes) => wire.closing = Some(bytes),
            Said::Ask { key } => wire.ask = Some(key),
            Said::Region { key, found } => wire.region = Some(RegionWire::new(key, found)),
            Said::Revoked { key } => wire.revoked = Some(key),
            Said::Taken { id, taken } => {
                let refusal = taken.err().map_or(0, |refusal| refusal.code().into());
                wire.taken = Some(TakenWire { id, refusal });
            }
            Said::Settle { ticket } => wire.settle = Some(ticket),
            Said::Settled { ticket } => wire.settled = Some(ticket),
            Said::Heartbeat => wire.beat = Some(BEAT_ASKED),
            Said::Alive => wire.beat = Some(BEAT_ALIVE),
        }
        wire
    }

    /// With its length before it.
    pub(crate) fn encode(self) -> Vec<u8> {
        let body = self.into_wire().encode_to_vec();
        let length = u32::try_from(body.len()).expect("closing is bounded, the rest is short");
        [length.to_le_bytes().as_slice(), &body].concat()
    }

    /// `None` for what cannot have been said.
    pub(crate) fn decode(body: &[u8]) -> Option<Self> {
        let wire = SaidWire::decode(body).ok()?;
        // Which one it is, and then that it is the only one.
        let said = match &wire {
            SaidWire { beat: Some(BEAT_ASKED), .. } => Said::Heartbeat,
            SaidWire { beat: Some(BEAT_ALIVE), .. } => Said::Alive,
            SaidWire { closing: Some(bytes), .. } if bytes.len() <= CLOSING_BYTES_MAX => {
                Said::Closing(bytes.clone())
            }
            SaidWire { ask: Some(key), .. } => Said::Ask { key: *key },
            SaidWire { region: Some(region), .. } => {
                Said::Region { key: region.key, found: region.found()? }
            }
            SaidWire { revoked: Some(key), .. } => Said::Revoked { key: *key },
            SaidWire { taken: Some(taken), .. } => {
                Said::Taken { id: taken.id, taken: taken.taken()? }
            }
            SaidWire { settle: Some(ticket), .. } => Said::Settle { ticket: *ticket },
            SaidWire { settled: Some(ticket), .. } => Said::Settled { ticket: *ticket },
            _ => return None,
        };
        (said.clone().into_wire() == wire).then_some(said)
    }
}

/// The length of the message that begins here, when it is one that may come.
pub(crate) fn length(prefix: [u8; LENGTH_BYTES]) -> Option<usize> {
    let length = u32::from_le_bytes(prefix) as usize;
    (length <= MESSAGE_BYTES_MAX).then_some(length)
}

pub(crate) const PIECE_HEADER_BYTES: usize = 16;

/// Before a piece of a message. The pieces of one message follow each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PieceHeader {
    pub(crate) id: u64,
    /// Of the message.
    pub(crate) bytes: u32,
    /// Of the piece within it.
    pub(crate) offset: u32,
}

impl PieceHeader {
    pub(crate) fn encode(&self) -> [u8; PIECE_HEADER_BYTES] {
        let mut header = [0; PIECE_HEADER_BYTES];
        header[..8].copy_from_slice(&self.id.to_le_bytes());
        header[8..12].copy_from_slice(&self.bytes.to_le_bytes());
        header[12..].copy_from_slice(&self.offset.to_le_bytes());
        header
    }

    /// And the piece itself.
    pub(crate) fn decode(bytes: &[u8]) -> Option<(Self, &[u8])> {
        let (id, rest) = bytes.split_first_chunk::<8>()?;
        let (total, rest) = rest.split_first_chunk::<4>()?;
        let (offset, piece) = rest.split_first_chunk::<4>()?;
        let header = PieceHeader {
            id: u64::from_le_bytes(*id),
            bytes: u32::from_le_bytes(*total),
            offset: u32::from_le_bytes(*offset),
        };
        let end = u64::from(header.offset) + piece.len() as u64;
        (end <= u64::from(header.bytes)).then_some((header, piece))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_said_survives_the_wire() {
        let known = Known { place: Place { address: 1 << 40, key: 7 }, length_bytes: 1 << 30 };
        for said in [
            Said::Closing(vec![1; CLOSING_BYTES_MAX]),
            Said::Closing(Vec::new()),
            Said::Ask { key: 0 },
            Said::Region { key: 5, found: Ok(Some(known)) },
            Said::Region { key: 5, found: Ok(None) },
            Said::Region { key: 5, found: Err(Refusal::Revoked) },
            Said::Revoked { key: u64::MAX },
            Said::Taken { id: 5, taken: Ok(()) },
            Said::Heartbeat,
            Said::Alive,
            Said::Settle { ticket: 0 },
            Said::Settled { ticket: u64::MAX },
            Said::Taken { id: 0, taken: Err(Refusal::NoRoom) },
        ] {
            let bytes = said.clone().encode();
            let (prefix, body) = bytes.split_first_chunk().expect("a length");
            assert_eq!(length(*prefix), Some(body.len()));
            assert_eq!(Said::decode(body), Some(said));
        }
    }

    #[test]
    fn what_cannot_have_been_said_is_not_read() {
        let two = SaidWire { ask: Some(1), revoked: Some(2), ..SaidWire::default() };
        let odd = RegionWire { refusal: 2, is_placed: true, ..RegionWire::default() };
        let unknown = RegionWire { refusal: 99, ..RegionWire::default() };
        let region = |region| SaidWire { region: Some(region), ..SaidWire::default() };
        let long =
            SaidWire { closing: Some(vec![0; CLOSING_BYTES_MAX + 1]), ..SaidWire::default() };
        for wire in [SaidWire::default(), two, region(odd), region(unknown), long] {
            assert_eq!(Said::decode(&wire.encode_to_vec()), None);
        }
        assert_eq!(length([0xff; 4]), None);
    }

    #[test]
    fn a_piece_lies_within_its_message() {
        let header = PieceHeader { id: 3, bytes: 10, offset: 6 };
        let bytes = |piece: &[u8]| [header.encode().as_slice(), piece].concat();
        assert_eq!(PieceHeader::decode(&bytes(b"abcd")), Some((header, b"abcd".as_slice())));
        assert_eq!(PieceHeader::decode(&bytes(b"abcde")), None);
        assert_eq!(PieceHeader::decode(&header.encode()[..15]), None);
    }
}
