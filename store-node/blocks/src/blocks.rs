//! The owner of a node's block table: a switchboard between shares, cache and memories.
//!
//! It alone changes them. Each of its concerns has a file: [`admin`] serves administrators, [`replication`] plans copies on other nodes, [`allocate`] reserves, [`engine`] serves
//! the local engine, [`arrival`] settles what a remote writer sent, [`ending`] ends shares, [`tiers`] moves blocks to and
//! from the SSD, [`partial`] serves one of which a part cannot be read, [`contexts`] keeps them for tenants,
//! [`prefetch`] reads ahead,
//! [`objects`] serves clients that are no engines, [`pools`] moves blocks between an engine's own pages and slots, [`carries`] what it computes there, and [`invariants`] says what must hold between any two calls.

mod admin;
mod allocate;
mod arrival;
mod bucket;
mod carries;
mod contexts;
mod copies;
mod ending;
mod engine;
mod invariants;
mod objects;
mod partial;
mod pools;
mod prefetch;
mod replication;
mod tiers;

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use kvasir_proto::{BlockKey, Generation, Share, SlotIndex, TierDigests};

use crate::admin::AdminPins;
use crate::api::{
    Action, BlockView, Busy, Changes, Counts, ObjectAt, Options, ShareError, ShareView, Snapshot,
    SsdSize,
};
use crate::bucket::Bucket;
use crate::cache::Cache;
use crate::carries::Carries;
use crate::copies::Copies;
use crate::ended::Ended;
use crate::gets::Gets;
use crate::imms::Imms;
use crate::index::Found;
use crate::pool_work::Fills;
use crate::replicas::Replicas;
use crate::share::ShareRecord;
use crate::share_state::Refusal;
use crate::ssd::SsdBlock;
use crate::tier_work::{Rises, Sinks};
use crate::unreached::Unreached;
use crate::unseen::Unseen;

