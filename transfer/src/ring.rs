//! A ring of byte records in shared memory, for one producer and one consumer in different processes.
//! Either side may be hostile or dead: the other one never panics and never leaves its range; what
//! cannot be true is [`Corrupt`].
//!
//! Layout of a range: head (u64, written by the consumer) and tail (u64, written by the producer), each
//! on its own 64-byte line, then the records. Head and tail count bytes and only grow; a record is its
//! length (u32), four bytes of zero, and the bytes, padded to 8. A record never wraps: where it does not
//! fit before the end, a length of `u32::MAX` says "go on at the start". A record becomes visible by the
//! store of the tail, so a producer that dies leaves no hole.

use std::sync::Arc;

use kvasir_mutation::{Mutation, mutated};

use crate::memory::{RangeError, SharedMemory};
use crate::sync::{AtomicU64, Ordering};

const HEAD: usize = 0;
const TAIL: usize = 64;
const RECORDS: usize = 128;
const LENGTH_BYTES: u64 = 8;
/// No ring carries so many bytes; sums of positions below it do not overflow.
const POSITION_MAX: u64 = u64::MAX / 2;
const WRAP: u32 = u32::MAX;

/// The ring has no room for the record now.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum PushError {
    #[error("the ring is full")]
    Full,
    #[error("a record of {bytes} bytes exceeds the maximum of the ring ({max} bytes)")]
    TooLong { bytes: usize, max: usize },
    #[error(transparent)]
    Corrupt(#[from] Corrupt),
}

/// The other side has written what cannot be: it must not be trusted any further.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the ring is corrupt")]
pub struct Corrupt;

/// Where a ring lies in a memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RingRange {
    /// A multiple of 64.
    pub offset: usize,
    /// Header included; a multiple of 8, at least [`RingRange::BYTES_MIN`].
    pub bytes: usize,
}

impl RingRange {
    pub const BYTES_MIN: usize = RECORDS + 64;

    fn open(self, memory: &Arc<SharedMemory>) -> Result<Shared, RangeError> {
        memory.check(self.offset, self.bytes)?;
        let aligned = self.offset.is_multiple_of(64) && self.bytes.is_multiple_of(8);
        if !aligned || self.bytes < Self::BYTES_MIN {
            return Err(RangeError { offset: self.offset, bytes: self.bytes, len: memory.len() });
        }
        let records = self.offset + RECORDS;
        let capacity = (self.bytes - RECORDS) as u64;
        Ok(Shared { memory: Arc::clone(memory), range: self, records, capacity })
    }
}

#[derive(Debug)]
struct Shared {
    memory: Arc<SharedMemory>,
    range: RingRange,
    records: usize,
    capacity: u64,
}

impl Shared {
    fn word(&self, at: usize) -> &AtomicU64 {
        let word = self.memory.atomic_u64(self.range.offset + at);
        word.expect("the range was checked when the ring was opened")
    }

    fn length_at(&self, position: u64) -> &AtomicU64 {
        let at = self.records + (position % self.capacity) as usize;
        self.memory.atomic_u64(at).expect("positions are multiples of 8 below the capacity")
    }

    fn padded(bytes: usize) -> u64 {
        LENGTH_BYTES + (bytes as u64).next_multiple_of(8)
    }

    /// A record may take half of the ring, so that one fits wherever the wrap falls.
    fn record_bytes_max(&self) -> usize {
        (self.capacity / 2 - LENGTH_BYTES) as usize
    }
}

/// The side that pushes. There must be one only.
#[derive(Debug)]
pub struct Producer {
    shared: Shared,
    tail: u64,
    head_seen: u64,
}

impl Producer {
    /// Continues where the ring's tail stands (zero in fresh memory).
    ///
    /// # Errors
    /// [`RangeError`] when the range does not fit or is misaligned, or its header cannot be a ring's.
    pub fn open(memory: &Arc<SharedMemory>, range: RingRange) -> Result<Self, RangeError> {
        let shared = range.open(memory)?;
        let tail = shared.word(TAIL).load(Ordering::Acquire);
        let head_seen = shared.word(HEAD).load(Ordering::Acquire);
        // Whoever made the memory may have written anything there.
        let fits = tail.is_multiple_of(8)
            && head_seen.is_multiple_of(8)
            && tail < POSITION_MAX
            && tail.checked_sub(head_seen).is_some_and(|filled| filled <= shared.capacity);
        if !fits {
            return Err(RangeError { offset: range.offset, bytes: range.bytes, len: memory.len() });
        }
        Ok(Producer { shared, tail, head_seen })
    }

    pub fn record_bytes_max(&self) -> usize {
        self.shared.record_bytes_max()
    }

    /// Whether a record of this size can be pushed now.
    ///
    /// # Errors
    /// As [`Producer::push`].
    pub fn room_for(&mut self, bytes: usize) -> Result<(), PushError> {
        self.place(bytes).map(|_| ())
    }

