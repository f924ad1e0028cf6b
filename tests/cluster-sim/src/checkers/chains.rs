//! DESIGN §5: within a chain, leaves go first, so that what a node has stays closed under prefix. A block
//! without the one before it could be found by nobody.

use std::collections::BTreeSet;
use std::rc::Rc;

use kvasir_proto::BlockKey;

use super::Checker;
use crate::content::Truth;
use crate::seen::Seen;

#[derive(Debug)]
pub(super) struct Chains {
    truth: Rc<Truth>,
}

impl Chains {
    pub(super) fn new(truth: Rc<Truth>) -> Self {
        Chains { truth }
    }

    fn orphan(&self, keys: impl Iterator<Item = BlockKey> + Clone) -> Option<BlockKey> {
        let there: BTreeSet<BlockKey> = keys.clone().collect();
        let mut keys = keys;
        keys.find(|key| {
            let parent = self.truth.blocks.get(key).and_then(|block| block.parent);
            parent.is_some_and(|parent| !there.contains(&parent))
        })
    }
}

impl Checker for Chains {
    fn name(&self) -> &'static str {
        "chains"
    }

    fn see(&mut self, _now_us: u64, seen: &Seen) -> Result<(), String> {
        let (place, orphan) = match seen {
            Seen::Listing { at, blocks } => {
                (format!("memory of {at:?}"), self.orphan(blocks.iter().map(|block| block.key)))
            }
            Seen::OnSsd { node, keys, .. } => {
                (format!("SSD of node {node}"), self.orphan(keys.iter().copied()))
            }
            // What is held for a request begins with a first block, and each follows the one before it.
            Seen::Held { at, share, keys, .. } => {
                let parents = std::iter::once(None).chain(keys.iter().map(|key| Some(*key)));
                let parent = |key: &BlockKey| self.truth.blocks.get(key).map(|block| block.parent);
                let stray =
                    keys.iter().zip(parents).find(|(key, before)| parent(key) != Some(*before));
                return match stray {
                    Some((key, _)) => Err(format!(
                        "{at:?} holds {key:?} for {share}, and not the block before it"
                    )),
                    None => Ok(()),
                };
            }
            _ => return Ok(()),
        };
        match orphan {
            Some(key) => Err(format!("{key:?} is in the {place}, and the block before it is not")),
            None => Ok(()),
        }
    }
}
