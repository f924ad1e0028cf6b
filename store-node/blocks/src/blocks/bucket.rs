//! Between this node and the object store that several nodes share: what is sent there because it is kept for
//! a tenant, and what is known to be there. What rises from there is [`tiers`](super::tiers)' matter.
//!
//! Nobody waits for a block to be sent, except where there is no SSD: then it is kept when it is there.

use std::collections::HashMap;

use kvasir_proto::{BlockKey, Class, Mark, Namespace, SlotIndex, Tenant};

use super::Blocks;
use super::contexts::longer;
use crate::api::{Action, ContextName, KeepError, KeepRequest, SinkError};
use crate::bucket::{Discard, Upload, UploadFrom, Wanted, until};
use crate::ends::{PersistedContext, class_of};
use crate::ssd::SsdBlock;
use crate::tier_work::{Keep, Sink};
use crate::unseen::Names;

impl Blocks {
    /// These blocks are in the object store, and no others. It is used from when
    /// [`Self::set_bucket_usable`] says so. Without `is_all` it has more.
    pub fn bucket_listed(&mut self, blocks: Vec<SsdBlock>, is_all: bool) {
        self.bucket.clear();
        let all = blocks.iter().map(|block| (block.namespace, block.key));
        let shown = all.filter(|of| self.bucket.is_to_be_gone(*of)).collect();
        self.bucket.listed(is_all, &shown);
        for block in blocks {
            let of = (block.namespace, block.key);
            if self.bucket.discard_of(of).is_some() {
                continue;
            }
            match self.bucket.is_to_be_gone(of) {
                // It is tried again as often as it is listed.
                true => self.discard(of, None),
                false => self.bucket.insert(block, self.options.bucket.blocks_max),
            }
        }
        if let Some(names) = self.unseen.bucket.is_seen() {
            self.bucket_is_seen(names);
        }
        self.want_all_kept();
    }

    /// What is kept there under names that were put before stays, and what was put goes, as if it had been known.
    fn bucket_is_seen(&mut self, names: Names) {
        let first = |block: SsdBlock| block.parent.is_none().then_some(block.key);
        let all = || self.bucket.iter().filter_map(first).collect();
        let names: Vec<BlockKey> = names.all().unwrap_or_else(all);
        for key in names {
            let block = self.bucket.get(key).filter(|block| block.parent.is_none());
            let Some(SsdBlock { namespace, .. }) = block else { continue };
            if self.is_being_sent(key) || self.cache.is_on_ssd(key) {
                continue;
            }
            let slot = self.cache.index().find(key);
            let own = self.object_slot(namespace, key);
            if slot == own {
                // Nothing that was put stands for it any more.
                self.unseen.ssd.forget(key);
            }
            own.into_iter().for_each(|slot| self.drop_refused(slot));
        }
    }

    /// Whether the object store answers. While it does not, nothing is begun with it, and who waits for something
    /// that is not begun waits no more.
    pub fn set_bucket_usable(&mut self, is_usable: bool) {
        self.bucket.usable = is_usable;
        if is_usable {
            return;
        }
        let (waited_for, others) =
            self.bucket.queue.drain(..).partition::<Vec<Wanted>, _>(|wanted| wanted.keep.is_some());
        self.bucket.queue.extend(others);
        self.bucket.awaited = 0;
        for wanted in waited_for {
            self.end_upload(wanted, false);
        }
    }

    /// Begins to send what is kept and is not in the object store. To be called now and then, and after anything
    /// was kept.
    pub fn upload_ahead(&mut self, now_ms: u64) {
        self.end_objects(now_ms);
        while self.bucket.usable
            && now_ms >= self.bucket.retry_at_ms
            && self.bucket.uploads.len() < self.uploads_max()
        {
            let Some(wanted) = self.bucket.queue.front().copied() else { return };
            let same = |upload: &Upload| upload.block.key == wanted.block.key;
            // What is being written says of its mark what is not so any more in a moment.
            let is_changed = wanted.keep.is_none() && self.is_being_kept(wanted.block.key);
            if is_changed || self.bucket.uploads.values().any(same) {
                return;
            }
            // What was there under its name is to be gone first.
            let of = (wanted.block.namespace, wanted.block.key);
            if self.bucket.discard_of(of).is_some() {
                return;
            }
            if self.bucket.is_to_be_gone(of) {
                return self.discard(of, None);
            }
            self.bucket.queue.pop_front();
            match wanted.keep {
                Some(_) => self.bucket.awaited -= 1,
                None => drop(self.bucket.queued.remove(&wanted.block.key)),
            }
            self.begin_upload(now_ms, wanted);
        }
    }

