//! Finding a disk and an index on this host: a file of full length, io_uring past the page cache
//! where that is allowed, plain calls elsewhere.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use kvasir_log::{Disk, KeyIndex, MemoryIndex};
use rustix::fs::{FallocateFlags, OFlags, fallocate};

use super::faulty::FaultyDisk;
use super::plain::PlainDisk;
use super::sled_index::SledIndex;
use super::uring::UringDisk;
use crate::config::{Ssd, SsdIo};

const LOG_FILE: &str = "kvasir.log";
const INDEX_DIR: &str = "index";

/// A disk, and in words how it is driven.
pub struct Opened {
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
pub fn open_disk(config: &Ssd) -> Result<Opened, String> {
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
    let held = file.metadata().map_err(failed)?.len();
    if held > config.bytes {
        return Err(format!(
            "{} has {held} bytes, and `ssd.bytes` is {}: set it to as many, or remove the file with \
             all that it holds",
            path.display(),
            config.bytes
        ));
    }
    if held < config.bytes {
        lengthen(&file, config.bytes).map_err(failed)?;
    }
    let (disk, how): (Box<dyn Disk + Send>, _) = match config.io {
        SsdIo::Plain => (Box::new(PlainDisk::new(file, config.bytes)), "plain calls"),
        SsdIo::Auto => match UringDisk::new(file, config.bytes) {
            Ok(disk) if is_direct => (Box::new(disk), "io_uring with O_DIRECT"),
            Ok(disk) => (Box::new(disk), "io_uring"),
            Err((file, error)) => {
                tracing::warn!(%error, "no io_uring here; the SSD is used by plain calls");
                (Box::new(PlainDisk::new(file, config.bytes)), "plain calls")
            }
        },
    };
    let disk = match &config.faults {
        Some(faults) => Box::new(FaultyDisk::new(disk, faults.clone())),
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
pub fn open_index(dir: &Path) -> Box<dyn KeyIndex> {
    match SledIndex::open(&dir.join(INDEX_DIR)) {
        Ok(index) => Box::new(index),
        Err(error) => {
            tracing::error!(%error, "the key index is kept in memory alone");
            Box::new(MemoryIndex::default())
        }
    }
}

/// Throws the index away.
pub fn drop_index(dir: &Path) {
    let index = dir.join(INDEX_DIR);
    if let Err(error) = std::fs::remove_dir_all(&index) {
        tracing::warn!(%error, dir = %index.display(), "the key index cannot be removed");
    }
}
