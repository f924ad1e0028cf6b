//! Between DRAM and SSD: what sinks before room is needed, and what rises when it is wanted. What is kept
//! for tenants is in [`contexts`](super::contexts).
//!
//! Sinking is planned ahead of pressure, so that whoever needs a slot evicts a block that the SSD has
//! already, and never waits. Chains sink from their first block on and leave from their last, so that
//! both tiers are closed under prefix, each by itself. Rising reads into a slot that nobody else has;
//! shares that want the block pin that slot and wait, or go on without it when it fails or is late.

use std::collections::HashMap;
use std::hash::BuildHasherDefault;

use kvasir_mutation::{Mutation, mutated};
use kvasir_proto::{BlockKey, Class, Namespace, Share, Side, SlotIndex};

use super::Blocks;
use crate::api::{AbortReason, Action, RiseError, SinkError, SsdSize};
use crate::index::{Entry, KeyHasher};
use crate::share::{Hold, Page};
use crate::share_state::ShareEvent;
use crate::slot_state::SlotState;
use crate::ssd::SsdBlock;
use crate::tier_work::{Batch, Rise, RiseFrom, Sink};
use crate::unreached::Unreached;

/// Blocks of one chain that sink together.
const BATCH_MAX: usize = 16;
/// So many of the blocks that would make room on the SSD are looked at for one that is not in memory.
const SPARE_LOOKS: usize = 2 * BATCH_MAX;
/// So many of the leaves that would go next shall be on the SSD, and fewer where fewer blocks shall be.
const NEXT_LEAVES: usize = 128;

impl Blocks {
    /// There is an SSD, whose blocks [`Self::ssd_ready`] will name.
    pub fn expect_ssd(&mut self) {
        self.unseen.ssd.expect();
    }

    /// The SSD can be used, and holds these blocks. Those whose chains are not whole are forgotten.
    /// To be followed by [`Self::expire`].
    pub fn ssd_ready(&mut self, size: SsdSize, blocks: Vec<SsdBlock>) {
        let orphans = self.set_ssd(size, blocks);
        orphans.iter().for_each(|block| self.forget_extent(block.key, block.parent.is_none()));
        self.ssd_has_come();
    }

    /// Answers with those whose chains are not whole.
    pub(super) fn set_ssd(&mut self, size: SsdSize, blocks: Vec<SsdBlock>) -> Vec<SsdBlock> {
        self.ssd_gone();
        self.ssd_size = size;
        self.kept_changed();
        // The first block after each, and the next after the same one, by their places.
        let mut after: HashMap<BlockKey, usize, BuildHasherDefault<KeyHasher>> = HashMap::default();
        let mut others = vec![None; blocks.len()];
        let mut next = Vec::new();
        let namespace = |at: usize| blocks[at].namespace;
        for (at, block) in blocks.iter().enumerate().rev() {
            match block.parent {
                Some(parent) => others[at] = after.insert(parent, at),
                None => next.push(at),
            }
        }
        next.reverse();
        let mut is_known = vec![false; blocks.len()];
        while let Some(at) = next.pop() {
            is_known[at] = true;
            self.cache.stored(blocks[at]);
            let first = after.remove(&blocks[at].key);
            // What another namespace has after a key of the same name follows another block.
            let children = std::iter::successors(first, |at| others[*at]);
            next.extend(children.filter(|child| namespace(*child) == namespace(at)));
        }
        let orphans = blocks.into_iter().zip(is_known).filter(|(_, is_known)| !is_known);
        orphans.map(|(block, _)| block).collect()
    }

    pub(super) fn ssd_has_come(&mut self) {
        self.ssd_is_seen();
        self.make_ssd_room(0);
        self.want_all_kept();
    }

    /// The SSD cannot be used for now: what is only there is not here any more. What is under way is
    /// answered as ever.
    pub fn ssd_gone(&mut self) {
        if self.has_ssd() {
            self.unseen.ssd.expect();
            // An extent that had made room before they were put may be there again.
            let entries = self.cache.index().iter().map(|(_, entry)| entry);
            let firsts = entries.filter(|entry| entry.parent.is_none()).map(|entry| entry.key);
            let unsunk: Vec<BlockKey> = firsts.filter(|key| !self.cache.is_on_ssd(*key)).collect();
            unsunk.into_iter().for_each(|key| self.unseen.ssd.put(key));
        }
        (self.ssd_size, self.ssd_unreached) = (SsdSize::default(), Unreached::default());
        self.ssd_in_part = false;
        let first = |block: SsdBlock| block.parent.is_none().then_some(block.key);
        let firsts: Vec<BlockKey> = self.cache.ssd().iter().filter_map(first).collect();
        for key in firsts {
            self.cache.unstore(key);
        }
    }

