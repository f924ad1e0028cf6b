//! Someone who waits until nothing that was under way can land any more.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::payload::Waiter;
use crate::shm::Copying;

/// What may still land.
#[derive(Debug, Clone)]
pub(crate) enum UnderWay {
    /// A copy by another process.
    Copy(Copying),
    /// What a card does for peers, until the flag is set.
    Card(Arc<AtomicBool>),
}

impl UnderWay {
    pub(crate) fn is_over(&self) -> bool {
        match self {
            UnderWay::Copy(copying) => copying.is_over(),
            UnderWay::Card(over) => over.load(Ordering::Acquire),
        }
    }
}

#[derive(Debug)]
pub(crate) struct Quiescing {
    under_way: Vec<UnderWay>,
    waiter: Waiter,
}

impl Quiescing {
    pub(crate) fn new(under_way: Vec<UnderWay>, waiter: Waiter) -> Self {
        Quiescing { under_way, waiter }
    }

    pub(crate) fn is_over(&mut self) -> bool {
        self.under_way.retain(|one| !one.is_over());
        self.under_way.is_empty()
    }

    pub(crate) fn into_waiter(self) -> Waiter {
        self.waiter
    }
}
