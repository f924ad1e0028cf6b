//! The tail: what follows the pages of a push. A message of checksums and engine bytes, preceded by
//! its length. What arrives was written by another node and is checked before anything in it is
//! believed.

use kvasir_proto::{TxId, v1};
use prost::Message;

/// The most an engine may give to `FinishPrefill`.
pub const ENGINE_BYTES_MAX: usize = 64 << 10;
/// Length, tags, transaction id and lengths of both fields, rounded up.
const FRAME_BYTES: usize = 64;

/// Room for the longest tail of this many checksums.
pub fn bytes_max(checksums: usize) -> usize {
    FRAME_BYTES + 8 * checksums + ENGINE_BYTES_MAX
}

/// The bytes that are written into the target's tail region.
pub fn encode(tx: TxId, checksums: Vec<u64>, engine: Vec<u8>) -> Vec<u8> {
    let tail = v1::Tail { tx: Some(tx.into()), checksums, engine };
    let length = tail.encoded_len();
    let mut bytes = Vec::with_capacity(4 + length);
    // Under `bytes_max`, which is far under 4 GiB.
    bytes.extend((length as u32).to_le_bytes());
    tail.encode(&mut bytes).expect("a vector grows as it must");
    bytes
}

/// Why a tail that arrived is not believed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TailError {
    #[error("its length {length} does not fit the {room} bytes it has")]
    Length { length: usize, room: usize },
    #[error("it is no tail message")]
    Malformed,
    #[error("it is of another transaction")]
    OtherTx,
    #[error("it has {got} checksums; the pages sent need {want}")]
    Checksums { got: usize, want: usize },
}

/// Reads the tail of `tx` from its room in the tail region.
///
/// # Errors
/// [`TailError`] says what does not fit.
pub fn decode(room: &[u8], tx: TxId, checksums: usize) -> Result<v1::Tail, TailError> {
    let malformed = || TailError::Length { length: 0, room: room.len() };
    let (length, rest) = room.split_first_chunk::<4>().ok_or_else(malformed)?;
    let length = u32::from_le_bytes(*length) as usize;
    let bytes = rest.get(..length).ok_or(TailError::Length { length, room: room.len() })?;
    let tail = v1::Tail::decode(bytes).map_err(|_| TailError::Malformed)?;
    if tail.tx != Some(tx.into()) {
        return Err(TailError::OtherTx);
    }
    if tail.checksums.len() != checksums {
        return Err(TailError::Checksums { got: tail.checksums.len(), want: checksums });
    }
    Ok(tail)
}

#[cfg(test)]
mod tests {
    use super::*;

    const TX: TxId = TxId { conductor_incarnation: 1, serial: 2 };

    #[test]
    fn a_tail_comes_back_and_fits_the_room_that_was_reserved() {
        for checksums in [0, 1, 1000] {
            let sent: Vec<u64> = (0..checksums as u64).map(|at| at << 50 | at).collect();
            let engine = vec![5; ENGINE_BYTES_MAX];
            let mut room = encode(TX, sent.clone(), engine.clone());
            assert!(room.len() <= bytes_max(checksums), "{} {checksums}", room.len());
            room.resize(bytes_max(checksums), 0xee);
            let tail = decode(&room, TX, checksums).expect("a tail");
            assert_eq!((tail.checksums, tail.engine), (sent, engine));
        }
    }

    #[test]
    fn what_another_node_wrote_is_not_believed_unchecked() {
        let good = encode(TX, vec![1, 2, 3], b"tail".to_vec());
        let check =
            |bytes: &[u8], tx, checksums| decode(bytes, tx, checksums).expect_err("refused");
        let other = TxId { serial: 3, ..TX };
        assert_eq!(check(&good, other, 3), TailError::OtherTx);
        assert_eq!(check(&good, TX, 4), TailError::Checksums { got: 3, want: 4 });
        for cut in 0..good.len() {
            assert!(matches!(check(&good[..cut], TX, 3), TailError::Length { .. }));
        }
        let mut long = good.clone();
        long[..4].copy_from_slice(&u32::MAX.to_le_bytes());
        assert!(matches!(check(&long, TX, 3), TailError::Length { .. }));
        let mut garbage = good;
        garbage[4..].fill(0xff);
        assert_eq!(check(&garbage, TX, 3), TailError::Malformed);
    }
}
