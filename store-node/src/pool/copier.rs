//! The thread that copies between pools and slots. It decides nothing: the block core says what to copy, and hears
//! what became of it.
//!
//! Jobs come through a bounded queue that the node's thread never waits for. Some are begun before any is waited for, so
//! that memory with latency is kept busy. What goes into a slot is hashed while it is in the processor's cache; what
//! leaves one is hashed first, so that rotten bytes reach no page.

use std::sync::Arc;
use std::sync::mpsc::Receiver;

use kvasir_blocks::{RiseError, WritePageError};
use kvasir_proto::{SlotIndex, SlotLayout};

use super::Pool;
use super::memory::CopyFault;
use crate::backlog::Backlog;
use crate::node::arena::Arena;

/// Jobs that wait for the thread; the node keeps what is more.
const JOBS_MAX: usize = 256;
/// Copies that are begun before they are waited for.
const BATCH: usize = 8;

/// One page and one slot.
#[derive(Debug)]
pub struct Copy {
    pub pool: Arc<Pool>,
    pub page: u32,
    pub slot: SlotIndex,
    pub layout: Arc<SlotLayout>,
    pub way: Way,
}

/// Which of them is copied.
#[derive(Debug)]
pub enum Way {
    /// The page, for this rise.
    IntoSlot { rise: u64 },
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
pub enum Copied {
    /// With the checksum of the slot.
    IntoSlot {
        rise: u64,
        result: Result<u64, RiseError>,
    },
    IntoPage {
        copy: u64,
        result: Result<(), WritePageError>,
    },
}

/// The node's end. Dropping it ends the thread.
#[derive(Debug)]
pub struct PageCopier {
    /// Bounded by what the block core has under way.
    jobs: Backlog<Job>,
}

impl PageCopier {
    /// Starts the thread. `report` takes what became of the copies.
    ///
    /// # Errors
    /// When no thread can be started.
    pub fn start(arena: Arena, report: impl Fn(Copied) + Send + 'static) -> std::io::Result<Self> {
        let (jobs, receiver) = Backlog::new(JOBS_MAX);
        let thread = Thread { arena, report: Box::new(report) };
        std::thread::Builder::new()
            .name("page-copier".into())
            .spawn(move || thread.run(&receiver))?;
        Ok(PageCopier { jobs })
    }

    /// Copies, without waiting for it.
    pub fn copy(&mut self, copy: Copy) {
        self.jobs.give(Job::Copy(copy));
    }

    /// Drops a pool after the copies that were asked for.
    pub fn let_go(&mut self, pool: Arc<Pool>) {
        self.jobs.give(Job::LetGo(pool));
    }

    /// Hands over what there was no room for. Answers whether some still waits.
    pub fn flush(&mut self) -> bool {
        self.jobs.flush()
    }
}

struct Thread {
    arena: Arena,
    report: Box<dyn Fn(Copied) + Send>,
}

impl Thread {
    fn run(&self, jobs: &Receiver<Job>) {
        let mut batch = Vec::with_capacity(BATCH);
        while let Ok(job) = jobs.recv() {
            let mut next = Some(job);
            while let Some(job) = next {
                match job {
                    Job::Copy(copy) => batch.push(copy),
                    // Copies of it that came before are over first.
                    Job::LetGo(pool) => {
                        self.copy_all(&mut batch);
                        drop(pool);
                    }
                }
                next = if batch.len() < BATCH { jobs.try_recv().ok() } else { None };
            }
            self.copy_all(&mut batch);
        }
    }

    fn copy_all(&self, batch: &mut Vec<Copy>) {
        let begun: Vec<Result<(), WritePageError>> =
            batch.iter().map(|copy| self.begin(copy)).collect();
        let mut ended: Vec<bool> = Vec::with_capacity(batch.len());
        for (at, copy) in batch.iter().enumerate() {
            // Those of one pool stand beside each other, and are waited for once.
            let same = at > 0 && Arc::ptr_eq(&batch[at - 1].pool, &copy.pool);
            ended.push(match same {
                true => ended[at - 1],
                false => copy.pool.memory.wait().inspect_err(log_fault).is_ok(),
            });
        }
        for ((copy, begun), ended) in batch.drain(..).zip(begun).zip(ended) {
            let result = begun.and(ended.then_some(()).ok_or(WritePageError::Failed));
            (self.report)(match copy.way {
                Way::IntoPage { copy, .. } => Copied::IntoPage { copy, result },
                Way::IntoSlot { rise } => Copied::IntoSlot {
                    rise,
                    result: result
                        .map(|()| self.arena.checksum(&copy.layout, copy.slot))
                        .map_err(|_| RiseError::Failed),
                },
            });
        }
    }

    fn begin(&self, copy: &Copy) -> Result<(), WritePageError> {
        let Copy { pool, page, slot, layout, way } = copy;
        if pool.is_closed() {
            return Err(WritePageError::Failed);
        }
        if let Way::IntoPage { checksum: Some(checksum), .. } = way
            && *checksum != self.arena.checksum(layout, *slot)
        {
            return Err(WritePageError::Corrupt);
        }
        for (run, (offset, bytes)) in slot_runs(layout, *slot).zip(pool.layout.runs(*page)) {
            let at = self.arena.memory().as_ptr().wrapping_add(run.0);
            let begun = match way {
                // SAFETY: the run of a slot of a checked layout lies in the arena. The core has given the slot to this copy
                // alone until it hears that the copy is over.
                Way::IntoSlot { .. } => unsafe { pool.memory.read(offset, at, bytes) },
                // SAFETY: as above; the core has the slot pinned until then, and nobody writes it.
                Way::IntoPage { .. } => unsafe { pool.memory.write(offset, at, bytes) },
            };
            begun.inspect_err(log_fault).map_err(|_| WritePageError::Failed)?;
        }
        Ok(())
    }
}

fn log_fault(fault: &CopyFault) {
    tracing::error!(%fault, "a copy between a pool and the slots has failed");
}

/// Where the runs of a slot begin, and their lengths, layer by layer.
fn slot_runs(layout: &SlotLayout, slot: SlotIndex) -> impl Iterator<Item = (usize, usize)> + '_ {
    let base = u64::from(slot.0) * layout.slot_bytes();
    let runs = (0..layout.layers()).flat_map(|layer| layout.runs(layer));
    runs.map(move |run| ((base + run.offset_bytes) as usize, run.length_bytes as usize))
}
