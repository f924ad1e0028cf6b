//! What is kept for tenants: chains whose last block is marked, so that each has a time of its own, and
//! blocks are kept as long as any chain that goes through them.
//!
//! A chain is kept when all of it is on the SSD and the extent of its last block says so; what is before
//! that needs no writing that is there already. While it is being written it counts as kept, so that nobody
//! else takes its room or its tenant's quota. Where there is no SSD the object store does the same
//! ([`bucket`](super::bucket)).

use std::collections::BTreeMap;

use kvasir_mutation::{Mutation, mutated};
use kvasir_proto::{BlockKey, Class, Mark, Namespace, SlotIndex, Tenant};

use super::Blocks;
use crate::api::{Action, ContextName, KeepError, KeepRequest, SsdSize};
use crate::ends::{PersistedContext, class_of};
use crate::ssd::SsdBlock;
use crate::tier_work::{Keep, Sink};

impl Blocks {
    /// Keeps a chain for a tenant: its leading blocks that are here become context blocks, durable
    /// until the time given, and never less long than before. [`Action::Kept`] says when they are, under
    /// the number answered.
    ///
    /// # Errors
    /// [`KeepError`]; then nothing is kept.
    pub fn keep(&mut self, now_ms: u64, request: &KeepRequest) -> Result<u64, KeepError> {
        let KeepRequest { namespace, keys, tenant, .. } = request;
        if self.is_draining() && !mutated(Mutation::DrainingNodeAcceptsKeeps) {
            return Err(KeepError::Draining);
        }
        if self.extent_bytes > 0 && !self.ssd_is_usable(now_ms) && self.bucket.usable {
            return self.keep_in_bucket(now_ms, request);
        }
        if self.extent_bytes == 0 || !self.ssd_is_usable(now_ms) {
            return Err(KeepError::NoSsd);
        }
        let in_dram = self.cache.index().prefix(Some(*namespace), keys);
        let on_ssd = self.cache.ssd().prefix(*namespace, self.cache.layout(), None, keys);
        let blocks = in_dram.len().max(on_ssd);
        let keys = &keys[..blocks];
        let Some(&last) = keys.last() else {
            // What only the object store has is kept there for longer.
            return match self.bucket.usable {
                true => self.keep_in_bucket(now_ms, request),
                false => Err(KeepError::NotHere),
            };
        };
        if self.is_waited_for(last) {
            return Err(KeepError::Busy);
        }
        self.check_tenant(keys, *tenant)?;
        let known = self.known_mark(last);
        let mark = longer(known, request);
        self.check_quota(*tenant, keys)?;
        if self.cache.ssd().prefix(*namespace, self.cache.layout(), None, keys) < on_ssd.min(blocks)
        {
            return Err(KeepError::NoRoom);
        }
        // Blocks of it that only the SSD has are rewritten from there.
        let path = in_dram.clone();
        let is_marked = known == Some(mark);
        // What could not be read may be newer, and say that the first one was removed or that the last one is not kept.
        let is_in_doubt = |at: usize| self.ssd_in_part && (at == 0 || at == blocks - 1);
        let lacks =
            |at: &usize| *at >= on_ssd || (*at == blocks - 1 && !is_marked) || is_in_doubt(*at);
        let mark_of = |key: &BlockKey| self.known_mark(*key);
        let sinks = (0..blocks).filter(lacks).map(|at| {
            let block = SsdBlock {
                key: keys[at],
                namespace: *namespace,
                parent: at.checked_sub(1).map(|before| keys[before]),
                class: class_of(&mark),
                // Contexts that end before it go on.
                mark: if at == blocks - 1 { Some(mark) } else { mark_of(&keys[at]) },
                layout: self.cache.layout(),
                bytes: self.extent_bytes,
            };
            (block, in_dram.get(at).copied())
        });
        let sinks: Vec<(SsdBlock, Option<SlotIndex>)> = sinks.collect();
        let there = on_ssd.min(blocks).checked_sub(1).map(|at| keys[at]);
        Ok(self.begin_keep(now_ms, Keep::new(blocks, Some(mark)), path, sinks, there))
    }

