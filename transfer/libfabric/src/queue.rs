//! Completion queues: where operations end and arrivals are told.
//!
//! A queue bounds the operations that are under way on all endpoints bound to it, so that their
//! completions always have room, and holds what those operations need. Polling it is also what moves
//! most providers on: a receiver that does not poll receives nothing.

use std::ffi::{CStr, c_char};
use std::fmt;
use std::os::fd::{BorrowedFd, RawFd};
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use crate::bindings::*;
use crate::completion::{Completion, Immediate, Operation, PeerId};
use crate::domain::{Domain, DomainInner, lock, opened};
use crate::error::{OpenError, OperationError, QueueError};
use crate::ops;
use crate::slab::Slab;

/// How a queue is opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QueueOptions {
    /// Operations under way at once on all its endpoints; a post beyond it is
    /// [busy](crate::error::Busy::Outstanding).
    pub operations_max: usize,
    /// Arrivals that it holds before it is polled. What a provider does beyond depends on it: most
    /// make the sender wait, a device may break the queue, so this is to cover what peers may have
    /// under way.
    pub arrivals_max: usize,
    pub wakeup: Wakeup,
}

impl Default for QueueOptions {
    fn default() -> Self {
        QueueOptions { operations_max: 1024, arrivals_max: 8192, wakeup: Wakeup::Poll }
    }
}

/// How a thread learns that a queue has something.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wakeup {
    /// By asking.
    Poll,
    /// A descriptor becomes readable.
    Fd,
}

/// How many entries are read at once.
const BATCH: usize = 64;

/// Room for what is read at once.
struct Batch {
    entries: [fi_cq_data_entry; BATCH],
    sources: [u64; BATCH],
}

/// A completion queue. Shared by clones.
#[derive(Debug, Clone)]
pub struct CompletionQueue(pub(crate) Arc<QueueInner>);

pub(crate) struct QueueInner {
    pub raw: NonNull<fid_cq>,
    pub domain: Arc<DomainInner>,
    pub slab: Slab,
    fd: Option<RawFd>,
    /// One thread reads at a time: what was read is handed on before the next looks.
    batch: Mutex<Box<Batch>>,
    has_sources: bool,
    endpoints: AtomicU64,
    /// Of these, those that are open.
    open: AtomicU64,
    busy: AtomicU64,
}

// SAFETY: calls are serialised (see `DomainInner`); the batch holds pointers that are only compared.
unsafe impl Send for QueueInner {}
// SAFETY: as above.
unsafe impl Sync for QueueInner {}

/// What a queue counts, for metrics.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct QueueCounts {
    /// Operations under way.
    pub outstanding: usize,
    /// Posts that were refused as [busy](crate::error::PostError::Busy), since it was opened.
    pub busy: u64,
}

impl CompletionQueue {
    /// Opens a queue. Where [`Wakeup::Fd`] is asked for and the provider has no descriptors for its
    /// queues, it is opened for polling: [`CompletionQueue::wakeup`] says which it is.
    ///
    /// # Errors
    /// [`OpenError`].
    pub fn open(domain: &Domain, options: QueueOptions) -> Result<Self, OpenError> {
        let domain = domain.0.clone();
        let has_sources = domain.info.details().arrival_sources;
        let with_fd = match options.wakeup {
            Wakeup::Fd => open_raw(&domain, options, FI_WAIT_FD).ok().and_then(|raw| {
                let fd = wait_fd(&domain, raw);
                if fd.is_none() {
                    let _serial = domain.enter();
                    // SAFETY: just opened, and nothing is bound to it.
                    unsafe { ops::close(raw.as_ptr().cast()) };
                }
                Some((raw, fd?))
            }),
            Wakeup::Poll => None,
        };
        let (raw, fd) = match with_fd {
            Some((raw, fd)) => (raw, Some(fd)),
            None => (open_raw(&domain, options, FI_WAIT_NONE)?, None),
        };
        let empty = fi_cq_data_entry {
            op_context: ptr::null_mut(),
            flags: 0,
            len: 0,
            buf: ptr::null_mut(),
            data: 0,
        };
        Ok(CompletionQueue(Arc::new(QueueInner {
            raw,
            domain,
            slab: Slab::new(options.operations_max),
            fd,
            batch: Mutex::new(Box::new(Batch {
                entries: [empty; BATCH],
                sources: [FI_ADDR_UNSPEC; BATCH],
            })),
            has_sources,
            endpoints: AtomicU64::new(0),
            open: AtomicU64::new(0),
            busy: AtomicU64::new(0),
        })))
    }

