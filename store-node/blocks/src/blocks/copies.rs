//! Contexts that are kept on several nodes: which of them lack copies, and who makes those.
//!
//! Each node that keeps such a context asks the others for it now and then. One that answers and has it not,
//! for less long, or for fewer copies, has lost it; one that has not answered for `node_lost_after_ms` has lost all.
//! Where too few are left, the one of them that has the smallest incarnation makes another copy, as a drain
//! does: pinned here, sent by a paired transaction, and counted when it is durable there. Nobody needs to know
//! how it came to be. A node that could not take it is tried again when no other can.
//!
//! A context of the object store alone has no copies: that outlives every node's disk.

use kvasir_mutation::{Mutation, mutated};
use kvasir_proto::{BlockKey, Mark, Namespace};

use super::{Blocks, as_u32};
use crate::api::ContextName;
use crate::copies::{CopiedContext, CopiedName, HeldCopies, PeerCopies, Promise};
use crate::replicas::{CopyCause, CopyPlan, Peer, Wanted};

impl Blocks {
    /// Contexts of the SSD of which there are to be copies elsewhere: the next so many, in a round. The
    /// shell asks other nodes for them and tells [`Self::copies_seen`].
    pub fn copied_contexts(&mut self, contexts_max: usize) -> Vec<CopiedContext> {
        self.copies.are_asked_for();
        let all = self.cache.ssd().copied();
        let is_there = |name| all.binary_search_by_key(&name, CopiedContext::name).is_ok();
        self.copies.retain(is_there);
        let after = self.copies.after;
        let from = all.iter().position(|of| after.is_none_or(|after| of.name() > after));
        let from = from.unwrap_or(0);
        let next: Vec<CopiedContext> = all[from..].iter().take(contexts_max).copied().collect();
        let last = next.last().map(CopiedContext::name);
        self.copies.after = last.filter(|_| from + next.len() < all.len());
        next
    }

    /// What is asked of other nodes for one context.
    pub fn copied_context(&self, context: &ContextName) -> Option<CopiedContext> {
        let mark = self.copied_mark(context.namespace, context.last)?;
        (mark.tenant == context.tenant).then_some(CopiedContext {
            tenant: mark.tenant,
            namespace: context.namespace,
            last: context.last,
            expires_unix_ms: mark.expires_unix_ms,
            copies: mark.copies,
        })
    }

    /// How many of the copies that are wanted of a context are not known to be there.
    pub fn copies_lacking(&self, context: &ContextName) -> u32 {
        let name = (context.namespace, context.last);
        let Some(mark) = self.copied_mark(name.0, name.1) else { return 0 };
        let holders = self.copies.holders(name, Promise::of(&mark)).count();
        let holders = holders + usize::from(mutated(Mutation::MissingReplicaIgnored));
        as_u32(usize::from(mark.copies - 1).saturating_sub(holders))
    }

    /// Contexts of which fewer copies are there than are wanted, as far as is known.
    pub fn contexts_short_of_copies(&self) -> usize {
        self.copies.contexts_short()
    }

    /// Whether a node keeps this context, for as long and for as many copies at least, so that somebody
    /// else's is not the only one.
    pub fn keeps_copy(&self, context: &CopiedContext) -> bool {
        let CopiedContext { tenant, namespace, last, .. } = *context;
        let block = self.cache.ssd().get(last).filter(|block| block.namespace == namespace);
        block.and_then(|block| block.mark).is_some_and(|mark| {
            mark.tenant == tenant
                && mark.created_unix_ms.is_some()
                && Promise::of(&mark).covers(context.promise())
        })
    }

    /// What other nodes have of these contexts; `own` is this node's incarnation.
    pub fn copies_seen(
        &mut self,
        now_ms: u64,
        own: u64,
        contexts: &[CopiedContext],
        peers: &[PeerCopies],
    ) {
        let node_lost_after_ms = self.options.replicas.node_lost_after_ms;
        let counted: Vec<bool> = peers
            .iter()
            .map(|PeerCopies { peer, answer }| {
                self.copies.hear(now_ms, peer, answer.is_some(), node_lost_after_ms)
            })
            .collect();
        for (at, context) in contexts.iter().enumerate() {
            self.look_at_copies(own, at, context, peers.iter().zip(counted.iter().copied()));
        }
    }

