//! One store node: the shipped cores, and a driver that does what the shell of `store-node` does around
//! them, without threads. Each file here stands for the file of that name in `store-node/src/node/owner`.

mod arrivals;
pub(crate) mod disk;
mod engine_side;
mod objects;
mod pools;
mod pushes;
mod replicas;
mod shares;
mod stops;
mod writers;

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use kvasir_blocks::moving::leaving::Leaving;
use kvasir_blocks::moving::pages::Pages;
use kvasir_blocks::moving::push::Group;
use kvasir_blocks::moving::sent_pushes::SentPushes;
use kvasir_blocks::moving::tail_space::{TailRange, TailSpace};
use kvasir_blocks::moving::writer_stops::WriterStops;
use kvasir_blocks::moving::writers::CutRound;
use kvasir_blocks::{
    AbortReason, Allocate, AttachEpoch, Blocks, Counts, Eviction, Options, ReplicaOptions,
};
use kvasir_log::sim_disk::SimDisk;
use kvasir_proto::{
    BlockKey, Generation, Namespace, Share, Side, SlotIndex, SlotLayout, Tenant, TxId,
};
use kvasir_transfer::memory::{Prefault, SharedMemory};
use kvasir_transfer::sim::{Landing, SimEngine, SimNetwork};
use kvasir_transfer::{Handlers, Outcome, PeerEvent, PeerId, RegionHandle};

use crate::calls::{Caller, Targets};
use crate::checkers::UNWRITTEN;
use crate::content::{self, PageBytes, SLOT_BYTES};
use crate::context::{Context, Event};
use crate::engine::Engine;
use crate::plan::{NodePlan, TENANTS};
use crate::random::Random;
use crate::seen::{Held, Life, Listed, ListedContext, Owner, Place, Seen};

use disk::Ssd;
use objects::Clients;
use replicas::Replication;
use writers::{Of, Writers};

/// Room for tails: of some seventy at once, since shares have at most one each.
const TAILS_BYTES: usize = 72 * 1024;
/// What every calendar clock shows when a run begins.
const CALENDAR_MS: u64 = 1_000_000;
/// How long a stop is waited for before its writer is cut off.
const STOP_TIMEOUT_MS: u64 = 150;
/// What an engine has to let go of a share that it is told to stop.
const ENGINE_STOP_TIMEOUT_MS: u64 = 120;
pub const LEASE_MS_MAX: u64 = 2_000;

/// What the transfer engine has to tell; filled by its callbacks.
#[derive(Debug)]
pub enum End {
    Group { share: Share, push: u64, number: u64, group: Group, outcome: Outcome },
    Tail { share: Share, push: u64, outcome: Outcome },
    Drained { share: Share, push: u64, outcome: Outcome },
    Counted { share: Share, imm: u32, outcome: Outcome },
    Cut { writer: u64, round: CutRound, outcome: Outcome },
    Sent { share: Share, outcome: Outcome },
    Probed { writer: u64, outcome: Outcome },
    Told { failure: stops::Failure, outcome: Outcome },
    Message(PeerId, Vec<u8>),
    Peer(PeerEvent),
}

#[derive(Debug, Clone, Default)]
pub struct Post(Arc<Mutex<Vec<End>>>);

impl Post {
    pub fn end(&self, end: End) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(end);
    }

    fn take(&self) -> Vec<End> {
        std::mem::take(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    pub fn is_empty(&self) -> bool {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).is_empty()
    }
}

/// What is being written for a tenant.
#[derive(Debug)]
enum Promise {
    Keep {
        keys: Vec<BlockKey>,
        expires_unix_ms: u64,
        /// Of a tenant's context, of which there are to be copies.
        copied: Option<(Tenant, Namespace)>,
    },
    /// Of the context that ends with this block.
    Change { last: BlockKey, expires_unix_ms: Option<u64> },
}

