//! The parsers of RDMA's control connection, messages and handshakes as targets; see [`crate::fuzzing`].

use kvasir_fuzzing::within;
use kvasir_transfer_core::Refusal;

use kvasir_transfer_libfabric::address::EndpointName;
use kvasir_transfer_libfabric::region::{RemoteKey, RemoteRegion};
use kvasir_transfer_verbs::{Gid, Lid, QKey, QpNum, QueuePairAddress};

use super::assembly::{Assembly, Put};
use super::efa::greeting::Greeting;
use super::handshake::{
    DATAGRAM_BYTES_MAX, Datagram, Handshakes, Heard, Kind, LANES_MAX, Ticket, Token,
};
use super::known::Known;
use super::nic::{PipeId, Place};
use super::wire::{LENGTH_BYTES, MESSAGE_BYTES_MAX, PieceHeader, Said, length};

/// What one end says to the other, with its length before it.
pub fn rdma_said(bytes: &[u8]) -> bool {
    let Some((prefix, rest)) = bytes.split_first_chunk::<LENGTH_BYTES>() else { return false };
    let Some(length) = within(0, || length(*prefix)) else { return false };
    assert!(length <= MESSAGE_BYTES_MAX);
    let Some(body) = rest.get(..length) else { return false };
    let Some(said) = within(body.len(), || Said::decode(body)) else { return false };
    let again = said.clone().encode();
    assert!(again.len() <= LENGTH_BYTES + MESSAGE_BYTES_MAX);
    assert_eq!(Said::decode(&again[LENGTH_BYTES..]), Some(said));
    true
}

/// A piece of a message, as a card has placed it.
pub fn rdma_piece(bytes: &[u8]) -> bool {
    let Some((header, piece)) = within(0, || PieceHeader::decode(bytes)) else { return false };
    assert!(u64::from(header.offset) + piece.len() as u64 <= u64::from(header.bytes));
    assert_eq!([header.encode().as_slice(), piece].concat(), bytes);
    true
}

/// What an end of a pipe says of how its datagrams reach it.
pub fn rdma_ticket(bytes: &[u8]) -> bool {
    let Some(ticket) = within(0, || Ticket::from_bytes(bytes)) else { return false };
    assert!(Ticket::is_one(bytes) && (2..=LANES_MAX).contains(&ticket.lanes));
    assert_eq!(ticket.to_bytes(), bytes);
    true
}

/// A datagram of a handshake, as it comes and as anybody on the fabric may send it. Whoever does not know both
/// tokens changes nothing by it.
pub fn rdma_datagram(bytes: &[u8]) -> bool {
    let mut handshakes = Handshakes::default();
    let (own, other) = (lanes(2), ticket(Token([1; 16])));
    handshakes.expect(PipeId(1), Token([2; 16]), (own, other));
    let heard = handshakes.hear(Some(other.number), bytes);
    let Some(datagram) = within(bytes.len(), || Datagram::decode(bytes)) else {
        assert_eq!(heard, Heard::Refused);
        return false;
    };
    assert_eq!(datagram.encode(), bytes);
    assert!(bytes.len() <= DATAGRAM_BYTES_MAX);
    let knows_both = (datagram.to, datagram.from) == (Token([2; 16]), Token([1; 16]));
    assert!(knows_both || heard == Heard::Refused);
    assert_eq!(handshakes.is_open(PipeId(1)), heard == Heard::Refused);
    true
}

/// What the end of an efa pipe tells of itself.
pub fn efa_greeting(bytes: &[u8]) -> bool {
    let Some(greeting) = within(bytes.len(), || Greeting::from_bytes(bytes)) else { return false };
    assert_eq!(greeting.to_bytes(), bytes);
    true
}

