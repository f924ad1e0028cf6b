//! What every file must keep to.

use std::path::{Path, PathBuf};

use kvasir_tests_repository::{assert_none, files, read, root};

const LINES_MAX: usize = 900;

/// Shared memory, descriptors and kernels: the rim. Every other package forbids unsafe code.
const MAY_BE_UNSAFE: [&str; 12] = [
    "transfer/checksum/src",
    "transfer/src",
    "transfer/verbs/src",
    "transfer/libfabric/src",
    "store-node/src",
    "store-node/client/src",
    "store-node/client/capi/src",
    "store-node/cuda/src",
    "store-node/attention/src",
    "store-node/route/src",
    "engines/reference/src",
    // It stands in for the allocator, to count.
    "tests/fuzzing/src",
];

/// Where each package begins.
const ROOTS: [&str; 25] = [
    "kvasir/src/main.rs",
    "kvasir/process/src/lib.rs",
    "proto/src/lib.rs",
    "transfer/src/lib.rs",
    "transfer/checksum/src/lib.rs",
    "transfer/core/src/lib.rs",
    "transfer/verbs/src/lib.rs",
    "transfer/libfabric/src/lib.rs",
    "store-node/src/lib.rs",
    "store-node/attach/src/lib.rs",
    "store-node/client/src/lib.rs",
    "store-node/client/capi/src/lib.rs",
    "store-node/blocks/src/lib.rs",
    "store-node/log/src/lib.rs",
    "store-node/cuda/src/lib.rs",
    "store-node/attention/src/lib.rs",
    "store-node/route/src/lib.rs",
    "conductor/src/lib.rs",
    "conductor/placement/src/lib.rs",
    "engines/reference/src/lib.rs",
    "benches/replay/src/lib.rs",
    "tests/cluster-sim/src/lib.rs",
    "tests/fuzzing/src/lib.rs",
    "tests/mutation/src/lib.rs",
    "tests/repository/src/lib.rs",
];

fn is_generated(path: &Path) -> bool {
    let path = path.to_string_lossy();
    path.contains("generated") || path.contains("bindings")
}

fn source_files() -> Vec<PathBuf> {
    files(&[".rs", ".py", ".proto", ".sh", ".cu"])
}

#[test]
fn no_file_is_longer_than_900_lines() {
    let complaints: Vec<String> = source_files()
        .into_iter()
        .filter(|path| !is_generated(path))
        .map(|path| (read(&path).lines().count(), path))
        .filter(|(lines, _)| *lines > LINES_MAX)
        .map(|(lines, path)| format!("{} has {lines} lines", path.display()))
        .collect();
    assert_none("too long", &complaints);
}

#[test]
fn every_source_file_says_what_it_is() {
    let complaints: Vec<String> = files(&[".rs"])
        .into_iter()
        .filter(|path| !is_generated(path))
        .filter(|path| !read(path).starts_with("//!"))
        .map(|path| format!("{} begins without a header", path.display()))
        .collect();
    assert_none("headers", &complaints);
}

#[test]
fn packages_away_from_the_rim_forbid_unsafe_code() {
    let complaints: Vec<String> = ROOTS
        .into_iter()
        .filter(|root| {
            !MAY_BE_UNSAFE.iter().any(|rim| Path::new(root).parent() == Some(Path::new(rim)))
        })
        .filter(|root| !read(Path::new(root)).contains("#![forbid(unsafe_code)]"))
        .map(|root| format!("{root} does not forbid unsafe code"))
        .collect();
    assert_none("unsafe code", &complaints);
}

#[test]
fn the_list_of_package_roots_is_whole() {
    let found: Vec<PathBuf> = files(&["Cargo.toml"])
        .into_iter()
        .filter_map(|path| path.parent().map(|folder| folder.join("src")))
        .filter(|folder| root().join(folder).is_dir())
        .collect();
    let complaints: Vec<String> = found
        .iter()
        .filter(|folder| {
            !ROOTS.iter().any(|root| Path::new(root).parent() == Some(folder.as_path()))
        })
        .map(|folder| format!("{} is not listed", folder.display()))
        .collect();
    assert_none("packages", &complaints);
}

#[test]
fn nothing_unfinished_is_left_behind() {
    // Put together here, so that this file does not find itself.
    let marks = [["TO", "DO"].concat(), ["FIX", "ME"].concat(), ["XX", "X:"].concat()];
    let complaints: Vec<String> = files(&[".rs", ".py", ".proto", ".toml", ".md", ".sh"])
        .into_iter()
        .filter(|path| !is_generated(path))
        .flat_map(|path| {
            let text = read(&path);
            let hits =
                text.lines().enumerate().filter(|(_, line)| marks.iter().any(|m| line.contains(m)));
            hits.map(|(index, _)| format!("{}:{}", path.display(), index + 1)).collect::<Vec<_>>()
        })
        .collect();
    assert_none("unfinished", &complaints);
}

#[test]
fn the_licence_is_there() {
    let text = read(Path::new("LICENSE"));
    assert!(text.contains("Apache License") && text.contains("Version 2.0, January 2004"));
}
