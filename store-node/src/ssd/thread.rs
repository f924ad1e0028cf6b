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
    AppendError, Counts, Disk, ExtentBuf, Log, Options, Output, ReadError, ReadExtent, Record,
    RecoverError, Recovered, recover,
};
use kvasir_proto::{BlockKey, Mark, SlotIndex, SlotLayout};
use kvasir_transfer::{Checksum, SharedMemory, fold};
use tokio::sync::oneshot;

use super::open::{Opened, drop_index, open_disk, open_index};
use crate::backlog::Backlog;
use crate::config::Ssd;

/// Jobs that wait for the thread; the node keeps what is more.
const JOBS_MAX: usize = 1_024;
/// How long it looks for ends of operations before it looks for jobs.
const ENDS_WAIT: Duration = Duration::from_micros(500);
/// With nothing to do, how often it looks whether something can be tried again.
const IDLE_WAIT: Duration = Duration::from_millis(250);
/// How long after a failure everything is tried anew.
const RETRY_WAIT: Duration = Duration::from_secs(1);
/// A disk that answers nothing for so long while the log is recovered hangs.
const PATIENCE: Duration = Duration::from_secs(10);
/// How often counts are reported.
const COUNTS_EVERY: Duration = Duration::from_millis(250);

/// How the blocks in the slots look.
#[derive(Debug, Clone)]
pub struct Shape {
    pub layout: Arc<SlotLayout>,
    /// Names the layout in extents.
    pub hash: u64,
}

/// What the node's thread asks for.
#[derive(Debug)]
pub enum Job {
    Sink {
        sink: u64,
        slot: SlotIndex,
        block: SsdBlock,
        checksum: Option<u64>,
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
    },
    /// Read a block for somebody who sends it elsewhere.
    Read {
        key: BlockKey,
        reply: oneshot::Sender<Result<ReadBlock, SinkError>>,
    },
}

/// A block as the log had it.
#[derive(Debug)]
pub struct ReadBlock {
    /// Of its runs.
    pub checksums: Vec<u64>,
    pub payload: Bytes,
}

/// What became of it.
#[derive(Debug)]
pub enum Report {
    /// The log is ready.
    Up {
        how: &'static str,
        live_bytes_max: u64,
        extent_bytes_max: u64,
        blocks: Vec<Recovered>,
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
    Counts(Counts),
}

/// The node's end. Dropping it ends the thread.
#[derive(Debug)]
pub struct SsdThread {
    /// Bounded by what the block core has under way, and by the blocks there are to forget.
    jobs: Backlog<Job>,
}

impl SsdThread {
    /// Starts the thread. `report` takes its reports, in their order, and may wait.
    ///
    /// # Errors
    /// When no thread can be started.
    pub fn start(
        config: Ssd,
        slots: Arc<SharedMemory>,
        log_id: u64,
        report: impl FnMut(Report) + Send + 'static,
    ) -> std::io::Result<Self> {
        let (jobs, receiver) = Backlog::new(JOBS_MAX);
        let thread = Thread { config, slots, log_id, jobs: receiver, report: Box::new(report) };
        std::thread::Builder::new().name("ssd".into()).spawn(move || thread.run())?;
        Ok(SsdThread { jobs })
    }

    /// Hands a job over without waiting.
    pub fn give(&mut self, job: Job) {
        self.jobs.give(job);
    }

