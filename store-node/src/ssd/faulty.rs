//! A disk that does wrong on purpose, around any other: for tests of a whole node. What it does
//! stands in a file, which is looked at now and then: any of the words `wrong` (reads give a wrong
//! byte), `full`, `read-errors`, `hang` (nothing ends until the word is gone); an empty or missing
//! file is a good disk.

use std::collections::HashMap;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use kvasir_log::{Disk, DiskDone, DiskError, DiskOp, Span};

use super::slots::Slots;

const LOOK_EVERY: Duration = Duration::from_millis(20);
/// What systems answer when a medium has failed.
const EIO: i32 = 5;

#[derive(Debug, Default, Clone, Copy)]
struct Faults {
    wrong: bool,
    full: bool,
    read_errors: bool,
    hang: bool,
}

/// See the module.
pub(crate) struct FaultyDisk {
    disk: Box<dyn Disk + Send>,
    file: PathBuf,
    slots: Slots,
    /// Reads under way that go on in a slot.
    into_slots: HashMap<u64, Span>,
    looked: Option<Instant>,
    faults: Faults,
    refused: Vec<DiskDone>,
    /// Reads: what they brought is changed.
    held: Vec<DiskDone>,
}

impl std::fmt::Debug for FaultyDisk {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("FaultyDisk").field("faults", &self.faults).finish_non_exhaustive()
    }
}

impl FaultyDisk {
    pub(crate) fn new(disk: Box<dyn Disk + Send>, file: PathBuf, slots: Slots) -> Self {
        FaultyDisk {
            disk,
            file,
            slots,
            into_slots: HashMap::new(),
            looked: None,
            faults: Faults::default(),
            refused: Vec::new(),
            held: Vec::new(),
        }
    }

    fn look(&mut self) {
        if self.looked.is_some_and(|looked| looked.elapsed() < LOOK_EVERY) {
            return;
        }
        self.looked = Some(Instant::now());
        let text = std::fs::read_to_string(&self.file).unwrap_or_default();
        let has = |word| text.split_whitespace().any(|said| said == word);
        self.faults = Faults {
            wrong: has("wrong"),
            full: has("full"),
            read_errors: has("read-errors"),
            hang: has("hang"),
        };
    }

    fn refuse(&mut self, op: DiskOp, error: DiskError) {
        let id = op.id();
        let buffer = match op {
            DiskOp::Read { buffer, .. } | DiskOp::Write { buffer, .. } => Some(buffer),
            DiskOp::Sync { .. } => None,
        };
        self.refused.push(DiskDone { id, result: Err(error), buffer, rest_sum: None });
    }

    /// What was read is known by its place in a slot, or by nothing but its buffer; a wrong byte in the buffer of what was
    /// written harms nobody any more.
    fn spoil(&mut self, done: &mut DiskDone) {
        let slot = self.into_slots.remove(&done.id);
        if let (true, Some(slot)) = (self.faults.wrong, slot) {
            self.slots.spoil(slot.offset_bytes + slot.length_bytes / 2);
            done.rest_sum = done.rest_sum.map(|_| self.slots.sum(slot));
        } else if let (true, Some(buffer)) = (self.faults.wrong, &mut done.buffer) {
            let bytes = buffer.bytes_mut();
            let middle = bytes.len() / 2;
            bytes[middle] ^= 0x40;
        }
    }
}

impl Disk for FaultyDisk {
    fn len_bytes(&self) -> u64 {
        self.disk.len_bytes()
    }

    fn depth(&self) -> usize {
        self.disk.depth()
    }

    fn submit(&mut self, op: DiskOp) {
        self.look();
        match op {
            DiskOp::Write { .. } if self.faults.full => self.refuse(op, DiskError::NoSpace),
            DiskOp::Read { .. } if self.faults.read_errors => self.refuse(op, DiskError::Io(EIO)),
            op => {
                if let DiskOp::Read { id, rest: Some(slot), .. } = &op {
                    self.into_slots.insert(*id, *slot);
                }
                self.disk.submit(op);
            }
        }
    }

    fn complete(&mut self, wait: Duration) -> Vec<DiskDone> {
        self.look();
        let waits =
            if self.refused.is_empty() && self.held.is_empty() { wait } else { Duration::ZERO };
        let mut done = self.disk.complete(waits);
        done.iter_mut().for_each(|done| self.spoil(done));
        done.append(&mut self.refused);
        self.held.append(&mut done);
        if self.faults.hang {
            std::thread::sleep(wait.min(LOOK_EVERY));
            return Vec::new();
        }
        std::mem::take(&mut self.held)
    }
}
