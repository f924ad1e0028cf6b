//! Objects that are put while it is not known what lies below memory: at a start, or while the SSD fails. A name may
//! stand for something there already, which nobody could see. What becomes of it then is
//! [`objects`](crate::blocks)' matter.

use std::collections::BTreeSet;

use kvasir_mutation::{Mutation, mutated};
use kvasir_proto::BlockKey;

/// Names that are remembered.
const NAMES_MAX: usize = 1 << 16;

/// Of each tier below memory what was put while it was not known what that has.
#[derive(Debug, Default)]
pub(crate) struct Unseen {
    pub(crate) ssd: Below,
    pub(crate) bucket: Below,
}

/// Of one tier; where all is known nothing has to be remembered.
#[derive(Debug, Default)]
pub(crate) struct Below {
    names: Option<Names>,
}

#[derive(Debug, Default)]
pub(crate) struct Names {
    names: BTreeSet<BlockKey>,
    /// There were more.
    too_many: bool,
}

impl Unseen {
    pub(crate) fn new(bucket: bool) -> Self {
        Unseen { ssd: Below::default(), bucket: Below { names: bucket.then(Names::default) } }
    }

    /// An object is put.
    pub(crate) fn put(&mut self, key: BlockKey) {
        self.ssd.put(key);
        self.bucket.put(key);
    }
}

impl Below {
    /// There is one, and what it has is not known.
    pub(crate) fn expect(&mut self) {
        self.names.get_or_insert_default();
    }

    /// What it has under this name is of before, if it has something.
    pub(crate) fn put(&mut self, key: BlockKey) {
        if !mutated(Mutation::PutBeforeRecoveryForgotten) {
            self.names.iter_mut().for_each(|names| names.put(key));
        }
    }

    /// Nothing is there any more that was put under this name.
    pub(crate) fn forget(&mut self, key: BlockKey) {
        if let Some(names) = &mut self.names {
            names.names.remove(&key);
        }
    }

    pub(crate) fn is_unknown(&self) -> bool {
        self.names.is_some()
    }

    /// What it has is known from now on. Answers with what was put meanwhile.
    pub(crate) fn is_seen(&mut self) -> Option<Names> {
        self.names.take()
    }
}

impl Names {
    fn put(&mut self, key: BlockKey) {
        if self.too_many {
            return;
        }
        self.names.insert(key);
        if self.names.len() > NAMES_MAX {
            self.names.clear();
            self.too_many = true;
        }
    }

    /// All that were put; `None` when nobody knows which.
    pub(crate) fn all(self) -> Option<Vec<BlockKey>> {
        (!self.too_many).then(|| self.names.into_iter().collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(n: usize) -> BlockKey {
        BlockKey((n as u128).to_le_bytes())
    }

    #[test]
    fn names_are_remembered_up_to_a_bound_and_as_long_as_the_tier_is_not_known() {
        let mut unseen = Unseen::new(true);
        unseen.put(key(1));
        assert!(unseen.ssd.is_seen().is_none(), "all is known");
        unseen.ssd.expect();
        unseen.put(key(2));
        unseen.ssd.expect();
        let names = unseen.ssd.is_seen().and_then(Names::all);
        assert_eq!(names, Some(vec![key(2)]), "earlier puts are not in doubt there");
        (0..=NAMES_MAX).for_each(|n| unseen.put(key(n)));
        unseen.put(key(1));
        let names = unseen.bucket.is_seen().expect("it was not known");
        assert_eq!((names.names.len(), names.all()), (0, None));
        assert!(!unseen.bucket.is_unknown());
    }
}
