//! Space comes back while the log runs, and nothing that is live is lost by it.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::Range;

use kvasir_log::sim_disk::SimDisk;
use kvasir_log::{AppendError, Options, PAGE_BYTES};

use crate::support::{SEGMENT_PAGES, SEGMENTS, TestLog, key, options, until};

/// Appends for ever what fits, removing the oldest when the log is full; keeps `kept` for ever.
fn churn(log: &mut TestLog, numbers: Range<u32>, kept: &BTreeSet<u32>) -> BTreeSet<u32> {
    let mut live: BTreeSet<u32> = BTreeSet::new();
    for n in numbers {
        while log.log.counts().live_bytes + 4 * 4096 > log.log.live_bytes_max() {
            let oldest = *live.iter().find(|n| !kept.contains(n)).expect("something to remove");
            live.remove(&oldest);
            log.log.remove(key(oldest), false);
        }
        let mut tries = 0;
        while let Err(error) = log.try_append(n) {
            assert_eq!(error, AppendError::Full, "block {n}");
            assert!(log.step(), "full, and nothing is under way: {:?}", log.log.counts());
            tries += 1;
            assert!(tries < 1_000);
        }
        live.insert(n);
        if n % 4 == 0 {
            log.settle();
        }
    }
    log.settle();
    live
}

#[test]
fn a_full_log_goes_on_and_loses_nothing_that_is_live() {
    for seed in 0..6 {
        let mut log = TestLog::new(seed);
        let kept: BTreeSet<u32> = (0..1_000).step_by(40).take(8).collect();
        let live = churn(&mut log, 0..1_000, &kept);
        let counts = log.log.counts();
        assert!(counts.cleaned_segments_total > 5, "{counts:?}");
        assert!(counts.moved_total > 0, "{counts:?}");
        live.iter().for_each(|n| assert!(log.has(*n), "seed {seed}: block {n}"));
        let mut log = log.crash();
        live.iter().for_each(|n| assert!(log.has(*n), "seed {seed}: block {n} after a crash"));
    }
}

/// With writes under way all the time, and blocks removed from anywhere, so that every segment has some left.
#[test]
fn writers_never_take_the_room_that_cleaning_needs() {
    for seed in 0..40 {
        // Many segments with many extents each: more may be live, and each is moved in several goes.
        let segment_bytes = (4 * SEGMENT_PAGES * PAGE_BYTES) as u64;
        let bytes = 2 * PAGE_BYTES + 32 * segment_bytes as usize;
        let options = Options { segment_bytes, ..options() };
        let mut log = TestLog::open_with(SimDisk::new(bytes, seed), &options).expect("a log");
        let mut random = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        let mut live = Vec::new();
        let mut stuck = 0;
        for n in 0..5_000 {
            while log.log.counts().live_bytes + 2 * 4096 > log.log.live_bytes_max() {
                random ^= random << 13;
                random ^= random >> 7;
                random ^= random << 17;
                if live.is_empty() {
                    assert!(log.step(), "seed {seed}: {:?}", log.log.counts());
                    continue;
                }
                log.log.remove(key(live.swap_remove(random as usize % live.len())), false);
            }
            match log.try_append_bytes(n, None, &n.to_le_bytes()) {
                Ok(()) => {
                    live.push(n);
                    stuck = 0;
                }
                Err(error) => {
                    assert_eq!(error, AppendError::Full, "block {n}");
                    stuck += 1;
                    let counts = log.log.counts();
                    assert!(seed % 2 == 1, "seed {seed}: refused though there is room: {counts:?}");
                    assert!(stuck < 500, "seed {seed}: nothing goes on: {counts:?}");
                    log.step();
                }
            }
            while log.log.counts().operations > 24 {
                log.step();
            }
            // Some disks fail now and then, also while a segment is moved.
            log.disk.faults.syncs_fail = seed % 2 == 1 && n % 53 < 5;
        }
        log.settle();
        let promised: BTreeSet<u32> = log.acknowledged().into_iter().collect();
        for n in live.iter().filter(|n| promised.contains(n)) {
            assert!(log.read(*n).is_ok(), "seed {seed}: block {n}");
        }
    }
}

