//! Blocks that follow no other, under names that say nothing of their contents: what was erased never comes back,
//! and no content that is older than the last one that was acknowledged.

use std::collections::BTreeMap;

use kvasir_log::{AppendError, ExtentBuf, ReadError, Record};

use crate::support::{DISK_BYTES, SEGMENT_PAGES, TestLog, key, record};

const OBJECTS: u32 = 6;
/// Blocks of chains, which take the room.
const OTHERS: u32 = 100;

/// What a name stands for: nothing, or a content.
type Version = Option<u32>;

fn content(version: u32) -> Vec<u8> {
    let length = 4 + (version as usize * 1_237) % 8_000;
    version
        .to_le_bytes()
        .into_iter()
        .chain((4..length).map(|at| (at as u32 ^ version) as u8))
        .collect()
}

/// Drawn without any pattern that matters.
struct Random(u64);

impl Random {
    fn below(&mut self, end: u32) -> u32 {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as u32 % end
    }
}

/// Of one name.
#[derive(Debug, Default)]
struct Known {
    acknowledged: Version,
    /// Its extent was forgotten without being erased: it may be there after a crash.
    is_evicted: bool,
    /// Asked for since, in order.
    asked: Vec<Version>,
}

struct Model {
    log: TestLog,
    random: Random,
    known: BTreeMap<u32, Known>,
    next_version: u32,
    next_other: u32,
    others: Vec<u32>,
}

impl Model {
    fn new(seed: u64) -> Self {
        Model {
            log: TestLog::new(seed),
            random: Random(seed),
            known: (0..OBJECTS).map(|n| (n, Known::default())).collect(),
            next_version: 1,
            next_other: OTHERS,
            others: Vec::new(),
        }
    }

    fn put(&mut self, n: u32) {
        let version = self.next_version;
        self.next_version += 1;
        let bytes = content(version);
        let record = Record { parent: None, mark: None, ..record(n) };
        let mut extent = ExtentBuf::new(record, bytes.len());
        extent.payload_mut().copy_from_slice(&bytes);
        self.asked(n).push(Some(version));
        self.log.log.append(u64::from(n), extent);
        self.pump();
    }

    fn erase(&mut self, n: u32) {
        self.asked(n).push(None);
        self.log.log.erase(u64::from(n), key(n), record(n).namespace);
        self.pump();
    }

    fn asked(&mut self, n: u32) -> &mut Vec<Version> {
        &mut self.known.get_mut(&n).expect("one of them").asked
    }

    fn pump(&mut self) {
        self.log.pump();
        while self.log.log.counts().waiting > 0 {
            assert!(self.log.step(), "nothing is under way: {:?}", self.log.log.counts());
        }
        self.take_answers();
    }

    fn take_answers(&mut self) {
        for (n, result) in std::mem::take(&mut self.log.appended) {
            let Some(known) = self.known.get_mut(&n) else { continue };
            match result {
                Ok(()) => {
                    (known.acknowledged, known.is_evicted) = (known.asked.remove(0), false);
                }
                // Of the last one: it was waited for.
                Err(AppendError::Full) => drop(known.asked.pop()),
                Err(error) => panic!("nothing is wrong with the disk: {error}"),
            }
        }
    }

    fn settle(&mut self) {
        self.log.settle();
        self.take_answers();
    }

    fn churn(&mut self) {
        let n = self.next_other;
        self.next_other += 1;
        if self.log.try_append(n).is_ok() {
            self.others.push(n);
        }
        self.take_answers();
        while self.others.len() > 25 {
            self.settle();
            let at = self.random.below(self.others.len() as u32) as usize;
            self.log.log.remove(key(self.others.swap_remove(at)), false);
        }
    }

    /// Nobody was promised anything.
    fn is_nothing(&self, n: u32) -> bool {
        self.known[&n].is_evicted || self.known[&n].acknowledged.is_none()
    }

    fn read(&mut self, n: u32) -> Version {
        match self.log.read(n) {
            Ok(bytes) => {
                let version = u32::from_le_bytes(*bytes.first_chunk().expect("four bytes"));
                assert!(bytes == content(version), "object {n} has bytes that nobody has written");
                Some(version)
            }
            Err(ReadError::Missing) => None,
            // Its segment has been written over in part.
            Err(ReadError::Rotten) if self.is_nothing(n) => None,
            Err(error) => panic!("object {n}: {error}"),
        }
    }

    fn check(&mut self) {
        self.settle();
        for n in 0..OBJECTS {
            let found = self.read(n);
            let Known { acknowledged, is_evicted, .. } = self.known[&n];
            let want = if is_evicted { None } else { acknowledged };
            assert_eq!(found, want, "object {n}");
        }
    }

    fn crash(mut self) -> Self {
        self.take_answers();
        self.log = self.log.crash();
        // As the node does with what follows nothing that is there.
        (OTHERS..self.next_other).for_each(|n| self.log.log.remove(key(n), false));
        self.others.clear();
        for n in 0..OBJECTS {
            let found = self.read(n);
            let known = self.known.get_mut(&n).expect("one of them");
            let may_be = found == known.acknowledged || known.asked.contains(&found);
            assert!(
                may_be || known.is_evicted && found.is_none(),
                "object {n}: {found:?} of {known:?}"
            );
            known.asked.clear();
            if !(known.is_evicted && found.is_none()) {
                (known.acknowledged, known.is_evicted) = (found, false);
            }
        }
        self
    }

    fn step(mut self) -> Self {
        let n = self.random.below(OBJECTS);
        match self.random.below(20) {
            0..=5 => self.put(n),
            6..=9 => self.erase(n),
            10 if self.known[&n].asked.is_empty() => {
                self.log.log.remove(key(n), true);
                self.known.get_mut(&n).expect("one of them").is_evicted = true;
            }
            10..=15 => (0..self.random.below(8)).for_each(|_| self.churn()),
            16 | 17 => {
                for _ in 0..self.random.below(6) {
                    self.log.step();
                }
                self.take_answers();
            }
            18 => self.check(),
            _ => return self.crash(),
        }
        self
    }
}

#[test]
fn what_was_erased_or_replaced_does_not_come_back() {
    for seed in 0..3_000 {
        let mut model = Model::new(seed);
        for _ in 0..150 {
            model = model.step();
        }
        model.check();
        model.crash();
    }
}

#[test]
fn removals_take_no_room_when_nothing_is_left_that_they_remove() {
    let mut model = Model::new(1);
    for n in 0..OBJECTS {
        model.put(n);
        model.settle();
        model.erase(n);
    }
    model.settle();
    assert!(model.log.log.counts().buried_bytes > 0, "their extents are on the disk");
    // All of the disk is used again, twice.
    (0..4 * (DISK_BYTES / 4_096) as u32 / SEGMENT_PAGES as u32 * 10).for_each(|_| model.churn());
    model.settle();
    assert_eq!(model.log.log.counts().buried_bytes, 0);
    model.crash();
}

#[test]
fn what_the_log_never_had_is_erased_without_writing() {
    let mut model = Model::new(2);
    let before = model.log.disk.writes_total;
    model.erase(3);
    model.settle();
    assert_eq!(model.log.disk.writes_total, before);
    assert!(model.known[&3].asked.is_empty(), "it was answered");
}
