//! Where something ends that was promised to a tenant: the marks of blocks on the SSD, by the blocks' numbers.
//! Which class follows from them for the blocks before is [`ssd`](crate::ssd)'s matter.
//!
//! It must hold that times and contexts are those of the marks.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound;

use kvasir_mutation::{Mutation, mutated};
use kvasir_proto::{BlockKey, Class, Mark, Namespace, Tenant};

use crate::copies::CopiedContext;

/// A context that is kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PersistedContext {
    pub namespace: Namespace,
    /// Of its last block.
    pub last: BlockKey,
    /// From the first of the chain to the last.
    pub blocks: u32,
    pub created_unix_ms: u64,
    pub expires_unix_ms: u64,
}

/// What a block that is marked is called.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Named {
    pub(crate) namespace: Namespace,
    pub(crate) key: BlockKey,
    /// From the first of its chain to this one.
    pub(crate) blocks: u32,
}

/// By this classes are compared: the later time counts. Of two tenants, which there are only where keys
/// are not salted by tenant, any one, but always the same.
pub(crate) fn rank(class: Class) -> Option<(u64, Tenant)> {
    match class {
        Class::Normal => None,
        Class::Context { tenant, expires_unix_ms } => Some((expires_unix_ms, tenant)),
    }
}

pub(crate) fn class_of(mark: &Mark) -> Class {
    Class::Context { tenant: mark.tenant, expires_unix_ms: mark.expires_unix_ms }
}

#[derive(Debug, Default)]
pub(crate) struct Ends {
    all: BTreeMap<u32, (Mark, Named)>,
    /// Marks that are being written: of the block with the mark, and of those of its chain that are on the
    /// SSD already. By the number of the keep, and removed with it.
    coming: BTreeMap<u32, Vec<(u64, Mark)>>,
    /// (until, id) of all that are there.
    untils: BTreeSet<(u64, u32)>,
    /// Ids of contexts.
    contexts: BTreeMap<(Tenant, Namespace, BlockKey), u32>,
    /// Of them those that are to be kept on several nodes, with their ids.
    copied: BTreeSet<(Namespace, BlockKey, u32)>,
}

impl Ends {
    pub(crate) fn get(&self, id: u32) -> Option<&(Mark, Named)> {
        self.all.get(&id)
    }

    pub(crate) fn ids(&self) -> impl Iterator<Item = u32> + '_ {
        self.all.keys().copied()
    }

    /// The class of a block that no other follows.
    pub(crate) fn class(&self, id: u32) -> Class {
        let coming = self.coming.get(&id).into_iter().flatten().map(|(_, mark)| mark);
        let marks = self.all.get(&id).into_iter().map(|(mark, _)| mark).chain(coming);
        marks.map(class_of).max_by_key(|class| rank(*class)).unwrap_or(Class::Normal)
    }

    pub(crate) fn set(&mut self, id: u32, mark: Mark, named: Named) {
        self.remove(id);
        self.all.insert(id, (mark, named));
        self.untils.insert((mark.expires_unix_ms, id));
        if mark.created_unix_ms.is_some() {
            self.contexts.insert((mark.tenant, named.namespace, named.key), id);
            if mark.copies > 1 {
                self.copied.insert((named.namespace, named.key, id));
            }
        }
    }

    pub(crate) fn remove(&mut self, id: u32) {
        let Some((mark, named)) = self.all.remove(&id) else { return };
        self.untils.remove(&(mark.expires_unix_ms, id));
        if mark.created_unix_ms.is_some() {
            self.contexts.remove(&(mark.tenant, named.namespace, named.key));
            self.copied.remove(&(named.namespace, named.key, id));
        }
    }

    pub(crate) fn add_coming(&mut self, id: u32, keep: u64, mark: Mark) {
        self.coming.entry(id).or_default().push((keep, mark));
    }

    pub(crate) fn remove_coming(&mut self, id: u32, keep: u64) {
        if let Some(marks) = self.coming.get_mut(&id) {
            marks.retain(|(of, _)| *of != keep);
            if marks.is_empty() {
                self.coming.remove(&id);
            }
        }
    }

    /// The block is gone.
    pub(crate) fn forget(&mut self, id: u32) {
        self.remove(id);
        self.coming.remove(&id);
    }

    /// The mark whose time is over first, when it is over.
    pub(crate) fn next_over(&self, unix_ms: u64) -> Option<u32> {
        let unix_ms = unix_ms + if mutated(Mutation::ContextExpiresEarly) { 50_000 } else { 0 };
        self.untils
            .first()
            .filter(|(expires_unix_ms, _)| *expires_unix_ms <= unix_ms)
            .map(|of| of.1)
    }

    /// Contexts that are to be kept on other nodes too, in the order of namespace and last key.
    pub(crate) fn copied(&self) -> Vec<CopiedContext> {
        let contexts = self.copied.iter().filter_map(|(namespace, last, id)| {
            let (mark, _) = self.all.get(id)?;
            Some(CopiedContext {
                tenant: mark.tenant,
                namespace: *namespace,
                last: *last,
                expires_unix_ms: mark.expires_unix_ms,
                copies: mark.copies,
            })
        });
        contexts.collect()
    }

    /// A tenant's contexts in the order of namespace and last key, after one of them.
    pub(crate) fn contexts(
        &self,
        tenant: Tenant,
        after: Option<(Namespace, BlockKey)>,
    ) -> impl Iterator<Item = PersistedContext> + '_ {
        let from = match after {
            Some((namespace, key)) => Bound::Excluded((tenant, namespace, key)),
            None => Bound::Included((tenant, Namespace([0; 16]), BlockKey([0; 16]))),
        };
        let of_tenant = self.contexts.range((from, Bound::Unbounded));
        of_tenant.take_while(move |((of, ..), _)| *of == tenant).filter_map(|(_, id)| {
            let (mark, named) = self.all.get(id)?;
            Some(PersistedContext {
                namespace: named.namespace,
                last: named.key,
                blocks: named.blocks,
                created_unix_ms: mark.created_unix_ms?,
                expires_unix_ms: mark.expires_unix_ms,
            })
        })
    }

    /// What the header says must hold, and that each mark is of the block that it names.
    pub(crate) fn check(&self, named: impl Fn(u32) -> Option<Named>) -> Result<(), String> {
        let (mut untils, mut contexts) = (BTreeSet::new(), BTreeMap::new());
        let mut copied = BTreeSet::new();
        for (&id, (mark, of)) in &self.all {
            if named(id) != Some(*of) {
                return Err(format!("block {:?} has the mark of another block", of.key));
            }
            untils.insert((mark.expires_unix_ms, id));
            if mark.created_unix_ms.is_some() {
                contexts.insert((mark.tenant, of.namespace, of.key), id);
                if mark.copies > 1 {
                    copied.insert((of.namespace, of.key, id));
                }
            }
        }
        if untils != self.untils || contexts != self.contexts || copied != self.copied {
            return Err("the expiries or contexts differ from those of the marks".to_owned());
        }
        match self.coming.iter().find(|(id, marks)| marks.is_empty() || named(**id).is_none()) {
            Some(_) => Err("a pending mark refers to a missing block".to_owned()),
            None => Ok(()),
        }
    }
}
