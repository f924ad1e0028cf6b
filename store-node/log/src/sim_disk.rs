//! A disk in memory that does, under a seed, what disks do on bad days: ends operations in another
//! order, loses or tears what was not synced when it crashes, rots, fills, fails and hangs.
//!
//! Product code, so that whole nodes can be simulated on it. Time is the caller's: an operation ends
//! at the earliest `latency` after it was submitted, by the clock that [`SimDisk::set_now`] moves;
//! whoever waits in [`Disk::complete`] moves it as well.

use std::collections::BTreeMap;
use std::time::Duration;

use kvasir_checksum::checksum;

use crate::buffer::{PAGE_BYTES, PageBuf};
use crate::disk::{Disk, DiskDone, DiskError, DiskOp, Memory, Span};

/// What a crash keeps or loses by itself.
const SECTOR_BYTES: usize = 512;
/// What a system says of a failed disk.
const EIO: i32 = 5;

/// What is wrong with the disk now.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Faults {
    /// Writes fail.
    pub is_full: bool,
    /// Reads fail.
    pub reads_fail: bool,
    /// Reads fail that touch a byte of these: from the first one up to the second.
    pub unreadable: (usize, usize),
    /// Writes fail in another way.
    pub writes_fail: bool,
    /// Writes are said to have ended well, and leave what was there.
    pub loses_writes: bool,
    /// Syncs fail, and what they should have covered is lost.
    pub syncs_fail: bool,
    /// Nothing ends.
    pub hangs: bool,
    /// Of so many reads one gives a wrong byte; 0 for none.
    pub wrong_one_in: u64,
}

impl Faults {
    fn cannot_read(&self, offset_bytes: u64, buffer: &PageBuf, rest: Option<Span>) -> bool {
        let length = buffer.bytes().len() + rest.map_or(0, |rest| rest.length_bytes);
        let ((from, until), at) = (self.unreadable, offset_bytes as usize);
        at < until && from < at + length
    }
}

/// See the module.
#[derive(Debug)]
pub struct SimDisk {
    /// What a crash leaves.
    durable: Vec<u8>,
    /// Pages written since they were last synced.
    unsynced: BTreeMap<usize, Box<[u8]>>,
    queue: Vec<(Duration, DiskOp)>,
    /// Where the rest of operations is.
    memory: Option<Box<dyn Memory>>,
    now: Duration,
    latency: Duration,
    depth: usize,
    random: u64,
    pub faults: Faults,
    pub writes_total: u64,
    pub syncs_total: u64,
}

impl SimDisk {
    pub fn new(len_bytes: usize, seed: u64) -> Self {
        SimDisk {
            durable: vec![0; len_bytes],
            unsynced: BTreeMap::new(),
            queue: Vec::new(),
            memory: None,
            now: Duration::ZERO,
            latency: Duration::from_micros(100),
            depth: 16,
            random: seed,
            faults: Faults::default(),
            writes_total: 0,
            syncs_total: 0,
        }
    }

    pub fn set_latency(&mut self, latency: Duration) {
        self.latency = latency;
    }

    /// From now on operations read and write here.
    pub fn set_memory(&mut self, memory: Box<dyn Memory>) {
        self.memory = Some(memory);
    }

    pub fn set_now(&mut self, now: Duration) {
        self.now = self.now.max(now);
    }

    /// What was waited for since then took no time. Nothing may be under way.
    pub fn turn_back_to(&mut self, now: Duration) {
        assert!(self.queue.is_empty(), "an operation in flight ends at a later time");
        self.now = now;
    }

    /// When the next operation ends; `None` when none will.
    pub fn next_end(&self) -> Option<Duration> {
        if self.faults.hangs {
            return None;
        }
        self.queue.iter().map(|(end, _)| *end).min()
    }

    /// The power goes: each sector that was written since the last sync is kept or lost, and
    /// nothing that is under way ever ends.
    pub fn crash(&mut self) {
        self.queue.retain(|(_, op)| matches!(op, DiskOp::Write { .. }));
        for (_, op) in std::mem::take(&mut self.queue) {
            // It may have been half done.
            if let DiskOp::Write { offset_bytes, buffer, rest, .. } = op {
                self.write_all(offset_bytes, buffer.bytes(), rest);
            }
        }
        for (page, bytes) in std::mem::take(&mut self.unsynced) {
            for (sector, written) in bytes.chunks(SECTOR_BYTES).enumerate() {
                if self.random().is_multiple_of(2) {
                    let at = page * PAGE_BYTES + sector * SECTOR_BYTES;
                    self.durable[at..at + written.len()].copy_from_slice(written);
                }
            }
        }
    }

    /// Whoever drove it gives it up without waiting, as a process does whose disk hangs: what is under
    /// way is reported to nobody, and written all the same.
    pub fn give_up(&mut self) {
        for (_, op) in std::mem::take(&mut self.queue) {
            if let DiskOp::Write { offset_bytes, buffer, rest, .. } = op {
                self.write_all(offset_bytes, buffer.bytes(), rest);
            }
        }
    }

    /// Flips a bit of what lies there.
    pub fn rot(&mut self, offset_bytes: usize, bit: u32) {
        let (page, within) = (offset_bytes / PAGE_BYTES, offset_bytes % PAGE_BYTES);
        match self.unsynced.get_mut(&page) {
            Some(bytes) => bytes[within] ^= 1 << (bit % 8),
            None => self.durable[offset_bytes] ^= 1 << (bit % 8),
        }
    }