/// The one owner of a node's slots, index and shares.
///
/// Call order. One thread owns it. After **every** call that takes `&mut self`, drain
/// [`poll_action`](Self::poll_action) until `None` and execute what it gives, in that order; then
/// arm one timer for [`poll_timeout`](Self::poll_timeout) and call
/// [`handle_timeout`](Self::handle_timeout) when it fires. Time is milliseconds of one monotonic
/// clock.
///
/// A share goes this way:
///
/// 1. [`allocate`](Self::allocate) reserves and pins, whole or not at all.
/// 2. The engine takes it: [`bind`](Self::bind). With a fetch under way the answer is `Waiting`,
///    and [`Action::Bound`] follows.
/// 3. A remote writer's immediate reached its count: [`arrived`](Self::arrived) commits the full
///    blocks. It sent less: [`stop_writer`](Self::stop_writer), wait for
///    [`writer_stopped`](Self::writer_stopped) or [`writer_cut_off`](Self::writer_cut_off), then
///    [`settle_fetch`](Self::settle_fetch).
/// 4. The engine works: [`commit_page`](Self::commit_page) when a full page's last layer is
///    written, in page order; [`grow`](Self::grow); [`commit_extra`](Self::commit_extra) for blocks
///    the answer fills.
/// 5. What is pushed is held: [`read_begin`](Self::read_begin) when a push is owed or begins (the
///    prefill engine said `FinishPrefill`, or targets came), [`read_end`](Self::read_end) when its
///    last write has landed or failed. Slots stay until then, also after the release.
/// 6. [`release`](Self::release): the engine (or, on the source side, the shell when the push is
///    over) will not touch the slots again. [`Action::Ended`] says when all is given back.
///
/// With an SSD ([`ssd_ready`](Self::ssd_ready)), [`sink_ahead`](Self::sink_ahead) after anything that
/// took slots, and [`sunk`](Self::sunk) and [`risen`](Self::risen) for what was asked for. A share
/// that waits for the SSD binds like one that waits for a fetch.
///
/// With an object store ([`bucket_listed`](Self::bucket_listed), [`set_bucket_usable`](Self::set_bucket_usable)),
/// [`upload_ahead`](Self::upload_ahead) now and then and after anything was kept, and
/// [`uploaded`](Self::uploaded) and [`risen`](Self::risen) for what was asked for.
///
/// With an engine that has pages of its own ([`open_pool`](Self::open_pool)), [`hold_pages`](Self::hold_pages),
/// [`drop_pages`](Self::drop_pages) and [`fill_pages`](Self::fill_pages) as it says;
/// [`copy_pages`](Self::copy_pages) before the actions are drained; and [`risen`](Self::risen) and
/// [`page_written`](Self::page_written) for what was asked for. What it computes there for a share
/// ([`compute_pages`](Self::compute_pages), [`layers_computed`](Self::layers_computed)) is copied into the share's slots;
/// when a copy is over, [`carried`](Self::carried) says what it has brought, to be pushed and committed before
/// [`carry_ended`](Self::carry_ended).
///
/// [`abort`](Self::abort), a lease that runs out, [`engine_gone`](Self::engine_gone) and a release
/// before the remote writer is done end a share early: its private slots are quarantined, and
/// `StopEngine`, `StopWriter`, `StopPush` and `CancelImm` are given for whoever still writes or
/// reads. When all have confirmed, the slots and the immediate are free and `Ended` is given.
#[derive(Debug)]
pub struct Blocks {
    options: Options,
    block_tokens: u32,
    cache: Cache,
    shares: BTreeMap<Share, ShareRecord>,
    /// (lease over at, share) of every share that is not aborted.
    leases: BTreeSet<(u64, Share)>,
    /// (aborted at, share) of every share that is.
    aborting: BTreeSet<(u64, Share)>,
    gets: Gets,
    replicas: Replicas,
    copies: Copies,
    admin_pins: AdminPins,
    imms: Imms,
    tombstones: Ended,
    finished: Ended,
    ssd_size: SsdSize,
    ssd_unreached: Unreached,
    /// What could not be read of it may have newer extents than those that are known.
    ssd_in_part: bool,
    /// What an extent of a block takes; 0 before it is known.
    extent_bytes: u64,
    sinks: Sinks,
    rises: Rises,
    bucket: Bucket,
    fills: Fills,
    carries: Carries,
    /// Objects that go when they are not kept after all: their clients have ended. No more than are being kept.
    ending_objects: BTreeMap<BlockKey, ObjectAt>,
    /// Names that may stand for something else below memory.
    unseen: Unseen,
    /// Shares that are hints.
    hints: usize,
    /// Bounded by the shares, each of which adds every action at most once (and once for each block that
    /// rises for it), and by the blocks of the SSD, each of which is forgotten once.
    actions: VecDeque<Action>,
    totals: Totals,
}

#[derive(Debug, Default)]
struct Totals {
    committed: u64,
    duplicates: u64,
    leases_over: u64,
    aborts: u64,
    dropped: u64,
    refused_no_space: u64,
    sunk: u64,
    sinks_failed: u64,
    risen: u64,
    rises_failed: u64,
    rises_late: u64,
    ssd_evicted: u64,
    ssd_lost: u64,
    expired: u64,
    uploaded: u64,
    uploads_failed: u64,
    uploads_refused: u64,
    downloaded: u64,
    downloads_failed: u64,
    downloads_late: u64,
    bucket_lost: u64,
    hints: u64,
    hints_refused: u64,
    prefetched: u64,
    prefetched_used: u64,
    pool_sunk: u64,
    pool_sinks_failed: u64,
    pool_dropped_unsunk: u64,
    pool_filled: u64,
    pool_unfilled: u64,
    layers_carried: u64,
    carries_failed: u64,
    carries_given_up: u64,
}

