//! The words that the owner and its shell exchange: requests, answers, errors and actions.
//!
//! Plain data. What the answers mean in which order stands on [`crate::Blocks`].

use std::fmt;
use std::ops::Range;

use kvasir_proto::{BlockKey, Generation, Imm, Mark, Namespace, Share, SlotIndex, Tenant};

use crate::bucket::{BucketOptions, UploadFrom};
use crate::eviction::Eviction;
use crate::replicas::ReplicaOptions;
use crate::ssd::SsdBlock;

/// Sizes and bounds of a node's block table.
#[derive(Debug, Clone)]
pub struct Options {
    /// Slots there are; 0 until an engine has said how large one is (see [`crate::Blocks::reset`]).
    pub slots: u32,
    /// Tokens of a block; 0 only together with no slots.
    pub block_tokens: u32,
    /// The first immediate is drawn from here on; the shell draws it at random, so that a restarted
    /// node does not soon repeat the immediates of its former incarnation.
    pub imm_seed: u32,
    /// The longest lease that is granted.
    pub lease_max_ms: u64,
    /// How long an abort of an unknown share is remembered.
    pub tombstone_ms: u64,
    /// How many such aborts; when full the oldest is forgotten and counted.
    pub tombstones_max: usize,
    /// How long ended shares are remembered: longer than the longest deadline of a request that a
    /// conductor can be given, an hour.
    pub finished_ms: u64,
    /// How many ended shares; when full the oldest is forgotten and counted.
    pub finished_max: usize,
    /// Which block makes room for others.
    pub eviction: Eviction,
    /// Block changes kept for subscribers that fall behind; older ones cost a snapshot.
    pub event_log_max: usize,
    /// Shares that may be open at once; one more is refused.
    pub shares_max: usize,
    /// Pins that one engine may hold through [`crate::Blocks::get`]; more are refused.
    pub get_pins_max: usize,
    /// Blocks that are written to the SSD at once, and an eighth of the slots at most.
    pub sinks_max: usize,
    /// Blocks that are read from it at once; what is more than that counts as not held.
    pub rises_max: usize,
    /// Chains that are read ahead at once; a hint that would be one more is refused. 0: none is followed.
    pub prefetch_chains_max: usize,
    /// What was used within this time makes no room for what is read ahead.
    pub prefetch_protected_ms: u64,
    /// A read or write of the SSD that takes longer is not waited for, and nothing new is begun with
    /// the SSD until it has ended.
    pub ssd_timeout_ms: u64,
    /// How long nothing is written to the SSD after it refused.
    pub sink_retry_ms: u64,
    /// The part of the slots that shall be free, or be had at once because the SSD has the block too.
    pub demote_ahead_percent: u32,
    /// Of the object store that nodes share.
    pub bucket: BucketOptions,
    /// Of copies on other nodes.
    pub replicas: ReplicaOptions,
    /// Copies between an engine's pool and slots that are begun ahead of need or for fills, at once.
    pub pool_copies_max: usize,
    /// Copies of layers that engines have computed in their pools, at once.
    pub carries_max: usize,
}

impl Default for Options {
    fn default() -> Self {
        Options {
            slots: 0,
            block_tokens: 0,
            imm_seed: 1,
            lease_max_ms: 60_000,
            tombstone_ms: 120_000,
            tombstones_max: 65_536,
            finished_ms: 3_900_000,
            finished_max: 262_144,
            eviction: Eviction::default(),
            event_log_max: 65_536,
            shares_max: 16_384,
            get_pins_max: 65_536,
            sinks_max: 64,
            rises_max: 1_024,
            prefetch_chains_max: 16,
            prefetch_protected_ms: 1_000,
            ssd_timeout_ms: 2_000,
            sink_retry_ms: 1_000,
            demote_ahead_percent: 25,
            bucket: BucketOptions::default(),
            replicas: ReplicaOptions::default(),
            pool_copies_max: 32,
            carries_max: 64,
        }
    }
}

/// Names one attachment of one engine; grows with each attach.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct AttachEpoch(pub u32);