/// What the shell keeps for one share.
#[derive(Debug)]
struct Leg {
    pages: Pages,
    cached_pages: u32,
    committed_pages: u32,
    held_pages: u32,
    keys: Vec<BlockKey>,
    lease_ms: u64,
    engine: Option<AttachEpoch>,
    incoming: Option<Incoming>,
    outgoing: Option<Outgoing>,
    tail: Option<Vec<u8>>,
    finished: bool,
    reading: bool,
    /// Its blocks are copies to have.
    replica: bool,
}

#[derive(Debug)]
struct Incoming {
    writer: Option<u64>,
    imm: u32,
    pages: Range<u32>,
    tail: TailRange,
    state: IncomingState,
    settling: Option<(u32, Vec<Caller>)>,
}

#[derive(Debug)]
enum IncomingState {
    Waiting,
    Arrived { engine: Vec<u8>, told: bool },
    Settled,
}

#[derive(Debug)]
struct Outgoing {
    id: u64,
    peer: PeerId,
    targets: Targets,
    leaving: Leaving<PeerId>,
    reply: Option<Caller>,
}

/// What a node is while its host is up.
#[derive(Debug)]
pub struct Running {
    pub at: Life,
    pub blocks: Blocks,
    pub transfer: SimEngine,
    post: Post,
    arena: RegionHandle,
    tails: Arc<SharedMemory>,
    tail_space: TailSpace,
    writers: Writers,
    legs: BTreeMap<Share, Leg>,
    stops: WriterStops,
    sent: SentPushes,
    pub engines: Vec<Engine>,
    next_epoch: u32,
    /// Memory of engines' pools, also of one that has ended while a copy reads it.
    pools: BTreeMap<AttachEpoch, Vec<PageBytes>>,
    open_pools: BTreeSet<AttachEpoch>,
    carries: BTreeMap<u64, pools::Carry>,
    pub ssd: Option<Ssd>,
    keeps: BTreeMap<u64, (Caller, Promise)>,
    replication: Replication,
    clients: Clients,
    next_push: u64,
    next_group: u64,
    next_hint: u64,
    pub incarnation: u64,
    /// Bits that were flipped in its memory, and flip back.
    flips: Vec<(u32, usize, u8)>,
    /// Blocks that will be said to be rotten, and when.
    suspects: Vec<(u64, SlotIndex, Generation)>,
    /// A job of the thread beside the disk is due.
    job_waits: bool,
    /// When the disk's next event is, so that it is not asked for twice.
    disk_at_us: u64,
    disk_lies_until_us: u64,
}

/// A node for the whole run.
#[derive(Debug)]
pub struct Node {
    pub index: usize,
    pub plan: NodePlan,
    pub life: u32,
    pub running: Option<Running>,
    /// While the host is down.
    disk: Option<SimDisk>,
    pub paused_until_us: u64,
    pub unreachable: bool,
    /// Of its calendar clock; below zero when it is behind.
    pub clock_ahead_ms: i64,
    /// Until when what is read of its disk may not be what lies there.
    pub disk_lies_until_us: u64,
    cuts_fail: bool,
    /// Until then it shall drain and leave.
    pub drains_until_us: u64,
}

impl Node {
    pub fn new(index: usize, plan: NodePlan, seed: u64) -> Self {
        let disk = plan.has_ssd.then(|| SimDisk::new(disk::DISK_BYTES, seed ^ index as u64));
        Node {
            index,
            plan,
            life: 0,
            running: None,
            disk,
            paused_until_us: 0,
            unreachable: false,
            clock_ahead_ms: 0,
            disk_lies_until_us: 0,
            cuts_fail: false,
            drains_until_us: 0,
        }
    }

    pub fn at(&self) -> Life {
        Life { node: self.index, life: self.life }
    }

    pub fn unix_ms(&self, context: &Context) -> u64 {
        (CALENDAR_MS + context.now_ms()).saturating_add_signed(self.clock_ahead_ms)
    }

