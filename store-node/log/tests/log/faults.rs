//! A disk that rots, fills, fails or hangs costs blocks that nobody was promised, and no more.

use kvasir_log::sim_disk::{Faults, SimDisk};
use kvasir_log::{AppendError, DiskError, ReadError, RecoverError};

use crate::support::{DISK_BYTES, SEGMENT_PAGES, SEGMENTS, TestLog, key, payload, record, until};

const PAGE: usize = 4096;

#[test]
fn rot_anywhere_costs_at_most_the_extents_it_touches() {
    let mut log = TestLog::new(1);
    (0..30).for_each(|n| log.store(n));
    let used = 3 * SEGMENT_PAGES * PAGE;
    for at in (2 * PAGE..used).step_by(1_021) {
        // A bit on the disk while nothing runs.
        let mut disk = SimDisk::new(DISK_BYTES, 1);
        let bytes = log.disk.bytes(0, DISK_BYTES);
        fill(&mut disk, &bytes);
        disk.rot(at, at as u32);
        let mut rotten = TestLog::open(disk).expect("a log");
        let missing: Vec<u32> = (0..30).filter(|n| !rotten.has(*n)).collect();
        assert!(missing.len() <= 1, "a bit at {at} has cost {missing:?}");
    }
}

fn fill(disk: &mut SimDisk, bytes: &[u8]) {
    use kvasir_log::{Disk, DiskOp, PageBuf};
    let mut buffer = PageBuf::zeroed(bytes.len() / PAGE);
    buffer.bytes_mut().copy_from_slice(bytes);
    disk.submit(DiskOp::Write { id: 0, offset_bytes: 0, buffer, rest: None });
    disk.complete(std::time::Duration::MAX / 4);
    disk.submit(DiskOp::Sync { id: 0 });
    disk.complete(std::time::Duration::MAX / 4);
}

#[test]
fn wrong_bytes_are_a_miss_and_counted() {
    let mut log = TestLog::new(2);
    log.store(9);
    log.disk.faults = Faults { wrong_one_in: 1, ..Faults::default() };
    // The first may fall into the padding, where nobody notices it.
    let outcome = (0..50).find_map(|_| log.read(9).err());
    assert_eq!(outcome, Some(ReadError::Rotten));
    log.disk.faults = Faults::default();
    assert_eq!(log.read(9), Err(ReadError::Missing), "it was forgotten");
    assert_eq!(log.log.counts().rotten_total, 1);
}

#[test]
fn where_a_write_was_lost_an_older_extent_of_the_block_is_not_taken_for_it() {
    let mut log = TestLog::new(2);
    let put = |log: &mut TestLog, version: u16, is_lost: bool| {
        log.disk.faults = Faults { loses_writes: is_lost, ..Faults::default() };
        let bytes = version.to_le_bytes();
        log.try_append_bytes(1, None, &bytes).expect("room");
        log.settle();
        assert_eq!(log.appended.last(), Some(&(1, Ok(()))), "version {version}");
        log.read(1).map(|read| read == bytes)
    };
    // Twice over the whole disk, so that the block has been everywhere.
    let laps = 2 * (DISK_BYTES / PAGE) as u16;
    (0..laps).for_each(|version| assert_eq!(put(&mut log, version, false), Ok(true)));
    for version in laps..laps + 40 {
        assert_eq!(put(&mut log, version, true), Err(ReadError::Rotten), "version {version}");
    }
}

#[test]
fn a_read_that_fails_costs_nothing_but_itself() {
    let mut log = TestLog::new(2);
    log.store(0);
    log.disk.faults = Faults { reads_fail: true, ..Faults::default() };
    assert_eq!(log.read(0), Err(ReadError::Disk(DiskError::Io(5))));
    log.disk.faults = Faults::default();
    assert!(log.has(0));
}

/// Where the bytes of the first segment are.
const FIRST: (usize, usize) = (2 * PAGE, (2 + SEGMENT_PAGES) * PAGE);