    /// How extents of blocks look from now on: a hash of the layout, and their bytes.
    pub fn set_extents(&mut self, layout: u64, extent_bytes: u64) {
        self.extent_bytes = extent_bytes;
        self.cache.set_layout(layout);
    }

    /// An extent was found rotten or could not be found: it, and what follows it, is not on the SSD.
    pub fn ssd_lost(&mut self, key: BlockKey) {
        self.ssd_unreached.remove(key);
        self.totals.ssd_lost += self.unstore_and_forget(key) as u64;
    }

    /// Answers how many blocks went with it.
    fn unstore_and_forget(&mut self, key: BlockKey) -> usize {
        // Those that go with it follow it.
        let follows_none = self.cache.ssd().get(key).is_some_and(|block| block.parent.is_none());
        let gone = self.cache.unstore(key);
        for of in &gone {
            self.forget_extent(*of, follows_none && *of == key);
        }
        gone.len()
    }

    /// The extents of a block that there are count for nothing any more. One that is being written would be
    /// forgotten with them: it replaces them, and if it fails they are forgotten then.
    pub(super) fn forget_extent(&mut self, key: BlockKey, follows_none: bool) {
        if self.sinks.writes(key) {
            self.sinks.forgotten.insert(key, follows_none);
        } else {
            self.actions.push_back(Action::Forget { key, follows_none });
        }
    }

    /// What the SSD has of an object, or may have after a crash, is to be gone for good. With `keep`, somebody waits.
    pub(super) fn erase(&mut self, now_ms: u64, of: (Namespace, BlockKey), keep: Option<u64>) {
        self.plan_erase(of, keep);
        self.issue_sinks(now_ms);
    }

    fn plan_erase(&mut self, (namespace, key): (Namespace, BlockKey), keep: Option<u64>) {
        let block = SsdBlock {
            key,
            namespace,
            parent: None,
            class: Class::Normal,
            mark: None,
            layout: self.cache.layout(),
            bytes: 0,
        };
        let (slot, batch, bytes) = (None, 0, 0);
        let number = self.sinks.plan(Sink { block, slot, batch, keep, bytes, erases: true });
        if let Some(waits) = keep.and_then(|keep| self.sinks.keeps.get_mut(&keep)) {
            waits.left.insert(number);
        }
    }

    /// What the SSD has under names that were put meanwhile is of before. What nobody was promised goes, and is gone for
    /// good; but what is kept there stays, and what was put goes: as if it had been known, and the put refused.
    fn ssd_is_seen(&mut self) {
        let first = |block: SsdBlock| block.parent.is_none().then_some(block.key);
        let all = || self.cache.ssd().iter().filter_map(first).collect();
        let names = self.unseen.ssd.is_seen().unwrap_or_default().all();
        let is_known = names.is_some();
        for key in names.unwrap_or_else(all) {
            let block = self.cache.ssd().get(key).filter(|block| block.parent.is_none());
            let Some(SsdBlock { namespace, class, .. }) = block else { continue };
            // What was put is kept too: that was promised last. Where nobody knows what was put, what is kept stays.
            let is_kept = self.bucket.get(key).is_some() || self.is_being_sent(key);
            let is_kept_since = is_known && is_kept;
            if matches!(class, Class::Context { .. }) && !is_kept_since {
                if let Some(slot) = self.object_slot(namespace, key) {
                    self.drop_refused(slot);
                }
                continue;
            }
            for of in self.cache.unstore(key) {
                if of != key {
                    self.forget_extent(of, false);
                }
            }
            self.sinks.forgotten.insert(key, true);
            self.plan_erase((namespace, key), None);
        }
    }

    /// What was put in memory is not found any more. Who reads it may go on.
    pub(super) fn drop_refused(&mut self, slot: SlotIndex) {
        self.totals.dropped += u64::from(self.cache.drop_subtree(slot));
    }

    /// The extent of a block that follows no other is to be gone for good, and is not found from now on even if that
    /// fails.
    pub(super) fn erase_extent(&mut self, now_ms: u64, (namespace, key): (Namespace, BlockKey)) {
        if self.has_ssd() {
            self.sinks.forgotten.insert(key, true);
            self.erase(now_ms, (namespace, key), None);
        } else {
            self.forget_extent(key, true);
        }
    }