/// What a share wants. Compared as a whole when the same share comes again.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Allocate {
    pub share: Share,
    pub namespace: Namespace,
    /// Keys of the prompt's full blocks (source side: of the blocks to send), in chain order.
    pub keys: Vec<BlockKey>,
    /// Ignored on the source side.
    pub prompt_tokens: u32,
    pub lease_ms: u64,
    /// Prefill side: blocks [held, fetch_until_block) are targets of a fetch. 0 for none.
    pub fetch_until_block: u32,
    /// The request names a node that will write here.
    pub has_remote_writer: bool,
    /// What it computes is kept for nobody else.
    pub is_ephemeral: bool,
    /// Prefill side: what only the SSD has is not read. It is fetched or computed, which takes less time.
    pub leaves_ssd: bool,
}

/// Objects that a client is about to write, or (one of them) to be read from the SSD.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReserveObjects {
    /// Drawn by the shell, and never used again. On the source side when it is to be read.
    pub share: Share,
    /// The client's attachment.
    pub epoch: AttachEpoch,
    pub namespace: Namespace,
    pub keys: Vec<BlockKey>,
    pub lease_ms: u64,
}

/// An object as it lies in memory. What is put under its key when it has gone is another one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ObjectAt {
    pub namespace: Namespace,
    pub key: BlockKey,
    pub slot: SlotIndex,
    pub generation: Generation,
}

/// What a share got.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Allocated {
    /// Leading blocks that are committed here, or on their way from the SSD, and now pinned.
    pub held_blocks: u32,
    /// How many of the last of them are still on their way.
    pub promoting_blocks: u32,
    /// One slot for each page of the prompt: the held prefix, then reserved ones (source side: the
    /// held prefix alone).
    pub pages: Vec<SlotIndex>,
    /// Pages that the remote writer fills; empty when there is none, or when it has only the tail
    /// to send.
    pub targets: Range<u32>,
    /// What its writes must carry. Present exactly when a remote writer is expected.
    pub imm: Option<Imm>,
}

/// Why nothing was taken.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum AllocateError {
    /// Try again later, or elsewhere.
    #[error("{wanted} slots are needed, but {available} are available")]
    NoSpace { available: u32, wanted: u32 },
    /// No use to try again here.
    #[error("{wanted} slots are needed, but this node has {slots}; raise `dram_bytes`")]
    TooLarge { wanted: u32, slots: u32 },
    #[error("{0} shares are open, the maximum of this node; try again later")]
    TooManyShares(usize),
    /// The share was aborted (before or after it was allocated).
    #[error("the share was already aborted")]
    Tombstoned,
    #[error("the share has finished")]
    Finished,
    /// No use to try again here before it is said that the node takes work.
    #[error("the node is draining")]
    Draining,
    #[error("{0}")]
    BadRequest(&'static str),
}

/// Why a call about a share had no effect.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum ShareError {
    /// Never allocated here, or ended so long ago that it is forgotten.
    #[error("no such share")]
    Unknown,
    #[error("the share has ended")]
    Finished,
    /// Aborted, and waiting for its writers and readers to stop.
    #[error("the share was aborted and is ending")]
    Ending,
    /// The call does not fit the share as it stands; the text says why.
    #[error("{0}")]
    Refused(&'static str),
}

/// Answer to an engine that takes a share over.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Binding {
    /// The slots are settled.
    Bound(Bound),
    /// A fetch or a read of the SSD is under way: [`Action::Bound`] follows, or [`Action::StopEngine`].
    Waiting,
}

/// What the engine may work with.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Bound {
    /// One for each page of the prompt.
    pub slots: Vec<SlotIndex>,
    /// Tokens of the prompt whose rows are there and may only be read.
    pub cached_tokens: u32,
    /// Decode side: pages and tail have arrived already, so `Ready` is due at once.
    pub arrived: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum BindError {
    #[error("no such share, or it has ended")]
    Gone,
    #[error("an engine has already bound the share")]
    Taken,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum GrowError {
    /// Nothing was taken; try again later or give up.
    #[error("{wanted} slots are needed, but {available} are available")]
    NoSpace { available: u32, wanted: u32 },
    #[error(transparent)]
    Share(#[from] ShareError),
}

/// What became of a page that was committed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Commit {
    /// It is in the index now (or was put there by an earlier call).
    Indexed,
    /// The key was there before: the old copy stays in the index, the new one stays the share's own
    /// and is freed with it.
    Duplicate { kept: SlotIndex },
    /// The SSD has an object of that name, which nobody knew when this one was reserved: that one stays, and the page the
    /// share's own.
    OnSsd,
    /// The share is ephemeral: it stays the share's own.
    Ephemeral,
    /// The page before it was not committed, so nobody could find this one: it stays the share's
    /// own.
    NoParent,
}

/// What became of the pages a remote writer sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Arrival {
    /// Settled; this many leading blocks of the share are cached and may only be read.
    Settled { cached_blocks: u32 },
    /// The share is being aborted: its writer counts as finished, and nothing was committed.
    Late,
}

