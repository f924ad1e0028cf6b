//! The thread beside the disk: it takes jobs, drives the log, and reports. It starts again when the
//! disk or the index fails it, so that the node need not.
//!
//! Jobs come through a bounded queue that the node's thread never waits for; reports go through one
//! that this thread may wait for, since the other side always empties it.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, TryRecvError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use kvasir_blocks::{RiseError, SinkError, SsdBlock};
use kvasir_log::{
    AppendError, Counts, Disk, DiskError, ExtentBuf, Log, Options, Output, ReadError, ReadExtent,
    Record, RecoverError, Recovered, Span, recover,
};
use kvasir_proto::{BlockKey, Mark, Namespace, SlotIndex, SlotLayout, SlotRun};
use kvasir_transfer::fold;
use kvasir_transfer::memory::SharedMemory;
use kvasir_transfer::spin::Spin;
use tokio::sync::oneshot;

use super::open::{Opened, drop_index, open_disk, open_index};
use super::pace::{Pace, Reads};
use super::slots::Slots;
use crate::backlog::Backlog;
use crate::config::Ssd;

/// Jobs that wait for the thread; the node keeps what is more.
const JOBS_MAX: usize = 1_024;
/// How long it looks for jobs and ends after there was one last, giving its core away between looks.
const SPIN: Duration = Duration::from_micros(200);
/// How long it then sleeps on ends of operations before it looks for jobs.
const ENDS_WAIT: Duration = Duration::from_micros(500);
/// With nothing to do, how often it looks whether something can be tried again.
const IDLE_WAIT: Duration = Duration::from_millis(250);
/// How long after a failure everything is tried anew.
const RETRY_WAIT: Duration = Duration::from_secs(1);
/// A disk that answers nothing for so long while the log is recovered hangs.
const PATIENCE: Duration = Duration::from_secs(10);
const INDEX_FAILED: &str = "the key index failed";
/// How often counts are reported.
const COUNTS_EVERY: Duration = Duration::from_millis(250);

/// How the blocks in the slots look.
#[derive(Debug, Clone)]
pub(crate) struct Shape {
    pub layout: Arc<SlotLayout>,
    /// Names the layout in extents.
    pub hash: u64,
}

impl Shape {
    fn span(&self, slot: SlotIndex) -> Span {
        let length_bytes = self.layout.slot_bytes() as usize;
        Span { offset_bytes: slot.0 as usize * length_bytes, length_bytes }
    }

    /// A slot is one run, so that the checksum of this is that of all its bytes.
    fn is_one_run(&self) -> bool {
        let layout = &self.layout;
        let is_all =
            |run: &SlotRun| run.offset_bytes == 0 && run.length_bytes == layout.slot_bytes();
        layout.runs_per_page() == 1 && layout.layers() == 1 && layout.runs(0).iter().all(is_all)
    }
}

/// What the node's thread asks for.
#[derive(Debug)]
pub(crate) enum Job {
    Sink {
        sink: u64,
        slot: SlotIndex,
        block: SsdBlock,
        checksum: u64,
        shape: Shape,
    },
    Rewrite {
        sink: u64,
        key: BlockKey,
        mark: Option<Mark>,
    },
    Rise {
        rise: u64,
        slot: SlotIndex,
        key: BlockKey,
        shape: Shape,
    },
    Forget {
        key: BlockKey,
        follows_none: bool,
    },
    /// Answered by [`Report::Sunk`].
    Erase {
        sink: u64,
        key: BlockKey,
        namespace: Namespace,
    },
    /// Read a block for somebody who sends it elsewhere.
    Read {
        key: BlockKey,
        reply: oneshot::Sender<Result<ReadBlock, SinkError>>,
    },
}

/// A block as the log had it.
#[derive(Debug)]
#[cfg_attr(
    not(feature = "object-store"),
    expect(dead_code, reason = "read by the object store's task")
)]
pub(crate) struct ReadBlock {
    /// Of its runs.
    pub checksums: Vec<u64>,
    pub payload: Bytes,
}