    /// Contexts whose time is over are none any more: what is kept for nothing else becomes normal. Blocks of
    /// the object store whose time is over are not there any more.
    pub fn expire(&mut self, unix_ms: u64) {
        self.totals.expired += self.cache.ssd_mut().expire(unix_ms) as u64;
        for block in self.ssd_unreached.expire(unix_ms) {
            self.forget_extent(block.key, block.parent.is_none());
        }
        self.bucket.expire(unix_ms);
    }

    /// Whether the SSD answers in time. While it does not, nothing is begun with it.
    pub fn ssd_is_usable(&self, now_ms: u64) -> bool {
        let timeout_ms = self.options.ssd_timeout_ms;
        let late = |since_ms: u64| now_ms.saturating_sub(since_ms) >= timeout_ms;
        self.ssd_size.bytes_max > 0
            && self.rises.late == 0
            && !self.sinks.oldest_ms().is_some_and(late)
    }

    /// Begins to sink what will have to go next, while there is not enough that could go at once. To
    /// be called now and then, and after anything that took slots.
    pub fn sink_ahead(&mut self, now_ms: u64) {
        if !self.ssd_is_usable(now_ms) {
            return;
        }
        if self.extent_bytes > 0 {
            self.plan_ahead(now_ms);
        }
        self.issue_sinks(now_ms);
    }

    fn plan_ahead(&mut self, now_ms: u64) {
        let slots = self.cache.slots().len();
        let ahead = u64::from(slots) * u64::from(self.options.demote_ahead_percent) / 100;
        if u64::from(self.cache.slots().tally().free) < ahead {
            self.sink_next(now_ms, usize::try_from(ahead).unwrap_or(NEXT_LEAVES).min(NEXT_LEAVES));
        }
        while now_ms >= self.sinks.retry_at_ms && self.sinks.under_way() < self.sinks_max() {
            let tally = self.cache.slots().tally();
            let (unsunk, eldest) = self.cache.index().unsunk();
            let clean = u64::from(tally.free) + u64::from(tally.evictable) - unsunk as u64;
            let Some(eldest) = eldest else { break };
            if clean + self.sinks.len() as u64 >= ahead || !self.sink_chain(eldest) {
                break;
            }
            self.issue_sinks(now_ms);
        }
    }

    /// Sinks the leaves that would go next. It is not enough that others are on the SSD: what rose from there
    /// lately is, and goes last.
    fn sink_next(&mut self, now_ms: u64, leaves: usize) {
        let index = self.cache.index();
        let going: Vec<SlotIndex> =
            index.going().take(leaves).filter(|leaf| !index.is_sunk(*leaf)).collect();
        for leaf in going {
            let is_full = self.sinks.under_way() >= self.sinks_max();
            let may_sink = now_ms >= self.sinks.retry_at_ms && !is_full;
            if !may_sink || !self.sink_chain(leaf) {
                break;
            }
            self.issue_sinks(now_ms);
        }
    }

    /// A sink has ended: its extent is durable, or nothing of it counts.
    pub fn sunk(&mut self, now_ms: u64, sink: u64, result: Result<(), SinkError>) {
        self.end_sink(now_ms, sink, result);
        self.issue_sinks(now_ms);
    }

    fn end_sink(&mut self, now_ms: u64, sink: u64, result: Result<(), SinkError>) {
        let Some(done) = self.sinks.end(sink) else { return };
        let key = done.block.key;
        self.sinks.bytes -= done.bytes;
        let stored = match result {
            Ok(()) if done.erases => true,
            Ok(()) => self.sunk_well(&done),
            Err(_) if done.erases => false,
            Err(SinkError::Corrupt) => {
                if let Some((slot, generation)) = done.slot {
                    self.drop_corrupt(now_ms, slot, generation);
                }
                false
            }
            Err(SinkError::Gone) => {
                self.ssd_lost(key);
                false
            }
            Err(SinkError::Failed) => {
                self.sinks.retry_at_ms = now_ms.saturating_add(self.options.sink_retry_ms);
                false
            }
        };
        if stored {
            self.sinks.forgotten.remove(&key);
        } else if !self.sinks.writes(key)
            && let Some(follows_none) = self.sinks.forgotten.remove(&key)
        {
            self.actions.push_back(Action::Forget { key, follows_none });
        }
        self.totals.sinks_failed += u64::from(!stored);
        self.totals.sunk += u64::from(stored && !done.erases);
        if let Some(batch) = self.sinks.batches.get_mut(&done.batch) {
            batch.left -= 1;
            if batch.left == 0 {
                let batch = self.sinks.batches.remove(&done.batch);
                let path = batch.into_iter().flat_map(|batch| batch.path);
                if !mutated(Mutation::DemotionNotPinned) {
                    path.for_each(|slot| self.cache.unpin_unused(slot));
                }
            }
        }
        if let Some(keep) = done.keep {
            self.kept(keep, sink, stored);
            self.end_objects(now_ms);
        }
    }

