//! What a block was marked with last counts, also after crashes: a mark that was taken away, or got a
//! shorter time, does not come back with an older extent, whatever was removed and cleaned since.

use std::collections::BTreeMap;

use kvasir_log::AppendError;
use kvasir_proto::Mark;
use proptest::prelude::*;

use crate::support::{DISK_BYTES, TestLog, key, until};

/// Blocks that get marks and lose them.
const MARKED: u32 = 2;

#[derive(Debug, Clone)]
enum Step {
    /// Writes a block with this mark, or without one.
    Write(u32, Option<u64>),
    Remove(u32),
    /// Writes so many others and removes them, so that segments are used again.
    Churn(u32),
    /// Some operations end.
    Work(u32),
    Crash,
}

fn step() -> impl Strategy<Value = Step> {
    let block = 0..MARKED;
    prop_oneof![
        5 => (block.clone(), prop::option::of(1..4u64)).prop_map(|(n, to)| Step::Write(n, to)),
        4 => block.prop_map(Step::Remove),
        3 => (1..80u32).prop_map(Step::Churn),
        2 => (1..9u32).prop_map(Step::Work),
        1 => Just(Step::Crash),
    ]
}

/// What may be found of a block at the next start.
#[derive(Debug, Clone, Default)]
struct Known {
    /// It was acknowledged, and not removed since.
    is_kept: bool,
    /// The last mark that was acknowledged, and those that were asked for since.
    marks: Vec<Option<Mark>>,
}

fn until_of(mark: Option<Mark>) -> Option<u64> {
    mark.map(|mark| mark.expires_unix_ms)
}

struct Model {
    log: Option<TestLog>,
    known: BTreeMap<u32, Known>,
    next_other: u32,
    /// Others that are there.
    others: Vec<u32>,
    /// Appends of marked blocks that were not answered, in order.
    asked: Vec<(u32, Option<Mark>)>,
}

impl Model {
    fn log(&mut self) -> &mut TestLog {
        self.log.as_mut().expect("between crashes")
    }

    fn append(&mut self, n: u32, mark: Option<Mark>) {
        let mut tries = 0;
        while let Err(error) = self.log().try_append_as(n, mark) {
            assert_eq!(error, AppendError::Full);
            assert!(self.log().step(), "full for ever: {:?}", self.log().log.counts());
            tries += 1;
            assert!(tries < 10_000, "full for ever: {:?}", self.log().log.counts());
        }
    }

    fn take_answers(&mut self) {
        for (n, result) in std::mem::take(&mut self.log().appended) {
            if n >= MARKED {
                continue;
            }
            assert_eq!(result, Ok(()), "nothing is wrong with the disk");
            let first = self.asked.iter().position(|(of, _)| *of == n).expect("it was asked for");
            let (_, mark) = self.asked.remove(first);
            let known = self.known.entry(n).or_default();
            let at = known.marks.iter().rposition(|of| *of == mark).expect("it was asked for");
            known.marks.drain(..at);
            known.is_kept = true;
        }
    }

    fn take(&mut self, step: &Step) {
        match *step {
            Step::Write(n, to) => {
                let mark = to.map(until);
                // Two at once of one block are told apart by nothing: one is waited for.
                if self.asked.iter().any(|(of, _)| *of == n) {
                    self.settle();
                }
                self.known.entry(n).or_default().marks.push(mark);
                self.asked.push((n, mark));
                self.append(n, mark);
            }
            Step::Remove(n) => {
                // One that is being written would be there again after it.
                if self.asked.iter().any(|(of, _)| *of == n) {
                    self.settle();
                }
                self.log().log.remove(key(n), false);
                if let Some(known) = self.known.get_mut(&n) {
                    known.is_kept = false;
                }
            }
            Step::Churn(count) => {
                for _ in 0..count {
                    let n = self.next_other;
                    self.next_other += 1;
                    self.append(n, None);
                    self.others.push(n);
                    if self.others.len() > 20 {
                        self.settle();
                        // Some stay long, so that segments are not used again in their order.
                        let at = n as usize * 7 % self.others.len();
                        let gone = self.others.swap_remove(at);
                        self.log().log.remove(key(gone), false);
                    }
                }
            }
            Step::Work(count) => {
                for _ in 0..count {
                    self.log().step();
                }
            }
            Step::Crash => self.crash(),
        }
        self.take_answers();
    }

    fn settle(&mut self) {
        self.log().settle();
        self.take_answers();
    }

    fn crash(&mut self) {
        self.take_answers();
        let mut log = self.log.take().expect("between crashes").crash();
        self.asked.clear();
        (MARKED..self.next_other).for_each(|n| log.log.remove(key(n), false));
        self.others.clear();
        for (n, known) in &mut self.known {
            let found = log.marks.get(&key(*n)).copied();
            // Of a block that was removed an older extent may come back, whole or overwritten in part.
            let found = found.filter(|_| known.is_kept || log.has(*n));
            match found {
                Some(mark) => {
                    // What comes back promises no more.
                    let weaker =
                        |of: &Option<Mark>| !known.is_kept && until_of(mark) <= until_of(*of);
                    let is_good = known.marks.iter().any(|of| *of == mark || weaker(of));
                    assert!(is_good, "block {n} has {mark:?} of {known:?}");
                    *known = Known { is_kept: true, marks: vec![mark] };
                }
                None => {
                    assert!(!known.is_kept, "block {n} is lost: {known:?}");
                    known.is_kept = false;
                    // Nothing of it is left, or only what a mark of now would outlast.
                    known.marks.truncate(known.marks.len().min(1));
                }
            }
        }
        self.log = Some(log);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..Default::default() })]

    #[test]
    fn the_last_mark_of_a_block_counts_after_any_crash(
        seed in any::<u64>(),
        steps in prop::collection::vec(step(), 1..100),
    ) {
        let mut model = Model {
            log: Some(TestLog::new(seed)),
            known: BTreeMap::new(),
            next_other: MARKED,
            others: Vec::new(),
            asked: Vec::new(),
        };
        for step in steps.iter().chain([&Step::Crash]) {
            model.take(step);
        }
    }
}

