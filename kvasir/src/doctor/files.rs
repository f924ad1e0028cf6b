//! Files of one value each, as /sys and /proc have them.

use std::fs;
use std::path::Path;

/// The names in a folder, sorted; none when it cannot be read.
pub(super) fn entries(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let mut names: Vec<String> =
        entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

/// Names below `folder` that begin with `prefix` and go on with a digit, sorted.
pub(super) fn folders(folder: &Path, prefix: &str) -> Vec<String> {
    let is_one = |name: &String| {
        name.strip_prefix(prefix).is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_digit()))
    };
    entries(folder).into_iter().filter(is_one).collect()
}

/// What a file says, without space around it.
pub(super) fn word(file: &Path) -> Option<String> {
    Some(fs::read_to_string(file).ok()?.trim().to_owned())
}

/// A made-up root of a system with these files.
#[cfg(test)]
pub(super) fn root_with(files: &[(&str, &str)]) -> tempfile::TempDir {
    let root = tempfile::tempdir().unwrap();
    for (path, text) in files {
        let path = root.path().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }
    root
}