    /// How many leading blocks of a chain [`Blocks::keep`] would keep.
    pub fn keepable(&self, now_ms: u64, namespace: Namespace, keys: &[BlockKey]) -> usize {
        let in_dram = self.cache.index().prefix(Some(namespace), keys).len();
        if self.extent_bytes > 0 && self.ssd_is_usable(now_ms) {
            let on_ssd = self.cache.ssd().prefix(namespace, self.cache.layout(), None, keys);
            if in_dram.max(on_ssd) > 0 {
                return in_dram.max(on_ssd);
            }
        }
        let parent = in_dram.checked_sub(1).map(|before| keys[before]);
        in_dram + self.bucket.prefix(namespace, self.cache.layout(), parent, &keys[in_dram..])
    }

    /// Gives a context another time, which may be earlier than the former one. [`Action::Kept`] says when
    /// that is durable.
    ///
    /// # Errors
    /// [`KeepError`]; then nothing has changed.
    pub fn extend_context(
        &mut self,
        now_ms: u64,
        context: &ContextName,
        expires_unix_ms: u64,
    ) -> Result<u64, KeepError> {
        if self.is_draining() {
            return Err(KeepError::Draining);
        }
        self.change_mark(now_ms, context, |mark| Some(Mark { expires_unix_ms, ..mark }))
    }

    /// Ends a context before its time: what is kept for nothing else becomes normal. [`Action::Kept`] says
    /// when that is durable.
    ///
    /// # Errors
    /// [`KeepError`]; then nothing has changed.
    pub fn delete_context(&mut self, now_ms: u64, context: &ContextName) -> Result<u64, KeepError> {
        // It would be kept there again.
        let is_copied = |key| {
            let mut under_way = self.replicas.under_way.values();
            under_way.any(|(_, wanted)| wanted.kept.is_some() && wanted.last() == Some(key))
        };
        if is_copied(context.last) {
            return Err(KeepError::Busy);
        }
        self.change_mark(now_ms, context, |_| None)
    }

    /// A tenant's contexts that end after this time, in the order of namespace and last key: so many after one
    /// of them.
    pub fn contexts(
        &self,
        tenant: Tenant,
        after: Option<(Namespace, BlockKey)>,
        contexts_max: usize,
        unix_ms: u64,
    ) -> Vec<PersistedContext> {
        let lasts = |context: &PersistedContext| context.expires_unix_ms > unix_ms;
        let on_ssd = self.cache.ssd().contexts(tenant, after).filter(lasts).take(contexts_max);
        let in_bucket = self.contexts_in_bucket(tenant, after, contexts_max, unix_ms);
        let mut all: BTreeMap<(Namespace, BlockKey), PersistedContext> = BTreeMap::new();
        for context in on_ssd.chain(in_bucket) {
            let known = all.entry((context.namespace, context.last)).or_insert(context);
            if known.expires_unix_ms < context.expires_unix_ms {
                *known = context;
            }
        }
        all.into_values().take(contexts_max).collect()
    }