#[test]
fn a_mark_that_was_taken_away_stays_away_when_its_block_is_removed_and_space_is_reclaimed() {
    for seed in 0..30 {
        let mut log = TestLog::new(seed);
        // Beside the marked extent others stay, and nothing does beside the one that took the mark away.
        put(&mut log, 1, Some(until(500)));
        (10..24).for_each(|n| put(&mut log, n, None));
        (30..42).for_each(|n| put(&mut log, n, None));
        put(&mut log, 1, None);
        (42..54).for_each(|n| put(&mut log, n, None));
        [1].into_iter().chain(30..54).for_each(|n| log.log.remove(key(n), false));
        assert!(!log.has(1), "nobody finds what is in its grave");
        churn(&mut log, 20 * (seed as u32 + 1));
        let log = log.crash();
        let found = log.marks.get(&key(1)).copied().flatten();
        assert_eq!(found, None, "seed {seed}");
    }
}

#[test]
fn a_marked_block_that_was_removed_is_remembered_when_it_is_written_again_without_its_mark() {
    for seed in 0..30 {
        let mut log = TestLog::new(seed);
        // Others stay beside the marked extent, and nothing stays beside the one without a mark.
        put(&mut log, 1, Some(until(500)));
        (10..24).for_each(|n| put(&mut log, n, None));
        log.log.remove(key(1), false);
        (30..42).for_each(|n| put(&mut log, n, None));
        put(&mut log, 1, None);
        (42..54).for_each(|n| put(&mut log, n, None));
        [1].into_iter().chain(30..54).for_each(|n| log.log.remove(key(n), false));
        churn(&mut log, 20 * (seed as u32 + 1));
        let log = log.crash();
        let found = log.marks.get(&key(1)).copied().flatten();
        assert_eq!(found, None, "seed {seed}");
    }
}

#[test]
fn what_a_start_did_not_find_is_not_found_by_a_later_one_either() {
    for seed in 0..300 {
        let mut log = TestLog::new(seed);
        put(&mut log, 1, None);
        // Some fall into segments whose headers are lost, though they themselves are not.
        for n in 0..15 {
            let _ = log.try_append_as(1_000 + n, None);
            if u64::from(n) == seed % 15 {
                let _ = log.try_append_as(1, Some(until(500)));
            }
        }
        for _ in 0..seed % 7 {
            log.step();
        }
        let mut log = log.crash();
        put(&mut log, 1, None);
        for n in 0..seed as u32 % 13 {
            put(&mut log, 1_000 + n, None);
        }
        let log = log.crash();
        assert_eq!(log.marks.get(&key(1)), Some(&None), "seed {seed}");
    }
}

#[test]
fn graves_are_given_up_when_nothing_needs_them() {
    for last in [None, Some(until(300))] {
        let mut log = TestLog::new(1);
        for round in 0..300u32 {
            let n = round % 5;
            for mark in [Some(until(500 + u64::from(round))), last] {
                while log.try_append_as(n, mark).is_err() {
                    assert!(log.step(), "full for ever: {:?}", log.log.counts());
                }
            }
            log.settle();
            log.log.remove(key(n), false);
        }
        // At most one for each block, and the newest of each was just written.
        assert!(log.log.counts().live_bytes <= 5 * 4 * 4096, "{:?}", log.log.counts());
        assert!(log.log.counts().appended_bytes_total > 5 * DISK_BYTES as u64);
        // Cleaning moves what is in a grave beside what stays, until all that it takes away is gone.
        let mut others = Vec::new();
        for n in 100..900 {
            put(&mut log, n, None);
            others.push(n);
            if others.len() > 40 {
                log.log.remove(key(others.swap_remove(n as usize * 7 % 41)), false);
            }
        }
        assert!(log.log.counts().moved_total > 0, "{:?}", log.log.counts());
        others.into_iter().for_each(|n| log.log.remove(key(n), false));
        assert_eq!(log.log.counts().live_bytes, 0, "{:?}", log.log.counts());
    }
}

/// Is durable when this returns.
fn put(log: &mut TestLog, n: u32, mark: Option<Mark>) {
    while log.try_append_as(n, mark).is_err() {
        assert!(log.step(), "full for ever: {:?}", log.log.counts());
    }
    log.settle();
}

/// Writes so many others, one after the other, and removes each.
fn churn(log: &mut TestLog, count: u32) {
    for n in 1_000..1_000 + count {
        put(log, n, None);
        log.log.remove(key(n), false);
    }
}
