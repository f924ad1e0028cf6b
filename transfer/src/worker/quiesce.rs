//! Someone who waits until copies that may be under way have ended.

use crate::payload::Waiter;
use crate::shm::Copying;

#[derive(Debug)]
pub(crate) struct Quiescing {
    copying: Vec<Copying>,
    waiter: Waiter,
}

impl Quiescing {
    pub(crate) fn new(copying: Vec<Copying>, waiter: Waiter) -> Self {
        Quiescing { copying, waiter }
    }

    pub(crate) fn is_over(&mut self) -> bool {
        self.copying.retain(|copying| !copying.is_over());
        self.copying.is_empty()
    }

    pub(crate) fn into_waiter(self) -> Waiter {
        self.waiter
    }
}
