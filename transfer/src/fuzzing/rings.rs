//! A ring in shared memory, under a script: pushes and pops, and an owner of the memory who writes
//! whatever it likes in between.

use std::collections::VecDeque;
use std::sync::Arc;

use super::within;
use crate::memory::{Prefault, SharedMemory};
use crate::ring::{Consumer, Producer, PushError, RingRange};

/// The ring lies between two guards, which nobody may touch.
const GUARD_BYTES: usize = 64;
const GUARD: u8 = 0xa5;
const HEAD: usize = GUARD_BYTES;
const TAIL: usize = GUARD_BYTES + 64;

const PUSH: u8 = 0;
const POP: u8 = 1;
const REOPEN: u8 = 2;
const SPOIL: u8 = 3;
const STEPS: u8 = 4;

/// The first byte is the ring's size; then steps of a kind and two numbers, and eight bytes more where
/// the memory is spoilt. Until then what comes out is what went in, in order; afterwards the two ends
/// still stay within the ring, and each either goes on or says that it is corrupt, for good. Accepted
/// is a script with a record that came out.
pub fn ring(script: &[u8]) -> bool {
    let Some((&size, mut steps)) = script.split_first() else { return false };
    let mut ring = Ring::new(RingRange::BYTES_MIN + 8 * usize::from(size));
    let mut any = false;
    while let Some((&[kind, low, high], rest)) = steps.split_first_chunk() {
        steps = rest;
        let number = usize::from(u16::from_le_bytes([low, high]));
        match kind % STEPS {
            PUSH => ring.push(number),
            POP => any |= ring.pop(),
            REOPEN => ring.reopen(),
            _ => {
                let Some((word, rest)) = steps.split_first_chunk() else { break };
                steps = rest;
                ring.spoil(number, *word);
            }
        }
    }
    ring.check_guards();
    any
}

struct Ring {
    memory: Arc<SharedMemory>,
    range: RingRange,
    producer: Option<Producer>,
    consumer: Option<Consumer>,
    /// What is in the ring, as long as nobody has spoilt it.
    pushed: Option<VecDeque<Vec<u8>>>,
    next: u8,
}

impl Ring {
    fn new(bytes: usize) -> Self {
        let whole = bytes + 2 * GUARD_BYTES;
        let memory = SharedMemory::create("fuzzed-ring", whole, Prefault::No);
        let memory = Arc::new(memory.expect("memory for a test"));
        for guard in [0, GUARD_BYTES + bytes] {
            memory.copy_from(guard, &[GUARD; GUARD_BYTES]).expect("the range is inside the memory");
        }
        let range = RingRange { offset: GUARD_BYTES, bytes };
        let pushed = Some(VecDeque::new());
        let mut ring = Ring { memory, range, producer: None, consumer: None, pushed, next: 0 };
        ring.reopen();
        ring
    }

    /// As an engine that was started anew would. A spoilt ring need not open.
    fn reopen(&mut self) {
        self.producer = Producer::open(&self.memory, self.range).ok();
        self.consumer = Consumer::open(&self.memory, self.range).ok();
        let opened = self.producer.is_some() && self.consumer.is_some();
        assert!(opened || self.pushed.is_none(), "an intact ring opens");
    }

    fn push(&mut self, bytes: usize) {
        let Some(producer) = &mut self.producer else { return };
        let record = vec![self.next; bytes];
        self.next = self.next.wrapping_add(1);
        let pushed = within(0, || producer.push(&record));
        let too_long = bytes > producer.record_bytes_max();
        assert_eq!(matches!(pushed, Err(PushError::TooLong { .. })), too_long);
        let Some(known) = &mut self.pushed else { return };
        match pushed {
            Ok(()) => known.push_back(record),
            Err(PushError::Full) => assert!(!known.is_empty(), "an empty ring has room"),
            Err(PushError::TooLong { .. }) => {}
            Err(PushError::Corrupt(_)) => panic!("an intact ring is not corrupt"),
        }
    }

    fn pop(&mut self) -> bool {
        let Some(consumer) = &mut self.consumer else { return false };
        let mut record = Vec::new();
        let popped = within(self.range.bytes, || consumer.pop(&mut record));
        assert!(
            popped != Ok(true) || record.len() < self.range.bytes,
            "a record is shorter than its ring"
        );
        match &mut self.pushed {
            Some(known) => {
                let expected = known.pop_front();
                assert_eq!(popped, Ok(expected.is_some()));
                assert!(expected.is_none_or(|expected| expected == record));
            }
            None if popped.is_err() => {
                assert!(consumer.pop(&mut record).is_err(), "corrupt is corrupt for good");
            }
            None => {}
        }
        popped == Ok(true)
    }

    /// Writes a word: often where it hurts most.
    fn spoil(&mut self, place: usize, word: [u8; 8]) {
        let words = self.range.bytes / 8;
        let at = match place % 4 {
            0 => HEAD,
            1 => TAIL,
            _ => GUARD_BYTES + 8 * (place / 4 % words),
        };
        self.memory.copy_from(at, &word).expect("the word is inside the ring");
        self.pushed = None;
    }

    fn check_guards(&self) {
        for guard in [0, GUARD_BYTES + self.range.bytes] {
            let mut bytes = [0; GUARD_BYTES];
            self.memory.copy_to(guard, &mut bytes).expect("the range is inside the memory");
            assert_eq!(bytes, [GUARD; GUARD_BYTES], "the ring's ends stay inside");
        }
    }
}

pub(super) fn scripts() -> Vec<Vec<u8>> {
    let push = |bytes: u8| [PUSH, bytes, 0];
    let pop = [POP, 0, 0];
    let steps = [push(5), push(0), pop, push(40), pop, push(60), pop, pop, push(61), pop];
    let honest = [&[16], steps.as_flattened()].concat();
    let reopened = [honest.as_slice(), &[REOPEN, 0, 0], &push(9), &pop].concat();
    let spoilt = [honest.as_slice(), &[SPOIL, 1, 0], &[8, 1, 0, 0, 0, 0, 0, 0], &pop].concat();
    vec![honest, reopened, spoilt]
}