/// What became of it.
#[derive(Debug)]
pub(crate) enum Report {
    /// The log is ready.
    Up {
        how: &'static str,
        live_bytes_max: u64,
        extent_bytes_max: u64,
        blocks: Vec<Recovered>,
        /// All of it could be read.
        is_whole: bool,
    },
    /// It is not, and why. Tried again by itself.
    Down {
        why: String,
    },
    /// With the disk's own words when it failed.
    Sunk {
        sink: u64,
        result: Result<(), SinkError>,
        why: Option<String>,
    },
    Risen {
        rise: u64,
        result: Result<u64, RiseError>,
        why: Option<String>,
    },
    Lost {
        key: BlockKey,
    },
    Counts(Counts, Reads),
}

/// The node's end. Dropping it ends the thread.
#[derive(Debug)]
pub(crate) struct SsdThread {
    /// Bounded by what the block core has under way, and by the blocks there are to forget.
    jobs: Backlog<Job>,
}

impl SsdThread {
    /// Starts the thread. `report` takes its reports, in their order, and may wait.
    ///
    /// # Errors
    /// When no thread can be started.
    pub(crate) fn start(
        config: Ssd,
        slots: Arc<SharedMemory>,
        log_id: u64,
        report: impl FnMut(Report) + Send + 'static,
    ) -> std::io::Result<Self> {
        let (jobs, receiver) = Backlog::new(JOBS_MAX);
        let (slots, report) = (Slots::new(slots), Box::new(report));
        let pace = Pace::default();
        let thread = Thread { config, slots, log_id, jobs: receiver, report, pace };
        std::thread::Builder::new().name("ssd".into()).spawn(move || thread.run())?;
        Ok(SsdThread { jobs })
    }

    /// Hands a job over without waiting.
    pub(crate) fn give(&mut self, job: Job) {
        self.jobs.give(job);
    }

    /// Hands over what there was no room for. Answers whether some still waits.
    pub(crate) fn flush(&mut self) -> bool {
        self.jobs.flush()
    }
}

struct Thread {
    config: Ssd,
    slots: Slots,
    log_id: u64,
    jobs: Receiver<Job>,
    report: Box<dyn FnMut(Report) + Send>,
    pace: Pace,
}

/// The node has ended.
struct Ended;

/// What a ticket of the log stands for.
enum Purpose {
    Sink(u64),
    Rewrite { sink: u64, mark: Option<Mark> },
    Rise { rise: u64, shape: Shape },
    Read(oneshot::Sender<Result<ReadBlock, SinkError>>),
}

impl Thread {
    fn run(mut self) {
        loop {
            let why = match self.begin() {
                Ok((log, disk)) => {
                    let mut serving = Serving::new(&mut self, log, disk);
                    match serving.serve() {
                        Ok(why) => why,
                        Err(Ended) => return,
                    }
                }
                Err(why) => why,
            };
            tracing::error!(reason = %why, "the store node cannot use the SSD; retrying");
            (self.report)(Report::Down { why });
            if self.refuse_for(RETRY_WAIT).is_err() {
                return;
            }
        }
    }

