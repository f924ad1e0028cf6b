//! What the two ends of a connection tell each other, by whatever way they have: in this project over
//! TCP. It comes from outside and is checked when it is read.

use crate::ids::{Gid, Lid, Mtu, Psn, QpNum};

/// Where a reliable queue pair is reached, and how it begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QueuePairAddress {
    pub number: QpNum,
    pub psn: Psn,
    pub gid: Gid,
    pub lid: Lid,
    /// What its port can do; the connection uses the smaller of both.
    pub mtu: Mtu,
}

/// Bytes that are no address of a queue pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum AddressError {
    #[error("an address of a queue pair has {expected} bytes, not {actual}")]
    Length { expected: usize, actual: usize },
    #[error("the queue pair number, the first packet number or the MTU is out of range")]
    OutOfRange,
}

impl QueuePairAddress {
    pub const BYTES: usize = 28;

    /// Big endian: number, first packet (4 bytes each), GID, LID (2 bytes), code of the MTU, 0.
    pub fn to_bytes(&self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        bytes[0..4].copy_from_slice(&self.number.get().to_be_bytes());
        bytes[4..8].copy_from_slice(&self.psn.get().to_be_bytes());
        bytes[8..24].copy_from_slice(&self.gid.0);
        bytes[24..26].copy_from_slice(&self.lid.0.to_be_bytes());
        bytes[26] = self.mtu.code();
        bytes
    }

    /// # Errors
    /// [`AddressError`] for what [`QueuePairAddress::to_bytes`] cannot have made.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, AddressError> {
        let bytes: &[u8; Self::BYTES] = bytes
            .try_into()
            .map_err(|_| AddressError::Length { expected: Self::BYTES, actual: bytes.len() })?;
        let word = |at: usize| {
            u32::from_be_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
        };
        let mut gid = [0; 16];
        gid.copy_from_slice(&bytes[8..24]);
        if bytes[27] != 0 {
            return Err(AddressError::OutOfRange);
        }
        Ok(QueuePairAddress {
            number: QpNum::new(word(0)).ok_or(AddressError::OutOfRange)?,
            psn: Psn::new(word(4)).ok_or(AddressError::OutOfRange)?,
            gid: Gid(gid),
            lid: Lid(u16::from_be_bytes([bytes[24], bytes[25]])),
            mtu: Mtu::from_code(bytes[26].into()).ok_or(AddressError::OutOfRange)?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address() -> QueuePairAddress {
        QueuePairAddress {
            number: QpNum::new(0x12_3456).expect("24 bits"),
            psn: Psn::new(0xab_cdef).expect("24 bits"),
            gid: "10.0.1.2".parse().expect("a GID"),
            lid: Lid(0x0708),
            mtu: Mtu::Bytes1024,
        }
    }

    #[test]
    fn an_address_comes_back_as_it_was_sent() {
        let bytes = address().to_bytes();
        assert_eq!(bytes[..8], [0, 0x12, 0x34, 0x56, 0, 0xab, 0xcd, 0xef]);
        assert_eq!(bytes[24..], [7, 8, 3, 0]);
        assert_eq!(QueuePairAddress::from_bytes(&bytes), Ok(address()));
    }

    fn check_refused(at: usize, value: u8) {
        let mut bytes = address().to_bytes();
        bytes[at] = value;
        let read = QueuePairAddress::from_bytes(&bytes);
        assert_eq!(read, Err(AddressError::OutOfRange), "byte {at} is {value}");
    }

    #[test]
    fn bytes_that_are_no_address_are_refused() {
        check_refused(0, 1);
        check_refused(4, 0xff);
        check_refused(26, 0);
        check_refused(26, 6);
        check_refused(27, 1);
        for actual in [0, 27, 29] {
            let error = AddressError::Length { expected: 28, actual };
            assert_eq!(QueuePairAddress::from_bytes(&vec![0; actual]), Err(error));
        }
    }
}
