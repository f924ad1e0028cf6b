//! A disk by io_uring: many operations at a time, past the page cache where the file allows it.

use std::collections::HashMap;
use std::fs::File;
use std::mem::ManuallyDrop;
use std::os::fd::AsRawFd;
use std::time::Duration;

use io_uring::{IoUring, opcode, squeue, types};
use kvasir_log::{Disk, DiskDone, DiskError, DiskOp};

use super::plain::error_of;

/// Operations at once: 128 KiB reads gain nothing beyond 16 on the disks that were measured.
const DEPTH: u32 = 32;
/// What the end of the disk waits for operations that are under way.
const LAST_WAIT: Duration = Duration::from_secs(5);

/// See the module.
#[derive(Debug)]
pub struct UringDisk {
    ring: Ring,
    file: File,
    len_bytes: u64,
    /// Hold the buffers for as long as the kernel may touch them.
    under_way: HashMap<u64, DiskOp>,
}

struct Ring(IoUring);

impl std::fmt::Debug for Ring {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("IoUring")
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
    let ring = IoUring::new(DEPTH)?;
    match ring.params().is_feature_ext_arg() {
        true => Ok(ring),
        false => Err(std::io::ErrorKind::Unsupported.into()),
    }
}

impl UringDisk {
    /// # Errors
    /// When the host has no io_uring, does not allow it, or has one that cannot wait with a timeout:
    /// the file comes back.
    pub fn new(file: File, len_bytes: u64) -> Result<Self, (File, std::io::Error)> {
        match ring() {
            Ok(ring) => {
                Ok(UringDisk { ring: Ring(ring), file, len_bytes, under_way: HashMap::new() })
            }
            Err(error) => Err((file, error)),
        }
    }

    fn entry(&self, op: &mut DiskOp) -> squeue::Entry {
        let file = types::Fd(self.file.as_raw_fd());
        match op {
            DiskOp::Read { id, offset_bytes, buffer } => {
                let (length, id) = (buffer.bytes().len() as u32, *id);
                let entry = opcode::Read::new(file, buffer.bytes_mut().as_mut_ptr(), length);
                entry.offset(*offset_bytes).build().user_data(id)
            }
            DiskOp::Write { id, offset_bytes, buffer } => {
                let length = buffer.bytes().len() as u32;
                let entry = opcode::Write::new(file, buffer.bytes().as_ptr(), length);
                entry.offset(*offset_bytes).build().user_data(*id)
            }
            DiskOp::Sync { id } => {
                let entry = opcode::Fsync::new(file).flags(types::FsyncFlags::DATASYNC);
                entry.build().user_data(*id)
            }
        }
    }

    fn reap(&mut self) -> Vec<DiskDone> {
        let mut done = Vec::new();
        for end in self.ring.0.completion() {
            let Some(op) = self.under_way.remove(&end.user_data()) else { continue };
            let id = op.id();
            let (buffer, length) = match op {
                DiskOp::Read { buffer, .. } | DiskOp::Write { buffer, .. } => {
                    let length = buffer.bytes().len();
                    (Some(buffer), length)
                }
                DiskOp::Sync { .. } => (None, 0),
            };
            let result = match usize::try_from(end.result()) {
                Ok(moved) if moved == length => Ok(()),
                Ok(_) => Err(DiskError::Short),
                Err(_) => Err(error_of(&std::io::Error::from_raw_os_error(-end.result()))),
            };
            done.push(DiskDone { id, result, buffer });
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

    fn submit(&mut self, mut op: DiskOp) {
        let entry = self.entry(&mut op);
        // Pages of a buffer stay where they are when the operation moves into the map.
        self.under_way.insert(op.id(), op);
        // SAFETY: the buffer is owned by `under_way` until the kernel has reported its end (or for
        // ever, see `drop`), and nothing else has access to it; the file is open as long.
        let pushed = unsafe { self.ring.0.submission().push(&entry) };
        pushed.expect("the queue holds as many as the depth, and all are submitted below");
        // An error here is met again when completions are waited for.
        let _ = self.ring.0.submit();
    }

    fn complete(&mut self, wait: Duration) -> Vec<DiskDone> {
        let done = self.reap();
        if !done.is_empty() || self.under_way.is_empty() {
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
                return;
            }
        }
    }
}
