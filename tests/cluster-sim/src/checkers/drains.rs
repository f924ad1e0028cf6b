//! A drain: the node takes no work and promises nothing from its beginning on, and does not say that it has
//! drained while anything is under way. That nothing is lost when it leaves is `durability`'s.

use std::collections::{BTreeMap, BTreeSet};

use kvasir_proto::{Share, Side};

use super::Checker;
use crate::seen::{Life, Seen};

#[derive(Debug, Default)]
pub(super) struct Drains {
    /// By node.
    draining: BTreeMap<usize, Life>,
    open: BTreeSet<(Life, Share)>,
}

impl Checker for Drains {
    fn name(&self) -> &'static str {
        "drains"
    }

    fn see(&mut self, _now_us: u64, seen: &Seen) -> Result<(), String> {
        match seen {
            Seen::DrainBegan { at } => {
                self.draining.insert(at.node, *at);
            }
            Seen::DrainStopped { at } => {
                self.draining.remove(&at.node);
            }
            Seen::Allocated { at, share, .. } => {
                if share.side != Side::Source && self.draining.contains_key(&at.node) {
                    return Err(format!("{at:?} drains, and takes {share}"));
                }
                self.open.insert((*at, *share));
            }
            Seen::Ended { at, share } => {
                self.open.remove(&(*at, *share));
            }
            Seen::KeepAsked { node, .. }
            | Seen::ContextAsked { node, expires_unix_ms: Some(_), .. }
                if self.draining.contains_key(node) =>
            {
                return Err(format!("node {node} drains, and promises what it did not before"));
            }
            Seen::Drained { at } => {
                if !self.draining.contains_key(&at.node) {
                    return Err(format!("{at:?} says that it has drained, and does not drain"));
                }
                if let Some((_, share)) = self.open.iter().find(|(of, _)| of == at) {
                    return Err(format!("{at:?} says that it has drained, and has {share}"));
                }
            }
            Seen::Crashed { at } => {
                self.draining.remove(&at.node);
                self.open.retain(|(of, _)| of != at);
            }
            _ => {}
        }
        Ok(())
    }
}
