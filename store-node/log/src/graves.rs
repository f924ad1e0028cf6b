//! What keeps a mark that was taken away, or an object that was removed, from coming back with an older extent of
//! its block.
//!
//! Removing is not logged: what is written last of a block counts at the next start. An extent that has
//! taken a mark away, or made its time shorter, must therefore outlive those before it. When it is removed
//! while one whose mark holds longer may still be read after a crash, it is in its *grave*: nobody finds it,
//! and cleaning moves it as if it were live. Extents with marks that are neither live nor in a grave are
//! *shadows*, and are gone when their segment has been used again and its new header is durable. There are
//! fewer graves than shadows, and shadows are what cleaning gains, so that graves never fill a log.
//!
//! Blocks that follow no other may be objects, whose names say nothing of their contents: each of their extents
//! that is not live is a shadow, whatever comes after it must outlive it, and a removal is in its grave from the
//! beginning.
//!
//! When something could not be read at the start it may hide an extent of any block, so that removals are kept whatever
//! is known, as far as there is room for them, and no more are taken then.

use std::collections::{BTreeMap, BTreeSet};

use kvasir_mutation::{Mutation, mutated};
use kvasir_proto::{BlockKey, Mark};

use crate::format::Entry;
use crate::index::Location;
use crate::log::Log;

/// An extent with a mark that is, or may be, on the disk, and counts for nothing.
#[derive(Debug, Clone, Copy)]
struct Shadow {
    segment: u32,
    /// Of this use of the segment.
    sequence: u64,
    expires_unix_ms: u64,
}

#[derive(Debug, Clone, Copy)]
struct Grave {
    at: Location,
    /// It takes away those that hold longer: all of them without this.
    expires_unix_ms: Option<u64>,
    /// What it says itself, until when; of a removal, and of what may come back, `None`.
    claim: Option<u64>,
}

#[derive(Debug, Default)]
pub(crate) struct Graves {
    /// Until when the marks of live extents hold.
    marked: BTreeMap<BlockKey, u64>,
    shadows: BTreeMap<BlockKey, Vec<Shadow>>,
    /// Whose shadows are in each segment.
    in_segment: BTreeMap<u32, BTreeSet<BlockKey>>,
    all: BTreeMap<BlockKey, Grave>,
    /// That all of them have.
    pages: u64,
    /// Something could not be read at the start: of any block there may be an extent that nobody knows of, until the next
    /// one. Of what was removed, before or since, alone something is done about it: these blocks. Each other one that has
    /// made room would be in its grave.
    partial: Option<BTreeSet<BlockKey>>,
}

fn until(mark: Option<Mark>) -> Option<u64> {
    mark.map(|mark| mark.expires_unix_ms)
}

/// Until when what an extent says would hold if it came back; of what may come back `None`.
fn claim(mark: Option<Mark>, follows_none: bool) -> Option<u64> {
    until(mark).or(follows_none.then_some(0))
}

fn claim_of(entry: &Entry) -> Option<u64> {
    if entry.is_removal { None } else { claim(entry.mark, entry.parent.is_none()) }
}

impl Graves {
    /// It was found on the disk, and is live.
    pub(crate) fn found_live(&mut self, key: BlockKey, mark: Option<Mark>) {
        match until(mark) {
            Some(expires_unix_ms) => drop(self.marked.insert(key, expires_unix_ms)),
            None => drop(self.marked.remove(&key)),
        }
    }

    /// An extent is, or may be, on the disk, and is not live (any more).
    pub(crate) fn shadow(&mut self, entry: &Entry, at: (u32, u64)) {
        if let Some(expires_unix_ms) = claim_of(entry) {
            self.add_shadow(entry.key, expires_unix_ms, at);
        }
    }

    fn add_shadow(&mut self, key: BlockKey, expires_unix_ms: u64, (segment, sequence): (u32, u64)) {
        let shadows = self.shadows.entry(key).or_default();
        // One for each use of a segment. Most are of the one that is being filled.
        let is_of_it = |of: &&mut Shadow| of.segment == segment && of.sequence == sequence;
        match shadows.iter_mut().rev().find(is_of_it) {
            Some(shadow) => shadow.expires_unix_ms = shadow.expires_unix_ms.max(expires_unix_ms),
            None => {
                shadows.push(Shadow { segment, sequence, expires_unix_ms });
                self.in_segment.entry(segment).or_default().insert(key);
            }
        }
    }

    /// A newer extent counts in place of one in this use of a segment, if there was one.
    pub(crate) fn replaced(&mut self, entry: &Entry, former: Option<(u32, u64)>) {
        let Entry { key, mark, parent, .. } = *entry;
        let former_until = self.marked.get(&key).copied().or(parent.is_none().then_some(0));
        if let (Some(expires_unix_ms), Some(at)) = (former_until, former) {
            self.add_shadow(key, expires_unix_ms, at);
        }
        self.found_live(key, mark);
    }

    /// Whether an older extent of it would come back after a crash, or might.
    pub(crate) fn may_come_back(&self, key: BlockKey) -> bool {
        let is_partial =
            self.partial.is_some() && !mutated(Mutation::RemovalOmittedAfterPartialRecovery);
        is_partial || self.shadows.contains_key(&key)
    }

    /// A removal that was found on the disk, newer than all else of its block, when all shadows are known. Answers
    /// whether it is needed, and then counts as live.
    pub(crate) fn found_removal(&mut self, key: BlockKey, at: Location) -> bool {
        let grave = Grave { at, expires_unix_ms: None, claim: None };
        let is_needed = self.is_needed(key, &grave);
        if is_needed {
            self.insert(key, grave);
        }
        is_needed
    }

