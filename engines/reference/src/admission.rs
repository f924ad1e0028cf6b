//! How many requests are in the engine, counted where they come in and where they end.

#![forbid(unsafe_code)]

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// The bound on requests, and what is known of those inside.
#[derive(Debug)]
pub(crate) struct Admission {
    permits: Arc<Semaphore>,
    requests_max: u32,
    waiting_prompt_tokens: Arc<AtomicU64>,
}

impl Admission {
    pub(crate) fn new(requests_max: u32) -> Self {
        Admission {
            permits: Arc::new(Semaphore::new(requests_max as usize)),
            requests_max,
            waiting_prompt_tokens: Arc::default(),
        }
    }

    /// Takes a request in, or not when the engine is full. `prompt_tokens` are those it will
    /// compute here.
    pub(crate) fn try_admit(&self, prompt_tokens: u32) -> Option<Admitted> {
        let permit = Arc::clone(&self.permits).try_acquire_owned().ok()?;
        self.waiting_prompt_tokens.fetch_add(prompt_tokens.into(), Ordering::Relaxed);
        let total = Arc::clone(&self.waiting_prompt_tokens);
        Some(Admitted { _permit: permit, waiting_prompt_tokens: prompt_tokens, total })
    }

    /// Requests inside at most.
    pub(crate) fn requests_max(&self) -> u32 {
        self.requests_max
    }

    /// Requests inside, running or waiting.
    pub(crate) fn requests(&self) -> u32 {
        self.requests_max.saturating_sub(self.permits.available_permits() as u32)
    }

    /// Prompt tokens accepted and not yet computed.
    pub(crate) fn waiting_prompt_tokens(&self) -> u64 {
        self.waiting_prompt_tokens.load(Ordering::Relaxed)
    }
}

/// A request inside; it leaves when this is dropped.
#[derive(Debug)]
pub(crate) struct Admitted {
    _permit: OwnedSemaphorePermit,
    waiting_prompt_tokens: u32,
    total: Arc<AtomicU64>,
}

impl Admitted {
    /// These prompt tokens need not be computed any more.
    pub(crate) fn settle(&mut self, tokens: u32) {
        let tokens = tokens.min(self.waiting_prompt_tokens);
        self.waiting_prompt_tokens -= tokens;
        self.total.fetch_sub(tokens.into(), Ordering::Relaxed);
    }
}

impl Drop for Admitted {
    fn drop(&mut self) {
        self.settle(self.waiting_prompt_tokens);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_engine_takes_nothing_in_until_a_request_leaves() {
        let admission = Admission::new(2);
        let mut first = admission.try_admit(100).expect("room");
        let second = admission.try_admit(50).expect("room");
        assert!(admission.try_admit(1).is_none());
        assert_eq!((admission.requests(), admission.waiting_prompt_tokens()), (2, 150));
        first.settle(30);
        assert_eq!(admission.waiting_prompt_tokens(), 120);
        first.settle(1000);
        assert_eq!(admission.waiting_prompt_tokens(), 50);
        drop(second);
        assert_eq!((admission.requests(), admission.waiting_prompt_tokens()), (1, 0));
        assert!(admission.try_admit(1).is_some());
    }
}
