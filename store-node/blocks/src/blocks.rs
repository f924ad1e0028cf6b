//! The owner of a node's block table.

use kvasir_proto::{BlockKey, Generation, Share, SlotIndex};

use crate::api::{
    AbortOutcome, AbortReason, Action, Allocate, AllocateError, Allocated, Arrival, AttachEpoch,
    BindError, Binding, BlockView, Busy, Changes, Commit, Counts, GetError, GrowError, Options,
    ShareError, ShareView, Snapshot,
};

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
/// [`abort`](Self::abort), a lease that runs out, [`engine_gone`](Self::engine_gone) and a release
/// before the remote writer is done end a share early: its private slots are quarantined, and
/// `StopEngine`, `StopWriter`, `StopPush` and `CancelImm` are given for whoever still writes or
/// reads. When all have confirmed, the slots and the immediate are free and `Ended` is given.
#[derive(Debug)]
pub struct Blocks {}

impl Blocks {
    pub fn new(options: Options) -> Self {
        unimplemented!()
    }

    /// Takes another number of slots of another size, and forgets every block. Sequences, leases,
    /// generations and the memory of ended shares go on.
    ///
    /// # Errors
    /// [`Busy`] while a share or a pin is open; abort first (see [`Self::abort_all`]) and wait for
    /// their ends.
    pub fn reset(&mut self, slots: u32, block_tokens: u32) -> Result<(), Busy> {
        unimplemented!()
    }

    /// Reserves and pins for a share, whole or not at all. The same request again gives the same
    /// answer and changes nothing.
    ///
    /// - Prefill: pins the committed prefix but leaves at least one token to compute into a private
    ///   slot; reserves every other page. With `fetch_until_block` beyond what is held, the pages
    ///   between are the targets of a fetch.
    /// - Decode: pins the committed prefix, reserves the rest; all of the rest is target.
    /// - Source: pins the committed prefix of `keys`, reserves nothing.
    ///
    /// # Errors
    /// [`AllocateError`]; then nothing was taken.
    pub fn allocate(
        &mut self,
        now_ms: u64,
        request: &Allocate,
    ) -> Result<Allocated, AllocateError> {
        unimplemented!()
    }

    /// The share may hold what it holds for `lease_ms` from now (at most `lease_ms_max`). Never
    /// shortens.
    ///
    /// # Errors
    /// [`ShareError`] when it is not alive here any more.
    pub fn renew(&mut self, now_ms: u64, share: Share, lease_ms: u64) -> Result<(), ShareError> {
        unimplemented!()
    }

    /// Ends a share early; an unknown one leaves a tombstone.
    pub fn abort(&mut self, now_ms: u64, share: Share, reason: AbortReason) -> AbortOutcome {
        unimplemented!()
    }

    /// Aborts every open share.
    pub fn abort_all(&mut self, now_ms: u64, reason: &AbortReason) {
        unimplemented!()
    }

    /// The engine takes the share over.
    ///
    /// # Errors
    /// [`BindError::Gone`] and [`BindError::Taken`].
    pub fn bind(&mut self, share: Share, epoch: AttachEpoch) -> Result<Binding, BindError> {
        unimplemented!()
    }

    /// Adds private pages to the end of a bound share, evicting if it must. Whole or nothing.
    ///
    /// # Errors
    /// [`GrowError::NoSpace`] when nothing was taken.
    pub fn grow(&mut self, share: Share, pages: u32) -> Result<Vec<SlotIndex>, GrowError> {
        unimplemented!()
    }

    /// Seals a full page of the prompt, whose key came with `allocate`; all its layers are written.
    /// One checksum for each run, as the shell likes to count them. Doing it again changes nothing.
    ///
    /// # Errors
    /// [`ShareError`] when it is not the share's to commit: no such page, not full, or a remote
    /// writer may still write it.
    pub fn commit_page(
        &mut self,
        share: Share,
        page: u32,
        checksums: Vec<u64>,
    ) -> Result<Commit, ShareError> {
        unimplemented!()
    }

    /// Seals a page that the answer filled, under a key that the engine computed.
    ///
    /// # Errors
    /// As [`Self::commit_page`], and when the key is in the index under another parent or
    /// namespace.
    pub fn commit_extra(
        &mut self,
        share: Share,
        page: u32,
        key: BlockKey,
        checksums: Vec<u64>,
    ) -> Result<Commit, ShareError> {
        unimplemented!()
    }

    /// The immediate has reached its count: every page in `targets` and the tail have landed, and
    /// the writer will write no more. Commits the full ones. `checksums` has one list for each page
    /// in `targets`.
    ///
    /// # Errors
    /// [`ShareError`]; nothing has changed then.
    pub fn arrived(
        &mut self,
        now_ms: u64,
        share: Share,
        checksums: Vec<Vec<u64>>,
    ) -> Result<Arrival, ShareError> {
        unimplemented!()
    }

    /// The remote writer of an open share shall stop, because not all will come: gives
    /// [`Action::StopWriter`] unless it has stopped.
    ///
    /// # Errors
    /// [`ShareError`] when there is no such share or it has no remote writer.
    pub fn stop_writer(&mut self, share: Share) -> Result<(), ShareError> {
        unimplemented!()
    }

    /// The remote writer says that every write it issued has landed or failed, and that it issues
    /// no more.
    pub fn writer_stopped(&mut self, now_ms: u64, share: Share) {
        unimplemented!()
    }

    /// The remote writer is lost, and the transfer engine confirmed that none of its writes can
    /// land any more.
    pub fn writer_cut_off(&mut self, now_ms: u64, share: Share) {
        unimplemented!()
    }

