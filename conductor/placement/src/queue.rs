//! The work that this conductor has booked on one instance: prefills in order, and the answers
//! that it decodes or will. Known at once, long before the instance reports it.

use std::collections::BTreeMap;

use crate::view::BookingId;

/// One prefill that is booked and not finished.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PrefillBooking {
    pub computed_tokens: u32,
    pub reused_tokens: u32,
    pub predicted_us: u64,
    /// When the blocks that it waits for are predicted to be there; it does not begin earlier.
    pub ready_us: u64,
    /// What it sends to the decode side while it runs.
    pub push_bytes: u64,
}

/// Prefills of one instance, in the order they were booked; the first one is taken to be running.
#[derive(Debug, Clone, Default)]
pub struct PrefillQueue {
    booked: BTreeMap<BookingId, PrefillBooking>,
    sum_us: u64,
    tokens: u64,
    /// Since when the first one runs.
    first_since_us: u64,
}

impl PrefillQueue {
    /// Books a prefill. An id that is booked already is replaced.
    pub fn book(&mut self, id: BookingId, booking: PrefillBooking, now_us: u64) {
        self.remove(id, now_us);
        if self.booked.is_empty() {
            self.first_since_us = now_us.max(booking.ready_us);
        }
        self.sum_us += booking.predicted_us;
        self.tokens += u64::from(booking.computed_tokens);
        self.booked.insert(id, booking);
    }

    pub fn get(&self, id: BookingId) -> Option<&PrefillBooking> {
        self.booked.get(&id)
    }

    /// Replaces what is predicted of a prefill, which keeps its place.
    pub fn revise(&mut self, id: BookingId, booking: PrefillBooking) {
        if let Some(old) = self.booked.get_mut(&id) {
            self.sum_us = self.sum_us - old.predicted_us + booking.predicted_us;
            self.tokens =
                self.tokens - u64::from(old.computed_tokens) + u64::from(booking.computed_tokens);
            *old = booking;
        }
    }

    /// The prefill is finished or given up.
    pub fn remove(&mut self, id: BookingId, now_us: u64) -> Option<PrefillBooking> {
        let was_first = self.booked.keys().next() == Some(&id);
        let booking = self.booked.remove(&id)?;
        self.sum_us -= booking.predicted_us;
        self.tokens -= u64::from(booking.computed_tokens);
        if was_first {
            let next_ready_us = self.booked.values().next().map_or(0, |next| next.ready_us);
            self.first_since_us = now_us.max(next_ready_us);
        }
        Some(booking)
    }

    /// The one that runs, and since when, or from when on if it waits for blocks.
    pub fn first(&self) -> Option<(BookingId, &PrefillBooking, u64)> {
        self.booked.iter().next().map(|(id, first)| (*id, first, self.first_since_us))
    }

    /// When the last one ended, while there is none.
    pub fn idle_since_us(&self) -> u64 {
        if self.booked.is_empty() { self.first_since_us } else { 0 }
    }

    /// What is left of all of them.
    pub fn remaining_us(&self, now_us: u64) -> u64 {
        let Some(first) = self.booked.values().next() else { return 0 };
        let done_us = now_us.saturating_sub(self.first_since_us).min(first.predicted_us);
        let waits_us = self.first_since_us.saturating_sub(now_us);
        self.sum_us - done_us + waits_us
    }

    /// Prompt tokens that they compute, the running one's included.
    pub fn tokens(&self) -> u64 {
        self.tokens
    }

    pub fn len(&self) -> usize {
        self.booked.len()
    }

    pub fn is_empty(&self) -> bool {
        self.booked.is_empty()
    }
}

/// Answers of one instance, each with the time at which it is predicted to end.
#[derive(Debug, Clone, Default)]
pub struct DecodeBookings {
    ends_us: Vec<u64>,
}

impl DecodeBookings {
    pub fn book(&mut self, end_us: u64) {
        let at = self.ends_us.partition_point(|&end| end < end_us);
        self.ends_us.insert(at, end_us);
    }

    /// Takes back what was booked with this end.
    pub fn remove(&mut self, end_us: u64) {
        if let Ok(at) = self.ends_us.binary_search(&end_us) {
            self.ends_us.remove(at);
        }
    }

    pub fn len(&self) -> usize {
        self.ends_us.len()
    }

    pub fn is_empty(&self) -> bool {
        self.ends_us.is_empty()
    }

    /// When each of them is predicted to end, the earliest first.
    pub fn ends_us(&self) -> &[u64] {
        &self.ends_us
    }

    /// How many will be there at `at_us`: those that end later, and of those that should have
    /// ended by now and have not, the share that a uniform answer time leaves.
    pub fn remaining_at(&self, at_us: u64, now_us: u64, answer_us: u64) -> f64 {
        let overdue = self.ends_us.partition_point(|&end| end <= now_us);
        let ended = self.ends_us.partition_point(|&end| end <= at_us.max(now_us));
        (self.ends_us.len() - ended) as f64 + overdue as f64 * left_share(at_us, now_us, answer_us)
    }
}

/// Of answers that began at unknown times and all take `answer_us`, the share that is left at
/// `at_us` (*Mooncake* §4.3).
pub fn left_share(at_us: u64, now_us: u64, answer_us: u64) -> f64 {
    let ahead_us = at_us.saturating_sub(now_us) as f64;
    (1.0 - ahead_us / (answer_us as f64).max(1.0)).clamp(0.0, 1.0)
}