/// Pieces of messages in any order, each after its length (u16, little-endian).
pub fn rdma_assembly(bytes: &[u8]) -> bool {
    let mut assembly = Assembly::new(false);
    let mut rest = bytes;
    let mut is_any_taken = false;
    while let Some((length, after)) = rest.split_first_chunk::<2>() {
        let length = usize::from(u16::from_le_bytes(*length)).min(after.len());
        let (piece, after) = after.split_at(length);
        rest = after;
        match assembly.put(piece, ASSEMBLED_BYTES_MAX) {
            Err(_) => return is_any_taken,
            Ok(Put::Whole { .. }) => {
                assert!(assembly.buffer().len() <= ASSEMBLED_BYTES_MAX);
                assembly.buffer().clear();
            }
            Ok(Put::More | Put::TooLong { .. }) => assert!(assembly.buffer().is_empty()),
        }
        is_any_taken = true;
    }
    is_any_taken
}

/// Of a message, for the target above.
const ASSEMBLED_BYTES_MAX: usize = 8 << 10;

// ---- what is accepted ----

fn lanes(count: u32) -> Vec<QueuePairAddress> {
    let mut bytes = [0; QueuePairAddress::BYTES];
    // The code of an MTU of 4096.
    bytes[26] = 5;
    let lane = |number: u32| {
        bytes[..4].copy_from_slice(&number.to_be_bytes());
        QueuePairAddress::from_bytes(&bytes).expect("an address")
    };
    (1..=count).map(lane).collect()
}

fn ticket(token: Token) -> Ticket {
    let number = QpNum::new(17).expect("24 bits");
    Ticket { number, key: QKey(5), gid: Gid([7; 16]), lid: Lid(0), lanes: 2, token }
}

pub(crate) fn tickets() -> Vec<Vec<u8>> {
    let most = Ticket { lanes: LANES_MAX, ..ticket(Token([9; 16])) };
    [ticket(Token([1; 16])), most].map(Ticket::to_bytes).to_vec()
}

pub(crate) fn datagrams() -> Vec<Vec<u8>> {
    let (to, from) = (Token([2; 16]), Token([1; 16]));
    let datagram = |kind, count| Datagram { kind, to, from, lanes: lanes(count) }.encode();
    vec![
        datagram(Kind::Offer, 2),
        datagram(Kind::Offer, LANES_MAX as u32),
        datagram(Kind::Answer, 2),
    ]
}

pub(crate) fn ends() -> Vec<Vec<u8>> {
    let trial = RemoteRegion { base: 1 << 40, key: RemoteKey(7), bytes: 64 };
    let greeting = |name: &[u8]| Greeting { name: EndpointName(name.to_vec()), trial }.to_bytes();
    vec![greeting(&[7; 32]), greeting(b"fi_shm://7:0:3\0")]
}

pub(crate) fn assemblies() -> Vec<Vec<u8>> {
    let piece = |id, bytes, offset, body: &[u8]| {
        let piece = [PieceHeader { id, bytes, offset }.encode().as_slice(), body].concat();
        [(piece.len() as u16).to_le_bytes().as_slice(), &piece].concat()
    };
    let (first, last) = (piece(1, 1030, 0, &[1; 1024]), piece(1, 1030, 1024, b"second"));
    let other = piece(2, 3, 0, b"abc");
    vec![[last, other.clone(), first].concat(), other, piece(3, 9000, 0, &[1; 1024])]
}

pub(crate) fn said() -> Vec<Vec<u8>> {
    let known = Known { place: Place { address: 1 << 40, key: 7 }, length_bytes: 1 << 30 };
    let all = [
        Said::Closing(vec![8, 1]),
        Said::Ask { key: 5 },
        Said::Region { key: 5, found: Ok(Some(known)) },
        Said::Region { key: 5, found: Ok(None) },
        Said::Region { key: 5, found: Err(Refusal::Revoked) },
        Said::Revoked { key: 5 },
        Said::Settle { ticket: 5 },
        Said::Settled { ticket: 5 },
        Said::Heartbeat,
        Said::Alive,
        Said::Taken { id: 5, taken: Err(Refusal::NoRoom) },
    ];
    all.map(Said::encode).to_vec()
}

pub(crate) fn pieces() -> Vec<Vec<u8>> {
    let piece = |bytes, offset, body: &[u8]| {
        [PieceHeader { id: 3, bytes, offset }.encode().as_slice(), body].concat()
    };
    vec![piece(0, 0, b""), piece(9, 0, b"abc"), piece(9, 3, b"defghi")]
}