    /// Opens the disk and finds out what is on it.
    fn begin(&mut self) -> Result<(Log, Box<dyn Disk + Send>), String> {
        let began = Instant::now();
        let dir: PathBuf = self.config.dir.clone().unwrap_or_default();
        let Opened { mut disk, how } = open_disk(&self.config, &self.slots)?;
        let options = Options {
            new_log_id: self.log_id,
            segment_bytes: self.config.segment_bytes,
            patience: PATIENCE,
        };
        let mut recovered = recover(&mut *disk, open_index(&dir), &options);
        if let Err(RecoverError::Index(error)) = &recovered {
            tracing::warn!(%error, "the key index of the SSD failed; the store node discards it");
            drop_index(&dir);
            recovered = recover(&mut *disk, open_index(&dir), &options);
        }
        let found = recovered.map_err(|error| match error {
            RecoverError::Foreign => {
                format!("the file in {} is not a Kvasir SSD log; move it away", dir.display())
            }
            other => other.to_string(),
        })?;
        tracing::info!(
            dir = %dir.display(), disk_access = how, blocks = found.blocks.len(), is_new = found.is_new,
            scanned_segments = found.scanned_segments, recovery_ms = began.elapsed().as_millis() as u64,
            "the store node has opened the SSD"
        );
        if found.unreadable_segments > 0 {
            tracing::warn!(
                dir = %dir.display(), unreadable_segments = found.unreadable_segments,
                "some segments of the SSD cannot be read completely: some of their blocks are \
                 missing, and the segments stay unchanged until the next start"
            );
        }
        let extent_bytes_max = (found.log.extent_pages_max() * kvasir_log::PAGE_BYTES) as u64;
        let live_bytes_max = found.log.live_bytes_max();
        let blocks = found.blocks;
        let is_whole = found.unreadable_segments == 0;
        (self.report)(Report::Up { how, live_bytes_max, extent_bytes_max, blocks, is_whole });
        Ok((found.log, disk))
    }

    /// Refuses all jobs for a while.
    fn refuse_for(&mut self, time: Duration) -> Result<(), Ended> {
        let until = Instant::now() + time;
        loop {
            match self.jobs.recv_timeout(until.saturating_duration_since(Instant::now())) {
                Ok(job) => self.refuse(job, "the SSD is not ready"),
                Err(RecvTimeoutError::Timeout) => return Ok(()),
                Err(RecvTimeoutError::Disconnected) => return Err(Ended),
            }
        }
    }

    fn refuse(&mut self, job: Job, why: &str) {
        match job {
            Job::Sink { sink, .. } | Job::Rewrite { sink, .. } | Job::Erase { sink, .. } => {
                self.sunk_badly(sink, why);
            }
            Job::Rise { rise, .. } => self.risen_badly(rise, why),
            // What comes back instead is forgotten or kept then.
            Job::Forget { .. } => {}
            // Who asked may have given up.
            Job::Read { reply, .. } => drop(reply.send(Err(SinkError::Failed))),
        }
    }

    fn sunk_badly(&mut self, sink: u64, why: &str) {
        let (result, why) = (Err(SinkError::Failed), Some(why.to_owned()));
        (self.report)(Report::Sunk { sink, result, why });
    }

    fn risen_badly(&mut self, rise: u64, why: &str) {
        let (result, why) = (Err(RiseError::Failed), Some(why.to_owned()));
        (self.report)(Report::Risen { rise, result, why });
    }
}

/// The thread while the log is ready.
struct Serving<'a> {
    thread: &'a mut Thread,
    log: Log,
    disk: Box<dyn Disk + Send>,
    purposes: HashMap<u64, Purpose>,
    next_ticket: u64,
    under_way: usize,
    counted: Option<Instant>,
}

impl<'a> Serving<'a> {
    fn new(thread: &'a mut Thread, log: Log, disk: Box<dyn Disk + Send>) -> Self {
        let purposes = HashMap::new();
        Serving { thread, log, disk, purposes, next_ticket: 0, under_way: 0, counted: None }
    }

    /// Until the node ends, or the index fails (then why).
    fn serve(&mut self) -> Result<String, Ended> {
        let mut spin = Spin::new(SPIN);
        loop {
            let mut worked = self.take_jobs()?;
            self.submit();
            worked |= self.take_ends(Duration::ZERO);
            if !worked && !spin.wait() {
                worked = match self.under_way {
                    0 => self.wait_for_job()?,
                    _ => self.take_ends(ENDS_WAIT),
                };
            }
            if worked {
                spin.worked();
            }
            if let Some(why) = self.act()? {
                return Ok(why);
            }
            if self.counted.is_none_or(|counted| counted.elapsed() >= COUNTS_EVERY) {
                self.log.retry();
                self.counted = Some(Instant::now());
                let reads = self.thread.pace.reads(Instant::now());
                (self.thread.report)(Report::Counts(self.log.counts(), reads));
            }
        }
    }