    /// The host comes up, with what is on its disk.
    pub fn start(&mut self, context: &mut Context, network: &SimNetwork) {
        if self.running.is_some() {
            return;
        }
        self.life += 1;
        let at = self.at();
        let post = Post::default();
        let (messages, peers) = (post.clone(), post.clone());
        let transfer = network.engine(Handlers {
            on_message: Box::new(move |peer, message| {
                messages.end(End::Message(peer, message.to_vec()));
            }),
            on_peer: Box::new(move |event| peers.end(End::Peer(event))),
        });
        context.lives.insert(transfer.endpoint().incarnation, at);
        context.processes.insert(at.node, at);
        let memory = |name: &str, bytes| {
            Arc::new(SharedMemory::create(name, bytes, Prefault::No).expect("little memory"))
        };
        let slots = memory("slots", self.plan.slots as usize * SLOT_BYTES);
        let tails = memory("tails", TAILS_BYTES);
        let (arena, _) = transfer.register(Arc::clone(&slots)).expect("it can be written");
        let mut random = context.chance("start", self.index as u64, self.life.into());
        let options = Options {
            slots: self.plan.slots,
            block_tokens: content::BLOCK_TOKENS,
            imm_seed: random.draw() as u32,
            lease_max_ms: LEASE_MS_MAX,
            tombstone_ms: context.plan.finished_ms,
            tombstones_max: 1_024,
            finished_ms: context.plan.finished_ms,
            finished_max: 4_096,
            eviction: match context.plan.seed.is_multiple_of(2) {
                true => Eviction::Lru,
                false => Eviction::HitDensity,
            },
            event_log_max: 64,
            shares_max: 48,
            get_pins_max: 16,
            sinks_max: 8,
            rises_max: 16,
            ssd_timeout_ms: 200,
            sink_retry_ms: 50,
            demote_ahead_percent: 40,
            prefetch_chains_max: 4,
            prefetch_protected_ms: 20,
            carries_max: 4,
            replicas: ReplicaOptions {
                concurrent_copies_max: 2,
                asked_max: 4,
                hot_requests_min: 2,
                hot_window_ms: 600,
                hot_pushes_min: 1 + (context.plan.seed % 2) as usize,
                hot_again_ms: 200,
                hot_chains_max: 4,
                retry_ms: 30,
                node_lost_after_ms: 900,
            },
            ..Options::default()
        };
        let mut running = Running {
            at,
            blocks: Blocks::new(options),
            writers: Writers::new(slots, Arc::clone(&tails)),
            transfer,
            post,
            arena,
            tails,
            tail_space: TailSpace::new(TAILS_BYTES as u64),
            legs: BTreeMap::new(),
            stops: WriterStops::default(),
            sent: SentPushes::default(),
            engines: Vec::new(),
            next_epoch: 0,
            pools: BTreeMap::new(),
            open_pools: BTreeSet::new(),
            carries: BTreeMap::new(),
            ssd: None,
            keeps: BTreeMap::new(),
            replication: Replication::default(),
            clients: Clients::default(),
            next_push: 1,
            next_group: 1,
            next_hint: 0,
            incarnation: random.draw(),
            flips: Vec::new(),
            suspects: Vec::new(),
            job_waits: false,
            disk_at_us: u64::MAX,
            disk_lies_until_us: self.disk_lies_until_us,
        };
        running.writers.cuts_fail = self.cuts_fail;
        running.blocks.expect_ssd();
        running.blocks.set_extents(disk::LAYOUT_HASH, disk::extent_bytes());
        running.share_generations();
        let unix_ms = self.unix_ms(context);
        if let Some(disk) = self.disk.take() {
            running.open_disk(context, disk, unix_ms);
        }
        running.attach_engines(context);
        context.after(context.plan.tick_us, Event::Tick { at });
        self.running = Some(running);
    }

    /// The host loses power.
    pub fn crash(&mut self, context: &mut Context, network: &SimNetwork) {
        let Some(running) = self.running.take() else { return };
        // Its peers hear nothing any more, and that is how they find out.
        network.vanish(&running.transfer);
        self.leave(context, running, SimDisk::crash);
    }

    /// The process is killed: the system closes its connections, and writes what it was given.
    pub fn kill(&mut self, context: &mut Context, network: &SimNetwork) {
        let Some(running) = self.running.take() else { return };
        network.kill(&running.transfer);
        self.leave(context, running, SimDisk::give_up);
    }

