//! The tail: what follows the pages of a push. A message of checksums and engine bytes, preceded by
//! its length. What arrives was written by another node and is checked before anything in it is
//! believed.

use kvasir_proto::{Side, TxId, v1};
use prost::Message;

/// What the engine may add to the tail.
pub const ENGINE_BYTES_MAX: usize = 8 << 10;

/// Length, tags, transaction id and lengths of both fields, rounded up.
const FRAME_BYTES: usize = 64;

/// Room for the longest tail of this many pages. Only a push to a decode side has an engine's
/// part.
pub fn bytes_max(pages: usize, side: Side) -> usize {
    let engine_bytes = if side == Side::Decode { ENGINE_BYTES_MAX } else { 0 };
    FRAME_BYTES + 8 * pages + engine_bytes
}

/// The bytes that are written into the target's tail region.
pub fn encode(tx: TxId, checksums: Vec<u64>, engine: Vec<u8>, whole_blocks_only: bool) -> Vec<u8> {
    let tail = v1::Tail { tx: Some(tx.into()), checksums, engine, whole_blocks_only };
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
    #[error("the length {length} exceeds the reserved {room} bytes")]
    Length { length: usize, room: usize },
    #[error("the bytes are not a tail message")]
    Malformed,
    #[error("the tail belongs to another transaction")]
    OtherTx,
    #[error("the tail has {got} checksums for {want} sent pages")]
    Checksums { got: usize, want: usize },
    #[error("the tail was sent before its pages arrived, and they did not arrive")]
    OnlyWhole,
}

/// Reads the tail of `tx`, which follows so many pages, from its room in the tail region.
///
/// # Errors
/// [`TailError`] says what does not fit.
pub fn decode(room: &[u8], tx: TxId, pages: usize) -> Result<v1::Tail, TailError> {
    let tail = read(room, tx)?;
    match tail.checksums.len() {
        got if got == pages => Ok(tail),
        got => Err(TailError::Checksums { got, want: pages }),
    }
}

/// Reads the checksums of the leading pages that a source knows to have landed.
///
/// # Errors
/// [`TailError`] says what does not fit.
pub fn decode_part(room: &[u8], tx: TxId) -> Result<Vec<u64>, TailError> {
    let v1::Tail { checksums, whole_blocks_only, .. } = read(room, tx)?;
    if whole_blocks_only {
        return Err(TailError::OnlyWhole);
    }
    Ok(checksums)
}

/// No length: what lies in room that was given out and not yet written.
pub const NO_TAIL: [u8; 4] = [0; 4];

fn read(room: &[u8], tx: TxId) -> Result<v1::Tail, TailError> {
    let malformed = || TailError::Length { length: 0, room: room.len() };
    let (length, rest) = room.split_first_chunk::<4>().ok_or_else(malformed)?;
    let length = u32::from_le_bytes(*length) as usize;
    let bytes = rest.get(..length).ok_or(TailError::Length { length, room: room.len() })?;
    let tail = v1::Tail::decode(bytes).map_err(|_| TailError::Malformed)?;
    if tail.tx != Some(tx.into()) {
        return Err(TailError::OtherTx);
    }
    Ok(tail)
}

#[cfg(test)]
mod tests {
    use super::*;

    const TX: TxId = TxId { conductor_incarnation: 1, serial: 2 };

    #[test]
    fn a_tail_comes_back_and_fits_the_room_that_was_reserved() {
        for (checksums, side) in [
            (0, Side::Decode),
            (1, Side::Decode),
            (1000, Side::Decode),
            (0, Side::Prefill),
            (1000, Side::Prefill),
        ] {
            let sent: Vec<u64> = (0..checksums as u64).map(|at| at << 50 | at).collect();
            let engine = vec![5; if side == Side::Decode { ENGINE_BYTES_MAX } else { 0 }];
            let mut room = encode(TX, sent.clone(), engine.clone(), true);
            let bytes_max = bytes_max(checksums, side);
            assert!(room.len() <= bytes_max, "{} {checksums}", room.len());
            room.resize(bytes_max, 0xee);
            let tail = decode(&room, TX, checksums).expect("a tail");
            assert_eq!((tail.checksums, tail.engine), (sent, engine));
        }
    }

    #[test]
    fn what_another_node_wrote_is_not_believed_unchecked() {
        let good = encode(TX, vec![1, 2, 3], b"tail".to_vec(), false);
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
        assert_eq!(check(&NO_TAIL, TX, 3), TailError::OtherTx);
    }

    #[test]
    fn a_part_counts_when_its_pages_had_landed() {
        let part = |checksums: Vec<u64>| decode_part(&encode(TX, checksums, Vec::new(), false), TX);
        assert_eq!(part(vec![4, 5]), Ok(vec![4, 5]));
        assert_eq!(part(Vec::new()), Ok(Vec::new()));
        assert_eq!(decode_part(&NO_TAIL, TX), Err(TailError::OtherTx));
        let early = encode(TX, vec![0, 1], Vec::new(), true);
        assert_eq!(decode_part(&early, TX), Err(TailError::OnlyWhole));
        assert!(decode(&early, TX, 2).is_ok(), "all has come");
    }
}
