//! The thread beside the disk, as `store-node/src/ssd/thread.rs` is: jobs become operations of the shipped
//! log on a simulated disk, and their ends reports. Here it does a job some time after it was given, as a
//! thread would.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use kvasir_blocks::{AbortReason, Allocate, RiseError, SinkError, SsdBlock, SsdSize};
use kvasir_log::sim_disk::SimDisk;
use kvasir_log::{
    AppendError, Disk, DiskError, ExtentBuf, Log, Memory, MemoryIndex, Options, Output, PAGE_BYTES,
    ReadError, ReadExtent, Record, Recovered, Span, extent_pages, recover,
};
use kvasir_proto::{BlockKey, Class, Mark, Namespace, Share, Side, SlotIndex, TxId};
use kvasir_transfer::memory::SharedMemory;

use super::Running;
use crate::content::{self, LAYERS, SLOT_BYTES};
use crate::context::{Context, Event};
use crate::random::Random;
use crate::seen::{Reader, Seen};

pub(crate) const LAYOUT_HASH: u64 = 7;
/// More blocks than a node has slots, and still so few that it is cleaned.
const SEGMENT_PAGES: usize = 16;
const SEGMENTS: usize = 9;
pub(crate) const DISK_BYTES: usize = (2 + SEGMENTS * SEGMENT_PAGES) * PAGE_BYTES;

/// A page of it, or all of a segment.
pub(crate) fn a_part(random: &mut Random) -> (usize, usize) {
    let segment = 2 + random.below(SEGMENTS) * SEGMENT_PAGES;
    let (first, pages) = match random.percent(60) {
        true => (segment, SEGMENT_PAGES),
        false => (segment + random.below(SEGMENT_PAGES), 1),
    };
    (first * PAGE_BYTES, (first + pages) * PAGE_BYTES)
}

/// What lies there: pages with a block's bytes, and which block. Found by the bytes alone.
pub(crate) fn on_disk(disk: &SimDisk, context: &Context) -> Vec<(usize, BlockKey)> {
    let pages = 0..DISK_BYTES / PAGE_BYTES;
    let found = pages.filter_map(|page| {
        let bytes = disk.bytes(page * PAGE_BYTES, SLOT_BYTES);
        Some((page, context.truth.block_of(&bytes)?))
    });
    found.collect()
}

pub(crate) fn extent_bytes() -> u64 {
    (extent_pages(LAYERS, SLOT_BYTES) * PAGE_BYTES) as u64
}

#[derive(Debug)]
enum Job {
    Sink { sink: u64, slot: SlotIndex, block: SsdBlock, checksum: u64 },
    Rewrite { sink: u64, key: BlockKey, mark: Option<Mark> },
    Rise { rise: u64, slot: SlotIndex, key: BlockKey },
    Forget { key: BlockKey, follows_none: bool },
    Erase { sink: u64, key: BlockKey, namespace: Namespace },
}

#[derive(Debug)]
enum Purpose {
    Sink(u64),
    Rewrite { sink: u64, mark: Option<Mark>, key: BlockKey },
    Rise { rise: u64, key: BlockKey },
}

/// The slots of a node, as its disk reads and writes them.
#[derive(Debug)]
struct Slots(Arc<SharedMemory>);

impl Memory for Slots {
    fn read(&self, span: Span) -> Vec<u8> {
        let mut bytes = vec![0; span.length_bytes];
        self.0.copy_to(span.offset_bytes, &mut bytes).expect("slots lie in the memory");
        bytes
    }

    fn write(&self, span: Span, bytes: &[u8]) {
        self.0.copy_from(span.offset_bytes, bytes).expect("slots lie in the memory");
    }
}

fn span_of(slot: SlotIndex) -> Span {
    Span { offset_bytes: slot.0 as usize * SLOT_BYTES, length_bytes: SLOT_BYTES }
}

/// A disk with a log on it, or one that cannot be used now.
#[derive(Debug)]
pub struct Ssd {
    disk: SimDisk,
    log: Option<Log>,
    jobs: VecDeque<Job>,
    purposes: BTreeMap<u64, Purpose>,
    next_ticket: u64,
    under_way: usize,
}