    fn leave(&mut self, context: &mut Context, running: Running, end: impl FnOnce(&mut SimDisk)) {
        context.see(Seen::Crashed { at: self.at() });
        let Some(ssd) = running.ssd else { return };
        let mut disk = ssd.into_disk();
        end(&mut disk);
        let keys = disk::on_disk(&disk, context).into_iter().map(|(_, key)| key).collect();
        context.see(Seen::OnDisk { node: self.index, keys });
        self.disk = Some(disk);
    }

    /// It has said that it has drained: it is taken away, and its disk with it. Another host without
    /// anything may come in its place.
    pub fn leave_for_good(&mut self, context: &mut Context, network: &SimNetwork) {
        let Some(running) = self.running.take() else { return };
        network.kill(&running.transfer);
        let unix_ms = self.unix_ms(context);
        context.covers("a drained node leaves");
        context.see(Seen::Crashed { at: self.at() });
        context.see(Seen::Left { node: self.index, unix_ms });
        let seed = context.chance("disk", self.index as u64, self.life.into()).draw();
        self.disk = self.plan.has_ssd.then(|| SimDisk::new(disk::DISK_BYTES, seed));
    }

    /// Its disk is lost for good, and the process with it. It comes back with an empty one.
    pub fn lose_disk(&mut self, context: &mut Context, network: &SimNetwork) {
        if let Some(running) = self.running.take() {
            network.vanish(&running.transfer);
            context.see(Seen::Crashed { at: self.at() });
        }
        let unix_ms = self.unix_ms(context);
        context.see(Seen::DiskLost { node: self.index, unix_ms });
        let seed = context.chance("disk", self.index as u64, self.life.into()).draw();
        self.disk = self.plan.has_ssd.then(|| SimDisk::new(disk::DISK_BYTES, seed));
    }

    /// Begins to drain, also again after a crash, as long as it is wanted.
    pub fn look_after_drain(&mut self, context: &mut Context) {
        if let Some(running) = &mut self.running
            && context.now_us < self.drains_until_us
            && !running.blocks.is_draining()
        {
            running.begin_drain(context);
        }
    }

    /// It shall stay after all.
    pub fn cancel_drain(&mut self, context: &mut Context, network: &SimNetwork) {
        self.drains_until_us = 0;
        match &mut self.running {
            Some(running) => drop(running.cancel_drain(context)),
            None => self.start(context, network),
        }
    }

    /// From now on cutting off takes long and fails here, or no longer so.
    pub fn set_cuts_fail(&mut self, fail: bool) {
        self.cuts_fail = fail;
        if let Some(running) = &mut self.running {
            running.writers.cuts_fail = fail;
        }
    }

    /// What is read of its disk may not be what lies there, for so long.
    pub fn disk_lies_until(&mut self, until_us: u64) {
        self.disk_lies_until_us = self.disk_lies_until_us.max(until_us);
        if let Some(running) = &mut self.running {
            running.disk_lies_until_us = self.disk_lies_until_us;
        }
    }

    /// Bits flip on the disk, in a few extents.
    pub fn rot(&mut self, context: &mut Context, fault: u64) {
        let mut random = context.chance("rot", self.index as u64, fault);
        let Some(disk) = self.disk_mut() else { return };
        let extents = disk::on_disk(disk, context);
        let mut rotted = Vec::new();
        for _ in 0..random.between(1, 4) {
            let Some((page, key)) = extents.get(random.below(extents.len().max(1))) else { break };
            // In the head, or in what it is the head of.
            let page = if random.percent(50) { page - 1 } else { *page };
            let at = page * kvasir_log::PAGE_BYTES + random.below(SLOT_BYTES);
            disk.rot(at, random.below(8) as u32);
            rotted.push(*key);
        }
        context.see(Seen::DiskRotted { node: self.index, keys: rotted });
    }

