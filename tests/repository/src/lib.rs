//! Checks on the repository itself; what is here is what they share. They need only the files and
//! Cargo, and reach no network.
//!
//! - `tests/packages.rs`: allowed dependencies, dependencies forbidden for cores, one path for each public item, lints
//! - `tests/files.rs`: file sizes, unsafe code, unfinished work, the licence
//! - `tests/documents.rs`: links between documents
//! - `tests/commands.rs`: the record of documented commands
//! - `tests/mutations.rs`: each mutation has its place in the code
//! - `tests/style.rs`: text in plain English
//!
//! [`modules`] reads the declarations of Rust files, [`prose`] their text.
#![forbid(unsafe_code)]

pub mod modules;
pub mod prose;
mod python;

use std::path::{Path, PathBuf};

/// The root of the workspace.
pub fn root() -> PathBuf {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    here.ancestors().nth(2).expect("this package lies two folders below the root").to_owned()
}

/// Built, fetched or hidden folders, which are nobody's source.
const PASSED_OVER: [&str; 4] = ["target", "__pycache__", "node_modules", "venv"];

/// Every file of the project whose name ends so, sorted, relative to the root.
pub fn files(endings: &[&str]) -> Vec<PathBuf> {
    let root = root();
    let mut found = Vec::new();
    let mut folders = vec![root.clone()];
    while let Some(folder) = folders.pop() {
        let entries = std::fs::read_dir(&folder).expect("a folder of the project is readable");
        for entry in entries {
            let entry = entry.expect("a folder of the project is readable");
            let name = entry.file_name().to_string_lossy().into_owned();
            let kind = entry.file_type().expect("a file of the project has a type");
            let is_hidden = name.starts_with('.') && name != ".ci";
            if kind.is_dir() && !is_hidden && !PASSED_OVER.contains(&name.as_str()) {
                folders.push(entry.path());
            } else if kind.is_file() && endings.iter().any(|ending| name.ends_with(ending)) {
                let path = entry.path();
                found.push(path.strip_prefix(&root).expect("below the root").to_owned());
            }
        }
    }
    found.sort();
    found
}

/// The first line of a file without an ending, if the file is a script.
pub fn script_line(path: &Path) -> Option<String> {
    let name = path.file_name()?.to_string_lossy();
    let bytes = (!name.contains('.')).then(|| std::fs::read(root().join(path)).ok())??;
    let line = bytes.split(|byte| *byte == b'\n').next()?.strip_prefix(b"#!")?;
    Some(String::from_utf8_lossy(line).into_owned())
}

pub fn read(path: &Path) -> String {
    std::fs::read_to_string(root().join(path))
        .unwrap_or_else(|error| panic!("{} is no readable text: {error}", path.display()))
}

/// One complaint per line, all at once, so that one run shows everything that is to be done.
pub fn assert_none(what: &str, complaints: &[String]) {
    assert!(complaints.is_empty(), "{what}:\n  {}", complaints.join("\n  "));
}
