//! The RAII side of a booking: what a placed request tells of itself on its way, so that its work
//! is counted while it lasts and what was measured is learned.

use std::fmt;
use std::sync::Arc;
use std::time::Instant;

use kvasir_placement::BookingId;

use super::state::Shared;

/// One placed request. Dropping it takes its work out of the view.
pub struct Booking {
    shared: Arc<Shared>,
    id: BookingId,
    placed_at: Instant,
    predicted_ttft_us: u64,
    first_token_seen: bool,
    completed: bool,
}

impl Booking {
    pub(super) fn new(
        shared: Arc<Shared>,
        id: BookingId,
        placed_at: Instant,
        predicted_ttft_us: u64,
    ) -> Self {
        Booking {
            shared,
            id,
            placed_at,
            predicted_ttft_us,
            first_token_seen: false,
            completed: false,
        }
    }

    /// The prefill side holds, or will have fetched, this many leading tokens of the prompt: as
    /// its node said, where the placement only guessed.
    pub fn revise(&self, reused_tokens: u32) {
        self.shared.lock().view.revise(self.id, reused_tokens);
    }

    /// The fetch has ended: so many bytes in this time, or `None` when it failed.
    pub fn fetched(&self, moved: Option<(u64, u64)>) {
        self.shared.lock().view.fetched(self.id, moved);
    }

    /// The prompt is computed. `measured` is what the engine said: tokens it computed and the
    /// microseconds it took for them, without its queue.
    pub fn prefilled(&self, measured: Option<(u32, u64)>) {
        let now_us = self.shared.now_us();
        self.shared.lock().view.prefilled(self.id, measured, now_us);
    }

    /// The first token is there. Only the first call counts.
    pub fn first_token(&mut self) {
        if !self.first_token_seen {
            self.first_token_seen = true;
            self.shared.metrics.first_token(self.predicted_ttft_us, self.placed_at.elapsed());
        }
    }

    /// The mean time between the latest tokens.
    pub fn stepped(&self, interval_us: u64) {
        let now_us = self.shared.now_us();
        self.shared.lock().view.stepped(self.id, interval_us, now_us);
    }

    /// The answer has reached its end. Without it the request counts as broken off, and its
    /// length teaches nothing.
    pub fn complete(mut self) {
        self.completed = true;
    }
}

impl Drop for Booking {
    fn drop(&mut self) {
        let now_us = self.shared.now_us();
        self.shared.lock().view.unbook(self.id, self.completed, now_us);
    }
}

impl fmt::Debug for Booking {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Booking").field("id", &self.id).finish_non_exhaustive()
    }
}
