//! What is remembered of contexts that are kept on several nodes: who has said that it keeps one too, who
//! could not take one, and when each node has answered last.
//!
//! It decides nothing by itself: see `blocks/copies.rs`.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use kvasir_mutation::{Mutation, mutated};
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
    pub expires_unix_ms: u64,
    /// On how many nodes. Who would see to fewer has no copy of it: others would wait for its part.
    pub copies: u8,
}

impl CopiedContext {
    pub(crate) fn name(&self) -> CopiedName {
        (self.namespace, self.last)
    }

    pub(crate) fn promise(&self) -> Promise {
        Promise { expires_unix_ms: self.expires_unix_ms, copies: self.copies }
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
    pub(crate) expires_unix_ms: u64,
    pub(crate) copies: u8,
}

impl Promise {
    const NONE: Promise = Promise { expires_unix_ms: 0, copies: 0 };

    pub(crate) fn of(mark: &Mark) -> Promise {
        Promise { expires_unix_ms: mark.expires_unix_ms, copies: mark.copies }
    }

    /// It is as much as the other one, or more.
    pub(crate) fn covers(self, other: Promise) -> bool {
        self.expires_unix_ms >= other.expires_unix_ms && self.copies >= other.copies
    }
}

/// Nodes that could not take a context since it was last tried with all of them.
#[derive(Debug, Default)]
struct Failed {
    peers: BTreeSet<Peer>,
    last_ms: u64,
    /// How often all have been tried again: each time it takes twice as long, up to a limit.
    rounds: u32,
}

/// The longest wait is so many times the first one, as a power of two.
const ROUNDS_MAX: u32 = 5;

/// Copies that nobody waits for, with the keys of their chains.
const FOUND_MAX: usize = 256;

fn name_of(wanted: &Wanted) -> Option<CopiedName> {
    wanted.last().map(|last| (wanted.namespace, last))
}

/// All of it is of contexts that are kept here.
#[derive(Debug, Default)]
pub(crate) struct Copies {
    /// Who keeps a context too and what it has promised, as far as they have said so.
    holders: BTreeMap<CopiedName, BTreeMap<Peer, Promise>>,
    failed: BTreeMap<CopiedName, Failed>,
    /// When a node was heard of last; of one that was never heard, when it was first asked.
    pub(crate) heard_ms: BTreeMap<Peer, u64>,
    /// Who has got a copy since the others were last asked: an answer that it has none is from before.
    fresh: BTreeSet<(CopiedName, Peer)>,
    /// Copies to make: for somebody who waits, and what was found to be lacking.
    awaited: VecDeque<Wanted>,
    found: VecDeque<Wanted>,
    /// The last one was for somebody who waits.
    was_awaited: bool,
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
        let covers = move |(_, of): &(&Peer, Promise)| {
            of.covers(wanted)
                || mutated(Mutation::ShorterReplicaCounts) && of.copies >= wanted.copies
        };
        self.known(name).filter(covers).map(|(peer, _)| peer)
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

    /// It has just got a copy.
    pub(crate) fn gets(&mut self, name: CopiedName, peer: &Peer, of: Promise) {
        self.has(name, peer, of);
        self.fresh.insert((name, peer.clone()));
    }

    /// The others are asked from now on.
    pub(crate) fn are_asked_for(&mut self) {
        self.fresh.clear();
    }

    /// It says that it has not promised as much. Answers whether that is from before it got a copy.
    pub(crate) fn lacks(&mut self, name: CopiedName, peer: &Peer, wanted: Promise) -> bool {
        if self.fresh.contains(&(name, peer.clone())) {
            return true;
        }
        if let Some(holders) = self.holders.get_mut(&name)
            && holders.get(peer).is_some_and(|of| of.covers(wanted))
        {
            holders.remove(peer);
        }
        false
    }

    /// It does not answer: what it had may still be there, and is not counted on.
    pub(crate) fn is_silent(&mut self, name: CopiedName, peer: &Peer) {
        let holders = self.holders.get_mut(&name);
        if let Some(of) = holders.and_then(|holders| holders.get_mut(peer)) {
            *of = Promise::NONE;
        }
    }

    /// A copy there has failed.
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
        let Some(failed) = self.failed.get_mut(&name) else { return false };
        let wait_ms = retry_ms.saturating_mul(1 << failed.rounds.min(ROUNDS_MAX));
        let retries = now_ms.saturating_sub(failed.last_ms) >= wait_ms;
        if retries {
            failed.peers.clear();
            failed.last_ms = now_ms;
            failed.rounds = failed.rounds.saturating_add(1);
        }
        retries
    }

    /// Forgets what is of no context that is there.
    pub(crate) fn retain(&mut self, is_there: impl Fn(CopiedName) -> bool) {
        self.holders.retain(|name, _| is_there(*name));
        self.failed.retain(|name, _| is_there(*name));
        self.short.retain(|name| is_there(*name));
        self.fresh.retain(|(name, _)| is_there(*name));
        let is_wanted = |wanted: &Wanted| name_of(wanted).is_some_and(&is_there);
        self.awaited.retain(is_wanted);
        self.found.retain(is_wanted);
    }

    /// Whether this copy is among those to make.
    pub(crate) fn is_wanted(&self, name: CopiedName, kept: Mark, awaited: bool) -> bool {
        let is_it = |wanted: &Wanted| name_of(wanted) == Some(name) && wanted.kept == Some(kept);
        self.awaited.iter().any(is_it) || !awaited && self.found.iter().any(is_it)
    }

    /// Whether one that was found to be lacking would be one too many. It is found again.
    pub(crate) fn are_enough(&self) -> bool {
        self.found.len() >= FOUND_MAX
    }

    /// A copy to make, in place of others of that context.
    pub(crate) fn want(&mut self, wanted: Wanted, awaited: bool) {
        let name = name_of(&wanted);
        if let (true, Some(failed)) = (awaited, name.and_then(|name| self.failed.get_mut(&name))) {
            failed.rounds = 0;
        }
        self.awaited.retain(|of| name_of(of) != name);
        self.found.retain(|of| name_of(of) != name);
        let queue = if awaited { &mut self.awaited } else { &mut self.found };
        queue.push_back(wanted);
    }

    pub(crate) fn wants(&self) -> bool {
        !self.awaited.is_empty() || !self.found.is_empty()
    }

    /// The next one: those that somebody waits for and the others have their turns.
    pub(crate) fn next_wanted(&mut self) -> Option<Wanted> {
        let awaited_first = !std::mem::take(&mut self.was_awaited);
        let (first, second) = match awaited_first {
            true => (&mut self.awaited, &mut self.found),
            false => (&mut self.found, &mut self.awaited),
        };
        let next = first.pop_front();
        self.was_awaited = awaited_first == next.is_some();
        next.or_else(|| second.pop_front())
    }

    /// A node has answered, or has not. Answers whether what it had is to be counted on.
    pub(crate) fn hear(
        &mut self,
        now_ms: u64,
        peer: &Peer,
        answers: bool,
        node_lost_after_ms: u64,
    ) -> bool {
        let heard_ms = self.heard_ms.entry(peer.clone()).or_insert(now_ms);
        if answers {
            *heard_ms = now_ms;
        }
        now_ms.saturating_sub(*heard_ms) < node_lost_after_ms
    }
}