#[test]
fn a_crash_while_space_is_reclaimed_loses_nothing() {
    for seed in 0..40u64 {
        let mut log = TestLog::new(seed);
        let kept: BTreeSet<u32> = (0..300).step_by(20).collect();
        let live = churn(&mut log, 0..200 + seed as u32, &kept);
        // Now without waiting, so that the crash meets moves under way.
        for n in 2_000..2_012 {
            let _ = log.try_append(n);
            for _ in 0..seed % 5 {
                log.step();
            }
        }
        let promised = log.acknowledged();
        let mut log = log.crash();
        for n in live.iter().filter(|n| promised.contains(n)) {
            assert!(log.has(*n), "seed {seed}: block {n}");
        }
        // And it still has room to go on.
        let counts = log.log.counts();
        assert!(counts.segments_free > 0 || log.try_append(9_999).is_ok(), "{counts:?}");
    }
}

#[test]
fn a_segment_that_is_full_of_live_extents_is_not_cleaned_for_ever() {
    let mut log = TestLog::new(3);
    // An eighth of a segment each, so that seven of them fill one.
    let bytes = vec![1; (SEGMENT_PAGES / 8 - 1) * 4096];
    let mut n = 0;
    while log.try_append_bytes(n, None, &bytes).is_ok() {
        log.settle();
        n += 1;
    }
    let counts = log.log.counts();
    assert_eq!(counts.live_bytes, u64::from(n) * (SEGMENT_PAGES as u64 / 8) * 4096);
    assert!(n % 7 == 0 && n > 28, "seven in each: {n}");
    assert_eq!((counts.moved_total, counts.cleaned_segments_total), (0, 0));
    // One of them goes: now there is something to gain.
    log.log.remove(key(0), false);
    log.log.retry();
    log.settle();
    let _ = log.try_append_bytes(n, None, &bytes);
    log.settle();
    assert!(log.log.counts().moved_total > 0, "{:?}", log.log.counts());
}

#[test]
fn an_extent_that_has_most_of_a_segment_for_itself_is_not_moved_for_ever() {
    let mut log = TestLog::new(4);
    let bytes = vec![1; SEGMENT_PAGES * 6 / 10 * 4096];
    let mut n = 0;
    while log.try_append_bytes(n, None, &bytes).is_ok() {
        log.settle();
        n += 1;
    }
    for _ in 0..20 {
        log.log.retry();
        log.settle();
    }
    let counts = log.log.counts();
    assert!(counts.moved_total <= 21 + u64::from(n), "{counts:?}");
}

#[test]
fn what_is_rotten_when_it_is_moved_is_reported_and_gone() {
    let mut log = TestLog::new(5);
    (0..4).for_each(|n| log.store(n));
    // Somewhere in the first extent's payload: after superblocks, segment header and head.
    log.disk.rot(4 * 4096, 3);
    churn(&mut log, 4..600, &(20..600).step_by(30).take(12).collect());
    assert_eq!(log.lost, [key(0)]);
    assert!(!log.has(0));
    (1..4).for_each(|n| assert!(log.has(n), "block {n}"));
    assert_eq!(log.log.counts().rotten_total, 1);
}

/// Lets blocks come and go, so that there is always something to clean, and answers with those that are there.
fn come_and_go(log: &mut TestLog, numbers: Range<u32>) -> VecDeque<u32> {
    let mut live = VecDeque::new();
    for n in numbers {
        log.store(n);
        live.push_back(n);
        if live.len() > 30 {
            log.log.remove(key(live.pop_front().expect("some")), false);
        }
    }
    live
}

/// One of the first segment lives for ever, so that there is least to move, and a page there has gone bad.
fn with_a_bad_page(first: usize) -> TestLog {
    let mut log = TestLog::new(6);
    (0..12).for_each(|n| log.store(n));
    (1..12).for_each(|n| log.log.remove(key(n), false));
    log.disk.faults.unreadable = (first * PAGE_BYTES, (first + 1) * PAGE_BYTES);
    log
}