/// How a share ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    Released,
    Aborted,
}

/// What an abort met.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AbortOutcome {
    /// The share was open; it ends now, or when [`Action::Ended`] says so.
    Aborting,
    /// It was being aborted already.
    AlreadyAborting,
    AlreadyEnded,
    /// Unknown: a tombstone refuses an allocation that arrives later.
    Tombstoned,
}

/// Why a share was aborted; for the engine and the log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum AbortReason {
    /// The conductor asked, and said why.
    Asked(String),
    LeaseOver,
    EngineGone,
    /// Released by its engine before the remote writer was done.
    ReleasedEarly,
    /// A block that it reads failed its checksum.
    Corrupt,
    /// What its peer sent failed its checksum or could not be read.
    BadArrival,
    PeerLost,
    Draining,
    /// The SSD did not give what it had promised, and there is no room to compute it.
    NoRoom,
    /// A client has removed an object that it reads.
    Removed,
    /// What its engine has computed could not be copied out of its pool.
    PoolFailed,
}

impl fmt::Display for AbortReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            AbortReason::Asked(why) => why,
            AbortReason::LeaseOver => "the lease expired",
            AbortReason::EngineGone => "the engine exited or detached",
            AbortReason::ReleasedEarly => "the engine released the share before its pages arrived",
            AbortReason::Corrupt => "a block that the share reads failed its checksum",
            AbortReason::BadArrival => "the peer sent corrupt data",
            AbortReason::PeerLost => "the connection to the peer is lost",
            AbortReason::Draining => "the node is draining",
            AbortReason::Removed => "the object was removed",
            AbortReason::PoolFailed => "cannot copy the computed pages from the engine's pool",
            AbortReason::NoRoom => "the SSD failed, and no slots are free to recompute its blocks",
        })
    }
}

/// What the shell must do. Each is given once.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Action {
    /// The fetch that a bind waited for is settled: tell the engine.
    Bound { share: Share, epoch: AttachEpoch, bound: Bound },
    /// Tell the local engine to stop writing; answered by `release` or `engine_gone`.
    StopEngine { share: Share, epoch: AttachEpoch, reason: AbortReason },
    /// Ask the remote writer to stop; answered by `writer_stopped` or `writer_cut_off` (or by
    /// `arrived`, when everything landed after all).
    StopWriter { share: Share },
    /// Issue no more of this share's pushes (and owe none); answered by `push_stopped` when those
    /// that were issued have landed or failed.
    StopPush { share: Share },
    /// Nobody waits for this immediate any more. Its counter must be kept until `Ended`.
    CancelImm { share: Share, imm: Imm },
    /// The share is over: its immediate, tail space and whatever else hangs on it may be reused.
    Ended { share: Share, imm: Option<Imm>, outcome: Outcome },
    /// Write the block in this slot to the SSD, if it has this checksum; answered by `sunk`.
    /// Committed bytes do not change, and the slot stays until then.
    Sink { sink: u64, slot: SlotIndex, generation: Generation, block: SsdBlock, checksum: u64 },
    /// Give a block of the SSD another mark or none, durably; answered by `sunk`.
    Rewrite { sink: u64, key: BlockKey, mark: Option<Mark> },
    /// Read a block of the SSD into a slot that nobody else touches; answered by `risen`.
    Rise { rise: u64, slot: SlotIndex, key: BlockKey },
    /// The SSD need not keep this block.
    Forget {
        key: BlockKey,
        /// It may be an object: an older one must not come back in its place.
        follows_none: bool,
    },
    /// What the SSD has of an object is to be gone for good; answered by [`Blocks::sunk`](super::Blocks::sunk) when it
    /// is. What is written of it later counts.
    Erase { sink: u64, key: BlockKey, namespace: Namespace },
    /// Send a block to the object store, if it has this checksum (none is given where it is not read
    /// from a slot); answered by `uploaded`.
    Upload { upload: u64, block: SsdBlock, from: UploadFrom, checksum: Option<u64> },
    /// Read a block of the object store into a slot that nobody else touches; answered by `risen`.
    Download { rise: u64, slot: SlotIndex, block: SsdBlock },
    /// What the object store has of an object, under whichever of its names, is to be gone for good; answered by
    /// [`Blocks::discarded`](super::Blocks::discarded). Nothing is sent under that name until then.
    Discard { discard: u64, namespace: Namespace, key: BlockKey },
    /// Source side: of what a share waits for from the SSD some has come, and its first blocks are there, this
    /// many. Given again as more comes; when `is_all` is set no more will.
    Risen { share: Share, blocks: u32, is_all: bool },
    /// What `keep`, `extend_context` or `delete_context` began is over: so many blocks are durable and the last
    /// has this mark now, or none; or it did not become so.
    Kept { keep: u64, blocks: Option<u32>, mark: Option<Mark> },
    /// Copy the block in this page of the engine's pool into a slot that nobody else touches; answered by
    /// `risen`. The page holds it until then.
    ReadPage { rise: u64, epoch: AttachEpoch, page: u32, slot: SlotIndex },
    /// Copy the block in this slot into a page of the engine's pool, if it has this checksum (none is
    /// given where nobody has one); answered by `page_written`. The slot stays until then.
    WritePage { copy: u64, epoch: AttachEpoch, page: u32, slot: SlotIndex, checksum: Option<u64> },
    /// Copy these layers of a page of the engine's pool into a slot, where nobody else writes them; answered by
    /// `carry_ended`. They stay as they are until then.
    CarryLayers { copy: u64, epoch: AttachEpoch, page: u32, slot: SlotIndex, layers: Range<u16> },
    /// Nothing touches the pages of this drop any more.
    PagesDropped { epoch: AttachEpoch, handle: u64 },
    /// A fill of pages is over: so many of the first have their blocks.
    PagesFilled { epoch: AttachEpoch, handle: u64, blocks: u32 },
}

