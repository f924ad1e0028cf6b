//! A disk by io_uring: many operations at a time, past the page cache where the file allows it, and payloads between
//! disk and slot without a copy where slots are aligned as it wants them.

use std::collections::HashMap;
use std::fs::File;
use std::mem::ManuallyDrop;
use std::os::fd::AsRawFd;
use std::time::Duration;

use io_uring::{IoUring, opcode, squeue, types};
use kvasir_log::{Disk, DiskDone, DiskError, DiskOp, PAGE_BYTES, PageBuf, Span};

use super::plain::error_of;
use super::slots::Slots;

/// Operations at once: 128 KiB reads gain nothing beyond 16 on the disks that were measured.
const DEPTH: u32 = 32;
/// The kernel is told of so many at once, which it then hands to the disk together.
const TOGETHER: u32 = 8;
/// What the end of the disk waits for operations that are under way.
const LAST_WAIT: Duration = Duration::from_secs(5);

/// What a file asks of memory that it moves by itself: addresses and lengths are multiples of these.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Alignment {
    pub address_bytes: usize,
    pub length_bytes: usize,
}

impl Alignment {
    /// Through the page cache.
    pub(crate) const NONE: Alignment = Alignment { address_bytes: 1, length_bytes: 1 };
    /// Whatever the disk.
    pub(crate) const PAGES: Alignment =
        Alignment { address_bytes: PAGE_BYTES, length_bytes: PAGE_BYTES };

    /// Of so many bytes from this address on, how many can be moved there and back by themselves.
    fn direct_bytes(self, address: *mut u8, bytes: usize) -> usize {
        match address.addr().is_multiple_of(self.address_bytes) {
            true => bytes - bytes % self.length_bytes,
            false => 0,
        }
    }
}

/// See the module.
#[derive(Debug)]
pub(crate) struct UringDisk {
    ring: Ring,
    file: File,
    len_bytes: u64,
    slots: Slots,
    alignment: Alignment,
    /// Hold the buffers for as long as the kernel may touch them.
    under_way: HashMap<u64, UnderWay>,
    /// Of these, the kernel has not been told yet of the last so many.
    untold: u32,
}

struct Ring(IoUring);

impl std::fmt::Debug for Ring {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("IoUring")
    }
}

#[derive(Debug)]
struct UnderWay {
    op: DiskOp,
    length: usize,
    parts: Option<Box<Parts>>,
}

/// An operation that goes on behind its buffer: in a slot, and for what cannot be moved there by itself in memory beside it.
#[derive(Debug)]
struct Parts {
    /// The buffer, the slot, what is beside it; those of them that have bytes come first.
    all: [libc::iovec; 3],
    count: usize,
    slot: Span,
    /// From the beginning of the slot on.
    direct_bytes: usize,
    beside: PageBuf,
    /// Of what is written from beside the slot altogether.
    written_sum: Option<u64>,
}

// SAFETY: the addresses are of memory that is held beside them, by the operation and by the disk's `Slots`, and only the
// kernel follows them.
unsafe impl Send for Parts {}

impl Parts {
    fn length(&self) -> usize {
        self.all.iter().map(|part| part.iov_len).sum()
    }

    /// What does not move by itself.
    fn beside(&self) -> Span {
        Span {
            offset_bytes: self.slot.offset_bytes + self.direct_bytes,
            length_bytes: self.slot.length_bytes - self.direct_bytes,
        }
    }

    /// A read has ended well: all of it comes to its slot.
    fn land(&self, slots: &Slots) -> u64 {
        let sum = match self.beside().length_bytes {
            0 => None,
            _ => Some(slots.fill(self.beside(), self.beside.bytes())),
        };
        sum.filter(|_| self.direct_bytes == 0).unwrap_or_else(|| slots.sum(self.slot))
    }

    /// A write has ended well: what it has written, unless somebody has changed it since.
    fn written(&self, slots: &Slots) -> u64 {
        self.written_sum.unwrap_or_else(|| slots.sum(self.slot))
    }
}

