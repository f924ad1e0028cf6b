//! What stays on an SSD of which a part could not be read, though what it follows is not there: blocks that are kept
//! for a tenant. They are not found, and their room is nobody else's, until what they follow is written anew, the SSD
//! is looked at anew, or their time is over.

use std::collections::{BTreeMap, BTreeSet};

use kvasir_proto::{BlockKey, Class, Mark, Tenant};

use crate::ends::class_of;
use crate::ssd::SsdBlock;

#[derive(Debug, Default)]
pub(crate) struct Unreached {
    /// Each with the class that it has where it can be found.
    blocks: BTreeMap<BlockKey, SsdBlock>,
    /// Those that follow a block.
    after: BTreeMap<BlockKey, BTreeSet<BlockKey>>,
    bytes: u64,
    /// Until then all of them stay.
    until_unix_ms: u64,
}

fn until(mark: Option<Mark>) -> u64 {
    mark.map_or(0, |mark| mark.until_unix_ms)
}

impl Unreached {
    /// Of blocks whose chains are not whole those that are kept. Answers with the others.
    pub(crate) fn new(orphans: Vec<SsdBlock>, unix_ms: u64) -> (Self, Vec<SsdBlock>) {
        let mut all = Unreached::default();
        orphans.into_iter().for_each(|block| all.put(block));
        let others = all.expire(unix_ms);
        (all, others)
    }

    /// Its extent is there, and what it follows is not.
    pub(crate) fn put(&mut self, block: SsdBlock) {
        self.remove(block.key);
        self.bytes += block.bytes;
        self.blocks.insert(block.key, block);
        if let Some(parent) = block.parent {
            self.after.entry(parent).or_default().insert(block.key);
        }
        // What is before it may be kept for another time now.
        self.until_unix_ms = 0;
    }

    /// Those that are kept for nobody any more.
    pub(crate) fn expire(&mut self, unix_ms: u64) -> Vec<SsdBlock> {
        if unix_ms < self.until_unix_ms {
            return Vec::new();
        }
        let mut marked: Vec<SsdBlock> =
            self.blocks.values().filter(|block| until(block.mark) > unix_ms).copied().collect();
        // What is before several is kept for as long as the longest of them.
        marked.sort_by_key(|block| std::cmp::Reverse(until(block.mark)));
        self.until_unix_ms = marked.last().map_or(u64::MAX, |block| until(block.mark));
        let mut kept: BTreeSet<BlockKey> = BTreeSet::new();
        for last in marked {
            let Some(mark) = last.mark else { continue };
            let mut next = Some(last.key);
            while let Some(key) = next
                && let Some(block) = self.blocks.get_mut(&key)
                && kept.insert(key)
            {
                block.class = class_of(&mark);
                next = block.parent;
            }
        }
        let others = self.blocks.keys().filter(|key| !kept.contains(key)).copied();
        let others: Vec<BlockKey> = others.collect();
        others.into_iter().filter_map(|key| self.remove(key)).collect()
    }

    /// It can be found from now on, or is lost.
    pub(crate) fn remove(&mut self, key: BlockKey) -> Option<SsdBlock> {
        let block = self.blocks.remove(&key)?;
        self.bytes -= block.bytes;
        if let Some(parent) = block.parent
            && let Some(after) = self.after.get_mut(&parent)
        {
            after.remove(&key);
            if after.is_empty() {
                self.after.remove(&parent);
            }
        }
        Some(block)
    }

    /// Takes out those that follow a block.
    pub(crate) fn take_after(&mut self, parent: BlockKey) -> Vec<SsdBlock> {
        let after = self.after.get(&parent).cloned().unwrap_or_default();
        after.into_iter().filter_map(|key| self.remove(key)).collect()
    }

    pub(crate) fn get(&self, key: BlockKey) -> Option<SsdBlock> {
        self.blocks.get(&key).copied()
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Of a tenant, or of all. Looks at all of them.
    pub(crate) fn bytes_for(&self, of: Option<Tenant>) -> u64 {
        let is_its = |block: &&SsdBlock| match block.class {
            Class::Context { tenant, .. } => of.is_none_or(|of| of == tenant),
            Class::Normal => false,
        };
        self.blocks.values().filter(is_its).map(|block| block.bytes).sum()
    }

    pub(crate) fn keys(&self) -> impl Iterator<Item = BlockKey> + '_ {
        self.blocks.keys().copied()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.blocks.is_empty()
    }
}
