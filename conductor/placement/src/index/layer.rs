//! One set of blocks of up to 64 nodes: 64 tables, so that replacing one of them stays short, and
//! what readers see of them. Not which nodes are alive: that is the group's.

use std::sync::Arc;

use kvasir_proto::{BlockKey, BlockSetDigest};

use super::table::{Inserted, Removed, SHARD_BITS, TOUCHED_AT_ONCE, Table, Tag};

pub(super) const SHARDS: usize = 1 << SHARD_BITS;

/// What readers see: fixed tables, whose slots change.
#[derive(Debug, Clone)]
pub(super) struct Tables(Arc<[Table]>);

impl Tables {
    /// Who has the keys at these places of a chain. All of them are asked for before one is
    /// looked at, so that they wait for memory together.
    pub(super) fn get(&self, keys: &[BlockKey], places: &[usize], sets: &mut [u64]) {
        let table = |place: &usize| {
            let tag = Tag::from(&keys[*place]);
            (&self.0[tag.shard()], tag)
        };
        let near = places.iter().map(table).fold(0, |near, (table, tag)| near | table.touch(tag));
        std::hint::black_box(near);
        for (set, (table, tag)) in sets.iter_mut().zip(places.iter().map(table)) {
            *set = table.get(tag);
        }
    }
}

/// The writer's side.
#[derive(Debug)]
pub(super) struct Layer {
    tables: Tables,
    used: [usize; SHARDS],
    keys: usize,
    /// Tables were replaced since readers were last told.
    replaced: bool,
}

/// What became of some keys.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Changed {
    /// Of keys that the node had not, or has no longer.
    pub(super) digest: BlockSetDigest,
    /// Keys left out because there was no room.
    pub(super) left_out: usize,
}

impl Layer {
    pub(super) fn new() -> Self {
        let tables = (0..SHARDS).map(|_| Table::default()).collect();
        Layer { tables: Tables(tables), used: [0; SHARDS], keys: 0, replaced: false }
    }

    /// What readers should see from now on, if that has changed.
    pub(super) fn take_replaced(&mut self) -> bool {
        std::mem::take(&mut self.replaced)
    }

    pub(super) fn tables(&self) -> &Tables {
        &self.tables
    }

    pub(super) fn is_empty(&self) -> bool {
        self.keys == 0
    }

    pub(super) fn keys(&self) -> usize {
        self.keys
    }

    pub(super) fn bytes(&self) -> usize {
        self.tables.0.iter().map(Table::bytes).sum()
    }

    /// The node has these blocks. At most `keys_max` different keys are taken.
    pub(super) fn insert(&mut self, node: u64, keys: &[BlockKey], keys_max: usize) -> Changed {
        let mut changed = Changed::default();
        for keys in keys.chunks(TOUCHED_AT_ONCE) {
            self.touch(keys);
            for key in keys {
                match self.insert_one(Tag::from(key), node, keys_max) {
                    Inserted::Already => {}
                    Inserted::Shared | Inserted::Fresh => changed.digest.add(key),
                    Inserted::Full => changed.left_out += 1,
                }
            }
        }
        changed
    }

    /// The node has these blocks no more.
    pub(super) fn remove(&mut self, node: u64, keys: &[BlockKey]) -> Changed {
        let mut changed = Changed::default();
        for keys in keys.chunks(TOUCHED_AT_ONCE) {
            self.touch(keys);
            for key in keys {
                let tag = Tag::from(key);
                let shard = tag.shard();
                let removed = self.tables.0[shard].remove(tag, node);
                if removed == Removed::Last {
                    self.used[shard] -= 1;
                    self.keys -= 1;
                    if self.tables.0[shard].is_sparse(self.used[shard]) {
                        self.replace(shard, 0, self.used[shard]);
                    }
                }
                if removed != Removed::Nothing {
                    changed.digest.add(key);
                }
            }
        }
        changed
    }

    /// Takes some nodes out of one table.
    pub(super) fn clear(&mut self, shard: usize, nodes: u64) {
        let used = self.tables.0[shard].used_without(nodes);
        self.replace(shard, nodes, used);
    }

    fn insert_one(&mut self, tag: Tag, node: u64, keys_max: usize) -> Inserted {
        let shard = tag.shard();
        let table = &self.tables.0[shard];
        let has_room = self.keys < keys_max;
        let mut inserted = table.insert(tag, node, has_room && !table.is_full(self.used[shard]));
        if inserted == Inserted::Full && has_room {
            self.replace(shard, 0, self.used[shard] + 1);
            inserted = self.tables.0[shard].insert(tag, node, true);
        }
        if inserted == Inserted::Fresh {
            self.used[shard] += 1;
            self.keys += 1;
        }
        inserted
    }

    /// Makes another table of one, with room for `room` keys.
    fn replace(&mut self, shard: usize, without: u64, room: usize) {
        let (table, used) = self.tables.0[shard].copy_without(without, room);
        self.keys = self.keys - self.used[shard] + used;
        self.used[shard] = used;
        let mut tables = self.tables.0.to_vec();
        tables[shard] = table;
        self.tables = Tables(tables.into());
        self.replaced = true;
    }

    /// Loads the places of all of them at once: one waits for memory as long as sixteen.
    fn touch(&self, keys: &[BlockKey]) {
        let touch = |key: &BlockKey| {
            let tag = Tag::from(key);
            self.tables.0[tag.shard()].touch(tag)
        };
        std::hint::black_box(keys.iter().map(touch).fold(0, |all, one| all | one));
    }
}