/// Whether this process may have what a disk by io_uring needs, found out by making it.
///
/// # Errors
/// Why not: as the system says it, or `Unsupported` without a number of the system when it cannot wait with a timeout.
pub fn try_io_uring() -> std::io::Result<()> {
    ring().map(drop)
}

fn ring() -> std::io::Result<IoUring> {
    // Whoever looks for ends enters the kernel often enough: the thread need not be interrupted to be told of them.
    let cooperative = IoUring::builder().setup_coop_taskrun().build(DEPTH);
    let ring = cooperative.or_else(|_| IoUring::new(DEPTH))?;
    match ring.params().is_feature_ext_arg() {
        true => Ok(ring),
        false => Err(std::io::ErrorKind::Unsupported.into()),
    }
}

impl UringDisk {
    /// # Errors
    /// When the host has no io_uring, does not allow it, or has one that cannot wait with a timeout:
    /// the file comes back.
    pub(crate) fn new(
        file: File,
        len_bytes: u64,
        slots: Slots,
        alignment: Alignment,
    ) -> Result<Self, (File, std::io::Error)> {
        match ring() {
            Ok(ring) => {
                let (ring, under_way) = (Ring(ring), HashMap::new());
                Ok(UringDisk { ring, file, len_bytes, slots, alignment, under_way, untold: 0 })
            }
            Err(error) => Err((file, error)),
        }
    }

    /// What the kernel is told of an operation, and what has to stay where it is until its end.
    fn begin(&self, mut op: DiskOp) -> (squeue::Entry, UnderWay) {
        let (file, id) = (types::Fd(self.file.as_raw_fd()), op.id());
        let (entry, length, parts) = match &mut op {
            DiskOp::Read { offset_bytes, buffer, rest: None, .. } => {
                let bytes = buffer.bytes_mut();
                let read = opcode::Read::new(file, bytes.as_mut_ptr(), bytes.len() as u32);
                (read.offset(*offset_bytes).build(), bytes.len(), None)
            }
            DiskOp::Write { offset_bytes, buffer, rest: None, .. } => {
                let bytes = buffer.bytes();
                let write = opcode::Write::new(file, bytes.as_ptr(), bytes.len() as u32);
                (write.offset(*offset_bytes).build(), bytes.len(), None)
            }
            DiskOp::Read { offset_bytes, buffer, rest: Some(slot), .. } => {
                let parts = self.parts(buffer, *slot, self.alignment.length_bytes);
                let read = opcode::Readv::new(file, parts.all.as_ptr(), parts.count as u32);
                (read.offset(*offset_bytes).build(), parts.length(), Some(parts))
            }
            DiskOp::Write { offset_bytes, buffer, rest: Some(slot), .. } => {
                let mut parts = self.parts(buffer, *slot, PAGE_BYTES);
                if parts.beside().length_bytes > 0 {
                    let sum = self.slots.copy(parts.beside(), parts.beside.bytes_mut());
                    parts.written_sum = (parts.direct_bytes == 0).then_some(sum);
                }
                let write = opcode::Writev::new(file, parts.all.as_ptr(), parts.count as u32);
                (write.offset(*offset_bytes).build(), parts.length(), Some(parts))
            }
            DiskOp::Sync { .. } => {
                let sync = opcode::Fsync::new(file).flags(types::FsyncFlags::DATASYNC);
                (sync.build(), 0, None)
            }
        };
        (entry.user_data(id), UnderWay { op, length, parts })
    }