#[test]
fn a_segment_that_cannot_be_read_does_not_keep_others_from_being_cleaned() {
    // A page of the one that lives.
    let mut log = with_a_bad_page(2 + 1);
    let live = come_and_go(&mut log, 100..700);
    assert_eq!(log.log.unread_segments(), 1);
    let counts = log.log.counts();
    // It is tried again when nothing else can be cleaned.
    assert!(counts.disk_errors_total < counts.cleaned_segments_total / 10, "{counts:?}");
    live.iter().for_each(|n| assert!(log.has(*n), "block {n}"));
    // When it can be read again, its room is gained, and nothing is lost.
    log.disk.faults.unreadable = (0, 0);
    for n in 700..800 {
        log.store(n);
        log.log.remove(key(n), false);
        log.log.retry();
        log.settle();
    }
    assert_eq!(log.log.unread_segments(), 0);
    assert!(log.has(0));
}

#[test]
fn a_page_that_cannot_be_read_and_has_nothing_live_does_not_keep_its_segment_from_being_used() {
    // The segment's header, and a page behind all that lives.
    for page in [0, SEGMENT_PAGES - 2] {
        let mut log = with_a_bad_page(2 + page);
        let writes = |log: &TestLog| log.disk.bytes((2 + 1) * PAGE_BYTES, PAGE_BYTES);
        let before = writes(&log);
        let live = come_and_go(&mut log, 100..700);
        assert_eq!(log.log.unread_segments(), 0, "page {page}");
        assert_ne!(writes(&log), before, "page {page}: it was used again");
        assert!(log.has(0), "page {page}");
        log.disk.faults.unreadable = (0, 0);
        live.iter().for_each(|n| assert!(log.has(*n), "page {page}: block {n}"));
    }
}

#[test]
fn when_nothing_can_be_read_not_every_segment_is_tried_at_once() {
    let mut log = TestLog::new(6);
    let live = come_and_go(&mut log, 0..700);
    log.disk.faults.reads_fail = true;
    let before = log.log.counts();
    let mut ticket = 700;
    while log.try_append(ticket).is_ok() {
        ticket += 1;
        log.log.remove(key(ticket - 1), false);
    }
    let now = log.log.counts();
    let errors = now.disk_errors_total - before.disk_errors_total;
    // A segment and an extent of it.
    assert!(errors >= 2 && errors.is_multiple_of(2), "{now:?}");
    log.log.retry();
    log.settle();
    assert_eq!(log.log.counts().disk_errors_total, now.disk_errors_total + 2);
    log.disk.faults.reads_fail = false;
    (0..SEGMENTS).for_each(|_| {
        log.log.retry();
        log.settle();
    });
    live.iter().for_each(|n| assert!(log.has(*n), "block {n}"));
    log.store(ticket);
}

#[test]
fn a_block_that_is_moved_while_it_is_written_anew_keeps_its_newest_mark() {
    for seed in 0..30 {
        let mut log = TestLog::new(seed);
        let mut newest = BTreeMap::new();
        let mut others = VecDeque::new();
        // Mostly without waiting for it, so that some meet the copy of what they replace.
        for round in 0..1_000 {
            let kept = round * 5 % 24;
            let (n, mark) = match round % 3 {
                0 => (kept, Some(until(10_000 + u64::from(round)))),
                _ => (100 + round, None),
            };
            let mut tries = 0;
            while log.try_append_as(n, mark).is_err() {
                log.settle();
                log.log.remove(key(others.pop_front().expect("something to remove")), false);
                tries += 1;
                assert!(tries < 1_000, "full: {:?}", log.log.counts());
            }
            match round % 3 {
                0 => drop(newest.insert(n, mark)),
                _ => others.push_back(n),
            }
            for _ in 0..round % 4 {
                log.step();
            }
        }
        log.settle();
        assert!(log.log.counts().moved_total > 0, "{:?}", log.log.counts());
        let log = log.crash();
        for (n, mark) in newest {
            assert_eq!(log.marks.get(&key(n)), Some(&mark), "seed {seed}: block {n}");
        }
    }
}

/// Without a footer it would never be cleaned.
#[test]
fn a_segment_gets_its_footer_also_when_a_read_is_the_last_to_use_it() {
    let mut log = TestLog::new(6);
    for n in 0..30 {
        log.append(n);
        log.settle();
        // Under way while the next one finds the segment full.
        log.begin_read(n);
    }
    log.settle();
    let again = TestLog::open(log.disk).expect("a log");
    assert!(again.scanned <= 1, "{} segments have no footer", again.scanned);
}
