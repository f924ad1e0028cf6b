//! The frames of the tcp domain. Forward: a header of 64 bytes and a payload. Back: acknowledgements
//! of 16 bytes. Either way, questions about paths that have failed and their answers travel between
//! them (see `closing`). All numbers are little-endian.

use kvasir_transfer_core::{FrameKind, Refusal, Settled, Target};

use crate::closing::CLOSING_BYTES_MAX;

pub(crate) const HEADER_BYTES: usize = 64;
pub(crate) const ACK_BYTES: usize = 16;
const HASHED_BYTES: usize = HEADER_BYTES - 8;
const MAGIC: u16 = 0x4b56;

/// Longer ones are malformed.
const PAYLOAD_BYTES_MAX: u64 = 1 << 32;

const KIND_WRITE: u8 = 1;
const KIND_SEAL: u8 = 2;
const KIND_MESSAGE: u8 = 3;
const KIND_QUESTION: u8 = 4;
const KIND_HEARTBEAT: u8 = 5;
const KIND_SIGNAL: u8 = 6;

const FLAG_IMM: u8 = 1;
const FLAG_CHECKSUM: u8 = 2;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Header {
    pub(crate) sequence: u64,
    pub(crate) kind: FrameKind,
    pub(crate) payload_bytes: u64,
}

/// What a header announces.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Announced {
    Frame(Header),
    /// About a path that has failed. It is no frame: it has no sequence and no acknowledgement.
    Question {
        bytes: usize,
    },
    /// Asks for a sign of life. It is no frame either.
    Heartbeat,
}

impl Announced {
    pub(crate) fn decode(bytes: &[u8; HEADER_BYTES]) -> Result<Self, Malformed> {
        match bytes[2] {
            KIND_QUESTION => {
                let length = usize::try_from(u64_at(bytes, 40)).map_err(|_| Malformed)?;
                if length > CLOSING_BYTES_MAX || *bytes != question_header(length) {
                    return Err(Malformed);
                }
                Ok(Announced::Question { bytes: length })
            }
            KIND_HEARTBEAT if *bytes == heartbeat_header() => Ok(Announced::Heartbeat),
            KIND_HEARTBEAT => Err(Malformed),
            _ => Header::decode(bytes).map(Announced::Frame),
        }
    }
}

pub(crate) fn question_header(bytes: usize) -> [u8; HEADER_BYTES] {
    bare_header(KIND_QUESTION, bytes)
}

pub(crate) fn heartbeat_header() -> [u8; HEADER_BYTES] {
    bare_header(KIND_HEARTBEAT, 0)
}

fn bare_header(kind: u8, bytes: usize) -> [u8; HEADER_BYTES] {
    let mut header = [0; HEADER_BYTES];
    header[..2].copy_from_slice(&MAGIC.to_le_bytes());
    header[2] = kind;
    header[40..48].copy_from_slice(&(bytes as u64).to_le_bytes());
    let hash = crate::checksum(&header[..HASHED_BYTES]);
    header[HASHED_BYTES..].copy_from_slice(&hash.to_le_bytes());
    header
}

/// Bytes that are no frame. The connection cannot be trusted any further.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the peer sent a malformed frame")]
pub(crate) struct Malformed;

/// Everything a header can say; each kind uses a part of it.
#[derive(Debug, Clone, Copy, Default)]
struct Fields {
    kind: u8,
    imm: Option<u32>,
    target: Option<Target>,
    offset: u64,
    length: u64,
    checksum: Option<u64>,
}

impl Header {
    pub(crate) fn encode(&self) -> [u8; HEADER_BYTES] {
        let fields = match self.kind {
            FrameKind::Write { target, offset, imm, checksum } => {
                let (kind, length) = (KIND_WRITE, self.payload_bytes);
                Fields { kind, imm, target: Some(target), offset, length, checksum }
            }
            FrameKind::Seal { target, offset, whole_bytes, imm, checksum } => {
                let (kind, length) = (KIND_SEAL, whole_bytes);
                Fields { kind, imm, target: Some(target), offset, length, checksum }
            }
            // The value stands where a checksum does elsewhere. What orders it here is that it was sent late.
            FrameKind::Signal { target, offset, value, is_fenced: _ } => {
                let (kind, target) = (KIND_SIGNAL, Some(target));
                Fields { kind, target, offset, checksum: Some(value), ..Fields::default() }
            }
            FrameKind::Message { id } => {
                let (kind, length) = (KIND_MESSAGE, self.payload_bytes);
                Fields { kind, offset: id, length, ..Fields::default() }
            }
        };
        let mut bytes = [0; HEADER_BYTES];
        let mut put = |at: usize, value: &[u8]| bytes[at..at + value.len()].copy_from_slice(value);
        put(0, &MAGIC.to_le_bytes());
        let imm_flag = if fields.imm.is_some() { FLAG_IMM } else { 0 };
        let checksum_flag = if fields.checksum.is_some() { FLAG_CHECKSUM } else { 0 };
        put(2, &[fields.kind, imm_flag | checksum_flag]);
        put(4, &fields.imm.unwrap_or(0).to_le_bytes());
        put(8, &self.sequence.to_le_bytes());
        if let Some(target) = fields.target {
            put(16, &target.key.to_le_bytes());
            put(24, &target.incarnation.to_le_bytes());
        }
        put(32, &fields.offset.to_le_bytes());
        put(40, &fields.length.to_le_bytes());
        put(48, &fields.checksum.unwrap_or(0).to_le_bytes());
        let hash = crate::checksum(&bytes[..HASHED_BYTES]);
        bytes[HASHED_BYTES..].copy_from_slice(&hash.to_le_bytes());
        bytes
    }

