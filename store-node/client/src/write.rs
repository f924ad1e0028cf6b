//! How an object is laid into a slot: its bytes, zeros, the footer; and the checksum of each run, computed
//! in the pass that copies it.

use kvasir_proto::{SlotLayout, SlotRun, objects};
use kvasir_transfer::Checksum;
use kvasir_transfer::memory::{RangeError, SharedMemory};

static ZEROS: [u8; 8 << 10] = [0; 8 << 10];

/// The shape of slots, as objects lie in them.
#[derive(Debug)]
pub(crate) struct Shape {
    pub(crate) slot_bytes: usize,
    /// The longest object.
    pub(crate) capacity: usize,
    /// Where the runs end.
    end: usize,
    /// In the order of their place.
    runs: Vec<SlotRun>,
    /// Of each run of the layout, layer by layer: which of `runs` it is.
    order: Vec<usize>,
}

impl Shape {
    /// `None` when no object lies in such a slot in one piece.
    pub(crate) fn new(layout: &SlotLayout) -> Option<Self> {
        let runs = objects::runs_in_place(layout)?;
        let capacity = usize::try_from(objects::capacity(layout)?).ok()?;
        let by_layer = (0..layout.layers()).flat_map(|layer| layout.runs(layer));
        let order = by_layer.map(|run| runs.binary_search(run).ok()).collect::<Option<_>>()?;
        Some(Shape {
            slot_bytes: usize::try_from(layout.slot_bytes()).ok()?,
            capacity,
            end: capacity + objects::FOOTER_BYTES as usize,
            runs,
            order,
        })
    }

    pub(crate) fn runs(&self) -> usize {
        self.runs.len()
    }

    /// Where an object's footer begins in its slot.
    pub(crate) fn footer_at(&self) -> usize {
        self.capacity
    }

    /// Copies an object into a slot and answers with the checksums of its runs, layer by layer.
    pub(crate) fn write(
        &self,
        memory: &SharedMemory,
        slot: u32,
        object: &[u8],
        checksums: &mut Vec<u64>,
    ) -> Result<(), RangeError> {
        let mut writer = Writer::new(self, memory, slot);
        writer.copy(object)?;
        self.finish(writer, object.len(), checksums)
    }

    /// Completes a slot whose first bytes were written in place, and answers as [`Self::write`].
    pub(crate) fn seal(
        &self,
        memory: &SharedMemory,
        slot: u32,
        object_bytes: usize,
        checksums: &mut Vec<u64>,
    ) -> Result<(), RangeError> {
        let mut writer = Writer::new(self, memory, slot);
        writer.read(object_bytes)?;
        self.finish(writer, object_bytes, checksums)
    }

    fn finish(
        &self,
        mut writer: Writer<'_>,
        object_bytes: usize,
        checksums: &mut Vec<u64>,
    ) -> Result<(), RangeError> {
        while writer.at < self.capacity {
            let bytes = ZEROS.len().min(self.capacity - writer.at);
            writer.copy(&ZEROS[..bytes])?;
        }
        writer.copy(&objects::footer(object_bytes as u64))?;
        debug_assert_eq!(writer.at, self.end, "a slot is written whole");
        let sums = writer.sums;
        checksums.extend(self.order.iter().map(|&run| sums[run]));
        Ok(())
    }

    /// The checksums of a slot's runs, layer by layer.
    pub(crate) fn checksums(
        &self,
        memory: &SharedMemory,
        slot: u32,
    ) -> Result<Vec<u64>, RangeError> {
        let mut writer = Writer::new(self, memory, slot);
        writer.read(self.end)?;
        Ok(self.order.iter().map(|&run| writer.sums[run]).collect())
    }
}

/// One slot, from its start on.
struct Writer<'a> {
    shape: &'a Shape,
    memory: &'a SharedMemory,
    base: usize,
    at: usize,
    sum: Checksum,
    sums: Vec<u64>,
}

