//! The ring between two threads, and against another side that writes what it likes.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use kvasir_transfer::memory::{Prefault, SharedMemory};
use kvasir_transfer::ring::{Consumer, Corrupt, Producer, PushError, RingRange};
use proptest::prelude::*;

const RANGE: RingRange = RingRange { offset: 64, bytes: 128 + 1024 };

fn memory() -> Arc<SharedMemory> {
    Arc::new(SharedMemory::create("ring", 4096, Prefault::No).expect("memory"))
}

fn open(memory: &Arc<SharedMemory>) -> (Producer, Consumer) {
    (
        Producer::open(memory, RANGE).expect("it fits"),
        Consumer::open(memory, RANGE).expect("it fits"),
    )
}

fn record(number: u32) -> Vec<u8> {
    let bytes = 4 + number as usize * 7 % 200;
    let mut record = vec![number as u8; bytes];
    record[..4].copy_from_slice(&number.to_le_bytes());
    record
}

#[test]
fn records_come_out_as_they_went_in() {
    let memory = memory();
    let (mut producer, mut consumer) = open(&memory);
    let mut out = Vec::new();
    assert!(consumer.is_empty());
    assert_eq!(consumer.pop(&mut out), Ok(false));
    for number in 0..1000 {
        let record = record(number);
        producer.push(&record).expect("room");
        producer.push(&[]).expect("room for an empty one");
        assert!(!consumer.is_empty());
        assert_eq!(consumer.pop(&mut out), Ok(true));
        assert_eq!(out, record);
        assert_eq!(consumer.pop(&mut out), Ok(true));
        assert!(out.is_empty());
    }
    assert_eq!(consumer.pop(&mut out), Ok(false));
}

#[test]
fn a_full_ring_says_so_and_takes_more_when_it_is_read() {
    let memory = memory();
    let (mut producer, mut consumer) = open(&memory);
    let mut pushed = 0;
    while producer.push(&record(pushed)).is_ok() {
        pushed += 1;
    }
    assert_eq!(producer.push(&record(pushed)), Err(PushError::Full));
    assert_eq!(producer.room_for(200), Err(PushError::Full));
    let mut out = Vec::new();
    for number in 0..pushed {
        assert_eq!(consumer.pop(&mut out), Ok(true));
        assert_eq!(out, record(number), "nothing was overwritten");
    }
    producer.push(&record(pushed)).expect("room");
}

#[test]
fn a_record_of_the_greatest_length_fits_wherever_the_wrap_falls() {
    let memory = memory();
    let (mut producer, mut consumer) = open(&memory);
    let max = producer.record_bytes_max();
    assert_eq!(producer.push(&vec![0; max + 1]), Err(PushError::TooLong { bytes: max + 1, max }));
    let mut out = Vec::new();
    for number in 0..500 {
        producer.push(&vec![1; number % 64]).expect("room");
        assert_eq!(consumer.pop(&mut out), Ok(true));
        producer.push(&vec![2; max]).expect("an empty ring takes the longest");
        assert_eq!(consumer.pop(&mut out), Ok(true));
        assert_eq!(out.len(), max);
    }
}

#[test]
fn two_threads_pass_a_hundred_thousand_records_in_order() {
    let memory = memory();
    let (mut producer, mut consumer) = open(&memory);
    let count = 100_000;
    let writer = std::thread::spawn(move || {
        for number in 0..count {
            let record = record(number);
            while producer.push(&record) == Err(PushError::Full) {
                std::thread::yield_now();
            }
        }
    });
    let mut out = Vec::new();
    for number in 0..count {
        while !consumer.pop(&mut out).expect("sound") {
            std::thread::yield_now();
        }
        assert!(out == record(number), "record {number}");
    }
    writer.join().expect("the writer");
}

#[test]
fn a_ring_is_taken_up_where_it_stands() {
    let memory = memory();
    let (mut producer, mut consumer) = open(&memory);
    let mut out = Vec::new();
    producer.push(b"one").expect("room");
    producer.push(b"two").expect("room");
    consumer.pop(&mut out).expect("sound");
    let (mut producer, mut consumer) = open(&memory);
    producer.push(b"three").expect("room");
    assert_eq!(consumer.pop(&mut out), Ok(true));
    assert_eq!(out, b"two");
    assert_eq!(consumer.pop(&mut out), Ok(true));
    assert_eq!(out, b"three");
}

