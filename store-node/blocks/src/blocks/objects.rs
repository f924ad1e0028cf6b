//! Objects: blocks that follow no other, put and got by processes that are no engines.
//!
//! What is put together is one share, whose pages its client writes and then commits one by one. It is
//! never heard of again once it has ended, so nothing of it is remembered. What is got together is
//! pinned under one handle, like an engine's blocks.

use kvasir_mutation::{Mutation, mutated};
use kvasir_proto::{BlockKey, Class, Generation, Namespace, Share, SlotIndex};

use super::{Blocks, as_u32};
use crate::api::{
    AbortReason, Allocate, AllocateError, AttachEpoch, GetError, KeepError, ObjectAt,
    ReserveObjects, Tier,
};
use crate::share::{Hold, Page, ShareRecord};
use crate::share_state::{Engine, ShareState};
use crate::ssd::SsdBlock;
use crate::tier_work::Keep;

impl Blocks {
    /// Reserves a slot for each of these objects, whole or not at all, evicting if it must. The
    /// client has the share at once: [`commit_page`](Self::commit_page) for each object that it has
    /// written, and [`release`](Self::release) when it writes no more.
    ///
    /// # Errors
    /// [`AllocateError`]; then nothing was taken.
    pub fn reserve_objects(
        &mut self,
        now_ms: u64,
        request: &ReserveObjects,
    ) -> Result<Vec<SlotIndex>, AllocateError> {
        self.forget_until(now_ms);
        self.check_object_share(request)?;
        if self.is_draining() {
            return Err(AllocateError::Draining);
        }
        let wanted = u32::try_from(request.keys.len()).unwrap_or(u32::MAX);
        let (slots, available) = (self.cache.slots().len(), self.cache.available());
        if wanted > slots {
            return Err(AllocateError::TooLarge { wanted, slots });
        }
        if wanted > available {
            self.totals.refused_no_space += 1;
            return Err(AllocateError::NoSpace { available, wanted });
        }
        self.cache.make_room(wanted);
        let reserve = |_| self.cache.reserve(request.share).expect("there are that many");
        let slots: Vec<SlotIndex> = (0..wanted).map(reserve).collect();
        let pages = slots.iter().map(|&slot| Page { slot, hold: Hold::Private }).collect();
        let mut state = ShareState::new(false, false, false);
        if !mutated(Mutation::PutSlotsFreedWhileWriting) {
            state.engine = Engine::Bound(request.epoch);
        }
        self.open_object_share(now_ms, request, state, pages);
        Ok(slots)
    }

    /// Begins to read objects from the SSD that are there and nowhere else, as far as there is room:
    /// each share is one object's. [`Action::Risen`](crate::Action::Risen) tells of each that has
    /// begun, and it is to be released then. False when the object cannot be read now.
    pub fn raise_object(&mut self, now_ms: u64, request: &ReserveObjects) -> bool {
        self.forget_until(now_ms);
        let [key] = request.keys[..] else { return false };
        let is_here = self.object_slot(request.namespace, key).is_some();
        let may = self.check_object_share(request).is_ok() && self.cache.available() > 0;
        if is_here || !may || self.could_rise(now_ms, request.namespace, &[key], 0) == 0 {
            return false;
        }
        let of = (request.share, request.namespace);
        let Some(page) = self.rise_page(now_ms, of, 0, key) else { return false };
        let state = ShareState::new(false, false, true);
        self.open_object_share(now_ms, request, state, vec![page]);
        true
    }

    /// Pins those of these objects that are here, under a name that the client chose, and answers
    /// with their slots, a miss as `None`. An answer of misses holds nothing.
    ///
    /// # Errors
    /// [`GetError`]; then nothing was pinned.
    pub fn get_objects(
        &mut self,
        epoch: AttachEpoch,
        handle: u64,
        namespace: Namespace,
        keys: &[BlockKey],
    ) -> Result<Vec<Option<SlotIndex>>, GetError> {
        let found: Vec<Option<SlotIndex>> =
            keys.iter().map(|&key| self.object_slot(namespace, key)).collect();
        let slots: Vec<SlotIndex> = found.iter().flatten().copied().collect();
        self.gets.check(epoch, handle, slots.len())?;
        if !slots.is_empty() {
            slots.iter().for_each(|&slot| self.cache.pin(slot));
            self.gets.insert(epoch, handle, slots);
        }
        Ok(found)
    }

