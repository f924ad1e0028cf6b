//! A digest of a set of blocks that does not depend on the order in which they came: their number
//! and the sum of their keys, which are hashes. Who holds a set and who was told of it compare the
//! two now and then; they differ when an event was lost or applied twice.

use crate::ids::{BlockKey, FieldError};
use crate::v1;

/// See the module. Not proof against keys that were chosen to deceive it: it guards against
/// mistakes, and what it guards is a hint.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct BlockSetDigest {
    pub blocks: u64,
    /// Of the keys as little-endian numbers, modulo 2^128.
    pub key_sum: u128,
}

/// What a node has, each block in the fastest tier in which it can be had.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct TierDigests {
    pub vram: BlockSetDigest,
    pub dram: BlockSetDigest,
    pub ssd: BlockSetDigest,
}

impl BlockSetDigest {
    /// A block that is not in the set comes to it.
    pub fn add(&mut self, key: &BlockKey) {
        *self = self.with(BlockSetDigest::of(key));
    }

    /// A block that is in the set leaves it.
    pub fn remove(&mut self, key: &BlockKey) {
        *self = self.without(BlockSetDigest::of(key));
    }

    /// Of this set and another one, which have no block in common.
    #[must_use]
    pub fn with(self, other: BlockSetDigest) -> Self {
        BlockSetDigest {
            blocks: self.blocks.wrapping_add(other.blocks),
            key_sum: self.key_sum.wrapping_add(other.key_sum),
        }
    }

    /// Of what is left of this set when a part of it is taken out.
    #[must_use]
    pub fn without(self, part: BlockSetDigest) -> Self {
        BlockSetDigest {
            blocks: self.blocks.wrapping_sub(part.blocks),
            key_sum: self.key_sum.wrapping_sub(part.key_sum),
        }
    }

    fn of(key: &BlockKey) -> Self {
        BlockSetDigest { blocks: 1, key_sum: u128::from_le_bytes(key.0) }
    }

    fn to_wire(self) -> v1::BlockSetDigest {
        let BlockSetDigest { blocks, key_sum } = self;
        v1::BlockSetDigest { blocks, key_sum: key_sum.to_le_bytes().to_vec() }
    }

    /// An absent one is that of the empty set.
    fn from_wire(wire: Option<&v1::BlockSetDigest>) -> Result<Self, FieldError> {
        let Some(v1::BlockSetDigest { blocks, key_sum }) = wire else { return Ok(Self::default()) };
        let bytes = key_sum.as_slice().try_into();
        let bytes = bytes.map_err(|_| FieldError::Length {
            field: "key_sum",
            got: key_sum.len(),
            want: "16",
        })?;
        Ok(BlockSetDigest { blocks: *blocks, key_sum: u128::from_le_bytes(bytes) })
    }
}

impl<'a> FromIterator<&'a BlockKey> for BlockSetDigest {
    /// Of keys that are all different, as those of a snapshot.
    fn from_iter<T: IntoIterator<Item = &'a BlockKey>>(keys: T) -> Self {
        let mut digest = BlockSetDigest::default();
        keys.into_iter().for_each(|key| digest.add(key));
        digest
    }
}

impl TierDigests {
    pub fn to_wire(self) -> v1::TierDigests {
        let TierDigests { vram, dram, ssd } = self;
        let [vram, dram, ssd] = [vram, dram, ssd].map(|of| Some(of.to_wire()));
        v1::TierDigests { vram, dram, ssd }
    }

    /// # Errors
    /// A sum that is not 16 bytes long.
    pub fn from_wire(wire: &v1::TierDigests) -> Result<Self, FieldError> {
        Ok(TierDigests {
            vram: BlockSetDigest::from_wire(wire.vram.as_ref())?,
            dram: BlockSetDigest::from_wire(wire.dram.as_ref())?,
            ssd: BlockSetDigest::from_wire(wire.ssd.as_ref())?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(byte: u8) -> BlockKey {
        BlockKey([byte; 16])
    }

    #[test]
    fn it_is_that_of_the_set_however_the_set_came_about() {
        let keys = [key(1), key(0xff), key(0xfe), key(9)];
        let all: BlockSetDigest = keys.iter().collect();
        assert_eq!(all, keys.iter().rev().collect());
        assert_eq!(all.blocks, 4);
        let mut other = BlockSetDigest::default();
        for key in [&keys[3], &keys[0], &key(7), &keys[2]] {
            other.add(key);
        }
        assert_ne!(other, all, "as many, and one is another");
        other.remove(&key(7));
        other.add(&keys[1]);
        assert_eq!(other, all);
        let (some, rest) = (keys[..2].iter().collect(), keys[2..].iter().collect());
        assert_eq!(BlockSetDigest::with(some, rest), all);
        assert_eq!(all.without(some), rest);
    }

    #[test]
    fn one_that_is_sent_arrives() {
        let (vram, ssd) = ([key(1)].iter().collect(), [key(0xff), key(2)].iter().collect());
        let digests = TierDigests { vram, dram: BlockSetDigest::default(), ssd };
        assert_eq!(TierDigests::from_wire(&digests.to_wire()), Ok(digests));
        assert_eq!(TierDigests::from_wire(&v1::TierDigests::default()), Ok(TierDigests::default()));
        let short = v1::BlockSetDigest { blocks: 1, key_sum: vec![0; 15] };
        let wire = v1::TierDigests { ssd: Some(short), ..v1::TierDigests::default() };
        let refused = FieldError::Length { field: "key_sum", got: 15, want: "16" };
        assert_eq!(TierDigests::from_wire(&wire), Err(refused));
    }
}