    fn look_at_copies<'a>(
        &mut self,
        own: u64,
        at: usize,
        context: &CopiedContext,
        peers: impl Iterator<Item = (&'a PeerCopies, bool)>,
    ) {
        let (name, wanted) = (context.name(), context.promise());
        let mark = self.copied_mark(name.0, name.1);
        // It may have another time by now.
        let is_it = |mark: &Mark| mark.tenant == context.tenant && Promise::of(mark) == wanted;
        let Some(mark) = mark.filter(is_it) else { return };
        let (mut there, mut is_first) = (1, true);
        for (PeerCopies { peer, answer }, is_counted) in peers {
            match answer {
                Some(HeldCopies { incarnation, holds }) if holds.get(at) == Some(&true) => {
                    self.copies.has(name, peer, wanted);
                    there += 1;
                    is_first &= own < *incarnation;
                }
                Some(HeldCopies { incarnation, .. }) => {
                    if self.copies.lacks(name, peer, wanted) {
                        there += 1;
                        is_first &= own < *incarnation;
                    }
                }
                // It may be back in a moment, with all that it had; nobody is told so.
                None => {
                    self.copies.is_silent(name, peer);
                    there += usize::from(is_counted);
                }
            }
        }
        if there >= usize::from(mark.copies) {
            self.copies.is_complete(name);
            return;
        }
        self.copies.is_short(name);
        if is_first {
            self.want_copy(name, mark, false);
        }
    }

    fn want_copy(&mut self, name: CopiedName, mark: Mark, awaited: bool) {
        if self.is_draining()
            || !awaited && self.copies.are_enough()
            || self.copies.is_wanted(name, mark, awaited)
        {
            return;
        }
        let (namespace, last) = name;
        let mut under_way = self.replicas.under_way.values();
        if under_way.any(|(_, wanted)| wanted.kept.is_some() && wanted.last() == Some(last)) {
            return;
        }
        let keys = self.cache.ssd().chain(last);
        let wanted = self.want(CopyCause::Context, namespace, keys, Some(mark), None);
        self.copies.want(wanted, awaited);
    }

    /// A context that somebody waits for until it has its copies: they wait for no more than every second one that nobody
    /// waits for.
    pub fn make_copies(&mut self, context: &ContextName) {
        let name = (context.namespace, context.last);
        if self.copies_lacking(context) > 0
            && let Some(mark) = self.copied_mark(name.0, name.1)
        {
            self.copies.is_short(name);
            self.want_copy(name, mark, true);
        }
    }

    /// What cannot be copied now is left: it is found to be lacking again.
    pub(super) fn poll_copies(&mut self, now_ms: u64) -> Option<CopyPlan> {
        // Who could take it is not known yet.
        self.replicas.peers_ms?;
        while let Some(wanted) = self.copies.next_wanted() {
            let Some(last) = wanted.last() else { continue };
            let Some(mark) = self.copied_mark(wanted.namespace, last) else { continue };
            if wanted.kept != Some(mark) {
                continue;
            }
            let name = (wanted.namespace, last);
            let retry_ms = self.options.replicas.retry_ms;
            let mut to = self.taker(&wanted, name, mark);
            if to.is_none() && self.copies.retries(now_ms, name, retry_ms) {
                to = self.taker(&wanted, name, mark);
            }
            if let Some(to) = to {
                return Some(self.begin_copy(wanted, to));
            }
        }
        None
    }

    /// Who shall have a copy, of those that have none and have not failed.
    fn taker(&self, wanted: &Wanted, name: CopiedName, mark: Mark) -> Option<Peer> {
        let promise = Promise::of(&mark);
        let has_failed = |peer: &Peer| self.copies.has_failed(name, peer);
        let can_take = |peer: &&Peer| self.replicas.can_keep(peer) && !has_failed(peer);
        if let Some(lesser) = self.copies.lesser(name, promise).find(can_take) {
            return Some(lesser.clone());
        }
        let holders = self.copies.holders(name, promise);
        let failed = self.replicas.peers.iter().map(|of| &of.peer).filter(|peer| has_failed(peer));
        let not: Vec<Peer> = holders.chain(failed).cloned().collect();
        self.replicas.choose(wanted, &[], &not).ok()
    }

    /// One more keeps a context; or it does not, and somebody else is to be tried.
    pub(super) fn context_copied(
        &mut self,
        now_ms: u64,
        name: CopiedName,
        mark: Mark,
        to: &Peer,
        is_there: bool,
    ) {
        if self.copied_mark(name.0, name.1).is_none() {
            return;
        }
        match is_there {
            true => self.copies.gets(name, to, Promise::of(&mark)),
            false => {
                self.copies.lost(name, to);
                self.copies.fails(now_ms, name, to);
            }
        }
    }

    /// The mark of a context of which there are to be copies.
    pub(super) fn copied_mark(&self, namespace: Namespace, last: BlockKey) -> Option<Mark> {
        let block = self.cache.ssd().get(last).filter(|block| block.namespace == namespace)?;
        block.mark.filter(|mark| mark.copies > 1 && mark.created_unix_ms.is_some())
    }
}
