//! Finding a disk and an index on this host: a file of full length, io_uring past the page cache
//! where that is allowed, blocking calls elsewhere.

use std::fs::{File, OpenOptions, TryLockError};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use kvasir_log::{Disk, KeyIndex, MemoryIndex};
use rustix::fs::{AtFlags, FallocateFlags, OFlags, StatxFlags, fallocate, statx};

use super::faulty::FaultyDisk;
use super::plain::PlainDisk;
use super::sled_index::SledIndex;
use super::slots::Slots;
use super::uring::{Alignment, UringDisk};
use crate::config::{Ssd, SsdIo};

const LOG_FILE: &str = "kvasir.log";
const INDEX_DIR: &str = "index";

/// A disk, and in words how it is driven.
pub(crate) struct Opened {
    pub disk: Box<dyn Disk + Send>,
    pub how: &'static str,
}

impl std::fmt::Debug for Opened {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Opened").field("how", &self.how).finish_non_exhaustive()
    }
}

/// Opens the log's file, and makes it as long as it shall be.
///
/// # Errors
/// A sentence: no such folder, no room, or a file that is longer than it shall be.
pub(crate) fn open_disk(config: &Ssd, slots: &Slots) -> Result<Opened, String> {
    let Some(dir) = &config.dir else { return Err("`ssd.dir` is not set".into()) };
    let path = dir.join(LOG_FILE);
    let failed = |error: std::io::Error| format!("{}: {error}", path.display());
    std::fs::create_dir_all(dir).map_err(failed)?;
    let direct = match config.io {
        SsdIo::Auto => open_file(&path, OFlags::DIRECT).ok(),
        SsdIo::Plain => None,
    };
    let is_direct = direct.is_some();
    let file = match direct {
        Some(file) => file,
        None => open_file(&path, OFlags::empty()).map_err(failed)?,
    };
    match file.try_lock() {
        Ok(()) => {}
        Err(TryLockError::WouldBlock) => {
            return Err(format!(
                "{} is in use by another process: each node needs its own `ssd.dir`",
                path.display()
            ));
        }
        Err(TryLockError::Error(error)) => return Err(failed(error)),
    }
    let held = file.metadata().map_err(failed)?.len();
    if held > config.capacity_bytes {
        return Err(format!(
            "{} has {held} bytes, but `ssd.capacity_bytes` is {}: set it to the size of the file, \
             or remove the file and its contents",
            path.display(),
            config.capacity_bytes
        ));
    }
    if held < config.capacity_bytes {
        lengthen(&file, config.capacity_bytes).map_err(failed)?;
    }
    let plain = |file| Box::new(PlainDisk::new(file, config.capacity_bytes, slots.clone()));
    let alignment = if is_direct { alignment(&file) } else { Alignment::NONE };
    let (disk, how): (Box<dyn Disk + Send>, _) = match config.io {
        SsdIo::Plain => (plain(file), "blocking calls"),
        SsdIo::Auto => {
            match UringDisk::new(file, config.capacity_bytes, slots.clone(), alignment) {
                Ok(disk) if is_direct => (Box::new(disk), "io_uring with O_DIRECT"),
                Ok(disk) => (Box::new(disk), "io_uring"),
                Err((file, error)) => {
                    tracing::warn!(%error, "io_uring is not available; the store node uses blocking calls for the SSD");
                    (plain(file), "blocking calls")
                }
            }
        }
    };
    let disk = match &config.faults_file {
        Some(faults) => Box::new(FaultyDisk::new(disk, faults.clone(), slots.clone())),
        None => disk,
    };
    Ok(Opened { disk, how })
}

fn open_file(path: &Path, flags: OFlags) -> std::io::Result<File> {
    // Bits of open(2), which fit.
    let flags = flags.bits() as i32;
    OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .custom_flags(flags)
        .open(path)
}