    /// Something could not be read; of these blocks there are removals.
    pub(crate) fn is_partial(&mut self, removed: BTreeSet<BlockKey>) {
        self.partial = Some(removed);
    }

    /// Whether no more removals can be kept until something that could not be read is.
    pub(crate) fn are_too_many(&self, pages_max: u64) -> bool {
        self.partial.is_some() && self.pages >= pages_max
    }

    fn is_needed(&self, key: BlockKey, grave: &Grave) -> bool {
        self.partial.as_ref().is_some_and(|removed| removed.contains(&key))
            || self.is_outlasted(key, grave.expires_unix_ms)
    }

    fn insert(&mut self, key: BlockKey, grave: Grave) {
        self.pages += u64::from(grave.at.pages);
        if let Some(former) = self.all.insert(key, grave) {
            self.pages -= u64::from(former.at.pages);
        }
    }

    fn take(&mut self, key: BlockKey) -> Option<Grave> {
        let grave = self.all.remove(&key)?;
        self.pages -= u64::from(grave.at.pages);
        Some(grave)
    }

    /// Whether a shadow would come back with a longer time than this.
    fn is_outlasted(&self, key: BlockKey, expires_unix_ms: Option<u64>) -> bool {
        let shadows = self.shadows.get(&key).into_iter().flatten();
        shadows.map(|shadow| Some(shadow.expires_unix_ms)).max() > Some(expires_unix_ms)
    }

    pub(crate) fn get(&self, key: BlockKey) -> Option<Location> {
        self.all.get(&key).map(|grave| grave.at)
    }

    /// Looks at all of them.
    pub(crate) fn all_in(&self, segment: u32) -> Vec<BlockKey> {
        let here = self.all.iter().filter(|(_, grave)| grave.at.segment == segment);
        here.map(|(key, _)| *key).collect()
    }

    pub(crate) fn pages(&self) -> u64 {
        self.pages
    }

    /// A segment is used anew: what an earlier use has left there is never read again. Answers with the
    /// blocks whose graves nothing needs any more.
    fn forget_former_uses(&mut self, segment: u32, sequence: u64) -> Vec<BlockKey> {
        let keys = self.in_segment.remove(&segment).unwrap_or_default();
        let mut over = Vec::new();
        for key in keys {
            let Some(shadows) = self.shadows.get_mut(&key) else { continue };
            shadows.retain(|shadow| shadow.segment != segment || shadow.sequence == sequence);
            if shadows.iter().any(|shadow| shadow.segment == segment) {
                self.in_segment.entry(segment).or_default().insert(key);
            }
            if shadows.is_empty() {
                self.shadows.remove(&key);
            }
            let grave = self.all.get(&key);
            if grave.is_some_and(|grave| !self.is_needed(key, grave)) {
                over.push(key);
            }
        }
        over
    }
}

impl Log {
    /// A removal is durable: nothing that is older counts.
    pub(crate) fn removed(&mut self, entry: &Entry, at: Location, former: Option<Location>) {
        let use_of = |of: Location| (of.segment, self.segments.get(of.segment).sequence);
        self.graves.replaced(entry, former.map(use_of));
        if let Some(former) = former {
            self.segments.remove_live(former);
        }
        self.unbury(entry.key);
        if let Some(removed) = &mut self.graves.partial {
            removed.insert(entry.key);
        }
        self.segments.add_live(at);
        let grave = Grave { at, expires_unix_ms: None, claim: None };
        if mutated(Mutation::RemovalTombstoneDropped) {
            return self.give_up(entry.key, grave);
        }
        self.lay(entry.key, grave);
    }

    /// A live extent is not found any more. One that follows no other may be of an object.
    pub(crate) fn bury(&mut self, key: BlockKey, at: Location, follows_none: bool) {
        let marked = self.graves.marked.remove(&key);
        let claim = marked.or(follows_none.then_some(0));
        let expires_unix_ms = marked.filter(|_| !follows_none);
        let grave = Grave { at, expires_unix_ms, claim };
        if mutated(Mutation::ClearedMarkReturns) {
            return self.give_up(key, grave);
        }
        self.lay(key, grave);
    }

    fn lay(&mut self, key: BlockKey, grave: Grave) {
        match self.graves.is_needed(key, &grave) {
            true => self.graves.insert(key, grave),
            false => self.give_up(key, grave),
        }
    }

    /// Nothing keeps an extent, which is on the disk until its segment is used again.
    fn give_up(&mut self, key: BlockKey, Grave { at, claim, .. }: Grave) {
        if let Some(expires_unix_ms) = claim {
            let sequence = self.segments.get(at.segment).sequence;
            self.graves.add_shadow(key, expires_unix_ms, (at.segment, sequence));
        }
        self.segments.remove_live(at);
    }

    /// Its grave is not needed: a newer extent is durable, or nothing is left that it takes away.
    pub(crate) fn unbury(&mut self, key: BlockKey) {
        if let Some(grave) = self.graves.take(key) {
            self.give_up(key, grave);
        }
    }

    /// Cleaning has copied an extent that is in its grave.
    pub(crate) fn rebury(&mut self, key: BlockKey, at: Location) {
        let Some(&former) = self.graves.all.get(&key) else { return };
        self.graves.insert(key, Grave { at, ..former });
        self.segments.add_live(at);
        self.give_up(key, former);
    }

    /// The header of a segment's newest use is durable.
    pub(crate) fn header_is_durable(&mut self, segment: u32) {
        let of = self.segments.get_mut(segment);
        if std::mem::replace(&mut of.header_durable, true) {
            return;
        }
        let sequence = of.sequence;
        let over = self.graves.forget_former_uses(segment, sequence);
        over.into_iter().for_each(|key| self.unbury(key));
    }
}
