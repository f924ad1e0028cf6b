//! An endpoint with its queue, and in tests disorder between it and us.

use kvasir_transfer_libfabric::completion::Completion;
use kvasir_transfer_libfabric::endpoint::Endpoint;
use kvasir_transfer_libfabric::error::QueueError;
use kvasir_transfer_libfabric::queue::CompletionQueue;
use kvasir_transfer_libfabric::shuffle::{ShuffleOptions, Shuffled};
use kvasir_transfer_libfabric::wire::Wire;

/// Completions that are read at once.
const BATCH: usize = 256;
/// Batches that are read when it closes; whoever goes on writing meanwhile is not waited for.
const LAST_BATCHES: usize = 64;

#[derive(Debug)]
pub(super) enum Line {
    Plain(Endpoint),
    Shuffled(Box<Shuffled<Endpoint>>),
}

impl Line {
    pub(super) fn new(endpoint: Endpoint, shuffle_seed: Option<u64>) -> Self {
        match shuffle_seed {
            None => Line::Plain(endpoint),
            Some(seed) => {
                let options = ShuffleOptions { seed, ..ShuffleOptions::default() };
                Line::Shuffled(Box::new(Shuffled::new(endpoint, options)))
            }
        }
    }

    pub(super) fn wire(&mut self) -> &mut dyn Wire {
        match self {
            Line::Plain(endpoint) => endpoint,
            Line::Shuffled(shuffled) => &mut **shuffled,
        }
    }

    pub(super) fn endpoint(&self) -> &Endpoint {
        match self {
            Line::Plain(endpoint) => endpoint,
            Line::Shuffled(shuffled) => shuffled.inner(),
        }
    }

    pub(super) fn queue(&self) -> &CompletionQueue {
        self.endpoint().queue()
    }

    /// Whether there was anything.
    pub(super) fn poll(&mut self, told: &mut Vec<Completion>) -> Result<bool, QueueError> {
        Ok(self.wire().poll(told, BATCH)? > 0)
    }

    pub(super) fn holds_back(&self) -> bool {
        match self {
            Line::Plain(_) => false,
            Line::Shuffled(shuffled) => shuffled.holds_back(),
        }
    }

    /// Whether a thread may wait for the descriptor of the queue.
    pub(super) fn may_sleep(&mut self) -> Result<bool, QueueError> {
        self.wire().may_sleep()
    }

    /// Nothing moves through it any more when this returns. What has landed is told.
    pub(super) fn close(mut self, told: &mut Vec<Completion>) {
        // A queue that has failed tells nothing more.
        for _ in 0..LAST_BATCHES {
            if !self.poll(told).unwrap_or(false) {
                break;
            }
        }
        let queue = self.queue().clone();
        let endpoint = match self {
            Line::Plain(endpoint) => endpoint,
            Line::Shuffled(shuffled) => {
                let (endpoint, held_back) = shuffled.into_parts();
                told.extend(held_back);
                endpoint
            }
        };
        // What came between the last look and the end. One that stays open must not be looked at: that is
        // what would let more come.
        if endpoint.close() {
            let _ = queue.poll(told, BATCH);
        }
    }
}
