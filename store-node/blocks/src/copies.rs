//! What is remembered of contexts that are kept on several nodes: who has said that it keeps one too, and
//! when each node has answered last.
//!
//! It decides nothing by itself: see `blocks/copies.rs`.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use kvasir_proto::{BlockKey, Namespace, Tenant};

use crate::replicas::{Peer, Wanted};

/// A context that is kept here, for which copies on other nodes are wanted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CopiedContext {
    pub tenant: Tenant,
    pub namespace: Namespace,
    /// Of its last block.
    pub last: BlockKey,
    /// A copy that is kept less long is none.
    pub until_unix_ms: u64,
}

/// What another node answers when it is asked for contexts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PeerCopies {
    pub peer: Peer,
    /// `None`: it does not answer, or cannot say.
    pub answer: Option<HeldCopies>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HeldCopies {
    pub incarnation: u64,
    /// One for each context that was asked for.
    pub holds: Vec<bool>,
}

/// By its last block: of two tenants only one keeps a block.
pub(crate) type CopiedName = (Namespace, BlockKey);

#[derive(Debug, Default)]
pub(crate) struct Copies {
    /// Who keeps a context too and until when, as far as they have said so. Only of contexts that are kept here.
    holders: BTreeMap<CopiedName, BTreeMap<Peer, u64>>,
    /// When a node was heard of last; of one that was never heard, when it was first asked.
    pub(crate) heard_ms: BTreeMap<Peer, u64>,
    /// Copies to make.
    pub(crate) wanted: VecDeque<Wanted>,
    /// Contexts that had fewer copies than are wanted when they were last looked at.
    pub(crate) short: BTreeSet<CopiedName>,
    /// Where the next look goes on.
    pub(crate) after: Option<CopiedName>,
}

impl Copies {
    /// Those that keep it until then at least.
    pub(crate) fn holders(
        &self,
        name: CopiedName,
        until_unix_ms: u64,
    ) -> impl Iterator<Item = &Peer> + '_ {
        self.known(name).filter(move |(_, of)| *of >= until_unix_ms).map(|(peer, _)| peer)
    }

    /// Those that keep it, but for less long: with them a copy costs no bytes.
    pub(crate) fn shorter(
        &self,
        name: CopiedName,
        until_unix_ms: u64,
    ) -> impl Iterator<Item = &Peer> + '_ {
        self.known(name).filter(move |(_, of)| *of < until_unix_ms).map(|(peer, _)| peer)
    }

    fn known(&self, name: CopiedName) -> impl Iterator<Item = (&Peer, u64)> + '_ {
        let known = self.holders.get(&name).into_iter().flatten();
        known.map(|(peer, until_unix_ms)| (peer, *until_unix_ms))
    }

    /// All of which something is remembered.
    pub(crate) fn names(&self) -> Vec<CopiedName> {
        self.holders.keys().copied().collect()
    }

    pub(crate) fn has(&mut self, name: CopiedName, peer: &Peer, until_unix_ms: u64) {
        self.holders.entry(name).or_default().insert(peer.clone(), until_unix_ms);
    }

    /// It has not got it until then.
    pub(crate) fn lacks(&mut self, name: CopiedName, peer: &Peer, until_unix_ms: u64) {
        if let Some(holders) = self.holders.get_mut(&name)
            && holders.get(peer).is_some_and(|of| *of >= until_unix_ms)
        {
            holders.remove(peer);
        }
    }

    pub(crate) fn forget(&mut self, name: CopiedName) {
        self.holders.remove(&name);
        self.short.remove(&name);
        self.wanted.retain(|wanted| wanted.last() != Some(name.1));
    }

    /// A node has answered, or has not. Answers whether what it had is to be counted on.
    pub(crate) fn hear(
        &mut self,
        now_ms: u64,
        peer: &Peer,
        answers: bool,
        gone_after_ms: u64,
    ) -> bool {
        let heard_ms = self.heard_ms.entry(peer.clone()).or_insert(now_ms);
        if answers {
            *heard_ms = now_ms;
        }
        now_ms.saturating_sub(*heard_ms) < gone_after_ms
    }
}
