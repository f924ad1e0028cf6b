//! Objects of clients: one is found when all of it is written and not before, what a dead client held is free,
//! and with a client goes only what is its own. That the bytes of objects are those that were put is `bytes`',
//! and that nobody writes them any more `writers`'.

use std::collections::{BTreeMap, BTreeSet};

use kvasir_blocks::AttachEpoch;
use kvasir_proto::{BlockKey, Namespace, Share};

use super::Checker;
use crate::seen::{Life, Seen};

#[derive(Debug, Default)]
pub(super) struct Objects {
    /// Whatever some client has written and said so of, and the namespace of that client.
    put: BTreeMap<BlockKey, Namespace>,
    /// Stored just now: the next list of that node has them.
    stored: BTreeSet<(Life, BlockKey)>,
    /// Open puts, whose they are, and what they write.
    puts: BTreeMap<(Life, Share), (AttachEpoch, Vec<BlockKey>)>,
    /// What lives as long as a client.
    ephemeral: BTreeMap<(Life, BlockKey), AttachEpoch>,
    /// Tenants have asked for these to be kept, so many times, and have not heard yet.
    asked: BTreeMap<(usize, BlockKey), u32>,
    /// They were, once.
    kept: BTreeSet<(usize, BlockKey)>,
    /// What was being kept when the client ended that it was to go with: it goes when it is not kept after all.
    waiting: BTreeSet<(Life, BlockKey)>,
    /// Clients that ended just now.
    gone: BTreeSet<(Life, AttachEpoch)>,
    /// What was removed, and nobody has begun to put since: whether for good already.
    removed: BTreeMap<(usize, BlockKey), bool>,
    /// A node that drains may have sent another one what that has removed.
    is_mixed: bool,
}

impl Objects {
    fn look(&mut self, at: Life, listed: &BTreeSet<BlockKey>) -> Result<(), String> {
        let missing = self.stored.iter().find(|(of, key)| *of == at && !listed.contains(key));
        if let Some((_, key)) = missing {
            return Err(format!("{at:?} says that {key:?} is stored, and does not list it"));
        }
        self.stored.retain(|(of, _)| *of != at);
        for gone in self.gone.iter().filter(|(of, _)| *of == at) {
            let mut puts = self.puts.iter();
            if let Some(((_, share), _)) = puts.find(|((of, _), (by, _))| (*of, *by) == *gone) {
                return Err(format!("{at:?} has {share}, of client {:?} that has ended", gone.1));
            }
            let of_gone = |((of, _), by): &(&(Life, BlockKey), &AttachEpoch)| (*of, **by) == *gone;
            let keys = self.ephemeral.iter().filter(of_gone).map(|((_, key), _)| *key);
            let left = |key: &BlockKey| {
                listed.contains(key)
                    && !self.kept.contains(&(at.node, *key))
                    && !self.asked.contains_key(&(at.node, *key))
            };
            if let Some(key) = keys.clone().find(left) {
                return Err(format!(
                    "{at:?} lists {key:?}, which was to go with client {:?}",
                    gone.1
                ));
            }
            self.waiting.extend(keys.map(|key| (at, key)));
        }
        let is_at = |of: &Life, key: &BlockKey| {
            *of == at && listed.contains(key) && !self.kept.contains(&(at.node, *key))
        };
        self.waiting.retain(|(of, key)| *of != at || is_at(of, key));
        let over =
            |(of, key): &&(Life, BlockKey)| *of == at && !self.asked.contains_key(&(at.node, *key));
        if let Some((_, key)) = self.waiting.iter().find(over) {
            return Err(format!(
                "{at:?} lists {key:?}, which is not kept and was to go with a client that has ended"
            ));
        }
        let gone = std::mem::take(&mut self.gone);
        self.ephemeral.retain(|(of, _), by| !gone.contains(&(*of, *by)));
        self.gone = gone.into_iter().filter(|(of, _)| *of != at).collect();
        Ok(())
    }
}

