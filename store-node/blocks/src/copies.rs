//! What is remembered of contexts that are kept on several nodes: who has said that it keeps one too, who
//! could not take one, and when each node has answered last.
//!
//! It decides nothing by itself: see `blocks/copies.rs`.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use kvasir_proto::{BlockKey, Mark, Namespace, Tenant};

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
    /// On how many nodes. Who would see to fewer has no copy of it: others would wait for its part.
    pub copies: u8,
}

impl CopiedContext {
    pub(crate) fn name(&self) -> CopiedName {
        (self.namespace, self.last)
    }

    pub(crate) fn promise(&self) -> Promise {
        Promise { until_unix_ms: self.until_unix_ms, copies: self.copies }
    }
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

/// How long a context is kept somewhere, and to how many copies that node sees.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Promise {
    pub(crate) until_unix_ms: u64,
    pub(crate) copies: u8,
}

impl Promise {
    pub(crate) fn of(mark: &Mark) -> Promise {
        Promise { until_unix_ms: mark.until_unix_ms, copies: mark.copies }
    }

    /// It is as much as the other one, or more.
    pub(crate) fn covers(self, other: Promise) -> bool {
        self.until_unix_ms >= other.until_unix_ms && self.copies >= other.copies
    }
}

/// Nodes that could not take a context since it was last tried with all of them.
#[derive(Debug, Default)]
struct Failed {
    peers: BTreeSet<Peer>,
    last_ms: u64,
}

/// All of it is of contexts that are kept here.
#[derive(Debug, Default)]
pub(crate) struct Copies {
    /// Who keeps a context too and what it has promised, as far as they have said so.
    holders: BTreeMap<CopiedName, BTreeMap<Peer, Promise>>,
    failed: BTreeMap<CopiedName, Failed>,
    /// When a node was heard of last; of one that was never heard, when it was first asked.
    pub(crate) heard_ms: BTreeMap<Peer, u64>,
    /// Copies to make.
    pub(crate) wanted: VecDeque<Wanted>,
    /// Contexts that had fewer copies than are wanted when they were last looked at.
    short: BTreeSet<CopiedName>,
    /// Where the next look goes on.
    pub(crate) after: Option<CopiedName>,
}

impl Copies {
    /// Those that have promised as much at least.
    pub(crate) fn holders(
        &self,
        name: CopiedName,
        wanted: Promise,
    ) -> impl Iterator<Item = &Peer> + '_ {
        self.known(name).filter(move |(_, of)| of.covers(wanted)).map(|(peer, _)| peer)
    }

    /// Those that keep it, but have promised less: with them a copy costs no bytes.
    pub(crate) fn lesser(
        &self,
        name: CopiedName,
        wanted: Promise,
    ) -> impl Iterator<Item = &Peer> + '_ {
        self.known(name).filter(move |(_, of)| !of.covers(wanted)).map(|(peer, _)| peer)
    }

    fn known(&self, name: CopiedName) -> impl Iterator<Item = (&Peer, Promise)> + '_ {
        let known = self.holders.get(&name).into_iter().flatten();
        known.map(|(peer, of)| (peer, *of))
    }

    pub(crate) fn has(&mut self, name: CopiedName, peer: &Peer, of: Promise) {
        self.holders.entry(name).or_default().insert(peer.clone(), of);
    }

    /// It has not promised as much.
    pub(crate) fn lacks(&mut self, name: CopiedName, peer: &Peer, wanted: Promise) {
        if let Some(holders) = self.holders.get_mut(&name)
            && holders.get(peer).is_some_and(|of| of.covers(wanted))
        {
            holders.remove(peer);
        }
    }

    /// Nothing is known of what it has.
    pub(crate) fn lost(&mut self, name: CopiedName, peer: &Peer) {
        if let Some(holders) = self.holders.get_mut(&name) {
            holders.remove(peer);
        }
    }

    pub(crate) fn is_short(&mut self, name: CopiedName) {
        self.short.insert(name);
    }

    pub(crate) fn is_complete(&mut self, name: CopiedName) {
        self.short.remove(&name);
        self.failed.remove(&name);
    }

    pub(crate) fn contexts_short(&self) -> usize {
        self.short.len()
    }

    /// It could not take the context.
    pub(crate) fn fails(&mut self, now_ms: u64, name: CopiedName, peer: &Peer) {
        let failed = self.failed.entry(name).or_default();
        failed.peers.insert(peer.clone());
        failed.last_ms = now_ms;
    }

    pub(crate) fn has_failed(&self, name: CopiedName, peer: &Peer) -> bool {
        self.failed.get(&name).is_some_and(|failed| failed.peers.contains(peer))
    }

    /// All have failed that could take it: they may be tried again some time after the last one. Answers
    /// whether that is now.
    pub(crate) fn retries(&mut self, now_ms: u64, name: CopiedName, retry_ms: u64) -> bool {
        let is_due = |failed: &Failed| now_ms.saturating_sub(failed.last_ms) >= retry_ms;
        let retries = self.failed.get(&name).is_some_and(is_due);
        if retries {
            self.failed.remove(&name);
        }
        retries
    }

    /// Forgets what is of no context that is there.
    pub(crate) fn retain(&mut self, is_there: impl Fn(CopiedName) -> bool) {
        self.holders.retain(|name, _| is_there(*name));
        self.failed.retain(|name, _| is_there(*name));
        self.short.retain(|name| is_there(*name));
        let is_wanted =
            |wanted: &Wanted| wanted.last().is_some_and(|last| is_there((wanted.namespace, last)));
        self.wanted.retain(is_wanted);
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