    /// Writes the last block of a context with another mark, or without one, wherever it has one.
    fn change_mark(
        &mut self,
        now_ms: u64,
        context: &ContextName,
        change: impl Fn(Mark) -> Option<Mark>,
    ) -> Result<u64, KeepError> {
        let ContextName { tenant, namespace, last } = *context;
        let of_tenant = |block: &SsdBlock| {
            let mark = block.mark.filter(|mark| mark.tenant == tenant)?;
            let is_it = block.namespace == namespace && mark.created_unix_ms.is_some();
            is_it.then_some(mark)
        };
        let on_ssd = self.cache.ssd().get(last).and_then(|block| Some((block, of_tenant(&block)?)));
        if on_ssd.is_some() && !self.ssd_is_usable(now_ms) {
            return Err(KeepError::NoSsd);
        }
        let in_bucket = self.marked_in_bucket(context);
        let known = on_ssd.into_iter().chain(in_bucket);
        let Some((_, known)) = known.max_by_key(|(_, mark)| mark.expires_unix_ms) else {
            return Err(KeepError::NoContext);
        };
        let copies = on_ssd.map_or(1, |(_, mark)| mark.copies);
        let known = Mark { copies, ..known };
        if self.is_being_kept(last) || self.is_being_sent(last) {
            return Err(KeepError::Busy);
        }
        if in_bucket.is_some() && !self.bucket.usable {
            return Err(KeepError::NoBucket);
        }
        let mark = change(known);
        let chain = self.cache.ssd().chain(last);
        // Where a part could not be read: see [`Self::keep`].
        let first = chain.first().copied().filter(|first| {
            self.ssd_in_part && *first != last && mark.is_some() && on_ssd.is_some()
        });
        if first.is_some_and(|first| self.is_being_kept(first)) {
            return Err(KeepError::Busy);
        }
        let first = first.and_then(|first| self.cache.ssd().get(first));
        let changed = |of: (SsdBlock, Mark)| (Some(of.1) != mark).then_some(of.0);
        let to_write =
            on_ssd.and_then(|of| if self.ssd_in_part { Some(of.0) } else { changed(of) });
        let (sinks, path) = match to_write {
            None => (Vec::new(), Vec::new()),
            Some(block) => {
                // From memory, where all of it is there: then nothing is read.
                let path = self.cache.index().prefix(Some(namespace), &chain);
                let is_whole = path.len() == chain.len();
                let path = if is_whole { path } else { Vec::new() };
                let class = mark.as_ref().map_or(Class::Normal, class_of);
                let block = SsdBlock { mark, class, ..block };
                let first = first.map(|first| (first, path.first().copied()));
                let last = (block, path.last().copied());
                (first.into_iter().chain([last]).collect(), path)
            }
        };
        let blocks = match on_ssd {
            Some(_) => chain.len(),
            None => self.chain_below(last).map_or(0, |blocks| blocks as usize),
        };
        let there = Some(last).filter(|_| mark.is_some() && !sinks.is_empty());
        let renamed = in_bucket.and_then(changed);
        let keep = self.sinks.number();
        let mut waits = Keep::new(blocks, mark);
        if let (None, Some(mark)) = (on_ssd, &mark) {
            // With an SSD that follows when the last block is written.
            waits.left.extend(self.lengthen_in_bucket(keep, last, mark)?);
        }
        if let Some(block) = renamed {
            waits.left.insert(self.rename_in_bucket(keep, block, mark));
        }
        self.begin_keep_as(now_ms, (keep, waits), path, sinks, there);
        self.upload_ahead(now_ms);
        Ok(keep)
    }

    fn begin_keep(
        &mut self,
        now_ms: u64,
        waits: Keep,
        path: Vec<SlotIndex>,
        sinks: Vec<(SsdBlock, Option<SlotIndex>)>,
        there: Option<BlockKey>,
    ) -> u64 {
        let keep = self.sinks.number();
        self.begin_keep_as(now_ms, (keep, waits), path, sinks, there);
        keep
    }

    /// `there`: the last block of the chain that the SSD has.
    fn begin_keep_as(
        &mut self,
        now_ms: u64,
        (keep, waits): (u64, Keep),
        path: Vec<SlotIndex>,
        sinks: Vec<(SsdBlock, Option<SlotIndex>)>,
        there: Option<BlockKey>,
    ) {
        let is_over = sinks.is_empty() && waits.left.is_empty();
        self.sinks.keeps.insert(keep, waits);
        if is_over {
            return self.finish_keep(keep);
        }
        if sinks.is_empty() {
            return;
        }
        there.into_iter().for_each(|key| self.count_as_kept(keep, key));
        self.begin_sinks(path, sinks, Some(keep));
        self.issue_sinks(now_ms);
    }

    /// A block of a chain that is being kept is on the SSD.
    fn count_as_kept(&mut self, keep: u64, key: BlockKey) {
        let Some(waits) = self.sinks.keeps.get_mut(&keep) else { return };
        let Some(mark) = waits.mark else { return };
        waits.coming.push(key);
        self.cache.ssd_mut().begin_mark(key, keep, mark);
    }

    pub(super) fn sunk_for_keep(&mut self, done: &Sink) {
        let Some(keep) = done.keep else { return };
        let key = done.block.key;
        self.count_as_kept(keep, key);
        if done.block.mark.is_some() {
            for key in self.cache.ssd().chain(key) {
                let block = self.cache.ssd().get(key);
                block.into_iter().for_each(|block| self.want_in_bucket(block));
            }
        }
    }

