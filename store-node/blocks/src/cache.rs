//! The cache: slots, index, what lies on the SSD and in engines' pools, and event log, which must change together
//! and change only here.
//!
//! It knows nothing of transactions beyond the share that a private slot is reserved for. It must
//! hold that the committed slots are exactly the indexed ones, that the log says of each block in which
//! tier it can be had fastest, and that whoever pins a block pins the blocks before it; the last is the callers' part, and
//! makes every unpinned block evictable.

use kvasir_proto::{BlockKey, Generation, Namespace, Share, SlotIndex};

use crate::api::{AttachEpoch, BlockChange, Tier};
use crate::events::EventLog;
use crate::eviction::Eviction;
use crate::index::{Entry, Index};
use crate::pool_set::PoolSet;
use crate::pools::PoolTable;
use crate::slot_state::{SlotEvent, SlotState};
use crate::slots::Slots;
use crate::ssd::{Ssd, SsdBlock};

#[derive(Debug)]
pub(crate) struct Cache {
    slots: Slots,
    index: Index,
    ssd: Ssd,
    /// A hash of how blocks lie in slots; 0 before it is known. What lies on the SSD in another one cannot be had.
    layout: u64,
    log: EventLog,
    evicted_total: u64,
    evicted_unsunk_total: u64,
    eviction: Eviction,
    pools: PoolSet,
}

impl Cache {
    pub(crate) fn new(slots: u32, event_log_max: usize, eviction: Eviction) -> Self {
        Cache {
            slots: Slots::new(slots, Generation(0)),
            index: Index::new(slots, eviction),
            ssd: Ssd::default(),
            layout: 0,
            log: EventLog::new(event_log_max),
            evicted_total: 0,
            evicted_unsunk_total: 0,
            eviction,
            pools: PoolSet::default(),
        }
    }

    /// Forgets every block but those on the SSD and takes another number of slots. Only when none is held.
    pub(crate) fn reset(&mut self, slots: u32) {
        self.make_room(self.slots.len());
        assert_eq!(self.slots.tally().free, self.slots.len(), "a reset while slots are held");
        self.slots = Slots::new(slots, self.slots.next_generation());
        let unused = self.index.prefetched_unused();
        self.index = Index::new(slots, self.eviction);
        self.index.set_prefetched_unused(unused);
    }

    /// The time, as ages of blocks are counted.
    pub(crate) fn set_now(&mut self, now_ms: u64) {
        self.index.set_now(now_ms);
    }

    pub(crate) fn slots(&self) -> &Slots {
        &self.slots
    }

    pub(crate) fn slots_mut(&mut self) -> &mut Slots {
        &mut self.slots
    }

    pub(crate) fn index(&self) -> &Index {
        &self.index
    }

    pub(crate) fn ssd(&self) -> &Ssd {
        &self.ssd
    }

    pub(crate) fn ssd_mut(&mut self) -> &mut Ssd {
        &mut self.ssd
    }

    pub(crate) fn log(&self) -> &EventLog {
        &self.log
    }

    pub(crate) fn evicted_total(&self) -> u64 {
        self.evicted_total
    }

    pub(crate) fn evicted_unsunk_total(&self) -> u64 {
        self.evicted_unsunk_total
    }

    /// Slots that could be had now.
    pub(crate) fn available(&self) -> u32 {
        let tally = self.slots.tally();
        tally.free + tally.evictable
    }

    /// What would be available while these committed slots were pinned.
    pub(crate) fn available_beside(&self, pinned: &[SlotIndex]) -> u32 {
        let idle = |slot: &&SlotIndex| self.slots.state(**slot).is_some_and(|s| s.pins() == 0);
        self.available() - pinned.iter().filter(idle).count() as u32
    }

    /// A free slot for one share, if need be by evicting. Whoever wants many says so first, to
    /// [`Self::make_room`], which costs less than one after the other.
    pub(crate) fn reserve(&mut self, share: Share) -> Option<SlotIndex> {
        self.make_room(1);
        self.slots.reserve(share)
    }

    /// A free slot to read a block of the SSD into, if need be by evicting.
    pub(crate) fn rise(&mut self) -> Option<SlotIndex> {
        self.make_room(1);
        self.slots.rise()
    }

    /// What was read from the SSD is right: makes it findable.
    pub(crate) fn land(&mut self, slot: SlotIndex, entry: Entry) {
        let key = entry.key;
        let state = self.slots.apply(slot, SlotEvent::Land);
        self.index.insert(slot, entry, self.is_on_ssd(key));
        if state.pins() == 0 {
            self.index.set_idle(slot);
        }
        self.tell_here(key, self.tier_below(key));
    }

    /// Its bytes are final: makes it findable, pinned once by the share that wrote it.
    pub(crate) fn seal(&mut self, slot: SlotIndex, entry: Entry) {
        let key = entry.key;
        self.slots.apply(slot, SlotEvent::Seal);
        self.index.insert(slot, entry, self.is_on_ssd(key));
        self.tell_here(key, self.tier_below(key));
    }

