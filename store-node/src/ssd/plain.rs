//! A disk by plain calls, one after the other, for hosts without io_uring. Reads and writes go
//! through the page cache; what is acknowledged was synced all the same.

use std::collections::VecDeque;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::time::Duration;

use kvasir_log::{Disk, DiskDone, DiskError, DiskOp};

/// See the module.
#[derive(Debug)]
pub struct PlainDisk {
    file: File,
    len_bytes: u64,
    done: VecDeque<DiskDone>,
}

impl PlainDisk {
    pub fn new(file: File, len_bytes: u64) -> Self {
        PlainDisk { file, len_bytes, done: VecDeque::new() }
    }
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
        let (id, (result, buffer)) = (
            op.id(),
            match op {
                DiskOp::Read { offset_bytes, mut buffer, .. } => {
                    let read = self.file.read_exact_at(buffer.bytes_mut(), offset_bytes);
                    (read, Some(buffer))
                }
                DiskOp::Write { offset_bytes, buffer, .. } => {
                    (self.file.write_all_at(buffer.bytes(), offset_bytes), Some(buffer))
                }
                DiskOp::Sync { .. } => (self.file.sync_data(), None),
            },
        );
        self.done.push_back(DiskDone { id, result: result.map_err(|e| error_of(&e)), buffer });
    }

    fn complete(&mut self, _wait: Duration) -> Vec<DiskDone> {
        self.done.drain(..).collect()
    }
}

/// What an error of the system means to the log.
pub fn error_of(error: &std::io::Error) -> DiskError {
    match error.kind() {
        std::io::ErrorKind::StorageFull
        | std::io::ErrorKind::QuotaExceeded
        | std::io::ErrorKind::FileTooLarge => DiskError::NoSpace,
        std::io::ErrorKind::UnexpectedEof | std::io::ErrorKind::WriteZero => DiskError::Short,
        _ => DiskError::Io(error.raw_os_error().unwrap_or(0)),
    }
}