    /// Begins what there is to begin. Answers whether there was anything.
    fn take_jobs(&mut self) -> Result<bool, Ended> {
        let mut worked = false;
        // Some, so that ends are not kept waiting.
        for _ in 0..64 {
            match self.thread.jobs.try_recv() {
                Ok(job) => self.begin(job),
                Err(TryRecvError::Empty) => break,
                Err(TryRecvError::Disconnected) => return Err(Ended),
            }
            // The disk works on this one while the next is copied.
            self.submit();
            worked = true;
        }
        Ok(worked)
    }

    /// Sleeps until there is a job, or for a while. Answers whether one was begun.
    fn wait_for_job(&mut self) -> Result<bool, Ended> {
        match self.thread.jobs.recv_timeout(IDLE_WAIT) {
            Ok(job) => self.begin(job),
            Err(RecvTimeoutError::Timeout) => return Ok(false),
            Err(RecvTimeoutError::Disconnected) => return Err(Ended),
        }
        Ok(true)
    }

    /// Takes what has ended. Answers whether anything had.
    fn take_ends(&mut self, wait: Duration) -> bool {
        if self.under_way == 0 {
            return false;
        }
        let done = self.disk.complete(wait);
        let any = !done.is_empty();
        for done in done {
            self.under_way -= 1;
            self.log.handle_done(done);
        }
        self.submit();
        any
    }

    fn begin(&mut self, job: Job) {
        match job {
            Job::Sink { sink, slot, block, checksum, shape } => {
                match self.extent(slot, block, checksum, &shape) {
                    Some(extent) => self.append(sink, extent),
                    None => {
                        let (result, why) = (Err(SinkError::Corrupt), None);
                        (self.thread.report)(Report::Sunk { sink, result, why });
                    }
                }
            }
            Job::Rewrite { sink, key, mark } => {
                let ticket = self.ticket(Purpose::Rewrite { sink, mark });
                self.log.read(ticket, key);
            }
            Job::Rise { rise, slot, key, shape } => {
                let span = shape.span(slot);
                let ticket = self.ticket(Purpose::Rise { rise, shape });
                self.thread.pace.asked(Instant::now());
                self.log.read_into(ticket, key, span);
            }
            Job::Forget { key, follows_none } => self.log.remove(key, follows_none),
            Job::Erase { sink, key, namespace } => {
                let ticket = self.ticket(Purpose::Sink(sink));
                self.log.erase(ticket, key, namespace);
            }
            Job::Read { key, reply } => {
                let ticket = self.ticket(Purpose::Read(reply));
                self.log.read(ticket, key);
            }
        }
    }

    /// What is to be written of a block. One with a single run stays in its slot: the log compares its checksum when it is
    /// written. Others are copied, and `None` when they have another checksum: what is written is what was
    /// checked.
    fn extent(
        &self,
        slot: SlotIndex,
        block: SsdBlock,
        checksum: u64,
        shape: &Shape,
    ) -> Option<ExtentBuf> {
        let layout = &shape.layout;
        let slot_bytes = layout.slot_bytes() as usize;
        let SsdBlock { key, namespace, parent, mark, .. } = block;
        let span = shape.span(slot);
        let record =
            |checksums| Record { key, namespace, parent, mark, layout: shape.hash, checksums };
        if shape.is_one_run() {
            return Some(ExtentBuf::placed(record(vec![checksum]), span, checksum));
        }
        let mut sums = vec![0; layout.runs_per_page()];
        let mut extent = ExtentBuf::new(record(sums.clone()), slot_bytes);
        let runs = (0..layout.layers()).flat_map(|layer| layout.runs(layer));
        for (run, of_run) in runs.zip(&mut sums) {
            let (start, length_bytes) = (run.offset_bytes as usize, run.length_bytes as usize);
            let target = &mut extent.payload_mut()[start..start + length_bytes];
            let run = Span { offset_bytes: span.offset_bytes + start, length_bytes };
            *of_run = self.thread.slots.copy(run, target);
        }
        let is_it = checksum == fold(&sums);
        extent.set_checksums(sums);
        is_it.then_some(extent)
    }