    /// A block has been sent, or nothing of it counts. `Gone`: it was not where its bytes were to come from.
    pub fn uploaded(&mut self, now_ms: u64, upload: u64, result: Result<(), SinkError>) {
        let Some(done) = self.bucket.uploads.remove(&upload) else { return };
        done.path.iter().for_each(|slot| self.cache.unpin_unused(*slot));
        let Upload { block, keep, from, unwanted, is_exact, .. } = done;
        let wanted = Wanted { number: upload, block, keep, is_exact };
        self.totals.uploaded += u64::from(result.is_ok());
        self.totals.uploads_failed += u64::from(result.is_err());
        let of = (block.namespace, block.key);
        match (result, from) {
            (Ok(()), _) => self.bucket.end_doubt(of),
            (Err(SinkError::Failed), _) => self.bucket.doubt_sent(of),
            (Err(_), UploadFrom::Bucket(_)) => self.bucket.doubt_not_found(of),
            // It never left.
            (Err(_), UploadFrom::Ssd | UploadFrom::Slot { .. }) => {}
        }
        match (result, from) {
            // It may be there, whatever is said of it.
            _ if unwanted => {
                self.issue_discard(of);
                self.end_upload(wanted, false);
            }
            (Ok(()), _) => {
                if let UploadFrom::Bucket(former) = from
                    && self.bucket.get(block.key) == Some(former)
                {
                    self.bucket.remove(block.key);
                }
                self.bucket.insert(block, self.options.bucket.blocks_max);
                self.end_upload(wanted, true);
            }
            // With the block its mark is gone.
            // Or another node has renamed it, which was asked for the same: a read finds out.
            (Err(SinkError::Gone | SinkError::Corrupt), UploadFrom::Bucket(_))
                if is_exact && block.mark.is_none() =>
            {
                self.bucket.remove(block.key);
                self.bucket.insert(block, self.options.bucket.blocks_max);
                self.end_upload(wanted, true);
            }
            // It is had from somewhere else, if it is there.
            (Err(SinkError::Gone | SinkError::Corrupt), UploadFrom::Bucket(_)) => {
                self.bucket_lost(block.key);
                self.want_sent(wanted);
            }
            (Err(SinkError::Gone | SinkError::Corrupt), UploadFrom::Ssd) => {
                self.ssd_lost(block.key);
                self.end_upload(wanted, false);
            }
            (Err(SinkError::Gone | SinkError::Corrupt), UploadFrom::Slot { slot, generation }) => {
                self.drop_corrupt(now_ms, slot, generation);
                self.end_upload(wanted, false);
            }
            (Err(SinkError::Failed), _) => {
                let retry_ms = self.options.bucket.retry_ms;
                self.bucket.retry_at_ms = now_ms.saturating_add(retry_ms);
                match keep {
                    Some(_) => self.end_upload(wanted, false),
                    None => self.want_sent(wanted),
                }
            }
        }
        self.upload_ahead(now_ms);
    }

