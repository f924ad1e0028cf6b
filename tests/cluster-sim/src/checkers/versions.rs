//! A name stands for one content until it is removed: what was put under it before a removal that a client was told
//! of comes back by nothing, neither from the SSD nor by a restart.
//!
//! Nothing is said of what was being put when it was removed, of what a disk has that was rotten or whose node was given
//! other bytes than lie there, and of what a node that drains may have sent about.

use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

use kvasir_proto::{BlockKey, Share};

use super::Checker;
use crate::content::Truth;
use crate::seen::{Life, Seen};

#[derive(Debug)]
pub struct Versions {
    truth: Rc<Truth>,
    /// Open puts, and what they write.
    puts: BTreeMap<(Life, Share), Vec<BlockKey>>,
    /// The last version of which a put was begun.
    begun: BTreeMap<(usize, BlockKey), u32>,
    /// What is being removed, and no put of it was open since.
    removing: BTreeSet<(usize, BlockKey)>,
    /// Older ones are gone for good.
    eldest: BTreeMap<(usize, BlockKey), u32>,
    /// Blocks have gone from node to node.
    is_mixed: bool,
}

impl Versions {
    pub fn new(truth: Rc<Truth>) -> Self {
        Versions {
            truth,
            puts: BTreeMap::new(),
            begun: BTreeMap::new(),
            removing: BTreeSet::new(),
            eldest: BTreeMap::new(),
            is_mixed: false,
        }
    }

    fn forget(&mut self, node: usize) {
        self.eldest.retain(|(of, _), _| *of != node);
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
                self.puts.insert((*at, *share), keys.clone());
            }
            Seen::Ended { at, share } => drop(self.puts.remove(&(*at, *share))),
            // Who is of another namespace removes nothing.
            Seen::ObjectRemoved { node, namespace, key }
                if self.truth.blocks.get(key).is_some_and(|of| of.namespace == *namespace) =>
            {
                let mut open = self.puts.iter();
                if !open.any(|((at, _), keys)| at.node == *node && keys.contains(key)) {
                    self.removing.insert((*node, *key));
                }
            }
            Seen::ObjectsErased { node, keys } => {
                for key in keys {
                    let of = (*node, *key);
                    if self.removing.remove(&of)
                        && let Some(begun) = self.begun.get(&of)
                    {
                        self.eldest.insert(of, begun + 1);
                    }
                }
            }
            Seen::Listing { at, blocks } if !self.is_mixed && !self.eldest.is_empty() => {
                for block in blocks {
                    let Some(eldest) = self.eldest.get(&(at.node, block.key)) else { continue };
                    let version = self.truth.version_of(block.key, &block.bytes);
                    if let Some(version) = version.filter(|version| version < eldest) {
                        return Err(format!(
                            "{at:?} has version {version} of {:?}, and all before {eldest} were \
                             removed for good",
                            block.key
                        ));
                    }
                }
            }
            Seen::DrainBegan { .. } => self.is_mixed = true,
            Seen::DiskRotted { node, .. } => self.forget(*node),
            Seen::Started { at, disk_lies: true, .. } => self.forget(at.node),
            Seen::Crashed { at } => {
                self.puts.retain(|(of, _), _| of != at);
                self.removing.retain(|(node, _)| *node != at.node);
            }
            _ => {}
        }
        Ok(())
    }
}