impl Ssd {
    pub fn into_disk(self) -> SimDisk {
        self.disk
    }

    pub fn disk_mut(&mut self) -> &mut SimDisk {
        &mut self.disk
    }

    pub fn is_up(&self) -> bool {
        self.log.is_some()
    }

    /// Extents that can be read.
    pub fn extents(&self) -> u64 {
        let counts = self.log.as_ref().map(Log::counts).unwrap_or_default();
        (counts.live_bytes - counts.buried_bytes) / extent_bytes()
    }

    /// Full segments without a footer, when nothing is under way: they would never be cleaned.
    pub fn unsealed(&self) -> u64 {
        let log = self.log.as_ref().filter(|log| log.is_idle());
        log.map_or(0, |log| log.counts().unsealed)
    }

    /// Extents that were written again so that their segment is free.
    pub fn moved(&self) -> u64 {
        self.log.as_ref().map_or(0, |log| log.counts().moved_total)
    }

    /// Everything that it has not answered.
    pub fn jobs(&self) -> usize {
        self.jobs.len() + self.purposes.len()
    }
}

/// Names the share by which a kept block is asked for.
fn asking(key: BlockKey) -> Share {
    let serial = key.0.iter().fold(0, |serial: u64, byte| serial.rotate_left(8) ^ u64::from(*byte));
    let tx = TxId { conductor_incarnation: 0, serial };
    Share { tx, side: Side::Source }
}

impl Running {
    /// Somebody wants a block and those before it, as a fetch does.
    pub fn ask_for(&mut self, context: &mut Context, key: BlockKey) {
        let mut keys = context.truth.chain(key);
        keys.reverse();
        let Some(block) = context.truth.blocks.get(&key) else { return };
        let wanted = Allocate {
            share: asking(key),
            namespace: block.namespace,
            prompt_tokens: keys.len() as u32 * content::BLOCK_TOKENS,
            keys,
            lease_ms: 1_000,
            fetch_until_block: 0,
            has_remote_writer: false,
            is_ephemeral: false,
            leaves_ssd: false,
        };
        // Whatever it answers, the block is there afterwards or not.
        let _ = self.blocks.allocate(context.now_ms(), &wanted);
        self.run_actions(context);
    }

    /// Shows what has come of that.
    pub fn show_asked_for(&mut self, context: &mut Context, key: BlockKey) {
        let block = self.blocks.blocks().find(|block| block.key == key).map(|block| block.slot);
        let bytes = block.map(|slot| self.read_slot(slot));
        context.covers("a kept block is asked for");
        context.see(Seen::AskedFor { at: self.at, key, bytes });
        let (now_ms, reason) = (context.now_ms(), AbortReason::Asked(String::new()));
        self.blocks.abort(now_ms, asking(key), reason);
        self.run_actions(context);
    }

    /// Finds out what is on the disk. A disk that cannot be used is tried again at a later tick.
    pub(super) fn open_disk(&mut self, context: &mut Context, mut disk: SimDisk, unix_ms: u64) {
        disk.set_now(Duration::from_micros(context.now_us));
        disk.set_memory(Box::new(Slots(Arc::clone(self.memory()))));
        let options = Options {
            new_log_id: context.chance("log", self.at.node as u64, self.at.life.into()).draw(),
            segment_bytes: (SEGMENT_PAGES * PAGE_BYTES) as u64,
            patience: Duration::from_millis(50),
        };
        let recovered = recover(&mut disk, Box::new(MemoryIndex::default()), &options);
        if recovered.is_err() {
            disk.give_up();
        }
        // It takes no time here, however slow the disk is.
        disk.turn_back_to(Duration::from_micros(context.now_us));
        let mut ssd = Ssd {
            disk,
            log: None,
            jobs: VecDeque::new(),
            purposes: BTreeMap::new(),
            next_ticket: 0,
            under_way: 0,
        };
        if let Ok(found) = recovered {
            let bytes_max = found.log.live_bytes_max();
            let context_bytes_max = bytes_max / 2;
            let tenant_bytes_max = context_bytes_max * 3 / 4;
            let is_partial = found.unreadable_segments > 0;
            ssd.log = Some(found.log);
            let blocks: Vec<SsdBlock> = found.blocks.into_iter().map(block).collect();
            let read = blocks.iter().map(|block| block.key).collect();
            let size = SsdSize { bytes_max, context_bytes_max, tenant_bytes_max };
            match is_partial {
                true => self.blocks.ssd_ready_in_part(size, blocks, unix_ms),
                false => self.blocks.ssd_ready(size, blocks),
            }
            self.blocks.expire(unix_ms);
            let on_ssd = self.blocks.ssd_blocks().map(|block| block.key).collect();
            let disk_lies = self.disk_lies(context);
            let contexts = self.contexts(unix_ms);
            let at = self.at;
            let unreached: BTreeSet<BlockKey> = self.blocks.ssd_unreached().collect();
            if !unreached.is_empty() {
                context.covers("what is kept follows what cannot be read");
            }
            context.see(Seen::Started {
                at,
                on_ssd,
                contexts,
                unix_ms,
                disk_lies,
                is_partial,
                read,
                unreached,
            });
            if is_partial {
                context.covers("a node starts without all of its disk");
            }
        }
        self.ssd = Some(ssd);
    }