    /// Keeps a chain for a tenant where there is no SSD: it is kept when all of it is in the object store.
    pub(super) fn keep_in_bucket(
        &mut self,
        now_ms: u64,
        request: &KeepRequest,
    ) -> Result<u64, KeepError> {
        let KeepRequest { namespace, keys, tenant, .. } = request;
        let in_dram = self.cache.index().prefix(Some(*namespace), keys);
        let parent = in_dram.len().checked_sub(1).map(|before| keys[before]);
        let rest = &keys[in_dram.len()..];
        let blocks =
            in_dram.len() + self.bucket.prefix(*namespace, self.cache.layout(), parent, rest);
        let Some(&last) = keys[..blocks].last() else { return Err(KeepError::NotHere) };
        // A name says one tenant, whose context it is that ends there.
        let of_other = |block: SsdBlock| matches!(block.class, Class::Context { tenant: other, .. } if other != *tenant);
        if self.bucket.get(last).is_some_and(of_other) {
            return Err(KeepError::OtherTenant);
        }
        let context = self.bucket.context(*tenant, *namespace, last);
        let mark = longer(context.map(|(_, mark)| mark), request);
        let block = |at: usize| SsdBlock {
            key: keys[at],
            namespace: *namespace,
            parent: at.checked_sub(1).map(|before| keys[before]),
            class: class_of(&mark),
            mark: (at == blocks - 1).then_some(mark),
            layout: self.cache.layout(),
            bytes: self.extent_bytes,
        };
        let wanted = |at: usize| self.bucket.as_wanted(&block(at));
        let lacking: Vec<SsdBlock> =
            (0..blocks).map(wanted).filter(|block| !self.bucket.keeps(block)).collect();
        let keeping = |block: &SsdBlock| keys[..blocks].contains(&block.key);
        let mut waiting = self.waited_for();
        if waiting.any(keeping) {
            return Err(KeepError::Busy);
        }
        drop(waiting);
        let is_new = |block: &&SsdBlock| self.bucket.get(block.key).is_none();
        let new = lacking.iter().filter(is_new).count();
        let of_tenant = |block: &&SsdBlock| match block.class {
            Class::Context { tenant: other, .. } => other == *tenant,
            Class::Normal => false,
        };
        let coming: u64 = self.waited_for().filter(of_tenant).map(|block| block.bytes).sum();
        let taken_bytes = self.bucket.tenant_bytes(*tenant) + coming;
        let wanted_bytes = new as u64 * self.extent_bytes;
        let tenant_bytes_max = self.options.bucket.tenant_bytes_max;
        if taken_bytes + wanted_bytes > tenant_bytes_max {
            return Err(KeepError::OverQuota { wanted_bytes, taken_bytes, tenant_bytes_max });
        }
        let is_full =
            self.bucket.len() + self.bucket.queue.len() + new > self.options.bucket.blocks_max;
        if is_full || !self.leaves_room(&in_dram) {
            return Err(KeepError::NoRoom);
        }
        let keep = self.sinks.number();
        self.sinks.keeps.insert(keep, Keep::new(blocks, Some(mark)));
        if lacking.is_empty() {
            self.finish_keep(keep);
        }
        for block in lacking {
            let number = self.sinks.number();
            if let Some(waits) = self.sinks.keeps.get_mut(&keep) {
                waits.left.insert(number);
            }
            self.want_sent(Wanted { number, block, keep: Some(keep), is_exact: false });
        }
        self.upload_ahead(now_ms);
        Ok(keep)
    }

    /// A block of the object store is not there, or not as it was sent.
    pub(super) fn bucket_lost(&mut self, key: BlockKey) {
        let lost = self.bucket.remove(key);
        self.totals.bucket_lost += u64::from(lost.is_some());
        if let Some(SsdBlock { namespace, .. }) = lost {
            self.bucket.doubt_not_found((namespace, key));
        }
    }

    /// Whether the object store has the block, may have it, or has it for a while still.
    pub(super) fn may_be_in_bucket(&self, of: (Namespace, BlockKey)) -> bool {
        self.options.bucket.uploads_max > 0
            && (self.has_to_do_with(of) || self.bucket.doubt(of).is_some())
    }

    /// This node knows that it is there, or has tried to bring it there.
    fn has_to_do_with(&self, of: (Namespace, BlockKey)) -> bool {
        let is_its = |block: &SsdBlock| (block.namespace, block.key) == of;
        self.bucket.get(of.1).as_ref().is_some_and(is_its)
            || self.bucket.uploads.values().any(|upload| is_its(&upload.block))
            || self.bucket.discard_of(of).is_some()
            || self.bucket.is_own_in_doubt(of)
    }

    /// An object goes by itself: what others may have there stays.
    pub(super) fn discard_own(&mut self, of: (Namespace, BlockKey)) {
        if self.has_to_do_with(of) {
            self.discard(of, None);
        }
    }

    /// Takes a block out of the object store for ever, if it may be there. With `keep`, somebody waits.
    pub(super) fn discard(&mut self, of: (Namespace, BlockKey), keep: Option<u64>) {
        if !self.may_be_in_bucket(of) {
            return;
        }
        let is_its = |block: &SsdBlock| (block.namespace, block.key) == of;
        if self.bucket.get(of.1).as_ref().is_some_and(is_its) {
            self.bucket.remove(of.1);
        }
        let number = self.bucket.discard_of(of).unwrap_or_else(|| {
            let number = self.sinks.number();
            let discard = Discard { of, keeps: Vec::new(), is_issued: false };
            self.bucket.begin_discard(number, discard);
            number
        });
        if let Some(keep) = keep
            && let Some(waits) = self.sinks.keeps.get_mut(&keep)
            && waits.left.insert(number)
            && let Some(discard) = self.bucket.discards.get_mut(&number)
        {
            discard.keeps.push(keep);
        }
        let mut is_being_sent = false;
        for upload in self.bucket.uploads.values_mut().filter(|upload| is_its(&upload.block)) {
            (upload.unwanted, is_being_sent) = (true, true);
        }
        if !is_being_sent {
            self.issue_discard(of);
        }
    }

