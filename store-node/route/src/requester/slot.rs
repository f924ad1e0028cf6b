//! One slot of a session's two rings, as a state that a thread that dispatches and the transfer engine's
//! worker share.
//!
//! | state | who may touch it | becomes |
//! | --- | --- | --- |
//! | free | nobody | in flight, by a dispatch |
//! | in flight | the holder writes the answer | arrived, by the worker; abandoned, by a flight given up |
//! | arrived | the flight reads it | free, by the flight |
//! | abandoned | the holder may still write: quarantine | free, by the worker |

use crate::sync::{AtomicU8, Ordering};

const FREE: u8 = 0;
const IN_FLIGHT: u8 = 1;
const ARRIVED: u8 = 2;
const ABANDONED: u8 = 3;

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Slot(AtomicU8);

impl Slot {
    /// Takes a free slot for a dispatch.
    pub(super) fn take(&self) -> bool {
        self.change(FREE, IN_FLIGHT)
    }

    /// The answer has landed.
    pub(super) fn arrived(&self) {
        if !self.change(IN_FLIGHT, ARRIVED) {
            self.change(ABANDONED, FREE);
        }
    }

    pub(super) fn has_arrived(&self) -> bool {
        self.0.load(Ordering::Acquire) == ARRIVED
    }

    /// The flight is over, with its answer or without.
    pub(super) fn give_back(&self) {
        if !self.change(IN_FLIGHT, ABANDONED) {
            self.change(ARRIVED, FREE);
        }
    }

    /// Nothing was sent, so nothing can land.
    pub(super) fn put_back(&self) {
        self.change(IN_FLIGHT, FREE);
    }

    fn change(&self, from: u8, to: u8) -> bool {
        self.0.compare_exchange(from, to, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }
}
