//! What open paths have counted in counters that are no more. All makers share the room for it. When it is full,
//! the longest path of one that has more than its share is forgotten as a whole, and is said to be when it is
//! asked about: what its sender has not heard of is then undecided for good.

use std::collections::{BTreeMap, BTreeSet};

use kvasir_mutation::{Mutation, mutated};

use super::{Maker, PathId, Share};

/// One for each immediate and path, some 30 MiB in all.
const FORMER_MAX: usize = 1 << 20;

#[derive(Debug)]
pub(super) struct Former {
    paths: BTreeMap<PathId, Counts>,
    /// How many counts each maker has, of those that have any.
    of: BTreeMap<Maker, usize>,
    pub(super) len: usize,
    pub(super) max: usize,
    /// Paths that are not remembered any more.
    forgotten: BTreeSet<PathId>,
}

#[derive(Debug)]
struct Counts {
    maker: Maker,
    by_imm: BTreeMap<u32, u64>,
}

impl Default for Former {
    fn default() -> Self {
        let (paths, of, forgotten) = Default::default();
        Former { paths, of, len: 0, max: FORMER_MAX, forgotten }
    }
}

impl Former {
    /// `None` when it is not known.
    pub(super) fn count(&self, path: PathId, imm: u32) -> Option<u64> {
        if self.forgotten.contains(&path) {
            return None;
        }
        let count = self.paths.get(&path).and_then(|counts| counts.by_imm.get(&imm));
        Some(count.copied().unwrap_or(0))
    }

    /// The share's counter is no more. Nothing is asked about a path that is closed.
    pub(super) fn remember(&mut self, share: &Share, imm: u32) {
        let Share { maker, path: Some(path), count } = *share else { return };
        if self.forgotten.contains(&path) || mutated(Mutation::FormerCountsForgotten) {
            return;
        }
        if let Some(counts) = self.paths.get_mut(&path)
            && let Some(known) = counts.by_imm.get_mut(&imm)
        {
            *known += count;
            return;
        }
        while self.len >= self.max {
            let longest = self.longest_of(self.payer(maker)).unwrap_or(path);
            self.remove(longest);
            self.forgotten.insert(longest);
            if longest == path {
                return;
            }
        }
        let by_imm = BTreeMap::new();
        let counts = self.paths.entry(path).or_insert(Counts { maker, by_imm });
        counts.by_imm.insert(imm, count);
        *self.of.entry(maker).or_default() += 1;
        self.len += 1;
    }

    /// Nothing is asked about the path any more.
    pub(super) fn close(&mut self, path: PathId) {
        self.remove(path);
        self.forgotten.remove(&path);
    }

    /// Who is to make room for one more of `maker`: itself when that is more than an equal share, else someone
    /// has more than that.
    fn payer(&self, maker: Maker) -> Maker {
        let of_maker = self.of.get(&maker).copied();
        let share = self.max / (self.of.len() + usize::from(of_maker.is_none()));
        if of_maker.unwrap_or(0) >= share || mutated(Mutation::PathForgotten) {
            return maker;
        }
        self.of.iter().max_by_key(|(_, len)| **len).map_or(maker, |(heaviest, _)| *heaviest)
    }

    fn longest_of(&self, maker: Maker) -> Option<PathId> {
        let of_maker = self.paths.iter().filter(|(_, counts)| counts.maker == maker);
        of_maker.max_by_key(|(_, counts)| counts.by_imm.len()).map(|(path, _)| *path)
    }

    fn remove(&mut self, path: PathId) {
        let Some(Counts { maker, by_imm }) = self.paths.remove(&path) else { return };
        self.len -= by_imm.len();
        if let Some(len) = self.of.get_mut(&maker) {
            *len -= by_imm.len();
            if *len == 0 {
                self.of.remove(&maker);
            }
        }
    }
}