    fn append(&mut self, sink: u64, extent: ExtentBuf) {
        let ticket = self.ticket(Purpose::Sink(sink));
        self.log.append(ticket, extent);
    }

    fn ticket(&mut self, purpose: Purpose) -> u64 {
        self.next_ticket += 1;
        self.purposes.insert(self.next_ticket, purpose);
        self.next_ticket
    }

    fn submit(&mut self) {
        while self.under_way < self.disk.depth() {
            let Some(op) = self.log.poll_operation() else { return };
            self.disk.submit(op);
            self.under_way += 1;
        }
    }

    /// Acts on what came of things. Answers with why, when the log must be recovered anew.
    fn act(&mut self) -> Result<Option<String>, Ended> {
        while let Some(output) = self.log.poll_output() {
            match output {
                Output::Appended { ticket, result, .. } => {
                    if let Some(Purpose::Sink(sink)) = self.purposes.remove(&ticket) {
                        let (result, why) = match result {
                            Ok(()) => (Ok(()), None),
                            Err(AppendError::Disk(DiskError::Changed)) => {
                                (Err(SinkError::Corrupt), None)
                            }
                            // A matter of time, mostly.
                            Err(AppendError::Full) => {
                                let unread = self.log.unread_segments();
                                let why = || {
                                    format!(
                                        "there is no space: {unread} segments of the log cannot be \
                                         read, so their space cannot be reclaimed"
                                    )
                                };
                                (Err(SinkError::Failed), (unread > 0).then(why))
                            }
                            Err(error) => (Err(SinkError::Failed), Some(error.to_string())),
                        };
                        (self.thread.report)(Report::Sunk { sink, result, why });
                    }
                }
                Output::Placed { ticket, result, .. } => {
                    if let Some(Purpose::Rise { rise, shape }) = self.purposes.remove(&ticket) {
                        self.risen(rise, &shape, result);
                    }
                }
                Output::Read { ticket, result, .. } => match self.purposes.remove(&ticket) {
                    Some(Purpose::Rewrite { sink, mark }) => self.rewrite(sink, mark, result),
                    Some(Purpose::Read(reply)) => {
                        let read = result.map(|extent| ReadBlock {
                            payload: Bytes::copy_from_slice(extent.payload()),
                            checksums: extent.record.checksums,
                        });
                        let _ = reply.send(read.map_err(|error| sink_error(&error)));
                    }
                    Some(Purpose::Sink(_) | Purpose::Rise { .. }) | None => {}
                },
                Output::Lost { key } => (self.thread.report)(Report::Lost { key }),
                Output::IndexFailed(error) => {
                    self.give_up()?;
                    if let Some(dir) = &self.thread.config.dir {
                        drop_index(dir);
                    }
                    return Ok(Some(error.to_string()));
                }
            }
        }
        Ok(None)
    }

    fn risen(&mut self, rise: u64, shape: &Shape, result: Result<Record, ReadError>) {
        let bytes = result.is_ok().then(|| shape.layout.slot_bytes());
        self.thread.pace.came(bytes, Instant::now());
        let fits = |record: &Record| {
            record.layout == shape.hash && record.checksums.len() == shape.layout.runs_per_page()
        };
        let (result, why) = match result {
            Ok(record) if fits(&record) => (Ok(fold(&record.checksums)), None),
            Ok(_) => (Err(RiseError::Gone), Some(ReadError::OtherSize.to_string())),
            Err(error @ (ReadError::Missing | ReadError::Rotten | ReadError::OtherSize)) => {
                (Err(RiseError::Gone), Some(error.to_string()))
            }
            Err(error) => (Err(RiseError::Failed), Some(error.to_string())),
        };
        (self.thread.report)(Report::Risen { rise, result, why });
    }