    fn sunk_well(&mut self, done: &Sink) -> bool {
        // It may have been dropped while it was written: then its bytes are in doubt, and it is not worth
        // an extent. But one that has replaced another is all that there is of that one, which may be kept
        // for a tenant; the copy was checked, as every read of it will be.
        let is_unreached = self.ssd_unreached.get(done.block.key).is_some();
        let replaces = is_unreached || self.cache.ssd().contains(done.block.key);
        // Its slot is pinned until here: nothing else has come there.
        let is_indexed = |slot| self.cache.index().find(done.block.key) == Some(slot);
        let still = done.slot.is_none_or(|(slot, _)| is_indexed(slot));
        let stored =
            (still || replaces) && self.ssd_size.bytes_max > 0 && self.cache.stored(done.block);
        if stored {
            self.ssd_unreached.remove(done.block.key);
            self.reach(done.block.key);
        } else if is_unreached && self.ssd_size.bytes_max > 0 {
            self.ssd_unreached.put(done.block);
        } else {
            self.forget_extent(done.block.key, done.block.parent.is_none());
        }
        // What it was to replace may have gone meanwhile, and with it the room.
        self.make_ssd_room(0);
        if stored {
            self.sunk_for_keep(done);
        }
        stored
    }

    /// Plans to sink the chain that ends with a block, its first blocks first.
    fn sink_chain(&mut self, last: SlotIndex) -> bool {
        let mut path = self.cache.index().path(last);
        let key_of = |slot: &SlotIndex| self.cache.index().entry(*slot).map(|entry| entry.key);
        let sinking = |slot: &SlotIndex| {
            let is_from = |sink: &Sink| sink.slot.is_some_and(|(of, _)| of == *slot);
            key_of(slot).is_some_and(|key| self.sinks.of_key(key).any(is_from))
        };
        // One that is there in another layout, and whose mark is being changed, has its turn after that.
        let is_changing = |slot: &SlotIndex| {
            key_of(slot)
                .is_some_and(|key| self.cache.ssd().contains(key) && self.is_being_kept(key))
        };
        let may_sink = |slot: &SlotIndex| {
            !self.cache.index().is_sunk(*slot) && !sinking(slot) && !is_changing(slot)
        };
        let dirty: Vec<usize> =
            (0..path.len()).filter(|at| may_sink(&path[*at])).take(BATCH_MAX).collect();
        let Some(&end) = dirty.last() else { return false };
        path.truncate(end + 1);
        // What is written stays until it is written, and all before it: not so much of it that nobody
        // else finds room.
        let room_left = self.cache.available_beside(&path) >= self.cache.slots().len() / 4;
        let bytes = dirty.len() as u64 * self.extent_bytes;
        // The blocks before them are wanted as much: room is not made of those.
        for slot in &path {
            if let Some(key) = self.cache.index().entry(*slot).map(|entry| entry.key) {
                self.cache.ssd_mut().touch(key);
            }
        }
        if !room_left || !self.spare_ssd_room(bytes) {
            return false;
        }
        let block = |at: &usize| {
            let entry = self.cache.index().entry(path[*at])?;
            let parent = entry.parent.and_then(|parent| self.cache.index().entry(parent));
            let block = SsdBlock {
                key: entry.key,
                namespace: entry.namespace,
                parent: parent.map(|parent| parent.key),
                class: Class::Normal,
                // In another layout it may be there, and be kept.
                mark: self.known_mark(entry.key),
                layout: self.cache.layout(),
                bytes: self.extent_bytes,
            };
            Some((block, Some(path[*at])))
        };
        let sinks: Vec<_> = dirty.iter().filter_map(block).collect();
        self.begin_sinks(path, sinks, None);
        true
    }

    pub(super) fn begin_sinks(
        &mut self,
        path: Vec<SlotIndex>,
        sinks: Vec<(SsdBlock, Option<SlotIndex>)>,
        keep: Option<u64>,
    ) {
        if !mutated(Mutation::DemotionNotPinned) {
            path.iter().for_each(|slot| self.cache.pin(*slot));
        }
        let batch = self.sinks.number();
        self.sinks.batches.insert(batch, Batch { path, left: sinks.len() });
        for (block, slot) in sinks {
            let slot = slot.and_then(|slot| Some((slot, self.cache.slots().generation(slot)?)));
            let there = self.on_ssd(block.key).map_or(0, |block| block.bytes);
            let bytes = block.bytes.saturating_sub(there);
            self.sinks.bytes += bytes;
            let number = self.sinks.plan(Sink { block, slot, batch, keep, bytes, erases: false });
            if let Some(waits) = keep.and_then(|keep| self.sinks.keeps.get_mut(&keep)) {
                waits.left.insert(number);
            }
        }
    }