    /// What is wrong with its disk, whether the host is up or not.
    pub fn disk_mut(&mut self) -> Option<&mut SimDisk> {
        match &mut self.running {
            Some(running) => running.ssd.as_mut().map(Ssd::disk_mut),
            None => self.disk.as_mut(),
        }
    }
}

impl Running {
    /// Everything that the transfer engine has told. Answers whether there was anything.
    pub fn take_ends(&mut self, context: &mut Context) -> bool {
        let ends = self.post.take();
        let any = !ends.is_empty();
        for end in ends {
            self.take_end(context, end);
            self.run_actions(context);
        }
        any
    }

    pub fn has_ends(&self) -> bool {
        !self.post.is_empty()
    }

    fn take_end(&mut self, context: &mut Context, end: End) {
        match end {
            End::Group { share, push, number, group, outcome } => {
                self.group_done(context, share, push, number, &group, outcome);
            }
            End::Tail { share, push, outcome } => self.tail_done(context, share, push, outcome),
            End::Drained { share, push, outcome } => {
                self.push_drained(context, share, push, outcome);
            }
            End::Counted { share, imm, outcome } => self.counted(context, share, imm, outcome),
            End::Cut { writer, round, outcome } => {
                self.writer_cut(context, writer, round, outcome);
            }
            End::Sent { share, outcome } => self.stop_sent(context, share, outcome),
            End::Probed { writer, outcome } => self.writer_probed(context, writer, outcome),
            End::Told { failure, outcome } => self.failure_told(failure, outcome),
            End::Message(peer, bytes) => self.take_message(context, peer, &bytes),
            End::Peer(event) => self.take_peer_event(context, event),
        }
    }

    /// What happens now and then.
    pub fn tick(&mut self, context: &mut Context, unix_ms: u64) {
        let now_ms = context.now_ms();
        if self.blocks.poll_timeout().is_some_and(|due_ms| due_ms <= now_ms) {
            self.blocks.handle_timeout(now_ms);
        }
        self.look_after_engine_stops(context);
        self.look_after_clients(context);
        self.look_after_stops(context);
        self.look_through_memory(context);
        self.tick_disk(context, unix_ms);
        self.run_actions(context);
        self.make_awaited();
        self.plan_copies(context);
        self.run_actions(context);
    }

    // ---- memory ----

    fn layout(&self) -> Arc<SlotLayout> {
        content::layout()
    }

    fn memory(&self) -> &Arc<SharedMemory> {
        self.arena.memory()
    }

    fn raw(&self, slot: SlotIndex) -> PageBytes {
        let mut bytes = [0; SLOT_BYTES];
        let copied = self.memory().copy_to(slot.0 as usize * SLOT_BYTES, &mut bytes);
        copied.expect("a slot lies in the memory");
        bytes
    }

    /// What lies in a slot, without the bits that were flipped: what a reader on this host gets is not
    /// checked by anything, and no checker is to find that.
    pub fn read_slot(&self, slot: SlotIndex) -> PageBytes {
        let mut bytes = self.raw(slot);
        for (_, at, mask) in self.flips.iter().filter(|(of, ..)| *of == slot.0) {
            bytes[*at] ^= mask;
        }
        bytes
    }

    pub fn write_slot(&mut self, slot: SlotIndex, offset: usize, bytes: &[u8]) {
        let copied = self.memory().copy_from(slot.0 as usize * SLOT_BYTES + offset, bytes);
        copied.expect("a slot lies in the memory");
    }

    /// The checksum of a run as it lies there, flipped bits and all.
    fn run_checksum(&self, slot: SlotIndex, run: kvasir_proto::SlotRun) -> u64 {
        let start = run.offset_bytes as usize;
        kvasir_transfer::checksum(&self.raw(slot)[start..start + run.length_bytes as usize])
    }

    fn run_checksums(&self, slot: SlotIndex) -> Vec<u64> {
        let layout = self.layout();
        let runs = (0..layout.layers()).flat_map(|layer| layout.runs(layer));
        runs.map(|run| self.run_checksum(slot, *run)).collect()
    }