/// More than fit on two segments, all durable.
fn of_two_segments() -> (TestLog, Vec<u32>) {
    let mut log = TestLog::new(4);
    let all: Vec<u32> = (0..2 * SEGMENT_PAGES as u32 / 3).collect();
    all.iter().for_each(|n| log.store(*n));
    (log, all)
}

#[test]
fn a_segment_whose_header_cannot_be_read_is_not_free() {
    for pages in [1, 2] {
        let (mut log, all) = of_two_segments();
        log.disk.faults.unreadable = (FIRST.0, FIRST.0 + pages * PAGE);
        let mut log = log.crash();
        assert_eq!(log.unreadable, 1);
        let missing = all.iter().filter(|n| !log.has(**n)).count();
        // The extent that begins on the second page goes with it.
        assert_eq!(missing, pages - 1, "{pages} pages");
        (100..115).for_each(|n| log.append(n));
        log.settle();
        let missing = all.iter().filter(|n| !log.has(**n)).count();
        assert_eq!(missing, pages - 1, "{pages} pages, later");
        // It was not written: all of it is there when it can be read.
        log.disk.faults = Faults::default();
        let mut log = log.crash();
        all.iter().for_each(|n| assert!(log.has(*n), "block {n}"));
    }
}

#[test]
fn a_segment_that_cannot_be_read_at_a_start_is_whole_at_the_next_one() {
    let (mut log, all) = of_two_segments();
    log.disk.faults.unreadable = FIRST;
    let mut log = log.crash();
    assert_eq!((log.unreadable, log.log.counts().segments_withheld), (1, 1));
    assert!(all.iter().any(|n| !log.has(*n)) && all.iter().any(|n| log.has(*n)));
    let room = log.log.live_bytes_max();
    // Whatever comes, it is not written over, and what is newer than what it holds stays newer.
    (100..120).for_each(|n| log.append(n));
    log.settle();
    log.append(0);
    log.settle();
    log.disk.faults = Faults::default();
    let mut log = log.crash();
    assert_eq!(log.unreadable, 0);
    assert!(log.log.live_bytes_max() >= room);
    all.iter().for_each(|n| assert!(log.has(*n), "block {n}"));
    (100..120).for_each(|n| assert!(log.has(n), "block {n}"));
}

fn erase(log: &mut TestLog, n: u32) {
    log.log.erase(u64::from(n), key(n), record(n).namespace);
    log.pump();
    log.settle();
    assert_eq!(log.appended.pop(), Some((n, Ok(()))));
}

/// So much comes and goes that every segment is used again that nothing live is in.
fn go_round(log: &mut TestLog) {
    for n in 1_000..1_000 + 2 * (DISK_BYTES / PAGE) as u32 {
        log.append(n);
        log.settle();
        log.log.remove(key(n), false);
    }
}

#[test]
fn what_is_removed_stays_removed_though_a_segment_could_not_be_read_at_a_start() {
    for is_removed_before in [false, true] {
        let (mut log, all) = of_two_segments();
        if is_removed_before {
            erase(&mut log, 0);
        }
        log.disk.faults.unreadable = FIRST;
        let mut log = log.crash();
        assert_eq!((log.unreadable, log.has(0)), (1, false));
        if !is_removed_before {
            erase(&mut log, 0);
        }
        all[1..].iter().for_each(|n| log.log.remove(key(*n), false));
        go_round(&mut log);
        log.disk.faults = Faults::default();
        let mut log = log.crash();
        assert_eq!(log.unreadable, 0);
        assert!(log.has(1), "the segment is there");
        assert!(!log.has(0), "removed before: {is_removed_before}");
        // From then on all is known again, and nothing is held that nothing needs.
        all.iter().for_each(|n| log.log.remove(key(*n), false));
        go_round(&mut log);
        assert_eq!(log.log.counts().buried_bytes, 0);
        assert!(!log.crash().has(0));
    }
}

