//! The bytes of an object, little-endian: a header that says which block it is, under a checksum of its own, then
//! the payload.
//!
//! Whatever an object store gives may be anything: decoding answers with an error and never panics.

use bytes::Bytes;
use kvasir_blocks::SsdBlock;
use kvasir_proto::SlotLayout;
use kvasir_transfer::checksum;

const MAGIC: u64 = u64::from_le_bytes(*b"KVOBJECT");
/// Of the format. What another one has written is wrong.
const VERSION: u32 = 1;
/// A header without checksums of runs.
const HEADER_BYTES: usize = 112;

/// What an object says that is not its block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Wrong {
    #[error("the object is not a Kvasir block, or its header is corrupt")]
    Header,
    #[error("the object has another format version")]
    Version,
    #[error("the block in the object does not match the object's name")]
    Other,
    #[error("the runs or the size of the object differ from the blocks of this node")]
    Shape,
    #[error("the payload of the object is corrupt")]
    Payload,
}

/// The bytes of an object with so many runs.
pub(crate) fn object_bytes(layout: &SlotLayout) -> u64 {
    (HEADER_BYTES + 8 * layout.runs_per_page()) as u64 + layout.slot_bytes()
}

/// The header of a block's object.
pub(crate) fn header(block: &SsdBlock, checksums: &[u64], payload: &[u8]) -> Bytes {
    let mut bytes = Vec::with_capacity(HEADER_BYTES + 8 * checksums.len());
    bytes.extend(MAGIC.to_le_bytes());
    // Of the header, when all else is there.
    bytes.extend(0_u64.to_le_bytes());
    bytes.extend(block.key.0);
    bytes.extend(block.namespace.0);
    bytes.extend(block.parent.map_or([0; 16], |parent| parent.0));
    bytes.extend(u64::from(block.parent.is_some()).to_le_bytes());
    bytes.extend(block.layout.to_le_bytes());
    bytes.extend((payload.len() as u64).to_le_bytes());
    bytes.extend(checksum(payload).to_le_bytes());
    bytes.extend((checksums.len() as u64).to_le_bytes());
    bytes.extend(u64::from(VERSION).to_le_bytes());
    checksums.iter().for_each(|checksum| bytes.extend(checksum.to_le_bytes()));
    let sum = checksum(&bytes[16..]).to_le_bytes();
    bytes[8..16].copy_from_slice(&sum);
    bytes.into()
}

/// The checksums and the payload of an object that is this block in this layout.
///
/// # Errors
/// [`Wrong`].
pub(crate) fn decode(
    object: &Bytes,
    block: &SsdBlock,
    layout: &SlotLayout,
) -> Result<(Vec<u64>, Bytes), Wrong> {
    let field = |at: usize| {
        let bytes = object.get(at..at + 8).and_then(|bytes| bytes.try_into().ok());
        bytes.map(u64::from_le_bytes).ok_or(Wrong::Header)
    };
    if field(0)? != MAGIC {
        return Err(Wrong::Header);
    }
    if field(104)? != u64::from(VERSION) {
        return Err(Wrong::Version);
    }
    let runs = layout.runs_per_page();
    if field(96)? != runs as u64 {
        return Err(Wrong::Shape);
    }
    let end = HEADER_BYTES + 8 * runs;
    if checksum(object.get(16..end).ok_or(Wrong::Header)?) != field(8)? {
        return Err(Wrong::Header);
    }
    let parent = block.parent.map_or([0; 16], |parent| parent.0);
    let is_it = object[16..32] == block.key.0
        && object[32..48] == block.namespace.0
        && object[48..64] == parent
        && field(64)? == u64::from(block.parent.is_some())
        && field(72)? == block.layout;
    if !is_it {
        return Err(Wrong::Other);
    }
    let payload = object.slice(end..);
    if field(80)? != layout.slot_bytes() || payload.len() as u64 != layout.slot_bytes() {
        return Err(Wrong::Shape);
    }
    let sums = (0..runs).map(|run| field(HEADER_BYTES + 8 * run));
    let checksums: Vec<u64> = sums.collect::<Result<_, _>>()?;
    if checksum(&payload) != field(88)? || checksums != self::checksums(layout, &payload) {
        return Err(Wrong::Payload);
    }
    Ok((checksums, payload))
}