/// Why nothing is done with pages of a pool. Whoever names such pages has another opinion of them than the node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum PoolError {
    #[error("the engine has no pool")]
    NoPool,
    #[error("page {page} does not exist: the pool has {pages} pages")]
    NoSuchPage { page: u32, pages: u32 },
    #[error("page {page} is named twice")]
    Twice { page: u32 },
    #[error("page {page} is {state}")]
    Taken { page: u32, state: &'static str },
    #[error("each of the {keys} keys needs one page, but {pages} pages are named")]
    Count { keys: usize, pages: usize },
    #[error("a page outside the {pages} pages of the share's prompt is named")]
    NotOfShare { pages: u32 },
    #[error(
        "page {page} of the share must not be computed: it is cached, committed or already computed"
    )]
    NotToCompute { page: u32 },
    /// It is here after another block, or in another namespace.
    #[error("key {0:?} belongs to another block")]
    OtherBlock(BlockKey),
}

/// Layers of a page that have come into a share's slot from the pool in which they were computed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Carried {
    /// Whose pool that is.
    pub epoch: AttachEpoch,
    pub share: Share,
    pub page: u32,
    /// Of the plan by which it is computed.
    pub step: u32,
    pub layers: Range<u16>,
}

/// Why a page was not written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WritePageError {
    /// The slot's bytes do not have their checksum.
    Corrupt,
    /// The pool could not be written.
    Failed,
}

/// How much of the SSD may be used. All zero means that there is none.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct SsdSize {
    /// By extents of all classes.
    pub bytes_max: u64,
    /// By those of the context cache.
    pub context_bytes_max: u64,
    /// By those of one tenant.
    pub tenant_bytes_max: u64,
}

/// Why a block is not on the SSD now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SinkError {
    /// The slot's bytes do not have their checksum.
    Corrupt,
    /// The SSD has not the block that was to be rewritten.
    Gone,
    /// The SSD is full, or has failed; later it may not.
    Failed,
}

/// Why a block did not come from the SSD.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RiseError {
    /// It is not there, or not as it was written.
    Gone,
    /// It could not be read now.
    Failed,
}

/// A chain to keep for a tenant.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KeepRequest {
    pub namespace: Namespace,
    /// From the first block of a chain on.
    pub keys: Vec<BlockKey>,
    pub tenant: Tenant,
    pub expires_unix_ms: u64,
    /// Of a context, and now when it is not known otherwise. One that is there already stays since when it
    /// was. `None`: an object, or what was kept before contexts were marked.
    pub created_unix_ms: Option<u64>,
    /// On how many nodes it is to be kept, this one among them; never on fewer than before. What is not there
    /// yet is made by copies from here.
    pub copies: u8,
}