    /// Takes back what [`Self::get_objects`] has pinned, as if nobody had asked for it.
    pub fn unget_objects(&mut self, epoch: AttachEpoch, handle: u64) {
        let slots = self.gets.remove(epoch, handle).unwrap_or_default();
        slots.iter().for_each(|&slot| self.cache.unpin_unused(slot));
    }

    /// Where an object can be had fastest, when it can. What is in the object store alone counts as on the SSD.
    pub fn find_object(&self, namespace: Namespace, key: BlockKey) -> Option<Tier> {
        if self.object_slot(namespace, key).is_some() {
            return Some(Tier::Dram);
        }
        let is_below = self.is_on_ssd(namespace, key)
            || self.bucket.prefix(namespace, self.cache.layout(), None, &[key]) == 1;
        is_below.then_some(Tier::Ssd)
    }

    /// The SSD has the object, in this layout.
    pub(super) fn is_on_ssd(&self, namespace: Namespace, key: BlockKey) -> bool {
        self.cache.ssd().prefix(namespace, self.cache.layout(), None, &[key]) == 1
    }

    /// An object that is in memory has come from another node: as if it had been put here.
    pub fn object_has_come(&mut self, namespace: Namespace, key: BlockKey) {
        if self.object_slot(namespace, key).is_some() {
            self.unseen.put(key);
        }
    }

    /// Forgets objects: they are found no more, and their slots are free when they are unpinned. Answers how many
    /// there were, and under which number [`Action::Kept`](crate::Action::Kept) says that no restart brings any
    /// of them back, neither from the SSD nor from the object store; without one, none could.
    ///
    /// # Errors
    /// [`KeepError::Busy`] while one of them is written anew from where the SSD has it, [`KeepError::NoBucket`] while
    /// the object store does not answer and may have one; then none is removed.
    pub fn remove_objects(
        &mut self,
        now_ms: u64,
        namespace: Namespace,
        keys: &[BlockKey],
    ) -> Result<(u32, Option<u64>), KeepError> {
        // What is read now would be appended after the removal.
        if keys.iter().any(|key| self.sinks.rewrites(*key)) {
            return Err(KeepError::Busy);
        }
        let mut keys = keys.to_vec();
        keys.sort_unstable();
        keys.dedup();
        let in_bucket: Vec<BlockKey> =
            keys.iter().copied().filter(|key| self.may_be_in_bucket((namespace, *key))).collect();
        if self.unseen.bucket.is_unknown() || !self.bucket.usable && !in_bucket.is_empty() {
            return Err(KeepError::NoBucket);
        }
        let (removed, mut absent): (Vec<BlockKey>, Vec<BlockKey>) =
            keys.iter().copied().partition(|key| self.has_object(namespace, *key));
        // One that has made room may come back too. What is there is somebody else's.
        let is_nowhere =
            |key: &BlockKey| self.on_ssd(*key).is_none() && self.cache.index().find(*key).is_none();
        absent.retain(is_nowhere);
        // Reads that are under way are of what is removed, also where a list has not shown it any more.
        self.void_rises(now_ms, namespace, &keys);
        self.abort_coming(now_ms, namespace, &keys);
        let is_written = self.has_ssd() && !(removed.is_empty() && absent.is_empty());
        let is_awaited = is_written || !in_bucket.is_empty();
        let keep = is_awaited.then(|| self.sinks.number());
        if let Some(keep) = keep {
            self.sinks.keeps.insert(keep, Keep::new(0, None));
            in_bucket.into_iter().for_each(|key| self.discard((namespace, key), Some(keep)));
        }
        if is_written {
            absent.iter().for_each(|key| self.erase(now_ms, (namespace, *key), keep));
        }
        removed.iter().for_each(|key| self.drop_object(now_ms, (namespace, *key), keep));
        if let Some(keep) = keep
            && self.sinks.keeps.get(&keep).is_some_and(|waits| waits.left.is_empty())
        {
            self.finish_keep(keep);
        }
        Ok((as_u32(removed.len()), keep))
    }

