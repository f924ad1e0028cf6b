//! Payloads that go between disk and slot without passing through the log.

use kvasir_checksum::checksum;
use kvasir_log::sim_disk::Faults;
use kvasir_log::{DiskError, Memory, ReadError, Span};

use crate::support::{Slots, TestLog, payload, record};

const SLOT: usize = 3 * 4096;

fn slot(at: usize, length_bytes: usize) -> Span {
    Span { offset_bytes: at * SLOT, length_bytes }
}

/// A log with slots, and in the first one the payload of a block.
fn with_payload(seed: u64, n: u32) -> (TestLog, Slots, Span) {
    let mut log = TestLog::new(seed);
    let slots = Slots::new(4 * SLOT);
    log.disk.set_memory(Box::new(slots.clone()));
    let bytes = payload(n);
    let span = slot(0, bytes.len());
    slots.write(span, &bytes);
    (log, slots, span)
}

fn stored(seed: u64, n: u32) -> (TestLog, Slots, usize) {
    let (mut log, slots, span) = with_payload(seed, n);
    log.append_placed(n, span, checksum(&payload(n)));
    log.settle();
    assert_eq!(log.appended, [(n, Ok(()))]);
    (log, slots, span.length_bytes)
}

#[test]
fn a_payload_goes_to_the_disk_and_into_another_slot_without_a_copy() {
    for n in 0..20 {
        let (mut log, slots, length) = stored(1, n);
        let to = slot(2, length);
        assert_eq!(log.read_into(n, to), Ok(record(n)));
        assert_eq!(slots.read(to), payload(n));
        let beside = Span { offset_bytes: to.offset_bytes + length, length_bytes: 1 };
        assert_eq!(slots.read(beside), [0xaa], "block {n}: what is behind it is somebody else's");
        assert!(log.has(n), "it is an extent like any other");
        let mut log = log.crash();
        assert!(log.has(n));
        // And one like any other comes into a slot.
        log.disk.set_memory(Box::new(slots.clone()));
        log.store(100 + n);
        let to = slot(1, payload(100 + n).len());
        assert_eq!(log.read_into(100 + n, to), Ok(record(100 + n)));
        assert_eq!(slots.read(to), payload(100 + n));
    }
}

#[test]
fn what_changes_in_its_slot_while_it_is_written_is_refused() {
    let (mut log, slots, span) = with_payload(2, 5);
    log.append_placed(5, span, checksum(&payload(5)));
    slots.write(Span { length_bytes: 1, ..span }, &[!payload(5)[0]]);
    log.settle();
    assert_eq!(log.appended, [(5, Err(DiskError::Changed.into()))]);
    assert!(!log.has(5));
    assert!(!log.crash().has(5));
}

#[test]
fn wrong_bytes_in_a_slot_are_a_miss_and_counted() {
    let (mut log, _, length) = stored(3, 9);
    log.disk.faults = Faults { wrong_one_in: 1, ..Faults::default() };
    // The first may fall into the padding of the head, where nobody notices it.
    let outcome = (0..50).find_map(|_| log.read_into(9, slot(1, length)).err());
    assert_eq!(outcome, Some(ReadError::Rotten));
    log.disk.faults = Faults::default();
    assert_eq!(log.read_into(9, slot(1, length)), Err(ReadError::Missing), "it was forgotten");
    assert_eq!(log.log.counts().rotten_total, 1);
}

#[test]
fn a_place_of_another_size_gets_nothing_and_the_extent_stays() {
    let (mut log, slots, length) = stored(4, 7);
    for other in [0, 1, length - 1, length + 1, length + 4096, length + 2 * 4096] {
        let read = log.read_into(7, Span { offset_bytes: SLOT, length_bytes: other });
        assert_eq!(read, Err(ReadError::OtherSize), "{other} for {length}");
    }
    assert_eq!(log.read_into(7, slot(1, length)), Ok(record(7)));
    assert_eq!(slots.read(slot(1, length)), payload(7));
    assert_eq!(log.read_into(8, slot(1, length)), Err(ReadError::Missing));
}

#[test]
fn a_read_that_fails_half_way_costs_nothing_but_itself() {
    let (mut log, slots, length) = stored(5, 3);
    log.disk.faults = Faults { reads_fail: true, ..Faults::default() };
    let read = log.read_into(3, slot(1, length));
    assert_eq!(read, Err(ReadError::Disk(DiskError::Io(5))));
    log.disk.faults = Faults::default();
    assert_eq!(log.read_into(3, slot(1, length)), Ok(record(3)));
    assert_eq!(slots.read(slot(1, length)), payload(3));
}
