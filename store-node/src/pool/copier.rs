//! The thread that copies between pools and slots. It decides nothing: the block core says what to copy, and hears
//! what became of it.
//!
//! Jobs come through a bounded queue that the node's thread never waits for. Some are begun before any is waited for, so
//! that memory with latency is kept busy. What goes into a slot is hashed in the pass that copies it, or, where a device
//! has copied it, when it is there; what leaves one is hashed first, so that rotten bytes reach no page.
//!
//! Layers of what is being computed go before whole pages, and between two small batches of those: somebody waits for them
//! while the next layer is computed.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::sync::mpsc::Receiver;

use kvasir_blocks::{RiseError, WritePageError};
use kvasir_proto::{SlotIndex, SlotLayout, SlotRun};
use kvasir_transfer::fold;

use super::Pool;
use super::memory::CopyFault;
use crate::backlog::Backlog;
use crate::node::arena::Arena;

/// Jobs that wait for the thread; the node keeps what is more.
const JOBS_MAX: usize = 256;
/// Copies of layers that are begun before they are waited for, and copies of whole pages.
const LAYERS_BATCH: usize = 32;
const PAGES_BATCH: usize = 8;
/// Whole pages that are begun before layers are looked for again: at 10 GB/s they take less than a millisecond.
const PAGES_BATCH_BYTES: u64 = 8 << 20;

/// One page and one slot.
#[derive(Debug)]
pub(crate) struct Copy {
    pub pool: Arc<Pool>,
    pub page: u32,
    pub slot: SlotIndex,
    pub layout: Arc<SlotLayout>,
    pub way: Way,
}

/// Which of them is copied.
#[derive(Debug)]
pub(crate) enum Way {
    /// The page, for this rise.
    IntoSlot { rise: u64 },
    /// Layers of the page, for this copy.
    Layers { copy: u64, layers: Range<u16> },
    /// The slot, for this copy, if it has this checksum. None is given where nobody has one.
    IntoPage { copy: u64, checksum: Option<u64> },
}

#[derive(Debug)]
enum Job {
    Copy(Copy),
    /// Nobody needs it any more: to let memory go takes long.
    LetGo(Arc<Pool>),
}

/// What became of a copy.
#[derive(Debug)]
pub(crate) enum Copied {
    /// With the checksum of the slot.
    IntoSlot {
        rise: u64,
        result: Result<u64, RiseError>,
    },
    /// With the checksums of the layers' runs.
    Layers {
        copy: u64,
        result: Result<Vec<u64>, WritePageError>,
    },
    IntoPage {
        copy: u64,
        result: Result<(), WritePageError>,
    },
}

/// The node's end. Dropping it ends the thread.
#[derive(Debug)]
pub(crate) struct PageCopier {
    /// Bounded by what the block core has under way.
    jobs: Backlog<Job>,
}

impl PageCopier {
    /// Starts the thread. `report` takes what became of copies, some at once.
    ///
    /// # Errors
    /// When no thread can be started.
    pub(crate) fn start(
        arena: Arena,
        report: impl Fn(Vec<Copied>) + Send + 'static,
    ) -> std::io::Result<Self> {
        let (jobs, receiver) = Backlog::new(JOBS_MAX);
        let thread = Thread { arena, report: Box::new(report) };
        std::thread::Builder::new()
            .name("page-copier".into())
            .spawn(move || thread.run(&receiver))?;
        Ok(PageCopier { jobs })
    }

    /// Copies, without waiting for it.
    pub(crate) fn copy(&mut self, copy: Copy) {
        self.jobs.give(Job::Copy(copy));
    }

    /// Drops a pool after the copies that were asked for.
    pub(crate) fn let_go(&mut self, pool: Arc<Pool>) {
        self.jobs.give(Job::LetGo(pool));
    }

    /// Hands over what there was no room for. Answers whether some still waits.
    pub(crate) fn flush(&mut self) -> bool {
        self.jobs.flush()
    }
}

/// What the thread has taken and not begun: no more than the block core has under way.
#[derive(Debug, Default)]
struct Queue {
    layers: VecDeque<Copy>,
    pages: VecDeque<Copy>,
    /// A copy that still waits has its pool anyway: so these may go whenever nothing else is to be done.
    let_go: Vec<Arc<Pool>>,
}

impl Queue {
    fn push(&mut self, job: Job) {
        match job {
            Job::Copy(copy) => match copy.way {
                Way::Layers { .. } => self.layers.push_back(copy),
                Way::IntoSlot { .. } | Way::IntoPage { .. } => self.pages.push_back(copy),
            },
            Job::LetGo(pool) => self.let_go.push(pool),
        }
    }

    fn is_empty(&self) -> bool {
        self.layers.is_empty() && self.pages.is_empty() && self.let_go.is_empty()
    }

    /// What is begun together next: layers, or else whole pages.
    fn next_batch(&mut self) -> Vec<Copy> {
        if !self.layers.is_empty() {
            return self.layers.drain(..self.layers.len().min(LAYERS_BATCH)).collect();
        }
        let (mut batch, mut bytes) = (Vec::new(), 0);
        while batch.len() < PAGES_BATCH && bytes < PAGES_BATCH_BYTES {
            let Some(copy) = self.pages.pop_front() else { break };
            bytes += copy.layout.slot_bytes();
            batch.push(copy);
        }
        batch
    }
}

