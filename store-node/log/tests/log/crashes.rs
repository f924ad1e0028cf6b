//! What was acknowledged survives a crash at any point; what was not is there whole or not at all.

use crate::support::TestLog;

/// Runs a workload until so many operations have ended, then the power goes. Answers with false when
/// the workload ended before.
fn check_crash(seed: u64, after: usize) -> bool {
    let mut log = TestLog::new(seed);
    let mut ends = 0;
    let mut next = 0;
    let mut crashed = false;
    'work: while next < 50 {
        // Some at a time, in varying numbers, so that syncs cover one or many.
        for _ in 0..1 + (seed + u64::from(next)) % 5 {
            log.append(next);
            next += 1;
        }
        for _ in 0..(seed + u64::from(next)) % 7 {
            if ends == after {
                crashed = true;
                break 'work;
            }
            ends += usize::from(log.step());
        }
    }
    if !crashed {
        return false;
    }
    let acknowledged = log.acknowledged();
    let in_order = acknowledged.is_sorted();
    assert!(in_order, "seed {seed}, after {after}: {acknowledged:?}");
    let mut log = log.crash();
    for n in 0..next {
        let there = log.has(n);
        assert!(
            there || !acknowledged.contains(&n),
            "seed {seed}, after {after}: block {n} is lost"
        );
    }
    // The log goes on, and what it takes now survives as well.
    log.store(1_000);
    let mut log = log.crash();
    assert!(log.has(1_000), "seed {seed}, after {after}");
    for n in acknowledged {
        assert!(log.has(n), "seed {seed}, after {after}: block {n} is lost by the second crash");
    }
    true
}

#[test]
fn what_was_acknowledged_survives_a_crash_after_any_operation() {
    for seed in 0..12 {
        let crashes = (0..).take_while(|after| check_crash(seed, *after)).count();
        assert!(crashes > 25, "seed {seed}: only {crashes} points were tried");
    }
}

#[test]
fn nothing_is_acknowledged_before_it_is_durable() {
    // Were the sync left out, some seed would lose a block here: half of all sectors go.
    for seed in 0..200 {
        let mut log = TestLog::new(seed);
        (0..9).for_each(|n| log.append(n));
        while log.acknowledged().len() < 9 {
            assert!(log.step());
        }
        let mut log = log.crash();
        (0..9).for_each(|n| assert!(log.has(n), "seed {seed}: block {n}"));
    }
}

#[test]
fn what_is_written_together_is_synced_together() {
    let mut log = TestLog::new(5);
    log.store(0);
    let before = log.disk.syncs_total;
    for n in 1..=6 {
        log.append(n);
    }
    log.settle();
    assert_eq!(log.acknowledged(), [0, 1, 2, 3, 4, 5, 6]);
    assert_eq!(log.disk.syncs_total - before, 1);
}

#[test]
fn a_clean_log_is_found_by_its_footers_and_one_tail() {
    let mut log = TestLog::new(1);
    (0..50).for_each(|n| log.store(n));
    let mut log = log.crash();
    assert_eq!(log.scanned, 1);
    assert_eq!(log.recovered.len(), 50);
    (0..50).for_each(|n| assert!(log.has(n)));
}

#[test]
fn what_was_appended_again_is_found_in_its_last_state() {
    let mut log = TestLog::new(3);
    (0..5).for_each(|n| log.store(n));
    let before = log.log.counts().live_bytes;
    (0..5).for_each(|n| log.store(n));
    assert_eq!(log.log.counts().live_bytes, before, "the former extents are dead");
    let mut log = log.crash();
    assert_eq!(log.log.counts().live_bytes, before);
    assert_eq!(log.recovered.len(), 5);
    (0..5).for_each(|n| assert!(log.has(n)));
}
