//! A digest of a set of blocks that does not depend on the order in which they came: their number
//! and the sum of their keys, which are hashes. Who holds a set and who was told of it compare the
//! two now and then; they differ when an event was lost or applied twice.

use kvasir_proto::BlockKey;

/// See the module. Not proof against keys that were chosen to deceive it: it guards against
/// mistakes, and what it guards is a hint.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct BlockSetDigest {
    pub blocks: u64,
    /// Of the keys as little-endian numbers, modulo 2^128.
    pub key_sum: u128,
}

impl BlockSetDigest {
    pub(super) fn add(&mut self, blocks: usize, key_sum: u128) {
        self.blocks += blocks as u64;
        self.key_sum = self.key_sum.wrapping_add(key_sum);
    }

    pub(super) fn subtract(&mut self, blocks: usize, key_sum: u128) {
        self.blocks -= blocks as u64;
        self.key_sum = self.key_sum.wrapping_sub(key_sum);
    }
}

impl<'a> FromIterator<&'a BlockKey> for BlockSetDigest {
    /// Of keys that are all different, as those of a snapshot.
    fn from_iter<T: IntoIterator<Item = &'a BlockKey>>(keys: T) -> Self {
        let mut digest = BlockSetDigest::default();
        keys.into_iter().for_each(|key| digest.add(1, u128::from_le_bytes(key.0)));
        digest
    }
}