#[test]
fn ranges_that_cannot_be_are_errors() {
    let memory = memory();
    for (offset, bytes) in [(0, 4097), (4096, 256), (8, 512), (0, 188), (0, 128), (0, 517)] {
        assert!(Producer::open(&memory, RingRange { offset, bytes }).is_err(), "{offset} {bytes}");
        assert!(Consumer::open(&memory, RingRange { offset, bytes }).is_err(), "{offset} {bytes}");
    }
}

#[test]
fn a_consumer_that_lies_is_found_out() {
    let memory = memory();
    let (mut producer, _) = open(&memory);
    let head =
        |value| memory.atomic_u64(RANGE.offset).expect("head").store(value, Ordering::Release);
    while producer.push(&[1; 100]).is_ok() {}
    head(u64::MAX);
    assert_eq!(producer.push(&[1; 100]), Err(PushError::Corrupt(Corrupt)));
    head(1 << 40);
    assert_eq!(producer.push(&[1; 100]), Err(PushError::Corrupt(Corrupt)));
}

#[test]
fn a_length_that_cannot_be_is_found_out() {
    let max = open(&memory()).0.record_bytes_max() as u64;
    for length in [max + 1, u64::from(u32::MAX) + 1, u64::MAX - 7, u64::MAX] {
        let memory = memory();
        let (mut producer, mut consumer) = open(&memory);
        while producer.push(&[1; 100]).is_ok() {}
        let first = memory.atomic_u64(RANGE.offset + 128).expect("in the ring");
        first.store(length, Ordering::Release);
        assert_eq!(consumer.pop(&mut Vec::new()), Err(Corrupt), "{length}");
    }
}

/// What a hostile producer overwrites: a word at a place in the ring.
fn spoilers() -> impl Strategy<Value = Vec<(usize, u64)>> {
    let word = prop_oneof![
        any::<u64>(),
        (0u64..5000),
        Just(u64::from(u32::MAX)),
        (0u64..300).prop_map(|eighth| eighth * 8),
    ];
    // Twice as often the tail, which is what a producer writes.
    let place = prop_oneof![Just(64 / 8), 0usize..RANGE.bytes / 8];
    prop::collection::vec((place, word), 1..20)
}

proptest! {
    /// The neighbours of the ring hold a mark, and are looked at afterwards; reading beyond the ring
    /// would show in a record.
    #[test]
    fn no_producer_can_make_the_consumer_leave_its_range(spoilers in spoilers()) {
        let memory = memory();
        let mark = vec![0xee; 4096];
        memory.copy_from(0, &mark).expect("it fits");
        memory.copy_from(RANGE.offset, &vec![0; RANGE.bytes]).expect("it fits");
        let (mut producer, mut consumer) = open(&memory);
        let mut out = Vec::new();
        let mut corrupt = false;
        for (word, value) in spoilers {
            let _ = producer.push(&[0x11; 40]);
            let at = RANGE.offset + word * 8;
            memory.atomic_u64(at).expect("in the ring").store(value, Ordering::Release);
            // A sound consumer comes to an end: it never reads a place twice without a new tail.
            for _ in 0..RANGE.bytes {
                match consumer.pop(&mut out) {
                    Ok(true) => {
                        prop_assert!(!corrupt || out.len() <= RANGE.bytes);
                        prop_assert!(out.len() <= producer.record_bytes_max());
                        prop_assert!(!out.windows(16).any(|bytes| bytes == [0xee; 16]));
                    }
                    Ok(false) => break,
                    Err(Corrupt) => {
                        corrupt = true;
                        break;
                    }
                }
            }
        }
        let mut around = vec![0; 4096];
        memory.copy_to(0, &mut around).expect("it fits");
        prop_assert!(around[..RANGE.offset] == mark[..RANGE.offset]);
        let end = RANGE.offset + RANGE.bytes;
        prop_assert!(around[end..] == mark[end..]);
    }
}
