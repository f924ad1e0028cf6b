//! The simulation's object store: what the shell would do with one, in any order, with failures, times at which
//! it cannot be used, objects that go, and objects of other nodes.

use std::collections::{BTreeMap, BTreeSet};

use kvasir_blocks::{Action, BucketOptions, RiseError, SinkError, SsdBlock, UploadFrom};
use kvasir_proto::{BlockKey, Class, Mark, Share, Side, SlotIndex, Tenant, TxId};

use crate::checker::Hand;
use crate::simulation::World;

pub(crate) fn options() -> BucketOptions {
    BucketOptions {
        uploads_max: 3,
        upload_bytes_max: 25,
        timeout_ms: 40,
        retry_ms: 30,
        blocks_max: 12,
        tenant_bytes_max: 70,
    }
}

#[derive(Debug, Default)]
pub(crate) struct SimBucket {
    objects: BTreeMap<Name, SsdBlock>,
    uploads: Vec<(u64, SsdBlock, UploadFrom)>,
    downloads: Vec<(u64, SlotIndex, SsdBlock)>,
    discards: Vec<(u64, BlockKey)>,
    lost: BTreeSet<BlockKey>,
}

impl SimBucket {
    pub(crate) fn is_idle(&self) -> bool {
        self.uploads.is_empty() && self.downloads.is_empty() && self.discards.is_empty()
    }

    /// It has a context that ends with the block.
    pub(crate) fn has_marked(&self, key: BlockKey) -> bool {
        self.objects.keys().any(|(of, _, times)| *of == key && times.is_some())
    }

    /// It has the block, or has lost it.
    pub(crate) fn has(&self, key: BlockKey) -> bool {
        self.lost.contains(&key) || self.objects.keys().any(|(of, ..)| *of == key)
    }
}

/// Key, until when, and the times of the context that ends there.
pub(crate) type Name = (BlockKey, u64, Option<(u64, u64)>);

pub(crate) fn name(block: &SsdBlock) -> Name {
    let times = |mark: Mark| (mark.expires_unix_ms, mark.created_unix_ms.expect("of a context"));
    match block.class {
        Class::Context { expires_unix_ms, .. } => {
            (block.key, expires_unix_ms, block.mark.map(times))
        }
        Class::Normal => panic!("{block:?} is kept for nobody"),
    }
}

/// Stands for an upload or a download in the checker's books.
fn as_share(incarnation: u64, serial: u64) -> Share {
    Share { tx: TxId { conductor_incarnation: incarnation, serial }, side: Side::Source }
}

impl World {
    pub(crate) fn bucket_begins(&mut self, action: Action) {
        match action {
            Action::Upload { upload, block, from, .. } => {
                if let UploadFrom::Slot { slot, generation } = from {
                    assert_eq!(self.blocks.generation(slot), Some(generation));
                    self.checker.held(&[block.key], &[slot]);
                    self.checker.read_begin(&self.blocks, as_share(5, upload), &[slot]);
                }
                self.bucket.uploads.push((upload, block, from));
            }
            Action::Download { rise, slot, block } => {
                self.checker.hand_out(as_share(2, rise), &[slot]);
                self.checker.may_write(as_share(2, rise), Hand::Remote, &[slot]);
                self.bucket.downloads.push((rise, slot, block));
            }
            Action::Discard { discard, key, .. } => self.bucket.discards.push((discard, key)),
            other => panic!("{other:?} is nothing for the object store"),
        }
    }

    pub(crate) fn bucket_works(&mut self) {
        if self.random.one_in(2) && !self.bucket.uploads.is_empty() {
            let at = self.random.below(self.bucket.uploads.len());
            let (upload, block, from) = self.bucket.uploads.swap_remove(at);
            self.checker.reads_end(as_share(5, upload));
            let result = self.end_upload(&block, from);
            self.blocks.uploaded(self.now_ms, upload, result);
        } else if let Some((discard, key)) = self.bucket.discards.pop() {
            let is_gone = !self.random.one_in(4);
            if is_gone {
                self.bucket.objects.retain(|(of, ..), _| *of != key);
            }
            self.blocks.discarded(self.now_ms, discard, is_gone);
        } else if !self.bucket.downloads.is_empty() {
            let at = self.random.below(self.bucket.downloads.len());
            let (rise, slot, block) = self.bucket.downloads.swap_remove(at);
            let share = as_share(2, rise);
            let result = if self.random.one_in(8) {
                Err(RiseError::Failed)
            } else if self.bucket.objects.contains_key(&name(&block)) {
                self.checker.write(share, Hand::Remote, slot, Some(block.key));
                Ok(1)
            } else {
                Err(RiseError::Gone)
            };
            self.checker.stopped(share, Hand::Remote);
            self.blocks.risen(self.now_ms, rise, result);
        }
        self.learn_of_aborts();
    }

    fn end_upload(&mut self, block: &SsdBlock, from: UploadFrom) -> Result<(), SinkError> {
        if self.random.one_in(10) {
            return Err(SinkError::Failed);
        }
        let is_there = match from {
            UploadFrom::Slot { .. } => true,
            UploadFrom::Ssd => self.ssd.stored.contains_key(&block.key),
            UploadFrom::Bucket(former) => self.bucket.objects.contains_key(&name(&former)),
        };
        if !is_there {
            return Err(SinkError::Gone);
        }
        self.bucket.objects.insert(name(block), *block);
        if let UploadFrom::Bucket(former) = from {
            self.bucket.objects.remove(&name(&former));
        }
        Ok(())
    }

    /// It is listed, found to answer or not to answer, or an object goes.
    pub(crate) fn bucket_changes(&mut self) {
        match self.random.below(7) {
            0 => self.blocks.set_bucket_usable(false),
            1 => {
                let nth = self.random.below(16);
                let name = self.bucket.objects.keys().nth(nth).copied();
                if let Some(name) = name {
                    self.bucket.objects.remove(&name);
                    self.bucket.lost.insert(name.0);
                }
            }
            2 | 3 => {
                self.others_send();
                let now_ms = self.now_ms;
                self.bucket.objects.retain(|(_, expires_unix_ms, _), _| *expires_unix_ms > now_ms);
                self.blocks.bucket_listed(self.bucket.objects.values().copied().collect(), true);
                self.blocks.expire(self.now_ms);
            }
            _ => self.blocks.set_bucket_usable(true),
        }
        self.learn_of_aborts();
    }

    fn others_send(&mut self) {
        let (namespace, keys) = self.keys(4);
        let expires_unix_ms = self.now_ms + self.random.below(400) as u64;
        let class = Class::Context { tenant: Tenant(7), expires_unix_ms };
        let mut parent = None;
        let last = keys.last().copied();
        let created_unix_ms = Some(self.now_ms);
        for key in keys {
            let end = Mark { tenant: Tenant(7), expires_unix_ms, created_unix_ms, copies: 1 };
            let mark = (Some(key) == last).then_some(end);
            let (layout, bytes) = (crate::sim_ssd::LAYOUT, crate::sim_ssd::EXTENT_BYTES);
            let block = SsdBlock { key, namespace, parent, class, mark, layout, bytes };
            self.bucket.objects.insert(name(&block), block);
            parent = Some(key);
        }
    }
}
