//! What an observer outside the nodes sees: who was given which place, who writes and reads where, what
//! was promised and what came out. The checkers see these and nothing else.

use std::collections::BTreeSet;

use kvasir_blocks::AttachEpoch;
use kvasir_proto::{BlockKey, Generation, Namespace, Share};

use crate::content::PageBytes;

/// A node between two crashes.
/// A context as a node lists it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ListedContext {
    pub last: BlockKey,
    pub expires_unix_ms: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Life {
    pub node: usize,
    pub life: u32,
}

/// A place in a node's memory that is given out, used and given out again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Place {
    Slot(u32),
    /// Room for a tail.
    Tail(u64),
    /// An immediate.
    Imm(u32),
}

/// Who was given a place, to write there.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Owner {
    Share(Share),
    /// A read of the SSD.
    Rise(u64),
}

/// Who reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Reader {
    /// The engine, for a share it has bound.
    Engine(Share),
    /// The engine, by a handle.
    Get(AttachEpoch, u64),
    /// Writes of a push: which push, and which of its groups.
    Push(u64, u64),
    /// A copy to the SSD.
    Sink(u64),
    /// A client of objects, by one of its requests.
    Client(AttachEpoch, u64),
}

/// A block that a node says it has.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Listed {
    pub key: BlockKey,
    pub slot: u32,
    pub generation: Generation,
    /// What lies there, bits apart that the run has flipped itself.
    pub bytes: PageBytes,
}

/// What a node says that it holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Held {
    pub pins: u32,
    pub locks: u32,
    pub quarantined: u32,
    pub imms: u32,
    pub shares: u32,
    pub tail_bytes: u64,
    /// Extents of the log without a block on the SSD that they are of.
    pub strays: u64,
    /// Full segments of the log without a footer: they are never cleaned.
    pub unsealed: u64,
}

/// One observation.
#[derive(Debug, Clone)]
pub enum Seen {
    /// A node has started, and says that these blocks lie on its SSD. `unix_ms` is by its own clock;
    /// `disk_lies`: what it read may not have been what lies there; `is_partial`: it could not read all of it.
    Started {
        at: Life,
        on_ssd: Vec<BlockKey>,
        contexts: Vec<ListedContext>,
        unix_ms: u64,
        disk_lies: bool,
        is_partial: bool,
        /// All that could be read.
        read: BTreeSet<BlockKey>,
        /// What it keeps there and cannot find, since it cannot read what that follows.
        unreached: BTreeSet<BlockKey>,
    },
    /// The host has crashed: nothing in its memory is anybody's any more.
    Crashed {
        at: Life,
    },
    /// The bytes of these blocks lie on a disk, whatever its node knows of them: as a host left it that
    /// has crashed.
    OnDisk {
        node: usize,
        keys: BTreeSet<BlockKey>,
    },
    /// Bits of extents of these blocks have flipped on a disk.
    DiskRotted {
        node: usize,
        keys: Vec<BlockKey>,
    },
    /// A node says that a block on its SSD cannot be read and is forgotten; `disk_lies`: it was given
    /// other bytes than lie there.
    DiskGone {
        node: usize,
        key: BlockKey,
        disk_lies: bool,
    },
    /// A block that was kept is asked for when all is quiet, and has come into memory or not.
    AskedFor {
        at: Life,
        key: BlockKey,
        bytes: Option<PageBytes>,
    },

    /// A place was given to somebody, who may have it written from now on.
    GivenOut {
        at: Life,
        place: Place,
        to: Owner,
    },
    /// The engine was told that it may write these slots.
    EngineMayWrite {
        at: Life,
        share: Share,
        slots: Vec<u32>,
    },
    /// A page is the engine's no more, because it has said that it is whole, or that it computes it in its pool.
    PageSealed {
        at: Life,
        share: Share,
        slot: u32,
    },
    /// The engine will not touch the share's slots again: it said so, or is dead.
    EngineStopped {
        at: Life,
        share: Share,
    },
    /// Another node was told that it may write these places.
    PeerMayWrite {
        at: Life,
        share: Share,
        imm: u32,
        places: Vec<Place>,
    },
    /// Bytes with this immediate have come to lie there.
    Landed {
        at: Life,
        imm: u32,
        place: Place,
    },
    /// All writes with this immediate have landed.
    Counted {
        at: Life,
        imm: u32,
    },
    /// Some writes of a push were begun: which push of its node, and which of its groups.
    WriteBegan {
        to: Life,
        imm: u32,
        write: (u64, u64),
    },
    /// The transfer engine has said what became of them.
    WriteEnded {
        to: Life,
        imm: u32,
        write: (u64, u64),
    },
    /// The writing node has none of these writes under way, and will issue none.
    PushOver {
        to: Life,
        imm: u32,
    },
    /// The transfer engine has confirmed that nothing of this writer lands here any more.
    CutOff {
        at: Life,
        imms: Vec<u32>,
    },
    /// A read of the SSD writes no more.
    RiseOver {
        at: Life,
        rise: u64,
    },

    /// A copy of finished layers out of a page of an engine's pool, into a slot.
    CarryBegan {
        at: Life,
        copy: u64,
        epoch: AttachEpoch,
        page: u32,
        slot: u32,
    },
    /// It touches neither any more.
    CarryEnded {
        at: Life,
        copy: u64,
    },
    /// The engine was told that it may use these pages of its pool for something else.
    PoolPagesBack {
        at: Life,
        epoch: AttachEpoch,
        pages: Vec<u32>,
    },