    fn issue_discard(&mut self, of: (Namespace, BlockKey)) {
        let Some(number) = self.bucket.discard_of(of) else { return };
        let Some(discard) = self.bucket.discards.get_mut(&number) else { return };
        if !std::mem::replace(&mut discard.is_issued, true) {
            let (namespace, key) = of;
            self.actions.push_back(Action::Discard { discard: number, namespace, key });
        }
    }

    /// An object is gone from the object store for good, or may be there still.
    pub fn discarded(&mut self, now_ms: u64, discard: u64, is_gone: bool) {
        let Some(Discard { of, keeps, .. }) = self.bucket.end_discard(discard) else { return };
        if is_gone {
            self.bucket.end_doubt(of);
        } else {
            self.bucket.doubt_gone(of);
            // What is to be sent under its name is wanted anew with the next list, and is in nobody's way until then;
            // who waits for it waits no more.
            let is_its = |wanted: &Wanted| (wanted.block.namespace, wanted.block.key) == of;
            let may_wait = self.bucket.awaited > 0 || self.bucket.queued.contains(&of.1);
            let mut own = Vec::new();
            if may_wait {
                let all = self.bucket.queue.drain(..);
                let (its, others) = all.partition::<Vec<Wanted>, _>(is_its);
                own = its;
                self.bucket.queue.extend(others);
            }
            for wanted in own {
                match wanted.keep {
                    Some(_) => self.bucket.awaited -= 1,
                    None => drop(self.bucket.queued.remove(&of.1)),
                }
                self.end_upload(wanted, false);
            }
        }
        keeps.into_iter().for_each(|keep| self.kept(keep, discard, is_gone));
        self.upload_ahead(now_ms);
    }

    /// All that the SSD keeps for tenants shall be in the object store.
    pub(super) fn want_all_kept(&mut self) {
        if self.options.bucket.uploads_max == 0 {
            return;
        }
        let kept = self.cache.ssd().kept();
        kept.into_iter().for_each(|block| self.want_in_bucket(block));
    }

    /// A block is on the SSD: if it is kept for a tenant, it shall be in the object store too.
    pub(super) fn want_in_bucket(&mut self, block: SsdBlock) {
        let is_kept = matches!(block.class, Class::Context { .. });
        let block = self.bucket.as_wanted(&block);
        if self.options.bucket.uploads_max > 0 && is_kept && !self.bucket.keeps(&block) {
            let number = self.sinks.number();
            self.want_sent(Wanted { number, block, keep: None, is_exact: false });
        }
    }

    fn want_sent(&mut self, wanted: Wanted) {
        if wanted.keep.is_some() || self.bucket.queued.insert(wanted.block.key) {
            self.bucket.awaited += usize::from(wanted.keep.is_some());
            self.bucket.queue.push_back(wanted);
        }
    }

    /// Gives a block of the object store this mark or none. Blocks before it stay as long as they were given:
    /// others may count on them. Answers with the number of the part of the keep.
    pub(super) fn rename_in_bucket(
        &mut self,
        keep: u64,
        block: SsdBlock,
        mark: Option<Mark>,
    ) -> u64 {
        let number = self.sinks.number();
        let longer = mark.filter(|mark| mark.expires_unix_ms > until(&block));
        let class = longer.as_ref().map_or(block.class, class_of);
        let mark = mark.map(|mark| Mark { copies: 1, ..mark });
        let block = SsdBlock { class, mark, ..block };
        self.want_sent(Wanted { number, block, keep: Some(keep), is_exact: true });
        number
    }

    pub(super) fn marked_in_bucket(&self, context: &ContextName) -> Option<(SsdBlock, Mark)> {
        let ContextName { tenant, namespace, last } = *context;
        self.bucket.context(tenant, namespace, last)
    }

    /// What is being sent of a block, or waits for that and somebody waits for it.
    pub(super) fn is_being_sent(&self, key: BlockKey) -> bool {
        self.bucket.uploads.values().any(|upload| upload.block.key == key)
            || self.is_waited_for(key)
    }

