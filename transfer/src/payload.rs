//! Where the bytes of an operation lie while it is under way, and who is told of its end.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use kvasir_mutation::{Mutation, mutated};
use kvasir_transfer_core::{Outcome, Told};

use crate::completion::Completion;
use crate::memory::SharedMemory;
use crate::parts::Join;
use crate::region::RegionHandle;
use crate::signalled::SignalOutcomes;
use crate::topology::Location;

/// Cheap to clone; offsets count from the start of the memory or of the bytes.
#[derive(Clone)]
pub(crate) enum Payload {
    Memory { memory: Arc<SharedMemory>, region: Origin },
    Bytes(Arc<Vec<u8>>),
}

/// Which region a source is: of an engine of this process, not always of the one that sends it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Origin {
    pub(crate) incarnation: u64,
    pub(crate) key: u64,
    /// `None` when it is not known.
    pub(crate) location: Option<Location>,
}

impl fmt::Debug for Payload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Payload").field(&self.len()).finish()
    }
}

impl From<RegionHandle> for Payload {
    fn from(handle: RegionHandle) -> Self {
        let location = handle.rdma.as_ref().and_then(|place| place.location);
        let region = Origin { incarnation: handle.incarnation, key: handle.key, location };
        Payload::Memory { memory: handle.memory, region }
    }
}

impl Payload {
    pub(crate) fn len(&self) -> usize {
        match self {
            Payload::Memory { memory, .. } => memory.len(),
            Payload::Bytes(bytes) => bytes.len(),
        }
    }

    /// Where the bytes lie, as far as it is known.
    pub(crate) fn location(&self) -> Option<Location> {
        match self {
            Payload::Memory { region, .. } => region.location,
            Payload::Bytes(_) => None,
        }
    }

    /// The bytes to be sent. Empty when the range lies outside, which the checks at submission
    /// exclude.
    pub(crate) fn bytes(&self, offset: usize, bytes: usize) -> &[u8] {
        let slice = match self {
            // SAFETY: whoever submits a write promises that nobody writes its source before it has
            // ended (see `Source`), and frames are detached from their source at that moment.
            Payload::Memory { memory, .. } => unsafe { memory.slice(offset, bytes) }.ok(),
            Payload::Bytes(owned) => owned.get(offset..).and_then(|rest| rest.get(..bytes)),
        };
        debug_assert!(slice.is_some(), "sources are checked when they are submitted");
        slice.unwrap_or_default()
    }
}

/// One or several of the operations that may be under way at once.
#[derive(Debug)]
pub(crate) struct Permit {
    in_flight: Arc<AtomicUsize>,
    operations: usize,
}

impl Permit {
    pub(crate) fn take(
        in_flight: &Arc<AtomicUsize>,
        operations: usize,
        max: usize,
    ) -> Option<Permit> {
        let taken = in_flight.fetch_add(operations, Ordering::Relaxed);
        let permit = Permit { in_flight: Arc::clone(in_flight), operations };
        let is_within = taken.saturating_add(operations) <= max;
        (is_within || mutated(Mutation::OperationsUnbounded)).then_some(permit)
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.in_flight.fetch_sub(self.operations, Ordering::Relaxed);
    }
}

/// A completion with what is given back when the operation has ended.
#[derive(Debug)]
pub(crate) struct Waiter {
    done: Done,
    permit: Option<Permit>,
}

#[derive(Debug)]
enum Done {
    Whole(Completion),
    /// Of several that are told together.
    Part(Arc<Join>, u32),
    /// One of these that also says how its peer is told.
    Signal(Arc<Join>, Arc<SignalOutcomes>, u32),
}

impl Waiter {
    pub(crate) fn new(done: Completion) -> Self {
        Waiter { done: Done::Whole(done), permit: None }
    }

    pub(crate) fn with_permit(done: Completion, permit: Permit) -> Self {
        Waiter { done: Done::Whole(done), permit: Some(permit) }
    }

    pub(crate) fn of_part(join: Arc<Join>, part: u32) -> Self {
        Waiter { done: Done::Part(join, part), permit: None }
    }

    pub(crate) fn of_signal(join: Arc<Join>, outcomes: Arc<SignalOutcomes>, part: u32) -> Self {
        Waiter { done: Done::Signal(join, outcomes, part), permit: None }
    }

    /// Before it is completed.
    pub(crate) fn note(&self, told: Option<Told>) {
        if let Done::Signal(_, outcomes, part) = &self.done {
            outcomes.note(*part, told);
        }
    }

    pub(crate) fn complete(self, outcome: Outcome) {
        // First, so that whoever is told can submit the next one.
        drop(self.permit);
        match self.done {
            Done::Whole(done) => done.complete(outcome),
            Done::Part(join, part) | Done::Signal(join, _, part) => join.part_ended(part, outcome),
        }
    }
}
