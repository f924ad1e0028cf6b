//! A log on a simulated disk, and what was promised of it: blocks are written as numbers, and the
//! payload of each follows from its number.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::Duration;

use kvasir_log::sim_disk::SimDisk;
use kvasir_log::{
    AppendError, Disk, ExtentBuf, Log, Memory, MemoryIndex, Options, Output, PAGE_BYTES, ReadError,
    Record, RecoverError, Recovery, Span, recover,
};
use kvasir_proto::{BlockKey, Mark, Namespace, Tenant};

pub(crate) const SEGMENT_PAGES: usize = 32;
pub(crate) const SEGMENTS: usize = 8;
pub(crate) const DISK_BYTES: usize = (2 + SEGMENTS * SEGMENT_PAGES) * PAGE_BYTES;

pub(crate) fn key(n: u32) -> BlockKey {
    BlockKey(u128::from(n).to_be_bytes())
}

/// Every third block is the end of a context.
pub(crate) fn mark(n: u32) -> Option<Mark> {
    n.is_multiple_of(3).then(|| until(1_000 + u64::from(n)))
}

pub(crate) fn until(expires_unix_ms: u64) -> Mark {
    let created_unix_ms = Some(expires_unix_ms / 2);
    Mark { tenant: Tenant(1), expires_unix_ms, created_unix_ms, copies: 1 }
}

pub(crate) fn record(n: u32) -> Record {
    Record {
        key: key(n),
        namespace: Namespace([7; 16]),
        parent: n.checked_sub(1).map(key),
        mark: mark(n),
        layout: 5,
        checksums: vec![n.into(), 2],
    }
}

/// Between one and three pages.
pub(crate) fn payload(n: u32) -> Vec<u8> {
    let length = 1 + (n as usize * 1_237) % (3 * PAGE_BYTES);
    (0..length).map(|at| (at as u32 ^ n.wrapping_mul(31) ^ (at as u32 >> 8)) as u8).collect()
}

/// Memory that payloads are written from and read into.
#[derive(Debug, Clone)]
pub(crate) struct Slots(Arc<[AtomicU8]>);

impl Slots {
    /// So many bytes of somebody else.
    pub(crate) fn new(bytes: usize) -> Self {
        Slots((0..bytes).map(|_| AtomicU8::new(0xaa)).collect())
    }
}

impl Memory for Slots {
    fn read(&self, span: Span) -> Vec<u8> {
        self.0[range(span)].iter().map(|byte| byte.load(Ordering::Relaxed)).collect()
    }

    fn write(&self, span: Span, bytes: &[u8]) {
        let places = &self.0[range(span)];
        assert_eq!(places.len(), bytes.len());
        places.iter().zip(bytes).for_each(|(place, byte)| place.store(*byte, Ordering::Relaxed));
    }
}

fn range(span: Span) -> std::ops::Range<usize> {
    span.offset_bytes..span.offset_bytes + span.length_bytes
}

pub(crate) struct TestLog {
    pub disk: SimDisk,
    pub log: Log,
    pub recovered: Vec<BlockKey>,
    /// As they were found at the start.
    pub marks: BTreeMap<BlockKey, Option<Mark>>,
    pub scanned: u32,
    pub unreadable: u32,
    next_ticket: u64,
    /// Appends that were answered, in order.
    pub appended: Vec<(u32, Result<(), AppendError>)>,
    pub lost: Vec<BlockKey>,
    reads: BTreeMap<u64, Result<Vec<u8>, ReadError>>,
    placed: BTreeMap<u64, Result<Record, ReadError>>,
    under_way: usize,
}

pub(crate) fn options() -> Options {
    Options {
        new_log_id: 77,
        segment_bytes: (SEGMENT_PAGES * PAGE_BYTES) as u64,
        patience: Duration::from_secs(1),
    }
}

impl TestLog {
    pub(crate) fn new(seed: u64) -> Self {
        TestLog::open(SimDisk::new(DISK_BYTES, seed)).expect("a log")
    }

    pub(crate) fn open(disk: SimDisk) -> Result<Self, RecoverError> {
        TestLog::open_with(disk, &options())
    }

    pub(crate) fn open_with(mut disk: SimDisk, options: &Options) -> Result<Self, RecoverError> {
        let index = Box::new(MemoryIndex::default());
        let Recovery { log, blocks, scanned_segments, unreadable_segments, .. } =
            recover(&mut disk, index, options)?;
        Ok(TestLog {
            disk,
            log,
            recovered: blocks.iter().map(|block| block.key).collect(),
            marks: blocks.iter().map(|block| (block.key, block.mark)).collect(),
            scanned: scanned_segments,
            unreadable: unreadable_segments,
            next_ticket: 0,
            appended: Vec::new(),
            lost: Vec::new(),
            reads: BTreeMap::new(),
            placed: BTreeMap::new(),
            under_way: 0,
        })
    }