    /// Somebody waits for what becomes of the block in the object store.
    pub(super) fn is_waited_for(&self, key: BlockKey) -> bool {
        self.waited_for().any(|block| block.key == key)
    }

    pub(super) fn is_being_kept(&self, key: BlockKey) -> bool {
        self.sinks.of_key(key).any(Sink::keeps)
    }

    /// A block counts as kept because of a chain that goes on from it and is not all durable yet.
    pub(super) fn is_coming(&self, key: BlockKey) -> bool {
        self.sinks.keeps.values().any(|keep| keep.coming.contains(&key))
    }

    /// Those of a tenant whose chains are whole, here or there: so many at most after one of them, and fewer
    /// where they are very long.
    pub(super) fn contexts_in_bucket(
        &self,
        tenant: Tenant,
        after: Option<(Namespace, BlockKey)>,
        contexts_max: usize,
        unix_ms: u64,
    ) -> Vec<PersistedContext> {
        let all = self.bucket.contexts(tenant, after);
        let lasts = all.filter(|(_, mark)| mark.expires_unix_ms > unix_ms);
        // Contexts that go on from one another have most of their blocks in common.
        let mut known = HashMap::new();
        let whole = lasts.filter_map(|(block, mark)| {
            Some(PersistedContext {
                namespace: block.namespace,
                last: block.key,
                blocks: self.chain_below_known(block.key, &mut known)?,
                created_unix_ms: mark.created_unix_ms?,
                expires_unix_ms: mark.expires_unix_ms,
            })
        });
        whole.take(contexts_max).collect()
    }

    /// How long the chain is that ends with a block, when each of it is on the SSD or in the object store.
    pub(super) fn chain_below(&self, last: BlockKey) -> Option<u32> {
        self.each_below(last, |_| {})
    }

    /// As [`Blocks::chain_below`], of many chains: each block is looked at once.
    fn chain_below_known(
        &self,
        last: BlockKey,
        known: &mut HashMap<BlockKey, Option<u32>>,
    ) -> Option<u32> {
        let (mut path, mut next) = (Vec::new(), Some(last));
        let mut blocks = loop {
            let Some(key) = next else { break Some(0) };
            if let Some(below) = known.get(&key) {
                break *below;
            }
            let block = self.bucket.get(key).or_else(|| self.cache.ssd().get(key));
            // A chain that bites its tail is none.
            let Some(block) = block.filter(|_| path.len() < self.known_below()) else { break None };
            path.push(key);
            next = block.parent;
        };
        for key in path.into_iter().rev() {
            blocks = blocks.map(|below| below + 1);
            known.insert(key, blocks);
        }
        blocks
    }

    /// Blocks of the SSD and of the object store: no chain is longer.
    fn known_below(&self) -> usize {
        self.bucket.len() + self.cache.ssd().len()
    }

    /// Keeps the blocks of a chain in the object store that come before its last as long as this mark says. Answers
    /// with the numbers of the parts of the keep, or why not.
    pub(super) fn lengthen_in_bucket(
        &mut self,
        keep: u64,
        last: BlockKey,
        mark: &Mark,
    ) -> Result<Vec<u64>, KeepError> {
        let mut before = Vec::new();
        let of_chain = |block: SsdBlock| {
            if block.key != last {
                before.push(SsdBlock { class: class_of(mark), mark: None, ..block });
            }
        };
        self.each_below(last, of_chain).ok_or(KeepError::NoContext)?;
        before.retain(|block| !self.bucket.keeps(&self.bucket.as_wanted(block)));
        if before.iter().any(|block| self.is_being_sent(block.key)) {
            return Err(KeepError::Busy);
        }
        let want = |block: SsdBlock| {
            let number = self.sinks.number();
            self.want_sent(Wanted { number, block, keep: Some(keep), is_exact: false });
            number
        };
        Ok(before.into_iter().map(want).collect())
    }

    /// Looks at a chain from its last block to its first, and says how long it is.
    fn each_below(&self, last: BlockKey, mut look: impl FnMut(SsdBlock)) -> Option<u32> {
        let (mut blocks, mut next) = (0, Some(last));
        while let Some(key) = next {
            let block = self.bucket.get(key).or_else(|| self.cache.ssd().get(key))?;
            look(block);
            blocks += 1;
            // Names say what they will: a chain that bites its tail is none.
            if blocks as usize > self.known_below() {
                return None;
            }
            next = block.parent;
        }
        Some(blocks)
    }