impl<'a> Writer<'a> {
    fn new(shape: &'a Shape, memory: &'a SharedMemory, slot: u32) -> Self {
        let base = slot as usize * shape.slot_bytes;
        let sums = Vec::with_capacity(shape.runs.len());
        Writer { shape, memory, base, at: 0, sum: Checksum::new(), sums }
    }

    /// Writes what stands next in the slot.
    fn copy(&mut self, mut bytes: &[u8]) -> Result<(), RangeError> {
        while !bytes.is_empty() {
            let (now, rest) = bytes.split_at(bytes.len().min(self.left_of_run()));
            self.memory.copy_from_summed(self.base + self.at, now, &mut self.sum)?;
            self.advance(now.len());
            bytes = rest;
        }
        Ok(())
    }

    /// Reads what stands in the slot already, up to there.
    fn read(&mut self, end: usize) -> Result<(), RangeError> {
        while self.at < end {
            let now = self.left_of_run().min(end - self.at);
            self.memory.add_to(self.base + self.at, now, &mut self.sum)?;
            self.advance(now);
        }
        Ok(())
    }

    fn left_of_run(&self) -> usize {
        let run = &self.shape.runs[self.sums.len()];
        (run.offset_bytes + run.length_bytes) as usize - self.at
    }

    /// A run's checksum is complete at its end.
    fn advance(&mut self, bytes: usize) {
        let left = self.left_of_run() - bytes;
        self.at += bytes;
        if left == 0 {
            self.sums.push(self.sum.sum());
            self.sum.reset();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvasir_transfer::memory::Prefault;

    fn check(layout: &SlotLayout, lengths: &[usize]) {
        let shape = Shape::new(layout).expect("a shape");
        let bytes = 2 * shape.slot_bytes;
        let memory = SharedMemory::create("test", bytes, Prefault::No).expect("memory");
        for &length in lengths {
            let object: Vec<u8> = (0..length).map(|at| (at * 7 + at / 251) as u8).collect();
            memory.copy_from(0, &vec![0xa5; bytes]).expect("inside");
            let mut sums = Vec::new();
            shape.write(&memory, 1, &object, &mut sums).expect("inside");
            let expected: Vec<u64> = (0..layout.layers())
                .flat_map(|layer| layout.runs(layer))
                .map(|run| {
                    let mut bytes = vec![0; run.length_bytes as usize];
                    let at = shape.slot_bytes + run.offset_bytes as usize;
                    memory.copy_to(at, &mut bytes).expect("inside");
                    kvasir_transfer::checksum(&bytes)
                })
                .collect();
            assert_eq!(sums, expected, "{length} bytes");
            let mut whole = vec![0; shape.slot_bytes];
            memory.copy_to(shape.slot_bytes, &mut whole).expect("inside");
            assert_eq!(whole[..length], object);
            assert!(whole[length..shape.capacity].iter().all(|&byte| byte == 0), "{length}");
            assert_eq!(whole[shape.capacity..shape.end], objects::footer(length as u64));
            let mut before = vec![0; shape.slot_bytes];
            memory.copy_to(0, &mut before).expect("inside");
            assert!(before.iter().all(|&byte| byte == 0xa5), "the slot before is as it was");
            assert_eq!(shape.checksums(&memory, 1), Ok(expected.clone()));
            let mut sealed = Vec::new();
            shape.seal(&memory, 1, length, &mut sealed).expect("inside");
            assert_eq!(sealed, expected);
        }
    }

    #[test]
    fn an_object_of_any_length_lies_in_its_slot_with_true_checksums() {
        let layout = objects::layout(20_000).expect("a layout");
        check(&layout, &[0, 1, 8_191, 8_192, 8_193, 20_000]);
    }

    #[test]
    fn an_object_lies_across_the_runs_of_an_engines_layout() {
        let run = |offset_bytes, length_bytes| SlotRun { offset_bytes, length_bytes };
        let layers = vec![vec![run(100, 9_000), run(0, 60)], vec![run(60, 40), run(9_100, 20)]];
        let layout = SlotLayout::new(64, 9_200, layers).expect("a layout");
        check(&layout, &[0, 59, 60, 61, 5_000, 9_090, 9_104]);
    }
}
