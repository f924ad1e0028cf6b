//! Provider `shm` within one process: its endpoints point into each other's memory, and go on doing so when
//! one of them was closed (seen with 1.17: whoever writes, or finishes what was written to it, crashes).
//! Between processes each has a mapping of its own, and nothing is wrong.
//!
//! So an endpoint of this process that has met another one of it, because either was told of the other, is
//! not closed any more: it stays, unpolled, until the process ends. Nothing lands through one that is not
//! polled, because there the receiver copies.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Mutex;

use crate::domain::lock;

/// An address vector, by where the provider keeps it: unique as long as it is open.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Vector(pub usize);

struct Open {
    vector: Vector,
    has_met: bool,
}

/// What is open in this process.
struct Neighbours {
    /// Endpoints by their names.
    endpoints: BTreeMap<Vec<u8>, Open>,
    /// Address vectors that were told of one of them: whoever is on such a vector points into it.
    told: BTreeSet<Vector>,
}

static NEIGHBOURS: Mutex<Neighbours> =
    Mutex::new(Neighbours { endpoints: BTreeMap::new(), told: BTreeSet::new() });

/// Without what follows its end.
fn text(name: &[u8]) -> &[u8] {
    name.split(|byte| *byte == 0).next().unwrap_or_default()
}

/// An endpoint of this name was opened on `vector`.
pub(crate) fn opened(name: &[u8], vector: Vector) {
    let mut here = lock(&NEIGHBOURS);
    let has_met = here.told.contains(&vector);
    here.endpoints.insert(text(name).to_vec(), Open { vector, has_met });
}

/// A peer of this name is about to be inserted into `vector`.
pub(crate) fn told_of(name: &[u8], vector: Vector) {
    let mut here = lock(&NEIGHBOURS);
    // Under the lock, so that it is not closed meanwhile.
    let Some(neighbour) = here.endpoints.get_mut(text(name)) else { return };
    neighbour.has_met = true;
    here.told.insert(vector);
    for open in here.endpoints.values_mut().filter(|open| open.vector == vector) {
        open.has_met = true;
    }
}

/// The address vector is closed, and so is every endpoint on it.
pub(crate) fn vector_closed(vector: Vector) {
    lock(&NEIGHBOURS).told.remove(&vector);
}

/// Where the provider keeps what its endpoints share.
const FOLDER: &str = "/dev/shm/";
const PREFIX: &str = "fi_shm://";

/// Whether the endpoint may be closed. One that may not is withdrawn: no other process finds it any more, and
/// nothing of it outlives this one.
pub(crate) fn may_close(name: &[u8]) -> bool {
    let mut here = lock(&NEIGHBOURS);
    let may_close = !here.endpoints.get(text(name)).is_some_and(|open| open.has_met);
    if may_close {
        here.endpoints.remove(text(name));
    } else if let Some(file) = file(name) {
        // It is gone already where the provider has no such file.
        let _ = std::fs::remove_file(file);
    }
    may_close
}

fn file(name: &[u8]) -> Option<String> {
    let name = std::str::from_utf8(text(name)).ok()?.strip_prefix(PREFIX)?;
    (!name.is_empty() && !name.contains('/')).then(|| format!("{FOLDER}{name}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_leads_to_its_own_file_only() {
        assert_eq!(file(b"fi_shm://7:0:3\0"), Some("/dev/shm/7:0:3".to_owned()));
        for other in [b"fi_shm://".as_slice(), b"fi_shm://../7", b"7:0:3", b"", b"\0fi_shm://7"] {
            assert_eq!(file(other), None);
        }
    }

    #[test]
    fn who_has_not_met_a_neighbour_may_close() {
        let (met, alone) = (Vector(1), Vector(2));
        opened(b"fi_shm://alone\0", alone);
        opened(b"fi_shm://first", met);
        opened(b"fi_shm://told of", Vector(3));
        told_of(b"fi_shm://elsewhere\0\0", alone);
        told_of(b"fi_shm://told of\0\0", met);
        opened(b"fi_shm://second", met);
        assert!(may_close(b"fi_shm://alone"), "it has no neighbours");
        for name in [b"fi_shm://told of".as_slice(), b"fi_shm://first", b"fi_shm://second"] {
            assert!(!may_close(name), "one points into the other");
        }
        vector_closed(met);
        opened(b"fi_shm://third", met);
        assert!(may_close(b"fi_shm://third"), "another vector at the same place");
    }
}