    /// Loses power and starts again.
    pub(crate) fn crash(mut self) -> Self {
        self.disk.crash();
        TestLog::open(self.disk).expect("a log after a crash")
    }

    /// Waits as long as room may come.
    pub(crate) fn try_append(&mut self, n: u32) -> Result<(), AppendError> {
        self.try_append_as(n, mark(n))
    }

    /// With another mark than the block's own.
    pub(crate) fn try_append_as(&mut self, n: u32, mark: Option<Mark>) -> Result<(), AppendError> {
        self.try_append_bytes(n, mark, &payload(n))
    }

    /// With other bytes too.
    pub(crate) fn try_append_bytes(
        &mut self,
        n: u32,
        mark: Option<Mark>,
        bytes: &[u8],
    ) -> Result<(), AppendError> {
        let mut extent = ExtentBuf::new(Record { mark, ..record(n) }, bytes.len());
        extent.payload_mut().copy_from_slice(bytes);
        self.log.append(u64::from(n), extent);
        self.pump();
        while self.log.counts().waiting > 0 {
            assert!(self.step(), "nothing is under way: {:?}", self.log.counts());
        }
        let refused = self.appended.iter().rposition(|(of, result)| {
            *of == n && matches!(result, Err(AppendError::Full | AppendError::TooLarge { .. }))
        });
        refused.map_or(Ok(()), |at| self.appended.remove(at).1)
    }

    /// From where it lies, with the checksum that it shall have.
    pub(crate) fn append_placed(&mut self, n: u32, span: Span, sum: u64) {
        let extent = ExtentBuf::placed(record(n), span, sum);
        self.log.append(u64::from(n), extent);
        self.pump();
    }

    pub(crate) fn read_into(&mut self, n: u32, span: Span) -> Result<Record, ReadError> {
        self.next_ticket += 1;
        let ticket = self.next_ticket;
        self.log.read_into(ticket, key(n), span);
        self.pump();
        self.settle();
        self.placed.remove(&ticket).expect("an answer")
    }

    pub(crate) fn append(&mut self, n: u32) {
        self.try_append(n).expect("room");
    }

    /// Appends and waits until it is durable.
    pub(crate) fn store(&mut self, n: u32) {
        self.append(n);
        self.settle();
        assert_eq!(self.appended.last(), Some(&(n, Ok(()))), "block {n}");
    }

    /// Takes one end of an operation; false when there was none.
    pub(crate) fn step(&mut self) -> bool {
        let done = self.disk.complete(Duration::from_secs(1));
        let any = !done.is_empty();
        for done in done {
            self.under_way -= 1;
            self.log.handle_done(done);
        }
        self.pump();
        any
    }

    pub(crate) fn settle(&mut self) {
        while self.step() {}
    }

    /// Without waiting for it.
    pub(crate) fn begin_read(&mut self, n: u32) -> u64 {
        self.next_ticket += 1;
        self.log.read(self.next_ticket, key(n));
        self.pump();
        self.next_ticket
    }

    pub(crate) fn read(&mut self, n: u32) -> Result<Vec<u8>, ReadError> {
        let ticket = self.begin_read(n);
        self.settle();
        self.reads.remove(&ticket).expect("an answer")
    }

    /// What is there is right.
    pub(crate) fn has(&mut self, n: u32) -> bool {
        match self.read(n) {
            Ok(bytes) => {
                assert!(bytes == payload(n), "block {n} has other bytes");
                true
            }
            Err(ReadError::Missing | ReadError::Rotten) => false,
            Err(error) => panic!("block {n}: {error}"),
        }
    }

    pub(crate) fn acknowledged(&self) -> Vec<u32> {
        self.appended.iter().filter(|(_, result)| result.is_ok()).map(|(n, _)| *n).collect()
    }

    pub(crate) fn pump(&mut self) {
        while self.under_way < self.disk.depth() {
            let Some(op) = self.log.poll_operation() else { break };
            self.under_way += 1;
            self.disk.submit(op);
        }
        while let Some(output) = self.log.poll_output() {
            match output {
                Output::Appended { ticket, key: of, result } => {
                    assert_eq!(of, key(ticket as u32));
                    self.appended.push((ticket as u32, result));
                }
                Output::Read { ticket, result, .. } => {
                    let result = result.map(|extent| extent.payload().to_vec());
                    self.reads.insert(ticket, result);
                }
                Output::Placed { ticket, result, .. } => {
                    self.placed.insert(ticket, result);
                }
                Output::Lost { key } => self.lost.push(key),
                Output::IndexFailed(error) => panic!("{error}"),
            }
        }
    }
}
