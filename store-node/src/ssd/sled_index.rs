//! The key index in sled: it survives a restart, so that a start only has to compare it with the
//! log instead of writing it anew. It is never believed: an index that cannot be opened, fails or
//! panics is deleted, and one that is wrong costs a miss.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

use kvasir_log::{IndexError, KeyIndex, Location};
use kvasir_proto::BlockKey;

/// Of memory that sled may use for its pages.
const CACHE_BYTES: u64 = 64 << 20;
const VALUE_BYTES: usize = 20;
/// Changes written together.
const BATCH: usize = 4_096;

/// See the module.
#[derive(Debug)]
pub(crate) struct SledIndex {
    tree: sled::Db,
}

impl SledIndex {
    /// Opens or makes the index in a folder of its own; one that cannot be opened is made anew.
    ///
    /// # Errors
    /// When a fresh one cannot be made either.
    pub(crate) fn open(dir: &Path) -> Result<Self, IndexError> {
        match try_open(dir) {
            Ok(index) => Ok(index),
            Err(error) => {
                tracing::warn!(
                    %error, dir = %dir.display(),
                    "the store node cannot open the key index of the SSD; creating a new one"
                );
                std::fs::remove_dir_all(dir).map_err(|error| IndexError(error.to_string()))?;
                try_open(dir)
            }
        }
    }
}

/// In a thread of its own: what sled finds in its files after a crash has made it panic.
fn try_open(dir: &Path) -> Result<SledIndex, IndexError> {
    let config = sled::Config::new().path(dir).cache_capacity(CACHE_BYTES);
    let opened = std::thread::spawn(move || config.open()).join();
    let opened = opened.map_err(|_| IndexError("sled panicked when it opened the index".into()))?;
    Ok(SledIndex { tree: opened.map_err(failed)? })
}

fn failed(error: sled::Error) -> IndexError {
    IndexError(error.to_string())
}

fn encode(at: Location) -> [u8; VALUE_BYTES] {
    let mut value = [0; VALUE_BYTES];
    value[..4].copy_from_slice(&at.segment.to_le_bytes());
    value[4..8].copy_from_slice(&at.first_page.to_le_bytes());
    value[8..12].copy_from_slice(&at.pages.to_le_bytes());
    value[12..].copy_from_slice(&at.generation.to_le_bytes());
    value
}

fn decode(value: &[u8]) -> Result<Location, IndexError> {
    let word = |at: usize| -> Option<u32> {
        Some(u32::from_le_bytes(*value.get(at..at + 4)?.first_chunk()?))
    };
    let generation = || Some(u64::from_le_bytes(*value.get(12..VALUE_BYTES)?.first_chunk()?));
    let location = || {
        Some(Location {
            segment: word(0)?,
            first_page: word(4)?,
            pages: word(8)?,
            generation: generation()?,
        })
    };
    location().ok_or_else(|| IndexError("a value is too short".into()))
}

fn key_of(key: &[u8]) -> Result<BlockKey, IndexError> {
    key.try_into().map(BlockKey).map_err(|_| IndexError("a key does not have 16 bytes".into()))
}

/// One call of sled. What it finds in its files may make it panic; the index is thrown away then as when it fails.
fn guarded<T>(call: impl FnOnce() -> Result<T, IndexError>) -> Result<T, IndexError> {
    catch_unwind(AssertUnwindSafe(call)).unwrap_or_else(|_| Err(IndexError("sled panicked".into())))
}

impl KeyIndex for SledIndex {
    fn get(&self, key: BlockKey) -> Result<Option<Location>, IndexError> {
        let value = guarded(|| self.tree.get(key.0).map_err(failed))?;
        value.map(|value| decode(&value)).transpose()
    }

    fn insert(&mut self, key: BlockKey, at: Location) -> Result<Option<Location>, IndexError> {
        let former = guarded(|| self.tree.insert(key.0, &encode(at)).map_err(failed))?;
        former.map(|value| decode(&value)).transpose()
    }

    fn remove(&mut self, key: BlockKey) -> Result<Option<Location>, IndexError> {
        let former = guarded(|| self.tree.remove(key.0).map_err(failed))?;
        former.map(|value| decode(&value)).transpose()
    }