    /// Blocks that somebody waits for.
    fn waited_for(&self) -> impl Iterator<Item = &SsdBlock> {
        // The others may be all that is kept.
        let queue = (self.bucket.awaited > 0).then_some(&self.bucket.queue);
        let queued = queue.into_iter().flatten().filter(|wanted| wanted.keep.is_some());
        let sent = self.bucket.uploads.values().filter(|upload| upload.keep.is_some());
        queued.map(|wanted| &wanted.block).chain(sent.map(|upload| &upload.block))
    }

    fn begin_upload(&mut self, now_ms: u64, wanted: Wanted) {
        let Wanted { number, keep, is_exact, .. } = wanted;
        // What nobody waits for is sent as it is kept now, if it still is.
        let now_kept = self.cache.ssd().get(wanted.block.key);
        let now_kept = now_kept.filter(|block| matches!(block.class, Class::Context { .. }));
        let known = self.bucket.get(wanted.block.key);
        let block = match (keep, now_kept) {
            // What is promised there meanwhile stays promised, but for the mark.
            (Some(_), _) if is_exact => {
                let longer = known.filter(|known| until(known) > until(&wanted.block));
                let class = longer.map_or(wanted.block.class, |known| known.class);
                SsdBlock { class, ..wanted.block }
            }
            (Some(_), _) => self.bucket.as_wanted(&wanted.block),
            (None, Some(block)) => self.bucket.as_wanted(&block),
            (None, None) => return,
        };
        let is_done = match is_exact {
            true => known == Some(block) || (known.is_none() && block.mark.is_none()),
            false => self.bucket.keeps(&block),
        };
        if is_done {
            return self.end_upload(wanted, true);
        }
        if known.is_none() && self.bucket.len() >= self.options.bucket.blocks_max {
            self.totals.uploads_refused += 1;
            return self.end_upload(wanted, false);
        }
        let Some((from, path)) = self.upload_from(now_ms, &block) else {
            return self.end_upload(wanted, false);
        };
        let checksum = match from {
            UploadFrom::Slot { slot, .. } => self.checksum_of(slot),
            UploadFrom::Ssd | UploadFrom::Bucket(_) => None,
        };
        path.iter().for_each(|slot| self.cache.pin(*slot));
        let upload = Upload { block, keep, from, path, unwanted: false, is_exact };
        self.bucket.uploads.insert(number, upload);
        self.actions.push_back(Action::Upload { upload: number, block, from, checksum });
    }

    /// Where the bytes of a block can be had without being in anybody's way, and what is pinned for that.
    fn upload_from(&self, now_ms: u64, block: &SsdBlock) -> Option<(UploadFrom, Vec<SlotIndex>)> {
        let fits = |other: &SsdBlock| {
            (other.namespace, other.layout, other.parent)
                == (block.namespace, block.layout, block.parent)
        };
        if let Some(former) = self.bucket.get(block.key).filter(fits) {
            return Some((UploadFrom::Bucket(former), Vec::new()));
        }
        if self.ssd_is_usable(now_ms) && self.cache.ssd().get(block.key).is_some_and(|b| fits(&b)) {
            return Some((UploadFrom::Ssd, Vec::new()));
        }
        let slot = self.cache.index().find(block.key)?;
        let entry = self.cache.index().entry(slot)?;
        let generation = self.cache.slots().generation(slot)?;
        let path = self.cache.index().path(slot);
        let same = entry.namespace == block.namespace && block.layout == self.cache.layout();
        (same && self.leaves_room(&path)).then_some((UploadFrom::Slot { slot, generation }, path))
    }

    /// While these are pinned others still find room.
    fn leaves_room(&self, path: &[SlotIndex]) -> bool {
        self.cache.available_beside(path) >= self.cache.slots().len() / 4
    }

    /// Nothing more becomes of a block that was wanted.
    fn end_upload(&mut self, wanted: Wanted, stored: bool) {
        if let Some(keep) = wanted.keep {
            self.kept(keep, wanted.number, stored);
        }
    }

    fn uploads_max(&self) -> usize {
        let of_bytes = self.options.bucket.upload_bytes_max / self.extent_bytes.max(1);
        let of_bytes = usize::try_from(of_bytes).unwrap_or(usize::MAX);
        self.options.bucket.uploads_max.min(of_bytes.max(1))
    }
}
