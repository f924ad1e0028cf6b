//! What stays on an SSD of which a part could not be read, though what it follows is not there: blocks that are kept
//! for a tenant. They are not found, and their room is nobody else's, until what they follow is written anew, the SSD
//! is looked at anew, or their time is over.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::hash::BuildHasherDefault;

use kvasir_proto::{BlockKey, Class, Mark, Tenant};

use crate::ends::class_of;
use crate::index::KeyHasher;
use crate::ssd::SsdBlock;

/// After a look at all of them it is not looked again for a millisecond for each so many: a look takes 0.5 to 0.8 us a
/// block, and so a twelfth of the time at most.
const BLOCKS_A_MS: usize = 100;

#[derive(Debug, Default)]
pub(crate) struct Unreached {
    /// Each with the class that it has where it can be found.
    blocks: BTreeMap<BlockKey, SsdBlock>,
    /// Those that follow a block.
    after: BTreeMap<BlockKey, BTreeSet<BlockKey>>,
    bytes: u64,
    /// Of each tenant, by the blocks' classes.
    tenants: BTreeMap<Tenant, u64>,
    /// Until then all of them stay.
    expires_unix_ms: u64,
    /// When it was looked at all of them last.
    looked_unix_ms: Option<u64>,
}

impl Unreached {
    /// Of blocks whose chains are not whole those that are kept. Answers with the others.
    pub(crate) fn new(mut orphans: Vec<SsdBlock>, unix_ms: u64) -> (Self, Vec<SsdBlock>) {
        let mut all = Unreached::default();
        let is_kept = all.see(&mut orphans, unix_ms);
        let (kept, others): (Vec<_>, Vec<_>) =
            orphans.into_iter().zip(is_kept).partition(|(_, is_kept)| *is_kept);
        kept.into_iter().for_each(|(block, _)| all.insert(block));
        (all, others.into_iter().map(|(block, _)| block).collect())
    }

    /// Its extent is there, and what it follows is not.
    pub(crate) fn put(&mut self, block: SsdBlock) {
        let known = self.remove(block.key).map_or(Class::Normal, |known| known.class);
        let class = block.mark.as_ref().map_or(known, class_of);
        self.insert(SsdBlock { class, ..block });
        // What is before it may be kept for another time now.
        self.expires_unix_ms = 0;
    }

    fn insert(&mut self, block: SsdBlock) {
        self.bytes += block.bytes;
        if let Class::Context { tenant, .. } = block.class {
            *self.tenants.entry(tenant).or_default() += block.bytes;
        }
        self.blocks.insert(block.key, block);
        if let Some(parent) = block.parent {
            self.after.entry(parent).or_default().insert(block.key);
        }
    }

    /// Those that are kept for nobody any more. It is not looked so often that it takes much of anybody's time.
    pub(crate) fn expire(&mut self, unix_ms: u64) -> Vec<SsdBlock> {
        let since_ms = self.looked_unix_ms.and_then(|looked| unix_ms.checked_sub(looked));
        let rests_ms = (self.blocks.len() / BLOCKS_A_MS) as u64;
        if unix_ms < self.expires_unix_ms || since_ms.is_some_and(|ms| ms < rests_ms) {
            return Vec::new();
        }
        let mut blocks: Vec<SsdBlock> = self.blocks.values().copied().collect();
        let is_kept = self.see(&mut blocks, unix_ms);
        self.tenants.clear();
        let mut others = Vec::new();
        for ((known, block), is_kept) in self.blocks.values_mut().zip(blocks).zip(is_kept) {
            *known = block;
            match block.class {
                Class::Context { tenant, .. } => {
                    *self.tenants.entry(tenant).or_default() += block.bytes;
                }
                Class::Normal => {}
            }
            if !is_kept {
                others.push(block.key);
            }
        }
        others.into_iter().filter_map(|key| self.remove(key)).collect()
    }

