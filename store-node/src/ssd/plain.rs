//! A disk with blocking calls, one at a time, for hosts without io_uring. Reads and writes go
//! through the page cache; what is acknowledged was synced all the same.

use std::collections::VecDeque;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::time::Duration;

use kvasir_log::{Disk, DiskDone, DiskError, DiskOp, PAGE_BYTES, PageBuf, Span};

use super::slots::Slots;

/// See the module.
#[derive(Debug)]
pub(crate) struct PlainDisk {
    file: File,
    len_bytes: u64,
    slots: Slots,
    done: VecDeque<DiskDone>,
}

impl PlainDisk {
    pub(crate) fn new(file: File, len_bytes: u64, slots: Slots) -> Self {
        PlainDisk { file, len_bytes, slots, done: VecDeque::new() }
    }

    /// What lies behind a buffer comes and goes through memory beside the slots.
    fn read_rest(&self, offset_bytes: u64, slot: Span) -> std::io::Result<u64> {
        let mut beside = PageBuf::zeroed(slot.length_bytes.div_ceil(PAGE_BYTES));
        self.file.read_exact_at(beside.bytes_mut(), offset_bytes)?;
        Ok(self.slots.fill(slot, beside.bytes()))
    }

    fn write_rest(&self, offset_bytes: u64, slot: Span) -> std::io::Result<u64> {
        let mut beside = PageBuf::zeroed(slot.length_bytes.div_ceil(PAGE_BYTES));
        let sum = self.slots.copy(slot, beside.bytes_mut());
        self.file.write_all_at(beside.bytes(), offset_bytes)?;
        Ok(sum)
    }
}

/// Where what lies behind a buffer begins.
fn behind(offset_bytes: u64, buffer: &PageBuf) -> u64 {
    offset_bytes + buffer.bytes().len() as u64
}

impl Disk for PlainDisk {
    fn len_bytes(&self) -> u64 {
        self.len_bytes
    }

    fn depth(&self) -> usize {
        // One at a time anyway; a few, so that a sync covers more than one write.
        8
    }

    fn submit(&mut self, op: DiskOp) {
        let id = op.id();
        let (result, buffer) = match op {
            DiskOp::Read { offset_bytes, mut buffer, rest, .. } => {
                let read = self.file.read_exact_at(buffer.bytes_mut(), offset_bytes);
                let at = behind(offset_bytes, &buffer);
                let rest = rest.map(|slot| self.read_rest(at, slot)).transpose();
                (read.and(rest), Some(buffer))
            }
            DiskOp::Write { offset_bytes, buffer, rest, .. } => {
                let written = self.file.write_all_at(buffer.bytes(), offset_bytes);
                let at = behind(offset_bytes, &buffer);
                let rest = rest.map(|slot| self.write_rest(at, slot)).transpose();
                (written.and(rest), Some(buffer))
            }
            DiskOp::Sync { .. } => (self.file.sync_data().map(|()| None), None),
        };
        let rest_sum = result.as_ref().ok().copied().flatten();
        let result = result.map(|_| ()).map_err(|error| error_of(&error));
        self.done.push_back(DiskDone { id, result, buffer, rest_sum });
    }

    fn complete(&mut self, _wait: Duration) -> Vec<DiskDone> {
        self.done.drain(..).collect()
    }
}

/// What an error of the system means to the log.
pub(crate) fn error_of(error: &std::io::Error) -> DiskError {
    match error.kind() {
        std::io::ErrorKind::StorageFull
        | std::io::ErrorKind::QuotaExceeded
        | std::io::ErrorKind::FileTooLarge => DiskError::NoSpace,
        std::io::ErrorKind::UnexpectedEof | std::io::ErrorKind::WriteZero => DiskError::Short,
        _ => DiskError::Io(error.raw_os_error().unwrap_or(0)),
    }
}
