//! The folder of one cluster: configurations, logs, sockets, `state.json`. A temporary one is
//! removed at the end; one that was asked for stays, and belongs to one cluster at a time. What a
//! killed `up` could not remove, the next one does.

use std::fs::{File, TryLockError};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use tempfile::TempDir;

/// `<run dir>/<node>/descriptors.sock` must fit into the 108 bytes of a Unix socket's address.
const PATH_BYTES_MAX: usize = 64;
const TEMPORARY_PREFIX: &str = "kvasir-up-";
const LOCK: &str = "lock";
/// A file that says that a temporary folder was left for somebody to read.
const KEPT: &str = "kept";
/// A folder whose lock is younger may not have been locked by its owner yet.
const ABANDONED_AFTER: Duration = Duration::from_secs(60);

#[derive(Debug, thiserror::Error)]
pub(super) enum RunDirError {
    #[error("cannot use the run directory {}: {source}; choose another one with --run-dir", path.display())]
    Unusable { path: PathBuf, source: std::io::Error },
    #[error("another cluster uses the run directory {}; choose another one with --run-dir", path.display())]
    InUse { path: PathBuf },
    #[error(
        "the path of the run directory {} is too long for the sockets in it (at most {PATH_BYTES_MAX} \
         bytes); choose another one with --run-dir",
        path.display()
    )]
    TooLong { path: PathBuf },
}

#[derive(Debug)]
pub(super) struct RunDir {
    path: PathBuf,
    temporary: Option<TempDir>,
    /// Held for as long as the cluster runs; the kernel lets go of it when the process ends.
    _lock: File,
}

impl RunDir {
    pub(super) fn open(asked: Option<&Path>, temporary: &Path) -> Result<RunDir, RunDirError> {
        match asked {
            Some(path) => Self::open_asked(path),
            None => Self::open_temporary(temporary),
        }
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Leaves a temporary folder where it is, so that its logs can be read.
    pub(super) fn keep(&mut self) {
        if let Some(temporary) = &mut self.temporary {
            temporary.disable_cleanup(true);
            // Without the mark the folder goes with the next cluster, which is no reason to fail.
            let _ = File::create(self.path.join(KEPT));
        }
    }

    fn open_asked(path: &Path) -> Result<RunDir, RunDirError> {
        let unusable = |source| RunDirError::Unusable { path: path.into(), source };
        std::fs::create_dir_all(path).map_err(unusable)?;
        let path = path.canonicalize().map_err(unusable)?;
        let lock = lock(&path)?;
        Ok(RunDir { path, temporary: None, _lock: lock })
    }

    fn open_temporary(parent: &Path) -> Result<RunDir, RunDirError> {
        remove_abandoned(parent, SystemTime::now());
        let temporary = tempfile::Builder::new()
            .prefix(TEMPORARY_PREFIX)
            .tempdir_in(parent)
            .map_err(|source| RunDirError::Unusable { path: parent.into(), source })?;
        let path = temporary.path().to_owned();
        let lock = lock(&path)?;
        Ok(RunDir { path, temporary: Some(temporary), _lock: lock })
    }
}

fn lock(path: &Path) -> Result<File, RunDirError> {
    if path.as_os_str().len() > PATH_BYTES_MAX {
        return Err(RunDirError::TooLong { path: path.into() });
    }
    let unusable = |source| RunDirError::Unusable { path: path.into(), source };
    let file = File::create(path.join(LOCK)).map_err(unusable)?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(TryLockError::WouldBlock) => Err(RunDirError::InUse { path: path.into() }),
        Err(TryLockError::Error(source)) => Err(unusable(source)),
    }
}

/// Removes the temporary folders of clusters whose `up` was killed. One that cannot be removed, such
/// as another user's, is none of this cluster's business.
fn remove_abandoned(parent: &Path, now: SystemTime) {
    for entry in std::fs::read_dir(parent).into_iter().flatten().flatten() {
        let is_ours = entry.file_name().to_string_lossy().starts_with(TEMPORARY_PREFIX)
            && entry.file_type().is_ok_and(|kind| kind.is_dir());
        if is_ours && is_abandoned(&entry.path(), now) {
            let _ = std::fs::remove_dir_all(entry.path());
        }
    }
}

fn is_abandoned(path: &Path, now: SystemTime) -> bool {
    let Ok(lock) = File::open(path.join(LOCK)) else { return false };
    let age = lock.metadata().and_then(|data| data.modified()).map(|at| now.duration_since(at));
    let is_old = age.is_ok_and(|age| age.is_ok_and(|age| age >= ABANDONED_AFTER));
    is_old && !path.join(KEPT).exists() && lock.try_lock().is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_temporary_folder_is_removed_unless_it_is_kept() {
        let parent = tempfile::tempdir().unwrap();
        let folder = RunDir::open(None, parent.path()).unwrap();
        let path = folder.path().to_owned();
        drop(folder);
        assert!(!path.exists());

        let mut folder = RunDir::open(None, parent.path()).unwrap();
        folder.keep();
        let path = folder.path().to_owned();
        drop(folder);
        assert!(path.exists());
    }

    #[test]
    fn a_folder_that_was_asked_for_stays_and_has_one_owner() {
        let parent = tempfile::tempdir().unwrap();
        let path = parent.path().join("run");
        let first = RunDir::open(Some(&path), parent.path()).unwrap();
        assert!(matches!(RunDir::open(Some(&path), parent.path()), Err(RunDirError::InUse { .. })));
        drop(first);
        assert!(RunDir::open(Some(&path), parent.path()).is_ok());
        let long = parent.path().join("x".repeat(PATH_BYTES_MAX));
        assert!(matches!(
            RunDir::open(Some(&long), parent.path()),
            Err(RunDirError::TooLong { .. })
        ));
    }

    #[test]
    fn what_a_killed_cluster_left_is_removed_and_nothing_else() {
        let parent = tempfile::tempdir().unwrap();
        let open = || RunDir::open(None, parent.path()).unwrap();
        let (mut killed, mut kept, running) = (open(), open(), open());
        let [killed_path, kept_path, running_path] =
            [&killed, &kept, &running].map(|folder| folder.path().to_owned());
        kept.keep();
        killed.temporary.as_mut().unwrap().disable_cleanup(true);
        drop((killed, kept));
        let other = parent.path().join("other");
        std::fs::create_dir(&other).unwrap();
        File::create(other.join(LOCK)).unwrap();

        remove_abandoned(parent.path(), SystemTime::now());
        assert!(killed_path.exists(), "its owner may be starting");
        remove_abandoned(parent.path(), SystemTime::now() + ABANDONED_AFTER);
        assert!(!killed_path.exists());
        assert!(kept_path.exists() && running_path.exists() && other.exists());
    }
}