    /// Which of all blocks are kept at this time: those with a mark, and what is before them, for as long as the longest
    /// of them. Each gets its class, and marks that are over are taken away.
    fn see(&mut self, blocks: &mut [SsdBlock], unix_ms: u64) -> Vec<bool> {
        type Places = HashMap<BlockKey, usize, BuildHasherDefault<KeyHasher>>;
        let places: Places = blocks.iter().enumerate().map(|(at, block)| (block.key, at)).collect();
        for block in &mut *blocks {
            block.class = Class::Normal;
            block.mark = block.mark.filter(|mark| mark.expires_unix_ms > unix_ms);
        }
        let marks = blocks.iter().enumerate();
        let mut marked: Vec<(usize, Mark)> =
            marks.filter_map(|(at, block)| Some((at, block.mark?))).collect();
        marked.sort_by_key(|(_, mark)| Reverse(mark.expires_unix_ms));
        self.expires_unix_ms = marked.last().map_or(u64::MAX, |(_, mark)| mark.expires_unix_ms);
        self.looked_unix_ms = Some(unix_ms);
        let mut is_kept = vec![false; blocks.len()];
        for (last, mark) in marked {
            let mut next = Some(last);
            while let Some(at) = next
                && !std::mem::replace(&mut is_kept[at], true)
            {
                blocks[at].class = class_of(&mark);
                next = blocks[at].parent.and_then(|parent| places.get(&parent).copied());
            }
        }
        is_kept
    }

    /// It can be found from now on, or is lost.
    pub(crate) fn remove(&mut self, key: BlockKey) -> Option<SsdBlock> {
        let block = self.blocks.remove(&key)?;
        self.bytes -= block.bytes;
        if let Class::Context { tenant, .. } = block.class
            && let Some(bytes) = self.tenants.get_mut(&tenant)
        {
            *bytes -= block.bytes;
            if *bytes == 0 {
                self.tenants.remove(&tenant);
            }
        }
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

    /// Of a tenant, or of all.
    pub(crate) fn bytes_for(&self, of: Option<Tenant>) -> u64 {
        match of {
            Some(of) => self.tenants.get(&of).copied().unwrap_or(0),
            None => self.tenants.values().sum(),
        }
    }

    pub(crate) fn keys(&self) -> impl Iterator<Item = BlockKey> + '_ {
        self.blocks.keys().copied()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.blocks.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use kvasir_proto::Namespace;

    use super::*;

    fn block(n: u32, expires_unix_ms: u64) -> SsdBlock {
        let mut key = [0; 16];
        key[..4].copy_from_slice(&n.to_le_bytes());
        SsdBlock {
            key: BlockKey(key),
            namespace: Namespace([0; 16]),
            parent: Some(BlockKey([0xff; 16])),
            class: Class::Normal,
            mark: Some(Mark {
                tenant: Tenant(1),
                expires_unix_ms,
                created_unix_ms: None,
                copies: 1,
            }),
            layout: 1,
            bytes: 10,
        }
    }

    #[test]
    fn where_there_are_many_it_is_not_looked_at_all_of_them_all_the_time() {
        let blocks = (0..1_000).map(|n| block(n, 10_000 + u64::from(n))).collect();
        let (mut all, others) = Unreached::new(blocks, 9_995);
        assert!(others.is_empty());
        assert_eq!(all.expire(10_001).len(), 0, "it was looked 6 ms before");
        assert_eq!(all.expire(10_005).len(), 6);
        assert_eq!((all.bytes(), all.bytes_for(None)), (9_940, 9_940));
        all.put(block(5_000, 10_500));
        all.put(block(5_000, 10_600));
        assert_eq!(all.bytes_for(None), 9_950, "one block");
        assert_eq!(all.expire(10_006).len(), 0);
        // A clock that was set back says nothing of when it was looked.
        all.put(block(5_001, 9_000));
        assert_eq!(all.bytes_for(Some(Tenant(1))), 9_960);
        assert_eq!(all.expire(9_500).len(), 1);
        assert_eq!(all.expire(20_000).len(), 995);
        assert_eq!((all.bytes(), all.bytes_for(None), all.is_empty()), (0, 0, true));
    }
}