#[test]
fn what_was_removed_and_put_anew_does_not_come_back_though_a_segment_could_not_be_read() {
    let newer = b"what was put after it";
    for is_removed_before in [false, true] {
        let (mut log, all) = of_two_segments();
        if is_removed_before {
            erase(&mut log, 0);
            log.try_append_bytes(0, None, newer).expect("room");
            log.settle();
        }
        log.disk.faults.unreadable = FIRST;
        let mut log = log.crash();
        if !is_removed_before {
            erase(&mut log, 0);
            log.try_append_bytes(0, None, newer).expect("room");
            log.settle();
        }
        // It makes room.
        log.log.remove(key(0), true);
        all[1..].iter().for_each(|n| log.log.remove(key(*n), false));
        go_round(&mut log);
        log.disk.faults = Faults::default();
        // What was not removed may come back.
        let bytes = log.crash().read(0);
        assert_eq!(bytes, Ok(newer.to_vec()), "removed before: {is_removed_before}");
    }
}

#[test]
fn removals_that_are_kept_for_what_could_not_be_read_do_not_fill_the_log() {
    let (mut log, _) = of_two_segments();
    log.disk.faults.unreadable = FIRST;
    let mut log = log.crash();
    let mut removals = 0;
    let refused = loop {
        let n = 1_000 + removals;
        log.log.erase(u64::from(n), key(n), record(n).namespace);
        log.pump();
        log.settle();
        match log.appended.pop() {
            Some((of, Ok(()))) if of == n => removals += 1,
            other => break other,
        }
        assert!(removals < 1_000, "no end of it");
    };
    assert_eq!(refused, Some((1_000 + removals, Err(AppendError::TooManyRemovals))));
    assert_eq!(u64::from(removals), log.log.live_bytes_max() / PAGE as u64 / 8);
    (5_000..5_030).for_each(|n| {
        log.store(n);
        log.log.remove(key(n), false);
    });
    log.disk.faults = Faults::default();
    let mut log = log.crash();
    assert_eq!(log.log.counts().buried_bytes, 0);
    erase(&mut log, 9_999);
}

#[test]
fn where_next_to_nothing_can_be_written_something_can_be_removed() {
    let mut log = TestLog::new(4);
    let all: Vec<u32> = (0..SEGMENTS as u32 * SEGMENT_PAGES as u32 / 5).collect();
    all.iter().for_each(|n| log.store(*n));
    // Of all but four nothing can be read.
    log.disk.faults.unreadable = (FIRST.0, FIRST.0 + (SEGMENTS - 4) * SEGMENT_PAGES * PAGE);
    let mut log = log.crash();
    assert!(log.log.live_bytes_max() <= PAGE as u64, "{:?}", log.log.counts());
    let removed = SEGMENT_PAGES as u32 / 8;
    (0..removed).for_each(|n| erase(&mut log, n));
    log.disk.faults = Faults::default();
    let mut log = log.crash();
    for n in all {
        assert_eq!(log.has(n), n >= removed, "block {n}");
    }
}

#[test]
fn what_is_moved_is_not_taken_for_newer_than_what_could_not_be_read() {
    let (mut log, all) = of_two_segments();
    // The first segment has the former extents, the last one the newest.
    let marked = |n: u32| until(50_000 + u64::from(n));
    let anew: Vec<u32> = (0..4).collect();
    anew.iter().for_each(|n| log.try_append_as(*n, Some(marked(*n))).expect("room"));
    log.settle();
    let bytes = log.disk.bytes(0, DISK_BYTES);
    let wanted = key(3).0;
    let last = bytes.windows(16).rposition(|part| part == wanted).expect("it is there");
    let segment = (last - FIRST.0) / (FIRST.1 - FIRST.0);
    assert!(segment > 0);
    let start = FIRST.0 + segment * (FIRST.1 - FIRST.0);
    log.disk.faults.unreadable = (start, start + SEGMENT_PAGES * PAGE);
    let mut log = log.crash();
    assert_eq!((log.unreadable, log.marks[&key(3)]), (1, crate::support::mark(3)));
    all[4..].iter().for_each(|n| log.log.remove(key(*n), false));
    // So much stays of what comes that segments have to be cleaned.
    for n in 1_000..1_400 {
        log.store(n);
        log.log.remove(key(n - 25), false);
    }
    assert!(log.log.counts().moved_total > 0, "{:?}", log.log.counts());
    log.disk.faults = Faults::default();
    let log = log.crash();
    for n in anew {
        assert_eq!(log.marks[&key(n)], Some(marked(n)), "block {n}");
    }
}

