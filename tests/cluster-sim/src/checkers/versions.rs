//! What a name stands for. What was put under it before a removal that a client was told of comes back by nothing, neither
//! from the SSD nor by a restart. What was there before another one was stored, in its place or after it had made room,
//! does not come back while the node lives.
//!
//! Nothing is said of what was being put when it was removed or when the other one was stored, of blocks of which a disk has
//! changed an extent, of a disk whose node was given other bytes than lie there, of what is found by a start that could
//! not read all of a disk (it may have been removed there), and of what a node that drains may have sent about; of what is
//! to be kept only that it stays removed.

use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

use kvasir_proto::{BlockKey, Share};

use super::Checker;
use crate::content::Truth;
use crate::seen::{Life, Seen};

#[derive(Debug)]
pub(super) struct Versions {
    truth: Rc<Truth>,
    /// Open puts, and what they write in which versions.
    puts: BTreeMap<(Life, Share), Vec<(BlockKey, u32)>>,
    /// The last version of which a put was begun.
    begun: BTreeMap<(usize, BlockKey), u32>,
    /// What is being removed, and no put of it was open since.
    removing: BTreeSet<(usize, BlockKey)>,
    /// Older ones are gone for good.
    eldest: BTreeMap<(usize, BlockKey), u32>,
    /// The same until the node ends.
    stored: BTreeMap<(Life, BlockKey), u32>,
    /// What is kept stays when another one is put before that is known.
    kept: BTreeSet<(usize, BlockKey)>,
    /// Blocks have gone from node to node.
    is_mixed: bool,
}

impl Versions {
    pub(super) fn new(truth: Rc<Truth>) -> Self {
        Versions {
            truth,
            puts: BTreeMap::new(),
            begun: BTreeMap::new(),
            removing: BTreeSet::new(),
            eldest: BTreeMap::new(),
            stored: BTreeMap::new(),
            kept: BTreeSet::new(),
            is_mixed: false,
        }
    }

    fn forget(&mut self, node: usize) {
        self.eldest.retain(|(of, _), _| *of != node);
        self.stored.retain(|(of, _), _| of.node != node);
    }

    /// Those of puts that are open.
    fn open(&self, node: usize, key: BlockKey) -> impl Iterator<Item = u32> + '_ {
        let puts = self.puts.iter().filter(move |((at, _), _)| at.node == node);
        let all = puts.flat_map(|(_, objects)| objects);
        all.filter(move |(of, _)| *of == key).map(|(_, version)| *version)
    }
}

impl Checker for Versions {
    fn name(&self) -> &'static str {
        "versions"
    }

    fn see(&mut self, _now_us: u64, seen: &Seen) -> Result<(), String> {
        match seen {
            Seen::PutBegan { at, share, keys, versions, .. } => {
                for (key, version) in keys.iter().zip(versions) {
                    let begun = self.begun.entry((at.node, *key)).or_insert(0);
                    *begun = (*begun).max(*version);
                    self.removing.remove(&(at.node, *key));
                }
                let objects = keys.iter().copied().zip(versions.iter().copied());
                self.puts.insert((*at, *share), objects.collect());
            }
            Seen::Ended { at, share } => drop(self.puts.remove(&(*at, *share))),
            // Who is of another namespace removes nothing.
            Seen::ObjectRemoved { node, namespace, key }
                if self.truth.blocks.get(key).is_some_and(|of| of.namespace == *namespace)
                    && self.open(*node, *key).next().is_none() =>
            {
                self.removing.insert((*node, *key));
            }
            Seen::ObjectsErased { node, keys } => {
                for key in keys {
                    let of = (*node, *key);
                    if self.removing.remove(&of)
                        && let Some(begun) = self.begun.get(&of)
                    {
                        self.eldest.insert(of, begun + 1);
                        self.kept.remove(&of);
                    }
                }
            }
            Seen::ObjectsStored { at, keys, .. } => {
                for key in keys {
                    // Which one it is nobody knows where two are put at once.
                    let eldest = self.open(at.node, *key).min();
                    let eldest = eldest.filter(|_| !self.kept.contains(&(at.node, *key)));
                    eldest.map(|version| self.stored.insert((*at, *key), version));
                }
            }
            Seen::KeepAsked { node, keys, .. } => {
                let objects = keys.iter().filter(|key| self.truth.is_object(**key));
                self.kept.extend(objects.map(|key| (*node, *key)));
                self.stored.retain(|(at, key), _| at.node != *node || !keys.contains(key));
            }
            Seen::Listing { at, blocks } if !self.is_mixed => {
                for block in blocks {
                    let removed = self.eldest.get(&(at.node, block.key));
                    let stored = self.stored.get(&(*at, block.key));
                    let Some(eldest) = removed.max(stored) else { continue };
                    let begun = self.begun.get(&(at.node, block.key)).copied().unwrap_or(0);
                    let version = self.truth.version_of(block.key, &block.bytes, begun);
                    if let Some(version) = version.filter(|version| version < eldest) {
                        let why = if removed >= stored { "removed for good" } else { "replaced" };
                        return Err(format!(
                            "{at:?} has version {version} of {:?}, and all before {eldest} were {why}",
                            block.key
                        ));
                    }
                }
            }
            Seen::DrainBegan { .. } => self.is_mixed = true,
            Seen::DiskRotted { node, keys } => {
                self.eldest.retain(|(of, key), _| of != node || !keys.contains(key));
                self.stored.retain(|(of, key), _| of.node != *node || !keys.contains(key));
            }
            Seen::Started { at, disk_lies: true, .. } => self.forget(at.node),
            Seen::Started { at, on_ssd, is_partial: true, .. } => {
                self.eldest.retain(|(of, key), _| *of != at.node || !on_ssd.contains(key));
            }
            Seen::Crashed { at } => {
                self.puts.retain(|(of, _), _| of != at);
                self.stored.retain(|(of, _), _| of != at);
                self.removing.retain(|(node, _)| *node != at.node);
            }
            _ => {}
        }
        Ok(())
    }
}