    /// A block lies on the SSD. False when the block before it does not.
    pub(crate) fn stored(&mut self, block: SsdBlock) -> bool {
        let (key, was) = (block.key, self.tier_below(block.key));
        if !self.ssd.insert(block) {
            return false;
        }
        self.ssd_has_changed(key, was);
        true
    }

    /// A hash of how blocks lie in slots.
    pub(crate) fn layout(&self) -> u64 {
        self.layout
    }

    /// Blocks in slots look like this from now on.
    pub(crate) fn set_layout(&mut self, layout: u64) {
        let former = std::mem::replace(&mut self.layout, layout);
        if former == layout {
            return;
        }
        let all: Vec<SsdBlock> = self.ssd.iter().collect();
        for SsdBlock { key, layout, .. } in all {
            self.ssd_has_changed(key, (layout == former).then_some(Tier::Ssd));
        }
    }

    /// Whether a block can be had from the SSD has changed, or has not.
    fn ssd_has_changed(&mut self, key: BlockKey, was: Option<Tier>) {
        match self.index.find(key) {
            Some(slot) => self.index.set_sunk(slot, self.is_on_ssd(key)),
            None if was != self.tier_below(key) => self.tell_gone(key, was),
            None => {}
        }
    }

    /// It can be had from there.
    pub(crate) fn is_on_ssd(&self, key: BlockKey) -> bool {
        self.ssd.get(key).is_some_and(|block| block.layout == self.layout)
    }