    /// Opens it again when it could not be used; otherwise has the log try again what failed.
    pub(super) fn tick_disk(&mut self, context: &mut Context, unix_ms: u64) {
        let Some(ssd) = &mut self.ssd else { return };
        if let Some(log) = &mut ssd.log {
            log.retry();
            self.blocks.expire(unix_ms);
        } else if ssd.jobs.is_empty() {
            let mut disk = self.ssd.take().expect("it was there above").into_disk();
            disk.give_up();
            context.covers("a disk is opened again");
            self.open_disk(context, disk, unix_ms);
        }
        self.work_on_disk(context);
    }

    // ---- jobs ----

    pub(super) fn sink(
        &mut self,
        context: &mut Context,
        sink: u64,
        slot: SlotIndex,
        block: SsdBlock,
        checksum: u64,
    ) {
        let slots = vec![slot.0];
        context.see(Seen::ReadBegan { at: self.at, reader: Reader::Sink(sink), slots });
        self.give_job(context, Job::Sink { sink, slot, block, checksum });
    }

    pub(super) fn rewrite(
        &mut self,
        context: &mut Context,
        sink: u64,
        key: BlockKey,
        mark: Option<Mark>,
    ) {
        self.give_job(context, Job::Rewrite { sink, key, mark });
    }

    pub(super) fn rise(
        &mut self,
        context: &mut Context,
        rise: u64,
        slot: SlotIndex,
        key: BlockKey,
    ) {
        self.give_job(context, Job::Rise { rise, slot, key });
    }

    pub(super) fn forget(&mut self, context: &mut Context, key: BlockKey, follows_none: bool) {
        self.give_job(context, Job::Forget { key, follows_none });
    }

    pub(super) fn erase(
        &mut self,
        context: &mut Context,
        sink: u64,
        key: BlockKey,
        namespace: Namespace,
    ) {
        self.give_job(context, Job::Erase { sink, key, namespace });
    }

    fn give_job(&mut self, context: &mut Context, job: Job) {
        let Some(ssd) = &mut self.ssd else { return };
        ssd.jobs.push_back(job);
        if !std::mem::replace(&mut self.job_waits, true) {
            let us = context.chance("disk job", self.at.node as u64, 0).between(2, 60);
            context.after(us, Event::Job { at: self.at });
        }
    }

    /// The thread looks into its queue.
    pub fn take_jobs(&mut self, context: &mut Context) {
        self.job_waits = false;
        while let Some(job) = self.ssd.as_mut().and_then(|ssd| ssd.jobs.pop_front()) {
            self.begin_job(context, job);
        }
        self.work_on_disk(context);
        self.run_actions(context);
    }

