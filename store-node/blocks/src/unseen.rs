//! Objects that are put while it is not known what lies below memory: at a start, or while the SSD fails. A name may
//! stand for something there already, which nobody could see. What becomes of it then is
//! [`objects`](crate::blocks)' matter.

use std::collections::BTreeSet;

use kvasir_proto::BlockKey;

/// Names that are remembered.
const NAMES_MAX: usize = 1 << 16;

#[derive(Debug, Default)]
pub(crate) struct Unseen {
    /// There is one, and what it has is not known.
    pub(crate) ssd: bool,
    pub(crate) bucket: bool,
    names: BTreeSet<BlockKey>,
    /// There were more.
    too_many: bool,
}

impl Unseen {
    pub(crate) fn new(bucket: bool) -> Self {
        Unseen { bucket, ..Unseen::default() }
    }

    /// An object is put.
    pub(crate) fn put(&mut self, key: BlockKey) {
        if !self.ssd && !self.bucket || self.too_many {
            return;
        }
        self.names.insert(key);
        if self.names.len() > NAMES_MAX {
            self.names.clear();
            self.too_many = true;
        }
    }

    /// All that were put; `None` when nobody knows which.
    pub(crate) fn names(&self) -> Option<Vec<BlockKey>> {
        (!self.too_many).then(|| self.names.iter().copied().collect())
    }

    /// Where all is known nothing has to be remembered.
    pub(crate) fn is_seen(&mut self) {
        if !self.ssd && !self.bucket {
            self.names.clear();
            self.too_many = false;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(n: usize) -> BlockKey {
        BlockKey((n as u128).to_le_bytes())
    }

    #[test]
    fn names_are_remembered_up_to_a_bound_and_as_long_as_something_is_not_known() {
        let mut unseen = Unseen::default();
        unseen.put(key(1));
        assert_eq!(unseen.names(), Some(Vec::new()), "all is known");
        (unseen.ssd, unseen.bucket) = (true, true);
        unseen.put(key(1));
        unseen.ssd = false;
        unseen.is_seen();
        assert_eq!(unseen.names(), Some(vec![key(1)]));
        (0..=NAMES_MAX).for_each(|n| unseen.put(key(n)));
        assert_eq!((unseen.names(), unseen.names.len()), (None, 0));
        unseen.put(key(1));
        assert_eq!(unseen.names.len(), 0);
        unseen.bucket = false;
        unseen.is_seen();
        assert_eq!(unseen.names(), Some(Vec::new()));
    }
}