    fn void_rises(&mut self, now_ms: u64, namespace: Namespace, keys: &[BlockKey]) {
        let void = self.rises.void(namespace, keys);
        void.into_iter().for_each(|rise| self.leave_waiters(now_ms, rise));
    }

    /// What another node sends of these counts for nothing.
    fn abort_coming(&mut self, now_ms: u64, namespace: Namespace, keys: &[BlockKey]) {
        let is_of_one = |(_, record): &(&Share, &ShareRecord)| {
            let of = &record.request;
            let first = of.keys.first();
            of.has_remote_writer
                && of.namespace == namespace
                && first.is_some_and(|first| keys.binary_search(first).is_ok())
        };
        let coming: Vec<Share> =
            self.shares.iter().filter(is_of_one).map(|(share, _)| *share).collect();
        for share in coming {
            self.abort_open(now_ms, share, AbortReason::Removed);
        }
    }

    /// The same of one that goes by itself. False when there was none.
    fn remove_object(&mut self, now_ms: u64, namespace: Namespace, key: BlockKey) -> bool {
        let is_there = self.has_object(namespace, key);
        if is_there {
            self.void_rises(now_ms, namespace, &[key]);
            self.discard_own((namespace, key));
            self.drop_object(now_ms, (namespace, key), None);
        }
        is_there
    }

    /// It is in some tier, in whichever layout: then it cannot be had, but it could by clients of that one.
    fn has_object(&self, namespace: Namespace, key: BlockKey) -> bool {
        self.object_slot(namespace, key).is_some() || {
            let is_its = |block: SsdBlock| block.namespace == namespace && block.parent.is_none();
            let below = [self.cache.ssd().get(key), self.bucket.get(key)];
            below.into_iter().flatten().any(is_its)
        }
    }

    /// There is an SSD, and it can be written to; blocks of this layout may be too large for it.
    pub(super) fn has_ssd(&self) -> bool {
        self.ssd_size.bytes_max > 0
    }

    fn drop_object(
        &mut self,
        now_ms: u64,
        (namespace, key): (Namespace, BlockKey),
        keep: Option<u64>,
    ) {
        self.cache.set_now(now_ms);
        let is_its = |block: SsdBlock| block.namespace == namespace;
        let there = self.cache.ssd().get(key);
        let is_others = there.is_some_and(|block| !is_its(block));
        // What follows it, if it is the beginning of a prompt.
        let on_ssd = if is_others { Vec::new() } else { self.cache.unstore(key) };
        let (own, after): (Vec<BlockKey>, Vec<BlockKey>) =
            on_ssd.into_iter().partition(|of| *of == key);
        after.into_iter().for_each(|key| self.forget_extent(key, false));
        if self.has_ssd() && !is_others {
            // When that fails, what is there is at least not found any more.
            self.sinks.forgotten.extend(own.into_iter().map(|key| (key, true)));
            self.erase(now_ms, (namespace, key), keep);
        }
        if !self.has_ssd() {
            // What it has, when there is one that fails now, is of before.
            self.unseen.ssd.put(key);
        }
        if let Some(slot) = self.object_slot(namespace, key) {
            self.drop_read(now_ms, slot, &AbortReason::Removed);
        }
    }

    /// The object of this key that is in memory now.
    pub fn object_at(&self, namespace: Namespace, key: BlockKey) -> Option<ObjectAt> {
        let slot = self.object_slot(namespace, key)?;
        let generation = self.cache.slots().generation(slot)?;
        Some(ObjectAt { namespace, key, slot, generation })
    }

    /// Whether the slot has an object of that namespace, of that generation.
    pub fn is_object_of(
        &self,
        namespace: Namespace,
        slot: SlotIndex,
        generation: Generation,
    ) -> bool {
        let entry = self.cache.index().entry(slot);
        entry.is_some_and(|entry| entry.namespace == namespace && entry.parent.is_none())
            && self.cache.slots().generation(slot) == Some(generation)
    }