    /// Prefill side, when the writer has stopped before all arrived: the first `checksums.len()`
    /// pages of `targets` are intact and are committed; the others become pages to compute.
    /// Answers with the blocks that are cached, also when it was settled before.
    ///
    /// # Errors
    /// [`ShareError::Refused`] while the writer may still write, or when there is no fetch.
    pub fn settle_fetch(
        &mut self,
        share: Share,
        checksums: Vec<Vec<u64>>,
    ) -> Result<u32, ShareError> {
        unimplemented!()
    }

    /// A push of this share's pages is owed or begins: slots stay until it has ended.
    ///
    /// # Errors
    /// [`ShareError`] when the share is not open: then do not read.
    pub fn read_begin(&mut self, share: Share) -> Result<(), ShareError> {
        unimplemented!()
    }

    /// One push has ended: each of its writes has landed or failed.
    ///
    /// # Errors
    /// [`ShareError`] when no read of the share is open (it may have been stopped meanwhile).
    pub fn read_end(&mut self, now_ms: u64, share: Share) -> Result<(), ShareError> {
        unimplemented!()
    }

    /// Answers [`Action::StopPush`]: all of the share's reads have ended, and none will begin.
    pub fn push_stopped(&mut self, now_ms: u64, share: Share) {
        unimplemented!()
    }

    /// Whoever held the share here will not touch its slots again. Pins are dropped and private
    /// slots freed as soon as reads have ended and the remote writer is known to have finished; if
    /// it has not finished, it is asked to stop as in an abort. Doing it again changes nothing.
    ///
    /// # Errors
    /// [`ShareError::Unknown`] and [`ShareError::Finished`], which need no answer.
    pub fn release(&mut self, now_ms: u64, share: Share) -> Result<(), ShareError> {
        unimplemented!()
    }

    /// The engine of this attachment can write no more: its process is dead, or its epoch is
    /// revoked and confirmed. Releases and aborts its shares, and drops its pins.
    pub fn engine_gone(&mut self, now_ms: u64, epoch: AttachEpoch) {
        unimplemented!()
    }

    /// Pins the longest committed prefix of a chain for an engine, under a name it chose. An empty
    /// answer holds nothing.
    ///
    /// # Errors
    /// [`GetError`]; then nothing was pinned.
    pub fn get(
        &mut self,
        epoch: AttachEpoch,
        handle: u64,
        keys: &[BlockKey],
    ) -> Result<Vec<SlotIndex>, GetError> {
        unimplemented!()
    }

    /// Drops the pins of a handle; false when there are none.
    pub fn unpin(&mut self, epoch: AttachEpoch, handle: u64) -> bool {
        unimplemented!()
    }

    /// A committed copy failed its checksum. It and the blocks after it leave the index at once and
    /// are freed when unpinned; open shares that read it are aborted, except source shares (whose
    /// push must itself leave it out). Answers with the number of blocks dropped: 0 when the slot
    /// does not hold that generation of a committed block any more.
    pub fn drop_corrupt(&mut self, now_ms: u64, slot: SlotIndex, generation: Generation) -> u32 {
        unimplemented!()
    }

    /// When [`Self::handle_timeout`] wants to be called.
    pub fn poll_timeout(&self) -> Option<u64> {
        unimplemented!()
    }

    /// Aborts the shares whose leases ran out; forgets what is old enough.
    pub fn handle_timeout(&mut self, now_ms: u64) {
        unimplemented!()
    }

    /// The next thing to do, oldest first.
    pub fn poll_action(&mut self) -> Option<Action> {
        unimplemented!()
    }

    /// A share that is open or ending.
    pub fn share(&self, share: Share) -> Option<ShareView<'_>> {
        unimplemented!()
    }

    /// Every share that is open or ending, in order.
    pub fn shares(&self) -> impl Iterator<Item = Share> + '_ {
        [].into_iter()
    }

    /// The slot of a page, prompt pages first and then grown ones.
    pub fn page_slot(&self, share: Share, page: u32) -> Option<(SlotIndex, Generation)> {
        unimplemented!()
    }

    /// The indexed copy of a block.
    pub fn block(&self, key: BlockKey) -> Option<BlockView<'_>> {
        unimplemented!()
    }

    /// Every block of the index, in slot order.
    pub fn blocks(&self) -> impl Iterator<Item = BlockView<'_>> {
        [].into_iter()
    }

    /// Checksums of the committed block in this slot, as they were given.
    pub fn checksums_of(&self, slot: SlotIndex) -> Option<&[u64]> {
        unimplemented!()
    }

    pub fn generation(&self, slot: SlotIndex) -> Option<Generation> {
        unimplemented!()
    }

    /// Slots that could be had now: free plus evictable.
    pub fn available(&self) -> u32 {
        unimplemented!()
    }

    pub fn counts(&self) -> Counts {
        unimplemented!()
    }

    /// The sequence of the latest block change; 0 before the first.
    pub fn sequence(&self) -> u64 {
        unimplemented!()
    }

    /// All keys, exact at the sequence it carries.
    pub fn snapshot(&self) -> Snapshot {
        unimplemented!()
    }

    /// Up to `changes_max` changes after `sequence`; `None` when the log does not reach back so
    /// far (or never got there): a snapshot is needed.
    pub fn changes_since(&self, sequence: u64, changes_max: usize) -> Option<Changes> {
        unimplemented!()
    }

    /// Checks everything that must hold between two calls; for tests and simulations.
    ///
    /// # Errors
    /// A sentence about the first thing that does not hold.
    pub fn check_invariants(&self) -> Result<(), String> {
        unimplemented!()
    }
}