    pub(crate) fn decode(bytes: &[u8; HEADER_BYTES]) -> Result<Self, Malformed> {
        if u64_at(bytes, HASHED_BYTES) != crate::checksum(&bytes[..HASHED_BYTES]) {
            return Err(Malformed);
        }
        if u16::from_le_bytes([bytes[0], bytes[1]]) != MAGIC {
            return Err(Malformed);
        }
        let flags = bytes[3];
        if flags & !(FLAG_IMM | FLAG_CHECKSUM) != 0 {
            return Err(Malformed);
        }
        let imm = u32::from_le_bytes([bytes[4], bytes[5], bytes[6], bytes[7]]);
        let imm = (flags & FLAG_IMM != 0).then_some(imm);
        let checksum = (flags & FLAG_CHECKSUM != 0).then(|| u64_at(bytes, 48));
        let target = Target { key: u64_at(bytes, 16), incarnation: u64_at(bytes, 24) };
        let (offset, length) = (u64_at(bytes, 32), u64_at(bytes, 40));
        let (kind, payload_bytes) = match bytes[2] {
            KIND_WRITE => (FrameKind::Write { target, offset, imm, checksum }, length),
            KIND_SEAL => {
                (FrameKind::Seal { target, offset, whole_bytes: length, imm, checksum }, 0)
            }
            KIND_MESSAGE => (FrameKind::Message { id: offset }, length),
            KIND_SIGNAL => {
                let (Some(value), None, 0) = (checksum, imm, length) else { return Err(Malformed) };
                if !offset.is_multiple_of(8) {
                    return Err(Malformed);
                }
                (FrameKind::Signal { target, offset, value, is_fenced: false }, 0)
            }
            _ => return Err(Malformed),
        };
        if payload_bytes > PAYLOAD_BYTES_MAX {
            return Err(Malformed);
        }
        Ok(Header { sequence: u64_at(bytes, 8), kind, payload_bytes })
    }
}

fn u64_at<const N: usize>(bytes: &[u8; N], at: usize) -> u64 {
    let mut value = [0; 8];
    value.copy_from_slice(&bytes[at..at + 8]);
    u64::from_le_bytes(value)
}

const ACK_THROUGH: u8 = 1;
const ACK_REFUSED: u8 = 2;
const ACK_CORRUPT: u8 = 3;
const ACK_ANSWER: u8 = 4;
const ACK_ALIVE: u8 = 5;

/// What a receiver says of frames.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ack {
    /// All up to this one have landed, those apart of which something else was said.
    Through {
        sequence: u64,
    },
    Failed {
        sequence: u64,
        settled: Settled,
    },
    /// So many bytes follow: the answer to a question.
    Answer {
        bytes: usize,
    },
    /// To a heartbeat.
    Alive,
}

impl Ack {
    pub(crate) fn encode(&self) -> [u8; ACK_BYTES] {
        let (kind, code, sequence) = match *self {
            Ack::Through { sequence } => (ACK_THROUGH, 0, sequence),
            Ack::Failed { sequence, settled: Settled::Refused(refusal) } => {
                (ACK_REFUSED, refusal.code(), sequence)
            }
            Ack::Failed { sequence, settled: Settled::Corrupt | Settled::Landed } => {
                (ACK_CORRUPT, 0, sequence)
            }
            Ack::Answer { bytes } => (ACK_ANSWER, 0, bytes as u64),
            Ack::Alive => (ACK_ALIVE, 0, 0),
        };
        let mut bytes = [0; ACK_BYTES];
        bytes[0] = kind;
        bytes[1] = code;
        bytes[8..].copy_from_slice(&sequence.to_le_bytes());
        bytes
    }