    /// Whether this object is there still, and not another one that was put under its key since.
    pub fn is_there(&self, object: &ObjectAt) -> bool {
        let there = self.object_at(object.namespace, object.key);
        there.as_ref() == Some(object)
            || mutated(Mutation::ReplacedObjectRemovedWithClient)
            || mutated(Mutation::EphemeralObjectNotPinned)
                && there.is_some_and(|there| there.slot == object.slot)
    }

    /// Forgets an object that was to live as long as its client, which has ended. One that is kept for a tenant
    /// meanwhile stays: whoever was told so knows nothing of that client. One that is being kept goes when that
    /// fails. What others have put under its key since is theirs. False when it has not gone.
    pub fn end_object(&mut self, now_ms: u64, object: &ObjectAt) -> bool {
        let ObjectAt { namespace, key, .. } = *object;
        if !self.is_there(object) {
            return false;
        }
        if self.is_being_kept(key) || self.is_waited_for(key) || self.is_coming(key) {
            self.ending_objects.insert(key, *object);
            return false;
        }
        let class = self.cache.ssd().get(key).map(|block| block.class);
        let on_ssd = matches!(class, Some(Class::Context { .. }));
        // Nothing is there but what somebody was promised.
        let in_bucket = self.bucket.get(key).is_some();
        if (on_ssd || in_bucket) && !mutated(Mutation::KeptObjectRemovedWithClient) {
            return false;
        }
        self.remove_object(now_ms, namespace, key)
    }

    /// Keeping has ended of some: those whose clients have ended meanwhile go, unless they are kept now.
    pub(super) fn end_objects(&mut self, now_ms: u64) {
        for object in std::mem::take(&mut self.ending_objects).into_values() {
            self.end_object(now_ms, &object);
        }
    }

    /// The slot of an object: a block of that namespace that follows no other.
    pub(super) fn object_slot(&self, namespace: Namespace, key: BlockKey) -> Option<SlotIndex> {
        let slot = self.cache.index().find(key)?;
        let entry = self.cache.index().entry(slot)?;
        let same_namespace =
            entry.namespace == namespace || mutated(Mutation::ObjectNamespaceIgnored);
        (same_namespace && entry.parent.is_none()).then_some(slot)
    }

    fn check_object_share(&self, request: &ReserveObjects) -> Result<(), AllocateError> {
        if self.shares.len() >= self.options.shares_max {
            return Err(AllocateError::TooManyShares(self.shares.len()));
        }
        if request.lease_ms == 0 || request.lease_ms > self.options.lease_max_ms {
            return Err(AllocateError::BadRequest("the lease is zero or longer than allowed"));
        }
        if request.keys.is_empty() || self.shares.contains_key(&request.share) {
            return Err(AllocateError::BadRequest(
                "the request must have at least one object and a new share",
            ));
        }
        Ok(())
    }

    fn open_object_share(
        &mut self,
        now_ms: u64,
        request: &ReserveObjects,
        state: ShareState,
        pages: Vec<Page>,
    ) {
        let ReserveObjects { share, namespace, ref keys, lease_ms, .. } = *request;
        let prompt_pages = pages.len() as u32;
        let rising = if state.rising { 0..prompt_pages } else { 0..0 };
        let lease_until_ms = now_ms.saturating_add(lease_ms);
        let record = ShareRecord {
            request: Allocate {
                share,
                namespace,
                keys: keys.clone(),
                prompt_tokens: prompt_pages.saturating_mul(self.block_tokens),
                lease_ms,
                fetch_until_block: 0,
                has_remote_writer: false,
                is_ephemeral: false,
                leaves_ssd: false,
            },
            state,
            held_blocks: rising.end,
            cached_blocks: 0,
            rising,
            prompt_pages,
            pages,
            targets: 0..0,
            imm: None,
            lease_until_ms,
            aborted: None,
            of_objects: true,
            is_hint: false,
            is_fill: false,
        };
        self.leases.insert((lease_until_ms, share));
        self.shares.insert(share, record);
    }
}