    /// What a read would give.
    pub fn bytes(&self, offset_bytes: usize, length: usize) -> Vec<u8> {
        let mut bytes = self.durable[offset_bytes..offset_bytes + length].to_vec();
        for (page, chunk) in (offset_bytes / PAGE_BYTES..).zip(bytes.chunks_mut(PAGE_BYTES)) {
            if let Some(written) = self.unsynced.get(&page) {
                chunk.copy_from_slice(&written[..chunk.len()]);
            }
        }
        bytes
    }

    /// Answers with the checksum of the rest.
    fn write_all(&mut self, offset_bytes: u64, bytes: &[u8], rest: Option<Span>) -> Option<u64> {
        self.write(offset_bytes, bytes);
        let rest = rest?;
        let mut payload = self.memory().read(rest);
        let sum = checksum(&payload);
        payload.resize(payload.len().next_multiple_of(PAGE_BYTES), 0);
        self.write(offset_bytes + bytes.len() as u64, &payload);
        Some(sum)
    }

    fn memory(&self) -> &dyn Memory {
        self.memory.as_deref().expect("the memory is set before an operation uses it")
    }

    fn write(&mut self, offset_bytes: u64, bytes: &[u8]) {
        let first = offset_bytes as usize / PAGE_BYTES;
        for (page, chunk) in (first..).zip(bytes.chunks(PAGE_BYTES)) {
            self.unsynced.insert(page, chunk.into());
        }
    }

    fn end(&mut self, op: DiskOp) -> DiskDone {
        let faults = self.faults;
        match op {
            DiskOp::Read { id, offset_bytes, buffer, rest }
                if faults.reads_fail || faults.cannot_read(offset_bytes, &buffer, rest) =>
            {
                // A part of it may have come.
                if let Some(rest) = rest {
                    let part = Span { length_bytes: rest.length_bytes / 2, ..rest };
                    let at = offset_bytes as usize + buffer.bytes().len();
                    self.memory().write(part, &self.bytes(at, part.length_bytes));
                }
                failed(id, EIO)
            }
            DiskOp::Read { id, offset_bytes, mut buffer, rest } => {
                let of_buffer = buffer.bytes().len();
                let length = of_buffer + rest.map_or(0, |rest| rest.length_bytes);
                let mut read = self.bytes(offset_bytes as usize, length);
                if faults.wrong_one_in > 0 && self.random().is_multiple_of(faults.wrong_one_in) {
                    let at = self.random() as usize % length;
                    read[at] ^= 1;
                }
                let (head, payload) = read.split_at(of_buffer);
                buffer.bytes_mut().copy_from_slice(head);
                let rest_sum = rest.map(|rest| {
                    self.memory().write(rest, payload);
                    checksum(&self.memory().read(rest))
                });
                DiskDone { id, result: Ok(()), buffer: Some(buffer), rest_sum }
            }
            DiskOp::Write { id, buffer, .. } if faults.is_full => {
                let result = Err(DiskError::NoSpace);
                DiskDone { id, result, buffer: Some(buffer), rest_sum: None }
            }
            DiskOp::Write { id, .. } if faults.writes_fail => failed(id, EIO),
            DiskOp::Write { id, offset_bytes, buffer, rest } => {
                self.writes_total += 1;
                if faults.loses_writes {
                    let rest_sum = rest.map(|rest| checksum(&self.memory().read(rest)));
                    return DiskDone { id, result: Ok(()), buffer: Some(buffer), rest_sum };
                }
                let rest_sum = self.write_all(offset_bytes, buffer.bytes(), rest);
                DiskDone { id, result: Ok(()), buffer: Some(buffer), rest_sum }
            }
            DiskOp::Sync { id } if faults.syncs_fail => {
                self.unsynced.clear();
                failed(id, EIO)
            }
            DiskOp::Sync { id } => {
                self.syncs_total += 1;
                for (page, bytes) in std::mem::take(&mut self.unsynced) {
                    let at = page * PAGE_BYTES;
                    self.durable[at..at + bytes.len()].copy_from_slice(&bytes);
                }
                DiskDone { id, result: Ok(()), buffer: None, rest_sum: None }
            }
        }
    }

    /// SplitMix64.
    fn random(&mut self) -> u64 {
        self.random = self.random.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.random;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }
}

fn failed(id: u64, errno: i32) -> DiskDone {
    DiskDone { id, result: Err(DiskError::Io(errno)), buffer: None, rest_sum: None }
}

impl Disk for SimDisk {
    fn len_bytes(&self) -> u64 {
        self.durable.len() as u64
    }

    fn depth(&self) -> usize {
        self.depth
    }

    fn submit(&mut self, op: DiskOp) {
        assert!(self.queue.len() < self.depth, "more operations than the disk takes");
        // A sync is no sooner done than another one; the order of the others is drawn.
        let jitter = self.random() % (self.latency.as_nanos() as u64 + 1);
        self.queue.push((self.now + self.latency + Duration::from_nanos(jitter), op));
    }

    /// One at a time, so that whoever drives it can stop after any of them.
    fn complete(&mut self, wait: Duration) -> Vec<DiskDone> {
        let Some(end) = self.next_end() else { return Vec::new() };
        if end > self.now + wait {
            self.now += wait;
            return Vec::new();
        }
        self.now = self.now.max(end);
        let first = self.queue.iter().position(|(at, _)| *at == end).expect("it was just found");
        let (_, op) = self.queue.remove(first);
        vec![self.end(op)]
    }
}