    pub(super) fn issue_sinks(&mut self, now_ms: u64) {
        while self.sinks.under_way() < self.sinks_max() {
            let Some((sink, of)) = self.sinks.issue(now_ms) else { return };
            let block = of.block;
            if of.erases {
                let SsdBlock { key, namespace, .. } = block;
                self.actions.push_back(Action::Erase { sink, key, namespace });
                continue;
            }
            let Some((slot, generation)) = of.slot else {
                self.actions.push_back(Action::Rewrite { sink, key: block.key, mark: block.mark });
                continue;
            };
            match self.cache.index().entry(slot).map(|entry| entry.checksum) {
                Some(checksum) => {
                    self.actions.push_back(Action::Sink {
                        sink,
                        slot,
                        generation,
                        block,
                        checksum,
                    });
                }
                // It was dropped while it waited.
                None => self.end_sink(now_ms, sink, Err(SinkError::Corrupt)),
            }
        }
    }

    /// Few enough that what they hold is a small part of the slots.
    fn sinks_max(&self) -> usize {
        let slots = self.cache.slots().len() as usize;
        self.options.sinks_max.min(slots / 8).max(2)
    }

    /// Makes room for so many bytes of new extents, by dropping what the SSD can spare.
    pub(super) fn make_ssd_room(&mut self, bytes: u64) -> bool {
        while !self.ssd_has_room(bytes) {
            let Some(key) = self.cache.ssd().eldest() else { return false };
            self.drop_from_ssd(key);
        }
        true
    }

    /// The same without driving out what is in memory too: that would be the next to sink, and so on without end.
    /// It counts as used, so that what is not in memory comes after it.
    fn spare_ssd_room(&mut self, bytes: u64) -> bool {
        let mut looks = 0;
        while !self.ssd_has_room(bytes) {
            let Some(key) = self.cache.ssd().eldest() else { return false };
            if self.cache.index().find(key).is_none() {
                self.drop_from_ssd(key);
            } else if looks < SPARE_LOOKS {
                self.cache.ssd_mut().touch(key);
                looks += 1;
            } else {
                return false;
            }
        }
        true
    }

    fn ssd_has_room(&self, bytes: u64) -> bool {
        let taken = self.cache.ssd().bytes() + self.ssd_unreached.bytes() + self.sinks.bytes;
        taken + bytes <= self.ssd_size.bytes_max
    }

    fn drop_from_ssd(&mut self, key: BlockKey) {
        self.totals.ssd_evicted += 1;
        self.unstore_and_forget(key);
    }

    /// How many blocks after a held prefix could be read from the SSD or the object store now.
    pub(super) fn could_rise(
        &self,
        now_ms: u64,
        namespace: Namespace,
        keys: &[BlockKey],
        held: usize,
    ) -> u32 {
        let there = self.below(now_ms, namespace, keys, held);
        let room = self.options.rises_max.saturating_sub(self.rises.all.len());
        there.min(room) as u32
    }

    /// How many of the keys after the first ones are in the engine's pool, on the SSD or in the object store, as
    /// far as these can be used: each in one of them.
    pub(super) fn below(
        &self,
        now_ms: u64,
        namespace: Namespace,
        keys: &[BlockKey],
        held: usize,
    ) -> usize {
        let ssd_is_usable = self.ssd_is_usable(now_ms);
        let mut at = held;
        loop {
            let before = at;
            let parent = |at: usize| at.checked_sub(1).map(|before| keys[before]);
            at += self.cache.pools().prefix(namespace, parent(at), &keys[at..]);
            if ssd_is_usable {
                let ssd = self.cache.ssd();
                at += ssd.prefix(namespace, self.cache.layout(), parent(at), &keys[at..]);
            }
            if self.bucket.usable {
                at += self.bucket.prefix(namespace, self.cache.layout(), parent(at), &keys[at..]);
            }
            if at == before {
                return at - held;
            }
        }
    }

    /// Whether anything can be read from below memory now.
    pub(super) fn below_is_usable(&self, now_ms: u64) -> bool {
        self.bucket.usable || self.ssd_is_usable(now_ms) || !self.cache.pools().is_empty()
    }

