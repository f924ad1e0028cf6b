//! The parsers of RDMA's control connection and messages as targets; see [`crate::fuzzing`].

use kvasir_transfer_core::Refusal;

use super::known::Known;
use super::nic::Place;
use super::wire::{LENGTH_BYTES, MESSAGE_BYTES_MAX, PieceHeader, Said, length};
use crate::fuzzing::within;

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

// ---- what is accepted ----

pub(crate) fn said() -> Vec<Vec<u8>> {
    let known = Known { place: Place { address: 1 << 40, key: 7 }, length_bytes: 1 << 30 };
    let all = [
        Said::Closing(vec![8, 1]),
        Said::Ask { key: 5 },
        Said::Region { key: 5, found: Ok(Some(known)) },
        Said::Region { key: 5, found: Ok(None) },
        Said::Region { key: 5, found: Err(Refusal::Revoked) },
        Said::Revoked { key: 5 },
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