impl Blocks {
    pub fn new(options: Options) -> Self {
        Blocks {
            block_tokens: options.block_tokens,
            cache: Cache::new(options.slots, options.event_log_max, options.eviction),
            shares: BTreeMap::new(),
            leases: BTreeSet::new(),
            aborting: BTreeSet::new(),
            gets: Gets::new(options.get_pins_max),
            admin_pins: AdminPins::default(),
            replicas: Replicas::default(),
            copies: Copies::default(),
            imms: Imms::new(options.imm_seed),
            tombstones: Ended::new(options.tombstone_ms, options.tombstones_max),
            finished: Ended::new(options.finished_ms, options.finished_max),
            ssd_size: SsdSize::default(),
            ssd_unreached: Unreached::default(),
            ssd_in_part: false,
            extent_bytes: 0,
            sinks: Sinks::default(),
            rises: Rises::default(),
            bucket: Bucket::default(),
            fills: Fills::default(),
            carries: Carries::default(),
            ending_objects: BTreeMap::new(),
            unseen: Unseen::new(options.bucket.uploads_max > 0),
            hints: 0,
            actions: VecDeque::new(),
            totals: Totals::default(),
            options,
        }
    }

    /// Takes another number of slots of another size, and forgets every block but those on the SSD
    /// (see [`Self::set_extents`]). Sequences, leases,
    /// generations and the memory of ended shares go on; administrators' pins end.
    ///
    /// # Errors
    /// [`Busy`] while a share or a pin is open; abort first (see [`Self::abort_all`]) and wait for
    /// their ends.
    pub fn reset(&mut self, slots: u32, block_tokens: u32) -> Result<(), Busy> {
        let pins = self.cache.slots().tally().pins - self.admin_pins.blocks() as u64;
        let has_pool = !self.cache.pools().is_empty();
        if !self.shares.is_empty() || pins > 0 || !self.rises.all.is_empty() || has_pool {
            return Err(Busy { shares: as_u32(self.shares.len()), pins: as_u32(pins) });
        }
        for pin in self.admin_pins.numbers() {
            self.admin_unpin(pin);
        }
        self.cache.reset(slots);
        self.block_tokens = block_tokens;
        Ok(())
    }

    /// When [`Self::handle_timeout`] wants to be called.
    pub fn poll_timeout(&self) -> Option<u64> {
        let lease = self.leases.first().map(|&(at_ms, _)| at_ms);
        let rise = self.rises.oldest();
        let rise = rise.map(|(_, since_ms)| since_ms.saturating_add(self.options.ssd_timeout_ms));
        let download = self.rises.oldest_download();
        let timeout_ms = self.options.bucket.timeout_ms;
        let download = download.map(|(_, since_ms)| since_ms.saturating_add(timeout_ms));
        let pin = self.admin_pins.next_end().map(|(until_ms, _)| until_ms);
        let all = [lease, rise, download, pin, self.tombstones.next_ms(), self.finished.next_ms()];
        all.into_iter().flatten().min()
    }

    /// The next thing to do, oldest first.
    pub fn poll_action(&mut self) -> Option<Action> {
        self.actions.pop_front()
    }