    fn begin_job(&mut self, context: &mut Context, job: Job) {
        let is_up = self.ssd.as_ref().is_some_and(Ssd::is_up);
        match job {
            Job::Sink { sink, slot, block, checksum } => {
                let checksums = self.run_checksums(slot);
                let intact = checksum == kvasir_transfer::fold(&checksums);
                if !is_up || !intact {
                    let error = if is_up { SinkError::Corrupt } else { SinkError::Failed };
                    return self.sunk(context, sink, Err(error));
                }
                let SsdBlock { key, namespace, parent, mark, layout, .. } = block;
                let record = Record { key, namespace, parent, mark, layout, checksums };
                let sum = kvasir_transfer::checksum(&self.raw(slot));
                self.append(sink, ExtentBuf::placed(record, span_of(slot), sum));
            }
            Job::Rewrite { sink, key, mark } if is_up => {
                self.read(Purpose::Rewrite { sink, mark, key }, key);
            }
            Job::Rewrite { sink, .. } => self.sunk(context, sink, Err(SinkError::Failed)),
            Job::Rise { rise, slot, key } if is_up => {
                let ticket = self.ticket(Purpose::Rise { rise, key });
                if let Some(log) = self.ssd.as_mut().and_then(|ssd| ssd.log.as_mut()) {
                    log.read_into(ticket, key, span_of(slot));
                }
            }
            Job::Rise { rise, .. } => self.risen(context, rise, Err(RiseError::Failed)),
            Job::Forget { key, follows_none } => {
                if let Some(log) = self.ssd.as_mut().and_then(|ssd| ssd.log.as_mut()) {
                    log.remove(key, follows_none);
                }
            }
            Job::Erase { sink, key, namespace } if is_up => {
                let ticket = self.ticket(Purpose::Sink(sink));
                if let Some(log) = self.ssd.as_mut().and_then(|ssd| ssd.log.as_mut()) {
                    log.erase(ticket, key, namespace);
                }
            }
            Job::Erase { sink, .. } => self.sunk(context, sink, Err(SinkError::Failed)),
        }
    }

    fn append(&mut self, sink: u64, extent: ExtentBuf) {
        let ticket = self.ticket(Purpose::Sink(sink));
        if let Some(log) = self.ssd.as_mut().and_then(|ssd| ssd.log.as_mut()) {
            log.append(ticket, extent);
        }
    }

    /// Nothing reads its slot any more.
    fn sunk(&mut self, context: &mut Context, sink: u64, result: Result<(), SinkError>) {
        context.see(Seen::ReadEnded { at: self.at, reader: Reader::Sink(sink) });
        self.blocks.sunk(context.now_ms(), sink, result);
    }

    fn ticket(&mut self, purpose: Purpose) -> u64 {
        let Some(ssd) = &mut self.ssd else { return 0 };
        ssd.next_ticket += 1;
        ssd.purposes.insert(ssd.next_ticket, purpose);
        ssd.next_ticket
    }

    fn read(&mut self, purpose: Purpose, key: BlockKey) {
        let ticket = self.ticket(purpose);
        if let Some(log) = self.ssd.as_mut().and_then(|ssd| ssd.log.as_mut()) {
            log.read(ticket, key);
        }
    }

    // ---- ends ----

    /// An operation of the disk may have ended.
    pub fn disk_moves(&mut self, context: &mut Context) {
        self.disk_at_us = u64::MAX;
        self.work_on_disk(context);
        self.run_actions(context);
    }

    fn work_on_disk(&mut self, context: &mut Context) {
        let now = Duration::from_micros(context.now_us);
        loop {
            let Some(ssd) = &mut self.ssd else { return };
            let Some(log) = &mut ssd.log else { return };
            ssd.disk.set_now(now);
            while ssd.under_way < ssd.disk.depth() {
                let Some(op) = log.poll_operation() else { break };
                ssd.disk.submit(op);
                ssd.under_way += 1;
            }
            let due = ssd.disk.next_end().is_some_and(|end| end <= now);
            let done = if due { ssd.disk.complete(Duration::ZERO) } else { Vec::new() };
            ssd.under_way -= done.len();
            let ended = !done.is_empty();
            for done in done {
                log.handle_done(done);
            }
            let acted = self.act(context);
            if !ended && !acted {
                break;
            }
        }
        let next = self.ssd.as_ref().and_then(|ssd| ssd.disk.next_end());
        if let Some(end) = next {
            // Whole microseconds, and never before its end.
            let at_us = end.as_micros() as u64 + 1;
            if at_us < self.disk_at_us {
                self.disk_at_us = at_us;
                context.at(at_us.max(context.now_us + 1), Event::Disk { at: self.at });
            }
        }
    }