impl Checker for Objects {
    fn name(&self) -> &'static str {
        "objects"
    }

    fn see(&mut self, _now_us: u64, seen: &Seen) -> Result<(), String> {
        match seen {
            Seen::PutBegan { at, share, epoch, keys, .. } => {
                self.puts.insert((*at, *share), (*epoch, keys.clone()));
                self.removed.retain(|(node, key), _| *node != at.node || !keys.contains(key));
            }
            Seen::ObjectsErased { node, keys } => {
                for key in keys {
                    self.removed.entry((*node, *key)).and_modify(|for_good| *for_good = true);
                }
            }
            Seen::DrainBegan { .. } => self.is_mixed = true,
            // It may have been told nothing of a removal, or of what that was of.
            Seen::Started { at, disk_lies: true, .. } => {
                self.removed.retain(|(node, _), _| *node != at.node);
            }
            Seen::Started { at, on_ssd, is_partial: true, .. } => {
                self.removed.retain(|(node, key), _| *node != at.node || !on_ssd.contains(key));
            }
            Seen::Started { at, on_ssd, .. } if !self.is_mixed => {
                let is_removed =
                    |key: &&BlockKey| self.removed.get(&(at.node, **key)) == Some(&true);
                if let Some(key) = on_ssd.iter().find(is_removed) {
                    return Err(format!("{key:?} comes back at {at:?}, and was removed for good"));
                }
            }
            Seen::Ended { at, share } => {
                self.puts.remove(&(*at, *share));
            }
            Seen::ObjectsStored { at, namespace, keys } => {
                self.put.extend(keys.iter().map(|key| (*key, *namespace)));
                // Whatever was there had gone before.
                self.ephemeral.retain(|(of, key), _| of != at || !keys.contains(key));
                self.waiting.retain(|(of, key)| of != at || !keys.contains(key));
                self.stored.extend(keys.iter().map(|key| (*at, *key)));
            }
            Seen::Ephemeral { at, epoch, key } => {
                self.ephemeral.insert((*at, *key), *epoch);
            }
            // Who is of another namespace removes nothing.
            Seen::ObjectRemoved { node, namespace, key }
                if self.put.get(key) == Some(namespace) =>
            {
                self.ephemeral.retain(|(at, of), _| at.node != *node || of != key);
                self.waiting.retain(|(at, of)| at.node != *node || of != key);
                let is_it =
                    |((at, _), (_, keys)): (&(Life, Share), &(AttachEpoch, Vec<BlockKey>))| {
                        at.node == *node && keys.contains(key)
                    };
                if !self.puts.iter().any(is_it) {
                    self.removed.insert((*node, *key), false);
                }
            }
            Seen::ObjectWent { at, epoch, key }
                if self.ephemeral.get(&(*at, *key)) != Some(epoch) =>
            {
                return Err(format!(
                    "{key:?} goes at {at:?} with client {epoch:?}, whose it is not"
                ));
            }
            Seen::KeepAsked { node, keys, .. } => {
                for key in keys {
                    *self.asked.entry((*node, *key)).or_insert(0) += 1;
                    self.removed.remove(&(*node, *key));
                }
            }
            Seen::KeepEnded { node, keys, blocks } => {
                let kept = keys.iter().take(blocks.unwrap_or(0) as usize);
                let objects = kept.filter(|key| self.put.contains_key(key));
                self.kept.extend(objects.map(|key| (*node, *key)));
                for key in keys {
                    let Some(asked) = self.asked.get_mut(&(*node, *key)) else { continue };
                    *asked -= 1;
                    if *asked == 0 {
                        self.asked.remove(&(*node, *key));
                    }
                }
            }
            Seen::Found { at, keys, .. } => {
                if let Some(key) = keys.iter().find(|key| !self.put.contains_key(key)) {
                    return Err(format!("{key:?} is found at {at:?}, and nobody has put it"));
                }
            }
            Seen::ClientGone { at, epoch } => {
                self.gone.insert((*at, *epoch));
            }
            Seen::Listing { at, blocks }
                if !self.stored.is_empty() || !self.gone.is_empty() || !self.waiting.is_empty() =>
            {
                return self.look(*at, &blocks.iter().map(|block| block.key).collect());
            }
            Seen::Crashed { at } => {
                self.stored.retain(|(of, _)| of != at);
                self.puts.retain(|(of, _), _| of != at);
                self.ephemeral.retain(|(of, _), _| of != at);
                self.gone.retain(|(of, _)| of != at);
                self.waiting.retain(|(of, _)| of != at);
                self.asked.retain(|(node, _), _| *node != at.node);
            }
            _ => {}
        }
        Ok(())
    }
}