    /// A share that is open or ending.
    pub fn share(&self, share: Share) -> Option<ShareView<'_>> {
        self.shares.get(&share).map(ShareRecord::view)
    }

    /// Every share that is open or ending, in order.
    pub fn shares(&self) -> impl Iterator<Item = Share> + '_ {
        self.shares.keys().copied()
    }

    /// The slot of a page, prompt pages first and then grown ones.
    pub fn page_slot(&self, share: Share, page: u32) -> Option<(SlotIndex, Generation)> {
        let record = self.shares.get(&share).filter(|record| !record.is_aborted())?;
        let slot = record.page(page)?.slot;
        Some((slot, self.cache.slots().generation(slot)?))
    }

    /// The indexed copy of a block.
    pub fn block(&self, key: BlockKey) -> Option<BlockView> {
        let slot = self.cache.index().find(key)?;
        self.block_view(slot, self.cache.index().entry(slot)?)
    }

    /// A block of the SSD.
    pub fn ssd_block(&self, key: BlockKey) -> Option<SsdBlock> {
        self.cache.ssd().get(key)
    }

    /// Every block of the SSD.
    pub fn ssd_blocks(&self) -> impl Iterator<Item = SsdBlock> + '_ {
        self.cache.ssd().iter()
    }

    /// A block that is known to be in the object store.
    pub fn bucket_block(&self, key: BlockKey) -> Option<SsdBlock> {
        self.bucket.get(key)
    }

    /// Every block of the index, in slot order.
    pub fn blocks(&self) -> impl Iterator<Item = BlockView> {
        self.cache.index().iter().filter_map(|(slot, entry)| self.block_view(slot, entry))
    }

    /// The checksum of the committed block in this slot, as it was given.
    pub fn checksum_of(&self, slot: SlotIndex) -> Option<u64> {
        self.cache.index().entry(slot).map(|entry| entry.checksum)
    }

    /// `None` when there is no such slot.
    pub fn generation(&self, slot: SlotIndex) -> Option<Generation> {
        self.cache.slots().generation(slot)
    }

    /// From now on [`Self::poll_freed`] is to be called until `None` after every call that takes
    /// `&mut self`. A [`reset`](Self::reset) ends that.
    pub fn note_freed(&mut self) {
        self.cache.slots_mut().note_freed();
    }

    /// A slot that came free, and its generation now.
    pub fn poll_freed(&mut self) -> Option<(SlotIndex, Generation)> {
        self.cache.slots_mut().next_freed()
    }

    /// Slots that could be had now: free plus evictable.
    pub fn available(&self) -> u32 {
        self.cache.available()
    }

    pub fn counts(&self) -> Counts {
        let tally = self.cache.slots().tally();
        let pool = self.cache.pools().tally();
        Counts {
            slots: self.cache.slots().len(),
            free: tally.free,
            allocated: tally.allocated,
            rising: tally.rising,
            committed: tally.committed,
            evictable: tally.evictable,
            leaving: tally.leaving,
            quarantined: tally.quarantined,
            shares: as_u32(self.shares.len()),
            aborting: as_u32(self.aborting.len()),
            aborting_since_ms: self.aborting.first().map(|&(since_ms, _)| since_ms),
            pins: as_u32(tally.pins),
            get_pins: as_u32(self.gets.pins()),
            imms: as_u32(self.imms.held().len()),
            tombstones: self.tombstones.len(),
            finished: self.finished.len(),
            sinking: as_u32(self.sinks.len()),
            rises_late: self.rises.late,
            sinking_since_ms: self.sinks.oldest_ms(),
            ssd_blocks: as_u32(self.cache.ssd().len()),
            ssd_bytes: self.cache.ssd().bytes(),
            context_blocks: as_u32(self.cache.ssd().context_blocks()),
            context_bytes: self.cache.ssd().context_bytes(),
            bucket_blocks: as_u32(self.bucket.len()),
            bucket_bytes: self.bucket.bytes(),
            uploading: as_u32(self.bucket.uploads.len()),
            uploads_waiting: as_u32(self.bucket.queue.len()),
            discarding: as_u32(self.bucket.discards.len()),
            pool_pages: pool.pages,
            pool_computed: pool.computed,
            pool_held: pool.held,
            pool_filling: pool.filling,
            pool_dropping: pool.dropping,
            pool_copies: as_u32(self.pool_copies()),
            carries: as_u32(self.carries.copies.len()),
            carries_waiting: as_u32(self.carries.due()),
            committed_total: self.totals.committed,
            duplicates_total: self.totals.duplicates,
            evicted_total: self.cache.evicted_total(),
            dropped_total: self.totals.dropped,
            leases_over_total: self.totals.leases_over,
            aborts_total: self.totals.aborts,
            refused_no_space_total: self.totals.refused_no_space,
            sunk_total: self.totals.sunk,
            sinks_failed_total: self.totals.sinks_failed,
            risen_total: self.totals.risen,
            rises_failed_total: self.totals.rises_failed,
            rises_late_total: self.totals.rises_late,
            ssd_evicted_total: self.totals.ssd_evicted,
            ssd_lost_total: self.totals.ssd_lost,
            context_expired_total: self.totals.expired,
            uploaded_total: self.totals.uploaded,
            uploads_failed_total: self.totals.uploads_failed,
            uploads_refused_total: self.totals.uploads_refused,
            downloaded_total: self.totals.downloaded,
            downloads_failed_total: self.totals.downloads_failed,
            downloads_late_total: self.totals.downloads_late,
            bucket_lost_total: self.totals.bucket_lost,
            evicted_unsunk_total: self.cache.evicted_unsunk_total(),
            hints_total: self.totals.hints,
            hints_refused_total: self.totals.hints_refused,
            prefetched_total: self.totals.prefetched,
            prefetched_used_total: self.totals.prefetched_used,
            prefetched_unused_total: self.cache.index().prefetched_unused(),
            pool_sunk_total: self.totals.pool_sunk,
            pool_sinks_failed_total: self.totals.pool_sinks_failed,
            pool_dropped_unsunk_total: self.totals.pool_dropped_unsunk,
            pool_filled_total: self.totals.pool_filled,
            pool_unfilled_total: self.totals.pool_unfilled,
            layers_carried_total: self.totals.layers_carried,
            carries_failed_total: self.totals.carries_failed,
            carries_given_up_total: self.totals.carries_given_up,
            tombstones_forgotten_total: self.tombstones.forgotten_total(),
            finished_forgotten_total: self.finished.forgotten_total(),
        }
    }

    /// The sequence of the latest block change; 0 before the first.
    pub fn sequence(&self) -> u64 {
        self.cache.log().sequence()
    }

    /// Of all that the changes up to [`Blocks::sequence`] have said, tier by tier.
    pub fn digests(&self) -> TierDigests {
        self.cache.log().digests()
    }

    /// All keys, exact at the sequence it carries.
    pub fn snapshot(&self) -> Snapshot {
        let (index, pools) = (self.cache.index(), self.cache.pools());
        let in_pool = |key: &BlockKey| pools.block(*key).is_some();
        let mut keys: Vec<BlockKey> = pools.keys().into_iter().collect();
        let vram_keys = keys.len();
        keys.extend(index.iter().map(|(_, entry)| entry.key).filter(|key| !in_pool(key)));
        let dram_keys = keys.len() - vram_keys;
        let on_ssd = self.cache.on_ssd();
        keys.extend(on_ssd.filter(|key| index.find(*key).is_none() && !in_pool(key)));
        Snapshot { sequence: self.sequence(), keys, vram_keys, dram_keys }
    }

    /// Up to `changes_max` changes after `sequence`; `None` when the log does not reach back so
    /// far (or never got there): a snapshot is needed.
    pub fn changes_since(&self, sequence: u64, changes_max: usize) -> Option<Changes> {
        self.cache.log().since(sequence, changes_max)
    }

    fn block_view(&self, slot: SlotIndex, entry: Found) -> Option<BlockView> {
        Some(BlockView {
            key: entry.key,
            namespace: entry.namespace,
            slot,
            generation: self.cache.slots().generation(slot)?,
            pins: self.cache.slots().state(slot)?.pins(),
            checksum: entry.checksum,
        })
    }

    /// Why there is no record of a share.
    fn missing(&self, share: Share) -> ShareError {
        match self.finished.get(share).or(self.tombstones.get(share)) {
            Some(_) => ShareError::Finished,
            None => ShareError::Unknown,
        }
    }

    /// A share that nobody aborted.
    fn open(&self, share: Share) -> Result<&ShareRecord, ShareError> {
        match self.shares.get(&share) {
            None => Err(self.missing(share)),
            Some(record) if record.is_aborted() => Err(ShareError::Ending),
            Some(record) => Ok(record),
        }
    }

    fn forget_until(&mut self, now_ms: u64) {
        self.cache.set_now(now_ms);
        self.tombstones.forget_until(now_ms);
        self.finished.forget_until(now_ms);
    }
}

impl From<Refusal> for ShareError {
    fn from(refusal: Refusal) -> Self {
        match refusal {
            Refusal::Ending => ShareError::Ending,
            Refusal::Taken => ShareError::Refused("an engine has bound the share"),
            Refusal::NoWriter => ShareError::Refused("the share has no remote writer"),
            Refusal::MayStillWrite => ShareError::Refused("the remote writer may still write"),
            Refusal::NoRead => ShareError::Refused("no read of the share is open"),
            Refusal::NoCarry => ShareError::Refused("no layer of the share is being copied"),
        }
    }
}

fn as_u32(count: impl TryInto<u32>) -> u32 {
    count.try_into().unwrap_or(u32::MAX)
}
