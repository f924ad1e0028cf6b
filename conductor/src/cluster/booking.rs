//! The RAII side of a booking: what a placed request tells of itself on its way, so that its work
//! is counted while it lasts and what was measured is learned.

use std::fmt;
use std::sync::Arc;
use std::time::Instant;

use kvasir_placement::{BookingId, Objectives, Placement};

use super::state::Shared;

/// What was predicted of a request when it was placed.
#[derive(Debug, Clone, Copy)]
pub(super) struct Predicted {
    pub(super) ttft_us: u64,
    pub(super) tbt_us: u64,
    /// Before its prefill begins, where nothing is brought first.
    queue_us: Option<u64>,
    /// Of the copy of its prefix.
    fetch_us: Option<u64>,
    /// How likely it meets its objective between tokens, where that is known.
    pub(super) likely: Option<f64>,
    pub(super) tbt_objective_us: u64,
}

impl Predicted {
    pub(super) fn of(placement: &Placement, objectives: Objectives) -> Predicted {
        Predicted {
            ttft_us: placement.predicted_ttft_us,
            tbt_us: placement.predicted_tbt_us,
            queue_us: (placement.fetch.is_none() && placement.chunks.is_empty())
                .then_some(placement.queue_us),
            fetch_us: placement.fetch.as_ref().map(|_| placement.transfer_us),
            likely: placement.likely(),
            tbt_objective_us: objectives.tbt_us,
        }
    }
}

/// What a prefill took by its engine's own word, and what was predicted of one of its lengths.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PrefillTime {
    pub predicted_us: u64,
    pub measured_us: u64,
}

/// One placed request. Dropping it takes its work out of the view.
pub struct Booking {
    shared: Arc<Shared>,
    id: BookingId,
    placed_at: Instant,
    predicted: Predicted,
    first_token_seen: bool,
    /// Tokens of the answer that the view has not been told of.
    grown_tokens: u32,
    /// Tokens of the whole answer, once it is complete.
    completed: Option<u32>,
}

/// The time between tokens is learned from answers that have so many, at least.
const LEARNED_FROM_TOKENS: u32 = 64;

/// Telling the view of fewer tokens than this is not worth its lock: an answer takes slots by
/// blocks.
const GROWN_TOKENS: u32 = 16;

impl Booking {
    pub(super) fn new(
        shared: Arc<Shared>,
        id: BookingId,
        placed_at: Instant,
        predicted: Predicted,
    ) -> Self {
        Booking {
            shared,
            id,
            placed_at,
            predicted,
            first_token_seen: false,
            grown_tokens: 0,
            completed: None,
        }
    }

    /// The prefill side holds, or will have fetched, this many leading tokens of the prompt: as
    /// its node said, where the placement only guessed.
    pub fn revise(&self, reused_tokens: u32) {
        self.shared.lock().view.revise(self.id, reused_tokens);
    }

    /// The prefix could not stay where it is.
    pub fn unrouted(&self) {
        self.shared.lock().view.unrouted(self.id);
    }

    /// This chunk could not stay where it is.
    pub fn unrouted_chunk(&self, chunk: usize) {
        self.shared.lock().view.unrouted_chunk(self.id, chunk);
    }

    /// The copy of this chunk has ended, well or not. Answers how many bytes were to come with it.
    pub fn chunk_fetched(&self, chunk: usize) -> u64 {
        self.shared.lock().view.chunk_fetched(self.id, chunk)
    }

    /// So many bytes of chunks have come in this time.
    pub fn moved(&self, bytes: u64, us: u64) {
        self.shared.lock().view.moved(self.id, bytes, us);
    }

    /// The fetch has ended: so many bytes in this time, or `None` when it failed.
    pub fn fetched(&self, moved: Option<(u64, u64)>) {
        self.shared.lock().view.fetched(self.id, moved);
        if let (Some(predicted_us), Some((_, us))) = (self.predicted.fetch_us, moved) {
            self.shared.metrics.fetched(predicted_us, us);
        }
    }

    /// By its engine's word its prefill has waited so long.
    pub fn queued(&self, queue_us: u64) {
        if let Some(predicted_us) = self.predicted.queue_us {
            self.shared.metrics.queued(predicted_us, queue_us);
        }
    }

    /// The prompt is computed. `measured` is what the engine said: tokens it computed and the
    /// microseconds it took for them, without its queue.
    pub fn prefilled(&self, measured: Option<(u32, u64)>) -> Option<PrefillTime> {
        let now_us = self.shared.now_us();
        let predicted_us = self.shared.lock().view.prefilled(self.id, measured, now_us)?;
        let (_, measured_us) = measured?;
        self.shared.metrics.prefilled(predicted_us, measured_us);
        Some(PrefillTime { predicted_us, measured_us })
    }

    /// What it has elsewhere was opened after so long.
    pub fn opened(&self, opening_us: u64) {
        self.shared.lock().view.opened(opening_us);
    }

    /// So many layers of decode steps were attended elsewhere, and took so long.
    pub fn routed(&self, layers: u32, routed_us: u64) {
        self.shared.lock().view.routed(self.id, layers, routed_us);
    }

    /// The same of its prompt, and how many queries were asked in all of them together.
    pub fn prompt_routed(&self, layers: u32, queries: u64, routed_us: u64) {
        self.shared.lock().view.prompt_routed(self.id, layers, queries, routed_us);
    }

    /// The first token is there. Only the first call counts.
    pub fn first_token(&mut self) {
        if !self.first_token_seen {
            self.first_token_seen = true;
            self.shared.metrics.first_token(self.predicted.ttft_us, self.placed_at.elapsed());
        }
    }

    /// The answer has so many tokens more.
    pub fn grew(&mut self, tokens: usize) {
        let tokens = u32::try_from(tokens).unwrap_or(u32::MAX);
        self.grown_tokens = self.grown_tokens.saturating_add(tokens);
        if self.grown_tokens >= GROWN_TOKENS {
            self.shared.lock().view.grew(self.id, std::mem::take(&mut self.grown_tokens));
        }
    }

    /// The mean time between the latest tokens.
    pub fn stepped(&self, interval_us: u64) {
        let now_us = self.shared.now_us();
        self.shared.lock().view.stepped(self.id, interval_us, now_us);
    }

    /// The answer, of so many tokens, saw so much between them: the mean of the longest tenth of its
    /// intervals. Of a short one that is an interval or two, which say more of a moment than of what is
    /// under way: it is counted and not learned from.
    pub fn paced(&self, tbt_us: u64, generated_tokens: u32) {
        let now_us = self.shared.now_us();
        self.shared.metrics.paced(&self.predicted, tbt_us);
        if generated_tokens >= LEARNED_FROM_TOKENS {
            self.shared.lock().view.paced(self.id, tbt_us, now_us);
        }
    }

    /// The answer has reached its end, with so many tokens. Without it the request counts as
    /// broken off: its answer would have been longer.
    pub fn complete(mut self, generated_tokens: u32) {
        self.completed = Some(generated_tokens);
    }
}

impl Drop for Booking {
    fn drop(&mut self) {
        let now_us = self.shared.now_us();
        let mut state = self.shared.lock();
        if self.grown_tokens > 0 {
            state.view.grew(self.id, self.grown_tokens);
        }
        state.view.unbook(self.id, self.completed, now_us);
    }
}

impl fmt::Debug for Booking {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Booking").field("id", &self.id).finish_non_exhaustive()
    }
}
