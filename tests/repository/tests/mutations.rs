//! Each mutation of the list has its place beside a guard in the code. `kvasir/tests/binary.rs` checks that an ordinary
//! binary contains none.

use std::collections::BTreeSet;

use kvasir_mutation::POINTS;
use kvasir_tests_repository::{assert_none, files, read};

/// The names that the code asks about.
fn applied() -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    for file in files(&[".rs"]) {
        if file.starts_with("tests/mutation") || file.starts_with("tests/repository") {
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
    let applied = applied();
    let unused = POINTS.iter().filter(|point| !applied.contains(point.name));
    let unused = unused.map(|point| format!("{} is applied nowhere", point.name));
    assert_none("mutations", &unused.collect::<Vec<_>>());
}