    /// The same bytes as a new extent with another mark.
    fn rewrite(&mut self, sink: u64, mark: Option<Mark>, result: Result<ReadExtent, ReadError>) {
        match result {
            Ok(read) => {
                let record = Record { mark, ..read.record.clone() };
                let mut extent = ExtentBuf::new(record, read.payload().len());
                extent.payload_mut().copy_from_slice(read.payload());
                self.append(sink, extent);
            }
            Err(error) => {
                let result = Err(sink_error(&error));
                (self.thread.report)(Report::Sunk { sink, result, why: Some(error.to_string()) });
            }
        }
    }

    /// Nothing that was begun will be answered by the log any more. A slot is not let go of while the disk may still read
    /// or write it, however long that takes.
    fn give_up(&mut self) -> Result<(), Ended> {
        self.thread.pace.broke_off();
        while self.under_way > 0 {
            self.under_way -= self.disk.complete(ENDS_WAIT).len();
            match self.thread.jobs.try_recv() {
                Ok(job) => self.thread.refuse(job, INDEX_FAILED),
                Err(TryRecvError::Empty) => {}
                Err(TryRecvError::Disconnected) => return Err(Ended),
            }
        }
        for purpose in std::mem::take(&mut self.purposes).into_values() {
            match purpose {
                Purpose::Sink(sink) | Purpose::Rewrite { sink, .. } => {
                    self.thread.sunk_badly(sink, INDEX_FAILED);
                }
                Purpose::Rise { rise, .. } => {
                    self.thread.risen_badly(rise, INDEX_FAILED);
                }
                Purpose::Read(reply) => drop(reply.send(Err(SinkError::Failed))),
            }
        }
        Ok(())
    }
}