    /// A page of a share that is read from the SSD or the object store, by this share first or by an earlier one.
    pub(super) fn rise_page(
        &mut self,
        now_ms: u64,
        (share, namespace): (Share, Namespace),
        page: u32,
        key: BlockKey,
    ) -> Option<Page> {
        let known = self.rises.of_key(key).map(|(id, rise)| (id, rise.slot));
        let (id, slot) = match known {
            Some(known) => known,
            None => self.begin_rise(now_ms, namespace, key)?,
        };
        self.cache.pin(slot);
        self.rises.all.get_mut(&id)?.waiters.push((share, page));
        Some(Page { slot, hold: Hold::Pinned })
    }

    fn begin_rise(
        &mut self,
        now_ms: u64,
        namespace: Namespace,
        key: BlockKey,
    ) -> Option<(u64, SlotIndex)> {
        let held = self.cache.pools().block(key);
        if let Some(parent) =
            held.filter(|held| held.namespace == namespace).map(|held| held.parent)
        {
            return self.begin_pool_rise(now_ms, (namespace, parent), key);
        }
        let layout = self.cache.layout();
        let fits = |block: &SsdBlock| {
            (block.namespace == namespace || mutated(Mutation::SsdNamespaceIgnored))
                && block.layout == layout
        };
        let on_ssd = self.cache.ssd().get(key).filter(fits);
        let on_ssd = on_ssd.filter(|_| self.ssd_is_usable(now_ms));
        let is_download = on_ssd.is_none();
        let block = on_ssd.or_else(|| self.bucket.get(key).filter(fits))?;
        let slot = self.cache.rise()?;
        if !is_download {
            self.cache.ssd_mut().begin_use(key);
        }
        let from = if is_download { RiseFrom::Bucket } else { RiseFrom::Ssd };
        let id = self.insert_rise(now_ms, (namespace, block.parent), key, (from, slot));
        self.actions.push_back(match is_download {
            true => Action::Download { rise: id, slot, block },
            false => Action::Rise { rise: id, slot, key },
        });
        Some((id, slot))
    }

    pub(super) fn insert_rise(
        &mut self,
        now_ms: u64,
        (namespace, parent): (Namespace, Option<BlockKey>),
        key: BlockKey,
        (from, slot): (RiseFrom, SlotIndex),
    ) -> u64 {
        self.rises.insert(Rise {
            key,
            namespace,
            parent,
            slot,
            from,
            since_ms: now_ms,
            landed: None,
            late: false,
            is_void: false,
            waiters: Vec::new(),
        })
    }

    /// A read of the SSD, of the object store or of a page has ended, with the block's checksum: its bytes are in the
    /// slot, or the slot is not written any more.
    pub fn risen(&mut self, now_ms: u64, rise: u64, result: Result<u64, RiseError>) {
        let Some(of) = self.rises.all.get_mut(&rise) else { return };
        let (key, from) = (of.key, of.from);
        let mut result = if of.is_void { Err(RiseError::Failed) } else { result };
        match from {
            RiseFrom::Ssd => self.cache.ssd_mut().end_use(key),
            RiseFrom::Bucket => {}
            // Of an engine that is gone nobody knows what it did last.
            RiseFrom::Pool { epoch, page } => {
                let is_there = self.end_pool_read(epoch, page);
                result = result.and_then(|sum| is_there.then_some(sum).ok_or(RiseError::Failed));
            }
        }
        let is_download = from == RiseFrom::Bucket;
        match result {
            Ok(checksum) => {
                if let Some(of) = self.rises.all.get_mut(&rise) {
                    of.landed = Some(checksum);
                }
                self.totals.downloaded += u64::from(is_download);
                self.land_from(now_ms, rise);
            }
            Err(error) => {
                self.totals.rises_failed += u64::from(from == RiseFrom::Ssd);
                self.totals.downloads_failed += u64::from(is_download);
                match (error, from) {
                    (RiseError::Gone, RiseFrom::Bucket) => self.bucket_lost(key),
                    (RiseError::Gone, RiseFrom::Ssd) => self.ssd_lost(key),
                    (RiseError::Failed, _) | (_, RiseFrom::Pool { .. }) => {}
                }
                self.fail_rise(now_ms, rise);
            }
        }
    }