/// Of the runs of a block.
pub(crate) fn checksums(layout: &SlotLayout, payload: &[u8]) -> Vec<u64> {
    let runs = (0..layout.layers()).flat_map(|layer| layout.runs(layer));
    let of_run = |run: &kvasir_proto::SlotRun| {
        let start = run.offset_bytes as usize;
        checksum(&payload[start..start + run.length_bytes as usize])
    };
    runs.map(of_run).collect()
}

#[cfg(test)]
mod tests {
    use kvasir_proto::{BlockKey, Class, Namespace, SlotRun, Tenant};
    use proptest::prelude::*;

    use super::*;

    const PAYLOAD: &[u8] = b"two runs of a block.";

    fn layout() -> SlotLayout {
        let run = |offset_bytes, length_bytes| vec![SlotRun { offset_bytes, length_bytes }];
        SlotLayout::new(4, 20, vec![run(0, 8), run(8, 10)]).expect("a layout")
    }

    fn block() -> SsdBlock {
        SsdBlock {
            key: BlockKey([1; 16]),
            namespace: Namespace([2; 16]),
            parent: Some(BlockKey([3; 16])),
            class: Class::Context { tenant: Tenant(1), expires_unix_ms: 5 },
            mark: None,
            layout: 4,
            bytes: 0,
        }
    }

    fn sums() -> Vec<u64> {
        vec![checksum(&PAYLOAD[..8]), checksum(&PAYLOAD[8..18])]
    }

    fn object() -> Vec<u8> {
        [&header(&block(), &sums(), PAYLOAD)[..], PAYLOAD].concat()
    }

    fn check(object: &[u8], block: &SsdBlock) -> Result<(Vec<u64>, Bytes), Wrong> {
        decode(&Bytes::copy_from_slice(object), block, &layout())
    }

    #[test]
    fn what_was_written_is_read() {
        assert_eq!(check(&object(), &block()), Ok((sums(), PAYLOAD.into())));
        assert_eq!(object().len() as u64, object_bytes(&layout()));
    }

    #[test]
    fn another_block_is_refused() {
        let good = block();
        for other in [
            SsdBlock { key: BlockKey([9; 16]), ..good },
            SsdBlock { namespace: Namespace([9; 16]), ..good },
            SsdBlock { parent: None, ..good },
            SsdBlock { parent: Some(BlockKey([9; 16])), ..good },
            SsdBlock { layout: 9, ..good },
        ] {
            assert_eq!(check(&object(), &other), Err(Wrong::Other), "{other:?}");
        }
        let later = SsdBlock { class: Class::Normal, ..good };
        assert!(check(&object(), &later).is_ok(), "how long it is kept is said by its name alone");
    }

    #[test]
    fn checksums_of_runs_that_the_payload_has_not_are_refused() {
        let wrong = [&header(&block(), &[1, 2], PAYLOAD)[..], PAYLOAD].concat();
        assert_eq!(check(&wrong, &block()), Err(Wrong::Payload));
        let more = [&header(&block(), &[1, 2, 3], PAYLOAD)[..], PAYLOAD].concat();
        assert_eq!(check(&more, &block()), Err(Wrong::Shape));
    }

    proptest! {
        #[test]
        fn any_byte_that_changes_is_noticed(at in 0..object().len(), flip in 1_u8..) {
            let mut object = object();
            object[at] ^= flip;
            prop_assert!(check(&object, &block()).is_err());
        }

        #[test]
        fn any_length_and_any_bytes_are_an_error(
            cut in 0..object().len(),
            bytes in prop::collection::vec(any::<u8>(), 0..300),
        ) {
            prop_assert!(check(&object()[..cut], &block()).is_err());
            prop_assert!(check(&[object(), vec![0]].concat(), &block()).is_err());
            prop_assert!(check(&bytes, &block()).is_err());
        }
    }
}