    /// Nobody else keeps a block of the chain, and nothing of it is being written just now.
    fn check_tenant(&self, keys: &[BlockKey], tenant: Tenant) -> Result<(), KeepError> {
        // Two writes of one block may end in either order, and the last one counts.
        if keys.iter().any(|key| self.is_being_kept(*key)) {
            return Err(KeepError::Busy);
        }
        let of_other = |key: &BlockKey| {
            let of = self.on_ssd(*key).map(|block| (block.class, block.mark));
            let is_other = |other: Tenant| other != tenant;
            of.is_some_and(|(class, mark)| {
                matches!(class, Class::Context { tenant, .. } if is_other(tenant))
                    || mark.is_some_and(|mark| is_other(mark.tenant))
            })
        };
        match keys.iter().any(of_other) {
            true => Err(KeepError::OtherTenant),
            false => Ok(()),
        }
    }

    fn check_quota(&mut self, tenant: Tenant, keys: &[BlockKey]) -> Result<(), KeepError> {
        let context_bytes = |key: BlockKey| {
            let kept =
                self.on_ssd(key).filter(|block| matches!(block.class, Class::Context { .. }));
            kept.map_or(0, |block| block.bytes)
        };
        let more = |key: &BlockKey| self.extent_bytes.saturating_sub(context_bytes(*key));
        let new: u64 = keys.iter().map(more).sum();
        // What is on its way counts as if it were there.
        let coming = |of: Option<Tenant>| -> u64 {
            let sinks = self.sinks.contexts().filter(|sink| match sink.block.class {
                Class::Context { tenant, .. } => of.is_none_or(|of| of == tenant),
                Class::Normal => false,
            });
            let more = |sink: &Sink| sink.block.bytes.saturating_sub(context_bytes(sink.block.key));
            sinks.map(more).sum()
        };
        let ssd = self.cache.ssd();
        let there = |of: Option<Tenant>| {
            of.map_or(ssd.context_bytes(), |of| ssd.tenant_bytes(of))
                + self.ssd_unreached.bytes_for(of)
        };
        let of_tenant = there(Some(tenant)) + coming(Some(tenant));
        let of_all = there(None) + coming(None);
        let SsdSize { tenant_bytes_max, context_bytes_max, .. } = self.ssd_size;
        if of_tenant + new > tenant_bytes_max {
            let taken_bytes = of_tenant;
            return Err(KeepError::OverQuota { wanted_bytes: new, taken_bytes, tenant_bytes_max });
        }
        let there = |key: &BlockKey| self.on_ssd(*key).map_or(0, |block| block.bytes);
        let more = |key: &BlockKey| self.extent_bytes.saturating_sub(there(key));
        let not_there: u64 = keys.iter().map(more).sum();
        keys.iter().for_each(|key| self.cache.ssd_mut().touch(*key));
        if of_all + new > context_bytes_max || !self.make_ssd_room(not_there) {
            return Err(KeepError::NoRoom);
        }
        Ok(())
    }

    pub(super) fn kept(&mut self, keep: u64, part: u64, stored: bool) {
        let Some(waits) = self.sinks.keeps.get_mut(&keep) else { return };
        waits.left.remove(&part);
        waits.failed |= !stored;
        if waits.left.is_empty() {
            self.finish_keep(keep);
        }
    }

    pub(super) fn finish_keep(&mut self, keep: u64) {
        let Some(Keep { failed, blocks, mark, coming, .. }) = self.sinks.keeps.remove(&keep) else {
            return;
        };
        coming.into_iter().for_each(|key| self.cache.ssd_mut().end_mark(key, keep));
        self.kept_changed();
        let blocks = (!failed).then_some(blocks);
        self.actions.push_back(Action::Kept { keep, blocks, mark });
    }
}

/// The mark of a chain that is kept once more: never for less long, and since when it was.
pub(super) fn longer(known: Option<Mark>, request: &KeepRequest) -> Mark {
    let KeepRequest { tenant, expires_unix_ms, created_unix_ms, copies, .. } = *request;
    let known = known.filter(|mark| mark.tenant == tenant);
    let since = known.and_then(|mark| mark.created_unix_ms);
    let created_unix_ms = since.into_iter().chain(created_unix_ms).min();
    let expires_unix_ms = known.map_or(0, |mark| mark.expires_unix_ms).max(expires_unix_ms);
    let copies = known.map_or(1, |mark| mark.copies).max(copies);
    Mark { tenant, expires_unix_ms, created_unix_ms, copies }
}
