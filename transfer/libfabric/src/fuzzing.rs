//! What must hold of what peers say in a handshake: no panic, nothing that a provider would read beyond
//! its end, no place outside of what was described. Compiled only for the tests below and for the
//! fuzzer in `transfer/fuzz`.

use crate::address::{NAME_BYTES_MAX, padded_name};
use crate::bindings::{FI_ADDR_EFA, FI_ADDR_STR, FI_SOCKADDR, FI_SOCKADDR_IN, FI_SOCKADDR_IN6};
use crate::region::RemoteRegion;

const FORMATS: [u32; 5] = [FI_SOCKADDR, FI_SOCKADDR_IN, FI_SOCKADDR_IN6, FI_ADDR_EFA, FI_ADDR_STR];

/// The name of a peer's endpoint, in every format that a provider may have.
pub fn name(bytes: &[u8]) {
    for format in FORMATS {
        let Some(padded) = padded_name(bytes, format) else { continue };
        assert_eq!(padded.len(), NAME_BYTES_MAX + 1);
        assert_eq!(padded.last(), Some(&0));
        let read = padded.iter().zip(bytes).take_while(|(read, byte)| read == byte).count();
        assert!(read == bytes.len() || (format == FI_ADDR_STR && bytes[..read].ends_with(&[0])));
    }
}

/// A peer's region, and a place in it: offset and length stand behind it.
pub fn region(bytes: &[u8]) {
    let Some((described, rest)) = bytes.split_first_chunk() else { return };
    let region = RemoteRegion::from_bytes(*described);
    assert_eq!(region.to_bytes(), *described);
    let Some(place) = rest.first_chunk::<16>() else { return };
    let [offset, length] = [0, 1].map(|word| u64::from_le_bytes(place.as_chunks().0[word]));
    let Ok(place) = region.at(offset, length) else { return };
    assert_eq!((place.address, place.key), (region.base + offset, region.key));
    let (end, region_end) = (u128::from(offset) + u128::from(length), u128::from(region.bytes));
    assert!(end <= region_end, "it ends in the region");
    assert!(u128::from(region.base) + end <= u128::from(u64::MAX), "it does not wrap around");
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use proptest::sample::Index;

    use super::*;

    fn described() -> impl Strategy<Value = Vec<u8>> {
        let word = || {
            prop_oneof![0..5000u64, (u64::MAX - 5000)..=u64::MAX, any::<u64>()]
                .prop_map(u64::to_le_bytes)
        };
        [word(), word(), word(), word(), word()].prop_map(|words| words.as_flattened().to_vec())
    }

    proptest! {
        #[test]
        fn parsers_bear_arbitrary_bytes(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            name(&bytes);
            region(&bytes);
        }

        #[test]
        fn parsers_bear_valid_bytes_that_were_changed(
            which in 0..4usize,
            at: Index,
            byte: u8,
            described in described(),
        ) {
            let names = [vec![2; 16], vec![10; 28], vec![7; 32], b"fi_shm://1:2\0".to_vec()];
            let mut changed = names[which].clone();
            changed[1] = if which < 2 { 0 } else { changed[1] };
            name(&changed);
            let at = at.index(changed.len());
            changed[at] = byte;
            name(&changed);
            name(&changed[..at]);
            region(&described);
        }
    }
}