    ReadBegan {
        at: Life,
        reader: Reader,
        slots: Vec<u32>,
    },
    ReadEnded {
        at: Life,
        reader: Reader,
    },
    /// An engine has read a page of a prompt that it was told is there.
    PageRead {
        at: Life,
        share: Share,
        key: BlockKey,
        bytes: PageBytes,
    },
    /// Everything that a node says it has in memory, with what lies there now.
    Listing {
        at: Life,
        blocks: Vec<Listed>,
    },
    /// What lies in the slots of open reads.
    Memory {
        at: Life,
        slots: Vec<(u32, PageBytes)>,
    },

    /// A node has answered that it holds these blocks, for a request of this namespace.
    Held {
        at: Life,
        share: Share,
        namespace: Namespace,
        keys: Vec<BlockKey>,
    },
    /// `waits_for_others`: another node may write there, and has to be stopped when it ends.
    Allocated {
        at: Life,
        share: Share,
        lease_ms: u64,
        waits_for_others: bool,
    },
    /// From now on more has to be stopped when the share ends: an engine, or a push.
    TakenUp {
        at: Life,
        share: Share,
    },
    Renewed {
        at: Life,
        share: Share,
        lease_ms: u64,
    },
    /// So many blocks of a fetch have landed intact.
    Fetched {
        at: Life,
        blocks: u32,
    },
    /// Whoever asked was told that the share is over.
    Ended {
        at: Life,
        share: Share,
    },
    /// Whoever looks through memory has found a block rotten, and says so later: by then another one may
    /// lie there.
    ReportedRotten {
        at: Life,
        slot: u32,
        generation: Generation,
        lies_there: Option<Generation>,
        dropped: u32,
    },
    /// A node, or the engine on it, does nothing until then.
    StandsStill {
        node: usize,
        until_us: u64,
    },
    /// A client puts objects, by this share, each in this version of what its name stands for.
    PutBegan {
        at: Life,
        share: Share,
        epoch: AttachEpoch,
        keys: Vec<BlockKey>,
        versions: Vec<u32>,
    },
    /// A client of this namespace was told that these are stored.
    ObjectsStored {
        at: Life,
        namespace: Namespace,
        keys: Vec<BlockKey>,
    },
    /// This one lives as long as the client that has put it.
    Ephemeral {
        at: Life,
        epoch: AttachEpoch,
        key: BlockKey,
    },
    /// With this client, which has ended, its node has dropped this one.
    ObjectWent {
        at: Life,
        epoch: AttachEpoch,
        key: BlockKey,
    },
    /// A client of this namespace was told that these are there, and they alone of what it asked for.
    Found {
        at: Life,
        namespace: Namespace,
        keys: Vec<BlockKey>,
    },
    /// A client of this namespace removes this one.
    ObjectRemoved {
        node: usize,
        namespace: Namespace,
        key: BlockKey,
    },
    /// A client was told that no restart of the node brings these back.
    ObjectsErased {
        node: usize,
        keys: Vec<BlockKey>,
    },
    /// The process of a client has ended, and its node knows it.
    ClientGone {
        at: Life,
        epoch: AttachEpoch,
    },
    /// A node shall drain, and takes no work from now on, nor promises anything.
    DrainBegan {
        at: Life,
    },
    /// It shall not, and does again.
    DrainStopped {
        at: Life,
    },
    /// It has said that it has drained: it may be taken away.
    Drained {
        at: Life,
    },
    /// It was taken away with its disk, after it had said so.
    Left {
        node: usize,
        unix_ms: u64,
    },
    /// Its disk was lost for good, and nobody had said that it may go.
    DiskLost {
        node: usize,
        unix_ms: u64,
    },
    /// A tenant was told that a context is kept until then on two nodes.
    CopiesKept {
        node: usize,
        last: BlockKey,
        expires_unix_ms: u64,
    },
    /// Nothing is under way any more; a prompt as long as the node's memory was asked for.
    AtRest {
        at: Life,
        has_room: Result<(), String>,
        /// What the node itself says is held.
        says: Held,
    },
    /// An aborted share that was never seen will not be allocated later.
    Tombstoned {
        at: Life,
        share: Share,
    },

    /// A tenant was told that these blocks are kept until then, by the node's calendar.
    Kept {
        node: usize,
        keys: Vec<BlockKey>,
        expires_unix_ms: u64,
    },
    /// These blocks shall be kept until then, or as many of the first as there are: it has begun. Of an object that is
    /// in memory, in this version.
    KeepAsked {
        node: usize,
        keys: Vec<BlockKey>,
        expires_unix_ms: u64,
        version: Option<u32>,
    },
    /// What was asked for has ended: so many of the first are kept, or none.
    KeepEnded {
        node: usize,
        keys: Vec<BlockKey>,
        blocks: Option<u32>,
    },
    /// A context that ends with this block shall get this time, or (none) be no more: it has begun.
    ContextAsked {
        node: usize,
        last: BlockKey,
        expires_unix_ms: Option<u64>,
    },
    /// A tenant was told that a context has this time now, or is no more.
    ContextChanged {
        node: usize,
        last: BlockKey,
        expires_unix_ms: Option<u64>,
    },
    /// The calendar of a node, what it has on its SSD, and the contexts that it lists.
    OnSsd {
        node: usize,
        unix_ms: u64,
        keys: Vec<BlockKey>,
        contexts: Vec<ListedContext>,
    },

    /// The answer to a request.
    Answered {
        request: usize,
        tokens: Vec<u32>,
    },
}
