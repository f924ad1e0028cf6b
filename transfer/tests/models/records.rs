//! Records come out of the ring as they went in, whatever the two sides see of each other.

use std::sync::Arc;

use loom::thread;

use crate::check;
use crate::memory::SharedMemory;
use crate::ring::{Consumer, Producer, PushError, RingRange};

/// The smallest ring: 64 bytes of records.
fn ring() -> (Producer, Consumer) {
    let range = RingRange { offset: 0, bytes: RingRange::BYTES_MIN };
    let memory = Arc::new(SharedMemory::new(range.bytes));
    let producer = Producer::open(&memory, range).expect("it fits");
    (producer, Consumer::open(&memory, range).expect("it fits"))
}

fn passes(preemptions: usize, records: &'static [&'static [u8]]) {
    check(preemptions, move || {
        let (mut producer, mut consumer) = ring();
        let pushing = thread::spawn(move || {
            for record in records {
                loop {
                    match producer.push(record) {
                        Ok(()) => break,
                        Err(PushError::Full) => thread::yield_now(),
                        Err(error) => panic!("{error}"),
                    }
                }
            }
        });
        let mut out = Vec::new();
        for record in records {
            while !consumer.pop(&mut out).expect("the other side is honest") {
                thread::yield_now();
            }
            assert_eq!(&out, record);
        }
        assert_eq!(consumer.pop(&mut out), Ok(false));
        pushing.join().expect("no panic");
    });
}

#[test]
fn records_pass_while_there_is_room() {
    passes(3, &[b"a", b"", b"bcd"]);
}

#[test]
fn records_pass_around_the_end_of_a_full_ring() {
    // 32, 16, then 32 bytes: the third does not fit before the end, and not before the first has left.
    passes(2, &[b"twenty-four bytes, these", b"b", b"and once more as many do"]);
}