    /// Lands a block that has been read, when the block before it is here, and then those that wait
    /// for it.
    fn land_from(&mut self, now_ms: u64, rise: u64) {
        self.cache.set_now(now_ms);
        let mut next = vec![rise];
        while let Some(rise) = next.pop() {
            let Some(of) = self.rises.all.get(&rise) else { continue };
            if of.landed.is_none() {
                continue;
            }
            let (key, parent) = (of.key, of.parent);
            let parent_slot = parent.map(|parent| self.cache.index().find(parent));
            let parent_rise = parent.and_then(|parent| self.rises.of_key(parent));
            let (parent_rises, is_in_time) =
                (parent_rise.is_some(), parent_rise.is_some_and(|(_, of)| !of.late));
            if parent_slot == Some(None) {
                if !parent_rises || of.late {
                    self.fail_rise(now_ms, rise);
                }
                continue;
            }
            // The parent was computed or sent here while it rose: whoever waits for this block has a pin of it only
            // when its rise is over, and no block is pinned without those before it.
            if is_in_time && !of.late {
                continue;
            }
            self.land(now_ms, rise, parent_slot.flatten());
            let follows = |(id, of): (&u64, &Rise)| (of.parent == Some(key)).then_some(*id);
            next.extend(self.rises.all.iter().filter_map(follows));
        }
    }

    fn land(&mut self, now_ms: u64, rise: u64, parent: Option<SlotIndex>) {
        self.leave_strays(now_ms, rise, parent);
        let Some(of) = self.rises.remove(rise) else { return };
        let Rise { key, namespace, slot, landed, waiters, from, .. } = of;
        match from {
            RiseFrom::Pool { .. } => self.totals.pool_sunk += 1,
            RiseFrom::Ssd | RiseFrom::Bucket => self.totals.risen += 1,
        }
        match self.cache.index().find(key) {
            None => {
                let checksum = landed.expect("the block has landed");
                self.cache.land(slot, Entry { key, namespace, parent, checksum });
            }
            // It was computed or sent here meanwhile: that copy serves.
            Some(kept) => {
                for (share, page) in &waiters {
                    let record = self.shares.get_mut(share);
                    let at = record.and_then(|record| record.pages.get_mut(*page as usize));
                    if let Some(at) = at.filter(|at| at.slot == slot) {
                        at.slot = kept;
                        self.cache.pin(kept);
                        self.cache.unpin(slot);
                    }
                }
                self.cache.give_back(slot);
            }
        }
        for (share, _) in waiters {
            self.look_after_rising(now_ms, share);
        }
    }

    /// A rise came to nothing: whoever waits for it goes on without it and what follows it.
    fn fail_rise(&mut self, now_ms: u64, rise: u64) {
        self.leave_waiters(now_ms, rise);
        let Some(of) = self.rises.remove(rise) else { return };
        self.totals.pool_sinks_failed += u64::from(matches!(of.from, RiseFrom::Pool { .. }));
        self.cache.give_back(of.slot);
        // What was read and waits for it has nothing to wait for.
        let follows = |(id, after): (&u64, &Rise)| {
            (after.parent == Some(of.key) && after.landed.is_some()).then_some(*id)
        };
        let orphans: Vec<u64> = self.rises.all.iter().filter_map(follows).collect();
        orphans.into_iter().for_each(|orphan| self.land_from(now_ms, orphan));
    }

    /// Those who wait for a block and have another copy of the one before it, which was dropped since: with a pin of this
    /// block they would have none of its parent.
    fn leave_strays(&mut self, now_ms: u64, rise: u64, parent: Option<SlotIndex>) {
        let Some(of) = self.rises.all.get_mut(&rise) else { return };
        let shares = &self.shares;
        let is_stray = |(share, page): &mut (Share, u32)| {
            let before = page.checked_sub(1);
            let record = shares.get(share);
            before
                .zip(record)
                .is_some_and(|(before, record)| record.page(before).map(|page| page.slot) != parent)
        };
        let (slot, strays) = (of.slot, of.waiters.extract_if(.., is_stray).collect::<Vec<_>>());
        self.leave(now_ms, slot, strays);
    }

    /// What was read and has waited for this rise does not wait any more.
    fn land_after(&mut self, now_ms: u64, rise: u64) {
        let Some(key) = self.rises.all.get(&rise).map(|of| of.key) else { return };
        let follows = |(id, after): (&u64, &Rise)| {
            (after.parent == Some(key) && after.landed.is_some()).then_some(*id)
        };
        let waiting: Vec<u64> = self.rises.all.iter().filter_map(follows).collect();
        waiting.into_iter().for_each(|rise| self.land_from(now_ms, rise));
    }

    pub(super) fn leave_waiters(&mut self, now_ms: u64, rise: u64) {
        let Some(of) = self.rises.all.get_mut(&rise) else { return };
        let (slot, waiters) = (of.slot, std::mem::take(&mut of.waiters));
        self.leave(now_ms, slot, waiters);
    }