    /// All that can be had from there.
    pub(crate) fn on_ssd(&self) -> impl Iterator<Item = BlockKey> + '_ {
        let fits = |block: &SsdBlock| block.layout == self.layout;
        self.ssd.iter().filter(fits).map(|block| block.key)
    }

    /// A block and those after it are not on the SSD any more; answers with their keys.
    pub(crate) fn unstore(&mut self, key: BlockKey) -> Vec<BlockKey> {
        let gone = self.ssd.subtree(key);
        for &key in &gone {
            let was = self.tier_below(key);
            self.ssd.remove(key);
            self.ssd_has_changed(key, was);
        }
        gone
    }

    pub(crate) fn pin(&mut self, slot: SlotIndex) {
        if self.slots.apply(slot, SlotEvent::Pin) == (SlotState::Committed { pins: 1 }) {
            self.index.set_busy(slot);
        }
    }

    pub(crate) fn unpin(&mut self, slot: SlotIndex) {
        if self.slots.apply(slot, SlotEvent::Unpin) == (SlotState::Committed { pins: 0 }) {
            self.index.set_idle(slot);
        }
    }

    /// Drops a pin that was no use of the block.
    pub(crate) fn unpin_unused(&mut self, slot: SlotIndex) {
        if self.slots.apply(slot, SlotEvent::Unpin) == (SlotState::Committed { pins: 0 }) {
            self.index.set_idle_as_before(slot);
        }
    }

    /// Drops a hint's pin, which was no use of the block. Answers whether the hint has brought it, and nobody
    /// else has it.
    pub(crate) fn unpin_hinted(&mut self, slot: SlotIndex, rose: bool) -> bool {
        self.unpin_unused(slot);
        let is_idle = self.slots.state(slot) == Some(SlotState::Committed { pins: 0 });
        if rose && is_idle {
            self.index.set_prefetched(slot, true);
        }
        rose && is_idle
    }

    /// A block is asked for: whether it was read ahead, once.
    pub(crate) fn take_prefetched(&mut self, slot: SlotIndex) -> bool {
        self.index.set_prefetched(slot, false)
    }

    pub(crate) fn quarantine(&mut self, slot: SlotIndex) {
        self.slots.apply(slot, SlotEvent::Quarantine);
    }

    pub(crate) fn give_back(&mut self, slot: SlotIndex) {
        self.slots.apply(slot, SlotEvent::GiveBack);
    }

    /// Takes a block and those after it out of the index; pinned ones leave when unpinned. Answers
    /// with their number.
    pub(crate) fn drop_subtree(&mut self, slot: SlotIndex) -> u32 {
        let gone = self.index.subtree(slot);
        for &slot in &gone {
            self.unlist(slot);
            self.slots.apply(slot, SlotEvent::Drop);
        }
        gone.len() as u32
    }

    /// Evicts a block and those after it, last ones first, as far as they are not pinned. Answers with
    /// how many went and how many are left.
    pub(crate) fn evict_subtree(&mut self, slot: SlotIndex) -> (u32, u32) {
        let (mut gone, mut left) = (0, 0);
        for slot in self.index.subtree(slot) {
            let idle = self.slots.state(slot) == Some(SlotState::Committed { pins: 0 });
            if !idle || !self.index.is_leaf(slot) {
                left += 1;
                continue;
            }
            self.unlist(slot);
            self.slots.apply(slot, SlotEvent::Evict);
            gone += 1;
        }
        self.evicted_total += u64::from(gone);
        (gone, left)
    }

    /// Takes a block and those after it from the SSD, last ones first, as far as they may go. Answers
    /// with the keys of those that went, and how many are left.
    pub(crate) fn unstore_idle(&mut self, key: BlockKey) -> (Vec<BlockKey>, u32) {
        let (mut gone, mut left) = (Vec::new(), 0);
        for key in self.ssd.subtree(key) {
            if !self.ssd.can_go(key) {
                left += 1;
                continue;
            }
            self.ssd.remove(key);
            match self.index.find(key) {
                Some(slot) => self.index.set_sunk(slot, false),
                None => self.tell_gone(key, Some(Tier::Ssd)),
            }
            gone.push(key);
        }
        (gone, left)
    }

    /// Evicts until so many slots are free, or nothing is left to go.
    pub(crate) fn make_room(&mut self, slots: u32) {
        let has_ssd = self.ssd.len() > 0;
        for (slot, key, sunk) in self.index.evict(slots.saturating_sub(self.slots.tally().free)) {
            self.evicted_unsunk_total += u64::from(has_ssd && !sunk);
            self.evicted_total += 1;
            self.tell_gone(key, Some(Tier::Dram));
            self.slots.apply(slot, SlotEvent::Evict);
        }
    }

    /// The pools of the attached engines.
    pub(crate) fn pools(&self) -> &PoolSet {
        &self.pools
    }

    pub(crate) fn pools_mut(&mut self) -> &mut PoolSet {
        &mut self.pools
    }

    pub(crate) fn open_pool(&mut self, epoch: AttachEpoch, pool: PoolTable) {
        self.close_pool(epoch);
        self.pools.insert(epoch, pool);
    }

    /// Nothing of this engine's pool counts any more.
    pub(crate) fn close_pool(&mut self, epoch: AttachEpoch) {
        let Some(pool) = self.pools.remove(epoch) else { return };
        pool.keys().for_each(|key| self.tell_left_pool(key));
    }

    /// A page of an engine's pool holds this block from now on.
    pub(crate) fn hold(
        &mut self,
        now_ms: u64,
        (epoch, page): (AttachEpoch, u32),
        key: BlockKey,
        of: (Namespace, Option<BlockKey>),
    ) {
        let was_in_pool = self.is_in_pool(key);
        let Some(pool) = self.pools.of_mut(epoch) else { return };
        pool.hold(now_ms, page, key, of);
        if !was_in_pool {
            let was = match self.index.find(key) {
                Some(_) => Some(Tier::Dram),
                None => self.tier_below(key),
            };
            self.log.push(BlockChange { key, removed: false, tier: Tier::Vram }, was);
        }
    }

    /// The engine wants these pages back.
    pub(crate) fn drop_pages(&mut self, epoch: AttachEpoch, handle: u64, pages: &[u32]) {
        let gone = self.pools.of_mut(epoch).map(|pool| pool.drop_pages(handle, pages));
        gone.into_iter().flatten().for_each(|key| self.tell_left_pool(key));
    }

    /// A free slot, or one whose block was last used before this time and goes next.
    pub(crate) fn has_slot_unused_since(&self, since_ms: u64) -> bool {
        self.slots.tally().free > 0
            || self.index.next_out_used_ms().is_some_and(|used_ms| used_ms < since_ms)
    }

    fn unlist(&mut self, slot: SlotIndex) {
        let key = self.index.remove(slot);
        self.tell_gone(key, Some(Tier::Dram));
    }

    /// Notes for subscribers that a block is in a slot now, and was in the tier `was`.
    fn tell_here(&mut self, key: BlockKey, was: Option<Tier>) {
        if self.is_in_pool(key) {
            return;
        }
        self.log.push(BlockChange { key, removed: false, tier: Tier::Dram }, was);
    }

    /// The same of one that is in no slot now.
    fn tell_gone(&mut self, key: BlockKey, was: Option<Tier>) {
        if self.is_in_pool(key) {
            return;
        }
        let below = self.tier_below(key);
        let (removed, tier) = (below.is_none(), below.unwrap_or(Tier::Dram));
        self.log.push(BlockChange { key, removed, tier }, was);
    }

    /// The same of one that is in no page of an engine now; another engine may have it in one.
    fn tell_left_pool(&mut self, key: BlockKey) {
        if self.is_in_pool(key) {
            return;
        }
        match self.index.find(key) {
            Some(_) => self.tell_here(key, Some(Tier::Vram)),
            None => self.tell_gone(key, Some(Tier::Vram)),
        }
    }

    /// Where a block can be had that is neither in a pool nor in a slot.
    fn tier_below(&self, key: BlockKey) -> Option<Tier> {
        self.is_on_ssd(key).then_some(Tier::Ssd)
    }

    /// Then what becomes of it elsewhere is no change of where it can be had fastest.
    fn is_in_pool(&self, key: BlockKey) -> bool {
        self.pools.block(key).is_some()
    }
}
