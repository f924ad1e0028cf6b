//! The tcp domain's parsers as targets; see [`crate::fuzzing`].

use kvasir_fuzzing::within;
use kvasir_transfer_core::{FrameKind, Refusal, Settled, Target};

use super::frame::{
    ACK_BYTES, Ack, Announced, HEADER_BYTES, Header, Malformed, heartbeat_header, question_header,
};
use super::{GREETING_BYTES, greeting, greeting_length};
use crate::closing::CLOSING_BYTES_MAX;
use crate::hello::HELLO_BYTES_MAX;

const HASHED_BYTES: usize = HEADER_BYTES - 8;
const PAYLOAD_BYTES_MAX: u64 = 1 << 32;

/// A frame's header, as it came and with the hash that a peer would give it, which no fuzzer guesses.
pub fn tcp_header(bytes: &[u8]) -> bool {
    let Some(bytes) = bytes.first_chunk::<HEADER_BYTES>() else { return false };
    header(bytes) | header(&hashed(*bytes))
}

fn hashed(mut bytes: [u8; HEADER_BYTES]) -> [u8; HEADER_BYTES] {
    let hash = crate::checksum(&bytes[..HASHED_BYTES]);
    bytes[HASHED_BYTES..].copy_from_slice(&hash.to_le_bytes());
    bytes
}

fn header(bytes: &[u8; HEADER_BYTES]) -> bool {
    match within(0, || Announced::decode(bytes)) {
        Ok(Announced::Frame(header)) => {
            assert!(header.payload_bytes <= PAYLOAD_BYTES_MAX);
            assert_eq!(Header::decode(&header.encode()), Ok(header));
            true
        }
        Ok(Announced::Question { bytes: announced }) => {
            assert!(announced <= CLOSING_BYTES_MAX);
            assert_eq!(question_header(announced), *bytes);
            true
        }
        Ok(Announced::Heartbeat) => {
            assert_eq!(heartbeat_header(), *bytes);
            true
        }
        Err(Malformed) => false,
    }
}

/// An acknowledgement.
pub fn tcp_ack(bytes: &[u8]) -> bool {
    let Some(bytes) = bytes.first_chunk::<ACK_BYTES>() else { return false };
    let Ok(ack) = within(0, || Ack::decode(bytes)) else { return false };
    assert_eq!(ack.encode(), *bytes);
    assert!(!matches!(ack, Ack::Answer { bytes } if bytes > CLOSING_BYTES_MAX));
    true
}

/// What stands before a hello.
pub fn tcp_greeting(bytes: &[u8]) -> bool {
    let Some(prefix) = bytes.first_chunk::<GREETING_BYTES>() else { return false };
    let Some(length) = within(0, || greeting_length(*prefix)) else { return false };
    assert!(length <= HELLO_BYTES_MAX);
    assert_eq!(greeting(&vec![0; length])[..GREETING_BYTES], *prefix);
    true
}

// ---- what is accepted ----

pub(crate) fn headers() -> Vec<Vec<u8>> {
    let target = Target { key: 1, incarnation: 9 };
    let write = FrameKind::Write { target, offset: 64, imm: Some(7), checksum: None };
    let seal =
        FrameKind::Seal { target, offset: 0, whole_bytes: 1 << 20, imm: None, checksum: Some(5) };
    let signal = FrameKind::Signal { target, offset: 64, value: 7, is_fenced: false };
    let message = FrameKind::Message { id: 3 };
    let kinds = [(write, 4096), (write, PAYLOAD_BYTES_MAX), (seal, 0), (message, 100), (signal, 0)];
    let frames = kinds.map(|(kind, payload_bytes)| Header { sequence: 2, kind, payload_bytes });
    let questions = [question_header(0), question_header(CLOSING_BYTES_MAX), heartbeat_header()];
    frames.iter().map(Header::encode).chain(questions).map(Vec::from).collect()
}

pub(crate) fn acks() -> Vec<Vec<u8>> {
    let acks = [
        Ack::Through { sequence: 7 },
        Ack::Failed { sequence: u64::MAX, settled: Settled::Corrupt },
        Ack::Failed { sequence: 1, settled: Settled::Refused(Refusal::Revoked) },
        Ack::Answer { bytes: CLOSING_BYTES_MAX },
        Ack::Alive,
    ];
    acks.iter().map(|ack| ack.encode().to_vec()).collect()
}

pub(crate) fn greetings() -> Vec<Vec<u8>> {
    [0, 100, HELLO_BYTES_MAX].map(|bytes| greeting(&vec![0; bytes])).to_vec()
}
