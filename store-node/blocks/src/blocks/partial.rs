//! An SSD of which a part could not be read: what is kept there for tenants and follows what is in that part.

use kvasir_proto::{BlockKey, Mark};

use super::Blocks;
use crate::api::SsdSize;
use crate::ssd::SsdBlock;
use crate::unreached::Unreached;

impl Blocks {
    /// [`Self::ssd_ready`] of an SSD that has more than could be read. What is kept for a tenant stays there, though what it
    /// follows is not among these: that may be there again when the SSD is looked at the next time.
    pub fn ssd_ready_in_part(&mut self, size: SsdSize, blocks: Vec<SsdBlock>, unix_ms: u64) {
        let orphans = self.set_ssd(size, blocks);
        let (unreached, others) = Unreached::new(orphans, unix_ms);
        (self.ssd_unreached, self.ssd_in_part) = (unreached, true);
        others.iter().for_each(|block| self.forget_extent(block.key, block.parent.is_none()));
        self.ssd_has_come();
    }

    /// Blocks that are on the SSD and cannot be found, as long as what they follow cannot be read.
    pub fn ssd_unreached(&self) -> impl Iterator<Item = BlockKey> + '_ {
        self.ssd_unreached.keys()
    }

    /// What the SSD has, also when it cannot be found.
    pub(super) fn on_ssd(&self, key: BlockKey) -> Option<SsdBlock> {
        self.cache.ssd().get(key).or_else(|| self.ssd_unreached.get(key))
    }

    /// What it says of a block.
    pub(super) fn known_mark(&self, key: BlockKey) -> Option<Mark> {
        self.on_ssd(key).and_then(|block| block.mark)
    }

    /// A block can be found on the SSD, and with it what follows it there.
    pub(super) fn reach(&mut self, key: BlockKey) {
        if self.ssd_unreached.is_empty() {
            return;
        }
        let namespace = self.cache.ssd().get(key).map(|block| block.namespace);
        let (mut next, mut reached) = (vec![key], Vec::new());
        while let Some(key) = next.pop() {
            for block in self.ssd_unreached.take_after(key) {
                if Some(block.namespace) == namespace && self.cache.stored(block) {
                    next.push(block.key);
                    reached.push(block.key);
                } else {
                    // What it follows has this key in another namespace.
                    self.ssd_unreached.put(block);
                }
            }
        }
        if !reached.is_empty() {
            self.kept_changed();
            // What is before them may be kept for longer now.
            let chain = self.cache.ssd().chain(key);
            for key in chain.into_iter().chain(reached) {
                if let Some(block) = self.cache.ssd().get(key) {
                    self.want_in_bucket(block);
                }
            }
        }
    }
}
