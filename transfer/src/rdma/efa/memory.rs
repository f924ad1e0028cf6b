//! Registered memory, and when nothing can land in it any more.
//!
//! Where hardware places what peers write, that is when its registration has ended. Where a provider's code
//! does, a write that had begun may still land. It was posted before its writer can have heard of it, so each
//! writer is asked to say when all that it had posted is done; one that does not in time is cut off, which
//! ends what was on its way to here for certain.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use kvasir_mutation::{Mutation, mutated};
use kvasir_transfer_libfabric::domain::Domain;
use kvasir_transfer_libfabric::region::{
    Access, CloseError, Closed, InUse, MemoryRegion, RemoteRegion,
};
use rustix::event::{EventfdFlags, eventfd};

use crate::memory::SharedMemory;
use crate::rdma::nic::{CardError, CardMemory, Place};

/// How long the thread that ends a registration waits before it tries again, while this side reads from it.
const AGAIN: Duration = Duration::from_millis(1);

// SAFETY: the mapping lives as long as the value, and its place and length never change. Nobody hands out
// slices of it but for calls whose callers promise that the bytes are at rest.
unsafe impl kvasir_transfer_libfabric::memory::Memory for SharedMemory {
    fn as_ptr(&self) -> *mut u8 {
        SharedMemory::as_ptr(self)
    }

    fn bytes(&self) -> usize {
        self.len()
    }
}

/// The registrations that the worker has not taken over yet, and what it takes to make them.
#[derive(Debug)]
pub(super) struct Registry {
    pub(super) domain: Domain,
    pub(super) landing: Arc<Landing>,
    fresh: Mutex<BTreeMap<u64, MemoryRegion>>,
}

impl Registry {
    pub(super) fn new(domain: Domain, landing: Arc<Landing>) -> Self {
        Registry { domain, landing, fresh: Mutex::default() }
    }

    pub(super) fn take(&self, key: u64) -> Option<MemoryRegion> {
        self.fresh.lock().unwrap_or_else(PoisonError::into_inner).remove(&key)
    }
}

impl CardMemory for Registry {
    fn register(&self, key: u64, memory: &Arc<SharedMemory>) -> Result<Place, CardError> {
        // Each by itself, so that each is withdrawn by itself.
        let region = self
            .domain
            .register(Arc::clone(memory) as _, Access::TARGET)
            .map_err(|error| CardError::because("cannot register memory", error))?;
        let place = place_of(region.remote());
        self.fresh.lock().unwrap_or_else(PoisonError::into_inner).insert(key, region);
        Ok(place)
    }
}

pub(super) fn place_of(region: RemoteRegion) -> Place {
    Place { address: region.base, key: region.key.0 }
}

/// The endpoints through which peers may write, and who waits for what is on its way through them.
#[derive(Debug)]
pub(super) struct Landing {
    state: Mutex<State>,
    /// One of them was closed, or is settled.
    changed: Condvar,
    /// The last that was given.
    ticket: AtomicU64,
    /// A registration did not end: no endpoint may stay open.
    has_failed: AtomicBool,
    /// Rings when one of the two has changed.
    bell: OwnedFd,
}

#[derive(Debug, Default)]
struct State {
    /// By numbers that grow: up to which ticket its writer has said that all is done.
    open: BTreeMap<u64, u64>,
}

impl Landing {
    pub(super) fn new() -> rustix::io::Result<Self> {
        Ok(Landing {
            state: Mutex::default(),
            changed: Condvar::new(),
            ticket: AtomicU64::new(0),
            has_failed: AtomicBool::new(false),
            bell: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
        })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn endpoint_opened(&self, number: u64) {
        self.state().open.insert(number, 0);
    }

    pub(super) fn endpoint_closed(&self, number: u64) {
        self.state().open.remove(&number);
        self.changed.notify_all();
    }

    /// Its writer has said that all is done that it had posted when it heard of the ticket.
    pub(super) fn endpoint_settled(&self, number: u64, ticket: u64) {
        if let Some(settled) = self.state().open.get_mut(&number) {
            *settled = ticket.max(*settled);
        }
        self.changed.notify_all();
    }

    /// Writers are to be asked about this one, and all before it.
    pub(super) fn ticket(&self) -> u64 {
        self.ticket.load(Ordering::Acquire)
    }

    pub(super) fn has_failed(&self) -> bool {
        self.has_failed.load(Ordering::Acquire)
    }

    pub(super) fn bell(&self) -> BorrowedFd<'_> {
        self.bell.as_fd()
    }

    pub(super) fn silence(&self) {
        let _ = rustix::io::read(&self.bell, &mut [0; 8]);
    }

    /// Waits until what was on its way through the endpoints of this moment has landed, or they are closed.
    fn settle(&self) {
        let mut state = self.state();
        let Some((last, _)) = state.open.last_key_value() else { return };
        let last = *last;
        let ticket = self.ticket.fetch_add(1, Ordering::AcqRel) + 1;
        // It rings already where it is full.
        let _ = rustix::io::write(&self.bell, &1_u64.to_ne_bytes());
        while !mutated(Mutation::EfaRevocationDoesNotWait)
            && state.open.range(..=last).any(|(_, settled)| *settled < ticket)
        {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn fail(&self) {
        self.has_failed.store(true, Ordering::Release);
        self.settle();
    }
}

/// From its drop on nothing lands in the region. The drop waits: for operations of this side that read
/// from the region, and for writers to say that what they had posted is done.
#[derive(Debug)]
pub(super) struct Registration {
    pub(super) region: Option<MemoryRegion>,
    pub(super) landing: Arc<Landing>,
}

impl Drop for Registration {
    fn drop(&mut self) {
        let mut left = self.region.take();
        while let Some(region) = left.take() {
            match region.close() {
                Ok(Closed::Certain) => {}
                Ok(Closed::WhenEndpointsClose) => self.landing.settle(),
                Err(CloseError::InUse(InUse(region))) => {
                    left = Some(region);
                    std::thread::sleep(AGAIN);
                }
                Err(error @ CloseError::Refused(_)) => {
                    tracing::error!(%error, "the transfer engine cannot end a memory registration; giving up the libfabric device");
                    self.landing.fail();
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whoever_ends_a_registration_waits_for_the_endpoints_of_that_moment_only() {
        let landing = Arc::new(Landing::new().expect("a descriptor"));
        landing.settle();
        assert_eq!(landing.ticket(), 0, "without endpoints there is nothing to wait for");
        for number in 3..6 {
            landing.endpoint_opened(number);
        }
        std::thread::scope(|threads| {
            let waits = threads.spawn(|| landing.settle());
            while landing.ticket() == 0 {
                std::thread::yield_now();
            }
            landing.endpoint_opened(6);
            landing.endpoint_settled(3, 0);
            // Time for the other thread to return too early.
            std::thread::sleep(std::time::Duration::from_millis(20));
            assert!(!waits.is_finished(), "that was said of something earlier");
            for number in 3..6 {
                assert!(!waits.is_finished(), "{number} is open");
                if number == 4 {
                    landing.endpoint_closed(number);
                } else {
                    landing.endpoint_settled(number, 1);
                }
            }
            waits.join().expect("it ends though a later one is open");
        });
        assert!(!landing.has_failed());
    }
}