/// What a file that is open past the page cache asks of memory; whole pages where the system does not say.
fn alignment(file: &File) -> Alignment {
    let said = statx(file, c"", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN).ok();
    let (address_bytes, length_bytes) =
        said.map_or((0, 0), |said| (said.stx_dio_mem_align, said.stx_dio_offset_align));
    let fits = |bytes: u32| bytes.is_power_of_two() && bytes as usize <= kvasir_log::PAGE_BYTES;
    match fits(address_bytes) && fits(length_bytes) {
        true => {
            Alignment { address_bytes: address_bytes as usize, length_bytes: length_bytes as usize }
        }
        false => Alignment::PAGES,
    }
}

/// All of the room is taken at once, so that the disk cannot become full later; where the file system
/// cannot do that, the file is only as long.
fn lengthen(file: &File, bytes: u64) -> std::io::Result<()> {
    match fallocate(file, FallocateFlags::empty(), 0, bytes) {
        Err(rustix::io::Errno::OPNOTSUPP | rustix::io::Errno::NOSYS) => file.set_len(bytes)?,
        other => other?,
    }
    file.sync_all()
}

/// The key index in sled, or in memory when that cannot be had.
pub(crate) fn open_index(dir: &Path) -> Box<dyn KeyIndex> {
    match SledIndex::open(&dir.join(INDEX_DIR)) {
        Ok(index) => Box::new(index),
        Err(error) => {
            tracing::error!(%error, "the store node cannot open the key index of the SSD; keeping the index in memory only");
            Box::new(MemoryIndex::default())
        }
    }
}

