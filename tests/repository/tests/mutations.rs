//! Each mutation of the list has its place beside a guard in the code. That an ordinary binary has none is
//! checked in `kvasir/tests/binary.rs`.

use std::collections::BTreeSet;
use std::path::Path;

use kvasir_tests_repository::{assert_none, files, read};

const FOLDER: &str = "tests/mutation";

/// The names in the list.
fn listed() -> BTreeSet<String> {
    let name = |line: &str| Some(line.strip_prefix("    ")?.split_once(": Finder::")?.0.to_owned());
    read(&Path::new(FOLDER).join("src/points.rs")).lines().filter_map(name).collect()
}

/// The names that the code asks about.
fn applied() -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    for file in files(&[".rs"]) {
        if file.starts_with(FOLDER) || file.starts_with("tests/repository") {
            continue;
        }
        for rest in read(&file).split("mutated(Mutation::").skip(1) {
            names.extend(rest.split(|it: char| !it.is_alphanumeric()).next().map(str::to_owned));
        }
    }
    names
}

#[test]
fn each_mutation_of_the_list_has_a_place_in_the_code() {
    let (listed, applied) = (listed(), applied());
    assert!(listed.len() >= 177, "{} mutations are listed", listed.len());
    let unused = listed.difference(&applied).map(|name| format!("{name} is applied nowhere"));
    assert_none("mutations", &unused.collect::<Vec<_>>());
}
