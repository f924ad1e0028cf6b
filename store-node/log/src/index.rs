//! Where each key's extent lies. Behind a trait, because it may be kept in a database, and never
//! the truth: whatever it says is checked against the extent, and it is filled from the log.

use std::collections::BTreeMap;

use kvasir_proto::BlockKey;

/// The place of an extent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Location {
    pub segment: u32,
    /// From the start of the segment.
    pub first_page: u32,
    pub pages: u32,
    /// Which of the log's appends it was. Copies of an extent have the same one, so that none is ever taken for newer
    /// than what was appended after it.
    pub generation: u64,
}

/// The index cannot be used any more: throw it away and fill another from the log.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the key index failed: {0}")]
pub struct IndexError(pub String);

/// One location for each key.
pub trait KeyIndex: std::fmt::Debug + Send {
    /// # Errors
    /// [`IndexError`], as in all that follow.
    fn get(&self, key: BlockKey) -> Result<Option<Location>, IndexError>;

    /// Answers with the former location.
    ///
    /// # Errors
    /// [`IndexError`].
    fn insert(&mut self, key: BlockKey, at: Location) -> Result<Option<Location>, IndexError>;

    /// Answers with the former location.
    ///
    /// # Errors
    /// [`IndexError`].
    fn remove(&mut self, key: BlockKey) -> Result<Option<Location>, IndexError>;

    /// Everything that is said to lie in a segment. May be slow.
    ///
    /// # Errors
    /// [`IndexError`].
    fn in_segment(&self, segment: u32) -> Result<Vec<(BlockKey, Location)>, IndexError>;

    /// From now on it holds exactly this, whatever it held.
    ///
    /// # Errors
    /// [`IndexError`].
    fn load(&mut self, all: &BTreeMap<BlockKey, Location>) -> Result<(), IndexError>;
}

/// In memory: about 60 bytes for each key.
#[derive(Debug, Default)]
pub struct MemoryIndex {
    all: BTreeMap<BlockKey, Location>,
}

impl KeyIndex for MemoryIndex {
    fn get(&self, key: BlockKey) -> Result<Option<Location>, IndexError> {
        Ok(self.all.get(&key).copied())
    }

    fn insert(&mut self, key: BlockKey, at: Location) -> Result<Option<Location>, IndexError> {
        Ok(self.all.insert(key, at))
    }

    fn remove(&mut self, key: BlockKey) -> Result<Option<Location>, IndexError> {
        Ok(self.all.remove(&key))
    }

    fn in_segment(&self, segment: u32) -> Result<Vec<(BlockKey, Location)>, IndexError> {
        let here = |(_, at): &(&BlockKey, &Location)| at.segment == segment;
        Ok(self.all.iter().filter(here).map(|(key, at)| (*key, *at)).collect())
    }

    fn load(&mut self, all: &BTreeMap<BlockKey, Location>) -> Result<(), IndexError> {
        self.all.clone_from(all);
        Ok(())
    }
}