/// Why a block could not be had from the log for somewhere else.
fn sink_error(error: &ReadError) -> SinkError {
    match error {
        ReadError::Missing | ReadError::Rotten | ReadError::OtherSize => SinkError::Gone,
        _ => SinkError::Failed,
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::sync::mpsc::{Receiver, sync_channel};

    use kvasir_log::sim_disk::SimDisk;
    use kvasir_log::{DiskDone, DiskOp, IndexError, KeyIndex, Location};
    use kvasir_transfer::memory::Prefault;

    use super::*;

    const SLOT: u64 = 4096;
    const SEGMENT: u64 = 32 * 4096;

    /// Ends nothing before it is told to, and then badly.
    #[derive(Default)]
    struct HeldDisk {
        under_way: Vec<DiskOp>,
        lets_go: Arc<AtomicBool>,
    }

    impl Disk for HeldDisk {
        fn len_bytes(&self) -> u64 {
            8 * SEGMENT
        }

        fn depth(&self) -> usize {
            8
        }

        fn submit(&mut self, op: DiskOp) {
            self.under_way.push(op);
        }

        fn complete(&mut self, wait: Duration) -> Vec<DiskDone> {
            if !self.lets_go.load(Ordering::Acquire) {
                std::thread::sleep(wait);
                return Vec::new();
            }
            let end = |op: DiskOp| {
                let result = Err(DiskError::Short);
                DiskDone { id: op.id(), result, buffer: None, rest_sum: None }
            };
            self.under_way.drain(..).map(end).collect()
        }
    }

    /// Says of every key that it is there, until it fails.
    #[derive(Debug)]
    struct FailingIndex(Arc<AtomicBool>);

    impl FailingIndex {
        fn answer<T>(&self, answer: T) -> Result<T, IndexError> {
            match self.0.load(Ordering::Acquire) {
                true => Err(IndexError("it was told to".into())),
                false => Ok(answer),
            }
        }
    }

    impl KeyIndex for FailingIndex {
        fn get(&self, _: BlockKey) -> Result<Option<Location>, IndexError> {
            self.answer(Some(Location { segment: 0, first_page: 1, pages: 2, generation: 1 }))
        }

        fn insert(&mut self, _: BlockKey, _: Location) -> Result<Option<Location>, IndexError> {
            self.answer(None)
        }

        fn remove(&mut self, _: BlockKey) -> Result<Option<Location>, IndexError> {
            self.answer(None)
        }

        fn in_segment(&self, _: u32) -> Result<Vec<(BlockKey, Location)>, IndexError> {
            self.answer(Vec::new())
        }

        fn load(&mut self, _: &BTreeMap<BlockKey, Location>) -> Result<(), IndexError> {
            self.answer(())
        }
    }

    /// The next rise that has failed, if one does in time.
    fn risen(reports: &Receiver<Report>, wait: Duration) -> Option<u64> {
        loop {
            match reports.recv_timeout(wait).ok()? {
                Report::Risen { rise, result: Err(RiseError::Failed), .. } => return Some(rise),
                Report::Counts(..) => {}
                other => panic!("{other:?}"),
            }
        }
    }

    #[test]
    fn a_slot_is_let_go_of_when_the_disk_has_done_so_also_where_the_index_has_failed() {
        let (index_fails, lets_go) = (Arc::new(AtomicBool::new(false)), Arc::default());
        let mut disk = SimDisk::new(9 * SEGMENT as usize, 1);
        let options =
            Options { new_log_id: 1, segment_bytes: SEGMENT, patience: Duration::from_secs(1) };
        let index = Box::new(FailingIndex(Arc::clone(&index_fails)));
        let log = recover(&mut disk, index, &options).expect("a log").log;
        let slots = SharedMemory::create("slots", 8 * SLOT as usize, Prefault::No).expect("memory");
        let runs = vec![vec![SlotRun { offset_bytes: 0, length_bytes: SLOT }]];
        let layout = Arc::new(SlotLayout::new(1, SLOT, runs).expect("a layout"));
        let (jobs, receiver) = sync_channel(8);
        let (report, reports) = sync_channel(1_024);
        let disk = HeldDisk { lets_go: Arc::clone(&lets_go), ..HeldDisk::default() };
        let mut thread = Thread {
            config: Ssd::default(),
            slots: Slots::new(Arc::new(slots)),
            log_id: 1,
            jobs: receiver,
            report: Box::new(move |said| drop(report.send(said))),
            pace: Pace::default(),
        };
        let serves = std::thread::spawn(move || {
            Serving::new(&mut thread, log, Box::new(disk)).serve().is_ok()
        });
        let rise = |rise| {
            let shape = Shape { layout: Arc::clone(&layout), hash: 1 };
            let (slot, key) = (SlotIndex(rise as u32), BlockKey([rise as u8; 16]));
            jobs.send(Job::Rise { rise, slot, key, shape }).expect("it serves");
        };
        rise(1);
        rise(2);
        while !reports
            .try_iter()
            .any(|report| matches!(report, Report::Counts(counts, _) if counts.operations == 2))
        {
            std::thread::yield_now();
        }
        index_fails.store(true, Ordering::Release);
        // Some are still taken before it is seen that the index has failed.
        let mut last = 2;
        let refused = loop {
            last += 1;
            rise(last);
            if let Some(refused) = risen(&reports, Duration::from_millis(50)) {
                break refused;
            }
        };
        assert!(refused > 2, "{refused} is still with the disk");
        lets_go.store(true, Ordering::Release);
        let rest = (1..last).map_while(|_| risen(&reports, Duration::from_secs(20)));
        let mut rest: Vec<u64> = rest.collect();
        rest.sort_unstable();
        assert_eq!(rest, (1..=last).filter(|rise| *rise != refused).collect::<Vec<u64>>());
        assert!(serves.join().expect("no panic"), "the thread restarts the log");
    }
}
