//! The operations under way on one completion queue, and libfabric's context of each. A provider may
//! use a context until the operation completes (mode bits `FI_CONTEXT`, `FI_CONTEXT2`), so contexts
//! lie in one allocation that lives as long as the queue, and completions find their operation by the
//! place of its context.
//!
//! An operation holds its memory and its peer. When its endpoint is closed it is over, and lets go of
//! them; but a completion of it may still lie in the queue, so its place is an *orphan* until the
//! queue was seen empty, and only then is used again.

use std::cell::UnsafeCell;
use std::ffi::c_void;
use std::ptr;
use std::sync::Mutex;

use crate::address::Peer;
use crate::bindings::fi_context2;
use crate::completion::{Operation, Token};
use crate::domain::lock;
use crate::region::Span;

/// An operation under way, and what it holds.
#[derive(Debug)]
pub(crate) struct Held {
    pub token: Token,
    pub operation: Operation,
    pub bytes: usize,
    /// The endpoint's number.
    pub endpoint: u64,
    pub _span: Option<Span>,
    pub _peer: Option<Peer>,
}

#[derive(Debug)]
enum Place {
    Free,
    Used(Held),
    Orphan,
}

#[derive(Debug)]
struct State {
    places: Vec<Place>,
    free: Vec<usize>,
    /// In the order in which they became orphans.
    orphans: Vec<usize>,
}

#[derive(Debug)]
pub(crate) struct Slab {
    contexts: Box<[UnsafeCell<fi_context2>]>,
    state: Mutex<State>,
}

// SAFETY: contexts are libfabric's to use; here only their addresses are looked at. All else is under
// the lock.
unsafe impl Send for Slab {}
// SAFETY: as above.
unsafe impl Sync for Slab {}

impl Slab {
    pub(crate) fn new(operations_max: usize) -> Self {
        let empty = fi_context2 { internal: [ptr::null_mut(); 8] };
        let contexts = (0..operations_max).map(|_| UnsafeCell::new(empty)).collect();
        let places = (0..operations_max).map(|_| Place::Free).collect();
        // The lowest comes first, which keeps few operations in few cache lines.
        let free = (0..operations_max).rev().collect();
        Slab { contexts, state: Mutex::new(State { places, free, orphans: Vec::new() }) }
    }

    /// A place for an operation, and the context to post it with; gives it back when there is none.
    pub(crate) fn take(&self, held: Held) -> Result<*mut c_void, Held> {
        let mut state = lock(&self.state);
        let Some(place) = state.free.pop() else { return Err(held) };
        state.places[place] = Place::Used(held);
        Ok(self.contexts[place].get().cast())
    }

    /// Ends the operation of this context. `None` for what is no context of an operation under way:
    /// none at all, or one whose endpoint was closed.
    pub(crate) fn finish(&self, context: *mut c_void) -> Option<Held> {
        let place = self.place_of(context)?;
        let mut state = lock(&self.state);
        match std::mem::replace(&mut state.places[place], Place::Free) {
            Place::Used(held) => {
                state.free.push(place);
                Some(held)
            }
            other => {
                state.places[place] = other;
                None
            }
        }
    }

    /// Whether it is one of these contexts, whatever became of its operation.
    pub(crate) fn has(&self, context: *mut c_void) -> bool {
        self.place_of(context).is_some()
    }

    fn place_of(&self, context: *mut c_void) -> Option<usize> {
        let offset = context.addr().checked_sub(self.contexts.as_ptr().addr())?;
        let place = offset / size_of::<fi_context2>();
        (offset.is_multiple_of(size_of::<fi_context2>()) && place < self.contexts.len())
            .then_some(place)
    }

    /// Ends all operations of an endpoint, which is closed.
    pub(crate) fn orphan(&self, endpoint: u64) -> Vec<Held> {
        let mut state = lock(&self.state);
        let of_endpoint =
            |place: &Place| matches!(place, Place::Used(held) if held.endpoint == endpoint);
        let places: Vec<usize> =
            (0..state.places.len()).filter(|at| of_endpoint(&state.places[*at])).collect();
        let mut ended = Vec::new();
        for place in places {
            if let Place::Used(held) = std::mem::replace(&mut state.places[place], Place::Orphan) {
                ended.push(held);
            }
            state.orphans.push(place);
        }
        ended
    }

    /// How many orphans there are, to be asked before the queue is read.
    pub(crate) fn orphans(&self) -> usize {
        lock(&self.state).orphans.len()
    }

    /// The queue was empty after the first `count` orphans became such: nothing refers to them.
    pub(crate) fn free_orphans(&self, count: usize) {
        let mut state = lock(&self.state);
        let freed: Vec<usize> = state.orphans.drain(..count).collect();
        for place in freed {
            state.places[place] = Place::Free;
            state.free.push(place);
        }
    }

    pub(crate) fn outstanding(&self) -> usize {
        let state = lock(&self.state);
        state.places.len() - state.free.len() - state.orphans.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn held(token: u64, endpoint: u64) -> Held {
        let operation = Operation::Write;
        Held { token: Token(token), operation, bytes: 0, endpoint, _span: None, _peer: None }
    }

    #[test]
    fn an_operation_is_found_by_its_context_and_once() {
        let slab = Slab::new(2);
        let first = slab.take(held(1, 0)).expect("room");
        let second = slab.take(held(2, 0)).expect("room");
        assert_eq!(slab.take(held(3, 0)).expect_err("full").token, Token(3));
        assert_eq!(slab.outstanding(), 2);
        assert_eq!(slab.finish(second).expect("under way").token, Token(2));
        assert!(slab.finish(second).is_none());
        assert_eq!(slab.finish(first).expect("under way").token, Token(1));
        assert_eq!(slab.outstanding(), 0);
    }

    #[test]
    fn what_is_no_context_of_ours_finds_nothing() {
        let slab = Slab::new(2);
        let context = slab.take(held(1, 0)).expect("room");
        for foreign in [
            ptr::null_mut(),
            context.wrapping_byte_add(8),
            context.wrapping_byte_add(128),
            context.wrapping_byte_sub(64),
        ] {
            assert!(slab.finish(foreign).is_none() && !slab.has(foreign));
        }
        assert!(slab.finish(context).is_some());
    }

    #[test]
    fn places_of_a_closed_endpoint_wait_until_the_queue_was_empty() {
        let slab = Slab::new(2);
        let gone = slab.take(held(1, 7)).expect("room");
        slab.take(held(2, 8)).expect("room");
        assert_eq!(slab.orphan(7).len(), 1);
        assert_eq!((slab.outstanding(), slab.orphans()), (1, 1));
        // A completion that was in the queue already is nobody's, and its place is not used yet.
        assert!(slab.finish(gone).is_none() && slab.has(gone));
        assert!(slab.take(held(3, 8)).is_err());
        slab.free_orphans(1);
        assert_eq!(slab.take(held(3, 8)).expect("room again"), gone);
    }
}