/// A context that is kept here, by its last block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ContextName {
    pub tenant: Tenant,
    pub namespace: Namespace,
    pub last: BlockKey,
}

/// Why nothing is kept, or not for longer or shorter than before.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum KeepError {
    #[error(
        "this node has neither a usable SSD nor an object store; set `ssd.dir` or `object_store.url`"
    )]
    NoSsd,
    /// Another node may.
    #[error("the node is draining")]
    Draining,
    #[error("this node does not hold the first block")]
    NotHere,
    #[error("another tenant persists a block of the chain")]
    OtherTenant,
    #[error(
        "{wanted_bytes} bytes in addition to {taken_bytes} exceed the tenant's quota of \
         {tenant_bytes_max} bytes"
    )]
    OverQuota { wanted_bytes: u64, taken_bytes: u64, tenant_bytes_max: u64 },
    #[error("another request is persisting a block of the chain; try again later")]
    Busy,
    #[error(
        "the persisted contexts leave no space on the SSD; delete a context or raise `ssd.capacity_bytes`"
    )]
    NoRoom,
    #[error("the tenant has no such context on this node")]
    NoContext,
    #[error(
        "the object store may hold the context, but it does not answer or is not listed yet; try \
         again when /readyz reports it as ready"
    )]
    NoBucket,
}

/// Where a block can be had fastest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Tier {
    /// In the engine's own pool.
    Vram,
    Dram,
    Ssd,
}

/// What a hint has brought about.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Prefetched {
    /// Leading blocks that are in memory.
    pub memory_blocks: u32,
    /// Blocks after them that are being read from the SSD, by this hint or for somebody else.
    pub promoting_blocks: u32,
}

/// Why a hint was not followed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum PrefetchError {
    #[error("this node has no usable SSD; check `ssd.dir`")]
    NoSsd,
    #[error("the node is draining")]
    Draining,
    #[error("this node already prefetches {0} chains, the maximum; try again later")]
    TooMany(usize),
    #[error("this node has no slots available for a prefetch; try again later")]
    NoRoom,
}

/// Why a lookup by an engine pinned nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum GetError {
    #[error("the engine would hold more than {0} pins")]
    TooManyPins(usize),
    #[error("the engine already uses the handle for other pins")]
    HandleInUse,
}

/// Another layout cannot be taken while anything is held.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the node cannot change its block layout while {shares} shares and {pins} pins are open")]
pub struct Busy {
    pub shares: u32,
    pub pins: u32,
}

/// A block that came, went, or is in another tier now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockChange {
    pub key: BlockKey,
    /// It is in no tier any more.
    pub removed: bool,
    /// Where it can be had fastest, when it can.
    pub tier: Tier,
}

/// Changes in sequence.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Changes {
    /// Of the first change; each has the next one.
    pub first_sequence: u64,
    pub changes: Vec<BlockChange>,
}

/// All keys, exact at `sequence`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Snapshot {
    pub sequence: u64,
    /// Those in the engine's pool, then others that are in DRAM, then those that are on the SSD alone.
    pub keys: Vec<BlockKey>,
    /// How many of them are in the pool.
    pub vram_keys: usize,
    /// How many of them are in DRAM and not in the pool.
    pub dram_keys: usize,
}

/// A committed block.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BlockView {
    pub key: BlockKey,
    pub namespace: Namespace,
    pub slot: SlotIndex,
    pub generation: Generation,
    pub pins: u32,
    pub checksum: u64,
}

/// A share as it stands.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ShareView<'a> {
    pub request: &'a Allocate,
    pub held_blocks: u32,
    /// Pages of the prompt and then those grown. Empty once the share gives its slots back.
    pub slots: Vec<SlotIndex>,
    pub targets: Range<u32>,
    pub imm: Option<Imm>,
    /// There is no remote writer, or what it sent is settled.
    pub settled: bool,
    /// A write of the remote writer may still land: its targets must not be read.
    pub writer_may_write: bool,
    pub bound_to: Option<AttachEpoch>,
    /// Pushes under way or owed.
    pub reads: u32,
    pub aborting: bool,
}

