//! Objects of clients: one is found when all of it is written and not before, and what a dead client held is
//! free. That their bytes are those that were put is `bytes`', and that nobody writes them any more `writers`'.

use std::collections::{BTreeMap, BTreeSet};

use kvasir_blocks::AttachEpoch;
use kvasir_proto::{BlockKey, Share};

use super::Checker;
use crate::seen::{Life, Seen};

#[derive(Debug, Default)]
pub struct Objects {
    /// Whatever some client has written and said so of.
    put: BTreeSet<BlockKey>,
    /// Stored just now: the next list of that node has them.
    stored: BTreeSet<(Life, BlockKey)>,
    /// Open puts, and whose they are.
    puts: BTreeMap<(Life, Share), AttachEpoch>,
    /// What lives as long as a client.
    ephemeral: BTreeMap<(Life, BlockKey), AttachEpoch>,
    /// Tenants asked for these to be kept.
    kept: BTreeSet<(usize, BlockKey)>,
    /// Clients that ended just now.
    gone: BTreeSet<(Life, AttachEpoch)>,
}

impl Objects {
    fn look(&mut self, at: Life, listed: &BTreeSet<BlockKey>) -> Result<(), String> {
        let missing = self.stored.iter().find(|(of, key)| *of == at && !listed.contains(key));
        if let Some((_, key)) = missing {
            return Err(format!("{at:?} says that {key:?} is stored, and does not list it"));
        }
        self.stored.retain(|(of, _)| *of != at);
        for gone in self.gone.iter().filter(|(of, _)| *of == at) {
            let of_gone = |((of, _), by): &(&(Life, Share), &AttachEpoch)| (*of, **by) == *gone;
            if let Some(((_, share), _)) = self.puts.iter().find(of_gone) {
                return Err(format!("{at:?} has {share}, of client {:?} that has ended", gone.1));
            }
            let of_gone = |((of, _), by): &(&(Life, BlockKey), &AttachEpoch)| (*of, **by) == *gone;
            let mut keys = self.ephemeral.iter().filter(of_gone).map(|((_, key), _)| *key);
            let left =
                |key: &BlockKey| listed.contains(key) && !self.kept.contains(&(at.node, *key));
            if let Some(key) = keys.find(left) {
                return Err(format!(
                    "{at:?} lists {key:?}, which was to go with client {:?}",
                    gone.1
                ));
            }
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
            Seen::PutBegan { at, share, epoch } => {
                self.puts.insert((*at, *share), *epoch);
            }
            Seen::Ended { at, share } => {
                self.puts.remove(&(*at, *share));
            }
            Seen::ObjectsStored { at, keys } => {
                self.put.extend(keys);
                self.stored.extend(keys.iter().map(|key| (*at, *key)));
            }
            Seen::Ephemeral { at, epoch, key } => {
                self.ephemeral.insert((*at, *key), *epoch);
            }
            Seen::ObjectRemoved { node, key, .. } => {
                self.ephemeral.retain(|(at, of), _| at.node != *node || of != key);
            }
            Seen::KeepAsked { node, keys, .. } => {
                self.kept.extend(keys.iter().map(|key| (*node, *key)));
            }
            Seen::Found { at, keys, .. } => {
                if let Some(key) = keys.iter().find(|key| !self.put.contains(key)) {
                    return Err(format!("{key:?} is found at {at:?}, and nobody has put it"));
                }
            }
            Seen::ClientGone { at, epoch } => {
                self.gone.insert((*at, *epoch));
            }
            Seen::Listing { at, blocks } if !self.stored.is_empty() || !self.gone.is_empty() => {
                return self.look(*at, &blocks.iter().map(|block| block.key).collect());
            }
            Seen::Crashed { at } => {
                self.stored.retain(|(of, _)| of != at);
                self.puts.retain(|(of, _), _| of != at);
                self.ephemeral.retain(|(of, _), _| of != at);
                self.gone.retain(|(of, _)| of != at);
            }
            _ => {}
        }
        Ok(())
    }
}