    pub fn wakeup(&self) -> Wakeup {
        if self.0.fd.is_some() { Wakeup::Fd } else { Wakeup::Poll }
    }

    /// What to wait on for reading, after [`CompletionQueue::may_sleep`] allowed it.
    pub fn fd(&self) -> Option<BorrowedFd<'_>> {
        // SAFETY: the queue owns it and closes it with itself.
        self.0.fd.map(|fd| unsafe { BorrowedFd::borrow_raw(fd) })
    }

    /// Whether the thread may wait on the descriptor: if not, there is something to poll first. Always
    /// `false` where there is no descriptor.
    ///
    /// # Errors
    /// [`QueueError`].
    pub fn may_sleep(&self) -> Result<bool, QueueError> {
        if self.0.fd.is_none() {
            return Ok(false);
        }
        let result = {
            let _serial = self.0.domain.enter();
            // SAFETY: fabric and queue are live.
            unsafe { ops::trywait(self.0.domain.fabric_ptr(), self.0.raw.as_ptr()) }
        };
        match result {
            0 => Ok(true),
            result if result == -FI_EAGAIN => Ok(false),
            result => Err(QueueError(self.0.domain.failure("fi_trywait", result))),
        }
    }

    /// Moves up to `max` completions into `out`, and says how many. It never waits.
    ///
    /// # Errors
    /// [`QueueError`] when the queue itself failed. What was read before is in `out`.
    pub fn poll(&self, out: &mut Vec<Completion>, max: usize) -> Result<usize, QueueError> {
        let queue = &*self.0;
        let mut batch = lock(&queue.batch);
        let before = out.len();
        while out.len() - before < max {
            let wanted = (max - (out.len() - before)).min(BATCH);
            let orphans = queue.slab.orphans();
            let read = queue.read(&mut batch, wanted);
            match usize::try_from(read) {
                Ok(0) => {
                    queue.slab.free_orphans(orphans);
                    break;
                }
                Ok(count) => {
                    let entries = batch.entries[..count].iter().zip(batch.sources);
                    out.extend(entries.filter_map(|(entry, source)| queue.ended(entry, source)));
                    if count < wanted {
                        break;
                    }
                }
                Err(_) if read == -(FI_EAGAIN as isize) => {
                    queue.slab.free_orphans(orphans);
                    break;
                }
                Err(_) if read == -(FI_EINTR as isize) => {}
                Err(_) if read == -(FI_EAVAIL as isize) => out.extend(queue.read_error()?),
                Err(_) => return Err(QueueError(queue.domain.failure("fi_cq_read", read as i64))),
            }
        }
        Ok(out.len() - before)
    }

    pub fn counts(&self) -> QueueCounts {
        QueueCounts {
            outstanding: self.0.slab.outstanding(),
            busy: self.0.busy.load(Ordering::Relaxed),
        }
    }
}

impl QueueInner {
    /// A number for an endpoint that is open, by which its operations are known here.
    pub(crate) fn number_endpoint(&self) -> u64 {
        self.open.fetch_add(1, Ordering::Relaxed);
        self.endpoints.fetch_add(1, Ordering::Relaxed)
    }

    /// An endpoint is about to be closed.
    pub(crate) fn endpoint_closes(&self) {
        self.open.fetch_sub(1, Ordering::Relaxed);
    }