    fn in_segment(&self, segment: u32) -> Result<Vec<(BlockKey, Location)>, IndexError> {
        guarded(|| self.list_segment(segment))
    }

    fn load(&mut self, all: &BTreeMap<BlockKey, Location>) -> Result<(), IndexError> {
        guarded(|| self.write_differences(all))
    }
}

impl SledIndex {
    fn list_segment(&self, segment: u32) -> Result<Vec<(BlockKey, Location)>, IndexError> {
        let mut found = Vec::new();
        for item in self.tree.iter() {
            let (key, value) = item.map_err(failed)?;
            let at = decode(&value)?;
            if at.segment == segment {
                found.push((key_of(&key)?, at));
            }
        }
        Ok(found)
    }

    /// To what is there.
    fn write_differences(&self, all: &BTreeMap<BlockKey, Location>) -> Result<(), IndexError> {
        let mut lacking = all.clone();
        let (mut batch, mut changes) = (sled::Batch::default(), 0);
        for item in self.tree.iter() {
            let (key, value) = item.map_err(failed)?;
            let known = key_of(&key).and_then(|key| Ok((key, decode(&value)?)));
            match known {
                Ok((key, at)) if lacking.get(&key) == Some(&at) => drop(lacking.remove(&key)),
                _ => {
                    batch.remove(key);
                    changes += 1;
                }
            }
            if changes >= BATCH {
                self.tree.apply_batch(std::mem::take(&mut batch)).map_err(failed)?;
                changes = 0;
            }
        }
        // After the removals: a key that lay elsewhere is among both.
        self.tree.apply_batch(batch).map_err(failed)?;
        let lacking: Vec<_> = lacking.into_iter().collect();
        for some in lacking.chunks(BATCH) {
            let mut batch = sled::Batch::default();
            some.iter().for_each(|(key, at)| batch.insert(&key.0, &encode(*at)));
            self.tree.apply_batch(batch).map_err(failed)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(n: u32) -> Location {
        Location { segment: n % 3, first_page: n, pages: 2, generation: u64::from(n) + 5 }
    }

    fn key(n: u32) -> BlockKey {
        BlockKey(u128::from(n).to_be_bytes())
    }

    fn all(numbers: std::ops::Range<u32>) -> BTreeMap<BlockKey, Location> {
        numbers.map(|n| (key(n), at(n))).collect()
    }

    #[test]
    fn it_holds_exactly_what_was_loaded_whatever_it_held() {
        let dir = tempfile::tempdir().expect("a folder");
        let mut index = SledIndex::open(dir.path()).expect("an index");
        index.load(&all(0..9)).expect("loaded");
        index.insert(key(3), at(77)).expect("inserted");
        index.load(&all(2..12)).expect("loaded");
        for n in 0..14 {
            let want = (2..12).contains(&n).then(|| at(n));
            assert_eq!(index.get(key(n)), Ok(want), "{n}");
        }
        assert_eq!(index.insert(key(20), at(20)), Ok(None));
        assert_eq!(index.insert(key(20), at(21)), Ok(Some(at(20))));
        assert_eq!(index.remove(key(20)), Ok(Some(at(21))));
        assert_eq!(index.remove(key(20)), Ok(None));
        let mut keys: Vec<_> = index.in_segment(1).expect("listed").into_iter().collect();
        keys.sort_by_key(|(key, _)| *key);
        assert_eq!(keys, [4, 7, 10].map(|n| (key(n), at(n))));
    }

    #[test]
    fn one_that_panics_has_failed() {
        let failed: Result<(), IndexError> = guarded(|| panic!("a page that is none"));
        assert_eq!(failed, Err(IndexError("sled panicked".into())));
    }

    #[test]
    fn one_that_cannot_be_opened_is_made_anew() {
        let dir = tempfile::tempdir().expect("a folder");
        let mut index = SledIndex::open(dir.path()).expect("an index");
        index.load(&all(0..9)).expect("loaded");
        drop(index);
        for file in std::fs::read_dir(dir.path()).expect("listed").flatten() {
            if file.file_type().is_ok_and(|kind| kind.is_file()) {
                std::fs::write(file.path(), b"nothing that sled could read").expect("written");
            }
        }
        let index = SledIndex::open(dir.path()).expect("an index");
        assert_eq!(index.get(key(1)), Ok(None));
    }
}
