//! The pools of all attached engines. Each is its engine's alone; what is asked here is what all of them have together.
//! A block that several pools hold is announced once, and copied into a slot from one of them.

use std::collections::{BTreeMap, BTreeSet};

use kvasir_proto::{BlockKey, Namespace};

use crate::api::{AttachEpoch, PoolError};
use crate::pools::{PoolBlock, PoolTable, PoolTally};

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct PoolSet {
    pools: BTreeMap<AttachEpoch, PoolTable>,
}

impl PoolSet {
    pub(crate) fn is_empty(&self) -> bool {
        self.pools.is_empty()
    }

    pub(crate) fn insert(&mut self, epoch: AttachEpoch, pool: PoolTable) {
        self.pools.insert(epoch, pool);
    }

    pub(crate) fn remove(&mut self, epoch: AttachEpoch) -> Option<PoolTable> {
        self.pools.remove(&epoch)
    }

    /// The pool of one engine.
    pub(crate) fn of(&self, epoch: AttachEpoch) -> Result<&PoolTable, PoolError> {
        self.pools.get(&epoch).ok_or(PoolError::NoPool)
    }

    pub(crate) fn of_mut(&mut self, epoch: AttachEpoch) -> Option<&mut PoolTable> {
        self.pools.get_mut(&epoch)
    }

    pub(crate) fn iter_mut(&mut self) -> impl Iterator<Item = (AttachEpoch, &mut PoolTable)> {
        self.pools.iter_mut().map(|(epoch, pool)| (*epoch, pool))
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (AttachEpoch, &PoolTable)> {
        self.pools.iter().map(|(epoch, pool)| (*epoch, pool))
    }

    /// Of all pools together.
    pub(crate) fn tally(&self) -> PoolTally {
        self.pools.values().fold(PoolTally::default(), |sum, pool| sum + pool.tally())
    }

    /// A block that some pool holds.
    pub(crate) fn block(&self, key: BlockKey) -> Option<&PoolBlock> {
        self.pools.values().find_map(|pool| pool.block(key))
    }

    /// Whose pool holds a block: the one that has it for longest.
    pub(crate) fn holder(&self, key: BlockKey) -> Option<AttachEpoch> {
        let since = |(epoch, pool): (&AttachEpoch, &PoolTable)| {
            pool.block(key).map(|block| (block.since_ms, *epoch))
        };
        self.pools.iter().filter_map(since).min().map(|(_, epoch)| epoch)
    }

    /// Every block that is held, once and in order.
    pub(crate) fn keys(&self) -> BTreeSet<BlockKey> {
        self.pools.values().flat_map(PoolTable::keys).collect()
    }

    /// How many of the keys are held, each after the one before it, whichever pool has it.
    pub(crate) fn prefix(
        &self,
        namespace: Namespace,
        mut parent: Option<BlockKey>,
        keys: &[BlockKey],
    ) -> usize {
        let mut at = 0;
        loop {
            let rest = &keys[at..];
            let held = self.pools.values().map(|pool| pool.prefix(namespace, parent, rest)).max();
            match held {
                None | Some(0) => return at,
                Some(held) => {
                    at += held;
                    parent = Some(keys[at - 1]);
                }
            }
        }
    }

    /// Whether a block of this key may be held: it is no other one's in any pool.
    pub(crate) fn fits(
        &self,
        key: BlockKey,
        namespace: Namespace,
        parent: Option<BlockKey>,
    ) -> bool {
        self.pools.values().all(|pool| pool.fits(key, namespace, parent))
    }

    /// The block that waits longest to be copied into a slot.
    pub(crate) fn next_waiting(&self) -> Option<BlockKey> {
        let first = |pool: &PoolTable| {
            let key = pool.next_waiting()?;
            Some((pool.block(key)?.since_ms, key))
        };
        let oldest = self.pools.values().filter_map(first).min_by_key(|(since_ms, _)| *since_ms);
        oldest.map(|(_, key)| key)
    }

    /// It does not wait any more, in any pool.
    pub(crate) fn looked_after(&mut self, key: BlockKey) {
        self.pools.values_mut().for_each(|pool| pool.looked_after(key));
    }
}
