//! I7: never is an acknowledged context-cache block lost by a crash, before its time is over.
//!
//! What a disk has done to a block by itself is known here, since it was the run that did it: then the
//! block and those after it are excused (a lost disk takes two replicas), and nothing else is. What lies
//! on a disk is looked up in its bytes, and in the end every block that was kept is asked for.

use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

use kvasir_proto::BlockKey;

use super::Checker;
use crate::content::Truth;
use crate::seen::Seen;

#[derive(Debug)]
pub struct Durability {
    truth: Rc<Truth>,
    /// Until when, by the node's calendar.
    kept: BTreeMap<(usize, BlockKey), u64>,
    /// Blocks of which a disk has changed an extent.
    rotted: BTreeSet<(usize, BlockKey)>,
}

impl Durability {
    pub fn new(truth: Rc<Truth>) -> Self {
        Durability { truth, kept: BTreeMap::new(), rotted: BTreeSet::new() }
    }

    /// Everything that a node has to keep.
    pub fn kept(&self, node: usize) -> impl Iterator<Item = BlockKey> + '_ {
        self.kept.keys().filter(move |(of, _)| *of == node).map(|(_, key)| *key)
    }

    fn expire(&mut self, node: usize, unix_ms: u64) {
        self.kept.retain(|(of, _), until_ms| *of != node || *until_ms > unix_ms);
    }

    fn missing(&self, node: usize, there: &BTreeSet<BlockKey>) -> Vec<BlockKey> {
        self.kept(node).filter(|key| !there.contains(key)).collect()
    }

    /// A block that the disk has lost by itself is not expected any more, nor are those after it.
    fn excuse(&mut self, node: usize, lost: BlockKey) {
        let truth = Rc::clone(&self.truth);
        let follows = |key: &BlockKey| truth.chain(*key).contains(&lost);
        self.kept.retain(|(of, key), _| *of != node || !follows(key));
    }

    fn look(&mut self, node: usize, there: &BTreeSet<BlockKey>) -> Result<(), String> {
        // One that has rotted is found out by whoever reads it; those after it go with it.
        let rotted = |key: &BlockKey| {
            self.truth.chain(*key).iter().any(|of| self.rotted.contains(&(node, *of)))
        };
        match self.missing(node, there).into_iter().find(|key| !rotted(key)) {
            Some(key) => Err(format!("node {node} was to keep {key:?} and has lost it")),
            None => Ok(()),
        }
    }
}

impl Checker for Durability {
    fn name(&self) -> &'static str {
        "I7 durability"
    }

    fn see(&mut self, _now_us: u64, seen: &Seen) -> Result<(), String> {
        match seen {
            Seen::Kept { node, keys, until_unix_ms } => {
                for key in keys {
                    let until_ms = self.kept.entry((*node, *key)).or_insert(0);
                    *until_ms = (*until_ms).max(*until_unix_ms);
                }
            }
            Seen::DiskRotted { node, keys } => {
                self.rotted.extend(keys.iter().map(|key| (*node, *key)));
            }
            Seen::DiskGone { node, key, disk_lies } => {
                let excused = *disk_lies || self.rotted.contains(&(*node, *key));
                if !excused && self.kept.contains_key(&(*node, *key)) {
                    return Err(format!(
                        "node {node} was to keep {key:?} and says that its extent is rotten, which \
                         the disk has not touched"
                    ));
                }
                self.excuse(*node, *key);
            }
            Seen::OnDisk { node, keys } => {
                let rotted = |key: &BlockKey| self.rotted.contains(&(*node, *key));
                if let Some(key) = self.missing(*node, keys).iter().find(|key| !rotted(key)) {
                    return Err(format!(
                        "node {node} was to keep {key:?}, and its bytes are nowhere on the disk"
                    ));
                }
            }
            Seen::Started { at, on_ssd, unix_ms, disk_lies } => {
                self.expire(at.node, *unix_ms);
                let there: BTreeSet<BlockKey> = on_ssd.iter().copied().collect();
                if *disk_lies {
                    for key in self.missing(at.node, &there) {
                        self.excuse(at.node, key);
                    }
                }
                self.look(at.node, &there)?;
            }
            Seen::OnSsd { node, unix_ms, keys } => {
                self.expire(*node, *unix_ms);
                self.look(*node, &keys.iter().copied().collect())?;
            }
            Seen::AskedFor { at, key, bytes } if self.kept.contains_key(&(at.node, *key)) => {
                let right = self.truth.blocks.get(key).map(|block| block.bytes);
                let rotted = |of: &BlockKey| self.rotted.contains(&(at.node, *of));
                if *bytes != right && !self.truth.chain(*key).iter().any(rotted) {
                    let what = if bytes.is_some() { "others" } else { "nothing" };
                    return Err(format!("{at:?} was to keep {key:?}, and gives {what} for it"));
                }
            }
            _ => {}
        }
        Ok(())
    }
}
