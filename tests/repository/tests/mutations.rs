//! Patches that take out one rule each: they fit the files as they are now, and each is in the table of
//! its folder. One that does not fit proves nothing, and is noticed only when it is run.

use std::collections::BTreeSet;
use std::path::Path;

use kvasir_tests_repository::{assert_none, files, read};

/// One place that a patch changes: the lines that must be there before, and the file.
struct Hunk {
    file: String,
    before: String,
}

fn hunks(patch: &str) -> Vec<Hunk> {
    let mut hunks: Vec<Hunk> = Vec::new();
    let mut file = String::new();
    for line in patch.lines() {
        if let Some(path) = line.strip_prefix("--- a/") {
            path.split('\t').next().unwrap_or(path).clone_into(&mut file);
        } else if line.starts_with("@@ ") {
            hunks.push(Hunk { file: file.clone(), before: String::new() });
        } else if let (Some(hunk), false) = (hunks.last_mut(), line.starts_with("--- ")) {
            let text = match line.as_bytes().first() {
                Some(b' ' | b'-') => &line[1..],
                // Some tools leave the space of an empty line out.
                None => "",
                Some(_) => continue,
            };
            hunk.before += text;
            hunk.before.push('\n');
        }
    }
    hunks
}

#[test]
fn patches_fit_the_files_that_they_change() {
    let mut complaints = Vec::new();
    let patches = files(&[".patch"]);
    assert!(patches.len() > 100, "{} patches were found", patches.len());
    for patch in patches {
        let hunks = hunks(&read(&patch));
        if hunks.is_empty() {
            complaints.push(format!("{} changes nothing", patch.display()));
        }
        for Hunk { file, before } in hunks {
            if !read(Path::new(&file)).contains(before.trim_end_matches('\n')) {
                complaints.push(format!("{} does not fit {file} any more", patch.display()));
            }
        }
    }
    assert_none("patches", &complaints);
}

#[test]
fn every_patch_is_in_the_table_of_its_folder() {
    let patches = files(&[".patch"]);
    let folders: BTreeSet<&Path> = patches.iter().filter_map(|patch| patch.parent()).collect();
    let mut complaints = Vec::new();
    for folder in folders {
        let table = read(&folder.join("README.md"));
        for patch in patches.iter().filter(|patch| patch.parent() == Some(folder)) {
            let name = patch.file_stem().unwrap_or_default().to_string_lossy();
            if !table.contains(&format!("`{name}`")) {
                complaints.push(format!("{} is not in the README beside it", patch.display()));
            }
        }
    }
    assert_none("tables", &complaints);
}