    /// It was not.
    pub(crate) fn endpoint_stays(&self) {
        self.open.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn count_busy(&self) {
        self.busy.fetch_add(1, Ordering::Relaxed);
    }

    fn read(&self, batch: &mut Batch, wanted: usize) -> isize {
        let (queue, entries) = (self.raw.as_ptr(), batch.entries.as_mut_ptr());
        let _serial = self.domain.enter();
        // SAFETY: the queue is live and of this format, and the batch has room for as many.
        unsafe {
            if self.has_sources {
                ops::cq_readfrom(queue, entries, batch.sources.as_mut_ptr(), wanted)
            } else {
                ops::cq_read(queue, entries, wanted)
            }
        }
    }

    /// `None` for what concerns nobody: completions of endpoints that are closed.
    fn ended(&self, entry: &fi_cq_data_entry, source: u64) -> Option<Completion> {
        // First, because the context of an arrival is nobody's: old providers put the sender's there.
        if entry.flags & (FI_REMOTE_WRITE | FI_REMOTE_READ) != 0 {
            let from = (source != FI_ADDR_UNSPEC).then_some(PeerId(source));
            let immediate = Immediate(entry.data as u32);
            return (entry.flags & FI_REMOTE_CQ_DATA != 0)
                .then_some(Completion::Arrived { immediate, from });
        }
        let held = self.slab.finish(entry.op_context)?;
        let bytes = if held.operation == Operation::Receive { entry.len } else { held.bytes };
        Some(Completion::Done { token: held.token, operation: held.operation, bytes })
    }

    fn read_error(&self) -> Result<Option<Completion>, QueueError> {
        let mut entry = fi_cq_err_entry {
            op_context: ptr::null_mut(),
            flags: 0,
            len: 0,
            buf: ptr::null_mut(),
            data: 0,
            tag: 0,
            olen: 0,
            err: 0,
            prov_errno: 0,
            // No room of ours: the provider points to its own.
            err_data: ptr::null_mut(),
            err_data_size: 0,
            src_addr: FI_ADDR_UNSPEC,
        };
        let read = {
            let _serial = self.domain.enter();
            // SAFETY: the queue is live; the entry is as long as the newest library writes.
            unsafe { ops::cq_readerr(self.raw.as_ptr(), &mut entry) }
        };
        if read == -(FI_EAGAIN as isize) {
            return Ok(None);
        }
        if read < 0 {
            return Err(QueueError(self.domain.failure("fi_cq_readerr", read as i64)));
        }
        let mut failure = self.domain.failure("completion", entry.err);
        failure.provider = Some((entry.prov_errno, self.provider_text(&entry)));
        Ok(self.failed(&entry, failure.into()))
    }

    /// `None` for an operation whose endpoint is closed: some providers tell that it was cancelled.
    fn failed(&self, entry: &fi_cq_err_entry, error: OperationError) -> Option<Completion> {
        let is_remote = entry.flags & (FI_REMOTE_WRITE | FI_REMOTE_READ) != 0;
        if is_remote || !self.slab.has(entry.op_context) {
            return Some(Completion::Trouble { error });
        }
        let held = self.slab.finish(entry.op_context)?;
        Some(Completion::Failed { token: held.token, operation: held.operation, error })
    }

    /// Nothing where all endpoints of the queue are closed: `ofi_rxm` looks into the first one for its texts, whether
    /// or not there is one (seen with 1.17, where it crashes).
    fn provider_text(&self, entry: &fi_cq_err_entry) -> String {
        let mut buffer = [0 as c_char; 256];
        let _serial = self.domain.enter();
        if self.open.load(Ordering::Relaxed) == 0 {
            return String::new();
        }
        // SAFETY: the queue is live, the number and data are the entry's, which was just read, and
        // the buffer's length is told.
        let text = unsafe {
            ops::cq_strerror(
                self.raw.as_ptr(),
                entry.prov_errno,
                entry.err_data,
                buffer.as_mut_ptr(),
                buffer.len(),
            )
        };
        if text.is_null() {
            return String::new();
        }
        // SAFETY: a C string in the buffer or the provider's own.
        unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
    }
}

impl Drop for QueueInner {
    fn drop(&mut self) {
        let _serial = self.domain.enter();
        // SAFETY: ours, and every endpoint on it is closed: each held it. So nobody uses the contexts.
        let result = unsafe { ops::close(self.raw.as_ptr().cast()) };
        debug_assert_eq!(result, 0, "a completion queue without endpoints closes");
    }
}

impl fmt::Debug for QueueInner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CompletionQueue")
            .field("outstanding", &self.slab.outstanding())
            .field("fd", &self.fd)
            .finish_non_exhaustive()
    }
}

fn open_raw(
    domain: &DomainInner,
    options: QueueOptions,
    wait_obj: u32,
) -> Result<NonNull<fid_cq>, OpenError> {
    let mut attributes = fi_cq_attr {
        size: options.operations_max.saturating_add(options.arrivals_max),
        flags: 0,
        format: FI_CQ_FORMAT_DATA,
        wait_obj,
        signaling_vector: 0,
        wait_cond: FI_CQ_COND_NONE,
        wait_set: ptr::null_mut(),
    };
    let mut raw = ptr::null_mut();
    let result = {
        let _serial = domain.enter();
        // SAFETY: the domain is live; `raw` is written on success.
        unsafe { ops::cq_open(domain.raw.as_ptr(), &mut attributes, &mut raw) }
    };
    opened(domain.library(), "fi_cq_open", result, raw)
}

fn wait_fd(domain: &DomainInner, queue: NonNull<fid_cq>) -> Option<RawFd> {
    let mut fd: RawFd = -1;
    let _serial = domain.enter();
    // SAFETY: the queue is live and was opened for a descriptor, which is one integer.
    let result = unsafe { ops::cq_wait_fd(queue.as_ptr(), &mut fd) };
    (result == 0 && fd >= 0).then_some(fd)
}