    /// Hands over what there was no room for. Answers whether some still waits.
    pub fn flush(&mut self) -> bool {
        self.jobs.flush()
    }
}

struct Thread {
    config: Ssd,
    slots: Arc<SharedMemory>,
    log_id: u64,
    jobs: Receiver<Job>,
    report: Box<dyn FnMut(Report) + Send>,
}

/// The node has ended.
struct Ended;

/// What a ticket of the log stands for.
enum Purpose {
    Sink(u64),
    Rewrite { sink: u64, mark: Option<Mark> },
    Rise { rise: u64, slot: SlotIndex, shape: Shape },
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
            tracing::error!(%why, "the SSD cannot be used; it is tried again");
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
        let Opened { mut disk, how } = open_disk(&self.config)?;
        let options = Options {
            new_log_id: self.log_id,
            segment_bytes: self.config.segment_bytes,
            patience: PATIENCE,
        };
        let mut recovered = recover(&mut *disk, open_index(&dir), &options);
        if let Err(RecoverError::Index(error)) = &recovered {
            tracing::warn!(%error, "the key index is thrown away");
            drop_index(&dir);
            recovered = recover(&mut *disk, open_index(&dir), &options);
        }
        let found = recovered.map_err(|error| match error {
            RecoverError::Foreign => {
                format!("the file in {} is no log of this program; move it away", dir.display())
            }
            other => other.to_string(),
        })?;
        tracing::info!(
            dir = %dir.display(), how, blocks = found.blocks.len(), is_new = found.is_new,
            scanned_segments = found.scanned_segments, ms = began.elapsed().as_millis() as u64,
            "the SSD is ready"
        );
        let extent_bytes_max = (found.log.extent_pages_max() * kvasir_log::PAGE_BYTES) as u64;
        let live_bytes_max = found.log.live_bytes_max();
        let blocks = found.blocks;
        (self.report)(Report::Up { how, live_bytes_max, extent_bytes_max, blocks });
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
            Job::Sink { sink, .. } | Job::Rewrite { sink, .. } => self.sunk_badly(sink, why),
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
        loop {
            self.take_jobs()?;
            self.submit();
            if self.under_way > 0 {
                for done in self.disk.complete(ENDS_WAIT) {
                    self.under_way -= 1;
                    self.log.handle_done(done);
                }
                self.submit();
            }
            if let Some(why) = self.act() {
                return Ok(why);
            }
            if self.counted.is_none_or(|counted| counted.elapsed() >= COUNTS_EVERY) {
                self.log.retry();
                self.counted = Some(Instant::now());
                (self.thread.report)(Report::Counts(self.log.counts()));
            }
        }
    }

    fn take_jobs(&mut self) -> Result<(), Ended> {
        let mut next = match self.under_way {
            0 => match self.thread.jobs.recv_timeout(IDLE_WAIT) {
                Ok(job) => Some(job),
                Err(RecvTimeoutError::Timeout) => return Ok(()),
                Err(RecvTimeoutError::Disconnected) => return Err(Ended),
            },
            _ => None,
        };
        // Some, so that ends are not kept waiting.
        for _ in 0..64 {
            let job = match next.take() {
                Some(job) => job,
                None => match self.thread.jobs.try_recv() {
                    Ok(job) => job,
                    Err(TryRecvError::Empty) => return Ok(()),
                    Err(TryRecvError::Disconnected) => return Err(Ended),
                },
            };
            self.begin(job);
            // The disk works on this one while the next is copied.
            self.submit();
        }
        Ok(())
    }