#[test]
fn what_may_be_torn_is_not_taken_for_newer_than_what_was_acknowledged() {
    let mut log = TestLog::new(4);
    log.store(0);
    let former = log.read(0).expect("it is there");
    let before = log.disk.bytes(0, DISK_BYTES);
    // Its head is written, and the process ends before the rest is.
    log.try_append_bytes(0, None, &vec![7; 3 * PAGE]).expect("room");
    log.settle();
    let at = log.disk.bytes(0, DISK_BYTES).windows(PAGE).position(|part| part == vec![7; PAGE]);
    let at = at.expect("it is there") + PAGE;
    log.disk.faults.unreadable = (at, at + 1);
    let mut log = log.crash();
    assert_eq!(log.unreadable, 1, "nobody knows");
    assert_eq!(log.read(0), Ok(former));
    assert_eq!(log.disk.bytes(FIRST.0, PAGE), before[FIRST.0..FIRST.0 + PAGE]);
    log.disk.faults = Faults::default();
    assert_eq!(log.crash().read(0), Ok(vec![7; 3 * PAGE]), "it was all there");
}

#[test]
fn a_page_that_can_hide_nothing_does_not_keep_a_segment_from_being_used() {
    // In the extent of a block whose head is read, in a segment without a footer; the last page of the same; the first
    // one of a segment that was never used.
    let open = FIRST.0;
    let in_extent = open + 2 * PAGE;
    let last = FIRST.1 - PAGE;
    for at in [in_extent, last, DISK_BYTES - SEGMENT_PAGES * PAGE] {
        let mut log = TestLog::new(4);
        let length = 3 * PAGE;
        log.try_append_bytes(0, None, &vec![7; length]).expect("room");
        (1..4).for_each(|n| log.store(n));
        log.disk.faults.unreadable = (at, at + 1);
        let mut log = log.crash();
        assert_eq!(log.unreadable, 0, "at {at}");
        (1..4).for_each(|n| assert!(log.has(n), "at {at}: block {n}"));
        assert_eq!(log.read(0).is_err(), at == in_extent, "at {at}");
        (10..20).for_each(|n| log.store(n));
        log.disk.faults = Faults::default();
        let mut log = log.crash();
        assert_eq!(log.read(0), Ok(vec![7; length]), "at {at}");
        (1..4).chain(10..20).for_each(|n| assert!(log.has(n), "at {at}: block {n}"));
    }
}

#[test]
fn what_was_removed_does_not_come_back_when_what_was_put_after_it_rots() {
    let (mut log, all) = of_two_segments();
    erase(&mut log, 0);
    let newer = b"what was put after it";
    // It says as much for itself as what was removed.
    log.try_append_bytes(0, crate::support::mark(0), newer).expect("room");
    log.settle();
    let bytes = log.disk.bytes(0, DISK_BYTES);
    let at = bytes.windows(newer.len()).position(|part| part == newer).expect("it is there");
    log.disk.rot(at, 0);
    assert_eq!(log.read(0), Err(ReadError::Rotten));
    // The first segment stays as it is, the others are used again.
    let stays = SEGMENT_PAGES as u32 / 3 + 2;
    all.iter().filter(|n| **n > stays).for_each(|n| log.log.remove(key(*n), false));
    go_round(&mut log);
    let mut log = log.crash();
    assert!(log.has(1), "the segment is there");
    assert!(!log.has(0), "it was removed, and what was put since is rotten");
}

