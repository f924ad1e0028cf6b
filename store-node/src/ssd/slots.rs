//! The node's slots, as disks have to do with them. A slot that is given to a disk with an operation is nobody else's
//! to write, and to read only where the disk reads it as well, until the operation has ended.

use std::sync::Arc;

use kvasir_log::Span;
use kvasir_transfer::Checksum;
use kvasir_transfer::memory::SharedMemory;

const WITHIN: &str = "slots of a checked layout are inside the arena";

/// See the module.
#[derive(Debug, Clone)]
pub(crate) struct Slots(Arc<SharedMemory>);

impl Slots {
    pub(crate) fn new(memory: Arc<SharedMemory>) -> Self {
        Slots(memory)
    }

    /// Where a span lies. It is in the memory, as long as this value or a clone of it lives.
    pub(crate) fn address(&self, span: Span) -> *mut u8 {
        self.0.check(span.offset_bytes, span.length_bytes).expect(WITHIN);
        self.0.as_ptr().wrapping_add(span.offset_bytes)
    }

    /// The checksum of what is there.
    pub(crate) fn sum(&self, span: Span) -> u64 {
        let mut sum = Checksum::new();
        self.0.add_to(span.offset_bytes, span.length_bytes, &mut sum).expect(WITHIN);
        sum.sum()
    }

    /// Fills a span, and answers with the checksum of what was put there.
    pub(crate) fn fill(&self, span: Span, bytes: &[u8]) -> u64 {
        let mut sum = Checksum::new();
        let bytes = &bytes[..span.length_bytes];
        self.0.copy_from_summed(span.offset_bytes, bytes, &mut sum).expect(WITHIN);
        sum.sum()
    }

    /// Copies a span to the beginning of `target`, and answers with the checksum of what was copied.
    pub(crate) fn copy(&self, span: Span, target: &mut [u8]) -> u64 {
        let mut sum = Checksum::new();
        let target = &mut target[..span.length_bytes];
        self.0.copy_to_summed(span.offset_bytes, target, &mut sum).expect(WITHIN);
        sum.sum()
    }

    /// Gives a bit of it another value.
    pub(crate) fn spoil(&self, offset_bytes: usize) {
        let mut byte = [0];
        self.0.copy_to(offset_bytes, &mut byte).expect(WITHIN);
        self.0.copy_from(offset_bytes, &[byte[0] ^ 0x40]).expect(WITHIN);
    }
}
