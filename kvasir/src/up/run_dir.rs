//! The folder of one cluster: configurations, logs, sockets, `state.json`. A temporary one is
//! removed at the end; one that was asked for stays, and belongs to one cluster at a time.

use std::fs::{File, TryLockError};
use std::path::{Path, PathBuf};

use tempfile::TempDir;

/// `<run dir>/<node>/descriptors.sock` must fit into the 108 bytes of a Unix socket's address.
const PATH_BYTES_MAX: usize = 64;

#[derive(Debug, thiserror::Error)]
pub enum RunDirError {
    #[error("the run folder {} cannot be used: {source}", path.display())]
    Unusable { path: PathBuf, source: std::io::Error },
    #[error("the run folder {} is used by another cluster", path.display())]
    InUse { path: PathBuf },
    #[error(
        "the path of the run folder {} is too long for the sockets in it: at most {PATH_BYTES_MAX} \
         bytes; choose another with --run-dir",
        path.display()
    )]
    TooLong { path: PathBuf },
}

#[derive(Debug)]
pub struct RunDir {
    path: PathBuf,
    temporary: Option<TempDir>,
    /// Held for as long as the cluster runs; the kernel lets go of it when the process ends.
    _lock: File,
}

impl RunDir {
    pub fn open(asked: Option<&Path>, temporary: &Path) -> Result<RunDir, RunDirError> {
        match asked {
            Some(path) => Self::open_asked(path),
            None => Self::open_temporary(temporary),
        }
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Leaves a temporary folder where it is, so that its logs can be read.
    pub fn keep(&mut self) {
        if let Some(temporary) = &mut self.temporary {
            temporary.disable_cleanup(true);
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
        let temporary = tempfile::Builder::new()
            .prefix("kvasir-")
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
    let file = File::create(path.join("lock")).map_err(unusable)?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(TryLockError::WouldBlock) => Err(RunDirError::InUse { path: path.into() }),
        Err(TryLockError::Error(source)) => Err(unusable(source)),
    }
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
}