    /// `step_bytes`: what is moved altogether is a multiple of it.
    fn parts(&self, buffer: &mut PageBuf, slot: Span, step_bytes: usize) -> Box<Parts> {
        let address = self.slots.address(slot);
        let direct_bytes = self.alignment.direct_bytes(address, slot.length_bytes);
        let beside_bytes = slot.length_bytes.next_multiple_of(step_bytes) - direct_bytes;
        let mut beside = PageBuf::zeroed(beside_bytes.div_ceil(PAGE_BYTES));
        let part = |address: *mut u8, iov_len| libc::iovec { iov_base: address.cast(), iov_len };
        let bytes = buffer.bytes_mut();
        let mut all = [
            part(bytes.as_mut_ptr(), bytes.len()),
            part(address, direct_bytes),
            part(beside.bytes_mut().as_mut_ptr(), beside_bytes),
        ];
        // Also the address of an empty one would have to be aligned.
        all.sort_by_key(|part| part.iov_len == 0);
        let count = all.iter().filter(|part| part.iov_len > 0).count();
        Box::new(Parts { all, count, slot, direct_bytes, beside, written_sum: None })
    }

    fn tell(&mut self) {
        // An error here is met again when completions are waited for.
        let _ = self.ring.0.submit();
        self.untold = 0;
    }

    fn reap(&mut self) -> Vec<DiskDone> {
        let mut done = Vec::new();
        for end in self.ring.0.completion() {
            let Some(of) = self.under_way.remove(&end.user_data()) else { continue };
            let result = match usize::try_from(end.result()) {
                Ok(moved) if moved == of.length => Ok(()),
                Ok(_) => Err(DiskError::Short),
                Err(_) => Err(error_of(&std::io::Error::from_raw_os_error(-end.result()))),
            };
            let (parts, id) = (of.parts.filter(|_| result.is_ok()), of.op.id());
            let (buffer, rest_sum) = match of.op {
                DiskOp::Read { buffer, .. } => {
                    (Some(buffer), parts.map(|parts| parts.land(&self.slots)))
                }
                DiskOp::Write { buffer, .. } => {
                    (Some(buffer), parts.map(|parts| parts.written(&self.slots)))
                }
                DiskOp::Sync { .. } => (None, None),
            };
            done.push(DiskDone { id, result, buffer, rest_sum });
        }
        done
    }
}

impl Disk for UringDisk {
    fn len_bytes(&self) -> u64 {
        self.len_bytes
    }

    fn depth(&self) -> usize {
        DEPTH as usize
    }

    fn submit(&mut self, op: DiskOp) {
        let (entry, of) = self.begin(op);
        // Pages of buffers, and the list of parts, stay where they are when these move into the map.
        self.under_way.insert(of.op.id(), of);
        // Slots are mapped as long as `self.slots` lives (or for ever), no reference to them is made, and whoever gave the
        // operation keeps everybody else from them.
        // SAFETY: buffers and the list of parts are owned by `under_way` until the kernel has reported the end (or for
        // ever, see `drop`), and nothing else has access to them; slots as above. The file is open as long.
        let pushed = unsafe { self.ring.0.submission().push(&entry) };
        pushed.expect("the queue has `depth` entries, and the kernel takes submitted entries");
        self.untold += 1;
        if self.untold >= TOGETHER {
            self.tell();
        }
    }

    fn complete(&mut self, wait: Duration) -> Vec<DiskDone> {
        if self.untold > 0 {
            self.tell();
        }
        let done = self.reap();
        if !done.is_empty() || self.under_way.is_empty() || wait.is_zero() {
            return done;
        }
        let timeout = types::Timespec::from(wait);
        let arguments = types::SubmitArgs::new().timespec(&timeout);
        // Its error says that the time is over, or that a signal came.
        let _ = self.ring.0.submitter().submit_with_args(1, &arguments);
        self.reap()
    }
}

impl Drop for UringDisk {
    fn drop(&mut self) {
        while !self.under_way.is_empty() {
            if self.complete(LAST_WAIT).is_empty() {
                // The kernel may still write into them: they are given up rather than freed.
                let _given_up = ManuallyDrop::new(std::mem::take(&mut self.under_way));
                let _mapped = ManuallyDrop::new(self.slots.clone());
                return;
            }
        }
    }
}