    fn checksum(&self, slot: SlotIndex) -> u64 {
        kvasir_transfer::fold(&self.run_checksums(slot))
    }

    /// A slot is somebody's now: nothing that lay there counts.
    fn give_out(&mut self, context: &mut Context, slot: SlotIndex, to: Owner) {
        context.see(Seen::GivenOut { at: self.at, place: Place::Slot(slot.0), to });
        self.flips.retain(|(of, ..)| *of != slot.0);
        self.write_slot(slot, 0, &UNWRITTEN);
    }

    /// Someone looks through the memory, finds a block rotten now and then, and says so a little later.
    fn look_through_memory(&mut self, context: &mut Context) {
        let due = |(at_us, ..): &(u64, SlotIndex, Generation)| *at_us <= context.now_us;
        let said: Vec<_> = self.suspects.extract_if(.., |suspect| due(suspect)).collect();
        for (_, slot, generation) in said {
            let mut blocks = self.blocks.blocks();
            let lies_there = blocks.find(|block| block.slot == slot).map(|block| block.generation);
            drop(blocks);
            let dropped = self.blocks.drop_corrupt(context.now_ms(), slot, generation);
            let (at, slot) = (self.at, slot.0);
            if dropped > 0 {
                context.covers("what was said to be rotten is dropped");
            }
            context.see(Seen::ReportedRotten { at, slot, generation, lies_there, dropped });
        }
        let mut random = context.chance("look through memory", self.at.node as u64, 0);
        if !context.calm && random.percent(2) {
            let blocks: Vec<_> = self.blocks.blocks().map(|b| (b.slot, b.generation)).collect();
            if !blocks.is_empty() {
                let (slot, generation) = blocks[random.below(blocks.len())];
                let at_us = context.now_us + random.between(0, 100_000);
                self.suspects.push((at_us, slot, generation));
            }
        }
    }

    /// A bit of some committed block flips; it flips back later.
    pub fn flip(&mut self, mut random: Random) {
        let slots: Vec<SlotIndex> = self.blocks.blocks().map(|block| block.slot).collect();
        if slots.is_empty() {
            return;
        }
        let slot = slots[random.below(slots.len())];
        let (at, mask) = (random.below(SLOT_BYTES), 1 << random.below(8));
        let flipped = self.raw(slot)[at] ^ mask;
        self.write_slot(slot, at, &[flipped]);
        self.flips.push((slot.0, at, mask));
    }

    pub fn flip_back(&mut self) {
        for (slot, at, mask) in std::mem::take(&mut self.flips) {
            let flipped = self.raw(SlotIndex(slot))[at] ^ mask;
            self.write_slot(SlotIndex(slot), at, &[flipped]);
        }
    }

    // ---- what is shown ----

    /// Shows the checkers what this node has.
    pub fn show(&self, context: &mut Context) {
        let listed = self.blocks.blocks().map(|block| Listed {
            key: block.key,
            slot: block.slot.0,
            generation: block.generation,
            bytes: self.read_slot(block.slot),
        });
        let blocks: Vec<Listed> = listed.collect();
        let slots =
            (0..self.blocks.counts().slots).map(|slot| (slot, self.read_slot(SlotIndex(slot))));
        let slots = slots.collect();
        context.see(Seen::Listing { at: self.at, blocks });
        context.see(Seen::Memory { at: self.at, slots });
    }

    pub fn show_ssd(&self, context: &mut Context, unix_ms: u64) {
        if self.ssd.as_ref().is_some_and(Ssd::is_up) {
            let keys = self.blocks.ssd_blocks().map(|block| block.key).collect();
            let contexts = self.contexts(unix_ms);
            context.see(Seen::OnSsd { node: self.at.node, unix_ms, keys, contexts });
        }
    }

    /// Of all tenants.
    pub fn contexts(&self, unix_ms: u64) -> Vec<ListedContext> {
        let all = (0..TENANTS)
            .flat_map(|tenant| self.blocks.contexts(Tenant(tenant), None, usize::MAX, unix_ms));
        let listed = |context: kvasir_blocks::PersistedContext| ListedContext {
            last: context.last,
            expires_unix_ms: context.expires_unix_ms,
        };
        all.map(listed).collect()
    }