    /// Appends a record.
    ///
    /// # Errors
    /// [`PushError::Full`] when it must be tried again later; [`PushError::TooLong`] when it never
    /// fits; [`PushError::Corrupt`] when the consumer cannot be trusted.
    pub fn push(&mut self, record: &[u8]) -> Result<(), PushError> {
        let (start, end) = self.place(record.len())?;
        if start != self.tail {
            self.shared.length_at(self.tail).store(u64::from(WRAP), Ordering::Relaxed);
        }
        self.shared.length_at(start).store(record.len() as u64, Ordering::Relaxed);
        let at = self.shared.records + ((start + LENGTH_BYTES) % self.shared.capacity) as usize;
        if !record.is_empty() {
            let copied = self.shared.memory.copy_from(at, record);
            copied.map_err(|_| Corrupt)?;
        }
        self.tail = end;
        let is_early = mutated(Mutation::RecordVisibleBeforeItsBytes);
        let order = if is_early { Ordering::Relaxed } else { Ordering::Release };
        self.shared.word(TAIL).store(end, order);
        Ok(())
    }

    /// Where the record's length would stand, and where the tail would be after it.
    fn place(&mut self, bytes: usize) -> Result<(u64, u64), PushError> {
        let max = self.record_bytes_max();
        if bytes > max {
            return Err(PushError::TooLong { bytes, max });
        }
        let capacity = self.shared.capacity;
        let needed = Shared::padded(bytes);
        let until_end = capacity - self.tail % capacity;
        let start = if needed <= until_end { self.tail } else { self.tail + until_end };
        let end = start + needed;
        if end - self.head_seen > capacity {
            let head = self.shared.word(HEAD).load(Ordering::Acquire);
            if head < self.head_seen || head > self.tail {
                return Err(Corrupt.into());
            }
            self.head_seen = head;
            if end - head > capacity {
                return Err(PushError::Full);
            }
        }
        Ok((start, end))
    }
}

/// The side that pops. There must be one only.
#[derive(Debug)]
pub struct Consumer {
    shared: Shared,
    head: u64,
    tail_seen: u64,
}

impl Consumer {
    /// Continues where the ring's head stands (zero in fresh memory).
    ///
    /// # Errors
    /// [`RangeError`] when the range does not fit or is misaligned.
    pub fn open(memory: &Arc<SharedMemory>, range: RingRange) -> Result<Self, RangeError> {
        let shared = range.open(memory)?;
        let head = shared.word(HEAD).load(Ordering::Acquire);
        if !head.is_multiple_of(8) || head >= POSITION_MAX {
            return Err(RangeError { offset: range.offset, bytes: range.bytes, len: memory.len() });
        }
        Ok(Consumer { shared, head, tail_seen: head })
    }

    /// Whether nothing can be popped now. One load when it is so.
    pub fn is_empty(&self) -> bool {
        self.shared.word(TAIL).load(Ordering::Acquire) == self.head
    }

    /// How far has been read.
    pub fn position(&self) -> u64 {
        self.head
    }

    /// How far could be read now: what is pushed later lies beyond. Never more than the ring holds.
    ///
    /// # Errors
    /// As [`Consumer::pop`].
    pub fn end(&mut self) -> Result<u64, Corrupt> {
        self.refresh()?;
        Ok(self.tail_seen)
    }

    /// Moves the next record into `record` (its former contents are dropped). `false` when there is
    /// none.
    ///
    /// # Errors
    /// [`Corrupt`] when the producer cannot be trusted; it stays so.
    pub fn pop(&mut self, record: &mut Vec<u8>) -> Result<bool, Corrupt> {
        loop {
            if self.head == self.tail_seen && !self.refresh()? {
                return Ok(false);
            }
            let capacity = self.shared.capacity;
            let available = self.tail_seen - self.head;
            let until_end = capacity - self.head % capacity;
            let length = self.shared.length_at(self.head).load(Ordering::Relaxed);
            if length == u64::from(WRAP) {
                if until_end == capacity || until_end > available {
                    return Err(Corrupt);
                }
                self.advance(until_end);
                continue;
            }
            if length > self.shared.record_bytes_max() as u64 {
                return Err(Corrupt);
            }
            let bytes = length as usize;
            let taken = Shared::padded(bytes);
            if taken > available || taken > until_end {
                return Err(Corrupt);
            }
            record.resize(bytes, 0);
            if bytes > 0 {
                let at = self.shared.records + ((self.head + LENGTH_BYTES) % capacity) as usize;
                self.shared.memory.copy_to(at, record).map_err(|_| Corrupt)?;
            }
            self.advance(taken);
            return Ok(true);
        }
    }

    fn refresh(&mut self) -> Result<bool, Corrupt> {
        let tail = self.shared.word(TAIL).load(Ordering::Acquire);
        let plausible = tail >= self.head
            && tail - self.head <= self.shared.capacity
            && tail.is_multiple_of(8)
            && self.head.is_multiple_of(8);
        if !plausible {
            return Err(Corrupt);
        }
        self.tail_seen = tail;
        Ok(tail != self.head)
    }

    fn advance(&mut self, bytes: u64) {
        self.head += bytes;
        self.shared.word(HEAD).store(self.head, Ordering::Release);
    }
}