struct Thread {
    arena: Arena,
    report: Box<dyn Fn(Vec<Copied>) + Send>,
}

/// What a copy has come to before it is waited for: the checksums of what goes into a slot, as far as they are known
/// already.
type Begun = Result<Vec<Option<u64>>, WritePageError>;

impl Thread {
    fn run(&self, jobs: &Receiver<Job>) {
        let mut queue = Queue::default();
        loop {
            if queue.is_empty() {
                let Ok(job) = jobs.recv() else { return };
                queue.push(job);
            }
            jobs.try_iter().for_each(|job| queue.push(job));
            let batch = queue.next_batch();
            if batch.is_empty() {
                queue.let_go.clear();
            } else {
                (self.report)(self.copy_all(batch));
            }
        }
    }

    fn copy_all(&self, batch: Vec<Copy>) -> Vec<Copied> {
        let begun: Vec<Begun> = batch.iter().map(|copy| self.begin(copy)).collect();
        let mut ended: Vec<bool> = Vec::with_capacity(batch.len());
        for (at, copy) in batch.iter().enumerate() {
            // Those of one pool stand beside each other, and are waited for once.
            let same = at > 0 && Arc::ptr_eq(&batch[at - 1].pool, &copy.pool);
            ended.push(match same {
                true => ended[at - 1],
                false => copy.pool.memory.wait().inspect_err(log_fault).is_ok(),
            });
        }
        let end = |((copy, begun), ended): ((Copy, Begun), bool)| {
            let result = begun.and_then(|sums| ended.then_some(sums).ok_or(WritePageError::Failed));
            match copy.way {
                Way::IntoPage { copy, .. } => Copied::IntoPage { copy, result: result.map(|_| ()) },
                Way::IntoSlot { rise } => {
                    let sum = result.map(|sums| fold(&self.sums(&copy, sums)));
                    Copied::IntoSlot { rise, result: sum.map_err(|_| RiseError::Failed) }
                }
                Way::Layers { copy: number, .. } => Copied::Layers {
                    copy: number,
                    result: result.map(|sums| self.sums(&copy, sums)),
                },
            }
        };
        batch.into_iter().zip(begun).zip(ended).map(end).collect()
    }

    /// Those of the runs that were copied into a slot; what is not known is hashed there.
    fn sums(&self, copy: &Copy, known: Vec<Option<u64>>) -> Vec<u64> {
        let runs = slot_runs(copy).map(|(_, run)| run).zip(known);
        let sum = |run| self.arena.run_checksum(&copy.layout, copy.slot, run);
        runs.map(|(run, known)| known.unwrap_or_else(|| sum(run))).collect()
    }

    fn begin(&self, copy: &Copy) -> Begun {
        let Copy { pool, page, slot, layout, way } = copy;
        if pool.is_closed() {
            return Err(WritePageError::Failed);
        }
        if let Way::IntoPage { checksum: Some(checksum), .. } = way
            && *checksum != self.arena.checksum(layout, *slot)
        {
            return Err(WritePageError::Corrupt);
        }
        let base = u64::from(slot.0) * layout.slot_bytes();
        let in_pool: Vec<(u64, u64)> = pool.layout.runs(*page).collect();
        let mut sums = Vec::new();
        for (index, run) in slot_runs(copy) {
            let (offset, bytes) = in_pool[index];
            let at = self.arena.memory().as_ptr().wrapping_add((base + run.offset_bytes) as usize);
            let begun = match way {
                // SAFETY: the run of a slot of a checked layout lies in the arena, and has as many bytes as in the pool. The
                // core has given it to this copy alone until it hears that the copy is over.
                Way::IntoSlot { .. } | Way::Layers { .. } => unsafe {
                    pool.memory.read(offset, at, bytes)
                },
                Way::IntoPage { .. } => {
                    // SAFETY: as above; the core has the slot pinned until then, and nobody writes it.
                    unsafe { pool.memory.write(offset, at, bytes) }.map(|()| None)
                }
            };
            sums.push(begun.inspect_err(log_fault).map_err(|_| WritePageError::Failed)?);
        }
        Ok(sums)
    }
}

fn log_fault(fault: &CopyFault) {
    tracing::error!(error = %fault, "the store node cannot copy between an engine pool and the slots");
}

/// The runs of the slot that are copied, layer by layer, each with its place among all runs of a slot.
fn slot_runs(copy: &Copy) -> impl Iterator<Item = (usize, SlotRun)> + '_ {
    let layers = match &copy.way {
        Way::Layers { layers, .. } => usize::from(layers.start)..usize::from(layers.end),
        Way::IntoSlot { .. } | Way::IntoPage { .. } => 0..copy.layout.layers(),
    };
    let layout = &copy.layout;
    let before: usize = (0..layers.start).map(|layer| layout.runs(layer).len()).sum();
    (before..).zip(layers.flat_map(|layer| layout.runs(layer)).copied())
}
