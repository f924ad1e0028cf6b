//! Where the bytes of an operation lie while it is under way, and who is told of its end.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use kvasir_transfer_core::Outcome;

use crate::completion::Completion;
use crate::memory::SharedMemory;

/// Cheap to clone; offsets count from the start of the memory or of the bytes.
#[derive(Clone)]
pub(crate) enum Payload {
    Memory(Arc<SharedMemory>),
    Bytes(Arc<Vec<u8>>),
}

impl fmt::Debug for Payload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Payload").field(&self.len()).finish()
    }
}

impl Payload {
    pub(crate) fn len(&self) -> usize {
        match self {
            Payload::Memory(memory) => memory.len(),
            Payload::Bytes(bytes) => bytes.len(),
        }
    }

    /// The bytes to be sent. Empty when the range lies outside, which the checks at submission
    /// exclude.
    pub(crate) fn bytes(&self, offset: usize, bytes: usize) -> &[u8] {
        let slice = match self {
            // SAFETY: whoever submits a write promises that nobody writes its source before it has
            // ended (see `Source`), and frames are detached from their source at that moment.
            Payload::Memory(memory) => unsafe { memory.slice(offset, bytes) }.ok(),
            Payload::Bytes(owned) => owned.get(offset..).and_then(|rest| rest.get(..bytes)),
        };
        debug_assert!(slice.is_some(), "sources are checked when they are submitted");
        slice.unwrap_or_default()
    }
}

/// One of the operations that may be under way at once.
#[derive(Debug)]
pub(crate) struct Permit(Arc<AtomicUsize>);

impl Permit {
    pub(crate) fn take(in_flight: &Arc<AtomicUsize>, max: usize) -> Option<Permit> {
        let taken = in_flight.fetch_add(1, Ordering::Relaxed);
        let permit = Permit(Arc::clone(in_flight));
        (taken < max).then_some(permit)
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// A completion with what is given back when the operation has ended.
#[derive(Debug)]
pub(crate) struct Waiter {
    done: Completion,
    permit: Option<Permit>,
}

impl Waiter {
    pub(crate) fn new(done: Completion) -> Self {
        Waiter { done, permit: None }
    }

    pub(crate) fn with_permit(done: Completion, permit: Permit) -> Self {
        Waiter { done, permit: Some(permit) }
    }

    pub(crate) fn complete(self, outcome: Outcome) {
        // First, so that whoever is told can submit the next one.
        drop(self.permit);
        self.done.complete(outcome);
    }
}