    pub(crate) fn decode(bytes: &[u8; ACK_BYTES]) -> Result<Self, Malformed> {
        let sequence = u64_at(bytes, 8);
        if bytes[2..8].iter().any(|byte| *byte != 0) {
            return Err(Malformed);
        }
        match (bytes[0], bytes[1]) {
            (ACK_THROUGH, 0) => Ok(Ack::Through { sequence }),
            (ACK_ANSWER, 0) => {
                let bytes = usize::try_from(sequence).map_err(|_| Malformed)?;
                if bytes <= CLOSING_BYTES_MAX { Ok(Ack::Answer { bytes }) } else { Err(Malformed) }
            }
            (ACK_ALIVE, 0) if sequence == 0 => Ok(Ack::Alive),
            (ACK_CORRUPT, 0) => Ok(Ack::Failed { sequence, settled: Settled::Corrupt }),
            (ACK_REFUSED, code) => {
                let refusal = Refusal::from_code(code).ok_or(Malformed)?;
                Ok(Ack::Failed { sequence, settled: Settled::Refused(refusal) })
            }
            _ => Err(Malformed),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn kinds() -> impl Strategy<Value = (FrameKind, u64)> {
        let target = any::<(u64, u64)>().prop_map(|(key, incarnation)| Target { key, incarnation });
        let fields = (target, any::<u64>(), any::<Option<u32>>(), any::<Option<u64>>());
        let length = 0..=PAYLOAD_BYTES_MAX;
        (0..4, fields, length, any::<u64>()).prop_map(|(kind, fields, length, whole_bytes)| {
            let (target, offset, imm, checksum) = fields;
            match kind {
                0 => (FrameKind::Write { target, offset, imm, checksum }, length),
                1 => (FrameKind::Seal { target, offset, whole_bytes, imm, checksum }, 0),
                2 => {
                    let (offset, value) = (offset & !7, whole_bytes);
                    (FrameKind::Signal { target, offset, value, is_fenced: false }, 0)
                }
                _ => (FrameKind::Message { id: offset }, length),
            }
        })
    }

    proptest! {
        #[test]
        fn headers_survive_the_wire((kind, payload_bytes) in kinds(), sequence: u64) {
            let header = Header { sequence, kind, payload_bytes };
            prop_assert_eq!(Header::decode(&header.encode()), Ok(header));
        }

        #[test]
        fn a_flipped_bit_makes_a_header_malformed((kind, payload_bytes) in kinds(), bit in 0usize..512) {
            let mut bytes = Header { sequence: 1, kind, payload_bytes }.encode();
            bytes[bit / 8] ^= 1 << (bit % 8);
            prop_assert_eq!(Header::decode(&bytes), Err(Malformed));
        }

        #[test]
        fn any_header_with_a_right_hash_is_decoded_or_malformed(random: [u64; 7]) {
            let mut bytes = [0; HEADER_BYTES];
            for (at, word) in random.iter().enumerate() {
                bytes[at * 8..at * 8 + 8].copy_from_slice(&word.to_le_bytes());
            }
            bytes[..2].copy_from_slice(&MAGIC.to_le_bytes());
            bytes[2] %= 7;
            bytes[3] %= 5;
            let hash = crate::checksum(&bytes[..HASHED_BYTES]);
            bytes[HASHED_BYTES..].copy_from_slice(&hash.to_le_bytes());
            if let Ok(header) = Header::decode(&bytes) {
                prop_assert!(header.payload_bytes <= PAYLOAD_BYTES_MAX);
                prop_assert_eq!(Header::decode(&header.encode()), Ok(header));
            }
        }

        #[test]
        fn any_acknowledgement_is_decoded_or_malformed(bytes: [u8; ACK_BYTES]) {
            if let Ok(ack) = Ack::decode(&bytes) {
                prop_assert_eq!(ack.encode(), bytes);
            }
        }
    }

    #[test]
    fn questions_are_announced_within_their_bound() {
        for bytes in [0, 1, CLOSING_BYTES_MAX] {
            let announced = Announced::decode(&question_header(bytes));
            assert_eq!(announced, Ok(Announced::Question { bytes }));
        }
        assert_eq!(Announced::decode(&question_header(CLOSING_BYTES_MAX + 1)), Err(Malformed));
        assert_eq!(Announced::decode(&heartbeat_header()), Ok(Announced::Heartbeat));
        assert_eq!(Announced::decode(&bare_header(KIND_HEARTBEAT, 1)), Err(Malformed));
        let mut flipped = question_header(5);
        flipped[9] ^= 1;
        assert_eq!(Announced::decode(&flipped), Err(Malformed));
    }

    #[test]
    fn acknowledgements_survive_the_wire() {
        let mut acks = vec![
            Ack::Through { sequence: 7 },
            Ack::Failed { sequence: u64::MAX, settled: Settled::Corrupt },
            Ack::Answer { bytes: CLOSING_BYTES_MAX },
            Ack::Alive,
        ];
        for (refusal, _, _) in Refusal::ALL {
            acks.push(Ack::Failed { sequence: 3, settled: Settled::Refused(refusal) });
        }
        for ack in acks {
            assert_eq!(Ack::decode(&ack.encode()), Ok(ack));
        }
    }
}