#[test]
fn what_was_removed_does_not_come_back_when_the_removal_rots_or_cannot_be_read() {
    for is_unreadable in [false, true] {
        let (mut log, all) = of_two_segments();
        let before = log.disk.bytes(0, DISK_BYTES);
        erase(&mut log, 0);
        let after = log.disk.bytes(0, DISK_BYTES);
        let at = (FIRST.1..DISK_BYTES).find(|at| before[*at] != after[*at]).expect("it is there");
        match is_unreadable {
            true => log.disk.faults.unreadable = (at, at + 1),
            false => log.disk.rot(at, 0),
        }
        // The first segment stays as it is, the others are used again.
        let stays = SEGMENT_PAGES as u32 / 3 + 2;
        all.iter().filter(|n| **n > stays).for_each(|n| log.log.remove(key(*n), false));
        go_round(&mut log);
        assert_ne!(log.disk.bytes(at, 1), after[at..=at], "it was written over");
        let mut log = log.crash();
        assert!(log.has(1), "the segment is there");
        assert!(!log.has(0), "unreadable: {is_unreadable}");
    }
}

#[test]
fn what_is_written_beside_a_segment_that_cannot_be_read_is_newer_than_what_it_holds() {
    let (mut log, all) = of_two_segments();
    let last = *all.last().expect("some");
    // The newest ones are there.
    log.disk.faults.unreadable = (FIRST.1, FIRST.1 + 2 * SEGMENT_PAGES * PAGE);
    let mut log = log.crash();
    assert!(!log.has(last));
    log.try_append_bytes(last, None, b"newer").expect("room");
    log.settle();
    log.disk.faults = Faults::default();
    assert_eq!(log.crash().read(last), Ok(b"newer".to_vec()));
}

fn check_writes_fail(faults: Faults, error: DiskError) {
    let mut log = TestLog::new(3);
    log.store(0);
    log.disk.faults = faults;
    (1..6).for_each(|n| log.append(n));
    log.settle();
    let failed: Vec<_> = (1..6).map(|n| (n, Err(error.into()))).collect();
    let mut answers = log.appended[1..].to_vec();
    answers.sort_by_key(|(n, _)| *n);
    assert_eq!(answers, failed, "{faults:?}");
    log.disk.faults = Faults::default();
    log.store(6);
    (1..6).for_each(|n| assert!(!log.has(n), "{faults:?}: block {n}"));
    let mut log = log.crash();
    assert!(log.has(0) && log.has(6), "{faults:?}");
}

#[test]
fn a_disk_that_takes_no_writes_refuses_them_and_recovers() {
    check_writes_fail(Faults { is_full: true, ..Faults::default() }, DiskError::NoSpace);
    check_writes_fail(Faults { writes_fail: true, ..Faults::default() }, DiskError::Io(5));
    check_writes_fail(Faults { syncs_fail: true, ..Faults::default() }, DiskError::Io(5));
}

#[test]
fn appends_around_a_failed_sync_are_durable_or_were_refused() {
    for seed in 0..100 {
        let mut log = TestLog::new(seed);
        for n in 0..80 {
            if log.try_append(n).is_err() {
                log.settle();
            }
            log.disk.faults.syncs_fail = (u64::from(n) + seed) % 11 == 0;
            for _ in 0..(u64::from(n) * 7 + seed) % 5 {
                log.step();
            }
        }
        let acknowledged = log.acknowledged();
        assert!(acknowledged.len() > 10, "seed {seed}");
        log.disk.faults = Faults::default();
        let mut log = log.crash();
        for n in acknowledged {
            assert!(log.has(n), "seed {seed}: block {n} is lost");
        }
    }
}