    /// Bytes have come to lie in a region of this node.
    pub fn landed(&self, context: &mut Context, landing: &Landing) {
        let (Some(of), Some(imm)) = (self.writers.region(landing.region), landing.imm) else {
            return;
        };
        let slot_bytes = SLOT_BYTES as u64;
        let place = match of {
            Of::Slots => Place::Slot((landing.offset_bytes / slot_bytes) as u32),
            // By where the room begins that was given out.
            Of::Tails => {
                let begins = |incoming: &Incoming| incoming.tail.offset_bytes;
                let incoming = self.legs.values().filter_map(|leg| leg.incoming.as_ref());
                let room = incoming.map(begins).filter(|begin| *begin <= landing.offset_bytes);
                Place::Tail(room.max().unwrap_or(landing.offset_bytes))
            }
        };
        context.see(Seen::Landed { at: self.at, imm, place });
    }

    /// When nothing is under way: asks for as much memory as there is, and shows what is held.
    pub fn show_at_rest(&mut self, context: &mut Context) {
        let Counts { pins, allocated, rising, leaving, quarantined, imms, shares, .. } =
            self.blocks.counts();
        let locks = allocated + rising + leaving;
        let tail_bytes = self.tail_space.taken_bytes();
        let extents = self.ssd.as_ref().map_or(0, Ssd::extents);
        let known =
            self.blocks.ssd_blocks().count() as u64 + self.blocks.ssd_unreached().count() as u64;
        let strays = extents.saturating_sub(known);
        let unsealed = self.ssd.as_ref().map_or(0, Ssd::unsealed);
        let says = Held { pins, locks, quarantined, imms, shares, tail_bytes, strays, unsealed };
        let now_ms = context.now_ms();
        let slots = self.blocks.counts().slots;
        let tx = TxId { conductor_incarnation: 0, serial: now_ms };
        let share = Share { tx, side: Side::Prefill };
        let wanted = Allocate {
            share,
            namespace: Namespace([0x55; 16]),
            // Of no prompt, and never committed.
            keys: (1..=slots).map(|page| BlockKey(u128::from(page).to_le_bytes())).collect(),
            prompt_tokens: slots * content::BLOCK_TOKENS,
            lease_ms: 1,
            fetch_until_block: 0,
            has_remote_writer: false,
            is_ephemeral: true,
            leaves_ssd: false,
        };
        let has_room = self.blocks.allocate(now_ms, &wanted);
        let has_room = has_room.map(|_| ()).map_err(|error| error.to_string());
        self.blocks.abort(now_ms, share, AbortReason::Asked(String::new()));
        self.run_actions(context);
        context.see(Seen::AtRest { at: self.at, has_room, says });
    }

    /// Everything that it keeps a number of, for a run that looks whether that grows.
    pub fn kept(&self) -> BTreeMap<&'static str, usize> {
        let counts = self.blocks.counts();
        BTreeMap::from([
            ("legs", self.legs.len()),
            ("stops", self.stops.shares().count()),
            ("tails", self.tail_space.taken_bytes() as usize),
            ("writers", self.writers.count()),
            ("keeps", self.keeps.len()),
            ("copies", self.replication.copies()),
            ("questions", self.replication.questions()),
            ("clients", self.clients.count()),
            ("shares", counts.shares as usize),
            ("pins", counts.pins as usize),
            ("locks", (counts.allocated + counts.rising + counts.leaving) as usize),
            ("quarantined", counts.quarantined as usize),
            ("imms", counts.imms as usize),
            ("tombstones", counts.tombstones as usize),
            ("finished", counts.finished as usize),
            ("sinking", counts.sinking as usize),
            // Pools that stay for copies out of them alone.
            ("carries", self.carries.len() + self.pools.len() - self.open_pools.len()),
            ("disk jobs", self.ssd.as_ref().map_or(0, Ssd::jobs)),
        ])
    }
}