    fn act(&mut self, context: &mut Context) -> bool {
        let mut acted = false;
        loop {
            let Some(ssd) = &mut self.ssd else { return acted };
            let Some(output) = ssd.log.as_mut().and_then(Log::poll_output) else { return acted };
            acted = true;
            match output {
                Output::Appended { ticket, result, .. } => {
                    if let Some(Purpose::Sink(sink)) = ssd.purposes.remove(&ticket) {
                        let result = result.map_err(|error| match error {
                            AppendError::Disk(DiskError::Changed) => SinkError::Corrupt,
                            _ => SinkError::Failed,
                        });
                        if result == Err(SinkError::Corrupt) {
                            context.covers("a slot is found rotten while it is written");
                        }
                        self.sunk(context, sink, result);
                    }
                }
                Output::Placed { ticket, result, .. } => {
                    if let Some(Purpose::Rise { rise, key }) = ssd.purposes.remove(&ticket) {
                        self.read_ended(context, rise, key, result);
                    }
                }
                Output::Read { ticket, result, .. } => {
                    if let Some(Purpose::Rewrite { sink, mark, key }) = ssd.purposes.remove(&ticket)
                    {
                        self.rewrite_read(context, sink, (mark, key), result);
                    }
                }
                Output::Lost { key } => {
                    context.covers("an extent is found rotten by the log");
                    self.gone(context, key);
                    self.blocks.ssd_lost(key);
                }
                Output::IndexFailed(error) => panic!("an index in memory has failed: {error}"),
            }
        }
    }

    fn read_ended(
        &mut self,
        context: &mut Context,
        rise: u64,
        key: BlockKey,
        result: Result<Record, ReadError>,
    ) {
        let result = match result {
            Ok(record) => Ok(kvasir_transfer::fold(&record.checksums)),
            Err(ReadError::Missing | ReadError::Rotten | ReadError::OtherSize) => {
                Err(RiseError::Gone)
            }
            Err(ReadError::Disk(_) | ReadError::Index(_)) => Err(RiseError::Failed),
        };
        if result == Err(RiseError::Gone) {
            context.covers("a block cannot be read");
            self.gone(context, key);
        }
        self.risen(context, rise, result);
    }

    /// What was written there cannot be read any more.
    fn gone(&self, context: &mut Context, key: BlockKey) {
        let disk_lies = self.disk_lies(context);
        context.see(Seen::DiskGone { node: self.at.node, key, disk_lies });
    }

    fn disk_lies(&self, context: &Context) -> bool {
        context.now_us < self.disk_lies_until_us
    }

    fn risen(&mut self, context: &mut Context, rise: u64, result: Result<u64, RiseError>) {
        context.see(Seen::RiseOver { at: self.at, rise });
        self.blocks.risen(context.now_ms(), rise, result);
    }

    /// The same bytes as a new extent with another mark.
    fn rewrite_read(
        &mut self,
        context: &mut Context,
        sink: u64,
        (mark, key): (Option<Mark>, BlockKey),
        result: Result<ReadExtent, ReadError>,
    ) {
        match result {
            Ok(read) => {
                let record = Record { mark, ..read.record.clone() };
                let mut extent = ExtentBuf::new(record, read.payload().len());
                extent.payload_mut().copy_from_slice(read.payload());
                self.append(sink, extent);
            }
            Err(error) => {
                let gone = matches!(error, ReadError::Missing | ReadError::Rotten);
                if gone {
                    self.gone(context, key);
                }
                let error = if gone { SinkError::Gone } else { SinkError::Failed };
                self.blocks.sunk(context.now_ms(), sink, Err(error));
            }
        }
    }
}

fn block(found: Recovered) -> SsdBlock {
    let Recovered { key, namespace, parent, mark, layout, bytes } = found;
    SsdBlock { key, namespace, parent, class: Class::Normal, mark, layout, bytes }
}
