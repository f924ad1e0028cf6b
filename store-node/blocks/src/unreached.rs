//! What stays on an SSD of which a part could not be read, though what it follows is not there: blocks that are kept
//! for a tenant. They are not found, and their room is nobody else's, until the SSD is looked at anew or their time is
//! over.

use std::collections::{BTreeMap, BTreeSet};

use kvasir_proto::{BlockKey, Mark};

use crate::ssd::SsdBlock;

#[derive(Debug, Default)]
pub(crate) struct Unreached {
    blocks: BTreeMap<BlockKey, SsdBlock>,
    bytes: u64,
    /// Until then all of them stay.
    until_unix_ms: u64,
}

impl Unreached {
    /// Of blocks whose chains are not whole those that are kept. Answers with the others.
    pub(crate) fn new(orphans: Vec<SsdBlock>, unix_ms: u64) -> (Self, Vec<SsdBlock>) {
        let mut all = Unreached {
            bytes: orphans.iter().map(|block| block.bytes).sum(),
            blocks: orphans.into_iter().map(|block| (block.key, block)).collect(),
            until_unix_ms: 0,
        };
        let others = all.expire(unix_ms);
        (all, others)
    }

    /// Those that are kept for nobody any more.
    pub(crate) fn expire(&mut self, unix_ms: u64) -> Vec<SsdBlock> {
        if unix_ms < self.until_unix_ms {
            return Vec::new();
        }
        let mut kept: BTreeSet<BlockKey> = BTreeSet::new();
        self.until_unix_ms = u64::MAX;
        for last in self.blocks.values() {
            let Some(mark) = last.mark.filter(|mark| mark.until_unix_ms > unix_ms) else {
                continue;
            };
            self.until_unix_ms = self.until_unix_ms.min(mark.until_unix_ms);
            let mut next = Some(last);
            while let Some(block) = next.filter(|block| kept.insert(block.key)) {
                next = block.parent.and_then(|parent| self.blocks.get(&parent));
            }
        }
        let others = self.blocks.keys().filter(|key| !kept.contains(key)).copied();
        let others: Vec<BlockKey> = others.collect();
        others.into_iter().filter_map(|key| self.remove(key)).collect()
    }

    /// It has been written anew, or is lost.
    pub(crate) fn remove(&mut self, key: BlockKey) -> Option<SsdBlock> {
        let block = self.blocks.remove(&key)?;
        self.bytes -= block.bytes;
        Some(block)
    }

    pub(crate) fn get(&self, key: BlockKey) -> Option<&SsdBlock> {
        self.blocks.get(&key)
    }

    pub(crate) fn mark(&self, key: BlockKey) -> Option<Mark> {
        self.blocks.get(&key).and_then(|block| block.mark)
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    pub(crate) fn len(&self) -> usize {
        self.blocks.len()
    }
}