/// What is held now, and what was counted since the start. Everything in the first part but
/// `free`, `committed` and `evictable` is zero when nothing is under way.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Counts {
    pub slots: u32,
    pub free: u32,
    pub allocated: u32,
    /// Being read from the SSD.
    pub rising: u32,
    pub committed: u32,
    /// Committed and not pinned.
    pub evictable: u32,
    pub leaving: u32,
    pub quarantined: u32,
    pub shares: u32,
    /// Shares that wait for a writer or a reader to stop.
    pub aborting: u32,
    /// When the oldest of those was aborted.
    pub aborting_since_ms: Option<u64>,
    pub pins: u32,
    /// Pins among them that engines hold through `get`.
    pub get_pins: u32,
    pub imms: u32,
    pub tombstones: u32,
    pub finished: u32,
    /// Blocks being written to the SSD.
    pub sinking: u32,
    /// Reads of the SSD that are under way and too late for anybody.
    pub rises_late: u32,
    /// When the oldest write of the SSD began.
    pub sinking_since_ms: Option<u64>,
    pub ssd_blocks: u32,
    pub ssd_bytes: u64,
    pub context_blocks: u32,
    pub context_bytes: u64,
    /// Blocks that are known to be in the object store; others that are being sent there, or wait for that.
    pub bucket_blocks: u32,
    pub bucket_bytes: u64,
    pub uploading: u32,
    pub uploads_waiting: u32,
    /// What is to be gone from there, and is not yet.
    pub discarding: u32,
    /// Pages of engines' pools: all, those in which shares are computed, those that hold blocks, those being filled,
    /// those that are wanted back.
    pub pool_pages: u32,
    pub pool_computed: u32,
    pub pool_held: u32,
    pub pool_filling: u32,
    pub pool_dropping: u32,
    /// Copies between the pool and slots that are under way.
    pub pool_copies: u32,
    /// Copies of computed layers that are under way, and pages that wait for one.
    pub carries: u32,
    pub carries_waiting: u32,

    pub committed_total: u64,
    pub duplicates_total: u64,
    pub evicted_total: u64,
    /// Blocks dropped because they, or one before them, failed a checksum, or because another was kept under their
    /// name below memory, which was not known when they were put.
    pub dropped_total: u64,
    pub leases_over_total: u64,
    pub aborts_total: u64,
    pub refused_no_space_total: u64,
    pub sunk_total: u64,
    pub sinks_failed_total: u64,
    pub risen_total: u64,
    pub rises_failed_total: u64,
    pub rises_late_total: u64,
    pub ssd_evicted_total: u64,
    /// Blocks of the SSD that were found rotten or missing, and those after them.
    pub ssd_lost_total: u64,
    pub context_expired_total: u64,
    pub uploaded_total: u64,
    pub uploads_failed_total: u64,
    /// Blocks that nobody sends, because more are known to be in the object store than may be.
    pub uploads_refused_total: u64,
    pub downloaded_total: u64,
    pub downloads_failed_total: u64,
    pub downloads_late_total: u64,
    /// Blocks of the object store that were found missing or wrong.
    pub bucket_lost_total: u64,
    /// Blocks that were evicted before the SSD had them, while there was one.
    pub evicted_unsunk_total: u64,
    pub hints_total: u64,
    pub hints_refused_total: u64,
    /// Blocks that were read ahead of need.
    pub prefetched_total: u64,
    /// Of them, those that were asked for, and those that left memory before anybody asked.
    pub prefetched_used_total: u64,
    pub prefetched_unused_total: u64,
    /// Blocks that were copied from the pool into slots; copies of that kind that came to nothing.
    pub pool_sunk_total: u64,
    pub pool_sinks_failed_total: u64,
    /// Blocks whose pages the engine took back before any other tier had them.
    pub pool_dropped_unsunk_total: u64,
    /// Pages that got their blocks, and pages that were to be filled and did not.
    pub pool_filled_total: u64,
    pub pool_unfilled_total: u64,
    /// Layers of pages that were computed in pools and copied into slots; copies of them that failed, and pages that were
    /// given up with their shares before they were copied.
    pub layers_carried_total: u64,
    pub carries_failed_total: u64,
    pub carries_given_up_total: u64,
    /// Tombstones forgotten before their time, because there were too many.
    pub tombstones_forgotten_total: u64,
    /// Ended shares forgotten before their time, because there were too many.
    pub finished_forgotten_total: u64,
}
