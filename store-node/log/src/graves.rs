//! What keeps a mark that was taken away from coming back with an older extent of its block.
//!
//! Removing is not logged: what is written last of a block counts at the next start. An extent that has
//! taken a mark away, or made its time shorter, must therefore outlive those before it. When it is removed
//! while one of them may still be read after a crash, it is in its *grave*: nobody finds it, and cleaning
//! moves it as if it were live. Older extents with marks are *shadows*, and are gone when their segment has
//! been used again and its new header is durable. There are fewer graves than shadows, and shadows are what
//! cleaning gains, so that graves never fill a log.

use std::collections::{BTreeMap, BTreeSet};

use kvasir_proto::{BlockKey, Mark};

use crate::index::Location;
use crate::log::Log;

/// An extent with a mark that is not its block's any more, and is still on the disk.
#[derive(Debug, Clone, Copy)]
struct Shadow {
    segment: u32,
    /// Of this use of the segment.
    sequence: u64,
    until_unix_ms: u64,
}

#[derive(Debug, Default)]
pub(crate) struct Graves {
    /// Until when the marks of live extents hold.
    marked: BTreeMap<BlockKey, u64>,
    shadows: BTreeMap<BlockKey, Vec<Shadow>>,
    /// Whose shadows are in each segment.
    in_segment: BTreeMap<u32, BTreeSet<BlockKey>>,
    all: BTreeMap<BlockKey, Location>,
}

fn until(mark: Option<Mark>) -> Option<u64> {
    mark.map(|mark| mark.until_unix_ms)
}

impl Graves {
    /// It was found on the disk, and is live.
    pub(crate) fn found_live(&mut self, key: BlockKey, mark: Option<Mark>) {
        match until(mark) {
            Some(until_unix_ms) => drop(self.marked.insert(key, until_unix_ms)),
            None => drop(self.marked.remove(&key)),
        }
    }

    /// An extent is, or may be, on the disk, and is not live (any more).
    pub(crate) fn shadow(&mut self, key: BlockKey, mark: Option<Mark>, at: (u32, u64)) {
        if let Some(until_unix_ms) = until(mark) {
            self.add_shadow(key, until_unix_ms, at);
        }
    }

    fn add_shadow(&mut self, key: BlockKey, until_unix_ms: u64, (segment, sequence): (u32, u64)) {
        let shadow = Shadow { segment, sequence, until_unix_ms };
        self.shadows.entry(key).or_default().push(shadow);
        self.in_segment.entry(segment).or_default().insert(key);
    }

    /// A newer extent is live in place of one in this use of a segment, if there was one.
    pub(crate) fn replaced(
        &mut self,
        key: BlockKey,
        mark: Option<Mark>,
        former: Option<(u32, u64)>,
    ) {
        let former_until = self.marked.get(&key).copied();
        if let (Some(until_unix_ms), Some(at)) = (former_until, former) {
            self.add_shadow(key, until_unix_ms, at);
        }
        self.found_live(key, mark);
    }

    /// A live extent is removed. Answers whether it must stay in its grave.
    fn removed(&mut self, key: BlockKey) -> bool {
        let until_unix_ms = self.marked.remove(&key);
        let shadows = self.shadows.get(&key).into_iter().flatten();
        shadows.map(|shadow| Some(shadow.until_unix_ms)).max() > Some(until_unix_ms)
    }

    pub(crate) fn get(&self, key: BlockKey) -> Option<Location> {
        self.all.get(&key).copied()
    }

    /// A segment is used anew: what an earlier use has left there is never read again. Answers with the
    /// graves that nothing needs any more.
    fn forget_former_uses(&mut self, segment: u32, sequence: u64) -> Vec<Location> {
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
                over.extend(self.all.remove(&key));
            }
        }
        over
    }
}

impl Log {
    /// A live extent is not found any more.
    pub(crate) fn bury(&mut self, key: BlockKey, at: Location) {
        match self.graves.removed(key) {
            true => drop(self.graves.all.insert(key, at)),
            false => self.segments.remove_live(at),
        }
    }

    /// A newer extent of the block is durable, and does what its grave did.
    pub(crate) fn unbury(&mut self, key: BlockKey) {
        if let Some(at) = self.graves.all.remove(&key) {
            self.segments.remove_live(at);
        }
    }

    /// Cleaning has copied an extent that is in its grave.
    pub(crate) fn rebury(&mut self, key: BlockKey, at: Location) {
        if let Some(former) = self.graves.all.insert(key, at) {
            self.segments.add_live(at);
            self.segments.remove_live(former);
        }
    }

    /// What cannot be read any more where it was is in no grave.
    pub(crate) fn forget_graves_in(&mut self, segment: u32) {
        let here = self.graves.all.extract_if(.., |_, at| at.segment == segment);
        let here: Vec<Location> = here.map(|(_, at)| at).collect();
        here.into_iter().for_each(|at| self.segments.remove_live(at));
    }

    /// The header of a segment's newest use is durable.
    pub(crate) fn header_is_durable(&mut self, segment: u32) {
        let of = self.segments.get_mut(segment);
        if std::mem::replace(&mut of.header_durable, true) {
            return;
        }
        let sequence = of.sequence;
        let over = self.graves.forget_former_uses(segment, sequence);
        over.into_iter().for_each(|at| self.segments.remove_live(at));
    }
}
