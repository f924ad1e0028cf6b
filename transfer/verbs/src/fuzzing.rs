//! What must hold of the parsers whose bytes come from peers and operators: no panic, and what is
//! accepted has one form. Compiled only for the tests below and for the fuzzer in `transfer/fuzz`.

use crate::{Gid, QueuePairAddress};

/// The address of a peer's queue pair.
pub fn address(bytes: &[u8]) {
    let Ok(address) = QueuePairAddress::from_bytes(bytes) else { return };
    assert_eq!(address.to_bytes(), bytes);
    assert!(address.number.get() < 1 << 24 && address.psn.get() < 1 << 24);
}

/// A GID as text.
pub fn gid(bytes: &[u8]) {
    let Some(gid) = std::str::from_utf8(bytes).ok().and_then(|text| text.parse::<Gid>().ok())
    else {
        return;
    };
    assert_eq!(gid.to_string().parse(), Ok(gid));
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use proptest::sample::Index;

    use super::*;
    use crate::{Lid, Mtu, Psn, QpNum};

    fn valid() -> Vec<u8> {
        let (number, psn) = (QpNum::new(0xff_ffff), Psn::new(0x12_3456));
        let (number, psn) = (number.expect("24 bits"), psn.expect("24 bits"));
        let (gid, lid, mtu) = (Gid([7; 16]), Lid(8), Mtu::Bytes4096);
        QueuePairAddress { number, psn, gid, lid, mtu }.to_bytes().to_vec()
    }

    proptest! {
        #[test]
        fn parsers_bear_arbitrary_bytes(bytes in proptest::collection::vec(any::<u8>(), 0..64)) {
            address(&bytes);
            gid(&bytes);
        }

        #[test]
        fn parsers_bear_valid_bytes_that_were_changed(
            at: Index,
            byte: u8,
            text in "[0-9a-f:.]{0,40}",
        ) {
            let mut bytes = valid();
            bytes[at.index(QueuePairAddress::BYTES)] = byte;
            address(&bytes);
            bytes.truncate(at.index(QueuePairAddress::BYTES));
            address(&bytes);
            gid(text.as_bytes());
        }
    }
}