/// Throws the index away.
pub(crate) fn drop_index(dir: &Path) {
    let index = dir.join(INDEX_DIR);
    if let Err(error) = std::fs::remove_dir_all(&index) {
        tracing::warn!(%error, dir = %index.display(), "the store node cannot remove the key index of the SSD");
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;
    use std::sync::Arc;
    use std::time::Duration;

    use kvasir_log::{DiskDone, DiskOp, PAGE_BYTES, PageBuf, Span};
    use kvasir_transfer::checksum;
    use kvasir_transfer::memory::{Prefault, SharedMemory};

    use super::*;

    const DISK_BYTES: u64 = 1 << 20;
    const MEMORY_BYTES: usize = 256 << 10;

    fn one(disk: &mut dyn Disk, op: DiskOp) -> DiskDone {
        disk.submit(op);
        let mut done = disk.complete(Duration::from_secs(20));
        assert_eq!(done.len(), 1);
        done.remove(0)
    }

    /// Writes what is in a slot behind a page, and reads it into another slot and into a buffer.
    fn check(disk: &mut dyn Disk, memory: &SharedMemory, slot: Span, what: &str) {
        let bytes: Vec<u8> = (0..slot.length_bytes)
            .map(|at| (at * 7 + at / 251 + slot.offset_bytes) as u8)
            .collect();
        memory.copy_from(slot.offset_bytes, &bytes).expect("it is inside");
        let mut buffer = PageBuf::zeroed(1);
        buffer.bytes_mut().fill(0x5a);
        let offset_bytes = 3 * PAGE_BYTES as u64;
        let op = DiskOp::Write { id: 1, offset_bytes, buffer, rest: Some(slot) };
        let done = one(disk, op);
        assert_eq!((done.id, done.result), (1, Ok(())), "{what}");
        assert_eq!(done.rest_sum, Some(checksum(&bytes)), "{what}");

        let target = Span { offset_bytes: slot.offset_bytes + MEMORY_BYTES / 2, ..slot };
        let around = Span {
            offset_bytes: target.offset_bytes - 64,
            length_bytes: target.length_bytes + 128,
        };
        memory.copy_from(around.offset_bytes, &vec![0xaa; around.length_bytes]).expect("inside");
        let buffer = PageBuf::zeroed(1);
        let done = one(disk, DiskOp::Read { id: 2, offset_bytes, buffer, rest: Some(target) });
        assert_eq!(done.result, Ok(()), "{what}");
        assert_eq!(done.rest_sum, Some(checksum(&bytes)), "{what}");
        assert!(done.buffer.is_some_and(|b| b.bytes().iter().all(|b| *b == 0x5a)), "{what}");
        let mut read = vec![0; around.length_bytes];
        memory.copy_to(around.offset_bytes, &mut read).expect("it is inside");
        assert!(read[64..read.len() - 64] == bytes, "{what}");
        assert!(read[..64].iter().chain(&read[read.len() - 64..]).all(|b| *b == 0xaa), "{what}");

        let pages = 1 + slot.length_bytes.div_ceil(PAGE_BYTES);
        let buffer = PageBuf::zeroed(pages);
        let done = one(disk, DiskOp::Read { id: 3, offset_bytes, buffer, rest: None });
        let buffer = done.buffer.expect("that of the operation");
        let (payload, padding) = buffer.bytes()[PAGE_BYTES..].split_at(bytes.len());
        assert!(payload == bytes && padding.iter().all(|byte| *byte == 0), "{what}");
    }

    fn check_all(open: impl Fn(&Path, Slots) -> Option<Box<dyn Disk + Send>>, what: &str) {
        let dir = tempfile::tempdir().expect("a folder");
        let memory = SharedMemory::create("slots", MEMORY_BYTES, Prefault::No).expect("memory");
        let memory = Arc::new(memory);
        let Some(mut disk) = open(dir.path(), Slots::new(Arc::clone(&memory))) else {
            let why = "skipped, there is no io_uring for this process";
            writeln!(std::io::stderr(), "{what}: {why}").ok();
            return;
        };
        for offset_bytes in [4096, 512, 4096 + 64, 8192 + 1] {
            for length_bytes in [1, 511, 512, 4096, 4096 + 512, 9000, 32_768, 32_768 + 64] {
                let slot = Span { offset_bytes, length_bytes };
                check(&mut *disk, &memory, slot, &format!("{what}: {slot:?}"));
            }
        }
    }

    fn config(dir: &Path, io: SsdIo) -> Ssd {
        Ssd { dir: Some(dir.to_owned()), capacity_bytes: DISK_BYTES, io, ..Ssd::default() }
    }

    #[test]
    fn a_disk_that_a_node_has_is_not_opened_by_another_one() {
        let memory = SharedMemory::create("slots", MEMORY_BYTES, Prefault::No).expect("memory");
        let slots = Slots::new(Arc::new(memory));
        let dir = tempfile::tempdir().expect("a folder");
        for io in [SsdIo::Auto, SsdIo::Plain] {
            let opened = open_disk(&config(dir.path(), io), &slots).expect("a disk");
            let error = open_disk(&config(dir.path(), io), &slots).expect_err("it is taken");
            assert!(error.contains("each node needs its own `ssd.dir`"), "{error}");
            drop(opened);
        }
    }

    #[test]
    fn payloads_come_from_slots_and_to_slots_wherever_these_lie_and_nothing_beside_them_changes() {
        for io in [SsdIo::Auto, SsdIo::Plain] {
            let open =
                |dir: &Path, slots| Some(open_disk(&config(dir, io), &slots).expect("a disk").disk);
            check_all(open, &format!("{io:?}"));
        }
        // Whatever the disk of this host asks for.
        let sectors = Alignment { address_bytes: 512, length_bytes: 512 };
        let mixed = Alignment { address_bytes: 4, length_bytes: 4096 };
        for alignment in [Alignment::NONE, sectors, mixed, Alignment::PAGES] {
            let open = |dir: &Path, slots| {
                let file = open_file(&dir.join("file"), OFlags::empty()).expect("a file");
                file.set_len(DISK_BYTES).expect("it is lengthened");
                let disk = UringDisk::new(file, DISK_BYTES, slots, alignment).ok()?;
                Some(Box::new(disk) as Box<dyn Disk + Send>)
            };
            check_all(open, &format!("{alignment:?}"));
        }
    }
}