    fn leave(&mut self, now_ms: u64, slot: SlotIndex, waiters: Vec<(Share, u32)>) {
        for (share, page) in waiters {
            let waits = self.shares.get(&share).and_then(|record| record.page(page));
            if waits.is_some_and(|at| at.slot == slot) {
                self.cut_rising(now_ms, share, page);
            }
        }
    }

    /// Reads that take too long are not waited for: the slots stay as they are until they end.
    pub(super) fn late_rises(&mut self, now_ms: u64) {
        while let Some((rise, since_ms)) = self.rises.oldest_download()
            && now_ms.saturating_sub(since_ms) >= self.options.bucket.timeout_ms
        {
            self.totals.downloads_late += 1;
            self.rises.set_late(rise);
            self.leave_waiters(now_ms, rise);
            self.land_after(now_ms, rise);
        }
        while let Some((rise, since_ms)) = self.rises.oldest()
            && now_ms.saturating_sub(since_ms) >= self.options.ssd_timeout_ms
        {
            self.totals.rises_late += 1;
            self.rises.set_late(rise);
            self.leave_waiters(now_ms, rise);
            if mutated(Mutation::LateSsdReadNotAwaited) {
                self.fail_rise(now_ms, rise);
            }
            self.land_after(now_ms, rise);
        }
    }

    /// The share does not get this page and those after it from the SSD: it computes them (or, on
    /// the source side, does not send them).
    fn cut_rising(&mut self, now_ms: u64, share: Share, page: u32) {
        let Some(record) = self.shares.get_mut(&share) else { return };
        let end = record.rising.end;
        record.rising.end = page;
        // Nobody computes anything into an aborted one any more either.
        let is_over = share.side == Side::Source || record.is_aborted();
        let cut: Vec<SlotIndex> =
            (page..end).filter_map(|page| Some(record.page(page)?.slot)).collect();
        self.cache.set_now(now_ms);
        cut.iter().for_each(|slot| self.cache.unpin(*slot));
        let finds_room = self.cache.available() as usize >= cut.len();
        if is_over || !finds_room {
            record.pages.drain(page as usize..page as usize + cut.len());
            record.held_blocks = record.held_blocks.min(page);
        }
        if !is_over && !finds_room {
            // Refused by no state.
            let _ = self.apply(now_ms, share, ShareEvent::Abort, AbortReason::NoRoom);
            return;
        }
        for page in (page..end).filter(|_| !is_over) {
            let slot = self.cache.reserve(share).expect("there was room for all");
            if let Some(record) = self.shares.get_mut(&share) {
                record.pages[page as usize] = Page { slot, hold: Hold::Private };
            }
        }
        self.look_after_rising(now_ms, share);
    }

    /// When nothing of a share rises any more, it has what it got. A source sends what it has meanwhile: to
    /// read and to send take the longer of both times.
    fn look_after_rising(&mut self, now_ms: u64, share: Share) {
        let Some(record) = self.shares.get_mut(&share) else { return };
        let slots = self.cache.slots();
        let rises = |page: u32| {
            let slot = record.page(page).map(|page| page.slot);
            matches!(slot.and_then(|slot| slots.state(slot)), Some(SlotState::Rising { .. }))
        };
        if record.is_aborted() || !record.state.rising {
            return;
        }
        let blocks = record.rising.clone().find(|page| rises(*page)).unwrap_or(record.rising.end);
        if blocks < record.rising.end {
            let sends = share.side == Side::Source && !record.is_hint;
            if sends && blocks > record.cached_blocks {
                record.cached_blocks = blocks;
                self.source_has(share, blocks, false);
            }
            return;
        }
        record.cached_blocks = blocks;
        // Refused by no state.
        let Ok(asks) = record.state.on(ShareEvent::Risen) else { return };
        if let Some(epoch) = asks.bound {
            let bound = record.bound(self.block_tokens);
            self.actions.push_back(Action::Bound { share, epoch, bound });
        }
        if record.is_hint {
            // Refused by no state.
            let _ = self.apply(now_ms, share, ShareEvent::Release, AbortReason::NoRoom);
        } else if share.side == Side::Source {
            self.source_has(share, blocks, true);
        }
    }

    /// More of what a source waits for is there; a fill goes on by itself.
    fn source_has(&mut self, share: Share, blocks: u32, is_all: bool) {
        if !self.fill_has(share, blocks, is_all) {
            self.actions.push_back(Action::Risen { share, blocks, is_all });
        }
    }
}