    fn begin(&mut self, job: Job) {
        match job {
            Job::Sink { sink, slot, block, checksum, shape } => {
                match self.copy_out(slot, block, checksum, &shape) {
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
                let ticket = self.ticket(Purpose::Rise { rise, slot, shape });
                self.log.read(ticket, key);
            }
            Job::Forget { key } => self.log.remove(key),
            Job::Read { key, reply } => {
                let ticket = self.ticket(Purpose::Read(reply));
                self.log.read(ticket, key);
            }
        }
    }

    /// Copies a block out of its slot; `None` when it has another checksum. What is written
    /// to the SSD is what was checked.
    fn copy_out(
        &self,
        slot: SlotIndex,
        block: SsdBlock,
        checksum: Option<u64>,
        shape: &Shape,
    ) -> Option<ExtentBuf> {
        let layout = &shape.layout;
        let slot_bytes = layout.slot_bytes() as usize;
        let SsdBlock { key, namespace, parent, mark, .. } = block;
        let mut sums = vec![0; layout.runs_per_page()];
        let record =
            Record { key, namespace, parent, mark, layout: shape.hash, checksums: sums.clone() };
        let mut extent = ExtentBuf::new(record, slot_bytes);
        let slot_start = slot.0 as usize * slot_bytes;
        let mut sum = Checksum::new();
        let runs = (0..layout.layers()).flat_map(|layer| layout.runs(layer));
        for (run, of_run) in runs.zip(&mut sums) {
            let (start, bytes) = (run.offset_bytes as usize, run.length_bytes as usize);
            let target = &mut extent.payload_mut()[start..start + bytes];
            sum.reset();
            let copied = self.slots().copy_to_summed(slot_start + start, target, &mut sum);
            copied.expect("slots of a checked layout lie in the arena");
            *of_run = sum.sum();
        }
        let is_it = checksum == Some(fold(&sums));
        extent.set_checksums(sums);
        is_it.then_some(extent)
    }

    fn append(&mut self, sink: u64, extent: ExtentBuf) {
        let ticket = self.ticket(Purpose::Sink(sink));
        if let Err(error) = self.log.append(ticket, extent) {
            self.purposes.remove(&ticket);
            // A full log is a matter of time: cleaning is under way.
            let why = match error {
                AppendError::Full => None,
                other => Some(other.to_string()),
            };
            (self.thread.report)(Report::Sunk { sink, result: Err(SinkError::Failed), why });
        }
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
    fn act(&mut self) -> Option<String> {
        while let Some(output) = self.log.poll_output() {
            match output {
                Output::Appended { ticket, result, .. } => {
                    if let Some(Purpose::Sink(sink)) = self.purposes.remove(&ticket) {
                        let why = result.err().map(|error| error.to_string());
                        let result = result.map_err(|_| SinkError::Failed);
                        (self.thread.report)(Report::Sunk { sink, result, why });
                    }
                }
                Output::Read { ticket, result, .. } => match self.purposes.remove(&ticket) {
                    Some(Purpose::Rise { rise, slot, shape }) => {
                        self.risen(rise, slot, &shape, result);
                    }
                    Some(Purpose::Rewrite { sink, mark }) => self.rewrite(sink, mark, result),
                    Some(Purpose::Read(reply)) => {
                        let read = result.map(|extent| ReadBlock {
                            payload: Bytes::copy_from_slice(extent.payload()),
                            checksums: extent.record.checksums,
                        });
                        let _ = reply.send(read.map_err(|error| sink_error(&error)));
                    }
                    Some(Purpose::Sink(_)) | None => {}
                },
                Output::Lost { key } => (self.thread.report)(Report::Lost { key }),
                Output::IndexFailed(error) => {
                    self.give_up();
                    if let Some(dir) = &self.thread.config.dir {
                        drop_index(dir);
                    }
                    return Some(error.to_string());
                }
            }
        }
        None
    }

    fn risen(
        &mut self,
        rise: u64,
        slot: SlotIndex,
        shape: &Shape,
        result: Result<ReadExtent, ReadError>,
    ) {
        let (result, why) = match result {
            Ok(extent) => {
                let slot_bytes = shape.layout.slot_bytes() as usize;
                let fits = extent.record.layout == shape.hash
                    && extent.payload().len() == slot_bytes
                    && extent.record.checksums.len() == shape.layout.runs_per_page();
                if fits {
                    let at = slot.0 as usize * slot_bytes;
                    let copied = self.slots().copy_from(at, extent.payload());
                    copied.expect("slots of a checked layout lie in the arena");
                    (Ok(fold(&extent.record.checksums)), None)
                } else {
                    (Err(RiseError::Gone), Some("the extent has another layout".to_owned()))
                }
            }
            Err(error @ (ReadError::Missing | ReadError::Rotten)) => {
                (Err(RiseError::Gone), Some(error.to_string()))
            }
            Err(error) => (Err(RiseError::Failed), Some(error.to_string())),
        };
        (self.thread.report)(Report::Risen { rise, result, why });
    }

    fn slots(&self) -> &SharedMemory {
        &self.thread.slots
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

    /// Nothing that was begun will be answered by the log any more.
    fn give_up(&mut self) {
        for purpose in std::mem::take(&mut self.purposes).into_values() {
            match purpose {
                Purpose::Sink(sink) | Purpose::Rewrite { sink, .. } => {
                    self.thread.sunk_badly(sink, "the key index has failed");
                }
                Purpose::Rise { rise, .. } => {
                    self.thread.risen_badly(rise, "the key index has failed");
                }
                Purpose::Read(reply) => drop(reply.send(Err(SinkError::Failed))),
            }
        }
    }
}

/// Why a block could not be had from the log for somewhere else.
fn sink_error(error: &ReadError) -> SinkError {
    match error {
        ReadError::Missing | ReadError::Rotten => SinkError::Gone,
        _ => SinkError::Failed,
    }
}