/// A copy there would be taken for older than what it is a copy of.
#[test]
fn an_older_segment_than_the_newest_is_not_gone_on_with() {
    let mut met = 0;
    for seed in 0..60 {
        let mut log = TestLog::new(seed);
        (0..4).for_each(|n| log.store(n));
        // Nothing more is appended there, and it gets no footer.
        log.disk.faults = Faults { syncs_fail: true, ..Faults::default() };
        log.append(50);
        log.settle();
        log.disk.faults = Faults::default();
        // The third one is opened, whose header may be lost.
        let free = |log: &TestLog| log.log.counts().segments_free;
        let mut next = 100;
        while free(&log) > SEGMENTS as u32 - 3 {
            log.settle();
            log.append(next);
            next += 1;
        }
        let mut log = log.crash();
        if log.scanned != 1 {
            continue;
        }
        met += 1;
        log.pump();
        log.settle();
        let before = log.disk.bytes(FIRST.0, FIRST.1 - FIRST.0);
        log.store(200);
        assert!(log.disk.bytes(FIRST.0, FIRST.1 - FIRST.0) == before, "seed {seed}");
        (0..4).for_each(|n| assert!(log.has(n), "block {n}"));
    }
    assert!(met > 0);
}

/// They take no room from what is written, nor give any.
#[test]
fn beside_segments_that_cannot_be_read_there_is_the_room_that_is_said() {
    const ALL: usize = 40;
    const UNREADABLE: usize = 12;
    let mut disk = SimDisk::new((2 + ALL * SEGMENT_PAGES) * PAGE, 4);
    disk = TestLog::open(disk).expect("a log").disk;
    disk.faults.unreadable = (FIRST.0, FIRST.0 + UNREADABLE * SEGMENT_PAGES * PAGE);
    let mut log = TestLog::open(disk).expect("a log");
    assert_eq!(log.log.counts().segments_withheld, UNREADABLE as u32);
    let mut kept = Vec::new();
    for n in 1_000.. {
        let bytes = (2 + payload(n).len().div_ceil(PAGE)) * PAGE;
        if log.log.counts().live_bytes + bytes as u64 > log.log.live_bytes_max() {
            break;
        }
        log.store(n);
        kept.push(n);
    }
    for at in 0..2_000 {
        log.store(kept[at * 7 % kept.len()]);
    }
    kept.iter().for_each(|n| assert!(log.has(*n), "block {n}"));
}

#[test]
fn a_disk_that_hangs_is_waited_for_and_nothing_is_lost() {
    let mut log = TestLog::new(4);
    log.store(0);
    log.disk.faults.hangs = true;
    log.append(1);
    assert!(!log.step());
    assert_eq!(log.acknowledged(), [0]);
    log.disk.faults.hangs = false;
    log.settle();
    assert_eq!(log.acknowledged(), [0, 1]);
    // While one starts as well.
    log.disk.faults.hangs = true;
    let refused = TestLog::open(log.disk).err();
    assert_eq!(refused, Some(RecoverError::Hangs));
}

#[test]
fn what_is_no_log_is_left_alone() {
    let mut disk = SimDisk::new(DISK_BYTES, 1);
    disk.rot(17, 1);
    assert_eq!(TestLog::open(disk).err(), Some(RecoverError::Foreign));
    let small = SimDisk::new(4 * SEGMENT_PAGES * PAGE, 1);
    assert!(matches!(TestLog::open(small).err(), Some(RecoverError::TooSmall { .. })));
}

#[test]
fn garbage_behind_a_good_superblock_is_an_empty_log() {
    let log = TestLog::new(1);
    for seed in 1..20u64 {
        let mut bytes = log.disk.bytes(0, DISK_BYTES);
        let mut state = seed;
        for byte in &mut bytes[2 * PAGE..] {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(seed);
            *byte = (state >> 33) as u8;
        }
        let mut disk = SimDisk::new(DISK_BYTES, seed);
        fill(&mut disk, &bytes);
        let mut log = TestLog::open(disk).expect("a log");
        assert_eq!(log.recovered, []);
        log.store(1);
        assert!(log.has(1));
    }
}
